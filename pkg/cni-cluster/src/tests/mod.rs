//! Tests of whole calls against a store in memory, and a search of all interleavings.

mod failures;
mod schedules;
pub(crate) mod search;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::rc::Rc;

use cni::Code;
use cni_ipam::Shortage;

use crate::ledger::State;
use crate::pool;
use crate::store::{Claim, Pool, Reclaim};
use crate::testing::{TestNode, memory};

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Returns a claim that an operator has made of one address.
fn reserved_claim(pool: &str, member: IpAddr) -> Claim {
    let text = String::new;
    let (first, last, pool) = (member, member, pool.to_owned());
    Claim { pool, first, last, node: text(), network: text(), machine: text(), nonce: text(), absent_since: None }
}

#[test]
fn nodes_never_get_the_same_address() {
    let memory = memory();
    let nodes: Vec<TestNode> =
        (0..10).map(|n| TestNode::new(&memory, &format!("node{n}"), &["10.61.0.0/20"])).collect();
    let mut addresses = BTreeSet::new();
    for _ in 0..100 {
        for node in &nodes {
            assert!(addresses.insert(node.add().unwrap()));
        }
    }
    let requests = memory.borrow().requests.len();
    assert!(requests <= 100, "{requests}");
    let pool = &memory.borrow().pools["10.61.0.0-20"];
    assert_eq!((pool.block_size, pool.reclaim), (32, Reclaim::AfterOneHour));
}

#[test]
fn an_add_from_a_held_block_sends_no_request() {
    let memory = memory();
    let node = TestNode::new(&memory, "node1", &["10.61.0.0/20"]);
    node.add().unwrap();
    assert_eq!(memory.borrow().requests, ["claims", "pools", "create pool", "pools", "create"]);
    memory.borrow_mut().requests.clear();
    for _ in 0..20 {
        node.add().unwrap();
    }
    assert!(memory.borrow().requests.is_empty());
    for _ in 0..20 {
        node.add().unwrap();
    }
    assert_eq!(memory.borrow().requests, ["create"]);
}

#[test]
fn all_addresses_of_a_small_subnet_can_be_used() {
    let memory = memory();
    let nodes: Vec<TestNode> = (0..3).map(|n| TestNode::new(&memory, &format!("node{n}"), &["10.61.0.0/29"])).collect();
    let mut addresses = BTreeSet::new();
    for n in 0..5 {
        assert!(addresses.insert(nodes[n % 3].add().unwrap()));
    }
    let error = nodes[0].add().unwrap_err();
    assert_eq!(error.code(), Code::TRY_AGAIN);
    let expected = "failed to allocate for range 0: no IP addresses available in range set: 10.61.0.1-10.61.0.6; \
                    all 5 blocks of pool 10.61.0.0-29 are claimed: node node0 has 2, node node1 has 2, node node2 has 1";
    assert_eq!(error.to_string(), expected);
    let freed = *nodes[1].reserved.borrow().iter().next().unwrap();
    nodes[1].del(freed);
    assert_eq!(nodes[0].add().unwrap(), freed);
}

#[test]
fn each_family_has_its_own_pool() {
    let memory = memory();
    let node = TestNode::new(&memory, "node1", &["10.61.0.0/24", "fd00:61::/64"]);
    assert!(node.add_in(0, None).unwrap().is_ipv4() && node.add_in(1, None).unwrap().is_ipv6());
    let pools: Vec<String> = memory.borrow().pools.keys().cloned().collect();
    assert_eq!(pools, ["10.61.0.0-24", "fd00-0061-0000-0000-0000-0000-0000-0000-64"]);
}

#[test]
fn a_requested_address_brings_its_block() {
    let memory = memory();
    let (one, two) =
        (TestNode::new(&memory, "node1", &["10.61.0.0/24"]), TestNode::new(&memory, "node2", &["10.61.0.0/24"]));
    let wanted = address("10.61.0.77");
    assert_eq!(one.add_in(0, Some(wanted)).unwrap(), wanted);
    // The block has the addresses .76 and .77.
    let error = two.add_in(0, Some(address("10.61.0.76"))).unwrap_err();
    let expected = "failed to allocate for range 0: requested IP address 10.61.0.76 is not available in range set \
                    10.61.0.1-10.61.0.254: claimed by network net of node node1";
    assert_eq!((error.code(), error.to_string().as_str()), (Code::CONFLICT, expected));
    assert!(two.ledger().entries().is_empty());
    let claim = reserved_claim("10.61.0.0-24", address("10.61.0.100"));
    let record = (claim, crate::store::Version("reserved".to_owned()));
    memory.borrow_mut().claims.insert(("10.61.0.0-24".to_owned(), address("10.61.0.100")), record);
    let error = two.add_in(0, Some(address("10.61.0.101"))).unwrap_err();
    assert!(error.code() == Code::CONFLICT && error.to_string().ends_with(": reserved by an operator"), "{error}");
}

