//! Checks whether the plugins of a list work together, and whether a plugin's keys are consistent
//! with the addresses that its IPAM plugin can give.

use std::net::{Ipv4Addr, Ipv6Addr};

use cni::Cidr;
use cni::config::NetConf;
use cni::delegate::keeps_reservations;
use cni::rollback::Notes;
use cni::skel::{Plugin, Role};
use cni::version::Version;
use cni_ipam::{Range, RangeSet, RangeSets};
use libcni::NetworkList;
use plugin_host_local::Pool;
use serde_json::{Value, json};

use super::document::ListedPlugin;
use super::{Problem, locate};

/// The MTUs that the kernel accepts for a veth, in bytes.
const VETH_MTU: std::ops::RangeInclusive<i64> = 68..=65535;

/// The smallest MTU of an interface with IPv6, in bytes.
const MIN_IPV6_MTU: i64 = 1280;

/// The effects of the plugins before the current one in the list.
#[derive(Default)]
struct Earlier {
    /// The path of the first bridge plugin, and the name of its bridge.
    bridge: Option<(String, String)>,
    /// Whether one of them may create the interface. Also true after a chained plugin, so that a
    /// missing interface is reported only once.
    may_create_interface: bool,
    /// Whether one of them may add addresses, which are not known here.
    may_add_addresses: bool,
    /// The folder and ranges in which they reserve addresses with host-local, each with the
    /// plugin's path.
    pools: Vec<(String, Pool)>,
}

