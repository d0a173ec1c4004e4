//! DNS and routes in the results of host-local.

use cni_testkit::{Attachment, Node};
use conformance::{attach, host_local, patched};
use serde_json::{Value, json};

#[track_caller]
fn dns_of(resolv_conf: &str) -> Value {
    let node = Node::new();
    let path = node.file("resolv.conf", resolv_conf);
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"ipam": {"resolvConf": path}}));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    attachment.del().success();
    result["dns"].clone()
}

#[test]
fn resolv_conf_becomes_dns() {
    let dns = dns_of(
        "# c\n; c\nnameserver 192.0.2.1\n nameserver 192.0.2.2 # x\ndomain a.example\nsearch a.example b.example\noptions ndots:5 rotate\nsortlist 1\n",
    );
    let expected = json!({
        "nameservers": ["192.0.2.1", "192.0.2.2"],
        "domain": "a.example",
        "search": ["a.example", "b.example"],
        "options": ["ndots:5", "rotate"],
    });
    assert_eq!(dns, expected);
}

#[test]
fn the_last_domain_wins_and_lists_are_joined() {
    let dns = dns_of("domain a\ndomain b\nsearch a\nsearch b c\noptions x\noptions y\nnameserver\n\n");
    assert_eq!(dns, json!({"domain": "b", "search": ["a", "b", "c"], "options": ["x", "y"]}));
}

#[test]
fn a_missing_resolv_conf_fails_add_and_reserves_nothing() {
    let node = Node::new();
    let container = node.container();
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"ipam": {"resolvConf": "/nowhere/resolv.conf"}}));
    Attachment::new(&node, &container, config).add().fails_naming(5, &["/nowhere/resolv.conf"]);
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn configured_routes_are_in_the_result() {
    let node = Node::new();
    let routes = json!([
        {"dst": "0.0.0.0/0"},
        {"dst": "192.0.2.0/24", "gw": "10.1.0.5"},
        {"dst": "fd00:9::/64", "gw": "fd00:1::9"},
    ]);
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"ipam": {"routes": routes}}));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(result["routes"], routes);
    attachment.del().success();
}

#[test]
fn routes_have_all_1_1_0_fields_in_every_version_with_routes() {
    let node = Node::new();
    let route = json!({"dst": "192.0.2.0/24", "gw": "10.1.0.5", "mtu": 1400, "advmss": 1300, "priority": 7,
                       "table": 0, "scope": 0});
    for version in ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let patch = json!({"cniVersion": version, "ipam": {"routes": [route]}});
        let (_c, attachment, result) = attach(&node, &patched(host_local(&node, &["10.1.0.0/24"]), patch), 1).remove(0);
        assert_eq!(result["routes"], json!([route]), "zero is a value, absent is absent");
        attachment.del().success();
    }
}

#[test]
fn a_route_s_mtu_advmss_and_priority_of_0_are_absent() {
    let node = Node::new();
    let route = json!({"dst": "192.0.2.0/24", "mtu": 0, "advmss": 0, "priority": 0, "scope": 0});
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"ipam": {"routes": [route]}}));
    let container = node.container();
    // The schema of configurations refuses values that the plugins accept.
    let result = node.plugin("host-local").command("ADD").container(&container).bad_config(&config).run().success();
    assert_eq!(result["routes"], json!([{"dst": "192.0.2.0/24", "scope": 0}]));
    Attachment::new(&node, &container, host_local(&node, &["10.1.0.0/24"])).del().success();
}

#[test]
fn below_0_3_0_routes_keep_destination_and_gateway() {
    let node = Node::new();
    let route = json!({"dst": "192.0.2.0/24", "gw": "10.1.0.5", "mtu": 1400, "table": 7});
    let patch = json!({"cniVersion": "0.2.0", "ipam": {"routes": [route]}});
    let (_c, attachment, result) = attach(&node, &patched(host_local(&node, &["10.1.0.0/24"]), patch), 1).remove(0);
    assert_eq!(result["ip4"]["routes"], json!([{"dst": "192.0.2.0/24", "gw": "10.1.0.5"}]));
    attachment.del().success();
}
