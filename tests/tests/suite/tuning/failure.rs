//! A failed ADD leaves everything as it was, sysctls and backup included.

use std::fs;

use cni_testkit::{Container, Node};
use conformance::patched;
use serde_json::{Value, json};

use super::{ARP_FILTER, MAC, backups, call, data_dir, pod, prev, state, tuned};

fn all() -> Value {
    json!({"mac": "02:00:00:00:00:aa", "promisc": true, "allmulti": true, "txQLen": 77,
           "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}})
}

#[track_caller]
fn is_untouched(node: &Node, container: &Container) {
    assert_eq!(state(container), (MAC.to_owned(), 1500, false, false, 1000));
    assert_eq!(container.sysctl(ARP_FILTER), "0");
    assert_eq!(backups(node), Vec::<String>::new());
}

#[test]
fn a_sysctl_in_the_middle_that_the_kernel_refuses() {
    let node = Node::new();
    let container = pod(&node);
    let keys = r#""sysctl":{"net.ipv4.conf.IFNAME.arp_filter":"1","net.ipv4.conf.IFNAME.arp_announce":"2",
        "net.ipv4.ip_local_port_range":"many","net.ipv4.conf.IFNAME.arp_notify":"1"},"mtu":1400"#;
    call(&node, &container, "ADD", keys).run().failure();
    is_untouched(&node, &container);
    assert_eq!(container.sysctl("net/ipv4/conf/eth0/arp_announce"), "0");
    assert_eq!(container.sysctl("net/ipv4/conf/eth0/arp_notify"), "0");
}

#[test]
fn a_sysctl_of_which_the_kernel_stores_a_part() {
    let node = Node::new();
    let container = pod(&node);
    let before = container.sysctl("net/ipv4/tcp_rmem");
    call(&node, &container, "ADD", r#""sysctl":{"net.ipv4.tcp_rmem":"5000 60000 -5"}"#).run().failure();
    is_untouched(&node, &container);
    assert_eq!(container.sysctl("net/ipv4/tcp_rmem"), before);
}

#[test]
fn an_mtu_that_the_device_refuses() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, patched(all(), json!({"mtu": 1_000_000})));
    attachment.add_after(&prev(&container)).fails_naming(100, &["eth0", "1000000", "os error 22"]);
    is_untouched(&node, &container);
    attachment.del().success();
    is_untouched(&node, &container);
}

#[test]
fn a_result_that_is_not_read() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, all());
    let outcome = attachment.invocation("ADD", Some(&prev(&container))).with_closed_stdout().run();
    assert_ne!(outcome.status, Some(0), "{}", outcome.report());
    is_untouched(&node, &container);
}

#[test]
fn a_second_add_that_fails_leaves_what_the_first_one_made() {
    let node = Node::new();
    let container = pod(&node);
    let first = tuned(&node, &container, all());
    let result = first.add_after(&prev(&container)).success();
    let (tuned_state, file) = (state(&container), data_dir(&node).join(format!("{}_eth0.json", container.id)));
    let bytes = fs::read(&file).unwrap();
    let keys =
        json!({"mac": "02:00:00:00:00:bb", "mtu": 1_000_000, "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "0"}});
    tuned(&node, &container, keys).add_after(&prev(&container)).failure();
    assert_eq!(state(&container), tuned_state);
    assert_eq!(container.sysctl(ARP_FILTER), "1");
    assert_eq!(fs::read(&file).unwrap(), bytes);
    first.check(&result).success();
    first.del_with(&result).success();
    is_untouched(&node, &container);
}

#[test]
fn an_invalid_namespace_is_named() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, all()).netns("/nowhere/ns");
    attachment.add_after(&prev(&container)).fails_naming(4, &["/nowhere/ns", "CNI_NETNS"]);
    assert_eq!(backups(&node), Vec::<String>::new());
}

#[test]
fn the_node_s_own_namespace_is_never_tuned() {
    let node = Node::new();
    let container = pod(&node);
    let own = tuned(&node, &container, json!({"sysctl": {"net.ipv4.conf.all.arp_filter": "1"}})).netns(node.netns());
    own.add_after(&prev(&container)).fails_with(8, "plugin's netns and netns from CNI_NETNS should not be the same");
    assert_eq!(node.sysctl("net/ipv4/conf/all/arp_filter"), "0");
    // A DEL with a path that now leads to the node's namespace removes only the file.
    let attachment = tuned(&node, &container, all());
    attachment.add_after(&prev(&container)).success();
    attachment.clone().netns(node.netns()).del().failure();
    assert_eq!(backups(&node), Vec::<String>::new());
}