#[test]
fn the_block_size_of_the_pool_is_fixed() {
    let memory = memory();
    let mut node = TestNode::new(&memory, "node1", &["10.61.0.0/24"]);
    node.block_size = Some(16);
    node.add().unwrap();
    let mut other = TestNode::new(&memory, "node2", &["10.61.0.0/24"]);
    other.add().unwrap();
    assert_eq!(other.ledger().pools["10.61.0.0-24"], 16);
    let expected = "blockSize 8 differs from that of pool 10.61.0.0-24, 16: it is fixed when the pool is first used";
    let new = TestNode { block_size: Some(8), ..TestNode::new(&memory, "node3", &["10.61.0.0/24"]) };
    other.block_size = Some(8);
    for node in [&new, &other] {
        let error = node.add().unwrap_err();
        assert_eq!((error.code(), error.to_string().as_str()), (Code::INVALID_CONFIG, expected));
    }
}

#[test]
fn a_block_is_not_larger_than_its_subnet() {
    let memory = memory();
    let node = TestNode { block_size: Some(512), ..TestNode::new(&memory, "node1", &["10.61.0.0/24"]) };
    let error = node.add().unwrap_err();
    let expected = "blocks of 512 addresses are larger than subnet 10.61.0.0/24";
    assert_eq!((error.code(), error.to_string().as_str()), (Code::INVALID_CONFIG, expected));
    assert!(memory.borrow().pools.is_empty());
}

#[test]
fn overlapping_pools_need_different_layer2_networks() {
    let memory = memory();
    TestNode::new(&memory, "node1", &["10.61.0.0/24"]).add().unwrap();
    let mut node = TestNode::new(&memory, "node2", &["10.61.0.0/20"]);
    let error = node.add().unwrap_err();
    let expected = "pool 10.61.0.0-20 overlaps pool 10.61.0.0-24: addresses would be given out twice; \
                    use the same subnet, or another layer2";
    assert_eq!((error.code(), error.to_string().as_str()), (Code::CONFLICT, expected));
    node.layer2 = "vlan20";
    node.add().unwrap();
    assert!(memory.borrow().pools.contains_key("vlan20.10.61.0.0-20"));
}

#[test]
fn overlapping_pools_of_the_same_moment_are_refused() {
    let memory = memory();
    let mut node = TestNode::new(&memory, "node1", &["10.61.0.0/24"]);
    let pool = Pool { subnet: "10.61.0.0/20".parse().unwrap(), block_size: 2, reclaim: Reclaim::Never };
    let expected = "pool 10.61.0.0-24 overlaps pool 10.61.0.0-20: addresses would be given out twice; \
                    use the same subnet, or another layer2";
    // Another node creates its pool between this node's list and creation.
    memory.borrow_mut().appearing = Some(("10.61.0.0-20".to_owned(), pool.clone()));
    for _ in 0..2 {
        let error = node.add().unwrap_err();
        assert_eq!((error.code(), error.to_string().as_str()), (Code::CONFLICT, expected));
    }
    assert!(memory.borrow().claims.is_empty());
    // After this node's last list. The next verification finds it.
    memory.borrow_mut().pools.remove("10.61.0.0-20");
    node.add().unwrap();
    memory.borrow_mut().pools.insert("10.61.0.0-20".to_owned(), pool);
    node.add().unwrap();
    node.host.uptime += 15 * 60;
    let error = node.add().unwrap_err();
    assert_eq!((error.code(), error.to_string().as_str()), (Code::CONFLICT, expected));
}

#[test]
fn a_pool_that_another_node_creates_first_is_used() {
    let memory = memory();
    let subnet = "10.61.0.0/24".parse().unwrap();
    let pool = Pool { subnet, block_size: 2, reclaim: Reclaim::Never };
    memory.borrow_mut().appearing = Some(("10.61.0.0-24".to_owned(), pool.clone()));
    TestNode::new(&memory, "node1", &["10.61.0.0/24"]).add().unwrap();
    assert_eq!(memory.borrow().pools.values().collect::<Vec<_>>(), [&pool]);
}

