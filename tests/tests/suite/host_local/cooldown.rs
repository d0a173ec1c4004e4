//! `releaseCooldown`: a released address is not given out again too soon.

use std::fs;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use cni_testkit::trace::{self, Act, Plan};
use cni_testkit::{Attachment, Container, Node, probe, require};
use conformance::{address, attach, host_local, patched};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// A network with the addresses 10.1.0.2 to 10.1.0.6, which cool down for an hour.
fn network(node: &Node) -> Value {
    patched(host_local(node, &["10.1.0.0/29"]), json!({"cniVersion": "1.1.0", "ipam": {"releaseCooldown": 3600}}))
}

fn without_key(config: &Value) -> Value {
    patched(config.clone(), json!({"ipam": {"releaseCooldown": null}}))
}

fn released(node: &Node) -> PathBuf {
    node.data_dir().join(".cni/net1/released")
}

fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()
}

/// Returns the address of an ADD, and its stderr.
fn add(node: &Node, config: &Value) -> (Container, String, String) {
    let container = node.container();
    let outcome = Attachment::new(node, &container, config.clone()).add();
    (container, address(&outcome.success()), outcome.stderr.clone())
}

/// Releases everything.
fn clear(node: &Node, config: &Value) {
    Attachment::new(node, &node.container(), config.clone()).gc(&[]).success();
}

/// Adds five containers and releases the third with a cool-down, then the first without one. Only
/// their addresses are free, and the round robin continues at the first.
fn two_free(node: &Node, config: &Value) {
    let all = attach(node, config, 5);
    all[2].1.del().success();
    Attachment::new(node, &all[0].0, without_key(config)).del().success();
}

#[test]
fn a_released_address_is_not_given_out_again_too_soon() {
    let node = Node::new();
    let config = network(&node);
    let all = attach(&node, &config, 5);
    all[0].1.del().success();
    Attachment::new(&node, &all[2].0, without_key(&config)).del().success();
    let (_, given, stderr) = add(&node, &config);
    assert_eq!((given.as_str(), stderr.as_str()), ("10.1.0.4", ""), "10.1.0.2 is the next in the round robin");
    let line = fs::read_to_string(released(&node)).unwrap();
    let (address, time) = line.trim_end().split_once(' ').unwrap();
    assert_eq!(address, "10.1.0.2");
    assert!(now() - time.parse::<u128>().unwrap() < 600_000, "{line}");
    clear(&node, &config);
}

#[test]
fn if_no_other_is_free_the_earliest_release_is_given() {
    let node = Node::new();
    let config = network(&node);
    let all = attach(&node, &config, 5);
    for position in [3, 1, 4] {
        all[position].1.del().success();
    }
    // What cools down still survives a scan of the folder.
    fs::remove_dir_all(node.data_dir().join(".cni/net1/links")).unwrap();
    for expected in ["10.1.0.5", "10.1.0.3", "10.1.0.6"] {
        let (_, given, stderr) = add(&node, &config);
        assert_eq!(given, expected);
        let note = format!("{expected} was released");
        assert!(stderr.contains(&note) && stderr.contains("releaseCooldown of 3600 s"), "{stderr}");
        assert!(stderr.contains("no other address of range set 10.1.0.1-10.1.0.6 is free"), "{stderr}");
    }
    let late = node.container();
    Attachment::new(&node, &late, config.clone())
        .add()
        .fails_with(11, "failed to allocate for range 0: no IP addresses");
    clear(&node, &config);
}

#[test]
fn after_the_period_the_address_is_free_again() {
    let node = Node::new();
    let config = network(&node);
    two_free(&node, &config);
    // 10.1.0.2 is free, 10.1.0.4 cools down.
    fs::write(released(&node), format!("10.1.0.2 {}\n10.1.0.4 {}\n", now() - 3_601_000, now() - 3_500_000)).unwrap();
    let (container, given, stderr) = add(&node, &config);
    assert_eq!((given.as_str(), stderr.as_str()), ("10.1.0.2", ""));
    Attachment::new(&node, &container, config.clone()).del().success();
    let text = fs::read_to_string(released(&node)).unwrap();
    let lines: Vec<&str> = text.lines().map(|line| line.split_once(' ').unwrap().0).collect();
    assert_eq!(lines, ["10.1.0.4", "10.1.0.2"], "one line for each address that cools down");
    clear(&node, &config);
}

