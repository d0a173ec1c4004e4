//! A port that is mapped in a backend other than the one in use.

use cni_testkit::bin_dir;
use conformance::patched;
use serde_json::{Value, json};

use super::world::{BACKENDS, Backend, IPTABLES, Pod, World, ask_tcp, at, each, map};

/// Returns a call of portmap with another backend than the world's.
#[track_caller]
fn by(backend: Backend, pod: &Pod<'_>, verb: &str, config: &Value) {
    let config = patched(config.clone(), json!({"backend": backend.key()}));
    let call = pod.invocation(&bin_dir(), verb, &config, Some(&pod.result));
    call.env("PATH", backend.path(&pod.world.node)).run().success();
}

fn others(world: &World) -> impl Iterator<Item = Backend> {
    BACKENDS.into_iter().filter(|other| *other != world.backend && other.probe().is_ok())
}

/// Returns all rules of nf_tables and, if its tables exist, of iptables-legacy.
fn everything(world: &World) -> String {
    let legacy = "for f in ip ip6; do ! grep -qs nat /proc/net/${f}_tables_names || /usr/sbin/xtables-legacy-multi ${f}tables-save -t nat | grep ^-; done";
    world.node.ruleset() + &world.node.exec(&["sh", "-ec", legacy])
}

#[test]
fn a_living_holder_is_found_whatever_backend_has_it() {
    each(&BACKENDS, |world| {
        for other in others(world) {
            let world = World::new(world.backend);
            let (holder, late) = (world.dual(), world.dual());
            let v6 = json!([{"hostPort": 8080, "containerPort": 80, "hostIP": "2001:db8::1"}]);
            by(other, &holder, "ADD", &world.config(v6));
            let before = everything(&world);
            world.ran();
            let config = world.config(json!([map(8080, 80, "tcp")]));
            late.add(&config).fails_naming(102, &[&holder.container.id, "8080"]);
            assert_eq!(everything(&world), before, "{other:?}, {:?}", world.backend);
            let ran = world.ran();
            assert!(ran.len() <= 2 && ran.iter().all(|program| program.contains("save")), "{ran:?}");
            let fine = world.config(json!([map(8080, 80, "udp")]));
            late.add(&fine).success();
            let ran = world.ran();
            assert!(ran.len() <= 4, "two for each family: {ran:?}");
            let ignoring = patched(config, json!({"portConflict": "ignore"}));
            late.add(&ignoring).success();
            by(other, &holder, "DEL", &fine);
            holder.leave();
            late.leave();
        }
    });
}

/// In a backend that the ADD does not use, only a rule to the container's address is removed.
#[test]
fn a_dead_holder_in_another_backend_stays_until_del() {
    each(&BACKENDS, |world| {
        for other in others(world) {
            let world = World::new(world.backend);
            let (dead, heir) = (world.dual(), world.dual());
            let config = world.config(json!([map(8080, 80, "tcp")]));
            by(other, &dead, "ADD", &config);
            // Its DEL was lost; the link, and with it the mark, is gone.
            dead.network.del_with(&dead.result).success();
            let outcome = heir.add(&config);
            outcome.success();
            let is_noted = outcome.stderr.contains("may take precedence until it is removed");
            assert!(is_noted && !outcome.stderr.contains("displaced"), "{}", outcome.report());
            // `nft` does not show where the IPv6 rules of iptables lead.
            let to_dead = format!("{}:80", dead.address(0));
            assert!(everything(&world).contains(&to_dead), "{other:?}, {:?}\n{}", world.backend, everything(&world));
            // Its late DEL, by either backend.
            by(world.backend, &dead, "DEL", &config);
            assert!(!everything(&world).contains(&to_dead), "{other:?}, {:?}\n{}", world.backend, everything(&world));
            heir.serve_tcp(80, "heir");
            for family in [0, 1] {
                let answer = world.client.enter(|| ask_tcp(&at(family, 8080)));
                assert!(answer.is_some_and(|answer| answer.starts_with("heir")), "{other:?}, {:?}", world.backend);
            }
            heir.leave();
            dead.leave();
        }
    });
}

/// In the family without a mapping, a container has an empty chain for the CHECK of Go's plugin.
#[test]
fn the_empty_chain_of_a_living_container_is_kept() {
    each(&IPTABLES, |world| {
        let mapping =
            |host_ip: &str| json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": host_ip}]);
        let holder = world.mapped(mapping("0.0.0.0"));
        let before = world.rules();
        world.mapped(mapping("::")).leave();
        assert_eq!(world.rules(), before);
        holder.leave();
    });
}
