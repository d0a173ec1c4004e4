//! Leftovers: links, devices, rules, reservations, backups, leases and cache entries whose
//! container is gone.
//!
//! An attachment is lost if the result cache does not have it and no link of the host has its mark.
//! Objects of an ADD that is still running look the same for a moment. So nothing is removed here;
//! the command is only printed.

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

/// Something left over.
pub(crate) struct Orphan {
    pub(crate) kind: &'static str,
    pub(crate) what: String,
    pub(crate) network: Option<String>,
    pub(crate) container: Option<String>,
    pub(crate) why: String,
    /// The command that removes it.
    pub(crate) command: String,
}

impl Orphan {
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

/// Everything that is left over.
pub(crate) fn find(snapshot: &Snapshot, call: &Call<'_>) -> Result<Vec<Orphan>, Error> {
    let mut orphans = Vec::new();
    cached(snapshot, call, &mut orphans);
    links(snapshot, &mut orphans);
    devices(snapshot, &mut orphans);
    rules(snapshot, &mut orphans);
    reservations(snapshot, call, &mut orphans);
    backups(snapshot, &mut orphans);
    leases(snapshot, &mut orphans);
    // One command often removes several leftovers. Each leftover is listed.
    Ok(orphans)
}

/// A DEL by hand of whatever is left, where there is a network to ask.
fn del(snapshot: &Snapshot, mark: &AttachmentId) -> Option<String> {
    let AttachmentId { network, container_id: container, ifname } = mark;
    let plain = [network, container, ifname].iter().all(|word| word.bytes().all(is_plain));
    (snapshot.is_configured(network) && plain && !container.starts_with('#'))
        .then(|| format!("cnitool del {network} --container-id {container} --ifname {ifname} --keep-going"))
}

/// Whether a byte means nothing to a shell.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':' | b'/' | b'@' | b'+')
}

