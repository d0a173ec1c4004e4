//! Mappings: repeated, damaged, partial, concurrent and occupied, in every version, and their cost.

use cni_testkit::{Attachment, bin_dir, probe, program, require};
use conformance::{VERSIONS, patched};
use serde_json::{Value, json};

use super::undo::lines;
use super::world::{BACKENDS, Backend, IN_VAIN, IPTABLES, Pod, World, ask_tcp, ask_tcp_for, at, each, map};

fn one() -> Value {
    json!([map(8080, 80, "tcp")])
}

fn shell(world: &World, script: &str) {
    let path = format!("PATH={}", world.backend.path(&world.node));
    world.node.exec(&["env", &path, "sh", "-ec", script]);
}

#[test]
fn the_result_is_the_one_before_and_every_version_is_spoken() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    for version in VERSIONS {
        let container = world.node.container();
        let network = patched(world.network("net1", &["10.1.0.0/24"]), json!({"cniVersion": version}));
        let bridge = Attachment::new(&world.node, &container, network);
        let prev = bridge.add().success();
        let config = patched(world.config(one()), json!({"cniVersion": version}));
        let portmap = bridge.clone().config(config);
        let result = portmap.add_after(&prev).success();
        assert_eq!(result, prev, "{version}");
        if version >= "0.4.0" {
            portmap.check(&prev).success();
        }
        portmap.del_with(&prev).success();
        bridge.del_with(&prev).success();
    }
}

#[test]
fn without_mappings_the_result_is_passed_on_and_nothing_is_done() {
    each(&BACKENDS, |world| {
        let pod = world.dual();
        let before = world.rules();
        for config in [json!(null), json!({}), json!({"portMappings": null}), json!({"portMappings": []})] {
            let config = patched(world.config(json!([])), json!({"runtimeConfig": config}));
            assert_eq!(pod.add(&config).success(), pod.result);
            pod.check(&config).success();
            pod.del(&config).success();
            let no_backend = patched(config, json!({"backend": null}));
            assert_eq!(pod.add(&no_backend).success(), pod.result);
        }
        assert_eq!((world.rules(), world.ran()), (before, vec![]), "{:?}", world.backend);
        pod.leave();
    });
}

#[test]
fn a_second_add_changes_nothing_and_a_second_del_finds_nothing() {
    each(&BACKENDS, |world| {
        let config = world.config(json!([map(8080, 80, "tcp"), map(8081, 81, "udp"), map(8080, 82, "sctp")]));
        let pod = world.dual();
        pod.add(&config).success();
        let rules = world.rules();
        world.ran();
        pod.add(&config).success();
        assert_eq!(world.rules(), rules, "{:?}", world.backend);
        assert!(!world.ran().iter().any(|program| program.contains("restore")), "nothing is written");
        let changed = world.config(json!([map(9090, 80, "tcp")]));
        pod.add(&changed).success();
        pod.check(&changed).success();
        pod.check(&config).failure();
        assert!(!world.rules().contains("8080"), "{:?}\n{}", world.backend, world.rules());
        for _ in 0..2 {
            pod.del(&config).success();
            let left = world.rules();
            assert!(!left.contains("9090") && !left.contains("CNI-DN-"), "{:?}\n{left}", world.backend);
        }
        pod.leave();
    });
}

