//! Many concurrent calls, and many foreign rules.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use cni_testkit::{Attachment, Container};
use conformance::{addresses, patched};
use serde_json::{Value, json};

use super::world::{BACKENDS, Backend, World, chain, config, each, rules, shell};

/// Attachments with handwritten results, because the tests are about firewall's rules only.
fn crowd(world: &World, count: usize) -> Vec<(Attachment<'_>, Value)> {
    let container = world.node.container();
    let config = config(world, json!({}));
    let one = |number: usize| {
        let mut attachment = Attachment::new(&world.node, &container, config.clone());
        attachment.id = format!("crowd-{number}");
        let ips = json!([{"address": format!("10.9.1.{number}/16")}, {"address": format!("fd00:9::{number}/64")}]);
        (attachment, json!({"cniVersion": "1.0.0", "ips": ips}))
    };
    (1..=count).map(one).collect()
}

fn call<'n>((attachment, prev): &(Attachment<'n>, Value), verb: &str, path: &str) -> cni_testkit::Invocation<'n> {
    attachment.invocation(verb, Some(prev)).env("PATH", path)
}

/// Runs all at the same time. A call that waited too long for the lock of iptables returns 11 and
/// is repeated, as runtimes do.
fn all(world: &World, crowd: &[(Attachment<'_>, Value)], verb: &str) {
    let path = world.backend.path(&world.node);
    let mut started: Vec<_> = crowd.iter().map(|one| call(one, verb, &path).start()).collect();
    started.iter_mut().for_each(cni_testkit::Started::release);
    let outcomes: Vec<_> = started.into_iter().map(cni_testkit::Started::finish).collect();
    for (one, outcome) in crowd.iter().zip(outcomes) {
        if outcome.status != Some(0) {
            outcome.fails_with(11, "");
            call(one, verb, &path).run().success();
        }
    }
}

/// Asserts that every address has its rules, once.
#[track_caller]
fn complete(world: &World, count: usize) {
    let rules = rules(world);
    for number in 1..=count {
        let (v4, v6) = (format!("10.9.1.{number}"), format!("fd00:9::{number}"));
        let wanted = match world.backend {
            Backend::Nftables => vec![format!("ip saddr {v4} comment"), format!("ip6 saddr {v6} comment")],
            _ => vec![
                format!("-A CNI-FORWARD -s {v4}/32 -j ACCEPT"),
                format!("-A CNI-FORWARD -d {v6}/128 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"),
                format!("-A CNI-FW-OWNERS -s {v6}/128 "),
            ],
        };
        for rule in wanted {
            assert_eq!(rules.iter().filter(|line| line.starts_with(&rule)).count(), 1, "{rule} {rules:#?}");
        }
    }
}

#[test]
fn fifty_adds_beside_a_foreign_writer_lose_no_rule() {
    each(&BACKENDS, |world| {
        let count = cni_testkit::crowd(50);
        let crowd = crowd(world, count);
        let done = AtomicBool::new(false);
        // Creates the programs before two threads would.
        world.backend.path(&world.node);
        thread::scope(|scope| {
            if world.backend != Backend::Nftables {
                // A process that ignores the plugins' lock, as kube-proxy does, at most as often
                // as there are ADDs.
                scope.spawn(|| {
                    for number in 0..count {
                        if done.load(Ordering::Relaxed) {
                            return;
                        }
                        let text = format!(
                            "*filter\\n:FOREIGN - [0:0]\\n-A FOREIGN -s 198.51.100.{number} -j RETURN\\nCOMMIT"
                        );
                        shell(world, &format!("printf '{text}\\n' | iptables-restore --noflush -w 10"));
                    }
                });
            }
            all(world, &crowd, "ADD");
            done.store(true, Ordering::Relaxed);
        });
        complete(world, count);
        if world.backend != Backend::Nftables {
            assert_eq!(chain(world, "FORWARD").len(), 2, "{:?} {:#?}", world.backend, rules(world));
            shell(world, "iptables -w -F FOREIGN; iptables -w -X FOREIGN");
        }
        all(world, &crowd, "DEL");
    });
}

#[test]
fn five_thousand_foreign_rules_stay_as_they_are() {
    each(&BACKENDS, |world| {
        let foreign = match world.backend {
            Backend::Nftables => {
                "(echo 'add table inet site; add chain inet site many'; \
                 for i in $(seq 5000); do echo \"add rule inet site many ip saddr 10.$((i / 250)).7.$((i % 250)) return\"; done) | nft -f -"
            }
            _ => {
                "(echo '*filter'; for i in $(seq 5000); do \
                 echo \"-A FORWARD -s 10.$((i / 250)).7.$((i % 250))/32 -j RETURN\"; done; echo COMMIT) | iptables-restore --noflush"
            }
        };
        shell(world, foreign);
        let before = rules(world).len();
        let crowd = crowd(world, 2);
        for verb in ["ADD", "CHECK", "DEL"] {
            for (attachment, prev) in &crowd {
                let path = world.backend.path(&world.node);
                attachment.invocation(verb, Some(prev)).env("PATH", path).run().success();
            }
        }
        let after = rules(world);
        let foreign = after.iter().filter(|rule| rule.contains(".7.")).count();
        assert!(foreign == 5000 && after.len() >= before, "{foreign}");
        shell(
            world,
            if world.backend == Backend::Nftables { "nft delete table inet site" } else { "iptables -w -F FORWARD" },
        );
    });
}

/// The rules of `nat` and `filter`, of both families.
fn both_tables(world: &World) -> Vec<String> {
    let nat = world.rules();
    let all = rules(world).into_iter().chain(nat.lines().map(str::to_owned));
    all.filter(|line| line.starts_with("-A")).collect()
}

/// Ends the writer, after a failed assertion too.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Rewrites kube-proxy's chains of `nat` and `filter`, 5,000 rules, over and over until `done`.
fn kube_proxy(world: &World, done: &AtomicBool) -> usize {
    let chain = |table: &str, name: &str| {
        let rule =
            |number: usize| format!("-A {name} -d 10.96.{}.{}/32 -p tcp -j RETURN\n", number / 250, number % 250);
        format!("*{table}\n:{name} - [0:0]\n{}COMMIT\n", (0..2500).map(rule).collect::<String>())
    };
    world.node.file("kube", chain("nat", "KUBE-SERVICES") + &chain("filter", "KUBE-FORWARD"));
    let restore = format!("iptables-restore --noflush -w 10 <{}", world.node.dir().join("kube").display());
    let mut rounds = 0;
    while !done.load(Ordering::Relaxed) {
        shell(world, &restore);
        rounds += 1;
    }
    rounds
}

#[test]
fn fifty_lists_of_plugins_work_beside_kube_proxy() {
    each(&[Backend::IptablesNft], |world| {
        let path = world.backend.path(&world.node);
        let network = world.network("net1", &["10.1.0.0/16", "fd00:1::/64"]);
        let network = patched(network, json!({"ipMasq": true, "ipMasqBackend": "iptables"}));
        let pods: Vec<(Container, [Value; 3])> = (0..cni_testkit::crowd(50))
            .map(|number| {
                let ports = json!([{"hostPort": 9000 + number, "containerPort": 80, "protocol": "tcp"}]);
                (world.node.container(), [network.clone(), world.config(ports), config(world, json!({}))])
            })
            .collect();
        let call = |(container, chain): &(Container, [Value; 3]), verb: &str, result: Option<Value>| {
            let mut order = [0, 1, 2];
            if verb == "DEL" {
                order.reverse();
            }
            order.iter().fold(result, |result, at| {
                let attachment = Attachment::new(&world.node, container, chain[*at].clone());
                let printed = attachment.invocation(verb, result.as_ref()).env("PATH", &path).run().success();
                if verb == "ADD" { Some(printed) } else { result }
            })
        };
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let kube = scope.spawn(|| kube_proxy(world, &done));
            let ends = Ends(&done);
            let adds: Vec<_> = pods.iter().map(|pod| scope.spawn(|| call(pod, "ADD", None).unwrap())).collect();
            let results: Vec<Value> = adds.into_iter().map(|add| add.join().unwrap()).collect();
            let rules = both_tables(world);
            for (number, result) in results.iter().enumerate() {
                let [four, six] = &addresses(result)[..] else { panic!("not two addresses: {result}") };
                let (four, six) = (four.split('/').next().unwrap(), six.split('/').next().unwrap());
                for rule in [
                    format!("-A CNI-FORWARD -s {four}/32 -j ACCEPT"),
                    format!("-A CNI-FORWARD -s {six}/128 -j ACCEPT"),
                    format!("--dport {} -j DNAT --to-destination {four}:80", 9000 + number),
                    format!("--dport {} -j DNAT --to-destination [{six}]:80", 9000 + number),
                    format!("-A POSTROUTING -s {four}/32 "),
                    format!("-A POSTROUTING -s {six}/128 "),
                ] {
                    assert_eq!(rules.iter().filter(|line| line.contains(&rule)).count(), 1, "{rule} {rules:#?}");
                }
            }
            let dels = pods.iter().zip(results).map(|(pod, result)| scope.spawn(|| call(pod, "DEL", Some(result))));
            dels.collect::<Vec<_>>().into_iter().for_each(|del| drop(del.join().unwrap()));
            drop(ends);
            assert!(kube.join().unwrap() > 0);
        });
        let left = both_tables(world);
        let of_pods = |line: &&String| ["10.1.", "fd00:1:", "CNI-DN", ":80"].iter().any(|part| line.contains(part));
        assert_eq!(left.iter().filter(of_pods).collect::<Vec<_>>(), [""; 0]);
        assert_eq!(left.iter().filter(|line| line.starts_with("-A KUBE")).count(), 5000);
        shell(world, "for t in nat filter; do iptables -t $t -F; iptables -t $t -X; done");
    });
}
