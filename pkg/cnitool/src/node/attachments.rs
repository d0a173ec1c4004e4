//! The attachments of a node, and whether an attachment is in use.
//!
//! Every runtime that uses Go's libcni stores its attachments in the same result cache as cnitool.
//! An attachment that the cache does not have is rare, but its container may still exist.
//!
//! Every verb that reports or removes leftovers decides with [`Liveness`].

use std::collections::{HashMap, HashSet};

use cni::machine::Machine;
use cni::result::AddResult;
use cni::{AttachmentId, Error};
use cni_ipam::Reservation;
use cni_linux::{Link, LinkKind, Netlink};
use libcni::cache::{Entry, Listing};

use super::objects::Owner;
use crate::call::Context;
use crate::target::NetnsPresence;

/// Whether an attachment is in use, as far as is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Liveness {
    /// Its container exists or may exist, for this reason.
    InUse(String),
    /// Its container does not exist any more, for this reason.
    ContainerGone(String),
    /// Nothing is known about the attachment or its container, for this reason.
    Unknown(String),
}

/// The word for [`Liveness::ContainerGone`].
pub(crate) const OVER: &str = "over";

impl Liveness {
    /// Returns the word for tables and JSON.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Liveness::InUse(_) => "in use",
            Liveness::ContainerGone(_) => OVER,
            Liveness::Unknown(_) => "unknown",
        }
    }

    /// Returns the reason.
    pub(crate) fn why(&self) -> &str {
        match self {
            Liveness::InUse(why) | Liveness::ContainerGone(why) | Liveness::Unknown(why) => why,
        }
    }
}

/// An attachment in a result cache.
pub(crate) struct CachedAttachment {
    pub(crate) entry: Entry,
    pub(crate) id: AttachmentId,
    /// Whether its namespace exists.
    pub(crate) presence: NetnsPresence,
    /// Its result, or why it has none that can be decoded.
    pub(crate) result: Result<AddResult, String>,
}

impl CachedAttachment {
    /// Decodes an entry, and checks whether its namespace exists.
    pub(crate) fn new(entry: Entry, machine: &dyn Machine) -> CachedAttachment {
        let presence = NetnsPresence::at(&entry.attachment.netns, machine);
        let absent = || Err("the result cache has no result of this attachment".to_owned());
        let result = entry.decoded_result().transpose().unwrap_or_else(absent);
        CachedAttachment { id: entry.id(), presence, result, entry }
    }

    /// Returns whether the attachment is in use, as far as its namespace shows.
    pub(crate) fn liveness(&self) -> Liveness {
        let netns = &self.entry.attachment.netns;
        Liveness::InUse(match &self.presence {
            NetnsPresence::Gone(why) => {
                return Liveness::ContainerGone(format!("its namespace {netns} is gone: {why}"));
            }
            NetnsPresence::Exists => format!("its namespace {netns} exists"),
            NetnsPresence::OtherFile(why) => format!("whether its namespace {netns} exists is unknown: {why}"),
            NetnsPresence::Unknown(why) => format!("whether its namespace exists is unknown: {why}"),
        })
    }
}

/// The attachments that the result cache and the links on the host show.
pub(crate) struct Attachments {
    /// Those of all result caches. Several caches may have an attachment.
    pub(crate) cached: Vec<CachedAttachment>,
    /// The position of each attachment by its alias. If several caches have an attachment, the
    /// position is that of an entry that is in use.
    by_alias: HashMap<String, usize>,
    /// A line for each file of a result cache without a usable entry.
    pub(crate) unreadable: Vec<String>,
    /// The links in the namespace of this process, which is the host's.
    pub(crate) links: Vec<Link>,
    /// The attachment that a link's alias names, and the link. Without ifbs: all these links
    /// disappear with the container.
    pub(crate) aliased_links: Vec<(AttachmentId, Link)>,
    /// The links on the host that belong to attachments: those with an alias, and those of the Go
    /// plugins, which set none. For a cached attachment without an aliased link, that is the veth
    /// with the name and the MAC of an interface in its result. The name alone does not suffice,
    /// because another link may have taken it.
    pub(crate) attached_links: Vec<(AttachmentId, Link)>,
}

