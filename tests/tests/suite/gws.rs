//! `gws`, the gateways of a route over several paths, which no version of the specification has.

use std::fs;
use std::os::unix::fs::symlink;

use cni_testkit::{Attachment, Container, Node, bin_dir, go_bin_dir, probe, require};
use conformance::{VERSIONS, attach, bridge, patched, uplink};
use serde_json::{Value, json};

/// A route with two gateways of the subnets of [`network`].
fn gws() -> Value {
    json!([
        {"dst": "198.51.100.0/24", "gws": ["10.1.0.98", "10.1.0.99"]},
        {"dst": "2001:db8:9::/48", "gws": ["fd00:1::98"], "gw": "fd00:1::99"},
    ])
}

/// [`gws`] as a result has it: with `gw`, for readers that do not know `gws`.
fn listed() -> Value {
    json!([
        {"dst": "198.51.100.0/24", "gw": "10.1.0.98", "gws": ["10.1.0.98", "10.1.0.99"]},
        {"dst": "2001:db8:9::/48", "gw": "fd00:1::99", "gws": ["fd00:1::98"]},
    ])
}

fn network(node: &Node, version: &str, routes: Value) -> Value {
    patched(bridge(node, &["10.1.0.0/24", "fd00:1::/64"]), json!({"cniVersion": version, "ipam": {"routes": routes}}))
}

/// The gateways of the container's route to `dst`.
#[track_caller]
fn gateways(container: &Container, dst: &str) -> Vec<String> {
    let family = if dst.contains(':') { "-6" } else { "-4" };
    let routes = container.json(&["ip", "-j", family, "route", "show", dst]);
    assert_eq!(routes.as_array().map(Vec::len), Some(1), "{routes}");
    let hops = routes[0]["nexthops"].as_array().cloned().unwrap_or_else(|| vec![routes[0].clone()]);
    hops.iter().map(|hop| hop["gateway"].as_str().unwrap_or_default().to_owned()).collect()
}

/// The gateways by which the container sends packets to the addresses of 198.51.100.0/24.
fn used(container: &Container) -> Vec<String> {
    let gateway = |last: u8| {
        let chosen = container.json(&["ip", "-j", "route", "get", &format!("198.51.100.{last}")]);
        chosen[0]["gateway"].as_str().unwrap_or_default().to_owned()
    };
    let mut used: Vec<String> = (1..64).map(gateway).collect();
    used.sort();
    used.dedup();
    used
}

#[test]
fn several_gateways_of_a_route_are_all_used() {
    for version in VERSIONS {
        let node = Node::new();
        let (container, attachment, result) = attach(&node, &network(&node, version, gws()), 1).remove(0);
        assert_eq!(gateways(&container, "198.51.100.0/24"), ["10.1.0.98", "10.1.0.99"], "{version}");
        assert_eq!(gateways(&container, "2001:db8:9::/48"), ["fd00:1::98", "fd00:1::99"], "{version}");
        assert_eq!(used(&container), ["10.1.0.98", "10.1.0.99"], "{version}");
        if version < "0.3.0" {
            let each =
                json!([{"dst": "198.51.100.0/24", "gw": "10.1.0.98"}, {"dst": "198.51.100.0/24", "gw": "10.1.0.99"}]);
            assert_eq!(result["ip4"]["routes"], each, "{version}");
        } else {
            assert_eq!(result["routes"], listed(), "{version}");
        }
        if version >= "0.4.0" {
            attachment.check(&result).success();
            container.ip(&["route replace 198.51.100.0/24 via 10.1.0.98"]);
            attachment.check(&result).fails_with(101, "Expected Route 198.51.100.0/24 via 10.1.0.99 not found");
        }
        attachment.del_with(&result).success();
    }
}