#[test]
fn check_passes_after_add_and_fails_after_any_sabotage() {
    each(&BACKENDS, |world| {
        let config = world.config(one());
        let nft = world.backend == Backend::Nftables;
        let mut sabotage = vec!["sysctl -qw net.ipv4.conf.br-net1.route_localnet=0"];
        if nft {
            sabotage.extend([
                "nft flush chain ip cni_hostport hostports",
                "nft flush chain ip6 cni_hostport hostports",
                "nft flush chain ip cni_hostport masquerading",
                "nft flush chain ip cni_hostport prerouting",
                "nft flush chain ip6 cni_hostport output",
                "nft flush chain ip cni_hostport hostports_all",
                "nft flush ruleset",
            ]);
        } else {
            sabotage.extend([
                "iptables -w -t nat -F PREROUTING",
                "ip6tables -w -t nat -F OUTPUT",
                "iptables -w -t nat -F POSTROUTING",
                "iptables -w -t nat -F CNI-HOSTPORT-DNAT",
                "ip6tables -w -t nat -F CNI-HOSTPORT-SETMARK",
                "iptables -w -t nat -F CNI-HOSTPORT-MASQ",
                "c=$(ip6tables -w -t nat -S | grep -o 'CNI-DN-[0-9a-f]*' | head -1); ip6tables -w -t nat -F $c",
            ]);
        }
        let pod = world.dual();
        pod.add(&config).success();
        pod.check(&config).success();
        let whole = lines(world);
        for script in sabotage {
            shell(world, script);
            pod.check(&config).failure();
            pod.add(&config).success();
            pod.check(&config).success();
            assert_eq!(lines(world), whole, "every rule is there once: {:?} {script}", world.backend);
        }
        for wrong in [map(8081, 80, "tcp"), map(8080, 81, "tcp"), map(8080, 80, "udp")] {
            pod.check(&world.config(json!([wrong]))).failure();
        }
        pod.check(&world.config(json!([map(8080, 80, "tcp"), map(8081, 80, "tcp")]))).failure();
        pod.del(&config).success();
        pod.check(&config).fails_with(3, "");
        pod.leave();
    });
}

#[test]
fn check_passes_with_conditions_on_the_host_address() {
    each(&BACKENDS, |world| {
        let dialects: &[&str] = match world.backend {
            Backend::Nftables => &["ip daddr 192.0.2.1", "ct state new ip daddr 192.0.2.1"],
            _ => &["-d 192.0.2.1"],
        };
        let pod = world.dual();
        for condition in dialects {
            let words: Vec<&str> = condition.split(' ').collect();
            let config = patched(world.config(one()), json!({"conditionsV4": words}));
            for _ in 0..2 {
                pod.add(&config).success();
                pod.check(&config).success();
            }
            pod.check(&patched(world.config(json!([map(8081, 80, "tcp")])), json!({"conditionsV4": words}))).failure();
            pod.del(&config).success();
            pod.check(&config).fails_with(3, "");
        }
        pod.leave();
    });
}

#[test]
fn a_foreign_jump_with_more_matches_is_not_the_shared_jump() {
    each(&IPTABLES, |world| {
        let first = world.mapped(one());
        first.serve_tcp(80, "first");
        // The plugins do not decode matches that they never write; otherwise this rule equals the
        // shared one.
        let shared = "-m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT";
        shell(world, &format!("iptables -w -t nat -I PREROUTING -m physdev --physdev-in nowhere {shared}"));
        let second = world.dual();
        second.add(&world.config(json!([map(8081, 80, "tcp")]))).success();
        assert!(world.client.enter(|| ask_tcp(&at(0, 8080))).is_some(), "{:?}\n{}", world.backend, world.rules());
        shell(world, &format!("iptables -w -t nat -D PREROUTING {shared}"));
        first.check(&world.config(one())).fails_naming(101, &["PREROUTING"]);
        first.leave();
        second.leave();
    });
}

