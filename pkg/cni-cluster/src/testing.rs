//! A store in memory with faults, and nodes that allocate addresses as a plugin does.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use cni::machine::{Child, Machine, Output, RunError};
use cni::rollback::Notes;
use cni::{Code, Error, Result};
use cni_ipam::ranges::{address, number};
use cni_ipam::{RangeConf, RangeSet, Shortage};
use cni_linux::flock::Limit;

use crate::cluster::{Cluster, InUse, Network};
use crate::ledger::{Host, Ledger};
use crate::pool::Block;
use crate::store::{Change, Claim, NodeState, Outcome, Pool, Store, Version};

/// What happens to one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The request takes effect and is answered.
    None,
    /// The request is lost.
    Lost,
    /// The request takes effect, and the answer is lost.
    Unanswered,
    /// The request takes effect when [`Memory::deliver`] is called, without an answer.
    Late,
    /// The store refuses, with code 103.
    Refused,
}

/// A request that takes effect later.
type Late = Box<dyn FnOnce(&mut Memory)>;

/// The contents of a store.
#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) pools: BTreeMap<String, Pool>,
    /// A pool that another node creates just after the next list of pools.
    pub(crate) appearing: Option<(String, Pool)>,
    pub(crate) claims: BTreeMap<(String, IpAddr), (Claim, Version)>,
    versions: u64,
    /// The machine IDs of the nodes, or `None` if the store does not know nodes.
    pub(crate) nodes: Option<BTreeMap<String, String>>,
    /// The time, in seconds since 1970.
    pub(crate) now: u64,
    /// The faults of the next requests. Later requests have the fault `fault`.
    pub(crate) faults: VecDeque<Fault>,
    pub(crate) fault: Option<Fault>,
    late: Vec<Late>,
    /// How many calls have opened the store.
    pub(crate) opened: usize,
    /// The operations of all requests.
    pub(crate) requests: Vec<&'static str>,
}

impl Memory {
    fn next_version(&mut self) -> Version {
        self.versions += 1;
        Version(self.versions.to_string())
    }

    fn change(&mut self, claim: Claim, change: &Change) -> Outcome {
        let next = self.next_version();
        let key = (claim.pool.clone(), claim.first);
        match (self.claims.get(&key), change) {
            (Some((_, found)), Change::Delete(version)) if found == version => {
                self.claims.remove(&key);
                Outcome::Absent
            }
            (Some((record, found)), Change::Swap(version)) if found == version => {
                assert_ne!(*record, claim, "a swap without a change keeps the version in Kubernetes");
                self.claims.insert(key, (claim, next.clone()));
                Outcome::Written(next)
            }
            (None, Change::Create) => {
                self.claims.insert(key, (claim, next.clone()));
                Outcome::Written(next)
            }
            (None, _) => Outcome::Absent,
            (Some(_), _) => Outcome::Conflict,
        }
    }

    /// Lets one of the late requests take effect, chosen by a number. Whether there was one.
    pub(crate) fn deliver(&mut self, choice: usize) -> bool {
        if self.late.is_empty() {
            return false;
        }
        let request = self.late.swap_remove(choice % self.late.len());
        request(self);
        true
    }

    /// Returns how many claims a node has.
    pub(crate) fn count(&self, node: &str) -> usize {
        self.claims.values().filter(|(claim, _)| claim.node == node).count()
    }
}

/// How often a request whose outcome is unknown is repeated in one call.
const ATTEMPTS: usize = 40;

/// A connection of one node to the store.
struct MemoryStore {
    memory: Rc<RefCell<Memory>>,
    node: String,
    limit: Limit,
    /// How many requests of this call may still have an unknown outcome.
    attempts: usize,
}

impl MemoryStore {
    /// Sends a request until its outcome is known.
    fn request<T>(&mut self, name: &'static str, apply: impl Fn(&mut Memory) -> T + Clone + 'static) -> Result<T> {
        let memory = &mut *self.memory.borrow_mut();
        loop {
            memory.requests.push(name);
            match memory.faults.pop_front().or(memory.fault).unwrap_or(Fault::None) {
                Fault::None => return Ok(apply(memory)),
                Fault::Lost => {}
                Fault::Unanswered => drop(apply(memory)),
                Fault::Late => {
                    let apply = apply.clone();
                    memory.late.push(Box::new(move |memory| drop(apply(memory))));
                }
                Fault::Refused => return Err(Error::new(Code(103), "401 Unauthorized")),
            }
            self.attempts = self.attempts.saturating_sub(1);
            if self.attempts == 0 {
                let why = format!("gave up after {:.1} s", self.limit.length.as_secs_f32());
                return Err(Error::new(Code::TRY_AGAIN, format!("no answer from 192.0.2.1:443; {why}")));
            }
        }
    }
}