/// Returns the problems that result from the combination of the document's plugins.
pub(super) fn check(document: &Value, plugins: &[ListedPlugin<'_>]) -> Vec<Problem> {
    let (mut problems, mut earlier) = (Vec::new(), Earlier::default());
    let version = version(document);
    for (index, listed) in plugins.iter().enumerate() {
        let kind = listed.kind;
        problems.extend(listed.check_position(index, &earlier));
        problems.extend(listed.check_ipam_type());
        problems.extend(listed.check_shared_ranges(&earlier));
        if kind == "bridge" {
            problems.extend(listed.check_second_bridge(&earlier, version));
        }
        // The addresses of flannel come from the node's subnet file.
        let has_addresses = |plugin: &&dyn Plugin| plugin.role() == Role::Interface && kind != "flannel";
        if let Some(plugin) = cni_multicall::find(kind).filter(has_addresses) {
            problems.extend(listed.check_addressing(plugin, &earlier, version));
            problems.extend(listed.check_advertisements(plugins));
        }
        problems.extend(listed.check_tuned_mtu(&earlier));
        listed.add_effects_to(&mut earlier);
    }
    problems
}

/// Returns the list's version, or `None` if it is not valid.
fn version(document: &Value) -> Option<Version> {
    // Errors in the name and the plugins must not hide the version.
    let mut list = document.as_object()?.clone();
    list.insert("plugins".to_owned(), json!([{"type": "x"}]));
    list.insert("name".to_owned(), json!("unnamed"));
    NetworkList::parse(Value::Object(list).to_string().as_bytes()).and_then(|list| list.version()).ok()
}

impl ListedPlugin<'_> {
    /// Returns the plugin's role, or `None` for a plugin of another project.
    fn role(&self) -> Option<Role> {
        cni_multicall::find(self.kind).map(Plugin::role)
    }

    /// Reports a chained plugin at the beginning of the list, unless its configuration contains a
    /// `prevResult`, and one behind plugins that do not create the interface.
    fn check_position(&self, index: usize, earlier: &Earlier) -> Option<Problem> {
        let kind = self.kind;
        match self.role()? {
            Role::Chained | Role::IpamOrChained if index == 0 => self.object["prevResult"].is_null().then(|| {
                let what = format!(
                    "{kind} needs the result of an earlier plugin: put it after the plugin that creates the interface, \
                     for example bridge"
                );
                self.error("type", what)
            }),
            Role::Chained | Role::IpamOrChained if !earlier.may_create_interface => {
                Some(self.warning("type", format!("no plugin before {kind} creates the container's interface")))
            }
            _ => None,
        }
    }

    /// Reports an IPAM plugin outside of `ipam`, and a plugin in `ipam` that is not an IPAM plugin.
    fn check_ipam_type(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.role() == Some(Role::Ipam) {
            let what = format!(
                "{} reserves addresses and creates no interface: it belongs in \"ipam\" of the plugin that creates the \
                 interface, for example bridge",
                self.kind
            );
            problems.push(self.warning("type", what));
        }
        if cni_multicall::find(self.ipam).is_some_and(|ipam| !matches!(ipam.role(), Role::Ipam | Role::IpamOrChained)) {
            problems.push(self.error("ipam.type", format!("{} is not an IPAM plugin", self.ipam)));
        }
        problems
    }

    /// Reports host-local ranges that an earlier plugin of the list reserves addresses from too.
    fn check_shared_ranges(&self, earlier: &Earlier) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.object["ipam"]["reuse"] == json!(true) {
            // ADD returns the address that the earlier plugin has reserved, instead of failing.
            return problems;
        }
        let Some(Pool { data_dir, ranges: Some(own_ranges), .. }) = self.pool() else { return problems };
        for (path, other) in &earlier.pools {
            let Some(other_ranges) = &other.ranges else { continue };
            let what = |outcome: &str| {
                format!(
                    "{path} reserves addresses from the same ranges, but an attachment can have only one of their addresses: ADD {outcome}"
                )
            };
            // The earlier plugin reserves an address from each of its sets. If this plugin's ranges
            // contain all addresses of a set, they contain the reserved address.
            let is_covered = |set: &RangeSet| set.ranges().iter().all(|range| contains(&own_ranges, range));
            if other.data_dir == data_dir && other_ranges.sets().iter().any(is_covered) {
                problems.push(self.error("ipam", what("fails")));
            } else if ranges(other_ranges).any(|other| ranges(&own_ranges).any(|own| own.overlaps(other))) {
                problems.push(self.warning("ipam", what("fails if both choose the same address")));
            }
        }
        problems
    }

    /// Reports the second bridge plugin of a list if its bridge differs from that of the first, or
    /// if plugins of this CNI version get no `prevResult`.
    fn check_second_bridge(&self, earlier: &Earlier, version: Option<Version>) -> Option<Problem> {
        let (path, bridge) = earlier.bridge.as_ref()?;
        if version.is_some_and(|version| version < Version::V0_3_0) {
            let what = format!(
                "{path} already creates the interface, which a second bridge cannot see in a prevResult before 0.3.0"
            );
            return Some(self.error("type", what));
        }
        if *bridge == self.bridge() {
            return None;
        }
        let what = format!(
            "{path} already attaches the interface to {bridge:?}, and an interface can only be attached to one bridge"
        );
        Some(self.error("bridge", what))
    }

    /// Returns the name of the bridge that this plugin, of type `bridge`, uses.
    fn bridge(&self) -> String {
        let name = self.object["bridge"].as_str().filter(|name| !name.is_empty());
        name.unwrap_or(plugin_bridge::DEFAULT_BRIDGE).to_owned()
    }

    /// Checks the keys about addresses, routes, gateways and the MTU of a plugin that creates an
    /// interface. Reports nothing for IPAM plugins that do not [keep
    /// reservations](keeps_reservations), because their addresses are not known. `plugin` is this
    /// plugin's code.
    fn check_addressing(&self, plugin: &dyn Plugin, earlier: &Earlier, version: Option<Version>) -> Vec<Problem> {
        match self.ipam {
            "" => return self.check_without_ipam(version),
            ipam if keeps_reservations(ipam) => {}
            _ => return Vec::new(),
        }
        if earlier.may_add_addresses {
            // The earlier addresses are not known and may reach every gateway, so 0.0.0.0/0 and
            // ::/0 stand for them. `mtu` is not checked, because it does not change the interface
            // that an earlier plugin has created.
            let unspecified = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
            return self.check_routes(plugin, &unspecified.map(Cidr::default_route));
        }
        let mut problems = self.check_routes(plugin, &[]);
        let sets = self.pool().and_then(|pool| pool.ranges);
        let has_ipv6 = sets.is_some_and(|sets| sets.sets().iter().any(|set| !set.is_ipv4()));
        // The plugin itself refuses smaller MTUs; 0 is the kernel's default.
        let only_for_ipv4 = *VETH_MTU.start()..MIN_IPV6_MTU;
        if let Some(mtu) = self.object["mtu"].as_i64()
            && has_ipv6
            && only_for_ipv4.contains(&mtu)
        {
            problems.push(self.error("mtu", format!("IPv6 needs an MTU of at least {MIN_IPV6_MTU}, not {mtu}")));
        }
        problems
    }

    /// Checks the keys about addresses of a plugin that creates an interface and has no IPAM
    /// plugin.
    fn check_without_ipam(&self, version: Option<Version>) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.object["ipam"].as_object().is_some_and(|keys| !keys.is_empty()) {
            let what = "ipam.type is missing: the other keys of ipam are ignored, and containers get no address";
            problems.push(self.warning("ipam", what));
        }
        for key in ["isGateway", "isDefaultGateway", "ipMasq"] {
            if self.object[key] == json!(true) || self.object[key].is_object() {
                problems.push(self.warning(key, "has no effect without ipam.type"));
            }
        }
        if let Some(version) = version.filter(|version| *version < Version::V0_3_0) {
            let what = format!("a result of version {version} needs an address, and ipam.type is missing");
            problems.push(Problem::error("cniVersion", what));
        }
        problems
    }

    /// Reports routes and gateways that the addresses in a [possible
    /// result](plugin_host_local::possible_results) of host-local do not reach. If ADD fails with
    /// every possible result, and the runtime cannot replace the ranges, the problems are errors;
    /// otherwise they are warnings. `plugin` is this plugin's code.
    fn check_routes(&self, plugin: &dyn Plugin, earlier_addresses: &[Cidr]) -> Vec<Problem> {
        let has_possible_results = NetConf::parse(self.request.to_string()).and_then(|conf| {
            plugin.examine(&conf)?;
            Ok(!plugin_host_local::possible_results(&conf)?.is_empty())
        });
        // `rules` reports an error in the plugin's or host-local's own keys.
        if !has_possible_results.unwrap_or(false) {
            return Vec::new();
        }
        let simulate = |request: &Value| simulate_add(plugin, request, earlier_addresses);
        let runtime_sets_ranges = self.object["capabilities"]["ipRanges"] == json!(true);
        let always_fails = !runtime_sets_ranges && simulate(&self.request).iter().all(Result::is_err);
        // Fails if ADD fails with one of the possible results.
        let check = |request: &Value| simulate(request).into_iter().collect::<Result<(), String>>();
        let errors = locate::errors(&self.request, &["cniVersion", "name", "type"], &check).into_iter();
        let as_problem = |(path, what): (String, String)| match always_fails {
            true => self.error(&path, what),
            false => self.warning(&path, what),
        };
        errors.map(as_problem).collect()
    }

    /// Reports an interface on the network of its master that gets only IPv4 addresses from IPAM,
    /// but accepts the advertisements of IPv6 routers. The runtime may add IPv6 addresses to those
    /// of the file, which are not known here. An empty `acceptRa` counts as absent.
    fn check_advertisements(&self, plugins: &[ListedPlugin<'_>]) -> Option<Problem> {
        let is_on_network_of_master = ["macvlan", "ipvlan", "vlan"].contains(&self.kind);
        let accept_ra = self.object["acceptRa"].as_str().unwrap_or_default();
        let is_decided = !["", "null"].contains(&accept_ra) || !self.object["enableSlaac"].is_null();
        let has_slaac = plugins.iter().any(|plugin| plugin.kind == "slaac");
        if !is_on_network_of_master || is_decided || has_slaac || !self.has_only_ipv4() {
            return None;
        }
        let what = "only IPv4 addresses are assigned, but a router of the master's network can give the interface IPv6 \
                    addresses and a default route, which no result has; \"acceptRa\": \"no\" prevents this";
        Some(self.warning("ipam", what))
    }

    /// Whether all addresses that the file assigns are IPv4 addresses. `false` if there are none.
    fn has_only_ipv4(&self) -> bool {
        match self.ipam {
            "dhcp" => true,
            ipam if keeps_reservations(ipam) => {
                let sets = self.pool().and_then(|pool| pool.ranges);
                sets.is_some_and(|sets| sets.sets().iter().all(RangeSet::is_ipv4))
            }
            "static" => {
                let addresses = self.object["ipam"]["addresses"].as_array().filter(|list| !list.is_empty());
                let is_ipv4 = |entry: &Value| entry["address"].as_str().is_some_and(|text| !text.contains(':'));
                addresses.is_some_and(|list| list.iter().all(is_ipv4))
            }
            _ => false,
        }
    }

    /// Reports an `mtu` of tuning that the veth of an earlier bridge plugin cannot have. Accepts 0,
    /// which tuning ignores, and values below 0 or above `i32::MAX`, which tuning's own check
    /// reports.
    fn check_tuned_mtu(&self, earlier: &Earlier) -> Option<Problem> {
        let mtu = self.object["mtu"].as_i64().filter(|_| self.kind == "tuning" && earlier.bridge.is_some())?;
        let tuning_sets_it = (1..=i64::from(i32::MAX)).contains(&mtu);
        let (least, most) = (VETH_MTU.start(), VETH_MTU.end());
        let what = || format!("the interface of bridge can have an MTU from {least} to {most}, not {mtu}");
        (tuning_sets_it && !VETH_MTU.contains(&mtu)).then(|| self.error("mtu", what()))
    }

    /// Returns the folder and the ranges in which host-local would reserve addresses, or `None` if
    /// the plugin does not use host-local or the configuration of host-local is invalid.
    fn pool(&self) -> Option<Pool> {
        if !keeps_reservations(self.kind) && !keeps_reservations(self.ipam) {
            return None;
        }
        let conf = NetConf::parse(self.request.to_string()).ok()?;
        Pool::read(&conf, &Notes::silent()).ok()
    }

    /// Adds the effects of this plugin to `earlier`. A plugin of another project has no known role:
    /// it may create the interface and add addresses.
    fn add_effects_to(&self, earlier: &mut Earlier) {
        if let Some(pool) = self.pool() {
            earlier.pools.push((self.path.clone(), pool));
        }
        if self.kind == "bridge" && earlier.bridge.is_none() {
            earlier.bridge = Some((self.path.clone(), self.bridge()));
        }
        earlier.may_create_interface |= !matches!(self.role(), Some(Role::Namespace | Role::Ipam));
        earlier.may_add_addresses |= self.role() != Some(Role::Namespace);
    }
}

