//! DEL and GC: everything of an attachment, in both backends, by its key.
//!
//! Nothing is asked of the configuration but the mappings, and those only to forget connections. What cannot be
//! removed because a program is missing is said on stderr and is no error.
//!
//! The backends are closed last of all: the closing of a socket waits until the kernel has freed what was removed, an RCU
//! grace period later, and what else there is to do is done meanwhile.

use std::net::IpAddr;

use cni::config::ValidAttachments;
use cni::machine::OnSigterm;
use cni::skel::Call;
use cni::{Error, Result};
use cni_linux::Mark;
use cni_linux::conntrack::{Conntrack, Forget};
use cni_linux::firewall::portmap::Claim;
use cni_linux::firewall::portmap::iptables::IptablesPortMap;
use cni_linux::firewall::portmap::nft::NftPortMap;

use crate::conf::Conf;
use crate::{forward, mark};

pub(crate) fn del(call: &Call<'_>) -> Result<()> {
    let addresses = forward::known_addresses(&call.conf, &call.ifname).unwrap_or_else(|error| {
        call.notes.note(format_args!("portmap: prevResult is not used: {error}"));
        Vec::new()
    });
    let (purged, _open) = purge(call, &addresses);
    // Rules may be gone already, by a flush or an earlier DEL, and connections still be there.
    let mappings = Conf::sound_mappings(&call.conf);
    let asked = mappings.iter().flat_map(|mapping| addresses.iter().filter_map(|address| mapping.claim(*address)));
    let mut claims: Vec<Claim> = asked.collect();
    claims.extend(purged.iter().flatten());
    forget(call, claims);
    purged.map(drop)
}

/// Removes the attachment's rules and returns what they claimed.
fn purge<'m>(call: &Call<'m>, addresses: &[IpAddr]) -> (Result<Vec<Claim>>, Open<'m>) {
    let mark = mark(call);
    both(call, |nft| nft.purge(&mark, addresses), |iptables| iptables.purge(&mark, addresses))
}

pub(crate) fn gc(call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
    let network = call.conf.name();
    let valid: Vec<Mark> = valid.iter().map(|(id, ifname)| Mark::new(network, id, ifname)).collect();
    let (removed, _open) =
        both(call, |nft| nft.collect_garbage(network, &valid), |iptables| iptables.collect_garbage(network, &valid));
    forget(call, removed.iter().flatten().copied().collect());
    removed.map(drop)
}

/// What is still open, to be closed last.
type Open<'m> = (Option<NftPortMap>, Option<IptablesPortMap<'m>>);

/// Does the same in both backends and keeps going.
fn both<'m>(
    call: &Call<'m>,
    nft: impl FnOnce(&mut NftPortMap) -> cni_linux::Result<Vec<Claim>>,
    iptables: impl FnOnce(&mut IptablesPortMap<'m>) -> cni_linux::Result<(Vec<Claim>, Vec<String>)>,
) -> (Result<Vec<Claim>>, Open<'m>) {
    let (mut claims, mut errors, mut open) = (Vec::new(), Vec::new(), (None, None));
    match NftPortMap::open().and_then(|backend| nft(open.0.insert(backend))) {
        Ok(found) => claims.extend(found),
        // Without nf_tables there is nothing of it.
        Err(error) if error.is_unsupported() => {}
        Err(error) => errors.push(Error::from(error)),
    }
    match IptablesPortMap::open(call.machine.0, call.notes.clone(), OnSigterm::Finish)
        .and_then(|backend| iptables(open.1.insert(backend)))
    {
        Ok((found, remarks)) => {
            claims.extend(found);
            for remark in remarks {
                call.notes.note(format_args!("portmap: {remark}"));
            }
        }
        Err(error) => errors.push(Error::from(error)),
    }
    (Error::join(errors).map_or(Ok(claims), Err), open)
}

/// Connections that were mapped to the container would stay mapped to it.
fn forget(call: &Call<'_>, mut claims: Vec<Claim>) {
    claims.sort();
    claims.dedup();
    if claims.is_empty() {
        return;
    }
    if let Err(error) = Conntrack::open().and_then(|mut table| table.forget(&claims, Forget::Own)) {
        call.notes.note(format_args!("portmap: {error}"));
    }
}
