//! A failed ADD leaves nothing: no link, no address, no rule. Only what others may use stays.

use std::thread::sleep;
use std::time::{Duration, Instant};

use cni_testkit::{Attachment, Container, Node, Outcome, probe};
use conformance::{attach, bridge, layer2, patched};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// Asserts that ADD fails and leaves nothing.
#[track_caller]
fn fails_and_leaves_nothing(config: impl FnOnce(&Node) -> Value, args: Option<&str>) -> Outcome {
    let node = Node::new();
    let container = node.container();
    let mut attachment = Attachment::new(&node, &container, config(&node));
    attachment.args = args.map(str::to_owned);
    let outcome = attachment.add();
    outcome.failure();
    assert_nothing(&node, &container, &outcome);
    outcome
}

#[track_caller]
fn assert_nothing(node: &Node, container: &Container, outcome: &Outcome) {
    assert!(container.link("eth0").is_none(), "the interface is left\n{}", outcome.report());
    assert_eq!(node.ports("br0"), Vec::<String>::new(), "a port is left\n{}", outcome.report());
    assert_eq!(node.reservations("net1"), [], "an address is left\n{}", outcome.report());
    if probe::tool("nft").is_ok() {
        assert!(!node.ruleset().contains("macspoofchk"), "rules are left\n{}", outcome.report());
    }
}

#[test]
fn when_ipam_is_missing() {
    fails_and_leaves_nothing(|node| patched(bridge(node, &[]), json!({"ipam": {"type": "not-there"}})), None);
}

#[test]
fn when_ipam_refuses() {
    let outcome = fails_and_leaves_nothing(|node| bridge(node, &["10.1.0.7/24"]), None);
    assert!(outcome.failure().msg.contains("Network has host bits set"), "the delegate's words reach the runtime");
}

#[test]
fn when_addresses_are_exhausted() {
    let node = Node::new();
    let config = bridge(&node, &["10.1.0.0/30"]);
    let (_first, first, result) = attach(&node, &config, 1).remove(0);
    let container = node.container();
    let late = Attachment::new(&node, &container, config.clone());
    late.add().fails_with(11, "failed to allocate for range 0: no IP addresses available in range set");
    assert!(container.link("eth0").is_none());
    assert_eq!(node.ports("br0").len(), 1);
    first.check(&result).success();
    first.del_with(&result).success();
}

#[test]
fn when_a_route_cannot_be_installed() {
    let routes = json!({"ipam": {"routes": [{"dst": "192.0.2.0/24", "gw": "172.31.9.9"}]}});
    fails_and_leaves_nothing(|node| patched(bridge(node, &["10.1.0.0/24"]), routes), None);
}

#[test]
fn when_the_kernel_refuses_a_route() {
    // Scope "host" allows no gateway.
    let routes = json!({"ipam": {"routes": [{"dst": "192.0.2.0/24", "gw": "10.1.0.77", "scope": 254}]}});
    fails_and_leaves_nothing(|node| patched(bridge(node, &["10.1.0.0/24"]), routes), None);
}

#[test]
fn a_failing_repeated_add_with_reuse_keeps_the_first_address() {
    let node = Node::new();
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"ipam": {"reuse": true}}));
    let (_living, attachment, result) = attach(&node, &config, 1).remove(0);
    let (other, before) = (node.container(), node.reservations("net1"));
    let routes = json!({"ipam": {"routes": [{"dst": "192.0.2.0/24", "gw": "172.31.9.9"}]}});
    let failing = patched(config, routes);
    attachment.clone().netns(other.netns()).config(failing.clone()).add().failure();
    assert_eq!(node.reservations("net1"), before);
    // What did not exist before is still released.
    attachment.clone().ifname("eth1").config(failing).add().failure();
    assert_eq!(node.reservations("net1"), before);
    attachment.del_with(&result).success();
}

#[test]
fn when_the_mac_is_refused() {
    fails_and_leaves_nothing(|node| bridge(node, &["10.1.0.0/24"]), Some("MAC=01:00:5e:00:00:01"));
}

#[test]
fn when_the_bridge_has_another_address() {
    let config = |node: &Node| {
        node.exec(&["ip", "link", "add", "br0", "type", "bridge"]);
        node.exec(&["ip", "addr", "add", "10.9.0.1/24", "dev", "br0"]);
        patched(bridge(node, &["10.1.0.0/24"]), json!({"macspoofchk": true}))
    };
    fails_and_leaves_nothing(config, None);
}

#[test]
fn when_the_version_cannot_express_the_result() {
    for version in ["0.1.0", "0.2.0"] {
        let config = |_: &Node| patched(layer2(), json!({"cniVersion": version}));
        let outcome = fails_and_leaves_nothing(config, None);
        let failure = outcome.failure();
        // Other programs compare these texts for equality.
        let texts = (failure.msg.as_str(), failure.details.as_str());
        assert_eq!(texts, ("cannot convert: no valid IP addresses", ""), "{}", outcome.report());
    }
}

#[test]
fn when_the_result_is_not_read() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"]));
    let outcome = attachment.invocation("ADD", None).with_closed_stdout().run();
    assert_ne!(outcome.status, Some(0), "{}", outcome.report());
    assert_nothing(&node, &container, &outcome);
}

