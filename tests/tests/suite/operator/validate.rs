//! `validate` reports all errors of a network at once, each with its position.

use cni_testkit::{probe, require};
use conformance::patched;
use serde_json::{Value, json};

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
        let severity =
            if ["unknown key", "use this"].iter().any(|one| words.contains(one)) { "warning" } else { "error" };
        let found = said
            .stdout
            .lines()
            .any(|one| one.starts_with(&at) && one.contains(&format!(": {severity}: ")) && one.contains(words));
        assert!(found, "line {line} should say `{severity}: {words}`\n{}", said.report());
    }
    assert!(said.stdout.contains("overlaps with") == said.stdout.contains("network \"net1\""), "{}", said.report());
    assert_eq!(said.stdout.lines().count(), 11, "{}", said.report());
    let json = operator.json(&["validate", file]);
    assert_eq!(
        (&json["networks"][0]["problems"][0]["line"], &json["networks"][0]["problems"][0]["column"]),
        (&json!(4), &json!(3))
    );
    let alone = operator.failed(&["validate", "--file-only", file], &[]);
    assert_eq!(alone.stdout.lines().count(), 10, "{}", alone.report());
    operator.failed(&["validate", "/nonexistent"], &["failed to read /nonexistent"]);
}

#[test]
fn invalid_json_is_reported_with_its_position() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let file = operator.node.file("bad.conflist", "{\n  \"name\": \"n\",\n  \"plugins\": [}\n");
    operator.failed(&["validate", file.to_str().unwrap()], &["bad.conflist:3:15: error: not JSON: "]);
}

#[test]
fn ipv4_only_lists_that_accept_advertisements_are_named() {
    require!(probe::plugin("cnitool"));
    require!(probe::plugin("slaac"));
    let operator = Operator::new();
    operator.node.ip(&["link add up0 type veth peer name up1"]);
    let host_local = |subnet: &str| json!({"type": "host-local", "ranges": [[{"subnet": subnet}]]});
    let fixed = |address: &str| json!({"type": "static", "addresses": [{"address": address}]});
    let macvlan = |keys: Value| patched(json!({"type": "macvlan", "master": "up0"}), keys);
    for (plugins, is_open) in [
        (json!([macvlan(json!({"ipam": host_local("10.1.0.0/24")}))]), true),
        (json!([macvlan(json!({"ipam": fixed("10.1.0.2/24"), "acceptRa": ""}))]), true),
        (json!([macvlan(json!({"ipam": fixed("fd00::2/64")}))]), false),
        (json!([macvlan(json!({"ipam": host_local("fd00::/64")}))]), false),
        (json!([macvlan(json!({"ipam": host_local("10.1.0.0/24"), "acceptRa": "no"}))]), false),
        (json!([macvlan(json!({"ipam": host_local("10.1.0.0/24"), "enableSlaac": true}))]), false),
        (json!([macvlan(json!({"ipam": host_local("10.1.0.0/24")})), {"type": "slaac", "timeout": 5}]), false),
        (json!([macvlan(json!({"ipam": {"type": "slaac", "token": "::5"}}))]), false),
        (json!([{"type": "bridge", "ipam": host_local("10.1.0.0/24")}]), false),
    ] {
        let list = json!({"cniVersion": "1.1.0", "name": "lan", "plugins": plugins});
        let file = operator.node.file("net.d/40-lan.conflist", list.to_string());
        let text = operator.done(&["validate", file.to_str().unwrap()]);
        assert_eq!(
            text.contains("warning: plugins[0].ipam: only IPv4 addresses are assigned"),
            is_open,
            "{list}: {text}"
        );
        assert!(!text.contains("unknown key"), "{text}");
    }
    let list = json!({"cniVersion": "1.1.0", "name": "lan", "plugins": [{"type": "slaac"}]});
    let file = operator.node.file("net.d/40-lan.conflist", list.to_string());
    operator.failed(&["validate", file.to_str().unwrap()], &["slaac needs the result of an earlier plugin"]);
    operator.node.ip(&["link delete up0"]);
}

