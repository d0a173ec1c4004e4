//! A runtime's pid may have been reused: `CNI_NETNS` may be the host's own namespace. Nothing in it
//! may be touched.

use cni_testkit::{Attachment, Node};
use conformance::{bridge, host_local, loopback};

const TEXT: &str = "plugin's netns and netns from CNI_NETNS should not be the same";

#[test]
fn add_into_the_host_s_namespace_is_refused_before_any_work() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"])).netns(node.netns());
    let outcome = attachment.add();
    assert_eq!(outcome.fails_with(8, TEXT).code, Some(8));
    assert!(node.link("eth0").is_none() && node.link("br0").is_none());
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn check_in_the_host_s_namespace_is_refused() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, loopback()).netns(node.netns());
    assert_eq!(attachment.invocation("CHECK", None).run().failure().code, Some(8));
}

#[test]
fn del_in_the_host_namespace_leaves_it_alone_and_cleans_up() {
    let node = Node::new();
    let container = node.container();
    node.exec(&["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "uplink"]);
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"]));
    let result = attachment.add().success();

    let outcome = attachment.clone().netns(node.netns()).del_with(&result);
    assert_eq!(outcome.fails_with(8, TEXT).code, Some(8));
    assert!(node.link("eth0").is_some(), "the host's own eth0 is gone\n{}", outcome.report());
    assert_eq!(node.reservations("net1"), [], "what is found by key is still removed");

    attachment.del_with(&result).success();
    node.exec(&["ip", "link", "del", "eth0"]);
}

#[test]
fn del_of_loopback_in_the_host_s_namespace_leaves_lo_up() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, loopback()).netns(node.netns());
    assert_eq!(attachment.del().failure().code, Some(8));
    let lo = node.link("lo").unwrap();
    assert!(lo["flags"].as_array().unwrap().iter().any(|flag| flag == "UP"), "{lo}");
}

#[test]
fn the_runtime_may_override_the_guard() {
    for value in ["1", "true", "TRUE"] {
        let node = Node::new();
        let container = node.container();
        let attachment = Attachment::new(&node, &container, loopback()).netns(node.netns());
        let call = attachment.invocation("ADD", None).env("CNI_NETNS_OVERRIDE", value);
        call.run().success();
    }
}

#[test]
fn other_values_do_not_override_the_guard() {
    let node = Node::new();
    let container = node.container();
    for value in ["0", "yes", ""] {
        let attachment = Attachment::new(&node, &container, loopback()).netns(node.netns());
        let call = attachment.invocation("ADD", None).env("CNI_NETNS_OVERRIDE", value);
        assert_eq!(call.run().failure().code, Some(8));
    }
}

#[test]
fn host_local_del_in_the_host_namespace_releases_the_address() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, host_local(&node, &["10.1.0.0/24"]));
    attachment.add().success();
    let outcome = attachment.netns(node.netns()).del();
    assert_eq!(outcome.failure().code, Some(8), "{}", outcome.report());
    assert_eq!(node.reservations("net1"), []);
}
