//! VLANs: refusals on every kernel, and traffic where the kernel filters by VLAN.

use cni_testkit::{Attachment, Container, Invocation, Node, probe, require, unprovoked};
use conformance::{attach, bridge, host_end, layer2, patched};
use serde_json::{Value, json};

use crate::storm::all_at_once;

/// The VLANs of a port as (ID, flags).
fn vlans(node: &Node, port: &str) -> Vec<(u64, Vec<String>)> {
    let all = node.json(&["bridge", "-j", "vlan", "show", "dev", port]);
    let of_port = all[0]["vlans"].as_array().cloned().unwrap_or_default();
    let flags = |vlan: &Value| {
        vlan["flags"].as_array().into_iter().flatten().filter_map(|f| f.as_str().map(str::to_owned)).collect()
    };
    let mut found = Vec::new();
    for vlan in &of_port {
        let first = vlan["vlan"].as_u64().unwrap();
        for id in first..=vlan["vlanEnd"].as_u64().unwrap_or(first) {
            found.push((id, flags(vlan)));
        }
    }
    found
}

fn untagged(id: u64) -> (u64, Vec<String>) {
    (id, vec!["PVID".to_owned(), "Egress Untagged".to_owned()])
}

#[test]
fn ids_outside_the_standard_are_refused() {
    let node = Node::new();
    let container = node.container();
    for id in [-1, 4095, 5000] {
        let attachment = Attachment::new(&node, &container, patched(layer2(), json!({"vlan": id})));
        attachment.add().fails_with(7, &format!("invalid VLAN ID {id} (must be between 0 and 4094)"));
    }
    assert!(node.link("br0").is_none());
}

#[test]
fn invalid_trunks_are_refused() {
    let node = Node::new();
    let container = node.container();
    for (trunk, text) in [
        (json!({"minID": 0, "maxID": 5}), "incorrect trunk minID parameter"),
        (json!({"minID": 1, "maxID": 5000}), "incorrect trunk maxID parameter"),
        (json!({"minID": 9, "maxID": 5}), "minID is greater than maxID in trunk parameter"),
        (json!({"maxID": 5}), "minID and maxID should be configured simultaneously, minID is missing"),
        (json!({"minID": 5}), "minID and maxID should be configured simultaneously, maxID is missing"),
        (json!({"id": 0}), "incorrect trunk id parameter"),
        (json!({"id": 4095}), "incorrect trunk id parameter"),
    ] {
        let attachment = Attachment::new(&node, &container, patched(layer2(), json!({"vlanTrunk": [trunk]})));
        let failure = attachment.add().fails_with(7, "");
        assert!(failure.msg.contains(text), "{failure:?} should say `{text}`");
    }
    assert!(node.link("br0").is_none());
}

#[test]
fn del_works_after_the_configured_vlan_has_changed() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    let bad = patched(attachment.config.clone(), json!({"vlan": 5000}));
    attachment.clone().config(bad).del_with(&result).success();
    assert_eq!((node.reservations("net1"), node.ports("br0")), (vec![], vec![]));
}

#[test]
fn missing_vlan_filtering_fails_before_any_change() {
    if probe::vlan_filtering().is_ok() {
        unprovoked("this kernel has VLAN filtering: nothing to refuse");
        return;
    }
    let node = Node::new();
    let container = node.container();
    for patch in [json!({"vlan": 100}), json!({"vlanTrunk": [{"id": 7}]})] {
        let attachment = Attachment::new(&node, &container, patched(bridge(&node, &["10.1.0.0/24"]), patch.clone()));
        let failure = attachment.add().failure();
        assert_eq!(failure.code, Some(2), "{failure:?}");
        assert!(failure.msg.contains("vlan"), "{failure:?} should name the key of {patch}");
        assert!(node.link("br0").is_none() && container.link("eth0").is_none());
        assert_eq!(node.reservations("net1"), []);
        attachment.del().success();
    }
}

#[test]
fn vlan_0_means_no_vlan() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &patched(layer2(), json!({"vlan": 0})), 1).remove(0);
    attachment.del_with(&result).success();
}

