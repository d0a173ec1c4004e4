//! sbr: packets from an interface's addresses leave by that interface.
//!
//! The container has `eth0` with the default route, and `net1`, the plugin's interface. Interfaces
//! get no automatic addresses, so that the tables contain only the test's routes.

mod failure;
mod identity;
mod mixed;
mod packets;
mod tables;

use cni_testkit::{Attachment, Container, Node};
use conformance::{VERSION, patched};
use serde_json::{Value, json};

/// A container with both interfaces, their other ends in a container for each network.
pub(crate) fn pod(node: &Node) -> (Container, [Container; 2]) {
    let (pod, networks) = (node.container(), [node.container(), node.container()]);
    for (name, number, network) in [("eth0", 1, &networks[0]), ("net1", 2, &networks[1])] {
        let netns = network.netns().display();
        network.ip(&["link add lan type bridge", "link set lan addrgenmode none up"]);
        pod.ip(&[
            &format!("link add {name} type veth peer name port netns {netns}"),
            &format!("link set {name} addrgenmode none up"),
            &format!("address add 10.{number}.0.2/24 dev {name}"),
            &format!("address add fd0{number}::2/64 dev {name} nodad"),
        ]);
        network.ip(&[
            "link set port addrgenmode none master lan up",
            &format!("address add 10.{number}.0.1/24 dev lan"),
            &format!("address add fd0{number}::1/64 dev lan nodad"),
        ]);
    }
    pod.ip(&["route add default via 10.1.0.1", "route add default via fd01::1"]);
    (pod, networks)
}

/// The network `net1` with these keys.
pub(crate) fn sbr(keys: Value) -> Value {
    patched(json!({"cniVersion": VERSION, "name": "net1", "type": "sbr"}), keys)
}

/// The attachment of `net1`.
pub(crate) fn routed<'n>(node: &'n Node, pod: &Container, keys: Value) -> Attachment<'n> {
    Attachment::new(node, pod, sbr(keys)).ifname("net1")
}

/// Returns the previous plugin's result: these addresses of `net1`, with their gateways.
pub(crate) fn prev(pod: &Container, ips: &[(&str, &str)]) -> Value {
    let ip = |(address, gateway): &(&str, &str)| match *gateway {
        "" => json!({"address": address, "interface": 1}),
        gateway => json!({"address": address, "gateway": gateway, "interface": 1}),
    };
    let mut all = vec![json!({"address": "10.1.0.2/24", "gateway": "10.1.0.1", "interface": 0})];
    all.extend(ips.iter().map(ip));
    let interfaces = json!([{"name": "eth0", "sandbox": pod.netns()}, {"name": "net1", "sandbox": pod.netns()}]);
    json!({"cniVersion": VERSION, "interfaces": interfaces, "ips": all})
}

/// The address of IPv4 with its gateway.
pub(crate) const V4: (&str, &str) = ("10.2.0.2/24", "10.2.0.1");

/// The address of IPv6 with its gateway.
pub(crate) const V6: (&str, &str) = ("fd02::2/64", "fd02::1");

/// Returns the rules that select a table by source, newest first.
pub(crate) fn rules(pod: &Container) -> Vec<String> {
    let all = [pod.exec(&["ip", "-4", "rule"]), pod.exec(&["ip", "-6", "rule"])].concat();
    let ours = all.lines().filter(|line| !line.contains("from all"));
    ours.map(|line| line.split_once('\t').expect("a priority").1.trim().to_owned()).collect()
}

/// The routes of one family (`-4`, `-6`) in a table, as `ip route` writes them.
pub(crate) fn routes(pod: &Container, family: &str, table: &str) -> Vec<String> {
    let ran = pod.run(&["ip", family, "route", "show", "table", table]);
    let lines = ran.stdout.lines().map(|line| line.replace(" linkdown", "").replace(" pref medium", ""));
    lines.map(|line| line.trim().to_owned()).collect()
}

/// Empties the tables of the first two addresses, which a DEL leaves to end with the interface.
pub(crate) fn empty(pod: &Container) {
    pod.run(&["ip", "-4", "route", "flush", "table", "100"]);
    pod.run(&["ip", "-6", "route", "flush", "table", "101"]);
}

/// Returns all rules, and all routes except those of the table `local`.
pub(crate) fn state(pod: &Container) -> Vec<String> {
    let mut all = rules(pod);
    for family in ["-4", "-6"] {
        let routes = routes(pod, family, "all");
        all.extend(routes.into_iter().filter(|line| !line.contains("table local") && !line.starts_with("multicast")));
    }
    all
}
