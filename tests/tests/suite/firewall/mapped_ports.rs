//! `acceptMappedPorts`: connections to host ports pass a filter that drops.

use cni_testkit::{probe, require};
use serde_json::{Value, json};

use super::packets::dropping;
use super::world::{BACKENDS, Backend, IPTABLES, Pod, World, config, each, go, naming, rules, shell};
use crate::portmap::world::{IN_VAIN, ask_tcp, ask_tcp_for, at, map};
use conformance::patched;

fn accepting(world: &World, keys: &Value) -> Value {
    patched(config(world, json!({"acceptMappedPorts": true})), keys.clone())
}

/// The number of rules and set elements that accept redirected connections to the container.
fn accepted(world: &World, pod: &Pod<'_>) -> usize {
    let addresses = [0, 1].map(|family| pod.address(family).to_string());
    let names = |line: &String| line.split([' ', ',', '/']).any(|word| addresses.iter().any(|address| address == word));
    let (mut set, mut count) = (String::new(), 0);
    for line in rules(world) {
        if let Some(name) = line.strip_prefix("set ") {
            name.clone_into(&mut set);
        }
        let is_element = line.starts_with("elements") && set.starts_with("cni_mapped");
        count += usize::from(names(&line) && (is_element || line.contains("--ctstate DNAT")));
    }
    count
}

#[test]
fn host_ports_pass_a_filter_that_drops() {
    each(&BACKENDS, |world| {
        let keys = dropping(world);
        let (pod, closed) = (world.dual(), world.dual());
        pod.serve_tcp(80, "pod");
        closed.serve_tcp(80, "closed");
        let (open_ports, closed_ports) =
            (world.config(json!([map(8080, 80, "tcp")])), world.config(json!([map(8081, 80, "tcp")])));
        for (pod, firewall, ports) in [
            (&closed, patched(config(world, json!({})), keys.clone()), &closed_ports),
            (&pod, accepting(world, &keys), &open_ports),
        ] {
            pod.add(&firewall).success();
            pod.check(&firewall).success();
            pod.add(ports).success();
        }
        for family in [0, 1] {
            let answer = world.client.enter(|| ask_tcp(&at(family, 8080)));
            let is_answered = answer.is_some_and(|answer| answer.starts_with("pod "));
            assert!(is_answered, "{:?} {:#?}", world.backend, rules(world));
            let direct = std::net::SocketAddr::new(pod.address(family), 80).to_string();
            assert_eq!(world.client.enter(|| ask_tcp_for(IN_VAIN, &direct)), None, "{:?}", world.backend);
            assert_eq!(world.client.enter(|| ask_tcp_for(IN_VAIN, &at(family, 8081))), None, "{:?}", world.backend);
        }
        pod.del(&accepting(world, &keys)).success();
        assert_eq!(world.client.enter(|| ask_tcp_for(IN_VAIN, &at(0, 8080))), None, "{:?}", world.backend);
        pod.leave();
        closed.leave();
        if world.backend == Backend::Nftables {
            shell(world, "nft delete table inet site");
        }
    });
}

#[test]
fn an_add_without_the_key_ends_the_acceptance() {
    each(&BACKENDS, |world| {
        let pod = world.dual();
        pod.add(&accepting(world, &json!({}))).success();
        assert_eq!(accepted(world, &pod), 2, "{:?} {:#?}", world.backend, rules(world));
        let without = config(world, json!({}));
        pod.check(&without).success();
        pod.add(&without).success();
        assert_eq!(accepted(world, &pod), 0, "{:?} {:#?}", world.backend, rules(world));
        pod.check(&without).success();
        pod.check(&accepting(world, &json!({}))).fails_with(101, "");
        pod.leave();
    });
}

#[test]
fn an_attachment_without_the_key_keeps_only_its_own_rules() {
    each(&BACKENDS, |world| {
        let pod = world.dual();
        let (with, without) = (accepting(world, &json!({})), config(world, json!({})));
        pod.add(&with).success();
        // Another network whose container has the same addresses.
        let other = patched(without.clone(), json!({"name": "net2"}));
        pod.add(&other).success();
        pod.del(&with).success();
        assert_eq!(accepted(world, &pod), 0, "{:?} {:#?}", world.backend, rules(world));
        pod.check(&other).success();
        pod.del(&other).success();
        assert_eq!(naming(world, &pod), 0, "{:?} {:#?}", world.backend, rules(world));
        pod.leave();
    });
}

#[test]
fn what_a_del_by_go_leaves_is_removed_by_gc() {
    require!(probe::go_plugins());
    each(&IPTABLES, |world| {
        let newest = json!({"cniVersion": "1.1.0"});
        let pod = world.dual();
        let config = accepting(world, &json!({}));
        pod.add(&config).success();
        pod.call_by(&go(), "CHECK", &config, Some(&pod.result)).success();
        pod.call_by(&go(), "DEL", &config, Some(&pod.result)).success();
        assert!(naming(world, &pod) > 0, "Go ignores the key");
        let gc = patched(patched(config, newest), json!({"cni.dev/valid-attachments": []}));
        let call = world.node.plugin("firewall").command("GC").config(&gc);
        call.env("PATH", world.backend.path(&world.node)).run().success();
        assert_eq!(naming(world, &pod), 0, "{:?} {:#?}", world.backend, rules(world));
        pod.leave();
    });
}
