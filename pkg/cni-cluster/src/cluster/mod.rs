//! What a plugin calls: it reads the ledger, asks the store for blocks, and gives blocks back.
//!
//! The rules are in [`Ledger::step`]. This module performs their actions, and writes a changed
//! ledger before each request. So whatever happens to a request, the next call knows that it may
//! have been sent.
//!
//! Only the holder of the claim lock, `claim.lock` in the sidecar, asks the store and writes the
//! ledger. The lock of the reservations is taken after the claim lock, never before, and never
//! during a request. A block becomes `releasing` only under both locks, so that no ADD reserves an
//! address in it at the same time.

mod choose;

use std::any::Any;
use std::fs::{DirBuilder, File, OpenOptions};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;
use cni::{Cidr, Code, Error, Result};
use cni_ipam::ranges::{Range, RangeSet, number};
use cni_linux::flock::{self, Limit};

use crate::ledger::{Action, Entry, Holder, Host, Ledger, Seen, State};
use crate::pool::{self, Block};
use crate::store::{Answer, Claim, NodeState, Outcome, Pool, Reclaim, Store, Version, repeat};

/// How long a call that can do without the store waits for it.
const SHORT_WAIT: Duration = Duration::from_secs(1);

/// A network, as configured.
#[derive(Debug, Clone)]
pub struct Network<'a> {
    /// The name.
    pub name: &'a str,
    /// The folder of these plugins' own files, `<dataDir>/.cni/<network>`.
    pub sidecar: PathBuf,
    /// The layer 2 network, or empty.
    pub layer2: &'a str,
    /// The key `blockSize`.
    pub block_size: Option<u32>,
    /// The range sets, which ADD needs. GC keeps an empty block of their pools.
    pub sets: &'a [RangeSet],
}

impl Network<'_> {
    /// Returns the name of the pool of a range.
    fn pool(&self, range: &Range) -> String {
        pool::name(self.layer2, range.subnet())
    }

    /// Returns the names of the pools of all ranges, each once, with their subnets.
    fn pools(&self) -> Vec<(String, Cidr)> {
        let mut pools = Vec::new();
        for range in self.sets.iter().flat_map(RangeSet::ranges) {
            let pool = (self.pool(range), range.subnet());
            if !pools.contains(&pool) {
                pools.push(pool);
            }
        }
        pools
    }

    /// Returns the number of addresses of the ranges in a subnet.
    fn addresses(&self, subnet: Cidr) -> u128 {
        let ranges = self.sets.iter().flat_map(RangeSet::ranges).filter(|range| range.subnet() == subnet);
        let size = |range: &Range| (number(range.last()) - number(range.first())).saturating_add(1);
        ranges.map(size).fold(0, u128::saturating_add)
    }

    /// Checks the size of the blocks of the pool with this name and subnet.
    ///
    /// # Errors
    /// Code 7 if another size is configured, or if a block would be larger than the subnet.
    fn check_block_size(&self, name: &str, subnet: Cidr, size: u32) -> Result<()> {
        pool::check_block_size(size).map_err(|error| error.context(format_args!("pool {name}")))?;
        if let Some(configured) = self.block_size.filter(|configured| *configured != size) {
            let why = format!("blockSize {configured} differs from that of pool {name}, {size}");
            return Err(Error::config(format!("{why}: it is fixed when the pool is first used")));
        }
        if Block::of("", size, subnet.address()).last > subnet.last() {
            return Err(Error::config(format!("blocks of {size} addresses are larger than subnet {subnet}")));
        }
        Ok(())
    }
}

/// An open store.
pub struct Opened<'a> {
    /// The store.
    pub store: Box<dyn Store + 'a>,
    /// How long a call may spend on the store.
    pub timeout: Duration,
}

/// The reservations of the network while their lock is held.
pub struct InUse {
    /// The reserved addresses.
    pub addresses: Vec<IpAddr>,
    /// Releases the lock when it is dropped.
    pub lock: Box<dyn Any>,
}

/// Lists the reservations of the network and locks them.
pub type ListInUse<'a> = dyn FnMut() -> Result<InUse> + 'a;

