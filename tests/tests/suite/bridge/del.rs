//! DEL: repeated, without a namespace, after a partial one. It always cleans up and succeeds.

use cni_testkit::{Attachment, Container, Node, Outcome};
use conformance::{attach, bridge, host_end, layer2, patched};
use serde_json::{Value, json};

fn nothing_left(node: &Node) -> bool {
    node.reservations("net1").is_empty() && node.ports("br0").is_empty()
}

#[test]
fn del_removes_both_ends_and_the_address() {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24", "fd00:1::/64"]), 1).remove(0);
    attachment.del_with(&result).success();
    assert!(container.link("eth0").is_none() && node.link(host_end(&result, "br0")).is_none());
    assert!(nothing_left(&node));
}

#[test]
fn the_second_del_succeeds() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    attachment.del_with(&result).success();
    attachment.del_with(&result).success();
    attachment.del().success();
}

#[test]
fn del_without_an_earlier_add_succeeds() {
    let node = Node::new();
    let container = node.container();
    for config in [bridge(&node, &["10.1.0.0/24"]), layer2()] {
        Attachment::new(&node, &container, config).del().success();
    }
    assert!(node.link("br0").is_none(), "DEL makes nothing");
}

#[test]
fn del_without_prev_result_cleans_up() {
    let node = Node::new();
    let (container, attachment, _) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    attachment.del().success();
    assert!(nothing_left(&node) && container.link("eth0").is_none());
}

#[test]
fn del_after_the_namespace_has_gone_releases_the_address() {
    for path in [None, Some("")] {
        let node = Node::new();
        let (container, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
        container.destroy();
        let attachment = match path {
            Some(path) => attachment.netns(path),
            None => attachment,
        };
        attachment.del_with(&result).success();
        assert_eq!(node.reservations("net1"), []);
    }
}

/// The namespace still exists at an unknown path: the host end is found by its mark.
#[track_caller]
fn cleans_from_the_host_side(netns: Option<&str>, prev: bool) {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    let attachment = match netns {
        Some(path) => attachment.netns(path),
        None => {
            container.unlink();
            attachment
        }
    };
    let outcome = if prev { attachment.del_with(&result) } else { attachment.del() };
    outcome.success();
    assert!(nothing_left(&node), "{}", outcome.report());
    assert!(container.link("eth0").is_none());
}

#[test]
fn del_with_an_empty_namespace_removes_the_link() {
    cleans_from_the_host_side(Some(""), true);
    cleans_from_the_host_side(Some(""), false);
}

#[test]
fn del_with_a_missing_namespace_file_removes_the_link() {
    cleans_from_the_host_side(None, true);
}

#[test]
fn del_with_an_impossible_namespace_path_removes_the_link() {
    let ring = tempfile::tempdir().unwrap();
    let ring = ring.path().join("ring");
    std::os::unix::fs::symlink(&ring, &ring).unwrap();
    let long = format!("/{}", "n".repeat(256));
    for path in [ring.to_str().unwrap(), &long] {
        cleans_from_the_host_side(Some(path), true);
        let node = Node::new();
        let attachment = Attachment::new(&node, &node.container(), layer2()).netns(path);
        attachment.add().fails_with(4, "failed to open netns");
    }
}

#[test]
fn del_with_a_plain_file_as_namespace_removes_the_link() {
    cleans_from_the_host_side(Some("/etc/hostname"), true);
}

/// The host end was renamed, and the container has no CNI_IFNAME.
#[track_caller]
fn cleans_what_was_renamed(clean: impl FnOnce(&Container, Attachment<'_>, &Value) -> Outcome) {
    let node = Node::new();
    let config = bridge(&node, &["10.1.0.0/24"]);
    let [(container, attachment, result), (_c, neighbour, neighbours)] =
        <[_; 2]>::try_from(attach(&node, &config, 2)).unwrap();
    let name = host_end(&result, "br0");
    node.exec(&["ip", "link", "set", name, "down"]);
    node.exec(&["ip", "link", "set", name, "name", "renamed0"]);
    node.exec(&["ip", "link", "set", "renamed0", "up"]);
    let outcome = clean(&container, attachment, &result);
    outcome.success();
    assert!(node.link("renamed0").is_none(), "it still answers at an address that is free: {}", outcome.report());
    assert!(container.link("eth0").is_none() && container.link("inner0").is_none());
    assert_eq!(node.ports("br0"), [host_end(&neighbours, "br0")]);
    assert_eq!(node.reservations("net1").len(), 1);
    neighbour.check(&neighbours).success();
    neighbour.del_with(&neighbours).success();
}

#[test]
fn del_without_a_namespace_finds_a_host_end_that_was_renamed() {
    cleans_what_was_renamed(|_, attachment, result| attachment.netns("").del_with(result));
    cleans_what_was_renamed(|_, attachment, _| attachment.netns("").del());
}

#[test]
fn del_finds_the_link_if_both_ends_were_renamed() {
    cleans_what_was_renamed(|container, attachment, result| {
        container.exec(&["ip", "link", "set", "eth0", "down"]);
        container.exec(&["ip", "link", "set", "eth0", "name", "inner0"]);
        attachment.del_with(result)
    });
}

#[test]
fn gc_finds_a_host_end_that_was_renamed() {
    cleans_what_was_renamed(|_, attachment, _| {
        let config = patched(attachment.config.clone(), json!({"cniVersion": "1.1.0"}));
        attachment.config(config).gc(&[("container-1", "eth0")])
    });
}

#[test]
fn gc_leaves_links_of_a_kind_that_no_plugin_creates() {
    let node = Node::new();
    node.ip(&["link add other0 type bridge", "link set other0 alias cni:net1/old/eth0"]);
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"cniVersion": "1.1.0"}));
    Attachment::new(&node, &node.container(), config).gc(&[]).success();
    assert!(node.link("other0").is_some());
    node.exec(&["ip", "link", "del", "other0"]);
}

