//! Real packets in both families: through a filter with a drop policy, and between isolated
//! bridges.

use serde_json::{Value, json};

use super::world::{BACKENDS, Backend, IPTABLES, Pod, World, config, each, end_isolation, named, rules, shell};
use crate::portmap::world::{IN_VAIN, ask_tcp, ask_tcp_for, at, map};
use conformance::{HOST, OUTSIDE};

/// Gives the client routes to containers and does [`dropping_chain`].
pub(super) fn dropping(world: &World) -> Value {
    for (subnet, host) in ["10.0.0.0/8", "fd00::/16"].into_iter().zip(HOST) {
        world.client.exec(&["ip", "route", "add", subnet, "via", host]);
    }
    dropping_chain(world)
}

/// Makes the node drop every forwarded packet and returns the keys that name the dropping chain.
pub(super) fn dropping_chain(world: &World) -> Value {
    match world.backend {
        Backend::Nftables => {
            shell(
                world,
                "nft 'add table inet site; add chain inet site gate { type filter hook forward priority 0; policy drop; }'",
            );
            json!({"nftablesChain": "inet site gate"})
        }
        _ => {
            shell(world, "iptables -w -P FORWARD DROP; ip6tables -w -P FORWARD DROP");
            json!({})
        }
    }
}

fn to(pod: &Pod<'_>, family: usize) -> String {
    std::net::SocketAddr::new(pod.address(family), 80).to_string()
}

fn out(family: usize) -> String {
    std::net::SocketAddr::new(OUTSIDE[family].parse().unwrap(), 80).to_string()
}

/// A server beyond the node, of either family.
fn serve(world: &World) {
    let listener = world.client.enter(|| std::net::TcpListener::bind(("::", 80)).unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = std::io::Write::write_all(&mut stream, b"outside");
        }
    });
}

#[test]
fn packets_of_the_container_pass_a_dropping_filter() {
    each(&IPTABLES, talks);
}

#[test]
fn nftables_packets_of_the_container_pass_a_dropping_filter() {
    each(&[Backend::Nftables], talks);
}

fn talks(world: &World) {
    let patch = dropping(world);
    let pod = world.dual();
    let other = world.pod(&world.network("net2", &["10.2.0.0/24", "fd00:2::/64"]));
    serve(world);
    pod.serve_tcp(80, "pod");
    assert_eq!(pod.container.enter(|| ask_tcp_for(IN_VAIN, &out(0))), None, "{:?}", world.backend);
    pod.add(&config(world, patch.clone())).success();
    other.add(&named(world, "net2", patch.clone())).success();
    for family in [0, 1] {
        let answer = pod.container.enter(|| ask_tcp(&out(family)));
        assert_eq!(answer.as_deref(), Some("outside"), "{:?} {:#?}", world.backend, rules(world));
        let to = to(&pod, family);
        assert!(world.node.enter(|| ask_tcp(&to)).is_some(), "{:?} from the node", world.backend);
        assert!(other.container.enter(|| ask_tcp(&to)).is_some(), "{:?} from another network", world.backend);
    }
    pod.del(&config(world, patch.clone())).success();
    assert_eq!(pod.container.enter(|| ask_tcp_for(IN_VAIN, &out(1))), None, "{:?}", world.backend);
    pod.leave();
    other.leave();
    if world.backend == Backend::Nftables {
        shell(world, "nft delete table inet site");
    }
}

#[test]
fn the_administrators_rules_come_first() {
    each(&[Backend::IptablesNft, Backend::IptablesLegacy], |world| {
        dropping(world);
        let pod = world.dual();
        pod.serve_tcp(80, "pod");
        pod.add(&config(world, json!({}))).success();
        let to = [0, 1].map(|family| to(&pod, family));
        assert_eq!(world.client.enter(|| ask_tcp_for(IN_VAIN, &to[0])), None, "{:?}", world.backend);
        let (v4, v6) = (pod.address(0), pod.address(1));
        shell(
            world,
            &format!("iptables -w -A CNI-ADMIN -d {v4} -j ACCEPT; ip6tables -w -A CNI-ADMIN -d {v6} -j ACCEPT"),
        );
        for to in &to {
            assert!(world.client.enter(|| ask_tcp(to)).is_some(), "{:?} {:#?}", world.backend, rules(world));
        }
        shell(world, "iptables -w -F CNI-ADMIN; ip6tables -w -F CNI-ADMIN");
        pod.leave();
    });
}

