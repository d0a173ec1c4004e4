//! Failures of the store, of nodes and of files.

use std::collections::BTreeMap;

use cni::{Code, Error};

use super::{address, reserved_claim};
use crate::ledger::State;
use crate::store::Reclaim;
use crate::testing::{Fault, TestNode, memory};

/// Returns whether the node holds a number of blocks, and nothing else.
fn holds(node: &TestNode, count: usize) -> bool {
    let ledger = node.ledger();
    ledger.entries().len() == count && ledger.entries().iter().all(|entry| matches!(entry.state, State::Held(_)))
}

fn code(error: &Error) -> u32 {
    error.code().0
}

#[test]
fn without_the_store_only_held_blocks_are_used() {
    let memory = memory();
    let node = TestNode { block_size: Some(4), ..TestNode::new(&memory, "node1", &["10.61.0.0/24"]) };
    let first = node.add().unwrap();
    memory.borrow_mut().fault = Some(Fault::Lost);
    let last = (0..4).find_map(|_| node.add().err()).unwrap();
    assert_eq!(last.code(), Code::TRY_AGAIN);
    let text = last.to_string();
    assert!(text.starts_with("no answer from 192.0.2.1:443; gave up after ") && text.ends_with(" s"), "{text}");
    node.del(first);
    node.gc();
    assert_eq!(node.add().unwrap(), first);
    assert!(matches!(node.ledger().entries(), [_, begun] if matches!(begun.state, State::Releasing(_))));
    memory.borrow_mut().fault = None;
    node.add().unwrap();
    assert!(holds(&node, 2));
    assert_eq!(memory.borrow().count("node1"), 2);
}

#[test]
fn a_lost_answer_does_not_lose_the_block() {
    let memory = memory();
    let node = TestNode { block_size: Some(1), ..TestNode::new(&memory, "node1", &["10.61.0.0/24"]) };
    node.add().unwrap();
    memory.borrow_mut().requests.clear();
    memory.borrow_mut().faults.extend([Fault::Unanswered, Fault::None, Fault::None, Fault::Unanswered]);
    let second = node.add().unwrap();
    // The answers to the first create and to the first swap were lost.
    assert_eq!(memory.borrow().requests, ["create", "create", "get", "swap", "swap", "get", "swap"]);
    assert!(holds(&node, 2) && memory.borrow().count("node1") == 2);
    memory.borrow_mut().faults.push_back(Fault::Unanswered);
    node.del(second);
    assert!(holds(&node, 1) && memory.borrow().count("node1") == 1);
}

#[test]
fn a_killed_add_is_continued_by_the_next() {
    for fault in [Fault::Lost, Fault::Unanswered, Fault::Late] {
        let memory = memory();
        let node = TestNode::new(&memory, "node1", &["10.61.0.0/24"]);
        memory.borrow_mut().faults.extend([Fault::None; 4]);
        memory.borrow_mut().fault = Some(fault);
        assert_eq!(node.add().unwrap_err().code(), Code::TRY_AGAIN);
        assert!(matches!(node.ledger().entries(), [entry] if entry.state == State::Claiming), "{fault:?}");
        memory.borrow_mut().fault = None;
        memory.borrow_mut().deliver(0);
        node.add().unwrap();
        assert!(holds(&node, 1) && memory.borrow().count("node1") == 1, "{fault:?}");
    }
}

#[test]
fn a_block_whose_release_is_unknown_is_not_used() {
    let memory = memory();
    let node = TestNode { block_size: Some(1), ..TestNode::new(&memory, "node1", &["10.61.0.0/24"]) };
    let (first, second) = (node.add().unwrap(), node.add().unwrap());
    memory.borrow_mut().fault = Some(Fault::Late);
    node.del(first);
    assert!(node.notes.borrow()[0].starts_with("no answer from"));
    assert_eq!(node.ledger().spans(|_| true), [(second, second)]);
    memory.borrow_mut().fault = None;
    let third = node.add_in(0, Some(first)).unwrap();
    // The block was released and claimed again, so the late delete means an older version.
    assert_eq!(third, first);
    memory.borrow_mut().deliver(0);
    assert!(holds(&node, 2) && memory.borrow().count("node1") == 2);
}

