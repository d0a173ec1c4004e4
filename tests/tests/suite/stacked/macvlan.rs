//! `macvlan` alone: its modes, its hardware addresses, the master, and layer 2 without addresses.

use super::*;

#[track_caller]
fn mode(container: &Container) -> Value {
    container.link("eth0").unwrap()["linkinfo"]["info_data"]["mode"].clone()
}

fn mac(container: &Container) -> Value {
    container.link("eth0").unwrap()["address"].clone()
}

/// The node's master has 192.0.2.1, what is beyond it .9.
fn beside_the_master(node: &Node) -> Value {
    let ranges = json!([[{"subnet": "192.0.2.0/24", "rangeStart": "192.0.2.100"}]]);
    patched(network(node, "macvlan"), json!({"ipam": {"ranges": ranges}}))
}

#[test]
fn containers_reach_each_other_and_the_outside() {
    let (node, outside) = node();
    let all = attach(&node, &beside_the_master(&node), 2);
    let [(one, ..), (other, ..)] = &all[..] else { unreachable!() };
    ping(one, &address(&all[1].2));
    ping(one, "192.0.2.9");
    ping(&outside, &address(&all[1].2));
    assert_eq!(mode(other), "bridge");
    for (container, attachment, result) in &all {
        attachment.check(result).success();
        attachment.del_with(result).success();
        assert_eq!(links(container), [""; 0]);
    }
}

#[test]
fn private_and_vepa_do_not_connect_containers() {
    let (node, _outside) = node();
    for name in ["private", "vepa"] {
        let config = patched(beside_the_master(&node), json!({"mode": name}));
        let all = attach(&node, &config, 2);
        assert_eq!(mode(&all[0].0), name);
        ping(&all[0].0, "192.0.2.9");
        // The peer outside sends nothing back.
        let unreached = all[0].0.run(&["ping", "-c1", "-W1", &address(&all[1].2)]);
        assert!(!unreached.ok, "{name}: {unreached:?}");
        for (_, attachment, result) in &all {
            attachment.check(result).success();
            attachment.del_with(result).success();
        }
    }
}

