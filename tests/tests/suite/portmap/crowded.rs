//! A node with many mappings: a call reads what belongs to its own attachment, finds what other
//! programs have changed, and leaves nothing after a kill.

use std::fmt::Write as _;

use cni_testkit::trace::{self, Act, Plan, Traced};
use cni_testkit::{Outcome, require};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::world::{Backend, Pod, World, each, go, map};

const BACKENDS: [Backend; 2] = [Backend::Nftables, Backend::IptablesNft];

/// More containers than a chain without an index has.
const MANY: usize = 100;

/// Writes the mappings of this many containers, with addresses that no pod has, and lets an ADD and
/// a DEL by the plugin follow, after which the chains have an index.
fn fill(world: &World, count: usize) {
    let first = world.mapped(json!([map(7000, 80, "tcp")]));
    let (mut nft, mut restore) = (String::new(), String::from("*nat\n"));
    let mut jumps = String::new();
    for i in 0..count {
        let (port, to) = (20000 + i, format!("10.77.{}.{}", i / 250, i % 250 + 2));
        let _ = writeln!(
            nft,
            "add rule ip cni_hostport hostports tcp dport {port} dnat to {to}:80 comment \"other{i}\"\n\
             add rule ip cni_hostport masquerading ip saddr {to} ip daddr {to} masquerade comment \"other{i}\""
        );
        let chain = format!("CNI-DN-{i:021x}");
        let _ = writeln!(restore, ":{chain} - [0:0]");
        let _ = writeln!(
            jumps,
            "-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment \"dnat name: \\\"far\\\" id: \\\"other{i}\\\"\" \
             -m multiport --dports {port} -j {chain}\n\
             -A {chain} -m comment --comment cni:far/other{i}/eth0\n\
             -A {chain} -p tcp -m tcp --dport {port} -j DNAT --to-destination {to}:80"
        );
    }
    match world.backend {
        Backend::Nftables => {
            let file = world.node.file("rules", nft);
            world.node.exec(&["nft", "-f", file.to_str().unwrap()]);
        }
        _ => {
            let file = world.node.file("rules", restore + &jumps + "COMMIT\n");
            world.node.exec(&["xtables-nft-multi", "iptables-restore", "-n", file.to_str().unwrap()]);
        }
    }
    // The first ADD writes the index.
    let second = world.mapped(json!([map(7001, 80, "tcp")]));
    assert_eq!(indexes(world), if world.backend == Backend::Nftables { 2 } else { 1 });
    first.leave();
    second.leave();
}

/// Removes the mappings that [`fill`] has written.
fn clear(world: &World, count: usize) {
    match world.backend {
        Backend::Nftables => {
            for chain in ["hostports", "masquerading"] {
                world.node.exec(&["nft", "flush", "chain", "ip", "cni_hostport", chain]);
            }
        }
        _ => {
            let mut restore = String::from("*nat\n-F CNI-HOSTPORT-DNAT\n");
            for i in 0..count {
                let _ = writeln!(restore, "-F CNI-DN-{i:021x}\n-X CNI-DN-{i:021x}");
            }
            let file = world.node.file("rules", restore + "COMMIT\n");
            world.node.exec(&["xtables-nft-multi", "iptables-restore", "-n", file.to_str().unwrap()]);
        }
    }
}

/// Returns the number of files with an index.
fn indexes(world: &World) -> usize {
    let list = world.node.exec(&["sh", "-c", "ls /run/cni | grep ^rules- || true"]);
    assert!(!list.contains("tmp"), "{list}");
    list.lines().count()
}

/// Runs `verb`, killed at this call.
fn killed_at(pod: &Pod<'_>, verb: &str, config: &Value, at: u64) -> Traced {
    let plan = Plan { victim: "portmap".to_owned(), at, act: Act::Signal(Signal::SIGKILL) };
    pod.invocation(&cni_testkit::bin_dir(), verb, config, Some(&pod.result)).traced(&plan)
}

/// Returns the numbers of datagrams that ADD, CHECK and DEL receive.
fn received(world: &World, port: u16) -> [usize; 3] {
    let pod = world.dual();
    let config = world.config(json!([map(port, 80, "tcp"), map(port, 80, "udp")]));
    let counts = ["ADD", "CHECK", "DEL"].map(|verb| {
        let traced = killed_at(&pod, verb, &config, u64::MAX);
        traced.outcome.success();
        traced.all.iter().filter(|hit| hit.call == "recvfrom").count()
    });
    pod.leave();
    counts
}

