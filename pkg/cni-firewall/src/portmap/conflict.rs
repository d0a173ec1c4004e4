//! Decides whether the container of a conflicting rule still exists. Only rules of a container that
//! no longer exists are removed.
//!
//! A rule of another container conflicts with an ADD if it maps a wanted host port, or if it leads
//! to the address of the ADD's container. The rule may name the network and the alias of its
//! attachment, and record that a link on the host had this alias when the rule was made. The first
//! of these cases that applies decides:
//! - The rule leads to the address of this ADD, names the network of this ADD and records no link:
//!   the container is *dead*, because a network gives an address to one container at a time.
//! - The rule leads to another address, and its conditions differ from those of the ADD: *unknown*.
//!   Both containers may have the port.
//! - A link had the alias, and the rule has the whole alias: *dead* if no link has it now.
//!   Otherwise *unknown* if the conditions differ, and *alive* if they do not.
//! - The rule leads to the address of this ADD, and the host's routes to that address all lead to
//!   this attachment: *dead*.
//! - All other cases: *unknown*. The container may be one of another plugin or of a Go plugin.
//!
//! The routes are compared because two networks can have overlapping subnets. Then two containers
//! can have the same address, and a rule that names no network may lead to the other container,
//! through another route or another routing table (VRF).

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::net::IpAddr;

use cni::AttachmentId;
use cni::attachment::Marked;
use cni::rollback::Notes;
use cni_linux::Netlink;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

use super::{ClaimedPort, Forwarding};

/// The reaction to a host port that another container has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// If the other container is dead, its rules are removed. If it is alive, the ADD fails. If
    /// that is unknown, the rules of both stay, and the older ones usually take precedence.
    RefuseIfAlive,
    /// As with Go's plugin, the rules of both stay, and the older ones usually take precedence.
    Ignore,
}

/// Another container, as its rule describes it. The rule maps a wanted port, or leads to the
/// address of the ADD's own container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    /// The container ID, or a name in parentheses if the rule does not have the ID.
    pub(super) container: String,
    /// The network, if the rule names one.
    pub(super) network: Option<String>,
    /// The attachment, if the rule has its alias.
    pub(super) attachment: Option<Marked>,
    /// Whether a link on the host had that alias when the rule was made.
    pub(super) had_link: bool,
    /// Whether the rules of the two containers have different conditions, so that both may have the
    /// port.
    pub(super) conditions_differ: bool,
    /// The port, and where its connections go.
    pub(super) claim: ClaimedPort,
}

impl Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is mapped to {} of container {}", self.claim, self.claim.container, self.container)?;
        match &self.attachment {
            Some(Marked { network, ifname, .. }) => write!(f, ", interface {ifname} in network {network}"),
            None => Ok(()),
        }
    }
}

/// The tables that are searched for rules of other containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SearchedTables {
    /// Those in which the ADD makes its rules: a dead container's rule for a wanted port is
    /// removed.
    Written,
    /// Others, with their name for remarks: only a dead container's rule that leads to the address
    /// of the ADD's container is removed. DEL and GC remove the rest.
    Other(String),
}

/// Whether the container of a rule is alive; see the module's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Liveness {
    Dead,
    Alive,
    Unknown,
}

/// Whether the ADD must fail with this error of a search, instead of continuing with a remark: a
/// living container has a wanted port, or a signal ended a wait.
pub(super) fn must_fail(error: &Error) -> bool {
    error.is_held() || error.is_terminated()
}

/// The search of an ADD for rules of other containers. Connects to the kernel only when a link or
/// the routes are needed to find out whether a container is alive.
#[derive(Debug)]
pub(super) struct ConflictSearch<'w> {
    /// What the ADD wants.
    pub(super) wanted: &'w Forwarding,
    /// Its claims in both families.
    claims: Vec<ClaimedPort>,
    /// A description of the living container because of which
    /// [`decide_removal`](ConflictSearch::decide_removal) has failed.
    pub(super) held: Option<String>,
    tables: SearchedTables,
    notes: Notes,
    /// Remarks for the operator about the rules in `tables`, one sentence each.
    remarks: Vec<String>,
    host: Option<Netlink>,
    /// For each address, whether it is routed only to the attachment of the ADD. Stored, because
    /// finding it out reads all routes of the host.
    routed_only_here: BTreeMap<IpAddr, bool>,
}