#[test]
fn after_eight_claimed_blocks_a_list_is_requested() {
    let memory = memory();
    let full = TestNode { block_size: Some(1), ..TestNode::new(&memory, "node1", &["10.61.0.0/24"]) };
    while full.add().is_ok() {}
    let free = *full.reserved.borrow().iter().next().unwrap();
    full.del(free);
    let node = TestNode::new(&memory, "node2", &["10.61.0.0/24"]);
    memory.borrow_mut().requests.clear();
    assert_eq!(node.add().unwrap(), free);
    let requests = memory.borrow().requests.clone();
    let before_list = requests.iter().take_while(|request| **request != "taken");
    assert_eq!(before_list.filter(|request| **request == "create").count(), 8, "{requests:?}");
    assert_eq!(requests[requests.len() - 2..], ["taken", "create"]);
}

#[test]
fn a_second_process_uses_the_block_of_the_first() {
    let memory = memory();
    let node = TestNode { block_size: Some(1), ..TestNode::new(&memory, "node1", &["10.61.0.0/24"]) };
    node.add().unwrap();
    node.call(|slow| {
        assert_eq!(slow.held().unwrap().map(|spans| spans.len()), Some(1));
        node.add().unwrap();
        memory.borrow_mut().requests.clear();
        slow.obtain(Some(Shortage { set: 0, requested: None })).unwrap();
        assert!(memory.borrow().requests.is_empty());
        assert_eq!(slow.held().unwrap().map(|spans| spans.len()), Some(2));
    });
}

#[test]
fn a_call_ends_when_its_time_is_over() {
    let memory = memory();
    let node = TestNode { timeout: std::time::Duration::ZERO, ..TestNode::new(&memory, "node1", &["10.61.0.0/24"]) };
    let error = node.add().unwrap_err();
    let expected = "the blocks of this node changed until no time was left";
    assert_eq!((error.code(), error.to_string().as_str()), (Code::TRY_AGAIN, expected));
}

#[test]
fn a_del_gives_back_a_second_empty_block() {
    let memory = memory();
    let node = TestNode { block_size: Some(4), ..TestNode::new(&memory, "node1", &["10.61.0.0/24"]) };
    let mut addresses: Vec<IpAddr> = (0..9).map(|_| node.add().unwrap()).collect();
    assert!(memory.borrow().count("node1") >= 3);
    memory.borrow_mut().requests.clear();
    while let Some(address) = addresses.pop() {
        node.del(address);
    }
    assert_eq!((memory.borrow().count("node1"), node.ledger().entries().len()), (1, 1));
    assert!(memory.borrow().requests.iter().all(|request| *request == "delete"));
    assert_eq!(node.ledger().spans(|_| true).len(), 1);
    node.gc();
    assert_eq!(memory.borrow().count("node1"), 1);
}

#[test]
fn a_del_that_empties_no_block_does_not_open_the_store() {
    let memory = memory();
    let node = TestNode { block_size: Some(4), ..TestNode::new(&memory, "node1", &["10.61.0.0/24"]) };
    let addresses: Vec<IpAddr> = (0..9).map(|_| node.add().unwrap()).collect();
    let opened = memory.borrow().opened;
    node.del(addresses[1]);
    node.del(addresses[5]);
    assert_eq!(memory.borrow().opened, opened);
}

#[test]
fn gc_gives_back_all_empty_blocks_but_one() {
    let memory = memory();
    let node = TestNode { block_size: Some(4), ..TestNode::new(&memory, "node1", &["10.61.0.0/24"]) };
    let addresses: Vec<IpAddr> = (0..20).map(|_| node.add().unwrap()).collect();
    let kept = addresses[10];
    node.reserved.borrow_mut().retain(|address| *address == kept);
    node.gc();
    let firsts: Vec<bool> = node.ledger().entries().iter().map(|entry| entry.block.contains(kept)).collect();
    assert_eq!((firsts.len(), firsts.iter().filter(|has_kept| **has_kept).count()), (2, 1));
    assert!(node.notes.borrow().is_empty());
}

