//! Reads everything about a node's networks once, for `inspect` and `doctor`.

use std::net::IpAddr;
use std::path::PathBuf;

use cni::AttachmentId;
use cni::Error;
use cni::config::NetConf;
use cni::json::Json;
use cni::result::AddResult;
use cni::rollback::Notes;
use cni::version::Version;
use cni_firewall::container_rules::{ContainerRule, list_container_rules};
use cni_ipam::Reservation;
use cni_linux::{Link, LinkKind, Netlink};
use libcni::NetworkList;
use libcni::cache::Entry;
use plugin_dhcp::leases::{Lease, list};
use plugin_tuning::{Saved, saved};

use crate::Call;
use crate::cli::{Shared, Variables};
use crate::ipam::{IpamContext, StoreLocation, sockets};
use crate::node;

/// The state of a node at one moment.
pub(crate) struct Snapshot {
    /// The configured networks.
    pub(crate) networks: Vec<NetworkList>,
    /// The entries of the result cache.
    pub(crate) remembered: Vec<Entry>,
    /// The links in the namespace of this process, which is the host's.
    pub(crate) links: Vec<Link>,
    /// The links whose alias names an attachment, without ifbs. They disappear with the container.
    pub(crate) marked: Vec<(AttachmentId, Link)>,
    /// bandwidth's ifbs, which remain when the container disappears. Those of the Go plugin have no
    /// alias.
    pub(crate) ifbs: Vec<(Option<AttachmentId>, Link)>,
    /// The packet filter rules of containers.
    pub(crate) rules: Vec<ContainerRule>,
    /// tuning's backups.
    pub(crate) saved: Vec<Saved>,
    /// The reservations of each network and folder.
    pub(crate) reservations: Vec<(String, PathBuf, Vec<Reservation>)>,
    /// The files with an address as their name that are not usual reservations: the network, the
    /// file, and what is unusual.
    pub(crate) unusual: Vec<(String, PathBuf, String)>,
    /// The leases that dhcp's daemons have recorded, each with the socket of its daemon.
    pub(crate) leases: Vec<(PathBuf, Lease)>,
}

impl Snapshot {
    /// Reads the state of this node. Problems with single files are written to `notes`.
    ///
    /// # Errors
    /// Something cannot be read as a whole: the network configurations, the links, a folder.
    pub(crate) fn take(shared: &Shared, call: &Call<'_>, notes: &Notes) -> Result<Snapshot, Error> {
        let networks = node::networks(&shared.conf_folder(&Variables(&call.environment)))?;
        let listing = shared.cache().list_all()?;
        listing.problems.iter().for_each(|problem| notes.note(format_args!("ignored: {problem}")));
        let links = Netlink::open()?.list_links()?;
        let (ifbs, others): (Vec<&Link>, Vec<&Link>) = links.iter().partition(|link| link.is_ifb());
        let marked = others.into_iter().filter_map(|link| Some((attachment_of(link)?, link.clone()))).collect();
        let ifbs = ifbs.into_iter().filter(|ifb| AttachmentId::is_ifb_name(&ifb.name));
        let ifbs = ifbs.map(|ifb| (attachment_of(ifb), ifb.clone())).collect();
        let location = StoreLocation::default();
        let ipam = IpamContext::new(shared, call, &location, notes);
        let (mut reservations, mut unusual) = (Vec::new(), Vec::new());
        for addresses in ipam.all()? {
            let (listed, unusual_files) = match ipam.lock(&addresses)? {
                Some(mut locked) => ipam.note_unread(locked.list()?),
                None => Default::default(),
            };
            let folder = addresses.data_dir.clone();
            let file = |address: IpAddr| folder.join(&addresses.network).join(address.to_string());
            for (address, what) in unusual_files {
                unusual.push((addresses.network.clone(), file(address), what));
            }
            reservations.push((addresses.network, folder, listed));
        }
        let mut leases = Vec::new();
        for socket in sockets(&networks) {
            leases.extend(list(&socket)?.into_iter().map(|lease| (socket.clone(), lease)));
        }
        let rules = list_container_rules(call.machine, notes)?;
        let remembered = listing.entries;
        let saved = read_backups(&networks, notes)?;
        Ok(Snapshot { networks, remembered, links, marked, ifbs, rules, saved, reservations, unusual, leases })
    }

