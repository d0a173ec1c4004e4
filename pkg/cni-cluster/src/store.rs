//! The store of claims: what it keeps, and the operations on it.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use cni::machine::Machine;
use cni::{Cidr, Code, Error};
use cni_linux::flock::Limit;
use serde::{Deserialize, Serialize};

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

/// Why an operation has no answer.
#[derive(Debug)]
pub enum Failure {
    /// The operation may have taken effect, or may yet: no answer in time, a lost connection, or an
    /// error that passes. The text names what was tried and the last answer.
    Unknown(String),
    /// The same, and the store asks to repeat the operation only after this time.
    Busy(String, Duration),
    /// The store refuses, and repeating does not help (code 103), or what the call needs cannot be
    /// read (code 5 or 7).
    Refused(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Refused(error)
    }
}

/// An unknown outcome has code 11.
impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        match failure {
            Failure::Unknown(text) | Failure::Busy(text, _) => Error::new(Code::TRY_AGAIN, text),
            Failure::Refused(error) => error,
        }
    }
}

/// What an operation answers.
pub type Answer<T> = Result<T, Failure>;

/// The outcome of a conditional change of one record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The change is made. The record has this version now.
    Done(Version),
    /// The record exists, but it was to be created, or has another version than expected.
    Conflict,
    /// The record does not exist.
    Absent,
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

/// How long [`repeat`] waits before it repeats an operation. A refused connection is refused again
/// within microseconds.
const PAUSE: Duration = Duration::from_millis(if cfg!(test) { 0 } else { 100 });

/// Repeats an operation until its outcome is known, the deadline has come or a signal has arrived.
/// Each operation may be repeated: it names the version that it means, or creates one record. Gives
/// up at once if the store asks for a pause beyond the deadline.
///
/// # Errors
/// The last failure. The text of an unknown outcome has the length of the limit.
pub fn repeat<T>(
    store: &mut dyn Store,
    machine: &dyn Machine,
    limit: Limit,
    mut operation: impl FnMut(&mut dyn Store) -> Answer<T>,
) -> Answer<T> {
    loop {
        match operation(store) {
            Err(failure) => pause(failure, machine, limit)?,
            answer => return answer,
        }
    }
}

/// Waits after a failure until the operation may be repeated.
///
/// # Errors
/// The failure, if the operation must not be repeated.
fn pause(failure: Failure, machine: &dyn Machine, limit: Limit) -> Answer<()> {
    let (last, pause) = match failure {
        Failure::Unknown(last) => (last, PAUSE),
        Failure::Busy(last, pause) => (last, pause.max(PAUSE)),
        Failure::Refused(_) => return Err(failure),
    };
    let end = machine.now() + pause;
    if end >= limit.deadline {
        return Err(Failure::Unknown(format!("{last}; gave up after {:.1} s", limit.length.as_secs_f32())));
    }
    while machine.now() < end {
        if machine.terminated() {
            return Err(Failure::Unknown(format!("{last}; interrupted by a signal")));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// A store of claims. Reads are linearizable except [`Store::taken`]. An operation ends at the
/// deadline or after a signal, with an unknown outcome; [`repeat`] decides about repetitions.
pub trait Store {
    /// Returns the name of this node in claims.
    fn node(&mut self) -> Answer<String>;

    /// Sets the time until which the following operations may wait, retries included.
    fn set_deadline(&mut self, deadline: Instant);

    /// Returns the names and contents of all pools.
    fn pools(&mut self) -> Answer<Vec<(String, Pool)>>;

    /// Creates a pool.
    fn create_pool(&mut self, name: &str, pool: &Pool) -> Answer<Outcome>;

    /// Creates the claim of a block that has none.
    fn create(&mut self, claim: &Claim) -> Answer<Outcome>;

    /// Returns the claim of the block of `pool` that begins at `first`.
    fn get(&mut self, pool: &str, first: IpAddr) -> Answer<Option<(Claim, Version)>>;

    /// Replaces a claim that still has this version.
    fn swap(&mut self, claim: &Claim, version: &Version) -> Answer<Outcome>;

    /// Deletes the claim of a block that still has this version. Returns whether the block has no
    /// claim now. If not, its claim has another version.
    fn delete(&mut self, pool: &str, first: IpAddr, version: &Version) -> Answer<bool>;

    /// Returns the claims of a node.
    fn claims_of(&mut self, node: &str) -> Answer<Vec<(Claim, Version)>>;

    /// Returns the first addresses of the claimed blocks of `pool` with their nodes, possibly of a
    /// moment ago: only for the choice of a candidate.
    fn taken(&mut self, pool: &str) -> Answer<Vec<(IpAddr, String)>>;

    /// Returns what the cluster knows of the node of this name.
    fn node_state(&mut self, name: &str) -> Answer<NodeState>;
}
