//! The client of etcd, against real members: each is a process in a network namespace of its own.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cni_cluster::store::{Claim, Created, Deleted, NodeState, Version};
use cni_testkit::cluster::{Authority, Etcd};
use cni_testkit::{Ended, Node, patience, probe, require, rounds};
use common::{address, claim, create, create_pool, keeps_the_contract, open, open_for, refused, unknown};
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
        assert!(unknown(store.create(&own)).contains("its pool has been deleted"));
        create_pool(&mut *store, POOL, "10.61.0.0/16");
        create(&mut *store, &own);
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
        assert!(unknown(store.get(POOL, address("10.61.0.65"))).contains("/cni/blocks/10.61.0.0-16/10.61.0.65"));
        assert_eq!(store.claims_of("node1").unwrap().len(), 1);
        assert_eq!(store.taken(POOL).unwrap().len(), 1);
        assert_eq!(store.create(&claim(POOL, "10.61.0.65", "node1")).unwrap(), Created::Exists);
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
                store.set_deadline(Instant::now() + Duration::from_secs(3));
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
    node.enter(|| unknown(open_for(&file, 2000).create(&claim(POOL, "10.61.0.64", "node1"))));
}

/// Claims blocks from ten nodes while `disturb` acts on the members. Afterwards each block belongs
/// to one node, which knows of it, and has the version that the node knows.
fn claims_of_ten_nodes(disturb: impl FnOnce(&mut Etcd<'_>) + Send) {
    require!(probe::etcd());
    let node = Node::new();
    let mut etcd = Etcd::start(&node, 3);
    let file = etcd.node_file("");
    let of_node = |name: &str| {
        let mut file = file.clone();
        file["node"] = json!(name);
        file
    };
    node.enter(|| create_pool(&mut *open(&of_node("n")), POOL, "10.61.0.0/16"));
    let count = rounds(400) as usize;
    let (next, unknowns) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let claimed: Mutex<BTreeMap<String, (String, Version)>> = Mutex::default();
    let give_up = Instant::now() + patience(Duration::from_secs(90));
    // Claims the block of this number, or finds who has it.
    let claim_block = |number: usize, name: &str| {
        let first = format!("10.61.{}.{}", number / 256, number % 256);
        let own = Claim { nonce: format!("{name}-{number}"), ..claim(POOL, &first, name) };
        let mut store = open(&of_node(name));
        loop {
            assert!(Instant::now() < give_up, "no claim in time");
            store.set_deadline(Instant::now() + Duration::from_secs(3));
            let version = match store.create(&own) {
                Ok(Created::Created(version)) => version,
                Ok(Created::Exists) => match store.get(POOL, own.first) {
                    Ok(Some((found, version))) if found == own => version,
                    Ok(_) => return,
                    Err(_) => continue,
                },
                Err(_) => {
                    unknowns.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(50));
                    continue;
                }
            };
            let known = (name.to_owned(), version);
            let earlier = claimed.lock().unwrap().insert(own.first.to_string(), known.clone());
            assert!(earlier.is_none_or(|earlier| earlier == known), "two nodes have {first}");
            return;
        }
    };
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (claim_block, next, node, ended) = (&claim_block, &next, &node, &ended);
        let claimers: Vec<_> = (0..10)
            .map(|number| {
                scope.spawn(move || {
                    node.enter(|| {
                        while !ended.load(Ordering::Relaxed) {
                            // Two nodes want each block at the same time.
                            let turn = next.fetch_add(1, Ordering::Relaxed);
                            if turn >= 2 * count {
                                return;
                            }
                            claim_block(turn / 2, &format!("n{number}"));
                        }
                    });
                })
            })
            .collect();
        let over = Ended(ended);
        while next.load(Ordering::Relaxed) < count / 2 {
            std::thread::sleep(Duration::from_millis(10));
        }
        disturb(&mut etcd);
        claimers.into_iter().for_each(|claimer| claimer.join().unwrap());
        drop(over);
    });
    let claimed = claimed.into_inner().unwrap();
    etcd.wait();
    node.enter(|| {
        let mut in_store = BTreeMap::new();
        for number in 0..10 {
            let name = format!("n{number}");
            for (claim, version) in open(&of_node(&name)).claims_of(&name).unwrap() {
                in_store.insert(claim.first.to_string(), (name.clone(), version));
            }
        }
        assert_eq!(in_store, claimed, "{} unknown outcomes", unknowns.load(Ordering::Relaxed));
        assert_eq!(claimed.len(), count);
        // Each version deletes exactly its claim.
        let (first, (_, version)) = claimed.first_key_value().unwrap();
        let mut store = open(&of_node("n0"));
        let older = Version((version.0.parse::<u64>().unwrap() - 1).to_string());
        assert_eq!(store.delete(POOL, address(first), &older).unwrap(), Deleted::Changed);
        assert_eq!(store.delete(POOL, address(first), version).unwrap(), Deleted::Deleted);
    });
}

#[test]
fn no_block_twice_while_the_leader_is_killed() {
    claims_of_ten_nodes(|etcd| {
        let leader = etcd.leader();
        etcd.kill(leader);
        std::thread::sleep(Duration::from_secs(2));
        etcd.start_member(leader);
    });
}

#[test]
fn no_block_twice_while_the_leader_is_stopped() {
    claims_of_ten_nodes(|etcd| {
        let leader = etcd.leader();
        etcd.signal(leader, Signal::SIGSTOP);
        std::thread::sleep(Duration::from_secs(6));
        etcd.signal(leader, Signal::SIGCONT);
    });
}

#[test]
fn no_block_twice_while_a_member_is_cut_off() {
    claims_of_ten_nodes(|etcd| {
        let leader = etcd.leader();
        etcd.cut(leader);
        std::thread::sleep(Duration::from_secs(3));
        etcd.join(leader);
    });
}

#[test]
fn no_block_twice_while_all_members_are_restarted() {
    claims_of_ten_nodes(|etcd| {
        (0..3).for_each(|member| etcd.kill(member));
        std::thread::sleep(Duration::from_secs(1));
        (0..3).for_each(|member| etcd.start_member(member));
    });
}
