//! Judges rules of other containers: for a wanted host port, or to the container's own address.
//!
//! Only proof counts. Alive: a link on the host has the mark of the rule. Dead: a link had it when
//! the rule was made and none has it now; or the rule's target is the address that this attachment
//! was just given, and the rule names the same network, or every route of the host to that address
//! leads to this attachment. A rule whose target is the container's address is stale whatever its
//! port. Any other owner is unknown: a container of another plugin or of a Go plugin, or a port
//! that other conditions keep apart.
//!
//! The routes are the proof against two networks with overlapping subnets: there the same address
//! is in use twice, and a rule without a network may lead to the other container, by a route of its
//! own or a table of its own (VRF).

use std::collections::BTreeMap;
use std::net::IpAddr;

use cni::AttachmentId;
use cni::attachment::Marked;
use cni_linux::Netlink;
use cni_linux::error::Result;
use cni_linux::route::Family;

use super::{ClaimedPort, Forwarding};

/// The reaction to a port that is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// A dead holder is displaced, a live one wins, where nothing can be proved the older rule goes
    /// first.
    RefuseIfAlive,
    /// As in Go: the older rule goes first.
    Ignore,
}

/// The container that has a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The container, as its rule names it.
    pub container: String,
    /// The network, if the rule names one.
    pub network: Option<String>,
    /// Its mark, if the rule has one.
    pub alias: Option<String>,
    /// Whether a link had that mark when the rule was made.
    pub had_link: bool,
    /// Whether the two rules look at other things too, and not the same ones.
    pub conditions_differ: bool,
    /// The port.
    pub claim: ClaimedPort,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} is mapped to {} of container {}", self.claim, self.claim.container, self.container)?;
        match self.alias.as_deref().and_then(AttachmentId::parse) {
            Some(marked) => write!(f, ", interface {} in network {}", marked.ifname, marked.network),
            None => Ok(()),
        }
    }
}

/// The containers that have the wanted ports in a backend that the ADD does not use.
#[derive(Clone, Debug, Default)]
pub struct Conflicts {
    /// A living one: nothing may be changed then.
    pub held: Option<Holder>,
    /// Whether something dead is to be displaced, or has been.
    pub found_dead: bool,
    /// Remarks for the operator, one sentence each.
    pub remarks: Vec<String>,
}

/// The action after the search for [`Conflicts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConflictAction {
    /// Nothing is changed.
    Keep,
    /// The dead go, unless there is a living one.
    Displace,
}

/// Whether a holder is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Liveness {
    Dead,
    Alive,
    Unknown,
}

/// Judges holders; asks the kernel only if one has to be judged by his link.
#[derive(Debug, Default)]
pub(super) struct LivenessProbe {
    host: Option<Netlink>,
    /// By address, whether the container's link is the only way to it. Found by reading all routes.
    only_ways: BTreeMap<IpAddr, bool>,
}

impl LivenessProbe {
    pub(super) fn liveness_of(&mut self, wanted: &Forwarding, holder: &Holder) -> Result<Liveness> {
        let address = holder.claim.container.ip();
        let is_here = wanted.is_container(address);
        // A network gives an address to one container at a time.
        if is_here && holder.network.as_deref() == Some(&wanted.attachment.network) {
            return Ok(Liveness::Dead);
        }
        if let Some(mark) = holder.mark().filter(|_| holder.had_link && (is_here || !holder.conditions_differ)) {
            return Ok(match self.find_host_link(&mark)? {
                Some(_) if holder.conditions_differ => Liveness::Unknown,
                Some(_) => Liveness::Alive,
                None => Liveness::Dead,
            });
        }
        if !is_here {
            return Ok(Liveness::Unknown);
        }
        let is_only = match self.only_ways.get(&address) {
            Some(is_only) => *is_only,
            // Routes that cannot be read prove nothing, and do not fail the ADD.
            None => self.is_only_way(address, &wanted.links).unwrap_or(false),
        };
        self.only_ways.insert(address, is_only);
        Ok(if is_only { Liveness::Dead } else { Liveness::Unknown })
    }

    /// Returns the link on the host that has this mark.
    pub(super) fn find_host_link(&mut self, attachment: &AttachmentId) -> Result<Option<String>> {
        // An end without an alias may be one that is just being made.
        Ok(self.host()?.find_host_end(attachment)?.map(|link| link.name))
    }

    /// Whether packets to this address can leave the host by these interfaces only: in every table
    /// with non-default routes to it the most specific routes use these interfaces, and there is at
    /// least one.
    fn is_only_way(&mut self, address: IpAddr, links: &[String]) -> Result<bool> {
        let host = self.host()?;
        let mut indices = Vec::new();
        for name in links {
            indices.extend(host.find_link(name)?.map(|link| link.index));
        }
        // By table: the longest prefix, and whether all routes of that length are ours.
        let mut best: BTreeMap<u32, (u8, bool)> = BTreeMap::new();
        let routes = host.list_all_routes(Family::of(address))?;
        for route in routes.iter().filter(|route| route.dst.prefix() > 0 && route.dst.contains(address)) {
            let (prefix, is_ours) = (route.dst.prefix(), indices.contains(&route.oif));
            let longest = best.entry(route.table_id()).or_insert((prefix, is_ours));
            *longest = match prefix.cmp(&longest.0) {
                std::cmp::Ordering::Less => *longest,
                std::cmp::Ordering::Equal => (prefix, longest.1 && is_ours),
                std::cmp::Ordering::Greater => (prefix, is_ours),
            };
        }
        Ok(!best.is_empty() && best.values().all(|(_, is_ours)| *is_ours))
    }

    fn host(&mut self) -> Result<&Netlink> {
        Ok(match &mut self.host {
            Some(host) => host,
            none => none.insert(Netlink::open()?),
        })
    }
}

impl Holder {
    /// Returns the mark of the rule, if the rule has it unabridged.
    fn mark(&self) -> Option<AttachmentId> {
        let Marked { network, container_id: container, ifname } =
            self.alias.as_deref().and_then(AttachmentId::parse)?;
        Some(AttachmentId::new(network, container?, ifname))
    }

    /// Returns the note about a rule that is removed.
    pub(super) fn removal_note(&self, wanted: &Forwarding) -> String {
        let address = self.claim.container.ip();
        match wanted.is_container(address) {
            true => format!("{self}, which is gone: the rule was displaced, as {address} is this container's now"),
            false => format!("{self}, which is gone: it was displaced"),
        }
    }

    /// Returns the note about a rule for a wanted port that stays.
    pub(super) fn port_taken_note(&self) -> String {
        format!("{self} already, which may go first as long as it is there")
    }

    /// Returns the note about a rule to the container's address that stays.
    pub(super) fn unknown_owner_note(&self) -> String {
        format!("{self}, of which nothing is known: the rule was left, and may lead to this container")
    }
}