#[test]
fn passthru_has_the_master_for_itself() {
    let (node, _outside) = node();
    let config = patched(beside_the_master(&node), json!({"mode": "passthru"}));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!((mode(&container), mac(&container)), (json!("passthru"), node.link("eth0").unwrap()["address"].clone()));
    assert_eq!(result["interfaces"][0]["mac"], mac(&container));
    let second = node.container();
    let failed = Attachment::new(&node, &second, config);
    assert!(failed.add().failure().msg.starts_with("failed to create macvlan: "));
    assert_eq!((links(&second), node.reservations("net1").len()), (vec![], 1));
    ping(&container, "192.0.2.9");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn unknown_modes_are_refused() {
    let (node, _outside) = node();
    let container = node.container();
    for name in ["source", "bridged", "BRIDGE"] {
        let config = patched(network(&node, "macvlan"), json!({"mode": name}));
        let failure = Attachment::new(&node, &container, config).add().failure();
        assert_eq!(failure.msg, format!("unknown macvlan mode: {name:?}"));
    }
}

#[test]
fn the_master_is_the_default_routes_interface() {
    let (node, _outside) = node();
    let container = node.container();
    let config = patched(network(&node, "macvlan"), json!({"master": null}));
    let attachment = Attachment::new(&node, &container, config);
    attachment.add().fails_with(7, "no default route interface found");
    assert_eq!((links(&container), node.reservations("net1")), (vec![], vec![]));
    node.ip(&["link add up0 type veth peer name up1", "link set up0 up", "link set up1 up"]);
    let master = |name: &str| node.link(name).unwrap()["ifindex"].clone();
    for (route, name) in [
        ("ip -6 route add default dev up0 metric 5", "up0"),
        ("ip route add default dev up1 metric 300", "up1"),
        ("ip route add default via 192.0.2.9 metric 100", "eth0"),
        ("ip route add default nexthop dev up0 nexthop dev eth0", "up0"),
    ] {
        node.exec(&route.split(' ').collect::<Vec<_>>());
        let result = attachment.add().success();
        assert_eq!(container.link("eth0").unwrap()["link_index"], master(name), "{route}");
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
    node.ip(&["link del up0"]);
}

#[test]
fn the_mtu_is_at_most_the_masters() {
    let (node, _outside) = node();
    let container = node.container();
    node.exec(&["ip", "link", "set", "eth0", "mtu", "1300"]);
    let attachment = |mtu: i64| {
        Attachment::new(
            &node,
            &container,
            patched(network(&node, "macvlan"), json!({"mtu": mtu, "ipam": ipam(&node, &["10.1.0.0/24"])})),
        )
    };
    for mtu in [1600, 1301, -100] {
        let failure = attachment(mtu).add().failure();
        assert_eq!(failure.msg, format!("invalid MTU {mtu}, must be [0, master MTU(1300)]"));
    }
    for (mtu, expected) in [(0, 1300), (1300, 1300), (1200, 1200)] {
        attachment(mtu).add().success();
        assert_eq!(container.link("eth0").unwrap()["mtu"], expected);
        attachment(mtu).del().success();
    }
}

#[test]
fn the_hardware_address_comes_from_the_runtime_first() {
    let (node, _outside) = node();
    let (own, args, runtime) = ("02:00:00:00:00:11", "02:00:00:00:00:22", "02:00:00:00:00:33");
    for (keys, argument, expected) in [
        (json!({}), None, own),
        (json!({}), Some(format!("IgnoreUnknown=true;MAC={args}")), args),
        (json!({"RuntimeConfig": {"Mac": runtime}}), Some(format!("IgnoreUnknown=1;MAC={args}")), runtime),
    ] {
        let config = patched(patched(network(&node, "macvlan"), json!({"mac": own})), keys);
        let container = node.container();
        let mut attachment = Attachment::new(&node, &container, config);
        attachment.args = argument;
        let result = attachment.add().success();
        assert_eq!((mac(&container), &result["interfaces"][0]["mac"]), (json!(expected), &json!(expected)));
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
    for (address, text) in [
        ("xx", "invalid args xx for MAC addr: address xx: invalid MAC address"),
        ("01:00:00:00:00:01", "failed to create macvlan: cannot assign requested address"),
    ] {
        let container = node.container();
        let config = patched(network(&node, "macvlan"), json!({"mac": address}));
        assert!(Attachment::new(&node, &container, config).add().failure().msg.starts_with(text));
        assert_eq!(links(&container), [""; 0]);
    }
}

#[test]
fn the_broadcast_queue_is_as_long_as_configured() {
    let (node, _outside) = node();
    let config = patched(network(&node, "macvlan"), json!({"bcqueuelen": 200}));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    let link = container.exec(&["ip", "-d", "link", "show", "eth0"]);
    assert!(link.contains("bcqueuelen 200 "), "{link}");
    attachment.del_with(&result).success();
}

#[test]
fn without_ipam_the_interface_is_up_without_addresses() {
    let (node, _outside) = node();
    let container = node.container();
    let without = patched(network(&node, "macvlan"), json!({"ipam": null}));
    for config in [patched(without.clone(), json!({"ipam": {"type": ""}})), without] {
        let attachment = Attachment::new(&node, &container, config.clone());
        let result = attachment.add().success();
        assert_eq!((result["ips"].as_array().map_or(0, Vec::len), container.addresses("eth0").len()), (0, 0));
        let flags = container.link("eth0").unwrap()["flags"].clone();
        assert!(flags.as_array().unwrap().contains(&json!("UP")), "{flags}");
        attachment.check(&result).success();
        attachment.del_with(&result).success();
        // Results of these versions cannot be without an address.
        for version in ["0.1.0", "0.2.0"] {
            let attachment = attachment.clone().config(patched(config.clone(), json!({"cniVersion": version})));
            assert!(attachment.add().failure().msg.contains("cannot convert: no valid IP addresses"));
            assert_eq!(links(&container), [""; 0]);
        }
    }
}

#[test]
fn its_addresses_may_be_requested_in_cni_args() {
    let (node, _outside) = node();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, network(&node, "macvlan"))
        .args("IgnoreUnknown=1;MAC=02:00:00:00:00:44;IP=10.1.0.77");
    let result = attachment.add().success();
    assert_eq!((address(&result), mac(&container)), ("10.1.0.77".to_owned(), json!("02:00:00:00:00:44")));
    attachment.del_with(&result).success();
    attachment.args("mac=02:00:00:00:00:44").add().fails_naming(4, &["unknown args"]);
}

#[test]
fn outdated_entries_of_neighbours_are_corrected() {
    neighbours_are_corrected("macvlan");
}
