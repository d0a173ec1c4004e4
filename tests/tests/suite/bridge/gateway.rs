//! The bridge as the gateway: its addresses, forwarding and its MAC.

use cni_testkit::{Attachment, Node};
use conformance::{attach, bridge, layer2, patched, tentative};
use serde_json::{Value, json};

fn bridge_addresses(node: &Node) -> Vec<String> {
    let links = node.json(&["ip", "-j", "addr", "show", "dev", "br0"]);
    let infos = links[0]["addr_info"].as_array().unwrap().clone();
    let global = infos.iter().filter(|info| info["scope"] == "global");
    global.map(|info| format!("{}/{}", info["local"].as_str().unwrap(), info["prefixlen"])).collect()
}

fn mac(node: &Node) -> Value {
    node.link("br0").unwrap()["address"].clone()
}

#[test]
fn the_bridge_gets_the_gateway_s_addresses() {
    let node = Node::new();
    let all = attach(&node, &bridge(&node, &["10.1.0.0/24", "fd00:1::/64"]), 2);
    assert_eq!(bridge_addresses(&node), ["10.1.0.1/24", "fd00:1::1/64"]);
    for (_, attachment, result) in all {
        attachment.del_with(&result).success();
    }
    assert_eq!(bridge_addresses(&node), ["10.1.0.1/24", "fd00:1::1/64"], "the bridge stays as it is");
}

#[test]
fn the_bridge_can_ask_for_ipv6_neighbours_at_once() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &bridge(&node, &["fd00:1::/64"]), 1).remove(0);
    assert_eq!(tentative(&node, "br0"), [false], "whether its link-local address is tentative");
    attachment.del_with(&result).success();
}

#[test]
fn without_is_gateway_the_bridge_gets_no_address() {
    let node = Node::new();
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"isGateway": false}));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(bridge_addresses(&node), Vec::<String>::new());
    attachment.del_with(&result).success();
}

#[test]
fn a_gateway_named_by_ipam_is_the_bridge_s_address() {
    let node = Node::new();
    let range = json!([[{"subnet": "10.1.0.0/24", "gateway": "10.1.0.254"}]]);
    let config = patched(bridge(&node, &[]), json!({"ipam": {"ranges": range}}));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(bridge_addresses(&node), ["10.1.0.254/24"]);
    container.ping("10.1.0.254");
    attachment.del_with(&result).success();
}

#[test]
fn a_gateway_needs_forwarding() {
    let node = Node::new();
    node.exec(&["sysctl", "-qw", "net.ipv4.ip_forward=0", "net.ipv6.conf.all.forwarding=0"]);
    let (_c, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    assert_eq!(
        (node.sysctl("net/ipv4/ip_forward"), node.sysctl("net/ipv6/conf/all/forwarding")),
        ("1".into(), "0".into())
    );
    attachment.del_with(&result).success();
    let config = patched(bridge(&node, &["fd00:1::/64"]), json!({"name": "net6", "bridge": "br6"}));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(node.sysctl("net/ipv6/conf/all/forwarding"), "1");
    attachment.del_with(&result).success();
}

#[test]
fn is_default_gateway_adds_default_routes() {
    let node = Node::new();
    let config =
        patched(bridge(&node, &["10.1.0.0/24", "fd00:1::/64"]), json!({"isGateway": null, "isDefaultGateway": true}));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(result["routes"], json!([{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}, {"dst": "::/0", "gw": "fd00:1::1"}]));
    for (family, gateway) in [("-4", "10.1.0.1"), ("-6", "fd00:1::1")] {
        let routes = container.json(&["ip", "-j", family, "route", "show", "default"]);
        assert_eq!(routes[0]["gateway"], gateway, "{routes}");
    }
    assert_eq!(bridge_addresses(&node).len(), 2, "isDefaultGateway implies isGateway");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn is_default_gateway_works_with_a_default_route_of_ipam() {
    let node = Node::new();
    for route in [json!({"dst": "0.0.0.0/0"}), json!({"dst": "0.0.0.0/0", "gw": "10.1.0.1"})] {
        let patch = json!({"isDefaultGateway": true, "ipam": {"routes": [route]}});
        let (container, attachment, result) =
            attach(&node, &patched(bridge(&node, &["10.1.0.0/24"]), patch), 1).remove(0);
        let routes = container.json(&["ip", "-j", "-4", "route", "show", "default"]);
        assert_eq!(routes.as_array().unwrap().len(), 1, "{routes}");
        assert_eq!(routes[0]["gateway"], "10.1.0.1");
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
}

#[test]
fn an_existing_bridge_is_used_as_it_is() {
    let node = Node::new();
    node.exec(&["ip", "link", "add", "br0", "mtu", "1400", "type", "bridge"]);
    let before = node.link("br0").unwrap();
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"mtu": 1300}));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(node.link("br0").unwrap()["ifindex"], before["ifindex"]);
    attachment.del_with(&result).success();
}

