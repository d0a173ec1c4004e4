//! What the host recorded at ADD decides what DEL does, not the names, aliases and addresses that a
//! pod with CAP_NET_ADMIN can write.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use cni_testkit::trace::{self, Act, Plan};
use cni_testkit::{Attachment, Container, Node, require};
use conformance::{VERSION, patched};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{MAC, is_back, is_taken, layer2, network, node, sysfs};

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

#[test]
fn del_leaves_the_device_of_another_attachment() {
    let node = node();
    sysfs(&node);
    let container = node.container();
    let first = Attachment::new(&node, &container, network(&node));
    let result = first.add().success();
    // The host's `eth0` takes the place of `dev0` in its PCI device.
    node.exec(&["mv", "/sys/devices/pci0/0000:00:01.0/net/dev0", "/sys/devices/pci0/0000:00:01.0/net/eth0"]);
    let keys = json!({"name": "net2", "pciBusID": "0000:00:01.0"});
    let second = Attachment::new(&node, &container, layer2(keys));
    second.add().fails_naming(102, &["eth0"]);
    second.del().success();
    is_taken(&node, &container);
    first.check(&result).success();
    first.del_with(&result).success();
    is_back(&node, "down");
}

#[test]
fn del_by_device_leaves_an_interface_of_the_pod() {
    for keys in [
        json!({"pciBusID": "0000:00:01.0"}),
        json!({"pciBusID": "0000:00:03.0"}),
        json!({"runtimeConfig": {"deviceID": "mlx5_core.sf.4"}}),
        json!({"kernelpath": "/sys/devices/pci0/0000:00:01.0"}),
    ] {
        let node = node();
        sysfs(&node);
        let container = node.container();
        container.ip(&["link add eth0 type ifb", "link set eth0 alias eth7"]);
        Attachment::new(&node, &container, layer2(keys.clone())).del().success();
        assert_eq!((node.link("eth7"), &container.link("eth0").unwrap()["ifalias"]), (None, &json!("eth7")), "{keys}");
    }
}

#[test]
fn del_after_a_failed_add_keeps_the_alias_of_the_host() {
    let node = node();
    sysfs(&node);
    let container = node.container();
    // The kernel itself gives the names `devN`.
    node.ip(&["link set dev0 down", "link set dev0 name nic0", "link set nic0 alias storage up"]);
    node.exec(&["mv", "/sys/devices/pci0/0000:00:01.0/net/dev0", "/sys/devices/pci0/0000:00:01.0/net/nic0"]);
    for keys in [json!({"hwaddr": MAC}), json!({"pciBusID": "0000:00:01.0"}), json!({"device": "nic0"})] {
        let config = patched(network(&node), json!({"device": null, "ipam": {"ranges": []}}));
        let attachment = Attachment::new(&node, &container, patched(config, keys));
        // The second CNI_IFNAME is the name on the host.
        let named = [attachment.clone(), attachment.ifname("nic0")];
        named.iter().for_each(|attachment| drop(attachment.add().failure()));
        for attachment in named.into_iter().flat_map(|one| [one.clone(), one.netns("")]) {
            attachment.del().success();
            let link = node.link("nic0").expect("the host has nic0");
            let up = link["flags"].as_array().unwrap().contains(&json!("UP"));
            assert_eq!((&link["ifalias"], up), (&json!("storage"), true));
        }
    }
    node.ip(&["link set nic0 down", "link set nic0 name dev0"]);
}

#[test]
fn an_add_killed_before_the_move_keeps_the_container() {
    require!(trace::supported());
    let node = node();
    node.expect_left("dev7");
    let container = node.container();
    // Of a kind that a pod can create, with the index that the host's interface has.
    node.ip(&["link add dev7 index 77 type ifb"]);
    let attachment = Attachment::new(&node, &container, layer2(json!({"device": "dev7"})));
    let add = |at, signal| {
        let plan = Plan { victim: "host-device".to_owned(), at, act: Act::Signal(signal) };
        attachment.invocation("ADD", None).traced(&plan)
    };
    let all = add(u64::MAX, Signal::SIGKILL).all;
    attachment.del().success();
    // The record gets its name by `linkat`.
    let recorded = (1..).zip(&all).find(|(_, hit)| hit.call == "linkat").expect("a record is written").0;
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let index = node.link("dev7").unwrap()["ifindex"].clone();
        container.ip(&[&format!("link add net2 index {index} type ifb")]);
        add(recorded + 1, signal);
        attachment.del().success();
        assert_eq!((container.link("net2").unwrap()["ifindex"].clone(), records(&node)), (index, vec![]));
        container.ip(&["link del net2"]);
        assert_eq!(node.link("dev7").unwrap()["ifalias"], Value::Null);
    }
}

#[test]
fn an_add_after_a_lost_del_records_the_original_name() {
    for keys in [json!({"hwaddr": MAC}), json!({"device": "dev0"})] {
        let node = node();
        let container = node.container();
        let attachment = Attachment::new(&node, &container, layer2(keys));
        attachment.add().success();
        // A veth ends with its namespace; the kernel brings hardware back, down, as here.
        container.ip(&[&format!("link set eth0 netns {} name eth7", node.netns().display())]);
        attachment.add().success();
        is_taken(&node, &container);
        attachment.del().success();
        is_back(&node, "down");
        assert_eq!(records(&node), Vec::<u32>::new());
    }
}

#[test]
fn a_namespace_with_the_inode_of_another_is_left() {
    let node = node();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, network(&node));
    let result = attachment.add().success();
    let path = node.enter(|| fs::read_dir("/run/cni/host-device").unwrap().next().unwrap().unwrap().path());
    let replace = |old: &str, new: &str| {
        let text = node.enter(|| fs::read_to_string(&path).unwrap());
        node.enter(|| fs::write(&path, text.replace(old, new)).unwrap());
    };
    // As if the namespace of the ADD had had the same inode.
    replace("\"netnsCookie\":", "\"netnsCookie\":9");
    attachment.del_with(&result).success();
    is_taken(&node, &container);
    // A record of a release without cookies.
    replace("\"netnsCookie\":", "\"unused\":");
    attachment.del_with(&result).success();
    is_back(&node, "down");
}

#[test]
fn alternative_names_that_a_pod_adds_do_not_reach_the_host() {
    let node = node();
    let container = node.container();
    node.ip(&["link property add dev dev0 altname enp7s0"]);
    let attachment = Attachment::new(&node, &container, network(&node));
    for is_moved_by_the_kernel in [false, true] {
        attachment.add().success();
        // The host may get a bridge `cni0`. `dev0` is the device's own name.
        container.ip(&["link property add dev eth0 altname cni0 altname dev0"]);
        if is_moved_by_the_kernel {
            container.ip(&[&format!("link set eth0 netns {} name eth7", node.netns().display())]);
            attachment.clone().netns("").del().success();
        } else {
            // With an alternative name that the host has, the kernel would refuse the move.
            node.ip(&["link add other0 type bridge"]);
            container.ip(&["link property add dev eth0 altname other0"]);
            attachment.del().success();
        }
        is_back_from_the_pod(&node);
        assert_eq!(node.link("dev0").unwrap()["altnames"], json!(["enp7s0"]));
    }
}
