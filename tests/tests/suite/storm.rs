//! A rebooted node starts all its pods at once.

use std::collections::BTreeSet;

use cni_testkit::{Container, Node, Started, probe, require};
use conformance::{addresses, bridge, patched};
use serde_json::{Value, json};

/// Runs `verb` for all at the same time: every process is started and waits for the end of its
/// configuration.
pub(crate) fn all_at_once(
    node: &Node,
    verb: &str,
    containers: &[Container],
    configs: &[Value],
) -> Vec<cni_testkit::Outcome> {
    let start = |(container, config)| node.plugin("bridge").command(verb).container(container).config(config).start();
    let mut started: Vec<Started> = containers.iter().zip(configs).map(start).collect();
    started.iter_mut().for_each(Started::release);
    started.into_iter().map(Started::finish).collect()
}

#[test]
fn two_hundred_adds_and_two_hundred_dels_leave_nothing() {
    let crowd = cni_testkit::crowd(200);
    let node = Node::new();
    let config = bridge(&node, &["10.1.0.0/16", "fd00:1::/64"]);
    let containers: Vec<Container> = (0..crowd).map(|_| node.container()).collect();
    let configs = vec![config.clone(); crowd];

    let results: Vec<Value> =
        all_at_once(&node, "ADD", &containers, &configs).iter().map(cni_testkit::Outcome::success).collect();
    let distinct: BTreeSet<String> = results.iter().flat_map(addresses).collect();
    assert_eq!(distinct.len(), 2 * crowd);
    assert_eq!(node.ports("br0").len(), crowd);
    assert_eq!(node.reservations("net1").len(), 2 * crowd);
    for container in [&containers[0], &containers[crowd - 1]] {
        container.ping("10.1.0.1");
    }

    let configs: Vec<Value> = results
        .iter()
        .map(|result| {
            let mut config = config.clone();
            config["prevResult"] = json!(result);
            config
        })
        .collect();
    for outcome in all_at_once(&node, "DEL", &containers, &configs) {
        outcome.success();
    }
    assert_eq!(node.ports("br0"), Vec::<String>::new());
    assert_eq!(node.reservations("net1"), []);
}

/// Concurrent first ADDs of a bridge: all find no bridge, one creates it, and the others find it
/// incomplete. Many small groups instead of a large one, because there is one race per bridge.
#[test]
fn concurrent_first_adds_share_one_bridge() {
    for round in 0..8 {
        let node = Node::new();
        let config = bridge(&node, &["10.1.0.0/24", "fd00:1::/64"]);
        let containers: Vec<Container> = (0..8).map(|_| node.container()).collect();
        let configs = vec![config; containers.len()];
        let results: Vec<Value> =
            all_at_once(&node, "ADD", &containers, &configs).iter().map(cni_testkit::Outcome::success).collect();
        let link = node.link("br0").expect("a bridge");
        let macs: BTreeSet<&str> =
            results.iter().map(|result| result["interfaces"][0]["mac"].as_str().unwrap()).collect();
        assert_eq!(
            macs,
            BTreeSet::from([link["address"].as_str().unwrap()]),
            "round {round}: all name the MAC it kept"
        );
        assert_eq!(node.ports("br0").len(), containers.len(), "round {round}");
        let served = node.json(&["ip", "-j", "addr", "show", "br0"]);
        let served = served[0]["addr_info"].as_array().unwrap().iter().filter_map(|address| address["local"].as_str());
        let served: Vec<&str> = served.filter(|address| !address.starts_with("fe80")).collect();
        assert_eq!(served, ["10.1.0.1", "fd00:1::1"], "round {round}");
        for container in &containers {
            container.ping("10.1.0.1");
        }
        for outcome in all_at_once(&node, "DEL", &containers, &configs) {
            outcome.success();
        }
        assert_eq!(node.ports("br0"), Vec::<String>::new());
        assert_eq!(node.reservations("net1"), []);
    }
}

#[test]
fn concurrent_first_adds_of_two_vlans_create_two_gateways() {
    require!(probe::vlan_filtering());
    let node = Node::new();
    let network = |vlan: u64| {
        let subnets = [format!("10.{vlan}.0.0/24"), format!("fd00:{vlan}::/64")];
        let subnets: Vec<&str> = subnets.iter().map(String::as_str).collect();
        patched(bridge(&node, &subnets), json!({"name": format!("net{vlan}"), "vlan": vlan}))
    };
    let containers: Vec<Container> = (0..6).map(|_| node.container()).collect();
    let configs: Vec<Value> = (0..6).map(|number| network(100 + number % 2)).collect();
    let results: Vec<Value> =
        all_at_once(&node, "ADD", &containers, &configs).iter().map(cni_testkit::Outcome::success).collect();
    for (number, container) in containers.iter().enumerate() {
        let vlan = 100 + number % 2;
        container.ping(&format!("10.{vlan}.0.1"));
        container.ping(&format!("fd00:{vlan}::1"));
    }
    let configs: Vec<Value> = configs
        .iter()
        .zip(&results)
        .map(|(config, result)| patched(config.clone(), json!({"prevResult": result})))
        .collect();
    for verb in ["CHECK", "DEL"] {
        for outcome in all_at_once(&node, verb, &containers, &configs) {
            outcome.success();
        }
    }
    let gateways = node.ports("br0");
    assert_eq!(gateways.len(), 2, "{gateways:?}");
    for name in ["br0.100", "br0.101"].map(str::to_owned).iter().chain(&gateways) {
        node.expect_left(name);
    }
}
