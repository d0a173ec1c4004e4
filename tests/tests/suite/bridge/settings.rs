//! Settings of the bridge and of the port that Go's plugin does not have: reserved addresses,
//! multicast snooping, spanning tree, the uplink's MTU, suppressed neighbour requests.

use cni_testkit::{Attachment, Node};
use conformance::{attach, bridge, host_end, layer2, patched};
use serde_json::{Value, json};

/// Returns settings of br0 in the words of `ip -d`: mask, snooping, spanning tree.
#[track_caller]
fn settings(node: &Node) -> (Value, Value, Value) {
    let link = node.link("br0").unwrap();
    let data = &link["linkinfo"]["info_data"];
    (data["group_fwd_mask"].clone(), data["mcast_snooping"].clone(), data["stp_state"].clone())
}

#[test]
fn a_new_bridge_has_the_configured_settings() {
    let node = Node::new();
    let keys = json!({"groupFwdMask": 16392, "mcastSnooping": false, "stp": true});
    let (_container, attachment, result) = attach(&node, &patched(layer2(), keys), 1).remove(0);
    assert_eq!(settings(&node), (json!("0x4008"), json!(0), json!(1)));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn an_existing_bridge_keeps_what_no_key_names() {
    let node = Node::new();
    node.ip(&["link add br0 type bridge group_fwd_mask 8 mcast_snooping 0 stp_state 0", "link set br0 up"]);
    let (_container, plain, first) = attach(&node, &layer2(), 1).remove(0);
    assert_eq!(settings(&node), (json!("0x8"), json!(0), json!(0)));
    let config = patched(layer2(), json!({"groupFwdMask": 16384, "stp": false}));
    let (_container, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(settings(&node), (json!("0x4000"), json!(0), json!(0)));
    attachment.check(&result).success();
    plain.check(&first).success();
    plain.del_with(&first).success();
    attachment.del_with(&result).success();
    assert_eq!(settings(&node), (json!("0x4000"), json!(0), json!(0)), "other networks may use the bridge");
}

#[test]
fn check_compares_only_the_settings_that_are_given() {
    let given = json!({"groupFwdMask": 16384, "mcastSnooping": true, "stp": false, "neighSuppress": true});
    for (key, sabotage) in [
        ("groupFwdMask is 0, expected 16384", "link set br0 type bridge group_fwd_mask 0"),
        ("mcastSnooping is false, expected true", "link set br0 type bridge mcast_snooping 0"),
        ("stp is true, expected false", "link set br0 type bridge stp_state 1"),
        ("neighSuppress is false, expected true", "link set HOST type bridge_slave neigh_suppress off"),
    ] {
        let node = Node::new();
        let (_plain, plain, first) = attach(&node, &layer2(), 1).remove(0);
        let (_container, attachment, result) = attach(&node, &patched(layer2(), given.clone()), 1).remove(0);
        attachment.check(&result).success();
        node.ip(&[&sabotage.replace("HOST", host_end(&result, "br0"))]);
        let failure = attachment.check(&result).failure();
        assert!(failure.code == Some(101) && failure.msg.contains(key), "{key}: {failure:?}");
        plain.check(&first).success();
        plain.del_with(&first).success();
        attachment.del_with(&result).success();
    }
}

/// Frames to 01:80:c2:00:00:0e, the address of LLDP, reach another container only with its bit in
/// the mask. A ping is such a frame if the neighbour entry has this address.
#[test]
fn frames_to_a_reserved_address_pass_with_the_mask() {
    for (mask, passes) in [(json!(null), false), (json!(16384), true)] {
        let node = Node::new();
        let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"groupFwdMask": mask}));
        let all = attach(&node, &config, 2);
        all[0].0.exec(&["ip", "neigh", "replace", "10.1.0.3", "lladdr", "01:80:c2:00:00:0e", "dev", "eth0"]);
        let wait = if passes { "-w10" } else { "-W1" };
        assert_eq!(all[0].0.run(&["ping", "-c1", wait, "10.1.0.3"]).ok, passes, "{mask}");
        for (_, attachment, result) in all {
            attachment.del_with(&result).success();
        }
    }
}

/// The bridge answers for a container that does not answer itself, if it knows its address. It does
/// not answer requests from a port that has the setting too.
#[test]
fn the_bridge_answers_arp_for_a_port_with_neigh_suppress() {
    for (suppress, answers) in [(json!(null), false), (json!(true), true)] {
        let node = Node::new();
        let config = bridge(&node, &["10.1.0.0/24"]);
        let mut all = attach(&node, &config, 1);
        all.extend(attach(&node, &patched(config, json!({"neighSuppress": suppress})), 1));
        all[1].0.ping("10.1.0.1");
        let mac = all[1].0.link("eth0").unwrap()["address"].as_str().unwrap().to_owned();
        all[1].0.set_sysctl("net/ipv4/conf/eth0/arp_ignore", "8");
        node.ip(&[&format!("neigh replace 10.1.0.3 lladdr {mac} dev br0 nud permanent")]);
        let wait = if answers { "-w10" } else { "-W1" };
        assert_eq!(all[0].0.run(&["ping", "-c1", wait, "10.1.0.3"]).ok, answers, "{suppress}");
        for (_, attachment, result) in all {
            attachment.check(&result).success();
            attachment.del_with(&result).success();
        }
    }
}

#[test]
fn the_mtu_of_the_uplink_is_the_smallest_of_its_ports() {
    let node = Node::new();
    let uplink = patched(layer2(), json!({"mtu": "uplink"}));
    let (container, attachment, result) = attach(&node, &uplink, 1).remove(0);
    assert_eq!(container.link("eth0").unwrap()["mtu"], 1500, "a bridge without other ports");
    attachment.del_with(&result).success();
    for (name, mtu) in [("up0", 1450), ("up1", 1400), ("up2", 9000)] {
        node.ip(&[&format!("link add {name} mtu {mtu} master br0 type veth peer name {name}peer")]);
        node.expect_left(name);
        node.expect_left(&format!("{name}peer"));
    }
    let (_small, small, first) = attach(&node, &patched(layer2(), json!({"mtu": 1300})), 1).remove(0);
    let (container, attachment, result) = attach(&node, &uplink, 1).remove(0);
    for link in [container.link("eth0"), node.link(host_end(&result, "br0"))] {
        assert_eq!(link.as_ref().unwrap()["mtu"], 1400, "{link:?}");
    }
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    small.del_with(&first).success();
}

#[test]
fn bad_settings_of_the_bridge_are_refused_before_any_work() {
    for keys in [
        json!({"groupFwdMask": 1}),
        json!({"groupFwdMask": 65536}),
        json!({"groupFwdMask": -8}),
        json!({"mtu": "uplinks"}),
    ] {
        let node = Node::new();
        let container = node.container();
        let attachment = Attachment::new(&node, &container, patched(layer2(), keys.clone()));
        assert_eq!(attachment.add().failure().code, Some(7), "{keys}");
        assert!(node.link("br0").is_none(), "{keys}");
        attachment.del().success();
    }
}
