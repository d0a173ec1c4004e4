//! Reads everything about a node's networks once, for `inspect` and `doctor`.

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
use libcni::cache::{Entry, Listing};
use plugin_dhcp::leases::{self, Lease};
use plugin_tuning::Saved;

use crate::call::{Call, Shared, Variables};
use crate::ipam::{IpamContext, StoreLocation, sockets};
use crate::node;

/// The state of a node at one moment.
pub(crate) struct Snapshot {
    /// The configured networks.
    pub(crate) networks: Vec<NetworkList>,
    /// The entries of the result cache.
    pub(crate) cached: Vec<Entry>,
    /// The links in the namespace of this process, which is the host's.
    pub(crate) links: Vec<Link>,
    /// The attachment that a link's alias names, and the link. Without ifbs: all these links
    /// disappear with the container.
    pub(crate) aliased_links: Vec<(AttachmentId, Link)>,
    /// bandwidth's ifbs, which remain when the container disappears. An ifb of the Go plugin has no
    /// alias, so its attachment is `None`.
    pub(crate) ifbs: Vec<(Option<AttachmentId>, Link)>,
    /// The packet filter rules of containers.
    pub(crate) rules: Vec<ContainerRule>,
    /// tuning's backups.
    pub(crate) backups: Vec<Saved>,
    /// The reservations of each network and folder.
    pub(crate) reservations: Vec<(String, PathBuf, Vec<Reservation>)>,
    /// The files that are named like a reservation, but are not regular files or are too long: the
    /// network, the file, and a description.
    pub(crate) unusual: Vec<(String, PathBuf, String)>,
    /// The leases that dhcp's daemons have recorded, each with the socket of its daemon.
    pub(crate) leases: Vec<(PathBuf, Lease)>,
}

impl Snapshot {
    /// Reads the state of this node. Problems with single files are written to `notes`.
    ///
    /// # Errors
    /// - Code 5 if the folder of the networks, of the result cache, of reservations, of leases or
    ///   of backups cannot be read.
    /// - Code 6 if the `dataDir` of a configuration has the wrong type.
    /// - Code 11 if the lock of reservations is held for too long.
    /// - The kernel's error if the links or the packet filter rules cannot be listed.
    pub(crate) fn take(shared: &Shared, call: &Call<'_>, notes: &Notes) -> Result<Snapshot, Error> {
        let networks = node::networks(&shared.conf_folder(&Variables(&call.environment)))?;
        let Listing { entries: cached, problems } = shared.cache().list_all()?;
        problems.iter().for_each(|problem| notes.note(format_args!("ignored: {problem}")));
        let links = Netlink::open()?.list_links()?;
        let (ifbs, other_links): (Vec<&Link>, Vec<&Link>) = links.iter().partition(|link| link.is_ifb());
        let aliased_links = other_links
            .into_iter()
            .filter_map(|link| Some((attachment_in_alias(link, &cached)?, link.clone())))
            .collect();
        // Other programs use ifbs too, under other names.
        let ifbs = ifbs.into_iter().filter(|ifb| AttachmentId::is_ifb_name(&ifb.name));
        let ifbs = ifbs.map(|ifb| (attachment_in_alias(ifb, &cached), ifb.clone())).collect();
        let location = StoreLocation::default();
        let ipam = IpamContext::new(shared, call, &location, notes);
        let (mut reservations, mut unusual) = (Vec::new(), Vec::new());
        for pool in ipam.list_pools()? {
            let (listed, unusual_in_pool) = match ipam.lock(&pool)? {
                Some(mut locked) => ipam.note_unread(locked.list()?),
                None => (Vec::new(), Vec::new()),
            };
            let folder = pool.data_dir.join(&pool.network);
            for (address, what) in unusual_in_pool {
                unusual.push((pool.network.clone(), folder.join(address.to_string()), what));
            }
            reservations.push((pool.network, pool.data_dir, listed));
        }
        let mut leases = Vec::new();
        for socket in sockets(&networks) {
            leases.extend(leases::list(&socket)?.into_iter().map(|lease| (socket.clone(), lease)));
        }
        let rules = list_container_rules(call.machine, notes)?;
        let backups = read_backups(&networks, notes)?;
        Ok(Snapshot { networks, cached, links, aliased_links, ifbs, rules, backups, reservations, unusual, leases })
    }

