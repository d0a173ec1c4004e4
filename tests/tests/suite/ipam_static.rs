//! static: addresses from the configuration, from CNI_ARGS, from `args.cni.ips` and from
//! `runtimeConfig.ips`.

use cni_testkit::{Attachment, Node, Outcome};
use conformance::{VERSION, VERSIONS, patched};
use serde_json::{Value, json};

/// The network `net1` with these keys.
fn network(keys: Value) -> Value {
    patched(json!({"cniVersion": VERSION, "name": "net1", "type": "static", "ipam": {"type": "static"}}), keys)
}

fn two_families() -> Value {
    json!({"ipam": {
        "addresses": [
            {"address": "10.10.0.1/24", "gateway": "10.10.0.254"},
            {"address": "3ffe:ffff:0:1ff::1/64", "gateway": "3ffe:ffff:0::1"},
        ],
        "routes": [
            {"dst": "0.0.0.0/0"},
            {"dst": "192.168.0.5/16", "gw": "10.10.5.1", "mtu": 1400, "priority": 5, "table": 7, "scope": 0},
            {"dst": "3ffe:ffff:0:1ff::/64"},
        ],
        "dns": {"nameservers": ["192.0.2.1"], "domain": "example.com"},
    }})
}

#[track_caller]
fn added(keys: Value, args: &str) -> Outcome {
    let node = Node::new();
    let container = node.container();
    Attachment::new(&node, &container, network(keys)).args(args).add()
}

/// Each address with its gateway.
#[track_caller]
fn ips(keys: Value, args: &str) -> Vec<(String, String)> {
    let result = added(keys, args).success();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let ips = result["ips"].as_array().cloned().unwrap_or_default();
    ips.iter().map(|ip| (text(&ip["address"]), text(&ip["gateway"]))).collect()
}

fn pairs<const N: usize>(ips: [(&str, &str); N]) -> Vec<(String, String)> {
    ips.map(|(address, gateway)| (address.to_owned(), gateway.to_owned())).to_vec()
}

#[test]
fn addresses_routes_and_dns_keep_the_configured_order() {
    let result = added(two_families(), "").success();
    assert_eq!(result["ips"][0], json!({"address": "10.10.0.1/24", "gateway": "10.10.0.254"}));
    assert_eq!(result["ips"][1], json!({"address": "3ffe:ffff:0:1ff::1/64", "gateway": "3ffe:ffff::1"}));
    assert_eq!(result["routes"], two_families()["ipam"]["routes"]);
    assert_eq!(result["dns"], two_families()["ipam"]["dns"]);
}

#[test]
fn routes_to_one_destination_over_two_gateways_are_kept() {
    let routes = json!([{"dst": "10.2.0.0/16", "gw": "10.10.0.2"}, {"dst": "10.2.0.0/16", "gw": "10.10.0.3"}]);
    let keys = json!({"ipam": {"addresses": [{"address": "10.10.0.1/24"}], "routes": routes}});
    assert_eq!(added(keys, "").success()["routes"], routes);
}

/// As a Go program writes the entry if it encodes the type of Go's plugin.
#[test]
fn an_object_under_a_second_spelling_is_ignored() {
    let object = json!({"IP": "10.1.0.2", "Mask": "////AA=="});
    for entry in [
        json!({"address": "10.1.0.2/24", "Address": object, "gateway": "10.1.0.1", "Version": "4"}),
        // The test writes the keys in alphabetical order, so here the object is the last one.
        json!({"ADDRESS": "10.1.0.2/24", "Address": object}),
        json!({"ADDRESS": "10.1.0.2/24", "Address": {}}),
    ] {
        let keys = json!({"ipam": {"addresses": [entry]}});
        assert_eq!(ips(keys.clone(), "")[0].0, "10.1.0.2/24");
        let node = Node::new();
        let container = node.container();
        let attachment = Attachment::new(&node, &container, network(keys));
        let result = attachment.add().success();
        attachment.check(&result).success();
        attachment.del().success();
    }
}

#[test]
fn cni_args_give_addresses_and_their_gateways() {
    let none = json!({});
    let alone = ips(none.clone(), "IP=10.10.0.1/24;GATEWAY=10.10.0.254");
    assert_eq!(alone, pairs([("10.10.0.1/24", "10.10.0.254")]));
    let two = ips(none, "IP=10.10.0.1/24,11.11.0.1/24;GATEWAY=10.10.0.254");
    assert_eq!(two, pairs([("10.10.0.1/24", "10.10.0.254"), ("11.11.0.1/24", "")]));
    let configured = json!({"ipam": {"addresses": [{"address": "10.10.0.9/24", "gateway": "10.10.0.1"}]}});
    let behind = ips(configured, "IP=10.10.0.1/24;GATEWAY=10.10.0.254");
    assert_eq!(behind, pairs([("10.10.0.9/24", "10.10.0.1"), ("10.10.0.1/24", "10.10.0.254")]));
}

#[test]
fn args_cni_ips_replace_and_the_runtime_s_replace_all() {
    let mut keys = two_families();
    keys["args"] = json!({"cni": {"ips": ["10.0.0.3/24", "fd00::3/64"], "other": 5}, "labels": 5});
    let args = "IP=10.10.0.1/24;GATEWAY=10.10.0.254";
    assert_eq!(ips(keys.clone(), args), pairs([("10.0.0.3/24", ""), ("fd00::3/64", "")]));
    keys["RuntimeConfig"] = json!({"ips": ["10.0.0.7/24"]});
    assert_eq!(ips(keys.clone(), args), pairs([("10.0.0.7/24", "")]));
    keys["RuntimeConfig"] = json!({"ips": []});
    assert_eq!(ips(keys, args).len(), 2, "an empty list asks for nothing");
}

