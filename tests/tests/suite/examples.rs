//! The examples of cni.dev's plugin pages: lists with the same keys and combinations attach, pass
//! CHECK and leave nothing. The pages of loopback, dhcp and static have theirs in the suites of
//! these plugins.

use cni_testkit::{Attachment, Node, probe, require};
use conformance::uplink;
use serde_json::{Value, json};

/// The plugins of a list in their order, each with the keys of its example.
fn play(node: &Node, plugins: &[Value]) {
    let _outside = uplink(node, "eth0");
    let container = node.container();
    let attachments: Vec<Attachment<'_>> = plugins
        .iter()
        .map(|plugin| {
            let mut config = json!({"cniVersion": "1.0.0", "name": "mynet"});
            config.as_object_mut().unwrap().extend(plugin.as_object().unwrap().clone());
            if config["ipam"]["type"] == "host-local" {
                config["ipam"]["dataDir"] = json!(node.data_dir());
            }
            Attachment::new(node, &container, config)
        })
        .collect();
    let mut result: Option<Value> = None;
    for attachment in &attachments {
        let outcome = match &result {
            Some(prev) => attachment.add_after(prev),
            None => attachment.add(),
        };
        result = Some(outcome.success());
    }
    let result = result.unwrap();
    attachments.iter().for_each(|attachment| drop(attachment.check(&result).success()));
    attachments.iter().rev().for_each(|attachment| drop(attachment.del_with(&result).success()));
    assert_eq!(node.reservations("mynet"), []);
}

fn subnet(subnet: &str) -> Value {
    json!({"type": "host-local", "subnet": subnet})
}

fn bridge() -> Value {
    json!({"type": "bridge", "bridge": "mynet0", "isDefaultGateway": true, "forceAddress": false, "ipMasq": true,
           "hairpinMode": true, "ipam": subnet("10.10.0.0/16")})
}

macro_rules! examples {
    ($($name:ident $(needs ($probe:expr))?: [$($plugin:expr),* $(,)?])*) => {
        $(#[test]
        fn $name() {
            $(require!($probe);)?
            play(&Node::new(), &[$($plugin),*]);
        })*
    };
}

examples! {
    bridge_as_default_gateway needs (probe::iptables()): [bridge()]
    ipvlan needs (probe::ipvlan()): [json!({"type": "ipvlan", "master": "eth0", "ipam": subnet("10.1.2.0/24")})]
    macvlan: [json!({"type": "macvlan", "master": "eth0", "ipam": subnet("10.1.2.0/24")})]
    ptp: [
        json!({"type": "ptp", "ipam": subnet("10.1.1.0/24"), "dns": {"nameservers": ["10.1.1.1", "8.8.8.8"]}}),
    ]
    vlan needs (probe::vlan_links()): [
        json!({"type": "vlan", "master": "eth0", "mtu": 1500, "vlanId": 5, "linkInContainer": false,
               "ipam": subnet("10.1.1.0/24"), "dns": {"nameservers": ["10.1.1.1", "8.8.8.8"]}}),
    ]
    tap: [
        json!({"type": "tap", "multiQueue": true, "owner": 0, "group": 0, "ipam": subnet("10.1.2.0/24")}),
    ]
    dummy needs (probe::dummy()): [json!({"type": "dummy", "ipam": subnet("10.1.2.0/24")})]
    host_local_with_ranges_of_both_families: [
        json!({"type": "bridge", "bridge": "mynet0", "ipam": {
            "type": "host-local",
            "ranges": [
                [{"subnet": "10.10.0.0/16", "rangeStart": "10.10.1.20", "rangeEnd": "10.10.3.50", "gateway": "10.10.0.254"},
                 {"subnet": "172.16.5.0/24"}],
                [{"subnet": "3ffe:ffff:0:01ff::/64", "rangeStart": "3ffe:ffff:0:01ff::0010",
                  "rangeEnd": "3ffe:ffff:0:01ff::0020"}],
            ],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "192.168.0.0/16", "gw": "10.10.5.1"}, {"dst": "3ffe:ffff:0:01ff::1/64"}],
        }}),
    ]
    bandwidth_behind_ptp needs (probe::tool("tc")): [
        json!({"type": "ptp", "ipam": subnet("10.1.1.0/24")}),
        json!({"type": "bandwidth", "ingressRate": 1_000_000, "ingressBurst": 2_000_000, "egressRate": 1_000_000,
               "egressBurst": 2_000_000}),
    ]
    firewall_with_same_bridge needs (probe::iptables()): [
        bridge(),
        json!({"type": "firewall", "ingressPolicy": "same-bridge", "backend": "iptables"}),
    ]
    portmap_with_conditions needs (probe::iptables()): [
        json!({"type": "ptp", "ipMasq": true, "ipam": subnet("10.1.1.0/24")}),
        json!({"type": "portmap", "backend": "iptables", "capabilities": {"portMappings": true}, "snat": true,
               "markMasqBit": 13, "conditionsV4": ["!", "-d", "192.0.2.0/24"], "conditionsV6": ["!", "-d", "fc00::/7"],
               "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}}),
    ]
    sbr_behind_macvlan: [
        json!({"type": "macvlan", "master": "eth0", "ipam": subnet("10.1.2.0/24")}),
        json!({"type": "sbr"}),
    ]
    tuning_of_sysctls_and_the_link: [
        json!({"type": "ptp", "ipam": subnet("10.1.1.0/24")}),
        json!({"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}, "mac": "c2:b0:57:49:47:f1", "mtu": 1454,
               "promisc": true}),
    ]
    vrf_behind_macvlan needs (probe::vrf()): [
        json!({"type": "macvlan", "master": "eth0", "ipam": subnet("10.1.2.0/24")}),
        json!({"type": "vrf", "vrfname": "blue"}),
    ]
}

/// The schema of configurations wants a type in `ipam`; the page's examples have `{}`.
#[test]
fn bridge_of_layer_2() {
    for down in [false, true] {
        let node = Node::new();
        let container = node.container();
        let mut config = json!({"cniVersion": "1.0.0", "name": "mynet", "type": "bridge", "bridge": "mynet0",
                                "disableContainerInterface": down, "ipam": {}});
        let call = |verb: &str, config: &Value| {
            node.plugin("bridge").command(verb).container(&container).bad_config(config).run().success()
        };
        config["prevResult"] = call("ADD", &config);
        call("CHECK", &config);
        call("DEL", &config);
        assert!(container.link("eth0").is_none());
    }
}

#[test]
fn host_device_by_name() {
    let node = Node::new();
    node.ip(&["link add enp0s1 type veth peer name far0"]);
    for left in ["enp0s1", "far0"] {
        node.expect_left(left);
    }
    play(&node, &[json!({"type": "host-device", "device": "enp0s1"})]);
}
