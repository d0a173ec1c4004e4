//! STATUS: would the next ADD succeed? Asked every few seconds, so it must be cheap and must not wait.

use std::time::Duration;

use cni_testkit::{Attachment, Invocation, Node, probe, require};
use conformance::{attach, bridge, host_local, layer2, loopback, patched};
use serde_json::{Value, json};

fn newest(config: Value) -> Value {
    patched(config, json!({"cniVersion": "1.1.0"}))
}

#[track_caller]
fn status(node: &Node, config: &Value) -> cni_testkit::Outcome {
    let plugin = config["type"].as_str().unwrap().to_owned();
    node.plugin(&plugin).command("STATUS").config(config).timeout(Duration::from_secs(10)).run()
}

#[test]
fn what_is_ready_says_nothing_and_makes_nothing() {
    let node = Node::new();
    for config in [host_local(&node, &["10.1.0.0/24"]), bridge(&node, &["10.1.0.0/24"]), layer2(), loopback()] {
        status(&node, &newest(config)).success();
    }
    assert!(node.link("br0").is_none());
    assert!(!node.data_dir().exists());
}

#[test]
fn an_exhausted_pool_is_not_available_and_says_how_full_it_is() {
    let node = Node::new();
    let config = newest(host_local(&node, &["10.1.0.0/29"]));
    let all = attach(&node, &config, 5);
    let failure = status(&node, &config).fails_with(50, "");
    let text = format!("{failure:?}");
    assert!(text.contains("5/5") || text.contains("5 of 5"), "used and total: {text}");
    all[0].1.del().success();
    status(&node, &config).success();
    for one in &all[1..] {
        one.1.del().success();
    }
}

#[test]
fn one_exhausted_set_of_two_is_enough() {
    let node = Node::new();
    let config = newest(host_local(&node, &["fd00:1::/64", "10.1.0.0/30"]));
    let (_c, attachment, _) = attach(&node, &config, 1).remove(0);
    status(&node, &config).fails_with(50, "");
    attachment.del().success();
    status(&node, &config).success();
}

/// As a Go plugin leaves them that was killed between making a file and writing it, or a crash that lost what was written.
#[test]
fn blank_files_are_free_addresses() {
    let node = Node::new();
    let config = newest(host_local(&node, &["10.1.0.0/29"]));
    let folder = node.data_dir().join("net1");
    std::fs::create_dir_all(&folder).unwrap();
    for host in 2..=5 {
        std::fs::write(folder.join(format!("10.1.0.{host}")), format!("c{host}\r\neth0")).unwrap();
    }
    // Without an index, and then with one that the killed plugin has made untrue.
    for blank in ["", "\0\0\0\0\r\n"] {
        let file = folder.join("10.1.0.6");
        std::fs::write(&file, blank).unwrap();
        status(&node, &config).success();
        std::fs::write(&file, "c6\r\neth0").unwrap();
        status(&node, &config).fails_with(50, "");
        std::fs::write(&file, blank).unwrap();
        let (_c, attachment, _) = attach(&node, &config, 1).remove(0);
        status(&node, &config).fails_with(50, "");
        attachment.del().success();
        status(&node, &config).success();
    }
    for host in 2..=5 {
        std::fs::remove_file(folder.join(format!("10.1.0.{host}"))).unwrap();
    }
}

#[test]
fn without_ranges_there_is_nothing_to_exhaust() {
    let node = Node::new();
    let config = newest(patched(host_local(&node, &[]), json!({"ipam": {"ranges": null}})));
    status(&node, &config).success();
}

