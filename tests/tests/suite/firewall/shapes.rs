//! The rules of the backend iptables, which other programs and the Go plugin look for.

use cni_testkit::Attachment;
use conformance::patched;
use serde_json::json;

use super::world::{IPTABLES, chain, config, each, end_isolation, rules, shell};

const JUMP: &str = r#"-m comment --comment "CNI firewall plugin rules" -j CNI-FORWARD"#;
const ADMIN: &str = r#"-m comment --comment "CNI firewall plugin admin overrides" -j"#;
const BOTH: &str = r#"-m comment --comment "CNI firewall plugin rules (ingressPolicy: same-bridge|isolated)" -j"#;

#[test]
fn the_result_is_passed_on_in_every_version() {
    each(&IPTABLES, |world| {
        for version in ["0.4.0", "1.0.0", "1.1.0"] {
            let container = world.node.container();
            let network =
                patched(world.network("net1", &["10.1.0.0/24", "fd00:1::/64"]), json!({"cniVersion": version}));
            let bridge = Attachment::new(&world.node, &container, network);
            let prev = bridge.add().success();
            let firewall = bridge.clone().config(config(world, json!({"cniVersion": version})));
            let path = world.backend.path(&world.node);
            let run = |verb: &str| firewall.invocation(verb, Some(&prev)).env("PATH", &path).run().success();
            assert_eq!(run("ADD"), prev, "{version}");
            run("CHECK");
            run("DEL");
            bridge.del_with(&prev).success();
        }
    });
}

#[test]
fn both_families_have_gos_rules_to_the_byte() {
    each(&IPTABLES, |world| {
        let pod = world.dual();
        pod.add(&config(world, json!({}))).success();
        let (v4, v6) = (pod.address(0), pod.address(1));
        assert_eq!(chain(world, "FORWARD"), [JUMP, JUMP], "{:?}", world.backend);
        let accept = |host: String| {
            [
                format!("{ADMIN} CNI-ADMIN"),
                format!("-d {host} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"),
                format!("-s {host} -j ACCEPT"),
            ]
        };
        let expected = [accept(format!("{v4}/32")), accept(format!("{v6}/128"))].concat();
        assert_eq!(chain(world, "CNI-FORWARD"), expected, "{:?}", world.backend);
        assert!(rules(world).iter().all(|rule| !rule.contains("ISOLATION")));
        pod.leave();
    });
}

#[test]
fn a_second_add_changes_nothing() {
    each(&IPTABLES, |world| {
        for policy in ["open", "same-bridge", "isolated"] {
            let config = config(world, json!({"ingressPolicy": policy}));
            let pod = world.dual();
            pod.add(&config).success();
            let before = rules(world);
            pod.add(&config).success();
            assert_eq!(rules(world), before, "{policy} {:?}", world.backend);
            pod.check(&config).success();
            pod.leave();
            end_isolation(world);
        }
    });
}

#[test]
fn the_admin_chain_has_the_configured_name_and_contents_stay() {
    each(&IPTABLES, |world| {
        let config = config(world, json!({"iptablesAdminChainName": "MY-ADMIN"}));
        let (pod, other) = (world.dual(), world.dual());
        pod.add(&config).success();
        shell(world, "iptables -w -A MY-ADMIN -s 198.51.100.7 -j DROP; ip6tables -w -A MY-ADMIN -s fd00:7::7 -j DROP");
        other.add(&config).success();
        assert_eq!(chain(world, "CNI-FORWARD").iter().filter(|rule| **rule == format!("{ADMIN} MY-ADMIN")).count(), 2);
        other.leave();
        pod.leave();
        assert_eq!(chain(world, "MY-ADMIN").len(), 2, "{:?}", world.backend);
        shell(world, "iptables -w -F MY-ADMIN; ip6tables -w -F MY-ADMIN");
        shell(
            world,
            "iptables -w -F CNI-FORWARD; iptables -w -X MY-ADMIN; ip6tables -w -F CNI-FORWARD; ip6tables -w -X MY-ADMIN",
        );
    });
}

#[test]
fn after_del_chains_and_jumps_stay_and_a_second_del_is_fine() {
    each(&IPTABLES, |world| {
        let config = config(world, json!({}));
        let pod = world.dual();
        pod.add(&config).success();
        for _ in 0..2 {
            pod.del(&config).success();
            assert_eq!(chain(world, "FORWARD"), [JUMP, JUMP], "{:?}", world.backend);
            let admin = format!("{ADMIN} CNI-ADMIN");
            assert_eq!(chain(world, "CNI-FORWARD"), [admin.clone(), admin], "{:?}", world.backend);
        }
        pod.leave();
    });
}

#[test]
fn an_isolated_bridge_has_gos_rules_to_the_byte() {
    each(&IPTABLES, |world| {
        for policy in ["same-bridge", "isolated"] {
            let pod = world.dual();
            pod.add(&config(world, json!({"ingressPolicy": policy}))).success();
            let to_stage = format!("{BOTH} CNI-ISOLATION-STAGE-1");
            assert_eq!(chain(world, "FORWARD"), [&to_stage, JUMP, &to_stage, JUMP], "{:?}", world.backend);
            let comment = format!(r#"-m comment --comment "CNI firewall plugin rules (ingressPolicy: {policy})" -j"#);
            let mut stage =
                vec![format!("-i br-net1 ! -o br-net1 {comment} CNI-ISOLATION-STAGE-2"), format!("{BOTH} RETURN")];
            if policy == "isolated" {
                stage.insert(0, format!("-i br-net1 -o br-net1 {comment} DROP"));
            }
            assert_eq!(chain(world, "CNI-ISOLATION-STAGE-1"), [stage.clone(), stage].concat(), "{:?}", world.backend);
            let second = [format!("-o br-net1 {BOTH} DROP"), format!("{BOTH} RETURN")];
            assert_eq!(chain(world, "CNI-ISOLATION-STAGE-2"), [second.clone(), second].concat(), "{:?}", world.backend);
            pod.leave();
            shell(world, "iptables -w -D FORWARD 1; ip6tables -w -D FORWARD 1");
            end_isolation(world);
        }
    });
}

#[test]
fn only_the_families_of_the_result_get_rules() {
    each(&IPTABLES, |world| {
        let pod = world.pod(&world.network("net1", &["10.1.0.0/24"]));
        pod.add(&config(world, json!({}))).success();
        assert_eq!(chain(world, "FORWARD"), [JUMP], "{:?}", world.backend);
        pod.leave();
    });
}

#[test]
fn errors_have_gos_text_and_precede_any_change() {
    each(&IPTABLES, |world| {
        let pod = world.dual();
        let before = rules(world);
        let wrong = config(world, json!({"ingressPolicy": "closed"}));
        pod.add(&wrong).fails_with(7, "unknown ingress policy: \"closed\"");
        for verb in ["ADD", "CHECK"] {
            let call = pod.invocation(&cni_testkit::bin_dir(), verb, &config(world, json!({})), None);
            call.run().fails_with(7, "missing prevResult from earlier plugin");
        }
        assert_eq!(rules(world), before, "{:?}", world.backend);
        pod.network.del_with(&pod.result).success();
    });
}