/// The administrator set no MAC, so the bridge may take that of its first port.
#[test]
fn result_has_the_mac_an_existing_bridge_gets_from_its_port() {
    let node = Node::new();
    node.exec(&["ip", "link", "add", "br0", "up", "type", "bridge"]);
    let (_c, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    assert_eq!(result["interfaces"][0]["mac"], mac(&node), "{result:#}");
    attachment.del_with(&result).success();
}

#[test]
fn an_interface_that_is_not_a_bridge_is_refused_and_unchanged() {
    let node = Node::new();
    node.exec(&["ip", "link", "add", "br0", "type", "veth", "peer", "name", "other"]);
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"]));
    let failure = attachment.add().failure();
    assert!(failure.msg.contains("\"br0\" already exists but is not a bridge"), "{failure:?}");
    assert!(node.link("br0").is_some() && container.link("eth0").is_none());
    attachment.del().success();
    node.exec(&["ip", "link", "del", "br0"]);
}

#[test]
fn another_address_on_the_bridge_is_an_error_and_stays() {
    let node = Node::new();
    node.exec(&["ip", "link", "add", "br0", "type", "bridge"]);
    node.exec(&["ip", "addr", "add", "10.9.0.1/24", "dev", "br0"]);
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"]));
    let failure = attachment.add().failure();
    assert!(failure.msg.contains("\"br0\" already has an IP address different from 10.1.0.1/24"), "{failure:?}");
    attachment.del().success();
    assert_eq!(bridge_addresses(&node), ["10.9.0.1/24"]);
}

#[test]
fn force_address_replaces_the_conflicting_address() {
    let node = Node::new();
    node.exec(&["ip", "link", "add", "br0", "type", "bridge"]);
    node.exec(&["ip", "addr", "add", "10.9.0.1/24", "dev", "br0"]);
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"forceAddress": true}));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(bridge_addresses(&node), ["10.1.0.1/24"]);
    attachment.del_with(&result).success();
}

/// An ADD that fails after it has replaced the addresses of another network's gateway.
fn forced_and_refused(node: &Node) -> Value {
    node.exec(&["ip", "link", "add", "br0", "up", "type", "bridge"]);
    node.exec(&["ip", "addr", "add", "10.9.0.1/24", "broadcast", "10.9.0.255", "label", "br0:office", "dev", "br0"]);
    node.exec(&["ip", "addr", "add", "10.9.0.2/24", "dev", "br0"]);
    node.exec(&["ip", "addr", "add", "fd00:1::99/64", "dev", "br0", "nodad"]);
    // The kernel refuses a gateway in scope "host".
    let routes = json!({"routes": [{"dst": "192.0.2.0/24", "gw": "10.1.0.77", "scope": 254}]});
    patched(bridge(node, &["10.1.0.0/24", "fd00:1::/64"]), json!({"forceAddress": true, "ipam": routes}))
}

/// The addresses of the bridge that are not a gateway of `forced_and_refused`, in full.
fn other_addresses(node: &Node) -> Vec<Value> {
    let links = node.json(&["ip", "-j", "addr", "show", "dev", "br0"]);
    let mut infos = links[0]["addr_info"].as_array().unwrap().clone();
    infos.retain(|info| info["local"] != "10.1.0.1" && info["local"] != "fd00:1::1" && info["scope"] == "global");
    infos
}

#[test]
fn a_failed_forced_add_leaves_the_other_gateways() {
    let node = Node::new();
    let config = forced_and_refused(&node);
    let before = other_addresses(&node);
    let container = node.container();
    let attachment = Attachment::new(&node, &container, config);
    let outcome = attachment.add();
    outcome.failure();
    assert_eq!(other_addresses(&node), before, "{}", outcome.report());
    assert!(node.exec(&["ip", "route", "show", "dev", "br0"]).contains("10.9.0.0/24"));
    attachment.del().success();
    assert_eq!(other_addresses(&node), before);
}

#[test]
fn a_failed_forced_chained_add_leaves_the_other_gateways() {
    let node = Node::new();
    let config = forced_and_refused(&node);
    let before = other_addresses(&node);
    let container = node.container();
    let prev = crate::bridge::chained::made_before(&node, &container);
    let attachment = Attachment::new(&node, &container, config);
    let outcome = attachment.add_after(&prev);
    outcome.failure();
    assert_eq!(other_addresses(&node), before, "{}", outcome.report());
    attachment.del_with(&prev).success();
    node.exec(&["ip", "link", "del", "host0"]);
}

