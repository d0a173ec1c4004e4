//! DEL: everything of the attachment that can be found, in whatever state it is.
//!
//! Nothing here needs an ADD to have worked, a namespace to exist or the configuration to be what it was: the host's
//! end is found by its mark, spoof rules by the attachment's name, and IPAM is always asked. Every step runs, whatever
//! the ones before it met; the errors are told together.

use std::path::Path;

use cni::delegate::Delegate;
use cni::skel::Call;
use cni::{Error, Result};
use cni_linux::firewall::spoof::SpoofCheck;
use cni_linux::{Link, Mac, Mark, Netlink, Netns};

use crate::chained::{PortMark, give_back};
use crate::{attach, mark};

pub(crate) fn del(call: &Call<'_>) -> Result<()> {
    let mark = mark(call);
    let mut errors = Vec::new();
    errors.extend(remove_links(call, &mark).err());
    // Only now: an address that is free again must not answer any more.
    if !call.conf.ipam_type().is_empty() {
        let released = Delegate::find(call, call.conf.ipam_type()).and_then(|ipam| ipam.del());
        errors.extend(released.err());
    }
    // Also without `macspoofchk`: it may have been on at the time of the ADD.
    errors.extend(purge_spoof_rules(call).err());
    match Error::join(errors) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

fn purge_spoof_rules(call: &Call<'_>) -> Result<()> {
    match SpoofCheck::open() {
        Ok(mut spoof) => Ok(spoof.purge(&call.container_id, &call.ifname)?),
        Err(error) if error.is_unsupported() => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn remove_links(call: &Call<'_>, mark: &Mark) -> Result<()> {
    let host = Netlink::open()?;
    let netns = match call.netns.as_deref().map(Netns::open) {
        None => None,
        Some(Ok(netns)) => Some(netns),
        // Gone, unmounted, or a path that never was one: nothing can be inside it.
        Some(Err(error)) if error.is_no_netns() => None,
        Some(Err(error)) => {
            return Err(
                Error::join([error.into()].into_iter().chain(by_mark(&host, mark).err())).unwrap_or_else(no_error)
            );
        }
    };
    let Some(netns) = netns else { return by_mark(&host, mark) };
    let container = host.open_in(&netns)?;
    if let Some(inner) = container.find_link(&call.ifname)? {
        remove_inner(call, mark, &host, &container, &inner)?;
    }
    // The host's end of an earlier ADD whose DEL was lost.
    by_name(&host, mark).map(drop)
}

/// [`Error::join`] of at least one error is some error.
fn no_error() -> Error {
    Error::new(cni::Code::INTERNAL, "no error to report")
}

/// Deletes CNI_IFNAME if it is ours as far as can be told (D3 of the decisions).
fn remove_inner(call: &Call<'_>, mark: &Mark, host: &Netlink, container: &Netlink, inner: &Link) -> Result<()> {
    let outer = match inner.peer_index {
        Some(index) => host.find_link_by_index(index)?.filter(|outer| outer.peer_index == Some(inner.index)),
        None => None,
    };
    let alias = outer.as_ref().and_then(|outer| outer.alias.as_deref());
    if let (Some(outer), Some(port_mark)) = (&outer, alias.and_then(PortMark::parse)) {
        if port_mark.is(mark) {
            give_back(host, outer)?;
        }
        return Ok(());
    }
    let ours = match alias.filter(|alias| Mark::parse(alias).is_some()) {
        Some(_) => mark.is_on(alias),
        // Made by a Go plugin, or cut off before it was marked.
        None => inner.is_veth() && expected_mac(call).is_none_or(|expected| inner.mac == Some(expected)),
    };
    if ours {
        container.purge_link(inner.index)?;
    } else {
        call.notes.note(format_args!(
            "{} in {} was left: it is not the interface that this attachment made",
            inner.name,
            call.netns.as_deref().unwrap_or(Path::new("the container")).display()
        ));
    }
    Ok(())
}

/// The interface's MAC by `prevResult`, if that is there and says one.
fn expected_mac(call: &Call<'_>) -> Option<Mac> {
    let prev = match call.conf.prev_result() {
        Ok(prev) => prev?,
        Err(error) => {
            call.notes.note(format_args!("prevResult is not used: {error}"));
            return None;
        }
    };
    let inner = prev
        .interfaces
        .iter()
        .find(|interface| interface.name == call.ifname && interface.sandbox == attach::sandbox(call))?;
    inner.mac.parse().ok()
}

/// The host's end by the names it may have. Returns whether there was one.
fn by_name(host: &Netlink, mark: &Mark) -> Result<bool> {
    match host.find_host_end(mark)? {
        Some(link) => Ok(host.purge_link(link.index)?),
        None => Ok(false),
    }
}

/// Without a namespace: the host's end by its names. If there is none, a port that another plugin made may still be
/// on the bridge; it can have any name, so all links are looked at.
fn by_mark(host: &Netlink, mark: &Mark) -> Result<()> {
    if by_name(host, mark)? {
        return Ok(());
    }
    for link in host.list_links()? {
        if link.alias.as_deref().and_then(PortMark::parse).is_some_and(|port_mark| port_mark.is(mark)) {
            give_back(host, &link)?;
        }
    }
    Ok(())
}
