//! ADD, repeated ADD, CHECK, DEL and repeated DEL; several interfaces of one container.

use cni_testkit::{Attachment, Node};
use conformance::{VERSIONS, addresses, attach, bridge, host_local, patched};
use serde_json::{Value, json};

#[test]
fn the_second_add_of_an_attachment_fails_and_changes_nothing() {
    let node = Node::new();
    let (container, attachment, _) = attach(&node, &host_local(&node, &["10.1.0.0/24"]), 1).remove(0);
    let before = node.reservations("net1");
    let failure = attachment.add().failure();
    let text = format!("10.1.0.2 has been allocated to {}, duplicate allocation is not allowed", container.id);
    assert!(failure.msg.contains(&text), "{failure:?} should say `{text}`");
    assert_eq!(node.reservations("net1"), before);
    attachment.del().success();
}

#[test]
fn with_reuse_a_second_add_returns_the_same_addresses() {
    let node = Node::new();
    let config = patched(host_local(&node, &["10.1.0.0/24", "fd00:1::/64"]), json!({"ipam": {"reuse": true}}));
    let mut all = attach(&node, &config, 2);
    let before = node.reservations("net1");
    let (container, attachment, result) = all.remove(0);
    assert_eq!(attachment.add().success(), result);
    assert_eq!(node.reservations("net1"), before);
    attachment.check(&result).success();
    // Another interface of the container is another attachment.
    let other = attachment.clone().ifname("eth1");
    assert_eq!(addresses(&other.add().success()), ["10.1.0.4/24", "fd00:1::4/64"]);
    other.del().success();
    let strict = attachment.clone().config(patched(config.clone(), json!({"ipam": {"reuse": false}})));
    let failure = strict.add().fails_naming(102, &["10.1.0.2", "fd00:1::2", "reuse"]);
    let text = format!("failed to allocate for range 0: 10.1.0.2 has been allocated to {}, dupl", container.id);
    assert!(failure.msg.starts_with(&text), "{failure:?}");
    // An ADD with an unread result removes nothing that existed before.
    assert_eq!(attachment.invocation("ADD", None).with_closed_stdout().run().status, Some(1));
    assert_eq!(node.reservations("net1"), before);
    attachment.del().success();
    all.remove(0).1.del().success();
}

#[test]
fn with_reuse_a_restarted_container_keeps_its_address() {
    let node = Node::new();
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"ipam": {"reuse": true}}));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    // The runtime has lost the namespace without a DEL, and starts the same container in a new one.
    container.destroy();
    let fresh = node.container();
    let again = attachment.clone().netns(fresh.netns());
    assert_eq!(addresses(&again.add().success()), addresses(&result));
    assert_eq!(fresh.addresses("eth0"), addresses(&result));
    again.del().success();
}

#[test]
fn the_second_del_succeeds() {
    let node = Node::new();
    let (_c, attachment, _) = attach(&node, &host_local(&node, &["10.1.0.0/24"]), 1).remove(0);
    attachment.del().success();
    attachment.del().success();
}

#[test]
fn del_without_an_earlier_add_succeeds() {
    let node = Node::new();
    let container = node.container();
    Attachment::new(&node, &container, host_local(&node, &["10.1.0.0/24"])).del().success();
}

#[test]
fn del_needs_no_namespace() {
    let node = Node::new();
    for path in ["", "/nowhere/ns", "/etc/passwd"] {
        let (_c, attachment, _) = attach(&node, &host_local(&node, &["10.1.0.0/24"]), 1).remove(0);
        attachment.netns(path).del().success();
        assert_eq!(node.reservations("net1"), []);
    }
}

#[test]
fn interfaces_of_one_container_have_addresses_of_their_own() {
    let node = Node::new();
    let (_c, eth0, _) = attach(&node, &host_local(&node, &["10.1.0.0/24"]), 1).remove(0);
    let eth1 = eth0.clone().ifname("eth1");
    assert_eq!(addresses(&eth1.add().success()), ["10.1.0.3/24"]);
    eth0.del().success();
    assert_eq!(node.reservations("net1"), [("10.1.0.3".to_owned(), format!("{}\r\neth1", eth1.id))]);
    eth1.del().success();
}

