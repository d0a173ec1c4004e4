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
use cni_ipam::{RangeConf, RangeSet};

use crate::cluster::{Cluster, InUse, Need, Network, Obtained, Opened};
use crate::ledger::{Host, Ledger};
use crate::store::{Answer, Claim, Failure, NodeState, Outcome, Pool, Store, Version};

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

    fn create(&mut self, claim: Claim) -> Outcome {
        let version = self.next_version();
        match self.claims.entry((claim.pool.clone(), claim.first)) {
            std::collections::btree_map::Entry::Occupied(_) => Outcome::Conflict,
            std::collections::btree_map::Entry::Vacant(free) => {
                free.insert((claim, version.clone()));
                Outcome::Done(version)
            }
        }
    }

    fn swap(&mut self, claim: Claim, version: &Version) -> Outcome {
        let next = self.next_version();
        match self.claims.get_mut(&(claim.pool.clone(), claim.first)) {
            Some(record) if record.1 == *version => {
                assert_ne!(record.0, claim, "a swap without a change keeps the version in Kubernetes");
                *record = (claim, next.clone());
                Outcome::Done(next)
            }
            Some(_) => Outcome::Conflict,
            None => Outcome::Absent,
        }
    }

    fn delete(&mut self, key: &(String, IpAddr), version: &Version) -> bool {
        if self.claims.get(key).is_some_and(|(_, found)| found == version) {
            self.claims.remove(key);
        }
        !self.claims.contains_key(key)
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

/// A connection of one node to the store.
struct MemoryStore {
    memory: Rc<RefCell<Memory>>,
    node: String,
}

impl MemoryStore {
    fn request<T>(&self, name: &'static str, apply: impl Fn(&mut Memory) -> T + 'static) -> Answer<T> {
        let memory = &mut *self.memory.borrow_mut();
        memory.requests.push(name);
        let unknown = || Err(Failure::Unknown("no answer from 192.0.2.1:443".to_owned()));
        match memory.faults.pop_front().or(memory.fault).unwrap_or(Fault::None) {
            Fault::None => Ok(apply(memory)),
            Fault::Lost => unknown(),
            Fault::Unanswered => {
                apply(memory);
                unknown()
            }
            Fault::Late => {
                memory.late.push(Box::new(move |memory| drop(apply(memory))));
                unknown()
            }
            Fault::Refused => Err(Failure::Refused(Error::new(Code(103), "401 Unauthorized"))),
        }
    }
}

impl Store for MemoryStore {
    fn node(&mut self) -> Answer<String> {
        Ok(self.node.clone())
    }
    fn set_deadline(&mut self, _: Instant) {}
    fn pools(&mut self) -> Answer<Vec<(String, Pool)>> {
        self.request("pools", |memory| {
            let listed = memory.pools.clone().into_iter().collect();
            memory.pools.extend(memory.appearing.take());
            listed
        })
    }
    fn create_pool(&mut self, name: &str, pool: &Pool) -> Answer<Outcome> {
        let (name, pool) = (name.to_owned(), pool.clone());
        self.request("create pool", move |memory| {
            if memory.pools.contains_key(&name) {
                return Outcome::Conflict;
            }
            memory.pools.insert(name.clone(), pool.clone());
            Outcome::Done(memory.next_version())
        })
    }
    fn create(&mut self, claim: &Claim) -> Answer<Outcome> {
        let claim = claim.clone();
        self.request("create", move |memory| memory.create(claim.clone()))
    }
    fn get(&mut self, pool: &str, first: IpAddr) -> Answer<Option<(Claim, Version)>> {
        let key = (pool.to_owned(), first);
        self.request("get", move |memory| memory.claims.get(&key).cloned())
    }
    fn swap(&mut self, claim: &Claim, version: &Version) -> Answer<Outcome> {
        let (claim, version) = (claim.clone(), version.clone());
        self.request("swap", move |memory| memory.swap(claim.clone(), &version))
    }
    fn delete(&mut self, pool: &str, first: IpAddr, version: &Version) -> Answer<bool> {
        let (key, version) = ((pool.to_owned(), first), version.clone());
        self.request("delete", move |memory| memory.delete(&key, &version))
    }
    fn claims_of(&mut self, node: &str) -> Answer<Vec<(Claim, Version)>> {
        let node = node.to_owned();
        self.request("claims", move |memory| {
            memory.claims.values().filter(|(claim, _)| claim.node == node).cloned().collect()
        })
    }
    fn taken(&mut self, pool: &str) -> Answer<Vec<(IpAddr, String)>> {
        let pool = pool.to_owned();
        self.request("taken", move |memory| {
            let claims = memory.claims.values().filter(|(claim, _)| claim.pool == pool);
            claims.map(|(claim, _)| (claim.first, claim.node.clone())).collect()
        })
    }
    fn node_state(&mut self, name: &str) -> Answer<NodeState> {
        let name = name.to_owned();
        self.request("node", move |memory| match &memory.nodes {
            None => NodeState::Unsupported,
            Some(nodes) => match nodes.get(&name) {
                Some(machine) => NodeState::Present(machine.clone()),
                None => NodeState::Absent(memory.now),
            },
        })
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
        let open = || {
            self.memory.borrow_mut().opened += 1;
            let store = Box::new(MemoryStore { memory: Rc::clone(&self.memory), node: self.name.clone() });
            Ok(Opened { store, timeout: self.timeout })
        };
        let network =
            Network { name: "net", sidecar: self.sidecar(), layer2: self.layer2, block_size: self.block_size, sets };
        let notes = Notes::new(move |note| notes.borrow_mut().push(note.to_owned()));
        function(&mut Cluster::new(network, self.host.clone(), &machine, notes, &open))
    }

    pub(crate) fn list(&self) -> Result<InUse> {
        Ok(InUse { addresses: self.reserved.borrow().iter().copied().collect(), lock: Box::new(()) })
    }

    /// Adds a container with an address of the set at a position, or with this address.
    pub(crate) fn add_in(&self, position: usize, requested: Option<IpAddr>) -> Result<IpAddr> {
        self.call(|cluster| {
            loop {
                let need = match cluster.held()? {
                    None => Need::Verification,
                    Some(spans) => match (self.free(&self.sets[position], &spans, requested), requested) {
                        (Some(address), _) => {
                            assert!(self.reserved.borrow_mut().insert(address));
                            return Ok(address);
                        }
                        (None, Some(address)) => Need::Address(address),
                        (None, None) => Need::Set(position),
                    },
                };
                match cluster.obtain(need, &mut || self.list())? {
                    Obtained::Changed => {}
                    Obtained::Exhausted(text) => return Err(Error::new(Code::TRY_AGAIN, text)),
                    Obtained::Taken(text) => return Err(Error::new(Code::CONFLICT, text)),
                }
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
        self.call_with(&[], |cluster| cluster.give_back(Some(&[address]), &mut || self.list()));
    }

    /// Collects garbage.
    pub(crate) fn gc(&self) {
        self.call(|cluster| cluster.give_back(None, &mut || self.list()));
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
