//! VERSION, and the version of a configuration.

use std::time::Duration;

use cni_testkit::{Invocation, Node, bin_dir, probe, require};
use conformance::{PLUGINS, VERSIONS, host_local, patched};
use serde_json::{Value, json};

#[test]
fn version_lists_every_version_of_the_specification() {
    let node = Node::new();
    for plugin in PLUGINS {
        let answer = node.plugin(plugin).command("VERSION").stdin(r#"{"cniVersion":"1.0.0"}"#).run().success();
        assert_eq!(answer["supportedVersions"], json!(VERSIONS), "{plugin}");
    }
}

#[test]
fn version_answers_in_the_version_it_was_asked_in() {
    let node = Node::new();
    for plugin in PLUGINS {
        for version in VERSIONS {
            let stdin = json!({"cniVersion": version}).to_string();
            let answer = node.plugin(plugin).command("VERSION").stdin(stdin).run().success();
            assert_eq!(answer["cniVersion"], version, "{plugin}");
        }
    }
}

#[test]
fn version_never_fails_and_falls_back_to_the_newest() {
    let node = Node::new();
    for plugin in PLUGINS {
        for stdin in ["", "nonsense", "[]", r#"{"cniVersion":"9.9.9"}"#, r#"{"cniVersion":7}"#, "{}"] {
            let answer = node.plugin(plugin).command("VERSION").stdin(stdin).run().success();
            assert_eq!(answer["cniVersion"], "1.1.0", "{plugin} asked with {stdin:?}");
        }
    }
}

#[test]
fn version_needs_no_other_variable() {
    let node = Node::new();
    for plugin in PLUGINS {
        node.plugin(plugin).without("CNI_PATH").command("VERSION").run().success();
    }
}

#[test]
fn version_does_not_wait_on_a_terminal() {
    require!(probe::tool("script"));
    let node = Node::new();
    let ask = format!("CNI_COMMAND=VERSION {}", bin_dir().join("loopback").display());
    // `script` gives the plugin a terminal without input.
    let call = Invocation::new(&node, "/usr/bin/script").arg("-qec").arg(ask).arg("/dev/null");
    let outcome = call.timeout(Duration::from_secs(10)).start().finish_without_end_of_input();
    assert!(outcome.stdout.contains("supportedVersions"), "{}", outcome.report());
}

#[test]
fn a_configuration_without_a_version_is_of_0_1_0() {
    let node = Node::new();
    let container = node.container();
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"cniVersion": null}));
    let call = |verb: &str| node.plugin("host-local").command(verb).container(&container).bad_config(&config);
    let result = call("ADD").run().success();
    assert_eq!(result["cniVersion"], "0.1.0");
    assert_eq!(result["ip4"]["ip"], "10.1.0.2/24");
    call("DEL").run().success();
}

#[test]
fn an_unknown_version_is_refused() {
    let node = Node::new();
    let container = node.container();
    for plugin in PLUGINS {
        for version in ["9.9.9", "1.0", "1.1.1", "0.1.0-dev", "nonsense"] {
            let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"type": plugin, "cniVersion": version}));
            for verb in ["ADD", "DEL"] {
                let call = node.plugin(plugin).command(verb).container(&container).bad_config(&config);
                let failure = call.run().fails_with(1, "incompatible CNI versions");
                assert_eq!(failure.code, Some(1));
                assert!(failure.details.contains(version), "{failure:?} should name {version}");
                assert!(failure.details.contains("0.4.0"), "{failure:?} should list what is supported");
            }
        }
    }
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn a_version_that_is_not_a_string_cannot_be_decoded() {
    let node = Node::new();
    let container = node.container();
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"cniVersion": 1}));
    for plugin in PLUGINS {
        let call = node.plugin(plugin).command("ADD").container(&container).bad_config(&config);
        assert_eq!(call.run().failure().code, Some(6));
    }
}

#[test]
fn check_needs_0_4_0() {
    let node = Node::new();
    let container = node.container();
    for version in ["0.1.0", "0.2.0", "0.3.0", "0.3.1"] {
        let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"cniVersion": version}));
        let call = node.plugin("host-local").command("CHECK").container(&container).config(&config);
        let failure = call.run().fails_with(1, "");
        // Other programs compare the text, to which Go's runtimes append the details.
        assert_eq!((failure.msg.as_str(), failure.details.as_str()), ("config version does not allow CHECK", ""));
    }
}

#[test]
fn gc_and_status_need_1_1_0() {
    let node = Node::new();
    for verb in ["GC", "STATUS"] {
        let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"cni.dev/valid-attachments": []}));
        let call = node.plugin("host-local").command(verb).config(&config);
        let failure = call.run().fails_with(1, "");
        assert_eq!((failure.msg, failure.details), (format!("config version does not allow {verb}"), String::new()));
    }
}

#[test]
fn check_of_a_malformed_version_cannot_be_decoded() {
    let node = Node::new();
    let container = node.container();
    for version in ["asdf", "asdf.", ".x", "0.", "..", "0.4.0.1.2"] {
        let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"cniVersion": version}));
        let call = node.plugin("host-local").command("CHECK").container(&container).bad_config(&config);
        assert_eq!(call.run().failure().code, Some(6), "{version}");
    }
}

/// A result of `version` that an earlier plugin might have returned.
fn prev(version: &str) -> Value {
    match version {
        "0.1.0" | "0.2.0" => json!({"cniVersion": version, "ip4": {"ip": "10.9.0.2/24"}, "dns": {}}),
        "1.0.0" | "1.1.0" => json!({"cniVersion": version, "ips": [{"address": "10.9.0.2/24"}]}),
        _ => json!({"cniVersion": version, "ips": [{"version": "4", "address": "10.9.0.2/24"}], "dns": {}}),
    }
}

#[test]
fn a_prev_result_of_another_family_of_versions_is_refused() {
    let node = Node::new();
    let container = node.container();
    for (config, given) in [("0.4.0", "1.0.0"), ("1.0.0", "0.4.0"), ("0.4.0", "0.2.0"), ("1.0.0", "7.0.0")] {
        let mut config = json!({"cniVersion": config, "name": "lo-net", "type": "loopback"});
        config["prevResult"] = prev(given);
        let call = node.plugin("loopback").command("ADD").container(&container).bad_config(&config);
        call.run().fails_naming(6, &["prevResult"]);
    }
}

#[test]
fn a_prev_result_of_the_same_family_is_accepted() {
    let node = Node::new();
    let container = node.container();
    for (version, given) in [("0.3.1", "0.3.0"), ("0.3.1", "0.4.0"), ("0.4.0", "0.3.1"), ("1.0.0", "1.0.0")] {
        let mut config = json!({"cniVersion": version, "name": "lo-net", "type": "loopback"});
        config["prevResult"] = prev(given);
        let call = node.plugin("loopback").command("ADD").container(&container).bad_config(&config);
        let result = call.run().success();
        assert_eq!(result["cniVersion"], version);
        assert_eq!(result["ips"][0]["address"], "10.9.0.2/24");
    }
}

#[test]
fn a_prev_result_without_a_version_is_of_the_configuration_s() {
    let node = Node::new();
    let container = node.container();
    let mut config = json!({"cniVersion": "0.4.0", "name": "lo-net", "type": "loopback"});
    config["prevResult"] = json!({"ips": [{"version": "4", "address": "10.9.0.2/24"}]});
    let call = node.plugin("loopback").command("ADD").container(&container).bad_config(&config);
    assert_eq!(call.run().success()["ips"][0]["version"], "4");
}