#[test]
fn a_call_reads_as_much_on_a_full_node_as_on_an_empty_one() {
    require!(trace::supported());
    each(&BACKENDS, |world| {
        received(world, 8080);
        let empty = received(world, 8080);
        fill(world, 1000);
        let full = received(world, 8080);
        for (empty, full) in empty.into_iter().zip(full) {
            // A list of 1,000 rules is 10 datagrams or more, and each call reads two.
            assert!(full <= empty + 9, "{:?}: {full} datagrams, {empty} on the empty node", world.backend);
        }
        clear(world, 1000);
    });
}

/// One socket for the rules of the attachment, and one for the route to its address.
#[test]
fn check_reads_rules_that_are_in_place_once() {
    require!(trace::supported());
    each(&BACKENDS, |world| {
        let (pod, config) = (world.dual(), world.config(json!([map(8080, 80, "tcp")])));
        pod.add(&config).success();
        let traced = killed_at(&pod, "CHECK", &config, u64::MAX);
        traced.outcome.success();
        let sockets = traced.all.iter().filter(|hit| hit.call == "socket").count();
        assert!(sockets <= 2, "{:?}: {sockets} sockets", world.backend);
        pod.leave();
    });
}

#[test]
fn a_long_chain_gets_the_rules_in_the_order_of_a_short_one() {
    each(&BACKENDS, |world| {
        let pod = world.dual();
        let config = world.config(json!([map(8082, 80, "tcp"), map(8080, 80, "udp"), map(8081, 80, "tcp")]));
        let order = || {
            pod.add(&config).success();
            let all = world.rules();
            pod.del(&config).success();
            all.lines().filter(|line| line.contains("808")).map(str::to_owned).collect::<Vec<String>>()
        };
        let in_short_chain = order();
        assert!(in_short_chain.len() > 3, "{in_short_chain:?}");
        fill(world, MANY);
        assert_eq!(order(), in_short_chain, "{:?}", world.backend);
        pod.leave();
        clear(world, MANY);
    });
}

/// The number of rules is the same as before, but one is another container's. Go removes the last
/// rule of the chain, or the one before it.
#[test]
fn a_port_that_go_has_given_away_meanwhile_is_found() {
    require!(cni_testkit::probe::go_nftables());
    each(&BACKENDS, |world| {
        fill(world, MANY);
        // Only IPv4: the chains of IPv6 are short, and are read whole.
        let mapping =
            |port: u16| json!([{"hostPort": port, "containerPort": 80, "protocol": "tcp", "hostIP": "0.0.0.0"}]);
        let config = |port| world.config(mapping(port));
        let by_go =
            |pod: &Pod<'_>, verb, port| -> Outcome { pod.call_by(&go(), verb, &config(port), Some(&pod.result)) };
        for gone_is_last in [true, false] {
            let (gone, kept, holder, late) = (world.dual(), world.dual(), world.dual(), world.dual());
            gone.add(&config(8081)).success();
            if !gone_is_last {
                kept.add(&config(8083)).success();
            }
            by_go(&gone, "DEL", 8081).success();
            by_go(&holder, "ADD", 8080).success();
            let before = world.rules();
            // In nftables Go's rule does not name the network, so only a note names the holder.
            let outcome = late.add(&config(8080));
            let said = outcome.stderr.clone() + &outcome.stdout;
            assert!(said.contains("8080") && said.contains(&holder.container.id), "{}", outcome.report());
            late.del(&config(8080)).success();
            assert_eq!(world.rules(), before, "{:?}", world.backend);
            late.add(&config(8082)).success();
            late.check(&config(8082)).success();
            for pod in [late, holder, kept, gone] {
                pod.leave();
            }
        }
        clear(world, MANY);
    });
}

/// The number of rules shows it.
#[test]
fn a_rule_that_was_inserted_by_hand_is_found() {
    each(&[Backend::Nftables], |world| {
        fill(world, MANY);
        let mapping = "tcp dport 8080 dnat to 10.77.9.9:80 comment \"by-hand\"";
        world.node.exec(&["nft", &format!("insert rule ip cni_hostport hostports {mapping}")]);
        let late = world.dual();
        let outcome = late.add(&world.config(json!([map(8080, 80, "tcp")])));
        assert!(outcome.stderr.contains("by-hand"), "{}", outcome.report());
        late.leave();
        clear(world, MANY);
    });
}

