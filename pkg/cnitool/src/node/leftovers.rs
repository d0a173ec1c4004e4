//! Lists leftovers: links, devices, rules, reservations, backups, records, leases and cache entries
//! of containers that do not exist any more.
//!
//! An object is a leftover if the result cache does not have its attachment and no link of the host
//! has the attachment's alias. Exceptions:
//! - A link is a leftover if the result cache does not have its attachment.
//! - A backup of the Go plugin names no network, so only its container and interface are compared.
//! - A cache entry is a leftover if its namespace is gone.
//! - A device of host-device is a leftover if the kernel has moved it back to the host.
//!
//! The objects of an ADD that is still running look like leftovers. So nothing is removed here;
//! each leftover gets a command that the operator can run.

use std::collections::BTreeSet;

use cni::AttachmentId;
use cni::json::Json;
use cni_linux::{Link, LinkKind};
use libcni::NetworkList;
use serde::Serialize;

use super::attachments::{CachedAttachment, Liveness};
use super::objects::{Object, Owner, RESERVATION};
use super::plugins_of_type;
use super::snapshot::Snapshot;

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

/// Why links, reservations and backups are leftovers.
const NOT_CACHED: &str = "the result cache does not have its attachment";

/// Why rules, records and leases are leftovers.
const NOT_KNOWN: &str = "the result cache does not have its attachment, and no link has its alias";

/// Why a device of host-device is a leftover.
const RETURNED_DEVICE: &str =
    "host-device moved it into a container, whose namespace was deleted; the kernel moved it back";

impl Leftover {
    /// Returns a leftover of the attachment with these names, as far as they are known.
    fn new(kind: &'static str, object: &str, names: [Option<&str>; 3], reason: &str, command: String) -> Leftover {
        let [network, container_id, ifname] = names.map(|name| name.map(str::to_owned));
        let (object, reason) = (object.to_owned(), reason.to_owned());
        Leftover { kind, object, place: None, network, container_id, ifname, reason, command }
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
pub(crate) fn list(snapshot: &Snapshot) -> Vec<Leftover> {
    // Not `del_command`: if the network is not configured, `cnitool del` uses the configuration in
    // the cache entry.
    let of_entry = |cached: &CachedAttachment| {
        let (id, Liveness::ContainerGone(why)) = (&cached.id, cached.liveness()) else { return None };
        Some(Leftover::new("attachment", "cache entry", Owner::from(id).names(), &why, quoted_del_command(id)))
    };
    let mut leftovers: Vec<Leftover> = snapshot.attachments.cached.iter().filter_map(of_entry).collect();
    add_links(snapshot, &mut leftovers);
    add_returned_devices(snapshot, &mut leftovers);
    let unknown = snapshot.objects.iter().filter(|object| !snapshot.attachments.has_owner(&object.owner));
    leftovers.extend(unknown.map(|object| of_object(snapshot, object)));
    leftovers
}

/// Returns the leftover for an object.
fn of_object(snapshot: &Snapshot, Object { kind, name, place, owner, removal, .. }: &Object) -> Leftover {
    let attachment = owner.attachment();
    let delete = || attachment.as_ref().and_then(|attachment| del_command(snapshot, attachment));
    let command = match (*kind, removal, &attachment) {
        // Its attachment may be unknown because it has nothing else.
        (RESERVATION, Some(command), _) => command.clone(),
        (_, Some(command), _) => delete().unwrap_or_else(|| command.clone()),
        (_, None, Some(attachment)) => delete().unwrap_or_else(|| {
            // `cnitool del` needs a configuration.
            let network = quoted(&attachment.network);
            format!("configure network {network} again, then run {}", quoted_del_command(attachment))
        }),
        (_, None, None) => format!("find the {kind} in {place} and delete it by hand"),
    };
    let reason = if ["reservation", "backup"].contains(kind) { NOT_CACHED } else { NOT_KNOWN };
    Leftover { place: Some(place.clone()), ..Leftover::new(kind, name, owner.names(), reason, command) }
}

/// Returns the command `cnitool del` for an attachment, or `None` if its network is not configured,
/// its container ID is only known as a hash (`#…`), or a name would need quotes.
fn del_command(snapshot: &Snapshot, attachment: &AttachmentId) -> Option<String> {
    let AttachmentId { network, container_id: container, ifname } = attachment;
    let is_plain = [network, container, ifname].iter().all(|word| word.bytes().all(is_plain_byte));
    let is_configured = snapshot.networks.iter().any(|list| list.name() == network);
    (is_configured && is_plain && !container.starts_with('#')).then(|| quoted_del_command(attachment))
}

/// Returns the command `cnitool del` for an attachment, with each name quoted if necessary.
fn quoted_del_command(AttachmentId { network, container_id, ifname }: &AttachmentId) -> String {
    let [network, id, ifname] = [network, container_id, ifname].map(|word| quoted(word));
    format!("cnitool del {network} --container-id {id} --ifname {ifname} --keep-going")
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

/// Adds the links and ifbs whose alias names an attachment that the result cache does not have.
/// Adds the ifbs without an alias, except those with the name of a cached attachment's ifb: they
/// come from the Go plugin, or from an ADD that was killed.
fn add_links(snapshot: &Snapshot, leftovers: &mut Vec<Leftover>) {
    let attachments = &snapshot.attachments;
    let aliased = attachments.aliased_links.iter().map(|(attachment, link)| (Some(attachment), link));
    let ifbs = snapshot.ifbs.iter().map(|(attachment, ifb)| (attachment.as_ref(), ifb));
    let is_ifb_of = |CachedAttachment { id, .. }: &CachedAttachment, link: &Link| {
        [id.ifb_name(), id.own_ifb_name()].contains(&link.name)
    };
    for (attachment, link) in aliased.chain(ifbs) {
        let delete_command = || format!("ip link delete dev {}", quoted(&link.name));
        leftovers.push(match attachment {
            Some(attachment) if attachments.find_cached(attachment).is_some() => continue,
            Some(attachment) => {
                let command = del_command(snapshot, attachment).unwrap_or_else(delete_command);
                Leftover::new("link", &link.name, Owner::from(attachment).names(), NOT_CACHED, command)
            }
            None if attachments.cached.iter().any(|cached| is_ifb_of(cached, link)) => continue,
            None => {
                let why = "the result cache has no container whose bandwidth it could limit";
                Leftover::new("link", &link.name, [None; 3], why, delete_command())
            }
        });
    }
}

/// Adds the devices of host-device that the kernel has moved back to the host because the
/// container's namespace was deleted.
fn add_returned_devices(snapshot: &Snapshot, leftovers: &mut Vec<Leftover>) {
    let configured = snapshot.networks.iter().map(NetworkList::raw);
    let recorded = snapshot.attachments.cached.iter().map(|cached| cached.entry.config.as_slice());
    // Most attachments of a network have the same configuration.
    let configs: BTreeSet<&[u8]> = configured.chain(recorded).collect();
    let host_device_plugins: Vec<Json> =
        configs.into_iter().flat_map(|config| plugins_of_type(config, "host-device")).collect();
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
            leftovers.push(Leftover::new("device", &link.name, [None; 3], RETURNED_DEVICE, command));
        }
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
