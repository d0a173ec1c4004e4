//! A node is switched from the Go plugin to this one and back while containers run.

use cni_testkit::{bin_dir, probe, require};
use conformance::patched;
use serde_json::json;

use super::world::{BACKENDS, Backend, IPTABLES, chain, config, each, end_isolation, go, naming, rules};

#[test]
fn rules_of_go_are_checked_and_removed() {
    require!(probe::go_plugins());
    each(&IPTABLES, |world| {
        for policy in ["open", "same-bridge", "isolated"] {
            let config = config(world, json!({"ingressPolicy": policy}));
            let pod = world.dual();
            pod.call_by(&go(), "ADD", &config, Some(&pod.result)).success();
            pod.check(&config).success();
            // The ADD adopts Go's rules; from now on DEL needs no result.
            let by_go = chain(world, "CNI-FORWARD");
            pod.add(&config).success();
            assert_eq!(chain(world, "CNI-FORWARD"), by_go, "{policy} {:?}", world.backend);
            pod.invocation(&bin_dir(), "DEL", &config, None).run().success();
            assert_eq!(naming(world, &pod), 0, "{policy} {:?}", world.backend);
            pod.call_by(&go(), "ADD", &config, Some(&pod.result)).success();
            pod.del(&config).success();
            assert_eq!(naming(world, &pod), 0, "{policy} {:?}", world.backend);
            let late = world.dual();
            late.add(&config).success();
            late.leave();
            pod.leave();
        }
    });
}

#[test]
fn rules_of_this_plugin_are_checked_and_removed_by_go() {
    require!(probe::go_plugins());
    each(&IPTABLES, |world| {
        for policy in ["open", "same-bridge", "isolated"] {
            let config = config(world, json!({"ingressPolicy": policy}));
            let pod = world.dual();
            pod.add(&config).success();
            let before = rules(world);
            pod.call_by(&go(), "CHECK", &config, Some(&pod.result)).success();
            pod.call_by(&go(), "ADD", &config, Some(&pod.result)).success();
            assert_eq!(rules(world), before, "{policy} {:?}", world.backend);
            pod.call_by(&go(), "DEL", &config, Some(&pod.result)).success();
            let left = chain(world, "CNI-FORWARD");
            assert!(!left.iter().any(|rule| rule.ends_with("ACCEPT")), "{left:?}");
            // Rules that only this plugin knows are removed by its own DEL or GC.
            pod.leave();
            assert_eq!(naming(world, &pod), 0, "{policy} {:?}", world.backend);
        }
    });
}

#[test]
fn go_beside_this_plugin_shares_chains_and_keeps_its_isolation() {
    require!(probe::go_plugins());
    each(&IPTABLES, |world| {
        let config = config(world, json!({"ingressPolicy": "same-bridge"}));
        let (ours, theirs) = (world.dual(), world.dual());
        theirs.call_by(&go(), "ADD", &config, Some(&theirs.result)).success();
        ours.add(&config).success();
        ours.check(&config).success();
        theirs.call_by(&go(), "CHECK", &config, Some(&theirs.result)).success();
        ours.del(&config).success();
        // No record says what the remaining container requested.
        theirs.check(&config).success();
        assert!(chain(world, "CNI-ISOLATION-STAGE-1").len() == 4, "{:?}", rules(world));
        assert!(naming(world, &theirs) > 0 && naming(world, &ours) == 0);
        let late = world.dual();
        late.add(&config).success();
        theirs.call_by(&go(), "DEL", &config, Some(&theirs.result)).success();
        late.check(&config).success();
        late.leave();
        theirs.leave();
        ours.leave();
        end_isolation(world);
    });
}

#[test]
fn a_record_of_a_removed_container_keeps_no_rules() {
    each(&BACKENDS, |world| {
        let only = |subnet: &str, ip: &str| json!([{"subnet": subnet, "rangeStart": ip, "rangeEnd": ip}]);
        let ranges = json!([only("10.1.0.0/24", "10.1.0.2"), only("fd00:1::/64", "fd00:1::2")]);
        let network = patched(world.network("net1", &[]), json!({"ipam": {"ranges": ranges}}));
        for policy in ["open", "same-bridge"] {
            let config = config(world, json!({"ingressPolicy": policy}));
            let gone = world.pod(&network);
            gone.add(&config).success();
            // Go's DEL removes the rules but not the record. No Go plugin has the backend nftables.
            if world.backend != Backend::Nftables && probe::go_plugins().is_ok() {
                gone.call_by(&go(), "DEL", &config, Some(&gone.result)).success();
            }
            gone.network.del_with(&gone.result).success();
            let late = world.pod(&network);
            assert_eq!(late.address(0), gone.address(0), "the address is free again");
            late.invocation(&bin_dir(), "ADD", &config, Some(&late.result)).with_closed_stdout().run();
            assert_eq!(naming(world, &late), 0, "after a failed ADD: {:?} {:#?}", world.backend, rules(world));
            late.add(&config).success();
            late.check(&config).success();
            late.del(&config).success();
            assert_eq!(naming(world, &late), 0, "{:?} {:#?}", world.backend, rules(world));
            late.leave();
        }
    });
}

#[test]
fn a_running_container_keeps_the_rules_of_a_shared_address() {
    each(&BACKENDS, |world| {
        let config = config(world, json!({}));
        let (one, two) = (world.dual(), world.dual());
        one.add(&config).success();
        two.invocation(&bin_dir(), "ADD", &config, Some(&one.result)).run().success();
        two.invocation(&bin_dir(), "DEL", &config, Some(&one.result)).run().success();
        one.check(&config).success();
        one.del(&config).success();
        one.leave();
        two.leave();
    });
}

#[test]
fn a_failed_add_keeps_gos_rules_for_its_address() {
    require!(probe::go_plugins());
    each(&IPTABLES, |world| {
        let config = config(world, json!({}));
        let (ours, theirs) = (world.dual(), world.dual());
        theirs.call_by(&go(), "ADD", &config, Some(&theirs.result)).success();
        let call = ours.invocation(&bin_dir(), "ADD", &config, Some(&theirs.result));
        assert_ne!(call.with_closed_stdout().run().status, Some(0));
        theirs.check(&config).success();
        ours.leave();
        theirs.call_by(&go(), "DEL", &config, Some(&theirs.result)).success();
        theirs.leave();
    });
}
