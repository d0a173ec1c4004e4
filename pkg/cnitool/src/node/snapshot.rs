//! Reads everything about a node's networks once, for `inspect` and `doctor`.

use std::net::IpAddr;
use std::path::PathBuf;

use cni::{AttachmentId, Error};
use cni_ipam::{Listed, Reservation};
use cni_linux::Link;
use libcni::NetworkList;
use plugin_dhcp::leases::{self, Lease};

use super::attachments::Attachments;
use super::bridges_of;
use super::ipam::{IpamContext, NetworkPool, sockets};
use super::objects::{self, Object};
use crate::call::Context;

/// A pool of host-local, and what is in its folder.
pub(crate) struct ListedPool {
    pub(crate) pool: NetworkPool,
    pub(crate) reservations: Vec<Reservation>,
    /// The files that are named like a reservation, but are not regular files or are too long, each
    /// with a description.
    pub(crate) unusual: Vec<(IpAddr, String)>,
}

/// The state of a node at one moment.
pub(crate) struct Snapshot {
    /// The configured networks.
    pub(crate) networks: Vec<NetworkList>,
    /// The attachments.
    pub(crate) attachments: Attachments,
    /// bandwidth's ifbs, which remain when the container disappears. An ifb of the Go plugin has no
    /// alias, so its attachment is `None`.
    pub(crate) ifbs: Vec<(Option<AttachmentId>, Link)>,
    /// The other objects of attachments.
    pub(crate) objects: Vec<Object>,
    /// The pools of host-local.
    pub(crate) pools: Vec<ListedPool>,
    /// The leases that dhcp's daemons have recorded, each with the socket of its daemon.
    pub(crate) leases: Vec<(PathBuf, Lease)>,
}

impl Snapshot {
    /// Reads the state of this node. Problems with single files are written to `notes`.
    ///
    /// # Errors
    /// - Code 5 if the folder of the networks, of the result cache, of reservations, of leases, of
    ///   backups or of records cannot be read.
    /// - Code 6 if the `dataDir` of a configuration has the wrong type.
    /// - Code 11 if the lock of reservations is held for too long.
    /// - The kernel's error if the links or the packet filter rules cannot be listed.
    pub(crate) fn take(context: &Context<'_>) -> Result<Snapshot, Error> {
        let networks = context.networks()?;
        let attachments = Attachments::read(context, None)?;
        // Other programs use ifbs too, under other names.
        let is_own = |link: &&Link| link.is_ifb() && AttachmentId::is_ifb_name(&link.name);
        let ifbs = attachments.links.iter().filter(is_own);
        let ifbs = ifbs.map(|ifb| (attachments.attachment_in_alias(ifb), ifb.clone())).collect();
        let ipam = IpamContext { context, data_dir: None, cached: Some(&attachments.cached) };
        let mut pools = Vec::new();
        for pool in ipam.list_pools()? {
            let Listed { reservations, unusual, .. } = ipam.list_reservations(&pool)?;
            pools.push(ListedPool { pool, reservations, unusual });
        }
        let mut leases = Vec::new();
        for socket in sockets(&networks) {
            leases.extend(leases::list(&socket)?.into_iter().map(|lease| (socket.clone(), lease)));
        }
        let mut snapshot = Snapshot { networks, attachments, ifbs, objects: Vec::new(), pools, leases };
        snapshot.objects = objects::read(&snapshot, context)?;
        Ok(snapshot)
    }

    /// Returns the bridges that containers use: a bridge with a port in
    /// [`Attachments::attached_links`], and a bridge of a configured network with any port, because
    /// the port may belong to an attachment that is not known.
    pub(crate) fn bridges(&self) -> Vec<&Link> {
        let masters: Vec<u32> = self.attachments.attached_links.iter().filter_map(|(_, link)| link.master).collect();
        let configured: Vec<String> = self.networks.iter().flat_map(bridges_of).collect();
        let has_ports = |bridge: &Link| self.attachments.links.iter().any(|link| link.master == Some(bridge.index));
        let is_used = |bridge: &&Link| {
            masters.contains(&bridge.index) || (configured.contains(&bridge.name) && has_ports(bridge))
        };
        self.attachments.links.iter().filter(|link| link.is_bridge()).filter(is_used).collect()
    }
}
