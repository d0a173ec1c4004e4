//! Compares one attachment's result with what exists of it in the kernel and on the disk.

use std::path::Path;
use std::time::Duration;

use cni::AttachmentId;
use cni::json::Json;
use cni::result::{AddResult, Interface, Route};
use cni_firewall::container_rules::Purpose;
use cni_linux::route::Family;
use cni_linux::{Addr, Link, Netlink, Netns, OperState, PortState};
use libcni::cache::Entry;

use super::Fact;
use crate::call::Call;
use crate::node::attachments::CheckedReservation;
use crate::node::snapshot::{ListedPool, Snapshot, has_go_name};
use crate::node::{decode_result, is_true, plugins_in, plugins_of_type};
use crate::rules::missing_rules;
use crate::target::NetnsPresence;

/// The kinds of facts that are about packet filter rules. The texts are part of the output.
pub(super) const RULE_KINDS: [&str; 4] = [MASQUERADE_KIND, HOST_PORT_KIND, SPOOF_CHECK_KIND, FIREWALL_KIND];

const MASQUERADE_KIND: &str = "masquerade";
const HOST_PORT_KIND: &str = "host port";
const SPOOF_CHECK_KIND: &str = "macspoofchk";
const FIREWALL_KIND: &str = "firewall";
const EGRESS_KIND: &str = "egress";

/// The scope of an address that is valid everywhere (`RT_SCOPE_UNIVERSE`).
const GLOBAL_SCOPE: u8 = 0;

/// An attachment in the result cache, and the facts about it.
pub(crate) struct AttachmentReport {
    /// The network, container ID and interface for people.
    pub(crate) name: String,
    pub(crate) network: String,
    pub(crate) container_id: String,
    pub(crate) ifname: String,
    pub(crate) netns: String,
    pub(crate) facts: Vec<Fact>,
}

impl AttachmentReport {
    /// Collects the facts about the attachment of a cache entry.
    pub(crate) fn new(snapshot: &Snapshot, entry: &Entry, call: &Call<'_>) -> AttachmentReport {
        let attachment = entry.id();
        let netns = entry.attachment.netns.clone();
        let mut facts = Vec::new();
        let result = match decode_result(entry) {
            Ok(result) => result,
            Err(why) => {
                facts.push(Fact::differs("result", why));
                AddResult::default()
            }
        };
        add_host_facts(snapshot, &attachment, &result, &mut facts);
        match NetnsPresence::at(&netns, call.machine) {
            NetnsPresence::Exists => {
                facts.push(Fact::fine("namespace", netns.clone()));
                let outcome = add_container_facts(&netns, &attachment.ifname, &result, &mut facts)
                    .and_then(|()| add_device_fact(&netns, entry, &mut facts));
                if let Err(why) = outcome {
                    facts.push(Fact::differs("namespace", why.to_string()));
                }
            }
            // Fine, because the module `leftovers` reports the cache entry.
            NetnsPresence::Gone(why) => facts.push(Fact::fine("namespace", format!("{netns} is gone: {why}"))),
            NetnsPresence::OtherFile(why) => facts.push(Fact::differs("namespace", format!("{netns}: {why}"))),
            // Fine, because nothing could be compared.
            NetnsPresence::Unknown(why) => facts.push(Fact::fine("namespace", format!("{netns}: {why}"))),
        }
        add_rule_facts(snapshot, entry, call, &mut facts);
        add_reservation_facts(snapshot, entry, &result, &mut facts);
        add_lease_facts(snapshot, &attachment, &mut facts);
        add_backup_facts(snapshot, &attachment, &mut facts);
        add_record_facts(snapshot, &attachment, &mut facts);
        AttachmentReport {
            name: format!("{} {} {}", attachment.network, attachment.container_id, attachment.ifname),
            network: attachment.network,
            container_id: attachment.container_id,
            ifname: attachment.ifname,
            netns,
            facts,
        }
    }
}