#[test]
fn a_deleted_ledger_is_rebuilt_from_the_claims() {
    let memory = memory();
    let node = TestNode { block_size: Some(2), ..TestNode::new(&memory, "node1", &["10.61.0.0/28"]) };
    let other = TestNode::new(&memory, "node2", &["10.61.0.0/28"]);
    for _ in 0..4 {
        node.add().unwrap();
    }
    let (spans, versions) = (node.ledger().spans(|_| true), node.ledger().to_json());
    std::fs::remove_dir_all(node.sidecar()).unwrap();
    node.add().unwrap();
    assert!(spans.iter().all(|span| node.ledger().spans(|_| true).contains(span)));
    assert_ne!(node.ledger().to_json(), versions);
    while let Ok(address) = other.add() {
        assert!(!node.reserved.borrow().contains(&address));
    }
}

#[test]
fn a_damaged_own_claim_does_not_damage_the_ledger() {
    let memory = memory();
    let node = TestNode::new(&memory, "node1", &["10.61.0.0/28"]);
    node.add().unwrap();
    let (mut claim, version) = memory.borrow().claims.values().next().unwrap().clone();
    (claim.pool, claim.last) = ("gone".to_owned(), "fd00::1".parse().unwrap());
    memory.borrow_mut().claims.insert((claim.pool.clone(), claim.first), (claim, version));
    std::fs::remove_dir_all(node.sidecar()).unwrap();
    node.add().unwrap();
    assert!(node.ledger().entries().iter().all(|entry| matches!(entry.state, State::Held(_))));
    assert!(!node.ledger().entries().is_empty());
}

#[test]
fn an_unwritable_ledger_fails_before_any_request() {
    let memory = memory();
    let node = TestNode::new(&memory, "node1", &["10.61.0.0/24"]);
    // A folder with the name of the ledger.
    std::fs::create_dir_all(node.sidecar().join("blocks")).unwrap();
    let error = node.add().unwrap_err();
    assert_eq!((error.code(), memory.borrow().requests.len()), (Code::IO, 0));
    assert!(error.to_string().starts_with("failed to write /"), "{error}");
}

#[test]
fn after_a_reboot_the_store_must_answer_once() {
    let memory = memory();
    let mut node = TestNode::new(&memory, "node1", &["10.61.0.0/24"]);
    node.add().unwrap();
    node.boot();
    memory.borrow_mut().fault = Some(Fault::Lost);
    assert_eq!(node.add().unwrap_err().code(), Code::TRY_AGAIN);
    memory.borrow_mut().fault = None;
    memory.borrow_mut().requests.clear();
    node.add().unwrap();
    assert_eq!(memory.borrow().requests, ["claims", "pools"]);
}

#[test]
fn blocks_given_away_during_a_power_loss_are_not_used() {
    let memory = memory();
    let mut node = TestNode::new(&memory, "node1", &["10.61.0.0/30"]);
    let address = node.add().unwrap();
    node.boot();
    // kubectl delete ipblocks --field-selector spec.node=node1
    memory.borrow_mut().claims.clear();
    assert_eq!(TestNode::new(&memory, "node2", &["10.61.0.0/30"]).add().unwrap(), address);
    assert_eq!(node.add().unwrap_err().code(), Code::TRY_AGAIN);
    assert!(node.ledger().entries().is_empty());
}

#[test]
fn a_node_that_is_cut_off_uses_its_blocks() {
    for (fault, expected) in
        [(Fault::Lost, "no answer from 192.0.2.1:443; gave up after 1.0 s"), (Fault::Refused, "401 Unauthorized")]
    {
        let memory = memory();
        let mut node = TestNode::new(&memory, "node1", &["10.61.0.0/20"]);
        node.add().unwrap();
        node.host.uptime += 15 * 60;
        memory.borrow_mut().fault = Some(fault);
        node.add().unwrap();
        let note = node.notes.borrow().first().cloned().unwrap();
        let begin = "the blocks of this node are used without a look at their claims: ";
        assert!(note.strip_prefix(begin).is_some_and(|cause| cause == expected), "{note}");
        // The block sizes are still checked.
        assert_eq!(node.ledger().pools["10.61.0.0-20"], 32);
        memory.borrow_mut().requests.clear();
        node.host.uptime += 59;
        node.add().unwrap();
        assert!(memory.borrow().requests.is_empty());
        node.host.uptime += 1;
        memory.borrow_mut().fault = None;
        node.add().unwrap();
        assert_eq!(memory.borrow().requests, ["claims", "pools"]);
    }
}

