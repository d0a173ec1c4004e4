//! A node is switched from the Go plugins to these, or back, with running pods: each must
//! understand the resources of the other and remove them completely.

use cni_testkit::{Attachment, Container, Node, bin_dir, go_bin_dir, probe, require};
use conformance::{address, bridge, host_local, layer2, loopback, patched};
use serde_json::{Value, json};

/// One container added by the plugins of one folder and taken over by those of the other.
#[track_caller]
fn handed_over(
    config: impl Fn(&Node) -> Value,
    added_by_go: bool,
    then: impl Fn(&Node, &Container, &Attachment<'_>, &Value),
) {
    let node = Node::new();
    let container = node.container();
    let ours = Attachment::new(&node, &container, config(&node));
    let go = ours.clone().by(go_bin_dir());
    let (first, second) = if added_by_go { (go, ours) } else { (ours, go) };
    let result = first.add().success();
    then(&node, &container, &second, &result);
    assert_eq!(node.reservations("net1"), []);
    assert_eq!(node.ports("br0"), Vec::<String>::new());
}

fn full(node: &Node) -> Value {
    let patch = json!({"isDefaultGateway": true, "hairpinMode": true, "ipam": {"routes": [{"dst": "192.0.2.0/24", "gw": "10.1.0.1"}]}});
    patched(bridge(node, &["10.1.0.0/24", "fd00:1::/64"]), patch)
}

fn spoofchecked(node: &Node) -> Value {
    patched(bridge(node, &["10.1.0.0/24"]), json!({"macspoofchk": true}))
}

fn check_and_del(_: &Node, container: &Container, attachment: &Attachment<'_>, result: &Value) {
    attachment.check(result).success();
    attachment.del_with(result).success();
    assert!(container.link("eth0").is_none());
}

#[test]
fn go_adds_and_we_check_and_delete() {
    require!(probe::go_plugins());
    handed_over(full, true, check_and_del);
}

#[test]
fn we_add_and_go_checks_and_deletes() {
    require!(probe::go_plugins());
    handed_over(full, false, check_and_del);
}

fn with_own_subnet(node: &Node) -> Value {
    let routes = json!([{"dst": "10.1.0.0/24"}, {"dst": "192.0.2.0/24", "gw": "10.1.0.1"}]);
    patched(bridge(node, &["10.1.0.0/24", "fd00:1::/64"]), json!({"ipam": {"routes": routes}}))
}

#[test]
fn a_route_to_the_own_subnet_passes_the_check_of_either() {
    require!(probe::go_plugins());
    handed_over(with_own_subnet, true, check_and_del);
    handed_over(with_own_subnet, false, check_and_del);
}

#[test]
fn go_checks_what_we_added_to_a_bridge_of_the_owners() {
    require!(probe::go_plugins());
    let on_existing = |node: &Node| {
        node.exec(&["ip", "link", "add", "br0", "up", "type", "bridge"]);
        full(node)
    };
    handed_over(on_existing, false, check_and_del);
}

#[test]
fn go_adds_and_we_delete_without_prev_result() {
    require!(probe::go_plugins());
    handed_over(full, true, |_, _, attachment, _| drop(attachment.del().success()));
}

#[test]
fn go_adds_and_we_delete_after_the_namespace_has_gone() {
    require!(probe::go_plugins());
    let node = Node::new();
    let container = node.container();
    let ours = Attachment::new(&node, &container, full(&node));
    let result = ours.clone().by(go_bin_dir()).add().success();
    container.destroy();
    ours.del_with(&result).success();
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn go_adds_layer_2_and_we_check_and_delete() {
    require!(probe::go_plugins());
    handed_over(|_| layer2(), true, check_and_del);
}

#[test]
fn we_add_layer_2_and_go_deletes() {
    require!(probe::go_plugins());
    handed_over(|_| layer2(), false, |_, _, attachment, result| drop(attachment.del_with(result).success()));
}

#[test]
fn go_adds_spoof_rules_and_we_check_and_delete() {
    require!(probe::go_plugins());
    require!(probe::nft_bridge());
    handed_over(spoofchecked, true, check_and_del);
}

#[test]
fn we_add_spoof_rules_and_go_checks_and_deletes() {
    require!(probe::go_plugins());
    require!(probe::nft_bridge());
    handed_over(spoofchecked, false, check_and_del);
}

#[test]
fn loopback_is_handed_over_both_ways() {
    require!(probe::go_plugins());
    for by_go in [true, false] {
        handed_over(
            |_| loopback(),
            by_go,
            |_, container, attachment, result| {
                attachment.check(result).success();
                attachment.del_with(result).success();
                assert!(!container.link("lo").unwrap()["flags"].as_array().unwrap().iter().any(|flag| flag == "UP"));
            },
        );
    }
}

#[test]
fn both_allocate_from_one_store_without_collision() {
    require!(probe::go_plugins());
    let node = Node::new();
    let config = host_local(&node, &["10.1.0.0/28", "fd00:1::/124"]);
    let mut given = Vec::new();
    let mut all = Vec::new();
    for turn in 0..12 {
        let container = node.container();
        let by = if turn % 2 == 0 { bin_dir() } else { go_bin_dir() };
        let attachment = Attachment::new(&node, &container, config.clone()).by(by);
        given.push(address(&attachment.add().success()));
        all.push((container, attachment));
    }
    let mut distinct = given.clone();
    distinct.sort();
    distinct.dedup();
    assert_eq!(distinct.len(), 12, "{given:?}");
    for (turn, (_, attachment)) in all.into_iter().enumerate() {
        let by = if turn % 3 == 0 { bin_dir() } else { go_bin_dir() };
        attachment.by(by).del().success();
    }
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn allocation_continues_where_go_stopped() {
    require!(probe::go_plugins());
    let node = Node::new();
    let config = host_local(&node, &["10.1.0.0/24"]);
    let next = |by| {
        let container = node.container();
        let attachment = Attachment::new(&node, &container, config.clone()).by(by);
        let given = address(&attachment.add().success());
        attachment.del().success();
        given
    };
    let given: Vec<String> = [go_bin_dir(), bin_dir(), go_bin_dir(), bin_dir()].into_iter().map(next).collect();
    assert_eq!(given, ["10.1.0.2", "10.1.0.3", "10.1.0.4", "10.1.0.5"]);
}

#[test]
fn a_concurrent_change_by_go_is_noticed_at_once() {
    require!(probe::go_plugins());
    let node = Node::new();
    // With three addresses, every wrongly free or used address is noticed.
    let config = host_local(&node, &["10.1.0.0/29"]);
    let container = node.container();
    let ours = Attachment::new(&node, &container, config.clone());
    for _ in 0..10 {
        ours.add().success();
        let other = node.container();
        let go = Attachment::new(&node, &other, config.clone()).by(go_bin_dir());
        go.add().success();
        ours.clone().by(go_bin_dir()).del().success();
        ours.add().success();
        go.clone().by(bin_dir()).del().success();
        ours.del().success();
    }
}

#[test]
fn each_bridge_runs_the_other_host_local() {
    require!(probe::go_plugins());
    for (bridge_of, ipam_of) in [(bin_dir(), go_bin_dir()), (go_bin_dir(), bin_dir())] {
        let node = Node::new();
        let container = node.container();
        let config = full(&node);
        let call = |verb: &str, config: &Value| {
            let call = cni_testkit::Invocation::new(&node, bridge_of.join("bridge")).cni_path(&ipam_of);
            call.command(verb).container(&container).config(config).run()
        };
        let result = call("ADD", &config).success();
        let with_prev = patched(config, json!({"prevResult": result}));
        call("CHECK", &with_prev).success();
        call("DEL", &with_prev).success();
        assert_eq!(node.reservations("net1"), []);
    }
}
