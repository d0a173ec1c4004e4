//! The node's allow-list, checked before any change.

use std::fs;

use cni_testkit::{Node, Outcome, skip};
use serde_json::json;

use super::{ARP_FILTER, backups, call, pod, prev, state, tuned};

const PATH: &str = "/etc/cni/tuning/allowlist.conf";

/// A node with a private /etc. `None` if the mount is not permitted.
fn node() -> Option<Node> {
    let node = Node::new();
    if !node.run(&["mount", "-t", "tmpfs", "tmpfs", "/etc"]).ok {
        return None;
    }
    node.enter(|| fs::create_dir_all("/etc/cni/tuning").unwrap());
    Some(node)
}

fn write(node: &Node, list: &[u8]) {
    node.enter(|| fs::write(PATH, list).unwrap());
}

fn add(node: &Node, key: &str) -> (Outcome, String) {
    let container = pod(node);
    let keys = format!(r#""mtu":1400,"sysctl":{{"{key}":"1"}}"#);
    let outcome = call(node, &container, "ADD", &keys).run();
    let value = container.sysctl(ARP_FILTER);
    let changed = state(&container).1 == 1400;
    assert_eq!(changed, outcome.status == Some(0), "all or nothing\n{}", outcome.report());
    call(node, &container, "DEL", &keys).run().success();
    assert_eq!(backups(node), Vec::<String>::new());
    (outcome, value)
}

macro_rules! private_node {
    () => {
        match node() {
            Some(node) => node,
            None => skip!("no private /etc can be mounted here"),
        }
    };
}

#[test]
fn without_a_list_everything_below_net_is_allowed() {
    let node = private_node!();
    assert_eq!(add(&node, "net.ipv4.conf.IFNAME.arp_filter").1, "1");
}

#[test]
fn a_key_that_matches_in_either_spelling_is_set() {
    let node = private_node!();
    for list in [
        r"^net\.ipv4\.conf\.IFNAME\.[a-z_]*$",
        "^net/ipv4/conf/IFNAME/arp_filter$",
        "arp_filter",
        "# a comment\n\n   ^net.ipv4.conf   \r\n",
        "^net.ipv6\n^net.ipv4",
    ] {
        write(&node, list.as_bytes());
        for key in ["net.ipv4.conf.IFNAME.arp_filter", "net/ipv4/conf/IFNAME/arp_filter"] {
            let (outcome, value) = add(&node, key);
            assert_eq!(value, "1", "{list:?} {}", outcome.report());
        }
    }
}

#[test]
fn a_key_that_does_not_match_is_refused_before_any_change() {
    let node = private_node!();
    for (list, key) in [
        ("", "net.ipv4.conf.IFNAME.arp_filter"),
        ("# net.ipv4\n", "net.ipv4.conf.IFNAME.arp_filter"),
        (r"^net\.ipv4\.conf\.IFNAME\.[a-z_]*$", "net.ipv4.conf.eth0.arp_filter"),
        (r"^net\.ipv4\.conf\.IFNAME\.arp_notify$", "net/ipv4/conf/IFNAME/arp_filter"),
        ("^ipv4", "net.ipv4.conf.eth0.arp_filter"),
    ] {
        write(&node, list.as_bytes());
        let (outcome, value) = add(&node, key);
        outcome.fails_with(7, &format!("Sysctl {key} is not allowed. Only the following sysctls are allowed: ["));
        assert_eq!(value, "0");
    }
}

#[test]
fn one_refused_key_prevents_all_writes() {
    let node = private_node!();
    write(&node, b"arp_filter\n");
    let container = pod(&node);
    let keys = r#""sysctl":{"net.ipv4.conf.IFNAME.arp_filter":"1","net.ipv4.conf.IFNAME.arp_notify":"1"}"#;
    let outcome = call(&node, &container, "ADD", keys).run();
    outcome.fails_with(7, "Sysctl net.ipv4.conf.IFNAME.arp_notify is not allowed.");
    assert_eq!(container.sysctl(ARP_FILTER), "0");
}

#[test]
fn sysctls_in_args_are_checked_too() {
    let node = private_node!();
    write(&node, b"arp_filter\n");
    let container = pod(&node);
    let keys = json!({"args": {"cni": {"sysctl": {"net.ipv4.conf.IFNAME.arp_notify": "1"}}}});
    tuned(&node, &container, keys).add_after(&prev(&container)).fails_naming(7, &["arp_notify", "not allowed"]);
}

#[test]
fn no_interface_s_name_makes_a_permitted_key_another_value() {
    let node = private_node!();
    let container = node.container();
    container.exec(&["ip", "link", "add", "ipv4", "type", "veth", "peer", "name", "peer0"]);
    write(&node, br"^net\.[A-Z]+\.ip_forward$");
    let attachment = tuned(&node, &container, json!({"sysctl": {"net.IFNAME.ip_forward": "1"}})).ifname("ipv4");
    let before = container.sysctl("net/ipv4/ip_forward");
    attachment.add_after(&prev(&container)).fails_naming(7, &["not allowed"]);
    assert_eq!(container.sysctl("net/ipv4/ip_forward"), before);
}

#[test]
fn a_bad_line_is_named() {
    let node = private_node!();
    for (list, line) in
        [(&b"arp_filter\n# (\n(\n"[..], "line 3 "), (b"[\n", "line 1 "), (b"arp_filter\n\xff\n", "line 2 ")]
    {
        write(&node, list);
        let (outcome, value) = add(&node, "net.ipv4.conf.IFNAME.arp_filter");
        let failure = outcome.fails_with(7, "error parsing regexp");
        assert!(failure.msg.contains(line) && failure.msg.contains(PATH), "{failure:?}");
        assert_eq!(value, "0");
    }
}

#[test]
fn a_list_that_cannot_be_read_allows_nothing() {
    let node = private_node!();
    node.enter(|| fs::create_dir(PATH).unwrap());
    let (outcome, value) = add(&node, "net.ipv4.conf.IFNAME.arp_filter");
    outcome.fails_naming(5, &[PATH]);
    assert_eq!(value, "0");
}

#[test]
fn without_sysctls_the_list_is_not_read() {
    let node = private_node!();
    write(&node, b"(");
    let container = pod(&node);
    tuned(&node, &container, json!({"mtu": 1400})).add_after(&prev(&container)).success();
    assert_eq!(state(&container).1, 1400);
}

#[test]
fn check_and_del_do_not_read_the_list() {
    let node = private_node!();
    let container = pod(&node);
    let attachment = tuned(&node, &container, json!({"sysctl": {"net.ipv4.conf.eth0.arp_filter": "1"}}));
    let result = attachment.add_after(&prev(&container)).success();
    write(&node, b"(");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert_eq!(container.sysctl(ARP_FILTER), "0");
}
