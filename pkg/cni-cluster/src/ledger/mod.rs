//! The node's ledger: the blocks of one network of this node, and the rules of claiming, adopting
//! and releasing them. Nothing here reads a clock or a file, except [`Ledger::read`].
//!
//! A version is a fence: the store refuses to delete or change a record under an older version. So
//! two rules make late requests harmless. No address is allocated from a block that is being
//! released, because the delete may still take effect. A claim that the ledger does not hold under
//! its present version is used only after a swap, which makes earlier deletes fail.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use cni::{Result, time};
use serde::{Deserialize, Serialize};

use crate::conf;
use crate::pool::Block;
use crate::store::{Change, Claim, Outcome, Reclaim, Version};

/// How many seconds a verified ledger may be used before it is verified again. The time is far
/// below [`GRACE`].
const TRUSTED: u64 = 15 * 60;
/// How many seconds a ledger that was verified in this boot may be used again, if the store does
/// not answer.
const TRUSTED_WITHOUT_STORE: u64 = 60;
/// How many seconds a node must be absent before other nodes may take its blocks.
const GRACE: u64 = 3600;
/// The format of the ledger's file. A file with another format counts as missing.
const FORMAT: u32 = 1;

/// The identity of this machine and of its boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The machine ID. Empty if the machine has none, or it is uninitialized.
    pub machine: String,
    /// The boot ID.
    pub boot: String,
    /// Whole seconds since the boot.
    pub uptime: u64,
}

impl Host {
    /// Reads the identity below `root`, which is `/` outside tests.
    ///
    /// # Errors
    /// Code 5 if the boot ID or the uptime cannot be read.
    pub fn read(root: &Path) -> Result<Host> {
        let read = |path: &str| conf::read_text(&root.join(path));
        let uptime = read("proc/uptime")?;
        Ok(Host {
            machine: read("etc/machine-id").ok().filter(|id| id != "uninitialized").unwrap_or_default(),
            boot: read("proc/sys/kernel/random/boot_id")?,
            // With the largest number, no ledger is ever trusted.
            uptime: uptime.split('.').next().and_then(|seconds| seconds.parse().ok()).unwrap_or(u64::MAX),
        })
    }
}

/// The node and the network that hold a block. Without a node, an operator has reserved the block.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Holder {
    /// The node's name.
    pub node: String,
    /// The network's name.
    pub network: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.node.as_str() {
            "" => f.write_str("reserved by an operator"),
            node => write!(f, "claimed by network {} of node {node}", self.network),
        }
    }
}

/// What the ledger knows of a block.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum State {
    /// The block may have been claimed. No address is allocated from it yet.
    Claiming,
    /// The block was claimed with this version. Addresses are allocated from it.
    Held(Version),
    /// The claim with this version may have been deleted. No address is allocated from the block.
    Releasing(Version),
    /// Another node has the block, but it has reservations. No address is allocated from it.
    Lost(Holder),
}

/// What is known of the claim of a block in the store.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Seen {
    /// Nothing yet.
    Unread,
    /// The outcome of a change, or that a reading has found no claim.
    Outcome(Outcome),
    /// The claim belongs to this network of this node.
    Own(Version),
    /// The claim belongs to another node or network.
    Other(Holder),
}

/// The next operation on the claim of a block.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Read the claim.
    Get,
    /// Change the claim. A claim that is written has a new nonce.
    Change(Change),
    /// None: the ledger agrees with the store.
    Done,
}

/// A block in the ledger.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Entry {
    /// The block.
    pub block: Block,
    /// Its state.
    pub state: State,
}

/// The ledger of one network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ledger {
    format: u32,
    /// The node's name in claims, at the last verification.
    pub node: String,
    /// The boot in which the ledger was verified last.
    boot: String,
    /// The uptime in seconds until which the ledger may be used.
    trusted_until: u64,
    /// The block sizes of the network's pools and of those of the entries, by their names.
    pub pools: BTreeMap<String, u32>,
    entries: Vec<Entry>,
    /// Whether an entry has changed since the ledger was read or written.
    #[serde(skip)]
    pub is_changed: bool,
}

impl Ledger {
    /// Reads the ledger of the network with this sidecar. A missing, damaged or unknown file is an
    /// empty ledger, which must be verified before it is used.
    pub fn read(sidecar: &Path) -> Ledger {
        std::fs::read(sidecar.join("blocks")).ok().and_then(|bytes| Ledger::parse(&bytes)).unwrap_or_default()
    }