/// A word as a shell takes it, and a terminal shows it: control characters and whatever is not
/// ASCII stand as numbers, which bash and zsh read. To a plain sh they are a strange word, and
/// still one word.
pub(crate) fn quoted(word: &str) -> String {
    if !word.is_empty() && word.bytes().all(is_plain) {
        word.to_owned()
    } else if !word.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()) {
        let byte = |byte: u8| if is_plain(byte) { char::from(byte).to_string() } else { format!("\\{byte:03o}") };
        format!("$'{}'", word.bytes().map(byte).collect::<String>())
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

fn is_over(entry: &Entry, call: &Call<'_>) -> Option<String> {
    match NetnsPresence::of(&entry.attachment.netns, call.machine) {
        NetnsPresence::Gone(why) => Some(format!("its namespace {} is gone: {why}", entry.attachment.netns)),
        NetnsPresence::There | NetnsPresence::Other(_) | NetnsPresence::Unknown(_) => None,
    }
}

fn cached(snapshot: &Snapshot, call: &Call<'_>, orphans: &mut Vec<Orphan>) {
    for entry in &snapshot.remembered {
        let Some(why) = is_over(entry, call) else { continue };
        let mark = entry.id();
        // Where its file is gone, DEL takes the configuration that is remembered.
        let words = [&mark.network, &mark.container_id, &mark.ifname].map(|word| quoted(word));
        let [network, container, ifname] = &words;
        orphans.push(Orphan {
            kind: "attachment",
            what: format!("{} {} {}", mark.network, mark.container_id, mark.ifname),
            command: format!("cnitool del {network} --container-id {container} --ifname {ifname} --keep-going"),
            network: Some(mark.network),
            container: Some(mark.container_id),
            why,
        });
    }
}

fn links(snapshot: &Snapshot, orphans: &mut Vec<Orphan>) {
    let ifbs = snapshot.ifbs.iter().filter_map(|(mark, ifb)| Some((mark.as_ref()?, ifb)));
    for (mark, link) in snapshot.marked.iter().map(|(mark, link)| (mark, link)).chain(ifbs) {
        let is_remembered = snapshot.remembered.iter().any(|entry| entry.id().alias() == mark.alias());
        // In the alias, a hash replaces a long ID. The mark of the cache entry has the hash too.
        let is_hashed = link.alias.as_deref().is_some_and(|alias| {
            snapshot.remembered.iter().any(|entry| entry.id().is_on(Some(&crate::node::mark_in(alias))))
        });
        if is_remembered || is_hashed {
            continue;
        }
        let command = del(snapshot, mark).unwrap_or_else(|| format!("ip link delete dev {}", quoted(&link.name)));
        orphans.push(Orphan {
            kind: "link",
            what: format!("{}, marked {} {} {}", link.name, mark.network, mark.container_id, mark.ifname),
            network: Some(mark.network.clone()),
            container: Some(mark.container_id.clone()),
            why: "the result cache does not have its attachment".to_owned(),
            command,
        });
    }
}

/// The ifbs without a mark, which the Go plugin or a killed ADD has created, and the devices that
/// the kernel has given back to the host with a container's namespace.
fn devices(snapshot: &Snapshot, orphans: &mut Vec<Orphan>) {
    let mut push = |kind, what, why: &str, command| {
        let (network, container) = (None, None);
        orphans.push(Orphan { kind, what, network, container, why: why.to_owned(), command });
    };
    for (_, ifb) in snapshot.ifbs.iter().filter(|(mark, _)| mark.is_none()) {
        let names = |entry: &Entry| [entry.id().ifb_name(), entry.id().own_ifb_name()];
        if !snapshot.remembered.iter().any(|entry| names(entry).contains(&ifb.name)) {
            let (what, command) = (format!("{}, without a mark", ifb.name), format!("ip link delete dev {}", ifb.name));
            push("link", what, "the result cache has no container whose limit it could be", command);
        }
    }
    let configured = snapshot.networks.iter().map(NetworkList::raw);
    let confs = configured.chain(snapshot.remembered.iter().map(|entry| entry.config.as_slice()));
    let selected: Vec<Json> = confs.flat_map(|config| plugins_of(config, "host-device")).collect();
    // The name of a device that is selected by its address or by the runtime is unknown.
    let can_be = |link: &Link, name: &str| {
        selected.iter().any(|plugin| match plugin.get("device").and_then(Json::as_str) {
            Some(device) => device == name,
            None => link.kind == LinkKind::Device,
        })
    };
    for link in &snapshot.links {
        let Some(name) = link.alias.as_deref().filter(|name| cni::ident::check_interface_name(name).is_ok()) else {
            continue;
        };
        if can_be(link, name) {
            let (now, then) = (quoted(&link.name), quoted(name));
            let command = match link.name == name {
                true => format!("ip link set dev {now} alias ''"),
                false => format!("ip link set dev {now} down && ip link set dev {now} name {then} alias ''"),
            };
            let why = "host-device moved it into a container, and the kernel gave it back with the namespace";
            push("device", format!("{}, {name} by its alias", link.name), why, command);
        }
    }
}

fn rules(snapshot: &Snapshot, orphans: &mut Vec<Orphan>) {
    for held in &snapshot.rules {
        let known =
            snapshot.remembered.iter().map(Entry::id).chain(snapshot.marked.iter().map(|(mark, _)| mark.clone()));
        if known.into_iter().any(|mark| held.owner.matches(&mark)) {
            continue;
        }
        let owner = &held.owner;
        let mark = match (&owner.network, &owner.container) {
            (Some(network), Some(id)) => {
                let mark = AttachmentId::new(network, id, owner.ifname.as_deref().unwrap_or("eth0"));
                // A truncated comment does not identify an attachment.
                held.owner.matches(&mark).then_some(mark)
            }
            _ => None,
        };
        let command = mark.as_ref().and_then(|mark| del(snapshot, mark)).or_else(|| held.removal.clone());
        let names = [&owner.network, &owner.container, &owner.ifname].map(|name| name.as_deref().unwrap_or("?"));
        // Without its network's configuration no DEL finds the network.
        let command = command.unwrap_or_else(|| match &mark {
            Some(AttachmentId { network, container_id, ifname }) => {
                let [network, id, ifname] = [network, container_id, ifname].map(|word| quoted(word));
                format!("configure network {network} again, then run cnitool del {network} --container-id {id} --ifname {ifname} --keep-going")
            }
            None => format!("see 'iptables-save -t nat', chain of {}", held.place),
        });
        orphans.push(Orphan {
            kind: "rule",
            what: format!("{} of {}: {}  [{}]", held.purpose, names.join(" "), held.text, held.place),
            network: owner.network.clone(),
            container: owner.container.clone(),
            why: "the result cache does not have its attachment, and no link has its mark".to_owned(),
            command,
        });
    }
}

fn reservations(snapshot: &Snapshot, call: &Call<'_>, orphans: &mut Vec<Orphan>) {
    let marks = snapshot.marked.iter().map(|(mark, link)| (mark.alias(), link.name.clone())).collect();
    let witnesses = LivenessSources { remembered: &snapshot.remembered, marks: &marks, machine: call.machine };
    for (network, folder, reservations) in &snapshot.reservations {
        for one in reservations {
            // `cached` reports a cached attachment whose namespace is gone.
            let Liveness::Unknown(why) = witnesses.judge(network, &one.id, one.ifname.as_deref()) else { continue };
            let usual = folder == Path::new(cni_ipam::store::DEFAULT_DATA_DIR) || snapshot.is_configured(network);
            let data_dir =
                if usual { String::new() } else { format!(" --data-dir {}", quoted(&folder.to_string_lossy())) };
            orphans.push(Orphan {
                kind: "reservation",
                what: format!("{one}  [{}]", folder.join(network).display()),
                network: Some(network.clone()),
                container: Some(one.id.clone()),
                why,
                command: format!("cnitool ipam release {} {}{data_dir}", quoted(network), one.address),
            });
        }
    }
}

fn backups(snapshot: &Snapshot, orphans: &mut Vec<Orphan>) {
    for saved in &snapshot.saved {
        let remove = || format!("rm {}", quoted(&saved.path.to_string_lossy()));
        let (network, container, command) = match &saved.owner {
            Some((network, id, ifname)) => {
                let mark = AttachmentId::new(network, id, ifname);
                if snapshot.is_known(&mark) {
                    continue;
                }
                (Some(network.clone()), Some(id.clone()), del(snapshot, &mark).unwrap_or_else(remove))
            }
            None => {
                let file = saved.path.file_name().unwrap_or_default().to_string_lossy();
                let is_its = |entry: &Entry| {
                    file == format!("{}_{}.json", entry.attachment.container_id, entry.attachment.ifname)
                };
                if snapshot.remembered.iter().any(is_its) {
                    continue;
                }
                (None, None, remove())
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

fn leases(snapshot: &Snapshot, orphans: &mut Vec<Orphan>) {
    for (socket, lease) in &snapshot.leases {
        let Lease { network, container_id, ifname, address, .. } = lease;
        let mark = AttachmentId::new(network, container_id, ifname);
        if snapshot.is_known(&mark) {
            continue;
        }
        // Without a network to ask, the plugin itself: its daemon releases the lease.
        let by_plugin = || {
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
            why: "no runtime remembers its attachment".to_owned(),
            command: del(snapshot, &mark).unwrap_or_else(by_plugin),
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