/// Adds the attachment's links on the host, bandwidth's ifbs included: those whose alias names the
/// attachment, and those in the result.
fn add_host_facts(snapshot: &Snapshot, attachment: &AttachmentId, result: &AddResult, facts: &mut Vec<Fact>) {
    let aliased = snapshot.attachments.aliased_links.iter().filter(|(owner, _)| owner == attachment);
    let mut added_indexes: Vec<u32> = Vec::new();
    for (_, link) in aliased {
        added_indexes.push(link.index);
        facts.push(Fact::fine("host link", describe(link, &snapshot.attachments.links)));
    }
    // An interface of the result without a sandbox is on the host.
    let on_host: Vec<&Interface> = result.interfaces.iter().filter(|interface| interface.sandbox.is_empty()).collect();
    for (owner, ifb) in &snapshot.ifbs {
        let belongs = match owner {
            Some(owner) => owner == attachment,
            // An ifb of the Go plugin has no alias, but is in the result.
            None => on_host.iter().any(|listed| listed.name == ifb.name),
        };
        if belongs {
            added_indexes.push(ifb.index);
            facts.push(Fact::fine("bandwidth", describe(ifb, &snapshot.attachments.links)));
        }
    }
    for interface in on_host {
        match snapshot.attachments.links.iter().find(|link| link.name == interface.name) {
            Some(link) if added_indexes.contains(&link.index) => {}
            Some(link) => {
                let kind = if link.is_bridge() { "bridge" } else { "host link" };
                facts.push(Fact::fine(kind, describe(link, &snapshot.attachments.links)));
            }
            None => {
                let text = format!("{} is in the result, but not on the host", interface.name);
                facts.push(Fact::differs("host link", text));
            }
        }
    }
}

/// Returns a description of a link's properties. It names the master only if that is in `masters`.
fn describe(link: &Link, masters: &[Link]) -> String {
    let mut text = format!("{} ({}, index {}), mtu {}", link.name, link.kind, link.index, link.mtu);
    if let Some(mac) = link.mac {
        text += &format!(", {mac}");
    }
    text += match (link.up, link.oper_state) {
        (false, _) => ", down",
        (true, OperState::Down) => ", up without carrier",
        (true, _) => ", up",
    };
    if let Some(master) = link.master.and_then(|index| masters.iter().find(|other| other.index == index)) {
        text += &format!(", port of {}", master.name);
    }
    if let Some(port) = link.port {
        text += match port.state {
            PortState::Forwarding => " (forwarding",
            PortState::Disabled => " (disabled",
            PortState::HeldBack => " (held back by the spanning tree",
        };
        text += if port.hairpin { ", hairpin" } else { "" };
        text += if port.isolated { ", isolated" } else { "" };
        text.push(')');
    }
    if let Some(bridge) = &link.bridge {
        text += if bridge.vlan_filtering { ", vlan filtering" } else { "" };
        text += if bridge.spanning_tree { ", spanning tree" } else { "" };
    }
    text
}

/// Adds the interfaces, addresses and routes in the container's namespace `path`, compared with the
/// result.
///
/// # Errors
/// The kernel's error if the namespace cannot be entered or read.
fn add_container_facts(path: &str, ifname: &str, result: &AddResult, facts: &mut Vec<Fact>) -> cni_linux::Result<()> {
    let netlink = Netlink::open()?.open_in(&Netns::open(Path::new(path))?)?;
    let links = netlink.list_links()?;
    let inside: Vec<&Interface> = result.interfaces.iter().filter(|interface| !interface.sandbox.is_empty()).collect();
    for interface in &inside {
        let Some(link) = links.iter().find(|link| link.name == interface.name) else {
            let text = format!("{} is in the result, but not in the namespace", interface.name);
            facts.push(Fact::differs("interface", text));
            continue;
        };
        facts.push(Fact::fine("interface", describe(link, &[])));
        let mac = link.mac.map_or_else(|| "(none)".to_owned(), |mac| mac.to_string());
        if !interface.mac.is_empty() && !interface.mac.eq_ignore_ascii_case(&mac) {
            let text = format!("{} has the MAC {mac}, but the result has {}", interface.name, interface.mac);
            facts.push(Fact::differs("interface", text));
        }
        if let Some(mtu) = interface.mtu.filter(|mtu| *mtu != link.mtu) {
            let text = format!("{} has the MTU {}, but the result has {mtu}", interface.name, link.mtu);
            facts.push(Fact::differs("interface", text));
        }
    }
    // A result need not list CNI_IFNAME.
    if !inside.iter().any(|interface| interface.name == ifname)
        && let Some(link) = links.iter().find(|link| link.name == ifname)
    {
        facts.push(Fact::fine("interface", describe(link, &[])));
    }
    add_address_facts(&netlink, ifname, &links, result, facts)?;
    add_route_facts(&netlink, ifname, &links, result, facts)
}