    /// Returns the ledger with this file, or `None` for a damaged or unknown file.
    pub fn parse(bytes: &[u8]) -> Option<Ledger> {
        let ledger: Ledger = serde_json::from_slice(bytes).ok()?;
        let mut blocks = BTreeSet::new();
        let is_valid = ledger.entries.iter().all(|entry| entry.block.is_valid() && blocks.insert(&entry.block));
        (ledger.format == FORMAT && is_valid).then_some(ledger)
    }

    /// Returns the content of the ledger's file.
    pub fn to_json(&self) -> String {
        serde_json::to_string(&Ledger { format: FORMAT, ..self.clone() }).unwrap_or_default()
    }

    /// Returns all blocks with their states.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the state of a block, or `None` if the ledger does not have it.
    pub fn state(&self, block: &Block) -> Option<&State> {
        self.entries.iter().find(|entry| entry.block == *block).map(|entry| &entry.state)
    }

    /// Whether the ledger was verified in this boot.
    pub fn is_of_boot(&self, host: &Host) -> bool {
        self.boot == host.boot
    }

    /// Whether addresses may be allocated from the held blocks without asking the store.
    pub fn is_usable(&self, host: &Host) -> bool {
        self.is_of_boot(host) && host.uptime < self.trusted_until
    }

    /// Records that all entries agreed with the store during this call.
    pub fn set_verified(&mut self, host: &Host) {
        (self.boot, self.trusted_until) = (host.boot.clone(), host.uptime.saturating_add(TRUSTED));
    }

    /// Allows the use of the ledger for a minute, although the store does not answer.
    pub fn extend_trust(&mut self, host: &Host) {
        self.trusted_until = host.uptime.saturating_add(TRUSTED_WITHOUT_STORE);
    }

    /// Whether the block has the size of its pool's blocks. If not, an operator has deleted the
    /// pool since, and maybe created it again.
    pub fn fits(&self, block: &Block) -> bool {
        let size = self.pools.get(&block.pool);
        size.is_some_and(|size| *block == Block::of(&block.pool, *size, block.first))
    }

    /// Replaces a block that does not fit by the blocks of its reserved addresses. The old block is
    /// never claimed again, and its claim, which has this version, is deleted. A block with
    /// reservations whose pool does not exist is kept, but no address is allocated from it.
    pub fn replace(&mut self, block: &Block, version: Option<Version>, reserved: &[IpAddr]) {
        for address in reserved.iter().filter(|address| block.contains(**address)) {
            let Some(size) = self.pools.get(&block.pool) else { return self.set(block, Some(State::Claiming)) };
            self.begin_claim(&Block::of(&block.pool, *size, *address));
        }
        // The claim of a new block with the same first address replaces the old one.
        let has_key = |entry: &Entry| entry.block.pool == block.pool && entry.block.first == block.first;
        let is_replaced = self.entries.iter().filter(|entry| entry.block != *block).any(has_key);
        self.set(block, version.filter(|_| !is_replaced).map(State::Releasing));
    }

    /// Returns the first and last addresses of some held blocks, sorted.
    pub fn spans(&self, is_chosen: impl Fn(&Block) -> bool) -> Vec<(IpAddr, IpAddr)> {
        let is_held = |entry: &&Entry| matches!(entry.state, State::Held(_)) && is_chosen(&entry.block);
        let mut spans = Vec::new();
        for Entry { block, .. } in self.entries.iter().filter(is_held) {
            let span = (block.first, block.last);
            spans.insert(spans.partition_point(|other| *other < span), span);
        }
        spans
    }

    /// Records that the block is about to be claimed or adopted, if the ledger does not have it.
    pub fn begin_claim(&mut self, block: &Block) {
        if self.state(block).is_none() {
            self.set(block, Some(State::Claiming));
        }
    }

    /// Returns the blocks to give back, if these addresses are reserved: held blocks without
    /// reservations, except one of each pool that is in use, unless blocks have one address; and
    /// all blocks without reservations whose claim or release was interrupted. With `released`,
    /// only held blocks that contain one of these addresses.
    pub fn surplus(
        &self,
        reserved: &[IpAddr],
        released: Option<&[IpAddr]>,
        is_in_use: &dyn Fn(&str) -> bool,
    ) -> Vec<Block> {
        let empty: Vec<&Entry> = self.entries.iter().filter(|entry| !entry.block.contains_any(reserved)).collect();
        let mut surplus: Vec<Block> = Vec::new();
        for Entry { block, state } in &empty {
            let remains = |other: &&Entry| {
                let is_other = other.block.pool == block.pool && other.block != *block;
                is_other && matches!(other.state, State::Held(_)) && !surplus.contains(&other.block)
            };
            let is_chosen = released.is_none_or(|released| block.contains_any(released));
            let is_surplus = match state {
                State::Held(_) => {
                    is_chosen && (block.first == block.last || !is_in_use(&block.pool) || empty.iter().any(remains))
                }
                State::Claiming | State::Releasing(_) => released.is_none(),
                State::Lost(_) => false,
            };
            if is_surplus {
                surplus.push(block.clone());
            }
        }
        surplus
    }