    /// Returns the known attachments with their host ends. An end is found by its alias or, if the
    /// Go plugin created it, by its name and MAC in the cached result. The name alone may belong to
    /// another link by now.
    pub(crate) fn attached(&self) -> Vec<(AttachmentId, &Link)> {
        let mut attached: Vec<(AttachmentId, &Link)> =
            self.marked.iter().map(|(attachment, link)| (attachment.clone(), link)).collect();
        for entry in &self.remembered {
            let attachment = entry.id();
            if attached.iter().any(|(known, _)| *known == attachment) {
                continue;
            }
            let interfaces = result_of(entry).map(|result| result.interfaces).unwrap_or_default();
            let is_in_result = |link: &&Link| {
                let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
                let mut on_host = interfaces.iter().filter(|interface| interface.sandbox.is_empty());
                link.kind == LinkKind::Veth
                    && on_host.any(|listed| listed.name == link.name && listed.mac.eq_ignore_ascii_case(&mac))
            };
            attached.extend(self.links.iter().find(is_in_result).map(|link| (attachment, link)));
        }
        attached
    }

    /// Returns the bridges that containers are attached to: those of known attachments, and those
    /// that a configured network names and that have ports, whose attachments the result cache may
    /// not have.
    pub(crate) fn bridges(&self) -> Vec<&Link> {
        let masters: Vec<u32> = self.attached().iter().filter_map(|(_, link)| link.master).collect();
        let named: Vec<String> = self.networks.iter().flat_map(bridges_of).collect();
        let has_ports = |bridge: &Link| self.links.iter().any(|link| link.master == Some(bridge.index));
        let is_used = |link: &&Link| masters.contains(&link.index) || (named.contains(&link.name) && has_ports(link));
        self.links.iter().filter(|link| link.is_bridge()).filter(is_used).collect()
    }

    /// Whether a network of this name is configured.
    pub(crate) fn is_configured(&self, network: &str) -> bool {
        self.networks.iter().any(|list| list.name() == network)
    }

    /// Whether the result cache has the attachment, or a link of the host has its alias.
    pub(crate) fn is_known(&self, attachment: &AttachmentId) -> bool {
        self.remembered.iter().any(|entry| entry.id() == *attachment)
            || self.marked.iter().any(|(known, _)| known == attachment)
    }
}

/// Returns tuning's backups in the folders that the networks configure, and in the default folder,
/// because its network may have been removed from the configuration.
fn read_backups(networks: &[NetworkList], notes: &Notes) -> Result<Vec<Saved>, Error> {
    let mut confs: Vec<NetConf> = Vec::new();
    for list in networks {
        for plugin in list.plugins().iter().filter(|plugin| plugin.kind() == "tuning") {
            confs.extend(list.request(plugin, None).and_then(NetConf::parse));
        }
    }
    confs.extend(NetConf::parse(r#"{"cniVersion":"1.0.0","name":"any","type":"tuning"}"#));
    let mut backups: Vec<Saved> = Vec::new();
    for conf in confs {
        for backup in saved(&conf, notes)? {
            if !backups.iter().any(|known| known.path == backup.path) {
                backups.push(backup);
            }
        }
    }
    Ok(backups)
}

/// Returns the bridges of a network's bridge plugins; the default bridge for a plugin that names
/// none.
pub(crate) fn bridges_of(list: &NetworkList) -> Vec<String> {
    let plugins = list.plugins().iter().filter(|plugin| plugin.kind() == "bridge");
    let confs = plugins.filter_map(|plugin| list.request(plugin, None).and_then(NetConf::parse).ok());
    let name = |conf: NetConf| {
        let named = conf.json().get("bridge").and_then(Json::as_str).unwrap_or_default().to_owned();
        if named.is_empty() { "cni0".to_owned() } else { named }
    };
    confs.map(name).collect()
}

/// Returns the objects of all plugins of this type in a configuration.
pub(crate) fn plugins_of(config: &[u8], kind: &str) -> Vec<Json> {
    let plugins = Json::parse(config).ok().and_then(|config| match config.get("plugins") {
        Some(Json::Array(plugins)) => Some(plugins.clone()),
        _ => None,
    });
    let has_kind = |plugin: &Json| plugin.get("type").and_then(Json::as_str) == Some(kind);
    plugins.unwrap_or_default().into_iter().filter(has_kind).collect()
}

/// Returns the result in a cache entry, or `None` if there is none or it cannot be decoded.
pub(crate) fn result_of(entry: &Entry) -> Option<AddResult> {
    let json = Json::parse(entry.result.as_ref()?.get().as_bytes()).ok()?;
    AddResult::decode(&json, Version::NEWEST).ok()
}

/// Returns the attachment that a link's alias names, or `None`. If the alias has the hash of a long
/// container ID, the attachment's container ID is that hash, with its `#`.
fn attachment_of(link: &Link) -> Option<AttachmentId> {
    let marked = AttachmentId::parse(&node::mark_in(link.alias.as_deref()?))?;
    let alias = node::mark_in(link.alias.as_deref()?);
    let hashed = alias.split('/').nth(1).unwrap_or_default().to_owned();
    Some(AttachmentId::new(marked.network, marked.container_id.unwrap_or(hashed), marked.ifname))
}
