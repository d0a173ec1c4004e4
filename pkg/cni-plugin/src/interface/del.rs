//! DEL: removes everything of the attachment that it can find.
//!
//! DEL works after a partial ADD, without a namespace and with a changed configuration: it finds
//! the host's end by its name or alias and the rules by the attachment's name, and always asks the
//! configured IPAM plugin. Every step runs even if an earlier one failed; the errors are reported
//! together.
//!
//! The masquerade rules are removed first, and their socket is closed last. The kernel frees the
//! rules after an RCU grace period, and closing the socket waits for that. Deleting the link waits
//! for a grace period too, so in this order the two waits overlap.

use std::net::IpAddr;
use std::path::Path;

use cni::AttachmentId;
use cni::delegate::call_ipam;
use cni::result::AddResult;
use cni::skel::{Call, Verb};
use cni::{Cidr, Error, Result};
use cni_firewall::AttachmentFilter;
use cni_linux::{Link, Netlink, Netns};

use super::adopted::take_off;
use super::{HostEnd, Interface, PortMark, Release, give_back, masquerade, purge_addresses};
use crate::identity::expected_mac;

/// Removes the attachment's masquerade rules, its links, what the plugin itself created, and its
/// addresses in IPAM.
///
/// # Errors
/// All errors, joined. Every step runs, even after an error.
pub(super) fn del<I: Interface>(plugin: &I, call: &Call<'_>) -> Result<()> {
    let attachment = call.attachment();
    let prev = prev_result(call);
    let mut errors: Vec<Error> = Vec::new();
    // Dropped, and its socket closed, at the end of this function: see the head of this module.
    let masquerade = masquerade::open(call);
    if I::HOST_END != HostEnd::None {
        // Done even without `ipMasq`, which may have been set at the time of the ADD.
        let addresses: Vec<IpAddr> = prev.iter().flat_map(|prev| &prev.ips).map(|ip| ip.address.address()).collect();
        errors.extend(masquerade.purge(AttachmentFilter::for_del(&attachment, &addresses)).err().map(Error::from));
    }
    let order = Release::order::<I>(call);
    if order == Release::BeforeLink {
        errors.extend(call_ipam(call, Verb::Del).err());
    }
    let links = Links { plugin, call, attachment: &attachment, prev: prev.as_ref() };
    errors.extend(links.remove().err());
    let cleaned = plugin.clean(call, &attachment);
    // IPAM may give a released address to the next container at once, so the interface that had the
    // address must be gone.
    if order == Release::AfterLink {
        errors.extend(call_ipam(call, Verb::Del).err());
    }
    // Appended after the errors of the links and of IPAM: joined errors have the code of the first.
    errors.extend(cleaned.err());
    Error::join(errors)
}

/// Returns `prevResult`. Returns `None` if it is absent, or, with a note, if it cannot be parsed.
fn prev_result(call: &Call<'_>) -> Option<AddResult> {
    call.conf.prev_result().unwrap_or_else(|error| {
        call.notes.note(format_args!("prevResult is not used: {error}"));
        None
    })
}

/// Finds and removes the links of one attachment.
struct Links<'c, 'm, I> {
    plugin: &'c I,
    call: &'c Call<'m>,
    attachment: &'c AttachmentId,
    prev: Option<&'c AddResult>,
}

