//! A failed ADD restores the former state: no rules after a first ADD, the earlier ADD's rules
//! after a second.

use cni_testkit::{bin_dir, require};
use conformance::patched;
use serde_json::{Value, json};

use super::world::{BACKENDS, Backend, IPTABLES, Pod, World, each, map};

/// Returns the rules as a set of lines, because restored rules are at the end of a chain.
pub(super) fn lines(world: &World) -> Vec<String> {
    let mut lines: Vec<String> = world.rules().lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[track_caller]
fn unheard(pod: &Pod<'_>, config: &Value) {
    let call = pod.invocation(&bin_dir(), "ADD", config, Some(&pod.result));
    assert_ne!(call.with_closed_stdout().run().status, Some(0));
}

#[test]
fn a_port_held_in_one_family_is_found_before_any_change() {
    each(&BACKENDS, |world| {
        let v6 = json!([{"hostPort": 8080, "containerPort": 80, "hostIP": "2001:db8::1"}]);
        let holder = world.mapped(v6);
        let late = world.dual();
        let before = world.rules();
        world.ran();
        late.add(&world.config(json!([map(8080, 80, "tcp")]))).fails_naming(102, &[&holder.container.id, "8080"]);
        assert_eq!(world.rules(), before, "{:?}", world.backend);
        let ran = world.ran();
        assert!(
            !ran.iter().any(|program| program.contains("restore")),
            "nothing is written, not even to be undone: {ran:?}"
        );
        late.leave();
        holder.leave();
    });
}

#[test]
fn when_the_second_family_fails_the_first_gets_back_what_it_had() {
    each(&IPTABLES, |world| {
        let pod = world.dual();
        let change = json!([map(9090, 80, "tcp"), map(9091, 80, "udp")]);
        let failing = patched(world.config(change), json!({"conditionsV6": ["-m", "nosuchmatch"]}));
        pod.add(&failing).failure();
        let left = world.rules();
        assert!(!left.contains("909") && !left.contains("CNI-DN-"), "{:?}\n{left}", world.backend);
        for conditions in
            [json!({}), json!({"conditionsV4": ["!", "-s", "10.9.0.0/16", "-m", "mark", "--mark", "0x7"]})]
        {
            let config = patched(world.config(json!([map(8080, 80, "tcp"), map(8081, 81, "udp")])), conditions);
            pod.add(&config).success();
            let before = lines(world);
            pod.add(&failing).failure();
            assert_eq!(lines(world), before, "{:?}", world.backend);
            pod.check(&config).success();
        }
        pod.leave();
    });
}

#[test]
fn a_repeated_add_with_unread_result_keeps_the_first_rules() {
    each(&BACKENDS, |world| {
        let pod = world.dual();
        // Another attachment of the container has rules in the same chains.
        let second =
            pod.also(&patched(world.network("net1", &["10.1.0.0/24"]), json!({"isDefaultGateway": false})), "eth1");
        second.add(&world.config(json!([map(7070, 80, "tcp")]))).success();
        let conditions = match world.backend {
            Backend::Nftables => json!({"conditionsV4": ["ip", "saddr", "!=", "10.9.0.0/16"]}),
            _ => json!({"conditionsV4": ["!", "-s", "10.9.0.0/16"]}),
        };
        for config in [
            world.config(json!([map(8080, 80, "tcp"), map(8081, 81, "udp")])),
            patched(world.config(json!([map(8080, 80, "tcp")])), conditions),
        ] {
            pod.add(&config).success();
            let before = lines(world);
            unheard(&pod, &config);
            assert_eq!(lines(world), before, "the same: {:?}", world.backend);
            unheard(&pod, &patched(world.config(json!([map(9090, 90, "sctp")])), json!({"snat": false})));
            assert_eq!(lines(world), before, "others: {:?}", world.backend);
            pod.check(&config).success();
        }
        pod.del(&world.config(json!([]))).success();
        let without = lines(world);
        unheard(&pod, &world.config(json!([map(9090, 90, "udp")])));
        assert_eq!(lines(world), without, "a first one: {:?}", world.backend);
        second.leave();
        pod.leave();
    });
}

#[test]
fn when_nft_refuses_conditions_what_was_there_stays() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let pod = world.dual();
    let with =
        |conditions: Value| patched(world.config(json!([map(8080, 80, "tcp"), map(8081, 81, "udp")])), conditions);
    let broken = with(json!({"conditionsV4": ["ip saddr { 192.0.2.9 }"], "conditionsV6": ["ip6 saddr nonsense:"]}));
    pod.add(&broken).fails_naming(7, &["nonsense:"]);
    assert!(!world.rules().contains(&pod.container.id), "{}", world.rules());
    for config in [with(json!({})), with(json!({"conditionsV4": ["ip saddr { 192.0.2.9, 192.0.2.10 }"]}))] {
        pod.add(&config).success();
        let before = lines(&world);
        pod.add(&broken).fails_naming(7, &["nonsense:"]);
        assert_eq!(lines(&world), before);
        world.ran();
        pod.add(&config).success();
        assert_eq!((lines(&world), world.ran()), (before.clone(), vec![]), "the same again writes nothing");
        unheard(&pod, &config);
        assert_eq!(lines(&world), before);
        pod.check(&config).success();
    }
    pod.leave();
}
