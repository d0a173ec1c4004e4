//! The link and its port: layer 2, hairpin, promiscuity, isolation, MTU, interfaces without
//! address.

use cni_testkit::{Attachment, Node};
use conformance::{attach, bridge, host_end, layer2, patched};
use serde_json::{Value, json};

/// A flag of a port as `ip -d` shows it.
fn port_flag(node: &Node, result: &Value, flag: &str) -> Value {
    let link = node.link(host_end(result, "br0")).unwrap();
    link["linkinfo"]["info_slave_data"][flag].clone()
}

/// A spanning tree blocks a new port for half a minute. That is the administrator's choice, not a
/// failure.
#[test]
fn a_bridge_that_runs_a_spanning_tree_works() {
    let node = Node::new();
    node.exec(&["ip", "link", "add", "br0", "type", "bridge", "stp_state", "1"]);
    node.exec(&["ip", "link", "set", "br0", "up"]);
    let (_container, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn an_existing_bridge_ignores_router_advertisements_too() {
    for state in ["up", "down"] {
        let node = Node::new();
        node.ip(&["link add br0 type bridge", &format!("link set br0 {state}")]);
        node.set_sysctl("net/ipv6/conf/br0/accept_ra", "1");
        let (_container, attachment, result) = attach(&node, &layer2(), 1).remove(0);
        assert_eq!(node.sysctl("net/ipv6/conf/br0/accept_ra"), "0", "a bridge that was {state}");
        attachment.del_with(&result).success();
    }
}

#[test]
fn default_routes_come_in_the_order_of_the_addresses() {
    for (subnets, order) in [
        (["10.1.0.0/24", "fd00:1::/64"], ["0.0.0.0/0", "::/0"]),
        (["fd00:1::/64", "10.1.0.0/24"], ["::/0", "0.0.0.0/0"]),
    ] {
        let node = Node::new();
        let config = patched(bridge(&node, &subnets), json!({"isDefaultGateway": true}));
        let (_container, attachment, result) = attach(&node, &config, 1).remove(0);
        let routes = result["routes"].as_array().unwrap();
        assert_eq!(routes.iter().map(|route| route["dst"].as_str().unwrap()).collect::<Vec<_>>(), order);
        attachment.del_with(&result).success();
    }
}

#[test]
fn a_layer_2_network_has_no_addresses() {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &layer2(), 1).remove(0);
    assert!(result.get("ips").is_none_or(|ips| ips == &json!([])), "{result:#}");
    assert_eq!(result["interfaces"].as_array().unwrap().len(), 3);
    assert_eq!(container.addresses("eth0"), Vec::<String>::new());
    assert_eq!(container.link("eth0").unwrap()["operstate"], "UP");
    assert_eq!(node.ports("br0"), [host_end(&result, "br0")]);
    attachment.del_with(&result).success();
}

#[test]
fn a_layer_2_network_can_be_checked() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &layer2(), 1).remove(0);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn the_default_bridge_is_cni0() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &patched(layer2(), json!({"bridge": null})), 1).remove(0);
    assert_eq!(result["interfaces"][0]["name"], "cni0");
    attachment.del_with(&result).success();
}

#[test]
fn the_name_of_the_host_end_begins_with_veth() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &layer2(), 1).remove(0);
    assert!(host_end(&result, "br0").starts_with("veth"), "administrators' rules match on it: {result:#}");
    attachment.del_with(&result).success();
}

#[test]
fn hairpin_mode_is_as_configured() {
    let node = Node::new();
    for wanted in [true, false] {
        let (_c, attachment, result) = attach(&node, &patched(layer2(), json!({"hairpinMode": wanted})), 1).remove(0);
        assert_eq!(port_flag(&node, &result, "hairpin"), wanted);
        attachment.del_with(&result).success();
    }
}

#[test]
fn isolated_ports_reach_the_gateway_and_not_each_other() {
    let node = Node::new();
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"portIsolation": true}));
    let all = attach(&node, &config, 2);
    assert_eq!(port_flag(&node, &all[0].2, "isolated"), true);
    all[0].0.ping("10.1.0.1");
    assert!(!all[0].0.run(&["ping", "-c1", "-W1", "10.1.0.3"]).ok, "an isolated port reached another");
    for (_, attachment, result) in all {
        attachment.del_with(&result).success();
    }
}

