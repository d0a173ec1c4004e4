//! `egress`: connections of a network's containers to denied destinations are dropped.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, UdpSocket};
use std::thread;

use cni_testkit::{Container, bin_dir, probe, require};
use serde_json::{Value, json};

use super::world::{BACKENDS, Backend, IPTABLES, Pod, World, config, each, go, named, shell};
use crate::portmap::world::{IN_VAIN, ask_tcp, ask_tcp_for, ask_udp, ask_udp_for};
use conformance::{HOST, OUTSIDE, patched};

/// Further addresses of the client, which no rule denies.
pub(super) const ALLOWED: [&str; 2] = ["198.51.100.9", "2001:db8:1::9"];
/// The addresses of the node on the bridge of `net1`.
const GATEWAY: [&str; 2] = ["10.1.0.1", "fd00:1::1"];

/// Denies connections to the client's addresses [`OUTSIDE`].
pub(super) fn denying() -> Value {
    json!({"egress": {"deny": [format!("{}/32", OUTSIDE[0]), format!("{}/128", OUTSIDE[1])]}})
}

/// Allows connections to the gateway only.
fn gateway_only() -> Value {
    let allowed = [format!("{}/32", GATEWAY[0]), format!("{}/128", GATEWAY[1])];
    json!({"egress": {"allow": allowed, "default": "deny"}})
}

fn serve(name: &'static str, container: Option<&Container>, world: &World) {
    let bind = || (TcpListener::bind(("::", 80)).unwrap(), UdpSocket::bind(("::", 53)).unwrap());
    let (listener, socket) = match container {
        Some(container) => container.enter(bind),
        None => world.node.enter(bind),
    };
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = std::io::Write::write_all(&mut stream, name.as_bytes());
        }
    });
    thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((_, peer)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(name.as_bytes(), peer);
        }
    });
}

/// Gives the client its further addresses and routes to containers, and starts servers there and on
/// the node.
pub(super) fn prepare(world: &World) {
    for family in [0, 1] {
        let (subnet, host) = (["10.0.0.0/8", "fd00::/16"][family], HOST[family]);
        world.client.exec(&["ip", "route", "add", subnet, "via", host]);
        let length = [32, 128][family];
        world.client.exec(&["ip", "address", "add", &format!("{}/{length}", ALLOWED[family]), "dev", "lo"]);
        world.node.ip(&[&format!("route add {} via {}", ALLOWED[family], OUTSIDE[family])]);
    }
    world.client.exec(&["ip", "link", "set", "lo", "up"]);
    serve("outside", Some(&world.client), world);
    serve("node", None, world);
}

fn tcp(address: &str) -> String {
    SocketAddr::new(address.parse().unwrap(), 80).to_string()
}

/// All of nf_tables, and both variants' table filter.
fn all_rules(world: &World) -> String {
    world.node.ruleset() + &super::world::rules(world).join("\n")
}

#[track_caller]
pub(super) fn passes(world: &World, pod: &Pod<'_>, to: &str) {
    assert!(pod.container.enter(|| ask_tcp(&tcp(to))).is_some(), "{to} {:?} {}", world.backend, all_rules(world));
}

#[track_caller]
pub(super) fn is_dropped(world: &World, pod: &Pod<'_>, to: &str) {
    let answer = pod.container.enter(|| ask_tcp_for(IN_VAIN, &tcp(to)));
    assert_eq!(answer, None, "{to} {:?} {}", world.backend, all_rules(world));
}

/// Returns whether the container has rules of egress: an element or a record with an address.
pub(super) fn is_checked(world: &World, pod: &Pod<'_>) -> bool {
    let table = table(world);
    let addresses = [0, 1].map(|family| pod.address(family).to_string());
    table.split([' ', ',', '\n', '\t']).any(|word| addresses.iter().any(|address| address == word))
}

/// Returns the sets and chains of egress, without counters; empty without the table.
fn table(world: &World) -> String {
    let ruleset = world.node.ruleset();
    let mut blocks: Vec<String> = Vec::new();
    let mut is_egress = false;
    for line in ruleset.lines() {
        let name = line.trim().strip_suffix(" {").unwrap_or_default();
        if name.starts_with("chain ") || name.starts_with("set ") || name.starts_with("table ") {
            is_egress = name.contains("egress");
        }
        if is_egress {
            blocks.push(line.to_owned());
        }
    }
    blocks.join("\n")
}

/// Returns whether a chain of a network is left. The shared chains stay.
pub(super) fn has_network(world: &World) -> bool {
    let shared = ["cni_egress_owners {", "cni_egress {", "egress_forward {", "egress_input {"];
    let names = table(world);
    names.lines().any(|line| line.contains(" {") && !shared.iter().any(|name| line.ends_with(name)))
}

