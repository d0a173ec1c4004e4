//! What a plugin calls: it reads the ledger, asks the store for blocks, and gives blocks back.
//!
//! Only the holder of the claim lock, `claim.lock` in the sidecar, asks the store and writes the
//! ledger. The lock of the reservations is taken after the claim lock, never before, and never
//! during a request. A block becomes `releasing` only under both locks, so that no ADD reserves an
//! address in it at the same time.

use std::any::Any;
use std::collections::BTreeSet;
use std::fs::{DirBuilder, File, OpenOptions};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;
use cni::{Cidr, Code, Error, Result};
use cni_ipam::{Range, RangeSet};
use cni_linux::flock::{self, Limit};

use crate::claimer::Claimer;
use crate::ledger::{Host, Ledger};
use crate::pool::{self, Block};
use crate::store::Store;

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
    /// The range sets. Only ADD needs them.
    pub sets: &'a [RangeSet],
}

impl Network<'_> {
    /// Returns the subnets of the ranges, each once.
    pub(crate) fn subnets(&self) -> BTreeSet<Cidr> {
        self.sets.iter().flat_map(RangeSet::ranges).map(Range::subnet).collect()
    }

    /// Returns the name of the pool of a subnet.
    pub(crate) fn pool(&self, subnet: Cidr) -> String {
        pool::name(self.layer2, subnet)
    }

    /// Checks the size of the blocks of the pool of this subnet.
    ///
    /// # Errors
    /// Code 7 if another size is configured, or if a block would be larger than the subnet.
    pub(crate) fn check_block_size(&self, subnet: Cidr, size: u32) -> Result<()> {
        let name = self.pool(subnet);
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
    /// As last read by [`held`](Cluster::held).
    ledger: Ledger,
    /// The store, and the end of the time that this call may spend on it.
    session: Option<(Opened<'a>, Instant)>,
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
        Cluster { network, host, machine, notes, open, ledger: Ledger::default(), session: None }
    }

    /// Returns the first and last addresses of the blocks from which this node may allocate,
    /// sorted, or `None` if the store must be asked first. The caller holds the lock of the
    /// reservations until it has reserved an address.
    ///
    /// # Errors
    /// Code 7 if a pool has blocks of another size than configured.
    pub fn held(&mut self) -> Result<Option<Vec<(IpAddr, IpAddr)>>> {
        self.ledger = Ledger::read(&self.network.sidecar);
        for subnet in self.network.subnets() {
            let name = self.network.pool(subnet);
            if let Some(size) = self.ledger.pools.get(&name) {
                self.network.check_block_size(subnet, *size)?;
            }
        }
        Ok(self.ledger.is_usable(&self.host).then(|| self.ledger.spans()))
    }

    /// Returns the ledger as last read by [`held`](Cluster::held).
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
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
        let (before, notes, host) = (self.ledger.clone(), self.notes.clone(), self.host.clone());
        let mut claimer = self.claimer(if is_optional { SHORT_WAIT } else { Duration::MAX })?;
        if claimer.ledger != before {
            return Ok(Obtained::Changed);
        }
        claimer.save()?;
        match claimer.fulfil(need, in_use).map_err(Error::from) {
            Err(error) if is_optional && !matches!(error.code(), Code::INVALID_CONFIG | Code::CONFLICT) => {
                claimer.ledger.extend_trust(&host);
                claimer.save()?;
                notes.note(format_args!("the blocks of this node are used without a look at their claims: {error}"));
                Ok(Obtained::Changed)
            }
            outcome => outcome,
        }
    }

    /// Gives back what DEL or GC has emptied: blocks of one address, and all but one of a pool's
    /// other empty blocks; after a DEL (`released`) only blocks that contain a released address.
    /// Takes at most a second. An error is a note, and the next call that needs the store repeats
    /// the release.
    pub fn give_back(&mut self, released: Option<&[IpAddr]>, in_use: &mut ListInUse<'_>) {
        // As long as no block can be empty, no lock is taken and nothing is listed.
        if Ledger::read(&self.network.sidecar).surplus(&[], released).is_empty() {
            return;
        }
        let outcome = self.claimer(SHORT_WAIT).and_then(|mut claimer| {
            let reservations = in_use()?;
            for block in claimer.ledger.surplus(&reservations.addresses, released) {
                claimer.ledger.begin_release(&block);
            }
            claimer.save()?;
            drop(reservations);
            claimer.finish_releases().map_err(Error::from)
        });
        if let Err(error) = outcome {
            self.notes.note(format_args!("failed to give back the claims of empty blocks: {error}"));
        }
    }

    /// Opens the store, takes the claim lock and reads the ledger. The call ends after `wait`, or
    /// earlier with the node's own timeout.
    ///
    /// # Errors
    /// - Code 5 or 7 if the store cannot be opened, or 5 if the lock cannot.
    /// - Code 11 if the time is over, or another process holds the lock.
    fn claimer(&mut self, wait: Duration) -> Result<Claimer<'_, 'a>> {
        let now = self.machine.now();
        let (opened, deadline) = match &mut self.session {
            Some(session) => session,
            empty => {
                let opened = (self.open)()?;
                let deadline = now + opened.timeout;
                empty.insert((opened, deadline))
            }
        };
        let length = deadline.saturating_duration_since(now).min(wait);
        let limit = Limit { deadline: now + length, length };
        opened.store.set_deadline(limit.deadline);
        let lock = lock_claims(&self.network.sidecar, self.machine, limit)?;
        Ok(Claimer {
            network: &self.network,
            host: &self.host,
            machine: self.machine,
            ledger: Ledger::read(&self.network.sidecar),
            store: &mut *opened.store,
            deadline: limit.deadline,
            is_registered: false,
            _lock: lock,
        })
    }
}

/// Takes the claim lock of the network with this sidecar.
///
/// # Errors
/// - Code 11 if another process holds it until the limit or a signal.
/// - Code 5 if the file cannot be created or locked.
fn lock_claims(sidecar: &Path, machine: &dyn Machine, limit: Limit) -> Result<File> {
    let path = sidecar.join("claim.lock");
    let failed = |error| Error::caused(Code::IO, format_args!("failed to lock {}", path.display()), error);
    DirBuilder::new().recursive(true).mode(0o700).create(sidecar).map_err(failed)?;
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path).map_err(failed)?;
    flock::lock(file, machine, OnSigterm::Kill, limit).map_err(|refused| {
        let holder = refused.holder.unwrap_or_else(|| "another process".to_owned());
        let seconds = limit.length.as_secs_f32();
        match refused.cause {
            cause if cause.is_deadline() || cause.is_terminated() => Error::new(
                Code::TRY_AGAIN,
                format!("failed to lock {} within {seconds} s: {holder} claims a block", path.display()),
            ),
            cause => Error::caused(Code::IO, format_args!("failed to lock {}", path.display()), cause),
        }
    })
}
