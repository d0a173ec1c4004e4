//! Draws the state of a node before the first ADD.

use serde_json::{Value, json};

use super::Draw;

pub(super) fn node(draw: &mut Draw, case: &mut Value) {
    let bridge = case["lists"][0]["plugins"][0]["bridge"].as_str().unwrap_or("cni0").to_owned();
    let sound = !bridge.is_empty()
        && bridge.len() < 16
        && !bridge.contains(['/', ' ', '%'])
        && ![".", "..", "lo", "all"].contains(&bridge.as_str());
    let mut host = Vec::new();
    if sound && draw.percent(35) {
        host.extend(existing(draw, &bridge));
    }
    if draw.one_in(8) {
        host.extend(
            [
                "link add up0 type veth peer name up1",
                "link set up0 up",
                "link set up1 up",
                "address add 192.0.2.1/24 dev up0",
            ]
            .map(str::to_owned),
        );
        if draw.one_in(2) {
            host.push("route add default via 192.0.2.9".to_owned());
        }
    }
    case["host"] = json!(host);
    if draw.one_in(8) {
        case["inside"][0] = json!(inside(draw));
    }
    if draw.one_in(12) {
        case["iptables"] = json!("legacy");
    }
}

/// Draws a bridge that the node's owner has made.
fn existing(draw: &mut Draw, bridge: &str) -> Vec<String> {
    let mut lines = vec![format!("link add {bridge} type bridge")];
    if draw.one_in(3) {
        lines.push(format!("link set {bridge} address e8:00:00:00:00:02"));
    }
    if draw.percent(40) {
        lines.push("link add port0 type veth peer name wire0".to_owned());
        // Lower than any random one: a bridge without a MAC of its own takes the lowest of its
        // ports.
        lines.push("link set port0 address 02:00:00:00:00:01".to_owned());
        lines.push(format!("link set port0 master {bridge} up"));
        lines.push("link set wire0 up".to_owned());
    }
    if draw.percent(60) {
        lines.push(format!("link set {bridge} up"));
    }
    let addresses = ["10.1.0.1/24", "10.1.0.254/24", "10.77.0.1/24", "fd00:1::1/64", "fd00:1::9/112", "10.1.0.1/16"];
    if draw.percent(30) {
        let address = draw.pick(&addresses);
        let nodad = if address.contains(':') { " nodad" } else { "" };
        lines.push(format!("address add {address} dev {bridge}{nodad}"));
    }
    if draw.one_in(15) {
        lines.push(format!("link set {bridge} mtu 1400"));
    }
    lines
}

/// Draws the settings that an earlier network, or the runtime, has made in the container.
fn inside(draw: &mut Draw) -> Vec<&'static str> {
    let other = [
        "link add other0 type veth peer name other1",
        "link set other0 up",
        "link set other1 up",
        "address add 10.200.0.2/24 dev other0",
    ];
    let mut lines = Vec::new();
    match draw.below(5) {
        0 => lines.push("link set lo up"),
        1 => lines.extend(other),
        2 => {
            lines.extend(other);
            lines.push("route add default via 10.200.0.1");
        }
        3 => {
            lines.extend(other);
            lines.push("route add 192.0.2.0/24 via 10.200.0.1");
        }
        // The name is taken.
        _ => lines.push("link add eth0 type veth peer name other1"),
    }
    lines
}
