//! Compares one attachment's result with what exists of it in the kernel and on the disk.

use std::net::IpAddr;
use std::path::Path;

use cni::delegate::keeps_reservations;
use cni::json::Json;
use cni::result::{AddResult, Interface, Route};
use cni::{AttachmentId, Cidr};
use cni_linux::route::Family;
use cni_linux::{Addr, Link, Netlink, Netns, OperState, PortState};
use libcni::cache::Entry;
use serde::Serialize;
use serde_json::json;

use crate::call::Call;
use crate::node::attachments::CachedAttachment;
use crate::node::objects::{HOST_PORT, RESERVATION};
use crate::node::snapshot::Snapshot;
use crate::node::{is_true, plugins_in, plugins_of_type};
use crate::report::{Fact, Fields};
use crate::rules::missing_rules;
use crate::target::NetnsPresence;

/// The kinds of facts about packet filter rules that `cnitool rules restore` restores. The texts
/// are part of the output.
pub(crate) const RULE_KINDS: [&str; 4] = ["masquerade", HOST_PORT, "macspoofchk", "firewall"];

/// The scope of an address that is valid everywhere (`RT_SCOPE_UNIVERSE`).
const GLOBAL_SCOPE: u8 = 0;

/// An attachment in the result cache, and the facts about it.
#[derive(Serialize)]
pub(crate) struct AttachmentReport {
    #[serde(flatten)]
    pub(crate) id: AttachmentId,
    netns: String,
    pub(crate) facts: Vec<Fact>,
}

impl AttachmentReport {
    /// Collects the facts about a cached attachment.
    pub(crate) fn new(snapshot: &Snapshot, cached: &CachedAttachment, call: &Call<'_>) -> AttachmentReport {
        let CachedAttachment { entry, id, presence, result } = cached;
        let mut report = AttachmentReport { id: id.clone(), netns: entry.attachment.netns.clone(), facts: Vec::new() };
        report.facts.extend(result.as_ref().err().map(|why| Fact::differs("result", [], why)));
        let no_result = AddResult::default();
        let result = result.as_ref().unwrap_or(&no_result);
        report.add_host_links(snapshot, result);
        let (state, problem) = match presence {
            NetnsPresence::Exists => ("exists", None),
            // Fine, because the module `leftovers` reports the cache entry.
            NetnsPresence::Gone(_) => ("gone", None),
            NetnsPresence::OtherFile(why) => ("unknown", Some(why.clone())),
            // Fine, because nothing could be compared.
            NetnsPresence::Unknown(_) => ("unknown", None),
        };
        let namespace = Fact::fine("namespace", [("path", json!(report.netns)), ("state", json!(state))]);
        report.facts.push(Fact { problem, ..namespace.clone() });
        if state == "exists"
            && let Err(error) = report.add_container_facts(entry, result)
        {
            report.facts.push(Fact { problem: Some(error.to_string()), ..namespace });
        }
        let objects = snapshot.objects.iter().filter(|object| object.owner.matches(&report.id));
        report.facts.extend(objects.map(|object| object.fact.clone()));
        report.add_missing_rules(entry, call);
        report.add_missing_reservations(entry, result);
        report
    }

    /// Adds the attachment's links on the host, bandwidth's ifbs included: those whose alias names
    /// the attachment, and those in the result. An ifb of the Go plugin has no alias.
    fn add_host_links(&mut self, snapshot: &Snapshot, result: &AddResult) {
        let (links, mut added) = (&snapshot.attachments.links, Vec::new());
        let aliased = snapshot.attachments.aliased_links.iter().map(|(owner, link)| (Some(owner), link));
        let ifbs = snapshot.ifbs.iter().map(|(owner, ifb)| (owner.as_ref(), ifb));
        for (_, link) in aliased.chain(ifbs).filter(|(owner, _)| *owner == Some(&self.id)) {
            added.push(link.index);
            self.facts.push(Fact::fine(kind_of(link), describe(link, links)));
        }
        // An interface of the result without a sandbox is on the host.
        for interface in result.interfaces.iter().filter(|interface| interface.sandbox.is_empty()) {
            let named = [("name", json!(interface.name))];
            self.facts.push(match links.iter().find(|link| link.name == interface.name) {
                Some(link) if added.contains(&link.index) => continue,
                Some(link) => Fact::fine(kind_of(link), describe(link, links)),
                None => Fact::differs("host link", named, "in the result, but not on the host"),
            });
        }
    }

