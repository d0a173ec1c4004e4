//! Tagged frames: what a container on a trunk sends and receives, and the spoof check of its MAC.

use cni_testkit::{Container, Node, probe, require};
use conformance::{attach, layer2, patched};
use serde_json::{Value, json};

/// Creates an interface of the container that tags frames.
fn tagging(container: &Container, id: u16, address: &str) {
    let (name, id) = (format!("eth0.{id}"), id.to_string());
    container.exec(&["ip", "link", "add", "link", "eth0", "name", &name, "type", "vlan", "id", &id]);
    container.exec(&["ip", "address", "add", address, "dev", &name]);
    container.exec(&["ip", "link", "set", &name, "up"]);
}

fn untagged(container: &Container, address: &str) {
    container.exec(&["ip", "address", "add", address, "dev", "eth0"]);
}

#[track_caller]
fn reaches(container: &Container, address: &str) {
    // The first answer may take a while on a slow machine; one is enough.
    container.ping(address);
}

#[track_caller]
fn is_cut_off_from(container: &Container, address: &str) {
    let ran = container.run(&["ping", "-c2", "-i0.2", "-W1", address]);
    assert!(!ran.ok, "{address} answers:\n{}", ran.stdout);
}

/// A container with this VLAN, or with none.
fn in_vlan(vlan: impl Into<Value>) -> Value {
    patched(layer2(), json!({"vlan": vlan.into()}))
}

#[test]
fn a_trunk_passes_frames_of_its_vlans_and_no_others() {
    require!(probe::vlan_filtering());
    require!(probe::vlan_links());
    let node = Node::new();
    let config = patched(layer2(), json!({"vlanTrunk": [{"id": 10}, {"minID": 20, "maxID": 21}]}));
    let mut all = attach(&node, &config, 2);
    for config in [in_vlan(10), in_vlan(20), in_vlan(30), in_vlan(Value::Null)] {
        all.extend(attach(&node, &config, 1));
    }
    let [trunk, second, ten, twenty, thirty, plain] = [0, 1, 2, 3, 4, 5].map(|number: usize| &all[number].0);
    for (id, member, net) in [(10, ten, "10.0.10"), (20, twenty, "10.0.20"), (30, thirty, "10.0.30")] {
        tagging(trunk, id, &format!("{net}.1/24"));
        tagging(second, id, &format!("{net}.2/24"));
        untagged(member, &format!("{net}.3/24"));
    }
    untagged(trunk, "10.0.1.1/24");
    untagged(plain, "10.0.1.3/24");

    for net in ["10.0.10", "10.0.20"] {
        reaches(trunk, &format!("{net}.3"));
        reaches(trunk, &format!("{net}.2"));
    }
    reaches(ten, "10.0.10.2");
    // Untagged frames belong to VLAN 1, like attachments without a VLAN.
    reaches(trunk, "10.0.1.3");
    // A VLAN outside this trunk: its tagged frames are dropped, and none are sent to the container.
    is_cut_off_from(trunk, "10.0.30.3");
    is_cut_off_from(trunk, "10.0.30.2");
    is_cut_off_from(thirty, "10.0.30.1");
    // An address of one VLAN on another: only ARP decides, and must not reach it.
    untagged(ten, "10.0.20.77/24");
    is_cut_off_from(ten, "10.0.20.3");
    is_cut_off_from(ten, "10.0.20.1");
    untagged(plain, "10.0.10.77/24");
    is_cut_off_from(plain, "10.0.10.3");
    for (_, attachment, result) in all {
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
}

#[test]
fn frames_leave_the_uplink_with_the_tag_of_their_vlan() {
    require!(probe::vlan_filtering());
    require!(probe::vlan_links());
    let node = Node::new();
    // The administrator's bridge has a trunk as its uplink. The peer behind it tags and is not an
    // attachment.
    node.exec(&["ip", "link", "add", "br0", "type", "bridge", "vlan_filtering", "1"]);
    let far = node.container();
    let path = far.netns().to_str().unwrap();
    node.exec(&["ip", "link", "add", "uplink", "type", "veth", "peer", "name", "eth0", "netns", path]);
    node.expect_left("uplink");
    node.exec(&["ip", "link", "set", "uplink", "master", "br0", "up"]);
    for id in ["10", "20"] {
        node.exec(&["bridge", "vlan", "add", "dev", "uplink", "vid", id]);
    }
    far.exec(&["ip", "link", "set", "eth0", "up"]);
    tagging(&far, 10, "10.0.0.1/24");
    let ten = attach(&node, &in_vlan(10), 1).remove(0);
    let twenty = attach(&node, &in_vlan(20), 1).remove(0);
    untagged(&ten.0, "10.0.0.3/24");
    untagged(&twenty.0, "10.0.0.4/24");
    reaches(&far, "10.0.0.3");
    is_cut_off_from(&far, "10.0.0.4");
    is_cut_off_from(&ten.0, "10.0.0.4");
    for (_, attachment, result) in [ten, twenty] {
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
}

#[test]
fn a_stolen_mac_is_dropped_in_a_vlan_and_under_a_tag() {
    require!(probe::vlan_filtering());
    require!(probe::vlan_links());
    require!(probe::nft_bridge());
    let node = Node::new();
    let checked = |config: Value| patched(config, json!({"macspoofchk": true}));
    let trunk = checked(patched(layer2(), json!({"vlanTrunk": [{"id": 10}]})));
    let mut all = Vec::new();
    for config in [&trunk, &checked(in_vlan(10)), &in_vlan(10)] {
        all.extend(attach(&node, config, 1));
    }
    let [tagged, access, server] = [0, 1, 2].map(|number: usize| &all[number].0);
    tagging(tagged, 10, "10.0.0.1/24");
    untagged(access, "10.0.0.2/24");
    untagged(server, "10.0.0.3/24");
    reaches(tagged, "10.0.0.3");
    reaches(access, "10.0.0.3");
    tagged.exec(&["ip", "link", "set", "eth0.10", "address", "02:de:ad:00:00:01"]);
    access.exec(&["ip", "link", "set", "eth0", "address", "02:de:ad:00:00:02"]);
    is_cut_off_from(tagged, "10.0.0.3");
    is_cut_off_from(access, "10.0.0.3");
    let (_, first, result) = &all[0];
    first.del_with(result).success();
    let rules = node.ruleset();
    assert!(!rules.contains(&tagged.id) && rules.contains(&access.id), "{rules}");
    for (_, attachment, result) in &all[1..] {
        attachment.del_with(result).success();
    }
    assert!(!node.ruleset().contains("macspoofchk"));
}
