//! Finds leftovers: links, devices, rules, reservations, backups, leases and cache entries of
//! containers that do not exist any more.
//!
//! An object is a leftover if the result cache does not have its attachment and no link of the host
//! has the attachment's alias. During an ADD its objects look the same for a moment. So nothing is
//! removed here; only the command is printed.

use std::path::Path;

use cni::AttachmentId;
use cni::Error;
use cni::json::Json;
use cni_linux::{Link, LinkKind};
use libcni::NetworkList;
use libcni::cache::Entry;
use plugin_dhcp::leases::Lease;
use serde_json::{Value, json};

use super::snapshot::{Snapshot, plugins_of};
use crate::Call;
use crate::node::{Liveness, LivenessSources};
use crate::target::NetnsPresence;

/// A leftover object.
pub(crate) struct Orphan {
    /// The kind of object: `link`, `rule`, `reservation`, …
    pub(crate) kind: &'static str,
    /// A description of the object.
    pub(crate) what: String,
    /// The network, if it is known.
    pub(crate) network: Option<String>,
    /// The container's ID, if it is known.
    pub(crate) container: Option<String>,
    /// Why it is a leftover.
    pub(crate) why: String,
    /// The command that removes it.
    pub(crate) command: String,
}

impl Orphan {
    /// Returns the leftover for `inspect --json`.
    pub(crate) fn json(&self) -> Value {
        json!({
            "kind": self.kind,
            "what": self.what,
            "network": self.network,
            "containerID": self.container,
            "reason": self.why,
            "command": self.command,
        })
    }
}

/// Returns all leftovers. One command often removes several of them; each is listed.
pub(crate) fn find(snapshot: &Snapshot, call: &Call<'_>) -> Result<Vec<Orphan>, Error> {
    let mut orphans = Vec::new();
    find_cache_entries(snapshot, call, &mut orphans);
    find_links(snapshot, &mut orphans);
    find_devices(snapshot, &mut orphans);
    find_rules(snapshot, &mut orphans);
    find_reservations(snapshot, call, &mut orphans);
    find_backups(snapshot, &mut orphans);
    find_leases(snapshot, &mut orphans);
    Ok(orphans)
}

/// Returns the command `cnitool del` for an attachment, or `None` if its network is not configured,
/// its container ID is only known as a hash (`#…`), or a name would need quotes.
fn del_command(snapshot: &Snapshot, attachment: &AttachmentId) -> Option<String> {
    let AttachmentId { network, container_id: container, ifname } = attachment;
    let is_plain = [network, container, ifname].iter().all(|word| word.bytes().all(is_plain_byte));
    if !snapshot.is_configured(network) || !is_plain || container.starts_with('#') {
        return None;
    }
    Some(format!("cnitool del {network} --container-id {container} --ifname {ifname} --keep-going"))
}

/// Whether a byte has no special meaning in a shell.
fn is_plain_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':' | b'/' | b'@' | b'+')
}

