//! The networks the suite plays with, and how to read a result.
//!
//! The tests themselves are in `tests/suite/`: one binary, one file per subject. They know the
//! plugins only by their executables (`CNI_BIN_DIR`), so they run against the Go plugins just as
//! well; where those differ by intent, `divergences.txt` says so.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests fail by panicking")]

pub mod cluster;
pub mod lan;
pub mod measure;
pub mod router;

use cni_testkit::{Attachment, Container, Node};
use serde_json::{Map, Value, json};

/// Every version of the specification that a plugin must speak, oldest first.
pub const VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// The version of tests that are not about versions: the newest that every plugin in the field
/// understands.
pub const VERSION: &str = "1.0.0";

/// The plugins of the suite, as far as every release of the Go plugins has them.
pub const PLUGINS: [&str; 15] = [
    "bandwidth",
    "bridge",
    "firewall",
    "host-device",
    "host-local",
    "ipvlan",
    "loopback",
    "macvlan",
    "portmap",
    "ptp",
    "sbr",
    "static",
    "tuning",
    "vlan",
    "vrf",
];

/// The addresses of a node on its [`uplink`], IPv4 and IPv6.
pub const HOST: [&str; 2] = ["192.0.2.1", "2001:db8::1"];

/// The addresses of what is [beyond](uplink) it.
pub const OUTSIDE: [&str; 2] = ["192.0.2.9", "2001:db8::9"];

/// Gives the node a link `name` to the world, and returns the machine beyond it, which has no way
/// back to any container.
pub fn uplink(node: &Node, name: &str) -> Container {
    let outside = node.container();
    node.expect_left(name);
    node.ip(&[
        &format!("link add {name} type veth peer name eth0 netns {}", outside.netns().display()),
        &format!("link set {name} up"),
        &format!("address add {}/24 dev {name}", HOST[0]),
        &format!("address add {}/64 dev {name} nodad", HOST[1]),
    ]);
    outside.ip(&[
        "link set eth0 up",
        &format!("address add {}/24 dev eth0", OUTSIDE[0]),
        &format!("address add {}/64 dev eth0 nodad", OUTSIDE[1]),
    ]);
    outside
}

/// The plugin that the tests of host-local call: another one with host-local's configuration and
/// files, if `CNI_TEST_IPAM` names it.
pub fn ipam_plugin() -> String {
    std::env::var("CNI_TEST_IPAM").unwrap_or_else(|_| "host-local".to_owned())
}

/// `ipam` for host-local on this node, over these ranges: one set per element.
pub fn ipam(node: &Node, subnets: &[&str]) -> Value {
    let plugin = ipam_plugin();
    if plugin == "cluster-local" {
        cluster::hold(node, "net1", subnets);
    }
    let sets: Vec<Value> = subnets.iter().map(|subnet| json!([{ "subnet": subnet }])).collect();
    json!({"type": plugin, "dataDir": node.data_dir(), "ranges": sets})
}

/// host-local called directly, as network `net1`.
pub fn host_local(node: &Node, subnets: &[&str]) -> Value {
    json!({"cniVersion": VERSION, "name": "net1", "type": ipam_plugin(), "ipam": ipam(node, subnets)})
}

/// A layer-3 network `net1` on bridge `br0`, the bridge being the gateway.
pub fn bridge(node: &Node, subnets: &[&str]) -> Value {
    json!({"cniVersion": VERSION, "name": "net1", "type": "bridge", "bridge": "br0", "isGateway": true,
           "ipam": ipam(node, subnets)})
}

/// A layer-2 network `net1` on bridge `br0`.
pub fn layer2() -> Value {
    json!({"cniVersion": VERSION, "name": "net1", "type": "bridge", "bridge": "br0"})
}

/// The loopback network.
pub fn loopback() -> Value {
    json!({"cniVersion": VERSION, "name": "lo-net", "type": "loopback"})
}

