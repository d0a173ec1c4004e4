//! The requests of one call, under the claim lock: verifies the ledger, claims, adopts, releases
//! and reclaims blocks.
//!
//! The rules are in [`Ledger::step`]. This module performs its actions, and writes a changed ledger
//! before each request. So whatever happens to a request, the next call knows that it may have been
//! sent.

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::net::IpAddr;
use std::time::Instant;

use cni::machine::Machine;
use cni::{Cidr, Code, Error, Result};
use cni_ipam::ranges::{Range, RangeSet, number};

use crate::cluster::{ListInUse, Need, Network, Obtained};
use crate::ledger::{Action, Holder, Host, Ledger, Reclaiming, Seen, State, reclaiming};
use crate::pool::{self, Block};
use crate::store::{Answer, Claim, Created, Deleted, NodeState, Pool, Reclaim, Store, Swapped, Version, repeat};

/// How many claimed blocks an ADD meets before it asks for a list.
const MAX_REFUSALS: usize = 8;
/// How many nodes the error of an exhausted range set names.
const MAX_LISTED: usize = 5;

/// A call that holds the claim lock.
pub(crate) struct Claimer<'c, 'a> {
    pub(crate) network: &'c Network<'a>,
    pub(crate) host: &'c Host,
    pub(crate) machine: &'a dyn Machine,
    pub(crate) ledger: Ledger,
    pub(crate) store: &'c mut (dyn Store + 'a),
    pub(crate) deadline: Instant,
    /// Whether the store knows this machine as the node's.
    pub(crate) is_registered: bool,
    pub(crate) _lock: File,
}

impl Claimer<'_, '_> {
    /// Writes the ledger.
    ///
    /// # Errors
    /// Code 5.
    pub(crate) fn save(&self) -> Result<()> {
        let path = self.network.sidecar.join("blocks");
        let content = self.ledger.to_json();
        cni_linux::file::replace(&path, &path.with_extension("new"), content.as_bytes())
            .map_err(|error| Error::caused(Code::IO, format_args!("failed to write {}", path.display()), error))
    }

    /// Repeats an operation of the store while its outcome is unknown.
    fn ask<T>(&mut self, operation: impl FnMut(&mut dyn Store) -> Answer<T>) -> Answer<T> {
        repeat(self.store, self.machine, self.deadline, operation)
    }

    /// Verifies the ledger if it must not be used, ends what an earlier call has begun, or else
    /// claims a block.
    pub(crate) fn fulfil(&mut self, need: Need, in_use: &mut ListInUse<'_>) -> Answer<Obtained> {
        if !self.ledger.is_usable(self.host) {
            return self.verify(in_use).map(|()| Obtained::Changed);
        }
        let begun: Vec<Block> = self.blocks(|state| matches!(state, State::Claiming | State::Releasing(_)));
        for block in &begun {
            self.settle(block, Seen::Unread, &[])?;
        }
        if !begun.is_empty() {
            return Ok(Obtained::Changed);
        }
        for subnet in self.network.subnets() {
            if !self.ledger.pools.contains_key(&self.network.pool(subnet)) {
                self.ensure_pool(subnet)?;
            }
        }
        let sets = self.network.sets;
        let holder = match need {
            Need::Verification => None,
            Need::Set(position) => match sets.get(position) {
                Some(set) => return self.claim_any(set),
                None => None,
            },
            Need::Address(address) => match sets.iter().find_map(|set| set.find(address)) {
                Some(range) => self.claim(&self.block_of(range, address))?,
                None => None,
            },
        };
        Ok(holder.map_or(Obtained::Changed, |holder| Obtained::Taken(holder.to_string())))
    }

    /// Ends the releases that this call or an earlier one has begun.
    pub(crate) fn finish_releases(&mut self) -> Answer<()> {
        for block in self.blocks(|state| matches!(state, State::Releasing(_))) {
            self.settle(&block, Seen::Unread, &[])?;
        }
        Ok(())
    }

