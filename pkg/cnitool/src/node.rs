//! What the verbs that look at the node know of it: the networks that are configured, the
//! attachments in the result cache, and the marks of the host's links.
//!
//! Every runtime that uses Go's libcni remembers its attachments in the same folder as cnitool, so
//! an attachment that is missing there is rare; but its absence does not prove that it is over.

use std::collections::BTreeMap;

use cni::Error;
use cni::machine::Machine;
use libcni::cache::Entry;
use libcni::{ConfFile, ConfFolder, NetworkList};

use crate::target::NetnsPresence;

/// The configured networks that load, each once, as the runtimes choose them: lists first, then by
/// name of the file.
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

/// The files of a folder in the order in which they are looked through for a network.
pub(crate) fn by_precedence(mut files: Vec<ConfFile>) -> Vec<ConfFile> {
    files.sort_by_key(|file| file.path.extension().is_none_or(|extension| extension != "conflist"));
    files
}

/// Whether an attachment is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Liveness {
    /// It is: why.
    InUse(String),
    /// It is not: why.
    Over(String),
    /// Nothing is known of it: why that is so.
    Unknown(String),
}

impl Liveness {
    /// The word for a table.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Liveness::InUse(_) => "in use",
            Liveness::Over(_) => "over",
            Liveness::Unknown(_) => "unknown",
        }
    }

    /// Why.
    pub(crate) fn why(&self) -> &str {
        match self {
            Liveness::InUse(why) | Liveness::Over(why) | Liveness::Unknown(why) => why,
        }
    }
}

/// The sources of knowledge about whether an attachment is in use.
pub(crate) struct LivenessSources<'a> {
    /// The network's entries in the result cache.
    pub(crate) remembered: &'a [Entry],
    /// The alias of each link of the host that has one, and the link's name.
    pub(crate) marks: &'a BTreeMap<String, String>,
    pub(crate) machine: &'a dyn Machine,
}

impl LivenessSources<'_> {
    /// Judges an attachment of `network`; without an interface any of the container's.
    pub(crate) fn judge(&self, network: &str, id: &str, ifname: Option<&str>) -> Liveness {
        let mut over = None;
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
                NetnsPresence::Gone(why) => over = Some(format!("its namespace {} is gone: {why}", attachment.netns)),
            }
        }
        // A host's end goes with the container's, so it is a sign of life where nothing else is.
        let marked = self.marks.iter().find(|(alias, _)| {
            cni::AttachmentId::parse(alias).is_some_and(|mark| match ifname {
                Some(ifname) => cni::AttachmentId::new(network, id, ifname).is_on(Some(alias)),
                None => mark.network == network && mark.container_id.as_deref() == Some(id),
            })
        });
        match (marked, over) {
            (Some((_, link)), _) => Liveness::InUse(format!("the host's link {link} has its mark")),
            (None, Some(why)) => Liveness::Over(why),
            (None, None) => Liveness::Unknown("the result cache does not have it".to_owned()),
        }
    }
}

/// Returns the mark of each link in the namespace of this process, and the link's name. bandwidth's
/// ifbs are left out: they do not go with the container, so they do not show that it exists.
///
/// # Errors
/// The kernel's.
pub(crate) fn marks() -> Result<BTreeMap<String, String>, Error> {
    let links = cni_linux::Netlink::open()?.list_links()?;
    let marked = |link: cni_linux::Link| {
        let alias = mark_in(&link.alias?);
        cni::AttachmentId::parse(&alias).map(|_| (alias, link.name))
    };
    Ok(links.into_iter().filter(|link| !link.is_ifb()).filter_map(marked).collect())
}

/// The mark in an alias: a port that another plugin made is marked `cni-port:<mark> …`. Any other
/// alias as it is.
pub(crate) fn mark_in(alias: &str) -> String {
    alias.strip_prefix("cni-port:").and_then(|rest| rest.split(' ').next()).unwrap_or(alias).to_owned()
}
