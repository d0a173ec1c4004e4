//! GC: what has this network's mark and belongs to no valid attachment, and links whose ADD was
//! killed before it set the mark.
//!
//! Links are known by their alias; what Go made has none. Masquerade rules name network and
//! container in their comments, Go's too. IPAM gets the same request. A link without an end on the
//! host ends with its container.

use cni::AttachmentId;
use cni::config::ValidAttachments;
use cni::delegate::Delegate;
use cni::skel::Call;
use cni::{Error, Result};
use cni_linux::{Link, Netlink};

use super::{HostEnd, Interface, PortMark, give_back, masquerade};

pub(super) fn collect<I: Interface>(plugin: &I, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
    let network = call.conf.name();
    let on_host = I::HOST_END != HostEnd::None;
    let mut errors = Vec::new();
    if on_host {
        errors.extend(collect_links(call, valid).err());
    }
    if !call.conf.ipam_type().is_empty() {
        let forwarded = Delegate::find(call, call.conf.ipam_type()).and_then(|ipam| ipam.gc());
        errors.extend(forwarded.err());
    }
    errors.extend(plugin.collect(call, valid).err());
    if on_host {
        let valid: Vec<(&str, &str)> = valid.iter().collect();
        errors.extend(masquerade::open(call).gc(network, &valid).err().map(Error::from));
    }
    Error::join(errors)
}

/// GC: removes this network's links on the host that belong to no valid attachment.
///
/// # Errors
/// The kernel's.
pub fn collect_links(call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
    let (network, host) = (call.conf.name(), Netlink::open()?);
    let prefix = AttachmentId::network_prefix(network);
    // Whole aliases are compared, so that a container ID too long for one is as good as any other.
    let valid: Vec<String> = valid.iter().map(|(id, ifname)| AttachmentId::new(network, id, ifname).alias()).collect();
    let is_garbage = |mark: &str| mark.starts_with(&prefix) && !valid.iter().any(|alias| alias == mark);
    let mut errors = Vec::new();
    let listed = host.list_links()?;
    for link in &listed {
        let Link { index, alias: Some(alias), .. } = link else { continue };
        let removed = match PortMark::parse(alias) {
            Some(port_mark) if is_garbage(&port_mark.mark) => give_back(&host, link),
            None if is_garbage(alias) => host.purge_link(*index).map(drop),
            _ => Ok(()),
        };
        errors.extend(removed.err().map(Error::from));
    }
    errors.extend(host.purge_unmarked(network, &listed, call.machine).err().map(Error::from));
    Error::join(errors)
}