#[test]
fn a_dropping_filter_lets_host_ports_pass_by_their_dnat() {
    each(&IPTABLES, |world| {
        dropping(world);
        let pod = world.dual();
        pod.serve_tcp(80, "pod");
        pod.add(&config(world, json!({}))).success();
        pod.add(&world.config(json!([map(8080, 80, "tcp")]))).success();
        let ports = [0, 1].map(|family| at(family, 8080));
        // The port of the host is no longer in the packet that passes FORWARD.
        let accept = |rule: &str| {
            shell(world, &format!("for i in iptables ip6tables; do $i -w -A CNI-ADMIN {rule} -j ACCEPT; done"));
        };
        accept("-p tcp --dport 8080");
        assert_eq!(world.client.enter(|| ask_tcp_for(IN_VAIN, &ports[0])), None, "{:?}", world.backend);
        accept("-m conntrack --ctstate DNAT");
        for port in &ports {
            assert!(world.client.enter(|| ask_tcp(port)).is_some(), "{:?} {:#?}", world.backend, rules(world));
        }
        shell(world, "iptables -w -F CNI-ADMIN; ip6tables -w -F CNI-ADMIN");
        pod.leave();
    });
}

/// Two containers in `net1` and one in `net2`, each with a server, all with this policy.
fn isolated<'w>(world: &'w World, policy: &str) -> [Pod<'w>; 3] {
    let second = world.network("net2", &["10.2.0.0/24", "fd00:2::/64"]);
    let pods = [world.dual(), world.dual(), world.pod(&second)];
    for (pod, network) in pods.iter().zip(["net1", "net1", "net2"]) {
        pod.serve_tcp(80, "pod");
        pod.add(&named(world, network, json!({"ingressPolicy": policy}))).success();
    }
    pods
}

#[track_caller]
fn passes(world: &World, from: &Pod<'_>, to: &str) {
    assert!(from.container.enter(|| ask_tcp(to)).is_some(), "{to} {:?} {:#?}", world.backend, rules(world));
}

#[track_caller]
fn is_blocked(world: &World, from: &Pod<'_>, to: &str) {
    assert_eq!(from.container.enter(|| ask_tcp_for(IN_VAIN, to)), None, "{to} {:?} {:#?}", world.backend, rules(world));
}

#[test]
fn same_bridge_passes_within_and_blocks_between_bridges() {
    each(&IPTABLES, same_bridge);
}

#[test]
fn nftables_same_bridge_passes_within_and_blocks_across() {
    each(&[Backend::Nftables], same_bridge);
}

fn same_bridge(world: &World) {
    let pods = isolated(world, "same-bridge");
    let [one, two, other] = &pods;
    let open = world.pod(&world.network("net3", &["10.3.0.0/24", "fd00:3::/64"]));
    open.add(&named(world, "net3", json!({}))).success();
    serve(world);
    for family in [0, 1] {
        world.client.exec(&["ip", "route", "add", ["10.0.0.0/8", "fd00::/16"][family], "via", HOST[family]]);
        passes(world, one, &to(two, family));
        passes(world, one, &out(family));
        passes(world, &open, &to(one, family));
        is_blocked(world, one, &to(other, family));
        is_blocked(world, other, &to(one, family));
    }
    pods.iter().for_each(Pod::leave);
    end_isolation(world);
    open.leave();
}

#[test]
fn isolated_blocks_within_and_between_bridges() {
    each(&IPTABLES, isolates);
}

#[test]
fn nftables_isolated_blocks_within_and_between_bridges() {
    each(&[Backend::Nftables], isolates);
}

fn isolates(world: &World) {
    let keys = ["net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables"];
    if !std::path::Path::new("/proc/sys").join(keys[0]).exists() {
        return cni_testkit::skipped("the kernel has no br_netfilter");
    }
    keys.iter().for_each(|key| world.node.set_sysctl(key, "1"));
    let pods = isolated(world, "isolated");
    let [one, two, other] = &pods;
    serve(world);
    for family in [0, 1] {
        world.client.exec(&["ip", "route", "add", ["10.0.0.0/8", "fd00::/16"][family], "via", HOST[family]]);
        is_blocked(world, one, &to(two, family));
        is_blocked(world, one, &to(other, family));
        passes(world, one, &out(family));
    }
    pods.iter().for_each(Pod::leave);
    end_isolation(world);
}

#[test]
fn without_br_netfilter_isolated_prints_a_note() {
    each(&BACKENDS, |world| {
        let keys = ["net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables"];
        if std::path::Path::new("/proc/sys").join(keys[0]).exists() {
            keys.iter().for_each(|key| world.node.set_sysctl(key, "0"));
        }
        let pods = isolated(world, "isolated");
        let [one, two, other] = &pods;
        let added = one.add(&config(world, json!({"ingressPolicy": "isolated"})));
        added.success();
        assert!(added.stderr.contains(keys[0]) && added.stderr.contains("isolated"), "{}", added.report());
        passes(world, one, &to(two, 0));
        is_blocked(world, one, &to(other, 0));
        pods.iter().for_each(Pod::leave);
    });
}
