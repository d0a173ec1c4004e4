//! DEL: everything of the attachment that can be found, in whatever state it is.
//!
//! Nothing here needs an ADD to have worked, a namespace to exist or the configuration to be what
//! it was: the host's end is found by its mark, rules by the attachment's name, and IPAM is always
//! asked. Every step runs, whatever the ones before it met; the errors are reported together.
//!
//! The masquerade rules go first: the kernel frees them after an RCU grace period, for which the
//! closing of their sockets waits. The deletion of the link, which comes next, waits for one too,
//! and so they wait together.

use std::net::IpAddr;
use std::path::Path;

use cni::AttachmentId;
use cni::delegate::Delegate;
use cni::result::AddResult;
use cni::skel::Call;
use cni::{Cidr, Error, Result};
use cni_linux::{Link, Mac, Netlink, Netns};

use super::adopted::take_off;
use super::{HostEnd, Interface, Ownership, PortMark, Release, give_back, masquerade, purge_addresses};

pub(super) fn delete<I: Interface>(plugin: &I, call: &Call<'_>) -> Result<()> {
    let mark = call.attachment();
    let prev = prev_result(call);
    let mut errors: Vec<Error> = Vec::new();
    // Dropped last: closing a socket that has removed rules waits until the kernel has freed them,
    // and the link's removal waits for the same.
    let masquerade = masquerade::open(call);
    if I::HOST_END != HostEnd::None {
        // Done without `ipMasq` too: it may have been on at the time of the ADD.
        let addresses: Vec<IpAddr> = prev.iter().flat_map(|prev| &prev.ips).map(|ip| ip.address.address()).collect();
        errors.extend(masquerade.purge(&mark, &addresses).err().map(Error::from));
    }
    let order = Release::order::<I>(call);
    if order == Release::BeforeLink {
        errors.extend(release(call).err());
    }
    let links = Links { plugin, call, mark: &mark, prev: prev.as_ref() };
    errors.extend(links.remove().err());
    let cleaned = plugin.clean(call, &mark);
    // Released last: an address that is free again must not answer any more.
    if order == Release::AfterLink {
        errors.extend(release(call).err());
    }
    errors.extend(cleaned.err());
    Error::join(errors)
}

/// Has IPAM give the attachment's addresses back.
fn release(call: &Call<'_>) -> Result<()> {
    match call.conf.ipam_type() {
        "" => Ok(()),
        kind => Delegate::find(call, kind)?.del(),
    }
}

/// `prevResult`, if there is one that can be read.
fn prev_result(call: &Call<'_>) -> Option<AddResult> {
    call.conf.prev_result().unwrap_or_else(|error| {
        call.notes.note(format_args!("prevResult is not used: {error}"));
        None
    })
}

/// The links of the attachment that is to go.
struct Links<'c, 'm, I> {
    plugin: &'c I,
    call: &'c Call<'m>,
    mark: &'c AttachmentId,
    prev: Option<&'c AddResult>,
}

impl<I: Interface> Links<'_, '_, I> {
    fn remove(&self) -> Result<()> {
        let host = Netlink::open()?;
        let netns = match self.call.netns.as_deref().map(Netns::open) {
            None => None,
            Some(Ok(netns)) => Some(netns),
            // Gone, unmounted, or a path that never was one: nothing can be inside it.
            Some(Err(error)) if error.is_no_netns() => None,
            Some(Err(error)) => {
                let outside = self.by_mark(&host, DetachedPort::TakenOff);
                return Err(Error::from(error).and(outside.err()));
            }
        };
        let Some(netns) = netns else { return self.by_mark(&host, DetachedPort::GivenBack) };
        let inside = || -> Result<bool> {
            let container = host.open_in(&netns)?;
            let unnamed = self.remove_unnamed(&container);
            let Some(inner) = container.find_link(&self.call.ifname)? else { return unnamed.map(|()| false) };
            let inner = self.remove_inner(&host, &container, &inner);
            Error::join([inner.err(), unnamed.err()].into_iter().flatten()).map(|()| true)
        };
        let inside = inside();
        // Also removes the host's end of an earlier ADD whose DEL was lost. If CNI_IFNAME does not
        // exist either, both ends may have been renamed.
        let outside = match inside {
            Ok(true) => self.by_name(&host).map(drop),
            Ok(false) => self.by_mark(&host, DetachedPort::GivenBack),
            Err(_) => self.by_mark(&host, DetachedPort::TakenOff),
        };
        Error::join([inside.err(), outside.err()].into_iter().flatten())
    }

    /// Deletes an interface that did not get CNI_IFNAME any more, because its ADD was killed.
    fn remove_unnamed(&self, container: &Netlink) -> Result<()> {
        if I::HOST_END == HostEnd::None
            && let Some(link) = container.find_link(&self.mark.host_name(0))?
            && link.kind.to_string() == I::KIND
        {
            container.purge_link(link.index)?;
        }
        Ok(())
    }

