//! A failed ADD removes what it has written, and nothing of other attachments.

use cni_testkit::{bin_dir, require};
use conformance::patched;
use serde_json::{Value, json};

use super::world::{BACKENDS, Backend, IPTABLES, Pod, World, each, map};

/// Returns the rules as a set of lines, because the ADDs of a test write them in another order.
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

/// Adds a second interface to the pod's container, whose rules are in the same chains.
fn with_second<'w>(world: &'w World, pod: &Pod<'w>) -> Pod<'w> {
    let network = patched(world.network("net1", &["10.1.0.0/24"]), json!({"isDefaultGateway": false}));
    let second = pod.also(&network, "eth1");
    second.add(&world.config(json!([map(7070, 80, "tcp")]))).success();
    second
}

#[test]
fn when_the_second_family_fails_the_first_is_undone() {
    each(&IPTABLES, |world| {
        let pod = world.dual();
        let change = json!([map(9090, 80, "tcp"), map(9091, 80, "udp")]);
        let failing = patched(world.config(change), json!({"conditionsV6": ["-m", "nosuchmatch"]}));
        pod.add(&failing).failure();
        let left = world.rules();
        assert!(!left.contains("909") && !left.contains("CNI-DN-"), "{:?}\n{left}", world.backend);
        let second = with_second(world, &pod);
        let before = lines(world);
        pod.add(&failing).failure();
        assert_eq!(lines(world), before, "{:?}", world.backend);
        second.leave();
        pod.leave();
    });
}

#[test]
fn an_unread_add_undoes_nothing_if_its_rules_were_in_place() {
    each(&BACKENDS, |world| {
        let pod = world.dual();
        let second = with_second(world, &pod);
        let config = world.config(json!([map(8080, 80, "tcp"), map(8081, 81, "udp")]));
        pod.add(&config).success();
        let before = lines(world);
        unheard(&pod, &config);
        assert_eq!(lines(world), before, "the same: {:?}", world.backend);
        pod.check(&config).success();
        pod.del(&config).success();
        let without = lines(world);
        pod.add(&config).success();
        unheard(&pod, &patched(world.config(json!([map(9090, 90, "sctp")])), json!({"snat": false})));
        assert_eq!(lines(world), without, "others: {:?}", world.backend);
        second.leave();
        pod.leave();
    });
}

#[test]
fn when_nft_refuses_conditions_nothing_remains() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let pod = world.dual();
    let conditions = json!({"conditionsV4": ["ip saddr { 192.0.2.9 }"], "conditionsV6": ["ip6 saddr nonsense:"]});
    let config = patched(world.config(json!([map(8080, 80, "tcp"), map(8081, 81, "udp")])), conditions);
    pod.add(&config).fails_naming(7, &["nonsense:"]);
    assert!(!world.rules().contains(&pod.container.id), "{}", world.rules());
    pod.leave();
}