#[test]
fn ranges_that_only_the_runtime_knows_are_said_to_be_full_and_do_not_make_a_node_unready() {
    let node = Node::new();
    let bare = newest(patched(host_local(&node, &[]), json!({"ipam": {"ranges": null}})));
    let of = |subnet: &str| {
        let ranges = json!([[{"subnet": subnet}], [{"subnet": "fd00:1::/64"}]]);
        patched(bare.clone(), json!({"runtimeConfig": {"ipRanges": ranges}}))
    };
    let notes = |config: &Value| {
        let outcome = status(&node, config);
        outcome.success();
        outcome.stderr
    };
    let (_c, one, _) = attach(&node, &of("10.1.0.0/30"), 1).remove(0);
    let said = notes(&bare);
    assert!(said.contains("10.1.0.1-10.1.0.2: 1 of 1 used"), "{said}");
    // Else a node that is given a larger range would never get the ADD that brings it.
    let (_c, two, _) = attach(&node, &of("10.2.0.0/29"), 1).remove(0);
    assert_eq!(notes(&bare), "");
    let others = attach(&node, &of("10.2.0.0/29"), 4);
    assert!(notes(&bare).contains("10.2.0.1-10.2.0.6: 5 of 5 used"));
    // Asked about these very ranges, the next ADD is sure to fail.
    status(&node, &of("10.2.0.0/29")).fails_with(50, "no IP addresses available in range set: 10.2.0.1-10.2.0.6");
    one.config(bare.clone()).del().success();
    assert_eq!(notes(&bare), "");
    for attachment in others.into_iter().map(|other| other.1).chain([two]) {
        attachment.config(bare.clone()).del().success();
    }
}

#[test]
fn a_disk_without_room_is_not_available() {
    let node = Node::new();
    let (blocks, inodes) = (node.dir().join("blocks"), node.dir().join("inodes"));
    for (folder, options) in [(&blocks, "size=64k"), (&inodes, "nr_inodes=12")] {
        std::fs::create_dir(folder).unwrap();
        node.exec(&["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder.to_str().unwrap()]);
    }
    for (folder, fill) in
        [(blocks, "head -c 200000 /dev/zero > fill"), (inodes, "for n in $(seq 20); do : > f$n; done")]
    {
        let config = newest(patched(host_local(&node, &["10.1.0.0/24"]), json!({"ipam": {"dataDir": folder}})));
        let (_c, attachment, _) = attach(&node, &config, 1).remove(0);
        status(&node, &config).success();
        node.run(&["sh", "-c", &format!("cd {}; {fill}", folder.display())]);
        let failure = status(&node, &config).fails_with(50, "");
        assert!(failure.msg.contains("net1") && failure.msg.contains("storage"), "{failure:?}");
        let late = node.container();
        let failure = Attachment::new(&node, &late, config.clone()).add().fails_with(5, "");
        assert!(failure.msg.contains("No space left"), "{failure:?}");
        attachment.del().success();
    }
}

#[test]
fn bridge_passes_on_what_its_ipam_says() {
    let node = Node::new();
    let config = newest(bridge(&node, &["10.1.0.0/30"]));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    status(&node, &config).fails_with(50, "");
    attachment.del_with(&result).success();
    status(&node, &config).success();
}

#[test]
fn bridge_without_its_ipam_is_not_available() {
    let node = Node::new();
    let config = newest(patched(bridge(&node, &[]), json!({"ipam": {"type": "not-there"}})));
    let failure = status(&node, &config).fails_with(50, "");
    assert!(failure.msg.contains("not-there"), "{failure:?}");
}

#[test]
fn a_name_that_is_no_bridge_is_not_available() {
    let node = Node::new();
    node.exec(&["ip", "link", "add", "br0", "type", "veth", "peer", "name", "other"]);
    status(&node, &newest(layer2())).fails_with(50, "");
    node.exec(&["ip", "link", "del", "br0"]);
}

#[test]
fn a_held_lock_is_not_waited_for() {
    require!(probe::tool("flock"));
    let node = Node::new();
    let config = newest(host_local(&node, &["10.1.0.0/24"]));
    let (container, attachment, _) = attach(&node, &config, 1).remove(0);
    let lock = node.data_dir().join("net1/lock");
    let holder = Invocation::new(&node, "/usr/bin/flock").arg(&lock).arg("-c").arg("read x").start();
    cni_testkit::locks::wait_until_locked(&lock);
    let answer = std::panic::catch_unwind(|| status(&node, &config).success());
    holder.finish();
    assert!(answer.is_ok(), "see above");
    Attachment::new(&node, &container, config.clone()).del().success();
    drop(attachment);
}
