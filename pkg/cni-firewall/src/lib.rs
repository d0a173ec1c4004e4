//! Writes, finds and removes the plugins' rules in the node's packet filter.
//!
//! [`nft`] reads and changes nf_tables, [`iptables`] the tables of iptables. The features plan
//! changes of rules, `engine` makes them in either store, and [`owner`] selects the attachments
//! whose rules are removed. The programs `nft` and `iptables` need not be installed. All calls act
//! in the network namespace of the calling thread.
//!
//! Rules that the Go plugins write too have Go's names, comments and matches, byte for byte, so
//! that these plugins and Go's can remove each other's rules. What Go's rules do not record, for
//! example the network's name in a spoof rule, is in *tags*, which Go does not read. A tag is an
//! entry of a rule's userdata in nf_tables ([`nft::userdata`]), a rule without a target in
//! iptables. A shared table or chain stays when its last rule is removed, as with Go: another
//! process may be about to add a rule.

pub mod container_rules;
mod engine;
pub mod forward;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod iptables;
pub mod masquerade;
pub mod nft;
pub mod owner;
pub mod portmap;
pub mod spoof;

pub use forward::Forward;
pub use masquerade::Masquerade;
pub use owner::AttachmentFilter;
pub use spoof::SpoofCheck;

use std::fmt;

use cni_linux::error::{Cause, Error, Result};
use nft::{BaseChain, Batch, Family, Hook, Kind, Nft, Table};

/// The kind of tables that the rules are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// iptables, in the variant (nft or legacy) that the host's `iptables` has.
    Iptables,
    /// The plugins' own tables in nf_tables.
    Nftables,
}

impl Backend {
    /// Returns the backend's name in configurations.
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

/// The maximum number of tries of a change that fails because the ruleset has changed since it was
/// read ([`Batch::only_at`]). Of n processes that change rules at once, each fails at most n - 1
/// times, and a failed try costs little.
const TRIES_MAX: usize = 1024;

/// Whether the kernel has nf_tables with NAT, which masquerading and port mappings need.
///
/// Makes the kernel check the creation of a NAT chain without creating it ([`Nft::rehearse`]),
/// which takes about 10 ms.
///
/// # Errors
/// The kernel refuses the check although it has nf_tables with NAT, for example because a privilege
/// is missing.
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

/// Calls `change`, which reads rules and changes them with [`Batch::only_at`], and returns its
/// result. If it fails because another process has changed the rules in between, calls it again, a
/// limited number of times. Any other error is final: the kernel checks for changed rules first.
fn retry<T>(mut change: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 0..TRIES_MAX {
        match change() {
            Err(error) if nft::raced(&error) => {}
            result => return result,
        }
    }
    let cause = Cause::text(format!("other processes changed the rules during each of {TRIES_MAX} attempts"));
    Err(Error::new("failed to change nftables", cause))
}

#[cfg(test)]
mod testing;
