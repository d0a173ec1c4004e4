//! Addresses requested by `runtimeConfig.ips`, `args.cni.ips` and `IP` in `CNI_ARGS`.

use cni_testkit::{Attachment, Node};
use conformance::{addresses, attach, host_local, patched};
use serde_json::{Value, json};

#[track_caller]
fn given(patch: Value, args: Option<&str>) -> Vec<String> {
    let node = Node::new();
    let container = node.container();
    let config = patched(host_local(&node, &["10.1.0.0/24", "fd00:1::/64"]), patch);
    let mut attachment = Attachment::new(&node, &container, config);
    attachment.args = args.map(str::to_owned);
    let result = attachment.add().success();
    attachment.del().success();
    addresses(&result)
}

#[test]
fn each_source_of_a_request_is_used() {
    for address in ["10.1.0.9", "10.1.0.9/24"] {
        let expected = ["10.1.0.9/24", "fd00:1::2/64"];
        assert_eq!(given(json!({"runtimeConfig": {"ips": [address]}}), None), expected);
        assert_eq!(given(json!({"args": {"cni": {"ips": [address]}}}), None), expected);
        assert_eq!(given(json!({}), Some(&format!("IP={address}"))), expected);
    }
}

#[test]
fn both_families_can_be_requested() {
    let ips = json!({"runtimeConfig": {"ips": ["fd00:1::9", "10.1.0.9"]}});
    assert_eq!(given(ips, None), ["10.1.0.9/24", "fd00:1::9/64"]);
    let both = json!({"args": {"cni": {"ips": ["fd00:1::9/64"]}}});
    assert_eq!(given(both, Some("IP=10.1.0.9")), ["10.1.0.9/24", "fd00:1::9/64"]);
}

#[test]
fn an_ipv6_address_may_be_spelled_in_any_way() {
    let ips = json!({"runtimeConfig": {"ips": ["FD00:0001:0:0::0009"]}});
    assert_eq!(given(ips, None), ["10.1.0.2/24", "fd00:1::9/64"]);
}

#[test]
fn of_several_sources_for_one_set_the_highest_wins() {
    let runtime = json!({"runtimeConfig": {"ips": ["10.1.0.7"]}, "args": {"cni": {"ips": ["10.1.0.8"]}}});
    assert_eq!(given(runtime, Some("IP=10.1.0.9"))[0], "10.1.0.7/24");
    let conventions = json!({"args": {"cni": {"ips": ["10.1.0.8"]}}});
    assert_eq!(given(conventions, Some("IP=10.1.0.9"))[0], "10.1.0.8/24");
}

/// Asserts that ADD with these requests fails with this error and reserves nothing.
#[track_caller]
fn refused(ips: Value, code: u64, text: &str) {
    let node = Node::new();
    let container = node.container();
    let config = patched(host_local(&node, &["10.1.0.0/24", "10.2.0.0/24"]), json!({"runtimeConfig": {"ips": ips}}));
    let failure = Attachment::new(&node, &container, config).add().fails_with(code, "");
    assert!(failure.msg.contains(text), "{failure:?} should say `{text}`");
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn the_gateway_cannot_be_requested() {
    refused(json!(["10.1.0.1"]), 7, "requested ip 10.1.0.1 is subnet's gateway");
}

#[test]
fn an_address_of_no_set_fails_the_add() {
    refused(json!(["172.16.0.9"]), 7, "failed to allocate all requested IPs: 172.16.0.9");
}

#[test]
fn two_addresses_of_one_set_from_one_source_fail_the_add() {
    refused(json!(["10.1.0.8", "10.1.0.9"]), 7, "failed to allocate all requested IPs: ");
}

#[test]
fn an_address_outside_start_and_end_fails_the_add() {
    let node = Node::new();
    let container = node.container();
    let range = json!([[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.10", "rangeEnd": "10.1.0.20"}]]);
    let patch = json!({"ipam": {"ranges": range}, "runtimeConfig": {"ips": ["10.1.0.30"]}});
    let attachment = Attachment::new(&node, &container, patched(host_local(&node, &[]), patch));
    attachment.add().fails_with(7, "failed to allocate all requested IPs: 10.1.0.30");
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn a_taken_address_fails_the_add_and_names_its_holder() {
    let node = Node::new();
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"runtimeConfig": {"ips": ["10.1.0.9"]}}));
    let (_c, first, _) = attach(&node, &config, 1).remove(0);
    let late = node.container();
    let failure = Attachment::new(&node, &late, config.clone()).add().failure();
    assert!(failure.msg.contains("requested IP address 10.1.0.9 is not available in range set"), "{failure:?}");
    assert!(format!("{failure:?}").contains(&first.id), "{failure:?} should name {}", first.id);
    assert_eq!(node.reservations("net1").len(), 1, "the first one's alone");
    first.del().success();
}

#[test]
fn allocation_continues_after_a_requested_address() {
    let node = Node::new();
    let config = host_local(&node, &["10.1.0.0/24"]);
    let asked = patched(config.clone(), json!({"runtimeConfig": {"ips": ["10.1.0.99"]}}));
    let (_c, first, _) = attach(&node, &asked, 1).remove(0);
    let (_c, second, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(addresses(&result), ["10.1.0.100/24"]);
    first.del().success();
    second.del().success();
}

#[test]
fn a_failing_later_set_gives_back_what_earlier_sets_gave() {
    let node = Node::new();
    let config = host_local(&node, &["10.1.0.0/24", "10.2.0.0/30"]);
    let (_c, first, _) = attach(&node, &config, 1).remove(0);
    let before = node.reservations("net1");
    let late = node.container();
    Attachment::new(&node, &late, config.clone()).add().fails_with(11, "failed to allocate for range 1: ");
    assert_eq!(node.reservations("net1"), before);
    first.del().success();
}

#[test]
fn a_failing_repeated_add_keeps_the_first_addresses() {
    let node = Node::new();
    let config = host_local(&node, &["10.1.0.0/24", "10.2.0.0/24"]);
    let (_c, attachment, _) = attach(&node, &config, 1).remove(0);
    let before = node.reservations("net1");
    let asking = patched(config, json!({"runtimeConfig": {"ips": ["10.1.0.77"]}}));
    attachment.clone().config(asking).add().failure();
    assert_eq!(node.reservations("net1"), before);
    attachment.del().success();
}
