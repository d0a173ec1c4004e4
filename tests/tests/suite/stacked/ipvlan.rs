//! `ipvlan` alone: its modes, and the use behind another plugin.

use super::*;

/// The node's master has 192.0.2.1, what is beyond it .9.
fn beside_the_master(node: &Node, mode: &str) -> Value {
    let ranges = json!([[{"subnet": "192.0.2.0/24", "rangeStart": "192.0.2.100"}]]);
    patched(network(node, "ipvlan"), json!({"mode": mode, "ipam": {"ranges": ranges}}))
}

#[test]
fn containers_reach_each_other_in_every_mode() {
    require!(probe::ipvlan());
    let (node, outside) = node();
    for mode in ["l2", "l3", "l3s"] {
        let all = attach(&node, &beside_the_master(&node, mode), 2);
        let link = all[0].0.link("eth0").unwrap();
        assert_eq!(link["linkinfo"]["info_data"]["mode"], mode);
        assert_eq!(link["address"], node.link("eth0").unwrap()["address"]);
        ping(&all[0].0, &address(&all[1].2));
        if mode == "l2" {
            ping(&all[0].0, "192.0.2.9");
            ping(&outside, &address(&all[1].2));
        }
        for (container, attachment, result) in &all {
            attachment.check(result).success();
            attachment.del_with(result).success();
            assert_eq!(links(container), [""; 0]);
        }
    }
}

#[test]
fn the_default_mode_is_l2() {
    require!(probe::ipvlan());
    let (node, _outside) = node();
    let (container, attachment, result) = attach(&node, &network(&node, "ipvlan"), 1).remove(0);
    assert_eq!(container.link("eth0").unwrap()["linkinfo"]["info_data"]["mode"], "l2");
    attachment.del_with(&result).success();
}

#[test]
fn unknown_modes_and_missing_ipam_are_refused() {
    let (node, _outside) = node();
    let container = node.container();
    let refused = |keys: Value| {
        let config = patched(network(&node, "ipvlan"), keys);
        Attachment::new(&node, &container, config).add().failure().msg
    };
    assert_eq!(refused(json!({"mode": "l4"})), "unknown ipvlan mode: \"l4\"");
    assert_eq!(refused(json!({"master": "nope0"})), "failed to lookup master \"nope0\": Link not found");
    assert_eq!(refused(json!({"master": null})), "no default route interface found");
    assert_eq!(links(&container), [""; 0]);
}

#[test]
fn without_ipam_it_is_refused() {
    let (node, _outside) = node();
    let container = node.container();
    let config = patched(network(&node, "ipvlan"), json!({"ipam": null}));
    assert_eq!(Attachment::new(&node, &container, config).add().failure().msg, "no plugin name provided");
    assert_eq!(links(&container), [""; 0]);
}

#[test]
fn any_mtu_is_accepted() {
    require!(probe::ipvlan());
    let (node, _outside) = node();
    for (mtu, expected) in [(9000, 9000), (1400, 1400), (0, 1500), (-5, 1500)] {
        let config = patched(network(&node, "ipvlan"), json!({"mtu": mtu}));
        let (container, attachment, result) = attach(&node, &config, 1).remove(0);
        assert_eq!(container.link("eth0").unwrap()["mtu"], expected);
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
}

#[test]
fn in_chained_use_addresses_and_master_are_those_before() {
    require!(probe::ipvlan());
    let (node, _outside) = node();
    let container = node.container();
    let config = patched(network(&node, "ipvlan"), json!({"master": null, "ipam": null}));
    let attachment = Attachment::new(&node, &container, config);
    let earlier = json!({"cniVersion": VERSION, "interfaces": [{"name": "eth0"}],
                         "ips": [{"address": "10.1.0.2/24", "gateway": "10.1.0.1", "interface": 0}],
                         "routes": [{"dst": "0.0.0.0/0"}]});
    let result = attachment.add_after(&earlier).success();
    assert_eq!(result["interfaces"].as_array().unwrap().len(), 1);
    assert_eq!(
        (&result["interfaces"][0]["sandbox"], &result["ips"][0]["interface"]),
        (&json!(container.netns()), &json!(0))
    );
    assert_eq!(container.addresses("eth0"), ["10.1.0.2/24"]);
    assert!(container.exec(&["ip", "route"]).contains("default via 10.1.0.1 dev eth0"));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert_eq!(links(&container), [""; 0]);
}

#[test]
fn an_earlier_result_without_a_single_interface_is_refused() {
    let (node, _outside) = node();
    let container = node.container();
    let config = patched(network(&node, "ipvlan"), json!({"master": null}));
    let attachment = Attachment::new(&node, &container, config);
    for interfaces in [json!([]), json!([{"name": "eth0"}, {"name": "eth1"}])] {
        let earlier = json!({"cniVersion": VERSION, "interfaces": interfaces});
        let failure = attachment.add_after(&earlier).failure();
        assert_eq!(failure.msg, "chained master failure. PrevResult lacks a single named interface");
    }
    assert_eq!((links(&container), node.reservations("net1")), (vec![], vec![]));
}

#[test]
fn outdated_entries_of_neighbours_are_corrected() {
    neighbours_are_corrected("ipvlan");
}
