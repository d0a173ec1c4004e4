//! A container's rules in each backend: damage, undo, DEL without `prevResult`, GC, isolation.

use cni_testkit::{Attachment, bin_dir, probe, require};
use conformance::patched;
use serde_json::{Value, json};

use super::world::{BACKENDS, Backend, IPTABLES, Pod, World, chain, config, each, go, named, naming, rules, shell};

#[track_caller]
fn del_without_result(pod: &Pod<'_>, config: &Value) {
    pod.invocation(&bin_dir(), "DEL", config, None).run().success();
}

#[test]
fn del_without_prev_result_removes_the_rules() {
    each(&BACKENDS, |world| {
        for policy in ["open", "isolated"] {
            let config = config(world, json!({"ingressPolicy": policy}));
            let (pod, other) = (world.dual(), world.dual());
            pod.add(&config).success();
            other.add(&config).success();
            let kept = naming(world, &other);
            assert!(naming(world, &pod) > 0 && kept > 0, "{:?} {:#?}", world.backend, rules(world));
            del_without_result(&pod, &json!({"cniVersion": "1.0.0", "name": "net1", "type": "firewall"}));
            assert_eq!((naming(world, &pod), naming(world, &other)), (0, kept), "{:?}", world.backend);
            other.check(&config).success();
            del_without_result(&other, &config);
            let left = rules(world);
            assert!(!left.iter().any(|rule| rule.contains("\"br-net1\"") || rule.contains("-i br-net1")), "{left:#?}");
            pod.network.del_with(&pod.result).success();
            other.network.del_with(&other.result).success();
        }
    });
}

#[test]
fn gc_keeps_the_valid_and_other_networks() {
    each(&BACKENDS, |world| {
        let newest = json!({"cniVersion": "1.1.0"});
        let (one, two) = (config(world, newest.clone()), named(world, "net2", newest.clone()));
        let (valid, dead) = (world.dual(), world.dual());
        let other = world.pod(&world.network("net2", &["10.2.0.0/24", "fd00:2::/64"]));
        let add = |pod: &Pod<'_>, config: &Value| {
            let prev = patched(pod.result.clone(), newest.clone());
            pod.invocation(&bin_dir(), "ADD", config, Some(&prev)).run().success();
        };
        add(&valid, &one);
        add(&dead, &one);
        add(&other, &two);
        let before = [&valid, &other].map(|pod| naming(world, pod));
        let gc = |valid: Value| {
            let config = patched(one.clone(), json!({"cni.dev/valid-attachments": valid}));
            let call = world.node.plugin("firewall").command("GC").config(&config);
            call.env("PATH", world.backend.path(&world.node)).run().success();
        };
        gc(json!([{"containerID": valid.container.id, "ifname": "eth0"}]));
        assert_eq!(naming(world, &dead), 0, "{:?} {:#?}", world.backend, rules(world));
        assert_eq!([&valid, &other].map(|pod| naming(world, pod)), before, "{:?}", world.backend);
        gc(json!([]));
        assert_eq!([&valid, &other].map(|pod| naming(world, pod) > 0), [false, true], "{:?}", world.backend);
        let prev = patched(other.result.clone(), newest.clone());
        other.invocation(&bin_dir(), "DEL", &two, Some(&prev)).run().success();
        for pod in [valid, dead, other] {
            pod.network.del_with(&pod.result).success();
        }
    });
}

#[test]
fn check_passes_after_add_and_fails_after_any_sabotage() {
    each(&BACKENDS, |world| {
        let config = config(world, json!({"ingressPolicy": "isolated", "acceptMappedPorts": true}));
        let sabotage: &[&str] = match world.backend {
            Backend::Nftables => &[
                "nft flush chain inet cni_firewall forward",
                "nft flush chain inet cni_firewall cni_forward",
                "nft flush chain inet cni_firewall cni_isolation_1",
                "nft flush chain inet cni_firewall cni_isolation_2",
                "nft flush set inet cni_firewall cni_pods4",
                "nft flush set inet cni_firewall cni_pods6",
                "nft flush set inet cni_firewall cni_mapped4",
                "nft delete table inet cni_firewall",
            ],
            _ => &[
                "iptables -w -F FORWARD",
                "ip6tables -w -F FORWARD",
                "iptables -w -F CNI-FORWARD",
                "iptables -w -D CNI-FORWARD 4",
                "ip6tables -w -D CNI-FORWARD 3",
                "ip6tables -w -D CNI-FORWARD 2",
                "iptables -w -D CNI-FORWARD 1",
                "iptables -w -F CNI-ISOLATION-STAGE-1",
                "ip6tables -w -F CNI-ISOLATION-STAGE-2",
                "iptables -w -F; iptables -w -X",
            ],
        };
        let pod = world.dual();
        pod.add(&config).success();
        pod.check(&config).success();
        for script in sabotage {
            shell(world, script);
            let broken = rules(world);
            pod.check(&config).fails_with(101, "");
            assert_eq!(rules(world), broken, "CHECK changes nothing: {script} {:?}", world.backend);
            pod.add(&config).success();
            pod.check(&config).success();
        }
        pod.leave();
    });
}

