//! Implements DEL and GC: removes the rules of attachments from both backends, then the tracked
//! connections that were mapped to them. Rules are found by the attachment that they name.
//!
//! DEL also reads the container's addresses in prevResult and, only to delete tracked connections,
//! the configured mappings. Rules that cannot be removed because a program is missing are not an
//! error but a note.
//!
//! The connections to nf_tables and iptables are closed last: closing one that has removed rules
//! waits for an RCU grace period, part of which then passes during the other work.

use cni::AttachmentId;
use cni::config::ValidAttachments;
use cni::machine::OnSigterm;
use cni::skel::Call;
use cni::{Error, Result};
use cni_firewall::portmap::iptables::IptablesPortMap;
use cni_firewall::portmap::nft::NftPortMap;
use cni_firewall::portmap::{ClaimedPort, Removal};
use cni_linux::conntrack::{Conntrack, FlushScope};

use crate::conf::Conf;
use crate::forward;

/// Removes the attachment's rules, then the tracked connections that were mapped to it.
///
/// # Errors
/// Those of both backends, after everything that can be removed is removed.
pub(crate) fn del(call: &Call<'_>) -> Result<()> {
    let addresses = forward::known_addresses(&call.conf, &call.ifname).unwrap_or_else(|error| {
        call.notes.note(format_args!("portmap: prevResult is not used: {error}"));
        Vec::new()
    });
    let attachment = call.attachment();
    // `_open` is dropped at the end of the function; the head of this module says why.
    let Removed { mut claims, outcome, open: _open } = remove_from_both(
        call,
        |nft| nft.purge(&attachment, &addresses),
        |iptables| iptables.purge(&attachment, &addresses),
    );
    // The configured mappings are added because a flush or an earlier DEL may have removed the
    // rules but not the tracked connections.
    for mapping in Conf::valid_mappings(&call.conf) {
        claims.extend(addresses.iter().filter_map(|address| mapping.claim(*address)));
    }
    delete_connections(call, claims);
    outcome
}

/// Removes the rules of attachments of the network that are not valid, then the tracked connections
/// that were mapped to them.
///
/// # Errors
/// As [`del`].
pub(crate) fn gc(call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
    let network = call.conf.name();
    let valid: Vec<AttachmentId> = valid.iter().map(|(id, ifname)| AttachmentId::new(network, id, ifname)).collect();
    // As in `del`, `_open` is dropped at the end of the function.
    let Removed { claims, outcome, open: _open } = remove_from_both(
        call,
        |nft| nft.collect_garbage(network, &valid),
        |iptables| iptables.collect_garbage(network, &valid),
    );
    delete_connections(call, claims);
    outcome
}

/// The outcome of a removal from both backends.
struct Removed<'m> {
    /// The ports of the removed rules. They are returned even if another step has failed, because
    /// no later DEL can find them.
    claims: Vec<ClaimedPort>,
    outcome: Result<()>,
    open: OpenBackends<'m>,
}

/// The connections to nf_tables and iptables, which the caller closes last.
#[derive(Default)]
struct OpenBackends<'m> {
    nft: Option<NftPortMap>,
    iptables: Option<IptablesPortMap<'m>>,
}

/// Runs both removals, even if one of them fails, and prints their notes.
fn remove_from_both<'m>(
    call: &Call<'m>,
    remove_from_nft: impl FnOnce(&mut NftPortMap) -> Removal,
    remove_from_iptables: impl FnOnce(&mut IptablesPortMap<'m>) -> Removal,
) -> Removed<'m> {
    let mut open = OpenBackends::default();
    let from_nft = NftPortMap::open().map(|nft| remove_from_nft(open.nft.insert(nft)));
    let from_iptables = IptablesPortMap::open(call.machine, call.notes.clone(), OnSigterm::Finish)
        .map(|iptables| remove_from_iptables(open.iptables.insert(iptables)));
    let (mut claims, mut errors) = (Vec::new(), Vec::new());
    for removal in [from_nft, from_iptables] {
        let outcome = removal.and_then(|removal| {
            claims.extend(removal.claims);
            for note in removal.remarks {
                call.notes.note(format_args!("portmap: {note}"));
            }
            removal.outcome
        });
        errors.extend(outcome.err().map(Error::from));
    }
    Removed { claims, outcome: Error::join(errors), open }
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
