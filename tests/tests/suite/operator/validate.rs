//! Everything that is wrong with a network, at once and in its place.

use cni_testkit::{probe, require};
use serde_json::json;

use super::Operator;

const BAD: &str = r#"{
  "cniVersion": "1.1.0",
  "name": "bad",
  "disablecheckk": true,
  "plugins": [
    {
      "type": "bridge",
      "bridge": "br7",
      "mtu": 67,
      "vlan": "5",
      "isGatway": true,
      "capabilities": {"portMappings": true, "mac": true},
      "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": "10.1.0.0/24", "rangestrat": "10.1.0.9"}], [{"subnet": "10.9.0.3/24"}]]
      }
    },
    {
      "type": "portmap",
      "markMasqBit": 40,
      "portConflict": "ignroe",
      "capabilities": {"portMapping": true}
    },
    {"type": "absent"}
  ]
}
"#;

#[test]
fn every_problem_is_found_at_once_with_its_place() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let file = operator.node.file("bad.conflist", BAD);
    let file = file.to_str().unwrap();
    let said = operator.failed(&["validate", file], &[]);
    for (line, words) in [
        (4, "disablecheckk: unknown key, which is ignored; did you mean \"disableCheck\"?"),
        (9, "plugins[0].mtu: invalid MTU 67"),
        (10, "plugins[0].vlan: failed to load netconf: vlan: "),
        (11, "plugins[0].isGatway: unknown key, which is ignored; did you mean \"isGateway\"?"),
        (12, "plugins[0].capabilities.portMappings: bridge does not use this capability"),
        (15, "plugins[0].ipam.ranges[0][0].rangestrat: unknown key, which is ignored; did you mean \"rangeStart\"?"),
        (15, "plugins[0].ipam.ranges[1]"),
        (20, "plugins[1].markMasqBit: MasqMarkBit must be between 0 and 31"),
        (21, "plugins[1].portConflict: "),
        (
            22,
            "plugins[1].capabilities.portMapping: portmap does not use this capability; did you mean \"portMappings\"?",
        ),
        (24, "plugins[2].type: failed to find plugin \"absent\""),
    ] {
        let at = format!("{file}:{line}:");
        let found = said.stdout.lines().any(|one| one.starts_with(&at) && one.contains(words));
        assert!(found, "line {line} should say `{words}`\n{}", said.report());
    }
    assert!(said.stdout.contains("overlaps with") == said.stdout.contains("network \"net1\""), "{}", said.report());
    assert_eq!(said.stdout.lines().count(), 11, "{}", said.report());
    let json = operator.json(&["validate", file]);
    assert_eq!(
        (&json["files"][0]["problems"][0]["line"], &json["files"][0]["problems"][0]["column"]),
        (&json!(4), &json!(3))
    );
    let alone = operator.failed(&["validate", "--file-only", file], &[]);
    assert_eq!(alone.stdout.lines().count(), 10, "{}", alone.report());
    operator.failed(&["validate", "/nonexistent"], &["failed to read /nonexistent"]);
}

#[test]
fn what_is_no_json_has_its_place_too() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let file = operator.node.file("bad.conflist", "{\n  \"name\": \"n\",\n  \"plugins\": [}\n");
    operator.failed(&["validate", file.to_str().unwrap()], &["bad.conflist:3:15: ", "it is no JSON: "]);
}

#[test]
fn a_sound_network_is_told_so_and_networks_lists_all() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let file = operator.node.dir().join("net.d/10-net1.conflist");
    let text = operator.done(&["validate", file.to_str().unwrap()]);
    assert!(text.ends_with("network net1 is sound\n"), "{text}");
    let text = operator.done(&["networks"]);
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((rows[1][..3].to_vec(), rows[1].last()), (vec!["net1", "1.1.0", "bridge"], Some(&"ok")), "{text}");
    // Another network that gives out the same addresses, and one that the kernel of this host cannot have.
    let twin = std::fs::read_to_string(&file).unwrap().replace("\"net1\"", "\"net2\"");
    operator.node.file("net.d/20-net2.conflist", &twin);
    let said = operator.failed(&["networks"], &["1 problem", "overlaps with 10.1.0.1-10.1.0.254 of network \"net1\""]);
    assert!(said.stdout.contains("of network \"net2\""), "both are told: {}", said.report());
    std::fs::remove_file(operator.node.dir().join("net.d/20-net2.conflist")).unwrap();
    operator.node.exec(&["ip", "link", "add", "br0", "type", "veth", "peer", "name", "br1"]);
    operator.failed(&["networks"], &["this host cannot serve it: ", "\"br0\" already exists but is not a bridge"]);
    operator.node.exec(&["ip", "link", "delete", "br0"]);
    operator.done(&["networks"]);
    operator.node.file("net.d/30-twin.conflist", std::fs::read(&file).unwrap());
    assert!(operator.done(&["networks"]).contains("never used: another file has this network"));
}

#[test]
fn host_ports_that_two_networks_map_are_told_of_both() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let map = |port: u16| json!({"type": "portmap", "runtimeConfig": {"portMappings": [{"hostPort": port, "containerPort": 80}]}});
    operator.configure(json!({}), &[map(8080)]);
    let file = operator.node.dir().join("net.d/10-net1.conflist");
    let text = std::fs::read_to_string(&file).unwrap();
    let other = |port: &str, key: &str| {
        let other = text.replace("\"net1\"", "\"net2\"").replace("10.1.0.0/24", "10.2.0.0/24").replace("8080", port);
        let other = other.replace("\"type\":\"portmap\"", &format!("\"type\":\"portmap\"{key}"));
        operator.node.file("net.d/20-net2.conflist", other);
    };
    other("8080", "");
    let said = operator.failed(
        &["networks"],
        &["plugins[1].runtimeConfig.portMappings: tcp port 8080 of the host is mapped by portmap of network \"net1\" too"],
    );
    assert!(said.stdout.contains("portmap of network \"net2\" too"), "both are told: {}", said.report());
    other("8081", "");
    operator.done(&["networks"]);
    // It is meant so.
    other("8080", ",\"portConflict\":\"ignore\"");
    operator.done(&["networks"]);
}
