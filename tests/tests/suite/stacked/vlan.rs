//! `vlan` alone: tagged frames, its ID and its MTU.

use super::*;

#[test]
fn frames_are_tagged_with_the_vlan() {
    require!(probe::vlan_links());
    let (node, outside) = node();
    outside.ip(&[
        "link add link eth0 name tagged type vlan id 5",
        "link set tagged up",
        "addr add 10.1.0.200/24 dev tagged",
    ]);
    let (container, attachment, result) = attach(&node, &network(&node, "vlan"), 1).remove(0);
    assert_eq!(container.link("eth0").unwrap()["linkinfo"]["info_data"]["id"], 5);
    ping(&container, "10.1.0.200");
    ping(&outside, "10.1.0.2");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn a_vlan_exists_once_on_a_master() {
    require!(probe::vlan_links());
    let (node, _outside) = node();
    let config = network(&node, "vlan");
    let (_container, attachment, result) = attach(&node, &config, 1).remove(0);
    let second = node.container();
    let failure = Attachment::new(&node, &second, config).add().fails_with(102, "failed to create vlan: ");
    assert!(failure.details.contains("VLAN 5"));
    assert_eq!((links(&second), node.reservations("net1").len()), (vec![], 2));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn ids_and_a_missing_master_are_refused() {
    let (node, _outside) = node();
    let container = node.container();
    let refused =
        |keys: Value| Attachment::new(&node, &container, patched(network(&node, "vlan"), keys)).add().failure().msg;
    for id in [-1, 4095, 4096, 70000] {
        let text = format!("invalid VLAN ID {id} (must be between 0 and 4095 inclusive)");
        assert_eq!(refused(json!({"vlanId": id})), text);
    }
    let text = "\"master\" field is required. It specifies the host interface name to create the VLAN for";
    assert_eq!(refused(json!({"master": null})), text);
    assert_eq!(refused(json!({"master": ""})), text);
    assert_eq!(links(&container), [""; 0]);
}

#[test]
fn a_missing_id_is_refused() {
    let (node, _outside) = node();
    let container = node.container();
    let config = patched(network(&node, "vlan"), json!({"vlanId": null}));
    Attachment::new(&node, &container, config).add().fails_naming(7, &["vlanId"]);
    assert_eq!(links(&container), [""; 0]);
}

#[test]
fn zero_and_4094_are_valid_ids() {
    require!(probe::vlan_links());
    let (node, _outside) = node();
    for id in [0, 4094] {
        let config = patched(network(&node, "vlan"), json!({"vlanId": id}));
        let (container, attachment, result) = attach(&node, &config, 1).remove(0);
        assert_eq!(container.link("eth0").unwrap()["linkinfo"]["info_data"]["id"], id);
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
}

#[test]
fn an_error_of_ipam_has_gos_context() {
    require!(probe::vlan_links());
    let (node, _outside) = node();
    let container = node.container();
    // A /30 has one address beside the gateway's.
    let config = patched(network(&node, "vlan"), json!({"ipam": ipam(&node, &["10.1.0.0/30"])}));
    let first = Attachment::new(&node, &container, config.clone());
    first.add().success();
    let other = node.container();
    let second = Attachment::new(&node, &other, patched(config, json!({"vlanId": 6})));
    let failure = second.add().failure();
    assert!(failure.msg.starts_with("failed to execute IPAM delegate: failed to allocate"), "{}", failure.msg);
    assert!(other.link("eth0").is_none(), "the failed ADD left its interface");
    first.del().success();
}

#[test]
fn the_mtu_is_at_most_the_masters() {
    require!(probe::vlan_links());
    let (node, _outside) = node();
    let attachment = |container: &Container, mtu: i64| {
        let config = patched(network(&node, "vlan"), json!({"mtu": mtu, "ipam": ipam(&node, &["10.1.0.0/24"])}));
        Attachment::new(&node, container, config)
    };
    let container = node.container();
    for mtu in [1600, -100] {
        let failure = attachment(&container, mtu).add().failure();
        assert_eq!(failure.msg, format!("invalid MTU {mtu}, must be [0, master MTU(1500)]"));
    }
    node.exec(&["ip", "link", "set", "eth0", "mtu", "1200"]);
    for (mtu, expected) in [(0, 1200), (1100, 1100)] {
        let result = attachment(&container, mtu).add().success();
        assert_eq!(container.link("eth0").unwrap()["mtu"], expected);
        attachment(&container, mtu).check(&result).success();
        attachment(&container, mtu).del_with(&result).success();
    }
}
