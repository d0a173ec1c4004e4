//! Implements DEL and GC: removes everything of an attachment, in both backends, by the
//! attachment's key.
//!
//! Of the configuration only the mappings are used, and only to delete tracked connections. Rules
//! that cannot be removed because a program is missing are reported on stderr and are not an error.
//!
//! The backends are closed last: closing a socket waits for an RCU grace period, until the kernel
//! has freed the removed rules. The other work is done during that time.

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

pub(crate) fn del(call: &Call<'_>) -> Result<()> {
    let addresses = forward::known_addresses(&call.conf, &call.ifname).unwrap_or_else(|error| {
        call.notes.note(format_args!("portmap: prevResult is not used: {error}"));
        Vec::new()
    });
    let mark = call.attachment();
    let Removed { claims: had, outcome, open: _open } =
        both(call, |nft| nft.purge(&mark, &addresses), |iptables| iptables.purge(&mark, &addresses));
    // Rules may be gone already, by a flush or an earlier DEL, and connections still be there.
    let mappings = Conf::sound_mappings(&call.conf);
    let asked = mappings.iter().flat_map(|mapping| addresses.iter().filter_map(|address| mapping.claim(*address)));
    let mut claims: Vec<ClaimedPort> = asked.collect();
    claims.extend(had);
    forget(call, claims);
    outcome
}

pub(crate) fn gc(call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
    let network = call.conf.name();
    let valid: Vec<AttachmentId> = valid.iter().map(|(id, ifname)| AttachmentId::new(network, id, ifname)).collect();
    let Removed { claims, outcome, open: _open } =
        both(call, |nft| nft.collect_garbage(network, &valid), |iptables| iptables.collect_garbage(network, &valid));
    forget(call, claims);
    outcome
}

/// The outcome of a removal from both backends.
struct Removed<'m> {
    /// The claims of the removed rules. No later DEL finds them, so they count even if another step
    /// has failed.
    claims: Vec<ClaimedPort>,
    outcome: Result<()>,
    open: Open<'m>,
}

/// The connections that are still open, to be closed last.
type Open<'m> = (Option<NftPortMap>, Option<IptablesPortMap<'m>>);

/// Does the same in both backends and keeps going.
fn both<'m>(
    call: &Call<'m>,
    nft: impl FnOnce(&mut NftPortMap) -> Removal,
    iptables: impl FnOnce(&mut IptablesPortMap<'m>) -> Removal,
) -> Removed<'m> {
    let mut open: Open<'m> = (None, None);
    let nft = match NftPortMap::open() {
        Ok(backend) => Ok(nft(open.0.insert(backend))),
        // Without nf_tables there is nothing of it.
        Err(error) if error.is_unsupported() => {
            Ok(Removal { claims: Vec::new(), remarks: Vec::new(), outcome: Ok(()) })
        }
        Err(error) => Err(error),
    };
    let iptables = IptablesPortMap::open(call.machine, call.notes.clone(), OnSigterm::Finish)
        .map(|backend| iptables(open.1.insert(backend)));
    let (mut claims, mut errors) = (Vec::new(), Vec::new());
    for removal in [nft, iptables] {
        let outcome = removal.and_then(|removal| {
            claims.extend(removal.claims);
            for remark in removal.remarks {
                call.notes.note(format_args!("portmap: {remark}"));
            }
            removal.outcome
        });
        errors.extend(outcome.err().map(Error::from));
    }
    Removed { claims, outcome: Error::join(errors), open }
}

/// Connections that were mapped to the container would stay mapped to it.
fn forget(call: &Call<'_>, mut claims: Vec<ClaimedPort>) {
    claims.sort();
    claims.dedup();
    if claims.is_empty() {
        return;
    }
    if let Err(error) = Conntrack::open().and_then(|mut table| table.forget(&claims, FlushScope::Own)) {
        call.notes.note(format_args!("portmap: {error}"));
    }
}
