//! `dummy`: an interface with addresses that drops all packets.

use cni_testkit::{Attachment, Container, Node, bin_dir, go_bin_dir, probe, require};
use conformance::{VERSION, attach, ipam, patched};
use serde_json::{Value, json};

fn network(node: &Node) -> Value {
    json!({"cniVersion": VERSION, "name": "net1", "type": "dummy", "ipam": ipam(node, &["10.1.0.0/24", "fd00:1::/64"])})
}

fn kind(container: &Container) -> Value {
    container.link("eth0").unwrap()["linkinfo"]["info_kind"].clone()
}

#[test]
fn without_ipam_it_is_refused_before_anything_is_opened() {
    let node = Node::new();
    let container = node.container();
    let config = patched(network(&node), json!({"ipam": null}));
    let failure = Attachment::new(&node, &container, config).netns("/nonexistent").add().failure();
    assert_eq!(failure.msg, "dummy interface requires an IPAM configuration");
}

#[test]
fn the_interface_is_up_with_its_addresses_until_del() {
    require!(probe::dummy());
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &network(&node), 1).remove(0);
    assert_eq!(result["interfaces"].as_array().unwrap().len(), 1);
    assert_eq!((kind(&container), result["ips"][1]["interface"].as_u64()), (json!("dummy"), Some(0)));
    let addresses = container.addresses("eth0");
    assert!(["10.1.0.2/24", "fd00:1::2/64"].iter().all(|one| addresses.iter().any(|is| is == one)), "{addresses:?}");
    // What a host sends to itself goes over lo, whichever interface has the address.
    container.exec(&["ip", "link", "set", "lo", "up"]);
    container.ping("10.1.0.2");
    attachment.check(&result).success();
    container.exec(&["ip", "link", "set", "eth0", "down"]);
    assert_eq!(attachment.check(&result).failure().msg, "Interface eth0 is down");
    attachment.del_with(&result).success();
    attachment.del_with(&result).success();
    assert!(container.link("eth0").is_none());
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn del_needs_neither_a_result_nor_a_namespace() {
    require!(probe::dummy());
    let node = Node::new();
    let all = attach(&node, &network(&node), 2);
    all[0].1.del().success();
    assert!(all[0].0.link("eth0").is_none());
    all[1].1.clone().netns("").del().success();
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn an_add_that_fails_leaves_nothing() {
    require!(probe::dummy());
    let node = Node::new();
    let container = node.container();
    let config = patched(network(&node), json!({"ipam": {"ranges": []}}));
    let attachment = Attachment::new(&node, &container, config);
    attachment.add().failure();
    assert!(container.link("eth0").is_none());
    let attachment = attachment.config(network(&node));
    let result = attachment.add().success();
    attachment.add().fails_naming(102, &["eth0"]);
    assert_eq!(kind(&container), "dummy");
    attachment.del_with(&result).success();
}

#[test]
fn a_foreign_interface_stays() {
    require!(probe::dummy());
    let node = Node::new();
    let container = node.container();
    container.exec(&["ip", "link", "add", "eth0", "type", "bridge"]);
    let attachment = Attachment::new(&node, &container, network(&node));
    attachment.add().fails_naming(102, &["eth0"]);
    attachment.del().success();
    assert_eq!(kind(&container), "bridge");
    container.ip(&["link del eth0", "link add eth0 type dummy"]);
    let interface = json!({"name": "eth0", "mac": "02:00:00:00:00:77", "sandbox": container.netns()});
    attachment.del_with(&json!({"cniVersion": VERSION, "interfaces": [interface]})).success();
    assert_eq!(kind(&container), "dummy");
    assert_eq!(node.reservations("net1"), []);
}

/// Before specification 0.4.0 a DEL has no result, and Go's interfaces have no mark.
#[test]
fn what_go_added_is_deleted_without_a_result() {
    require!(probe::dummy());
    require!(probe::go_plugins());
    let node = Node::new();
    let container = node.container();
    let config = patched(network(&node), json!({"cniVersion": "0.3.1"}));
    let attachment = Attachment::new(&node, &container, config).by(go_bin_dir());
    attachment.add().success();
    attachment.by(bin_dir()).del().success();
    assert!(container.link("eth0").is_none());
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn gc_and_status_reach_ipam() {
    require!(probe::dummy());
    let node = Node::new();
    let config = patched(network(&node), json!({"cniVersion": "1.1.0"}));
    let all = attach(&node, &config, 2);
    let keep = &all[1].1;
    keep.status().success();
    keep.gc(&[(&keep.id, "eth0")]).success();
    assert_eq!(node.reservations("net1").len(), 2);
    keep.check(&all[1].2).success();
    for (_, attachment, result) in &all {
        attachment.del_with(result).success();
    }
}