#[test]
fn del_with_a_path_that_was_unmounted_releases_the_address() {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    container.unmount();
    attachment.del_with(&result).success();
    assert!(nothing_left(&node));
}

#[test]
fn del_without_cni_netns_cleans_up() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    attachment.invocation("DEL", Some(&result)).without("CNI_NETNS").run().success();
    assert!(nothing_left(&node));
}

#[test]
fn del_of_a_partial_attachment_removes_the_rest() {
    let node = Node::new();
    let config = bridge(&node, &["10.1.0.0/24"]);
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    container.exec(&["ip", "link", "del", "eth0"]);
    attachment.del_with(&result).success();
    assert!(nothing_left(&node), "the link was gone, the address was not");

    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    node.plugin("host-local").command("DEL").container(&container).config(&config).run().success();
    attachment.del_with(&result).success();
    assert!(nothing_left(&node), "the address was gone, the link was not");

    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    node.exec(&["ip", "link", "del", "br0"]);
    attachment.del_with(&result).success();
    assert!(nothing_left(&node), "the bridge was gone");
    assert!(node.link("br0").is_none(), "DEL makes nothing");
}

#[test]
fn a_failing_ipam_plugin_does_not_keep_del_from_the_link() {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    let broken = patched(attachment.config.clone(), json!({"ipam": {"type": "not-there"}}));
    attachment.clone().config(broken).del_with(&result).failure();
    assert!(container.link("eth0").is_none());
    assert_eq!(node.ports("br0"), Vec::<String>::new());
    attachment.del_with(&result).success();
}

#[test]
fn del_leaves_an_interface_that_is_not_a_veth() {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    container.exec(&["ip", "link", "del", "eth0"]);
    container.exec(&["ip", "link", "add", "eth0", "type", "bridge"]);
    attachment.del_with(&result).success();
    assert!(container.link("eth0").is_some(), "the bridge was deleted");
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn del_leaves_an_unmarked_veth_with_another_mac() {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    container.exec(&["ip", "link", "del", "eth0"]);
    container.exec(&["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "other"]);
    attachment.del_with(&result).success();
    assert!(container.link("eth0").is_some());
    container.exec(&["ip", "link", "del", "eth0"]);
}

#[test]
fn del_leaves_the_other_interfaces_of_the_container() {
    let node = Node::new();
    let (container, eth0, one) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    let eth1 = eth0.clone().ifname("eth1");
    let two: Value = eth1.add().success();
    eth0.netns("").del_with(&one).success();
    assert!(container.link("eth1").is_some());
    assert_eq!(node.reservations("net1").len(), 1);
    eth1.check(&two).success();
    eth1.del_with(&two).success();
}

#[test]
fn del_needs_only_the_names_of_the_attachment() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    let changed = json!({"mtu": -5, "hairpinMode": true, "promiscMode": true, "bridge": "other0",
                         "ipam": {"ranges": [[{"subnet": "10.1.0.9/24"}]]}});
    let changed = patched(attachment.config.clone(), changed);
    attachment.clone().config(changed).del_with(&result).success();
    assert!(nothing_left(&node));
    assert!(node.link("other0").is_none());
}
