//! Dummy interfaces, which are neither veth nor bridge: nodes have them as uplinks and for
//! addresses of their own.

use cni_testkit::{Attachment, Node, probe, require};
use conformance::{attach, bridge, layer2, patched};
use serde_json::json;

/// A node whose bridge has a dummy as its uplink.
fn with_uplink() -> Node {
    let node = Node::new();
    node.exec(&["ip", "link", "add", "br0", "type", "bridge"]);
    node.exec(&["ip", "link", "add", "uplink", "address", UPLINK_MAC, "type", "dummy"]);
    node.exec(&["ip", "link", "set", "uplink", "master", "br0", "up"]);
    node.expect_left("uplink");
    node
}

const UPLINK_MAC: &str = "02:00:00:00:00:07";

#[test]
fn a_bridge_with_an_uplink_keeps_its_owner_s_address() {
    require!(probe::dummy());
    let node = with_uplink();
    let all = attach(&node, &layer2(), 2);
    assert!(node.link("br0").unwrap()["ifalias"].is_null(), "it is not ours to pin");
    assert_eq!(node.ports("br0").len(), 3);
    for (_, attachment, result) in all {
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
    assert_eq!(node.ports("br0"), ["uplink"]);
    assert_eq!(node.link("br0").unwrap()["address"], UPLINK_MAC, "with the last container it is the uplink's again");
}

#[test]
fn a_gateway_keeps_the_address_of_its_uplink() {
    require!(probe::dummy());
    let node = with_uplink();
    let all = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 2);
    // A port with a lower MAC would change the bridge's MAC, and peers with the old one in their
    // neighbour cache would lose the gateway.
    assert_eq!(node.link("br0").unwrap()["address"], UPLINK_MAC);
    all[0].0.ping("10.1.0.1");
    for (_, attachment, result) in all {
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
    assert_eq!(node.ports("br0"), ["uplink"]);
    assert_eq!(node.link("br0").unwrap()["address"], UPLINK_MAC);
}

#[test]
fn vlan_filtering_is_not_enabled_with_an_uplink() {
    require!(probe::dummy());
    require!(probe::vlan_filtering());
    let node = with_uplink();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, patched(layer2(), json!({"vlan": 100})));
    attachment.add().fails_naming(7, &["uplink"]);
    assert_eq!(node.link("br0").unwrap()["linkinfo"]["info_data"]["vlan_filtering"], 0);
    // The administrator follows the message.
    node.exec(&["ip", "link", "set", "br0", "type", "bridge", "vlan_filtering", "1"]);
    let result = attachment.add().success();
    attachment.del_with(&result).success();
    assert_eq!(node.ports("br0"), ["uplink"]);
}

#[test]
fn the_containers_own_interface_stays_in_every_verb() {
    require!(probe::dummy());
    let node = Node::new();
    let container = node.container();
    container.exec(&["ip", "link", "add", "eth0", "type", "dummy"]);
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"]));
    attachment.add().fails_naming(102, &["eth0"]);
    assert_eq!(node.reservations("net1"), []);
    attachment.del().success();
    assert_eq!(container.link("eth0").unwrap()["linkinfo"]["info_kind"], "dummy");
}
