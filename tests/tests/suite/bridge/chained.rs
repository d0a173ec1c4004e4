//! bridge after another plugin: attaches that plugin's host end to the bridge and owns nothing else
//! of it.

use cni_testkit::trace::{self, Act, Plan};
use cni_testkit::{Attachment, Container, Node, Outcome, probe, require};
use conformance::{bridge, layer2, patched};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// Creates what a plugin before bridge creates: a veth pair, and a result that names both ends.
pub(crate) fn made_before(node: &Node, container: &Container) -> Value {
    let netns = container.netns().to_str().unwrap();
    node.exec(&["ip", "link", "add", "host0", "type", "veth", "peer", "name", "temp0"]);
    node.exec(&["ip", "link", "set", "temp0", "netns", netns]);
    container.exec(&["ip", "link", "set", "temp0", "name", "eth0"]);
    container.exec(&["ip", "link", "set", "eth0", "up"]);
    node.exec(&["ip", "link", "set", "host0", "up"]);
    json!({
        "cniVersion": "1.0.0",
        "interfaces": [
            {"name": "host0", "mac": node.link("host0").unwrap()["address"]},
            {"name": "eth0", "mac": container.link("eth0").unwrap()["address"], "sandbox": netns},
        ],
        "dns": {"nameservers": ["192.0.2.53"]},
    })
}

#[test]
fn the_host_end_becomes_a_port_and_the_result_gains_the_bridge() {
    let node = Node::new();
    let container = node.container();
    let prev = made_before(&node, &container);
    let attachment = Attachment::new(&node, &container, patched(layer2(), json!({"hairpinMode": true})));
    let result = attachment.add_after(&prev).success();

    let port = node.link("host0").unwrap();
    assert_eq!(port["master"], "br0");
    assert_eq!(port["linkinfo"]["info_slave_data"]["hairpin"], true);
    let alias = port["ifalias"].as_str().unwrap_or_default();
    assert!(alias.contains(&format!("cni:net1/{}/eth0", container.id)), "marked as ours: {alias}");
    let names: Vec<_> = result["interfaces"].as_array().unwrap().iter().map(|i| i["name"].as_str().unwrap()).collect();
    assert_eq!(names.len(), 3);
    assert!(names.contains(&"br0") && names.contains(&"host0") && names.contains(&"eth0"), "{names:?}");
    assert_eq!(result["dns"], prev["dns"]);

    attachment.check(&result).success();
    attachment.del_with(&result).success();
    let port = node.link("host0").expect("it is the other plugin's to delete");
    assert!(port["master"].is_null(), "{port}");
    assert!(container.link("eth0").is_some());
    node.exec(&["ip", "link", "del", "host0"]);
}

#[test]
fn chained_result_has_the_final_mac_of_an_existing_bridge() {
    let node = Node::new();
    let container = node.container();
    let prev = made_before(&node, &container);
    node.exec(&["ip", "link", "add", "br0", "up", "type", "bridge"]);
    let attachment = Attachment::new(&node, &container, layer2());
    let result = attachment.add_after(&prev).success();
    assert_eq!(result["interfaces"][2]["mac"], node.link("br0").unwrap()["address"], "{result:#}");
    attachment.del_with(&result).success();
    node.exec(&["ip", "link", "del", "host0"]);
}

#[test]
fn a_second_chained_del_deletes_no_interface() {
    let node = Node::new();
    let container = node.container();
    let prev = made_before(&node, &container);
    let attachment = Attachment::new(&node, &container, layer2());
    let result = attachment.add_after(&prev).success();
    attachment.del_with(&result).success();
    let outcome = attachment.del_with(&result);
    outcome.success();
    assert!(node.link("host0").is_some(), "it is the other plugin's to delete\n{}", outcome.report());
    node.exec(&["ip", "link", "del", "host0"]);
}

