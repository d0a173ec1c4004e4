//! The client of etcd, against real members: each is a process in a network namespace of its own.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::time::{Duration, Instant};

use cni_cluster::pool::Block;
use cni_cluster::store::{Change, NodeState, Outcome};
use cni_testkit::cluster::{Authority, Etcd};
use cni_testkit::{Node, patience, probe, require};
use common::{address, claim, create, create_pool, keeps_the_contract, limit, open, open_for, refused, unknown};
use nix::sys::signal::Signal;
use serde_json::json;

const POOL: &str = "10.61.0.0-16";

#[test]
fn one_member_keeps_the_contract() {
    require!(probe::etcd());
    let node = Node::new();
    let etcd = Etcd::start(&node, 1);
    let file = etcd.node_file("node1");
    node.enter(|| {
        let mut store = open(&file);
        keeps_the_contract(&mut *store, "node1", "a");
        assert_eq!(store.node_state("node1").unwrap(), NodeState::Unsupported);
        // Without the key `node`, the kernel's host name.
        let mut file = file.clone();
        file.as_object_mut().unwrap().remove("node");
        let hostname = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert_eq!(open(&file).node().unwrap(), hostname.trim());
    });
}

#[test]
fn a_claim_needs_its_pool() {
    require!(probe::etcd());
    let node = Node::new();
    let etcd = Etcd::start(&node, 1);
    node.enter(|| {
        let mut store = open(&etcd.node_file("node1"));
        let own = claim(POOL, "10.61.0.64", "node1");
        assert!(unknown(store.change(&own, &Change::Create)).contains("its pool has been deleted"));
        create_pool(&mut *store, POOL, "10.61.0.0/16");
        create(&mut *store, &own);
        let advice = store.deletion_advice(&own);
        assert_eq!(advice, "delete the keys of its claims, such as /cni/blocks/10.61.0.0-16/10.61.0.64");
        // Two pools of which one's name begins with the other's.
        create_pool(&mut *store, "10.61.0.0-1", "0.0.0.0/1");
        assert_eq!(store.taken("10.61.0.0-1").unwrap(), []);
    });
}

#[test]
fn damaged_records_do_not_count_as_claims() {
    require!(probe::etcd());
    let node = Node::new();
    let etcd = Etcd::start(&node, 1);
    node.enter(|| {
        let mut store = open(&etcd.node_file("node1"));
        create_pool(&mut *store, POOL, "10.61.0.0/16");
        create(&mut *store, &claim(POOL, "10.61.0.64", "node1"));
        etcd.control(&["put", &format!("/cni/blocks/{POOL}/10.61.0.65"), "garbage"]);
        assert!(
            unknown(store.get(&Block::of(POOL, 1, address("10.61.0.65"))))
                .contains("/cni/blocks/10.61.0.0-16/10.61.0.65")
        );
        assert_eq!(store.claims_of("node1").unwrap().len(), 1);
        assert_eq!(store.taken(POOL).unwrap().len(), 1);
        assert_eq!(store.change(&claim(POOL, "10.61.0.65", "node1"), &Change::Create).unwrap(), Outcome::Conflict);
    });
}

#[test]
fn authentication_of_etcd_is_refused_with_the_reason() {
    require!(probe::etcd());
    let node = Node::new();
    let etcd = Etcd::start(&node, 1);
    node.enter(|| {
        for command in ["user add root:x", "user grant-role root root", "auth enable"] {
            etcd.control(&command.split(' ').collect::<Vec<_>>());
        }
        let (code, text) = refused(open(&etcd.node_file("node1")).pools());
        assert!(code == 103 && text.contains("CommonName") && text.contains("is not supported"), "{text}");
    });
}

#[test]
fn a_certificate_that_etcd_does_not_trust_is_refused() {
    require!(probe::etcd());
    let node = Node::new();
    let etcd = Etcd::start(&node, 1);
    let other = Authority::new();
    let pem = other.issue("/CN=node", "DNS:x");
    let mut file = etcd.node_file("node1");
    file["etcd"]["certFile"] = json!(pem);
    file["etcd"]["keyFile"] = json!(pem);
    let (code, text) = node.enter(|| refused(open(&file).pools()));
    assert!(code == 103 && text.contains("alert"), "{text}");
}

#[test]
fn another_member_answers_for_one_that_is_gone() {
    require!(probe::etcd());
    let node = Node::new();
    let mut etcd = Etcd::start(&node, 3);
    let file = etcd.node_file("node1");
    node.enter(|| create_pool(&mut *open(&file), POOL, "10.61.0.0/16"));
    etcd.kill(0);
    let all_answer = || {
        for _ in 0..8 {
            let (begin, mut store) = (Instant::now(), open(&file));
            // The first request may fail, and an election takes some seconds.
            loop {
                store.set_limit(limit(3000));
                let Err(error) = store.pools() else { break };
                assert!(begin.elapsed() < patience(Duration::from_secs(20)), "{error:?}");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    };
    node.enter(all_answer);
    etcd.start_member(0);
    etcd.wait();
    etcd.signal(1, Signal::SIGSTOP);
    node.enter(all_answer);
    etcd.signal(1, Signal::SIGCONT);
    etcd.wait();
    etcd.cut(2);
    node.enter(all_answer);
    // Without a majority nothing is claimed, and the failure may pass.
    etcd.kill(0);
    node.enter(|| unknown(open_for(&file, 2000).change(&claim(POOL, "10.61.0.64", "node1"), &Change::Create)));
}