    /// Returns the ledger's blocks in some states.
    fn blocks(&self, is_chosen: impl Fn(&State) -> bool) -> Vec<Block> {
        let chosen = self.ledger.entries().iter().filter(|entry| is_chosen(&entry.state));
        chosen.map(|entry| entry.block.clone()).collect()
    }

    /// Makes the ledger agree with the store: pools, this node's claims, and the blocks of all
    /// reservations.
    fn verify(&mut self, in_use: &mut ListInUse<'_>) -> Answer<()> {
        let node = self.ask(|store| store.node())?;
        self.ledger.node = node.clone();
        for subnet in self.network.subnets() {
            self.ensure_pool(subnet)?;
        }
        let mut own = HashMap::new();
        for (claim, version) in self.ask(|store| store.claims_of(&node))? {
            if claim.network == self.network.name {
                let block = Block { pool: claim.pool.clone(), first: claim.first, last: claim.last };
                self.ledger.begin_claim(&block);
                own.insert(block, self.recognise(claim, version)?);
            }
        }
        let reserved = in_use()?.addresses;
        for address in &reserved {
            let range = self.network.sets.iter().find_map(|set| set.find(*address));
            if let Some(range) = range.filter(|_| !self.blocks(|_| true).iter().any(|block| block.contains(*address))) {
                self.ledger.begin_claim(&self.block_of(range, *address));
            }
        }
        for block in self.blocks(|_| true) {
            self.settle(&block, own.remove(&block).unwrap_or(Seen::Unread), &reserved)?;
        }
        self.ledger.set_verified(self.host);
        Ok(self.save()?)
    }

    /// Records the block size of the pool of a subnet, and creates the pool if it does not exist.
    fn ensure_pool(&mut self, subnet: Cidr) -> Answer<()> {
        let name = self.network.pool(subnet);
        let pool = loop {
            if let Some(pool) = self.ask(|store| store.pool(&name))? {
                break pool;
            }
            let is_here = |pool: &Pool, other: &str| self.network.pool(pool.subnet) == other;
            let overlaps =
                |pool: &Pool| pool.subnet.contains(subnet.address()) || subnet.contains(pool.subnet.address());
            let pools = repeat(self.store, self.machine, self.deadline, |store| store.pools())?;
            if let Some((other, _)) = pools.iter().find(|(other, pool)| is_here(pool, other) && overlaps(pool)) {
                let why = "addresses would be given out twice; use the same subnet, or another layer2";
                return Err(Error::new(Code::CONFLICT, format!("pool {name} overlaps pool {other}: {why}")).into());
            }
            let ranges = self.network.sets.iter().flat_map(RangeSet::ranges).filter(|range| range.subnet() == subnet);
            let size = |range: &Range| (number(range.last()) - number(range.first())).saturating_add(1);
            let addresses = ranges.map(size).fold(0, u128::saturating_add);
            let block_size = self.network.block_size.unwrap_or(pool::default_block_size(addresses));
            self.network.check_block_size(subnet, block_size)?;
            let pool = Pool { subnet, block_size, reclaim: Reclaim::default() };
            self.ask(|store| store.create_pool(&name, &pool))?;
        };
        self.network.check_block_size(subnet, pool.block_size)?;
        self.ledger.pools.insert(name, pool.block_size);
        Ok(())
    }

    /// Returns the name and the block size of the pool of a range, which the ledger has.
    fn pool_of(&self, range: &Range) -> (String, u32) {
        let name = self.network.pool(range.subnet());
        let size = self.ledger.pools.get(&name).copied().unwrap_or(1);
        (name, size)
    }

    /// Returns the block of an address of a range.
    fn block_of(&self, range: &Range, address: IpAddr) -> Block {
        let (pool, size) = self.pool_of(range);
        Block::of(&pool, size, address)
    }

