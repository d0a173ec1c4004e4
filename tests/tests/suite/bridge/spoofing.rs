//! `macspoofchk`: a container can only send with its own MAC.

use cni_testkit::{Attachment, Container, Node, probe, require, unprovoked};
use conformance::{VERSION, attach, bridge, host_end, patched};
use serde_json::{Value, json};

fn config(node: &Node) -> Value {
    patched(bridge(node, &["10.1.0.0/24"]), json!({"macspoofchk": true}))
}

fn pings(container: &Container, wait: &str) -> bool {
    container.run(&["ping", "-c1", wait, "10.1.0.1"]).ok
}

#[test]
fn a_frame_with_another_mac_is_dropped() {
    require!(probe::nft_bridge());
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &config(&node), 1).remove(0);
    assert!(pings(&container, "-w10"), "with its own MAC");
    container.exec(&["ip", "link", "set", "eth0", "address", "02:de:ad:00:00:01"]);
    assert!(!pings(&container, "-W1"), "with a stolen one\n{}", node.ruleset());
    attachment.del_with(&result).success();
}

#[test]
fn the_rules_are_where_go_looks_for_them() {
    require!(probe::nft_bridge());
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &config(&node), 1).remove(0);
    let rules = node.ruleset();
    let id = format!("{}-eth0", container.id);
    for part in [
        "table bridge nat",
        "chain PREROUTING",
        "type filter hook prerouting priority dstnat; policy accept;",
        &format!("chain cni-br-iface-{id} {{"),
        &format!("chain cni-br-iface-{id}-mac {{"),
        &format!("iifname \"{}\" jump cni-br-iface-{id} comment \"macspoofchk-{id}\"", host_end(&result, "br0")),
    ] {
        assert!(rules.contains(part), "`{part}` is missing from\n{rules}");
    }
    attachment.del_with(&result).success();
    assert!(!node.ruleset().contains("macspoofchk"), "{}", node.ruleset());
}

#[test]
fn del_without_a_namespace_removes_the_rules() {
    require!(probe::nft_bridge());
    for gone in ["", "/nowhere/ns"] {
        let node = Node::new();
        let (container, attachment, result) = attach(&node, &config(&node), 1).remove(0);
        container.destroy();
        attachment.netns(gone).del_with(&result).success();
        assert!(!node.ruleset().contains("macspoofchk"), "{}", node.ruleset());
    }
}

#[test]
fn del_removes_the_rules_after_the_key_was_removed() {
    require!(probe::nft_bridge());
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &config(&node), 1).remove(0);
    attachment.config(patched(config(&node), json!({"macspoofchk": false}))).del_with(&result).success();
    assert!(!node.ruleset().contains("macspoofchk"), "{}", node.ruleset());
}

#[test]
fn del_of_one_leaves_the_rules_of_the_other() {
    require!(probe::nft_bridge());
    let node = Node::new();
    let mut all = attach(&node, &config(&node), 2);
    let (_c, first, result) = all.remove(0);
    first.del_with(&result).success();
    let (container, second, result) = all.remove(0);
    assert!(node.ruleset().contains(&format!("macspoofchk-{}-eth0", container.id)));
    second.check(&result).success();
    second.del_with(&result).success();
}

#[test]
fn a_del_of_another_network_leaves_the_spoof_rules() {
    require!(probe::nft_bridge());
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &config(&node), 1).remove(0);
    let web = patched(bridge(&node, &["10.2.0.0/24"]), json!({"name": "web", "bridge": "br1"}));
    let other = attachment.clone().config(web);
    let before = node.ruleset();
    // Late, and as a runtime sends it after an ADD that was refused because the interface is there.
    other.del().success();
    assert_eq!(node.ruleset(), before);
    other.add().failure();
    let outcome = other.del();
    outcome.success();
    assert_eq!(node.ruleset(), before);
    let named = outcome.stderr.contains("spoof rules were not removed: they belong to cni:net1/");
    assert!(named, "{}", outcome.report());
    assert!(pings(&container, "-w10"));
    attachment.del_with(&result).success();
    assert!(!node.ruleset().contains("macspoofchk"), "{}", node.ruleset());
}

#[test]
fn a_second_attachment_with_the_same_chain_names_is_refused() {
    require!(probe::nft_bridge());
    let node = Node::new();
    let container = node.container();
    let mut first = Attachment::new(&node, &container, config(&node)).ifname("eth0-x");
    first.id = "a".to_owned();
    let mut second = first.clone().ifname("x");
    second.id = "a-eth0".to_owned();
    let result = first.add().success();
    let before = node.ruleset();
    let failure = second.add().failure();
    assert_eq!(failure.code, Some(102), "{failure:?}");
    assert!(failure.msg.contains("cni:net1/a/eth0-x, host interface veth"), "{failure:?}");
    assert!(container.link("x").is_none());
    second.del().success();
    assert_eq!(node.ruleset(), before);
    // No interface uses these rules any more.
    container.exec(&["ip", "link", "del", "eth0-x"]);
    let other = second.add().success();
    assert!(node.ruleset().contains(host_end(&other, "br0")), "{}", node.ruleset());
    first.del_with(&result).success();
    second.check(&other).success();
    second.del_with(&other).success();
    assert!(!node.ruleset().contains("macspoofchk"), "{}", node.ruleset());
}

#[test]
fn check_fails_when_a_rule_is_missing() {
    require!(probe::nft_bridge());
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &config(&node), 1).remove(0);
    attachment.check(&result).success();
    node.exec(&["nft", "flush", "chain", "bridge", "nat", "PREROUTING"]);
    attachment.check(&result).failure();
    attachment.del_with(&result).success();
}

/// bridge allows only the MAC that it gave the interface; tuning after it sets another one.
#[test]
fn check_names_the_mac_that_the_rule_pins() {
    require!(probe::nft_bridge());
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &config(&node), 1).remove(0);
    let pinned = container.link("eth0").unwrap()["address"].as_str().unwrap().to_owned();
    let tuning = json!({"cniVersion": VERSION, "name": "net1", "type": "tuning", "mac": "02:00:00:00:00:aa",
                        "dataDir": node.dir().join("tuning")});
    let tuning = attachment.clone().config(tuning);
    let result = tuning.add_after(&result).success();
    let failure = attachment.check(&result).failure();
    assert_eq!(failure.code, Some(101), "{failure:?}");
    let says = format!("spoof rule pins MAC {pinned}, but eth0 has MAC 02:00:00:00:00:aa");
    assert!(failure.msg.contains(&says), "{failure:?}");
    tuning.del_with(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn a_long_container_id_works() {
    require!(probe::nft_bridge());
    let node = Node::new();
    let container = node.container();
    let mut attachment = Attachment::new(&node, &container, config(&node));
    attachment.id = "x".repeat(100);
    let result = attachment.add().success();
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn missing_nf_tables_for_bridges_fails_before_any_change() {
    if probe::nft_bridge().is_ok() {
        unprovoked("this kernel has nf_tables in the bridge family: nothing to refuse");
        return;
    }
    let node = Node::new();
    let container = node.container();
    let failure = Attachment::new(&node, &container, config(&node)).add().failure();
    assert_eq!(failure.code, Some(2), "{failure:?}");
    assert!(node.link("br0").is_none());
}