/// Quotes a word for a shell, if necessary. Control characters and characters that are not ASCII
/// are printed as octal numbers in `$'…'`, which bash and zsh understand, so that they do not reach
/// the terminal.
pub(crate) fn quoted(word: &str) -> String {
    if !word.is_empty() && word.bytes().all(is_plain_byte) {
        word.to_owned()
    } else if !word.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()) {
        let escape =
            |byte: u8| if is_plain_byte(byte) { char::from(byte).to_string() } else { format!("\\{byte:03o}") };
        format!("$'{}'", word.bytes().map(escape).collect::<String>())
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Finds cache entries whose namespace does not exist any more.
fn find_cache_entries(snapshot: &Snapshot, call: &Call<'_>, orphans: &mut Vec<Orphan>) {
    for entry in &snapshot.remembered {
        let netns = &entry.attachment.netns;
        let NetnsPresence::Gone(why) = NetnsPresence::of(netns, call.machine) else { continue };
        let attachment = entry.id();
        // `cnitool del` works even without the network's file: it uses the configuration in the
        // entry.
        let words = [&attachment.network, &attachment.container_id, &attachment.ifname].map(|word| quoted(word));
        let [network, container, ifname] = &words;
        orphans.push(Orphan {
            kind: "attachment",
            what: format!("{} {} {}", attachment.network, attachment.container_id, attachment.ifname),
            command: format!("cnitool del {network} --container-id {container} --ifname {ifname} --keep-going"),
            network: Some(attachment.network),
            container: Some(attachment.container_id),
            why: format!("its namespace {netns} is gone: {why}"),
        });
    }
}

/// Finds links and ifbs whose alias names an attachment that the result cache does not have.
fn find_links(snapshot: &Snapshot, orphans: &mut Vec<Orphan>) {
    let ifbs = snapshot.ifbs.iter().filter_map(|(attachment, ifb)| Some((attachment.as_ref()?, ifb)));
    for (attachment, link) in snapshot.marked.iter().map(|(attachment, link)| (attachment, link)).chain(ifbs) {
        let is_cached = snapshot.remembered.iter().any(|entry| entry.id().alias() == attachment.alias());
        // The alias of a long container ID has its hash instead, and so has the alias of the entry.
        let is_cached_by_hash = link.alias.as_deref().is_some_and(|alias| {
            snapshot.remembered.iter().any(|entry| entry.id().is_on(Some(&crate::node::mark_in(alias))))
        });
        if is_cached || is_cached_by_hash {
            continue;
        }
        let command =
            del_command(snapshot, attachment).unwrap_or_else(|| format!("ip link delete dev {}", quoted(&link.name)));
        orphans.push(Orphan {
            kind: "link",
            what: format!(
                "{}, alias of {} {} {}",
                link.name, attachment.network, attachment.container_id, attachment.ifname
            ),
            network: Some(attachment.network.clone()),
            container: Some(attachment.container_id.clone()),
            why: "the result cache does not have its attachment".to_owned(),
            command,
        });
    }
}

/// Finds ifbs without an alias, which the Go plugin or a killed ADD has created, and devices of
/// host-device that the kernel has moved back to the host because the container's namespace was
/// deleted.
fn find_devices(snapshot: &Snapshot, orphans: &mut Vec<Orphan>) {
    let mut push = |kind, what, why: &str, command| {
        let (network, container) = (None, None);
        orphans.push(Orphan { kind, what, network, container, why: why.to_owned(), command });
    };
    for (_, ifb) in snapshot.ifbs.iter().filter(|(attachment, _)| attachment.is_none()) {
        let names = |entry: &Entry| [entry.id().ifb_name(), entry.id().own_ifb_name()];
        if !snapshot.remembered.iter().any(|entry| names(entry).contains(&ifb.name)) {
            let (what, command) =
                (format!("{}, without an alias", ifb.name), format!("ip link delete dev {}", ifb.name));
            push("link", what, "the result cache has no container whose bandwidth it could limit", command);
        }
    }
    let configured = snapshot.networks.iter().map(NetworkList::raw);
    let confs = configured.chain(snapshot.remembered.iter().map(|entry| entry.config.as_slice()));
    let host_device_plugins: Vec<Json> = confs.flat_map(|config| plugins_of(config, "host-device")).collect();
    // If a configuration selects its device by an address, or the runtime selects it, its name is
    // not known, so it can be any device.
    let is_selected = |link: &Link, name: &str| {
        host_device_plugins.iter().any(|plugin| match plugin.get("device").and_then(Json::as_str) {
            Some(device) => device == name,
            None => link.kind == LinkKind::Device,
        })
    };
    for link in &snapshot.links {
        // While a device is in a container, host-device keeps its original name as the alias.
        let Some(name) = link.alias.as_deref().filter(|name| cni::ident::check_interface_name(name).is_ok()) else {
            continue;
        };
        if is_selected(link, name) {
            let (current, original) = (quoted(&link.name), quoted(name));
            let command = match link.name == name {
                true => format!("ip link set dev {current} alias ''"),
                false => {
                    format!("ip link set dev {current} down && ip link set dev {current} name {original} alias ''")
                }
            };
            let why = "host-device moved it into a container, whose namespace was deleted; the kernel moved it back";
            push("device", format!("{}, original name {name}", link.name), why, command);
        }
    }
}

/// Finds packet filter rules of attachments that neither the result cache nor a link's alias has.
fn find_rules(snapshot: &Snapshot, orphans: &mut Vec<Orphan>) {
    for rule in &snapshot.rules {
        let cached = snapshot.remembered.iter().map(Entry::id);
        let by_alias = snapshot.marked.iter().map(|(attachment, _)| attachment.clone());
        if cached.chain(by_alias).any(|attachment| rule.owner.matches(&attachment)) {
            continue;
        }
        let owner = &rule.owner;
        let attachment = match (&owner.network, &owner.container) {
            (Some(network), Some(id)) => {
                let attachment = AttachmentId::new(network, id, owner.ifname.as_deref().unwrap_or("eth0"));
                // A truncated comment of a rule does not identify an attachment.
                if owner.matches(&attachment) { Some(attachment) } else { None }
            }
            _ => None,
        };
        let del = attachment.as_ref().and_then(|attachment| del_command(snapshot, attachment));
        let command = del.or_else(|| rule.removal.clone());
        let names = [&owner.network, &owner.container, &owner.ifname].map(|name| name.as_deref().unwrap_or("?"));
        // `cnitool del` needs the network's configuration.
        let command = command.unwrap_or_else(|| match &attachment {
            Some(AttachmentId { network, container_id, ifname }) => {
                let [network, id, ifname] = [network, container_id, ifname].map(|word| quoted(word));
                format!("configure network {network} again, then run cnitool del {network} --container-id {id} --ifname {ifname} --keep-going")
            }
            None => format!("see 'iptables-save -t nat', chain of {}", rule.place),
        });
        orphans.push(Orphan {
            kind: "rule",
            what: format!("{} of {}: {}  [{}]", rule.purpose, names.join(" "), rule.text, rule.place),
            network: owner.network.clone(),
            container: owner.container.clone(),
            why: "the result cache does not have its attachment, and no link has its alias".to_owned(),
            command,
        });
    }
}

/// Finds reservations of containers of which nothing is known.
fn find_reservations(snapshot: &Snapshot, call: &Call<'_>, orphans: &mut Vec<Orphan>) {
    let marks = snapshot.marked.iter().map(|(attachment, link)| (attachment.alias(), link.name.clone())).collect();
    let sources = LivenessSources { remembered: &snapshot.remembered, marks: &marks, machine: call.machine };
    for (network, folder, reservations) in &snapshot.reservations {
        for reservation in reservations {
            // `find_cache_entries` reports a cached attachment whose namespace is gone.
            let liveness = sources.judge(network, &reservation.id, reservation.ifname.as_deref());
            let Liveness::Unknown(why) = liveness else { continue };
            // cnitool finds the default folder, and the folder of a configured network, by itself.
            let is_found = folder == Path::new(cni_ipam::store::DEFAULT_DATA_DIR) || snapshot.is_configured(network);
            let data_dir =
                if is_found { String::new() } else { format!(" --data-dir {}", quoted(&folder.to_string_lossy())) };
            orphans.push(Orphan {
                kind: "reservation",
                what: format!("{reservation}  [{}]", folder.join(network).display()),
                network: Some(network.clone()),
                container: Some(reservation.id.clone()),
                why,
                command: format!("cnitool ipam release {} {}{data_dir}", quoted(network), reservation.address),
            });
        }
    }
}

/// Finds tuning's backups of attachments that are not known.
fn find_backups(snapshot: &Snapshot, orphans: &mut Vec<Orphan>) {
    for saved in &snapshot.saved {
        let rm_command = || format!("rm {}", quoted(&saved.path.to_string_lossy()));
        let (network, container, command) = match &saved.owner {
            Some((network, id, ifname)) => {
                let attachment = AttachmentId::new(network, id, ifname);
                if snapshot.is_known(&attachment) {
                    continue;
                }
                let command = del_command(snapshot, &attachment).unwrap_or_else(rm_command);
                (Some(network.clone()), Some(id.clone()), command)
            }
            // A backup of the Go plugin names no network, only container and interface in its file
            // name.
            None => {
                let file = saved.path.file_name().unwrap_or_default().to_string_lossy();
                let has_this_name = |entry: &Entry| {
                    file == format!("{}_{}.json", entry.attachment.container_id, entry.attachment.ifname)
                };
                if snapshot.remembered.iter().any(has_this_name) {
                    continue;
                }
                (None, None, rm_command())
            }
        };
        orphans.push(Orphan {
            kind: "backup",
            what: format!("{}: {}", saved.path.display(), saved.settings.join(", ")),
            network,
            container,
            why: "the result cache does not have its attachment".to_owned(),
            command,
        });
    }
}

/// Finds leases of dhcp's daemons whose attachments are not known.
fn find_leases(snapshot: &Snapshot, orphans: &mut Vec<Orphan>) {
    for (socket, lease) in &snapshot.leases {
        let Lease { network, container_id, ifname, address, .. } = lease;
        let attachment = AttachmentId::new(network, container_id, ifname);
        if snapshot.is_known(&attachment) {
            continue;
        }
        // If the network is not configured, DEL of the plugin dhcp makes the daemon release the
        // lease.
        let plugin_command = || {
            let ipam = json!({"type": "dhcp", "daemonSocketPath": socket});
            let config = json!({"cniVersion": "1.0.0", "name": network, "type": "dhcp", "ipam": ipam}).to_string();
            let [config, id, ifname] = [&config, container_id, ifname].map(|word| quoted(word));
            format!("echo {config} | CNI_COMMAND=DEL CNI_CONTAINERID={id} CNI_IFNAME={ifname} dhcp")
        };
        orphans.push(Orphan {
            kind: "lease",
            what: format!("{address} of {network} {container_id} {ifname}  [{}]", socket.display()),
            network: Some(network.clone()),
            container: Some(container_id.clone()),
            why: "the result cache does not have its attachment, and no link has its alias".to_owned(),
            command: del_command(snapshot, &attachment).unwrap_or_else(plugin_command),
        });
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