#[test]
fn a_forced_add_with_unread_result_keeps_other_addresses() {
    let node = Node::new();
    let config = patched(forced_and_refused(&node), json!({"ipam": {"routes": null}}));
    let before = other_addresses(&node);
    let container = node.container();
    let attachment = Attachment::new(&node, &container, config);
    let outcome = attachment.invocation("ADD", None).with_closed_stdout().run();
    assert_ne!(outcome.status, Some(0), "{}", outcome.report());
    assert_eq!(other_addresses(&node), before, "{}", outcome.report());
}

#[test]
fn a_refused_gateway_of_one_family_adds_none_of_the_other() {
    let node = Node::new();
    node.exec(&["ip", "link", "add", "br0", "type", "bridge"]);
    node.exec(&["ip", "addr", "add", "fd00:1::99/64", "dev", "br0"]);
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24", "fd00:1::/64"]));
    attachment.add().fails_with(102, "failed to set bridge addr: \"br0\" already has an IP address different from");
    assert_eq!(bridge_addresses(&node), ["fd00:1::99/64"]);
    attachment.del().success();
}

#[test]
fn an_ipv6_address_without_overlap_is_not_a_conflict() {
    let node = Node::new();
    node.exec(&["ip", "link", "add", "br0", "type", "bridge"]);
    node.exec(&["ip", "addr", "add", "fd00:9::1/64", "dev", "br0"]);
    let (_c, attachment, result) = attach(&node, &bridge(&node, &["fd00:1::/64"]), 1).remove(0);
    let mut all = bridge_addresses(&node);
    all.sort();
    assert_eq!(all, ["fd00:1::1/64", "fd00:9::1/64"]);
    attachment.del_with(&result).success();
}

#[test]
fn an_ipv6_address_that_overlaps_is_a_conflict() {
    let node = Node::new();
    node.exec(&["ip", "link", "add", "br0", "type", "bridge"]);
    node.exec(&["ip", "addr", "add", "fd00:1::99/64", "dev", "br0"]);
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bridge(&node, &["fd00:1::/64"]));
    let failure = attachment.add().failure();
    assert!(failure.msg.contains("already has an IP address different from"), "{failure:?}");
    attachment.del().success();
}

#[test]
fn the_bridges_mac_never_changes() {
    for is_gateway in [true, false] {
        let node = Node::new();
        let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"isGateway": is_gateway}));
        let low = |last: u8| format!("02:00:00:00:00:{last:02x}");
        let mut all = Vec::new();
        let mut macs = Vec::new();
        // Each later port has a lower MAC: a bridge that follows its ports would take it.
        for last in [9, 5, 1] {
            let config = patched(config.clone(), json!({"runtimeConfig": {"mac": low(last)}}));
            all.extend(attach(&node, &config, 1));
            macs.push(mac(&node));
        }
        for (_, attachment, result) in &all {
            attachment.check(result).success();
        }
        for (_, attachment, result) in all {
            attachment.del_with(&result).success();
            macs.push(mac(&node));
        }
        macs.dedup();
        assert_eq!(macs.len(), 1, "isGateway {is_gateway}: {macs:?}");
        assert_ne!(macs[0], "00:00:00:00:00:00");
    }
}

#[test]
fn a_bridge_left_by_a_failed_first_add_is_usable() {
    let node = Node::new();
    let bad = patched(
        bridge(&node, &["10.1.0.0/24"]),
        json!({"ipam": {"routes": [{"dst": "192.0.2.0/24", "gw": "172.31.9.9"}]}}),
    );
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bad);
    attachment.add().failure();
    attachment.del().success();
    let (_c, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    assert_ne!(mac(&node), "00:00:00:00:00:00");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn the_bridge_ignores_router_advertisements() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    assert_eq!(node.sysctl("net/ipv6/conf/br0/accept_ra"), "0");
    assert_eq!(node.sysctl(&format!("net/ipv6/conf/{}/accept_ra", conformance::host_end(&result, "br0"))), "0");
    attachment.del_with(&result).success();
}

/// Creates a bridge as an administrator does: its MAC follows its uplink.
fn with_uplink(node: &Node) {
    node.expect_left("up0");
    node.ip(&[
        "link add br0 up type bridge",
        "link add up0 up address e8:00:00:00:00:01 type veth peer name up1",
        "link set up0 master br0",
    ]);
    assert_eq!(mac(node), "e8:00:00:00:00:01");
}

