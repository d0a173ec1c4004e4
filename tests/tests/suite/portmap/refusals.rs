//! Configurations that are refused, with Go's words, before anything is changed.

use cni_testkit::require;
use conformance::{patched, without_iptables};
use serde_json::{Value, json};

use super::world::{BACKENDS, Backend, World, each, map};

#[test]
fn invalid_mappings_are_code_7_and_change_nothing() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let pod = world.dual();
    let good = world.config(json!([map(8080, 80, "tcp")]));
    let before = world.rules();
    let mapping = |patch: Value| json!({"runtimeConfig": {"portMappings": [patched(map(8080, 80, "tcp"), patch)]}});
    for (patch, beginning) in [
        (mapping(json!({"hostPort": 0})), "Invalid host port number: 0"),
        (mapping(json!({"hostPort": -1})), "Invalid host port number: -1"),
        (mapping(json!({"hostPort": 65536})), "Invalid host port number: 65536"),
        (mapping(json!({"containerPort": 0})), "Invalid container port number: 0"),
        (mapping(json!({"containerPort": 70000})), "Invalid container port number: 70000"),
        (mapping(json!({"protocol": "icmp"})), "Invalid protocol"),
        (mapping(json!({"hostIP": "192.0.2"})), "Invalid host IP"),
        (json!({"markMasqBit": 32}), "MasqMarkBit must be between 0 and 31"),
        (json!({"markMasqBit": 1, "externalSetMarkChain": "X"}), "Cannot specify externalSetMarkChain and markMasqBit"),
        (json!({"backend": "pf"}), "unrecognized backend \"pf\""),
        (
            json!({"backend": "iptables", "conditionsV4": ["ip", "saddr"]}),
            "iptables backend was requested but configuration contains nftables-specific options [conditionsV4]",
        ),
        (
            json!({"conditionsV6": ["-s", "fd00::1"]}),
            "nftables backend was requested but configuration contains iptables-specific options [conditionsV6]",
        ),
        (json!({"backend": "iptables", "conditionsV4": ["-s", "1.2.3.4", "-j", "ACCEPT"]}), "conditionsV4: \"-j\""),
        (json!({"backend": "iptables", "conditionsV4": ["-s", "1.2.3.4\n-A INPUT"]}), "conditionsV4: \"1.2.3.4"),
        (
            json!({"backend": "iptables", "conditionsV4": ["-m", "comment", "--comment", "COMMIT"]}),
            "conditionsV4: \"COMMIT",
        ),
        (json!({"backend": "iptables", "externalSetMarkChain": "X\nCOMMIT"}), "externalSetMarkChain"),
        (json!({"conditionsV4": ["ip saddr 1.2.3.4 accept"]}), "conditionsV4: \"accept\""),
        (json!({"conditionsV4": ["ip saddr 1.2.3.4; flush ruleset"]}), "conditionsV4: \"flush\""),
    ] {
        let config = patched(good.clone(), patch);
        let attachment = pod.network.clone().config(patched(config, json!({"prevResult": pod.result})));
        let call = |verb: &str| {
            let call = world.node.plugin("portmap").command(verb).container(&pod.container);
            call.bad_config(&attachment.config).run()
        };
        call("ADD").fails_with(7, &format!("failed to parse config: {beginning}"));
        call("CHECK").fails_with(7, beginning);
        call("DEL").success();
    }
    assert_eq!((world.rules(), world.ran()), (before, vec![]));
    pod.leave();
}

#[test]
fn conditions_in_iptables_words_need_its_programs() {
    require!(Backend::IptablesNft.probe());
    let world = World::new(Backend::IptablesNft);
    let pod = world.dual();
    without_iptables(&world.node);
    let config = world.config(json!([map(8080, 80, "tcp")]));
    let call =
        |verb: &str| pod.invocation(&cni_testkit::bin_dir(), verb, &config, Some(&pod.result)).env("PATH", "/usr/sbin");
    call("ADD").run().success();
    call("DEL").run().success();
    let config =
        patched(config, json!({"conditionsV4": ["-m", "statistic", "--mode", "random", "--probability", "0.5"]}));
    // As bridge says it: the specification's code for a key that this host cannot serve.
    let add = pod.invocation(&cni_testkit::bin_dir(), "ADD", &config, Some(&pod.result)).env("PATH", "/usr/sbin").run();
    add.fails_with(
        2,
        "\"backend\": \"iptables\" cannot be used on this host: failed to find the programs of iptables-nft",
    );
    pod.leave();
}