#[test]
fn no_program_is_run() {
    each(&[Backend::Nftables, Backend::IptablesNft], |world| {
        let config = config(world, json!({"ingressPolicy": "same-bridge"}));
        let (pod, late) = (world.dual(), world.dual());
        world.ran();
        pod.add(&config).success();
        pod.add(&config).success();
        pod.check(&config).success();
        late.add(&config).success();
        pod.check(&config).success();
        late.del(&config).success();
        del_without_result(&pod, &config);
        assert_eq!(world.ran(), [""; 0], "{:?}", world.backend);
        late.leave();
        pod.leave();
    });
}

#[test]
fn an_unread_add_undoes_nothing_if_its_rules_were_in_place() {
    each(&BACKENDS, |world| {
        let unheard = |pod: &Pod<'_>, config: &Value| {
            let call = pod.invocation(&bin_dir(), "ADD", config, Some(&pod.result));
            assert_ne!(call.with_closed_stdout().run().status, Some(0));
        };
        let (pod, neighbour) = (world.dual(), world.dual());
        let (isolated, open) = (config(world, json!({"ingressPolicy": "isolated"})), config(world, json!({})));
        neighbour.add(&open).success();
        let sorted = || {
            let mut rules = rules(world);
            rules.sort();
            rules
        };
        unheard(&pod, &isolated);
        assert_eq!(naming(world, &pod), 0, "{:?} {:#?}", world.backend, rules(world));
        pod.add(&open).success();
        let before = sorted();
        unheard(&pod, &open);
        assert_eq!(sorted(), before, "{:?}", world.backend);
        unheard(&pod, &isolated);
        assert_eq!(naming(world, &pod), 0, "{:?} {:#?}", world.backend, rules(world));
        neighbour.check(&open).success();
        neighbour.leave();
        pod.leave();
    });
}

#[test]
fn an_address_of_two_attachments_stays_until_the_last_has_gone() {
    each(&BACKENDS, |world| {
        let (one, two) = (config(world, json!({})), named(world, "net2", json!({})));
        let pod = world.dual();
        pod.add(&one).success();
        pod.add(&two).success();
        pod.del(&one).success();
        pod.check(&two).success();
        pod.del(&two).success();
        assert_eq!(naming(world, &pod), 0, "{:?} {:#?}", world.backend, rules(world));
        pod.leave();
    });
}

/// Go's DEL leaves the record, and Go's ADD of another container with the address writes none.
#[test]
fn gc_keeps_the_rules_of_a_living_container_of_go() {
    require!(probe::go_plugins());
    each(&IPTABLES, |world| {
        let config = config(world, json!({}));
        let pod = world.dual();
        pod.add(&config).success();
        pod.call_by(&go(), "DEL", &config, Some(&pod.result)).success();
        pod.call_by(&go(), "ADD", &config, Some(&pod.result)).success();
        let cached = json!({"kind": "cniCacheV1", "result": pod.result}).to_string();
        let script = "mkdir -p /var/lib/cni/results; printf %s \"$0\" > /var/lib/cni/results/net1-later-eth0";
        world.node.exec(&["sh", "-c", script, &cached]);
        let gc = |valid: Value| {
            let keys = json!({"cniVersion": "1.1.0", "cni.dev/valid-attachments": valid});
            let call = world.node.plugin("firewall").command("GC").config(&patched(config.clone(), keys));
            call.env("PATH", world.backend.path(&world.node)).run().success();
        };
        gc(json!([{"containerID": "later", "ifname": "eth0"}]));
        pod.call_by(&go(), "CHECK", &config, Some(&pod.result)).success();
        assert_eq!(chain(world, "CNI-FW-OWNERS"), [""; 0], "{:?}", world.backend);
        world.node.exec(&["rm", "-r", "/var/lib/cni/results"]);
        pod.call_by(&go(), "DEL", &config, Some(&pod.result)).success();
        pod.leave();
    });
}