/// As after a switch to Go and back.
#[test]
fn rules_that_the_other_plugins_made_are_checked_and_deleted() {
    require!(cni_testkit::probe::go_nftables());
    each(&BACKENDS, |world| {
        fill(world, MANY);
        let before = world.rules();
        let (ours, theirs) = (world.dual(), world.dual());
        let config = |port| world.config(json!([map(port, 80, "tcp")]));
        theirs.call_by(&go(), "ADD", &config(8081), Some(&theirs.result)).success();
        ours.add(&config(8080)).success();
        theirs.check(&config(8081)).success();
        theirs.del(&config(8081)).success();
        ours.call_by(&go(), "CHECK", &config(8080), Some(&ours.result)).success();
        ours.call_by(&go(), "DEL", &config(8080), Some(&ours.result)).success();
        ours.leave();
        theirs.leave();
        assert_eq!(world.rules(), before, "{:?}", world.backend);
        clear(world, MANY);
    });
}

#[test]
fn the_index_of_a_chain_that_has_become_short_is_removed() {
    each(&[Backend::Nftables], |world| {
        let ports: Vec<Value> = (7000..7080).map(|port| map(port, 80, "tcp")).collect();
        let first = world.mapped(json!(ports));
        let second = world.mapped(json!([map(8080, 80, "tcp")]));
        assert!(indexes(world) > 0);
        first.leave();
        assert_eq!(indexes(world), 0);
        second.leave();
    });
}

#[test]
fn a_damaged_index_hides_no_holder_of_a_port() {
    each(&BACKENDS, |world| {
        fill(world, MANY);
        let holder = world.mapped(json!([map(8080, 80, "tcp")]));
        let late = world.dual();
        let config = world.config(json!([map(8080, 80, "tcp")]));
        for damage in [
            "for f in /run/cni/rules-*; do truncate -s -21 $f; done",
            "for f in /run/cni/rules-*; do : >$f; done",
            "for f in /run/cni/rules-*; do chmod 666 $f; done",
            "for f in /run/cni/rules-*; do rm $f; mkfifo $f; done",
            "for f in /run/cni/rules-*; do rm $f; ln -s /etc/passwd $f; done",
            "for f in /run/cni/rules-*; do rm $f; mkdir $f; done",
        ] {
            world.node.exec(&["sh", "-ec", damage]);
            late.add(&config).fails_naming(102, &[&holder.container.id, "8080"]);
            // The next change writes the file again, except over a folder.
            let next = world.mapped(json!([map(8090, 80, "tcp")]));
            next.leave();
        }
        world.node.exec(&["sh", "-c", "rmdir /run/cni/rules-*"]);
        holder.leave();
        late.leave();
        clear(world, MANY);
    });
}

#[test]
fn a_kill_between_the_rules_and_the_index_leaves_nothing() {
    require!(trace::supported());
    each(&BACKENDS, |world| {
        fill(world, MANY);
        let config = world.config(json!([map(8080, 80, "tcp")]));
        let rules = world.rules();
        for verb in ["ADD", "DEL"] {
            let pod = world.dual();
            if verb == "DEL" {
                pod.add(&config).success();
            }
            let whole = killed_at(&pod, verb, &config, u64::MAX);
            whole.outcome.success();
            // The last transaction, and what follows it.
            let transaction = whole.all.iter().rposition(|hit| hit.call == "sendto").unwrap_or(0);
            for at in transaction.saturating_sub(10)..whole.all.len() {
                let other = world.dual();
                if verb == "DEL" {
                    other.del(&config).success();
                    pod.add(&config).success();
                } else {
                    pod.del(&config).success();
                }
                killed_at(&pod, verb, &config, u64::try_from(at).unwrap() + 1);
                pod.del(&config).success();
                assert_eq!(world.rules(), rules, "{:?}: {verb} killed at call {at}", world.backend);
                other.add(&config).success();
                other.check(&config).success();
                other.leave();
                assert_eq!(world.rules(), rules, "{:?}: {verb} killed at call {at}, and the next", world.backend);
            }
            pod.leave();
        }
        clear(world, MANY);
    });
}
