//! Draws loopback, tuning and portmap.

use serde_json::{Value, json};

use super::bridge::mac;
use super::{Draw, object};

const TRUE: [Value; 1] = [Value::Bool(true)];
const BOTH: [Value; 2] = [Value::Bool(true), Value::Bool(false)];

pub(super) fn loopback(draw: &mut Draw) -> Value {
    let mut plugin = json!({"type": "loopback"});
    draw.key(&mut plugin, 10, "capabilities", &[json!({"portMappings": true})], &[json!([])]);
    draw.key(&mut plugin, 10, "unknown", &[json!({"x": [1, "y"]}), json!(5)], &[]);
    plugin
}

pub(super) fn tuning(draw: &mut Draw) -> Value {
    let mut plugin = json!({"type": "tuning"});
    if draw.percent(60) {
        let mut knobs = json!({});
        sysctls(draw, &mut knobs);
        plugin["sysctl"] = knobs;
    }
    knobs(draw, &mut plugin, 18);
    draw.key(&mut plugin, 15, "dataDir", &[json!("/run/backups")], &[json!("/proc/backups"), json!(1)]);
    if draw.one_in(8) {
        plugin["runtimeConfig"]["mac"] = mac(draw);
    }
    if draw.one_in(8) {
        let mut asked = json!({});
        knobs(draw, &mut asked, 30);
        // Go panics where there is no `sysctl` beside it.
        if plugin["sysctl"].is_object() && draw.one_in(2) {
            let mut knobs = json!({});
            sysctls(draw, &mut knobs);
            asked["sysctl"] = knobs;
        }
        plugin["args"]["cni"] = asked;
    }
    plugin
}

fn knobs(draw: &mut Draw, plugin: &mut Value, chance: u64) {
    if draw.percent(chance) {
        plugin["mac"] = mac(draw);
    }
    draw.key(plugin, chance, "promisc", &BOTH, &[json!("x")]);
    draw.key(
        plugin,
        chance,
        "mtu",
        &[json!(1300), json!(1400), json!(0), json!(9000)],
        &[json!(-5), json!(70000), json!("x")],
    );
    draw.key(plugin, chance, "allmulti", &BOTH, &[json!(1)]);
    draw.key(plugin, chance, "txQLen", &[json!(500), json!(0), json!(1000)], &[json!(-1), json!("x")]);
}

fn sysctls(draw: &mut Draw, into: &mut Value) {
    let good: [(&str, &[&str]); 12] = [
        ("net.ipv4.conf.IFNAME.arp_filter", &["1", "0"]),
        ("net/ipv4/conf/IFNAME/log_martians", &["1"]),
        ("net.ipv4.conf.all.accept_redirects", &["0", "1"]),
        ("net.ipv4.conf.default.rp_filter", &["2", "0"]),
        ("net.ipv4.ip_default_ttl", &["99"]),
        ("net.ipv4.ip_unprivileged_port_start", &["80"]),
        ("net.ipv4.ping_group_range", &["0 1000", "0\t5"]),
        ("net.ipv4.ip_local_port_range", &["1024 65000"]),
        ("net.ipv6.conf.IFNAME.accept_ra", &["0", "2"]),
        ("net.ipv6.conf.all.forwarding", &["1"]),
        ("net/ipv6/conf/default/hop_limit", &["33"]),
        ("net.core.somaxconn", &["500"]),
    ];
    let bad: [(&str, &[&str]); 5] = [
        ("kernel.hostname", &["x"]),
        ("net.ipv4.none_such", &["1"]),
        ("net.ipv4.ip_default_ttl", &["300", "x"]),
        ("net/../kernel/hostname", &["x"]),
        ("", &["1"]),
    ];
    for _ in 0..=draw.below(3) {
        let (key, values) = if draw.spoilt && draw.one_in(4) { draw.pick(&bad) } else { draw.pick(&good) };
        into[key] = Value::from(draw.pick(values));
    }
}

pub(super) fn portmap(draw: &mut Draw) -> Value {
    let mut plugin = json!({"type": "portmap", "capabilities": {"portMappings": true}});
    if draw.percent(90) {
        let count = draw.below(5);
        let mappings: Vec<Value> = (0..count).map(|number| mapping(draw, number)).collect();
        plugin["runtimeConfig"]["portMappings"] = Value::from(mappings);
    }
    draw.key(&mut plugin, 30, "snat", &BOTH, &[json!("x")]);
    draw.key(&mut plugin, 15, "masqAll", &TRUE, &[json!("x")]);
    let backend = [json!("iptables"), json!("nftables"), json!("nftables")];
    draw.key(&mut plugin, 45, "backend", &backend, &[json!("x"), json!(1)]);
    let nft = plugin["backend"] == "nftables";
    if !nft {
        draw.key(
            &mut plugin,
            12,
            "markMasqBit",
            &[json!(0), json!(13), json!(31), json!(5)],
            &[json!(32), json!(-1), json!("x")],
        );
        draw.key(&mut plugin, 4, "externalSetMarkChain", &[json!("PREROUTING"), json!("OWN-MARK")], &[json!(1)]);
    }
    for (key, family, source) in [("conditionsV4", "ip", "192.0.2.0/24"), ("conditionsV6", "ip6", "2001:db8::/32")] {
        let words: [Value; 3] = if nft || (draw.spoilt && draw.one_in(4)) {
            [json!([family, "saddr", source]), json!([family, "daddr", "!=", source]), json!(["iifname", "!=", "eth9"])]
        } else {
            [json!(["-s", source]), json!(["!", "-d", source]), json!(["-i", "eth9", "-s", source])]
        };
        draw.key(&mut plugin, 8, key, &words, &[json!(["nonsense"]), json!("x"), json!([1])]);
    }
    plugin
}

fn mapping(draw: &mut Draw, number: u64) -> Value {
    let host = json!(8000 + 10 * number + draw.below(3));
    let mut mapping = object(&[("hostPort", host), ("containerPort", json!(80 + draw.below(3)))]);
    draw.key(&mut mapping, 0, "hostPort", &[], &[json!(0), json!(-1), json!(70000), json!("80"), json!(8000)]);
    draw.key(&mut mapping, 0, "containerPort", &[], &[json!(0), json!(-1), json!(70000)]);
    // Go's portmap passes the value on to the tool unchanged, even an absent one.
    let protocols = [json!("tcp"), json!("tcp"), json!("udp"), json!("sctp")];
    draw.key(
        &mut mapping,
        100,
        "protocol",
        &protocols,
        &[json!("TCP"), json!(""), json!("icmp"), json!("x"), json!(6)],
    );
    let hosts = ["192.0.2.1", "0.0.0.0", "::", "127.0.0.1", "2001:db8::1", ""].map(Value::from);
    draw.key(&mut mapping, 35, "hostIP", &hosts, &[json!("nonsense"), json!(1)]);
    mapping
}