/// Adds the device that host-device has moved into the namespace `path`. The device's alias is its
/// name on the host.
///
/// # Errors
/// The kernel's error if the namespace cannot be entered or read.
fn add_device_fact(path: &str, entry: &Entry, facts: &mut Vec<Fact>) -> cni_linux::Result<()> {
    if plugins_of_type(&entry.config, "host-device").is_empty() {
        return Ok(());
    }
    let ifname = &entry.attachment.ifname;
    let inside = Netlink::open()?.open_in(&Netns::open(Path::new(path))?)?.find_link(ifname)?;
    if let Some(name) = inside.and_then(|link| link.alias) {
        facts.push(Fact::fine("device", format!("{name} of the host is {ifname} in the container")));
    }
    Ok(())
}

/// Adds the addresses of the result, and the other global addresses of CNI_IFNAME. `netlink` and
/// `links` are those of the container's namespace.
///
/// # Errors
/// The kernel's error if the addresses cannot be listed.
fn add_address_facts(
    netlink: &Netlink,
    ifname: &str,
    links: &[Link],
    result: &AddResult,
    facts: &mut Vec<Fact>,
) -> cni_linux::Result<()> {
    let existing: Vec<Addr> = netlink.list_all_addresses()?;
    let index_of = |name: &str| links.iter().find(|link| link.name == name).map(|link| link.index);
    for ip in &result.ips {
        // In a result, an address names its interface by the position in `interfaces`.
        let interface = ip.interface.and_then(|position| result.interfaces.get(position));
        let name = interface.map_or(ifname, |interface| interface.name.as_str());
        match existing.iter().find(|addr| addr.cidr == ip.address && Some(addr.index) == index_of(name)) {
            Some(addr) if addr.dad_failed => {
                facts.push(Fact::differs(
                    "address",
                    format!("{} on {name} is a duplicate: another host on the link has it too", ip.address),
                ));
            }
            Some(addr) if addr.tentative => {
                facts.push(Fact::fine("address", format!("{} on {name}, still tentative", ip.address)));
            }
            Some(_) => facts.push(Fact::fine("address", format!("{} on {name}", ip.address))),
            None => {
                facts.push(Fact::differs("address", format!("{} is in the result, but not on {name}", ip.address)));
            }
        }
    }
    for addr in existing.iter().filter(|addr| addr.scope == GLOBAL_SCOPE && Some(addr.index) == index_of(ifname)) {
        if !result.ips.iter().any(|ip| ip.address == addr.cidr) {
            facts.push(Fact::fine("address", format!("{} on {ifname}, not in the result", addr.cidr)));
        }
    }
    Ok(())
}