/// Checks that the bridge keeps its MAC while containers with lower and higher MACs are added and
/// deleted.
#[track_caller]
fn keeps_its_mac(node: &Node, patch: Value) {
    let config = patched(bridge(node, &["10.1.0.0/24"]), patch);
    let before = mac(node);
    let mut all = attach(node, &config, 5);
    assert_eq!(mac(node), before, "after the ADDs");
    for (_, attachment, result) in all.drain(..) {
        assert_eq!(result["interfaces"][0]["mac"], before, "the result has the bridge's MAC");
        attachment.check(&result).success();
        attachment.del_with(&result).success();
        assert_eq!(mac(node), before, "after one DEL");
    }
}

#[test]
fn a_bridge_with_an_uplink_keeps_its_mac() {
    let node = Node::new();
    with_uplink(&node);
    keeps_its_mac(&node, json!({}));
    node.exec(&["ip", "link", "del", "up0"]);
    assert_eq!(mac(&node), "e8:00:00:00:00:01", "after the uplink is gone");
}

#[test]
fn an_administrators_bridge_without_ports_keeps_its_mac() {
    let node = Node::new();
    node.exec(&["ip", "link", "add", "br0", "up", "type", "bridge"]);
    keeps_its_mac(&node, json!({}));
    node.ip(&["link add up0 address 02:00:00:00:00:01 type veth peer name up1", "link set up0 master br0"]);
    keeps_its_mac(&node, json!({"isDefaultGateway": true}));
    node.exec(&["ip", "link", "del", "up0"]);
}

#[test]
fn a_bridge_with_an_alias_keeps_both_alias_and_mac() {
    let node = Node::new();
    with_uplink(&node);
    node.exec(&["ip", "link", "set", "br0", "alias", "the office"]);
    keeps_its_mac(&node, json!({}));
    assert_eq!(node.link("br0").unwrap()["ifalias"], "the office");
    node.exec(&["ip", "link", "del", "up0"]);
}

/// This plugin creates such a port for `vlan` with `isGateway`.
#[test]
fn the_port_of_a_vlan_gateway_does_not_prevent_pinning() {
    let node = Node::new();
    node.ip(&["link add br0 up type bridge", "link add port0 up type veth peer name gate0"]);
    node.exec(&["ip", "link", "set", "port0", "master", "br0", "alias", "cni-bridge: VLAN gateway"]);
    let (_c, attachment, result) = attach(&node, &layer2(), 1).remove(0);
    assert_eq!(node.link("br0").unwrap()["ifalias"], "cni-bridge: MAC pinned");
    attachment.del_with(&result).success();
    node.exec(&["ip", "link", "del", "port0"]);
}

/// Setting a MAC, even the same one, makes the kernel drop all neighbour entries of the bridge.
#[test]
fn a_second_add_keeps_the_neighbours_of_a_bridge_with_an_alias() {
    let node = Node::new();
    with_uplink(&node);
    node.exec(&["ip", "link", "set", "br0", "alias", "the office"]);
    let config = bridge(&node, &["10.1.0.0/24"]);
    let (_first, first, first_result) = attach(&node, &config, 1).remove(0);
    node.exec(&["ip", "neigh", "add", "10.1.0.200", "lladdr", "02:00:00:00:00:01", "dev", "br0", "nud", "permanent"]);
    let (_second, second, second_result) = attach(&node, &config, 1).remove(0);
    assert!(node.exec(&["ip", "neigh", "show", "dev", "br0"]).contains("10.1.0.200"));
    second.del_with(&second_result).success();
    first.del_with(&first_result).success();
    node.exec(&["ip", "link", "del", "up0"]);
}

/// The administrator may already have added the gateway's address.
#[test]
fn a_bridge_that_has_the_address_keeps_its_mac() {
    let node = Node::new();
    with_uplink(&node);
    node.exec(&["ip", "addr", "add", "10.1.0.1/24", "dev", "br0"]);
    keeps_its_mac(&node, json!({}));
    node.exec(&["ip", "link", "del", "up0"]);
}

#[test]
fn without_a_gateway_the_bridges_mac_is_not_pinned() {
    let node = Node::new();
    with_uplink(&node);
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"isGateway": false}));
    for config in [config, layer2()] {
        let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
        assert_eq!(result["interfaces"][0]["mac"], mac(&node));
        attachment.del_with(&result).success();
    }
    assert_eq!(node.link("br0").unwrap()["ifalias"], Value::Null);
    node.exec(&["ip", "link", "set", "up0", "address", "e8:00:00:00:00:02"]);
    assert_eq!(mac(&node), "e8:00:00:00:00:02", "it follows its uplink");
    node.exec(&["ip", "link", "del", "up0"]);
}
