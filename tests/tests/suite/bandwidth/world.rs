//! Containers with limited interfaces, and what limits them.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use cni_testkit::{Container, Node};
use conformance::{VERSION, patched};
use serde_json::{Value, json};

/// Both limits: 8 Mbit/s, and 100,000 bytes at once.
pub(super) fn both() -> Value {
    json!({"ingressRate": 8_000_000, "ingressBurst": 800_000, "egressRate": 16_000_000, "egressBurst": 800_000})
}

pub(super) fn config(limits: Value) -> Value {
    patched(json!({"cniVersion": VERSION, "name": "net1", "type": "bandwidth"}), limits)
}

/// A container whose `eth0` is one end of a veth pair, and what the plugin that made it would have
/// answered.
pub(super) fn pod(node: &Node, host: &str) -> (Container, Value) {
    let container = node.container();
    let prev = plug(node, &container, host, "eth0");
    (container, prev)
}

/// Gives a container an interface. The other end is the test's to remove: `unplug`.
pub(super) fn plug(node: &Node, container: &Container, host: &str, ifname: &str) -> Value {
    let netns = container.netns().display().to_string();
    node.ip(&[
        &format!("link add {host} mtu 1400 type veth peer name {ifname} netns {netns}"),
        &format!("link set {host} up"),
        &format!("address add 10.9.0.1/32 peer 10.9.0.2 dev {host}"),
    ]);
    container.ip(&[&format!("link set {ifname} up"), &format!("address add 10.9.0.2/32 peer 10.9.0.1 dev {ifname}")]);
    json!({"cniVersion": VERSION, "interfaces": [{"name": "br0"}, {"name": host}, {"name": ifname, "sandbox": netns}]})
}

pub(super) fn unplug(node: &Node, host: &str) {
    node.exec(&["ip", "link", "del", host]);
}

pub(super) fn qdiscs(node: &Node, link: &str) -> Vec<Value> {
    let all = node.json(&["tc", "-s", "-j", "qdisc", "show", "dev", link]);
    all.as_array().unwrap().iter().filter(|qdisc| qdisc["kind"] != "noqueue").cloned().collect()
}

pub(super) fn ifbs(node: &Node) -> Vec<String> {
    let links = node.json(&["ip", "-j", "link", "show", "type", "ifb"]);
    links.as_array().into_iter().flatten().map(|link| link["ifname"].as_str().unwrap().to_owned()).collect()
}

/// All that limits anything on the node, as text.
pub(super) fn limits(node: &Node, host: &str) -> String {
    let filters = node.exec(&["tc", "filter", "show", "dev", host, "parent", "ffff:"]);
    let all = node.exec(&["tc", "qdisc", "show"]);
    let made = all.lines().filter(|line| !line.contains("noqueue"));
    made.chain(filters.lines()).collect::<Vec<_>>().join("\n")
}

/// Sends so much from one side to the other and returns how long it took.
pub(super) fn send(from: impl Fn() -> TcpStream, to: &TcpListener, bytes: usize) -> Duration {
    thread::scope(|scope| {
        let received = scope.spawn(|| {
            let (mut stream, _) = to.accept().unwrap();
            let (mut buffer, mut all) = (vec![0; 1 << 16], 0);
            loop {
                match stream.read(&mut buffer).unwrap() {
                    0 => return (all, Instant::now()),
                    read => all += read,
                }
            }
        });
        let mut stream = from();
        let began = Instant::now();
        stream.write_all(&vec![7; bytes]).unwrap();
        drop(stream);
        let (all, ended) = received.join().unwrap();
        assert_eq!(all, bytes);
        ended - began
    })
}

/// Sends to the container or from there.
pub(super) fn transfer(node: &Node, container: &Container, to_container: bool, bytes: usize) -> Duration {
    if to_container {
        let listener = container.enter(|| TcpListener::bind("10.9.0.2:0").unwrap());
        let address = listener.local_addr().unwrap();
        send(|| node.enter(|| TcpStream::connect(address).unwrap()), &listener, bytes)
    } else {
        let listener = node.enter(|| TcpListener::bind("10.9.0.1:0").unwrap());
        let address = listener.local_addr().unwrap();
        send(|| container.enter(|| TcpStream::connect(address).unwrap()), &listener, bytes)
    }
}
