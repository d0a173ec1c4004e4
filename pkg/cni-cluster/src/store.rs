//! The store of claims: what it keeps, and the operations on it.

use std::net::IpAddr;

use cni::{Cidr, Result};
use cni_linux::flock::Limit;
use serde::{Deserialize, Serialize};

use crate::pool::Block;

/// The name that a store gives to a state of a record, and changes with every write of it
/// (Kubernetes: `resourceVersion`; etcd: `mod_revision`).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Version(pub String);

/// A pool: all addresses of one subnet on one layer 2 network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pool {
    /// The subnet, with its network address.
    pub subnet: Cidr,
    /// Addresses of a block, a power of two from 1 to 65536.
    pub block_size: u32,
    /// Whether blocks of absent nodes may be taken.
    #[serde(default)]
    pub reclaim: Reclaim,
}

/// Whether other nodes may take the blocks of a node that the cluster does not know any more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reclaim {
    /// An hour after another node found the node absent.
    #[default]
    AfterOneHour,
    /// Only the operator releases blocks.
    Never,
}

/// A claim: the record that a block belongs to one network of one node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Claim {
    /// The name of the pool.
    pub pool: String,
    /// The first address of the block.
    pub first: IpAddr,
    /// The last address of the block.
    pub last: IpAddr,
    /// Empty for a reserved claim, which an operator made.
    #[serde(default)]
    pub node: String,
    /// The name of the network.
    #[serde(default)]
    pub network: String,
    /// The machine ID of the node.
    #[serde(default)]
    pub machine: String,
    /// 64 random bits in hexadecimal digits: which of two writers with equal contents wrote this.
    #[serde(default)]
    pub nonce: String,
    /// When another node first found the node absent (RFC 3339).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub absent_since: Option<String>,
}

impl Claim {
    /// Returns the block.
    pub fn block(&self) -> Block {
        Block { first: self.first, last: self.last, pool: self.pool.clone() }
    }
}

/// A conditional change of the claim of one block.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Change {
    /// Creates the claim of a block that has none.
    Create,
    /// Replaces the claim that still has this version.
    Swap(Version),
    /// Deletes the claim that still has this version.
    Delete(Version),
}

/// The outcome of a change.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The claim is written, and has this version now.
    Written(Version),
    /// The block has no claim.
    Absent,
    /// Nothing has changed: the block has a claim, but with another version, or should have none.
    Conflict,
}

/// What the cluster knows of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeState {
    /// With its machine ID.
    Present(String),
    /// Absent at this time of the store's clock, in seconds since 1970.
    Absent(u64),
    /// The store knows no nodes.
    Unsupported,
}

/// A store of claims. Reads are linearizable except [`Store::taken`].
///
/// An operation is repeated while its outcome is unknown: no answer in time, a lost connection, or
/// an error that passes. It may be repeated, because it names the version that it means, or creates
/// one record.
///
/// # Errors
/// - Code 11 at the deadline or after a signal: the operation may have taken effect, or may yet.
///   Also for an answer that proves nothing.
/// - Code 103 if the store refuses, and repeating does not help.
/// - Code 5 or 7 if what the operation needs cannot be read.
pub trait Store {
    /// Returns the name of this node in claims.
    fn node(&mut self) -> Result<String>;

    /// Sets how long the following operations may take.
    fn set_limit(&mut self, limit: Limit);

    /// Returns the names and contents of all pools.
    fn pools(&mut self) -> Result<Vec<(String, Pool)>>;

    /// Creates a pool if it does not exist.
    fn create_pool(&mut self, name: &str, pool: &Pool) -> Result<()>;

    /// Returns the claim of a block with its version.
    fn get(&mut self, block: &Block) -> Result<Option<(Claim, Version)>>;

    /// Changes the claim of the block of `claim`. A deletion uses nothing else of `claim`.
    fn change(&mut self, claim: &Claim, change: &Change) -> Result<Outcome>;

    /// Returns the claims of a node.
    fn claims_of(&mut self, node: &str) -> Result<Vec<(Claim, Version)>>;

    /// Returns the first addresses of the claimed blocks of `pool` with their nodes, possibly of a
    /// moment ago: only for the choice of a candidate.
    fn taken(&mut self, pool: &str) -> Result<Vec<(IpAddr, String)>>;

    /// Returns what the cluster knows of the node of this name.
    fn node_state(&mut self, name: &str) -> Result<NodeState>;

    /// Returns how an operator deletes all claims of the node of `claim`.
    fn deletion_advice(&self, claim: &Claim) -> String;
}
