//! Draws host-local: ranges from every place, requested addresses, routes, a resolver's file.

use serde_json::{Value, json};

use super::{Draw, object};

/// A network with addresses in it: (subnet, gateway, some address, first, last).
type Network = [&'static str; 5];

const V4: [[Network; 6]; 2] = [
    [
        ["10.1.0.0/24", "10.1.0.1", "10.1.0.77", "10.1.0.10", "10.1.0.99"],
        ["10.1.0.0/24", "10.1.0.254", "10.1.0.78", "10.1.0.20", "10.1.0.20"],
        ["10.1.0.0/29", "10.1.0.1", "10.1.0.4", "10.1.0.2", "10.1.0.5"],
        ["10.1.0.0/30", "10.1.0.1", "10.1.0.2", "10.1.0.2", "10.1.0.2"],
        ["172.30.0.0/16", "172.30.0.1", "172.30.200.7", "172.30.9.0", "172.30.9.255"],
        ["100.64.0.128/25", "100.64.0.129", "100.64.0.140", "100.64.0.130", "100.64.0.254"],
    ],
    [
        ["10.9.0.0/24", "10.9.0.1", "10.9.0.77", "10.9.0.10", "10.9.0.99"],
        ["10.9.0.0/24", "10.9.0.254", "10.9.0.78", "10.9.0.20", "10.9.0.20"],
        ["10.9.0.0/29", "10.9.0.1", "10.9.0.4", "10.9.0.2", "10.9.0.5"],
        ["10.9.0.0/30", "10.9.0.1", "10.9.0.2", "10.9.0.2", "10.9.0.2"],
        ["172.29.0.0/16", "172.29.0.1", "172.29.200.7", "172.29.9.0", "172.29.9.255"],
        ["100.65.0.128/25", "100.65.0.129", "100.65.0.140", "100.65.0.130", "100.65.0.254"],
    ],
];

const V6: [[Network; 3]; 2] = [
    [
        ["fd00:1::/64", "fd00:1::1", "fd00:1::77", "fd00:1::10", "fd00:1::ffff"],
        ["fd00:1::/112", "fd00:1::9", "fd00:1::78", "fd00:1::20", "fd00:1::20"],
        ["fd00:1::/126", "fd00:1::1", "fd00:1::2", "fd00:1::2", "fd00:1::3"],
    ],
    [
        ["fd00:9::/64", "fd00:9::1", "fd00:9::77", "fd00:9::10", "fd00:9::ffff"],
        ["fd00:9::/112", "fd00:9::9", "fd00:9::78", "fd00:9::20", "fd00:9::20"],
        ["fd00:9::/126", "fd00:9::1", "fd00:9::2", "fd00:9::2", "fd00:9::3"],
    ],
];

const THIRD: Network = ["10.5.0.0/24", "10.5.0.1", "10.5.0.77", "10.5.0.10", "10.5.0.99"];
const SIXTH: Network = ["fd00:5::/64", "fd00:5::1", "fd00:5::77", "fd00:5::10", "fd00:5::ff"];

/// The paths of a resolver's file.
const RESOLV: &str = "/run/resolv.conf";

/// Draws `ipam` of `plugin` and the runtime's requests for addresses. Several networks on one node
/// have ranges of their own.
pub(super) fn sources(draw: &mut Draw, plugin: &mut Value, network: usize) {
    let mut sets = sets(draw, network);
    let networks: Vec<Network> = sets.iter().flatten().copied().collect();
    let mut ipam = json!({"type": "host-local"});
    if draw.percent(25) && !sets.is_empty() && sets[0].len() == 1 {
        let old = sets.remove(0)[0];
        for (key, value) in range(draw, &old).as_object().into_iter().flatten() {
            ipam[key] = value.clone();
        }
    }
    if draw.percent(12) && !sets.is_empty() {
        let set = sets.remove(0);
        let set: Vec<Value> = set.iter().map(|network| range(draw, network)).collect();
        plugin["runtimeConfig"]["ipRanges"] = json!([set]);
    }
    let rest: Vec<Value> = sets
        .iter()
        .map(|set| Value::from(set.iter().map(|network| range(draw, network)).collect::<Vec<Value>>()))
        .collect();
    if !rest.is_empty() || draw.one_in(10) {
        ipam["ranges"] = Value::from(rest);
    }
    if draw.percent(45) {
        let count = 1 + draw.below(3);
        ipam["routes"] = (0..count).map(|_| route(draw, &networks)).collect();
    }
    draw.key(
        &mut ipam,
        30,
        "dataDir",
        &[json!("/run/nets"), json!("/var/lib/cni/networks")],
        &[json!("/proc/nets"), json!(1)],
    );
    draw.key(&mut ipam, 10, "resolvConf", &[json!(RESOLV)], &[json!("/run/missing")]);
    draw.key(
        plugin,
        0,
        "ipam",
        &[],
        &[json!({}), json!({"type": "host-local"}), json!({"type": "none-such"}), json!(1)],
    );
    if plugin["ipam"].is_null() {
        plugin["ipam"] = ipam;
    }
    asked(draw, plugin, &networks);
}

/// Draws range sets as networks.
fn sets(draw: &mut Draw, network: usize) -> Vec<Vec<Network>> {
    let of = |draw: &mut Draw, six: bool| if six { draw.pick(&V6[network]) } else { draw.pick(&V4[network]) };
    match draw.below(100) {
        0..44 => vec![vec![of(draw, false)]],
        44..54 => vec![vec![of(draw, true)]],
        54..80 => vec![vec![of(draw, false)], vec![of(draw, true)]],
        80..86 => vec![vec![of(draw, true)], vec![of(draw, false)]],
        86..90 => vec![vec![of(draw, false)], vec![THIRD]],
        90..93 => vec![vec![of(draw, true)], vec![SIXTH]],
        93..98 => vec![vec![of(draw, false), THIRD]],
        _ => vec![vec![of(draw, false)], vec![of(draw, true)], vec![THIRD]],
    }
}

fn range(draw: &mut Draw, network: &Network) -> Value {
    let mut range = json!({"subnet": network[0]});
    let bad = [json!("192.0.2.1"), json!("nonsense"), json!(5), json!("fd00:77::1")];
    draw.key(
        &mut range,
        0,
        "subnet",
        &[],
        &[json!("10.1.0.1/24"), json!("10.1.0.0"), json!("10.1.0.0/31"), json!("10.1.0.0/33"), json!(9)],
    );
    draw.key(&mut range, 25, "gateway", &[json!(network[1])], &bad);
    draw.key(&mut range, 20, "rangeStart", &[json!(network[3])], &bad);
    draw.key(&mut range, 20, "rangeEnd", &[json!(network[4])], &bad);
    range
}

/// Draws addresses that the runtime requests.
fn asked(draw: &mut Draw, plugin: &mut Value, networks: &[Network]) {
    if networks.is_empty() || !draw.one_in(8) {
        return;
    }
    let network = draw.pick(networks);
    let prefixed = || format!("{}/{}", network[2], network[0].split('/').nth(1).unwrap_or_default());
    let good = [json!([network[2]]), json!([prefixed()]), json!([])];
    let bad =
        [json!(["192.0.2.99"]), json!([network[1]]), json!(["nonsense"]), json!([network[2], network[3]]), json!("x")];
    let ips = draw.value(&good, &bad);
    if draw.one_in(2) {
        plugin["runtimeConfig"]["ips"] = ips;
    } else {
        plugin["args"]["cni"]["ips"] = ips;
    }
}

fn route(draw: &mut Draw, networks: &[Network]) -> Value {
    let six = networks.iter().any(|network| network[0].contains(':'));
    let four = networks.iter().any(|network| network[0].contains('.'));
    let to_six = six && (!four || draw.percent(40));
    let mut dsts: Vec<&str> = if to_six {
        vec!["::/0", "::/0", "2001:db8::/32", "2001:db8:7::1/128", "fd00:aa::/64", "fd00:1::/64"]
    } else {
        vec![
            "0.0.0.0/0",
            "0.0.0.0/0",
            "0.0.0.0/0",
            "192.0.2.0/24",
            "198.51.100.0/24",
            "203.0.113.9/32",
            "10.0.0.0/8",
            "10.1.0.0/24",
        ]
    };
    if draw.one_in(10) {
        dsts = networks.iter().map(|network| network[0]).collect();
    }
    let dst = draw.pick(&dsts);
    let same: Vec<&Network> = networks.iter().filter(|network| network[0].contains(':') == dst.contains(':')).collect();
    let mut gateways = Vec::new();
    for network in same {
        gateways.extend([json!(network[1]), json!(network[2])]);
    }
    let mut route = object(&[("dst", json!(dst))]);
    let bad_dst = [json!("192.0.2.1/24"), json!("nonsense"), json!("192.0.2.1"), json!(1)];
    draw.key(&mut route, 0, "dst", &[], &bad_dst);
    if !gateways.is_empty() {
        draw.key(&mut route, 40, "gw", &gateways, &[json!("203.0.113.254"), json!("fd00:77::1"), json!("x"), json!(1)]);
    }
    draw.key(&mut route, 8, "mtu", &[json!(1300), json!(0), json!(1500)], &[json!("x")]);
    // A negative one of Go's result is none by the schema.
    draw.key(&mut route, 6, "advmss", &[json!(1000)], &[json!("x")]);
    draw.key(&mut route, 10, "priority", &[json!(0), json!(50), json!(1024)], &[json!(-1)]);
    draw.key(
        &mut route,
        8,
        "table",
        &[json!(100), json!(254), json!(5000), json!(0), json!(255)],
        &[json!(-1), json!("main")],
    );
    draw.key(&mut route, 8, "scope", &[json!(0), json!(253), json!(200), json!(254)], &[json!(300), json!(-1)]);
    route
}

/// Adds the files that the lists name.
pub(super) fn files(case: &mut Value) {
    if case.to_string().contains(RESOLV) {
        let text = "# of a resolver\nnameserver 192.0.2.53\nnameserver 2001:db8::53\nsearch a.example b.example\ndomain c.example\noptions ndots:5\n";
        case["files"][RESOLV] = Value::from(text);
    }
}