#[test]
fn a_verification_that_finds_a_wrong_configuration_fails() {
    let memory = memory();
    let mut node = TestNode { block_size: Some(16), ..TestNode::new(&memory, "node1", &["10.61.0.0/24"]) };
    node.add().unwrap();
    memory.borrow_mut().pools.values_mut().for_each(|pool| pool.block_size = 8);
    node.add().unwrap();
    node.host.uptime += 15 * 60;
    assert_eq!(node.add().unwrap_err().code(), Code::INVALID_CONFIG);
}

#[test]
fn a_refusal_of_the_store_has_code_103() {
    let memory = memory();
    let node = TestNode { block_size: Some(1), ..TestNode::new(&memory, "node1", &["10.61.0.0/24"]) };
    node.add().unwrap();
    memory.borrow_mut().fault = Some(Fault::Refused);
    let error = node.add().unwrap_err();
    assert_eq!((code(&error), error.to_string().as_str()), (103, "401 Unauthorized"));
}

/// Fills a /30, which has one address that is not the gateway, by node1, and returns another node.
fn fill(memory: &std::rc::Rc<std::cell::RefCell<crate::testing::Memory>>) -> (TestNode, TestNode) {
    let node = TestNode::new(memory, "node1", &["10.61.0.0/30"]);
    node.add().unwrap();
    (node, TestNode::new(memory, "node2", &["10.61.0.0/30"]))
}

fn forget_node(memory: &std::cell::RefCell<crate::testing::Memory>) {
    memory.borrow_mut().nodes.as_mut().map(|nodes| nodes.remove("node1"));
}

#[test]
fn a_dead_node_with_a_node_object_keeps_its_blocks() {
    let memory = memory();
    let (_, other) = fill(&memory);
    for _ in 0..3 {
        memory.borrow_mut().now += 3600;
        assert_eq!(other.add().unwrap_err().code(), Code::TRY_AGAIN);
    }
    assert_eq!(memory.borrow().count("node1"), 1);
    memory.borrow_mut().claims.clear();
    other.add().unwrap();
}

#[test]
fn blocks_of_an_absent_node_are_free_after_an_hour() {
    let memory = memory();
    let (_, other) = fill(&memory);
    forget_node(&memory);
    let error = other.add().unwrap_err();
    let expected = "; all 1 blocks of pool 10.61.0.0-30 are claimed: node node1 has 1; 1 belong to nodes that are \
                    absent since 2026-11-21T01:43:04.000Z or later, and are free an hour after";
    assert!(error.to_string().ends_with(expected), "{error}");
    memory.borrow_mut().now += 3599;
    assert!(other.add().is_err());
    memory.borrow_mut().now += 1;
    other.add().unwrap();
    assert_eq!((memory.borrow().count("node1"), memory.borrow().count("node2")), (0, 1));
}

#[test]
fn a_full_pool_looks_up_a_few_nodes_and_others_the_next_time() {
    let memory = memory();
    let new =
        |n: usize| TestNode { block_size: Some(1), ..TestNode::new(&memory, &format!("node{n}"), &["10.61.0.0/26"]) };
    let nodes: Vec<TestNode> = (0..61).map(new).collect();
    nodes.iter().for_each(|node| assert!(node.add().is_ok()));
    let other = new(61);
    memory.borrow_mut().nodes.as_mut().map(|nodes| nodes.remove("node30"));
    for _ in 0..1000 {
        memory.borrow_mut().requests.clear();
        memory.borrow_mut().now += 3600;
        if other.add().is_ok() {
            return;
        }
        let lookups = memory.borrow().requests.iter().filter(|request| **request == "node").count();
        assert_eq!(lookups, 16);
    }
    panic!("the absent node was never looked up twice");
}

#[test]
fn a_node_that_registers_again_keeps_its_blocks() {
    let memory = memory();
    let (mut node, other) = fill(&memory);
    forget_node(&memory);
    assert!(other.add().is_err());
    node.host.uptime += 15 * 60;
    // The set is full, but the ADD verifies the ledger, and so removes the mark.
    assert!(node.add().is_err());
    memory.borrow_mut().now += 3600;
    assert!(other.add().is_err());
    assert_eq!((memory.borrow().count("node1"), holds(&node, 1)), (1, true));
}