/// Adds the routes of the result or, if the result has none, CNI_IFNAME's routes with a gateway.
/// `netlink` and `links` are those of the container's namespace.
///
/// # Errors
/// The kernel's error if the routes cannot be listed.
fn add_route_facts(
    netlink: &Netlink,
    ifname: &str,
    links: &[Link],
    result: &AddResult,
    facts: &mut Vec<Fact>,
) -> cni_linux::Result<()> {
    let mut existing = netlink.list_all_routes(Family::V4)?;
    existing.extend(netlink.list_all_routes(Family::V6)?);
    let name_of = |index: u32| links.iter().find(|link| link.index == index).map_or("?", |link| link.name.as_str());
    for route in result.routes.iter().flat_map(Route::paths) {
        // For a route without a gateway, the gateway of the first address of its family is used.
        let expected_gw = route.gw.or_else(|| {
            let has_family = |ip: &&cni::result::IpConfig| ip.address.is_ipv4() == route.dst.is_ipv4();
            result.ips.iter().find(has_family).and_then(|ip| ip.gateway)
        });
        let text = match expected_gw {
            Some(gw) => format!("{} via {gw}", route.dst),
            None => route.dst.to_string(),
        };
        let found = existing.iter().find(|other| {
            other.dst == route.dst.network()
                && (expected_gw.is_none() || other.gw == expected_gw)
                && other.table_id() == table_id(route.table)
        });
        match found {
            Some(found) => facts.push(Fact::fine("route", format!("{text} dev {}", name_of(found.oif)))),
            None => facts.push(Fact::differs("route", format!("{text} is in the result, but not in the namespace"))),
        }
    }
    if result.routes.is_empty() {
        for route in existing.iter().filter(|route| name_of(route.oif) == ifname) {
            let Some(gw) = route.gw else { continue };
            facts.push(Fact::fine("route", format!("{} via {gw} dev {ifname}, not in the result", route.dst)));
        }
    }
    Ok(())
}

/// Returns the number of the routing table for a route of the result: `None` and 0 stand for the
/// main table.
fn table_id(table: Option<u32>) -> u32 {
    table.filter(|table| *table != 0).unwrap_or(cni_linux::route::MAIN_TABLE)
}

/// Adds the attachment's packet filter rules, and each kind of rule that the configuration of its
/// ADD needs but that does not exist.
fn add_rule_facts(snapshot: &Snapshot, entry: &Entry, call: &Call<'_>, facts: &mut Vec<Fact>) {
    let mut existing_purposes: Vec<Purpose> = Vec::new();
    let attachment = entry.id();
    for rule in snapshot.rules.iter().filter(|rule| rule.owner.matches(&attachment)) {
        existing_purposes.push(rule.purpose);
        facts.push(Fact::fine(rule_kind(rule.purpose), format!("{}  [{}]", rule.text, rule.place)));
    }
    let plugins = plugins_in(&entry.config);
    let a_plugin_sets = |key: &str| plugins.iter().any(|plugin| is_true(plugin, key));
    let a_plugin_has =
        |key: &str| plugins.iter().any(|plugin| plugin.get(key).is_some_and(|value| *value != Json::Null));
    let has_plugin = |kind: &str| plugins.iter().any(|plugin| plugin.get("type").and_then(Json::as_str) == Some(kind));
    let mappings = entry.attachment.capability_args.get_exact("portMappings").map(|raw| raw.get().trim().to_owned());
    let has_mappings = mappings.is_some_and(|text| !matches!(text.as_str(), "null" | "[]"));
    for (purpose, is_needed) in [
        (Purpose::Masquerade, a_plugin_sets("ipMasq")),
        (Purpose::SpoofCheck, a_plugin_sets("macspoofchk")),
        (Purpose::Forward, has_plugin("firewall")),
        (Purpose::Egress, a_plugin_has("egress")),
        (Purpose::PortMap, has_mappings && has_plugin("portmap")),
    ] {
        if !is_needed || existing_purposes.contains(&purpose) {
            continue;
        }
        // The rules of Go's firewall name no owner. Its CHECK finds them by their addresses.
        if purpose == Purpose::Forward && missing_rules(entry, "firewall", call).is_ok_and(|missing| missing.is_empty())
        {
            facts.push(Fact::fine(rule_kind(purpose), "the rules exist, and do not name the attachment"));
            continue;
        }
        let text = "the attachment has no such rule, although its configuration needs one";
        facts.push(Fact::differs(rule_kind(purpose), text));
    }
}

