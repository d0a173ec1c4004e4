//! cluster-local with real members of etcd: three nodes are three data directories, because only
//! one namespace reaches the members.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use cni_testkit::cluster::Etcd;
use cni_testkit::{Attachment, Node, patience, probe, require};
use conformance::cluster::ranges;
use conformance::{VERSION, address};
use serde_json::json;

use super::supported;

#[test]
fn etcd_gives_nodes_different_addresses_while_it_fails() {
    require!(supported());
    require!(probe::etcd());
    let node = Node::new();
    let mut etcd = Etcd::start(&node, 3);
    let network = |number: usize| {
        let file = node.file(&format!("node{number}.json"), etcd.node_file(&format!("node{number}")).to_string());
        let ipam = json!({"type": "cluster-local", "dataDir": node.dir().join(format!("data{number}")),
                          "ranges": ranges(&["10.61.0.0/26"]), "blockSize": 1, "clusterConf": file});
        json!({"cniVersion": VERSION, "name": "net1", "type": "cluster-local", "ipam": ipam})
    };
    let networks: Vec<_> = (0..3).map(network).collect();
    let (mut addresses, mut attachments) = (BTreeSet::new(), Vec::new());
    for turn in 0..24 {
        if turn == 8 {
            let leader = etcd.leader();
            etcd.kill(leader);
        }
        let container = node.container();
        let attachment = Attachment::new(&node, &container, networks[turn % 3].clone());
        let deadline = Instant::now() + patience(Duration::from_secs(40));
        let result = loop {
            let outcome = attachment.add();
            if outcome.status == Some(0) {
                break outcome.success();
            }
            // During an election.
            assert_eq!(outcome.failure().code, Some(11), "{}", outcome.report());
            assert!(Instant::now() < deadline, "{}", outcome.report());
        };
        assert!(addresses.insert(address(&result)), "{result} twice");
        attachments.push((container, attachment));
    }
    let keys = || etcd.control(&["get", "--prefix", "--keys-only", "/cni/blocks/"]).split_whitespace().count();
    assert_eq!(keys(), 24);
    for (_, attachment) in &attachments {
        attachment.del().success();
    }
    assert_eq!(keys(), 0);
}
