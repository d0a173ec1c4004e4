//! Tests a second ADD of one attachment, into another namespace, while the first ADD's interface
//! exists.

use std::time::{Duration, Instant};

use cni_testkit::{Attachment, Container, Node, go_bin_dir, probe, require};
use conformance::{attach, bridge, host_end, layer2, patched};
use serde_json::{Value, json};

use super::chained::made_before;

fn config(node: &Node) -> Value {
    patched(bridge(node, &["10.1.0.0/24"]), json!({"macspoofchk": true}))
}

fn pings(container: &Container, wait: &str) -> bool {
    container.run(&["ping", "-c1", wait, "10.1.0.1"]).ok
}

fn links(node: &Node) -> String {
    node.exec(&["ip", "-br", "link"])
}

#[test]
fn with_macspoofchk_it_is_refused_before_the_first_change() {
    require!(probe::nft_bridge());
    for reuse in [false, true] {
        let node = Node::new();
        let config = patched(config(&node), json!({"ipam": {"reuse": reuse}}));
        let (container, first, result) = attach(&node, &config, 1).remove(0);
        let other = node.container();
        // On a bridge that does not exist yet, so that any change shows.
        let second = first.clone().netns(other.netns()).config(patched(config, json!({"bridge": "br1"})));
        let before = (node.ruleset(), links(&node), node.reservations("net1"));
        let failure = second.add().failure();
        assert_eq!(failure.code, Some(102), "{failure:?}");
        assert!(failure.msg.contains(host_end(&result, "br0")), "{failure:?}");
        assert_eq!((node.ruleset(), links(&node), node.reservations("net1")), before, "reuse {reuse}");
        assert!(other.link("eth0").is_none());
        first.check(&result).success();
        container.exec(&["ip", "link", "set", "eth0", "address", "02:de:ad:00:00:01"]);
        assert!(!pings(&container, "-W1"), "with a stolen MAC\n{}", node.ruleset());
        first.del_with(&result).success();
        assert!(!node.ruleset().contains("macspoofchk"), "{}", node.ruleset());
    }
}

#[test]
fn an_interface_made_without_macspoofchk_counts_too() {
    require!(probe::nft_bridge());
    let node = Node::new();
    let without = patched(config(&node), json!({"macspoofchk": false, "ipam": {"reuse": true}}));
    let (_container, first, result) = attach(&node, &without, 1).remove(0);
    let other = node.container();
    let second = first.clone().netns(other.netns()).config(patched(without, json!({"macspoofchk": true})));
    assert_eq!(second.add().failure().code, Some(102));
    first.del_with(&result).success();
    let result = second.add().success();
    second.del_with(&result).success();
}

#[test]
fn the_rules_of_gos_living_interface_are_not_replaced() {
    require!(probe::nft_bridge());
    require!(probe::go_plugins());
    require!(probe::tool("nft"));
    let node = Node::new();
    let container = node.container();
    let go = Attachment::new(&node, &container, config(&node)).by(go_bin_dir());
    let result = go.add().success();
    let other = node.container();
    let reuse = patched(config(&node), json!({"ipam": {"reuse": true}}));
    let second = Attachment::new(&node, &container, reuse).netns(other.netns());
    let before = (node.ruleset(), links(&node), node.reservations("net1"));
    let failure = second.add().failure();
    assert_eq!(failure.code, Some(102), "{failure:?}");
    assert_eq!((node.ruleset(), links(&node), node.reservations("net1")), before);
    // The runtime's DEL of the refused ADD finds no interface of its own. The address is released:
    // IPAM knows no namespace.
    second.del().success();
    assert_eq!((node.ruleset(), links(&node)), (before.0, before.1));
    go.del_with(&result).success();
}

#[test]
fn with_macspoofchk_it_succeeds_once_the_namespace_has_gone() {
    require!(probe::nft_bridge());
    let node = Node::new();
    let config = patched(config(&node), json!({"ipam": {"reuse": true}}));
    let (container, first, _) = attach(&node, &config, 1).remove(0);
    container.destroy();
    let other = node.container();
    let second = first.clone().netns(other.netns());
    // The interface is removed after its namespace, which a process that a test just started may
    // hold a moment longer.
    let deadline = Instant::now() + cni_testkit::patience(Duration::from_secs(10));
    let result = loop {
        let outcome = second.add();
        if outcome.status == Some(0) {
            break outcome.success();
        }
        assert_eq!(outcome.failure().code, Some(102), "{}", outcome.report());
        assert!(Instant::now() < deadline, "{}", outcome.report());
    };
    assert!(pings(&other, "-w10"));
    second.check(&result).success();
    other.exec(&["ip", "link", "set", "eth0", "address", "02:de:ad:00:00:01"]);
    assert!(!pings(&other, "-W1"), "with a stolen MAC\n{}", node.ruleset());
    second.del_with(&result).success();
    assert!(!node.ruleset().contains("macspoofchk"), "{}", node.ruleset());
}

#[test]
fn chained_it_leaves_the_rules_of_the_first_port() {
    require!(probe::nft_bridge());
    let node = Node::new();
    let container = node.container();
    let prev = made_before(&node, &container);
    let config = patched(layer2(), json!({"macspoofchk": true}));
    let first = Attachment::new(&node, &container, config.clone());
    let result = first.add_after(&prev).success();
    let other = node.container();
    let netns = other.netns().to_str().unwrap();
    node.exec(&["ip", "link", "add", "host9", "type", "veth", "peer", "name", "eth0", "netns", netns]);
    let prev = json!({
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "host9"}, {"name": "eth0", "sandbox": netns}],
    });
    let second = first.clone().netns(other.netns());
    let before = node.ruleset();
    let failure = second.add_after(&prev).failure();
    assert_eq!(failure.code, Some(102), "{failure:?}");
    assert_eq!(node.ruleset(), before);
    assert!(node.link("host9").unwrap()["master"].is_null());
    first.check(&result).success();
    first.del_with(&result).success();
    assert!(!node.ruleset().contains("macspoofchk"), "{}", node.ruleset());
    for name in ["host0", "host9"] {
        node.exec(&["ip", "link", "del", name]);
    }
}

/// A failed ADD must not remove what an earlier plugin put on the interface, nor its bridge.
#[test]
fn chained_a_failed_add_leaves_what_was_there_before() {
    let node = Node::new();
    let container = node.container();
    let mut prev = made_before(&node, &container);
    node.exec(&["ip", "link", "add", "br0", "up", "type", "bridge"]);
    node.exec(&["ip", "link", "set", "host0", "master", "br0", "alias", "by the earlier plugin"]);
    container.exec(&["ip", "addr", "add", "10.1.0.2/24", "dev", "eth0"]);
    prev["ips"] = json!([{"address": "10.1.0.2/24", "interface": 1}]);
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"]));
    // IPAM hands out the address that the interface has.
    attachment.add_after(&prev).failure();
    let port = node.link("host0").unwrap();
    assert_eq!((&port["master"], &port["ifalias"]), (&json!("br0"), &json!("by the earlier plugin")), "{port}");
    assert_eq!(container.addresses("eth0"), ["10.1.0.2/24"]);
    assert_eq!(node.reservations("net1"), []);
    let call = attachment.clone().config(layer2()).invocation("ADD", Some(&prev));
    assert_ne!(call.with_closed_stdout().run().status, Some(0));
    let port = node.link("host0").unwrap();
    assert_eq!((&port["master"], &port["ifalias"]), (&json!("br0"), &json!("by the earlier plugin")), "{port}");
    node.exec(&["ip", "link", "del", "host0"]);
}
