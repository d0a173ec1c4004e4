//! Addresses and connectivity: IPv4, IPv6, both, several ranges.

use cni_testkit::{Attachment, Node, bin_dir, probe, require};
use conformance::{addresses, attach, bridge, host_end, ipam, layer2, patched, sandboxed};
use serde_json::{Value, json};

#[test]
fn the_result_equals_the_state_of_the_kernel() {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    let host = host_end(&result, "br0");

    assert_eq!(result["interfaces"].as_array().unwrap().len(), 3);
    assert_eq!(result["interfaces"][0]["name"], "br0", "bridge, host end, container end: runtimes count on it");
    assert_eq!(result["interfaces"][0]["mac"], node.link("br0").unwrap()["address"]);
    assert_eq!(result["interfaces"][1]["mac"], node.link(host).unwrap()["address"]);
    assert_eq!(sandboxed(&result)["name"], "eth0");
    assert_eq!(sandboxed(&result)["mac"], container.link("eth0").unwrap()["address"]);
    assert_eq!(sandboxed(&result)["sandbox"], container.netns().to_str().unwrap());
    assert_eq!(result["ips"], json!([{"address": "10.1.0.2/24", "gateway": "10.1.0.1", "interface": 2}]));

    assert_eq!(node.ports("br0"), [host]);
    assert_eq!(container.addresses("eth0"), ["10.1.0.2/24"]);
    attachment.del_with(&result).success();
}

#[test]
fn containers_reach_the_gateway_and_each_other() {
    let node = Node::new();
    let all = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 2);
    for target in ["10.1.0.1", "10.1.0.3"] {
        all[0].0.ping(target);
    }
    node.ping("10.1.0.2");
    for (_, attachment, result) in all {
        attachment.del_with(&result).success();
    }
}

#[test]
fn ipv6_alone_works() {
    let node = Node::new();
    let all = attach(&node, &bridge(&node, &["fd00:1::/64"]), 2);
    assert_eq!(all[0].0.addresses("eth0"), ["fd00:1::2/64"]);
    for target in ["fd00:1::1", "fd00:1::3"] {
        all[0].0.ping(target);
    }
    for (_, attachment, result) in all {
        attachment.del_with(&result).success();
    }
}

#[test]
fn both_families_work() {
    let node = Node::new();
    let all = attach(&node, &bridge(&node, &["10.1.0.0/24", "fd00:1::/64"]), 2);
    assert_eq!(addresses(&all[0].2), ["10.1.0.2/24", "fd00:1::2/64"]);
    assert_eq!(all[0].0.addresses("eth0"), ["10.1.0.2/24", "fd00:1::2/64"]);
    for target in ["10.1.0.1", "10.1.0.3", "fd00:1::1", "fd00:1::3"] {
        all[0].0.ping(target);
    }
    for (_, attachment, result) in all {
        attachment.del_with(&result).success();
    }
}

#[test]
fn several_ipv6_ranges_with_a_gateway_work() {
    let node = Node::new();
    let (container, attachment, result) =
        attach(&node, &bridge(&node, &["10.1.0.0/24", "fd00:1::/64", "fd00:2::/64"]), 1).remove(0);
    assert_eq!(container.addresses("eth0").len(), 3);
    for target in ["10.1.0.1", "fd00:1::1", "fd00:2::1"] {
        container.ping(target);
    }
    attachment.del_with(&result).success();
}