    /// Returns what a claim means to this network of this node.
    ///
    /// # Errors
    /// Code 102 if another machine has made the claim under this node's name, and the store does
    /// not know this machine as the node.
    fn recognise(&mut self, claim: Claim, version: Version) -> Answer<Seen> {
        if claim.node != self.ledger.node || claim.network != self.network.name {
            return Ok(Seen::Other(Holder { node: claim.node, network: claim.network }));
        }
        if claim.machine != self.host.machine && !self.is_registered {
            let state = self.ask(|store| store.node_state(&claim.node))?;
            if state != NodeState::Present(self.host.machine.clone()) {
                let node = &claim.node;
                let what = format!(
                    "the claims of node {node} are of machine {:?}, not of this one, {:?}",
                    claim.machine, self.host.machine
                );
                let advice =
                    format!("if that machine is off: kubectl delete ipblocks --field-selector spec.node={node}");
                return Err(Error::new(Code::CONFLICT, format!("{what}; {advice}")).into());
            }
            self.is_registered = true;
        }
        Ok(Seen::Own(version))
    }

    /// Performs the ledger's actions on a block until it agrees with the store. Returns the holder
    /// of a block that is not this node's. `reserved`: the addresses in use.
    fn settle(&mut self, block: &Block, mut seen: Seen, reserved: &[IpAddr]) -> Answer<Option<Holder>> {
        let is_reserved = block.contains_any(reserved);
        loop {
            let holder = if let Seen::Other(holder) = &seen { Some(holder.clone()) } else { None };
            let before = self.ledger.clone();
            let action = self.ledger.step(block, seen, is_reserved);
            if self.ledger != before || action == Action::Create {
                self.save()?;
            }
            seen = match action {
                Action::Done => return Ok(holder),
                Action::Get => match self.ask(|store| store.get(&block.pool, block.first))? {
                    Some((claim, version)) => self.recognise(claim, version)?,
                    None => Seen::Absent,
                },
                Action::Create => {
                    let claim = self.new_claim(block)?;
                    match self.ask(|store| store.create(&claim))? {
                        Created::Created(version) => Seen::Written(version),
                        Created::Exists => Seen::Changed,
                    }
                }
                Action::Swap(version) => {
                    let claim = self.new_claim(block)?;
                    match self.ask(|store| store.swap(&claim, &version))? {
                        Swapped::Swapped(version) => Seen::Written(version),
                        Swapped::Changed => Seen::Changed,
                    }
                }
                Action::Delete(version) => match self.ask(|store| store.delete(&block.pool, block.first, &version))? {
                    Deleted::Deleted | Deleted::Absent => Seen::Absent,
                    Deleted::Changed => Seen::Changed,
                },
            };
        }
    }

    /// Returns this node's claim of a block, with a new nonce.
    fn new_claim(&self, block: &Block) -> Result<Claim> {
        let nonce = getrandom::u64().map_err(|error| Error::caused(Code::IO, "failed to read random bytes", error))?;
        Ok(Claim {
            pool: block.pool.clone(),
            first: block.first,
            last: block.last,
            node: self.ledger.node.clone(),
            network: self.network.name.to_owned(),
            machine: self.host.machine.clone(),
            nonce: format!("{nonce:016x}"),
            absent_since: None,
        })
    }

    /// Claims a block. Returns the holder if it is not this node's.
    fn claim(&mut self, block: &Block) -> Answer<Option<Holder>> {
        if let Some(State::Lost(holder)) = self.ledger.state(block) {
            return Ok(Some(holder.clone()));
        }
        self.ledger.begin_claim(block);
        self.settle(block, Seen::Unread, &[])
    }

