//! Reads and changes nf_tables over one netlink socket, without running a program.
//!
//! [`Batch`] collects changes, and [`Nft::commit`] makes all of them or none. [`Nft::rules`],
//! [`Nft::chains`] and [`Nft::find_chain`] read.
//!
//! A change can depend on objects that were read. Another process may have changed these objects
//! meanwhile. So that the kernel then refuses the change, the change names handles, creates chains
//! with [`Batch::create_chain`], or requires that no rule has changed ([`Batch::only_at`]). After
//! such a refusal, the caller reads again.
//!
//! Needs CAP_NET_ADMIN. The socket belongs to the network namespace that the thread was in when it
//! opened the socket.
//!
//! A kernel without nf_tables has no rules: reading finds nothing there, and a transaction without
//! changes succeeds. Only a transaction with changes fails, with
//! [`is_unsupported`](cni_linux::error::Error::is_unsupported).

use std::fmt;

mod batch;
pub mod decode;
pub mod expr;
mod index;
mod lists;
mod refusal;
mod request;
mod socket;
pub mod userdata;

pub(crate) use batch::RulePosition;
pub use batch::{BaseChain, Batch, Hook, Kind};
pub use decode::{has_any_pair, mentions};
pub use expr::{Expr, Verdict};
pub(crate) use index::{IfMissing, Key, Search, is_long};
pub(crate) use lists::Retries;
pub use socket::{Generation, Nft, raced};

/// The netlink subsystem number of nf_tables.
const NFNL_SUBSYS_NFTABLES: u16 = 10;

/// The packets that a table sees. The numbers are the kernel's, `NFPROTO_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4 and IPv6.
    Inet = 1,
    /// IPv4.
    Ip = 2,
    /// IPv6.
    Ip6 = 10,
    /// Frames on a bridge.
    Bridge = 7,
}

impl Family {
    /// Returns the family's name in `nft`.
    pub fn name(self) -> &'static str {
        match self {
            Family::Inet => "inet",
            Family::Ip => "ip",
            Family::Ip6 => "ip6",
            Family::Bridge => "bridge",
        }
    }
}

/// A table's family and name. Displays as in `nft`: `bridge nat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table<'a> {
    /// Its family.
    pub family: Family,
    /// Its name within the family.
    pub name: &'a str,
}

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.family.name(), self.name)
    }
}

/// A rule that is to be written or was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// The expressions.
    pub exprs: Vec<Expr>,
    /// The comment that `nft` shows.
    pub comment: Option<String>,
    /// The tags: all other entries of the rule's userdata (type, value). These plugins use types
    /// from 0x80 up.
    pub tags: Vec<(u8, Vec<u8>)>,
}

impl Rule {
    /// Returns a rule without comment and tags.
    pub fn new(exprs: impl Into<Vec<Expr>>) -> Rule {
        Rule { exprs: exprs.into(), comment: None, tags: Vec::new() }
    }

    /// Sets the comment.
    #[must_use]
    pub fn with_comment(mut self, comment: impl Into<String>) -> Rule {
        self.comment = Some(comment.into());
        self
    }

    /// Adds a tag.
    #[must_use]
    pub fn with_tag(mut self, tag_type: u8, value: impl Into<Vec<u8>>) -> Rule {
        self.tags.push((tag_type, value.into()));
        self
    }

    /// Returns the value of the first tag of this type.
    pub fn tag(&self, tag_type: u8) -> Option<&[u8]> {
        self.tags.iter().find(|(kind, _)| *kind == tag_type).map(|(_, value)| value.as_slice())
    }
}

/// A rule in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The rule's number, never used twice within a table.
    pub handle: u64,
    /// The rule.
    pub rule: Rule,
}

/// A chain in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Its name.
    pub name: String,
    /// Its number, never used twice within a table.
    pub handle: u64,
    /// The base chain's place in the packet path; `None` for a regular chain, and for base chains
    /// of types and hooks not used here.
    pub base: Option<BaseChain>,
    /// The number of its rules and of the jumps to it.
    pub uses: u32,
    /// Whether its policy is drop: packets that reach its end are dropped.
    pub drops: bool,
}

#[cfg(test)]
mod tests;