#[test]
fn a_port_is_only_in_its_vlan() {
    require!(probe::vlan_filtering());
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &patched(layer2(), json!({"vlan": 100})), 1).remove(0);
    assert_eq!(vlans(&node, host_end(&result, "br0")), [untagged(100)]);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn the_default_vlan_is_kept_on_request() {
    require!(probe::vlan_filtering());
    let node = Node::new();
    let config = patched(layer2(), json!({"vlan": 100, "preserveDefaultVlan": true}));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    let ids: Vec<u64> = vlans(&node, host_end(&result, "br0")).iter().map(|vlan| vlan.0).collect();
    assert_eq!(ids, [1, 100]);
    attachment.del_with(&result).success();
}

#[test]
fn a_trunk_carries_its_vlans_tagged() {
    require!(probe::vlan_filtering());
    let node = Node::new();
    let trunk = json!([{"minID": 10, "maxID": 12}, {"id": 11}, {"id": 20}]);
    let (_c, attachment, result) = attach(&node, &patched(layer2(), json!({"vlanTrunk": trunk})), 1).remove(0);
    let tagged = |id| (id, Vec::new());
    assert_eq!(vlans(&node, host_end(&result, "br0")), [untagged(1), tagged(10), tagged(11), tagged(12), tagged(20)]);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn vlans_are_separate_and_members_reach_each_other() {
    require!(probe::vlan_filtering());
    let node = Node::new();
    let base = patched(bridge(&node, &["10.1.0.0/24"]), json!({"isGateway": false}));
    let red = attach(&node, &patched(base.clone(), json!({"vlan": 100})), 2);
    let blue = attach(&node, &patched(base, json!({"vlan": 200})), 1);
    red[0].0.ping("10.1.0.3");
    assert!(!red[0].0.run(&["ping", "-c1", "-W1", "10.1.0.4"]).ok, "a frame crossed from one VLAN to another");
    for (_, attachment, result) in red.into_iter().chain(blue) {
        attachment.del_with(&result).success();
    }
}

#[test]
fn a_vlan_s_gateway_is_an_interface_of_its_own() {
    require!(probe::vlan_filtering());
    let node = Node::new();
    node.expect_left("br0.100");
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"vlan": 100}));
    let all = attach(&node, &config, 2);
    for port in node.ports("br0") {
        if all.iter().all(|one| host_end(&one.2, "br0") != port) {
            node.expect_left(&port);
        }
    }
    all[0].0.ping("10.1.0.1");
    all[1].0.ping("10.1.0.1");
    assert!(all[0].2["interfaces"].as_array().unwrap().iter().any(|interface| interface["name"] == "br0.100"));
    for (_, attachment, result) in all {
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
}

/// Expects the gateway of br0's VLAN 100 to stay, like the bridge.
fn expect_gateway(node: &Node) {
    node.ports("br0").iter().chain([&"br0.100".to_owned()]).for_each(|name| node.expect_left(name));
}

#[test]
fn the_next_add_finishes_a_gateway_left_unmarked_by_a_kill() {
    require!(probe::vlan_filtering());
    let node = Node::new();
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"vlan": 100}));
    let (_first, attachment, _) = attach(&node, &config, 1).remove(0);
    attachment.del().success();
    expect_gateway(&node);
    let port = node.ports("br0").remove(0);
    node.exec(&["ip", "link", "set", "br0.100", "down"]);
    node.exec(&["ip", "link", "set", &port, "alias", ""]);
    node.exec(&["bridge", "vlan", "del", "dev", &port, "vid", "100"]);
    node.exec(&["bridge", "vlan", "add", "dev", &port, "vid", "1", "pvid", "untagged"]);
    let (container, attachment, _) = attach(&node, &config, 1).remove(0);
    assert!(reaches(&container, "10.1.0.1"));
    assert_eq!(node.link(&port).unwrap()["ifalias"], "cni-bridge: VLAN gateway");
    attachment.del().success();
}

