//! The node's packet filter: the rules of plugins, how they are found again and removed.
//!
//! [`nft`] speaks to nf_tables, [`iptables`] to tables of iptables; the features stand on these
//! two. No program `nft` or `iptables` has to be installed. All of it acts in the network namespace
//! of the thread that opens it.
//!
//! Names, comments and matches are those of the Go plugins, byte for byte, so that either side can
//! remove the rules of the other. Facts that Go's keys lack are in tags beside the comments
//! ([`nft::userdata`]), which Go does not read. A shared table or chain stays when its last rule is
//! removed, as with Go: another plugin may be about to fill it.

pub mod container_rules;
pub mod forward;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod iptables;
pub mod masquerade;
pub mod nft;
pub mod portmap;
pub mod spoof;

pub use forward::Forward;
pub use masquerade::Masquerade;
pub use spoof::SpoofCheck;

use std::fmt;

use cni_linux::error::Result;
use nft::{BaseChain, Batch, Family, Hook, Kind, Nft, Table};

/// The tables that have the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// iptables, in the variant that the machine's owner has chosen.
    Iptables,
    /// Tables of our own in nf_tables.
    Nftables,
}

impl Backend {
    /// Its name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Iptables => "iptables",
            Backend::Nftables => "nftables",
        }
    }

    /// Returns the backend that has this name in configurations.
    pub fn by_name(name: &str) -> Option<Backend> {
        [Backend::Iptables, Backend::Nftables].into_iter().find(|backend| backend.name() == name)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How often a change is planned again because the rules it is based on have changed. Only
/// operations on the same attachment disturb each other, so only a defect reaches the bound.
const ATTEMPTS: usize = 32;
/// How often one that holds only for the ruleset it has read ([`Batch::only_at`]) is. Of n changes
/// that race each loses at most n - 1 times, at once and for free.
const OVERTAKEN: usize = 1024;

/// Whether masquerading and port mappings are possible with nf_tables: it exists, can be
/// changed, and has NAT.
///
/// Asks the kernel to check a table with a NAT chain and to forget it: nothing changes, no
/// notification is sent, no process runs. Some 10 ms: the kernel waits for an RCU grace period
/// before it forgets. `Ok(false)` means that this kernel cannot; any other obstacle, a missing
/// privilege above all, is an error.
pub fn nft_usable() -> Result<bool> {
    let table = Table { family: Family::Inet, name: "cni_probe" };
    let mut batch = Batch::new();
    batch.ensure_table(table, None);
    let nat = BaseChain { kind: Kind::Nat, hook: Hook::Postrouting, priority: 100 };
    batch.ensure_base_chain(table, "probe", nat, None);
    match Nft::open().and_then(|mut nft| nft.rehearse(batch)) {
        Ok(()) => Ok(true),
        Err(error) if error.is_unsupported() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Repeats `once` while it fails because another process changed what it had read; the last error
/// after that.
fn retry<T>(mut once: impl FnMut() -> Result<T>) -> Result<T> {
    let (mut attempt, mut overtaken) = (1, 1);
    loop {
        match once() {
            Err(error) if error.errno() == Some(libc::ERESTART) && overtaken < OVERTAKEN => overtaken += 1,
            Err(error) if nft::raced(&error) && attempt < ATTEMPTS => attempt += 1,
            done => return done,
        }
    }
}

#[cfg(test)]
mod testing;
