//! Sysctls: the file of a key, the order of writes, and refusals before any write.

use cni_testkit::{Container, Node, skip};
use serde_json::{Map, Value, json};

use super::{ARP_FILTER, backups, call, pod, prev, tuned};

fn one(key: &str, value: &str) -> Value {
    json!({"sysctl": Map::from_iter([(key.to_owned(), json!(value))])})
}

#[test]
fn both_spellings_and_the_placeholder_name_the_file() {
    for key in [
        "net.ipv4.conf.IFNAME.arp_filter",
        "net/ipv4/conf/IFNAME/arp_filter",
        "net.ipv4.conf.eth0.arp_filter",
        "net/ipv4/conf/eth0/arp_filter",
        "net.ipv4/conf.eth0/arp_filter",
    ] {
        let node = Node::new();
        let container = pod(&node);
        let attachment = tuned(&node, &container, one(key, "1"));
        let result = attachment.add_after(&prev(&container)).success();
        assert_eq!(container.sysctl(ARP_FILTER), "1", "{key}");
        assert_eq!(result, prev(&container));
        attachment.check(&result).success();
        attachment.del_with(&result).success();
        assert_eq!(container.sysctl(ARP_FILTER), "0", "{key}");
        assert_eq!(backups(&node), Vec::<String>::new());
    }
}

#[test]
fn an_interface_with_a_dot_in_its_name_is_found() {
    for key in [
        "net.ipv4.conf.IFNAME.arp_filter",
        "net/ipv4/conf/IFNAME/arp_filter",
        "net/ipv4/conf/eth0.100/arp_filter",
        "net.ipv4.conf.eth0/100.arp_filter",
    ] {
        let node = Node::new();
        let container = pod(&node);
        container.exec(&["ip", "link", "set", "eth0", "name", "eth0.100"]);
        let attachment = tuned(&node, &container, one(key, "1")).ifname("eth0.100");
        attachment.add_after(&prev(&container)).success();
        assert_eq!(container.sysctl("net/ipv4/conf/eth0.100/arp_filter"), "1", "{key}");
        attachment.del().success();
        assert_eq!(container.sysctl("net/ipv4/conf/eth0.100/arp_filter"), "0", "{key}");
    }
}

#[test]
fn sysctls_are_written_in_order_and_restored_in_reverse() {
    let (all, own) = ("net/ipv4/conf/all/forwarding", "net/ipv4/conf/eth0/forwarding");
    let all_first = r#""sysctl":{"net.ipv4.conf.all.forwarding":"1","net.ipv4.conf.IFNAME.forwarding":"0"}"#;
    let own_first = r#""sysctl":{"net.ipv4.conf.IFNAME.forwarding":"0","net.ipv4.conf.all.forwarding":"1"}"#;
    let node = Node::new();
    let container = pod(&node);
    // "all" changes every interface, so the last write wins. A random order would be wrong at
    // times.
    for _ in 0..6 {
        for (keys, expected) in [(all_first, "0"), (own_first, "1")] {
            container.set_sysctl(all, "0");
            call(&node, &container, "ADD", keys).run().success();
            assert_eq!((container.sysctl(all).as_str(), container.sysctl(own).as_str()), ("1", expected));
            call(&node, &container, "DEL", keys).run().success();
            assert_eq!((container.sysctl(all).as_str(), container.sysctl(own).as_str()), ("0", "0"));
        }
    }
}

