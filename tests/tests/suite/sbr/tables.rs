//! The rules and routes that ADD creates, and those that it leaves alone.

use cni_testkit::Node;
use conformance::{VERSIONS, patched};
use serde_json::{Value, json};

use super::{V4, V6, pod, prev, routed, routes, rules, state};

#[test]
fn the_interface_s_routes_move_to_table_100() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    pod.ip(&["route add 10.8.0.0/16 dev net1 mtu 1300", "route add 10.9.0.0/16 via 10.2.0.9 metric 7"]);
    let local = routes(&pod, "-4", "local");
    let prev = prev(&pod, &[V4]);
    let attachment = routed(&node, &pod, json!({}));
    assert_eq!(attachment.add_after(&prev).success(), prev);
    assert_eq!(rules(&pod), ["from 10.2.0.2 lookup 100"]);
    assert_eq!(
        routes(&pod, "-4", "100"),
        [
            "default via 10.2.0.1 dev net1",
            "10.2.0.0/24 dev net1 proto kernel scope link src 10.2.0.2",
            "10.8.0.0/16 dev net1 scope link mtu 1300",
            "10.9.0.0/16 via 10.2.0.9 dev net1 metric 7",
        ]
    );
    let of_eth0 = ["default via 10.1.0.1 dev eth0", "10.1.0.0/24 dev eth0 proto kernel scope link src 10.1.0.2"];
    assert_eq!(routes(&pod, "-4", "main"), of_eth0);
    assert_eq!(routes(&pod, "-4", "local"), local);
    attachment.del().success();
    assert_eq!(rules(&pod), [""; 0]);
    attachment.del().success();
}

#[test]
fn each_family_has_its_table_and_its_routes() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    pod.ip(&["address add fe80::5/64 dev net1 nodad", "route add fd99::/64 via fd02::9"]);
    let prev = prev(&pod, &[V4, V6]);
    routed(&node, &pod, json!({})).add_after(&prev).success();
    assert_eq!(rules(&pod), ["from 10.2.0.2 lookup 100", "from fd02::2 lookup 101"]);
    assert_eq!(routes(&pod, "-6", "100"), [""; 0]);
    assert_eq!(routes(&pod, "-4", "101"), [""; 0]);
    assert_eq!(
        routes(&pod, "-6", "101"),
        [
            "fd02::/64 dev net1 proto kernel metric 256",
            "fd99::/64 via fd02::9 dev net1 metric 1024",
            "fe80::/64 dev net1 proto kernel metric 256",
            "default via fd02::1 dev net1 metric 1024",
        ]
    );
    // Packets with a link-local source match no rule.
    let main = routes(&pod, "-6", "main");
    assert!(main.iter().any(|route| route.starts_with("fe80::/64 dev net1")), "{main:?}");
    assert!(main.iter().all(|route| !route.contains("net1") || route.starts_with("fe80")), "{main:?}");
}

#[test]
fn routes_of_a_family_without_an_address_stay() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let before = routes(&pod, "-6", "main");
    routed(&node, &pod, json!({})).add_after(&prev(&pod, &[V4])).success();
    assert_eq!(routes(&pod, "-6", "main"), before);
    assert_eq!(routes(&pod, "-6", "100"), [""; 0]);
}

#[test]
fn a_default_route_of_the_interface_moves_along() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    pod.ip(&["route del default", "route add default via 10.2.0.9"]);
    routed(&node, &pod, json!({})).add_after(&prev(&pod, &[V4])).success();
    assert_eq!(routes(&pod, "-4", "100")[0], "default via 10.2.0.9 dev net1");
    assert_eq!(routes(&pod, "-4", "100").len(), 2);
}

#[test]
fn a_route_over_several_gateways_moves_along() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    pod.ip(&["route add 10.9.0.0/16 nexthop via 10.2.0.8 nexthop via 10.2.0.9"]);
    routed(&node, &pod, json!({})).add_after(&prev(&pod, &[V4])).success();
    let moved = routes(&pod, "-4", "100").join("\n");
    assert!(moved.contains("via 10.2.0.8 dev net1") && moved.contains("via 10.2.0.9 dev net1"), "{moved}");
    assert!(!routes(&pod, "-4", "main").join("\n").contains("10.9.0.0/16"));
}

#[test]
fn two_addresses_have_a_table_each() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    pod.ip(&[
        "address add 10.3.0.2/24 dev net1",
        "route add 10.8.0.0/16 dev net1",
        "route add 10.9.0.0/16 via 10.3.0.9",
    ]);
    let prev = prev(&pod, &[V4, ("10.3.0.2/24", "10.3.0.1")]);
    routed(&node, &pod, json!({})).add_after(&prev).success();
    assert_eq!(rules(&pod), ["from 10.3.0.2 lookup 101", "from 10.2.0.2 lookup 100"]);
    let of = |table| routes(&pod, "-4", table).join("\n");
    assert!(of("100").contains("10.8.0.0/16") && of("101").contains("10.8.0.0/16"), "{}", of("all"));
    assert!(!of("100").contains("10.9.0.0/16") && of("101").contains("10.9.0.0/16"), "{}", of("all"));
    assert!(of("100").contains("default via 10.2.0.1") && of("101").contains("default via 10.3.0.1"));
}