    /// Deletes CNI_IFNAME if it is this attachment's as far as can be determined: by the mark of
    /// its end on the host, else by the MAC in `prevResult`. Another interface stays, with a note.
    fn remove_inner(&self, host: &Netlink, container: &Netlink, inner: &Link) -> Result<()> {
        let outer = match inner.peer_index {
            Some(index) if I::HOST_END != HostEnd::None => {
                host.find_link_by_index(index)?.filter(|outer| outer.peer_index == Some(inner.index))
            }
            _ => None,
        };
        if let (Some(outer), Some(port_mark)) = (&outer, outer.as_ref().and_then(PortMark::of)) {
            if port_mark.belongs_to(self.mark) {
                let (first, count) = port_mark.addresses;
                let ours = self.prev.into_iter().flat_map(|prev| prev.ips.iter().skip(first).take(count));
                let ours: Vec<Cidr> = ours.map(|ip| ip.address).collect();
                // Where one cannot be taken away the port is taken off the bridge by its mark, and
                // keeps that.
                purge_addresses(container, inner.index, &ours)?;
                give_back(host, outer)?;
            }
            return Ok(());
        }
        if let Some(claim) = self.plugin.claims(self.call, self.prev, inner) {
            return self.remove_or_leave(container, inner, claim);
        }
        let marked = if I::HOST_END == HostEnd::None { Some(inner) } else { outer.as_ref() };
        let alias = marked.and_then(|link| link.alias.as_deref());
        let ours = match alias.filter(|alias| AttachmentId::parse(alias).is_some()) {
            Some(_) => self.mark.is_on(alias),
            None => self.plugin.is_kind(inner) && self.owns_unmarked(host, inner, outer.as_ref())?,
        };
        self.remove_or_leave(container, inner, if ours { Ownership::Ours } else { Ownership::NotOurs })
    }

    fn remove_or_leave(&self, container: &Netlink, inner: &Link, claim: Ownership) -> Result<()> {
        if claim == Ownership::Ours {
            return self.plugin.remove(self.call, container, inner);
        }
        self.call.notes.note(format_args!(
            "{} in {} was left: it is not the interface that this attachment made",
            inner.name,
            self.call.netns.as_deref().unwrap_or(Path::new("the container")).display()
        ));
        Ok(())
    }

    /// Whether a link that a Go plugin made, or whose ADD was cut off before it was marked, is
    /// ours.
    fn owns_unmarked(&self, host: &Netlink, inner: &Link, outer: Option<&Link>) -> Result<bool> {
        if let HostEnd::Veth { listed_after } = I::HOST_END
            && let Some(place) = outer.and_then(|outer| self.place_in_prev(outer))
        {
            // An entry further ahead was created by an earlier plugin; a chained use of this plugin
            // has already given that interface back.
            return Ok(place >= listed_after);
        }
        match self.expected_mac() {
            Some(expected) => Ok(inner.mac == Some(expected)),
            None => self.plugin.owns_unmarked(self.call, host, outer),
        }
    }

    /// Where `prevResult` names the host's end among the interfaces of the host. It knows it by
    /// name, which no later plugin changes; the container end's MAC it may give as `tuning` set it,
    /// and has set it back since.
    fn place_in_prev(&self, outer: &Link) -> Option<usize> {
        let mut on_host = self.prev?.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
        on_host.position(|interface| interface.name == outer.name)
    }

    /// The interface's MAC by `prevResult`, if that is there and says one.
    fn expected_mac(&self) -> Option<Mac> {
        let prev = self.prev?;
        let place = prev.find_interface(&self.call.ifname, self.call.sandbox())?;
        prev.interfaces[place].mac.parse().ok()
    }

    /// The host's end by the names it may have; several, where an ADD was cut off and another one
    /// followed. Returns whether there was one.
    fn by_name(&self, host: &Netlink) -> Result<bool> {
        let mut found = false;
        if I::HOST_END == HostEnd::None {
            return Ok(found);
        }
        while let Some(link) = host.find_host_end(self.mark)? {
            host.purge_link(link.index)?;
            found = true;
        }
        Ok(found)
    }

    /// Removes the host's end by its names, without a namespace. If no link has such a name, the
    /// end may have been renamed, or a port that another plugin created may still be on the bridge.
    /// Either can have any name, so all links are searched.
    fn by_mark(&self, host: &Netlink, port: DetachedPort) -> Result<()> {
        if I::HOST_END == HostEnd::None {
            return Ok(());
        }
        let mut errors: Vec<Error> = Vec::new();
        match self.by_name(host) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => errors.push(error),
        }
        let links = host.list_links().unwrap_or_else(|error| {
            errors.push(error.into());
            Vec::new()
        });
        for link in links {
            let done = if link.is_veth() && self.mark.is_on(link.alias.as_deref()) {
                host.purge_link(link.index).map(drop)
            } else if PortMark::of(&link).is_some_and(|port_mark| port_mark.belongs_to(self.mark)) {
                match port {
                    DetachedPort::GivenBack => give_back(host, &link),
                    DetachedPort::TakenOff => take_off(host, &link),
                }
            } else {
                Ok(())
            };
            errors.extend(done.err().map(Error::from));
        }
        Error::join(errors)
    }
}

/// The state of a port of another plugin after DEL.
#[derive(Clone, Copy)]
enum DetachedPort {
    /// It is off the bridge and has its former alias again.
    GivenBack,
    /// It is off the bridge, so that addresses that may still be in the container are unreachable.
    /// It keeps its mark, by which the next DEL finds the addresses.
    TakenOff,
}
