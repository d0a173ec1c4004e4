//! `CNI_ARGS`, the deprecated channel that every runtime still uses.

use cni_testkit::{Attachment, Node};
use conformance::{addresses, host_local, layer2, patched, sandboxed};
use serde_json::json;

/// Runs ADD and DEL of host-local with these arguments.
#[track_caller]
fn add_and_del(args: &str) -> Vec<String> {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, host_local(&node, &["10.1.0.0/24"])).args(args);
    let result = attachment.add().success();
    attachment.del().success();
    addresses(&result)
}

#[test]
fn an_address_can_be_requested() {
    assert_eq!(add_and_del("IP=10.1.0.9"), ["10.1.0.9/24"]);
    assert_eq!(add_and_del("IP=10.1.0.9/24"), ["10.1.0.9/24"]);
}

#[test]
fn unknown_keys_are_fine_when_the_runtime_says_so() {
    for ignore in ["1", "true", "True", "TRUE"] {
        assert_eq!(add_and_del(&format!("IgnoreUnknown={ignore};FOO=BAR;IP=10.1.0.9")), ["10.1.0.9/24"]);
        assert_eq!(add_and_del(&format!("FOO=BAR;IP=10.1.0.9;IgnoreUnknown={ignore}")), ["10.1.0.9/24"]);
    }
}

#[test]
fn an_unknown_key_is_an_error_otherwise() {
    let node = Node::new();
    let container = node.container();
    for args in ["FOO=BAR", "IgnoreUnknown=0;FOO=BAR", "IgnoreUnknown=false;FOO=BAR", "ip=10.1.0.9"] {
        let attachment = Attachment::new(&node, &container, host_local(&node, &["10.1.0.0/24"])).args(args);
        attachment.add().fails_with(4, "ARGS: unknown args [");
    }
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn an_argument_that_is_not_a_pair_is_an_error() {
    let node = Node::new();
    let container = node.container();
    for args in ["FOO", "IgnoreUnknown=1;FOO"] {
        let attachment = Attachment::new(&node, &container, host_local(&node, &["10.1.0.0/24"])).args(args);
        attachment.add().fails_with(4, "ARGS: invalid pair ");
    }
}

#[test]
fn a_value_may_contain_an_equals_sign() {
    assert_eq!(add_and_del("IgnoreUnknown=1;TOKEN=a=b=;IP=10.1.0.9"), ["10.1.0.9/24"]);
}

#[test]
fn a_trailing_semicolon_is_fine() {
    assert_eq!(add_and_del("IgnoreUnknown=1;IP=10.1.0.9;"), ["10.1.0.9/24"]);
}

#[test]
fn arguments_of_kubernetes_are_accepted() {
    let pod = "K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=0a1b;K8S_POD_UID=1-2-3";
    assert_eq!(add_and_del(&format!("IgnoreUnknown=1;{pod};IP=10.1.0.9")), ["10.1.0.9/24"]);
    assert_eq!(add_and_del(&format!("{pod};IP=10.1.0.9")), ["10.1.0.9/24"]);
}

#[test]
fn of_duplicate_keys_the_last_wins() {
    assert_eq!(add_and_del("IP=10.1.0.8;IP=10.1.0.9"), ["10.1.0.9/24"]);
}

#[test]
fn del_works_with_any_arguments() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, host_local(&node, &["10.1.0.0/24"]));
    attachment.add().success();
    attachment.clone().args("IP=10.1.0.77;IgnoreUnknown=1;FOO=BAR").del().success();
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn bridge_takes_a_mac_from_the_arguments() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, patched(layer2(), json!({})));
    let attachment = attachment.args("IgnoreUnknown=1;MAC=02:11:22:33:44:55;IP=10.1.0.1");
    let result = attachment.add().success();
    assert_eq!(sandboxed(&result)["mac"], "02:11:22:33:44:55");
    assert_eq!(container.link("eth0").unwrap()["address"], "02:11:22:33:44:55");
    attachment.del().success();
}
