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
mod network;

use std::any::Any;
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::time::{Duration, Instant};

use cni::machine::OnSigterm;
use cni::{Code, Error, Result};
use cni_ipam::Shortage;
use cni_ipam::ranges::Range;
use cni_linux::flock::{self, Limit};

use crate::ledger::{Action, Entry, Holder, Ledger, Seen, State};
use crate::pool::Block;
use crate::store::{Claim, NodeState, Outcome, Pool, Reclaim, Store, Version};

pub use network::Network;

/// How long a call that can do without the store waits for it.
const SHORT_WAIT: Duration = Duration::from_secs(1);

/// The reservations of the network while their lock is held.
pub struct InUse {
    /// The reserved addresses.
    pub addresses: Vec<IpAddr>,
    /// Releases the lock when it is dropped.
    pub lock: Box<dyn Any>,
}

/// Opens the store. Returns also how long a call may spend on it.
pub type Open<'a> = dyn Fn() -> Result<(Box<dyn Store + 'a>, Duration)> + 'a;

/// The blocks of one network of this node.
pub struct Cluster<'a> {
    network: Network<'a>,
    /// The store, once it is needed, and until when the call may wait for it and the claim lock.
    store: Option<(Box<dyn Store + 'a>, Instant)>,
    /// As last read or written.
    ledger: Ledger,
    /// Whether this call goes on with a ledger of this boot, because it could not verify it.
    is_unverified: bool,
}

impl<'a> Cluster<'a> {
    /// Returns the blocks of a network.
    pub fn new(network: Network<'a>) -> Cluster<'a> {
        Cluster { network, store: None, ledger: Ledger::default(), is_unverified: false }
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
            if let Some(size) = self.ledger.pools.get(name) {
                self.network.check_block_size(name, *subnet, *size)?;
            }
        }
        // The ledger may have blocks of pools that an earlier configuration used.
        let is_chosen = |block: &Block| {
            let is_known = self.ledger.pools.contains_key(&block.pool);
            pools.iter().any(|(name, _)| *name == block.pool) && (!is_known || self.ledger.fits(block))
        };
        let host = &self.network.host;
        let is_usable = self.ledger.is_usable(host) || self.is_unverified && self.ledger.is_of_boot(host);
        Ok(is_usable.then(|| self.ledger.spans(is_chosen)))
    }

    /// Claims a block for a shortage, or without one verifies the ledger, because
    /// [`held`](Cluster::held) has returned `None`. The caller has released the lock of the
    /// reservations. If the ledger has changed afterwards, by this process or by another one, the
    /// caller tries again to reserve.
    ///
    /// # Errors
    /// - Code 5 if the ledger cannot be written, before any request.
    /// - Code 7 if a pool has blocks of another size than configured.
    /// - Code 11 if the store does not answer in time, if another process of this node claims, or
    ///   if all blocks of the range set are claimed.
    /// - Code 102 if the block of the requested address is claimed, if another machine has this
    ///   node's claims, or if an overlapping pool exists.
    /// - Code 103 if the store refuses.
    pub fn obtain(&mut self, shortage: Option<Shortage>) -> Result<()> {
        // With a ledger that was verified in this boot, the node works without the store.
        let is_optional = shortage.is_none() && self.ledger.is_of_boot(&self.network.host);
        let before = self.ledger.clone();
        let _lock = match self.lock(if is_optional { SHORT_WAIT } else { Duration::MAX }) {
            // Only the process that has the lock writes the ledger.
            Err(error) if is_optional && error.code() == Code::TRY_AGAIN => {
                self.is_unverified = true;
                self.note_unverified(&error);
                return Ok(());
            }
            locked => locked?,
        };
        if self.ledger != before {
            return Ok(());
        }
        self.save()?;
        match self.fulfil(shortage) {
            Err(error) if is_optional && !matches!(error.code(), Code::INVALID_CONFIG | Code::CONFLICT) => {
                self.ledger.extend_trust(&self.network.host);
                self.note_unverified(&error);
                self.save()
            }
            outcome => outcome,
        }
    }

    /// Writes the note that blocks are used although they could not be verified.
    fn note_unverified(&self, error: &Error) {
        let what = "the blocks of this node are used without a look at their claims";
        self.network.notes.note(format_args!("{what}: {error}"));
    }