#[test]
fn a_node_that_was_absent_for_an_hour_reports_lost_blocks() {
    let memory = memory();
    let (mut node, other) = fill(&memory);
    forget_node(&memory);
    assert!(other.add().is_err());
    memory.borrow_mut().now += 3600;
    let address = other.add().unwrap();
    node.host.uptime += 3600;
    let error = node.add().unwrap_err();
    assert!(error.to_string().ends_with("all 1 blocks of pool 10.61.0.0-30 are claimed: node node2 has 1"), "{error}");
    let notes = node.ledger().lost_notes(&[address]);
    assert!(notes[0].contains("is claimed by network net of node node2, but 10.61.0.2 are in use here"), "{notes:?}");
    node.del(address);
    node.host.uptime += 3600;
    assert!(node.add().is_err());
    assert!(node.ledger().entries().is_empty());
}

#[test]
fn a_pool_can_exclude_that_blocks_are_taken() {
    let memory = memory();
    let (_, other) = fill(&memory);
    memory.borrow_mut().pools.values_mut().for_each(|pool| pool.reclaim = Reclaim::Never);
    forget_node(&memory);
    for _ in 0..3 {
        memory.borrow_mut().now += 3600;
        assert!(other.add().is_err());
    }
    assert_eq!(memory.borrow().count("node1"), 1);
}

#[test]
fn a_store_without_nodes_gives_no_block_away() {
    let memory = memory();
    memory.borrow_mut().nodes = None;
    let (_, other) = fill(&memory);
    for _ in 0..3 {
        memory.borrow_mut().now += 3600;
        assert!(other.add().is_err());
    }
    assert_eq!(memory.borrow().count("node1"), 1);
}

#[test]
fn a_rebuilt_node_adopts_the_claims_of_its_name() {
    let memory = memory();
    let (_, _) = fill(&memory);
    let rebuilt = TestNode::new(&memory, "node1", &["10.61.0.0/30"]);
    let mut rebuilt =
        TestNode { host: crate::ledger::Host { machine: "new".to_owned(), ..rebuilt.host.clone() }, ..rebuilt };
    let error = rebuilt.add().unwrap_err();
    let expected = "the claims of node node1 are of machine \"machine of node1\", not of this one, \"new\"; \
                    if that machine is off: delete what node1 has, such as 10.61.0.2";
    assert_eq!((error.code(), error.to_string().as_str()), (Code::CONFLICT, expected));
    memory.borrow_mut().nodes = Some(BTreeMap::from([("node1".to_owned(), "new".to_owned())]));
    rebuilt.add().unwrap();
    assert!(memory.borrow().claims.values().all(|(claim, _)| claim.machine == "new"));
    // A later verification does not ask for the node.
    rebuilt.host.uptime += 15 * 60;
    memory.borrow_mut().requests.clear();
    assert!(rebuilt.add().is_err());
    assert_eq!(memory.borrow().requests[..2], ["claims", "pools"]);
}

#[test]
fn a_second_machine_with_the_name_is_refused() {
    let memory = memory();
    memory.borrow_mut().nodes = None;
    let node = TestNode::new(&memory, "node1", &["10.61.0.0/30"]);
    let twin = TestNode::new(&memory, "node1", &["10.61.0.0/30"]);
    let twin = TestNode { host: crate::ledger::Host { machine: "twin".to_owned(), ..twin.host.clone() }, ..twin };
    let address = address("10.61.0.2");
    // Both verify their ledgers before the first claim.
    twin.call(|slow| {
        slow.held().unwrap();
        slow.obtain(None).unwrap();
    });
    assert_eq!(node.add().unwrap(), address);
    let error = twin.add().unwrap_err();
    let advice = "; if that machine is off: delete what node1 has, such as 10.61.0.2";
    assert!(error.code() == Code::CONFLICT && error.to_string().ends_with(advice), "{error}");
    assert!(twin.ledger().spans(|_| true).is_empty());
}

#[test]
fn a_second_machine_is_refused_if_only_a_list_has_its_claims() {
    let memory = memory();
    memory.borrow_mut().nodes = None;
    let [node, twin] = ["one", "two"].map(|machine| {
        let node = TestNode { block_size: Some(1), ..TestNode::new(&memory, "node1", &["10.61.0.0/27"]) };
        TestNode { host: crate::ledger::Host { machine: machine.to_owned(), ..node.host.clone() }, ..node }
    });
    // Both verify their ledgers before the first claim.
    for node in [&node, &twin] {
        node.call(|slow| {
            slow.held().unwrap();
            slow.obtain(None).unwrap();
        });
    }
    // All blocks that both try before the list are reserved.
    let pool = "10.61.0.0-27";
    let candidates = crate::pool::candidates(&node.sets[0], &|_| (pool.to_owned(), 1), "node1/net", &[]);
    let order: Vec<_> = candidates.map(|block| block.first).collect();
    for first in &order[..order.len() - 1] {
        let record = (reserved_claim(pool, *first), crate::store::Version("reserved".to_owned()));
        memory.borrow_mut().claims.insert((pool.to_owned(), *first), record);
    }
    assert_eq!(node.add().unwrap(), order[order.len() - 1]);
    let error = twin.add().unwrap_err();
    assert!(error.code() == Code::CONFLICT && error.to_string().contains("are of machine \"one\""), "{error}");
}