#[test]
fn static_and_another_interface_plugin_take_gws() {
    let node = Node::new();
    let _outside = uplink(&node, "eth0");
    let container = node.container();
    let ipam = json!({"type": "static", "routes": gws(), "addresses": [
        {"address": "10.1.0.5/24", "gateway": "10.1.0.1"}, {"address": "fd00:1::5/64", "gateway": "fd00:1::1"},
    ]});
    let config = json!({"cniVersion": "1.1.0", "name": "net1", "type": "macvlan", "master": "eth0", "ipam": ipam});
    let attachment = Attachment::new(&node, &container, config);
    let result = attachment.add().success();
    assert_eq!(gateways(&container, "198.51.100.0/24"), ["10.1.0.98", "10.1.0.99"]);
    assert_eq!(result["routes"], listed());
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn gws_that_cannot_work_are_refused() {
    let node = Node::new();
    let container = node.container();
    let many: Vec<String> = (1..66).map(|last| format!("10.1.0.{last}")).collect();
    for (route, code, why) in [
        (json!({"gws": []}), 7, "route 198.51.100.0/24: gws is empty"),
        (json!({"gws": many}), 7, "route 198.51.100.0/24: gws has 65 gateways, at most 64 are allowed"),
        (
            json!({"gws": ["10.1.0.98", "fd00:1::98"]}),
            7,
            "route 198.51.100.0/24 via fd00:1::98: the gateway is of the other address family",
        ),
        (
            json!({"gws": ["10.1.0.98"], "gw": "fd00:1::98"}),
            7,
            "route 198.51.100.0/24 via fd00:1::98: the gateway is of the other address family",
        ),
        (json!({"gws": ["10.1.0.98", ""]}), 6, "ipam.routes[0].gws: invalid IP address: "),
        (json!({"gws": "10.1.0.98"}), 6, "ipam.routes[0].gws: "),
    ] {
        let routes = json!([patched(json!({"dst": "198.51.100.0/24"}), route)]);
        let static_routes = json!({"type": "static", "addresses": [{"address": "10.1.0.5/24"}], "routes": routes});
        let config = network(&node, "1.1.0", routes);
        let with_static = patched(config.clone(), json!({"ipam": null}));
        for config in [config, patched(with_static, json!({"ipam": static_routes}))] {
            let attachment = Attachment::new(&node, &container, config);
            let failure = attachment.add().fails_with(code, "");
            assert!(failure.msg.contains(why) || failure.details.contains(why), "{failure:?}");
            let status = attachment.invocation("STATUS", None).run().fails_with(50, "");
            assert!(status.msg.contains(why) || status.details.contains(why), "{status:?}");
            attachment.del().success();
        }
    }
    assert!(node.reservations("net1").is_empty());
    // bridge makes its bridge before it calls the IPAM plugin.
    node.expect_left("br0");
}

/// Go's bridge does not know `gws`: it uses `gw`, which our IPAM plugin adds.
#[test]
fn gos_bridge_uses_the_first_gateway_of_our_ipam() {
    require!(probe::go_plugins());
    let node = Node::new();
    let folder = node.dir().join("both");
    fs::create_dir(&folder).unwrap();
    symlink(go_bin_dir().join("bridge"), folder.join("bridge")).unwrap();
    symlink(bin_dir().join("host-local"), folder.join("host-local")).unwrap();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, network(&node, "1.0.0", gws())).by(&folder);
    let result = attachment.add().success();
    assert_eq!(gateways(&container, "198.51.100.0/24"), ["10.1.0.98"]);
    assert_eq!(gateways(&container, "2001:db8:9::/48"), ["fd00:1::99"]);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn a_second_default_route_over_several_gateways_is_behind() {
    let node = Node::new();
    let default = |gateways| json!([patched(json!({"dst": "0.0.0.0/0"}), gateways)]);
    let first = network(&node, "1.0.0", default(json!({"gw": "10.1.0.1"})));
    let (container, one, one_result) = attach(&node, &first, 1).remove(0);
    let config = patched(
        bridge(&node, &["10.2.0.0/24"]),
        json!({"name": "net2", "bridge": "br1", "ipam": {"routes": default(json!({"gws": ["10.2.0.8", "10.2.0.9"]}))}}),
    );
    let two = one.clone().ifname("net1").config(config);
    let result = two.add().success();
    let listed = json!({"dst": "0.0.0.0/0", "gw": "10.2.0.8", "gws": ["10.2.0.8", "10.2.0.9"], "priority": 1});
    assert_eq!(result["routes"], json!([listed]));
    let shown = container.json(&["ip", "-j", "route", "show", "default", "metric", "1"]);
    let hops = shown[0]["nexthops"].as_array().map(Vec::len);
    assert_eq!((used(&container), hops), (vec!["10.1.0.1".to_owned()], Some(2)), "{shown}");
    two.check(&result).success();
    two.del_with(&result).success();
    one.del_with(&one_result).success();
}
