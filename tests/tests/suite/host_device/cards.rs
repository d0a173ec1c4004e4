//! A real network card, which the kernel brings back to the host when its namespace ends.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cni_testkit::{Container, Node, bin_dir, patience, require};
use serde_json::{Value, json};

use super::layer2;

/// The network cards that `scripts/vm` gives a virtual machine, by their addresses, and what
/// connects them.
const CARDS: [&str; 2] = ["52:54:00:63:6e:01", "52:54:00:63:6e:02"];

/// The name of a card in the namespace of this process, without the help of a node.
fn card(mac: &str) -> Option<String> {
    let folder = fs::read_dir("/sys/class/net").ok()?;
    let names = folder.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut cards = names.filter(|name| {
        let address = fs::read_to_string(format!("/sys/class/net/{name}/address"));
        address.is_ok_and(|address| address.trim() == mac)
    });
    cards.next()
}

/// The plugin, called where the kernel brings a card when its namespace ends: in this process's own
/// namespace.
fn call(verb: &str, container: Option<&Container>, keys: &Value) -> Value {
    let netns = container.map_or(Path::new(""), |container| container.netns());
    let mut child = Command::new(bin_dir().join("host-device"))
        .envs([("CNI_COMMAND", verb), ("CNI_CONTAINERID", "card"), ("CNI_IFNAME", "net7")])
        .env("CNI_NETNS", netns)
        .env("CNI_PATH", bin_dir())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(layer2(keys.clone()).to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{verb} with {keys}: {}", String::from_utf8_lossy(&output.stdout));
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

#[test]
fn a_network_card_comes_back_when_its_namespace_ends() {
    let found = card(CARDS[0]).zip(card(CARDS[1]));
    require!(found.as_ref().map(drop).ok_or("no network card to play with: scripts/vm has two".to_owned()));
    let (name, other) = found.unwrap();
    // .../0000:00:04.0/virtio2/net/eth0: below the PCI device is the virtio device.
    let path = fs::canonicalize(format!("/sys/class/net/{name}/device")).unwrap();
    let address = path.parent().unwrap().file_name().unwrap().to_string_lossy().into_owned();
    let node = Node::new();
    let outside = node.container();
    let ip = |line: &str| {
        let done = Command::new("ip").args(line.split(' ')).status().unwrap();
        assert!(done.success(), "ip {line}");
    };
    ip(&format!("link set {other} netns {}", outside.netns().display()));
    outside.ip(&[&format!("link set {other} up"), &format!("address add 10.1.0.1/24 dev {other}")]);
    for keys in [
        json!({"device": name}),
        json!({"pciBusID": address}),
        json!({"kernelpath": path}),
        json!({"hwaddr": CARDS[0]}),
    ] {
        // By a DEL that finds it in the container, and by one after the container has gone.
        let container = node.container();
        call("ADD", Some(&container), &keys);
        container.ip(&["address add 10.1.0.2/24 dev net7"]);
        container.ping("10.1.0.1");
        call("DEL", Some(&container), &keys);
        assert_eq!(card(CARDS[0]).as_ref(), Some(&name), "{keys}");
        call("ADD", Some(&container), &keys);
        assert_eq!(card(CARDS[0]), None);
        // What the pod writes decides nothing.
        container.ip(&["link set net7 down", "link set net7 alias wg0"]);
        container.destroy();
        let deadline = Instant::now() + patience(Duration::from_secs(30));
        while card(CARDS[0]).is_none() && Instant::now() < deadline {}
        assert_eq!(card(CARDS[0]).as_deref(), Some("net7"), "{keys}");
        for _ in 0..2 {
            call("DEL", None, &keys);
            assert_eq!(card(CARDS[0]).as_ref(), Some(&name), "{keys}");
            assert_eq!(fs::read_to_string(format!("/sys/class/net/{name}/ifalias")).unwrap(), "");
        }
    }
    // Back from a namespace that ends with the test.
    outside.ip(&[&format!("link set {other} netns 1")]);
}
