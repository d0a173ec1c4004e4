//! Lists leftovers: links, devices, rules, reservations, backups, records, leases and cache entries
//! of containers that do not exist any more.
//!
//! An object is a leftover if the result cache does not have its attachment and no link of the host
//! has the attachment's alias. Exceptions:
//! - A link is a leftover if the result cache does not have its attachment.
//! - A backup of the Go plugin names no network, so it is compared only with the result cache.
//! - A cache entry is a leftover if its namespace is gone.
//! - A device of host-device is a leftover if the kernel has moved it back to the host.
//!
//! The objects of an ADD that is still running look like leftovers. So nothing is removed here;
//! each leftover gets a command that the operator can run.

use cni::AttachmentId;
use cni::json::Json;
use cni_firewall::container_rules::{ContainerRule, RuleOwner};
use cni_linux::{Link, LinkKind};
use libcni::NetworkList;
use libcni::cache::Entry;
use plugin_dhcp::leases::Lease;
use serde::Serialize;
use serde_json::json;

use super::attachments::{CheckedReservation, Liveness};
use super::plugins_of_type;
use super::snapshot::{ListedPool, Snapshot, has_go_name};
use crate::call::Call;

/// A leftover object. What is not known of it is `None`.
#[derive(Serialize)]
pub(crate) struct Leftover {
    /// The kind of object: `link`, `rule`, `reservation`, …
    pub(crate) kind: &'static str,
    /// The object: its name, address, rule or path.
    object: String,
    /// The folder, chain or socket that has the object.
    place: Option<String>,
    pub(crate) network: Option<String>,
    #[serde(rename = "containerID")]
    pub(crate) container_id: Option<String>,
    ifname: Option<String>,
    /// Why it is a leftover.
    pub(crate) reason: String,
    /// The command that removes it.
    pub(crate) command: String,
}

/// Why most objects are leftovers.
const NOT_KNOWN: &str = "the result cache does not have its attachment, and no link has its alias";

/// As [`NOT_KNOWN`], for objects that are compared with the result cache only.
const NOT_CACHED: &str = "the result cache does not have its attachment";

/// Why a device of host-device is a leftover.
const RETURNED_DEVICE: &str =
    "host-device moved it into a container, whose namespace was deleted; the kernel moved it back";

impl Leftover {
    /// Returns a leftover of `attachment`, if that is known.
    fn new(
        kind: &'static str,
        (object, place): (impl Into<String>, Option<String>),
        attachment: Option<&AttachmentId>,
        reason: &str,
        command: String,
    ) -> Leftover {
        Leftover {
            kind,
            object: object.into(),
            place,
            network: attachment.map(|attachment| attachment.network.clone()),
            container_id: attachment.map(|attachment| attachment.container_id.clone()),
            ifname: attachment.map(|attachment| attachment.ifname.clone()).filter(|name| !name.is_empty()),
            reason: reason.to_owned(),
            command,
        }
    }

    /// Returns the object and its attachment for people.
    pub(crate) fn text(&self) -> String {
        let known = [&self.network, &self.container_id, &self.ifname];
        let words: Vec<&str> = known.into_iter().map(|name| name.as_deref().unwrap_or("?")).collect();
        let owner = if known == [&None; 3] { String::new() } else { format!(" of {}", words.join(" ")) };
        let place = self.place.as_ref().map(|place| format!("  [{place}]")).unwrap_or_default();
        format!("{}{owner}{place}", self.object)
    }
}

/// Returns all leftovers. Several may have the same command, if it removes all of them.
pub(crate) fn list(snapshot: &Snapshot, call: &Call<'_>) -> Vec<Leftover> {
    let mut leftovers = Vec::new();
    add_cache_entries(snapshot, call, &mut leftovers);
    add_links(snapshot, &mut leftovers);
    add_ifbs_without_alias(snapshot, &mut leftovers);
    add_returned_devices(snapshot, &mut leftovers);
    add_rules(snapshot, &mut leftovers);
    add_reservations(snapshot, &mut leftovers);
    add_backups(snapshot, &mut leftovers);
    add_records(snapshot, &mut leftovers);
    add_leases(snapshot, &mut leftovers);
    leftovers
}

