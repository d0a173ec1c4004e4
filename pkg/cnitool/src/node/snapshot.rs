//! Reads everything about a node's networks once, for `inspect` and `doctor`.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use cni::AttachmentId;
use cni::Error;
use cni::config::NetConf;
use cni::rollback::Notes;
use cni_firewall::container_rules::{ContainerRule, list_container_rules};
use cni_ipam::Listed;
use cni_linux::Link;
use libcni::NetworkList;
use plugin_dhcp::leases::{self, Lease};
use plugin_tuning::Saved;

use super::attachments::{Attachments, CheckedReservation, attachment_in_alias};
use super::ipam::{IpamContext, NetworkPool, sockets};
use super::{bridges_of, confs_of_type};
use crate::call::Context;

/// A pool of host-local, and what is in its folder.
pub(crate) struct ListedPool {
    pub(crate) pool: NetworkPool,
    pub(crate) reservations: Vec<CheckedReservation>,
    /// The files that are named like a reservation, but are not regular files or are too long, each
    /// with a description.
    pub(crate) unusual: Vec<(IpAddr, String)>,
}

/// What a plugin has recorded on the host about an attachment, for DEL.
pub(crate) struct Record {
    /// The plugin.
    pub(crate) plugin: &'static str,
    pub(crate) path: PathBuf,
    /// A description of the content.
    pub(crate) text: String,
    /// The network. `None` if the file cannot be decoded.
    pub(crate) network: Option<String>,
    pub(crate) container_id: String,
    /// The interface. `None` for flannel, which records one configuration for each container.
    pub(crate) ifname: Option<String>,
}

impl Record {
    /// Whether the record is about this attachment, as far as it is known.
    pub(crate) fn is_about(&self, attachment: &AttachmentId) -> bool {
        self.container_id == attachment.container_id
            && self.network.as_ref().is_none_or(|network| *network == attachment.network)
            && self.ifname.as_ref().is_none_or(|ifname| *ifname == attachment.ifname)
    }

    /// Returns the attachment, or `None` if the network is not known. If the interface is not
    /// known, `eth0` is assumed.
    pub(crate) fn attachment(&self) -> Option<AttachmentId> {
        let ifname = self.ifname.as_deref().unwrap_or("eth0");
        self.network.as_ref().map(|network| AttachmentId::new(network, &self.container_id, ifname))
    }
}

/// The plugins with a folder of records in /run/cni.
const RECORDING: [&str; 3] = ["bond", "host-device", "route-override"];

/// The state of a node at one moment.
pub(crate) struct Snapshot {
    /// The configured networks.
    pub(crate) networks: Vec<NetworkList>,
    /// The attachments.
    pub(crate) attachments: Attachments,
    /// bandwidth's ifbs, which remain when the container disappears. An ifb of the Go plugin has no
    /// alias, so its attachment is `None`.
    pub(crate) ifbs: Vec<(Option<AttachmentId>, Link)>,
    /// The packet filter rules of containers.
    pub(crate) rules: Vec<ContainerRule>,
    /// tuning's backups.
    pub(crate) backups: Vec<Saved>,
    /// The records of the other plugins.
    pub(crate) records: Vec<Record>,
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
        let (networks, notes, machine) = (context.networks()?, &context.notes, context.call.machine);
        let attachments = Attachments::read(context, None)?;
        // Other programs use ifbs too, under other names.
        let is_own = |link: &&Link| link.is_ifb() && AttachmentId::is_ifb_name(&link.name);
        let ifbs = attachments.links.iter().filter(is_own);
        let ifbs = ifbs.map(|ifb| (attachment_in_alias(ifb, &attachments.cached), ifb.clone())).collect();
        let ipam = IpamContext { context, data_dir: None };
        let mut pools = Vec::new();
        for pool in ipam.list_pools()? {
            let Listed { reservations, unusual, .. } = ipam.list_reservations(&pool)?;
            let reservations = attachments.check_reservations(&pool.network, reservations, machine);
            pools.push(ListedPool { pool, reservations, unusual });
        }
        let mut leases = Vec::new();
        for socket in sockets(&networks) {
            leases.extend(leases::list(&socket)?.into_iter().map(|lease| (socket.clone(), lease)));
        }
        let rules = list_container_rules(machine, notes)?;
        let backups = read_backups(&networks, notes)?;
        let records = read_records(&networks)?;
        Ok(Snapshot { networks, attachments, ifbs, rules, backups, records, pools, leases })
    }

    /// Returns the bridges that containers use: a bridge with a port in
    /// [`Attachments::attached_links`], and a bridge of a configured network with any port, because
    /// the port may belong to an attachment that is not known.
    pub(crate) fn bridges(&self) -> Vec<&Link> {
        let masters: Vec<u32> = self.attachments.attached_links().iter().filter_map(|(_, link)| link.master).collect();
        let configured: Vec<String> = self.networks.iter().flat_map(bridges_of).collect();
        let has_ports = |bridge: &Link| self.attachments.links.iter().any(|link| link.master == Some(bridge.index));
        let is_used = |bridge: &&Link| {
            masters.contains(&bridge.index) || (configured.contains(&bridge.name) && has_ports(bridge))
        };
        self.attachments.links.iter().filter(|link| link.is_bridge()).filter(is_used).collect()
    }

    /// Whether a network of this name is configured.
    pub(crate) fn is_configured(&self, network: &str) -> bool {
        self.networks.iter().any(|list| list.name() == network)
    }
}