impl<I: Interface> Links<'_, '_, I> {
    /// Removes the attachment's interface in the container and its end on the host.
    ///
    /// # Errors
    /// CNI_NETNS exists but cannot be opened, or the kernel refuses a change. Even then, tries to
    /// remove the host's end.
    fn remove(&self) -> Result<()> {
        let host = Netlink::open()?;
        let netns = match self.call.netns.as_deref().map(Netns::open) {
            None => None,
            Some(Ok(netns)) => Some(netns),
            // The path does not exist or is not a namespace: the namespace has been deleted.
            Some(Err(error)) if error.is_no_netns() => None,
            // Addresses may remain in the namespace, which exists.
            Some(Err(error)) => {
                let host_end_removed = self.purge_host_end(&host, PortAction::TakeOff);
                return Err(Error::from(error).and(host_end_removed.err()));
            }
        };
        let Some(netns) = netns else { return self.purge_host_end(&host, PortAction::GiveBack) };
        let inside_removed = self.remove_inside(&host, &netns);
        let host_end_removed = match inside_removed {
            // The host's end has usually disappeared with CNI_IFNAME, but the end of an earlier ADD
            // whose DEL was lost has not.
            Ok(true) => self.purge_named_host_ends(&host).map(drop),
            // Both ends may have been renamed, so all aliases are searched.
            Ok(false) => self.purge_host_end(&host, PortAction::GiveBack),
            // Addresses may remain in the container.
            Err(_) => self.purge_host_end(&host, PortAction::TakeOff),
        };
        Error::join([inside_removed.err(), host_end_removed.err()].into_iter().flatten())
    }

    /// Removes the attachment's interfaces in the container's namespace. Returns whether CNI_IFNAME
    /// was one of them: the container can have renamed its interface, and have another one of this
    /// name.
    fn remove_inside(&self, host: &Netlink, netns: &Netns) -> Result<bool> {
        let container = host.open_in(netns)?;
        if self.plugin.remove_recorded(self.call, &container, netns)? {
            return Ok(true);
        }
        let unrenamed_removed = self.remove_unrenamed(&container);
        let Some(inner) = container.find_link(&self.call.ifname)? else {
            unrenamed_removed?;
            return Ok(false);
        };
        let inner_removed = self.remove_inner(host, &container, &inner);
        match (inner_removed, unrenamed_removed) {
            (Err(error), unrenamed_removed) => Err(error.and(unrenamed_removed.err())),
            (Ok(was_ours), unrenamed_removed) => unrenamed_removed.map(|()| was_ours),
        }
    }

    /// Removes an interface that still has its temporary name, because its ADD was killed before it
    /// renamed the interface to CNI_IFNAME. Only links without a host end get a temporary name.
    fn remove_unrenamed(&self, container: &Netlink) -> Result<()> {
        if I::HOST_END == HostEnd::None
            && let Some(link) = container.find_link(&self.attachment.host_name(0))?
            && link.kind.to_string() == I::KIND
        {
            container.purge_link(link.index)?;
        }
        Ok(())
    }

    /// Removes `inner`, which is CNI_IFNAME, if it belongs to this attachment, else leaves it, with
    /// a note. If its end on the host has a port mark, an earlier plugin created `inner`: gives it
    /// back if the mark is this attachment's, else leaves it silently. Returns whether it was this
    /// attachment's.
    fn remove_inner(&self, host: &Netlink, container: &Netlink, inner: &Link) -> Result<bool> {
        let outer = if I::HOST_END == HostEnd::None { None } else { host.find_other_end(inner)? };
        if let Some(outer) = &outer
            && let Some(port_mark) = PortMark::of(outer)
        {
            let is_ours = port_mark.belongs_to(self.attachment);
            if is_ours {
                let added_ips = self.prev.into_iter().flat_map(|prev| port_mark.added_ips(prev));
                let added: Vec<Cidr> = added_ips.map(|ip| ip.address).collect();
                // After an error, `remove` takes the port off the bridge but leaves the port mark,
                // so that the next DEL finds the addresses again.
                purge_addresses(container, inner.index, &added)?;
                give_back(host, outer)?;
            }
            return Ok(is_ours);
        }
        if self.is_own(host, inner, outer.as_ref())? {
            self.plugin.remove(self.call, container, inner)?;
            return Ok(true);
        }
        self.call.notes.note(format_args!(
            "{} in {} was not removed: it is not the interface that this attachment created",
            inner.name,
            self.call.netns.as_deref().unwrap_or(Path::new("the container")).display()
        ));
        Ok(false)
    }

