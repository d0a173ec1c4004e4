//! Records on the host which routes ADD has removed and added, so that DEL can restore them.
//!
//! The record is written before the first change. Several entries of the plugin in one list share
//! it: it has the changes of all of them.

use cni::AttachmentId;
use cni_linux::{Link, Netlink, Netns, SavedRoute};
use cni_plugin::record::AttachmentRecord;
use serde::{Deserialize, Serialize};

/// The changes for one attachment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    attachment: AttachmentId,
    /// The device and inode numbers of the container's namespace.
    netns: (u64, u64),
    /// The cookie of this namespace, since the kernel reuses inode numbers.
    #[serde(default)]
    netns_cookie: Option<u64>,
    /// The index of CNI_IFNAME and of a veth's other end. A new namespace can soon get the numbers
    /// of a deleted one, but its interfaces have other indexes.
    pub(crate) interface: (u32, Option<u32>),
    /// The removed routes, in the kernel's format.
    removed: Vec<Vec<u8>>,
    /// The added routes, in the kernel's format.
    added: Vec<Vec<u8>>,
}

impl AttachmentRecord for Record {
    const FOLDER: &'static str = "/run/cni/route-override";

    fn attachment(&self) -> AttachmentId {
        self.attachment.clone()
    }
}

impl Record {
    /// Returns a record without changes. `link` is CNI_IFNAME in `netns`, and `netlink` a
    /// connection to this namespace.
    pub(crate) fn new(attachment: AttachmentId, netlink: &Netlink, netns: &Netns, link: &Link) -> Record {
        let interface = (link.index, link.peer_index);
        let netns_cookie = netlink.netns_cookie();
        Record { attachment, netns: netns.id(), netns_cookie, interface, removed: Vec::new(), added: Vec::new() }
    }

    /// Whether the record is about this interface in `netns`, with the connection `netlink`.
    pub(crate) fn is_of(&self, netlink: &Netlink, netns: &Netns, link: &Link) -> bool {
        let has_cookie = self.netns_cookie.is_none_or(|cookie| netlink.netns_cookie() == Some(cookie));
        self.netns == netns.id() && has_cookie && self.interface == (link.index, link.peer_index)
    }

    /// Adds the changes of one ADD. A removed route that an earlier ADD had added is left out: DEL
    /// must not restore it.
    pub(crate) fn extend(&mut self, removed: &[SavedRoute], added: &[SavedRoute]) {
        let earlier = self.added();
        let is_original = |route: &&SavedRoute| !earlier.iter().any(|earlier| earlier.is_same(route));
        self.removed.extend(removed.iter().filter(is_original).map(SavedRoute::to_bytes));
        self.added.extend(added.iter().map(SavedRoute::to_bytes));
    }

    /// Returns the removed routes.
    pub(crate) fn removed(&self) -> Vec<SavedRoute> {
        self.removed.iter().filter_map(|bytes| SavedRoute::from_bytes(bytes)).collect()
    }

    /// Returns the added routes.
    pub(crate) fn added(&self) -> Vec<SavedRoute> {
        self.added.iter().filter_map(|bytes| SavedRoute::from_bytes(bytes)).collect()
    }
}
