//! dhcp behind ipvlan and vlan, which need a kernel that has them.

use cni_testkit::{Attachment, bin_dir, probe, require, wait_until};
use conformance::lan::{Lan, Server};
use conformance::{VERSION, patched};
use serde_json::{Value, json};

/// ADD, CHECK and DEL, as the server and the container have them. `keys`: those of the interface
/// plugin, and of `ipam`. `flags`: the daemon's. `begin`: how the leased address begins.
#[track_caller]
fn leases_for(lan: &Lan, keys: Value, flags: &[&str], begin: &str) {
    let _daemon = lan.daemon_of(&bin_dir(), flags);
    let container = lan.node.container();
    let ipam = json!({"type": "dhcp", "daemonSocketPath": lan.socket()});
    let config = patched(json!({"cniVersion": VERSION, "name": "net1", "ipam": ipam}), keys);
    let attachment = Attachment::new(&lan.node, &container, config);
    let result = attachment.add().success();
    let cidr = result["ips"][0]["address"].as_str().unwrap();
    assert!(cidr.starts_with(begin), "{result}");
    let shown = container.exec(&["ip", "-o", "address", "show", "dev", "eth0", "scope", "global"]);
    assert!(shown.contains(&format!(" {cidr} ")), "{shown}");
    let address = cidr.split('/').next().unwrap();
    wait_until("the server has the lease", || lan.leased() == [address]);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert!(container.link("eth0").is_none());
    wait_until("the server has the address back", || lan.leased().is_empty());
    assert_eq!(lan.records(), 0);
}

/// A network whose server is reached by the VLAN 7 of the bridge. `arguments`: the server's.
fn tagged(arguments: &[&str]) -> Lan {
    let lan = Lan::silent();
    lan.node.expect_left("lan.7");
    lan.node.ip(&[
        "link add link lan name lan.7 type vlan id 7",
        "link set lan.7 up",
        "address add 192.168.2.1/24 dev lan.7",
        "address add 2001:db8:2::1/64 dev lan.7 nodad",
    ]);
    lan.serve(10, &[&["--interface=lan.7"], arguments].concat());
    lan
}

/// All of ipvlan's interfaces have the master's hardware address, and a packet goes to the one that
/// has its address: an answer to an address that no interface has yet must be a broadcast.
#[test]
fn ipvlan_gets_a_lease_by_broadcast_and_gives_it_back() {
    require!(Server::Dnsmasq.probe());
    require!(probe::ipvlan());
    let lan = Lan::of(Server::Dnsmasq);
    leases_for(&lan, json!({"type": "ipvlan", "master": "peer"}), &["-broadcast"], "192.168.1.5/24");
}

#[test]
fn vlan_gets_a_lease_and_gives_it_back() {
    require!(Server::Dnsmasq.probe());
    require!(probe::vlan_links());
    let lan = tagged(&["--dhcp-range=192.168.2.5,192.168.2.14,255.255.255.0,120"]);
    leases_for(&lan, json!({"type": "vlan", "master": "peer", "vlanId": 7}), &[], "192.168.2.5/24");
}

/// The server answers to the link-local address, which the interface has.
#[test]
fn ipvlan_gets_an_ipv6_lease_and_gives_it_back() {
    require!(Server::Dnsmasq.probe());
    require!(probe::ipvlan());
    let ipam = json!({"ipv6": "stateful", "ipv4": false});
    leases_for(&Lan::dual(&[]), json!({"type": "ipvlan", "master": "peer", "ipam": ipam}), &[], "2001:db8:1::");
}

#[test]
fn vlan_gets_an_ipv6_lease_and_gives_it_back() {
    require!(Server::Dnsmasq.probe());
    require!(probe::vlan_links());
    let lan = tagged(&["--dhcp-range=2001:db8:2::5,2001:db8:2::fff,64,120"]);
    let keys = json!({"type": "vlan", "master": "peer", "vlanId": 7, "ipam": {"ipv6": "stateful", "ipv4": false}});
    leases_for(&lan, keys, &[], "2001:db8:2::");
}