/// Checks each of host-local's possible results as `plugin`'s ADD would do with the configuration
/// `request`. Returns one outcome for each possible result, or a single error if `request` is
/// invalid or has no ranges.
fn simulate_add(plugin: &dyn Plugin, request: &Value, earlier_addresses: &[Cidr]) -> Vec<Result<(), String>> {
    let outcome = NetConf::parse(request.to_string()).and_then(|conf| {
        let results =
            if keeps_reservations(conf.ipam_type()) { plugin_host_local::possible_results(&conf)? } else { Vec::new() };
        plugin.examine_answers(&conf, &results, earlier_addresses)
    });
    match outcome {
        // `locate` removes keys on trial. A success without the ranges would make the ranges look
        // like the cause of an error.
        Ok(errors) if errors.is_empty() => vec![Err("no ranges in the configuration".to_owned())],
        Ok(errors) => errors.into_iter().map(|error| error.map_or(Ok(()), |error| Err(error.to_string()))).collect(),
        Err(error) => vec![Err(error.to_string())],
    }
}

/// Whether one of the ranges of `sets` contains the whole `range`.
fn contains(sets: &RangeSets, range: &Range) -> bool {
    ranges(sets).any(|candidate| candidate.contains(range.first()) && candidate.contains(range.last()))
}

/// Returns all ranges of all sets.
pub(super) fn ranges(sets: &RangeSets) -> impl Iterator<Item = &Range> {
    sets.sets().iter().flat_map(RangeSet::ranges)
}
