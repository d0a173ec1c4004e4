//! Interfaces of the host that a container gets until DEL: how they are recorded, recognised in the
//! container, and returned.
//!
//! A process in the container that has CAP_NET_ADMIN can write the interface's name, alias and
//! hardware address, and can put another interface in its place. So an interface is recognised by
//! properties that such a process cannot write.

use cni::rollback::Notes;
use cni::{Code, Error, Result};
use cni_linux::{Link, Netlink, Netns};
use serde::{Deserialize, Serialize};

/// An interface as it was before a container got it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BorrowedLink {
    /// The name.
    pub name: String,
    /// The index. On a move the kernel keeps it if it is free in the other namespace.
    pub index: u32,
    /// The kind of link, as [`LinkKind`](cni_linux::LinkKind) writes it.
    kind: String,
    /// The hardware address that the device was built with.
    permanent_mac: Option<String>,
    /// The device below the interface, by its bus.
    parent: Option<String>,
    /// A veth's other end, or the interface below.
    peer: Option<Peer>,
    /// Whether it was up.
    up: bool,
    /// The hardware address.
    mac: Option<String>,
    /// The MTU in bytes.
    mtu: u32,
    /// The alias; empty if there was none.
    pub alias: String,
    /// The alternative names; `None` in a record of a release that did not read them.
    #[serde(default)]
    altnames: Option<Vec<String>>,
}

/// The other end of a veth, or the interface below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Peer {
    /// Its index in its own namespace.
    index: u32,
    /// Whether it was in the namespace of the interface.
    is_beside: bool,
}

/// How far the return of an interface to the host has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Return {
    /// It is on the host, under its name and with this index.
    Complete(u32),
    /// It does not exist any more.
    Gone,
    /// It is still in a container, or cannot be renamed. A later call may succeed.
    Pending,
}

impl BorrowedLink {
    /// Returns what is recorded of an interface.
    pub fn new(link: &Link) -> BorrowedLink {
        BorrowedLink {
            name: link.name.clone(),
            index: link.index,
            kind: link.kind.to_string(),
            permanent_mac: link.permanent_mac.map(|mac| mac.to_string()),
            parent: link.parent.clone(),
            peer: link.peer_index.map(|index| Peer { index, is_beside: link.peer_netnsid.is_none() }),
            up: link.up,
            mac: link.mac.map(|mac| mac.to_string()),
            mtu: link.mtu,
            alias: link.alias.clone().unwrap_or_default(),
            altnames: Some(link.altnames.clone()),
        }
    }

    /// Whether only one link can have the recorded properties: that of a hardware device, or a veth
    /// whose other end is on the host. A pod can create others of all other kinds.
    fn is_proof(&self) -> bool {
        self.is_hardware() || self.veth_peer().is_some()
    }

    /// Whether the interface is that of a hardware device, which the kernel moves to the host when
    /// the container's namespace ends.
    fn is_hardware(&self) -> bool {
        self.permanent_mac.is_some() || self.parent.is_some()
    }

    /// Returns the index of the other end on the host, if the interface is a veth with such an end.
    fn veth_peer(&self) -> Option<u32> {
        self.peer_on_host().filter(|_| self.kind == "veth")
    }

    /// Returns the index of the other end, or of the interface below, if it is on the host.
    fn peer_on_host(&self) -> Option<u32> {
        self.peer.filter(|peer| peer.is_beside).map(|peer| peer.index)
    }

    /// Whether `link` has the recorded properties. `host_id` is the ID that the host's namespace
    /// has in the namespace of `link`, or `None` if `link` is in the namespace that it was recorded
    /// in.
    pub fn fits(&self, link: &Link, host_id: Option<i32>) -> bool {
        let peer_fits = match self.peer {
            None => link.peer_index.is_none(),
            Some(peer) => link.peer_index == Some(peer.index) && (!peer.is_beside || link.peer_netnsid == host_id),
        };
        peer_fits
            && link.kind.to_string() == self.kind
            && link.permanent_mac.map(|mac| mac.to_string()) == self.permanent_mac
            && link.parent == self.parent
    }