impl Attachments {
    /// Reads the attachments of this node. Reads only the cache entries of `network` if it is
    /// given. Problems with single files become notes.
    ///
    /// # Errors
    /// Code 5 if the result cache cannot be read; the kernel's error if the links cannot be listed.
    pub(crate) fn read(context: &Context<'_>, network: Option<&str>) -> Result<Attachments, Error> {
        let Listing { entries, problems } = read_caches(context, network)?;
        problems.iter().for_each(|problem| context.notes.note(format_args!("ignored: {problem}")));
        let links = Netlink::open()?.list_links()?;
        let read = |entry| CachedAttachment::new(entry, context.call.machine);
        let cached: Vec<CachedAttachment> = entries.into_iter().map(read).collect();
        // Those that are in use come last, and replace others.
        let mut positions: Vec<(usize, &CachedAttachment)> = cached.iter().enumerate().collect();
        positions.sort_by_key(|(_, one)| !one.presence.is_gone());
        let by_alias = positions.into_iter().map(|(position, one)| (one.id.alias(), position)).collect();
        let (unreadable, aliased_links, attached_links) = (problems, Vec::new(), Vec::new());
        let mut found = Attachments { cached, by_alias, unreadable, links, aliased_links, attached_links };
        let aliased = |link: &Link| Some((found.attachment_in_alias(link)?, link.clone()));
        found.aliased_links = found.links.iter().filter(|link| !link.is_ifb()).filter_map(aliased).collect();
        found.attached_links = [found.aliased_links.clone(), found.find_unaliased_links()].concat();
        Ok(found)
    }

    /// Returns whether a reservation of `network` is in use:
    /// - [`Liveness::InUse`] if the namespace in the result cache exists or may exist, or a link on
    ///   the host has the attachment's alias
    /// - otherwise [`Liveness::ContainerGone`] if the result cache has the attachment
    /// - otherwise [`Liveness::Unknown`]
    ///
    /// A reservation without an interface is compared with all interfaces of its container.
    pub(crate) fn liveness_of(&self, network: &str, Reservation { id, ifname, .. }: &Reservation) -> Liveness {
        let owner = Owner::Names([Some(network.to_owned()), Some(id.clone()), ifname.clone()]);
        let known: Vec<&CachedAttachment> = match ifname {
            Some(ifname) => self.find_cached(&AttachmentId::new(network, id, ifname)).into_iter().collect(),
            None => self.cached.iter().filter(|cached| owner.matches(&cached.id)).collect(),
        };
        let in_use = known.iter().find(|cached| !cached.presence.is_gone());
        let outcome = match in_use.or(known.last()).map(|cached| cached.liveness()) {
            Some(in_use @ Liveness::InUse(_)) => return in_use,
            Some(other) => other,
            None => Liveness::Unknown("the result cache does not have its attachment".to_owned()),
        };
        // The host's end of a link disappears with the container's end, so its existence shows that
        // the container exists.
        let link = self.aliased_links.iter().find(|(attachment, _)| owner.matches(attachment));
        let in_use = |link: &Link| format!("link {} on the host has the alias of this attachment", link.name);
        link.map_or(outcome, |(_, link)| Liveness::InUse(in_use(link)))
    }

    /// Returns the cached attachment with this identifier.
    pub(crate) fn find_cached(&self, id: &AttachmentId) -> Option<&CachedAttachment> {
        self.cached.get(*self.by_alias.get(&id.alias())?)
    }

    /// Whether the result cache has the owner of an object, or a link of the host has its alias.
    pub(crate) fn has_owner(&self, owner: &Owner) -> bool {
        let aliased = self.aliased_links.iter().map(|(attachment, _)| attachment);
        owner.attachment().is_some_and(|attachment| self.find_cached(&attachment).is_some())
            || self.cached.iter().map(|cached| &cached.id).chain(aliased).any(|attachment| owner.matches(attachment))
    }

