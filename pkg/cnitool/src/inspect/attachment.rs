//! One attachment: its result, and what there is of it.

use std::path::Path;
use std::time::Duration;

use cni::AttachmentId;
use cni::json::Json;
use cni::result::{AddResult, Interface};
use cni::version::Version;
use cni_linux::route::Family;
use cni_linux::{Addr, Link, Netlink, Netns, OperState, PortState};
use libcni::cache::Entry;

use super::Fact;
use super::snapshot::{Snapshot, plugins_of};
use crate::Call;
use crate::target::NetnsPresence;

/// An attachment in the result cache, and what was found of it.
pub(crate) struct Attached {
    pub(crate) name: String,
    pub(crate) network: String,
    pub(crate) container_id: String,
    pub(crate) ifname: String,
    pub(crate) netns: String,
    pub(crate) facts: Vec<Fact>,
}

impl Attached {
    pub(crate) fn look(snapshot: &Snapshot, entry: &Entry, call: &Call<'_>) -> Attached {
        let mark = entry.id();
        let netns = entry.attachment.netns.clone();
        let mut facts = Vec::new();
        let result = match result(entry) {
            Ok(result) => result,
            Err(why) => {
                facts.push(Fact::differs("result", why));
                AddResult::default()
            }
        };
        host(snapshot, &mark, &result, &mut facts);
        match NetnsPresence::of(&netns, call.machine) {
            NetnsPresence::There => {
                facts.push(Fact::fine("namespace", netns.clone()));
                let seen = container(&netns, &mark.ifname, &result, &mut facts);
                if let Err(why) = seen.and_then(|()| device(&netns, entry, &mut facts)) {
                    facts.push(Fact::differs("namespace", why.to_string()));
                }
            }
            // `orphans` reports it as a leftover.
            NetnsPresence::Gone(why) => facts.push(Fact::fine("namespace", format!("{netns} is gone: {why}"))),
            NetnsPresence::Other(why) => facts.push(Fact::differs("namespace", format!("{netns}: {why}"))),
            NetnsPresence::Unknown(why) => facts.push(Fact::fine("namespace", format!("{netns}: {why}"))),
        }
        rules(snapshot, &mark, entry, &mut facts);
        stored(snapshot, &mark, &result, &mut facts);
        Attached {
            name: format!("{} {} {}", mark.network, mark.container_id, mark.ifname),
            network: mark.network,
            container_id: mark.container_id,
            ifname: mark.ifname,
            netns,
            facts,
        }
    }
}

fn result(entry: &Entry) -> Result<AddResult, String> {
    let Some(raw) = &entry.result else { return Err("the result cache has none".to_owned()) };
    let json = Json::parse(raw.get().as_bytes()).map_err(|error| error.to_string())?;
    AddResult::decode(&json, Version::NEWEST).map_err(|error| error.to_string())
}

/// The links on the host: those that have the mark, and those that the result names.
fn host(snapshot: &Snapshot, mark: &AttachmentId, result: &AddResult, facts: &mut Vec<Fact>) {
    let marked = snapshot.marked.iter().filter(|(whose, _)| whose.alias() == mark.alias()).map(|(_, link)| link);
    let named = result.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
    let mut shown: Vec<u32> = Vec::new();
    for link in marked {
        shown.push(link.index);
        facts.push(Fact::fine("host link", described(link, &snapshot.links)));
    }
    let is_named = |ifb: &Link| result.interfaces.iter().any(|one| one.sandbox.is_empty() && one.name == ifb.name);
    let is_its = |whose: &Option<AttachmentId>, ifb: &Link| match whose {
        Some(whose) => whose.alias() == mark.alias(),
        None => is_named(ifb),
    };
    for (_, ifb) in snapshot.ifbs.iter().filter(|(whose, ifb)| is_its(whose, ifb)) {
        shown.push(ifb.index);
        facts.push(Fact::fine("bandwidth", described(ifb, &snapshot.links)));
    }
    for interface in named {
        match snapshot.links.iter().find(|link| link.name == interface.name) {
            Some(link) if shown.contains(&link.index) => {}
            Some(link) => {
                let what = if link.is_bridge() { "bridge" } else { "host link" };
                facts.push(Fact::fine(what, described(link, &snapshot.links)));
            }
            None => {
                let text = format!("{} is in the result and not on the host", interface.name);
                facts.push(Fact::differs("host link", text));
            }
        }
    }
}

