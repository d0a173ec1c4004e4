//! Finds out whether the interface CNI_IFNAME of CNI_NETNS belongs to the attachment of the call,
//! for the DEL of a plugin that did not create the interface.
//!
//! CNI_NETNS may lead to another container: the PID in a path like `/proc/PID/ns/net` may have been
//! reused.

use cni::AttachmentId;
use cni::Result;
use cni::result::AddResult;
use cni::skel::Call;
use cni_linux::{Link, Mac, Netlink, Netns};

use crate::interface::PortMark;

/// What is known about the attachment that an interface belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
    /// The interface belongs to the attachment of the call.
    Own,
    /// The interface belongs to another attachment.
    Other,
    /// Neither the MAC nor a mark identifies the attachment.
    Unknown,
}

/// Identifies `link`, which is CNI_IFNAME in CNI_NETNS: first by the MAC in `prev`, then by the
/// mark, which a veth has at its end on the host.
///
/// # Errors
/// The kernel cannot look up the end on the host.
pub fn identify(call: &Call<'_>, prev: Option<&AddResult>, link: &Link) -> Result<Identity> {
    let expected = expected_mac(call, prev);
    if expected.is_some() && expected == link.mac {
        return Ok(Identity::Own);
    }
    let host_end = if link.is_veth() { Netlink::open()?.find_other_end(link)? } else { None };
    let alias = host_end.as_ref().unwrap_or(link).alias.as_deref();
    if alias.and_then(AttachmentId::parse).is_none() {
        return Ok(Identity::Unknown);
    }
    Ok(if call.attachment().is_on(alias) { Identity::Own } else { Identity::Other })
}

/// Returns the host's end of `inner`, a veth in `netns`, the container's namespace; `None` if the
/// host has no such end.
///
/// Both ends must name each other. A process in the container chooses the indexes of its links, so
/// an end without the attachment's mark must also have its other end in `netns`.
///
/// # Errors
/// Those of the kernel.
pub fn find_host_end(host: &Netlink, attachment: &AttachmentId, netns: &Netns, inner: &Link) -> Result<Option<Link>> {
    let Some(outer) = host.find_other_end(inner)? else { return Ok(None) };
    let has_mark = attachment.is_on(outer.alias.as_deref())
        || PortMark::of(&outer).is_some_and(|mark| mark.belongs_to(attachment));
    Ok(if has_mark || host.is_end_in(&outer, netns)? { Some(outer) } else { None })
}

/// Returns the MAC that `prev` has for CNI_IFNAME, or `None` if there is no valid one.
pub fn expected_mac(call: &Call<'_>, prev: Option<&AddResult>) -> Option<Mac> {
    let prev = prev?;
    let position = prev.find_interface(&call.ifname, call.sandbox())?;
    prev.interfaces[position].mac.parse().ok()
}
