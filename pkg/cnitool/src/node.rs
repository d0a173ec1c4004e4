//! Reads what the node has: the configured networks, the attachments in the result cache, and the
//! aliases of the host's links.
//!
//! Every runtime that uses Go's libcni stores its attachments in the same result cache as cnitool.
//! So an attachment is rarely missing there, but that does not prove that its container is gone.

use std::collections::BTreeMap;

use cni::Error;
use cni::machine::Machine;
use libcni::cache::Entry;
use libcni::{ConfFile, ConfFolder, NetworkList};

use crate::target::NetnsPresence;

/// Returns the valid configured networks, sorted by name. If several files have the same network,
/// the one counts that the runtimes choose: files with a list come first, then the order of the
/// file names.
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

/// Sorts the files of a folder in the order in which runtimes search them for a network.
pub(crate) fn by_precedence(mut files: Vec<ConfFile>) -> Vec<ConfFile> {
    files.sort_by_key(|file| file.path.extension().is_none_or(|extension| extension != "conflist"));
    files
}

/// Whether an attachment is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Liveness {
    /// Yes, with the reason.
    InUse(String),
    /// No, with the reason.
    Over(String),
    /// Not known, with the reason.
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
    pub(crate) remembered: &'a [Entry],
    /// The aliases of the host's links that name attachments, each with the link's name.
    pub(crate) marks: &'a BTreeMap<String, String>,
    pub(crate) machine: &'a dyn Machine,
}

impl LivenessSources<'_> {
    /// Returns whether an attachment of the container `id` to `network` is in use. Without
    /// `ifname`, any interface of the container counts.
    pub(crate) fn judge(&self, network: &str, id: &str, ifname: Option<&str>) -> Liveness {
        let mut netns_gone = None;
        for entry in self.remembered.iter().filter(|entry| entry.network == network) {
            let attachment = &entry.attachment;
            if attachment.container_id != id || ifname.is_some_and(|name| name != attachment.ifname) {
                continue;
            }
            match NetnsPresence::of(&attachment.netns, self.machine) {
                NetnsPresence::There => return Liveness::InUse(format!("its namespace {} exists", attachment.netns)),
                NetnsPresence::Unknown(why) => {
                    return Liveness::InUse(format!("whether its namespace exists is unknown: {why}"));
                }
                NetnsPresence::Other(why) => {
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
        // container exists too.
        let marked = self.marks.iter().find(|(alias, _)| {
            cni::AttachmentId::parse(alias).is_some_and(|parsed| match ifname {
                Some(ifname) => cni::AttachmentId::new(network, id, ifname).is_on(Some(alias)),
                None => parsed.network == network && parsed.container_id.as_deref() == Some(id),
            })
        });
        match (marked, netns_gone) {
            (Some((_, link)), _) => {
                Liveness::InUse(format!("link {link} on the host has the alias of this attachment"))
            }
            (None, Some(why)) => Liveness::Over(why),
            (None, None) => Liveness::Unknown("the result cache does not have its attachment".to_owned()),
        }
    }
}

/// Returns the aliases that name attachments, each with the link's name, of all links in the
/// namespace of this process. bandwidth's ifbs are left out, because they remain when the container
/// disappears.
///
/// # Errors
/// Those of the kernel.
pub(crate) fn marks() -> Result<BTreeMap<String, String>, Error> {
    let links = cni_linux::Netlink::open()?.list_links()?;
    let marked = |link: cni_linux::Link| {
        let alias = mark_in(&link.alias?);
        cni::AttachmentId::parse(&alias).map(|_| (alias, link.name))
    };
    Ok(links.into_iter().filter(|link| !link.is_ifb()).filter_map(marked).collect())
}

/// Returns the attachment's alias in a link's alias. bridge gives `cni-port:<attachment's alias> …`
/// to a port that another plugin created; any other alias is returned as it is.
pub(crate) fn mark_in(alias: &str) -> String {
    alias.strip_prefix("cni-port:").and_then(|rest| rest.split(' ').next()).unwrap_or(alias).to_owned()
}