/// Why an ADD needs the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// [`Cluster::held`] returned `None`.
    Verification,
    /// The range set with this position has no free address in the held blocks.
    Set(usize),
    /// The requested address is in no held block.
    Address(IpAddr),
}

/// The outcome of [`Cluster::obtain`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obtained {
    /// The ledger has changed, by this process or by another one: try again to reserve.
    Changed,
    /// All blocks of the range set are claimed. The text has their number and the holders.
    Exhausted(String),
    /// The block of the requested address is claimed. The text has its holder.
    Taken(String),
}

/// The blocks of one network of this node.
pub struct Cluster<'a> {
    network: Network<'a>,
    host: Host,
    machine: &'a dyn Machine,
    notes: Notes,
    open: &'a dyn Fn() -> Result<Opened<'a>>,
    opened: Option<Opened<'a>>,
    /// When this call began.
    begin: Instant,
    /// How long the call may wait for the claim lock and the store.
    limit: Limit,
    /// As last read or written.
    ledger: Ledger,
}

impl<'a> Cluster<'a> {
    /// Returns the blocks of a network. `open` opens the store; it is called at most once, when the
    /// store is needed.
    pub fn new(
        network: Network<'a>,
        host: Host,
        machine: &'a dyn Machine,
        notes: Notes,
        open: &'a dyn Fn() -> Result<Opened<'a>>,
    ) -> Cluster<'a> {
        let (begin, opened, ledger) = (machine.now(), None, Ledger::default());
        let limit = Limit { deadline: begin, length: Duration::ZERO };
        Cluster { network, host, machine, notes, open, opened, begin, limit, ledger }
    }

    /// Returns the ledger as last read by [`held`](Cluster::held).
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns the first and last addresses of the blocks from which this node may allocate,
    /// sorted, or `None` if the store must be asked first. The caller holds the lock of the
    /// reservations until it has reserved an address.
    ///
    /// # Errors
    /// Code 7 if a pool has blocks of another size than configured.
    pub fn held(&mut self) -> Result<Option<Vec<(IpAddr, IpAddr)>>> {
        self.ledger = Ledger::read(&self.network.sidecar);
        let pools = self.network.pools();
        for (name, subnet) in &pools {
            let size = self.ledger.pools.get(name);
            size.map_or(Ok(()), |size| self.network.check_block_size(name, *subnet, *size))?;
        }
        // The ledger may have blocks of pools that an earlier configuration used.
        let spans = || self.ledger.spans_in(|pool| pools.iter().any(|(name, _)| name == pool));
        Ok(self.ledger.is_usable(&self.host).then(spans))
    }

    /// Verifies the ledger or claims a block, as an ADD needs it. The caller has called
    /// [`held`](Cluster::held) and released the lock of the reservations.
    ///
    /// # Errors
    /// - Code 5 if the ledger cannot be written, before any request.
    /// - Code 7 if a pool has blocks of another size than configured.
    /// - Code 11 if the store does not answer in time, or another process of this node claims.
    /// - Code 102 if another machine has this node's claims, or an overlapping pool exists.
    /// - Code 103 if the store refuses.
    pub fn obtain(&mut self, need: Need, in_use: &mut ListInUse<'_>) -> Result<Obtained> {
        // With a ledger that was verified in this boot, the node works without the store.
        let is_optional = need == Need::Verification && self.ledger.is_of_boot(&self.host);
        let before = self.ledger.clone();
        let _lock = self.lock(if is_optional { SHORT_WAIT } else { Duration::MAX })?;
        if self.limit.length.is_zero() {
            return Err(Error::new(Code::TRY_AGAIN, "the blocks of this node changed until no time was left"));
        }
        if self.ledger != before {
            return Ok(Obtained::Changed);
        }
        self.save()?;
        match self.fulfil(need, in_use).map_err(Error::from) {
            Err(error) if is_optional && !matches!(error.code(), Code::INVALID_CONFIG | Code::CONFLICT) => {
                self.ledger.extend_trust(&self.host);
                self.save()?;
                self.notes
                    .note(format_args!("the blocks of this node are used without a look at their claims: {error}"));
                Ok(Obtained::Changed)
            }
            outcome => outcome,
        }
    }

    /// Gives back what DEL or GC has emptied: blocks of one address, and all but one of a pool's
    /// other empty blocks, or all if the network has ranges but none in the pool. After a DEL
    /// (`released`), gives back only blocks that contain a released address. Takes at most a
    /// second. An error is a note, and the next call that needs the store repeats the release.
    pub fn give_back(&mut self, released: Option<&[IpAddr]>, in_use: &mut ListInUse<'_>) {
        // Usually nothing is given back. Then the store is not opened, and no claim lock is taken.
        let ledger = Ledger::read(&self.network.sidecar);
        let pools = self.network.pools();
        let is_in_use = |pool: &str| pools.is_empty() || pools.iter().any(|(name, _)| name == pool);
        let is_done = |reserved: &[IpAddr]| ledger.surplus(reserved, released, &is_in_use).is_empty();
        if is_done(&[]) || in_use().is_ok_and(|in_use| is_done(&in_use.addresses)) {
            return;
        }
        let outcome = self.lock(SHORT_WAIT).and_then(|_lock| {
            let reservations = in_use()?;
            for block in self.ledger.surplus(&reservations.addresses, released, &is_in_use) {
                self.ledger.begin_release(&block);
            }
            self.save()?;
            drop(reservations);
            Ok(self.finish_begun().map(drop)?)
        });
        if let Err(error) = outcome {
            self.notes.note(format_args!("failed to give back the claims of empty blocks: {error}"));
        }
    }

    /// Opens the store, takes the claim lock and reads the ledger. Sets the deadline to `wait`, or
    /// to the rest of the node's timeout if that is shorter.
    ///
    /// # Errors
    /// - Code 5 or 7 if the store cannot be opened, or 5 if the lock cannot.
    /// - Code 11 if another process holds the lock until the deadline or a signal.
    fn lock(&mut self, wait: Duration) -> Result<File> {
        let now = self.machine.now();
        let opened = match &mut self.opened {
            Some(opened) => opened,
            empty => empty.insert((self.open)()?),
        };
        let length = wait.min((self.begin + opened.timeout).saturating_duration_since(now));
        self.limit = Limit { deadline: now + length, length };
        opened.store.set_deadline(self.limit.deadline);
        let path = self.network.sidecar.join("claim.lock");
        let doing = format!("failed to lock {}", path.display());
        let file = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.network.sidecar)
            .and_then(|()| OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path));
        let file = file.map_err(|error| Error::caused(Code::IO, &doing, error))?;
        let lock = flock::lock(file, self.machine, OnSigterm::Kill, self.limit).map_err(|refused| {
            let is_over = refused.cause.is_deadline() || refused.cause.is_terminated();
            let holder = refused.holder.map(|holder| format!(", which {holder} holds to claim a block"));
            let code = if is_over { Code::TRY_AGAIN } else { Code::IO };
            Error::caused(code, format_args!("{doing}{}", holder.unwrap_or_default()), refused.cause)
        })?;
        self.ledger = Ledger::read(&self.network.sidecar);
        Ok(lock)
    }

    /// Writes the ledger.
    ///
    /// # Errors
    /// Code 5.
    fn save(&mut self) -> Result<()> {
        let path = self.network.sidecar.join("blocks");
        cni_linux::file::replace(&path, &path.with_extension("new"), self.ledger.to_json().as_bytes())
            .map_err(|error| Error::caused(Code::IO, format_args!("failed to write {}", path.display()), error))?;
        self.ledger.is_changed = false;
        Ok(())
    }

    /// Asks the store, and repeats the operation while its outcome is unknown.
    fn ask<T>(&mut self, operation: impl FnMut(&mut dyn Store) -> Answer<T>) -> Answer<T> {
        match &mut self.opened {
            Some(opened) => repeat(&mut *opened.store, self.machine, self.limit, operation),
            None => Err(Error::new(Code::INTERNAL, "the store is not open").into()),
        }
    }

    /// Verifies the ledger if it must not be used, finishes what an earlier call has begun, or else
    /// claims a block.
    fn fulfil(&mut self, need: Need, in_use: &mut ListInUse<'_>) -> Answer<Obtained> {
        if !self.ledger.is_usable(&self.host) {
            return self.verify(in_use).map(|()| Obtained::Changed);
        }
        if self.finish_begun()? {
            return Ok(Obtained::Changed);
        }
        for (name, subnet) in self.network.pools() {
            if !self.ledger.pools.contains_key(&name) {
                self.ensure_pool(name, subnet)?;
            }
        }
        let sets = self.network.sets;
        let holder = match need {
            Need::Set(position) if position < sets.len() => return self.claim_any(&sets[position]),
            Need::Address(address) => match self.block_of(address) {
                Some(block) => self.claim(&block)?,
                None => None,
            },
            Need::Verification | Need::Set(_) => None,
        };
        Ok(holder.map_or(Obtained::Changed, |holder| Obtained::Taken(holder.to_string())))
    }

    /// Finishes the claims and releases that an earlier call, or this one, has begun. Returns
    /// whether there was one.
    fn finish_begun(&mut self) -> Answer<bool> {
        let is_begun = |entry: &&Entry| matches!(entry.state, State::Claiming | State::Releasing(_));
        let begun: Vec<Block> =
            self.ledger.entries().iter().filter(is_begun).map(|entry| entry.block.clone()).collect();
        for block in &begun {
            self.settle(block, Seen::Unread, &[])?;
        }
        Ok(!begun.is_empty())
    }

    /// Makes the ledger agree with the store: pools, this node's claims, and the blocks of all
    /// reservations.
    fn verify(&mut self, in_use: &mut ListInUse<'_>) -> Answer<()> {
        let node = self.ask(|store| store.node())?;
        self.ledger.node = node.clone();
        for (name, subnet) in self.network.pools() {
            self.ensure_pool(name, subnet)?;
        }
        let mut own = Vec::new();
        for (claim, version) in self.ask(|store| store.claims_of(&node))? {
            if claim.network == self.network.name {
                let block = Block { pool: claim.pool.clone(), first: claim.first, last: claim.last };
                self.ledger.begin_claim(&block);
                own.push((block, self.recognise(claim, version)?));
            }
        }
        let reserved = in_use()?.addresses;
        for address in &reserved {
            let has_entry = self.ledger.entries().iter().any(|entry| entry.block.contains(*address));
            if let Some(block) = self.block_of(*address).filter(|_| !has_entry) {
                self.ledger.begin_claim(&block);
            }
        }
        for Entry { block, .. } in self.ledger.entries().to_vec() {
            let seen = own.iter().find(|(other, _)| *other == block).map_or(Seen::Unread, |(_, seen)| seen.clone());
            self.settle(&block, seen, &reserved)?;
        }
        self.ledger.set_verified(&self.host);
        Ok(self.save()?)
    }

    /// Records the block size of a pool, and creates the pool if it does not exist.
    fn ensure_pool(&mut self, name: String, subnet: Cidr) -> Answer<()> {
        let block_size = loop {
            let pools = self.ask(|store| store.pools())?;
            if let Some((_, pool)) = pools.iter().find(|(other, _)| *other == name) {
                break pool.block_size;
            }
            let pool = self.new_pool(&name, subnet, &pools)?;
            // If another node creates it at the same moment, that one may have another block size.
            if let Outcome::Done(_) = self.ask(|store| store.create_pool(&name, &pool))? {
                break pool.block_size;
            }
        };
        self.network.check_block_size(&name, subnet, block_size)?;
        self.ledger.pools.insert(name, block_size);
        Ok(())
    }

    /// Returns a pool that is not in `pools`.
    fn new_pool(&self, name: &str, subnet: Cidr, pools: &[(String, Pool)]) -> Result<Pool> {
        let overlaps = |(other, pool): &&(String, Pool)| {
            pool::name(self.network.layer2, pool.subnet) == *other
                && (pool.subnet.contains(subnet.address()) || subnet.contains(pool.subnet.address()))
        };
        if let Some((other, _)) = pools.iter().find(overlaps) {
            let why = "addresses would be given out twice; use the same subnet, or another layer2";
            return Err(Error::new(Code::CONFLICT, format!("pool {name} overlaps pool {other}: {why}")));
        }
        let default_size = pool::default_block_size(self.network.addresses(subnet));
        let block_size = self.network.block_size.unwrap_or(default_size);
        self.network.check_block_size(name, subnet, block_size)?;
        Ok(Pool { subnet, block_size, reclaim: Reclaim::default() })
    }

    /// Returns the name and the block size of the pool of a range, which the ledger has.
    fn pool_of(&self, range: &Range) -> (String, u32) {
        let name = self.network.pool(range);
        let size = self.ledger.pools.get(&name).copied().unwrap_or(1);
        (name, size)
    }

    /// Returns the block of an address, or `None` if the address is in no range.
    fn block_of(&self, address: IpAddr) -> Option<Block> {
        let range = self.network.sets.iter().find_map(|set| set.find(address))?;
        let (pool, size) = self.pool_of(range);
        Some(Block::of(&pool, size, address))
    }

    /// Returns what a claim means to this network of this node.
    ///
    /// # Errors
    /// Code 102 if another machine has made the claim under this node's name, and the store does
    /// not know this machine as the node.
    fn recognise(&mut self, claim: Claim, version: Version) -> Answer<Seen> {
        let (node, machine) = (&claim.node, self.host.machine.clone());
        if *node != self.ledger.node || claim.network != self.network.name {
            return Ok(Seen::Other(Holder { node: claim.node, network: claim.network }));
        }
        let is_registered = |state: NodeState| state == NodeState::Present(machine.clone());
        if claim.machine != machine && !is_registered(self.ask(|store| store.node_state(node))?) {
            let other = &claim.machine;
            let what = format!("the claims of node {node} are of machine {other:?}, not of this one, {machine:?}");
            let advice = format!("if that machine is off: kubectl delete ipblocks --field-selector spec.node={node}");
            return Err(Error::new(Code::CONFLICT, format!("{what}; {advice}")).into());
        }
        Ok(Seen::Own(version))
    }

    /// Performs the ledger's actions on a block until it agrees with the store. Returns the holder
    /// of a block that is not this node's. `reserved`: the addresses in use.
    fn settle(&mut self, block: &Block, mut seen: Seen, reserved: &[IpAddr]) -> Answer<Option<Holder>> {
        let is_reserved = block.contains_any(reserved);
        let mut holder = None;
        loop {
            if let Seen::Other(other) = &seen {
                holder = Some(other.clone());
            }
            let action = self.ledger.step(block, seen, is_reserved);
            if self.ledger.is_changed {
                self.save()?;
            }
            let claim = self.new_claim(block)?;
            seen = match action {
                Action::Done => return Ok(holder),
                Action::Get => match self.ask(|store| store.get(&block.pool, block.first))? {
                    Some((claim, version)) => self.recognise(claim, version)?,
                    None => Seen::Absent,
                },
                Action::Create => written(self.ask(|store| store.create(&claim))?),
                Action::Swap(version) => written(self.ask(|store| store.swap(&claim, &version))?),
                Action::Delete(version) => match self.ask(|store| store.delete(&block.pool, block.first, &version))? {
                    true => Seen::Absent,
                    false => Seen::Changed,
                },
            };
        }
    }

    /// Returns this node's claim of a block, with a new nonce.
    fn new_claim(&self, block: &Block) -> Result<Claim> {
        let nonce = getrandom::u64().map_err(|error| Error::caused(Code::IO, "failed to read random bytes", error))?;
        let Block { pool, first, last } = block.clone();
        let (node, network) = (self.ledger.node.clone(), self.network.name.to_owned());
        let (machine, nonce) = (self.host.machine.clone(), format!("{nonce:016x}"));
        Ok(Claim { pool, first, last, node, network, machine, nonce, absent_since: None })
    }

    /// Claims a block. Returns the holder if it is not this node's.
    fn claim(&mut self, block: &Block) -> Answer<Option<Holder>> {
        if let Some(State::Lost(holder)) = self.ledger.state(block) {
            return Ok(Some(holder.clone()));
        }
        self.ledger.begin_claim(block);
        self.settle(block, Seen::Unread, &[])
    }
}

/// Returns what the outcome of a creation or a swap shows of the claim.
fn written(outcome: Outcome) -> Seen {
    match outcome {
        Outcome::Done(version) => Seen::Written(version),
        Outcome::Conflict | Outcome::Absent => Seen::Changed,
    }
}