#[test]
fn a_store_restored_from_an_older_state_gets_its_claims_back() {
    let memory = memory();
    let mut node = TestNode { block_size: Some(1), ..TestNode::new(&memory, "node1", &["10.61.0.0/24"]) };
    node.add().unwrap();
    let older = memory.borrow().claims.clone();
    node.add().unwrap();
    memory.borrow_mut().claims = older;
    node.host.uptime += 15 * 60;
    node.add().unwrap();
    assert!(holds(&node, 3) && memory.borrow().count("node1") == 3);
}

#[test]
fn a_call_waits_for_another_that_claims() {
    let memory = memory();
    let node = TestNode::new(&memory, "node1", &["10.61.0.0/24"]);
    std::fs::create_dir_all(node.sidecar()).unwrap();
    let lock = std::fs::File::create(node.sidecar().join("claim.lock")).unwrap();
    lock.lock().unwrap();
    let error = node.add().unwrap_err();
    let text = error.to_string();
    assert_eq!(error.code(), Code::TRY_AGAIN);
    assert!(text.starts_with("failed to lock ") && text.contains("/net/claim.lock, which process "), "{text}");
    assert!(text.contains(" holds to claim a block: ") && memory.borrow().requests.is_empty(), "{text}");
    lock.unlock().unwrap();
    node.add().unwrap();
}

/// The operator deletes all claims and the pool, and creates the pool with blocks of this size.
fn recreate_pool(memory: &std::cell::RefCell<crate::testing::Memory>, size: u32) {
    memory.borrow_mut().claims.clear();
    memory.borrow_mut().pools.values_mut().for_each(|pool| pool.block_size = size);
}

#[test]
fn a_pool_with_a_new_block_size_gets_no_old_blocks() {
    for (size, has_container) in [(8, false), (8, true), (2, false), (2, true)] {
        let memory = memory();
        memory.borrow_mut().pools.insert(
            "10.61.0.0-24".to_owned(),
            crate::store::Pool { subnet: "10.61.0.0/24".parse().unwrap(), block_size: 4, reclaim: Reclaim::Never },
        );
        let mut node = TestNode::new(&memory, "node1", &["10.61.0.0/24"]);
        let old = node.add().unwrap();
        if !has_container {
            node.reserved.borrow_mut().clear();
        }
        recreate_pool(&memory, size);
        let other = TestNode::new(&memory, "node2", &["10.61.0.0/24"]);
        let taken: Vec<_> = (0..200).filter_map(|_| other.add().ok()).collect();
        assert!(taken.len() > 190);
        node.host.uptime += 15 * 60;
        for _ in 0..20 {
            let address = node.add().unwrap();
            assert!(!taken.contains(&address), "{size} {has_container} {address}");
        }
        let is_new =
            |first, last| u128::from(size) == cni_ipam::ranges::number(last) - cni_ipam::ranges::number(first) + 1;
        let claims = memory.borrow().claims.clone();
        assert!(claims.values().all(|(claim, _)| is_new(claim.first, claim.last)), "{size} {has_container}");
        let entries = node.ledger().entries().to_vec();
        assert!(entries.iter().all(|entry| is_new(entry.block.first, entry.block.last)), "{entries:?}");
        // The block of the container's address is the other node's, which is reported.
        let is_lost = has_container && taken.contains(&old);
        assert_eq!(node.ledger().lost_notes(&[old]).len(), usize::from(is_lost));
    }
}

