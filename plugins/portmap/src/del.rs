//! Implements DEL: removes the attachment's rules from both backends, then the tracked connections
//! that were mapped to them. Rules are found by the attachment that they name. GC shares the
//! removal.
//!
//! DEL also reads the container's addresses in prevResult and, only to delete tracked connections,
//! the configured mappings. Rules that cannot be removed because a program is missing are not an
//! error but a note.
//!
//! The connections to nf_tables and iptables are closed last: closing one that has removed rules
//! waits for an RCU grace period, part of which then passes during the other work.

use cni::Result;
use cni::skel::Call;
use cni_firewall::AttachmentFilter;
use cni_firewall::owner::Untagged;
use cni_firewall::portmap::{ClaimedPort, PortMap};
use cni_linux::conntrack::{Conntrack, FlushScope};

use crate::add;
use crate::conf::Conf;

/// Removes the attachment's rules, then the tracked connections that were mapped to it.
///
/// # Errors
/// Those of both backends, after everything that can be removed is removed.
pub(crate) fn del(call: &Call<'_>) -> Result<()> {
    let addresses = add::known_addresses(&call.conf, &call.ifname).unwrap_or_else(|error| {
        call.notes.note(format_args!("portmap: prevResult is not used: {error}"));
        Vec::new()
    });
    let attachment = call.attachment();
    // A flush or an earlier DEL may have removed the rules but not the tracked connections.
    let mut configured_ports = Vec::new();
    for mapping in Conf::valid_mappings(&call.conf) {
        configured_ports.extend(addresses.iter().filter_map(|address| mapping.claim(*address)));
    }
    purge(
        call,
        configured_ports,
        AttachmentFilter::One { attachment: &attachment, untagged: Untagged::ByFamily(&addresses) },
    )
}

/// Removes the rules of the selected attachments from both backends, even if one of them fails, and
/// prints notes. Then deletes the tracked connections to the ports of the removed rules and to
/// `claims`.
///
/// # Errors
/// Those of both removals, joined. The connections are deleted even after an error, because no
/// later DEL can find the ports of the removed rules.
pub(crate) fn purge(call: &Call<'_>, mut claims: Vec<ClaimedPort>, filter: AttachmentFilter<'_>) -> Result<()> {
    // Dropped at the end of the function; the head of this module says why.
    let portmap = PortMap::new(call.machine, call.notes.clone());
    let removal = portmap.purge(filter);
    claims.extend(removal.claims);
    delete_connections(call, claims);
    removal.outcome.map_err(cni::Error::from)
}

/// Deletes the tracked connections to these mapped ports, because the kernel would continue to map
/// them. A failure is only a note.
fn delete_connections(call: &Call<'_>, mut claims: Vec<ClaimedPort>) {
    claims.sort();
    claims.dedup();
    if claims.is_empty() {
        return;
    }
    if let Err(error) = Conntrack::open().and_then(|mut table| table.flush(&claims, FlushScope::Own)) {
        call.notes.note(format_args!("portmap: {error}"));
    }
}
