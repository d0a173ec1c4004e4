//! DEL: everything of the attachment that can be found, in whatever state it is.
//!
//! Nothing here needs an ADD to have worked, a namespace to exist or the configuration to be what it was: the host's
//! end is found by its mark, rules by the attachment's name, and IPAM is always asked. Every step runs, whatever the ones
//! before it met; the errors are told together.
//!
//! The masquerade rules go first: the kernel frees them after an RCU grace period, for which the closing of their sockets waits.
//! The deletion of the link, which comes next, waits for one too, and so they wait together.

use std::net::IpAddr;
use std::path::Path;

use cni::delegate::Delegate;
use cni::json::Json;
use cni::result::AddResult;
use cni::skel::Call;
use cni::{Cidr, Error, Result};
use cni_firewall::spoof::SpoofCheck;
use cni_linux::{Link, Mac, Mark, Netlink, Netns};

use crate::chained::{PortMark, give_back, purge_addresses, take_off};
use crate::conf::DEFAULT_BRIDGE;
use crate::{attach, mark, masquerade};

pub(crate) fn del(call: &Call<'_>) -> Result<()> {
    let mark = mark(call);
    let prev = prev_result(call);
    let mut errors: Vec<Error> = Vec::new();
    // Also without `ipMasq` and `macspoofchk`: they may have been on at the time of the ADD.
    let addresses: Vec<IpAddr> = prev.iter().flat_map(|prev| &prev.ips).map(|ip| ip.address.address()).collect();
    let masquerade = masquerade::open(call);
    errors.extend(masquerade.purge(&mark, &addresses).err().map(Error::from));
    errors.extend(remove_links(call, &mark, prev.as_ref()).err());
    // After the link, although its wait then comes on top: up to its end the container must not get frames past them.
    let spoof = SpoofCheck::open().and_then(|mut spoof| spoof.purge(&mark));
    // Only now: an address that is free again must not answer any more.
    if !call.conf.ipam_type().is_empty() {
        let released = Delegate::find(call, call.conf.ipam_type()).and_then(|ipam| ipam.del());
        errors.extend(released.err());
    }
    match spoof {
        Ok(Some(owner)) => call.notes.note(format_args!("spoof rules were left: they are those of {owner}")),
        Ok(None) => {}
        Err(error) if error.is_unsupported() => {}
        Err(error) => errors.push(error.into()),
    }
    match Error::join(errors) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// `prevResult`, if there is one that can be read.
fn prev_result(call: &Call<'_>) -> Option<AddResult> {
    call.conf.prev_result().unwrap_or_else(|error| {
        call.notes.note(format_args!("prevResult is not used: {error}"));
        None
    })
}

fn remove_links(call: &Call<'_>, mark: &Mark, prev: Option<&AddResult>) -> Result<()> {
    let host = Netlink::open()?;
    let netns = match call.netns.as_deref().map(Netns::open) {
        None => None,
        Some(Ok(netns)) => Some(netns),
        // Gone, unmounted, or a path that never was one: nothing can be inside it.
        Some(Err(error)) if error.is_no_netns() => None,
        Some(Err(error)) => {
            let outside = by_mark(&host, mark, Port::TakenOff);
            return Err(Error::join([error.into()].into_iter().chain(outside.err())).unwrap_or_else(no_error));
        }
    };
    let Some(netns) = netns else { return by_mark(&host, mark, Port::GivenBack) };
    let inside = || -> Result<bool> {
        let container = host.open_in(&netns)?;
        let Some(inner) = container.find_link(&call.ifname)? else { return Ok(false) };
        remove_inner(call, mark, &host, &container, &inner, prev).map(|()| true)
    };
    let inside = inside();
    // And the host's end of an earlier ADD whose DEL was lost. Where there is no CNI_IFNAME either, somebody may have
    // renamed both ends.
    let outside = match inside {
        Ok(true) => by_name(&host, mark).map(drop),
        Ok(false) => by_mark(&host, mark, Port::GivenBack),
        Err(_) => by_mark(&host, mark, Port::TakenOff),
    };
    match Error::join([inside.err(), outside.err()].into_iter().flatten()) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// [`Error::join`] of at least one error is some error.
fn no_error() -> Error {
    Error::new(cni::Code::INTERNAL, "no error to report")
}

/// Deletes CNI_IFNAME if it is ours as far as can be told (D3 of the decisions).
fn remove_inner(
    call: &Call<'_>,
    mark: &Mark,
    host: &Netlink,
    container: &Netlink,
    inner: &Link,
    prev: Option<&AddResult>,
) -> Result<()> {
    let outer = match inner.peer_index {
        Some(index) => host.find_link_by_index(index)?.filter(|outer| outer.peer_index == Some(inner.index)),
        None => None,
    };
    let alias = outer.as_ref().and_then(|outer| outer.alias.as_deref());
    if let (Some(outer), Some(port_mark)) = (&outer, alias.and_then(PortMark::parse)) {
        if port_mark.is(mark) {
            let (first, count) = port_mark.addresses;
            let ours = prev.into_iter().flat_map(|prev| prev.ips.iter().skip(first).take(count));
            let ours: Vec<Cidr> = ours.map(|ip| ip.address).collect();
            // Where one cannot be taken away the port is taken off the bridge by its mark, and keeps that.
            purge_addresses(container, inner.index, &ours)?;
            give_back(host, outer)?;
        }
        return Ok(());
    }
    let port = outer.clone();
    let ours = match alias.filter(|alias| Mark::parse(alias).is_some()) {
        Some(_) => mark.is_on(alias),
        // Made by a Go plugin, or cut off before it was marked.
        None => {
            inner.is_veth()
                && match port.as_ref().and_then(|outer| place_in(prev, outer)) {
                    // A bridge plugin, ours or Go's, lists the bridge before the port. What stands first was made by an
                    // earlier plugin, and a chained use of ours has given it back already.
                    Some(place) => place > 0,
                    None => match expected_mac(call, prev) {
                        Some(expected) => inner.mac == Some(expected),
                        // Nothing says what it should look like: an ADD that failed because somebody else's interface
                        // has this name is followed by a DEL too. What Go made is a port of the bridge.
                        None => is_port_of(host, call, port.as_ref())?,
                    },
                }
        }
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

/// Whether the host's end is a port of the configuration's bridge, as far as the configuration can be read.
fn is_port_of(host: &Netlink, call: &Call<'_>, outer: Option<&Link>) -> Result<bool> {
    let Some(master) = outer.and_then(|outer| outer.master) else { return Ok(false) };
    let named = call.conf.json().get("bridge").and_then(Json::as_str).filter(|name| !name.is_empty());
    let bridge = host.find_link(named.unwrap_or(DEFAULT_BRIDGE))?;
    Ok(bridge.is_some_and(|bridge| bridge.index == master))
}

/// Where `prevResult` names the host's end among the interfaces of the host. It knows it by name, which no later plugin
/// changes; the container end's MAC it may give as `tuning` set it, and has set it back since.
fn place_in(prev: Option<&AddResult>, outer: &Link) -> Option<usize> {
    let mut on_host = prev?.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
    on_host.position(|interface| interface.name == outer.name)
}

/// The interface's MAC by `prevResult`, if that is there and says one.
fn expected_mac(call: &Call<'_>, prev: Option<&AddResult>) -> Option<Mac> {
    let inner = prev?
        .interfaces
        .iter()
        .find(|interface| interface.name == call.ifname && interface.sandbox == attach::sandbox(call))?;
    inner.mac.parse().ok()
}

/// What becomes of a port that another plugin made.
#[derive(Clone, Copy)]
enum Port {
    /// It is off the bridge and has its own alias: nothing of ours is left on it.
    GivenBack,
    /// It is off the bridge, so that our addresses, which may still be in the container, answer nobody. By the mark that it
    /// keeps the next DEL finds them.
    TakenOff,
}

/// The host's end by the names it may have; several, where an ADD was cut off and another one followed. Returns whether
/// there was one.
fn by_name(host: &Netlink, mark: &Mark) -> Result<bool> {
    let mut found = false;
    while let Some(link) = host.find_host_end(mark)? {
        host.purge_link(link.index)?;
        found = true;
    }
    Ok(found)
}

/// Without a namespace: the host's end by its names. If there is none, somebody may have renamed it, or a port that
/// another plugin made may still be on the bridge; either can have any name, so all links are looked at.
fn by_mark(host: &Netlink, mark: &Mark, port: Port) -> Result<()> {
    let mut errors: Vec<Error> = Vec::new();
    match by_name(host, mark) {
        Ok(true) => return Ok(()),
        Ok(false) => {}
        Err(error) => errors.push(error),
    }
    let links = host.list_links().unwrap_or_else(|error| {
        errors.push(error.into());
        Vec::new()
    });
    for link in links {
        let done = if link.is_veth() && mark.is_on(link.alias.as_deref()) {
            host.purge_link(link.index).map(drop)
        } else if link.alias.as_deref().and_then(PortMark::parse).is_some_and(|port_mark| port_mark.is(mark)) {
            match port {
                Port::GivenBack => give_back(host, &link),
                Port::TakenOff => take_off(host, &link),
            }
        } else {
            Ok(())
        };
        errors.extend(done.err().map(Error::from));
    }
    match Error::join(errors) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}