/// `base` with the keys of `patch` laid over it, recursively; `null` takes a key away.
#[must_use]
pub fn patched(mut base: Value, patch: Value) -> Value {
    lay(&mut base, patch);
    base
}

fn lay(base: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *base = patch;
        return;
    };
    if !base.is_object() {
        *base = Value::Object(Map::new());
    }
    for (key, value) in patch {
        if value.is_null() {
            base.as_object_mut().unwrap().remove(&key);
        } else {
            lay(&mut base[key], value);
        }
    }
}

/// The addresses of a result from 0.3.0 on, prefix included.
#[track_caller]
pub fn addresses(result: &Value) -> Vec<String> {
    let ips = result["ips"].as_array().unwrap_or_else(|| panic!("no ips in {result:#}"));
    ips.iter().map(|ip| ip["address"].as_str().unwrap().to_owned()).collect()
}

/// The first address of a result, prefix excluded.
#[track_caller]
pub fn address(result: &Value) -> String {
    addresses(result)[0].split('/').next().unwrap().to_owned()
}

/// Whether each link-local IPv6 address of a link of the host is still tentative.
#[track_caller]
pub fn tentative(node: &Node, link: &str) -> Vec<bool> {
    let links = node.json(&["ip", "-j", "-6", "addr", "show", "dev", link]);
    let infos = links[0]["addr_info"].as_array().unwrap_or_else(|| panic!("no address in {links}"));
    infos.iter().filter(|info| info["scope"] == "link").map(|info| info["tentative"] == true).collect()
}

/// The interface of a result that is in a sandbox.
#[track_caller]
pub fn sandboxed(result: &Value) -> &Value {
    let interfaces = result["interfaces"].as_array().unwrap_or_else(|| panic!("no interfaces in {result:#}"));
    let inside = interfaces.iter().find(|interface| interface["sandbox"].as_str().is_some_and(|s| !s.is_empty()));
    inside.unwrap_or_else(|| panic!("nothing in a sandbox in {result:#}"))
}

/// The name of the host end in a result of bridge: outside any sandbox and not the bridge itself.
#[track_caller]
pub fn host_end<'a>(result: &'a Value, bridge: &str) -> &'a str {
    let interfaces = result["interfaces"].as_array().unwrap_or_else(|| panic!("no interfaces in {result:#}"));
    let outside = interfaces.iter().filter(|interface| interface["sandbox"].as_str().unwrap_or_default().is_empty());
    let mut names = outside.filter_map(|interface| interface["name"].as_str()).filter(|name| *name != bridge);
    names.next().unwrap_or_else(|| panic!("no host end in {result:#}"))
}

/// Makes `variant` (`nft` or `legacy`) the iptables that the node's owner has chosen.
#[track_caller]
pub fn choose_iptables(node: &Node, variant: &str) {
    let script = format!(
        "mkdir {0} && cp -a /etc/alternatives/. {0}/ && for f in ip ip6; do for s in '' -save -restore; do
         ln -sf /usr/sbin/${{f}}tables-{variant}$s {0}/${{f}}tables$s; done; done &&
         mount --bind {0} /etc/alternatives",
        node.dir().join("alternatives").display()
    );
    node.exec(&["sh", "-ec", &script]);
}

/// Takes iptables away from the node, both variants.
#[track_caller]
pub fn without_iptables(node: &Node) {
    let script = format!(
        "mkdir {0} && cp -a $(ls -d /usr/sbin/* | grep -v 'ip6*tables\\|xtables') {0}/ && mount --bind {0} /usr/sbin",
        node.dir().join("sbin").display()
    );
    node.exec(&["sh", "-ec", &script]);
}

/// Adds `count` containers to the network and returns each with its attachment and result.
#[track_caller]
pub fn attach<'n>(node: &'n Node, config: &Value, count: usize) -> Vec<(Container, Attachment<'n>, Value)> {
    let add = || {
        let container = node.container();
        let attachment = Attachment::new(node, &container, config.clone());
        let result = attachment.add().success();
        (container, attachment, result)
    };
    (0..count).map(|_| add()).collect()
}