#[test]
fn concurrent_first_adds_of_a_vlan_create_one_gateway() {
    require!(probe::vlan_filtering());
    for _ in 0..3 {
        let node = Node::new();
        let containers: Vec<Container> = (0..5).map(|_| node.container()).collect();
        let configs = vec![patched(bridge(&node, &["10.1.0.0/24"]), json!({"vlan": 100})); containers.len()];
        all_at_once(&node, "ADD", &containers, &configs).iter().for_each(|outcome| drop(outcome.success()));
        for container in &containers {
            assert!(reaches(container, "10.1.0.1"));
        }
        all_at_once(&node, "DEL", &containers, &configs).iter().for_each(|outcome| drop(outcome.success()));
        assert_eq!(node.ports("br0").len(), 1, "the gateway's port alone");
        expect_gateway(&node);
    }
}

#[test]
fn vlan_filtering_is_not_enabled_with_foreign_ports() {
    require!(probe::vlan_filtering());
    let node = Node::new();
    node.exec(&["ip", "link", "add", "br0", "type", "bridge"]);
    node.exec(&["ip", "link", "add", "uplink", "type", "veth", "peer", "name", "far"]);
    node.exec(&["ip", "link", "set", "uplink", "master", "br0"]);
    let container = node.container();
    let attachment = Attachment::new(&node, &container, patched(layer2(), json!({"vlan": 100})));
    attachment.add().fails_naming(7, &["uplink"]);
    attachment.del().success();
    node.exec(&["ip", "link", "del", "uplink"]);
    attachment.add().success();
    attachment.del().success();
}

#[test]
fn a_port_that_its_add_has_not_marked_yet_is_not_foreign() {
    require!(probe::vlan_filtering());
    let node = Node::new();
    node.exec(&["ip", "link", "add", "br0", "type", "bridge"]);
    // The state between the two requests of an ADD.
    node.exec(&["ip", "link", "add", "port", "type", "veth", "peer", "name", "far"]);
    node.exec(&["ip", "link", "set", "port", "master", "br0"]);
    let container = node.container();
    let attachment = Attachment::new(&node, &container, patched(layer2(), json!({"vlan": 100})));
    // The plugin waits a second for the mark; only a start of `ip` delays it.
    let marked =
        Invocation::new(&node, "/bin/sh").arg("-c").arg("read x; exec ip link set port alias cni:net2/other/eth0");
    let mut marked = marked.start();
    let mut add = attachment.invocation("ADD", None).start();
    add.release();
    marked.release();
    assert_eq!(marked.finish().status, Some(0));
    let result = add.finish().success();
    attachment.del_with(&result).success();
    node.exec(&["ip", "link", "del", "port"]);
}

fn reaches(container: &Container, address: &str) -> bool {
    container.run(&["ping", "-c1", "-W5", address]).ok
}

fn is_cut_off_from(container: &Container, address: &str) -> bool {
    !container.run(&["ping", "-c1", "-W1", address]).ok
}

#[test]
fn check_fails_when_a_vlan_is_gone() {
    require!(probe::vlan_filtering());
    for (patch, gone) in [
        (json!({"vlan": 100}), "100"),
        (json!({"vlanTrunk": [{"minID": 10, "maxID": 12}]}), "11"),
        (json!({"vlan": 100, "vlanTrunk": [{"id": 7}]}), "7"),
    ] {
        let node = Node::new();
        let (_c, attachment, result) = attach(&node, &patched(layer2(), patch), 1).remove(0);
        attachment.check(&result).success();
        let port = host_end(&result, "br0").to_owned();
        node.exec(&["bridge", "vlan", "del", "dev", &port, "vid", gone]);
        attachment.check(&result).fails_naming(101, &[gone]);
        attachment.del_with(&result).success();
    }
}

#[test]
fn check_fails_when_the_vlans_gateway_is_gone() {
    require!(probe::vlan_filtering());
    let node = Node::new();
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"vlan": 100}));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    attachment.check(&result).success();
    node.exec(&["ip", "link", "del", "br0.100"]);
    attachment.check(&result).fails_naming(101, &["br0.100"]);
    attachment.del_with(&result).success();
}

