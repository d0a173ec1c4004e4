//! `flannel`: makes the configuration of bridge and host-local from flanneld's subnet file, and
//! stores it for DEL.

use std::fs;
use std::path::PathBuf;

use cni_testkit::{Attachment, Node, probe, require};
use conformance::{VERSION, addresses, attach, ipam, patched};
use serde_json::{Value, json};

const SUBNET: &str =
    "FLANNEL_NETWORK=10.42.0.0/16\nFLANNEL_SUBNET=10.42.3.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";

/// A flannel network on bridge `br0`. The subnet file does not exist yet.
fn network(node: &Node) -> Value {
    json!({"cniVersion": VERSION, "name": "net1", "type": "flannel", "subnetFile": node.dir().join("subnet.env"),
           "dataDir": node.dir().join("flannel"), "ipam": {"type": "host-local", "dataDir": node.data_dir()},
           "delegate": {"bridge": "br0", "isDefaultGateway": true, "hairpinMode": true}})
}

/// The same, with the subnet file.
fn ready(node: &Node) -> Value {
    node.file("subnet.env", SUBNET);
    network(node)
}

/// The names of the stored configurations and of all other files in their folder.
fn stored(node: &Node) -> Vec<String> {
    let Ok(entries) = fs::read_dir(node.dir().join("flannel")) else { return Vec::new() };
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn file_of(node: &Node, attachment: &Attachment<'_>) -> PathBuf {
    node.dir().join("flannel").join(&attachment.id)
}

/// Asserts that neither ports nor addresses nor stored configurations are left.
#[track_caller]
fn nothing_is_left(node: &Node) {
    assert_eq!((node.ports("br0"), node.reservations("net1"), stored(node)), (vec![], vec![], vec![]));
}

#[test]
fn bridge_gets_subnet_mtu_and_routes_of_the_file() {
    require!(probe::plugin("flannel"));
    let node = Node::new();
    let all = attach(&node, &ready(&node), 2);
    for ((container, attachment, result), address) in all.iter().zip(["10.42.3.2", "10.42.3.3"]) {
        assert_eq!(addresses(result), [format!("{address}/24")]);
        assert_eq!(container.link("eth0").unwrap()["mtu"], 1450);
        let mut routes: Vec<String> = container.exec(&["ip", "route"]).lines().map(|line| line.trim().into()).collect();
        routes.sort();
        let link = format!("10.42.3.0/24 dev eth0 proto kernel scope link src {address}");
        assert_eq!(routes, ["10.42.0.0/16 via 10.42.3.1 dev eth0", link.as_str(), "default via 10.42.3.1 dev eth0"]);
        attachment.check(result).success();
    }
    all[0].0.ping("10.42.3.3");
    for (_, attachment, result) in &all {
        attachment.del_with(result).success();
        attachment.del_with(result).success();
    }
    nothing_is_left(&node);
}

#[test]
fn the_stored_configuration_is_that_of_upstream() {
    require!(probe::plugin("flannel"));
    let node = Node::new();
    let config = patched(ready(&node), json!({"runtimeConfig": {"mac": "02:11:22:33:44:55"}}));
    let (_c, attachment, _) = attach(&node, &config, 1).remove(0);
    let bytes = fs::read(file_of(&node, &attachment)).unwrap();
    let expected = format!(
        r#"{{"bridge":"br0","cniVersion":"{VERSION}","hairpinMode":true,"ipMasq":false,"ipam":{{"dataDir":"{}","ranges":[[{{"subnet":"10.42.3.0/24"}}]],"routes":[{{"dst":"10.42.0.0/16"}}],"type":"host-local"}},"isDefaultGateway":true,"isGateway":true,"mtu":1450,"name":"net1","runtimeConfig":{{"mac":"02:11:22:33:44:55"}},"type":"bridge"}}"#,
        node.data_dir().display()
    );
    assert_eq!(String::from_utf8(bytes).unwrap(), expected);
    attachment.del().success();
    nothing_is_left(&node);
}

#[test]
fn del_needs_neither_subnet_file_nor_namespace() {
    require!(probe::plugin("flannel"));
    let node = Node::new();
    let (container, attachment, _) = attach(&node, &ready(&node), 1).remove(0);
    fs::remove_file(node.dir().join("subnet.env")).unwrap();
    container.destroy();
    attachment.del().success();
    nothing_is_left(&node);
    attachment.del().success();
}

/// As upstream's plugin leaves it: bridge has attached the container with the stored file.
#[test]
fn a_container_that_upstream_attached_is_deleted() {
    require!(probe::plugin("flannel"));
    let node = Node::new();
    let delegated = json!({"cniVersion": VERSION, "name": "net1", "type": "bridge", "bridge": "br0", "ipMasq": false,
        "isGateway": true, "mtu": 1450, "ipam": ipam(&node, &["10.42.3.0/24"])});
    let (container, bridge, result) = attach(&node, &delegated, 1).remove(0);
    let attachment = Attachment::new(&node, &container, network(&node));
    node.file(&format!("flannel/{}", bridge.id), delegated.to_string());
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    nothing_is_left(&node);
}

#[test]
fn a_subnet_file_that_is_missing_or_incomplete_is_named() {
    require!(probe::plugin("flannel"));
    let node = Node::new();
    let container = node.container();
    let config = patched(network(&node), json!({"cniVersion": "1.1.0"}));
    let attachment = Attachment::new(&node, &container, config);
    for cut in [None, Some(0), Some(60), Some(SUBNET.len() - 3)] {
        let file = cut.map(|end| node.file("subnet.env", &SUBNET[..end]));
        let words = ["flanneld has not written", "subnet.env", "yet"];
        attachment.add().fails_naming(11, &words);
        attachment.status().fails_naming(50, &words);
        attachment.del().success();
        file.into_iter().for_each(|file| fs::remove_file(file).unwrap());
    }
    assert_eq!(container.link("eth0"), None);
    nothing_is_left(&node);
    node.file("subnet.env", SUBNET);
    attachment.status().success();
}

#[test]
fn a_second_add_fails_and_leaves_the_first() {
    require!(probe::plugin("flannel"));
    let node = Node::new();
    let config = ready(&node);
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    let before = fs::read(file_of(&node, &attachment)).unwrap();
    let other = patched(config, json!({"delegate": {"mtu": 1400}}));
    Attachment::new(&node, &container, other).add().failure();
    assert_eq!(fs::read(file_of(&node, &attachment)).unwrap(), before);
    attachment.check(&result).success();
    attachment.del().success();
    nothing_is_left(&node);
}

#[test]
fn a_failed_add_leaves_nothing() {
    require!(probe::plugin("flannel"));
    let node = Node::new();
    let container = node.container();
    let config = patched(ready(&node), json!({"delegate": {"mtu": 5}}));
    Attachment::new(&node, &container, config).add().failure();
    nothing_is_left(&node);
}

/// The second ADD replaces the stored configuration, whose name has neither network nor interface.
#[test]
fn two_networks_of_a_container_are_both_deleted() {
    require!(probe::plugin("flannel"));
    let node = Node::new();
    let (container, first, _) = attach(&node, &ready(&node), 1).remove(0);
    let subnet = node.file("other.env", SUBNET.replace("10.42", "10.43"));
    let other = json!({"name": "net2", "subnetFile": subnet, "delegate": {"bridge": "br1"}});
    let second = Attachment::new(&node, &container, patched(network(&node), other)).ifname("eth1");
    second.add().success();
    first.del().success();
    assert!(container.link("eth0").is_none() && container.link("eth1").is_some());
    assert_eq!(stored(&node).len(), 1);
    second.del().success();
    assert_eq!((node.ports("br1"), node.reservations("net2")), (vec![], vec![]));
    nothing_is_left(&node);
}

/// The kernel has the route to the network already. The DEL of the second interface removes the
/// stored configuration, which both share.
#[test]
fn a_second_interface_of_a_network_leaves_the_first() {
    require!(probe::plugin("flannel"));
    let node = Node::new();
    let (container, first, result) = attach(&node, &ready(&node), 1).remove(0);
    let second = first.clone().ifname("eth1");
    second.add().fails_with(100, "failed to add route 10.42.0.0/16 via 10.42.3.1 dev eth1: File exists");
    assert_eq!(stored(&node), [first.id.as_str()]);
    second.del().success();
    assert!(container.link("eth0").is_some() && stored(&node).is_empty());
    first.check(&result).success();
    first.del().success();
    nothing_is_left(&node);
}

/// No network can use such a file, so the DEL of its container removes it. GC only prints its path:
/// it may be a file of another program.
#[test]
fn a_stored_file_that_cannot_be_decoded_ends_with_its_container() {
    require!(probe::plugin("flannel"));
    let node = Node::new();
    let config = patched(ready(&node), json!({"cniVersion": "1.1.0"}));
    let (_container, attachment, result) = attach(&node, &config, 1).remove(0);
    fs::write(file_of(&node, &attachment), "{\"name\":\"net1\"").unwrap();
    let other = node.file("flannel/other", "not JSON");
    attachment.check(&result).success();
    for valid in [vec![(attachment.id.as_str(), "eth0")], vec![]] {
        let outcome = attachment.gc(&valid);
        outcome.success();
        assert!(outcome.stderr.contains("flannel/other is not used: expected"), "{}", outcome.report());
        assert_eq!(stored(&node), [attachment.id.as_str(), "other"]);
    }
    attachment.del().success();
    assert_eq!(stored(&node), ["other"]);
    fs::remove_file(other).unwrap();
    nothing_is_left(&node);
}

#[test]
fn del_leaves_the_configuration_of_another_network() {
    require!(probe::plugin("flannel"));
    let node = Node::new();
    let container = node.container();
    let path = node.file(&format!("flannel/{}", container.id), r#"{"name":"net2","type":"bridge"}"#);
    Attachment::new(&node, &container, ready(&node)).del().success();
    assert!(path.exists());
    fs::remove_file(path).unwrap();
}

#[test]
fn gc_removes_containers_that_are_not_valid() {
    require!(probe::plugin("flannel"));
    let node = Node::new();
    let config = patched(ready(&node), json!({"cniVersion": "1.1.0"}));
    let mut all = attach(&node, &config, 2);
    let (gone, ..) = all.remove(0);
    let (_c, kept, result) = all.remove(0);
    let other = node.file("flannel/other", r#"{"name":"net2","type":"bridge"}"#);
    gone.destroy();
    // The stored configurations suffice.
    fs::remove_file(node.dir().join("subnet.env")).unwrap();
    kept.gc(&[(&kept.id, "eth0")]).success();
    assert_eq!(stored(&node), [kept.id.as_str(), "other"]);
    assert_eq!((node.ports("br0").len(), node.reservations("net1").len()), (1, 1));
    kept.check(&result).success();
    kept.gc(&[]).success();
    fs::remove_file(other).unwrap();
    nothing_is_left(&node);
}

#[test]
fn gc_reaches_the_former_store_of_a_changed_ipam() {
    require!(probe::plugin("flannel"));
    let node = Node::new();
    let config = patched(ready(&node), json!({"cniVersion": "1.1.0"}));
    let (_c, former, _) = attach(&node, &config, 1).remove(0);
    let other = node.dir().join("other-store");
    let present = patched(config, json!({"ipam": {"dataDir": other}}));
    let (_d, present, _) = attach(&node, &present, 1).remove(0);
    present.gc(&[(&present.id, "eth0")]).success();
    assert_eq!((stored(&node), node.reservations("net1")), (vec![present.id.clone()], vec![]));
    present.gc(&[]).success();
    assert_eq!(former.gc(&[]).success(), Value::Null);
    nothing_is_left(&node);
}

#[test]
fn a_configuration_that_del_could_not_read_fails_the_add() {
    require!(probe::plugin("flannel"));
    let node = Node::new();
    let container = node.container();
    let config = patched(ready(&node), json!({"delegate": {"comment": "x".repeat(1 << 20)}}));
    let attachment = Attachment::new(&node, &container, config);
    attachment.add().fails_naming(5, &["failed to write the stored configuration", "longer than 1048576 bytes"]);
    assert_eq!((container.link("eth0"), node.link("br0")), (None, None));
    nothing_is_left(&node);
}