#[test]
fn an_own_claim_with_an_old_block_size_is_deleted_or_replaced() {
    for (size, has_container) in [(8, false), (8, true), (2, false), (2, true)] {
        let memory = memory();
        let mut node = TestNode { block_size: Some(4), ..TestNode::new(&memory, "node1", &["10.61.0.0/24"]) };
        for _ in 0..9 {
            node.add().unwrap();
        }
        if !has_container {
            node.reserved.borrow_mut().clear();
        }
        // The operator has forgotten to delete the claims.
        memory.borrow_mut().pools.values_mut().for_each(|pool| pool.block_size = size);
        node.block_size = None;
        node.host.uptime += 15 * 60;
        node.add().unwrap();
        let reserved = node.reserved.borrow().clone();
        let memory = memory.borrow();
        let has_new_size =
            |claim: &crate::store::Claim| crate::pool::Block::of(&claim.pool, size, claim.first) == claim.block();
        assert!(memory.claims.values().all(|(claim, _)| has_new_size(claim)), "{size} {:?}", memory.claims);
        let has_claim =
            |address: &std::net::IpAddr| memory.claims.values().any(|(claim, _)| claim.block().contains(*address));
        assert!(reserved.iter().all(has_claim), "{size} {has_container}");
        assert!(holds(&node, memory.claims.len()), "{size} {has_container}");
    }
}

#[test]
fn a_machine_without_an_id_needs_a_store_that_knows_it() {
    for has_nodes in [true, false] {
        let memory = memory();
        if !has_nodes {
            memory.borrow_mut().nodes = None;
        }
        let mut node = TestNode::new(&memory, "node1", &["10.61.0.0/24"]);
        node.host.machine.clear();
        if let Some(nodes) = &mut memory.borrow_mut().nodes {
            nodes.insert("node1".to_owned(), String::new());
        }
        let added = node.add();
        assert_eq!(added.is_ok(), has_nodes);
        if let Err(error) = added {
            let expected = "this machine has no ID, so the claims of node node1 may be those of another machine; \
                            create /etc/machine-id: systemd-machine-id-setup";
            assert_eq!((error.code(), error.to_string().as_str()), (Code::CONFLICT, expected));
            assert!(memory.borrow().claims.is_empty());
        }
    }
}

#[test]
fn gc_gives_back_what_an_interrupted_call_has_begun() {
    for fault in [Fault::Lost, Fault::Unanswered] {
        let memory = memory();
        let node = TestNode { block_size: Some(1), ..TestNode::new(&memory, "node1", &["10.61.0.0/24"]) };
        let (kept, deleted) = (node.add().unwrap(), node.add().unwrap());
        memory.borrow_mut().fault = Some(fault);
        node.del(deleted);
        memory.borrow_mut().fault = None;
        node.gc();
        assert!(holds(&node, 1) && memory.borrow().count("node1") == 1, "{fault:?}");
        memory.borrow_mut().fault = Some(fault);
        assert_eq!(node.add().unwrap_err().code(), Code::TRY_AGAIN);
        memory.borrow_mut().fault = None;
        node.gc();
        assert!(holds(&node, 1) && memory.borrow().count("node1") == 1, "{fault:?}");
        assert_eq!(node.ledger().spans(|_| true), [(kept, kept)]);
    }
}

#[test]
fn held_blocks_are_used_while_another_process_verifies() {
    let memory = memory();
    let mut node = TestNode::new(&memory, "node1", &["10.61.0.0/20"]);
    node.add().unwrap();
    node.host.uptime += 15 * 60;
    let lock = std::fs::File::open(node.sidecar().join("claim.lock")).unwrap();
    lock.lock().unwrap();
    let before = node.ledger();
    node.add().unwrap();
    let note = node.notes.borrow()[0].clone();
    let begin = "the blocks of this node are used without a look at their claims: failed to lock ";
    assert!(note.starts_with(begin), "{note}");
    // Only the process that has the lock writes the ledger.
    assert_eq!(node.ledger(), before);
    node.boot();
    assert_eq!(node.add().unwrap_err().code(), Code::TRY_AGAIN);
}

#[test]
fn a_replaced_claim_lock_is_locked_again() {
    let memory = memory();
    let node = TestNode::new(&memory, "node1", &["10.61.0.0/24"]);
    std::fs::create_dir_all(node.sidecar()).unwrap();
    let path = node.sidecar().join("claim.lock");
    let old = std::fs::File::create(&path).unwrap();
    old.lock().unwrap();
    let replace = {
        let path = path.clone();
        std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(200));
            std::fs::remove_file(&path).unwrap();
            let new = std::fs::File::create(&path).unwrap();
            new.lock().unwrap();
            drop(old);
            new
        })
    };
    assert_eq!(node.add().unwrap_err().code(), Code::TRY_AGAIN);
    assert!(memory.borrow().requests.is_empty());
    drop(replace.join().unwrap());
    node.add().unwrap();
}