    /// Gives back what DEL or GC has emptied: blocks of one address, and all but one of a pool's
    /// other empty blocks, or all if the network has ranges but none in the pool. After a DEL
    /// (`released`), gives back only blocks that contain a released address. Takes at most a
    /// second. After an error, the next call that needs the store repeats the release.
    ///
    /// # Errors
    /// Those of [`obtain`](Cluster::obtain).
    pub fn give_back(&mut self, released: Option<&[IpAddr]>) -> Result<()> {
        let pools = self.network.pools();
        let is_in_use = |pool: &str| pools.is_empty() || pools.iter().any(|(name, _)| name == pool);
        let surplus = |ledger: &Ledger, reserved: &[IpAddr]| ledger.surplus(reserved, released, &is_in_use);
        // Usually nothing is given back. Then the store is not opened, and no claim lock is taken.
        let ledger = Ledger::read(&self.network.sidecar);
        if surplus(&ledger, &[]).is_empty()
            || surplus(&ledger, &(self.network.lock_reservations)()?.addresses).is_empty()
        {
            return Ok(());
        }
        let _lock = self.lock(SHORT_WAIT)?;
        let reservations = (self.network.lock_reservations)()?;
        for block in surplus(&self.ledger, &reservations.addresses) {
            self.ledger.begin_release(&block);
        }
        self.save()?;
        drop(reservations);
        self.finish_begun().map(drop)
    }

