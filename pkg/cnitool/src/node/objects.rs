//! The objects of attachments besides links and cache entries: packet filter rules, reservations,
//! backups, records and leases. Only this module knows which attachment an object of a plugin
//! belongs to.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::SystemTime;

use cni::config::NetConf;
use cni::rollback::Notes;
use cni::{AttachmentId, Error};
use cni_firewall::container_rules::{ContainerRule, Purpose, RuleOwner, list_container_rules};
use cni_ipam::Reservation;
use libcni::NetworkList;
use plugin_dhcp::leases::Lease;
use plugin_flannel::StoredFile;
use plugin_tuning::Saved;
use serde_json::json;

use super::confs_of_type;
use super::ipam::NetworkPool;
use super::leftovers::quoted;
use super::snapshot::{ListedPool, Snapshot};
use crate::call::Context;
use crate::report::Fact;

/// An object of an attachment.
pub(crate) struct Object {
    /// Its kind in the list of leftovers.
    pub(crate) kind: &'static str,
    /// Its name and the folder, chain, file or socket that has it, for the list of leftovers.
    pub(crate) name: String,
    pub(crate) place: String,
    pub(crate) owner: Owner,
    /// What `inspect` prints about it.
    pub(crate) fact: Fact,
    /// The command that removes it, if it can be removed alone.
    pub(crate) removal: Option<String>,
    /// When it was written, if it is a reservation.
    pub(crate) since: Option<SystemTime>,
}

/// The attachment that an object belongs to, as far as the object names it.
pub(crate) enum Owner {
    /// The network, the container ID and the interface.
    Names([Option<String>; 3]),
    /// A rule often has only a hash.
    Rule(RuleOwner),
    /// The name of the Go plugin's backup, which consists of the container ID and the interface.
    GoBackup(String),
}

impl From<&AttachmentId> for Owner {
    fn from(AttachmentId { network, container_id, ifname }: &AttachmentId) -> Owner {
        Owner::Names([network, container_id, ifname].map(|name| Some(name.clone())))
    }
}

impl Owner {
    /// Returns the network, the container ID and the interface, as far as they are known.
    pub(crate) fn names(&self) -> [Option<&str>; 3] {
        match self {
            Owner::Names(names) => names.each_ref().map(Option::as_deref),
            Owner::Rule(rule) => [&rule.network, &rule.container, &rule.ifname].map(Option::as_deref),
            Owner::GoBackup(_) => [None; 3],
        }
    }

    /// Whether the object belongs to `attachment`, as far as is known. The container ID of
    /// `attachment` may be `#` and a hash.
    pub(crate) fn matches(&self, attachment: &AttachmentId) -> bool {
        let AttachmentId { network, container_id, ifname } = attachment;
        match self {
            Owner::Rule(rule) => rule.matches(attachment),
            Owner::GoBackup(file) => *file == format!("{container_id}_{ifname}.json"),
            Owner::Names([own_network, own_container, own_ifname]) => {
                let has_hash = |id: &String| {
                    container_id.starts_with('#')
                        && AttachmentId::new(network, id, ifname).alias() == attachment.alias()
                };
                own_network.as_ref().is_none_or(|name| name == network)
                    && own_ifname.as_ref().is_none_or(|name| name == ifname)
                    && own_container.as_ref().is_none_or(|id| id == container_id || has_hash(id))
            }
        }
    }

    /// Returns an attachment that the object may belong to, or `None` if the network or the
    /// container is not known, for example because the comment of a rule is truncated. If the
    /// interface is not known, `eth0` is assumed.
    pub(crate) fn attachment(&self) -> Option<AttachmentId> {
        let [network, container, ifname] = self.names();
        let attachment = AttachmentId::new(network?, container?, ifname.unwrap_or("eth0"));
        // A truncated comment does not match.
        self.matches(&attachment).then_some(attachment)
    }
}

/// The kind of a fact about a host port.
pub(crate) const HOST_PORT: &str = "host port";

/// The kind of a reservation, and of a fact about one.
pub(crate) const RESERVATION: &str = "reservation";

/// Returns the objects of all attachments: rules, reservations, leases, backups and records. The
/// reservations, the leases and the networks are those of `snapshot`.
///
/// # Errors
/// - Code 5 if a folder or a file cannot be read; 6 if a configuration's path has the wrong type.
/// - The kernel's error if the packet filter rules cannot be listed.
pub(super) fn read(snapshot: &Snapshot, context: &Context<'_>) -> Result<Vec<Object>, Error> {
    let rules = list_container_rules(context.call.machine, &context.notes)?;
    let mut objects: Vec<Object> = rules.into_iter().map(of_rule).collect();
    for ListedPool { pool, reservations, .. } in &snapshot.pools {
        objects.extend(reservations.iter().map(|reservation| of_reservation(pool, reservation)));
    }
    objects.extend(snapshot.leases.iter().map(|(socket, lease)| of_lease(socket, lease)));
    add_backups(&snapshot.networks, &mut objects, &context.notes)?;
    add_records(&snapshot.networks, &mut objects)?;
    Ok(objects)
}

/// Returns a packet filter rule.
fn of_rule(ContainerRule { purpose, place, owner, text, removal }: ContainerRule) -> Object {
    let kind = if purpose == Purpose::PortMap { HOST_PORT } else { purpose.as_str() };
    let fact = Fact::fine(kind, [("rule", json!(text)), ("place", json!(place))]);
    let (name, owner) = (format!("{}: {text}", purpose.as_str()), Owner::Rule(owner));
    Object { kind: "rule", name, place, owner, fact, removal, since: None }
}

