//! GC: removes this network's links, masquerade rules and addresses that belong to no valid
//! attachment.
//!
//! A link is recognised by its alias. Links of the Go plugins have none and stay. Links whose ADD
//! was killed before it set the alias are removed too. Masquerade rules, including those of the Go
//! plugins, are recognised by their comments, which name network and container. The GC of the IPAM
//! plugin removes the addresses. A link without an end on the host disappears with the container's
//! namespace.

use std::collections::BTreeSet;

use cni::AttachmentId;
use cni::config::ValidAttachments;
use cni::delegate::call_ipam;
use cni::skel::{Call, Verb};
use cni::{Error, Result};
use cni_firewall::AttachmentFilter;
use cni_linux::{Link, Netlink};

use super::{HostEnd, Interface, PortMark, give_back, masquerade};

/// Removes everything of this network that belongs to no attachment in `valid`: links, addresses,
/// what the plugin itself created, and masquerade rules.
///
/// # Errors
/// All errors, joined. Every step runs, even after an error.
pub(super) fn gc<I: Interface>(plugin: &I, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
    let network = call.conf.name();
    let has_host_end = I::HOST_END != HostEnd::None;
    let mut errors = Vec::new();
    if has_host_end {
        errors.extend(gc_links(call, valid).err());
    }
    errors.extend(call_ipam(call, Verb::Gc).err());
    errors.extend(plugin.gc(call, valid).err());
    if has_host_end {
        let filter = AttachmentFilter::Garbage { network, valid };
        errors.extend(masquerade::open(call).purge(filter).err().map(Error::from));
    }
    Error::join(errors)
}

/// Removes this network's links on the host that belong to no attachment in `valid`. Gives back a
/// link with a [`PortMark`] instead of deleting it.
///
/// # Errors
/// The errors of the kernel, joined. Every link is tried, even after an error.
pub fn gc_links(call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
    let (network, host) = (call.conf.name(), Netlink::open()?);
    let prefix = AttachmentId::network_prefix(network);
    // Aliases are compared as a whole, not parsed: an alias has the hash of a long container ID
    // instead of the ID.
    let valid_aliases: BTreeSet<String> =
        valid.iter().map(|(id, ifname)| AttachmentId::new(network, id, ifname).alias()).collect();
    let is_stale = |alias: &str| alias.starts_with(&prefix) && !valid_aliases.contains(alias);
    let mut errors = Vec::new();
    let links = host.list_links()?;
    for link in &links {
        let Link { index, alias: Some(alias), .. } = link else { continue };
        let removed = match PortMark::parse(alias) {
            Some(port_mark) if is_stale(&port_mark.attachment_alias) => give_back(&host, link),
            // Another kind of link, such as a network card, has its alias from elsewhere.
            None if is_stale(alias) && (link.is_veth() || link.is_ifb()) => host.purge_link(*index).map(drop),
            _ => Ok(()),
        };
        errors.extend(removed.err().map(Error::from));
    }
    // The links of ADDs that were killed before they set the alias.
    errors.extend(host.purge_unmarked(network, &links, call.machine).err().map(Error::from));
    Error::join(errors)
}