    /// Records that a block is about to be released. The caller holds the store's lock, and the
    /// block has no reservations.
    pub fn begin_release(&mut self, block: &Block) {
        let version = match self.state(block) {
            Some(State::Held(version)) => version.clone(),
            // No claim has this version, so the claim is read before it is deleted.
            Some(State::Claiming) => Version("0".to_owned()),
            _ => return,
        };
        self.set(block, Some(State::Releasing(version)));
    }

    /// Records what was seen of the claim of a block, and returns the next operation on it. The
    /// caller stores a changed ledger before the operation. `is_reserved`: the block has
    /// reservations of this network.
    pub fn step(&mut self, block: &Block, seen: Seen, is_reserved: bool) -> Action {
        use Outcome::{Absent, Conflict, Written};
        use State::{Claiming, Held, Lost, Releasing};
        let Some(state) = self.state(block).cloned() else { return Action::Done };
        let (next, action) = match (state, seen) {
            (state, Seen::Outcome(Conflict)) => (Some(state), Action::Get),
            (Claiming, Seen::Unread) => (Some(Claiming), Action::Change(Change::Create)),
            (Releasing(held), Seen::Unread) => (Some(Releasing(held.clone())), Action::Change(Change::Delete(held))),
            (state, Seen::Unread) => (Some(state), Action::Get),
            (_, Seen::Outcome(Written(version))) => (Some(Held(version)), Action::Done),
            (state @ Releasing(_), Seen::Own(version)) => (Some(state), Action::Change(Change::Delete(version))),
            (Held(held), Seen::Own(seen)) if held == seen => (Some(Held(held)), Action::Done),
            // An answer was lost, the ledger was lost, or another node has marked the claim.
            (state, Seen::Own(version)) => (Some(state), Action::Change(Change::Swap(version))),
            (Releasing(_), Seen::Outcome(Absent) | Seen::Other(_)) => (None, Action::Done),
            (Lost(_), Seen::Outcome(Absent)) if !is_reserved => (None, Action::Done),
            (_, Seen::Outcome(Absent)) => (Some(Claiming), Action::Change(Change::Create)),
            (_, Seen::Other(holder)) if is_reserved => (Some(Lost(holder)), Action::Done),
            (_, Seen::Other(_)) => (None, Action::Done),
        };
        self.set(block, next);
        action
    }

    /// Sets the state of a block that the ledger has. `None` removes the block.
    fn set(&mut self, block: &Block, state: Option<State>) {
        if self.state(block) != state.as_ref() {
            self.entries.retain(|entry| entry.block != *block);
            self.entries.extend(state.map(|state| Entry { block: block.clone(), state }));
            self.is_changed = true;
        }
    }

    /// Whether another node has one of the blocks.
    pub fn has_lost(&self) -> bool {
        self.entries.iter().any(|entry| matches!(entry.state, State::Lost(_)))
    }

    /// Returns a note for each block that another node has, although these reserved addresses are
    /// in it.
    pub fn lost_notes(&self, reserved: &[IpAddr]) -> Vec<String> {
        let note = |Entry { block, state }: &Entry| {
            let State::Lost(holder) = state else { return None };
            let inside = reserved.iter().filter(|address| block.contains(**address));
            let inside: Vec<String> = inside.map(IpAddr::to_string).collect();
            let risk = "containers of other nodes may get these addresses; replace the containers of this node";
            (!inside.is_empty())
                .then(|| format!("{block} is {holder}, but {} are in use here: {risk}", inside.join(", ")))
        };
        self.entries.iter().filter_map(note).collect()
    }
}

/// Returns the change that another node may make to this claim with this version, if the pool has
/// this rule and the claim's node is absent `now`, in seconds since 1970. A swap marks the claim:
/// then it has a time in `absent_since` after this call.
pub fn reclaim(claim: &mut Claim, version: Version, rule: Reclaim, now: u64) -> Option<Change> {
    if rule == Reclaim::Never || claim.node.is_empty() {
        return None;
    }
    let Some(since) = &claim.absent_since else {
        claim.absent_since = Some(time::rfc3339(Duration::from_secs(now)));
        return Some(Change::Swap(version));
    };
    let is_over = time::parse_rfc3339(since).is_some_and(|since| since.saturating_add(GRACE) <= now);
    is_over.then_some(Change::Delete(version))
}

#[cfg(test)]
mod tests;
