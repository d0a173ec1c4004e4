//! An address is reused with a new MAC: peers must not wait until their neighbour entry expires.

use cni_testkit::{Attachment, Node};
use conformance::{attach, bridge, patched, sandboxed};
use serde_json::{Value, json};

fn asking(node: &Node, address: &str) -> Value {
    let subnet = if address.contains(':') { "fd00:1::/64" } else { "10.1.0.0/24" };
    patched(bridge(node, &[subnet]), json!({"runtimeConfig": {"ips": [address]}}))
}

/// The host knows the address by the first container's MAC; the first packet to the second must be
/// answered.
#[track_caller]
fn first_packet_is_answered(address: &str) {
    let node = Node::new();
    let config = asking(&node, address);
    let (_old, first, result) = attach(&node, &config, 1).remove(0);
    node.ping(address);
    let mac = sandboxed(&result)["mac"].as_str().unwrap().to_owned();
    first.del_with(&result).success();
    node.exec(&["ip", "neigh", "replace", address, "lladdr", &mac, "dev", "br0", "nud", "reachable"]);

    let (_new, second, result) = attach(&node, &config, 1).remove(0);
    let ping = node.run(&["ping", "-c1", "-W10", address]);
    let known = node.exec(&["ip", "neigh", "show"]);
    assert!(ping.ok, "{result:#}\n{}{known}", ping.stdout);
    second.del_with(&result).success();
}

#[test]
fn the_host_s_first_packet_is_answered_over_ipv4() {
    first_packet_is_answered("10.1.0.9");
}

#[test]
fn the_host_s_first_packet_is_answered_over_ipv6() {
    first_packet_is_answered("fd00:1::9");
}

#[track_caller]
fn first_packet_of_a_neighbour_is_answered(address: &str) {
    let node = Node::new();
    let config = asking(&node, address);
    let subnet = if address.contains(':') { "fd00:1::/64" } else { "10.1.0.0/24" };
    let (neighbour, other, other_result) = attach(&node, &bridge(&node, &[subnet]), 1).remove(0);
    let (_old, first, result) = attach(&node, &config, 1).remove(0);
    neighbour.ping(address);
    let mac = sandboxed(&result)["mac"].as_str().unwrap().to_owned();
    first.del_with(&result).success();
    neighbour.exec(&["ip", "neigh", "replace", address, "lladdr", &mac, "dev", "eth0", "nud", "reachable"]);

    let (_new, second, result) = attach(&node, &config, 1).remove(0);
    let ping = neighbour.run(&["ping", "-c1", "-W10", address]);
    let known = neighbour.exec(&["ip", "neigh", "show"]);
    assert!(ping.ok, "{result:#}\n{}{known}", ping.stdout);
    second.del_with(&result).success();
    other.del_with(&other_result).success();
}

#[test]
fn a_neighbour_s_first_packet_is_answered_over_ipv4() {
    first_packet_of_a_neighbour_is_answered("10.1.0.9");
}

#[test]
fn a_neighbour_s_first_packet_is_answered_over_ipv6() {
    first_packet_of_a_neighbour_is_answered("fd00:1::9");
}

/// Each announcement is flooded to all ports of the bridge, so a second one is work for every
/// container of the node.
#[test]
fn each_address_is_announced_once() {
    let node = Node::new();
    let (neighbour, other, other_result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    let rules = "add table netdev count
        add chain netdev count frames { type filter hook ingress device eth0 priority 0; }
        add rule netdev count frames arp saddr ip 10.1.0.9 arp daddr ip 10.1.0.9 counter
        add rule netdev count frames icmpv6 type nd-neighbor-advert @th,64,128 0xfd000001000000000000000000000009 counter";
    neighbour.exec(&["nft", rules]);
    let config = patched(
        bridge(&node, &["10.1.0.0/24", "fd00:1::/64"]),
        json!({"runtimeConfig": {"ips": ["10.1.0.9", "fd00:1::9"]}}),
    );
    let (_container, attachment, result) = attach(&node, &config, 1).remove(0);
    // A frame that comes after all announcements of the ADD.
    neighbour.ping("10.1.0.9");
    let counters = neighbour.exec(&["nft", "list", "table", "netdev", "count"]);
    assert_eq!(counters.matches("counter packets 1 ").count(), 2, "{counters}");
    attachment.del_with(&result).success();
    other.del_with(&other_result).success();
}

#[test]
fn no_permanent_neighbour_entry_is_created() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, asking(&node, "10.1.0.9"));
    let result = attachment.add().success();
    let entries = node.exec(&["ip", "neigh", "show", "dev", "br0"]);
    assert!(!entries.contains("PERMANENT"), "{entries}");
    attachment.del_with(&result).success();
}