impl Store for MemoryStore {
    fn node(&mut self) -> Result<String> {
        Ok(self.node.clone())
    }
    fn set_limit(&mut self, limit: Limit) {
        (self.limit, self.attempts) = (limit, ATTEMPTS);
    }
    fn pools(&mut self) -> Result<Vec<(String, Pool)>> {
        self.request("pools", |memory| {
            let listed = memory.pools.clone().into_iter().collect();
            memory.pools.extend(memory.appearing.take());
            listed
        })
    }
    fn create_pool(&mut self, name: &str, pool: &Pool) -> Result<()> {
        let (name, pool) = (name.to_owned(), pool.clone());
        self.request("create pool", move |memory| {
            memory.pools.entry(name.clone()).or_insert(pool.clone());
        })
    }
    fn get(&mut self, block: &Block) -> Result<Option<(Claim, Version)>> {
        let key = (block.pool.clone(), block.first);
        self.request("get", move |memory| memory.claims.get(&key).cloned())
    }
    fn change(&mut self, claim: &Claim, change: &Change) -> Result<Outcome> {
        let (claim, change) = (claim.clone(), change.clone());
        let name = match change {
            Change::Create => "create",
            Change::Swap(_) => "swap",
            Change::Delete(_) => "delete",
        };
        self.request(name, move |memory| memory.change(claim.clone(), &change))
    }
    fn claims_of(&mut self, node: &str) -> Result<Vec<(Claim, Version)>> {
        let node = node.to_owned();
        self.request("claims", move |memory| {
            memory.claims.values().filter(|(claim, _)| claim.node == node).cloned().collect()
        })
    }
    fn taken(&mut self, pool: &str) -> Result<Vec<(IpAddr, String)>> {
        let pool = pool.to_owned();
        self.request("taken", move |memory| {
            let claims = memory.claims.values().filter(|(claim, _)| claim.pool == pool);
            claims.map(|(claim, _)| (claim.first, claim.node.clone())).collect()
        })
    }
    fn node_state(&mut self, name: &str) -> Result<NodeState> {
        let name = name.to_owned();
        self.request("node", move |memory| match &memory.nodes {
            None => NodeState::Unsupported,
            Some(nodes) => match nodes.get(&name) {
                Some(machine) => NodeState::Present(machine.clone()),
                None => NodeState::Absent(memory.now),
            },
        })
    }
    fn deletion_advice(&self, claim: &Claim) -> String {
        format!("delete what {} has, such as {}", claim.node, claim.first)
    }
}

/// A machine whose clock goes on by 10 ms whenever it is read, so that repetitions end soon.
#[derive(Default)]
pub(crate) struct TestMachine {
    reads: Cell<u32>,
}

impl Machine for TestMachine {
    fn is_own_netns(&self, _: &Path) -> io::Result<bool> {
        Ok(false)
    }
    fn terminated(&self) -> bool {
        false
    }
    fn now(&self) -> Instant {
        self.reads.set(self.reads.get() + 1);
        Instant::now() + Duration::from_millis(10) * self.reads.get()
    }
    fn run(&self, _: &Child<'_>) -> Result<Output, RunError> {
        Err(RunError::Start(io::ErrorKind::Unsupported.into()))
    }
}

/// A node with one network.
pub(crate) struct TestNode {
    pub(crate) name: String,
    pub(crate) host: Host,
    pub(crate) sets: Vec<RangeSet>,
    pub(crate) layer2: &'static str,
    pub(crate) block_size: Option<u32>,
    pub(crate) timeout: Duration,
    pub(crate) folder: tempfile::TempDir,
    /// The addresses of the containers.
    pub(crate) reserved: Rc<RefCell<BTreeSet<IpAddr>>>,
    pub(crate) memory: Rc<RefCell<Memory>>,
    /// The notes of all calls.
    pub(crate) notes: Rc<RefCell<Vec<String>>>,
}