#[test]
fn a_requested_address_is_given_with_a_note() {
    let node = Node::new();
    let config = network(&node);
    let (container, _, _) = add(&node, &config);
    Attachment::new(&node, &container, config.clone()).del().success();
    let other = node.container();
    let outcome = Attachment::new(&node, &other, config.clone()).args("IP=10.1.0.2").add();
    assert_eq!(address(&outcome.success()), "10.1.0.2");
    assert!(outcome.stderr.contains("it is given out, because it was requested"), "{}", outcome.stderr);
    clear(&node, &config);
}

/// A clock that was set back: the release counts as now, in the file too, so that the address cools
/// down for no more than the period.
#[test]
fn a_release_in_the_future_counts_as_now() {
    let node = Node::new();
    let config = network(&node);
    two_free(&node, &config);
    fs::write(released(&node), format!("10.1.0.2 {}\n", now() + 86_400_000_000)).unwrap();
    let (_, given, _) = add(&node, &config);
    assert_eq!(given, "10.1.0.4", "the file has no release of it");
    let text = fs::read_to_string(released(&node)).unwrap();
    let time: u128 = text.trim_end().strip_prefix("10.1.0.2 ").unwrap().parse().unwrap();
    assert!(time <= now(), "{text}");
    clear(&node, &config);
}

#[test]
fn damaged_lines_are_ignored_with_a_note() {
    let node = Node::new();
    let config = network(&node);
    two_free(&node, &config);
    fs::write(released(&node), format!("x\n10.1.0.2\n10.1.0.2 {}\n\u{fe}", now())).unwrap();
    let (_, given, stderr) = add(&node, &config);
    assert_eq!(given, "10.1.0.4");
    assert!(stderr.contains("3 damaged lines of ") && stderr.contains("/released are ignored"), "{stderr}");
    clear(&node, &config);
}

#[test]
fn gc_stores_its_releases_too() {
    let node = Node::new();
    let config = network(&node);
    let all = attach(&node, &config, 5);
    let valid: Vec<(&str, &str)> = all[1..].iter().map(|(container, ..)| (container.id.as_str(), "eth0")).collect();
    all[0].1.gc(&valid).success();
    Attachment::new(&node, &all[2].0, without_key(&config)).del().success();
    assert_eq!(add(&node, &config).1, "10.1.0.4");
    clear(&node, &config);
}

/// A failed ADD of host-local itself gave the address to no container.
#[test]
fn an_add_that_failed_or_a_del_without_the_key_store_none() {
    let node = Node::new();
    let config = network(&node);
    let container = node.container();
    let attachment = Attachment::new(&node, &container, config.clone());
    let outcome = attachment.invocation("ADD", None).with_closed_stdout().run();
    assert_ne!(outcome.status, Some(0), "{}", outcome.report());
    assert_eq!(node.reservations("net1"), []);
    let plain = attachment.config(without_key(&config));
    plain.add().success();
    plain.del().success();
    plain.add().success();
    plain.gc(&[]).success();
    assert!(!released(&node).exists());
}