#[test]
fn two_ipvlan_modes_on_one_master_are_named() {
    require!(probe::plugin("cnitool"));
    require!(probe::plugin("ipvlan"));
    let operator = Operator::new();
    operator.node.exec(&["ip", "link", "add", "up0", "type", "veth", "peer", "name", "up1"]);
    operator.node.exec(&["ip", "addr", "add", "192.0.2.1/24", "dev", "up0"]);
    operator.node.exec(&["ip", "link", "set", "up0", "up"]);
    operator.node.exec(&["ip", "route", "add", "default", "via", "192.0.2.2", "dev", "up0"]);
    let list = |name: &str, keys: &str| {
        let ipam = r#""ipam": {"type": "static", "addresses": [{"address": "10.9.0.2/24"}]}"#;
        let text =
            format!(r#"{{"cniVersion": "1.1.0", "name": "{name}", "plugins": [{{"type": "ipvlan", {keys} {ipam}}}]}}"#);
        operator.node.file(&format!("net.d/40-{name}.conflist"), text)
    };
    let warnings = |file: &std::path::Path| {
        let text = operator.done(&["validate", file.to_str().unwrap()]);
        text.lines().filter(|line| line.contains("plugins[0].mode: mode l3 for master up0")).count()
    };
    // The first has the default mode, on the interface of the default route.
    list("slow", "");
    let other = list("other", r#""master": "up0", "mode": "l3","#);
    assert_eq!(warnings(&other), 1);
    let alike = list("alike", r#""master": "up0", "mode": "l2","#);
    std::fs::remove_file(&other).unwrap();
    assert!(!operator.done(&["validate", alike.to_str().unwrap()]).contains("plugins[0].mode"));
    // In the container a master is the container's.
    let inside = list("inside", r#""master": "up0", "mode": "l3", "linkInContainer": true,"#);
    assert_eq!(warnings(&inside), 0);
    operator.node.exec(&["ip", "link", "delete", "up0"]);
}

#[test]
fn a_valid_network_is_reported_and_networks_lists_all() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let file = operator.node.dir().join("net.d/10-net1.conflist");
    let text = operator.done(&["validate", file.to_str().unwrap()]);
    assert!(text.ends_with("network net1 has no errors\n"), "{text}");
    let text = operator.done(&["networks"]);
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((rows[1][..3].to_vec(), rows[1].last()), (vec!["net1", "1.1.0", "bridge"], Some(&"ok")), "{text}");
    // Another network that gives out the same addresses, and one that the kernel of this host
    // cannot have.
    let twin = std::fs::read_to_string(&file).unwrap().replace("\"net1\"", "\"net2\"");
    operator.node.file("net.d/20-net2.conflist", &twin);
    let text = operator.done(&["networks"]);
    assert_eq!(text.matches("  1 warning\n").count(), 2, "both are named: {text}");
    assert!(text.contains("warning: plugins[0].ipam: 10.1.0.1-10.1.0.254 overlaps with"), "{text}");
    assert!(text.contains("of network \"net1\"\n") && text.contains("of network \"net2\"\n"), "{text}");
    std::fs::remove_file(operator.node.dir().join("net.d/20-net2.conflist")).unwrap();
    operator.node.exec(&["ip", "link", "add", "br0", "type", "veth", "peer", "name", "br1"]);
    operator.failed(&["networks"], &["this host cannot handle an ADD: ", "\"br0\" already exists but is not a bridge"]);
    operator.node.exec(&["ip", "link", "delete", "br0"]);
    operator.done(&["networks"]);
    operator.node.file("net.d/30-twin.conflist", std::fs::read(&file).unwrap());
    assert!(operator.done(&["networks"]).contains("never used: another file defines this network"));
}

#[test]
fn host_ports_mapped_by_two_networks_are_reported_for_both() {
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
    let text = operator.done(&["networks"]);
    for network in ["net1", "net2"] {
        let what = format!("tcp port 8080 of the host is mapped by portmap of network {network:?} too");
        assert!(text.contains(&format!("warning: plugins[1].runtimeConfig.portMappings: {what}")), "{text}");
    }
    other("8081", "");
    assert!(!operator.done(&["networks"]).contains("warning"));
    // The file allows it explicitly.
    other("8080", ",\"portConflict\":\"ignore\"");
    assert!(!operator.done(&["networks"]).contains("warning"));
}

#[test]
fn another_networks_faults_do_not_fail_a_sound_one() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let sound = operator.node.dir().join("net.d/10-net1.conflist");
    // Podman's package on a node with these plugins: no `calico`, and overlapping addresses.
    let plugins = json!([conformance::bridge(&operator.node, &["10.1.0.0/16"]), {"type": "calico"}]);
    let podman = json!({"cniVersion": "0.4.0", "name": "podman", "plugins": plugins});
    operator.node.file("net.d/87-podman-bridge.conflist", podman.to_string());
    operator.node.file("net.d/90-broken.conflist", "{");
    let overlap =
        "warning: plugins[0].ipam: 10.1.0.1-10.1.0.254 overlaps with 10.1.0.1-10.1.255.254 of network \"podman\"";
    for args in [&["networks", "net1"][..], &["validate", sound.to_str().unwrap()]] {
        let text = operator.done(args);
        assert!(text.contains(overlap) && !text.contains("error: "), "{args:?}: {text}");
    }
    let absent = "error: plugins[1].type: failed to find plugin \"calico\"";
    let all = operator.failed(&["networks"], &[absent, "  1 warning\n", "  1 error, 1 warning\n", "error: not JSON"]);
    assert_eq!(all.stdout.matches("net.d/").count(), 7, "three rows, four problems\n{}", all.report());
    let one = operator.failed(&["networks", "podman"], &[absent]);
    assert!(!one.stdout.contains("broken"), "{}", one.report());
    operator.failed(&["networks", "net1", "podman"], &[absent]);
    operator.failed(&["networks", "net2"], &["no net configuration with name \"net2\" in "]);
    operator.failed(&["validate", "--strict", sound.to_str().unwrap()], &[overlap]);
    let json = operator.json(&["networks"]);
    let verdict = |index: usize| json["networks"][index]["sound"].clone();
    assert_eq!([verdict(0), verdict(1), verdict(2)], [json!(true), json!(false), json!(false)]);
    assert_eq!(json["networks"][0]["problems"][0]["severity"], "warning");
}

#[test]
fn what_a_file_says_twice_or_in_vain_is_reported() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let text = r#"{
"cniVersion": "1.1.0", "NAME": "odd", "disableGC": false, "disablegc": true,
"Plugins": [
  {"Type": "bridge", "mtu": 70000, "MTU": 1500, "isGateway": true,
   "ipam": {"subnet": "10.1.0.0/24"}},
  {"type": "tuning", "sysctl": {
    "net.core.somaxconn": "1",
    "net.core.somaxconn": "2"}},
  {"type": "host-local", "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}},
  {"type": "../bridge", "x": 1, "x": 2}
]}"#;
    let file = operator.node.file("odd.conflist", text);
    let said = operator.failed(&["validate", "--file-only", file.to_str().unwrap()], &[]);
    let expected = [
        ":2:59: warning: disableGC: duplicate key: only the last value counts",
        ":4:36: warning: plugins[0].MTU: duplicate key: only the last value counts",
        ":4:49: warning: plugins[0].isGateway: has no effect without ipam.type",
        ":5:4: warning: plugins[0].ipam: ipam.type is missing: the other keys of ipam are ignored",
        ":8:5: error: plugins[1].sysctl.net.core.somaxconn: duplicated sysctl keys are not allowed",
        ":9:4: warning: plugins[2].type: host-local reserves addresses and creates no interface",
        ":10:4: error: plugins[3].type: invalid plugin name: ../bridge",
        ":10:33: warning: plugins[3].x: duplicate key: only the last value counts",
    ];
    let lines: Vec<&str> = said.stdout.lines().collect();
    assert_eq!(lines.len(), expected.len(), "{}", said.report());
    for (line, expected) in lines.iter().zip(expected) {
        assert!(line.contains(expected), "`{expected}` expected\n{}", said.report());
    }
}

#[test]
fn validate_covers_a_plugin_without_keys_of_its_own() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let text = r#"{"cniVersion": "1.1.0", "name": "lo", "plugins": [{"type": "loopback", "mtu": 9000, "dns": {}}]}"#;
    let file = operator.node.file("lo.conflist", text);
    let said = operator.done(&["validate", file.to_str().unwrap()]);
    assert!(said.contains(": warning: plugins[0].mtu: unknown key, which is ignored"), "{said}");
    assert!(!said.contains("plugins[0].dns"), "{said}");
}