#[test]
fn ports_are_not_isolated_by_default() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &layer2(), 1).remove(0);
    assert_eq!(port_flag(&node, &result, "isolated"), false);
    attachment.del_with(&result).success();
}

#[test]
fn promisc_mode_makes_the_bridge_promiscuous() {
    let node = Node::new();
    let (_c, attachment, result) =
        attach(&node, &patched(bridge(&node, &["10.1.0.0/24"]), json!({"promiscMode": true})), 1).remove(0);
    let link = node.link("br0").unwrap();
    assert!(link["flags"].as_array().unwrap().iter().any(|flag| flag == "PROMISC"), "{link}");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn hairpin_and_promisc_exclude_each_other() {
    let node = Node::new();
    let container = node.container();
    let attachment =
        Attachment::new(&node, &container, patched(layer2(), json!({"hairpinMode": true, "promiscMode": true})));
    attachment.add().fails_with(7, "cannot set hairpin mode and promiscuous mode at the same time");
    assert!(node.link("br0").is_none());
    attachment.del().success();
}

#[test]
fn the_bridge_and_both_ends_have_the_configured_mtu() {
    let node = Node::new();
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"mtu": 1400}));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    for link in [container.link("eth0"), node.link(host_end(&result, "br0")), node.link("br0")] {
        assert_eq!(link.as_ref().unwrap()["mtu"], 1400, "{link:?}");
    }
    attachment.del_with(&result).success();
}

#[test]
fn the_result_of_1_1_0_names_the_mtu() {
    let node = Node::new();
    let config = patched(layer2(), json!({"cniVersion": "1.1.0", "mtu": 1400}));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    let container_end = conformance::sandboxed(&result);
    assert!(container_end.get("mtu").is_none_or(|mtu| mtu == 1400), "if it is named, then rightly: {result:#}");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn an_invalid_mtu_is_refused() {
    let node = Node::new();
    let container = node.container();
    for mtu in [-1, 1_i64 << 40] {
        let attachment = Attachment::new(&node, &container, patched(layer2(), json!({"mtu": mtu})));
        attachment.add().failure();
        attachment.del().success();
    }
}

#[test]
fn a_disabled_container_interface_is_created_and_stays_down() {
    let node = Node::new();
    let config = patched(layer2(), json!({"disableContainerInterface": true}));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    let link = container.link("eth0").unwrap();
    assert!(!link["flags"].as_array().unwrap().iter().any(|flag| flag == "UP"), "{link}");
    let addresses = container.json(&["ip", "-j", "addr", "show", "dev", "eth0"]);
    assert_eq!(addresses[0]["addr_info"], json!([]));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn a_disabled_container_interface_can_have_no_ipam() {
    let node = Node::new();
    let container = node.container();
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"disableContainerInterface": true}));
    let attachment = Attachment::new(&node, &container, config);
    attachment.add().fails_with(7, "cannot use IPAM when DisableContainerInterface flag is set");
    assert_eq!(node.reservations("net1"), []);
    attachment.del().success();
}

#[test]
fn every_veth_has_the_mark_of_its_attachment() {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &layer2(), 1).remove(0);
    let link = node.link(host_end(&result, "br0")).unwrap();
    assert_eq!(link["ifalias"], format!("cni:net1/{}/eth0", container.id));
    attachment.del_with(&result).success();
}

#[test]
fn a_mark_too_long_for_the_kernel_is_shortened() {
    let node = Node::new();
    let container = node.container();
    let mut attachment = Attachment::new(&node, &container, patched(layer2(), json!({"name": "n".repeat(200)})));
    attachment.id = "i".repeat(200);
    let result = attachment.add().success();
    let alias = node.link(host_end(&result, "br0")).unwrap()["ifalias"].as_str().unwrap().to_owned();
    assert!(alias.starts_with("cni:nnn") && alias.len() <= 255, "{alias}");
    container.unlink();
    attachment.del().success();
    assert_eq!(node.ports("br0"), Vec::<String>::new(), "found by its mark");
}
