//! What the tests of both stores share: a machine that no signal ends, and what holds of any store.

#![allow(dead_code, reason = "each test program uses a part")]

use std::net::IpAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cni::Result;
use cni::machine::{Child, Machine, Output, RunError};
use cni_cluster::conf::Conf;
use cni_cluster::store::{Change, Claim, Outcome, Pool, Reclaim, Store, Version};
use cni_linux::flock::Limit;
use serde_json::Value;

/// A machine with the real clock, that receives a signal when a test says so.
#[derive(Default)]
pub(crate) struct TestMachine {
    pub(crate) terminated: AtomicBool,
}

impl Machine for TestMachine {
    fn is_own_netns(&self, _: &Path) -> std::io::Result<bool> {
        Ok(false)
    }
    fn terminated(&self) -> bool {
        self.terminated.load(Ordering::Relaxed)
    }
    fn now(&self) -> Instant {
        Instant::now()
    }
    fn run(&self, _: &Child<'_>) -> Result<Output, RunError> {
        Err(RunError::Terminated)
    }
}

/// A machine that receives no signal.
pub(crate) static QUIET: TestMachine = TestMachine { terminated: AtomicBool::new(false) };

/// Opens the store of a node's file.
#[track_caller]
pub(crate) fn open(file: &Value) -> Box<dyn Store> {
    let conf = Conf::parse(file.to_string().as_bytes()).unwrap();
    cni_cluster::open(&conf, &QUIET).unwrap()
}

/// Returns a limit that ends in so many milliseconds.
pub(crate) fn limit(milliseconds: u64) -> Limit {
    let length = Duration::from_millis(milliseconds);
    Limit { deadline: Instant::now() + length, length }
}

/// Opens the store of a node's file, with a deadline in so many milliseconds.
#[track_caller]
pub(crate) fn open_for(file: &Value, milliseconds: u64) -> Box<dyn Store> {
    let mut store = open(file);
    store.set_limit(limit(milliseconds));
    store
}

pub(crate) fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Returns the claim of a node for a block of one address.
pub(crate) fn claim(pool: &str, first: &str, node: &str) -> Claim {
    Claim {
        pool: pool.to_owned(),
        first: address(first),
        last: address(first),
        node: node.to_owned(),
        network: "lan".to_owned(),
        machine: "0123456789abcdef0123456789abcdef".to_owned(),
        nonce: "0123456789abcdef".to_owned(),
        absent_since: None,
    }
}

/// Returns the text of a failure that may pass.
#[track_caller]
pub(crate) fn unknown<T: std::fmt::Debug>(answer: Result<T>) -> String {
    match answer {
        Err(error) if error.code().0 == 11 => error.msg().to_owned(),
        other => panic!("not unknown: {other:?}"),
    }
}

/// Returns the code and the message of a failure that does not pass.
#[track_caller]
pub(crate) fn refused<T: std::fmt::Debug>(answer: Result<T>) -> (u32, String) {
    match answer {
        Err(error) if error.code().0 != 11 => (error.code().0, format!("{}; {}", error.msg(), error.details())),
        other => panic!("not refused: {other:?}"),
    }
}

/// Replaces a claim.
pub(crate) fn swap(store: &mut dyn Store, claim: &Claim, version: &Version) -> Result<Outcome> {
    store.change(claim, &Change::Swap(version.clone()))
}

/// Deletes a claim.
pub(crate) fn delete(store: &mut dyn Store, claim: &Claim, version: &Version) -> Result<Outcome> {
    store.change(claim, &Change::Delete(version.clone()))
}

/// Creates the pool `name` of `subnet`.
pub(crate) fn create_pool(store: &mut dyn Store, name: &str, subnet: &str) {
    let pool = Pool { subnet: subnet.parse().unwrap(), block_size: 1, reclaim: Reclaim::AfterOneHour };
    store.create_pool(name, &pool).unwrap();
    assert_eq!(find_pool(store, name).unwrap(), Some(pool));
}

/// Returns the pool of this name.
pub(crate) fn find_pool(store: &mut dyn Store, name: &str) -> Result<Option<Pool>> {
    let found = store.pools()?.into_iter().find(|(other, _)| other == name);
    Ok(found.map(|(_, pool)| pool))
}

/// Creates a claim and returns its version.
#[track_caller]
pub(crate) fn create(store: &mut dyn Store, claim: &Claim) -> Version {
    match store.change(claim, &Change::Create).unwrap() {
        Outcome::Written(version) => version,
        refusal => panic!("{claim:?}: {refusal:?}"),
    }
}

/// Waits until the list for the choice of a candidate, which may be a moment old, has these blocks.
#[track_caller]
fn wait_until_taken(store: &mut dyn Store, pool: &str, expected: &[(IpAddr, String)]) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while store.taken(pool).unwrap() != expected {
        assert!(Instant::now() < deadline, "{:?}", store.taken(pool));
    }
}

/// What every store does with the records of a pool: `node` is the node of `store`, and `pool` does
/// not exist yet.
#[track_caller]
pub(crate) fn keeps_the_contract(store: &mut dyn Store, node: &str, layer2: &str) {
    let (v4, v6) = (format!("{layer2}.10.61.0.0-24"), format!("{layer2}.fd00-0061-0000-0000-0000-0000-0000-0000-64"));
    assert_eq!(store.node().unwrap(), node);
    assert_eq!(find_pool(store, &v4).unwrap(), None);
    create_pool(store, &v4, "10.61.0.0/24");
    create_pool(store, &v6, "fd00:61::/64");
    let pool = find_pool(store, &v4).unwrap().unwrap();
    store.create_pool(&v4, &Pool { block_size: 2, ..pool.clone() }).unwrap();
    let pools = store.pools().unwrap();
    assert!(pools.contains(&(v4.clone(), pool)) && pools.iter().any(|(name, _)| *name == v6), "{pools:?}");
    for (pool, first, other) in [(&v4, "10.61.0.64", "10.61.0.65"), (&v6, "fd00:61::40", "fd00:61::41")] {
        let mut own = claim(pool, first, node);
        assert_eq!(store.get(&own.block()).unwrap(), None);
        let version = create(store, &own);
        assert_eq!(store.change(&own, &Change::Create).unwrap(), Outcome::Conflict);
        assert_eq!(store.get(&own.block()).unwrap(), Some((own.clone(), version.clone())));
        assert!(store.claims_of(node).unwrap().contains(&(own.clone(), version.clone())));
        assert!(store.claims_of("no-such-node").unwrap().is_empty());
        wait_until_taken(store, pool, &[(own.first, node.to_owned())]);
        // A new version fences the old one.
        own.nonce = "fedcba9876543210".to_owned();
        let Outcome::Written(newer) = swap(store, &own, &version).unwrap() else { panic!("changed") };
        assert_eq!(store.get(&own.block()).unwrap(), Some((own.clone(), newer.clone())));
        assert_eq!(swap(store, &own, &version).unwrap(), Outcome::Conflict);
        assert_eq!(delete(store, &own, &version).unwrap(), Outcome::Conflict);
        assert_eq!(delete(store, &own, &newer).unwrap(), Outcome::Absent);
        assert_eq!(store.get(&own.block()).unwrap(), None);
        assert_eq!(delete(store, &own, &newer).unwrap(), Outcome::Absent);
        assert_eq!(swap(store, &own, &newer).unwrap(), Outcome::Absent);
        wait_until_taken(store, pool, &[]);
        let second = claim(pool, other, node);
        let version = create(store, &second);
        assert_eq!(delete(store, &second, &version).unwrap(), Outcome::Absent);
    }
}
