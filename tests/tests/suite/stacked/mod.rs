//! `macvlan`, `ipvlan` and `vlan`: an interface of a container on top of one of the host. This
//! module tests their common behaviour.
//!
//! The master is always called `eth0`, as the container's interface: some kernels look a new
//! interface's name up in the host's namespace too.

mod ipvlan;
mod macvlan;
mod vlan;

use std::path::Path;

use cni_testkit::{Attachment, Container, Node, bin_dir, go_bin_dir, probe, probe::Probed, require};
use conformance::{VERSION, VERSIONS, address, addresses, attach, ipam, patched, uplink};
use serde_json::{Value, json};

/// Expands to the common tests for each plugin.
macro_rules! for_each_plugin {
    ($($test:ident)*) => {
        mod each {
            $(mod $test {
                #[test]
                fn macvlan() {
                    super::super::$test("macvlan");
                }
                #[test]
                fn ipvlan() {
                    super::super::$test("ipvlan");
                }
                #[test]
                fn vlan() {
                    super::super::$test("vlan");
                }
            })*
        }
    };
}

for_each_plugin! {
    add_check_del
    every_version_is_spoken
    a_failed_add_leaves_nothing
    del_needs_neither_result_nor_namespace_nor_master
    del_removes_only_what_is_its_own
    a_killed_adds_interface_is_removed
    check_reports_what_differs
    the_master_may_be_in_the_container
    gc_and_status
    what_one_side_added_the_other_deletes
}

/// A node with a master `eth0`, and the peer beyond it.
fn node() -> (Node, Container) {
    let node = Node::new();
    let outside = uplink(&node, "eth0");
    (node, outside)
}

/// Whether the kernel has such interfaces.
fn probed(plugin: &str) -> Probed {
    match plugin {
        "ipvlan" => probe::ipvlan(),
        "vlan" => probe::vlan_links(),
        _ => Ok(()),
    }
}

/// A network of that plugin on the master.
fn network(node: &Node, plugin: &str) -> Value {
    let base = json!({"cniVersion": VERSION, "name": "net1", "type": plugin, "master": "eth0",
                      "ipam": ipam(node, &["10.1.0.0/24", "fd00:1::/64"])});
    if plugin == "vlan" { patched(base, json!({"vlanId": 5})) } else { base }
}

fn kind(container: &Container) -> Value {
    container.link("eth0").map_or(Value::Null, |link| link["linkinfo"]["info_kind"].clone())
}

/// The names of a container's interfaces besides `lo`.
fn links(container: &Container) -> Vec<String> {
    let links = container.json(&["ip", "-j", "link", "show"]);
    let names = links.as_array().unwrap().iter().map(|link| link["ifname"].as_str().unwrap().to_owned());
    names.filter(|name| name != "lo").collect()
}

fn ping(from: &Container, to: &str) {
    from.ping(to);
}

