//! loopback: sets `lo` up and returns a result in the right form.

use cni_testkit::{Attachment, Container, Node};
use conformance::{loopback, patched};
use serde_json::{Value, json};

fn is_up(container: &Container) -> bool {
    let lo = container.link("lo").unwrap();
    lo["flags"].as_array().unwrap().iter().any(|flag| flag == "UP")
}

#[test]
fn lo_goes_up_and_down() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, loopback());
    assert!(!is_up(&container));
    let result = attachment.add().success();
    assert!(is_up(&container));
    assert_eq!(container.addresses("lo"), ["127.0.0.1/8", "::1/128"]);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert!(!is_up(&container));
}

#[test]
fn the_interface_s_name_does_not_matter() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, loopback()).ifname("whatever0").args("FOO=BAR");
    let result = attachment.add().success();
    assert_eq!(result["interfaces"][0]["name"], "lo");
    attachment.del().success();
}

#[test]
fn the_second_add_succeeds_and_so_does_the_second_del() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, loopback());
    let first = attachment.add().success();
    assert_eq!(attachment.add().success(), first);
    attachment.del().success();
    attachment.del().success();
}

#[test]
fn check_fails_when_lo_is_down() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, loopback());
    let result = attachment.add().success();
    container.exec(&["ip", "link", "set", "lo", "down"]);
    let failure = attachment.check(&result).failure();
    assert!(failure.msg.contains("loopback interface is down"), "{failure:?}");
}

#[test]
fn del_needs_no_namespace() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, loopback());
    for path in ["", "/nowhere/ns"] {
        attachment.clone().netns(path).del().success();
    }
    attachment.invocation("DEL", None).without("CNI_NETNS").run().success();
}

#[test]
fn del_of_a_path_that_was_unmounted_succeeds() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, loopback());
    attachment.add().success();
    container.unmount();
    attachment.del().success();
}

#[test]
fn an_address_that_is_not_a_loopback_address_is_refused() {
    let node = Node::new();
    let container = node.container();
    container.exec(&["ip", "addr", "add", "10.1.0.1/24", "dev", "lo"]);
    let failure = Attachment::new(&node, &container, loopback()).add().failure();
    let text = "loopback interface found with non-loopback address \"10.1.0.1";
    assert!(failure.msg.contains(text), "{failure:?} should say `{text}`");
}

#[test]
fn more_loopback_addresses_are_fine() {
    let node = Node::new();
    let container = node.container();
    container.exec(&["ip", "addr", "add", "127.9.9.9/8", "dev", "lo"]);
    Attachment::new(&node, &container, loopback()).add().success();
}

#[test]
fn a_prev_result_is_handed_on() {
    let node = Node::new();
    let container = node.container();
    let prev = json!({
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/x"}],
        "ips": [{"address": "10.1.0.2/24", "interface": 0}],
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}],
        "dns": {"nameservers": ["192.0.2.1"]},
    });
    let result = Attachment::new(&node, &container, loopback()).add_after(&prev).success();
    assert_eq!(result, prev);
}

/// ADD, CHECK where the version has it, DEL; returns the result.
#[track_caller]
fn life_in(version: &str) -> (Value, String) {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, patched(loopback(), json!({"cniVersion": version})));
    let result = attachment.add().success();
    assert_eq!(result["cniVersion"], version);
    if version >= "0.4.0" {
        attachment.check(&result).success();
    }
    attachment.del_with(&result).success();
    (result, container.netns().to_str().unwrap().to_owned())
}

#[track_caller]
fn the_first_shape(version: &str) {
    let (result, _) = life_in(version);
    assert_eq!((&result["ip4"]["ip"], &result["ip6"]["ip"]), (&json!("127.0.0.1/8"), &json!("::1/128")), "{result:#}");
    assert!(result.get("interfaces").is_none() && result.get("ips").is_none(), "{result:#}");
}

#[track_caller]
fn the_second_shape(version: &str) {
    let (result, sandbox) = life_in(version);
    let expected = json!({
        "cniVersion": version,
        "interfaces": [{"name": "lo", "mac": "00:00:00:00:00:00", "sandbox": sandbox}],
        "ips": [
            {"version": "4", "interface": 0, "address": "127.0.0.1/8"},
            {"version": "6", "interface": 0, "address": "::1/128"},
        ],
        "dns": {},
    });
    assert_eq!(result, expected);
}

#[track_caller]
fn the_third_shape(version: &str) {
    let (result, sandbox) = life_in(version);
    assert_eq!(result["interfaces"][0]["name"], "lo");
    assert_eq!(result["interfaces"][0]["mac"], "00:00:00:00:00:00");
    assert_eq!(result["interfaces"][0]["sandbox"], sandbox);
    let ips = json!([{"interface": 0, "address": "127.0.0.1/8"}, {"interface": 0, "address": "::1/128"}]);
    assert_eq!(result["ips"], ips);
}

#[test]
fn verbs_and_result_in_0_1_0() {
    the_first_shape("0.1.0");
}

#[test]
fn verbs_and_result_in_0_2_0() {
    the_first_shape("0.2.0");
}

#[test]
fn verbs_and_result_in_0_3_0() {
    the_second_shape("0.3.0");
}

#[test]
fn verbs_and_result_in_0_3_1() {
    the_second_shape("0.3.1");
}

#[test]
fn verbs_and_result_in_0_4_0() {
    the_second_shape("0.4.0");
}

#[test]
fn verbs_and_result_in_1_0_0() {
    the_third_shape("1.0.0");
}

#[test]
fn verbs_and_result_in_1_1_0() {
    the_third_shape("1.1.0");
}