#[test]
fn a_second_chained_add_fails_and_changes_nothing() {
    let node = Node::new();
    let container = node.container();
    let prev = made_before(&node, &container);
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"]));
    let result = attachment.add_after(&prev).success();
    attachment.add_after(&prev).failure();
    assert_eq!((node.reservations("net1").len(), node.ports("br0")), (1, vec!["host0".to_owned()]));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert_eq!(node.reservations("net1"), []);
    assert_eq!(container.addresses("eth0"), Vec::<String>::new(), "an address that is free again must not answer");
    node.exec(&["ip", "link", "del", "host0"]);
}

#[test]
fn ipam_runs_only_if_it_is_configured() {
    let node = Node::new();
    let container = node.container();
    let prev = made_before(&node, &container);
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"]));
    let result = attachment.add_after(&prev).success();
    assert_eq!(conformance::addresses(&result), ["10.1.0.2/24"]);
    assert_eq!(container.addresses("eth0"), ["10.1.0.2/24"]);
    container.ping("10.1.0.1");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert!(node.link("host0").is_some());
    assert_eq!(node.reservations("net1"), []);
    node.exec(&["ip", "link", "del", "host0"]);
}

/// The earlier plugin gave the interface an address: its gateway and masquerading are not bridge's
/// task.
#[track_caller]
fn judged_by_its_own_addresses(keys: Value, broken: &[&str]) {
    let node = Node::new();
    let container = node.container();
    let mut prev = made_before(&node, &container);
    prev["ips"] = json!([{"address": "10.50.0.5/24", "gateway": "10.50.0.1", "interface": 1}]);
    container.exec(&["ip", "address", "add", "10.50.0.5/24", "dev", "eth0"]);
    let attachment = Attachment::new(&node, &container, patched(bridge(&node, &["10.1.0.0/24"]), keys));
    let result = attachment.add_after(&prev).success();
    attachment.check(&result).success();
    if !broken.is_empty() {
        node.exec(broken);
        assert_eq!(attachment.check(&result).failure().code, Some(101));
    }
    attachment.del_with(&result).success();
    assert_eq!(container.addresses("eth0"), ["10.50.0.5/24"]);
    node.exec(&["ip", "link", "del", "host0"]);
}

#[test]
fn check_judges_the_gateway_of_its_own_addresses_alone() {
    judged_by_its_own_addresses(json!({}), &["ip", "address", "del", "10.1.0.1/24", "dev", "br0"]);
    judged_by_its_own_addresses(json!({"ipam": null}), &[]);
}

#[test]
fn check_judges_the_masquerading_of_its_own_addresses_alone() {
    require!(probe::nft());
    let nftables = json!({"isGateway": null, "ipMasq": true, "ipMasqBackend": "nftables"});
    judged_by_its_own_addresses(nftables.clone(), &["nft", "delete", "table", "inet", "cni_plugins_masquerade"]);
    judged_by_its_own_addresses(patched(nftables, json!({"ipam": null})), &[]);
}

#[test]
fn a_route_may_lead_through_the_earlier_plugins_network() {
    let node = Node::new();
    let container = node.container();
    let mut prev = made_before(&node, &container);
    prev["ips"] = json!([{"address": "10.50.0.5/24", "interface": 1}]);
    container.exec(&["ip", "address", "add", "10.50.0.5/24", "dev", "eth0"]);
    let routes = json!({"ipam": {"routes": [{"dst": "192.0.2.0/24", "gw": "10.50.0.9"}]}});
    let attachment = Attachment::new(&node, &container, patched(bridge(&node, &["10.1.0.0/24"]), routes));
    let result = attachment.add_after(&prev).success();
    let there = container.json(&["ip", "-j", "route", "show", "192.0.2.0/24"]);
    assert_eq!(there[0]["gateway"], "10.50.0.9", "{there}");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    node.exec(&["ip", "link", "del", "host0"]);
}

#[test]
fn an_add_without_a_host_end_is_refused() {
    let node = Node::new();
    let container = node.container();
    let prev = json!({"cniVersion": "1.0.0", "interfaces": [
        {"name": "eth0", "sandbox": container.netns()}, {"name": "host0"}]});
    let attachment = Attachment::new(&node, &container, layer2());
    assert_eq!(attachment.add_after(&prev).failure().code, Some(7));
    assert_eq!(node.ports("br0"), Vec::<String>::new());
    attachment.del_with(&prev).success();
}