impl TestNode {
    /// Returns a node of a cluster, with a range set for each subnet.
    pub(crate) fn new(memory: &Rc<RefCell<Memory>>, name: &str, subnets: &[&str]) -> TestNode {
        let set = |subnet: &&str| {
            RangeSet::check(&[RangeConf { subnet: Some((*subnet).to_owned()), ..RangeConf::default() }]).unwrap()
        };
        let machine = format!("machine of {name}");
        if let Some(nodes) = &mut memory.borrow_mut().nodes {
            nodes.insert(name.to_owned(), machine.clone());
        }
        TestNode {
            name: name.to_owned(),
            host: Host { machine, boot: "boot 1".to_owned(), uptime: 10 },
            sets: subnets.iter().map(set).collect(),
            layer2: "",
            block_size: None,
            timeout: Duration::from_secs(2),
            folder: tempfile::tempdir().unwrap(),
            reserved: Rc::default(),
            memory: Rc::clone(memory),
            notes: Rc::default(),
        }
    }

    pub(crate) fn sidecar(&self) -> PathBuf {
        self.folder.path().join("net")
    }

    pub(crate) fn ledger(&self) -> Ledger {
        Ledger::read(&self.sidecar())
    }

    /// Runs a function with the blocks of a new process.
    pub(crate) fn call<T>(&self, function: impl FnOnce(&mut Cluster<'_>) -> T) -> T {
        self.call_with(&self.sets, function)
    }

    fn call_with<T>(&self, sets: &[RangeSet], function: impl FnOnce(&mut Cluster<'_>) -> T) -> T {
        let machine = TestMachine::default();
        let notes = Rc::clone(&self.notes);
        function(&mut Cluster::new(Network {
            name: "net",
            sidecar: self.sidecar(),
            layer2: self.layer2.to_owned(),
            block_size: self.block_size,
            sets,
            host: self.host.clone(),
            machine: &machine,
            notes: Notes::new(move |note| notes.borrow_mut().push(note.to_owned())),
            open: Box::new(|| {
                self.memory.borrow_mut().opened += 1;
                let limit = Limit { deadline: Instant::now(), length: Duration::ZERO };
                let (memory, node) = (Rc::clone(&self.memory), self.name.clone());
                Ok((Box::new(MemoryStore { memory, node, limit, attempts: 0 }), self.timeout))
            }),
            lock_reservations: Box::new(|| self.list()),
        }))
    }

    pub(crate) fn list(&self) -> Result<InUse> {
        Ok(InUse { addresses: self.reserved.borrow().iter().copied().collect(), lock: Box::new(()) })
    }

    /// Adds a container with an address of the set at a position, or with this address.
    pub(crate) fn add_in(&self, position: usize, requested: Option<IpAddr>) -> Result<IpAddr> {
        self.call(|cluster| {
            loop {
                let shortage = match cluster.held()? {
                    None => None,
                    Some(spans) => match self.free(&self.sets[position], &spans, requested) {
                        Some(address) => {
                            assert!(self.reserved.borrow_mut().insert(address));
                            return Ok(address);
                        }
                        None => Some(Shortage { set: position, requested }),
                    },
                };
                cluster.obtain(shortage)?;
            }
        })
    }

    /// Returns the first free address of the set in the spans.
    fn free(&self, set: &RangeSet, spans: &[(IpAddr, IpAddr)], requested: Option<IpAddr>) -> Option<IpAddr> {
        let reserved = self.reserved.borrow();
        let all = spans
            .iter()
            .flat_map(|(first, last)| (number(*first)..=number(*last)).map(|number| address(*first, number)));
        all.into_iter().find(|address| {
            requested.is_none_or(|requested| requested == *address)
                && set.can_allocate(*address)
                && !reserved.contains(address)
        })
    }

    /// Adds a container with an address of the first set.
    pub(crate) fn add(&self) -> Result<IpAddr> {
        self.add_in(0, None)
    }

    /// Deletes a container. DEL has no ranges.
    pub(crate) fn del(&self, address: IpAddr) {
        assert!(self.reserved.borrow_mut().remove(&address));
        self.call_with(&[], |cluster| self.note(cluster.give_back(Some(&[address]))));
    }

    /// Collects garbage.
    pub(crate) fn gc(&self) {
        self.call(|cluster| self.note(cluster.give_back(None)));
    }

    /// Writes an error as a note.
    fn note(&self, outcome: Result<()>) {
        self.notes.borrow_mut().extend(outcome.err().map(|error| error.to_string()));
    }

    /// Boots the machine again, without containers.
    pub(crate) fn boot(&mut self) {
        self.host.boot.push('+');
        self.reserved.borrow_mut().clear();
    }
}

/// Returns an empty store that knows nodes.
pub(crate) fn memory() -> Rc<RefCell<Memory>> {
    Rc::new(RefCell::new(Memory { nodes: Some(BTreeMap::new()), now: 1_795_225_384, ..Memory::default() }))
}