fn described(link: &Link, all: &[Link]) -> String {
    let mut text = format!("{} ({}, index {}), mtu {}", link.name, link.kind, link.index, link.mtu);
    if let Some(mac) = link.mac {
        text += &format!(", {mac}");
    }
    text += match (link.up, link.oper_state) {
        (false, _) => ", down",
        (true, OperState::Down) => ", up without carrier",
        (true, _) => ", up",
    };
    if let Some(master) = link.master.and_then(|master| all.iter().find(|other| other.index == master)) {
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

/// Adds the facts of the container's namespace that differ from the result or are not in it.
fn container(path: &str, ifname: &str, result: &AddResult, facts: &mut Vec<Fact>) -> cni_linux::Result<()> {
    let netlink = Netlink::open()?.open_in(&Netns::open(Path::new(path))?)?;
    let links = netlink.list_links()?;
    let inside: Vec<(usize, &Interface)> =
        result.interfaces.iter().enumerate().filter(|(_, interface)| !interface.sandbox.is_empty()).collect();
    for (_, interface) in &inside {
        let Some(link) = links.iter().find(|link| link.name == interface.name) else {
            let text = format!("{} is in the result and not in the namespace", interface.name);
            facts.push(Fact::differs("interface", text));
            continue;
        };
        facts.push(Fact::fine("interface", described(link, &[])));
        let mac = link.mac.map_or_else(|| "(none)".to_owned(), |mac| mac.to_string());
        if !interface.mac.is_empty() && !interface.mac.eq_ignore_ascii_case(&mac) {
            let text = format!("{} has the MAC {mac}; the result says {}", interface.name, interface.mac);
            facts.push(Fact::differs("interface", text));
        }
        if let Some(mtu) = interface.mtu.filter(|mtu| *mtu != link.mtu) {
            let text = format!("{} has an MTU of {}; the result says {mtu}", interface.name, link.mtu);
            facts.push(Fact::differs("interface", text));
        }
    }
    if !inside.iter().any(|(_, interface)| interface.name == ifname)
        && let Some(link) = links.iter().find(|link| link.name == ifname)
    {
        facts.push(Fact::fine("interface", described(link, &[])));
    }
    addresses(&netlink, ifname, &links, result, facts)?;
    routes(&netlink, ifname, &links, result, facts)
}

/// The device that host-device has moved into the namespace. Its alias is its name on the host.
fn device(path: &str, entry: &Entry, facts: &mut Vec<Fact>) -> cni_linux::Result<()> {
    if plugins_of(&entry.config, "host-device").is_empty() {
        return Ok(());
    }
    let ifname = &entry.attachment.ifname;
    let inside = Netlink::open()?.open_in(&Netns::open(Path::new(path))?)?.find_link(ifname)?;
    if let Some(name) = inside.and_then(|link| link.alias) {
        facts.push(Fact::fine("device", format!("{name} of the host is {ifname} in the container")));
    }
    Ok(())
}

fn addresses(
    netlink: &Netlink,
    ifname: &str,
    links: &[Link],
    result: &AddResult,
    facts: &mut Vec<Fact>,
) -> cni_linux::Result<()> {
    let there: Vec<Addr> = netlink.list_all_addresses()?;
    let index = |name: &str| links.iter().find(|link| link.name == name).map(|link| link.index);
    for ip in &result.ips {
        let name = ip.interface.and_then(|at| result.interfaces.get(at)).map_or(ifname, |one| one.name.as_str());
        match there.iter().find(|addr| addr.cidr == ip.address && Some(addr.index) == index(name)) {
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
                facts.push(Fact::differs("address", format!("{} is in the result and not on {name}", ip.address)));
            }
        }
    }
    for addr in there.iter().filter(|addr| addr.scope == 0 && Some(addr.index) == index(ifname)) {
        if !result.ips.iter().any(|ip| ip.address == addr.cidr) {
            facts.push(Fact::fine("address", format!("{} on {ifname}, not in the result", addr.cidr)));
        }
    }
    Ok(())
}

fn routes(
    netlink: &Netlink,
    ifname: &str,
    links: &[Link],
    result: &AddResult,
    facts: &mut Vec<Fact>,
) -> cni_linux::Result<()> {
    let mut there = netlink.list_all_routes(Family::V4)?;
    there.extend(netlink.list_all_routes(Family::V6)?);
    let name = |index: u32| links.iter().find(|link| link.index == index).map_or("?", |link| link.name.as_str());
    for route in &result.routes {
        let gw = route.gw.or_else(|| {
            let same = |ip: &&cni::result::IpConfig| ip.address.is_ipv4() == route.dst.is_ipv4();
            result.ips.iter().find(same).and_then(|ip| ip.gateway)
        });
        let text = match gw {
            Some(gw) => format!("{} via {gw}", route.dst),
            None => route.dst.to_string(),
        };
        let found = there.iter().find(|one| {
            one.dst == route.dst.network() && (one.gw == gw || gw.is_none()) && one.table_id() == table(route.table)
        });
        match found {
            Some(one) => facts.push(Fact::fine("route", format!("{text} dev {}", name(one.oif)))),
            None => facts.push(Fact::differs("route", format!("{text} is in the result and not in the namespace"))),
        }
    }
    if result.routes.is_empty() {
        for one in there.iter().filter(|one| one.gw.is_some() && name(one.oif) == ifname) {
            let gw = one.gw.map(|gw| gw.to_string()).unwrap_or_default();
            facts.push(Fact::fine("route", format!("{} via {gw} dev {ifname}, not in the result", one.dst)));
        }
    }
    Ok(())
}

fn table(table: Option<u32>) -> u32 {
    table.filter(|table| *table != 0).unwrap_or(cni_linux::route::MAIN_TABLE)
}

/// The rules there are, and those that the configuration of the ADD asked for and that are not.
fn rules(snapshot: &Snapshot, mark: &AttachmentId, entry: &Entry, facts: &mut Vec<Fact>) {
    let mut found = Vec::new();
    for held in snapshot.rules.iter().filter(|held| held.owner.matches(mark)) {
        found.push(held.purpose.to_string());
        let what = match held.purpose {
            cni_firewall::container_rules::Purpose::Masquerade => "masquerade",
            cni_firewall::container_rules::Purpose::PortMap => "host port",
            cni_firewall::container_rules::Purpose::SpoofCheck => "macspoofchk",
            cni_firewall::container_rules::Purpose::Forward => "firewall",
        };
        facts.push(Fact::fine(what, format!("{}  [{}]", held.text, held.place)));
    }
    let Ok(config) = Json::parse(&entry.config) else { return };
    let plugins = match config.get("plugins") {
        Some(Json::Array(plugins)) => plugins.as_slice(),
        _ => &[],
    };
    let is_on = |plugin: &Json, key: &str| plugin.get(key) == Some(&Json::Bool(true));
    let kind = |plugin: &Json| plugin.get("type").and_then(Json::as_str).unwrap_or_default().to_owned();
    let mappings = entry.attachment.capability_args.get_exact("portMappings").map(|raw| raw.get().trim().to_owned());
    let has_mappings = mappings.is_some_and(|text| !matches!(text.as_str(), "null" | "[]"));
    for (what, purpose, wanted) in [
        ("masquerade", "masquerade", plugins.iter().any(|plugin| is_on(plugin, "ipMasq"))),
        ("macspoofchk", "macspoofchk", plugins.iter().any(|plugin| is_on(plugin, "macspoofchk"))),
        ("firewall", "firewall", plugins.iter().any(|plugin| kind(plugin) == "firewall")),
        ("host port", "portmap", has_mappings && plugins.iter().any(|plugin| kind(plugin) == "portmap")),
    ] {
        if wanted && !found.iter().any(|one| one == purpose) {
            facts.push(Fact::differs(what, "there is no rule, although the configuration asked for one"));
        }
    }
}

/// Adds the files on the disk that belong to the attachment.
fn stored(snapshot: &Snapshot, mark: &AttachmentId, result: &AddResult, facts: &mut Vec<Fact>) {
    let mut held = Vec::new();
    for (network, folder, reservations) in &snapshot.reservations {
        for one in reservations.iter().filter(|one| *network == mark.network && one.id == mark.container_id) {
            if one.ifname.as_ref().is_none_or(|name| *name == mark.ifname) {
                held.push(one.address);
                let text = format!("{}  [{}]", one.address, folder.join(network).display());
                facts.push(Fact::fine("reservation", text));
            }
        }
    }
    // Only if the network reserves addresses.
    let reserves = snapshot.reservations.iter().any(|(network, ..)| *network == mark.network);
    for ip in result.ips.iter().filter(|ip| reserves && !held.contains(&ip.address.address())) {
        let address = ip.address.address();
        facts.push(Fact::differs("reservation", format!("{address} is in the result and not reserved for it")));
    }
    for (socket, lease) in &snapshot.leases {
        if AttachmentId::new(&lease.network, &lease.container_id, &lease.ifname) != *mark {
            continue;
        }
        let text = format!("{} of {}", lease.address, lease.server);
        let end = match lease.times.map(|times| times.expiry) {
            None => ", without an answer yet".to_owned(),
            Some(None) => ", without an end".to_owned(),
            Some(Some(Duration::ZERO)) => ", ended".to_owned(),
            Some(Some(left)) => format!(", ends in {} s", left.as_secs()),
        };
        facts.push(match &lease.error {
            Some(error) => Fact::differs("lease", format!("{text}{end}: {error}")),
            None => Fact::fine("lease", format!("{text}{end}  [{}]", socket.display())),
        });
    }
    for saved in &snapshot.saved {
        let owner = saved.owner.as_ref().map(|(network, id, ifname)| AttachmentId::new(network, id, ifname));
        let file = saved.path.file_name().unwrap_or_default().to_string_lossy();
        let is_its = match owner {
            Some(owner) => owner == *mark,
            None => file == format!("{}_{}.json", mark.container_id, mark.ifname),
        };
        if is_its {
            let text = format!("{}  [{}]", saved.settings.join(", "), saved.path.display());
            facts.push(Fact::fine("saved", text));
        }
    }
}
