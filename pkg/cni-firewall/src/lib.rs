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

pub use engine::nft_usable;
pub use forward::Forward;
pub use masquerade::Masquerade;
pub use owner::AttachmentFilter;
pub use spoof::SpoofCheck;

use std::fmt;

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

    /// Returns the other backend.
    pub fn other(self) -> Backend {
        match self {
            Backend::Iptables => Backend::Nftables,
            Backend::Nftables => Backend::Iptables,
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

#[cfg(test)]
mod testing;
