//! Records on the host which interface an attachment got.
//!
//! A process in the container that has CAP_NET_ADMIN can write the interface's name, alias and
//! hardware address, and can put another interface in its place. DEL therefore identifies the
//! interface by the record, which only has properties that such a process cannot write. The record
//! is written before the move, and removed when the interface is on the host again.

use cni::AttachmentId;
use cni_linux::{Link, Netns};
use cni_plugin::record::AttachmentRecord;
use serde::{Deserialize, Serialize};

/// The interface of one attachment, as it was on the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Record {
    network: String,
    #[serde(rename = "containerID")]
    container_id: String,
    ifname: String,
    /// The device and inode numbers of the container's namespace. CNI_NETNS may lead to another one
    /// later.
    netns: (u64, u64),
    /// The name on the host.
    pub(crate) name: String,
    /// The index on the host. The kernel keeps it in the container if it is free there.
    index: u32,
    /// The kind of link, as [`LinkKind`](cni_linux::LinkKind) writes it.
    kind: String,
    /// The hardware address that the device was built with.
    permanent_mac: Option<String>,
    /// The device below the interface, by its bus.
    parent: Option<String>,
    /// A veth's other end, or the interface below.
    peer: Option<Peer>,
}

/// The other end of a veth, or the interface below, as seen from the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Peer {
    /// Its index in its own namespace.
    pub(crate) index: u32,
    /// Whether it is on the host.
    #[serde(rename = "onHost")]
    pub(crate) is_on_host: bool,
}

impl Record {
    /// Returns the record of an attachment that gets `device`, an interface of the host.
    pub(crate) fn new(attachment: &AttachmentId, netns: &Netns, device: &Link) -> Record {
        Record {
            network: attachment.network.clone(),
            container_id: attachment.container_id.clone(),
            ifname: attachment.ifname.clone(),
            netns: netns.id(),
            name: device.name.clone(),
            index: device.index,
            kind: device.kind.to_string(),
            permanent_mac: device.permanent_mac.map(|mac| mac.to_string()),
            parent: device.parent.clone(),
            peer: device.peer_index.map(|index| Peer { index, is_on_host: device.peer_netnsid.is_none() }),
        }
    }

    /// Whether `netns` is the namespace that the attachment was made in.
    pub(crate) fn is_of(&self, netns: &Netns) -> bool {
        self.netns == netns.id()
    }

    /// Whether only one link can have the recorded properties: that of a hardware device, or a veth
    /// whose other end is on the host. A pod can create others of all other kinds.
    pub(crate) fn is_proof(&self) -> bool {
        self.is_hardware() || self.host_peer().is_some()
    }

    /// Whether the interface is that of a hardware device, which the kernel moves to the host when
    /// the container's namespace ends.
    pub(crate) fn is_hardware(&self) -> bool {
        self.permanent_mac.is_some() || self.parent.is_some()
    }

    /// Returns the index of the other end on the host, if the interface is a veth with such an end.
    pub(crate) fn host_peer(&self) -> Option<u32> {
        self.host_peer_or_lower().filter(|_| self.kind == "veth")
    }

    /// Returns the index of the other end, or of the interface below, if it is on the host.
    pub(crate) fn host_peer_or_lower(&self) -> Option<u32> {
        self.peer.filter(|peer| peer.is_on_host).map(|peer| peer.index)
    }

    /// Whether `link` has the recorded properties. `host_id` is the ID that the host's namespace
    /// has in the namespace of `link`, or `None` if `link` is on the host.
    pub(crate) fn fits(&self, link: &Link, host_id: Option<i32>) -> bool {
        let peer_fits = match self.peer {
            None => link.peer_index.is_none(),
            Some(peer) => link.peer_index == Some(peer.index) && (!peer.is_on_host || link.peer_netnsid == host_id),
        };
        peer_fits
            && link.kind.to_string() == self.kind
            && link.permanent_mac.map(|mac| mac.to_string()) == self.permanent_mac
            && link.parent == self.parent
    }

    /// Returns the attachment's interface among `links`, those of the container. If several fit,
    /// prefers CNI_IFNAME, then the recorded index. `host_id` is that of [`fits`](Record::fits).
    pub(crate) fn find_in(&self, links: Vec<Link>, host_id: Option<i32>) -> Option<Link> {
        let has_name = |link: &Link| link.name == self.ifname;
        let has_index = |link: &Link| link.index == self.index;
        let mut fitting: Vec<Link> = links.into_iter().filter(|link| self.fits(link, host_id)).collect();
        fitting.retain(|link| self.is_proof() || has_name(link) || has_index(link));
        fitting.into_iter().max_by_key(|link| (has_name(link), has_index(link)))
    }
}

impl AttachmentRecord for Record {
    const FOLDER: &'static str = "/run/cni/host-device";

    fn attachment(&self) -> AttachmentId {
        AttachmentId::new(&self.network, &self.container_id, &self.ifname)
    }
}
