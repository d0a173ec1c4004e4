//! dhcp behind ipvlan and vlan, which need a kernel that has them.

use cni_testkit::{Attachment, bin_dir, probe, require};
use conformance::lan::{Lan, Server, until};
use conformance::{VERSION, patched};
use serde_json::{Value, json};

/// ADD, CHECK and DEL, as the server and the container have them. `flags`: the daemon's.
#[track_caller]
fn leases_for(lan: &Lan, keys: Value, flags: &[&str], expected: &str) {
    let _daemon = lan.daemon_of(&bin_dir(), flags);
    let container = lan.node.container();
    let ipam = json!({"type": "dhcp", "daemonSocketPath": lan.socket()});
    let config = patched(json!({"cniVersion": VERSION, "name": "net1", "ipam": ipam}), keys);
    let attachment = Attachment::new(&lan.node, &container, config);
    let result = attachment.add().success();
    assert_eq!(container.addresses("eth0"), [format!("{expected}/24")]);
    until("the server has the lease", || lan.leased() == [expected]);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert!(container.link("eth0").is_none());
    until("the server has the address back", || lan.leased().is_empty());
    assert_eq!(lan.records(), 0);
}

/// All of ipvlan's interfaces have the master's hardware address, and a packet goes to the one that
/// has its address: an answer to an address that no interface has yet must be a broadcast.
#[test]
fn ipvlan_gets_a_lease_by_broadcast_and_gives_it_back() {
    require!(Server::Dnsmasq.probe());
    require!(probe::ipvlan());
    let lan = Lan::of(Server::Dnsmasq);
    leases_for(&lan, json!({"type": "ipvlan", "master": "peer"}), &["-broadcast"], "192.168.1.5");
}

#[test]
fn vlan_gets_a_lease_and_gives_it_back() {
    require!(Server::Dnsmasq.probe());
    require!(probe::vlan_links());
    let lan = Lan::silent();
    lan.node.expect_left("lan.7");
    lan.node.ip(&[
        "link add link lan name lan.7 type vlan id 7",
        "link set lan.7 up",
        "address add 192.168.2.1/24 dev lan.7",
    ]);
    lan.serve(10, &["--interface=lan.7", "--dhcp-range=192.168.2.5,192.168.2.14,255.255.255.0,120"]);
    leases_for(&lan, json!({"type": "vlan", "master": "peer", "vlanId": 7}), &[], "192.168.2.5");
}