impl<'w> ConflictSearch<'w> {
    /// Returns a search that has found nothing, in the tables in which the ADD makes its rules.
    pub(super) fn new(wanted: &'w Forwarding, notes: Notes) -> ConflictSearch<'w> {
        let (remarks, routed_only_here) = Default::default();
        let (claims, tables) = (wanted.all_claims(), SearchedTables::Written);
        ConflictSearch { wanted, claims, held: None, tables, notes, remarks, host: None, routed_only_here }
    }

    /// Begins the search of these tables, or begins it again, and forgets the remarks that were not
    /// written.
    pub(super) fn begin(&mut self, tables: SearchedTables) {
        self.tables = tables;
        self.remarks.clear();
    }

    /// Adds a remark, unless there is one with this text.
    pub(super) fn remark(&mut self, text: impl Display) {
        let remark = match &self.tables {
            SearchedTables::Written => text.to_string(),
            SearchedTables::Other(name) => format!("{text} ({name})"),
        };
        if !self.remarks.contains(&remark) {
            self.remarks.push(remark);
        }
    }

    /// Writes the remarks as notes: the search of these tables is finished.
    pub(super) fn note_remarks(&mut self) {
        for remark in self.remarks.drain(..) {
            self.notes.note(format_args!("portmap: {remark}"));
        }
    }

    /// Ends the search of tables in which the ADD makes no rules: `removal` is the outcome of the
    /// removal of stale rules. Writes the remarks; a failure is one of them.
    ///
    /// # Errors
    /// Those with which the ADD [must fail](must_fail).
    pub(super) fn finish(&mut self, removal: Result<()>) -> Result<()> {
        match removal {
            Err(error) if must_fail(&error) => return Err(error),
            Err(error) => self.remark(format_args!("the stale host port rules were not removed: {error}")),
            Ok(()) => {}
        }
        self.note_remarks();
        Ok(())
    }

    /// Adds a remark for each of `older` that has a wanted port, unless the ADD ignores conflicts.
    /// `older` are mappings of this container to other addresses. The ADD keeps them, because their
    /// rules do not name an attachment.
    pub(super) fn remark_older_mappings(&mut self, older: impl IntoIterator<Item = ClaimedPort>) {
        if self.wanted.policy == Policy::Ignore {
            return;
        }
        for claim in older {
            if self.is_wanted_port(&claim) {
                let address = claim.container;
                self.remark(format_args!(
                    "{claim} is mapped to {address} by older rules of this container, which may take precedence until \
                     they are removed"
                ));
            }
        }
    }

    /// Whether a packet to a wanted port can match this claim.
    fn is_wanted_port(&self, claim: &ClaimedPort) -> bool {
        self.claims.iter().any(|wanted| wanted.overlaps(claim))
    }

    /// Whether another container's mapping with this claim conflicts with the ADD: it has a wanted
    /// port, or leads to the address of the ADD's container.
    pub(super) fn conflicts_with(&self, claim: &ClaimedPort) -> bool {
        self.is_wanted_port(claim) || self.wanted.is_container(claim.container.ip())
    }

    /// Decides whether the rule of `holder`, which [conflicts](ConflictSearch::conflicts_with) with
    /// the ADD, is removed. Adds a remark if the holder is dead or if that is unknown.
    ///
    /// # Errors
    /// - [`Error::is_held`]: the holder is alive and has a wanted port, so the ADD must fail. The
    ///   description is then in `held`.
    /// - The links cannot be read.
    pub(super) fn decide_removal(&mut self, holder: Holder) -> Result<bool> {
        let has_wanted_port = self.is_wanted_port(&holder.claim);
        let address = holder.claim.container.ip();
        match self.liveness_of(&holder)? {
            Liveness::Alive if has_wanted_port => {
                self.held = Some(holder.to_string());
                return Err(Error::new("failed to map a host port", Cause::Held(holder.to_string())));
            }
            // The rule leads to the address of this container, which a container of another network
            // may have too. So the rule stays.
            Liveness::Alive => {}
            Liveness::Dead if self.wanted.is_container(address) => {
                self.remark(format_args!(
                    "{holder}, which no longer exists: its rule was displaced, because {address} is now this \
                     container's"
                ));
                return Ok(true);
            }
            Liveness::Dead if self.tables == SearchedTables::Written => {
                self.remark(format_args!("{holder}, which no longer exists: its rule was displaced"));
                return Ok(true);
            }
            // Also a dead holder, if the ADD makes no rules in these tables: DEL or GC removes its
            // rule.
            Liveness::Dead | Liveness::Unknown if has_wanted_port => {
                self.remark(format_args!("{holder} already, and that rule may take precedence until it is removed"))
            }
            // The holder is unknown: without a wanted port, the rule leads to this container, and a
            // dead holder of such a rule is handled above.
            Liveness::Dead | Liveness::Unknown => self.remark(format_args!(
                "{holder}, which may still exist: the rule was not removed, and may lead to this container"
            )),
        }
        Ok(false)
    }

    /// Returns whether the holder is alive, by the cases of the module's documentation. Fails if
    /// the links cannot be read.
    fn liveness_of(&mut self, holder: &Holder) -> Result<Liveness> {
        let wanted = self.wanted;
        let address = holder.claim.container.ip();
        let leads_here = wanted.is_container(address);
        let is_of_network = holder.network.as_deref() == Some(&wanted.attachment.network);
        // A network gives an address to one container at a time, now to this one. If the rule
        // records a link, the cases below decide: a configuration can give one address to two.
        if leads_here && is_of_network && !holder.had_link {
            return Ok(Liveness::Dead);
        }
        // Both containers may have the port, whether or not the other one is alive.
        if !leads_here && holder.conditions_differ {
            return Ok(Liveness::Unknown);
        }
        // The alias may have only a hash of the container ID.
        if holder.had_link
            && let Some(Marked { network, container_id: Some(container_id), ifname }) = &holder.attachment
        {
            return Ok(match self.find_host_link(&AttachmentId::new(network, container_id, ifname))? {
                // The container exists, but both containers may have the port.
                Some(_) if holder.conditions_differ => Liveness::Unknown,
                Some(_) => Liveness::Alive,
                None => Liveness::Dead,
            });
        }
        let is_dead = leads_here && self.is_routed_only_here(address);
        Ok(if is_dead { Liveness::Dead } else { Liveness::Unknown })
    }

    /// Whether all routes of the host to this address lead to the attachment of the ADD. False if
    /// the routes cannot be read: that proves nothing, and must not make the ADD fail.
    fn is_routed_only_here(&mut self, address: IpAddr) -> bool {
        if let Some(known) = self.routed_only_here.get(&address) {
            return *known;
        }
        let is_only_here = self.all_routes_use_links(address).unwrap_or(false);
        self.routed_only_here.insert(address, is_only_here);
        is_only_here
    }

    /// Returns the name of the attachment's link on the host, as [`Netlink::find_host_end`] finds
    /// the link; `None` if there is none.
    pub(super) fn find_host_link(&mut self, attachment: &AttachmentId) -> Result<Option<String>> {
        Ok(self.host()?.find_host_end(attachment)?.map(|link| link.name))
    }

    /// Whether packets to this address can leave the host by interfaces of the ADD's attachment
    /// only: in every routing table that has a non-default route to the address, the most specific
    /// routes use these interfaces. False if no table has such a route.
    fn all_routes_use_links(&mut self, address: IpAddr) -> Result<bool> {
        let links = &self.wanted.links;
        let host = self.host()?;
        let mut link_indices = Vec::new();
        for name in links {
            link_indices.extend(host.find_link(name)?.map(|link| link.index));
        }
        let mut routes = host.list_all_routes(Family::of(address))?;
        routes.retain(|route| route.dst.prefix() > 0 && route.dst.contains(address));
        let mut longest_by_table: BTreeMap<u32, u8> = BTreeMap::new();
        for route in &routes {
            let longest = longest_by_table.entry(route.table_id()).or_default();
            *longest = route.dst.prefix().max(*longest);
        }
        routes.retain(|route| longest_by_table.get(&route.table_id()) == Some(&route.dst.prefix()));
        Ok(!routes.is_empty() && routes.iter().all(|route| link_indices.contains(&route.oif)))
    }

    /// Returns the connection to the kernel, which is opened when it is first needed.
    fn host(&mut self) -> Result<&Netlink> {
        Ok(match &mut self.host {
            Some(host) => host,
            none => none.insert(Netlink::open()?),
        })
    }
}