#[test]
fn two_ipv4_ranges_with_a_gateway_work() {
    let node = Node::new();
    let config = bridge(&node, &["10.1.0.0/24", "10.2.0.0/24"]);
    for _ in 0..2 {
        let (container, attachment, result) = attach(&node, &config, 1).remove(0);
        for target in ["10.1.0.1", "10.2.0.1"] {
            container.ping(target);
        }
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
}

#[test]
fn two_interfaces_of_one_container_work() {
    let node = Node::new();
    let (container, first, one) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    let other = json!({"name": "net2", "bridge": "br1", "ipam": ipam(&node, &["10.2.0.0/24"])});
    let second = first.clone().ifname("net1").config(patched(bridge(&node, &[]), other));
    let two = second.add().success();
    container.ping("10.1.0.1");
    container.ping("10.2.0.1");
    first.del_with(&one).success();
    assert!(container.link("eth0").is_none() && container.link("net1").is_some());
    second.check(&two).success();
    second.del_with(&two).success();
}

#[test]
fn the_interface_the_host_end_and_the_bridge_are_up() {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    for link in [container.link("eth0"), node.link(host_end(&result, "br0")), node.link("br0")] {
        assert_eq!(link.as_ref().unwrap()["operstate"], "UP", "{link:?}");
    }
    attachment.del_with(&result).success();
}

#[test]
fn addresses_are_usable_when_the_add_returns() {
    for dad in [false, true] {
        let node = Node::new();
        let config = patched(bridge(&node, &["10.1.0.0/24", "fd00:1::/64"]), json!({"enabledad": dad}));
        let (container, attachment, result) = attach(&node, &config, 1).remove(0);
        let shown = container.exec(&["ip", "addr", "show", "dev", "eth0", "scope", "global"]);
        assert!(!shown.contains("tentative") && !shown.contains("dadfailed"), "enabledad {dad}: {shown}");
        container.ping("fd00:1::1");
        attachment.del_with(&result).success();
    }
}

#[test]
fn without_enabledad_an_address_is_usable_at_once() {
    let node = Node::new();
    let container = node.container();
    // Duplicate address detection would take a minute.
    container.exec(&["sysctl", "-qw", "net.ipv6.conf.default.dad_transmits=60"]);
    let attachment = Attachment::new(&node, &container, bridge(&node, &["fd00:1::/64"]));
    let result = attachment.add().success();
    let addresses = container.exec(&["ip", "-6", "addr", "show", "dev", "eth0", "scope", "global"]);
    assert!(addresses.contains("fd00:1::2/64") && !addresses.contains("tentative"), "{addresses}");
    attachment.del_with(&result).success();
}

#[test]
fn an_ipam_plugin_that_returns_no_address_fails_the_add() {
    let node = Node::new();
    let container = node.container();
    let folder =
        crate::delegation::executable(&node, "empty", "#!/bin/sh\ncat >/dev/null\necho '{\"cniVersion\":\"1.0.0\"}'\n");
    let config = patched(bridge(&node, &[]), json!({"ipam": {"type": "empty", "ranges": null, "dataDir": null}}));
    let call = node.plugin("bridge").command("ADD").cni_path(folder).container(&container).config(&config);
    let failure = call.run().failure();
    assert!(failure.msg.contains("IPAM plugin returned missing IP config"), "{failure:?}");
}

#[test]
fn dns_of_the_configuration_replaces_that_of_ipam() {
    let node = Node::new();
    let path = node.file("resolv.conf", "nameserver 192.0.2.1\nsearch a.example\n");
    let base = patched(bridge(&node, &["10.1.0.0/24"]), json!({"ipam": {"resolvConf": path}}));
    let (_c, attachment, result) = attach(&node, &base, 1).remove(0);
    assert_eq!(result["dns"], json!({"nameservers": ["192.0.2.1"], "search": ["a.example"]}));
    attachment.del_with(&result).success();

    let config = patched(base, json!({"dns": {"nameservers": ["192.0.2.9"]}}));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(result["dns"], json!({"nameservers": ["192.0.2.9"]}));
    attachment.del_with(&result).success();
}

#[test]
fn dns_of_the_runtime_replaces_all_other_dns() {
    let node = Node::new();
    let path = node.file("resolv.conf", "nameserver 192.0.2.1\nsearch a.example\n");
    let conf = json!({"dns": {"nameservers": ["192.0.2.9"], "options": ["rotate"]}});
    let layer3 = patched(patched(bridge(&node, &["10.1.0.0/24"]), json!({"ipam": {"resolvConf": path}})), conf.clone());
    let layer2 = patched(layer2(), conf);
    // The keys of the specification's convention, those of `dns` of a configuration, and those that
    // Go's libcni writes.
    for (given, expected) in [
        (json!({"servers": ["192.0.2.7"], "searches": ["r"]}), json!({"nameservers": ["192.0.2.7"], "search": ["r"]})),
        (json!({"nameservers": ["192.0.2.8"], "domain": "d"}), json!({"nameservers": ["192.0.2.8"], "domain": "d"})),
        (
            json!({"Servers": null, "Searches": ["r"], "Options": ["edns0"]}),
            json!({"search": ["r"], "options": ["edns0"]}),
        ),
        (json!({}), Value::Null),
    ] {
        for base in [&layer3, &layer2] {
            let mut config = base.clone();
            // `patched` is not usable here: null makes it remove a key.
            config["runtimeConfig"] = json!({ "dns": given });
            let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
            assert_eq!(result["dns"], expected, "{given}");
            attachment.check(&result).success();
            attachment.del_with(&result).success();
        }
    }
    let container = node.container();
    let wrong = patched(layer2, json!({"runtimeConfig": {"dns": {"servers": "192.0.2.7"}}}));
    let attachment = Attachment::new(&node, &container, wrong);
    // Go ignores the key, so a value of a wrong type must not fail the ADD.
    let added = attachment.add();
    assert_eq!(added.success()["dns"], json!({"nameservers": ["192.0.2.9"], "options": ["rotate"]}));
    assert!(added.stderr.contains("runtimeConfig.dns is ignored: servers"), "{}", added.report());
    attachment.del().success();
}

#[test]
fn validate_knows_the_capability_dns() {
    require!(probe::plugin("cnitool"));
    let node = Node::new();
    let cnitool = bin_dir().join("cnitool");
    for (name, known) in [("dns", true), ("dnss", false)] {
        let plugin = json!({"type": "bridge", "capabilities": {name: true}});
        let list = json!({"cniVersion": "1.0.0", "name": "net1", "plugins": [plugin]});
        let file = node.file("10-net1.conflist", list.to_string());
        let ran = node.run(&[cnitool.to_str().unwrap(), "validate", "--file-only", file.to_str().unwrap()]);
        assert!(ran.ok && known != ran.stdout.contains("does not use this capability"), "{name}: {ran:?}");
    }
}