    /// Returns the links on the host that belong to attachments. A link is found by its alias. The
    /// Go plugins set no alias: for a cached attachment without an aliased link, the veth with the
    /// name and the MAC of an interface in its result is found. The name alone does not suffice,
    /// because another link may have taken it.
    pub(crate) fn attached_links(&self) -> Vec<(AttachmentId, &Link)> {
        let mut attached: Vec<(AttachmentId, &Link)> =
            self.aliased_links.iter().map(|(attachment, link)| (attachment.clone(), link)).collect();
        for entry in &self.cached {
            let attachment = entry.id();
            if attached.iter().any(|(known, _)| *known == attachment) {
                continue;
            }
            let result = result_of(entry).unwrap_or_default();
            let found = self.links.iter().find(|link| is_veth_of_result(link, &result));
            attached.extend(found.map(|link| (attachment, link)));
        }
        attached
    }

    /// Returns the bridges that containers use: a bridge with a port in
    /// [`attached_links`](Snapshot::attached_links), and a bridge of a configured network with any
    /// port, because the port may belong to an attachment that is not known.
    pub(crate) fn bridges(&self) -> Vec<&Link> {
        let masters: Vec<u32> = self.attached_links().iter().filter_map(|(_, link)| link.master).collect();
        let configured: Vec<String> = self.networks.iter().flat_map(bridges_of).collect();
        let has_ports = |bridge: &Link| self.links.iter().any(|link| link.master == Some(bridge.index));
        let is_used = |bridge: &&Link| {
            masters.contains(&bridge.index) || (configured.contains(&bridge.name) && has_ports(bridge))
        };
        self.links.iter().filter(|link| link.is_bridge()).filter(is_used).collect()
    }

    /// Returns the cached attachments of the containers that have a port on `bridge`.
    pub(crate) fn entries_on_bridge(&self, bridge: &Link) -> Vec<&Entry> {
        let mut ports = self.attached_links();
        ports.retain(|(_, link)| link.master == Some(bridge.index));
        let has_port = |entry: &&Entry| {
            ports.iter().any(|(attachment, _)| {
                attachment.network == entry.network && attachment.container_id == entry.attachment.container_id
            })
        };
        self.cached.iter().filter(has_port).collect()
    }

    /// Whether a network of this name is configured.
    pub(crate) fn is_configured(&self, network: &str) -> bool {
        self.networks.iter().any(|list| list.name() == network)
    }

    /// Whether the result cache has the attachment, or a link of the host has its alias.
    pub(crate) fn is_known(&self, attachment: &AttachmentId) -> bool {
        self.cached.iter().any(|entry| entry.id() == *attachment)
            || self.aliased_links.iter().any(|(known, _)| known.alias() == attachment.alias())
    }
}

/// Returns the attachment's end on the host: the link with its alias or, because the Go plugins set
/// no alias, the veth of its result. A container can change neither.
pub(crate) fn find_host_end<'a>(links: &'a [Link], attachment: &AttachmentId, result: &AddResult) -> Option<&'a Link> {
    let has_alias = |link: &&Link| {
        let alias = link.alias.as_deref().map(node::attachment_alias_in);
        !link.is_ifb() && attachment.is_on(alias.as_deref())
    };
    links.iter().find(has_alias).or_else(|| links.iter().find(|link| is_veth_of_result(link, result)))
}

/// Whether a link of the host is a veth with the name and the MAC of an interface in the result.
fn is_veth_of_result(link: &Link, result: &AddResult) -> bool {
    let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
    // An interface without a sandbox is on the host.
    let mut on_host = result.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
    link.kind == LinkKind::Veth
        && on_host.any(|listed| listed.name == link.name && listed.mac.eq_ignore_ascii_case(&mac))
}