#[test]
fn when_a_signal_comes_while_the_configuration_has_no_end() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"]));
    for verb in ["ADD", "DEL"] {
        let started = attachment.invocation(verb, None).timeout(Duration::from_secs(20)).start();
        // Before the plugin handles signals, a signal would end it like any program.
        let (status, taken) = (format!("/proc/{}/status", started.pid()), 1 << (Signal::SIGTERM as i32 - 1));
        let deadline = Instant::now() + cni_testkit::patience(Duration::from_secs(10));
        loop {
            let text = std::fs::read_to_string(&status).unwrap();
            let blocked = text.lines().find_map(|line| line.strip_prefix("SigBlk:\t")).unwrap();
            if u64::from_str_radix(blocked, 16).unwrap() & taken != 0 {
                break;
            }
            assert!(Instant::now() < deadline, "{text}");
            sleep(Duration::from_millis(5));
        }
        started.terminate();
        let outcome = started.finish_without_end_of_input();
        outcome.fails_with(11, "error reading from stdin: interrupted by a signal");
    }
}

#[test]
fn when_a_signal_comes_while_the_result_is_not_read() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"]));
    let call = attachment.invocation("ADD", None).with_stuck_stdout().timeout(Duration::from_secs(20));
    let mut started = call.start();
    started.release();
    // Its last change before the result is written.
    let deadline = Instant::now() + cni_testkit::patience(Duration::from_secs(10));
    while !container.run(&["ip", "-o", "addr", "show", "dev", "eth0", "up"]).stdout.contains("10.1.0.") {
        assert!(Instant::now() < deadline, "the address never came");
        sleep(Duration::from_millis(20));
    }
    sleep(Duration::from_secs(1));
    started.terminate();
    let outcome = started.finish();
    assert_eq!(outcome.status, Some(1), "{}", outcome.report());
    assert!(outcome.stderr.contains("interrupted by a signal"), "{}", outcome.report());
    assert_nothing(&node, &container, &outcome);
}

#[test]
fn when_the_runtime_loses_patience() {
    let node = Node::new();
    let container = node.container();
    // Hangs in ADD; its DEL is called anyway, since it may have obtained a lease.
    let script = "#!/bin/sh\n[ $CNI_COMMAND = ADD ] || { touch \"${0%/*}/deleted\"; exit 0; }\necho $$ > \"${0%/*}/pid\"\nexec sleep 60\n";
    let folder = crate::delegation::executable(&node, "slow", script);
    let config = patched(bridge(&node, &[]), json!({"ipam": {"type": "slow", "ranges": null, "dataDir": null}}));
    let call = node.plugin("bridge").command("ADD").cni_path(&folder).container(&container).config(&config);
    let mut started = call.timeout(std::time::Duration::from_secs(20)).start();
    started.release();
    crate::delegation::wait_for(&folder.join("pid"));
    started.terminate();
    let outcome = started.finish();
    assert_ne!(outcome.status, Some(0));
    assert_eq!(outcome.failure().code, Some(11), "{}", outcome.report());
    assert_nothing(&node, &container, &outcome);
    assert!(folder.join("deleted").exists(), "{}", outcome.report());
    let pid = std::fs::read_to_string(folder.join("pid")).unwrap();
    assert!(!std::path::Path::new(&format!("/proc/{}", pid.trim())).exists(), "the delegate is killed and reaped");
}

#[test]
fn an_existing_interface_stays_untouched() {
    let node = Node::new();
    let container = node.container();
    container.exec(&["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "other"]);
    container.exec(&["ip", "addr", "add", "172.16.0.5/24", "dev", "eth0"]);
    let before = container.link("eth0").unwrap();
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"]));
    let failure = attachment.add().failure();
    assert!(failure.msg.contains("container veth name") && failure.msg.contains("already exists"), "{failure:?}");
    assert_eq!(container.link("eth0").unwrap(), before);
    assert_eq!(container.addresses("eth0"), ["172.16.0.5/24"]);
    assert_eq!((node.reservations("net1"), node.ports("br0")), (vec![], vec![]));
    container.exec(&["ip", "link", "del", "eth0"]);
}

/// After a failed ADD a runtime calls DEL, without a result.
#[test]
fn del_after_a_failed_add_leaves_an_existing_interface() {
    let node = Node::new();
    let container = node.container();
    container.exec(&["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "other"]);
    let before = container.link("eth0").unwrap();
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"]));
    attachment.add().failure();
    let outcome = attachment.del();
    outcome.success();
    assert_eq!(container.link("eth0").as_ref(), Some(&before), "{}", outcome.report());
    container.exec(&["ip", "link", "del", "eth0"]);
}

#[test]
fn the_second_add_of_an_attachment_fails_and_changes_nothing() {
    let node = Node::new();
    for config in [bridge(&node, &["10.1.0.0/24", "fd00:1::/64"]), layer2()] {
        let (container, attachment, result) = attach(&node, &config, 1).remove(0);
        let before = (container.addresses("eth0"), node.ports("br0"), node.reservations("net1"));
        attachment.add().failure();
        assert_eq!((container.addresses("eth0"), node.ports("br0"), node.reservations("net1")), before);
        attachment.del_with(&result).success();
    }
}
