//! The owner of each rule: attachments of one container, networks, both implementations, GC.

use cni_testkit::{Attachment, bin_dir, probe, require};
use conformance::patched;
use serde_json::{Value, json};

use super::world::{BACKENDS, Backend, IN_VAIN, IPTABLES, Pod, World, ask_tcp, ask_tcp_for, at, each, go, map, shared};

fn without_ports(config: &Value) -> Value {
    patched(config.clone(), json!({"runtimeConfig": null}))
}

/// Returns how often the rules of this backend contain a port of a mapping.
fn mentions(world: &World, port: u16) -> usize {
    world.rules().matches(&format!("dport {port} ")).count()
}

/// Two attachments of one container, one with port 8080 and one with 8081.
fn two<'w>(world: &'w World, networks: [&str; 2]) -> [(Pod<'w>, Value); 2] {
    let network = |name: &str| match name {
        "net1" => world.network("net1", &["10.1.0.0/24", "fd00:1::/64"]),
        other => world.network(other, &["10.2.0.0/24", "fd00:2::/64"]),
    };
    let config = |name: &str, port: u16| patched(world.config(json!([map(port, 80, "tcp")])), json!({"name": name}));
    let first = world.pod(&network(networks[0]));
    // The second one's default routes would contradict the first one's.
    let plain = patched(network(networks[1]), json!({"isDefaultGateway": false, "isGateway": true}));
    let second = first.also(&plain, "eth1");
    let configs = [config(networks[0], 8080), config(networks[1], 8081)];
    first.add(&configs[0]).success();
    second.add(&configs[1]).success();
    let [one, other] = configs;
    [(first, one), (second, other)]
}

#[test]
fn attachments_of_one_container_do_not_disturb_each_other() {
    each(&BACKENDS, |world| {
        for networks in [["net1", "net1"], ["net1", "net2"]] {
            for gone in [0, 1] {
                let world = World::new(world.backend);
                let both = two(&world, networks);
                for (pod, config) in &both {
                    pod.check(config).success();
                }
                let (pod, config) = &both[gone];
                // A DEL with the least possible information.
                pod.call_by(&bin_dir(), "DEL", &without_ports(config), None).success();
                assert_eq!(
                    mentions(&world, [8080, 8081][gone]),
                    0,
                    "{networks:?} {:?}\n{}",
                    world.backend,
                    world.rules()
                );
                let (pod, config) = &both[1 - gone];
                pod.check(config).success();
                let (pod, config) = &both[gone];
                pod.check(config).failure();
                for (pod, _) in &both {
                    pod.leave();
                }
            }
        }
    });
}

#[test]
fn a_del_by_go_removes_only_attachments_with_the_same_key() {
    require!(probe::go_plugins());
    each(shared(), |world| {
        for networks in [["net1", "net1"], ["net1", "net2"]] {
            for gone in [0, 1] {
                let world = World::new(world.backend);
                let both = two(&world, networks);
                let (pod, config) = &both[gone];
                pod.call_by(&go(), "DEL", config, Some(&pod.result)).success();
                assert_eq!(mentions(&world, [8080, 8081][gone]), 0);
                // Go's key is network and container, in nftables only the container.
                let (pod, config) = &both[1 - gone];
                if networks[0] != networks[1] && world.backend != Backend::Nftables {
                    pod.check(config).success();
                }
                for (pod, _) in &both {
                    pod.leave();
                }
            }
        }
    });
}

#[test]
fn rules_of_go_are_checked_and_removed() {
    require!(probe::go_plugins());
    each(shared(), |world| {
        let config = world.config(json!([map(8080, 80, "tcp"), map(8081, 81, "udp")]));
        for prev in ["all", "of IPv4 alone", "none"] {
            let pod = world.dual();
            pod.call_by(&go(), "ADD", &config, Some(&pod.result)).success();
            pod.check(&config).success();
            let v4 = patched(pod.result.clone(), json!({"ips": [pod.result["ips"][0]]}));
            let prev = [("all", &pod.result), ("of IPv4 alone", &v4)].into_iter().find(|(name, _)| *name == prev);
            pod.call_by(&bin_dir(), "DEL", &without_ports(&config), prev.map(|(_, prev)| prev)).success();
            assert!(!world.rules().contains("CNI-DN-"), "{:?}\n{}", world.backend, world.rules());
            assert!(!world.rules().contains(&pod.container.id), "{:?}\n{}", world.backend, world.rules());
            pod.leave();
        }
    });
}

#[test]
fn gos_rules_for_two_interfaces_are_removed_one_by_one() {
    require!(probe::go_plugins());
    each(shared(), |world| {
        // Go asks `ip6tables-legacy -C`, which finds rules that are not there.
        let families = if world.backend == Backend::IptablesLegacy { 1 } else { 2 };
        let network = world.network("net1", &["10.1.0.0/24", "fd00:1::/64"][..families]);
        for (ports, gone) in [([8080, 8081], 0), ([8080, 8081], 1), ([8080, 8080], 0)] {
            let first = world.pod(&network);
            let second = first.also(&patched(network.clone(), json!({"isDefaultGateway": false})), "eth1");
            let pods = [first, second];
            let configs = ports.map(|port| world.config(json!([map(port, 80, "tcp")])));
            for (pod, config) in pods.iter().zip(&configs) {
                pod.call_by(&go(), "ADD", config, Some(&pod.result)).success();
            }
            pods[0].check(&configs[0]).success();
            if ports[0] == ports[1] {
                let address = pods[0].address(0).to_string();
                pods[1].check(&configs[1]).fails_naming(101, &["8080", &address, "before"]);
            }
            let del = |which: usize| {
                let (pod, config) = (&pods[which], without_ports(&configs[which]));
                pod.call_by(&bin_dir(), "DEL", &config, Some(&pod.result)).success();
            };
            del(gone);
            pods[gone].check(&configs[gone]).failure();
            pods[1 - gone].check(&configs[1 - gone]).success();
            del(1 - gone);
            assert!(!world.rules().contains("CNI-DN-"), "{ports:?} {:?}\n{}", world.backend, world.rules());
            let id = &pods[0].container.id;
            assert!(!world.rules().contains(id), "{ports:?} {:?}\n{}", world.backend, world.rules());
            pods.iter().for_each(Pod::leave);
        }
    });
}

/// Go's rules in nftables name only the container.
#[test]
fn a_del_with_ipv4_alone_leaves_gos_other_network() {
    require!(probe::go_nftables());
    let world = World::new(Backend::Nftables);
    let first = world.pod(&world.network("net1", &["10.1.0.0/24"]));
    let plain = json!({"isDefaultGateway": false, "isGateway": true});
    let second = first.also(&patched(world.network("net2", &["10.2.0.0/24", "fd00:2::/64"]), plain), "eth1");
    let config = |name: &str, port: u16| patched(world.config(json!([map(port, 80, "tcp")])), json!({"name": name}));
    let configs = [config("net1", 8080), config("net2", 8081)];
    for (pod, config) in [&first, &second].into_iter().zip(&configs) {
        pod.call_by(&go(), "ADD", config, Some(&pod.result)).success();
    }
    first.call_by(&bin_dir(), "DEL", &without_ports(&configs[0]), Some(&first.result)).success();
    assert_eq!((mentions(&world, 8080), mentions(&world, 8081)), (0, 2), "{}", world.rules());
    second.check(&configs[1]).success();
    second.call_by(&bin_dir(), "DEL", &without_ports(&configs[1]), Some(&second.result)).success();
    assert!(!world.rules().contains(&first.container.id), "{}", world.rules());
    first.leave();
    second.leave();
}

#[test]
fn go_rules_for_an_earlier_address_are_reported() {
    require!(probe::go_plugins());
    each(shared(), |world| {
        let pod = world.pod(&world.network("net1", &["10.1.0.0/24"]));
        let config = world.config(json!([map(8080, 80, "tcp")]));
        let earlier = patched(pod.result.clone(), json!({"ips": [{"address": "10.1.0.99/24", "interface": 2}]}));
        pod.call_by(&go(), "ADD", &config, Some(&earlier)).success();
        let added = pod.add(&config);
        added.success();
        assert!(added.stderr.contains("10.1.0.99"), "{}", added.report());
        pod.check(&config).fails_naming(101, &["8080", "10.1.0.99", "before the requested one"]);
        pod.del(&config).success();
        assert!(!world.rules().contains(&pod.address(0).to_string()), "{:?}\n{}", world.backend, world.rules());
        pod.call_by(&bin_dir(), "DEL", &config, Some(&earlier)).success();
        assert!(!world.rules().contains("CNI-DN-"), "{:?}\n{}", world.backend, world.rules());
        assert!(!world.rules().contains(&pod.container.id), "{:?}\n{}", world.backend, world.rules());
        pod.leave();
    });
}

#[test]
fn go_removes_the_rules_of_this_plugin() {
    require!(probe::go_plugins());
    each(shared(), |world| {
        let pod = world.dual();
        let config = world.config(json!([map(8080, 80, "tcp"), map(8081, 81, "udp")]));
        pod.add(&config).success();
        // Release 1.1.1 looks for IPv4's rules in IPv6, even for its own.
        if probe::go_nftables().is_ok() {
            pod.call_by(&go(), "CHECK", &config, Some(&pod.result)).success();
        }
        pod.call_by(&go(), "DEL", &config, Some(&pod.result)).success();
        assert!(!world.rules().contains("CNI-DN-"), "{:?}\n{}", world.backend, world.rules());
        assert!(!world.rules().contains(&pod.container.id), "{:?}\n{}", world.backend, world.rules());
        pod.leave();
    });
}

/// A port on a host address of one family, for a container with the other one or with both.
fn of_one_family(world: &World, host_ip: &str) -> Value {
    world.config(json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": host_ip}]))
}

#[test]
fn go_checks_and_removes_ports_of_one_family() {
    require!(probe::go_nftables());
    each(shared(), |world| {
        for host_ip in ["192.0.2.1", "0.0.0.0", "2001:db8::1", "::"] {
            for subnets in [&["10.1.0.0/24", "fd00:1::/64"][..], &["10.1.0.0/24"]] {
                let world = World::new(world.backend);
                let pod = world.pod(&world.network("net1", subnets));
                let config = of_one_family(&world, host_ip);
                pod.add(&config).success();
                let rules = world.rules();
                pod.add(&config).success();
                assert_eq!(world.rules(), rules, "{host_ip} {subnets:?} {:?}", world.backend);
                pod.check(&config).success();
                pod.call_by(&go(), "CHECK", &config, Some(&pod.result)).success();
                pod.call_by(&go(), "DEL", &config, Some(&pod.result)).success();
                let rules = world.rules();
                assert!(!rules.contains("CNI-DN-") && !rules.contains(&pod.container.id), "{host_ip}\n{rules}");
                pod.leave();
            }
        }
    });
}

#[test]
fn ports_of_one_family_are_removed_by_del_and_by_gc() {
    require!(probe::go_plugins());
    each(shared(), |world| {
        for by in [go(), bin_dir()] {
            for verb in ["DEL", "GC"] {
                let world = World::new(world.backend);
                let pod = world.dual();
                let config = of_one_family(&world, "0.0.0.0");
                pod.call_by(&by, "ADD", &config, Some(&pod.result)).success();
                pod.check(&config).success();
                // GC leaves Go's rules in nftables, which name no network.
                if verb == "GC" && by == go() && world.backend == Backend::Nftables {
                    pod.del(&config).success();
                }
                let valid = json!({"cniVersion": "1.1.0", "cni.dev/valid-attachments": []});
                let call = if verb == "GC" { patched(config.clone(), valid) } else { without_ports(&config) };
                pod.call_by(&bin_dir(), verb, &call, None).success();
                let rules = world.rules();
                assert!(!rules.contains("CNI-DN-") && !rules.contains(&pod.container.id), "{verb}\n{rules}");
                pod.leave();
            }
        }
    });
}

#[test]
fn an_add_after_gos_adds_no_rule_twice() {
    require!(probe::go_plugins());
    each(shared(), |world| {
        let pod = world.dual();
        let config = world.config(json!([map(8080, 80, "tcp")]));
        pod.call_by(&go(), "ADD", &config, Some(&pod.result)).success();
        pod.add(&config).success();
        pod.check(&config).success();
        // One per family; nftables has two for IPv4 packets of the pod to itself.
        let targets: &[_] = match world.backend {
            Backend::Nftables => &[("dnat to", 2), (" masquerade ", 3), ("jump hostports_all", 4)],
            _ => &[("-j DNAT", 2), ("-j MASQUERADE", 2), ("-j MARK", 2)],
        };
        for (target, number) in targets {
            assert_eq!(world.rules().matches(target).count(), *number, "{target}\n{}", world.rules());
        }
        pod.leave();
    });
}

#[test]
fn rules_of_go_s_nftables_backend_are_checked_and_removed() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let pod = world.pod(&world.network("net1", &["10.1.0.0/24"]));
    let id = &pod.container.id;
    // As v1.9 leaves it, with conditions in the shared chains and every rule doubled by a second
    // ADD.
    let rule = format!("tcp dport 8080 dnat to 10.1.0.2:80 comment \"{id}\"");
    let masquerade = |from: &str| format!("ip saddr {from} ip daddr 10.1.0.2 masquerade comment \"{id}\"");
    let (own, local) = (masquerade("10.1.0.2"), masquerade("127.0.0.1"));
    let entry = "iifname != \"eth7\" fib daddr type local jump hostports_all";
    let text = format!(
        "table ip cni_hostport {{\n comment \"CNI portmap plugin\"\n chain hostip_hostports {{\n }}\n\
         chain hostports {{\n {rule}\n {rule}\n }}\n\
         chain hostports_all {{\n jump hostip_hostports\n jump hostports\n }}\n\
         chain prerouting {{\n type nat hook prerouting priority -100\n {entry}\n }}\n\
         chain output {{\n type nat hook output priority -100\n {entry}\n }}\n\
         chain masquerading {{\n type nat hook postrouting priority 100\n {own}\n {local}\n }}\n }}\n"
    );
    let file = world.node.file("go.nft", text);
    world.node.exec(&["nft", "-f", file.to_str().unwrap()]);
    world.node.exec(&["sh", "-ec", "echo 1 > /proc/sys/net/ipv4/conf/br-net1/route_localnet"]);
    let config = world.config(json!([map(8080, 80, "tcp")]));
    pod.check(&config).success();
    // Go's plugin makes the same rules with this key.
    pod.check(&patched(config.clone(), json!({"masqAll": true}))).success();
    pod.check(&world.config(json!([map(8081, 80, "tcp")]))).failure();
    pod.call_by(&bin_dir(), "DEL", &without_ports(&config), None).success();
    assert!(!world.rules().contains(id), "{}", world.rules());
    pod.leave();
    world.node.exec(&["nft", "flush", "ruleset"]);
}

#[test]
fn the_chains_of_old_go_releases_are_removed() {
    each(&IPTABLES, |world| {
        let pod = world.mapped(json!([map(8080, 80, "tcp")]));
        let rules = world.rules();
        let chain = rules.split("CNI-DN-").nth(1).unwrap().split([' ', '\n']).next().unwrap();
        let script = format!(
            "iptables -w -t nat -N CNI-HOSTPORT-SNAT; iptables -w -t nat -N CNI-SN-{chain}
             iptables -w -t nat -A CNI-HOSTPORT-SNAT -j CNI-SN-{chain}; iptables -w -t nat -A CNI-SN-{chain} -j MASQUERADE"
        );
        let path = format!("PATH={}", world.backend.path(&world.node));
        world.node.exec(&["env", &path, "sh", "-ec", &script]);
        pod.leave();
        assert!(!world.rules().contains("CNI-SN-"), "{:?}\n{}", world.backend, world.rules());
    });
}

#[test]
fn del_finds_what_another_backend_holds() {
    each(&BACKENDS, |world| {
        let pod = world.mapped(json!([map(8080, 80, "tcp")]));
        let other = if world.backend == Backend::Nftables { "iptables" } else { "nftables" };
        let toggled = patched(world.config(json!([map(8080, 80, "tcp")])), json!({"backend": other, "snat": false}));
        let checked = patched(toggled.clone(), json!({"snat": true}));
        pod.check(&checked).success();
        pod.call_by(&bin_dir(), "DEL", &without_ports(&toggled), None).success();
        assert_eq!(mentions(world, 8080), 0, "{:?}\n{}", world.backend, world.rules());
        pod.leave();
    });
}

#[test]
fn gc_removes_only_the_rules_of_invalid_attachments() {
    each(&BACKENDS, |world| {
        let config = |name: &str, port: u16| {
            let patch = json!({"name": name, "cniVersion": "1.1.0"});
            patched(world.config(json!([map(port, 80, "tcp")])), patch)
        };
        let (one, other) = (world.network("net1", &["10.1.0.0/24"]), world.network("net2", &["10.2.0.0/24"]));
        let (kept, gone, elsewhere) = (world.pod(&one), world.pod(&one), world.pod(&other));
        let second = kept.also(&patched(one.clone(), json!({"isDefaultGateway": false})), "eth1");
        for (pod, name, port) in
            [(&kept, "net1", 8080), (&gone, "net1", 8081), (&elsewhere, "net2", 8082), (&second, "net1", 8083)]
        {
            let prev = patched(pod.result.clone(), json!({"cniVersion": "1.1.0"}));
            pod.call_by(&bin_dir(), "ADD", &config(name, port), Some(&prev)).success();
        }
        let gc = Attachment::new(&world.node, &kept.container, config("net1", 1));
        gc.gc(&[(&kept.container.id, "eth0")]).success();
        let left: Vec<usize> = [8080, 8081, 8082, 8083].map(|port| mentions(world, port).min(1)).into();
        assert_eq!(left, [1, 0, 1, 0], "{:?}\n{}", world.backend, world.rules());
        for pod in [&kept, &gone, &elsewhere, &second] {
            pod.leave();
        }
    });
}

#[test]
fn gc_removes_gos_chains_that_name_the_network() {
    require!(probe::go_plugins());
    each(&IPTABLES, |world| {
        let pods = [world.dual(), world.dual()];
        let config = world.config(json!([map(8080, 80, "tcp")]));
        for (number, pod) in pods.iter().enumerate() {
            let config = world.config(json!([map([8080, 8081][number], 80, "tcp")]));
            pod.call_by(&go(), "ADD", &config, Some(&pod.result)).success();
        }
        let newest = patched(config, json!({"cniVersion": "1.1.0"}));
        let other = patched(newest.clone(), json!({"name": "net2"}));
        Attachment::new(&world.node, &pods[0].container, other).gc(&[]).success();
        assert!(mentions(world, 8080) > 0 && mentions(world, 8081) > 0);
        let gc = Attachment::new(&world.node, &pods[0].container, newest);
        gc.gc(&[(&pods[0].container.id, "eth0")]).success();
        assert!(mentions(world, 8080) > 0 && mentions(world, 8081) == 0, "{:?}\n{}", world.backend, world.rules());
        pods.iter().for_each(Pod::leave);
    });
}

#[test]
fn the_conditions_of_one_network_do_not_touch_another_s() {
    each(&BACKENDS, |world| {
        let (one, other) = (world.network("net1", &["10.1.0.0/24"]), world.network("net2", &["10.2.0.0/24"]));
        let (closed, open) = (world.pod(&one), world.pod(&other));
        closed.serve_tcp(80, "closed");
        open.serve_tcp(80, "open");
        let nobody =
            if world.backend == Backend::Nftables { json!(["ip saddr 10.9.9.9"]) } else { json!(["-s", "10.9.9.9"]) };
        let open_config = patched(world.config(json!([map(8081, 80, "tcp")])), json!({"name": "net2"}));
        open.add(&open_config).success();
        let closed_config = patched(world.config(json!([map(8080, 80, "tcp")])), json!({"conditionsV4": nobody}));
        closed.add(&closed_config).success();
        closed.check(&closed_config).success();
        open.check(&open_config).success();
        assert_eq!(
            world.client.enter(|| ask_tcp_for(IN_VAIN, &at(0, 8080))),
            None,
            "{:?}\n{}",
            world.backend,
            world.rules()
        );
        assert!(world.client.enter(|| ask_tcp(&at(0, 8081))).is_some(), "{:?}\n{}", world.backend, world.rules());
        closed.add(&closed_config).success();
        let ways = world.rules().matches("10.9.9.9").count();
        assert_eq!(ways, 1, "a second ADD adds nothing: {:?}\n{}", world.backend, world.rules());
        closed.leave();
        open.leave();
    });
}
