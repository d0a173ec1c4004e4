//! Reads what the node has: the configured networks, the attachments in the result cache, and the
//! aliases of the host's links.
//!
//! Every runtime that uses Go's libcni stores its attachments in the same result cache as cnitool.
//! So an attachment is rarely missing there. But a missing one may still have its container.

use std::collections::BTreeMap;

use cni::Error;
use cni::machine::Machine;
use libcni::cache::Entry;
use libcni::{ConfFile, ConfFolder, NetworkList};

use crate::target::NetnsPresence;

/// Returns the valid configured networks, sorted by name. If several files have the same network,
/// the one counts that the runtimes choose (see [`by_precedence`]).
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

/// Sorts files in the order in which runtimes search them for a network: those whose name ends in
/// `.conflist` come first. Otherwise the order of `files`, which is by name, stays.
pub(crate) fn by_precedence(mut files: Vec<ConfFile>) -> Vec<ConfFile> {
    // The sort is stable, and `false` comes before `true`.
    files.sort_by_key(|file| file.path.extension().is_none_or(|extension| extension != "conflist"));
    files
}

/// The knowledge about whether an attachment is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Liveness {
    /// It is or may be in use, for this reason.
    InUse(String),
    /// Its container is gone, for this reason.
    Over(String),
    /// Nothing is known about the attachment, for this reason.
    Unknown(String),
}

impl Liveness {
    /// Returns the word for tables and JSON.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Liveness::InUse(_) => "in use",
            Liveness::Over(_) => "over",
            Liveness::Unknown(_) => "unknown",
        }
    }

    /// Returns the reason.
    pub(crate) fn why(&self) -> &str {
        match self {
            Liveness::InUse(why) | Liveness::Over(why) | Liveness::Unknown(why) => why,
        }
    }
}

/// The information from which [`judge`](LivenessSources::judge) decides whether an attachment is in
/// use.
pub(crate) struct LivenessSources<'a> {
    /// The entries of the result cache.
    pub(crate) cached: &'a [Entry],
    /// The names of those links on the host that have an attachment's alias, by this alias.
    pub(crate) links_by_alias: &'a BTreeMap<String, String>,
    pub(crate) machine: &'a dyn Machine,
}

impl LivenessSources<'_> {
    /// Returns whether an attachment of the container `id` to `network` is in use. It is in use if
    /// its namespace exists, or may exist, or if a link on the host has its alias. Its container is
    /// gone if the result cache has the attachment, but neither is true. Otherwise nothing is
    /// known. Without `ifname`, any interface of the container counts.
    pub(crate) fn judge(&self, network: &str, id: &str, ifname: Option<&str>) -> Liveness {
        let mut netns_gone = None;
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
                    netns_gone = Some(format!("its namespace {} is gone: {why}", attachment.netns))
                }
            }
        }
        // The host's end of a link disappears with the container's end, so if it exists, the
        // container exists too. `is_on` also recognizes the alias of a long container ID, which has
        // only the hash of the ID.
        let host_link = self.links_by_alias.iter().find(|(alias, _)| {
            cni::AttachmentId::parse(alias).is_some_and(|parsed| {
                let ifname = ifname.unwrap_or(&parsed.ifname);
                cni::AttachmentId::new(network, id, ifname).is_on(Some(alias))
            })
        });
        match (host_link, netns_gone) {
            (Some((_, link)), _) => {
                Liveness::InUse(format!("link {link} on the host has the alias of this attachment"))
            }
            (None, Some(why)) => Liveness::Over(why),
            (None, None) => Liveness::Unknown("the result cache does not have its attachment".to_owned()),
        }
    }
}

/// Returns the names of those links in the namespace of this process that have an attachment's
/// alias, by this alias. bandwidth's ifbs are left out, because they remain when the container
/// disappears.
///
/// # Errors
/// The kernel's error if the links cannot be listed.
pub(crate) fn list_links_by_alias() -> Result<BTreeMap<String, String>, Error> {
    let links = cni_linux::Netlink::open()?.list_links()?;
    let with_alias = |link: cni_linux::Link| {
        let alias = attachment_alias_in(&link.alias?);
        cni::AttachmentId::parse(&alias).is_some().then_some((alias, link.name))
    };
    Ok(links.into_iter().filter(|link| !link.is_ifb()).filter_map(with_alias).collect())
}

/// Returns the attachment's alias in a link's alias. bridge gives `cni-port:<attachment's alias> …`
/// to a port that another plugin created; any other alias is returned as it is.
pub(crate) fn attachment_alias_in(alias: &str) -> String {
    alias.strip_prefix("cni-port:").and_then(|rest| rest.split(' ').next()).unwrap_or(alias).to_owned()
}