/// Nomad's bridge network is such a list: loopback, bridge, firewall, portmap.
#[test]
fn a_previous_result_with_only_lo_does_not_change_the_add() {
    let node = Node::new();
    let container = node.container();
    let prev = json!({
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "lo", "mac": "00:00:00:00:00:00", "sandbox": container.netns()}],
        "ips": [{"address": "127.0.0.1/8", "interface": 0}, {"address": "::1/128", "interface": 0}],
    });
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"]));
    let result = attachment.add_after(&prev).success();
    assert_eq!(conformance::addresses(&result), ["10.1.0.2/24"], "what portmap and firewall go by: {result}");
    assert_eq!(container.addresses("eth0"), ["10.1.0.2/24"]);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert_eq!(node.reservations("net1"), []);
    assert!(container.link("eth0").is_none());
}

/// Calls ADD with a previous result that need not follow any schema.
#[track_caller]
fn add_behind(attachment: &Attachment<'_>, prev: Value) -> Outcome {
    let config = patched(attachment.config.clone(), json!({ "prevResult": prev }));
    attachment.invocation("ADD", None).bad_config(&config).run()
}

#[test]
fn a_previous_result_may_have_another_version_or_oddities() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"]));
    let sandbox = container.netns();
    for prev in [
        json!({"cniVersion": "0.4.0", "ips": [{"version": "4", "address": "10.9.0.1/24"}]}),
        json!({"cniVersion": "1.0.0", "interfaces": [{"name": "lo", "mtu": -1, "sandbox": sandbox}]}),
        json!({"cniVersion": "1.0.0", "ips": [{"address": "10.9.0.1/24", "interface": -1}]}),
        json!({"cniVersion": "7.0.0", "interfaces": [{"name": "eth0"}]}),
    ] {
        let outcome = add_behind(&attachment, prev.clone());
        let result = outcome.success();
        assert_eq!(conformance::addresses(&result), container.addresses("eth0"), "{prev}");
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
}

#[test]
fn the_interface_is_found_in_results_of_other_versions() {
    let node = Node::new();
    let container = node.container();
    let mut prev = made_before(&node, &container);
    prev["cniVersion"] = json!("0.4.0");
    prev["ips"] = json!([{"version": "4", "address": "10.50.0.5/24", "interface": 1}]);
    container.exec(&["ip", "address", "add", "10.50.0.5/24", "dev", "eth0"]);
    let attachment = Attachment::new(&node, &container, layer2());
    let result = add_behind(&attachment, prev.clone()).success();
    assert_eq!(node.ports("br0"), ["host0"]);
    assert_eq!(conformance::addresses(&result), ["10.50.0.5/24"]);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    // The unreadable part decides whether this interface is the one to attach.
    prev["ips"][0]["address"] = json!("nonsense");
    add_behind(&attachment, prev).fails_with(6, "could not parse prevResult");
    assert_eq!(node.ports("br0"), Vec::<String>::new());
    node.exec(&["ip", "link", "del", "host0"]);
}

#[test]
fn a_failed_chained_add_gives_the_port_back() {
    let node = Node::new();
    let container = node.container();
    let prev = made_before(&node, &container);
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"ipam": {"type": "not-there"}}));
    let attachment = Attachment::new(&node, &container, config);
    attachment.add_after(&prev).failure();
    assert!(node.link("host0").unwrap()["master"].is_null());
    node.exec(&["ip", "link", "del", "host0"]);
}