#[test]
fn nftables_is_the_default_where_iptables_does_not_work() {
    require!(Backend::Nftables.probe());
    require!(Backend::IptablesNft.probe());
    for broken in [&["iptables", "ip6tables"][..], &["ip6tables"]] {
        let world = World::new(Backend::Nftables);
        let pod = world.dual();
        pod.serve_tcp(80, "pod");
        // As iptables-legacy on a kernel without its tables.
        let bin = world.node.dir().join("broken");
        let script = "#!/bin/sh\ncase \"$*\" in *--version*) echo 'iptables v1.8.9 (legacy)'; exit;; esac\n\
                      cat >/dev/null\necho \"can't initialize iptables table\" >&2\nexit 3\n";
        program::script(bin.join("xtables-legacy-multi"), script);
        for name in broken.iter().flat_map(|name| ["", "-save", "-restore"].map(|job| format!("{name}{job}"))) {
            std::os::unix::fs::symlink("xtables-legacy-multi", bin.join(name)).unwrap();
        }
        let path = format!("{}:{}", bin.display(), world.backend.path(&world.node));
        let config = patched(world.config(one()), json!({"cniVersion": "1.1.0", "backend": null}));
        let prev = patched(pod.result.clone(), json!({"cniVersion": "1.1.0"}));
        let call =
            |verb: &str, config: &Value| pod.invocation(&bin_dir(), verb, config, Some(&prev)).env("PATH", &path).run();
        let asked = patched(config.clone(), json!({"backend": "iptables"}));
        call("ADD", &asked).fails_naming(100, &["initialize"]);
        world.node.plugin("portmap").command("STATUS").config(&config).env("PATH", &path).run().success();
        let added = call("ADD", &config);
        added.success();
        assert!(added.stderr.contains("nftables is used, because iptables does not work"), "{}", added.report());
        for family in [0, 1] {
            assert!(world.client.enter(|| ask_tcp(&at(family, 8080))).is_some(), "{broken:?}\n{}", world.rules());
        }
        assert!(!world.rules().contains("CNI-DN-"), "{broken:?}\n{}", world.rules());
        call("CHECK", &config).success();
        call("DEL", &config).success();
        assert!(!world.rules().contains("8080"), "{broken:?}\n{}", world.rules());
        pod.leave();
    }
}

#[test]
fn an_add_with_unread_result_leaves_nothing() {
    each(&BACKENDS, |world| {
        let pod = world.dual();
        let call = pod.invocation(&bin_dir(), "ADD", &world.config(one()), Some(&pod.result));
        assert_ne!(call.with_closed_stdout().run().status, Some(0));
        assert!(!world.rules().contains("8080"), "{:?}\n{}", world.backend, world.rules());
        pod.leave();
    });
}