    /// Returns the attachment that a link's alias names, or `None` if it names none. If the alias
    /// has only the hash of a long container ID and the result cache does not have the attachment,
    /// its container ID is `#` and the hash.
    pub(super) fn attachment_in_alias(&self, link: &Link) -> Option<AttachmentId> {
        let alias = attachment_alias_in(link.alias.as_deref()?);
        if let Some(position) = self.by_alias.get(&alias) {
            return self.cached.get(*position).map(|cached| cached.id.clone());
        }
        let parsed = AttachmentId::parse(&alias)?;
        // For `cni:NETWORK/#HASH/IFNAME`, `parse` returns no container ID.
        let hash = alias.split('/').nth(1).unwrap_or_default().to_owned();
        Some(AttachmentId::new(parsed.network, parsed.container_id.unwrap_or(hash), parsed.ifname))
    }

    /// Returns the links of the cached attachments that have no aliased link.
    fn find_unaliased_links(&self) -> Vec<(AttachmentId, Link)> {
        let aliased: HashSet<&AttachmentId> = self.aliased_links.iter().map(|(attachment, _)| attachment).collect();
        let unaliased = self.cached.iter().filter(|cached| !aliased.contains(&cached.id));
        let with_link = unaliased.filter_map(|CachedAttachment { id, result, .. }| {
            let result = result.as_ref().ok()?;
            Some((id.clone(), self.links.iter().find(|link| is_veth_of_result(link, result))?.clone()))
        });
        with_link.collect()
    }

    /// Returns the cached attachments of the containers that have a link on the host for which
    /// `condition` is true.
    pub(crate) fn cached_with_link(
        &self,
        condition: impl Fn(&Link) -> bool,
    ) -> impl Iterator<Item = &CachedAttachment> {
        let links = self.attached_links.iter().filter(|(_, link)| condition(link));
        let containers: HashSet<(&str, &str)> = links.map(|(id, _)| (&*id.network, &*id.container_id)).collect();
        self.cached
            .iter()
            .filter(move |CachedAttachment { id, .. }| containers.contains(&(&id.network, &id.container_id)))
    }

    /// Returns the cached attachments of the containers that have a port on `bridge`.
    pub(crate) fn cached_on_bridge(&self, bridge: &Link) -> impl Iterator<Item = &CachedAttachment> {
        self.cached_with_link(|link| link.master == Some(bridge.index))
    }
}

/// Returns the entries of all result caches, or those of `network`.
///
/// # Errors
/// Code 5 if a cache cannot be read.
pub(crate) fn read_caches(context: &Context<'_>, network: Option<&str>) -> Result<Listing, Error> {
    let mut all = Listing::default();
    for cache in context.caches() {
        let Listing { entries, problems } = cache.list(network)?;
        all.entries.extend(entries);
        all.problems.extend(problems);
    }
    Ok(all)
}

/// Returns the attachment's end on the host: the link with its alias or, because the Go plugins set
/// no alias, the veth of its result. A container can change neither.
pub(crate) fn find_host_end<'a>(links: &'a [Link], attachment: &AttachmentId, result: &AddResult) -> Option<&'a Link> {
    let has_alias = |link: &&Link| {
        let alias = link.alias.as_deref().map(attachment_alias_in);
        !link.is_ifb() && attachment.is_on(alias.as_deref())
    };
    links.iter().find(has_alias).or_else(|| links.iter().find(|link| is_veth_of_result(link, result)))
}

/// Whether a link of the host is a veth with the name and the MAC of an interface in the result.
fn is_veth_of_result(link: &Link, result: &AddResult) -> bool {
    let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
    // An interface without a sandbox is on the host.
    let mut on_host = result.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
    link.kind == LinkKind::Veth
        && on_host.any(|listed| listed.name == link.name && listed.mac.eq_ignore_ascii_case(&mac))
}

/// Extracts the attachment's alias from the alias of a link. bridge gives the alias
/// `cni-port:<attachment's alias> …` to a port that another plugin created. Any other alias is
/// returned unchanged.
fn attachment_alias_in(alias: &str) -> String {
    alias.strip_prefix("cni-port:").and_then(|rest| rest.split(' ').next()).unwrap_or(alias).to_owned()
}