/// A container in `net1` behind bridge or ptp.
fn pod<'w>(world: &'w World, kind: &str) -> Pod<'w> {
    let routes = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    let network = world.network("net1", &["10.1.0.0/24", "fd00:1::/64"]);
    world.pod(&patched(network, json!({"type": kind, "ipam": {"routes": routes}})))
}

#[test]
fn denied_destinations_are_dropped_and_others_pass() {
    each(&BACKENDS, |world| {
        prepare(world);
        for kind in ["bridge", "ptp"] {
            let config = config(world, denying());
            let pod = pod(world, kind);
            pod.serve_tcp(80, "pod");
            OUTSIDE.iter().for_each(|to| passes(world, &pod, to));
            pod.add(&config).success();
            pod.check(&config).success();
            for family in [0, 1] {
                is_dropped(world, &pod, OUTSIDE[family]);
                passes(world, &pod, ALLOWED[family]);
                passes(world, &pod, HOST[family]);
                let to = SocketAddr::new(pod.address(family), 80).to_string();
                assert!(world.client.enter(|| ask_tcp(&to)).is_some(), "replies pass: {kind} {:?}", world.backend);
            }
            let counted = world.node.exec(&["nft", "list", "table", "inet", "cni_firewall"]);
            let is_counted = |line: &&str| line.contains("counter packets") && !line.contains("packets 0 ");
            assert!(counted.lines().filter(is_counted).count() == 2, "{counted}");
            pod.del(&config).success();
            OUTSIDE.iter().for_each(|to| passes(world, &pod, to));
            assert!(!has_network(world), "{:?} {}", world.backend, table(world));
            pod.leave();
        }
    });
}

/// Asks the node's server from the container's link-local address.
fn ask_link_local(world: &World, pod: &Pod<'_>, ask: fn(&str) -> Option<String>) -> Option<String> {
    let links = world.node.json(&["ip", "-j", "address", "show", "dev", "br-net1"]);
    let mut addresses = links.as_array().unwrap().iter().flat_map(|link| link["addr_info"].as_array()).flatten();
    let to = addresses.find(|address| address["family"] == "inet6" && address["scope"] == "link");
    let to: Ipv6Addr = to.unwrap_or_else(|| panic!("{links:#}"))["local"].as_str().unwrap().parse().unwrap();
    pod.container.enter(|| {
        let index = std::fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap();
        let line = index.lines().find(|line| line.ends_with("eth0")).unwrap();
        let index = u32::from_str_radix(line.split_whitespace().nth(1).unwrap(), 16).unwrap();
        ask(&SocketAddrV6::new(to, 80, 0, index).to_string())
    })
}

#[test]
fn the_node_is_a_destination_too() {
    each(&BACKENDS, |world| {
        prepare(world);
        let pod = world.dual();
        pod.serve_tcp(80, "pod");
        assert!(ask_link_local(world, &pod, ask_tcp).is_some());
        pod.add(&config(world, gateway_only())).success();
        for family in [0, 1] {
            passes(world, &pod, GATEWAY[family]);
            is_dropped(world, &pod, HOST[family]);
            is_dropped(world, &pod, OUTSIDE[family]);
            let ask = |address: &str| {
                let to = SocketAddr::new(address.parse().unwrap(), 53).to_string();
                let local = SocketAddr::new(["0.0.0.0", "::"][family].parse::<IpAddr>().unwrap(), 0);
                pod.container.enter(|| {
                    let socket = UdpSocket::bind(local).unwrap();
                    if address == GATEWAY[family] { ask_udp(&socket, &to) } else { ask_udp_for(IN_VAIN, &socket, &to) }
                })
            };
            assert_eq!(ask(GATEWAY[family]).as_deref(), Some("node"), "{:?}", world.backend);
            assert_eq!(ask(HOST[family]), None, "{:?}", world.backend);
            let to = SocketAddr::new(pod.address(family), 80).to_string();
            assert!(world.node.enter(|| ask_tcp(&to)).is_some(), "replies pass: {:?}", world.backend);
        }
        assert_eq!(
            ask_link_local(world, &pod, |to| ask_tcp_for(IN_VAIN, to)),
            None,
            "{:?} {}",
            world.backend,
            all_rules(world)
        );
        pod.leave();
    });
}

#[test]
fn no_accepting_rule_overrides_a_denied_destination() {
    each(&BACKENDS, |world| {
        prepare(world);
        let pod = world.dual();
        let keys = super::packets::dropping_chain(world);
        pod.add(&patched(config(world, denying()), keys)).success();
        match world.backend {
            Backend::Nftables => shell(world, "nft insert rule inet site gate accept"),
            // Also in the place of a program that puts its rules before all others.
            _ => shell(
                world,
                "for i in iptables ip6tables; do $i -w -A CNI-ADMIN -j ACCEPT; $i -w -I FORWARD -j ACCEPT; done",
            ),
        }
        for family in [0, 1] {
            is_dropped(world, &pod, OUTSIDE[family]);
            passes(world, &pod, ALLOWED[family]);
        }
        pod.leave();
        match world.backend {
            Backend::Nftables => shell(world, "nft delete table inet site"),
            _ => shell(world, "for i in iptables ip6tables; do $i -w -F CNI-ADMIN; $i -w -D FORWARD -j ACCEPT; done"),
        }
    });
}