#[test]
fn isolation_ends_with_the_last_attachment_that_wants_it() {
    each(&BACKENDS, |world| {
        let isolated = config(world, json!({"ingressPolicy": "isolated"}));
        let open = config(world, json!({"ingressPolicy": "open"}));
        let is_isolated = || {
            let text = rules(world).join("\n");
            text.contains("oifname \"br-net1\" drop") || text.contains("-o br-net1 -m comment")
        };
        let (first, last) = (world.dual(), world.dual());
        first.add(&isolated).success();
        last.add(&isolated).success();
        // The policy of the network goes back to open.
        first.add(&open).success();
        first.check(&open).success();
        assert!(is_isolated(), "{:?}", world.backend);
        last.del(&isolated).success();
        assert!(!is_isolated(), "{:?} {:#?}", world.backend, rules(world));
        last.leave();
        first.leave();
    });
}

#[test]
fn isolation_precedes_forwarding_in_every_order_of_adds() {
    each(&IPTABLES, |world| {
        let isolated = config(world, json!({"ingressPolicy": "same-bridge"}));
        let pod = world.dual();
        pod.add(&isolated).success();
        let stage = "-j CNI-ISOLATION-STAGE-1";
        let comment = r#"-m comment --comment "CNI firewall plugin rules""#;
        // As the Go plugin does if the jump to CNI-FORWARD is missing.
        shell(world, &format!("iptables -w -D FORWARD 2; iptables -w -I FORWARD {comment} -j CNI-FORWARD"));
        assert!(chain(world, "FORWARD")[1].ends_with(stage), "{:?}", chain(world, "FORWARD"));
        pod.check(&isolated).fails_naming(101, &["CNI-ISOLATION-STAGE-1", "before"]);
        let other = world.dual();
        other.add(&config(world, json!({}))).success();
        pod.check(&isolated).success();
        let all = chain(world, "FORWARD");
        assert!(all.len() == 4 && all[0].ends_with(stage), "{:?} {all:?}", world.backend);
        shell(world, &format!("iptables -w -D FORWARD 2; iptables -w -I FORWARD {comment} -j CNI-FORWARD"));
        let gc = patched(
            isolated.clone(),
            json!({"cniVersion": "1.1.0", "cni.dev/valid-attachments":
            [{"containerID": pod.container.id, "ifname": "eth0"}, {"containerID": other.container.id, "ifname": "eth0"}]}),
        );
        let call = world.node.plugin("firewall").command("GC").config(&gc);
        call.env("PATH", world.backend.path(&world.node)).run().success();
        pod.check(&isolated).success();
        other.leave();
        pod.leave();
    });
}

#[test]
fn isolation_behind_ptp_is_refused_before_any_change() {
    each(&BACKENDS, |world| {
        let network = patched(world.network("net1", &["10.1.0.0/24"]), json!({"type": "ptp"}));
        let pod = world.pod(&network);
        let before = rules(world);
        for policy in ["same-bridge", "isolated"] {
            let config = config(world, json!({"ingressPolicy": policy}));
            pod.add(&config).fails_naming(7, &["ingressPolicy", policy, "veth", "bridge"]);
        }
        assert_eq!(rules(world), before, "{:?}", world.backend);
        pod.add(&config(world, json!({}))).success();
        pod.leave();
    });
}