    /// Claims a block of the set: first without a list, then one that the store lists as free, then
    /// one of an absent node.
    fn claim_any(&mut self, set: &RangeSet) -> Answer<Obtained> {
        let seed = format!("{}/{}", self.ledger.node, self.network.name);
        let candidates = pool::candidates(set, &|range| self.pool_of(range), &seed);
        let unknown = candidates.filter(|block| self.ledger.state(block).is_none());
        for block in unknown.take(MAX_REFUSALS).collect::<Vec<_>>() {
            if self.claim(&block)?.is_none() {
                return Ok(Obtained::Changed);
            }
        }
        let pools: BTreeSet<String> = set.ranges().iter().map(|range| self.pool_of(range).0).collect();
        let mut taken = HashMap::new();
        for pool in &pools {
            for (first, node) in self.ask(|store| store.taken(pool))? {
                taken.insert((pool.clone(), first), node);
            }
        }
        let candidates = pool::candidates(set, &|range| self.pool_of(range), &seed);
        // The blocks of other nodes and networks, and what is known of the nodes.
        let (mut foreign, mut nodes) = (Vec::new(), BTreeMap::new());
        for block in candidates {
            if self.ledger.state(&block).is_some() {
                *nodes.entry(self.ledger.node.clone()).or_default() += 1;
                continue;
            }
            let holder = match taken.remove(&(block.pool.clone(), block.first)) {
                Some(node) => node,
                None => match self.claim(&block)? {
                    Some(holder) => holder.node,
                    None => return Ok(Obtained::Changed),
                },
            };
            *nodes.entry(holder.clone()).or_default() += 1;
            foreign.push((block, holder));
        }
        match self.claim_of_absent(&foreign)? {
            Ok(()) => Ok(Obtained::Changed),
            Err(absent) => Ok(Obtained::Exhausted(exhausted_text(&pools, nodes, &absent))),
        }
    }

    /// Claims one of these blocks whose node has been absent for long enough; marks the claims of
    /// other absent nodes. Without such a block, returns since when the nodes of the marked blocks
    /// are absent.
    fn claim_of_absent(&mut self, foreign: &[(Block, String)]) -> Answer<Result<(), Vec<String>>> {
        let (mut states, mut rules, mut marks) = (HashMap::new(), HashMap::new(), Vec::new());
        for (block, node) in foreign.iter().filter(|(_, node)| !node.is_empty()) {
            let state = match states.entry(node) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(unknown) => unknown.insert(self.ask(|store| store.node_state(node))?),
            };
            if !matches!(state, NodeState::Absent(_)) {
                continue;
            }
            let rule = match rules.entry(&block.pool) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(unknown) => {
                    let pool = self.ask(|store| store.pool(&block.pool))?;
                    *unknown.insert(pool.map_or(Reclaim::Never, |pool| pool.reclaim))
                }
            };
            let found = self.ask(|store| store.get(&block.pool, block.first))?;
            let Some((claim, version)) = found.filter(|(claim, _)| claim.node == *node) else { continue };
            match reclaiming(&claim, rule, state) {
                Reclaiming::Leave => marks.extend(claim.absent_since),
                Reclaiming::Mark(since) => {
                    let marked = Claim { absent_since: Some(since.clone()), ..claim };
                    self.ask(|store| store.swap(&marked, &version))?;
                    marks.push(since);
                }
                Reclaiming::Delete => {
                    self.ask(|store| store.delete(&block.pool, block.first, &version))?;
                    if self.claim(block)?.is_none() {
                        return Ok(Ok(()));
                    }
                }
            }
        }
        Ok(Err(marks))
    }
}

/// Returns the text for a set whose blocks are all claimed. `nodes` has the number of blocks of
/// each node, `absent` has since when the node of each marked block is absent.
fn exhausted_text(pools: &BTreeSet<String>, nodes: BTreeMap<String, usize>, absent: &[String]) -> String {
    let pools: Vec<&str> = pools.iter().map(String::as_str).collect();
    let total: usize = nodes.values().sum();
    let mut nodes: Vec<(String, usize)> = nodes.into_iter().collect();
    nodes.sort_by_key(|(_, count)| Reverse(*count));
    let holder = |(node, count): &(String, usize)| match node.as_str() {
        "" => format!("{count} are reserved by an operator"),
        node => format!("node {node} has {count}"),
    };
    let holders: Vec<String> = nodes.iter().take(MAX_LISTED).map(holder).collect();
    let mut text = format!("all {total} blocks of pool {} are claimed: {}", pools.join(", "), holders.join(", "));
    if let Some(since) = absent.iter().min() {
        let count = absent.len();
        text +=
            &format!("; {count} belong to nodes that are absent since {since} or later, and are free an hour after");
    }
    text
}