#[test]
fn fifty_concurrent_first_adds_create_each_rule_once() {
    each(&BACKENDS, |world| {
        let count = u16::try_from(cni_testkit::crowd(50)).unwrap();
        // Handwritten results, because the test is about portmap's rules only.
        world.node.exec(&["ip", "link", "add", "br9", "type", "bridge"]);
        world.node.exec(&["ip", "address", "add", "10.9.0.1/16", "dev", "br9"]);
        world.node.exec(&["ip", "link", "set", "br9", "up"]);
        let container = world.node.container();
        let crowd: Vec<(Attachment<'_>, Value, u16)> = (1..=count)
            .map(|number| {
                let config = world.config(json!([map(9000 + number, 80, "tcp")]));
                let mut attachment = Attachment::new(&world.node, &container, config);
                attachment.id = format!("crowd-{number}");
                let ips =
                    json!([{"address": format!("10.9.1.{number}/16")}, {"address": format!("fd00:9::{number}/64")}]);
                (attachment, json!({"cniVersion": "1.0.0", "ips": ips}), number)
            })
            .collect();
        let path = world.backend.path(&world.node);
        let all = |verb: &str| {
            let start = |(attachment, prev, _): &(Attachment<'_>, Value, u16)| {
                attachment.invocation(verb, Some(prev)).env("PATH", &path).start()
            };
            let mut started: Vec<_> = crowd.iter().map(start).collect();
            started.iter_mut().for_each(cni_testkit::Started::release);
            started.into_iter().for_each(|started| drop(started.finish().success()));
        };
        all("ADD");
        let rules = world.rules();
        for (attachment, prev, number) in &crowd {
            attachment.invocation("CHECK", Some(prev)).env("PATH", &path).run().success();
            let dnats = [format!(":9::{number}]:80"), format!("10.9.1.{number}:80")];
            for dnat in dnats {
                assert_eq!(rules.matches(&dnat).count(), 1, "{dnat} {:?}\n{rules}", world.backend);
            }
        }
        let shared: &[&str] = match world.backend {
            Backend::Nftables => &["fib daddr type local jump hostports_all", "jump hostip_hostports"],
            _ => &["--dst-type LOCAL -j CNI-HOSTPORT-DNAT", "-j CNI-HOSTPORT-MASQ", "-j MASQUERADE", "-j MARK"],
        };
        for (rule, times) in shared.iter().zip(if shared.len() == 2 { [4, 2, 0, 0] } else { [4, 2, 2, 2] }) {
            assert_eq!(rules.matches(rule).count(), times, "{rule} {:?}\n{rules}", world.backend);
        }
        all("DEL");
        let left = world.rules();
        assert!(!left.contains("crowd-") && !left.contains("CNI-DN-"), "{:?}\n{left}", world.backend);
    });
}

#[test]
fn a_port_of_a_live_container_is_refused_before_any_change() {
    each(&BACKENDS, |world| {
        let holder = world.mapped(one());
        let late = world.dual();
        let before = world.rules();
        let failure = late.add(&world.config(one())).fails_naming(102, &[&holder.container.id, "8080"]);
        assert_eq!(world.rules(), before, "{:?} {failure:?}", world.backend);
        let on = json!([{"hostPort": 8080, "containerPort": 80, "hostIP": "192.0.2.1"}]);
        late.add(&world.config(on)).fails_with(102, "");
        late.add(&world.config(json!([map(8080, 80, "udp")]))).success();
        let ignoring = patched(world.config(one()), json!({"portConflict": "ignore"}));
        late.add(&ignoring).success();
        late.leave();
        holder.leave();
    });
}

#[test]
fn a_port_of_a_container_that_is_gone_is_taken_over() {
    each(&BACKENDS, |world| {
        let dead = world.mapped(one());
        // Its DEL was lost; the link, and with it the mark, is gone.
        dead.network.del_with(&dead.result).success();
        let heir = world.dual();
        heir.serve_tcp(80, "heir");
        let outcome = heir.add(&world.config(one()));
        outcome.success();
        heir.check(&world.config(one())).success();
        for family in [0, 1] {
            let answer = world.client.enter(|| ask_tcp(&at(family, 8080)));
            assert!(answer.is_some_and(|answer| answer.starts_with("heir")), "{:?}\n{}", world.backend, world.rules());
        }
        heir.leave();
        dead.leave();
    });
}

#[test]
fn a_port_of_an_unknown_holder_is_mapped_again_with_a_note() {
    each(&BACKENDS, |world| {
        // An attachment by another plugin: no link has its mark.
        let container = world.node.container();
        let stranger = Attachment::new(&world.node, &container, world.config(one()));
        let prev = json!({"cniVersion": "1.0.0", "ips": [{"address": "192.0.2.9/24"}]});
        let path = world.backend.path(&world.node);
        stranger.invocation("ADD", Some(&prev)).env("PATH", &path).run().success();
        let pod = world.dual();
        let outcome = pod.add(&world.config(one()));
        outcome.success();
        assert!(outcome.stderr.contains(&container.id), "{}", outcome.report());
        pod.leave();
        stranger.invocation("DEL", None).env("PATH", &path).run().success();
    });
}

#[test]
fn conditions_beyond_the_subset_go_through_nft() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let pod = world.dual();
    pod.serve_tcp(80, "pod");
    let conditions = json!({"conditionsV4": ["ip", "saddr", "{ 192.0.2.9, 192.0.2.10 }", "ct", "state", "new"]});
    let config = patched(world.config(one()), conditions);
    // A repeated ADD replaces the rules.
    for _ in 0..2 {
        pod.add(&config).success();
        assert_eq!(world.ran(), ["nft"]);
        pod.check(&config).success();
        assert_eq!(world.rules().matches("tcp dport 8080 dnat to 10.1.0.2:80").count(), 1, "{}", world.rules());
    }
    shell(&world, "nft flush chain ip cni_hostport prerouting");
    pod.check(&config).fails_naming(101, &["prerouting lacks a jump"]);
    pod.add(&config).success();
    pod.check(&config).success();
    assert!(world.client.enter(|| ask_tcp(&at(0, 8080))).is_some());
    assert!(world.node.enter(|| ask_tcp_for(IN_VAIN, &at(0, 8080))).is_none(), "192.0.2.1 is not among them");
    // Another attachment of the container has a mapping of the same kind; each takes its own.
    let plain = patched(world.network("net2", &["10.2.0.0/24"]), json!({"isDefaultGateway": false}));
    let second = pod.also(&plain, "eth1");
    let other =
        patched(config.clone(), json!({"name": "net2", "runtimeConfig": {"portMappings": [map(8081, 80, "tcp")]}}));
    second.add(&other).success();
    pod.call_by(&bin_dir(), "DEL", &patched(config.clone(), json!({"runtimeConfig": null})), None).success();
    assert!(!world.rules().contains("8080") && world.rules().contains("8081"), "{}", world.rules());
    second.check(&other).success();
    for (network, remains) in [("net1", true), ("net2", false)] {
        let newest = patched(other.clone(), json!({"name": network, "cniVersion": "1.1.0"}));
        Attachment::new(&world.node, &pod.container, newest).gc(&[]).success();
        assert_eq!(world.rules().contains("8081"), remains, "GC of {network}: {}", world.rules());
    }
    second.leave();
    let broken = patched(config, json!({"conditionsV4": ["ip saddr nonsense:"]}));
    pod.add(&broken).fails_naming(7, &["nonsense:"]);
    assert!(!world.rules().contains(&pod.container.id), "{}", world.rules());
    pod.leave();
}

