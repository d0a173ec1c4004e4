//! Compares one attachment's result with what exists of it in the kernel and on the disk.

use std::net::IpAddr;
use std::path::Path;

use cni::json::Json;
use cni::result::{AddResult, Interface, Route};
use cni::{AttachmentId, Cidr};
use cni_firewall::container_rules::Purpose;
use cni_linux::route::Family;
use cni_linux::{Addr, Link, Netlink, Netns, OperState, PortState};
use libcni::cache::Entry;
use serde::Serialize;
use serde_json::json;

use super::{Fact, Fields};
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
#[derive(Serialize)]
pub(crate) struct AttachmentReport {
    pub(crate) network: String,
    #[serde(rename = "containerID")]
    container_id: String,
    ifname: String,
    netns: String,
    pub(crate) facts: Vec<Fact>,
}

impl AttachmentReport {
    /// Collects the facts about the attachment of a cache entry.
    pub(crate) fn new(snapshot: &Snapshot, entry: &Entry, call: &Call<'_>) -> AttachmentReport {
        let attachment = entry.id();
        let netns = entry.attachment.netns.clone();
        let mut facts = Vec::new();
        let result = decode_result(entry).unwrap_or_else(|why| {
            facts.push(Fact::differs("result", [], why));
            AddResult::default()
        });
        add_host_facts(snapshot, &attachment, &result, &mut facts);
        let namespace = |state: &str| [("path", json!(netns)), ("state", json!(state))];
        match NetnsPresence::at(&netns, call.machine) {
            NetnsPresence::Exists => {
                facts.push(Fact::fine("namespace", namespace("exists")));
                let outcome = add_container_facts(&netns, &attachment.ifname, &result, &mut facts)
                    .and_then(|()| add_device_fact(&netns, entry, &mut facts));
                if let Err(why) = outcome {
                    facts.push(Fact::differs("namespace", namespace("exists"), why.to_string()));
                }
            }
            // Fine, because the module `leftovers` reports the cache entry.
            NetnsPresence::Gone(_) => facts.push(Fact::fine("namespace", namespace("gone"))),
            NetnsPresence::OtherFile(why) => facts.push(Fact::differs("namespace", namespace("unknown"), why)),
            // Fine, because nothing could be compared.
            NetnsPresence::Unknown(_) => facts.push(Fact::fine("namespace", namespace("unknown"))),
        }
        add_rule_facts(snapshot, entry, call, &mut facts);
        add_reservation_facts(snapshot, entry, &result, &mut facts);
        add_lease_facts(snapshot, &attachment, &mut facts);
        add_backup_facts(snapshot, &attachment, &mut facts);
        add_record_facts(snapshot, &attachment, &mut facts);
        let AttachmentId { network, container_id, ifname } = attachment;
        AttachmentReport { network, container_id, ifname, netns, facts }
    }

    /// Returns the network, container ID and interface for people.
    pub(crate) fn name(&self) -> String {
        format!("{} {} {}", self.network, self.container_id, self.ifname)
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
                facts.push(Fact::differs(
                    "host link",
                    [("name", json!(interface.name))],
                    "in the result, but not on the host",
                ));
            }
        }
    }
}

/// Returns a link's properties. It names the master only if that is in `masters`.
fn describe(link: &Link, masters: &[Link]) -> Fields {
    let state = match (link.up, link.oper_state) {
        (false, _) => "down",
        (true, OperState::Down) => "up without carrier",
        (true, _) => "up",
    };
    let master = masters.iter().find(|other| link.master == Some(other.index));
    let port_state = link.port.map(|port| match port.state {
        PortState::Forwarding => "forwarding",
        PortState::Disabled => "disabled",
        PortState::HeldBack => "held back by the spanning tree",
    });
    vec![
        ("name", json!(link.name)),
        ("type", json!(link.kind.to_string())),
        ("index", json!(link.index)),
        ("mtu", json!(link.mtu)),
        ("mac", json!(link.mac.map(|mac| mac.to_string()))),
        ("state", json!(state)),
        ("master", json!(master.map(|master| &master.name))),
        ("port", json!(port_state)),
        ("hairpin", json!(link.port.map(|port| port.hairpin))),
        ("isolated", json!(link.port.map(|port| port.isolated))),
        ("vlanFiltering", json!(link.bridge.as_ref().map(|bridge| bridge.vlan_filtering))),
        ("spanningTree", json!(link.bridge.as_ref().map(|bridge| bridge.spanning_tree))),
    ]
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
            let problem = "in the result, but not in the namespace";
            facts.push(Fact::differs("interface", [("name", json!(interface.name))], problem));
            continue;
        };
        let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
        let (mut fact, mut problems) = (Fact::fine("interface", describe(link, &[])), Vec::new());
        if !interface.mac.is_empty() && !interface.mac.eq_ignore_ascii_case(&mac) {
            problems.push(format!("the result has the MAC {}", interface.mac));
        }
        if let Some(mtu) = interface.mtu.filter(|mtu| *mtu != link.mtu) {
            problems.push(format!("the result has the MTU {mtu}"));
        }
        fact.problem = Some(problems.join("; ")).filter(|problem| !problem.is_empty());
        facts.push(fact);
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
        facts.push(Fact::fine("device", [("name", json!(name)), ("interface", json!(ifname))]));
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
        let found = existing.iter().find(|addr| addr.cidr == ip.address && Some(addr.index) == index_of(name));
        let mut fact = Fact::fine("address", address_fields(ip.address, name, found, false));
        fact.problem = match found {
            None => Some("in the result, but not on the interface".to_owned()),
            Some(addr) if addr.dad_failed => Some("another host on the link has it too".to_owned()),
            Some(_) => None,
        };
        facts.push(fact);
    }
    for addr in existing.iter().filter(|addr| addr.scope == GLOBAL_SCOPE && Some(addr.index) == index_of(ifname)) {
        if !result.ips.iter().any(|ip| ip.address == addr.cidr) {
            facts.push(Fact::fine("address", address_fields(addr.cidr, ifname, Some(addr), true)));
        }
    }
    Ok(())
}