    /// Opens the store, takes the claim lock and reads the ledger. The requests until the next lock
    /// may take `wait`, or the rest of the node's timeout if that is shorter.
    ///
    /// # Errors
    /// - Code 5 or 7 if the store cannot be opened, or 5 if the lock cannot.
    /// - Code 11 if another process holds the lock until the deadline or a signal, or if no time is
    ///   left.
    fn lock(&mut self, wait: Duration) -> Result<File> {
        let now = self.network.machine.now();
        let (store, end) = match &mut self.store {
            Some(opened) => opened,
            closed => {
                let (store, timeout) = (self.network.open)()?;
                closed.insert((store, now + timeout))
            }
        };
        let length = wait.min(end.saturating_duration_since(now));
        if length.is_zero() {
            return Err(Error::new(Code::TRY_AGAIN, "the blocks of this node changed until no time was left"));
        }
        let limit = Limit { deadline: now + length, length };
        store.set_limit(limit);
        let path = self.network.sidecar.join("claim.lock");
        let doing = format!("failed to lock {}", path.display());
        while self.network.machine.now() < limit.deadline {
            let file = DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&self.network.sidecar)
                .and_then(|()| OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path));
            let file = file.map_err(|error| Error::caused(Code::IO, &doing, error))?;
            let lock = flock::lock(file, self.network.machine, OnSigterm::Kill, limit).map_err(|refused| {
                let is_over = refused.cause.is_deadline() || refused.cause.is_terminated();
                let holder = refused.holder.map(|holder| format!(", which {holder} holds to claim a block"));
                let code = if is_over { Code::TRY_AGAIN } else { Code::IO };
                Error::caused(code, format_args!("{doing}{}", holder.unwrap_or_default()), refused.cause)
            })?;
            if cni_ipam::lock::is_at_path(&lock, &path) {
                self.ledger = Ledger::read(&self.network.sidecar);
                return Ok(lock);
            }
            // The lock file was removed or replaced during the wait.
        }
        Err(Error::new(Code::TRY_AGAIN, format!("{doing}: another process keeps removing it")))
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

    /// Returns the store, which [`lock`](Cluster::lock) has opened.
    fn store(&mut self) -> Result<&mut (dyn Store + 'a)> {
        let opened = self.store.as_mut().map(|(store, _)| &mut **store);
        opened.ok_or_else(|| Error::new(Code::INTERNAL, "the store is not open"))
    }

    /// Verifies the ledger if it must not be used, finishes what an earlier call has begun, or else
    /// claims a block.
    fn fulfil(&mut self, shortage: Option<Shortage>) -> Result<()> {
        if !self.ledger.is_usable(&self.network.host) {
            return self.verify();
        }
        if self.finish_begun()? {
            return Ok(());
        }
        if self.network.pools().iter().any(|(name, _)| !self.ledger.pools.contains_key(name)) {
            self.read_pools()?;
        }
        let Some(Shortage { set: position, requested }) = shortage else { return Ok(()) };
        let set = &self.network.sets[position];
        let block = requested.and_then(|address| self.block_of(address));
        let refusal = match (requested, block) {
            (Some(address), Some(block)) => self.claim(&block)?.map(|holder| {
                let msg = format!("requested IP address {address} is not available in range set {set}: {holder}");
                (Code::CONFLICT, msg)
            }),
            _ => self
                .claim_any(set)?
                .map(|why| (Code::TRY_AGAIN, format!("no IP addresses available in range set: {set}; {why}"))),
        };
        let Some((code, msg)) = refusal else { return Ok(()) };
        Err(Error::new(code, format!("failed to allocate for range {position}: {msg}")))
    }

    /// Finishes the claims and releases that an earlier call, or this one, has begun. Returns
    /// whether there was one.
    fn finish_begun(&mut self) -> Result<bool> {
        let is_usable = self.ledger.is_usable(&self.network.host);
        let is_begun = |entry: &&Entry| match entry.state {
            // A claim of a block with an old size is left to the next verification.
            State::Claiming => is_usable && self.ledger.fits(&entry.block),
            State::Releasing(_) => true,
            State::Held(_) | State::Lost(_) => false,
        };
        let begun: Vec<Entry> = self.ledger.entries().iter().filter(is_begun).cloned().collect();
        for Entry { block, .. } in &begun {
            self.settle(block, Seen::Unread, &[])?;
        }
        Ok(!begun.is_empty())
    }

    /// Makes the ledger agree with the store: pools, this node's claims, and the blocks of all
    /// reservations.
    fn verify(&mut self) -> Result<()> {
        let node = self.store()?.node()?;
        // Without an ID, another machine with this node's name has the same claims.
        if self.network.host.machine.is_empty() && self.store()?.node_state(&node)? != NodeState::Present(String::new())
        {
            let what = format!("this machine has no ID, so the claims of node {node} may be those of another machine");
            let advice = "create /etc/machine-id: systemd-machine-id-setup";
            return Err(Error::new(Code::CONFLICT, format!("{what}; {advice}")));
        }
        self.ledger.node = node.clone();
        let own = self.own_claims(&node)?;
        own.iter().for_each(|(block, _)| self.ledger.begin_claim(block));
        self.read_pools()?;
        let InUse { addresses: reserved, lock } = (self.network.lock_reservations)()?;
        let version = |block: &Block| own.iter().find(|(other, _)| other == block).map(|(_, version)| version.clone());
        for Entry { block, .. } in self.ledger.entries().to_vec() {
            if !self.ledger.fits(&block) {
                self.ledger.replace(&block, version(&block), &reserved);
            }
        }
        if self.ledger.is_changed {
            // Until then another ADD may reserve an address in a block that is to be released.
            self.save()?;
        }
        drop(lock);
        for address in &reserved {
            let has_entry = self.ledger.entries().iter().any(|entry| entry.block.contains(*address));
            if let Some(block) = self.block_of(*address).filter(|_| !has_entry) {
                self.ledger.begin_claim(&block);
            }
        }
        for Entry { block, .. } in self.ledger.entries().to_vec() {
            if self.ledger.fits(&block) || matches!(self.ledger.state(&block), Some(State::Releasing(_))) {
                self.settle(&block, version(&block).map_or(Seen::Unread, Seen::Own), &reserved)?;
            }
        }
        self.ledger.set_verified(&self.network.host);
        self.save()
    }

    /// Returns the blocks and versions of this network's claims with the node's name.
    ///
    /// # Errors
    /// Code 102 if another machine has made one of them.
    fn own_claims(&mut self, node: &str) -> Result<Vec<(Block, Version)>> {
        let mut own = Vec::new();
        for (claim, version) in self.store()?.claims_of(node)? {
            let block = claim.block();
            if let Seen::Own(version) = self.recognise(claim, version)?
                && block.is_valid()
            {
                own.push((block, version));
            }
        }
        Ok(own)
    }

    /// Records the block sizes of the pools, and creates those of the network that do not exist.
    fn read_pools(&mut self) -> Result<()> {
        let wanted = self.network.pools();
        for _ in 0..2 {
            let pools = self.store()?.pools()?;
            let mut is_complete = true;
            for (name, subnet) in &wanted {
                // Also if the pool exists: two nodes may have created both at the same time.
                self.network.check_overlap(name, *subnet, &pools)?;
                let found = pools.iter().find(|(other, _)| other == name).map(|(_, pool)| pool.block_size);
                let block_size = found.unwrap_or_else(|| self.network.new_block_size(*subnet));
                self.network.check_block_size(name, *subnet, block_size)?;
                if found.is_none() {
                    let pool = Pool { subnet: *subnet, block_size, reclaim: Reclaim::default() };
                    self.store()?.create_pool(name, &pool)?;
                    is_complete = false;
                }
            }
            // Otherwise the next list has the pool, or the one that another node creates first.
            if is_complete {
                let has_entry = |name: &String| self.ledger.entries().iter().any(|entry| entry.block.pool == *name);
                let is_used =
                    |(name, _): &(String, Pool)| wanted.iter().any(|(other, _)| other == name) || has_entry(name);
                // Not `collect`, which sorts first: that takes some kilobytes of code.
                let mut sizes = BTreeMap::new();
                sizes.extend(pools.into_iter().filter(is_used).map(|(name, pool)| (name, pool.block_size)));
                self.ledger.pools = sizes;
                return Ok(());
            }
        }
        Err(Error::new(Code::TRY_AGAIN, "the store does not list a pool that it has created"))
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
    fn recognise(&mut self, claim: Claim, version: Version) -> Result<Seen> {
        let (node, machine) = (&claim.node, self.network.host.machine.clone());
        if *node != self.ledger.node || claim.network != self.network.name {
            return Ok(Seen::Other(Holder { node: claim.node, network: claim.network }));
        }
        if claim.machine != machine && self.store()?.node_state(node)? != NodeState::Present(machine.clone()) {
            let other = &claim.machine;
            let what = format!("the claims of node {node} are of machine {other:?}, not of this one, {machine:?}");
            let advice = self.store()?.deletion_advice(&claim);
            return Err(Error::new(Code::CONFLICT, format!("{what}; if that machine is off: {advice}")));
        }
        Ok(Seen::Own(version))
    }

    /// Performs the ledger's actions on a block until it agrees with the store. Returns the holder
    /// of a block that is not this node's. `reserved`: the addresses in use.
    fn settle(&mut self, block: &Block, mut seen: Seen, reserved: &[IpAddr]) -> Result<Option<Holder>> {
        let is_reserved = block.contains_any(reserved);
        loop {
            let holder = if let Seen::Other(holder) = &seen { Some(holder.clone()) } else { None };
            let action = self.ledger.step(block, seen, is_reserved);
            if self.ledger.is_changed {
                self.save()?;
            }
            seen = match action {
                Action::Done => return Ok(holder),
                Action::Get => match self.store()?.get(block)? {
                    Some((claim, version)) => self.recognise(claim, version)?,
                    None => Seen::Outcome(Outcome::Absent),
                },
                Action::Change(change) => {
                    let claim = self.new_claim(block)?;
                    Seen::Outcome(self.store()?.change(&claim, &change)?)
                }
            };
        }
    }

    /// Returns this node's claim of a block, with a new nonce.
    fn new_claim(&self, block: &Block) -> Result<Claim> {
        let nonce = getrandom::u64().map_err(|error| Error::caused(Code::IO, "failed to read random bytes", error))?;
        let Block { pool, first, last } = block.clone();
        let (node, network) = (self.ledger.node.clone(), self.network.name.to_owned());
        let (machine, nonce) = (self.network.host.machine.clone(), format!("{nonce:016x}"));
        Ok(Claim { pool, first, last, node, network, machine, nonce, absent_since: None })
    }

    /// Claims a block. Returns the holder if it is not this node's.
    fn claim(&mut self, block: &Block) -> Result<Option<Holder>> {
        if let Some(State::Lost(holder)) = self.ledger.state(block) {
            return Ok(Some(holder.clone()));
        }
        self.ledger.begin_claim(block);
        self.settle(block, Seen::Unread, &[])
    }
}
