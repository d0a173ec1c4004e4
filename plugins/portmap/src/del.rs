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

use std::collections::BTreeSet;

use cni::skel::Call;
use cni::{Cidr, Error, Result};
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
    let prev = call.conf.prev_result().unwrap_or_else(|error| {
        call.notes.note(format_args!("portmap: prevResult is not used: {error}"));
        None
    });
    let containers = prev.map_or_else(Vec::new, |prev| add::container_addresses(&call.ifname, &prev));
    let addresses: Vec<_> = containers.iter().map(Cidr::address).collect();
    // A flush or an earlier DEL may have removed the rules but not the tracked connections.
    let mut configured_ports = BTreeSet::new();
    for mapping in Conf::valid_mappings(&call.conf) {
        configured_ports.extend(addresses.iter().filter_map(|address| mapping.claim(*address)));
    }
    let attachment = call.attachment();
    let filter = AttachmentFilter::One { attachment: &attachment, untagged: Untagged::ByFamily(&addresses) };
    purge(call, configured_ports, filter)
}

/// Removes the rules of the selected attachments from both backends, even if one of them fails, and
/// prints notes. Then deletes the tracked connections to the ports of the removed rules and to
/// `claims`, because the kernel would continue to map them. A failure to do so is only a note.
///
/// # Errors
/// Those of both removals, joined. The connections are deleted even after an error, because no
/// later DEL can find the ports of the removed rules.
pub(crate) fn purge(call: &Call<'_>, mut claims: BTreeSet<ClaimedPort>, filter: AttachmentFilter<'_>) -> Result<()> {
    // Dropped at the end of the function; the head of this module says why.
    let portmap = PortMap::new(call.machine, call.notes.clone());
    let result = portmap.purge(filter, &mut claims);
    if !claims.is_empty() {
        let claims: Vec<ClaimedPort> = claims.into_iter().collect();
        if let Err(error) = Conntrack::open().and_then(|mut table| table.flush(&claims, FlushScope::Own)) {
            call.notes.note(format_args!("portmap: {error}"));
        }
    }
    result.map_err(Error::from)
}