/// Returns a reservation of host-local.
fn of_reservation(pool: &NetworkPool, Reservation { address, id, ifname, since }: &Reservation) -> Object {
    let folder = pool.folder().display().to_string();
    // Without `--data-dir`, cnitool prefers the folder that the network's configuration names.
    let (network, data_dir) = (quoted(&pool.network), quoted(&pool.data_dir.to_string_lossy()));
    let removal = Some(format!("cnitool ipam release {network} {address} --data-dir {data_dir}"));
    let owner = Owner::Names([Some(pool.network.clone()), Some(id.clone()), ifname.clone()]);
    let fact = Fact::fine(RESERVATION, [("address", json!(address)), ("folder", json!(folder))]);
    Object { kind: RESERVATION, name: address.to_string(), place: folder, owner, fact, removal, since: *since }
}

/// Returns a lease of the daemon of dhcp at `socket`.
fn of_lease(
    socket: &Path,
    Lease { network, container_id, ifname, address, server, times, error, .. }: &Lease,
) -> Object {
    let fields = [
        ("address", json!(address.to_string())),
        ("server", json!(server)),
        ("unconfirmed", json!(times.is_none())),
        ("expirySeconds", json!(times.and_then(|times| times.expiry).map(|left| left.as_secs()))),
        ("socket", json!(socket.to_string_lossy())),
    ];
    // DEL of the plugin dhcp makes the daemon release the lease.
    let ipam = json!({"type": "dhcp", "daemonSocketPath": socket});
    let config = json!({"cniVersion": "1.0.0", "name": network, "type": "dhcp", "ipam": ipam}).to_string();
    let [config, id, name] = [&config, container_id, ifname].map(|word| quoted(word));
    let removal = Some(format!("echo {config} | CNI_COMMAND=DEL CNI_CONTAINERID={id} CNI_IFNAME={name} dhcp"));
    let owner = Owner::from(&AttachmentId::new(network, container_id, ifname));
    let fact = Fact { problem: error.clone(), ..Fact::fine("lease", fields) };
    let (name, place) = (address.to_string(), socket.display().to_string());
    Object { kind: "lease", name, place, owner, fact, removal, since: None }
}

/// Adds the backups of tuning in the folders that the networks configure, and in the default
/// folder, which also has those of networks that are not configured any more.
///
/// # Errors
/// Code 5 if a folder or a file cannot be read; 6 if a `dataDir` has the wrong type.
fn add_backups(networks: &[NetworkList], objects: &mut Vec<Object>, notes: &Notes) -> Result<(), Error> {
    for Saved { path, owner, settings } in plugin_tuning::saved(&confs_with_default(networks, "tuning"), notes)? {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let owner = match owner {
            Some((network, id, ifname)) => Owner::Names([network, id, ifname].map(Some)),
            None => Owner::GoBackup(file.into_owned()),
        };
        let fact = Fact::fine("saved", [("settings", json!(settings)), ("file", json!(path.to_string_lossy()))]);
        let (name, place) = (settings.join(", "), path.display().to_string());
        let removal = Some(rm_command(&path));
        objects.push(Object { kind: "backup", name, place, owner, fact, removal, since: None });
    }
    Ok(())
}

/// Adds the records of bond, host-device and route-override, and those of flannel in the folders
/// that the networks configure and in the default folder. Only DEL gives back the interfaces in a
/// record of bond or host-device, so no command removes such a record alone.
///
/// # Errors
/// Code 5 if a folder or a file cannot be read; 6 if a configuration's path has the wrong type.
fn add_records(networks: &[NetworkList], objects: &mut Vec<Object>) -> Result<(), Error> {
    let mut add = |plugin: &str, path: &Path, name: String, owner: Owner, removal| {
        let mut fact = Fact::fine("record", [("plugin", json!(plugin)), ("file", json!(path.to_string_lossy()))]);
        match owner.names() {
            [None, ..] => fact.problem = Some(name.clone()),
            _ => fact.fields.push(("content", json!(name))),
        }
        let place = path.display().to_string();
        objects.push(Object { kind: "record", name, place, owner, fact, removal, since: None });
    };
    for plugin in ["bond", "host-device", "route-override"] {
        for (path, attachment) in cni_plugin::record::list(&Path::new("/run/cni").join(plugin))? {
            add(plugin, &path, "for DEL".to_owned(), Owner::from(&attachment), None);
        }
    }
    let mut seen = BTreeSet::new();
    for conf in confs_with_default(networks, "flannel") {
        for StoredFile { path, container_id, network, text } in plugin_flannel::stored_files(&conf)? {
            if seen.insert(path.clone()) {
                // flannel records one configuration for each container.
                let owner = Owner::Names([network, Some(container_id), None]);
                add("flannel", &path, text, owner, Some(rm_command(&path)));
            }
        }
    }
    Ok(())
}

/// Returns the command that removes a file.
fn rm_command(path: &Path) -> String {
    format!("rm {}", quoted(&path.to_string_lossy()))
}

/// Returns the configurations of the plugin `kind` in all networks, and one without keys, which
/// selects the default folder.
fn confs_with_default(networks: &[NetworkList], kind: &str) -> Vec<NetConf> {
    let mut confs: Vec<NetConf> =
        networks.iter().flat_map(|list| confs_of_type(list, kind).map(|(_, conf)| conf)).collect();
    confs.extend(NetConf::parse(format!(r#"{{"cniVersion":"1.0.0","name":"any","type":"{kind}"}}"#)));
    confs
}
