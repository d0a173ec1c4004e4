//! A host port that somebody else has: may it be taken from him?
//!
//! Only what is proved counts. Dead: the container's address is now ours, or a link on the host bore its mark when the
//! rule was made and none does now. Alive: a link bears the mark. Of anything else nothing is known: a container of
//! another plugin, of a Go plugin, a port that other conditions keep apart.

use crate::Netlink;
use crate::error::Result;
use crate::mark::Mark;

use super::{Claim, Forwarding};

/// What happens if a port is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// A dead holder is displaced, a live one wins, where nothing can be proved the older rule goes first.
    Judge,
    /// As in Go: the older rule goes first.
    Ignore,
}

/// Who has a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The container, as its rule names it.
    pub container: String,
    /// Its mark, if the rule bears one.
    pub alias: Option<String>,
    /// Whether a link bore that mark when the rule was made.
    pub witnessed: bool,
    /// Whether the two rules look at other things too, and not the same ones.
    pub apart: bool,
    /// What it has.
    pub claim: Claim,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} is mapped to {} of container {}", self.claim, self.claim.container, self.container)?;
        match self.alias.as_deref().and_then(Mark::parse) {
            Some(marked) => write!(f, ", interface {} in network {}", marked.ifname, marked.network),
            None => Ok(()),
        }
    }
}

/// Who has wanted ports in a backend that an ADD does not use.
#[derive(Clone, Debug, Default)]
pub struct Rivals {
    /// A living one: nothing may be changed then.
    pub held: Option<Holder>,
    /// Whether something dead is to be displaced, or has been.
    pub dead: bool,
    /// What the operator should know, one sentence each.
    pub remarks: Vec<String>,
}

/// What comes after looking for [`Rivals`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Nothing is changed.
    Nothing,
    /// The dead go, unless there is a living one.
    Displace,
}

/// What is known of a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Dead,
    Alive,
    Unknown,
}

/// Judges holders; asks the kernel only if one has to be judged by his link.
#[derive(Debug, Default)]
pub(super) struct Judge {
    host: Option<Netlink>,
}

impl Judge {
    pub(super) fn fate(&mut self, wanted: &Forwarding, holder: &Holder) -> Result<Fate> {
        if wanted.is_container(holder.claim.container.ip()) {
            return Ok(Fate::Dead);
        }
        let marked = holder.alias.as_deref().filter(|_| holder.witnessed && !holder.apart).and_then(Mark::parse);
        let Some(mark) = marked.and_then(|m| Some(Mark::new(m.network, m.container?, m.ifname))) else {
            return Ok(Fate::Unknown);
        };
        Ok(if self.bearer(&mark)?.is_some() { Fate::Alive } else { Fate::Dead })
    }

    /// The link on the host that bears this mark.
    pub(super) fn bearer(&mut self, mark: &Mark) -> Result<Option<String>> {
        let host = match &mut self.host {
            Some(host) => host,
            none => none.insert(Netlink::open()?),
        };
        // An end without an alias may be one that is just being made.
        Ok(host.find_host_end(mark)?.map(|link| link.name))
    }
}