    /// Whether `inner`, which is CNI_IFNAME, belongs to this attachment. `outer` is its end on the
    /// host.
    fn is_own(&self, host: &Netlink, inner: &Link, outer: Option<&Link>) -> Result<bool> {
        if let Some(is_claimed) = self.plugin.claims(self.call, self.prev, inner) {
            return Ok(is_claimed);
        }
        let end_with_alias = if I::HOST_END == HostEnd::None { Some(inner) } else { outer };
        let alias = end_with_alias.and_then(|link| link.alias.as_deref());
        let names_attachment = alias.is_some_and(|alias| AttachmentId::parse(alias).is_some());
        if names_attachment {
            return Ok(self.attachment.is_on(alias));
        }
        Ok(self.plugin.is_kind(inner) && self.is_ours_without_alias(host, inner, outer)?)
    }

    /// Whether `inner` belongs to this attachment. Called if no alias names an attachment, because
    /// a Go plugin created `inner` or the ADD was killed before it set the alias. `outer` is the
    /// end on the host.
    fn is_ours_without_alias(&self, host: &Netlink, inner: &Link, outer: Option<&Link>) -> Result<bool> {
        if let HostEnd::Veth { listed_after } = I::HOST_END
            && let Some(position) = outer.and_then(|outer| self.position_in_prev(outer))
        {
            // The first `listed_after` of the host's interfaces are not ends of this plugin's
            // pairs: an `outer` among them belongs to an earlier plugin of the list.
            return Ok(position >= listed_after);
        }
        match expected_mac(self.call, self.prev) {
            Some(expected) => Ok(inner.mac == Some(expected)),
            None => self.plugin.owns_unmarked(self.call, host, outer),
        }
    }

    /// Returns the position of `outer` among the host's interfaces in `prevResult`, or `None` if
    /// `outer` is not listed. Compares names, which no later plugin changes. The MAC of CNI_IFNAME
    /// would not identify the pair: `tuning` may have changed it in ADD and restored it in DEL.
    fn position_in_prev(&self, outer: &Link) -> Option<usize> {
        let mut on_host = self.prev?.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
        on_host.position(|interface| interface.name == outer.name)
    }

    /// Removes the attachment's veth ends on the host, found by the names that ADD derives from the
    /// attachment. There are several if an ADD was killed and another one followed. Returns whether
    /// at least one existed.
    fn purge_named_host_ends(&self, host: &Netlink) -> Result<bool> {
        let mut found = false;
        if I::HOST_END == HostEnd::None {
            return Ok(found);
        }
        while let Some(link) = host.find_host_end(self.attachment)? {
            host.purge_link(link.index)?;
            found = true;
        }
        Ok(found)
    }

    /// Removes the attachment's end on the host without looking into the container.
    ///
    /// First tries the names that ADD uses. If no link has one of them, searches the aliases of all
    /// links: the end may have been renamed, or may be a port that another plugin created under any
    /// name. `port_action` is what happens to a port that another plugin created.
    fn purge_host_end(&self, host: &Netlink, port_action: PortAction) -> Result<()> {
        if I::HOST_END == HostEnd::None {
            return Ok(());
        }
        let mut errors: Vec<Error> = Vec::new();
        match self.purge_named_host_ends(host) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            // The aliases are still searched.
            Err(error) => errors.push(error),
        }
        let links = host.list_links().unwrap_or_else(|error| {
            errors.push(error.into());
            Vec::new()
        });
        for link in links {
            let removed = if link.is_veth() && self.attachment.is_on(link.alias.as_deref()) {
                host.purge_link(link.index).map(drop)
            } else if PortMark::of(&link).is_some_and(|port_mark| port_mark.belongs_to(self.attachment)) {
                match port_action {
                    PortAction::GiveBack => give_back(host, &link),
                    PortAction::TakeOff => take_off(host, &link),
                }
            } else {
                Ok(())
            };
            errors.extend(removed.err().map(Error::from));
        }
        Error::join(errors)
    }
}

/// What DEL does with a port that another plugin created.
#[derive(Clone, Copy)]
enum PortAction {
    /// Takes the port off the bridge and restores its earlier alias.
    GiveBack,
    /// Takes the port off the bridge, so that addresses that may still be in the container are
    /// unreachable, but leaves the port mark, by which the next DEL finds these addresses.
    TakeOff,
}