    /// Adds the interfaces, addresses and routes in the container's namespace, compared with the
    /// result, and the device that host-device has moved into it.
    ///
    /// # Errors
    /// The kernel's error if the namespace cannot be entered or read.
    fn add_container_facts(&mut self, entry: &Entry, result: &AddResult) -> cni_linux::Result<()> {
        let netlink = Netlink::open()?.open_in(&Netns::open(Path::new(&self.netns))?)?;
        let (links, ifname) = (netlink.list_links()?, self.id.ifname.clone());
        let mut listed = result.interfaces.iter().filter(|one| !one.sandbox.is_empty());
        for Interface { name, mac, mtu, .. } in listed.clone() {
            let Some(link) = links.iter().find(|link| link.name == *name) else {
                let problem = "in the result, but not in the namespace";
                self.facts.push(Fact::differs("interface", [("name", json!(name))], problem));
                continue;
            };
            let own_mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
            let mut problems = Vec::new();
            if !mac.is_empty() && !mac.eq_ignore_ascii_case(&own_mac) {
                problems.push(format!("the result has the MAC {mac}"));
            }
            problems.extend(mtu.filter(|mtu| *mtu != link.mtu).map(|mtu| format!("the result has the MTU {mtu}")));
            let problem = Some(problems.join("; ")).filter(|problem| !problem.is_empty());
            self.facts.push(Fact { problem, ..Fact::fine("interface", describe(link, &[])) });
        }
        let own = links.iter().find(|link| link.name == ifname);
        // A result need not list CNI_IFNAME.
        let unlisted = own.filter(|_| !listed.any(|one| one.name == ifname));
        self.facts.extend(unlisted.map(|link| Fact::fine("interface", describe(link, &[]))));
        self.add_addresses(&netlink, &links, result)?;
        self.add_routes(&netlink, &links, result)?;
        // The device's alias is its name on the host.
        if let Some(name) = own.and_then(|link| link.alias.as_deref())
            && !plugins_of_type(&entry.config, "host-device").is_empty()
        {
            self.facts.push(Fact::fine("device", [("name", json!(name)), ("interface", json!(ifname))]));
        }
        Ok(())
    }

    /// Adds the addresses of the result, and the other global addresses of CNI_IFNAME. `netlink`
    /// and `links` are those of the container's namespace.
    ///
    /// # Errors
    /// The kernel's error if the addresses cannot be listed.
    fn add_addresses(&mut self, netlink: &Netlink, links: &[Link], result: &AddResult) -> cni_linux::Result<()> {
        let existing: Vec<Addr> = netlink.list_all_addresses()?;
        let index_of = |name: &str| links.iter().find(|link| link.name == name).map(|link| link.index);
        let ifname = self.id.ifname.as_str();
        for ip in &result.ips {
            // In a result, an address names its interface by the position in `interfaces`.
            let interface = ip.interface.and_then(|position| result.interfaces.get(position));
            let name = interface.map_or(ifname, |interface| interface.name.as_str());
            let found = existing.iter().find(|addr| addr.cidr == ip.address && Some(addr.index) == index_of(name));
            let problem = match found {
                None => Some("in the result, but not on the interface".to_owned()),
                Some(addr) => addr.dad_failed.then(|| "another host on the link has it too".to_owned()),
            };
            self.facts.push(Fact { problem, ..address_fact(ip.address, name, found, false) });
        }
        for addr in existing.iter().filter(|addr| addr.scope == GLOBAL_SCOPE && Some(addr.index) == index_of(ifname)) {
            if !result.ips.iter().any(|ip| ip.address == addr.cidr) {
                self.facts.push(address_fact(addr.cidr, ifname, Some(addr), true));
            }
        }
        Ok(())
    }

    /// Adds the routes of the result or, if the result has none, CNI_IFNAME's routes with a
    /// gateway. `netlink` and `links` are those of the container's namespace.
    ///
    /// # Errors
    /// The kernel's error if the routes cannot be listed.
    fn add_routes(&mut self, netlink: &Netlink, links: &[Link], result: &AddResult) -> cni_linux::Result<()> {
        let mut existing = netlink.list_all_routes(Family::V4)?;
        existing.extend(netlink.list_all_routes(Family::V6)?);
        let name_of = |index: u32| links.iter().find(|link| link.index == index).map_or("?", |link| &link.name);
        let ifname = self.id.ifname.as_str();
        for route in result.routes.iter().flat_map(Route::paths) {
            // For a route without a gateway, the gateway of the first address of its family is
            // used.
            let first = || result.ips.iter().find(|ip| ip.address.is_ipv4() == route.dst.is_ipv4());
            let gw = route.gw.or_else(|| first().and_then(|ip| ip.gateway));
            // `None` and 0 stand for the main table.
            let table = route.table.filter(|table| *table != 0).unwrap_or(cni_linux::route::MAIN_TABLE);
            let found = existing.iter().find(|other| {
                other.dst == route.dst.network() && (gw.is_none() || other.gw == gw) && other.table_id() == table
            });
            let problem = found.is_none().then(|| "in the result, but not in the namespace".to_owned());
            let interface = found.map_or(ifname, |found| name_of(found.oif));
            self.facts.push(Fact { problem, ..route_fact(route.dst, gw, interface, false) });
        }
        if result.routes.is_empty() {
            let unlisted = existing.iter().filter(|route| name_of(route.oif) == ifname && route.gw.is_some());
            self.facts.extend(unlisted.map(|route| route_fact(route.dst, route.gw, ifname, true)));
        }
        Ok(())
    }

