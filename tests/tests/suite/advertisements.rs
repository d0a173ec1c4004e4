//! `acceptRa` and `enableSlaac`: whether a container's interface accepts the advertisements of IPv6
//! routers.

use cni_testkit::{Attachment, Node, probe, require, wait_until};
use conformance::{VERSION, ipam, layer2, patched, router, uplink};
use serde_json::{Value, json};

use crate::delegation::executable;

const ACCEPT_RA: &str = "net/ipv6/conf/eth0/accept_ra";
const AUTOCONF: &str = "net/ipv6/conf/eth0/autoconf";

/// A network `net1` of macvlan with IPv4 addresses only, on the master `eth0`.
fn ipv4_only(node: &Node) -> Value {
    json!({"cniVersion": VERSION, "name": "net1", "type": "macvlan", "master": "eth0",
           "ipam": ipam(node, &["10.1.0.0/24"])})
}

#[test]
fn a_router_gives_no_address_to_an_interface_that_refuses() {
    require!(probe::radvd().map(drop));
    let node = Node::new();
    let outside = uplink(&node, "eth0");
    let (closed, open) = (node.container(), node.container());
    let config = patched(ipv4_only(&node), json!({"acceptRa": "no"}));
    let attachment = Attachment::new(&node, &closed, config);
    let result = attachment.add().success();
    let other = Attachment::new(&node, &open, ipv4_only(&node));
    other.add().success();
    let _router = router::radvd(&node, &outside, "AdvRASolicitedUnicast off; prefix 2001:db8:1::/64 { };");
    let advertised = |address: &String| address.starts_with("2001:db8:1:");
    wait_until("the interface without the key gets an address", || open.addresses("eth0").iter().any(advertised));
    assert!(!closed.addresses("eth0").iter().any(advertised), "{:?}", closed.addresses("eth0"));
    assert_eq!(closed.exec(&["ip", "-6", "route", "show", "default"]), "");
    attachment.check(&result).success();
    for attachment in [attachment, other] {
        attachment.del().success();
    }
}

#[test]
fn sysctls_are_written_before_the_interface_comes_up() {
    let node = Node::new();
    let container = node.container();
    let seen = node.dir().join("seen");
    let script = format!(
        "#!/bin/sh\nnsenter --net=\"$CNI_NETNS\" sh -c 'cat /proc/sys/{ACCEPT_RA} /proc/sys/{AUTOCONF}; \
         ip link show eth0 up' >>{}\necho '{{\"cniVersion\":\"1.0.0\",\"ips\":[{{\"address\":\"10.1.0.9/24\"}}]}}'\n",
        seen.display()
    );
    let folder = executable(&node, "odd-ipam", &script);
    for (keys, expected) in [
        (json!({}), "1\n1\n"),
        (json!({"acceptRa": "default"}), "1\n1\n"),
        (json!({"acceptRa": "no"}), "0\n0\n"),
        (json!({"enableSlaac": false}), "0\n0\n"),
        (json!({"acceptRa": "yes"}), "2\n1\n"),
        (json!({"enableSlaac": true, "acceptRa": "yes"}), "2\n1\n"),
    ] {
        let config = patched(patched(layer2(), json!({"ipam": {"type": "odd-ipam"}})), keys.clone());
        let call = |verb| node.plugin("bridge").command(verb).cni_path(&folder).container(&container).config(&config);
        call("ADD").run().success();
        // Without the output of `ip`, which lists the interface only if it is up.
        assert_eq!(std::fs::read_to_string(&seen).unwrap(), expected, "{keys}");
        call("DEL").run().success();
        std::fs::remove_file(&seen).unwrap();
    }
}

#[test]
fn every_interface_plugin_writes_them_and_check_compares() {
    let node = Node::new();
    let _outside = uplink(&node, "eth0");
    let addresses = json!({"ipam": ipam(&node, &["10.1.0.0/24"])});
    let plugins = [
        ("bridge", json!({"bridge": "br0"}), Ok(())),
        ("dummy", json!({}), probe::dummy()),
        ("ipvlan", json!({"master": "eth0"}), probe::ipvlan()),
        ("macvlan", json!({"master": "eth0"}), Ok(())),
        ("ptp", json!({}), Ok(())),
        ("tap", json!({}), probe::plugin("tap")),
        ("vlan", json!({"master": "eth0", "vlanId": 7}), probe::vlan_links()),
    ];
    for (plugin, keys, probed) in plugins {
        if let Err(reason) = probed {
            cni_testkit::skipped(&reason);
            continue;
        }
        let container = node.container();
        let base = json!({"cniVersion": VERSION, "name": "net1", "type": plugin, "acceptRa": "no"});
        let attachment = Attachment::new(&node, &container, patched(patched(base, keys), addresses.clone()));
        let result = attachment.add().success();
        attachment.check(&result).success();
        for sysctl in [ACCEPT_RA, AUTOCONF] {
            assert_eq!(container.sysctl(sysctl), "0", "{plugin}");
            container.set_sysctl(sysctl, "1");
            attachment.check(&result).fails_with(101, &format!("sysctl {sysctl} is 1, expected 0"));
            container.set_sysctl(sysctl, "0");
        }
        attachment.del_with(&result).success();
    }
}

#[test]
fn contradicting_keys_about_advertisements_are_refused() {
    let node = Node::new();
    let _outside = uplink(&node, "eth0");
    let container = node.container();
    let expected = "acceptRa \"no\" contradicts enableSlaac true";
    let config = patched(ipv4_only(&node), json!({"acceptRa": "no", "enableSlaac": true, "cniVersion": "1.1.0"}));
    let attachment = Attachment::new(&node, &container, config);
    attachment.add().fails_with(7, expected);
    attachment.status().fails_with(50, expected);
    assert_eq!((container.link("eth0"), node.reservations("net1")), (None, vec![]));
}
