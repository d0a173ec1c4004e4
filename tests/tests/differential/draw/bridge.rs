//! Draws bridge: all its keys, and all requests of the runtime.

use cni_testkit::probe;
use serde_json::{Value, json};

use super::{Draw, ipam};

const TRUE: [Value; 1] = [Value::Bool(true)];

/// The MACs that configurations ask for.
const MACS: [&str; 3] = ["02:11:22:33:44:55", "02:AA:bb:CC:dd:EE", "c2:11:22:33:44:66"];

pub(super) fn bridge(draw: &mut Draw, network: usize) -> Value {
    let mut plugin = json!({"type": "bridge"});
    let names = ["br0", "br0", "br0", "br0", "br-0_x.y", "fifteen-letters"].map(Value::from);
    let bad_names = ["sixteen-letters-", "a/b", "a b", ".", "..", "lo", "br%d", "all"].map(Value::from);
    draw.key(&mut plugin, 85, "bridge", &names, &bad_names);
    let switches = [
        ("isGateway", 45),
        ("isDefaultGateway", 35),
        ("forceAddress", 10),
        ("ipMasq", 35),
        ("hairpinMode", 15),
        ("portIsolation", 8),
        ("macspoofchk", 10),
        ("disableContainerInterface", 3),
    ];
    for (key, chance) in switches {
        let good = if draw.one_in(8) { [json!(false)] } else { TRUE };
        draw.key(&mut plugin, chance, key, &good, &[json!("true"), json!(1)]);
    }
    if plugin["hairpinMode"] != true || draw.spoilt {
        draw.key(&mut plugin, 6, "promiscMode", &TRUE, &[json!("x")]);
    }
    // Detection of duplicates takes a second or two.
    draw.key(&mut plugin, 2, "enabledad", &TRUE, &[json!("x")]);
    draw.key(
        &mut plugin,
        30,
        "ipMasqBackend",
        &[json!("iptables"), json!("nftables"), json!("")],
        &[json!("x"), json!(1)],
    );
    draw.key(
        &mut plugin,
        20,
        "mtu",
        &[json!(1280), json!(1400), json!(9000), json!(0)],
        &[json!(67), json!(-1), json!(65536), json!("x")],
    );
    vlan(draw, &mut plugin);
    if draw.one_in(8) {
        let good = [
            json!({"nameservers": ["192.0.2.53"], "search": ["example.com"], "options": ["ndots:2"], "domain": "example.org"}),
            json!({"domain": "example.org"}),
            json!({}),
        ];
        draw.key(&mut plugin, 100, "dns", &good, &[json!({"nameservers": "x"}), json!([])]);
    }
    if draw.one_in(25) {
        let good =
            [json!({"servers": ["192.0.2.54"], "searches": ["pod.example"]}), json!({"nameservers": ["192.0.2.55"]})];
        plugin["runtimeConfig"]["dns"] = draw.pick(&good);
    }
    if draw.one_in(8) {
        let mac = mac(draw);
        if draw.one_in(2) {
            plugin["runtimeConfig"]["mac"] = mac;
        } else {
            plugin["args"]["cni"]["mac"] = mac;
        }
    }
    let layer2 = plugin["disableContainerInterface"] == true || draw.percent(7);
    if !layer2 || (draw.spoilt && draw.one_in(8)) {
        ipam::sources(draw, &mut plugin, network);
    }
    plugin
}

pub(super) fn mac(draw: &mut Draw) -> Value {
    draw.value(&MACS.map(Value::from), &[json!("zz"), json!("01:00:5e:00:00:01"), json!("00:00:00:00:00:00"), json!(1)])
}

/// Draws VLANs if the kernel has them; else in one list of fifty, which both must refuse.
fn vlan(draw: &mut Draw, plugin: &mut Value) {
    let chance = if probe::vlan_filtering().is_ok() { 12 } else { 1 };
    draw.key(plugin, chance, "vlan", &[json!(100), json!(1), json!(4094)], &[json!(4095), json!(-1), json!("x")]);
    let good = [json!([{"id": 100}]), json!([{"minID": 10, "maxID": 12}, {"id": 11}]), json!([])];
    let bad = [json!([{"minID": 10}]), json!([{"id": 4095}]), json!([{"minID": 12, "maxID": 10}]), json!({"id": 5})];
    draw.key(plugin, chance, "vlanTrunk", &good, &bad);
    draw.key(plugin, chance, "preserveDefaultVlan", &TRUE, &[json!("x")]);
}
