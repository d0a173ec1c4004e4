//! Invalid configurations and their errors. DEL releases with any configuration.

use cni_testkit::{Attachment, Node};
use conformance::{host_local, patched};
use serde_json::{Value, json};

/// Asserts that ADD with these ranges fails with this text, and that DEL of an existing reservation
/// still works.
#[track_caller]
fn refused(ranges: Value, text: &str) {
    refused_config(json!({"ipam": {"ranges": ranges}}), text);
}

#[track_caller]
fn refused_config(patch: Value, text: &str) {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, patched(host_local(&node, &["10.1.0.0/24"]), patch));
    let failure = attachment.add().fails_with(7, "");
    assert!(failure.msg.contains(text), "{failure:?} should say `{text}`");
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn a_range_is_required() {
    refused(json!([]), "no IP ranges specified");
}

#[test]
fn an_ipam_key_is_required() {
    let node = Node::new();
    let container = node.container();
    let config = json!({"cniVersion": "1.0.0", "name": "net1", "type": "host-local"});
    Attachment::new(&node, &container, config).add().fails_with(7, "IPAM config missing 'ipam' key");
}

#[test]
fn a_set_must_hold_a_range() {
    refused(json!([[]]), "invalid range set 0: empty range set");
}

#[test]
fn a_range_must_have_a_subnet() {
    refused(json!([[{}]]), "IP <nil> not v4 nor v6");
}

#[test]
fn a_subnet_must_have_room() {
    for (subnet, network) in
        [("10.1.0.0/31", "10.1.0.0/31"), ("10.1.0.1/32", "10.1.0.1/32"), ("fd00::/127", "fd00::/127")]
    {
        refused(json!([[{"subnet": subnet}]]), &format!("Network {network} too small to allocate from"));
    }
}

#[test]
fn a_subnet_must_not_have_host_bits() {
    let text = "Network has host bits set. For a subnet mask of length 24 the network address is 10.1.0.0";
    refused(json!([[{"subnet": "10.1.0.5/24"}]]), text);
}

#[test]
fn a_subnet_must_be_a_valid_prefix() {
    for subnet in ["10.1.0.0", "10.1.0.0/33", "10.1.0/24", "010.1.0.0/24", "fd00::/129", "x/24", ""] {
        let node = Node::new();
        let container = node.container();
        let config = patched(host_local(&node, &[]), json!({"ipam": {"ranges": [[{"subnet": subnet}]]}}));
        Attachment::new(&node, &container, config).add().failure();
        assert_eq!(node.reservations("net1"), []);
    }
}

#[test]
fn start_and_end_must_be_inside() {
    let with = |key: &str, value: &str| json!([[{"subnet": "10.1.0.0/24", key: value}]]);
    refused(with("rangeStart", "10.2.0.1"), "RangeStart 10.2.0.1 not in network 10.1.0.0/24");
    refused(with("rangeEnd", "10.2.0.1"), "RangeEnd 10.2.0.1 not in network 10.1.0.0/24");
    refused(with("rangeStart", "fd00::1"), "RangeStart fd00::1 not in network 10.1.0.0/24");
}

#[test]
fn start_must_not_be_behind_the_end() {
    refused(json!([[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.9", "rangeEnd": "10.1.0.8"}]]), "not in network");
}

#[test]
fn the_ranges_of_a_set_must_be_of_one_family() {
    refused(
        json!([[{"subnet": "10.1.0.0/24"}, {"subnet": "fd00::/64"}]]),
        "invalid range set 0: mixed address families",
    );
}

#[test]
fn ranges_must_not_overlap() {
    let set = json!([[{"subnet": "10.1.0.0/24"}, {"subnet": "10.1.0.0/16"}]]);
    refused(set, "subnets 10.1.0.1-10.1.0.254 and 10.1.0.1-10.1.255.254 overlap");
    refused(json!([[{"subnet": "10.1.0.0/24"}], [{"subnet": "10.1.0.0/16"}]]), "range set 0 overlaps with 1");
}

#[test]
fn ranges_of_one_subnet_that_do_not_overlap_are_fine() {
    let node = Node::new();
    let low = json!({"subnet": "10.1.0.0/24", "rangeEnd": "10.1.0.99"});
    let high = json!({"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.100"});
    let config = patched(host_local(&node, &[]), json!({"ipam": {"ranges": [[low], [high]]}}));
    let (_c, attachment, result) = conformance::attach(&node, &config, 1).remove(0);
    assert_eq!(conformance::addresses(&result), ["10.1.0.2/24", "10.1.0.100/24"]);
    attachment.del().success();
}

#[test]
fn a_requested_address_must_be_valid() {
    refused_config(json!({"runtimeConfig": {"ips": ["nonsense"]}}), "nonsense");
    refused_config(json!({"args": {"cni": {"ips": ["10.1.0.300"]}}}), "10.1.0.300");
}

#[test]
fn del_needs_no_ranges() {
    let node = Node::new();
    let config = host_local(&node, &["10.1.0.0/24"]);
    for patch in [
        json!({"ipam": {"ranges": []}}),
        json!({"ipam": {"ranges": null}}),
        json!({"ipam": {"ranges": [[{"subnet": "10.1.0.5/24"}]]}}),
        json!({"ipam": {"ranges": [[{"subnet": "172.16.0.0/16"}]]}}),
        json!({"ipam": {"resolvConf": "/nowhere"}}),
        json!({"runtimeConfig": {"ips": ["nonsense"]}}),
        json!({"cniVersion": "0.2.0", "ipam": {"ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "10.2.0.0/24"}]]}}),
    ] {
        let (_container, attachment, _) = conformance::attach(&node, &config, 1).remove(0);
        attachment.clone().config(patched(config.clone(), patch.clone())).del().success();
        assert_eq!(node.reservations("net1"), [], "after a DEL with {patch}");
    }
}