#[test]
fn a_vlan_gateway_is_reachable_only_from_its_vlan() {
    require!(probe::vlan_filtering());
    let node = Node::new();
    let red = patched(bridge(&node, &["10.1.0.0/24"]), json!({"vlan": 100}));
    let blue = patched(bridge(&node, &["10.2.0.0/24"]), json!({"name": "net2", "vlan": 200, "isDefaultGateway": true}));
    let plain = patched(bridge(&node, &["10.3.0.0/24"]), json!({"name": "net3"}));
    let all: Vec<_> = [&red, &blue, &plain].into_iter().flat_map(|config| attach(&node, config, 1)).collect();
    for (number, (container, ..)) in all.iter().enumerate() {
        assert!(reaches(container, &format!("10.{}.0.1", number + 1)), "gateway {number}");
    }
    // An address of another VLAN on the red container's interface: only ARP decides, and must not
    // reach it.
    all[0].0.exec(&["ip", "addr", "add", "10.2.0.77/24", "dev", "eth0"]);
    assert!(is_cut_off_from(&all[0].0, "10.2.0.2"), "blue's container");
    all[0].0.exec(&["ip", "addr", "add", "10.3.0.77/24", "dev", "eth0"]);
    assert!(is_cut_off_from(&all[0].0, "10.3.0.2"), "the container without a VLAN");
    let members: Vec<String> = all.iter().map(|(.., result)| host_end(result, "br0").to_owned()).collect();
    for (_, attachment, result) in all {
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
    // Shared links stay, like the bridge: both ends of both gateways.
    let left = node.ports("br0");
    assert_eq!(left.len(), 2, "{left:?}");
    assert!(left.iter().all(|port| !members.contains(port)), "{left:?}");
    for name in ["br0.100", "br0.200"].map(str::to_owned).iter().chain(&left) {
        node.expect_left(name);
    }
}

#[test]
fn earlier_containers_keep_their_traffic_with_filtering() {
    require!(probe::vlan_filtering());
    let node = Node::new();
    let plain = bridge(&node, &["10.1.0.0/24"]);
    let mut all = attach(&node, &plain, 2);
    assert_eq!(node.link("br0").unwrap()["linkinfo"]["info_data"]["vlan_filtering"], 0);
    let vlan = patched(layer2(), json!({"name": "net2", "vlan": 100}));
    all.extend(attach(&node, &vlan, 1));
    assert_eq!(node.link("br0").unwrap()["linkinfo"]["info_data"]["vlan_filtering"], 1);
    assert!(reaches(&all[0].0, "10.1.0.3") && reaches(&all[0].0, "10.1.0.1"));
    all[2].0.exec(&["ip", "addr", "add", "10.1.0.50/24", "dev", "eth0"]);
    assert!(is_cut_off_from(&all[0].0, "10.1.0.50"));
    for (_, attachment, result) in all {
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
}

#[test]
fn del_without_a_namespace_and_gc_find_ports_with_vlans() {
    require!(probe::vlan_filtering());
    let node = Node::new();
    let config = patched(layer2(), json!({"cniVersion": "1.1.0", "vlan": 100, "vlanTrunk": [{"id": 7}]}));
    let mut all = attach(&node, &config, 3);
    let (kept, first) = (all.remove(0), all.remove(0));
    first.1.clone().netns("").del_with(&first.2).success();
    kept.1.gc(&[(&kept.0.id, "eth0")]).success();
    assert_eq!(node.ports("br0"), [host_end(&kept.2, "br0")]);
    kept.1.check(&kept.2).success();
    kept.1.del_with(&kept.2).success();
}

#[test]
fn a_chained_port_gets_its_vlan_and_gives_it_back() {
    require!(probe::vlan_filtering());
    let node = Node::new();
    let container = node.container();
    let prev = super::chained::made_before(&node, &container);
    let attachment = Attachment::new(&node, &container, patched(layer2(), json!({"vlan": 100})));
    let result = attachment.add_after(&prev).success();
    assert_eq!(vlans(&node, "host0"), [untagged(100)]);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert!(node.link("host0").unwrap()["master"].is_null());
    node.exec(&["ip", "link", "del", "host0"]);
}
