//! `inspect` and `doctor` know the ifbs of bandwidth and the devices of host-device.

use cni_testkit::{probe, require};
use serde_json::{Value, json};

use super::{Operator, path};

/// The kind, the text and the command of each leftover.
fn left_over(operator: &Operator) -> Vec<(String, String, String)> {
    let seen = operator.json(&["inspect"]);
    let word = |one: &Value, key: &str| one[key].as_str().unwrap().to_owned();
    let all = seen["leftOver"].as_array().unwrap();
    all.iter().map(|one| (word(one, "kind"), word(one, "object"), word(one, "command"))).collect()
}

#[test]
fn an_ifb_is_shown_and_keeps_nothing_alive() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let limits = json!({"type": "bandwidth", "egressRate": 8_000_000, "egressBurst": 800_000});
    operator.configure(json!({}), &[limits]);
    let container = operator.attach();
    let text = operator.done(&["inspect"]);
    assert_eq!(text.matches("host link    veth").count(), 1, "{text}");
    assert!(text.contains("bandwidth    bwp") && !text.contains("host link    bwp"), "{text}");
    let text = operator.call(&["doctor"]).run().stdout;
    assert!(text.contains("1 host link, up"), "{text}");

    // The host's end has gone with the container, the ifb has not, and no runtime knows of it.
    let link = operator.node.ports("br0").pop().unwrap();
    operator.node.exec(&["ip", "link", "delete", &link]);
    operator.node.exec(&["sh", "-c", "rm /var/lib/cni/results/net1-*"]);
    let found = left_over(&operator);
    let kinds: Vec<&str> = found.iter().map(|(kind, ..)| kind.as_str()).collect();
    assert_eq!(kinds, ["link", "reservation"], "{found:#?}");
    assert!(found[0].1.starts_with("bwp"), "{found:#?}");
    let text = operator.done(&["ipam", "show", "net1"]);
    assert!(text.contains("the result cache does not have it"), "{text}");
    operator.paste(&found[0].2);
    assert_eq!(operator.done(&["inspect"]), "0 attachments; nothing is left over.\n");
    drop(container);
}

#[test]
fn an_ifb_without_a_mark_is_left_over_unless_a_result_names_it() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let limits = json!({"type": "bandwidth", "egressRate": 8_000_000, "egressBurst": 800_000});
    operator.configure(json!({}), &[limits]);
    let container = operator.attach();
    // As the Go plugin creates it.
    operator.node.exec(&["sh", "-c", "ip link set $(ip -br link show type ifb | cut -d' ' -f1) alias ''"]);
    operator.done(&["inspect"]);
    operator.node.exec(&["ip", "link", "add", "bwp0123456789ab", "type", "ifb"]);
    operator.node.exec(&["ip", "link", "add", "ifb7", "type", "ifb"]);
    let found = left_over(&operator);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].1.starts_with("bwp0123456789ab") && found[0].2 == "ip link delete dev bwp0123456789ab");
    operator.failed(&["doctor"], &["bwp0123456789ab", "fix: ip link delete dev bwp0123456789ab"]);
    operator.paste(&found[0].2);
    operator.node.exec(&["ip", "link", "delete", "ifb7"]);
    operator.detach(&container);
}

#[test]
fn a_device_is_shown_by_its_host_name_and_after_a_fall_back() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    operator.node.ip(&["link add dev0 type veth peer name peer0", "link set dev0 up"]);
    for name in ["dev0", "peer0"] {
        operator.node.expect_left(name);
    }
    let list = json!({"cniVersion": "1.1.0", "name": "dev", "plugins": [{"type": "host-device", "device": "dev0"}]});
    operator.node.file("net.d/20-dev.conflist", list.to_string());
    let container = operator.node.container();
    operator.done(&["add", "dev", path(&container), "--container-id", &container.id]);
    let text = operator.done(&["inspect"]);
    assert!(text.contains("device       dev0, interface eth0"), "{text}");
    operator.done(&["del", "dev", path(&container), "--container-id", &container.id]);
    assert_eq!(operator.done(&["inspect"]), "0 attachments; nothing is left over.\n");

    // The kernel gives a device back under the container's name, and keeps the alias.
    operator.node.ip(&["link set dev0 down", "link set dev0 name eth7 alias dev0"]);
    let found = left_over(&operator);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!((found[0].0.as_str(), found[0].1.as_str()), ("device", "eth7"));
    operator.paste(&found[0].2);
    let link = operator.node.link("dev0").unwrap();
    assert_eq!(link["ifalias"], Value::Null, "{link:#}");
    assert_eq!(operator.done(&["inspect"]), "0 attachments; nothing is left over.\n");
}
