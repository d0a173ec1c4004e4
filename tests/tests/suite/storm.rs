//! A node that comes back with all its pods at once.

use std::collections::BTreeSet;

use cni_testkit::{Container, Node, Started};
use conformance::{addresses, bridge};
use serde_json::{Value, json};

/// Runs `verb` for all at one barrier: every process is started and waits for its configuration to end.
fn all_at_once(node: &Node, verb: &str, containers: &[Container], configs: &[Value]) -> Vec<cni_testkit::Outcome> {
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
        container.exec(&["ping", "-c1", "-w5", "10.1.0.1"]);
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