/// DEL succeeds with a note on a disk without space or inodes, and if the file is a folder.
#[test]
fn a_release_that_cannot_be_stored_does_not_fail_del() {
    let node = Node::new();
    for (name, options, fill) in [
        ("blocks", "size=64k", "head -c 200000 /dev/zero > fill"),
        ("inodes", "nr_inodes=12", "for n in $(seq 20); do : > f$n; done"),
        ("folder", "size=64k", "mkdir .cni/net1/released.new"),
    ] {
        let folder = node.dir().join(name);
        fs::create_dir(&folder).unwrap();
        node.exec(&["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder.to_str().unwrap()]);
        let config = patched(network(&node), json!({"ipam": {"dataDir": folder}}));
        let (_container, attachment, _) = attach(&node, &config, 1).remove(0);
        node.run(&["sh", "-c", &format!("cd {}; {fill}", folder.display())]);
        let outcome = attachment.del();
        outcome.success();
        assert!(outcome.stderr.contains("/released, so the released addresses do not cool down"), "{}", outcome.stderr);
        assert!(!folder.join("net1/10.1.0.2").exists(), "{name}");
    }
}

/// Interrupts DEL at every system call. The address is then reserved or cools down, and the next
/// DEL stores its release.
fn interrupted(act: Act) -> usize {
    let node = Node::new();
    let config = network(&node);
    // The round robin is always at the first address.
    let again = |at| {
        let _ = fs::remove_file(released(&node));
        fs::write(node.data_dir().join("net1/last_reserved_ip.0"), "10.1.0.6").unwrap();
        let container = node.container();
        let attachment = Attachment::new(&node, &container, config.clone());
        attachment.add().success();
        let plan = Plan { victim: "host-local".into(), at, act };
        let traced = attachment.invocation("DEL", None).traced(&plan);
        let is_reserved = node.reservations("net1").iter().any(|(address, _)| address == "10.1.0.2");
        let cools = fs::read_to_string(released(&node)).is_ok_and(|text| text.starts_with("10.1.0.2 "));
        let noted = traced.outcome.stderr.contains("do not cool down");
        assert!(is_reserved || cools || noted, "{act:?} at call {at}\n{}", traced.outcome.report());
        attachment.del().success();
        assert_eq!(node.reservations("net1"), [], "{act:?} at call {at}");
        assert!(!released(&node).with_extension("new").exists() || act != Act::Fail(Errno::ENOSPC), "call {at}");
        (traced.hit.is_some(), is_reserved, cools)
    };
    attach(&node, &config, 1).remove(0).1.del().success();
    let (mut at, mut both) = (1, 0);
    loop {
        let (hit, is_reserved, cools) = again(at);
        if !hit {
            return both;
        }
        both += usize::from(is_reserved && cools);
        at += 1;
    }
}

#[test]
fn a_killed_del_leaves_no_address_free_at_once() {
    require!(trace::supported());
    let both = interrupted(Act::Signal(Signal::SIGKILL));
    assert!(both > 1, "a release is stored before the reservation is removed: {both}");
}

#[test]
fn no_error_in_a_del_frees_an_address_at_once() {
    require!(trace::supported());
    interrupted(Act::Fail(Errno::ENOSPC));
}

#[test]
fn ipam_show_lists_the_addresses_that_cool_down() {
    require!(probe::plugin("cnitool"));
    let node = Node::new();
    let config = network(&node);
    let all = attach(&node, &config, 2);
    all[0].1.del().success();
    node.file("net.d/1.conflist", json!({"cniVersion": "1.1.0", "name": "net1", "plugins": [config]}).to_string());
    let cnitool = cni_testkit::bin_dir().join("cnitool");
    let conf = node.dir().join("net.d");
    let [cnitool, conf] = [&cnitool, &conf].map(|path| path.to_str().unwrap());
    let text = node.exec(&[cnitool, "ipam", "show", "net1", "--conf-dir", conf]);
    assert!(text.contains("10.1.0.2: cools down for another "), "{text}");
    let shown = node.json(&[cnitool, "ipam", "show", "net1", "--conf-dir", conf, "--json"]);
    let cooling = shown["coolingDown"].as_array().unwrap();
    assert_eq!((cooling.len(), &cooling[0]["address"]), (1, &json!("10.1.0.2")), "{shown:#}");
    assert!((1..=3600).contains(&cooling[0]["secondsLeft"].as_u64().unwrap()), "{shown:#}");
    clear(&node, &config);
}