/// Returns tuning's backups in the folders that the networks configure, and in the default folder,
/// which also has the backups of networks that are not configured any more.
///
/// # Errors
/// Code 5 if a folder or a file cannot be read; 6 if a configuration's `dataDir` has the wrong
/// type.
fn read_backups(networks: &[NetworkList], notes: &Notes) -> Result<Vec<Saved>, Error> {
    let mut backups: Vec<Saved> = Vec::new();
    for conf in confs_with_default(networks, "tuning") {
        for backup in plugin_tuning::saved(&conf, notes)? {
            if !backups.iter().any(|known| known.path == backup.path) {
                backups.push(backup);
            }
        }
    }
    Ok(backups)
}

/// Returns the configurations of the plugin `kind` in all networks, and one without keys, which
/// selects the default folder.
fn confs_with_default(networks: &[NetworkList], kind: &str) -> Vec<NetConf> {
    let mut confs: Vec<NetConf> =
        networks.iter().flat_map(|list| confs_of_type(list, kind).map(|(_, conf)| conf)).collect();
    confs.extend(NetConf::parse(format!(r#"{{"cniVersion":"1.0.0","name":"any","type":"{kind}"}}"#)));
    confs
}

/// Returns the records of all plugins. Those of flannel are in the folders that the networks
/// configure, and in the default folder.
///
/// # Errors
/// Code 5 if a folder or a file cannot be read; 6 if a configuration's path has the wrong type.
fn read_records(networks: &[NetworkList]) -> Result<Vec<Record>, Error> {
    let mut records: Vec<Record> = Vec::new();
    for plugin in RECORDING {
        for (path, attachment) in cni_plugin::record::list(&Path::new("/run/cni").join(plugin))? {
            let AttachmentId { network, container_id, ifname } = attachment;
            let text = "for DEL".to_owned();
            let (network, ifname) = (Some(network), Some(ifname));
            records.push(Record { plugin, path, text, network, container_id, ifname });
        }
    }
    for conf in confs_with_default(networks, "flannel") {
        for stored in plugin_flannel::stored_files(&conf)? {
            if !records.iter().any(|known| known.path == stored.path) {
                let plugin_flannel::StoredFile { path, container_id, network, text } = stored;
                records.push(Record { plugin: "flannel", path, text, network, container_id, ifname: None });
            }
        }
    }
    Ok(records)
}

/// Whether a backup has no owner and is named like the Go plugin's backup of `attachment`. The name
/// has only the container ID and the interface.
pub(crate) fn has_go_name(backup: &Saved, attachment: &AttachmentId) -> bool {
    let file = backup.path.file_name().unwrap_or_default().to_string_lossy();
    backup.owner.is_none() && file == format!("{}_{}.json", attachment.container_id, attachment.ifname)
}
