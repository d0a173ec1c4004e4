//! GC removes resources without a valid attachment, keeps those with an unknown owner, and does
//! nothing without a list.

use cni_testkit::{Attachment, Container, Node, probe, require};
use conformance::{attach, bridge, host_end, host_local, loopback, patched};
use serde_json::{Value, json};

fn newest(config: Value) -> Value {
    patched(config, json!({"cniVersion": "1.1.0"}))
}

/// Calls GC with this value of the key, or without the key.
#[track_caller]
fn gc_with(node: &Node, config: &Value, valid: Option<Value>) -> cni_testkit::Outcome {
    let mut config = config.clone();
    if let Some(valid) = valid {
        config["cni.dev/valid-attachments"] = valid;
    }
    let plugin = config["type"].as_str().unwrap().to_owned();
    node.plugin(&plugin).command("GC").config(&config).run()
}

#[test]
fn reservations_of_invalid_attachments_are_released() {
    let node = Node::new();
    let all = attach(&node, &newest(host_local(&node, &["10.1.0.0/24", "fd00:1::/64"])), 3);
    let keep = &all[1].1;
    keep.gc(&[(&keep.id, "eth0")]).success();
    let left = node.reservations("net1");
    assert_eq!(left.len(), 2);
    assert!(left.iter().all(|(_, content)| content.starts_with(&keep.id)), "{left:?}");
    keep.del().success();
}

#[test]
fn another_interface_of_a_valid_container_is_not_valid() {
    let node = Node::new();
    let (_c, eth0, _) = attach(&node, &newest(host_local(&node, &["10.1.0.0/24"])), 1).remove(0);
    let eth1 = eth0.clone().ifname("eth1");
    eth1.add().success();
    eth0.gc(&[(&eth0.id, "eth0")]).success();
    assert_eq!(node.reservations("net1"), [("10.1.0.2".to_owned(), format!("{}\r\neth0", eth0.id))]);
    eth0.del().success();
}

#[test]
fn an_id_only_reservation_is_kept_for_any_interface() {
    let node = Node::new();
    let container = node.container();
    node.file("networks/net1/10.1.0.5", &container.id);
    node.file("networks/net1/10.1.0.6", "other-container");
    let attachment = Attachment::new(&node, &container, newest(host_local(&node, &["10.1.0.0/24"])));
    attachment.gc(&[(&container.id, "net7")]).success();
    assert_eq!(node.reservations("net1"), [("10.1.0.5".to_owned(), container.id.clone())]);
    attachment.del().success();
}

#[test]
fn gc_without_a_list_changes_nothing() {
    let node = Node::new();
    let config = newest(host_local(&node, &["10.1.0.0/24"]));
    let (_c, attachment, _) = attach(&node, &config, 1).remove(0);
    for valid in [None, Some(json!("all")), Some(json!({})), Some(json!(true))] {
        let outcome = gc_with(&node, &config, valid);
        assert_eq!(outcome.failure().code, Some(7), "{}", outcome.report());
        assert_eq!(node.reservations("net1").len(), 1);
    }
    attachment.del().success();
}

#[test]
fn an_empty_list_and_null_mean_that_nothing_is_valid() {
    let node = Node::new();
    let config = newest(host_local(&node, &["10.1.0.0/24"]));
    for valid in [json!([]), Value::Null] {
        let (_c, _attachment, _) = attach(&node, &config, 1).remove(0);
        gc_with(&node, &config, Some(valid)).success();
        assert_eq!(node.reservations("net1"), []);
    }
}

#[test]
fn the_older_spelling_of_the_key_is_understood() {
    let node = Node::new();
    let config = newest(host_local(&node, &["10.1.0.0/24"]));
    let all = attach(&node, &config, 2);
    let valid = json!([{"containerID": all[0].1.id, "ifname": "eth0"}]);
    gc_with(&node, &patched(config, json!({"cni.dev/attachments": valid})), None).success();
    assert_eq!(node.reservations("net1").len(), 1);
    all[0].1.del().success();
}

