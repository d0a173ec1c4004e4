//! The choice of the next container's address.

use cni_testkit::{Attachment, Container, Node};
use conformance::{address, addresses, attach, host_local, ipam, patched};
use serde_json::{Value, json};

/// Adds a container and returns it with its first address.
#[track_caller]
fn next<'n>(node: &'n Node, config: &Value) -> (Container, Attachment<'n>, String) {
    let (container, attachment, result) = attach(node, config, 1).remove(0);
    (container, attachment, address(&result))
}

#[test]
fn the_first_address_follows_the_gateway() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &host_local(&node, &["10.1.0.0/24"]), 1).remove(0);
    assert_eq!(result["ips"], json!([{"address": "10.1.0.2/24", "gateway": "10.1.0.1"}]));
    assert!(result.get("interfaces").is_none(), "an IPAM plugin names no interfaces: {result:#}");
    attachment.del().success();
}

#[test]
fn released_addresses_are_not_handed_out_again_at_once() {
    let node = Node::new();
    let config = host_local(&node, &["10.1.0.0/24"]);
    for expected in ["10.1.0.2", "10.1.0.3", "10.1.0.4"] {
        let (_c, attachment, address) = next(&node, &config);
        assert_eq!(address, expected);
        attachment.del().success();
    }
}

#[test]
fn a_slash_30_has_room_for_one() {
    let node = Node::new();
    let config = host_local(&node, &["10.1.0.0/30"]);
    let (_c, first, address) = next(&node, &config);
    assert_eq!(address, "10.1.0.2");
    let late = node.container();
    let text = "failed to allocate for range 0: no IP addresses available in range set: 10.1.0.1-10.1.0.2";
    Attachment::new(&node, &late, config.clone()).add().fails_with(11, text);
    first.del().success();
    let (_c, second, address) = next(&node, &config);
    assert_eq!(address, "10.1.0.2");
    second.del().success();
}

#[test]
fn allocation_wraps_around_at_the_end_of_the_range() {
    let node = Node::new();
    let config = host_local(&node, &["10.1.0.0/29"]);
    let mut all = attach(&node, &config, 5);
    assert_eq!(address(&all[4].2), "10.1.0.6");
    let (_c, freed, _) = all.remove(1);
    freed.del().success();
    let (_c, again, wrapped) = next(&node, &config);
    assert_eq!(wrapped, "10.1.0.3", "the only free one, behind the end and the taken beginning");
    again.del().success();
    for (_, attachment, _) in all {
        attachment.del().success();
    }
}

#[test]
fn start_and_end_bound_the_range() {
    let node = Node::new();
    let range = json!({"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.20", "rangeEnd": "10.1.0.21"});
    let config = patched(host_local(&node, &[]), json!({"ipam": {"ranges": [[range]]}}));
    let all = attach(&node, &config, 2);
    assert_eq!(all.iter().map(|one| address(&one.2)).collect::<Vec<_>>(), ["10.1.0.20", "10.1.0.21"]);
    let late = node.container();
    Attachment::new(&node, &late, config.clone()).add().fails_with(11, "failed to allocate for range 0: ");
    for (_, attachment, _) in all {
        attachment.del().success();
    }
}

#[test]
fn the_ends_of_a_subnet_are_handed_out_if_the_range_says_so() {
    let node = Node::new();
    let range = json!({"subnet": "10.1.0.0/30", "rangeStart": "10.1.0.0", "rangeEnd": "10.1.0.3"});
    let config = patched(host_local(&node, &[]), json!({"ipam": {"ranges": [[range]]}}));
    let all = attach(&node, &config, 3);
    let given: Vec<String> = all.iter().map(|one| address(&one.2)).collect();
    assert_eq!(given, ["10.1.0.0", "10.1.0.2", "10.1.0.3"], "all but the gateway");
    for (_, attachment, _) in all {
        attachment.del().success();
    }
}

#[test]
fn the_broadcast_address_is_not_handed_out_by_default() {
    let node = Node::new();
    let all = attach(&node, &host_local(&node, &["10.1.0.0/29"]), 5);
    let given: Vec<String> = all.iter().map(|one| address(&one.2)).collect();
    assert_eq!(given.last().map(String::as_str), Some("10.1.0.6"));
    for (_, attachment, _) in all {
        attachment.del().success();
    }
}

#[test]
fn a_gateway_inside_the_range_is_skipped() {
    let node = Node::new();
    let range = json!({"subnet": "10.1.0.0/29", "rangeStart": "10.1.0.1", "gateway": "10.1.0.2"});
    let config = patched(host_local(&node, &[]), json!({"ipam": {"ranges": [[range]]}}));
    let all = attach(&node, &config, 2);
    assert_eq!(all.iter().map(|one| address(&one.2)).collect::<Vec<_>>(), ["10.1.0.1", "10.1.0.3"]);
    assert_eq!(all[0].2["ips"][0]["gateway"], "10.1.0.2");
    for (_, attachment, _) in all {
        attachment.del().success();
    }
}