#[test]
fn a_file_is_judged_as_a_runtime_reads_it() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let list = std::fs::read_to_string(operator.node.dir().join("net.d/10-net1.conflist")).unwrap();
    // Only files with this suffix are read as lists.
    let file = operator.node.file("list.conf", &list);
    let words = ["list.conf:1:", "error: plugins: ", "missing 'type'", "only a file whose name ends in .conflist"];
    operator.failed(&["validate", "--file-only", file.to_str().unwrap()], &words);
    // The plugins in the folder with the network's name follow those of the list.
    let file = operator.node.file("folder.conflist", r#"{"cniVersion": "1.1.0", "name": "folder"}"#);
    let path = file.to_str().unwrap();
    operator.failed(&["validate", "--file-only", path], &["no plugin configs found"]);
    operator.node.file("folder/10-portmap.conf", r#"{"type": "portmap"}"#);
    operator.failed(&["validate", "--file-only", path], &["portmap needs the result of an earlier plugin"]);
    let bridge = conformance::bridge(&operator.node, &["10.1.0.0/24"]);
    operator.node.file("folder/00-bridge.conf", bridge.to_string());
    operator.done(&["validate", path]);
}

/// The delegate's keys, and those of its IPAM plugin, are checked by these plugins.
#[test]
fn the_keys_of_flannels_delegate_are_checked() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let list = |flannel: Value| {
        let flannel = patched(json!({"type": "flannel"}), flannel);
        let list = json!({"cniVersion": "1.0.0", "name": "cbr0", "plugins": [flannel]});
        operator.node.file("flannel.conflist", list.to_string()).display().to_string()
    };
    let wrong = list(json!({
        "delegate": {"hairpinmode": true, "hairpinMod": true, "vlan": 5000, "isDefaultGateway": "yes"},
        "ipam": {"routs": [], "lockTimeout": 0, "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.9.0.0/16", "gws": []}]},
        "subnetfile": "/run/flannel/subnet.env", "dataDirs": "",
    }));
    operator.failed(
        &["validate", &wrong],
        &[
            "plugins[0].delegate.hairpinMod: unknown key, which is ignored; did you mean \"hairpinMode\"?",
            "plugins[0].delegate.vlan: invalid VLAN ID 5000",
            "plugins[0].delegate.isDefaultGateway: ",
            "plugins[0].ipam.routs: unknown key, which is ignored; did you mean \"routes\"?",
            "plugins[0].ipam.lockTimeout: ",
            "plugins[0].ipam.routes[1]",
            "route 10.9.0.0/16: gws is empty",
            "plugins[0].dataDirs: unknown key, which is ignored; did you mean \"dataDir\"?",
        ],
    );
    for right in [
        json!({"delegate": {"hairpinMode": true, "forceAddress": true, "isDefaultGateway": true}}),
        json!({"delegate": {"type": "ptp", "mtu": 1400}, "ipam": {"dataDir": "/d", "routes": [{"dst": "0.0.0.0/0"}]}}),
        json!({"delegate": {"type": "somebodys", "key": 1}}),
    ] {
        operator.done(&["validate", "--file-only", &list(right)]);
    }
}