#[test]
fn a_bad_mapping_is_named_by_its_index() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let pod = world.dual();
    for (bad, word) in [(json!({"containerPort": 0}), "0"), (json!({"protocol": "icmp"}), "icmp")] {
        let config = world.config(json!([map(8080, 80, "tcp"), patched(map(8081, 80, "tcp"), bad)]));
        let call = pod.invocation(&cni_testkit::bin_dir(), "ADD", &world.config(json!([])), None);
        let outcome = call.bad_config(&patched(config, json!({"prevResult": pod.result}))).run();
        let failure = outcome.fails_naming(7, &[word]);
        assert!((outcome.stderr + &failure.msg).contains("portMappings[1]"), "{failure:?}");
    }
    let twice = world.config(json!([map(8080, 80, "tcp"), map(8080, 81, "tcp")]));
    pod.add(&twice).fails_naming(7, &["portMappings[1]", "portMappings[0]"]);
    pod.leave();
}

/// Other programs compare these by equality with what Go's plugin prints, and libcni appends the
/// details to the message.
#[test]
fn refusals_that_go_has_too_have_exactly_gos_text() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let pod = world.dual();
    let good = world.config(json!([map(8080, 80, "tcp")]));
    let second = |bad: Value| json!({"runtimeConfig": {"portMappings": [map(8080, 80, "tcp"), patched(map(81, 80, "tcp"), bad)]}});
    for (patch, text) in [
        (second(json!({"hostPort": 0})), "Invalid host port number: 0"),
        (second(json!({"hostPort": -1})), "Invalid host port number: -1"),
        (second(json!({"containerPort": 0})), "Invalid container port number: 0"),
        (second(json!({"containerPort": -7, "hostPort": 0})), "Invalid container port number: -7"),
        (json!({"markMasqBit": 32}), "MasqMarkBit must be between 0 and 31"),
        (json!({"markMasqBit": 1, "externalSetMarkChain": "X"}), "Cannot specify externalSetMarkChain and markMasqBit"),
        (json!({"backend": "pf"}), "unrecognized backend \"pf\""),
        (
            json!({"conditionsV6": ["-s", "fd00::1"]}),
            "nftables backend was requested but configuration contains iptables-specific options [conditionsV6]",
        ),
    ] {
        let config = patched(good.clone(), patched(patch, json!({"prevResult": pod.result})));
        let call = |verb: &str| {
            let call = world.node.plugin("portmap").command(verb).container(&pod.container);
            call.bad_config(&config).run().fails_with(7, "")
        };
        for (verb, prefix) in [("ADD", "failed to parse config: "), ("CHECK", "")] {
            let failure = call(verb);
            assert_eq!((failure.msg, failure.details), (format!("{prefix}{text}"), String::new()), "{verb}");
        }
    }
    pod.leave();
}

#[test]
fn portmap_must_follow_another_plugin() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let pod = world.dual();
    let config = world.config(json!([map(8080, 80, "tcp")]));
    pod.call_by(&cni_testkit::bin_dir(), "ADD", &config, None).fails_with(7, "must be called as chained plugin");
    pod.call_by(&cni_testkit::bin_dir(), "CHECK", &config, None).fails_with(7, "Required prevResult missing");
    pod.leave();
}

#[test]
fn a_name_as_host_ip_is_refused_before_any_change() {
    each(&BACKENDS, |world| {
        let pod = world.dual();
        let before = world.rules();
        let config = world.config(json!([patched(map(8080, 80, "tcp"), json!({"hostIP": "localhost"}))]));
        pod.add(&config).fails_with(7, "failed to parse config: Invalid host IP \"localhost\"");
        assert_eq!(world.rules(), before, "{:?}", world.backend);
        pod.leave();
    });
}
