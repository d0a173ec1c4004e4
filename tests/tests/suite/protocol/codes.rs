//! Provokes every error code of the specification.
//!
//! Unlike in the other files, no deviation is excused. The tests of each subject assert the
//! messages; these assert the codes, by which a runtime decides.

use cni_testkit::{Attachment, Node, probe, unprovoked};
use conformance::{attach, bridge, host_local, layer2, patched};
use serde_json::json;

#[test]
fn code_1_an_unknown_version() {
    let node = Node::new();
    let container = node.container();
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"cniVersion": "1.9.0"}));
    assert_eq!(Attachment::new(&node, &container, config).add().failure().code, Some(1));
}

#[test]
fn code_2_a_key_that_this_kernel_cannot_serve() {
    if probe::vlan_filtering().is_ok() {
        unprovoked("this kernel has VLAN filtering: there is nothing it cannot serve");
        return;
    }
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, patched(layer2(), json!({"vlan": 100})));
    let failure = attachment.add().failure();
    assert_eq!(failure.code, Some(2));
    assert!(failure.msg.contains("vlan") && failure.msg.contains("100"), "key and value: {failure:?}");
    assert!(node.link("br0").is_none(), "nothing is created before that is known");
    attachment.del().success();
}

#[test]
fn code_3_check_of_what_does_not_exist() {
    let node = Node::new();
    let config = bridge(&node, &["10.1.0.0/24"]);
    let (_container, attachment, result) = attach(&node, &config, 1).remove(0);
    attachment.del_with(&result).success();
    assert_eq!(attachment.check(&result).failure().code, Some(3));
}

#[test]
fn code_4_the_environment() {
    let node = Node::new();
    let call = node.plugin("host-local").command("ADD").config(&host_local(&node, &["10.1.0.0/24"]));
    let failure = call.run().failure();
    assert_eq!(failure.code, Some(4));
    assert!(failure.msg.contains("CNI_CONTAINERID"), "{failure:?}");
}

#[test]
fn code_5_a_file() {
    let node = Node::new();
    let container = node.container();
    node.file("networks", "a file where a folder should be");
    let attachment = Attachment::new(&node, &container, host_local(&node, &["10.1.0.0/24"]));
    let failure = attachment.add().failure();
    assert_eq!(failure.code, Some(5));
    assert!(failure.msg.contains(node.data_dir().to_str().unwrap()), "the path: {failure:?}");
}

#[test]
fn code_6_invalid_json() {
    let node = Node::new();
    let container = node.container();
    let call = node.plugin("bridge").command("ADD").container(&container).stdin("{");
    assert_eq!(call.run().failure().code, Some(6));
}

#[test]
fn code_7_a_configuration_that_makes_no_sense() {
    let node = Node::new();
    let container = node.container();
    let config = patched(layer2(), json!({"hairpinMode": true, "promiscMode": true}));
    assert_eq!(Attachment::new(&node, &container, config).add().failure().code, Some(7));
    let config = host_local(&node, &["10.1.0.7/24"]);
    assert_eq!(Attachment::new(&node, &container, config).add().failure().code, Some(7));
}

#[test]
fn code_11_exhaustion() {
    let node = Node::new();
    let config = host_local(&node, &["10.1.0.0/30"]);
    let all = attach(&node, &config, 1);
    let late = node.container();
    let late = Attachment::new(&node, &late, config.clone());
    assert_eq!(late.add().failure().code, Some(11));
    all[0].1.del().success();
}

#[test]
fn code_50_status_where_no_add_can_work() {
    let node = Node::new();
    let container = node.container();
    let config = patched(host_local(&node, &["10.1.0.0/30"]), json!({"cniVersion": "1.1.0"}));
    let attachment = Attachment::new(&node, &container, config);
    let file = node.file("networks", "a file where a folder should be");
    assert_eq!(attachment.status().failure().code, Some(50));
    std::fs::remove_file(file).unwrap();
    attachment.status().success();
}

#[test]
fn codes_from_100_an_interface_that_exists() {
    let node = Node::new();
    let container = node.container();
    container.exec(&["ip", "link", "add", "eth0", "type", "bridge"]);
    let attachment = Attachment::new(&node, &container, layer2());
    let code = attachment.add().failure().code.unwrap();
    assert!((100..999).contains(&code), "{code}");
    attachment.del().success();
}
