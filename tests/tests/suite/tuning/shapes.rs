//! The result: the previous result in the form of its version, with the changed values in this
//! interface's entry.

use cni_testkit::Node;
use conformance::patched;
use serde_json::{Value, json};

use super::{pod, prev, state, tuned};

const TUNED: &str = "02:00:00:00:00:aa";

fn keys(version: &str) -> Value {
    json!({"cniVersion": version, "mac": TUNED, "mtu": 1400})
}

/// Runs ADD, CHECK where the version has it, and DEL.
#[track_caller]
fn life(version: &str, prev: impl FnOnce(&str) -> Value, expected: impl FnOnce(&mut Value)) {
    let node = Node::new();
    let container = pod(&node);
    let prev = prev(container.netns().to_str().unwrap());
    let attachment = tuned(&node, &container, keys(version));
    let result = attachment.add_after(&prev).success();
    let mut wanted = prev;
    expected(&mut wanted);
    assert_eq!(result, wanted);
    if version >= "0.4.0" {
        attachment.check(&result).success();
    }
    attachment.del_with(&result).success();
    assert_eq!(state(&container).1, 1500);
}

fn first_shape(version: &str) -> Value {
    json!({
        "cniVersion": version,
        "ip4": {"ip": "10.1.0.2/24", "gateway": "10.1.0.1", "routes": [{"dst": "0.0.0.0/0"}]},
        "dns": {"nameservers": ["192.0.2.1"]},
    })
}

fn second_shape(version: &str, sandbox: &str) -> Value {
    json!({
        "cniVersion": version,
        "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:0e", "sandbox": sandbox}],
        "ips": [{"version": "4", "interface": 0, "address": "10.1.0.2/24", "gateway": "10.1.0.1"}],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dns": {},
    })
}

fn third_shape(version: &str, sandbox: &str) -> Value {
    json!({
        "cniVersion": version,
        "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:0e", "sandbox": sandbox}],
        "ips": [{"interface": 0, "address": "10.1.0.2/24", "gateway": "10.1.0.1"}],
        "routes": [{"dst": "0.0.0.0/0"}],
    })
}

fn new_mac(result: &mut Value) {
    result["interfaces"][0]["mac"] = json!(TUNED);
}

#[test]
fn verbs_and_result_in_0_1_0() {
    life("0.1.0", |_| first_shape("0.1.0"), |_| {});
}

#[test]
fn verbs_and_result_in_0_2_0() {
    life("0.2.0", |_| first_shape("0.2.0"), |_| {});
}

#[test]
fn verbs_and_result_in_0_3_0() {
    life("0.3.0", |sandbox| second_shape("0.3.0", sandbox), new_mac);
}

#[test]
fn verbs_and_result_in_0_3_1() {
    life("0.3.1", |sandbox| second_shape("0.3.1", sandbox), new_mac);
}

#[test]
fn verbs_and_result_in_0_4_0() {
    life("0.4.0", |sandbox| second_shape("0.4.0", sandbox), new_mac);
}

#[test]
fn verbs_and_result_in_1_0_0() {
    life("1.0.0", |sandbox| patched(third_shape("1.0.0", sandbox), json!({"dns": {"domain": "x"}})), new_mac);
}

#[test]
fn verbs_and_result_in_1_1_0_where_an_interface_has_an_mtu() {
    life(
        "1.1.0",
        |sandbox| patched(third_shape("1.1.0", sandbox), json!({"dns": {"domain": "x"}})),
        |result| {
            new_mac(result);
            result["interfaces"][0]["mtu"] = json!(1400);
        },
    );
}

#[test]
fn only_this_sandbox_s_entry_is_changed() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, json!({"mac": "02:00:00:00:00:AA"}));
    let result = attachment.add_after(&prev(&container)).success();
    let mut expected = prev(&container);
    expected["interfaces"][1]["mac"] = json!(TUNED);
    assert_eq!(result, expected);
    attachment.del_with(&result).success();
}

#[test]
fn the_sandbox_may_be_spelled_otherwise() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, json!({"mac": TUNED}));
    let other =
        std::fs::canonicalize(node.dir()).unwrap().join("netns/../netns").join(container.netns().file_name().unwrap());
    let prev = patched(
        prev(&container),
        json!({"interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:0e", "sandbox": other}]}),
    );
    let prev = patched(prev, json!({"ips": [{"address": "10.1.0.2/24"}]}));
    let result = attachment.add_after(&prev).success();
    assert_eq!(result["interfaces"][0]["mac"], TUNED);
    attachment.del().success();
}
