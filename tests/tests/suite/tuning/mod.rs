//! tuning: settings of an interface and of its namespace, set by ADD and put back by DEL.
//!
//! The interface is one end of a veth pair inside the container, so that no other plugin is needed;
//! `prev` is the result of the plugin that would have created it.

mod allowlist;
mod backup;
mod chain;
mod check;
mod extras;
mod failure;
mod knobs;
mod mixed;
mod network;
mod shapes;
mod sysctl;

use std::fs;
use std::path::PathBuf;

use cni_testkit::{Attachment, Container, Invocation, Node};
use conformance::{VERSION, patched};
use serde_json::{Value, json};

/// The interface's MAC before tuning.
const MAC: &str = "02:00:00:00:00:0e";

/// A sysctl of the interface, 0 before tuning.
const ARP_FILTER: &str = "net/ipv4/conf/eth0/arp_filter";

/// A container with an `eth0`.
#[track_caller]
pub(crate) fn pod(node: &Node) -> Container {
    let container = node.container();
    equip(&container);
    container
}

#[track_caller]
fn equip(container: &Container) {
    container.exec(&["ip", "link", "add", "eth0", "address", MAC, "type", "veth", "peer", "name", "peer0"]);
}

/// The network `net1` with these keys; its backups are in the node's folder.
fn tuning(node: &Node, keys: Value) -> Value {
    let base = json!({"cniVersion": VERSION, "name": "net1", "type": "tuning", "dataDir": data_dir(node)});
    patched(base, keys)
}

pub(crate) fn data_dir(node: &Node) -> PathBuf {
    node.dir().join("tuning")
}

/// Returns its attachment of this container.
pub(crate) fn tuned<'n>(node: &'n Node, container: &Container, keys: Value) -> Attachment<'n> {
    Attachment::new(node, container, tuning(node, keys))
}

/// What a plugin before this one returned: the host's end, the container's, and another sandbox's
/// of the same name.
pub(crate) fn prev(container: &Container) -> Value {
    json!({
        "cniVersion": VERSION,
        "interfaces": [
            {"name": "veth0", "mac": "02:00:00:00:00:01"},
            {"name": "eth0", "mac": MAC, "sandbox": container.netns()},
            {"name": "eth0", "mac": "02:00:00:00:00:02", "sandbox": "/some/where/else"},
        ],
        "ips": [{"address": "10.1.0.2/24", "interface": 1, "gateway": "10.1.0.1"}],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dns": {"nameservers": ["192.0.2.1"]},
    })
}

/// Returns a call with a textual configuration, because JSON values neither keep the order of keys
/// nor contain a key twice.
fn call<'n>(node: &'n Node, container: &Container, verb: &str, keys: &str) -> Invocation<'n> {
    let (folder, prev) = (data_dir(node), prev(container));
    let folder = folder.to_str().unwrap();
    let config = format!(
        r#"{{"cniVersion":"{VERSION}","name":"net1","type":"tuning","dataDir":"{folder}",{keys},"prevResult":{prev}}}"#
    );
    node.plugin("tuning").command(verb).container(container).stdin(config)
}

/// Returns MAC, MTU, promiscuous and all-multicast flags, and transmit queue length of `eth0`.
#[track_caller]
pub(crate) fn state(container: &Container) -> (String, u64, bool, bool, u64) {
    let link = container.link("eth0").expect("eth0 is there");
    let flag = |name: &str| link["flags"].as_array().unwrap().iter().any(|flag| flag == name);
    let number = |key: &str| link[key].as_u64().unwrap_or_default();
    (link["address"].as_str().unwrap().to_owned(), number("mtu"), flag("PROMISC"), flag("ALLMULTI"), number("txqlen"))
}

/// Returns the names of the files in the backups' folder.
fn backups(node: &Node) -> Vec<String> {
    let files = fs::read_dir(data_dir(node)).into_iter().flatten().flatten();
    let mut names: Vec<String> = files.map(|file| file.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The backup of the container's `eth0`.
#[track_caller]
fn backup_of(node: &Node, container: &Container) -> Value {
    let path = data_dir(node).join(format!("{}_eth0.json", container.id));
    serde_json::from_slice(&fs::read(path).expect("there is a backup")).expect("a backup is JSON")
}
