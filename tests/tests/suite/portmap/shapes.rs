//! The rules in the kernel: with iptables those that Go leaves in the same run, with nf_tables
//! those of the reference.

use cni_testkit::{bin_dir, require};
use conformance::patched;
use serde_json::{Value, json};

use super::world::{Backend, IPTABLES, Pod, World, each, go, map};

fn eight() -> Value {
    let on = |host_port: u16, protocol: &str, host_ip: &str| json!({"hostPort": host_port, "containerPort": 80, "protocol": protocol, "hostIP": host_ip});
    json!([
        map(8080, 80, "tcp"),
        map(8081, 80, "tcp"),
        map(8080, 81, "udp"),
        map(8082, 82, "udp"),
        on(8083, "tcp", "192.0.2.1"),
        on(8084, "tcp", "0.0.0.0"),
        on(8085, "tcp", "2001:db8::1"),
        on(8086, "tcp", "::"),
    ])
}

/// Returns the rules, chain by chain, without the rule that only these plugins write.
fn comparable(world: &World) -> Vec<String> {
    let text = world.rules();
    let mut found = Vec::new();
    for (family, text) in text.split("\nv6\n").enumerate() {
        let mut lines: Vec<&str> = text.lines().filter(|line| line.starts_with(['-', ':'])).collect();
        lines.retain(|line| !line.contains("--comment \"cni:") && !line.contains("--comment cni:"));
        // The order within a chain matters, the order of chains does not.
        lines.sort_by_key(|line| line.split(' ').take(if line.starts_with(':') { 1 } else { 2 }).collect::<Vec<_>>());
        found.extend(lines.into_iter().map(|line| format!("v{} {line}", if family == 0 { 4 } else { 6 })));
    }
    found
}

#[track_caller]
fn same_as_go(world: &World, patch: &Value, mappings: Value, around: Option<[&str; 2]>) {
    let left_by = |dir: &std::path::Path| {
        let world = World::new(world.backend);
        let path = format!("PATH={}", world.backend.path(&world.node));
        let shell = |script: &str| drop(world.node.exec(&["env", &path, "sh", "-ec", script]));
        around.iter().for_each(|[before, _]| shell(before));
        let pod = world.dual();
        let config = patched(world.config(mappings.clone()), patch.clone());
        pod.call_by(dir, "ADD", &config, Some(&pod.result)).success();
        let rules = comparable(&world);
        pod.call_by(dir, "DEL", &config, Some(&pod.result)).success();
        let after = comparable(&world);
        around.iter().for_each(|[_, after]| shell(after));
        pod.leave();
        (rules, after)
    };
    let (go, ours) = (left_by(&go()), left_by(&bin_dir()));
    for (when, ours, go) in [("ADD", &ours.0, &go.0), ("DEL", &ours.1, &go.1)] {
        let lacks = |one: &[String], other: &[String]| -> Vec<String> {
            one.iter().filter(|line| !other.contains(line)).cloned().collect()
        };
        let (more, less) = (lacks(ours, go), lacks(go, ours));
        // `ip6tables-legacy -C` (1.8.9) finds rules that are not there, so Go leaves some of IPv6
        // out.
        let excused = |line: &String| world.backend == Backend::IptablesLegacy && line.starts_with("v6 -A CNI-DN-");
        if less.is_empty() && more.iter().all(excused) {
            continue;
        }
        assert_eq!(ours, go, "{when} {:?} {patch}: only ours {more:#?}, only Go's {less:#?}", world.backend);
    }
}

/// One test per case, because Go starts up to a hundred programs for each.
#[track_caller]
fn each_as_go(patch: &Value, mappings: &Value, around: Option<[&str; 2]>) {
    require!(cni_testkit::probe::go_plugins());
    each(&IPTABLES, |world| same_as_go(world, patch, mappings.clone(), around));
}

#[test]
fn with_iptables_the_rules_are_go_s() {
    each_as_go(&json!({}), &eight(), None);
}

#[test]
fn with_iptables_and_without_snat_the_rules_are_go_s() {
    each_as_go(&json!({"snat": false}), &eight(), None);
}

#[test]
fn with_iptables_and_another_bit_the_rules_are_go_s() {
    each_as_go(&json!({"markMasqBit": 5}), &json!([map(1, 2, "sctp"), map(3, 4, "tcp")]), None);
}

#[test]
fn iptables_rules_match_go_for_more_ports_than_a_rule_takes() {
    let many = (1..=32).map(|port| map(8000 + port, port, if port % 2 == 0 { "udp" } else { "tcp" }));
    each_as_go(&json!({}), &many.collect(), None);
}

#[test]
fn iptables_rules_match_go_for_an_external_mark_chain() {
    let make = "for f in iptables ip6tables; do $f -w -t nat -N THEIRS; done";
    let remove = "for f in iptables ip6tables; do $f -w -t nat -X THEIRS; done";
    each_as_go(&json!({"externalSetMarkChain": "THEIRS"}), &eight(), Some([make, remove]));
}

#[test]
fn with_iptables_and_conditions_the_rules_are_go_s() {
    let conditions = json!({"conditionsV4": ["!", "-s", "10.9.0.0/16", "-m", "comment", "--comment", "a b\"c"],
                            "conditionsV6": ["-m", "mark", "--mark", "0x7"]});
    each_as_go(&conditions, &eight(), None);
}