#[test]
fn del_and_a_failed_add_restore_sysctls_in_reverse() {
    let (all, own) = ("net/ipv4/conf/all/forwarding", "net/ipv4/conf/eth0/forwarding");
    let keys = r#""sysctl":{"net.ipv4.conf.IFNAME.forwarding":"0","net.ipv4.conf.all.forwarding":"1"}"#;
    let node = Node::new();
    let container = pod(&node);
    // Restoring "all" last would overwrite the interface's own value.
    container.set_sysctl(all, "0");
    container.set_sysctl(own, "1");
    call(&node, &container, "ADD", keys).run().success();
    call(&node, &container, "DEL", keys).run().success();
    assert_eq!((container.sysctl(all).as_str(), container.sysctl(own).as_str()), ("0", "1"));
    call(&node, &container, "ADD", &format!(r#"{keys},"mtu":1000000"#)).run().failure();
    assert_eq!((container.sysctl(all).as_str(), container.sysctl(own).as_str()), ("0", "1"));
}

#[test]
fn sysctls_in_args_replace_or_follow_the_others() {
    let node = Node::new();
    let container = pod(&node);
    let keys = json!({
        "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "0", "net.ipv4.conf.IFNAME.arp_notify": "1"},
        "args": {"cni": {"sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1", "net.ipv4.conf.IFNAME.arp_announce": "2"}}},
    });
    let attachment = tuned(&node, &container, keys);
    let result = attachment.add_after(&prev(&container)).success();
    let values = || {
        ["arp_filter", "arp_notify", "arp_announce"].map(|name| container.sysctl(&format!("net/ipv4/conf/eth0/{name}")))
    };
    assert_eq!(values(), ["1", "1", "2"]);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert_eq!(values(), ["0", "0", "0"]);
}

#[test]
fn sysctls_in_args_only_do_not_crash() {
    let node = Node::new();
    let container = pod(&node);
    let keys = json!({"args": {"cni": {"sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}}}});
    let attachment = tuned(&node, &container, keys);
    let result = attachment.add_after(&prev(&container)).success();
    assert_eq!(container.sysctl(ARP_FILTER), "1");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert_eq!(container.sysctl(ARP_FILTER), "0");
}

#[track_caller]
fn is_refused_as_a_duplicate(container: &Container, node: &Node, keys: &str) {
    let outcome = call(node, container, "ADD", keys).run();
    outcome.fails_with(7, "duplicated sysctl keys are not allowed");
    call(node, container, "CHECK", keys).run().fails_with(7, "duplicated sysctl keys are not allowed");
    assert_eq!(container.sysctl(ARP_FILTER), "0");
    // An invalid configuration must not keep DEL from restoring.
    call(node, container, "DEL", keys).run().success();
}

#[test]
fn a_repeated_key_is_an_error() {
    let node = Node::new();
    let container = pod(&node);
    let twice = r#"{"net.ipv4.conf.IFNAME.arp_filter":"1","net.ipv4.conf.IFNAME.arp_filter":"1"}"#;
    is_refused_as_a_duplicate(&container, &node, &format!(r#""sysctl":{twice}"#));
    is_refused_as_a_duplicate(&container, &node, &format!(r#""args":{{"cni":{{"sysctl":{twice}}}}}"#));
}

#[test]
fn two_spellings_of_one_file_are_an_error() {
    let node = Node::new();
    let container = pod(&node);
    for other in ["net/ipv4/conf/IFNAME/arp_filter", "net.ipv4.conf.eth0.arp_filter"] {
        let twice = format!(r#""sysctl":{{"net.ipv4.conf.IFNAME.arp_filter":"1","{other}":"0"}}"#);
        is_refused_as_a_duplicate(&container, &node, &twice);
    }
}

#[test]
fn keys_outside_net_are_refused_before_any_change() {
    let node = Node::new();
    let container = pod(&node);
    let long = format!("net.{}", "x".repeat(64 << 10));
    for key in [
        "kernel.hostname",
        "kernel/hostname",
        "net.ipv4/../../kernel.hostname",
        "net/ipv4/../../kernel/hostname",
        "net/../kernel/hostname",
        "/proc/sys/net/ipv4/ip_forward",
        "/etc/hostname",
        "",
        ".",
        "net",
        "net.ipv4.\0",
        "net.ipv4.no_such_value",
        "net.ipv4",
        &long,
    ] {
        let keys = format!(
            r#""sysctl":{{"net.ipv4.conf.IFNAME.arp_filter":"1",{}:"the value"}},"mtu":1400"#,
            Value::from(key)
        );
        let outcome = call(&node, &container, "ADD", &keys).run();
        let failure = outcome.fails_naming(7, &["the value", &key[..key.len().min(40)].replace('\0', "\\0")]);
        assert!(failure.msg.len() < 1000, "{failure:?}");
        assert_eq!(container.sysctl(ARP_FILTER), "0", "{}", outcome.report());
        assert_eq!(super::state(&container).1, 1500);
        assert_eq!(backups(&node), Vec::<String>::new());
    }
}

#[test]
fn a_key_outside_net_is_refused_with_gos_text() {
    let node = Node::new();
    let container = pod(&node);
    for (key, text) in [("kernel.hostname", "kernel/hostname"), ("kernel/IFNAME.x", "kernel/eth0/x")] {
        let attachment = tuned(&node, &container, one(key, "x"));
        let said = attachment.add_after(&prev(&container)).fails_with(7, "invalid net sysctl key").msg;
        assert_eq!(said, format!("invalid net sysctl key: \"{text}\""));
    }
}

#[test]
fn an_interface_called_all_gets_no_placeholder() {
    let node = Node::new();
    let container = pod(&node);
    for ifname in ["all", "default"] {
        let attachment = tuned(&node, &container, one("net.ipv4.conf.IFNAME.arp_filter", "1")).ifname(ifname);
        attachment.add_after(&prev(&container)).fails_naming(4, &["CNI_IFNAME", ifname]);
        assert_eq!(container.sysctl(&format!("net/ipv4/conf/{ifname}/arp_filter")), "0");
    }
}

#[test]
fn a_value_that_the_kernel_refuses_is_named_with_its_errno() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, one("net.ipv4.ip_local_port_range", "many"));
    let words = ["net.ipv4.ip_local_port_range", "many", "Invalid argument (os error 22)"];
    attachment.add_after(&prev(&container)).fails_naming(100, &words);
    assert_eq!(backups(&node), Vec::<String>::new());
}

#[test]
fn a_value_that_is_not_text_is_refused() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, json!({"sysctl": {"net.ipv4.conf.IFNAME.arp_filter": 1}}));
    attachment.add_after(&prev(&container)).fails_with(6, "failed to load netconf");
}

#[test]
fn an_empty_value_writes_nothing() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, one("net.ipv4.conf.IFNAME.arp_filter", ""));
    attachment.add_after(&prev(&container)).success();
    assert_eq!(container.sysctl(ARP_FILTER), "0");
    assert_eq!(backups(&node), Vec::<String>::new());
}

#[test]
fn write_only_sysctls_are_written_and_not_saved() {
    let node = Node::new();
    let container = pod(&node);
    if !container.run(&["test", "-w", "/proc/sys/net/ipv4/route/flush"]).ok {
        skip!("no net.ipv4.route.flush in a container's namespace");
    }
    let keys = json!({"sysctl": {"net.ipv4.route.flush": "1", "net.ipv4.conf.IFNAME.arp_filter": "1"}});
    let attachment = tuned(&node, &container, keys);
    let result = attachment.add_after(&prev(&container)).success();
    let text = super::backup_of(&node, &container).to_string();
    assert!(text.contains("arp_filter") && !text.contains("flush"), "{text}");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert_eq!(container.sysctl(ARP_FILTER), "0");
}

#[test]
fn a_value_changed_by_others_since_is_left_alone() {
    let node = Node::new();
    let container = pod(&node);
    let keys = json!({"sysctl": {"net.ipv4.conf.IFNAME.arp_announce": "1", "net.ipv4.conf.IFNAME.arp_filter": "1"}});
    let attachment = tuned(&node, &container, keys);
    let result = attachment.add_after(&prev(&container)).success();
    container.set_sysctl("net/ipv4/conf/eth0/arp_announce", "2");
    let outcome = attachment.del_with(&result);
    outcome.success();
    assert_eq!(container.sysctl("net/ipv4/conf/eth0/arp_announce"), "2");
    assert_eq!(container.sysctl(ARP_FILTER), "0");
    assert!(outcome.stderr.contains("arp_announce"), "not logged: {}", outcome.report());
    assert_eq!(backups(&node), Vec::<String>::new());
}

#[test]
fn values_that_the_kernel_rewrites_are_checked_and_restored() {
    let node = Node::new();
    let container = pod(&node);
    for (path, value, reads) in [
        ("net/ipv4/ip_local_reserved_ports", "8080,8081,8082", "8080-8082"),
        ("net/ipv4/ip_local_port_range", "  20000   30000 ", "20000\t30000"),
        ("net/ipv4/ip_default_ttl", "0x20", "32"),
    ] {
        let before = container.sysctl(path);
        let attachment = tuned(&node, &container, one(path, value));
        let result = attachment.add_after(&prev(&container)).success();
        assert_eq!(container.sysctl(path), reads);
        attachment.check(&result).success();
        attachment.del_with(&result).success();
        assert_eq!(container.sysctl(path), before);
    }
}

#[test]
fn the_hosts_values_are_not_changed() {
    let node = Node::new();
    let container = pod(&node);
    let before = node.sysctl("net/ipv4/conf/all/arp_filter");
    let attachment = tuned(&node, &container, one("net.ipv4.conf.all.arp_filter", "1"));
    attachment.add_after(&prev(&container)).success();
    assert_eq!(container.sysctl("net/ipv4/conf/all/arp_filter"), "1");
    assert_eq!(node.sysctl("net/ipv4/conf/all/arp_filter"), before);
}
