//! All that is looked at, read once.

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

/// A node at one moment.
pub(crate) struct Snapshot {
    pub(crate) networks: Vec<NetworkList>,
    pub(crate) remembered: Vec<Entry>,
    /// The links of the namespace of this process, which is taken for the host's.
    pub(crate) links: Vec<Link>,
    /// The links with an attachment's mark that go with the container.
    pub(crate) marked: Vec<(AttachmentId, Link)>,
    /// bandwidth's ifbs, which stay when the container has gone; the Go plugin's have no mark.
    pub(crate) ifbs: Vec<(Option<AttachmentId>, Link)>,
    pub(crate) rules: Vec<ContainerRule>,
    pub(crate) saved: Vec<Saved>,
    /// The reservations, by network and folder.
    pub(crate) reservations: Vec<(String, PathBuf, Vec<Reservation>)>,
    /// The addresses with an unusual file: the network, the file, what the file is.
    pub(crate) unusual: Vec<(String, PathBuf, String)>,
    /// The leases that dhcp's daemons have recorded, each with the socket of its daemon.
    pub(crate) leases: Vec<(PathBuf, Lease)>,
}

impl Snapshot {
    pub(crate) fn take(shared: &Shared, call: &Call<'_>, notes: &Notes) -> Result<Snapshot, Error> {
        let networks = node::networks(&shared.conf_folder(&Variables(&call.environment)))?;
        let listing = shared.cache().list_all()?;
        listing.problems.iter().for_each(|problem| notes.note(format_args!("ignored: {problem}")));
        let links = Netlink::open()?.list_links()?;
        let (ifbs, others): (Vec<&Link>, Vec<&Link>) = links.iter().partition(|link| link.is_ifb());
        let marked = others.into_iter().filter_map(|link| Some((bearer(link)?, link.clone()))).collect();
        let ifbs = ifbs.into_iter().filter(|ifb| AttachmentId::is_ifb_name(&ifb.name));
        let ifbs = ifbs.map(|ifb| (bearer(ifb), ifb.clone())).collect();
        let mut folders: Vec<NetConf> = Vec::new();
        for list in &networks {
            for plugin in list.plugins().iter().filter(|plugin| plugin.kind() == "tuning") {
                folders.extend(list.request(plugin, None).and_then(NetConf::parse));
            }
        }
        // The usual folder too: its network may have left the configuration.
        folders.extend(NetConf::parse(r#"{"cniVersion":"1.0.0","name":"any","type":"tuning"}"#));
        let mut backups: Vec<Saved> = Vec::new();
        for conf in folders {
            for one in saved(&conf, notes)? {
                if !backups.iter().any(|known| known.path == one.path) {
                    backups.push(one);
                }
            }
        }
        let place = StoreLocation::default();
        let desk = IpamContext::new(shared, call, &place, notes);
        let (mut reservations, mut unusual) = (Vec::new(), Vec::new());
        for addresses in desk.all()? {
            let (held, odd) = match desk.lock(&addresses)? {
                Some(mut locked) => desk.note_unread(locked.list()?),
                None => Default::default(),
            };
            let folder = addresses.data_dir.clone();
            let file = |address: IpAddr| folder.join(&addresses.network).join(address.to_string());
            unusual.extend(odd.into_iter().map(|(address, what)| (addresses.network.clone(), file(address), what)));
            reservations.push((addresses.network, folder, held));
        }
        let mut leases = Vec::new();
        for socket in sockets(&networks) {
            leases.extend(list(&socket)?.into_iter().map(|lease| (socket.clone(), lease)));
        }
        let rules = list_container_rules(call.machine, notes)?;
        let remembered = listing.entries;
        Ok(Snapshot { networks, remembered, links, marked, ifbs, rules, saved: backups, reservations, unusual, leases })
    }

    /// The host's end of each attachment that is known of: by our mark, else by the cached result,
    /// which is how those that a Go plugin made are found. A name alone may be
    /// another's by now; the MAC is not.
    pub(crate) fn attached(&self) -> Vec<(AttachmentId, &Link)> {
        let mut attached: Vec<(AttachmentId, &Link)> =
            self.marked.iter().map(|(mark, link)| (mark.clone(), link)).collect();
        for entry in &self.remembered {
            let mark = entry.id();
            if attached.iter().any(|(known, _)| *known == mark) {
                continue;
            }
            let named = result_of(entry).map(|result| result.interfaces).unwrap_or_default();
            let is_it = |link: &&Link| {
                let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
                let mut hosts = named.iter().filter(|interface| interface.sandbox.is_empty());
                link.kind == LinkKind::Veth
                    && hosts.any(|one| one.name == link.name && one.mac.eq_ignore_ascii_case(&mac))
            };
            attached.extend(self.links.iter().find(is_it).map(|link| (mark, link)));
        }
        attached
    }

    /// The bridges that containers are on: those of attachments, and those that a configured
    /// network names and that have ports, because what put them there may have left no cache entry.
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

    /// Whether the result cache has it, or a link of the host has its mark.
    pub(crate) fn is_known(&self, mark: &AttachmentId) -> bool {
        self.remembered.iter().any(|entry| entry.id() == *mark) || self.marked.iter().any(|(known, _)| known == mark)
    }
}

/// The bridges that a network's plugins name; the default where they name none.
pub(crate) fn bridges_of(list: &NetworkList) -> Vec<String> {
    let plugins = list.plugins().iter().filter(|plugin| plugin.kind() == "bridge");
    let confs = plugins.filter_map(|plugin| list.request(plugin, None).and_then(NetConf::parse).ok());
    let name = |conf: NetConf| {
        let named = conf.json().get("bridge").and_then(Json::as_str).unwrap_or_default().to_owned();
        if named.is_empty() { "cni0".to_owned() } else { named }
    };
    confs.map(name).collect()
}

/// The keys of each plugin of this type in a configuration.
pub(crate) fn plugins_of(config: &[u8], kind: &str) -> Vec<Json> {
    let plugins = Json::parse(config).ok().and_then(|config| match config.get("plugins") {
        Some(Json::Array(plugins)) => Some(plugins.clone()),
        _ => None,
    });
    let is_it = |plugin: &Json| plugin.get("type").and_then(Json::as_str) == Some(kind);
    plugins.unwrap_or_default().into_iter().filter(is_it).collect()
}

/// Returns the result of an ADD, if the result cache has it and it can be read.
pub(crate) fn result_of(entry: &Entry) -> Option<AddResult> {
    let json = Json::parse(entry.result.as_ref()?.get().as_bytes()).ok()?;
    AddResult::decode(&json, Version::NEWEST).ok()
}

/// The attachment whose mark a link has. A hash replaces an ID that is too long for an alias.
fn bearer(link: &Link) -> Option<AttachmentId> {
    let marked = AttachmentId::parse(&node::mark_in(link.alias.as_deref()?))?;
    let alias = node::mark_in(link.alias.as_deref()?);
    let hashed = alias.split('/').nth(1).unwrap_or_default().to_owned();
    Some(AttachmentId::new(marked.network, marked.container_id.unwrap_or(hashed), marked.ifname))
}