/// Returns the kind of a fact about a rule with this purpose.
fn rule_kind(purpose: Purpose) -> &'static str {
    match purpose {
        Purpose::Masquerade => MASQUERADE_KIND,
        Purpose::PortMap => HOST_PORT_KIND,
        Purpose::SpoofCheck => SPOOF_CHECK_KIND,
        Purpose::Forward => FIREWALL_KIND,
        Purpose::Egress => EGRESS_KIND,
    }
}

/// Adds the attachment's reservations and, if its configuration uses host-local, the addresses of
/// the result that are not reserved.
fn add_reservation_facts(snapshot: &Snapshot, entry: &Entry, result: &AddResult, facts: &mut Vec<Fact>) {
    let mut reserved = Vec::new();
    let attachment = entry.id();
    for ListedPool { pool, reservations, .. } in
        snapshot.pools.iter().filter(|listed| listed.pool.network == attachment.network)
    {
        for CheckedReservation { reservation, .. } in reservations {
            // Reservations of old releases of host-local have no interface.
            let is_of_interface = reservation.ifname.as_ref().is_none_or(|name| *name == attachment.ifname);
            if reservation.id == attachment.container_id && is_of_interface {
                reserved.push(reservation.address);
                let text = format!("{}  [{}]", reservation.address, pool.folder().display());
                facts.push(Fact::fine("reservation", text));
            }
        }
    }
    // Another network of this name may have left its reservations.
    let uses_host_local = plugins_in(&entry.config).iter().any(|plugin| {
        let ipam_type = plugin.get("ipam").and_then(|ipam| ipam.get("type"));
        ipam_type.and_then(Json::as_str) == Some("host-local")
    });
    for ip in result.ips.iter().filter(|ip| uses_host_local && !reserved.contains(&ip.address.address())) {
        let address = ip.address.address();
        facts.push(Fact::differs(
            "reservation",
            format!("{address} is in the result, but not reserved for this attachment"),
        ));
    }
}

/// Adds the attachment's leases that dhcp's daemons have recorded.
fn add_lease_facts(snapshot: &Snapshot, attachment: &AttachmentId, facts: &mut Vec<Fact>) {
    for (socket, lease) in &snapshot.leases {
        if AttachmentId::new(&lease.network, &lease.container_id, &lease.ifname) != *attachment {
            continue;
        }
        let text = format!("{} of {}", lease.address, lease.server);
        let end = match lease.times {
            None => ", without an answer yet".to_owned(),
            Some(times) => match times.expiry {
                None => ", without an end".to_owned(),
                Some(Duration::ZERO) => ", ended".to_owned(),
                Some(left) => format!(", ends in {} s", left.as_secs()),
            },
        };
        facts.push(match &lease.error {
            Some(error) => Fact::differs("lease", format!("{text}{end}: {error}")),
            None => Fact::fine("lease", format!("{text}{end}  [{}]", socket.display())),
        });
    }
}

/// Adds tuning's backup of the attachment.
fn add_backup_facts(snapshot: &Snapshot, attachment: &AttachmentId, facts: &mut Vec<Fact>) {
    for backup in &snapshot.backups {
        let belongs = match &backup.owner {
            Some((network, id, ifname)) => AttachmentId::new(network, id, ifname) == *attachment,
            None => has_go_name(backup, attachment),
        };
        if belongs {
            let text = format!("{}  [{}]", backup.settings.join(", "), backup.path.display());
            facts.push(Fact::fine("saved", text));
        }
    }
}

/// Adds the records of other plugins about the attachment.
fn add_record_facts(snapshot: &Snapshot, attachment: &AttachmentId, facts: &mut Vec<Fact>) {
    for record in snapshot.records.iter().filter(|record| record.is_about(attachment)) {
        let text = format!("{}: {}  [{}]", record.plugin, record.text, record.path.display());
        facts.push(match record.network {
            Some(_) => Fact::fine("record", text),
            None => Fact::differs("record", text),
        });
    }
}