/// Returns the command `cnitool del` for an attachment, or `None` if its network is not configured,
/// its container ID is only known as a hash (`#…`), or a name would need quotes.
fn del_command(snapshot: &Snapshot, attachment: &AttachmentId) -> Option<String> {
    let AttachmentId { network, container_id: container, ifname } = attachment;
    let is_plain = [network, container, ifname].iter().all(|word| word.bytes().all(is_plain_byte));
    if !snapshot.is_configured(network) || !is_plain || container.starts_with('#') {
        return None;
    }
    Some(quoted_del_command(attachment))
}

/// Returns the command `cnitool del` for an attachment, with each name quoted if necessary.
fn quoted_del_command(AttachmentId { network, container_id, ifname }: &AttachmentId) -> String {
    let [network, id, ifname] = [network, container_id, ifname].map(|word| quoted(word));
    format!("cnitool del {network} --container-id {id} --ifname {ifname} --keep-going")
}

/// Returns instructions for an attachment without a cache entry, whose network is not configured:
/// `cnitool del` needs a configuration.
fn del_instructions(attachment: &AttachmentId) -> String {
    let network = quoted(&attachment.network);
    format!("configure network {network} again, then run {}", quoted_del_command(attachment))
}

/// Whether a byte has no special meaning in a shell.
fn is_plain_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':' | b'/' | b'@' | b'+')
}

/// Quotes a word for a shell, if necessary. A word with control or non-ASCII characters becomes
/// `$'…'` (bash, zsh) with octal escapes, so that no such character reaches the terminal.
pub(crate) fn quoted(word: &str) -> String {
    let is_printable = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
    if !word.is_empty() && word.bytes().all(is_plain_byte) {
        word.to_owned()
    } else if word.bytes().all(is_printable) {
        format!("'{}'", word.replace('\'', r"'\''"))
    } else {
        let escape =
            |byte: u8| if is_plain_byte(byte) { char::from(byte).to_string() } else { format!("\\{byte:03o}") };
        format!("$'{}'", word.bytes().map(escape).collect::<String>())
    }
}

/// Adds the entries of the result cache whose namespace does not exist any more.
fn add_cache_entries(snapshot: &Snapshot, call: &Call<'_>, leftovers: &mut Vec<Leftover>) {
    for entry in &snapshot.attachments.cached {
        let Liveness::ContainerGone(why) = Liveness::of(entry, call.machine) else { continue };
        let attachment = entry.id();
        // Not `del_command`: if the network is not configured, `cnitool del` uses the configuration
        // in the cache entry.
        let command = quoted_del_command(&attachment);
        let object = ("cache entry", None);
        leftovers.push(Leftover::new("attachment", object, Some(&attachment), &why, command));
    }
}

/// Adds the links and ifbs whose alias names an attachment that the result cache does not have.
fn add_links(snapshot: &Snapshot, leftovers: &mut Vec<Leftover>) {
    let links = snapshot.attachments.aliased_links.iter().map(|(attachment, link)| (attachment, link));
    let ifbs = snapshot.ifbs.iter().filter_map(|(attachment, ifb)| Some((attachment.as_ref()?, ifb)));
    for (attachment, link) in links.chain(ifbs).filter(|(attachment, _)| !snapshot.attachments.is_cached(attachment)) {
        let delete_command = || format!("ip link delete dev {}", quoted(&link.name));
        let command = del_command(snapshot, attachment).unwrap_or_else(delete_command);
        leftovers.push(Leftover::new("link", (&link.name, None), Some(attachment), NOT_CACHED, command));
    }
}

/// Adds the ifbs without an alias, except those with the name of a cached attachment's ifb. Such
/// ifbs come from the Go plugin, or from an ADD that was killed.
fn add_ifbs_without_alias(snapshot: &Snapshot, leftovers: &mut Vec<Leftover>) {
    for (_, ifb) in snapshot.ifbs.iter().filter(|(attachment, _)| attachment.is_none()) {
        // An attachment's ifb has one of these names.
        let possible_names = |entry: &Entry| [entry.id().ifb_name(), entry.id().own_ifb_name()];
        if !snapshot.attachments.cached.iter().any(|entry| possible_names(entry).contains(&ifb.name)) {
            let why = "the result cache has no container whose bandwidth it could limit";
            let command = format!("ip link delete dev {}", ifb.name);
            leftovers.push(Leftover::new("link", (&ifb.name, None), None, why, command));
        }
    }
}