/// The peer outside still has a neighbour entry with another container's MAC for this address.
fn neighbours_are_corrected(plugin: &str) {
    require!(probed(plugin));
    let (node, outside) = node();
    let ranges = json!([[{"subnet": "192.0.2.0/24", "rangeStart": "192.0.2.100"}], [{"subnet": "2001:db8::/64", "rangeStart": "2001:db8::100"}]]);
    let config = patched(network(&node, plugin), json!({"ipam": {"ranges": ranges}}));
    for address in ["192.0.2.100", "2001:db8::100"] {
        let stale = ["lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "reachable"];
        outside.exec(&[&["ip", "neigh", "replace", address], &stale[..]].concat());
    }
    let (_container, attachment, result) = attach(&node, &config, 1).remove(0);
    ping(&outside, "192.0.2.100");
    ping(&outside, "2001:db8::100");
    attachment.del_with(&result).success();
}

fn add_check_del(plugin: &str) {
    require!(probed(plugin));
    let (node, outside) = node();
    let config = patched(network(&node, plugin), json!({"ipam": {"routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}]}}));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    let interfaces = json!([{"name": "eth0", "mac": container.link("eth0").unwrap()["address"],
                             "sandbox": container.netns()}]);
    assert_eq!(result["interfaces"], interfaces);
    assert_eq!((kind(&container), result["ips"][1]["interface"].as_u64()), (json!(plugin), Some(0)));
    let there = container.addresses("eth0");
    assert!(["10.1.0.2/24", "fd00:1::2/64"].iter().all(|one| there.iter().any(|is| is == one)), "{there:?}");
    assert!(container.exec(&["ip", "route"]).contains("default via 10.1.0.1 dev eth0"));
    for key in ["net/ipv4/conf/eth0/arp_notify", "net/ipv6/conf/eth0/ndisc_notify"] {
        assert_eq!(container.sysctl(key), "1");
    }
    attachment.check(&result).success();
    attachment.add().failure();
    attachment.check(&result).success();
    assert_eq!(links(&container), ["eth0"]);
    attachment.del_with(&result).success();
    attachment.del_with(&result).success();
    assert_eq!((links(&container), node.reservations("net1")), (vec![], vec![]));
    assert!(node.link("eth0").is_some());
    drop(outside);
}

fn every_version_is_spoken(plugin: &str) {
    require!(probed(plugin));
    let (node, _outside) = node();
    for version in VERSIONS {
        let container = node.container();
        let config = patched(network(&node, plugin), json!({"cniVersion": version}));
        let attachment = Attachment::new(&node, &container, config);
        let result = attachment.add().success();
        assert_eq!(result["cniVersion"], version);
        attachment.del().success();
        assert_eq!(links(&container), [""; 0]);
    }
    assert_eq!(node.reservations("net1"), []);
}

fn a_failed_add_leaves_nothing(plugin: &str) {
    require!(probed(plugin));
    let (node, _outside) = node();
    let container = node.container();
    let config = network(&node, plugin);
    for broken in [
        // No address, no such IPAM plugin, an answer that cannot work.
        json!({"ipam": {"ranges": []}}),
        json!({"ipam": {"type": "nonexistent"}}),
        json!({"ipam": {"routes": [{"dst": "10.9.0.0/24", "gw": "192.168.7.1"}]}}),
        json!({"master": "nope0"}),
    ] {
        Attachment::new(&node, &container, patched(config.clone(), broken)).add().failure();
        assert_eq!((links(&container), node.reservations("net1")), (vec![], vec![]));
    }
    container.exec(&["ip", "link", "add", "eth0", "type", "bridge"]);
    let attachment = Attachment::new(&node, &container, config);
    attachment.add().fails_naming(102, &["eth0"]);
    attachment.del().success();
    assert_eq!((kind(&container), links(&container).len()), (json!("bridge"), 1));
    container.exec(&["ip", "link", "del", "eth0"]);
    let result = attachment.add().success();
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

fn del_needs_neither_result_nor_namespace_nor_master(plugin: &str) {
    require!(probed(plugin));
    let (node, _outside) = node();
    let config = network(&node, plugin);
    let (container, attachment, _) = attach(&node, &config, 1).remove(0);
    attachment.del().success();
    assert_eq!(links(&container), [""; 0]);
    attachment.add().success();
    attachment.clone().netns("").del().success();
    assert_eq!(node.reservations("net1"), []);
    // A master that the configuration does not name and that cannot be found.
    attachment.clone().config(patched(config.clone(), json!({"master": null}))).del().success();
    assert_eq!(links(&container), [""; 0]);
    let result = attachment.add().success();
    node.exec(&["ip", "link", "del", "eth0"]);
    attachment.del_with(&result).success();
    assert_eq!((links(&container), node.reservations("net1")), (vec![], vec![]));
}

fn del_removes_only_what_is_its_own(plugin: &str) {
    require!(probed(plugin));
    let (node, _outside) = node();
    let config = network(&node, plugin);
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    // An interface of another network, by its mark.
    attachment.clone().config(patched(config.clone(), json!({"name": "net2"}))).del().success();
    assert_eq!(kind(&container), plugin);
    // Without a mark, as Go makes it, by the result: and another interface has come since.
    let other = patched(
        result.clone(),
        json!({"interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:77",
                                                               "sandbox": container.netns()}]}),
    );
    container.exec(&["ip", "link", "set", "eth0", "alias", ""]);
    attachment.del_with(&other).success();
    assert_eq!(kind(&container), plugin);
    // Without mark and result, by its link type.
    attachment.del().success();
    assert_eq!(links(&container), [""; 0]);
    container.exec(&["ip", "link", "add", "eth0", "type", "bridge"]);
    attachment.del().success();
    assert_eq!(kind(&container), "bridge");
}

/// The name that the interface has until it gets CNI_IFNAME is derived from the attachment.
fn a_killed_adds_interface_is_removed(plugin: &str) {
    require!(probed(plugin));
    let (node, _outside) = node();
    let (container, attachment, result) = attach(&node, &network(&node, plugin), 1).remove(0);
    let text = format!("net1/{}/eth0/\\0\\0\\0\\0", attachment.id);
    let hash = node.exec(&["sh", "-c", &format!("printf '{text}' | sha512sum")]);
    let name = format!("veth{}", &hash[..8]);
    container.exec(&["ip", "link", "set", "eth0", "down"]);
    container.exec(&["ip", "link", "set", "eth0", "alias", "", "name", &name]);
    assert_eq!(links(&container), [name]);
    attachment.del_with(&result).success();
    assert_eq!((links(&container), node.reservations("net1")), (vec![], vec![]));
}

fn check_reports_what_differs(plugin: &str) {
    require!(probed(plugin));
    let (node, _outside) = node();
    let config = network(&node, plugin);
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    // CHECK requires neither the master's name nor an MTU that the master allows.
    attachment
        .clone()
        .config(patched(config.clone(), json!({"master": "gone0", "mtu": 9000})))
        .check(&result)
        .success();
    let (other, words) = match plugin {
        "macvlan" => (json!({"mode": "vepa"}), "container macvlan mode bridge does not match expected value: vepa"),
        "ipvlan" => (json!({"mode": "l3s"}), "Container IPVlan mode l2 does not match expected value: l3s"),
        _ => (json!({"vlanId": 6}), "Container VLAN ID 5 does not match expected value: 6"),
    };
    attachment.clone().config(patched(config, other)).check(&result).fails_with(101, words);
    container.exec(&["ip", "addr", "del", "10.1.0.2/24", "dev", "eth0"]);
    attachment.check(&result).fails_naming(101, &["10.1.0.2/24"]);
    container.exec(&["ip", "link", "set", "eth0", "down"]);
    attachment.check(&result).fails_with(101, "Interface eth0 is down");
    container.ip(&["link del eth0", "link add eth0 type bridge"]);
    attachment.check(&result).fails_naming(101, &["eth0", plugin]);
    container.exec(&["ip", "link", "del", "eth0"]);
    attachment.check(&result).fails_naming(3, &["eth0"]);
    attachment.del_with(&result).success();
}

fn the_master_may_be_in_the_container(plugin: &str) {
    require!(probed(plugin));
    let (node, _outside) = node();
    let (container, other) = (node.container(), node.container());
    container.ip(&[
        &format!("link add nic0 type veth peer name nic1 netns {}", other.netns().display()),
        "link set nic0 up",
    ]);
    other.ip(&["link set nic1 up"]);
    let config = patched(network(&node, plugin), json!({"master": "nic0", "linkInContainer": true}));
    let attachment = Attachment::new(&node, &container, config);
    let result = attachment.add().success();
    let index = |name: &str| container.link(name).unwrap()["ifindex"].clone();
    assert_eq!((kind(&container), &container.link("eth0").unwrap()["link"]), (json!(plugin), &json!("nic0")));
    assert_ne!(index("eth0"), index("nic0"));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert_eq!(links(&container), ["nic0"]);
    // Not the master with that name on the host.
    attachment.config(patched(network(&node, plugin), json!({"linkInContainer": true}))).add().failure();
    assert_eq!(links(&container), ["nic0"]);
}

fn gc_and_status(plugin: &str) {
    require!(probed(plugin));
    let (node, _outside) = node();
    let config = patched(network(&node, plugin), json!({"cniVersion": "1.1.0"}));
    let (_container, attachment, result) = attach(&node, &config, 1).remove(0);
    attachment.status().success();
    attachment.gc(&[(&attachment.id, "eth0")]).success();
    assert_eq!(node.reservations("net1").len(), 2);
    attachment.check(&result).success();
    attachment.gc(&[]).success();
    assert_eq!(node.reservations("net1"), []);
    attachment.del_with(&result).success();
    attachment
        .clone()
        .config(patched(config.clone(), json!({"master": "nope0"})))
        .status()
        .fails_naming(50, &["nope0"]);
    attachment.config(patched(config, json!({"master": "nope0", "linkInContainer": true}))).status().success();
}

fn what_one_side_added_the_other_deletes(plugin: &str) {
    require!(probed(plugin));
    require!(probe::go_plugins());
    let (node, _outside) = node();
    let (ours, go) = (bin_dir(), go_bin_dir());
    for (adds, deletes) in [(&ours, &go), (&go, &ours)] {
        for version in ["0.3.1", VERSION] {
            let container = node.container();
            let config = patched(network(&node, plugin), json!({"cniVersion": version}));
            let attachment = Attachment::new(&node, &container, config).by(Path::new(adds));
            let result = attachment.add().success();
            assert_eq!((addresses(&result).len(), kind(&container)), (2, json!(plugin)));
            let attachment = attachment.by(Path::new(deletes));
            if version == VERSION {
                attachment.check(&result).success();
                attachment.del_with(&result).success();
            } else {
                attachment.del().success();
            }
            assert_eq!((links(&container), node.reservations("net1")), (vec![], vec![]));
        }
    }
}
