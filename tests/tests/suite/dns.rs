//! The name servers in the result of an interface plugin: those of the runtime, else of the
//! configuration, else of IPAM.

use cni_testkit::probe::{self, Probed};
use cni_testkit::{Attachment, Node, require};
use conformance::{VERSION, ipam, patched, uplink};
use serde_json::{Value, json};

/// Returns the keys that `plugin` needs besides `ipam`, and whether the kernel supports it.
fn keys(plugin: &str) -> (Value, Probed) {
    match plugin {
        "bridge" => (json!({"bridge": "br0"}), Ok(())),
        "dummy" => (json!({}), probe::dummy()),
        "host-device" => (json!({"device": "dev0"}), Ok(())),
        "ipvlan" => (json!({"master": "eth0"}), probe::ipvlan()),
        "macvlan" => (json!({"master": "eth0"}), Ok(())),
        "vlan" => (json!({"master": "eth0", "vlanId": 5}), probe::vlan_links()),
        _ => (json!({}), Ok(())),
    }
}

fn the_runtime_s_come_first(plugin: &str) {
    let (keys, probed) = keys(plugin);
    require!(probed);
    require!(probe::plugin(plugin));
    let node = Node::new();
    let _outside = uplink(&node, "eth0");
    for left in ["br0", "dev0", "peer0"] {
        node.expect_left(left);
    }
    node.ip(&["link add dev0 type veth peer name peer0"]);
    let resolv = node.file("resolv.conf", "nameserver 192.0.2.53\n");
    let base = json!({"cniVersion": VERSION, "name": "net1", "type": plugin,
                      "ipam": patched(ipam(&node, &["10.1.0.0/24"]), json!({"resolvConf": resolv}))});
    let config = patched(base, keys);
    let configured = json!({"dns": {"nameservers": ["192.0.2.54"]}});
    let runtime = json!({"runtimeConfig": {"dns": {"servers": ["192.0.2.55"], "searches": ["a.example"]}}});
    for (more, expected) in [
        (json!({}), json!({"nameservers": ["192.0.2.53"]})),
        (configured.clone(), json!({"nameservers": ["192.0.2.54"]})),
        (patched(configured, runtime), json!({"nameservers": ["192.0.2.55"], "search": ["a.example"]})),
        // An empty list asks for none of IPAM's.
        (json!({"dns": {"nameservers": []}}), Value::Null),
        (json!({"dns": {"search": []}}), Value::Null),
    ] {
        let container = node.container();
        let attachment = Attachment::new(&node, &container, patched(config.clone(), more));
        let result = attachment.add().success();
        assert_eq!(result["dns"], expected);
        attachment.del_with(&result).success();
    }
}

macro_rules! for_each_plugin {
    ($($name:ident: $plugin:literal)*) => {
        mod the_runtime_s_come_first {
            $(#[test]
            fn $name() {
                super::the_runtime_s_come_first($plugin);
            })*
        }
    };
}

for_each_plugin! {
    bridge: "bridge"
    dummy: "dummy"
    host_device: "host-device"
    ipvlan: "ipvlan"
    macvlan: "macvlan"
    ptp: "ptp"
    tap: "tap"
    vlan: "vlan"
}