#[test]
fn with_nf_tables_the_rules_are_those_of_the_reference() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let pod = world.dual();
    let config =
        patched(world.config(eight()), json!({"conditionsV4": ["iifname", "!=", "eth9", "ip saddr 10.0.0.0/9"]}));
    pod.add(&config).success();
    let rules = world.node.json(&["nft", "-j", "list", "ruleset"]);
    let objects = |kind: &str| -> Vec<Value> {
        rules["nftables"].as_array().unwrap().iter().filter_map(|object| object.get(kind)).cloned().collect()
    };
    let in_chain = |family: &str, chain: &str| -> Vec<Value> {
        objects("rule").into_iter().filter(|rule| rule["family"] == family && rule["chain"] == chain).collect()
    };
    for table in objects("table") {
        assert_eq!(table["name"], "cni_hostport", "{table}");
    }
    for (family, host_ip, any) in [("ip", "192.0.2.1", 8084), ("ip6", "2001:db8::1", 8086)] {
        let v4 = family == "ip";
        for (name, hook, priority) in
            [("prerouting", "prerouting", -100), ("output", "output", -100), ("masquerading", "postrouting", 100)]
        {
            let is_it = |chain: &&Value| chain["family"] == family && chain["name"] == name;
            let chains = objects("chain");
            let chain = chains.iter().find(is_it).unwrap();
            assert_eq!(
                (&chain["hook"], &chain["prio"], &chain["type"]),
                (&json!(hook), &json!(priority), &json!("nat"))
            );
        }
        let local =
            json!({"match": {"op": "==", "left": {"fib": {"result": "type", "flags": ["daddr"]}}, "right": "local"}});
        for chain in ["prerouting", "output"] {
            let rules = in_chain(family, chain);
            assert_eq!(rules.len(), 1);
            assert_eq!(rules[0]["expr"], json!([local, {"jump": {"target": "hostports_all"}}]));
        }
        let jumps: Vec<Value> =
            in_chain(family, "hostports_all").into_iter().map(|rule| rule["expr"].clone()).collect();
        let to = |chain: &str| json!([{"jump": {"target": chain}}]);
        assert_eq!(jumps, [to("hostip_hostports"), to("hostports")]);
        assert!(in_chain(family, "hostip_hostports").is_empty());

        let address = pod.address(usize::from(!v4)).to_string();
        let equals = |protocol: &str, field: &str, op: &str, right: Value| json!({"match": {"op": op, "left": {"payload": {"protocol": protocol, "field": field}}, "right": right}});
        let forward = |protocol: &str, host: Option<&str>, port: u16, container: u16| {
            let mut expr = Vec::new();
            if v4 {
                expr.push(json!({"match": {"op": "!=", "left": {"meta": {"key": "iifname"}}, "right": "eth9"}}));
                expr.push(equals("ip", "saddr", "==", json!({"prefix": {"addr": "10.0.0.0", "len": 9}})));
            }
            expr.extend(host.map(|host| equals(family, "daddr", "==", json!(host))));
            expr.push(equals(protocol, "dport", "==", json!(port)));
            expr.push(json!({"dnat": {"addr": address, "port": container}}));
            Value::Array(expr)
        };
        let expected = [
            forward("tcp", None, 8080, 80),
            forward("tcp", None, 8081, 80),
            forward("udp", None, 8080, 81),
            forward("udp", None, 8082, 82),
            forward("tcp", Some(host_ip), if v4 { 8083 } else { 8085 }, 80),
            forward("tcp", None, any, 80),
        ];
        let found = in_chain(family, "hostports");
        assert_eq!(found.iter().map(|rule| rule["expr"].clone()).collect::<Vec<_>>(), expected);
        let masquerade = |from: &str| json!([equals(family, "saddr", "==", json!(from)), equals(family, "daddr", "==", json!(address)), {"masquerade": null}]);
        let mut expected = vec![masquerade(&address)];
        if v4 {
            expected.push(masquerade("127.0.0.1"));
        }
        let masquerading = in_chain(family, "masquerading");
        assert_eq!(masquerading.iter().map(|rule| rule["expr"].clone()).collect::<Vec<_>>(), expected);
        for rule in found.iter().chain(&masquerading) {
            assert_eq!(rule["comment"], json!(pod.container.id), "Go searches by this");
        }
    }
    assert!(world.rules().contains("comment \"CNI portmap plugin\""));
    // nft accepts its own listing.
    world.node.exec(&["sh", "-ec", "nft list ruleset > /run/rules; nft -c -f /run/rules"]);
    assert_eq!(world.ran(), Vec::<String>::new(), "no process");
    pod.leave();
    assert_eq!(world.ran(), Vec::<String>::new(), "no process");
}

#[test]
fn masq_all_is_one_rule_of_each_family() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let pod: Pod<'_> = world.dual();
    pod.add(&patched(world.config(json!([map(80, 80, "tcp")])), json!({"masqAll": true}))).success();
    let rules = world.rules();
    for rule in ["ip saddr 0.0.0.0/0 ip daddr 10.1.0.2 masquerade", "ip6 saddr ::/0 ip6 daddr fd00:1::2 masquerade"] {
        assert_eq!(rules.matches(rule).count(), 1, "{rules}");
    }
    assert_eq!(rules.matches("masquerade comment").count(), 2);
    pod.leave();
}