#[test]
fn nftables_is_the_default_where_iptables_is_missing() {
    each(&[Backend::Nftables], |world| {
        let pod = world.dual();
        // On this node alone.
        let nothing = world.node.file("nothing", "");
        for program in ["xtables-nft-multi", "xtables-legacy-multi"] {
            let path = format!("/usr/sbin/{program}");
            if std::path::Path::new(&path).exists() {
                world.node.exec(&["mount", "--bind", nothing.to_str().unwrap(), &path]);
            }
        }
        let config = config(world, json!({"backend": null}));
        let call = |verb: &str, config: &Value| {
            pod.invocation(&bin_dir(), verb, config, Some(&pod.result)).env("PATH", "/usr/bin:/bin").run()
        };
        // By name it is served too, over netlink.
        let by_name = patched(config.clone(), json!({"backend": "iptables"}));
        call("ADD", &by_name).success();
        call("CHECK", &by_name).success();
        call("DEL", &by_name).success();
        call("ADD", &config).success();
        assert!(naming(world, &pod) > 0, "{:#?}", rules(world));
        call("CHECK", &config).success();
        call("DEL", &config).success();
        assert_eq!(naming(world, &pod), 0, "{:#?}", rules(world));
        pod.leave();
    });
}

#[test]
fn status_asks_the_backend_and_the_chain() {
    each(&BACKENDS, |world| {
        let newest = json!({"cniVersion": "1.1.0"});
        let status = |config: &Value| {
            let call = world.node.plugin("firewall").command("STATUS").config(config);
            call.env("PATH", world.backend.path(&world.node)).run()
        };
        status(&config(world, newest.clone())).success();
        if world.backend == Backend::Nftables {
            let missing = patched(config(world, newest), json!({"nftablesChain": "inet none forward"}));
            status(&missing).fails_naming(50, &["inet none forward"]);
        }
    });
}

#[test]
fn an_administrators_chain_gets_a_jump_to_the_rules() {
    each(&[Backend::Nftables], |world| {
        shell(
            world,
            "nft 'add table inet site; add chain inet site gate { type filter hook forward priority 0; policy drop; }'",
        );
        let before = world.node.ruleset();
        let own = config(world, json!({}));
        let pod = world.dual();
        let added = pod.add(&own);
        added.success();
        assert!(
            added.stderr.contains("inet site gate drops") && added.stderr.contains("nftablesChain"),
            "{}",
            added.report()
        );
        let theirs = config(world, json!({"nftablesChain": "inet site gate"}));
        let added = pod.add(&theirs);
        added.success();
        assert!(!added.stderr.contains("drops"), "{}", added.report());
        pod.check(&theirs).success();
        assert!(world.node.exec(&["nft", "list", "chain", "inet", "site", "gate"]).contains("jump cni_forward"));
        assert!(!world.node.exec(&["nft", "list", "table", "inet", "cni_firewall"]).contains("net1"));
        pod.leave();
        let missing = config(world, json!({"nftablesChain": "inet site door"}));
        let pod = world.dual();
        pod.add(&missing).fails_naming(7, &["nftablesChain", "inet site door"]);
        pod.leave();
        shell(world, "nft delete table inet cni_firewall; nft delete table inet site");
        assert!(before.contains("table inet site"));
    });
}

/// Runs a list as a runtime does, with the list that Podman ships.
fn podman(world: &World) -> Vec<Value> {
    let base = |kind: &str| json!({"cniVersion": "0.4.0", "name": "podman", "type": kind});
    vec![
        patched(
            world.network("podman", &["10.88.0.0/16"]),
            json!({"cniVersion": "0.4.0", "bridge": "cni-podman0", "isGateway": true, "ipMasq": true, "hairpinMode": true}),
        ),
        patched(
            base("portmap"),
            json!({"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}}),
        ),
        base("firewall"),
        base("tuning"),
    ]
}

#[test]
fn podmans_packaged_list_works_from_add_to_del() {
    each(&IPTABLES, |world| {
        let container = world.node.container();
        let list = podman(world);
        let path = world.backend.path(&world.node);
        let mut prev: Option<Value> = None;
        let attachment = |config: &Value| Attachment::new(&world.node, &container, config.clone());
        for config in &list {
            prev = Some(attachment(config).invocation("ADD", prev.as_ref()).env("PATH", &path).run().success());
        }
        for config in &list {
            attachment(config).invocation("CHECK", prev.as_ref()).env("PATH", &path).run().success();
        }
        assert_eq!(chain(world, "CNI-FORWARD").len(), 3, "{:?}", rules(world));
        for config in list.iter().rev() {
            attachment(config).invocation("DEL", prev.as_ref()).env("PATH", &path).run().success();
        }
    });
}