#[test]
fn spoof_rules_precede_and_outlast_the_port() {
    require!(probe::nft_bridge());
    require!(trace::supported());
    let node = Node::new();
    let container = node.container();
    let prev = made_before(&node, &container);
    let attachment = Attachment::new(&node, &container, patched(layer2(), json!({"macspoofchk": true})));
    let plan = Plan { victim: "bridge".into(), at: u64::MAX, act: Act::Signal(Signal::SIGTERM) };
    let traced_add = |attachment: &Attachment<'_>| {
        let (mut as_port, mut unguarded) = (0, 0);
        let traced = attachment.invocation("ADD", Some(&prev)).watched(&plan, |hit| {
            if hit.call.starts_with("send") && node.ports("br0") == ["host0"] {
                as_port += 1;
                unguarded += u32::from(!node.ruleset().contains("macspoofchk"));
            }
        });
        assert!(as_port > 0 && unguarded == 0, "unguarded at {unguarded} of {as_port} requests");
        traced.outcome
    };
    attachment.del_with(&traced_add(&attachment).success()).success();
    let ipam = json!({"ipam": {"type": "not-there"}});
    traced_add(&attachment.clone().config(patched(attachment.config.clone(), ipam))).failure();
    node.exec(&["ip", "link", "del", "host0"]);
}

#[test]
fn del_after_a_killed_chained_add_leaves_nothing() {
    require!(probe::nft_bridge());
    require!(trace::supported());
    let node = Node::new();
    let container = node.container();
    let prev = made_before(&node, &container);
    let attachment = Attachment::new(&node, &container, patched(layer2(), json!({"macspoofchk": true})));
    let plan = |at| Plan { victim: "bridge".into(), at, act: Act::Signal(Signal::SIGKILL) };
    let whole = attachment.invocation("ADD", Some(&prev)).traced(&plan(u64::MAX));
    attachment.del_with(&whole.outcome.success()).success();
    let mut killed_with_rules = 0;
    for (at, _) in (1..).zip(&whole.all).filter(|(_, hit)| !hit.starting && hit.call.starts_with("send")) {
        let traced = attachment.invocation("ADD", Some(&prev)).traced(&plan(at));
        killed_with_rules += u32::from(node.ruleset().contains("macspoofchk"));
        attachment.del_with(&prev).success();
        let left = (node.ruleset().contains("macspoofchk"), node.link("host0").unwrap()["master"].clone());
        assert_eq!(left, (false, Value::Null), "killed at {at}, {:?}\n{}", traced.hit, traced.outcome.report());
    }
    assert!(killed_with_rules > 0, "no kill came after the rules were written");
    node.exec(&["ip", "link", "del", "host0"]);
}

/// Creates a pair in the container: `ifname` and its other end have the indexes of `inner` and
/// `outer`, the ends of another container's pair.
pub(crate) fn imitate_pair(container: &Container, ifname: &str, inner: &Value, outer: &Value) {
    let (inner, outer) = (&inner["ifindex"], &outer["ifindex"]);
    container.ip(&[
        &format!("link add {ifname} index {inner} type veth peer name other0 index {outer}"),
        &format!("link set {ifname} up"),
    ]);
}

#[test]
fn a_pod_that_imitates_anothers_pair_does_not_get_its_port() {
    let node = Node::new();
    let (victim, container) = (node.container(), node.container());
    made_before(&node, &victim);
    let before = node.link("host0").unwrap();
    imitate_pair(&container, "eth0", &victim.link("eth0").unwrap(), &before);
    let prev = json!({
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "host0"}, {"name": "eth0", "sandbox": container.netns()}],
    });
    Attachment::new(&node, &container, layer2()).add_after(&prev).fails_naming(7, &["eth0"]);
    let after = node.link("host0").unwrap();
    assert_eq!((&after["master"], &after["ifalias"]), (&Value::Null, &Value::Null));
    node.exec(&["ip", "link", "del", "host0"]);
}

#[test]
fn del_gives_the_port_back_if_the_pod_has_another_eth0() {
    let node = Node::new();
    let container = node.container();
    let prev = made_before(&node, &container);
    let attachment = Attachment::new(&node, &container, layer2());
    let result = attachment.add_after(&prev).success();
    container.ip(&["link set eth0 name mine0", "link add eth0 type veth peer name other0"]);
    attachment.del_with(&result).success();
    let port = node.link("host0").unwrap();
    assert_eq!((&port["master"], &port["ifalias"]), (&Value::Null, &Value::Null));
    assert!(container.link("eth0").is_some(), "it is the pod's");
    node.exec(&["ip", "link", "del", "host0"]);
}