#[test]
fn a_replaced_source_is_not_checked() {
    let keys = json!({"ipam": {"addresses": [{"address": "bad"}]}, "runtimeConfig": {"ips": ["10.0.0.7/24"]}});
    assert_eq!(ips(keys, ""), pairs([("10.0.0.7/24", "")]));
}

#[test]
fn an_address_without_its_prefix_is_refused() {
    let no_ipam = json!({"ipam": null});
    let configured = json!({"ipam": {"addresses": [{"address": "10.10.0.1"}]}});
    let gateway = json!({"ipam": {"addresses": [{"address": "10.10.0.1/24", "gateway": "x"}]}});
    let conventions = json!({"args": {"cni": {"ips": ["10.10.0.1"]}}});
    let runtime = json!({"runtimeConfig": {"ips": ["10.10.0.1"]}});
    let an_entry = "an entry in the 'ips' field is NOT in CIDR notation, got: '10.10.0.1'";
    for (keys, args, code, msg) in [
        (configured, "", 7, "the 'address' field is expected to be in CIDR notation, got: '10.10.0.1'"),
        (gateway, "", 7, "invalid IP address: x"),
        (json!({}), "IP=10.10.0.1", 4, "the 'ip' field is expected to be in CIDR notation, got: '10.10.0.1'"),
        (json!({}), "IP=10.10.0.1/24;GATEWAY=x", 4, "invalid gateway address: x"),
        (json!({}), "FOO=1", 4, "ARGS: unknown args [\"FOO=1\"]"),
        (conventions, "", 7, an_entry),
        (runtime, "", 7, an_entry),
        (no_ipam, "IP=10.10.0.1/24", 7, "IPAM config missing 'ipam' key"),
        (json!({"ipam": null, "runtimeConfig": {"ips": ["10.10.0.1/24"]}}), "", 7, "IPAM config missing 'ipam' key"),
    ] {
        assert_eq!(added(keys, args).fails_with(code, "").msg, msg);
    }
}

#[test]
fn old_versions_know_one_address_of_each_family() {
    for version in ["0.1.0", "0.2.0"] {
        let keys = json!({ "cniVersion": version });
        let error = added(keys.clone(), "IP=10.10.0.1/24,11.11.0.1/24").fails_with(7, "");
        assert_eq!(error.msg, format!("CNI version {version} does not support more than 1 address per family"));
        added(keys, "").fails_with(1, "cannot convert: no valid IP addresses");
    }
}

#[test]
fn every_version_gets_its_own_shape() {
    for version in VERSIONS {
        let result = added(patched(two_families(), json!({ "cniVersion": version })), "").success();
        assert_eq!(result["cniVersion"], version);
        match version {
            "0.1.0" | "0.2.0" => assert_eq!(result["ip4"]["ip"], "10.10.0.1/24"),
            "0.3.0" | "0.3.1" | "0.4.0" => assert_eq!(result["ips"][0]["version"], "4"),
            _ => assert_eq!(result["ips"][0].get("version"), None),
        }
    }
}

#[test]
fn without_addresses_the_result_has_none() {
    assert_eq!(added(json!({"ipam": {"addresses": null}}), "").success(), json!({"cniVersion": VERSION}));
}

#[test]
fn check_compares_the_gateways_that_are_configured() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, network(two_families()));
    let mut result = attachment.add().success();
    attachment.check(&result).success();
    attachment.invocation("CHECK", None).run().fails_with(7, "Required prevResult missing");
    result["ips"][0]["gateway"] = json!("10.10.0.253");
    let error = attachment.check(&result).fails_with(101, "");
    assert_eq!(error.msg, "static: Failed to match addr 10.10.0.1 on interface eth0");
    result["ips"] = json!([]);
    attachment.check(&result).success();
}

#[test]
fn del_gc_and_status_find_nothing_to_do() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, network(json!({"cniVersion": "1.1.0"})));
    attachment.del().success();
    attachment.del().success();
    attachment.clone().netns("").del().success();
    attachment.clone().config(network(json!({"ipam": {"addresses": "nonsense"}}))).del().success();
    attachment.gc(&[]).success();
    attachment.status().success();
}

#[test]
fn status_refuses_a_configuration_that_add_refuses() {
    let node = Node::new();
    let container = node.container();
    let keys = json!({"cniVersion": "1.1.0", "ipam": {"addresses": [{"address": "10.0.0.1"}]}});
    Attachment::new(&node, &container, network(keys)).status().fails_with(50, "the 'address' field");
}

#[test]
fn a_container_on_a_bridge_gets_a_static_address() {
    let node = Node::new();
    node.expect_left("br0");
    let container = node.container();
    let addresses = json!([{"address": "10.1.0.5/24", "gateway": "10.1.0.1"}, {"address": "fd00:1::5/64"}]);
    let config = json!({
        "cniVersion": VERSION, "name": "net1", "type": "bridge", "bridge": "br0",
        "ipam": {"type": "static", "addresses": addresses, "routes": [{"dst": "0.0.0.0/0"}]},
    });
    let attachment = Attachment::new(&node, &container, config);
    let result = attachment.add().success();
    assert_eq!(container.addresses("eth0"), ["10.1.0.5/24", "fd00:1::5/64"]);
    assert!(container.exec(&["ip", "-4", "route"]).contains("default via 10.1.0.1 dev eth0"));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}