    /// Adds each kind of rule that the configuration of the ADD needs and that does not exist.
    fn add_missing_rules(&mut self, entry: &Entry, call: &Call<'_>) {
        let plugins = plugins_in(&entry.config);
        let a_plugin_sets = |key: &str| plugins.iter().any(|plugin| is_true(plugin, key));
        let a_plugin_has = |key: &str| plugins.iter().any(|plugin| plugin.get(key).is_some());
        let has = |kind: &str| plugins.iter().any(|plugin| plugin.get("type").and_then(Json::as_str) == Some(kind));
        let mappings = entry.attachment.capability_args.get_exact("portMappings");
        let has_mappings = mappings.is_some_and(|raw| !matches!(raw.get().trim(), "null" | "[]"));
        for (kind, is_needed) in [
            ("masquerade", a_plugin_sets("ipMasq")),
            ("macspoofchk", a_plugin_sets("macspoofchk")),
            ("firewall", has("firewall")),
            ("egress", a_plugin_has("egress")),
            (HOST_PORT, has_mappings && has("portmap")),
        ] {
            if !is_needed || self.facts.iter().any(|fact| fact.kind == kind) {
                continue;
            }
            // The rules of Go's firewall name no owner. Its CHECK finds them by their addresses.
            let is_nameless =
                kind == "firewall" && missing_rules(entry, kind, call).is_ok_and(|rules| rules.is_empty());
            let problem = "the attachment has no such rule, although its configuration needs one";
            self.facts.push(match is_nameless {
                true => Fact::fine(kind, [("withoutOwner", json!(true))]),
                false => Fact::differs(kind, [], problem),
            });
        }
    }

    /// If the IPAM plugin of the ADD keeps reservations, adds the addresses of the result that are
    /// not reserved. Another network of this name may have left its reservations.
    fn add_missing_reservations(&mut self, entry: &Entry, result: &AddResult) {
        let has_reservations = plugins_in(&entry.config).iter().any(|plugin| {
            let ipam_type = plugin.get("ipam").and_then(|ipam| ipam.get("type"));
            ipam_type.and_then(Json::as_str).is_some_and(keeps_reservations)
        });
        for ip in result.ips.iter().filter(|_| has_reservations) {
            let address = ("address", json!(ip.address.address()));
            if !self.facts.iter().any(|fact| fact.kind == RESERVATION && fact.fields.contains(&address)) {
                let problem = "in the result, but not reserved for this attachment";
                self.facts.push(Fact::differs(RESERVATION, [address], problem));
            }
        }
    }
}

/// Returns the kind of a fact about a link of the host.
fn kind_of(link: &Link) -> &'static str {
    match link {
        _ if link.is_ifb() => "bandwidth",
        _ if link.is_bridge() => "bridge",
        _ => "host link",
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

/// Returns an address. `not_in_result` is whether the result does not have it.
fn address_fact(address: Cidr, interface: &str, existing: Option<&Addr>, not_in_result: bool) -> Fact {
    let fields = [
        ("address", json!(address.to_string())),
        ("interface", json!(interface)),
        ("tentative", json!(existing.is_some_and(|addr| addr.tentative))),
        ("duplicate", json!(existing.is_some_and(|addr| addr.dad_failed))),
        ("notInResult", json!(not_in_result)),
    ];
    Fact::fine("address", fields)
}

/// Returns a route. `not_in_result` is whether the result does not have it.
fn route_fact(destination: Cidr, gateway: Option<IpAddr>, interface: &str, not_in_result: bool) -> Fact {
    let fields = [
        ("destination", json!(destination.to_string())),
        ("gateway", json!(gateway)),
        ("interface", json!(interface)),
        ("notInResult", json!(not_in_result)),
    ];
    Fact::fine("route", fields)
}