#[test]
fn a_table_that_any_rule_or_route_uses_is_not_taken() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    pod.ip(&[
        "rule add fwmark 7 lookup 100",
        "route add 10.50.0.0/16 dev eth0 table 101",
        "route add blackhole fd50::/64 table 103",
    ]);
    pod.exec(&["ip", "-6", "rule", "add", "from", "fd50::1", "lookup", "102"]);
    routed(&node, &pod, json!({})).add_after(&prev(&pod, &[V4, V6])).success();
    let rules = rules(&pod).join("\n");
    assert!(rules.contains("from 10.2.0.2 lookup 104") && rules.contains("from fd02::2 lookup 105"), "{rules}");
}

#[test]
fn a_configured_table_gets_rules_and_no_route_is_touched() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let before = state(&pod);
    for table in [5000, 7] {
        let attachment = routed(&node, &pod, json!({ "table": table }));
        attachment.add_after(&prev(&pod, &[V4, V6])).success();
        let expected = [format!("from 10.2.0.2 lookup {table}"), format!("from fd02::2 lookup {table}")];
        assert_eq!(rules(&pod), expected);
        assert_eq!(state(&pod)[2..], before);
        routed(&node, &pod, json!({"table": 6})).del().success();
        assert_eq!(rules(&pod), expected, "a DEL of another table leaves them");
        attachment.del().success();
        assert_eq!(state(&pod), before);
    }
}

#[test]
fn configured_gateways_win_over_all_others() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    pod.ip(&["route add default via 10.2.0.8 metric 5", "route add default via fd02::8 metric 5"]);
    let attachment = routed(&node, &pod, json!({"gateways": ["fd02::77", "10.2.0.77"]}));
    attachment.add_after(&prev(&pod, &[V4, V6])).success();
    let default = |family, table| {
        let all = routes(&pod, family, table);
        all.into_iter().filter(|route| route.starts_with("default")).collect::<Vec<_>>()
    };
    assert_eq!(default("-4", "100"), ["default via 10.2.0.77 dev net1"]);
    assert_eq!(default("-6", "101"), ["default via fd02::77 dev net1 metric 1024"]);
}

#[test]
fn a_gateway_of_one_family_leaves_the_other() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    routed(&node, &pod, json!({"gateways": ["10.2.0.77"]})).add_after(&prev(&pod, &[V4, V6])).success();
    assert_eq!(routes(&pod, "-4", "100")[0], "default via 10.2.0.77 dev net1");
    assert!(routes(&pod, "-6", "101").contains(&"default via fd02::1 dev net1 metric 1024".to_owned()));
}

#[test]
fn source_hints_stay_in_the_main_table() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    pod.ip(&["route add 10.8.0.0/16 dev net1", "route add 10.9.0.0/16 via 10.2.0.9"]);
    let before = state(&pod);
    let attachment = routed(&node, &pod, json!({"addSourceHints": true}));
    attachment.add_after(&prev(&pod, &[V4, V6])).success();
    let of_net1 = |family| {
        let all = routes(&pod, family, "main");
        all.into_iter().filter(|route| route.contains("net1")).collect::<Vec<_>>()
    };
    assert_eq!(of_net1("-4"), ["10.2.0.0/24 dev net1 scope link src 10.2.0.2", "10.8.0.0/16 dev net1 scope link"]);
    assert_eq!(of_net1("-6"), ["fd02::/64 dev net1 src fd02::2 metric 1024"]);
    assert!(routes(&pod, "-4", "100").contains(&"10.9.0.0/16 via 10.2.0.9 dev net1".to_owned()), "{before:?}");
}

#[test]
fn a_tentative_address_does_not_stop_source_hints() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    pod.ip(&["address del fd02::2/64 dev net1", "address add fd02::2/64 dev net1"]);
    routed(&node, &pod, json!({"addSourceHints": true})).add_after(&prev(&pod, &[V4, V6])).success();
    let main = routes(&pod, "-6", "main").join("\n");
    assert!(main.contains("fd02::/64 dev net1"), "{main}");
}

#[test]
fn addresses_without_an_interface_count() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let mut prev = prev(&pod, &[V4]);
    prev["ips"].as_array_mut().unwrap().remove(0);
    prev["ips"][0].as_object_mut().unwrap().remove("interface");
    routed(&node, &pod, json!({})).add_after(&prev).success();
    assert_eq!(rules(&pod), ["from 10.2.0.2 lookup 100"]);
}

#[test]
fn every_version_gets_its_prev_result_back() {
    for version in VERSIONS {
        let node = Node::new();
        let (pod, _networks) = pod(&node);
        let mut prev = match version {
            "0.1.0" | "0.2.0" => json!({"ip4": {"ip": "10.2.0.2/24", "gateway": "10.2.0.1"}, "dns": {}}),
            _ => prev(&pod, &[V4]),
        };
        prev["cniVersion"] = version.into();
        if version.starts_with("0.3") || version == "0.4.0" {
            prev["ips"].as_array_mut().unwrap().iter_mut().for_each(|ip| ip["version"] = "4".into());
            prev["dns"] = json!({});
        }
        let attachment = routed(&node, &pod, json!({ "cniVersion": version }));
        assert_eq!(attachment.add_after(&prev).success(), prev, "{version}");
        assert_eq!(rules(&pod), ["from 10.2.0.2 lookup 100"], "{version}");
    }
}

#[test]
fn unknown_members_of_prev_result_are_handed_on() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let unknown = json!({"vendor": {"id": 7}});
    let prev: Value = patched(prev(&pod, &[V4]), unknown);
    let result = routed(&node, &pod, json!({})).add_after(&prev).success();
    assert_eq!(result, prev);
}
