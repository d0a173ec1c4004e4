//! Where the container's MAC comes from.

use cni_testkit::{Attachment, Node};
use conformance::{attach, layer2, patched, sandboxed};
use serde_json::{Value, json};

const A: &str = "02:11:22:33:44:0a";
const B: &str = "02:11:22:33:44:0b";
const C: &str = "02:11:22:33:44:0c";

#[track_caller]
fn mac(patch: Value, args: Option<&str>) -> String {
    let node = Node::new();
    let container = node.container();
    let mut attachment = Attachment::new(&node, &container, patched(layer2(), patch));
    attachment.args = args.map(str::to_owned);
    let result = attachment.add().success();
    let kernel = container.link("eth0").unwrap()["address"].as_str().unwrap().to_owned();
    assert_eq!(sandboxed(&result)["mac"], kernel, "the result has the kernel's MAC");
    attachment.del_with(&result).success();
    kernel
}

#[test]
fn each_source_of_the_mac_is_used() {
    assert_eq!(mac(json!({}), Some(&format!("MAC={A}"))), A);
    assert_eq!(mac(json!({"args": {"cni": {"mac": B}}}), None), B);
    assert_eq!(mac(json!({"runtimeConfig": {"mac": C}}), None), C);
}

#[test]
fn the_runtimes_mac_precedes_args_which_precede_cni_args() {
    let environment = format!("MAC={A}");
    let all = json!({"args": {"cni": {"mac": B}}, "runtimeConfig": {"mac": C}});
    assert_eq!(mac(all, Some(&environment)), C);
    assert_eq!(mac(json!({"args": {"cni": {"mac": B}}}), Some(&environment)), B);
}

#[test]
fn a_mac_in_upper_case_is_the_same_address() {
    assert_eq!(mac(json!({"runtimeConfig": {"mac": "02:AA:BB:CC:DD:EE"}}), None), "02:aa:bb:cc:dd:ee");
}

#[test]
fn an_invalid_mac_fails_the_add_and_leaves_nothing() {
    let node = Node::new();
    let container = node.container();
    for bad in ["zz", "02:11:22:33:44", "01:00:5e:00:00:01", "ff:ff:ff:ff:ff:ff"] {
        let attachment = Attachment::new(&node, &container, layer2()).args(&format!("MAC={bad}"));
        attachment.add().failure();
        assert!(container.link("eth0").is_none(), "{bad}");
        assert_eq!(node.ports("br0"), Vec::<String>::new(), "{bad}");
    }
}

#[test]
fn the_host_end_has_another_mac() {
    let node = Node::new();
    let config = patched(layer2(), json!({"runtimeConfig": {"mac": A}}));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    let macs: Vec<&str> =
        result["interfaces"].as_array().unwrap().iter().map(|interface| interface["mac"].as_str().unwrap()).collect();
    assert_ne!(macs[1], A, "{macs:?}");
    attachment.del_with(&result).success();
}