/// Returns the properties of an address. `not_in_result` is whether the result does not have it.
fn address_fields(address: Cidr, interface: &str, existing: Option<&Addr>, not_in_result: bool) -> Fields {
    vec![
        ("address", json!(address.to_string())),
        ("interface", json!(interface)),
        ("tentative", json!(existing.is_some_and(|addr| addr.tentative))),
        ("duplicate", json!(existing.is_some_and(|addr| addr.dad_failed))),
        ("notInResult", json!(not_in_result)),
    ]
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
        let found = existing.iter().find(|other| {
            other.dst == route.dst.network()
                && (expected_gw.is_none() || other.gw == expected_gw)
                && other.table_id() == table_id(route.table)
        });
        let interface = found.map_or(ifname, |found| name_of(found.oif));
        let mut fact = Fact::fine("route", route_fields(route.dst, expected_gw, interface, false));
        fact.problem = found.is_none().then(|| "in the result, but not in the namespace".to_owned());
        facts.push(fact);
    }
    if result.routes.is_empty() {
        for route in existing.iter().filter(|route| name_of(route.oif) == ifname && route.gw.is_some()) {
            facts.push(Fact::fine("route", route_fields(route.dst, route.gw, ifname, true)));
        }
    }
    Ok(())
}

/// Returns the properties of a route. `not_in_result` is whether the result does not have it.
fn route_fields(destination: Cidr, gateway: Option<IpAddr>, interface: &str, not_in_result: bool) -> Fields {
    vec![
        ("destination", json!(destination.to_string())),
        ("gateway", json!(gateway)),
        ("interface", json!(interface)),
        ("notInResult", json!(not_in_result)),
    ]
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
        facts.push(Fact::fine(rule_kind(rule.purpose), [("rule", json!(rule.text)), ("place", json!(rule.place))]));
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
            facts.push(Fact::fine(rule_kind(purpose), [("withoutOwner", json!(true))]));
            continue;
        }
        let problem = "the attachment has no such rule, although its configuration needs one";
        facts.push(Fact::differs(rule_kind(purpose), [], problem));
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
                let fields =
                    [("address", json!(reservation.address)), ("folder", json!(pool.folder().to_string_lossy()))];
                facts.push(Fact::fine("reservation", fields));
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
        let problem = "in the result, but not reserved for this attachment";
        facts.push(Fact::differs("reservation", [("address", json!(address))], problem));
    }
}

/// Adds the attachment's leases that dhcp's daemons have recorded.
fn add_lease_facts(snapshot: &Snapshot, attachment: &AttachmentId, facts: &mut Vec<Fact>) {
    for (socket, lease) in &snapshot.leases {
        if AttachmentId::new(&lease.network, &lease.container_id, &lease.ifname) != *attachment {
            continue;
        }
        let expiry = lease.times.and_then(|times| times.expiry);
        let fields = [
            ("address", json!(lease.address.to_string())),
            ("server", json!(lease.server)),
            ("unconfirmed", json!(lease.times.is_none())),
            ("expirySeconds", json!(expiry.map(|left| left.as_secs()))),
            ("socket", json!(socket.to_string_lossy())),
        ];
        facts.push(Fact { problem: lease.error.clone(), ..Fact::fine("lease", fields) });
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
            facts.push(Fact::fine(
                "saved",
                [("settings", json!(backup.settings)), ("file", json!(backup.path.to_string_lossy()))],
            ));
        }
    }
}

/// Adds the records of other plugins about the attachment.
fn add_record_facts(snapshot: &Snapshot, attachment: &AttachmentId, facts: &mut Vec<Fact>) {
    for record in snapshot.records.iter().filter(|record| record.is_about(attachment)) {
        let mut fields = vec![("plugin", json!(record.plugin)), ("file", json!(record.path.to_string_lossy()))];
        facts.push(if record.network.is_some() {
            fields.push(("content", json!(record.text)));
            Fact::fine("record", fields)
        } else {
            Fact::differs("record", fields, &record.text)
        });
    }
}
