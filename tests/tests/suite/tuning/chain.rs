//! A list of bridge and tuning.

use cni_testkit::{Attachment, Node, probe, require};
use conformance::{layer2, patched, sandboxed};
use serde_json::{Value, json};

use super::{backups, tuned};

/// Runs ADD in order, CHECK, and DEL in reverse with the last result, as runtimes do.
#[track_caller]
fn life(node: &Node) {
    let container = node.container();
    let bridge = Attachment::new(node, &container, layer2());
    let tuning = tuned(node, &container, json!({"mac": "02:00:00:00:00:aa", "mtu": 1400}));
    let made: Value = bridge.add().success();
    let result = tuning.add_after(&made).success();
    assert_eq!(sandboxed(&result)["mac"], "02:00:00:00:00:aa");
    tuning.check(&result).success();
    for attachment in [&tuning, &bridge] {
        attachment.del_with(&result).success();
    }
    assert!(container.link("eth0").is_none(), "the interface is left");
    assert_eq!(node.ports("br0"), Vec::<String>::new());
    assert_eq!(backups(node), Vec::<String>::new());
}

#[test]
fn a_list_of_bridge_and_tuning_leaves_nothing() {
    require!(probe::plugin("bridge"));
    life(&Node::new());
}

#[test]
fn bridge_checks_what_tuning_has_changed() {
    require!(probe::plugin("bridge"));
    let node = Node::new();
    let container = node.container();
    let bridge = Attachment::new(&node, &container, patched(layer2(), json!({"mtu": 1450})));
    let tuning = tuned(&node, &container, json!({"mac": "02:00:00:00:00:aa", "mtu": 1400}));
    let result = tuning.add_after(&bridge.add().success()).success();
    bridge.check(&result).success();
    tuning.check(&result).success();
    tuning.del_with(&result).success();
    bridge.del_with(&result).success();
    assert!(container.link("eth0").is_none());
}
