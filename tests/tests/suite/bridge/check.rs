//! CHECK succeeds for a healthy attachment, also after permitted changes by others, and fails for
//! each single damage.

use cni_testkit::{Container, Node, probe, require};
use conformance::{attach, bridge, host_end, patched};
use serde_json::{Value, json};

fn network(node: &Node) -> Value {
    let routes = json!([{"dst": "0.0.0.0/0"}, {"dst": "192.0.2.0/24", "gw": "10.1.0.77"}]);
    patched(
        bridge(node, &["10.1.0.0/24", "fd00:1::/64"]),
        json!({"ipam": {"routes": routes}, "hairpinMode": true, "portIsolation": true}),
    )
}

/// Asserts that CHECK succeeds before and fails after `sabotage(node, container, host end)`, with a
/// meaningful message.
#[track_caller]
fn fails_after(sabotage: impl FnOnce(&Node, &Container, &str)) {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &network(&node), 1).remove(0);
    attachment.check(&result).success();
    sabotage(&node, &container, host_end(&result, "br0"));
    let failure = attachment.check(&result).failure();
    assert!(failure.msg.len() > 10, "{failure:?}");
    attachment.del_with(&result).success();
}

/// Asserts that CHECK still succeeds.
#[track_caller]
fn passes_after(change: impl FnOnce(&Node, &Container, &str)) {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &network(&node), 1).remove(0);
    change(&node, &container, host_end(&result, "br0"));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn fails_when_the_address_is_gone() {
    fails_after(|_, container, _| drop(container.exec(&["ip", "addr", "del", "10.1.0.2/24", "dev", "eth0"])));
}

#[test]
fn fails_when_the_ipv6_address_is_gone() {
    fails_after(|_, container, _| drop(container.exec(&["ip", "addr", "del", "fd00:1::2/64", "dev", "eth0"])));
}

#[test]
fn fails_when_the_address_has_another_prefix() {
    fails_after(|_, container, _| {
        container.exec(&["ip", "addr", "add", "10.1.0.2/25", "dev", "eth0"]);
        container.exec(&["ip", "addr", "del", "10.1.0.2/24", "dev", "eth0"]);
    });
}

#[test]
fn fails_when_a_route_is_gone() {
    fails_after(|_, container, _| drop(container.exec(&["ip", "route", "del", "192.0.2.0/24"])));
}

#[test]
fn the_routes_of_a_family_are_read_once() {
    require!(probe::plugin("cnitool"));
    let node = Node::new();
    let (_container, attachment, result) = attach(&node, &network(&node), 1).remove(0);
    let log = node.dir().join("log");
    let check = attachment.invocation("CHECK", Some(&result));
    check.env("CNI_LOG", "debug").env("CNI_LOG_FILE", &log).run().success();
    let log = std::fs::read_to_string(log).unwrap();
    let reads: Vec<&str> = log.lines().filter(|line| line.contains("netlink GetRoute (all)")).collect();
    assert_eq!(reads.len(), 1, "both expected routes are IPv4 routes: {reads:#?}");
    attachment.del_with(&result).success();
}

#[test]
fn fails_when_the_default_route_is_gone() {
    fails_after(|_, container, _| drop(container.exec(&["ip", "route", "del", "default"])));
}

#[test]
fn fails_when_the_default_route_goes_elsewhere() {
    fails_after(|_, container, _| drop(container.exec(&["ip", "route", "replace", "default", "via", "10.1.0.99"])));
}

#[test]
fn fails_when_the_interface_is_down() {
    fails_after(|_, container, _| {
        container.exec(&["sysctl", "-qw", "net.ipv6.conf.eth0.keep_addr_on_down=1"]);
        container.exec(&["ip", "link", "set", "eth0", "down"]);
    });
}

#[test]
fn fails_when_the_interface_is_gone() {
    fails_after(|_, container, _| drop(container.exec(&["ip", "link", "del", "eth0"])));
}

#[test]
fn fails_when_the_interface_is_another_one() {
    fails_after(|_, container, _| {
        container.exec(&["ip", "link", "del", "eth0"]);
        container.exec(&["ip", "link", "add", "eth0", "type", "bridge"]);
        container.exec(&["ip", "link", "set", "eth0", "up"]);
        container.exec(&["ip", "addr", "add", "10.1.0.2/24", "dev", "eth0"]);
    });
}

#[test]
fn fails_when_the_mac_is_another_one() {
    fails_after(|_, container, _| drop(container.exec(&["ip", "link", "set", "eth0", "address", "02:00:00:00:00:99"])));
}

#[test]
fn fails_when_the_bridge_is_down() {
    fails_after(|node, _, _| drop(node.exec(&["ip", "link", "set", "br0", "down"])));
}

#[test]
fn fails_when_the_bridge_is_gone() {
    fails_after(|node, _, _| drop(node.exec(&["ip", "link", "del", "br0"])));
}

#[test]
fn fails_when_the_bridge_has_lost_the_gateways_address() {
    fails_after(|node, _, _| drop(node.exec(&["ip", "addr", "del", "10.1.0.1/24", "dev", "br0"])));
}

#[test]
fn fails_when_the_host_end_is_down() {
    fails_after(|node, _, host| drop(node.exec(&["ip", "link", "set", host, "down"])));
}