/// Returns tuning's backups in the folders that the networks configure, and in the default folder,
/// which also has the backups of networks that are not configured any more.
///
/// # Errors
/// Code 5 if a folder or a file cannot be read; 6 if a configuration's `dataDir` has the wrong
/// type.
fn read_backups(networks: &[NetworkList], notes: &Notes) -> Result<Vec<Saved>, Error> {
    let mut confs: Vec<NetConf> = Vec::new();
    for list in networks {
        for plugin in list.plugins().iter().filter(|plugin| plugin.kind() == "tuning") {
            if let Ok(conf) = list.request(plugin, None).and_then(NetConf::parse) {
                confs.push(conf);
            }
        }
    }
    // Without `dataDir`, this configuration selects the default folder.
    confs.extend(NetConf::parse(r#"{"cniVersion":"1.0.0","name":"any","type":"tuning"}"#));
    let mut backups: Vec<Saved> = Vec::new();
    for conf in confs {
        for backup in plugin_tuning::saved(&conf, notes)? {
            if !backups.iter().any(|known| known.path == backup.path) {
                backups.push(backup);
            }
        }
    }
    Ok(backups)
}

/// Returns the names of the bridges of a network's bridge plugins. A plugin that names no bridge
/// uses the default bridge.
pub(crate) fn bridges_of(list: &NetworkList) -> Vec<String> {
    let plugins = list.plugins().iter().filter(|plugin| plugin.kind() == "bridge");
    let confs = plugins.filter_map(|plugin| list.request(plugin, None).and_then(NetConf::parse).ok());
    let name = |conf: NetConf| {
        let named = conf.json().get("bridge").and_then(Json::as_str).unwrap_or_default().to_owned();
        if named.is_empty() { plugin_bridge::DEFAULT_BRIDGE.to_owned() } else { named }
    };
    confs.map(name).collect()
}

/// Returns the JSON objects of all plugins in a configuration. Returns none if the configuration is
/// invalid or has no list of plugins.
pub(crate) fn plugins_in(config: &[u8]) -> Vec<Json> {
    match Json::parse(config).ok().as_ref().and_then(|config| config.get("plugins")) {
        Some(Json::Array(plugins)) => plugins.clone(),
        _ => Vec::new(),
    }
}

/// Returns the JSON objects of all plugins of the type `kind` in a configuration.
pub(crate) fn plugins_of_type(config: &[u8], kind: &str) -> Vec<Json> {
    let has_kind = |plugin: &Json| plugin.get("type").and_then(Json::as_str) == Some(kind);
    plugins_in(config).into_iter().filter(has_kind).collect()
}

/// Whether a plugin's object has `key` with the value true.
pub(crate) fn is_true(plugin: &Json, key: &str) -> bool {
    plugin.get(key) == Some(&Json::Bool(true))
}

/// Decodes the result in a cache entry.
///
/// # Errors
/// Why there is no result or it cannot be decoded.
pub(crate) fn decode_result(entry: &Entry) -> Result<AddResult, String> {
    let Some(raw) = &entry.result else { return Err("the result cache has no result of this attachment".to_owned()) };
    let json = Json::parse(raw.get().as_bytes()).map_err(|error| error.to_string())?;
    AddResult::decode(&json, Version::NEWEST).map_err(|error| error.to_string())
}

/// Returns the result in a cache entry, or `None` if there is none or it cannot be decoded.
pub(crate) fn result_of(entry: &Entry) -> Option<AddResult> {
    decode_result(entry).ok()
}

/// Whether a backup has no owner and is named like the Go plugin's backup of `attachment`. The name
/// has only the container ID and the interface.
pub(crate) fn has_go_name(backup: &Saved, attachment: &AttachmentId) -> bool {
    let file = backup.path.file_name().unwrap_or_default().to_string_lossy();
    backup.owner.is_none() && file == format!("{}_{}.json", attachment.container_id, attachment.ifname)
}

/// Returns the attachment that a link's alias names, or `None` if it names none. If the alias has
/// only the hash of a long container ID and no entry in `cached` has the attachment, its container
/// ID is `#` and the hash.
fn attachment_in_alias(link: &Link, cached: &[Entry]) -> Option<AttachmentId> {
    let alias = node::attachment_alias_in(link.alias.as_deref()?);
    if let Some(attachment) = cached.iter().map(Entry::id).find(|attachment| attachment.alias() == alias) {
        return Some(attachment);
    }
    let parsed = AttachmentId::parse(&alias)?;
    // For `cni:NETWORK/#HASH/IFNAME`, `parse` returns no container ID.
    let hash = alias.split('/').nth(1).unwrap_or_default().to_owned();
    Some(AttachmentId::new(parsed.network, parsed.container_id.unwrap_or(hash), parsed.ifname))
}