#[test]
fn a_later_add_changes_the_rules_of_its_network_only() {
    each(&BACKENDS, |world| {
        prepare(world);
        let second = world.network("net2", &["10.2.0.0/24", "fd00:2::/64"]);
        let (one, two, other) = (world.dual(), world.dual(), world.pod(&second));
        let open = world.pod(&world.network("net3", &["10.3.0.0/24", "fd00:3::/64"]));
        one.add(&config(world, denying())).success();
        other.add(&named(world, "net2", denying())).success();
        open.add(&named(world, "net3", json!({}))).success();
        let allowed = json!({"egress": {"deny": [format!("{}/32", ALLOWED[0]), format!("{}/128", ALLOWED[1])]}});
        two.add(&config(world, allowed.clone())).success();
        for family in [0, 1] {
            for pod in [&one, &two] {
                passes(world, pod, OUTSIDE[family]);
                is_dropped(world, pod, ALLOWED[family]);
            }
            is_dropped(world, &other, OUTSIDE[family]);
            passes(world, &other, ALLOWED[family]);
            passes(world, &open, OUTSIDE[family]);
        }
        one.check(&config(world, allowed)).success();
        one.check(&config(world, denying())).fails_naming(101, &["cni_egress_"]);
        // Without the key an ADD ends the rules for its container, and for no other.
        two.add(&config(world, json!({}))).success();
        assert!(is_checked(world, &one) && !is_checked(world, &two), "{:?} {}", world.backend, table(world));
        passes(world, &two, ALLOWED[0]);
        one.leave();
        two.leave();
        assert!(has_network(world) && is_checked(world, &other), "{:?} {}", world.backend, table(world));
        other.leave();
        open.leave();
        assert!(!has_network(world), "{:?} {}", world.backend, table(world));
    });
}

#[test]
fn del_and_gc_remove_the_rules_with_the_last_attachment() {
    each(&BACKENDS, |world| {
        let newest = json!({"cniVersion": "1.1.0"});
        let config = patched(config(world, denying()), newest.clone());
        let (one, two) = (world.dual(), world.dual());
        for pod in [&one, &two] {
            let prev = patched(pod.result.clone(), newest.clone());
            pod.invocation(&bin_dir(), "ADD", &config, Some(&prev)).run().success();
        }
        let bare = json!({"cniVersion": "1.0.0", "name": "net1", "type": "firewall"});
        one.invocation(&bin_dir(), "DEL", &bare, None).run().success();
        assert!(!is_checked(world, &one) && is_checked(world, &two), "{:?} {}", world.backend, table(world));
        let gc = |valid: Value| {
            let config = patched(bare.clone(), patched(newest.clone(), json!({"cni.dev/valid-attachments": valid})));
            let call = world.node.plugin("firewall").command("GC").config(&config);
            call.env("PATH", world.backend.path(&world.node)).run().success();
        };
        gc(json!([{"containerID": two.container.id, "ifname": "eth0"}]));
        assert!(is_checked(world, &two), "{:?} {}", world.backend, table(world));
        gc(json!([]));
        assert!(!is_checked(world, &two) && !has_network(world), "{:?} {}", world.backend, table(world));
        one.leave();
        two.leave();
    });
}