#[test]
fn gc_gives_back_the_last_block_of_a_pool_without_ranges() {
    let memory = memory();
    let mut node = TestNode::new(&memory, "node1", &["10.61.0.0/24"]);
    let address = node.add().unwrap();
    node.del(address);
    node.layer2 = "vlan20";
    let address = node.add().unwrap();
    node.del(address);
    let pools =
        |node: &TestNode| node.ledger().entries().iter().map(|entry| entry.block.pool.clone()).collect::<Vec<_>>();
    assert_eq!(pools(&node), ["10.61.0.0-24", "vlan20.10.61.0.0-24"]);
    // The runtime provides the ranges of a network without ranges, so every pool may be in use.
    let sets = std::mem::take(&mut node.sets);
    node.gc();
    assert_eq!(pools(&node), ["10.61.0.0-24", "vlan20.10.61.0.0-24"]);
    node.sets = sets;
    node.gc();
    assert_eq!(pools(&node), ["vlan20.10.61.0.0-24"]);
    assert_eq!(memory.borrow().count("node1"), 1);
}

#[test]
fn a_set_with_two_subnets_uses_both() {
    let memory = memory();
    let node = TestNode::new(&memory, "node1", &["10.61.0.0/30", "10.62.0.0/30"]);
    let conf = |subnet: &str| cni_ipam::RangeConf { subnet: Some(subnet.to_owned()), ..Default::default() };
    let set = cni_ipam::RangeSet::check(&[conf("10.61.0.0/30"), conf("10.62.0.0/30")]).unwrap();
    let node = TestNode { sets: vec![set], ..node };
    let addresses = BTreeSet::from([node.add().unwrap(), node.add().unwrap()]);
    assert_eq!(addresses, BTreeSet::from([address("10.61.0.2"), address("10.62.0.2")]));
    assert_eq!(node.add().unwrap_err().code(), Code::TRY_AGAIN);
}

#[test]
fn an_address_of_another_plugin_gets_its_block() {
    let memory = memory();
    let (one, two) =
        (TestNode::new(&memory, "node1", &["10.61.0.0/24"]), TestNode::new(&memory, "node2", &["10.61.0.0/24"]));
    let (old, lost) = (address("10.61.0.9"), address("10.61.0.21"));
    two.add_in(0, Some(lost)).unwrap();
    one.reserved.borrow_mut().extend([old, lost]);
    one.add().unwrap();
    let ledger = one.ledger();
    let state = |address: IpAddr| ledger.entries().iter().find(|entry| entry.block.contains(address)).unwrap();
    assert!(matches!(state(old).state, State::Held(_)) && matches!(state(lost).state, State::Lost(_)));
    assert!(ledger.has_lost() && ledger.lost_notes(&[lost])[0].contains("but 10.61.0.21 are in use here"));
}

#[test]
fn a_default_block_size_counts_the_ranges_of_the_network() {
    let memory = memory();
    let node = TestNode::new(&memory, "node1", &["10.61.0.0/16"]);
    let range = cni_ipam::RangeConf {
        subnet: Some("10.61.0.0/16".to_owned()),
        range_start: Some("10.61.1.0".to_owned()),
        range_end: Some("10.61.1.255".to_owned()),
        gateway: None,
    };
    let node = TestNode { sets: vec![cni_ipam::RangeSet::check(&[range]).unwrap()], ..node };
    node.add().unwrap();
    assert_eq!(memory.borrow().pools["10.61.0.0-16"].block_size, pool::default_block_size(256));
}

#[test]
fn an_existing_pool_is_used() {
    let memory = memory();
    let subnet = "10.61.0.0/24".parse().unwrap();
    let pool = Pool { subnet, block_size: 2, reclaim: Reclaim::Never };
    memory.borrow_mut().pools.insert("10.61.0.0-24".to_owned(), pool);
    let node = TestNode::new(&memory, "node1", &["10.61.0.0/24"]);
    node.add().unwrap();
    assert_eq!(memory.borrow().requests, ["claims", "pools", "create"]);
    assert_eq!(Rc::strong_count(&memory), 2);
}

#[test]
fn blocks_of_another_layer2_network_are_not_used() {
    let memory = memory();
    let mut node = TestNode::new(&memory, "node1", &["10.61.0.0/24"]);
    let old = node.add().unwrap();
    node.layer2 = "vlan20";
    let other = TestNode { layer2: "vlan20", ..TestNode::new(&memory, "node2", &["10.61.0.0/24"]) };
    other.add_in(0, Some(old)).unwrap();
    for _ in 0..4 {
        let address = node.add().unwrap();
        let ledger = node.ledger();
        let entry = ledger.entries().iter().find(|entry| entry.block.contains(address)).unwrap();
        assert_eq!(entry.block.pool, "vlan20.10.61.0.0-24", "{address}");
    }
}