    /// Returns the interface in the container, which it was moved to from the host under the name
    /// `inner_name`, or `None` if it is on the host. If several fit, prefers that name, then the
    /// recorded index.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn find_in(&self, container: &Netlink, inner_name: &str) -> Result<Option<Link>> {
        // If ADD failed before the move, another interface of the container can have the index.
        if !self.is_proof()
            && Netlink::open()?.find_link_by_index(self.index)?.is_some_and(|link| self.fits(&link, None))
        {
            return Ok(None);
        }
        let mut fitting = container.list_links()?;
        // Asked after the interfaces, because the answer about a veth assigns the ID.
        let host_id = match self.peer_on_host() {
            Some(_) => container.find_netns_id(&Netns::current()?)?,
            None => None,
        };
        // Without an ID, no interface of the container has its other end on the host.
        if self.peer_on_host().is_some() && host_id.is_none() {
            return Ok(None);
        }
        let has_name = |link: &Link| link.name == inner_name;
        let has_index = |link: &Link| link.index == self.index;
        fitting.retain(|link| self.fits(link, host_id));
        fitting.retain(|link| self.is_proof() || has_name(link) || has_index(link));
        Ok(fitting.into_iter().max_by_key(|link| (has_name(link), has_index(link))))
    }

    /// Moves the interface, which is `link` in the container, to the host, where it gets the
    /// recorded name and this alias.
    ///
    /// # Errors
    /// - Code 102 if another interface of the host has the name.
    /// - Those of the kernel.
    pub fn move_to_host(&self, container: &Netlink, link: &Link, alias: &str) -> Result<()> {
        ensure_free(&self.name)?;
        self.remove_new_altnames(container, link)?;
        Ok(container.move_link(link.index, &Netns::current()?, &self.name, alias)?)
    }

    /// Removes the alternative names of the interface, now `link`, that it had not on the host. The
    /// kernel would refuse the move if the host has a link of such a name, and programs of the
    /// host could take the interface for another one.
    fn remove_new_altnames(&self, netlink: &Netlink, link: &Link) -> Result<()> {
        let Some(before) = &self.altnames else { return Ok(()) };
        for altname in link.altnames.iter().filter(|altname| !before.contains(altname)) {
            match netlink.remove_altname(link.index, altname) {
                // Another program, such as udev, has removed it meanwhile.
                Err(error) if error.is_not_found() => {}
                removed => removed?,
            }
        }
        Ok(())
    }

    /// Restores the hardware address, the MTU and the state of the interface, which has this index
    /// now.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn restore(&self, netlink: &Netlink, index: u32) -> Result<()> {
        let Some(link) = netlink.find_link_by_index(index)? else { return Ok(()) };
        if let Some(mac) = self.mac.as_deref().and_then(|mac| mac.parse().ok())
            && link.mac != Some(mac)
        {
            netlink.set_mac(index, mac)?;
        }
        if link.mtu != self.mtu {
            netlink.set_mtu(index, self.mtu)?;
        }
        match (link.up, self.up) {
            (false, true) => Ok(netlink.set_up(index)?),
            (true, false) => Ok(netlink.set_down(index)?),
            _ => Ok(()),
        }
    }

    /// Whether the interface is among `links`, those of the host, under another name: the kernel
    /// has moved it there, and no DEL has completed the return.
    pub fn has_fallen_back(&self, links: &[Link]) -> bool {
        let is_certain =
            |link: &Link| self.permanent_mac.is_some() || link.alias.as_deref() == Some(self.name.as_str());
        links.iter().any(|link| self.fits(link, None) && is_certain(link) && link.name != self.name)
    }

    /// DEL and GC: completes the return to the host. The kernel moves a hardware interface there,
    /// under its name in the container, when the container's namespace ends.
    ///
    /// # Errors
    /// The errors of the kernel.
    pub fn complete_return(&self, host: &Netlink, notes: &Notes) -> Result<Return> {
        // host-device writes the name into the alias, as Go's plugin does.
        let has_alias = |link: &Link| link.alias.as_deref() == Some(&*self.name);
        let is_recorded = |link: &Link| self.fits(link, None) && (self.is_proof() || has_alias(link));
        // Usually the interface is already on the host again, and the list of all links is not
        // needed.
        if let Some(named) = host.find_link(&self.name)?
            // The pod can have given the name to the device as an alternative name.
            && named.name == self.name
            && self.fits(&named, None)
        {
            self.remove_new_altnames(host, &named)?;
            // It is that of ADD, or one that the pod has set.
            if named.alias.as_deref().is_some_and(|alias| alias != self.alias) {
                host.set_alias(named.index, "")?;
            }
            return Ok(Return::Complete(named.index));
        }
        let mut fitting = host.list_links()?;
        fitting.retain(is_recorded);
        match &*fitting {
            [] => Ok(match self.veth_peer() {
                // The interface exists as long as its other end does.
                Some(peer) if host.find_link_by_index(peer)?.is_some_and(|link| link.is_veth()) => Return::Pending,
                // The kernel may still move it to the host.
                None if self.is_hardware() => Return::Pending,
                _ => Return::Gone,
            }),
            // The pod may have removed the alias. An interface that is up may be in use under its
            // new name.
            [link] if has_alias(link) || !link.up => {
                if link.up {
                    host.set_down(link.index)?;
                }
                self.remove_new_altnames(host, link)?;
                host.set_name(link.index, &self.name)?;
                host.set_alias(link.index, "")?;
                Ok(Return::Complete(link.index))
            }
            several => {
                let names: Vec<&str> = several.iter().map(|link| link.name.as_str()).collect();
                notes.note(format_args!(
                    "{} was not renamed to {}: it is in use, or several interfaces fit",
                    names.join(", "),
                    self.name
                ));
                Ok(Return::Pending)
            }
        }
    }
}

/// Checks that the host has no interface `name`: the kernel would first move the interface and then
/// refuse the name.
///
/// # Errors
/// Code 102, with the text of Go's host-device, if it has one.
pub fn ensure_free(name: &str) -> Result<()> {
    if Netlink::open()?.find_link(name)?.is_none() {
        return Ok(());
    }
    let details = format!("the host has another interface {name}: rename or remove it, and repeat DEL");
    Err(Error::new(Code::CONFLICT, format!("failed to move {name:?} to hostNS: file exists")).with_details(details))
}