#[test]
fn an_invalid_attachment_fails_gc_before_any_change() {
    let node = Node::new();
    let config = newest(host_local(&node, &["10.1.0.0/24"]));
    let (_c, attachment, _) = attach(&node, &config, 1).remove(0);
    for element in
        [json!({"containerID": "x"}), json!({"ifname": "eth0"}), json!("x"), json!({"containerID": 7, "ifname": "e"})]
    {
        gc_with(&node, &config, Some(json!([{"containerID": "x", "ifname": "eth0"}, element]))).failure();
        assert_eq!(node.reservations("net1").len(), 1);
    }
    attachment.del().success();
}

#[test]
fn gc_needs_no_ranges_and_leaves_other_networks_alone() {
    let node = Node::new();
    let config = newest(host_local(&node, &["10.1.0.0/24"]));
    let other = patched(config.clone(), json!({"name": "net2"}));
    attach(&node, &config, 1);
    let (_c, kept, _) = attach(&node, &other, 1).remove(0);
    gc_with(&node, &patched(config, json!({"ipam": {"ranges": null}})), Some(json!([]))).success();
    assert_eq!((node.reservations("net1").len(), node.reservations("net2").len()), (0, 1));
    kept.del().success();
}

#[test]
fn foreign_files_survive_a_gc() {
    let node = Node::new();
    let config = newest(host_local(&node, &["10.1.0.0/24"]));
    let path = node.file("networks/net1/notes.txt", "gone-container\r\neth0");
    gc_with(&node, &config, Some(json!([]))).success();
    assert!(path.exists());
    std::fs::remove_file(path).unwrap();
}

#[test]
fn bridge_removes_links_and_addresses_of_invalid_attachments() {
    let node = Node::new();
    let config = newest(bridge(&node, &["10.1.0.0/24"]));
    let all = attach(&node, &config, 3);
    let (_, keep, result) = &all[0];
    keep.gc(&[(&keep.id, "eth0")]).success();
    assert_eq!(node.ports("br0"), [host_end(result, "br0")]);
    assert_eq!(node.reservations("net1").len(), 1, "GC is forwarded to IPAM");
    assert!(all[1].0.link("eth0").is_none());
    keep.check(result).success();
    keep.del_with(result).success();
}

#[test]
fn bridge_leaves_links_without_the_mark_of_this_network() {
    let node = Node::new();
    let config = newest(bridge(&node, &["10.1.0.0/24"]));
    node.exec(&["ip", "link", "add", "br0", "type", "bridge"]);
    node.exec(&["ip", "link", "add", "vethstranger", "master", "br0", "type", "veth", "peer", "name", "peer0"]);
    let other = patched(config.clone(), json!({"name": "net2"}));
    let (_c, kept, result) = attach(&node, &other, 1).remove(0);
    gc_with(&node, &config, Some(json!([]))).success();
    assert_eq!(node.ports("br0").len(), 2);
    kept.check(&result).success();
    kept.del_with(&result).success();
    node.exec(&["ip", "link", "del", "vethstranger"]);
}

#[test]
fn bridge_removes_spoof_rules_of_invalid_attachments() {
    require!(probe::nft_bridge());
    let node = Node::new();
    let config = newest(patched(bridge(&node, &["10.1.0.0/24"]), json!({"macspoofchk": true})));
    let all = attach(&node, &config, 2);
    let (_, keep, result) = &all[0];
    keep.gc(&[(&keep.id, "eth0")]).success();
    let rules = node.ruleset();
    assert!(rules.contains(&format!("macspoofchk-{}-eth0", keep.id)), "{rules}");
    assert!(!rules.contains(&format!("macspoofchk-{}-eth0", all[1].1.id)), "{rules}");
    keep.check(result).success();
    keep.del_with(result).success();
}

#[test]
fn a_gc_that_finds_nothing_succeeds() {
    let node = Node::new();
    for config in [host_local(&node, &["10.1.0.0/24"]), bridge(&node, &["10.1.0.0/24"]), loopback()] {
        gc_with(&node, &newest(config), Some(json!([]))).success();
    }
    assert!(node.link("br0").is_none(), "GC makes nothing");
}

#[test]
fn gc_of_loopback_changes_nothing() {
    let node = Node::new();
    let container: Container = node.container();
    let attachment = Attachment::new(&node, &container, newest(loopback()));
    let result = attachment.add().success();
    attachment.gc(&[]).success();
    attachment.check(&result).success();
}
