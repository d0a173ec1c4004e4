//! The keys every configuration has, and what runtimes add to them.

use cni_testkit::{Attachment, Node};
use conformance::{PLUGINS, addresses, host_local, loopback, patched};
use serde_json::json;

#[test]
fn a_network_must_have_a_name() {
    let node = Node::new();
    let container = node.container();
    for plugin in PLUGINS {
        for patch in [json!({"name": null}), json!({"name": ""})] {
            let config = patched(patched(host_local(&node, &["10.1.0.0/24"]), patch), json!({"type": plugin}));
            let call = node.plugin(plugin).command("ADD").container(&container).bad_config(&config);
            assert_eq!(call.run().fails_with(7, "missing network name").code, Some(7));
        }
    }
}

#[test]
fn a_network_name_of_other_characters_is_refused() {
    let node = Node::new();
    let container = node.container();
    for plugin in PLUGINS {
        for name in ["../up", "a/b", ".cni", "a b", "-a", "ä"] {
            let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"type": plugin, "name": name}));
            let call = node.plugin(plugin).command("ADD").container(&container).bad_config(&config);
            let failure = call.run().fails_with(7, "invalid characters found in network name");
            assert_eq!(failure.code, Some(7));
            assert!(failure.details.contains(name) || failure.msg.contains(name), "{failure:?} should name {name}");
        }
    }
}

#[test]
fn a_network_name_of_one_character_is_a_name() {
    let node = Node::new();
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"name": "n"}));
    let container = node.container();
    let attachment = Attachment::new(&node, &container, config);
    attachment.add().success();
    assert_eq!(node.reservations("n").len(), 1);
    attachment.del().success();
}

#[test]
fn a_network_name_over_200_bytes_cannot_be_added_but_is_cleaned() {
    let node = Node::new();
    let container = node.container();
    let name = "n".repeat(201);
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"name": name}));
    node.file(&format!("networks/{name}/10.1.0.7"), format!("{}\r\neth0", container.id));
    let call = |verb: &str| node.plugin("host-local").command(verb).container(&container).bad_config(&config);
    call("ADD").run().fails_with(7, "");
    call("DEL").run().success();
    assert_eq!(node.reservations(&name), []);
}

#[test]
fn a_network_name_of_200_bytes_can_be_added() {
    let node = Node::new();
    let container = node.container();
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"name": "n".repeat(200)}));
    let attachment = Attachment::new(&node, &container, config);
    attachment.add().success();
    attachment.del().success();
}

#[test]
fn what_is_unknown_under_args_is_ignored() {
    let node = Node::new();
    let container = node.container();
    for args in
        [json!({"vendor": [1, 2]}), json!({"cni": {"labels": [{"key": "a", "value": "b"}], "new": 7}}), json!({})]
    {
        let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"args": args, "unknownKey": {"a": [null]}}));
        let attachment = Attachment::new(&node, &container, config);
        attachment.add().success();
        attachment.del().success();
    }
}

#[test]
fn what_is_under_args_may_be_of_any_type() {
    let node = Node::new();
    let container = node.container();
    for args in [json!("text"), json!([1]), json!({"cni": "text"}), json!({"cni": null})] {
        let config = patched(loopback(), json!({}));
        let mut config = config;
        config["args"] = args;
        let call = |verb: &str| node.plugin("loopback").command(verb).container(&container).bad_config(&config);
        call("ADD").run().success();
        call("DEL").run().success();
    }
}

#[test]
fn a_delegate_receives_the_bytes_that_its_parent_received() {
    let node = Node::new();
    let container = node.container();
    let seen = node.dir().join("seen");
    let spy = format!("#!/bin/sh\ncat > {}\necho '{{\"cniVersion\":\"1.0.0\",\"ips\":[]}}'\n", seen.display());
    let folder = crate::delegation::executable(&node, "spy", &spy);
    let config = r#"{ "cniVersion":"1.0.0",  "name":"net1","type":"bridge","bridge":"br0","unknown":{"z":1,"a":[1.50]},"ipam":{"type":"spy"} }"#;
    let call = node.plugin("bridge").cni_path(&folder).container(&container).stdin(config);
    call.clone().command("ADD").run().failure();
    assert_eq!(std::fs::read_to_string(&seen).unwrap(), config);
    call.command("DEL").run().success();
}

#[test]
fn runtime_config_that_the_plugin_does_not_know_is_ignored() {
    let node = Node::new();
    let container = node.container();
    let runtime = json!({"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}], "other": 1});
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"runtimeConfig": runtime}));
    let attachment = Attachment::new(&node, &container, config);
    assert_eq!(addresses(&attachment.add().success()), ["10.1.0.2/24"]);
    attachment.del().success();
}