/// Adds the devices of host-device that the kernel has moved back to the host because the
/// container's namespace was deleted.
fn add_returned_devices(snapshot: &Snapshot, leftovers: &mut Vec<Leftover>) {
    let configured = snapshot.networks.iter().map(NetworkList::raw);
    let recorded = snapshot.attachments.cached.iter().map(|entry| entry.config.as_slice());
    let host_device_plugins: Vec<Json> =
        configured.chain(recorded).flat_map(|config| plugins_of_type(config, "host-device")).collect();
    // A configuration without `device` selects a device by an address, or the runtime selects it.
    // So any device may be meant.
    let may_be_configured = |link: &Link, original_name: &str| {
        host_device_plugins.iter().any(|plugin| match plugin.get("device").and_then(Json::as_str) {
            Some(device) => device == original_name,
            None => link.kind == LinkKind::Device,
        })
    };
    for link in &snapshot.attachments.links {
        // While a device is in a container, its alias is its original name. host-device's DEL
        // removes the alias, so a device on the host that still has it was moved back by the
        // kernel.
        let Some(name) = link.alias.as_deref().filter(|name| cni::ident::check_interface_name(name).is_ok()) else {
            continue;
        };
        if may_be_configured(link, name) {
            let (current, original) = (quoted(&link.name), quoted(name));
            let command = match link.name == name {
                true => format!("ip link set dev {current} alias ''"),
                false => {
                    format!("ip link set dev {current} down && ip link set dev {current} name {original} alias ''")
                }
            };
            leftovers.push(Leftover::new("device", (&link.name, None), None, RETURNED_DEVICE, command));
        }
    }
}

/// Returns the attachments in the result cache, and those that the alias of a link names.
fn known_attachments(snapshot: &Snapshot) -> Vec<AttachmentId> {
    let cached = snapshot.attachments.cached.iter().map(Entry::id);
    let by_alias = snapshot.attachments.aliased_links.iter().map(|(attachment, _)| attachment.clone());
    cached.chain(by_alias).collect()
}

/// Adds the packet filter rules of attachments that are neither in the result cache nor named by a
/// link's alias.
fn add_rules(snapshot: &Snapshot, leftovers: &mut Vec<Leftover>) {
    let known = known_attachments(snapshot);
    for rule in &snapshot.rules {
        let owner = &rule.owner;
        if known.iter().any(|attachment| owner.matches(attachment)) {
            continue;
        }
        let object = (format!("{}: {}", rule.purpose, rule.text), Some(rule.place.clone()));
        leftovers.push(Leftover {
            network: owner.network.clone(),
            container_id: owner.container.clone(),
            ifname: owner.ifname.clone(),
            ..Leftover::new("rule", object, None, NOT_KNOWN, rule_command(snapshot, rule))
        });
    }
}

/// Returns the command that removes a rule: `cnitool del` if possible, otherwise the command in the
/// rule. If there is neither, returns instructions for the operator.
fn rule_command(snapshot: &Snapshot, rule: &ContainerRule) -> String {
    let attachment = attachment_of_owner(&rule.owner);
    if let Some(command) = attachment.as_ref().and_then(|attachment| del_command(snapshot, attachment)) {
        return command;
    }
    if let Some(command) = &rule.removal {
        return command.clone();
    }
    match &attachment {
        Some(attachment) => del_instructions(attachment),
        None => format!("find the rule in {} and delete it by hand", rule.place),
    }
}

/// Returns an attachment that a rule's owner may be, or `None` if the rule lacks the network or the
/// container ID, or its comment is truncated. If the rule has no interface, `eth0` is assumed.
pub(crate) fn attachment_of_owner(owner: &RuleOwner) -> Option<AttachmentId> {
    let (network, container) = (owner.network.as_ref()?, owner.container.as_ref()?);
    let attachment = AttachmentId::new(network, container, owner.ifname.as_deref().unwrap_or("eth0"));
    // A truncated comment does not match.
    owner.matches(&attachment).then_some(attachment)
}