#[test]
fn without_any_iptables_nf_tables_works_and_del_never_fails() {
    require!(Backend::Nftables.probe());
    // An empty PATH does not hide the system's folders, so this is about existing rules, not about
    // installed programs.
    let world = World::new(Backend::Nftables);
    let pod = world.mapped(one());
    let path = world.node.dir().join("empty");
    std::fs::create_dir(&path).unwrap();
    let config = patched(world.config(one()), json!({"runtimeConfig": null, "backend": null}));
    pod.invocation(&bin_dir(), "DEL", &config, None).env("PATH", &path).run().success();
    assert!(!world.rules().contains("8080"));
    pod.leave();
}

#[test]
fn programs_run_with_iptables_legacy_alone() {
    each(&IPTABLES, |world| {
        let (pod, config) = (world.dual(), world.config(one()));
        let legacy = world.backend == Backend::IptablesLegacy;
        world.ran();
        // Of the older one its programs alone can tell what is there: a save for each family before
        // anything else.
        for (step, older) in [("ADD", 2), ("ADD", 2), ("CHECK", 2), ("DEL", 4), ("DEL", 2)] {
            pod.call_by(&bin_dir(), step, &config, Some(&pod.result)).success();
            let ran = world.ran();
            assert_eq!(ran.len(), if legacy { older } else { 0 }, "{step} {:?}: {ran:?}", world.backend);
        }
        pod.leave();
    });
}

#[test]
fn status_says_whether_a_backend_can_be_used() {
    each(&BACKENDS, |world| {
        let config = patched(world.config(one()), json!({"cniVersion": "1.1.0", "runtimeConfig": null}));
        let before = world.rules();
        let call = |config: &Value| {
            let call = world.node.plugin("portmap").command("STATUS").config(config);
            call.env("PATH", world.backend.path(&world.node)).run()
        };
        call(&config).success();
        call(&patched(config.clone(), json!({"backend": null}))).success();
        if world.backend == Backend::Nftables {
            assert_eq!(world.rules(), before, "nothing is left");
        }
        call(&patched(config, json!({"markMasqBit": 77}))).fails_with(50, "");
    });
}

#[test]
fn a_node_with_both_kinds_of_pods_serves_both() {
    require!(probe::go_plugins());
    each(super::world::shared(), |world| {
        let pods: Vec<Pod<'_>> = (0..2).map(|_| world.dual()).collect();
        let by_go = world.config(json!([map(8081, 80, "tcp")]));
        pods[1].call_by(&super::world::go(), "ADD", &by_go, Some(&pods[1].result)).success();
        pods[0].add(&world.config(one())).success();
        for (pod, port) in pods.iter().zip([8080, 8081]) {
            pod.serve_tcp(80, "pod");
            assert!(world.client.enter(|| ask_tcp(&at(0, port))).is_some(), "{port} {:?}", world.backend);
        }
        pods.iter().for_each(Pod::leave);
    });
}