#[test]
fn what_a_del_by_go_leaves_hits_no_later_container() {
    require!(probe::go_plugins());
    each(&IPTABLES, |world| {
        prepare(world);
        let only = |subnet: &str, ip: &str| json!([{"subnet": subnet, "rangeStart": ip, "rangeEnd": ip}]);
        let ranges = json!([only("10.1.0.0/24", "10.1.0.2"), only("fd00:1::/64", "fd00:1::2")]);
        let network = patched(world.network("net1", &[]), json!({"ipam": {"ranges": ranges}}));
        for keys in [json!({}), gateway_only()] {
            let gone = world.pod(&network);
            gone.add(&config(world, denying())).success();
            gone.call_by(&go(), "DEL", &config(world, denying()), Some(&gone.result)).success();
            assert!(is_checked(world, &gone), "Go ignores the key");
            gone.network.del_with(&gone.result).success();
            let late = world.pod(&network);
            assert_eq!(late.address(0), gone.address(0), "the address is free again");
            let has_key = keys.get("egress").is_some();
            late.add(&config(world, keys)).success();
            assert_eq!(is_checked(world, &late), has_key, "{:?} {}", world.backend, table(world));
            if !has_key {
                OUTSIDE.iter().for_each(|to| passes(world, &late, to));
            }
            let is_of_gone = table(world).contains(&gone.container.id);
            assert!(!is_of_gone, "{:?} {}", world.backend, table(world));
            late.leave();
            assert!(!has_network(world), "{:?} {}", world.backend, table(world));
        }
        let gone = world.dual();
        gone.add(&config(world, denying())).success();
        gone.call_by(&go(), "DEL", &config(world, denying()), Some(&gone.result)).success();
        let gc = patched(config(world, json!({"cniVersion": "1.1.0"})), json!({"cni.dev/valid-attachments": []}));
        let call = world.node.plugin("firewall").command("GC").config(&gc);
        call.env("PATH", world.backend.path(&world.node)).run().success();
        assert!(!is_checked(world, &gone) && !has_network(world), "{:?} {}", world.backend, table(world));
        gone.leave();
    });
}

#[test]
fn check_finds_changes_of_the_egress_rules() {
    each(&BACKENDS, |world| {
        let config = config(world, denying());
        let pod = world.dual();
        pod.add(&config).success();
        let table_text = table(world);
        let mut names = table_text.lines().filter_map(|line| line.trim().strip_prefix("chain ")?.strip_suffix(" {"));
        let chain = names.find(|name| name.len() == "cni_egress_0123456789abcdef".len()).unwrap();
        for change in [
            "flush chain inet cni_firewall egress_forward".to_owned(),
            "flush chain inet cni_firewall egress_input".to_owned(),
            "flush chain inet cni_firewall cni_egress".to_owned(),
            "insert rule inet cni_firewall cni_egress accept".to_owned(),
            format!("flush chain inet cni_firewall {chain}"),
            format!("insert rule inet cni_firewall {chain} return"),
            format!("flush set inet cni_firewall {chain}_4"),
            format!("flush set inet cni_firewall {chain}_6"),
            "delete table inet cni_firewall".to_owned(),
        ] {
            world.node.exec(&["sh", "-ec", &format!("nft '{change}'")]);
            let broken = table(world);
            pod.check(&config).fails_with(101, "");
            assert_eq!(table(world), broken, "CHECK changes nothing: {change} {:?}", world.backend);
            pod.add(&config).success();
            pod.check(&config).success();
        }
        pod.leave();
    });
}

#[test]
fn egress_behind_macvlan_is_refused_before_any_change() {
    each(&BACKENDS, |world| {
        let macvlan =
            json!({"type": "macvlan", "master": "up0", "ipam": conformance::ipam(&world.node, &["10.9.0.0/24"])});
        let network = json!({"cniVersion": conformance::VERSION, "name": "net1"});
        let pod = world.pod(&patched(network, macvlan));
        let before = all_rules(world);
        pod.add(&config(world, denying())).fails_naming(7, &["egress", "no bridge and no veth", "macvlan"]);
        assert_eq!(all_rules(world), before, "{:?}", world.backend);
        pod.add(&config(world, json!({}))).success();
        pod.leave();
    });
}

#[test]
fn invalid_egress_is_refused_before_any_change() {
    each(&BACKENDS, |world| {
        let pod = world.dual();
        let before = all_rules(world);
        let many: Vec<String> = (0..65).map(|n| format!("10.{n}.0.0/16")).collect();
        for (egress, code, words) in [
            (json!({"deny": ["10.0.0.0"]}), 7, ["egress.deny", "10.0.0.0"]),
            (json!({"deny": ["10.0.0.1/8"]}), 7, ["egress.deny", "the network is 10.0.0.0/8"]),
            (json!({"deny": ["0.0.0.0/0"]}), 7, ["egress.deny", "default"]),
            (json!({"allow": ["::/0"], "default": "deny"}), 7, ["egress.allow", "default"]),
            (json!({"deny": ["fd00::/129"]}), 7, ["egress.deny", "fd00::/129"]),
            (json!({"deny": many}), 7, ["egress.deny", "64"]),
            (json!({"denied": ["10.0.0.0/8"]}), 7, ["unknown key", "denied"]),
            (json!({"default": "drop"}), 7, ["egress.default", "drop"]),
            (json!({"allow": ["10.0.0.0/8"]}), 7, ["egress", "denies nothing"]),
            (json!({"deny": "10.0.0.0/8"}), 6, ["egress", "deny"]),
            (json!(true), 6, ["egress", "boolean"]),
        ] {
            pod.add(&config(world, json!({"egress": egress}))).fails_naming(code, &words);
        }
        assert_eq!(all_rules(world), before, "{:?}", world.backend);
        pod.leave();
    });
}
