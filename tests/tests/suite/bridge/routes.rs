//! Routes of IPAM: their tables, metrics and gateways.

use cni_testkit::{Attachment, Container, Node};
use conformance::{VERSION, VERSIONS, attach, bridge, layer2, patched};
use serde_json::{Value, json};

#[track_caller]
fn route(container: &Container, table: &str, dst: &str) -> Value {
    let family = if dst.contains(':') { "-6" } else { "-4" };
    let routes = container.json(&["ip", "-j", family, "route", "show", "table", table, dst]);
    routes.as_array().and_then(|routes| routes.first().cloned()).unwrap_or(Value::Null)
}

fn with_routes(node: &Node, subnets: &[&str], routes: Value) -> Value {
    patched(bridge(node, subnets), json!({"ipam": {"routes": routes}}))
}

#[test]
fn routes_are_installed_through_the_gateway() {
    let node = Node::new();
    let routes = json!([{"dst": "0.0.0.0/0"}, {"dst": "192.0.2.0/24", "gw": "10.1.0.77"}, {"dst": "::/0"}]);
    let config = with_routes(&node, &["10.1.0.0/24", "fd00:1::/64"], routes);
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(route(&container, "main", "default")["gateway"], "10.1.0.1");
    assert_eq!(route(&container, "main", "192.0.2.0/24")["gateway"], "10.1.0.77");
    assert_eq!(route(&container, "main", "::/0")["gateway"], "fd00:1::1");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

/// host-local's route with `table`, `priority`, `mtu` and `advmss` under bridge, in one version.
#[track_caller]
fn where_it_belongs_in(version: &str) {
    let node = Node::new();
    let routes = json!([
        {"dst": "192.0.2.0/24", "gw": "10.1.0.77", "table": 100, "priority": 7, "mtu": 1400, "advmss": 1300},
        {"dst": "fd00:9::/64", "table": 101, "priority": 8, "mtu": 1350},
    ]);
    let config =
        patched(with_routes(&node, &["10.1.0.0/24", "fd00:1::/64"], routes.clone()), json!({"cniVersion": version}));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    let four = route(&container, "100", "192.0.2.0/24");
    assert_eq!((&four["gateway"], &four["metric"]), (&json!("10.1.0.77"), &json!(7)), "{four}");
    assert_eq!(four["metrics"], json!([{"mtu": 1400, "advmss": 1300}]), "{four}");
    let six = route(&container, "101", "fd00:9::/64");
    assert_eq!((&six["gateway"], &six["metric"]), (&json!("fd00:1::1"), &json!(8)), "{six}");
    assert_eq!(six["metrics"], json!([{"mtu": 1350}]), "{six}");
    assert_eq!(route(&container, "main", "192.0.2.0/24"), Value::Null);
    assert_eq!(result["routes"], routes);
    if VERSIONS.iter().position(|v| *v == version) >= VERSIONS.iter().position(|v| *v == "0.4.0") {
        attachment.check(&result).success();
        container.exec(&["ip", "route", "del", "192.0.2.0/24", "table", "100"]);
        attachment.check(&result).failure();
    }
    attachment.del_with(&result).success();
}

#[test]
fn a_route_is_put_where_it_belongs_in_0_3_0() {
    where_it_belongs_in("0.3.0");
}

#[test]
fn a_route_is_put_where_it_belongs_in_0_3_1() {
    where_it_belongs_in("0.3.1");
}

#[test]
fn a_route_is_put_where_it_belongs_in_0_4_0() {
    where_it_belongs_in("0.4.0");
}

#[test]
fn a_route_is_put_where_it_belongs_in_1_0_0() {
    where_it_belongs_in("1.0.0");
}

#[test]
fn a_route_is_put_where_it_belongs_in_1_1_0() {
    where_it_belongs_in("1.1.0");
}

#[test]
fn a_route_with_scope_link_needs_no_gateway() {
    let node = Node::new();
    let config = with_routes(&node, &["10.1.0.0/24"], json!([{"dst": "192.0.2.0/24", "scope": 253}]));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    let found = route(&container, "main", "192.0.2.0/24");
    assert_eq!((&found["scope"], &found["gateway"]), (&json!("link"), &Value::Null), "{found}");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

/// IPv6 routes have no scope in the kernel, so the scope does not affect the gateway.
#[test]
fn an_ipv6_route_with_a_scope_goes_through_the_gateway() {
    let node = Node::new();
    let config = with_routes(&node, &["fd00:1::/64"], json!([{"dst": "2001:db8::/32", "scope": 253}]));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    let routes = container.json(&["ip", "-6", "-j", "route", "show", "2001:db8::/32"]);
    assert_eq!(routes[0]["gateway"], "fd00:1::1", "{routes}");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

/// An on-link route as written for releases without `scope`.
#[test]
fn a_route_with_a_gateway_of_zeros_has_no_gateway() {
    let node = Node::new();
    let config = with_routes(&node, &["10.1.0.0/24"], json!([{"dst": "192.0.2.0/24", "gw": "0.0.0.0"}]));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    let found = route(&container, "main", "192.0.2.0/24");
    assert_eq!((&found["dev"], &found["gateway"]), (&json!("eth0"), &Value::Null), "{found}");
    attachment.check(&result).success();
    container.exec(&["ip", "route", "del", "192.0.2.0/24"]);
    attachment.check(&result).failure();
    attachment.del_with(&result).success();
}

/// As `static` answers without a gateway. The kernel created that route with the address.
#[test]
fn a_route_to_the_containers_own_network_is_accepted() {
    let node = Node::new();
    let answer =
        json!({"cniVersion": VERSION, "ips": [{"address": "10.1.0.5/24"}], "routes": [{"dst": "10.1.0.0/24"}]});
    let script = format!("#!/bin/sh\ncat >/dev/null\n[ $CNI_COMMAND != ADD ] || echo '{answer}'\n");
    let folder = crate::delegation::executable(&node, "static", &script);
    let config = patched(layer2(), json!({"ipam": {"type": "static"}}));
    let container = node.container();
    let attachment = Attachment::new(&node, &container, config);
    let call = |verb: &str, prev| attachment.invocation(verb, prev).cni_path(&folder).run();
    let result = call("ADD", None).success();
    let found = container.json(&["ip", "-j", "route", "show", "10.1.0.0/24"]);
    assert_eq!(found[0]["dev"], "eth0", "{found}");
    assert_eq!(result["routes"], answer["routes"]);
    call("CHECK", Some(&result)).success();
    call("DEL", Some(&result)).success();
}

/// Returns the routes to the container's own IPv4 subnet, in the order in which the kernel tries
/// them: gateway and metric of each.
fn to_own_subnet(container: &Container) -> Vec<(Value, Value)> {
    let routes = container.json(&["ip", "-j", "-4", "route", "show", "table", "main", "10.1.0.0/24"]);
    let gateways = routes.as_array().unwrap().iter().map(|route| (route["gateway"].clone(), route["metric"].clone()));
    gateways.collect()
}

#[test]
fn a_route_to_the_own_subnet_precedes_the_kernels() {
    for (routes, gateway) in [
        (json!([{"dst": "10.1.0.0/24"}]), "10.1.0.1"),
        (json!([{"dst": "10.1.0.0/24", "gw": "10.1.0.1"}]), "10.1.0.1"),
        (json!([{"dst": "0.0.0.0/0"}, {"dst": "10.1.0.0/24", "gw": "10.1.0.99"}]), "10.1.0.99"),
    ] {
        for is_gateway in [true, false] {
            let node = Node::new();
            let patch = json!({"isGateway": is_gateway, "ipam": {"routes": routes}});
            let config = patched(bridge(&node, &["10.1.0.0/24", "fd00:1::/64"]), patch);
            let (container, attachment, result) = attach(&node, &config, 1).remove(0);
            let expected = [(json!(gateway), Value::Null), (Value::Null, Value::Null)];
            assert_eq!(to_own_subnet(&container), expected, "{routes}");
            assert_eq!(result["routes"], routes);
            attachment.check(&result).success();
            attachment.del_with(&result).success();
        }
    }
}

#[test]
fn check_fails_when_the_route_to_the_own_subnet_is_gone() {
    let node = Node::new();
    let config = with_routes(&node, &["10.1.0.0/24"], json!([{"dst": "10.1.0.0/24"}]));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    container.exec(&["ip", "route", "del", "10.1.0.0/24", "via", "10.1.0.1"]);
    attachment.check(&result).failure();
    attachment.del_with(&result).success();
}

#[test]
fn a_route_with_a_metric_follows_the_kernels() {
    let node = Node::new();
    let routes = json!([{"dst": "10.1.0.0/24", "gw": "10.1.0.99", "priority": 7}]);
    let (container, attachment, result) = attach(&node, &with_routes(&node, &["10.1.0.0/24"], routes), 1).remove(0);
    let expected = [(Value::Null, Value::Null), (json!("10.1.0.99"), json!(7))];
    assert_eq!(to_own_subnet(&container), expected);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn several_gateways_to_the_own_subnet_make_one_route() {
    let node = Node::new();
    let routes = json!([{"dst": "10.1.0.0/24", "gw": "10.1.0.98"}, {"dst": "10.1.0.0/24", "gw": "10.1.0.99"}]);
    let (container, attachment, result) = attach(&node, &with_routes(&node, &["10.1.0.0/24"], routes), 1).remove(0);
    let shown = container.json(&["ip", "-j", "route", "show", "10.1.0.0/24"]);
    let hops: Vec<&Value> = shown[0]["nexthops"].as_array().unwrap().iter().map(|hop| &hop["gateway"]).collect();
    assert_eq!(hops, ["10.1.0.98", "10.1.0.99"], "{shown}");
    assert_eq!(shown[1]["protocol"], "kernel", "{shown}");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn an_ipv6_route_to_the_own_subnet_joins_the_kernels() {
    let node = Node::new();
    let config = with_routes(&node, &["fd00:1::/64"], json!([{"dst": "fd00:1::/64"}]));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    let shown = container.json(&["ip", "-j", "-6", "route", "show", "fd00:1::/64"]);
    let gateways: Vec<&Value> = shown.as_array().unwrap().iter().map(|route| &route["gateway"]).collect();
    assert_eq!(gateways, [&Value::Null, &json!("fd00:1::1")], "{shown}");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn a_repeated_route_is_accepted() {
    let node = Node::new();
    let twice = json!([{"dst": "192.0.2.0/24"}, {"dst": "192.0.2.0/24", "gw": "10.1.0.1"}]);
    let (container, attachment, result) = attach(&node, &with_routes(&node, &["10.1.0.0/24"], twice), 1).remove(0);
    let routes = container.json(&["ip", "-j", "route", "show", "192.0.2.0/24"]);
    assert_eq!(routes.as_array().unwrap().len(), 1, "{routes}");
    attachment.del_with(&result).success();
}

#[test]
fn the_default_route_of_the_first_network_stays() {
    let node = Node::new();
    let first = with_routes(&node, &["10.1.0.0/24"], json!([{"dst": "0.0.0.0/0"}]));
    let (container, one, one_result) = attach(&node, &first, 1).remove(0);
    let second = patched(
        with_routes(&node, &["10.2.0.0/24"], json!([{"dst": "0.0.0.0/0"}])),
        json!({"name": "net2", "bridge": "br1"}),
    );
    let two = one.clone().ifname("net1").config(second);
    let outcome = two.add();
    let result = outcome.success();
    assert_eq!(route(&container, "main", "default")["gateway"], "10.1.0.1", "{}", outcome.report());
    assert_eq!(result["routes"], json!([{"dst": "0.0.0.0/0", "priority": 1}]));
    assert!(outcome.stderr.contains("behind the default route of another network"), "{}", outcome.report());
    one.check(&one_result).success();
    two.check(&result).success();
    two.del_with(&result).success();
    one.del_with(&one_result).success();
}

#[test]
fn a_blackhole_route_is_a_conflict_and_stays() {
    let node = Node::new();
    let container = node.container();
    container.ip(&["route add blackhole 192.0.2.0/24", "route add unreachable 2001:db8::/32"]);
    for dst in ["192.0.2.0/24", "2001:db8::/32"] {
        let config = with_routes(&node, &["10.1.0.0/24", "fd00:1::/64"], json!([{ "dst": dst }]));
        node.expect_left("br0");
        let attachment = Attachment::new(&node, &container, config);
        let failure = attachment.add().fails_with(100, &format!("failed to add route {dst} via "));
        assert!(failure.details.contains("of another type"));
        assert!(container.link("eth0").is_none());
        attachment.del().success();
    }
    let blackhole = container.exec(&["ip", "route", "show", "192.0.2.0/24"]);
    assert_eq!(blackhole.trim(), "blackhole 192.0.2.0/24");
}

#[test]
fn an_invalid_route_is_refused_before_any_change() {
    let node = Node::new();
    let container = node.container();
    for bad in [
        json!({"dst": "192.0.2.7/24"}),
        json!({"dst": "192.0.2.0/24", "gw": "fd00:1::1"}),
        json!({"dst": "192.0.2.0/24", "gw": "172.31.9.9"}),
    ] {
        let attachment = Attachment::new(&node, &container, with_routes(&node, &["10.1.0.0/24"], json!([bad])));
        assert_eq!(attachment.add().failure().code, Some(7), "{bad}");
        assert!(container.link("eth0").is_none());
        assert_eq!(node.reservations("net1"), []);
        attachment.del().success();
    }
}
