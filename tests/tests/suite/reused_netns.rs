//! CNI_NETNS of a container that has ended leads to another container, because the PID in
//! `/proc/PID/ns/net` was reused. DEL leaves the other container as it is.

use cni_testkit::{Attachment, Container, Node};
use conformance::{VERSION, bridge, ipam, loopback, patched, uplink};
use serde_json::{Value, json};

/// The interfaces, addresses and routes of a container.
fn state(container: &Container) -> Vec<String> {
    let mut lines = Vec::new();
    for command in ["ip -o address", "ip route", "ip -6 route"] {
        let words: Vec<&str> = command.split(' ').collect();
        // Lifetimes and the state of duplicate address detection change by themselves.
        let text = container.exec(&words);
        lines.extend(text.lines().map(|line| line.split(" valid_lft").next().unwrap().replace(" tentative", "")));
    }
    lines
}

fn config(node: &Node, kind: &str) -> Value {
    let base = json!({"cniVersion": VERSION, "name": "net1", "type": kind, "ipam": ipam(node, &["10.1.0.0/24"])});
    match kind {
        "bridge" => bridge(node, &["10.1.0.0/24"]),
        "macvlan" => patched(base, json!({"master": "out0"})),
        _ => base,
    }
}

#[test]
fn del_leaves_the_interface_of_another_container() {
    for kind in ["bridge", "macvlan", "ptp"] {
        let node = Node::new();
        let _outside = uplink(&node, "out0");
        let [ended, living] = [node.container(), node.container()];
        let attachment = Attachment::new(&node, &ended, config(&node, kind));
        let other = Attachment::new(&node, &living, config(&node, kind));
        let (result, other_result) = (attachment.add().success(), other.add().success());
        let before = state(&living);
        ended.destroy();
        attachment.netns(living.netns()).del_with(&result).success();
        assert_eq!(state(&living), before, "{kind}");
        other.check(&other_result).success();
        assert_eq!(node.reservations("net1").len(), 1, "{kind}");
        other.del_with(&other_result).success();
    }
}

#[test]
fn del_of_loopback_leaves_lo_of_a_container_in_use() {
    let node = Node::new();
    let [ended, living] = [node.container(), node.container()];
    let attachment = Attachment::new(&node, &ended, loopback());
    let result = attachment.add().success();
    let other = Attachment::new(&node, &living, loopback());
    let other_result = other.add().success();
    let network = Attachment::new(&node, &living, config(&node, "bridge"));
    let network_result = network.add().success();
    ended.destroy();
    attachment.netns(living.netns()).del_with(&result).success();
    living.ping("127.0.0.1");
    other.check(&other_result).success();
    network.del_with(&network_result).success();
    other.del_with(&other_result).success();
    assert!(other.check(&other_result).failure().msg.contains("loopback interface is down"));
}
