//! Reads the configured networks and the aliases of the host's links, and finds out whether an
//! attachment is in use.
//!
//! Every runtime that uses Go's libcni stores its attachments in the same result cache as cnitool.
//! An attachment that the cache does not have is rare, but its container may still exist.

use std::collections::BTreeMap;

use cni::machine::Machine;
use cni::{AttachmentId, Error};
use libcni::cache::Entry;
use libcni::{ConfFile, ConfFolder, NetworkList};

use crate::target::NetnsPresence;

/// Returns the valid configured networks, sorted by name. If several files define the same network,
/// the first one in the order of [`by_precedence`] is used, as in runtimes.
///
/// # Errors
/// Code 5 if the folder cannot be read.
pub(crate) fn networks(folder: &ConfFolder) -> Result<Vec<NetworkList>, Error> {
    let mut chosen: Vec<NetworkList> = Vec::new();
    for ConfFile { list, .. } in by_precedence(folder.files()?) {
        if let Ok(list) = list
            && !chosen.iter().any(|other| other.name() == list.name())
        {
            chosen.push(list);
        }
    }
    chosen.sort_by(|a, b| a.name().cmp(b.name()));
    Ok(chosen)
}

/// Sorts files in the order in which runtimes search them for a network: files named `*.conflist`
/// first. Both groups keep the order of `files`, which is by name.
pub(crate) fn by_precedence(mut files: Vec<ConfFile>) -> Vec<ConfFile> {
    // The sort is stable, and `false` comes before `true`.
    files.sort_by_key(|file| file.path.extension().is_none_or(|extension| extension != "conflist"));
    files
}

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

impl Liveness {
    /// Returns the word for tables and JSON.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Liveness::InUse(_) => "in use",
            Liveness::ContainerGone(_) => "over",
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

/// The information from which [`judge`](LivenessSources::judge) decides whether an attachment is in
/// use.
pub(crate) struct LivenessSources<'a> {
    /// The entries of the result cache.
    pub(crate) cached: &'a [Entry],
    /// The links on the host that have an attachment's alias: the link's name by the alias.
    pub(crate) links_by_alias: &'a BTreeMap<String, String>,
    pub(crate) machine: &'a dyn Machine,
}

impl LivenessSources<'_> {
    /// Returns whether an attachment of the container `id` to `network` is in use. Without
    /// `ifname`, attachments of all interfaces of the container are considered.
    /// - [`Liveness::InUse`] if the namespace in the result cache exists or may exist, or a link on
    ///   the host has the attachment's alias
    /// - otherwise [`Liveness::ContainerGone`] if the result cache has the attachment
    /// - otherwise [`Liveness::Unknown`]
    pub(crate) fn judge(&self, network: &str, id: &str, ifname: Option<&str>) -> Liveness {
        let mut gone_reason = None;
        for entry in self.cached.iter().filter(|entry| entry.network == network) {
            let attachment = &entry.attachment;
            if attachment.container_id != id || ifname.is_some_and(|name| name != attachment.ifname) {
                continue;
            }
            match NetnsPresence::at(&attachment.netns, self.machine) {
                NetnsPresence::Exists => return Liveness::InUse(format!("its namespace {} exists", attachment.netns)),
                NetnsPresence::Unknown(why) => {
                    return Liveness::InUse(format!("whether its namespace exists is unknown: {why}"));
                }
                NetnsPresence::OtherFile(why) => {
                    return Liveness::InUse(format!(
                        "whether its namespace {} exists is unknown: {why}",
                        attachment.netns
                    ));
                }
                NetnsPresence::Gone(why) => {
                    gone_reason = Some(format!("its namespace {} is gone: {why}", attachment.netns))
                }
            }
        }
        // The host's end of a link disappears with the container's end, so its existence shows that
        // the container exists.
        let host_link = self.links_by_alias.iter().find(|(alias, _)| names_container(alias, network, id, ifname));
        match (host_link, gone_reason) {
            (Some((_, link)), _) => {
                Liveness::InUse(format!("link {link} on the host has the alias of this attachment"))
            }
            (None, Some(why)) => Liveness::ContainerGone(why),
            (None, None) => Liveness::Unknown("the result cache does not have its attachment".to_owned()),
        }
    }
}

/// Whether a link's alias names the attachment of the container `id` to `network` with the
/// interface `ifname`, or with any interface if `ifname` is `None`.
fn names_container(alias: &str, network: &str, id: &str, ifname: Option<&str>) -> bool {
    let Some(parsed) = AttachmentId::parse(alias) else { return false };
    // Not compared with the parsed ID: the alias may have only the hash of a long container ID.
    AttachmentId::new(network, id, ifname.unwrap_or(&parsed.ifname)).is_on(Some(alias))
}

/// Returns the links in the namespace of this process that have an attachment's alias: the link's
/// name by the alias. bandwidth's ifbs are left out, because they remain when the container
/// disappears.
///
/// # Errors
/// The kernel's error if the links cannot be listed.
pub(crate) fn list_links_by_alias() -> Result<BTreeMap<String, String>, Error> {
    let links = cni_linux::Netlink::open()?.list_links()?;
    let alias_and_name = |link: cni_linux::Link| {
        let alias = attachment_alias_in(&link.alias?);
        AttachmentId::parse(&alias).is_some().then_some((alias, link.name))
    };
    Ok(links.into_iter().filter(|link| !link.is_ifb()).filter_map(alias_and_name).collect())
}

/// Extracts the attachment's alias from the alias of a link. bridge gives the alias
/// `cni-port:<attachment's alias> …` to a port that another plugin created. Any other alias is
/// returned unchanged.
pub(crate) fn attachment_alias_in(alias: &str) -> String {
    alias.strip_prefix("cni-port:").and_then(|rest| rest.split(' ').next()).unwrap_or(alias).to_owned()
}
