//! JSON as Go's decoder reads it, because that is what configurations in the field are written for.

use std::time::Duration;

use cni_testkit::{Invocation, Node};
use conformance::{PLUGINS, addresses, host_local};
use serde_json::Value;

fn host_local_with<'n>(node: &'n Node, container: &cni_testkit::Container, verb: &str, text: &str) -> Invocation<'n> {
    let text = text.replace("DATADIR", node.data_dir().to_str().unwrap());
    node.plugin("host-local").command(verb).container(container).stdin(text)
}

/// Runs ADD and DEL with a handwritten configuration; `DATADIR` stands for the node's folder.
#[track_caller]
fn add_and_del(text: &str) -> Value {
    let node = Node::new();
    let container = node.container();
    let result = host_local_with(&node, &container, "ADD", text).run().success();
    host_local_with(&node, &container, "DEL", text).run().success();
    result
}

#[test]
fn a_document_that_is_not_an_object_cannot_be_decoded() {
    let node = Node::new();
    let container = node.container();
    for plugin in PLUGINS {
        for text in ["", "nonsense", "[]", "7", "\"text\"", "{", "{\"name\":\"a\",}", "{'name':'a'}"] {
            for verb in ["ADD", "DEL"] {
                let call = node.plugin(plugin).command(verb).container(&container).stdin(text);
                let failure = call.run().fails_with(6, "error unmarshall network config: ");
                assert_eq!(failure.code, Some(6));
            }
        }
    }
}

#[test]
fn nothing_may_follow_the_object() {
    let node = Node::new();
    let container = node.container();
    for tail in ["{}", "x", "]", "null"] {
        let text = format!("{}{tail}", host_local(&node, &["10.1.0.0/24"]));
        let call = node.plugin("host-local").command("ADD").container(&container).stdin(text);
        assert_eq!(call.run().failure().code, Some(6));
    }
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn white_space_around_the_object_is_fine() {
    add_and_del(
        "\n\t {\"cniVersion\":\"1.0.0\",\"name\":\"net1\",\"type\":\"host-local\",
            \"ipam\":{\"type\":\"host-local\",\"dataDir\":\"DATADIR\",\"subnet\":\"10.1.0.0/24\"}} \r\n",
    );
}

#[test]
fn keys_match_in_any_case() {
    let result = add_and_del(
        r#"{"CNIVERSION":"1.0.0","Name":"net1","TYPE":"host-local",
            "IPAM":{"Type":"host-local","DATADIR_":"","datadir":"DATADIR","Ranges":[[{"SUBNET":"10.1.0.0/24","rangestart":"10.1.0.9"}]]},
            "RuntimeConfig":{"IPS":["10.1.0.20"]}}"#,
    );
    assert_eq!((result["cniVersion"].as_str(), addresses(&result)), (Some("1.0.0"), vec!["10.1.0.20/24".to_owned()]));
}

#[test]
fn of_duplicate_keys_the_last_wins() {
    let result = add_and_del(
        r#"{"cniVersion":"0.4.0","name":"first","name":"net1","type":"host-local","cniVersion":"1.0.0",
            "ipam":{"type":"host-local","dataDir":"/nowhere","dataDir":"DATADIR","subnet":"10.2.0.0/24","subnet":"10.1.0.0/24"}}"#,
    );
    assert_eq!((result["cniVersion"].as_str(), addresses(&result)), (Some("1.0.0"), vec!["10.1.0.2/24".to_owned()]));
}

#[test]
fn null_is_the_default() {
    let result = add_and_del(
        r#"{"cniVersion":"1.0.0","name":"net1","type":"host-local","args":null,"runtimeConfig":null,"dns":null,"prevResult":null,
            "ipam":{"type":"host-local","dataDir":"DATADIR","resolvConf":null,"routes":null,
                    "ranges":[[{"subnet":"10.1.0.0/24","rangeStart":null,"gateway":null}]]}}"#,
    );
    assert_eq!(addresses(&result), ["10.1.0.2/24"]);
    assert_eq!(result["ips"][0]["gateway"], "10.1.0.1");
}

#[test]
fn a_scalar_of_another_type_is_refused() {
    let node = Node::new();
    let container = node.container();
    for wrong in [
        r#""name":7"#,
        r#""ipam":[]"#,
        r#""ipam":{"type":7}"#,
        r#""ipam":{"type":"host-local","ranges":{}}"#,
        r#""ipam":{"type":"host-local","dataDir":true,"subnet":"10.1.0.0/24"}"#,
    ] {
        let text = format!(r#"{{"cniVersion":"1.0.0","name":"net1","type":"host-local",{wrong}}}"#);
        let failure = host_local_with(&node, &container, "ADD", &text).run().failure();
        assert!(matches!(failure.code, Some(6 | 7 | 999)), "{wrong}: {failure:?}");
    }
}

#[test]
fn deep_nesting_is_refused_and_reasonable_nesting_is_not() {
    let node = Node::new();
    let container = node.container();
    let with_depth = |depth: usize| {
        let (open, close) = ("[".repeat(depth), "]".repeat(depth));
        format!(
            r#"{{"cniVersion":"1.0.0","name":"net1","type":"host-local","deep":{open}{close},
                "ipam":{{"type":"host-local","dataDir":"DATADIR","subnet":"10.1.0.0/24"}}}}"#
        )
    };
    for depth in [128, 200, 100_000, 1_000_000] {
        let failure = host_local_with(&node, &container, "ADD", &with_depth(depth)).run().failure();
        assert_eq!(failure.code, Some(6), "{depth} levels below the first");
    }
    assert_eq!(node.reservations("net1"), []);
    add_and_del(&with_depth(120));
}

#[test]
fn sixteen_mebibytes_are_the_limit() {
    let node = Node::new();
    let container = node.container();
    let config = |padding: usize| {
        let text = host_local(&node, &["10.1.0.0/24"]).to_string();
        format!("{}{text}", " ".repeat(padding))
    };
    let call = |verb: &str, text: String| node.plugin("host-local").command(verb).container(&container).stdin(text);
    call("ADD", config(17 << 20)).timeout(Duration::from_secs(20)).run().failure();
    assert_eq!(node.reservations("net1"), []);
    call("ADD", config(15 << 20)).run().success();
    call("DEL", config(0)).run().success();
}

#[test]
fn a_failure_prints_one_document_and_success_of_add_too() {
    let node = Node::new();
    let container = node.container();
    let config = host_local(&node, &["10.1.0.0/24"]);
    let call = |verb: &str| node.plugin("host-local").command(verb).container(&container).config(&config).run();
    let added = call("ADD");
    added.success();
    let again = call("ADD");
    again.failure();
    for outcome in [added, again] {
        let documents = serde_json::Deserializer::from_str(&outcome.stdout).into_iter::<Value>().count();
        assert_eq!(documents, 1, "{}", outcome.report());
    }
    call("DEL").success();
}

#[test]
fn a_closed_standard_output_rolls_the_add_back() {
    let node = Node::new();
    let container = node.container();
    let config = host_local(&node, &["10.1.0.0/24"]);
    let call = node.plugin("host-local").command("ADD").container(&container).config(&config);
    let outcome = call.with_closed_stdout().run();
    assert_ne!(outcome.status, Some(0), "the result was not read\n{}", outcome.report());
    assert_eq!(node.reservations("net1"), []);
}