#[test]
fn del_takes_no_other_container_s_address() {
    let node = Node::new();
    let all = attach(&node, &host_local(&node, &["10.1.0.0/24"]), 2);
    let mut prefix = all[0].1.clone();
    prefix.id = all[0].1.id[..3].to_owned();
    prefix.del().success();
    assert_eq!(node.reservations("net1").len(), 2);
    all[0].1.del().success();
    assert_eq!(node.reservations("net1").len(), 1);
    all[1].1.del().success();
}

#[test]
fn check_passes_only_while_the_address_is_reserved() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &host_local(&node, &["10.1.0.0/24"]), 1).remove(0);
    attachment.check(&result).success();
    attachment.del().success();
    attachment.check(&result).fails_with(3, "host-local: Failed to find address added by container");
}

#[test]
fn check_accepts_an_id_only_reservation() {
    let node = Node::new();
    let container = node.container();
    node.file("networks/net1/10.1.0.2", &container.id);
    let attachment = Attachment::new(&node, &container, host_local(&node, &["10.1.0.0/24"]));
    attachment.check(&json!({"cniVersion": "1.0.0", "ips": [{"address": "10.1.0.2/24"}]})).success();
    attachment.del().success();
}

#[test]
fn check_fails_for_another_interface() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &host_local(&node, &["10.1.0.0/24"]), 1).remove(0);
    attachment.clone().ifname("eth1").check(&result).failure();
    attachment.del().success();
}

/// Runs ADD, CHECK where the version has it, and DEL in one version.
#[track_caller]
fn life_in(version: &str) -> Value {
    let node = Node::new();
    let config = patched(
        host_local(&node, &["10.1.0.0/24", "fd00:1::/64"]),
        json!({"cniVersion": version, "ipam": {"routes": [{"dst": "0.0.0.0/0"}, {"dst": "fd00:9::/64", "gw": "fd00:1::9"}]}}),
    );
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(result["cniVersion"], version);
    if VERSIONS.iter().position(|v| *v == version) >= VERSIONS.iter().position(|v| *v == "0.4.0") {
        attachment.check(&result).success();
    }
    attachment.del_with(&result).success();
    result
}

#[track_caller]
fn the_first_shape(version: &str) {
    let expected = json!({
        "cniVersion": version,
        "ip4": {"ip": "10.1.0.2/24", "gateway": "10.1.0.1", "routes": [{"dst": "0.0.0.0/0"}]},
        "ip6": {"ip": "fd00:1::2/64", "gateway": "fd00:1::1", "routes": [{"dst": "fd00:9::/64", "gw": "fd00:1::9"}]},
        "dns": {},
    });
    assert_eq!(life_in(version), expected);
}

#[track_caller]
fn the_second_shape(version: &str) {
    let expected = json!({
        "cniVersion": version,
        "ips": [
            {"version": "4", "address": "10.1.0.2/24", "gateway": "10.1.0.1"},
            {"version": "6", "address": "fd00:1::2/64", "gateway": "fd00:1::1"},
        ],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "fd00:9::/64", "gw": "fd00:1::9"}],
        "dns": {},
    });
    assert_eq!(life_in(version), expected);
}

#[track_caller]
fn the_third_shape(version: &str) {
    let expected = json!({
        "cniVersion": version,
        "ips": [
            {"address": "10.1.0.2/24", "gateway": "10.1.0.1"},
            {"address": "fd00:1::2/64", "gateway": "fd00:1::1"},
        ],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "fd00:9::/64", "gw": "fd00:1::9"}],
    });
    let mut result = life_in(version);
    if result["dns"] == json!({}) {
        result.as_object_mut().unwrap().remove("dns");
    }
    assert_eq!(result, expected);
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