#[test]
fn fails_when_the_host_end_is_not_attached_to_the_bridge() {
    fails_after(|node, _, host| drop(node.exec(&["ip", "link", "set", host, "nomaster"])));
}

#[test]
fn fails_when_the_host_end_is_a_port_of_another_bridge() {
    fails_after(|node, _, host| {
        node.exec(&["ip", "link", "add", "br1", "type", "bridge"]);
        node.exec(&["ip", "link", "set", host, "master", "br1"]);
    });
}

#[test]
fn fails_when_hairpin_is_off() {
    fails_after(|node, _, host| drop(node.exec(&["bridge", "link", "set", "dev", host, "hairpin", "off"])));
}

#[test]
fn fails_when_isolation_is_off() {
    fails_after(|node, _, host| drop(node.exec(&["bridge", "link", "set", "dev", host, "isolated", "off"])));
}

#[test]
fn fails_when_forwarding_is_off() {
    fails_after(|node, _, _| drop(node.exec(&["sysctl", "-qw", "net.ipv4.ip_forward=0"])));
}

#[test]
fn fails_when_ipv6_forwarding_is_off() {
    fails_after(|node, _, _| drop(node.exec(&["sysctl", "-qw", "net.ipv6.conf.all.forwarding=0"])));
}

#[test]
fn passes_when_ipv6_forwarding_is_another_number_than_1() {
    passes_after(|node, _, _| drop(node.exec(&["sysctl", "-qw", "net.ipv6.conf.all.forwarding=2"])));
}

#[test]
fn fails_when_the_reservation_is_gone() {
    fails_after(|node, _, _| {
        for (address, _) in node.reservations("net1") {
            std::fs::remove_file(node.data_dir().join("net1").join(address)).unwrap();
        }
    });
}

#[test]
fn fails_when_the_bridge_is_not_promiscuous_any_more() {
    let node = Node::new();
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"promiscMode": true}));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    attachment.check(&result).success();
    node.exec(&["ip", "link", "set", "br0", "promisc", "off"]);
    attachment.check(&result).failure();
    attachment.del_with(&result).success();
}

#[test]
fn fails_for_another_namespace() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &network(&node), 1).remove(0);
    let other = node.container();
    attachment.clone().netns(other.netns()).check(&result).failure();
    attachment.del_with(&result).success();
}

#[test]
fn fails_without_a_prev_result() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &network(&node), 1).remove(0);
    let failure = attachment.invocation("CHECK", None).run().failure();
    assert!(failure.msg.to_lowercase().contains("prevresult"), "{failure:?}");
    attachment.del_with(&result).success();
}

#[test]
fn passes_when_the_bridge_is_more_promiscuous_than_asked() {
    passes_after(|node, _, _| drop(node.exec(&["ip", "link", "set", "br0", "promisc", "on"])));
}

#[test]
fn passes_when_a_later_plugin_has_changed_the_mtu() {
    passes_after(|_, container, _| drop(container.exec(&["ip", "link", "set", "eth0", "mtu", "1400"])));
}

#[test]
fn passes_when_others_have_added_addresses_and_routes() {
    passes_after(|_, container, _| {
        container.exec(&["ip", "addr", "add", "172.16.0.5/24", "dev", "eth0"]);
        container.exec(&["ip", "route", "add", "198.51.100.0/24", "via", "10.1.0.1"]);
    });
}

#[test]
fn passes_after_tuning_has_reported_a_changed_mac() {
    let node = Node::new();
    let (container, attachment, mut result) = attach(&node, &network(&node), 1).remove(0);
    container.exec(&["ip", "link", "set", "eth0", "address", "02:00:00:00:00:99"]);
    let interfaces = result["interfaces"].as_array_mut().unwrap();
    interfaces.iter_mut().find(|interface| interface["name"] == "eth0").unwrap()["mac"] = json!("02:00:00:00:00:99");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn passes_for_each_container_while_others_come_and_go() {
    let node = Node::new();
    let mut all = attach(&node, &network(&node), 3);
    for _ in 0..2 {
        let (_, gone, result) = all.remove(0);
        gone.del_with(&result).success();
        for (_, attachment, result) in &all {
            attachment.check(result).success();
        }
    }
    let (_, last, result) = all.remove(0);
    last.del_with(&result).success();
}

#[test]
fn fails_when_the_mtu_is_larger_than_that_of_prev_result() {
    let node = Node::new();
    let (container, attachment, mut result) =
        attach(&node, &patched(network(&node), json!({"cniVersion": "1.1.0"})), 1).remove(0);
    let interfaces = result["interfaces"].as_array_mut().unwrap();
    interfaces.iter_mut().find(|interface| interface["name"] == "eth0").unwrap()["mtu"] = json!(1500);
    attachment.check(&result).success();
    container.exec(&["ip", "link", "set", "eth0", "mtu", "1400"]);
    attachment.check(&result).success();
    container.exec(&["ip", "link", "set", "eth0", "mtu", "1600"]);
    attachment.check(&result).fails_with(101, "Interface eth0 has MTU 1600, expected 1500");
    attachment.del_with(&result).success();
}