#[test]
fn the_ranges_of_a_set_are_one_pool() {
    let node = Node::new();
    let set = json!([{"subnet": "10.1.0.0/30"}, {"subnet": "10.2.0.0/30"}]);
    let config = patched(host_local(&node, &[]), json!({"ipam": {"ranges": [set]}}));
    let mut all = attach(&node, &config, 2);
    let results: Vec<_> = all.iter().map(|one| one.2["ips"].clone()).collect();
    assert_eq!(results[0], json!([{"address": "10.1.0.2/30", "gateway": "10.1.0.1"}]));
    assert_eq!(results[1], json!([{"address": "10.2.0.2/30", "gateway": "10.2.0.1"}]));
    let late = node.container();
    let full =
        "failed to allocate for range 0: no IP addresses available in range set: 10.1.0.1-10.1.0.2,10.2.0.1-10.2.0.2";
    Attachment::new(&node, &late, config.clone()).add().fails_with(11, full);
    all.remove(0).1.del().success();
    let (_c, again, given) = next(&node, &config);
    assert_eq!(given, "10.1.0.2", "round the ranges and back to the first");
    again.del().success();
    all.remove(0).1.del().success();
}

#[test]
fn each_set_gives_one_address_in_order() {
    let node = Node::new();
    let config = host_local(&node, &["10.1.0.0/24", "fd00:1::/64", "10.2.0.0/24"]);
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(addresses(&result), ["10.1.0.2/24", "fd00:1::2/64", "10.2.0.2/24"]);
    let gateways: Vec<_> = (0..3).map(|i| result["ips"][i]["gateway"].clone()).collect();
    assert_eq!(gateways, ["10.1.0.1", "fd00:1::1", "10.2.0.1"]);
    attachment.del().success();
}

#[test]
fn the_old_style_subnet_comes_before_the_ranges() {
    let node = Node::new();
    let old = json!({"subnet": "10.9.0.0/24", "rangeStart": "10.9.0.7", "gateway": "10.9.0.254"});
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"ipam": old}));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(addresses(&result), ["10.9.0.7/24", "10.1.0.2/24"]);
    assert_eq!(result["ips"][0]["gateway"], "10.9.0.254");
    attachment.del().success();
}

#[test]
fn the_runtime_s_ranges_come_before_all_others() {
    let node = Node::new();
    let ranges = json!({"ipRanges": [[{"subnet": "10.7.0.0/24", "rangeStart": "10.7.0.9"}]]});
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"runtimeConfig": ranges}));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(addresses(&result), ["10.7.0.9/24", "10.1.0.2/24"]);
    attachment.del().success();
}

#[test]
fn the_runtime_s_ranges_alone_are_enough() {
    let node = Node::new();
    let bare = json!({"cniVersion": "1.0.0", "name": "net1", "type": "host-local",
                      "ipam": {"type": "host-local", "dataDir": node.data_dir()}});
    let config = patched(bare, json!({"runtimeConfig": {"ipRanges": [[{"subnet": "10.7.0.0/24"}]]}}));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(addresses(&result), ["10.7.0.2/24"]);
    attachment.del().success();
}

#[test]
fn a_last_address_outside_the_range_restarts_the_allocation() {
    let node = Node::new();
    node.file("networks/net1/last_reserved_ip.0", "172.16.0.1");
    let (_c, attachment, address) = next(&node, &host_local(&node, &["10.1.0.0/24"]));
    assert_eq!(address, "10.1.0.2");
    attachment.del().success();
}

#[test]
fn a_damaged_last_address_restarts_the_allocation() {
    let node = Node::new();
    for garbage in ["", "garbage", "\0\0\0\0", "10.1.0.300"] {
        node.file("networks/net1/last_reserved_ip.0", garbage);
        let (_c, attachment, address) = next(&node, &host_local(&node, &["10.1.0.0/24"]));
        assert_eq!(address, "10.1.0.2", "after {garbage:?}");
        attachment.del().success();
    }
}

#[test]
fn a_large_ipv6_subnet_costs_no_more_than_a_small_one() {
    let node = Node::new();
    let all = attach(&node, &host_local(&node, &["fd00:1::/64", "fd00:2::/96"]), 3);
    assert_eq!(addresses(&all[2].2), ["fd00:1::4/64", "fd00:2::4/96"]);
    for (_, attachment, _) in all {
        attachment.del().success();
    }
}

#[test]
fn twenty_concurrent_adds_get_twenty_addresses() {
    let node = Node::new();
    let config = host_local(&node, &["10.1.0.0/24", "fd00:1::/64"]);
    let containers: Vec<Container> = (0..20).map(|_| node.container()).collect();
    let start =
        |container: &Container| node.plugin("host-local").command("ADD").container(container).config(&config).start();
    let mut started: Vec<_> = containers.iter().map(start).collect();
    started.iter_mut().for_each(cni_testkit::Started::release);
    let mut given: Vec<String> = started.into_iter().flat_map(|one| addresses(&one.finish().success())).collect();
    given.sort();
    given.dedup();
    assert_eq!(given.len(), 40);
    for container in &containers {
        Attachment::new(&node, container, config.clone()).del().success();
    }
}

#[test]
fn ranges_below_0_3_0_are_one_per_family() {
    let node = Node::new();
    let container = node.container();
    for version in ["0.1.0", "0.2.0"] {
        let config = patched(host_local(&node, &["10.1.0.0/24", "10.2.0.0/24"]), json!({"cniVersion": version}));
        let text = format!("CNI version {version} does not support more than 1 address per family");
        Attachment::new(&node, &container, config).add().fails_with(7, &text);
        let config = json!({"cniVersion": version, "ipam": ipam(&node, &["10.1.0.0/24", "fd00:1::/64"])});
        let attachment = Attachment::new(&node, &container, patched(host_local(&node, &[]), config));
        let result = attachment.add().success();
        assert!(result["ip4"]["ip"].is_string() && result["ip6"]["ip"].is_string(), "{result:#}");
        attachment.del().success();
    }
}