/// Adds the reservations of attachments about which nothing is known. If the container is gone,
/// `add_cache_entries` adds its attachment.
fn add_reservations(snapshot: &Snapshot, leftovers: &mut Vec<Leftover>) {
    for ListedPool { pool, reservations, .. } in &snapshot.pools {
        for CheckedReservation { reservation, liveness } in reservations {
            let Liveness::Unknown(why) = liveness else { continue };
            let object = (reservation.address.to_string(), Some(pool.folder().display().to_string()));
            let ifname = reservation.ifname.as_deref().unwrap_or_default();
            let attachment = AttachmentId::new(&pool.network, &reservation.id, ifname);
            // Without `--data-dir`, cnitool prefers the folder that the network's configuration
            // names.
            let data_dir = quoted(&pool.data_dir.to_string_lossy());
            let (network, address) = (quoted(&pool.network), reservation.address);
            let command = format!("cnitool ipam release {network} {address} --data-dir {data_dir}");
            leftovers.push(Leftover::new("reservation", object, Some(&attachment), why, command));
        }
    }
}

/// Adds tuning's backups of attachments that are neither in the result cache nor named by a link's
/// alias.
fn add_backups(snapshot: &Snapshot, leftovers: &mut Vec<Leftover>) {
    for backup in &snapshot.backups {
        let owner = backup.owner.as_ref().map(|(network, id, ifname)| AttachmentId::new(network, id, ifname));
        let is_known = match &owner {
            Some(attachment) => snapshot.attachments.is_known(attachment),
            // A backup of the Go plugin.
            None => snapshot.attachments.cached.iter().any(|entry| has_go_name(backup, &entry.id())),
        };
        if is_known {
            continue;
        }
        let object = (backup.settings.join(", "), Some(backup.path.display().to_string()));
        let rm_command = || format!("rm {}", quoted(&backup.path.to_string_lossy()));
        let command = owner.as_ref().and_then(|attachment| del_command(snapshot, attachment));
        let command = command.unwrap_or_else(rm_command);
        leftovers.push(Leftover::new("backup", object, owner.as_ref(), NOT_CACHED, command));
    }
}

/// Adds the records of bond, flannel, host-device and route-override about attachments that are
/// neither in the result cache nor named by a link's alias. Only DEL gives back the interfaces in a
/// record of bond or host-device, so no command removes such a record alone.
fn add_records(snapshot: &Snapshot, leftovers: &mut Vec<Leftover>) {
    let known = known_attachments(snapshot);
    for record in &snapshot.records {
        if known.iter().any(|attachment| record.is_about(attachment)) {
            continue;
        }
        let object = (record.text.clone(), Some(record.path.display().to_string()));
        let attachment = record.attachment();
        let command = attachment.as_ref().and_then(|attachment| del_command(snapshot, attachment));
        let command = command.unwrap_or_else(|| match &attachment {
            Some(attachment) if record.plugin != "flannel" => del_instructions(attachment),
            _ => format!("rm {}", quoted(&record.path.to_string_lossy())),
        });
        leftovers.push(Leftover::new("record", object, attachment.as_ref(), NOT_KNOWN, command));
    }
}

/// Adds the leases of dhcp's daemons of attachments that are neither in the result cache nor named
/// by a link's alias.
fn add_leases(snapshot: &Snapshot, leftovers: &mut Vec<Leftover>) {
    for (socket, Lease { network, container_id, ifname, address, .. }) in &snapshot.leases {
        let attachment = AttachmentId::new(network, container_id, ifname);
        if snapshot.attachments.is_known(&attachment) {
            continue;
        }
        // Without `cnitool del`: DEL of the plugin dhcp makes the daemon release the lease.
        let plugin_command = || {
            let ipam = json!({"type": "dhcp", "daemonSocketPath": socket});
            let config = json!({"cniVersion": "1.0.0", "name": network, "type": "dhcp", "ipam": ipam}).to_string();
            let [config, id, ifname] = [&config, container_id, ifname].map(|word| quoted(word));
            format!("echo {config} | CNI_COMMAND=DEL CNI_CONTAINERID={id} CNI_IFNAME={ifname} dhcp")
        };
        let object = (address.to_string(), Some(socket.display().to_string()));
        let command = del_command(snapshot, &attachment).unwrap_or_else(plugin_command);
        leftovers.push(Leftover::new("lease", object, Some(&attachment), NOT_KNOWN, command));
    }
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn a_word_stays_one_word_whatever_is_in_it() {
        for (word, shown) in [
            ("br0", "br0"),
            ("", "''"),
            ("br0;id", "'br0;id'"),
            ("a'b$(id)", r"'a'\''b$(id)'"),
            ("a\x1b[2J'", r"$'a\033\1332J\047'"),
            ("ö", r"$'\303\266'"),
        ] {
            assert_eq!(quoted(word), shown);
        }
    }
}
