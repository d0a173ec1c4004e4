//! Tests names that would stand for another interface than the created one: templates (`eth%d`),
//! and folders of sysctls (`all`).

use cni_testkit::{Attachment, Node, probe, require};
use conformance::{PLUGINS, bridge, host_local, layer2, loopback, patched};
use serde_json::{Value, json};

const NAMES: [&str; 5] = ["eth%d", "%", "100%", "all", "default"];

fn config(node: &Node, plugin: &str) -> Value {
    match plugin {
        "bridge" => bridge(node, &["10.1.0.0/24"]),
        "host-local" => host_local(node, &["10.1.0.0/24"]),
        "loopback" => loopback(),
        other => json!({"cniVersion": "1.0.0", "name": "net1", "type": other, "mtu": 1400,
                        "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"},
                        "prevResult": {"cniVersion": "1.0.0", "interfaces": []}}),
    }
}

#[test]
fn add_refuses_an_interface_name_that_means_another() {
    let node = Node::new();
    let container = node.container();
    for plugin in PLUGINS {
        for name in NAMES {
            let call = node.plugin(plugin).command("ADD").container(&container).ifname(name);
            call.config(&config(&node, plugin)).run().fails_naming(4, &["CNI_IFNAME", name]);
        }
    }
    assert!(node.link("br0").is_none() && container.link("eth0").is_none(), "nothing is made");
    assert!(!node.data_dir().exists(), "nothing is reserved");
    assert_eq!(container.sysctl("net/ipv4/conf/all/arp_filter"), "0");
    assert_eq!(container.sysctl("net/ipv4/conf/default/arp_filter"), "0");
    assert_eq!(container.link("lo").unwrap()["operstate"], "DOWN");
}

#[test]
fn a_bridge_name_that_means_another_is_refused() {
    let node = Node::new();
    let container = node.container();
    for name in ["br%d", "all", "default", "lo"] {
        for keys in [json!({}), json!({"vlan": 100})] {
            let keys = patched(json!({"cniVersion": "1.1.0", "bridge": name}), keys);
            for base in [bridge(&node, &["10.1.0.0/24"]), layer2()] {
                let attachment = Attachment::new(&node, &container, patched(base, keys.clone()));
                attachment.add().fails_naming(7, &["bridge", name]);
                attachment.status().fails_naming(50, &["bridge", name]);
                attachment.del().success();
                attachment.gc(&[]).success();
            }
        }
    }
    let links = node.json(&["ip", "-j", "link", "show", "type", "bridge"]);
    assert!(links.as_array().is_none_or(Vec::is_empty), "no bridge is made: {links}");
    assert!(!node.data_dir().exists(), "nothing is reserved");
}

/// A release that passed the template to the kernel created an interface with another name, and a
/// mark with the template.
#[test]
fn del_removes_what_an_add_made_of_a_template() {
    let cases = [("DEL", "eth%d"), ("GC", "eth%d"), ("DEL", "all"), ("DEL", "default")];
    for (verb, name) in cases {
        let node = Node::new();
        let container = node.container();
        node.ip(&[
            "link add br0 type bridge",
            &format!("link add veth0 type veth peer name eth0 netns {}", container.netns().display()),
            &format!("link set veth0 master br0 alias cni:net1/{}/{name}", container.id),
        ]);
        node.file("networks/net1/10.1.0.2", format!("{}\r\n{name}", container.id));
        let keys = json!({"cniVersion": "1.1.0", "bridge": "br%d"});
        let attachment = Attachment::new(&node, &container, patched(bridge(&node, &["10.1.0.0/24"]), keys));
        let attachment = attachment.ifname(name);
        match verb {
            "DEL" => attachment.del().success(),
            _ => attachment.gc(&[]).success(),
        };
        assert!(node.link("veth0").is_none() && container.link("eth0").is_none(), "{verb} {name}");
        assert_eq!(node.reservations("net1"), [], "{verb} {name}");
    }
}

#[test]
fn cnitool_refuses_such_names_and_validate_reports_them() {
    require!(probe::plugin("cnitool"));
    let node = Node::new();
    let container = node.container();
    let list = |name: &str| {
        let mut plugin = patched(bridge(&node, &["10.1.0.0/24"]), json!({"name": null, "cniVersion": null}));
        plugin["bridge"] = name.into();
        json!({"cniVersion": "1.0.0", "name": "net1", "plugins": [plugin]}).to_string()
    };
    let cnitool = cni_testkit::bin_dir().join("cnitool");
    let folder = node.dir().join("net.d");
    let [cnitool, folder] = [&cnitool, &folder].map(|path| path.to_str().unwrap());
    let file = node.file("net.d/10-net1.conflist", list("br0"));
    let netns = container.netns().to_str().unwrap();
    let ran = node.run(&[cnitool, "add", "net1", netns, "--ifname", "eth%d", "--conf-dir", folder]);
    assert!(!ran.ok && ran.stderr.contains("interface name \"eth%d\" contains %"), "{}", ran.stderr);
    for name in ["br%d", "all", "default", "lo"] {
        node.file("net.d/10-net1.conflist", list(name));
        let ran = node.run(&[cnitool, "validate", file.to_str().unwrap(), "--file-only"]);
        assert!(!ran.ok && ran.stdout.contains(&format!("bridge {name:?}: the name ")), "{}{}", ran.stdout, ran.stderr);
    }
}
