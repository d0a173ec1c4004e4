//! What the host recorded at ADD decides what DEL does, not the names, aliases and addresses that a
//! pod with CAP_NET_ADMIN can write.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use cni_testkit::{Attachment, Container, Node};
use conformance::{VERSION, patched};
use serde_json::{Value, json};

use super::{MAC, is_back, is_taken, layer2, network, node};

/// The modes of the files in the folder of the records.
fn records(node: &Node) -> Vec<u32> {
    node.enter(|| {
        let files = fs::read_dir("/run/cni/host-device").into_iter().flatten().flatten();
        files.map(|file| file.metadata().unwrap().permissions().mode() & 0o7777).collect()
    })
}

/// Removes the records, as if Go's plugin had moved the device.
pub(super) fn forget(node: &Node) {
    node.exec(&["rm", "-rf", "/run/cni/host-device"]);
}

/// Whether the host's `dev0` is the one whose other end is `peer0`, down and without an alias.
#[track_caller]
fn is_back_from_the_pod(node: &Node) {
    let link = node.link("dev0").expect("the host has dev0 again");
    let up = link["flags"].as_array().unwrap().contains(&json!("UP"));
    assert_eq!((&link["link"], &link["ifalias"], up), (&json!("peer0"), &Value::Null, false), "{link:#}");
}

/// The pod renames the device, and offers a veth of its own in its place.
fn offer_a_veth(container: &Container) {
    container.ip(&[
        "link set eth0 down",
        "link set eth0 name hidden0",
        &format!("link add eth0 address {MAC} type veth peer name mine0"),
        "link set eth0 alias dev0",
    ]);
}

#[test]
fn the_pods_alias_does_not_name_the_device_on_the_host() {
    for keys in [json!({"device": "dev0"}), json!({"hwaddr": MAC})] {
        // `eth0` is the name of another interface of the host.
        for alias in ["wg0", "docker0", "eth0", "a/b", ""] {
            for with_result in [true, false] {
                let node = node();
                let container = node.container();
                let attachment = Attachment::new(&node, &container, layer2(keys.clone()));
                let result = attachment.add().success();
                container.exec(&["ip", "link", "set", "eth0", "alias", alias]);
                if with_result { attachment.del_with(&result) } else { attachment.del() }.success();
                is_back(&node, "down");
                assert_eq!(container.link("eth0"), None);
            }
        }
    }
}

#[test]
fn a_veth_of_the_pod_is_not_moved_to_the_host() {
    let node = node();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, network(&node));
    let result = attachment.add().success();
    offer_a_veth(&container);
    container.ip(&["link set hidden0 alias wg0", "link set hidden0 address 02:00:00:00:00:99"]);
    let outcome = attachment.del_with(&result);
    outcome.success();
    assert!(outcome.stderr.contains("eth0"), "{}", outcome.report());
    is_back_from_the_pod(&node);
    assert_eq!(container.link("eth0").unwrap()["link"], "mine0");
    assert_eq!((container.link("hidden0"), records(&node)), (None, vec![]));
}

#[test]
fn a_veth_with_the_devices_index_is_not_moved_to_the_host() {
    let node = node();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, network(&node));
    let result = attachment.add().success();
    let index = container.link("eth0").unwrap()["ifindex"].clone();
    let peer = node.link("peer0").unwrap()["ifindex"].clone();
    // The device is hidden in a namespace of the pod, where DEL does not look.
    let elsewhere = node.container();
    container.ip(&[
        &format!("link set eth0 netns {}", elsewhere.netns().display()),
        &format!("link add eth0 index {index} address {MAC} type veth peer name mine0 index {peer}"),
        "link set eth0 alias dev0",
    ]);
    let outcome = attachment.del_with(&result);
    outcome.success();
    assert!(outcome.stderr.contains("eth0") && outcome.stderr.contains("dev0"), "{}", outcome.report());
    assert_eq!((container.link("eth0").unwrap()["link"].clone(), node.link("dev0")), (json!("mine0"), None));
    // When the hidden device comes back, the next DEL gives it its name.
    elsewhere.ip(&[&format!("link set eth0 netns {} name eth7", node.netns().display())]);
    attachment.netns("").del_with(&result).success();
    is_back_from_the_pod(&node);
    assert_eq!(records(&node), Vec::<u32>::new());
}

#[test]
fn a_device_that_comes_back_gets_its_name_without_an_alias() {
    for alias in ["", "wg0"] {
        let node = node();
        let container = node.container();
        let attachment = Attachment::new(&node, &container, network(&node));
        attachment.add().success();
        container.exec(&["ip", "link", "set", "eth0", "alias", alias]);
        // A veth ends with its namespace; the kernel brings hardware back, down, as here.
        container.ip(&[&format!("link set eth0 netns {} name eth7", node.netns().display())]);
        for _ in 0..2 {
            attachment.clone().netns("").del().success();
            is_back_from_the_pod(&node);
        }
        assert_eq!(records(&node), Vec::<u32>::new());
    }
}

#[test]
fn a_reused_namespace_keeps_what_looks_like_the_device() {
    let node = node();
    let (container, other) = (node.container(), node.container());
    let attachment = Attachment::new(&node, &container, network(&node));
    let result = attachment.add().success();
    other.ip(&[&format!("link add eth0 address {MAC} type veth peer name mine0"), "link set eth0 alias dev0"]);
    let reused = attachment.clone().netns(other.netns());
    reused.del_with(&result).success();
    assert_eq!(other.link("eth0").unwrap()["link"], "mine0");
    is_taken(&node, &container);
    attachment.del_with(&result).success();
    is_back_from_the_pod(&node);
}

#[test]
fn without_a_record_the_configured_name_comes_before_the_alias() {
    let node = node();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, network(&node));
    for with_result in [true, false] {
        let result = attachment.add().success();
        forget(&node);
        container.exec(&["ip", "link", "set", "eth0", "alias", "wg0"]);
        if with_result {
            attachment.del_with(&result).success();
        } else {
            // Neither an address nor an alias fits.
            attachment.del().success();
            container.ip(&["link set eth0 alias dev0"]);
            attachment.del().success();
        }
        is_back(&node, "down");
    }
}

#[test]
fn the_record_is_private_and_ends_with_the_attachment() {
    let node = node();
    let [container, other] = [node.container(), node.container()];
    let config = patched(network(&node), json!({"cniVersion": VERSION}));
    let attachment = Attachment::new(&node, &container, config);
    let result = attachment.add().success();
    assert_eq!(records(&node), [0o600]);
    attachment.del_with(&result).success();
    assert_eq!(records(&node), Vec::<u32>::new());
    // A failed ADD leaves none.
    let refused = patched(network(&node), json!({"ipam": {"ranges": []}}));
    Attachment::new(&node, &other, refused).add().failure();
    assert_eq!(records(&node), Vec::<u32>::new());
    // GC gives a device that came back its name, and removes the record.
    let config = patched(network(&node), json!({"cniVersion": "1.1.0"}));
    let attachment = Attachment::new(&node, &container, config);
    attachment.add().success();
    attachment.gc(&[]).success();
    assert_eq!(records(&node), [0o600], "the device is in the container");
    container.ip(&[&format!("link set eth0 netns {} name eth7", node.netns().display())]);
    attachment.gc(&[(&attachment.id, "eth0")]).success();
    assert_eq!(node.link("dev0"), None, "the attachment is valid");
    attachment.gc(&[]).success();
    is_back_from_the_pod(&node);
    assert_eq!(records(&node), Vec::<u32>::new());
}
