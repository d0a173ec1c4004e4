//! Checks what the plugins of a list need of each other, and what a plugin's keys and those of its
//! delegate need of each other.

use cni::Cidr;
use cni::config::NetConf;
use cni::rollback::Notes;
use cni::skel::{Plugin, Role};
use cni::version::Version;
use cni_ipam::{Range, RangeSet, RangeSets};
use libcni::NetworkList;
use plugin_host_local::Pool;
use serde_json::{Value, json};

use super::rules::request;
use super::{Problem, blame};
use crate::plugins;

/// The MTUs that the kernel accepts for a veth, in bytes.
const VETH_MTU: std::ops::RangeInclusive<i64> = 68..=65535;

/// The least MTU of an interface with IPv6, in bytes.
const IPV6_MTU: i64 = 1280;

/// The effects of the plugins before one plugin.
#[derive(Default)]
struct Earlier {
    /// The path of the first bridge plugin, and the bridge.
    bridge: Option<(String, String)>,
    /// Whether a plugin may have created the interface.
    interface: bool,
    /// Whether a plugin came before whose addresses are not known here.
    addresses: bool,
    /// The reservations of addresses: the plugin's path, the folder, the ranges.
    reserved: Vec<(String, Pool)>,
}

/// One plugin of the document.
struct One<'a> {
    at: &'a str,
    kind: &'a str,
    ipam: &'a str,
    plugin: &'a Value,
    /// The configuration that it would read on its standard input.
    request: Value,
}

/// Returns everything that is wrong between the plugins of a document.
pub(super) fn check(document: &Value) -> Vec<Problem> {
    let plugins: Vec<(String, &Value)> = match document["plugins"].as_array() {
        Some(plugins) => plugins.iter().enumerate().map(|(index, one)| (format!("plugins[{index}]"), one)).collect(),
        None => vec![(String::new(), document)],
    };
    let (mut problems, mut earlier) = (Vec::new(), Earlier::default());
    for (index, (at, plugin)) in plugins.iter().enumerate() {
        let Some(request) = request(document, plugin) else { continue };
        let text = |value: &'_ Value| value.as_str().map(str::to_owned).unwrap_or_default();
        let (kind, ipam) = (text(&plugin["type"]), text(&plugin["ipam"]["type"]));
        let one = One { at, kind: &kind, ipam: &ipam, plugin, request };
        let version = version(document);
        if index == 0 {
            problems.extend(one.first());
        } else {
            problems.extend(one.interface(&earlier));
        }
        problems.extend(one.reservation(&earlier));
        if kind == "bridge" {
            problems.extend(one.second_bridge(&earlier, version));
        }
        if let Some(reader) = plugins::find(&kind).filter(|reader| reader.role() == Role::Interface) {
            problems.extend(one.layer3(reader, &earlier, version));
        }
        problems.extend(one.tuned(&earlier));
        one.leave(&mut earlier);
    }
    problems
}

/// Returns the list's version, if it is valid.
fn version(document: &Value) -> Option<Version> {
    let mut head = document.clone();
    head["plugins"] = json!([{"type": "x"}]);
    head["name"] = json!("unnamed");
    NetworkList::parse(head.to_string().as_bytes()).and_then(|list| list.version()).ok()
}

impl One<'_> {
    /// The plugin's role; `None` if it is another project's.
    fn role(&self) -> Option<Role> {
        plugins::role(self.kind)
    }

    fn below(&self, key: &str) -> String {
        match self.at {
            "" => key.to_owned(),
            at => format!("{at}.{key}"),
        }
    }

    fn error(&self, key: &str, what: impl Into<String>) -> Problem {
        Problem::error(self.below(key), what)
    }

    fn warning(&self, key: &str, what: impl Into<String>) -> Problem {
        Problem::warning(self.below(key), what)
    }

    /// Checks the plugin as the first of the list.
    fn first(&self) -> Option<Problem> {
        let needs_result = self.role() == Some(Role::Chained) && self.plugin["prevResult"].is_null();
        needs_result.then(|| {
            let what = format!(
                "{} needs the result of an earlier plugin: put it behind the plugin that creates the interface, for \
                 example bridge",
                self.kind
            );
            self.error("type", what)
        })
    }

    /// Checks the plugin as a later one of the list.
    fn interface(&self, earlier: &Earlier) -> Option<Problem> {
        let needs_interface = self.role() == Some(Role::Chained) && !earlier.interface;
        needs_interface
            .then(|| self.warning("type", format!("no plugin before {} creates the container's interface", self.kind)))
    }

    /// Checks the plugin as one that reserves addresses.
    fn reservation(&self, earlier: &Earlier) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.role() == Some(Role::Ipam) {
            let what = format!(
                "{} reserves addresses and creates no interface: it belongs in \"ipam\" of the plugin that creates the \
                 interface, for example bridge",
                self.kind
            );
            problems.push(self.warning("type", what));
        }
        if plugins::role(self.ipam).is_some_and(|role| role != Role::Ipam) {
            problems.push(self.error("ipam.type", format!("{} is not an IPAM plugin", self.ipam)));
        }
        let Some(pool) = self.pool().filter(|_| self.plugin["ipam"]["reuse"] != json!(true)) else { return problems };
        let Some(ours) = &pool.ranges else { return problems };
        for (at, other) in &earlier.reserved {
            let Some(theirs) = &other.ranges else { continue };
            let what = |when: &str| {
                format!("{at} reserves addresses of these ranges too, and an attachment gets one alone: ADD {when}")
            };
            let all_in_ours = |set: &RangeSet| set.ranges().iter().all(|range| contains(ours, range));
            if other.data_dir == pool.data_dir && theirs.sets().iter().any(all_in_ours) {
                problems.push(self.error("ipam", what("fails")));
            } else if overlap(theirs, ours) {
                problems.push(self.warning("ipam", what("fails where both would give the same address")));
            }
        }
        problems
    }

    /// Checks the plugin as a bridge behind another one.
    fn second_bridge(&self, earlier: &Earlier, version: Option<Version>) -> Option<Problem> {
        let (at, bridge) = earlier.bridge.as_ref()?;
        if version.is_some_and(|version| version < Version::V0_3_0) {
            let what = format!("{at} creates the interface already, which results before 0.3.0 cannot express");
            return Some(self.error("type", what));
        }
        (*bridge != self.bridge()).then(|| {
            self.error("bridge", format!("{at} attaches the interface to {bridge:?}, and it can have one bridge"))
        })
    }

    fn bridge(&self) -> String {
        match self.plugin["bridge"].as_str() {
            None | Some("") => plugin_bridge::DEFAULT_BRIDGE.to_owned(),
            Some(name) => name.to_owned(),
        }
    }

    /// Checks the addresses, routes and gateways of a plugin that creates an interface.
    fn layer3(&self, reader: &dyn Plugin, earlier: &Earlier, version: Option<Version>) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.ipam.is_empty() {
            let is_set = |value: &Value| value.as_object().is_some_and(|keys| !keys.is_empty());
            if is_set(&self.plugin["ipam"]) {
                let what = "ipam.type is missing: the other keys of ipam are ignored, and containers get no address";
                problems.push(self.warning("ipam", what));
            }
            for key in ["isGateway", "isDefaultGateway", "ipMasq"] {
                if self.plugin[key] == json!(true) {
                    problems.push(self.warning(key, "has no effect without ipam.type"));
                }
            }
            if let Some(version) = version.filter(|version| *version < Version::V0_3_0) {
                let what = format!("a result of version {version} needs an address, and ipam.type is missing");
                problems.push(Problem::error("cniVersion", what));
            }
            return problems;
        }
        if self.ipam != "host-local" {
            return problems;
        }
        // The networks that the addresses of an earlier plugin reach are not known here.
        let everything = ["0.0.0.0", "::"].map(|zero| zero.parse().ok().map(Cidr::default_route));
        let before: Vec<Cidr> = everything.into_iter().flatten().filter(|_| earlier.addresses).collect();
        problems.extend(self.routes(reader, &before));
        if earlier.addresses {
            return problems;
        }
        let sets = self.pool().and_then(|pool| pool.ranges);
        let has_ipv6 = sets.is_some_and(|sets| sets.sets().iter().any(|set| !set.is_ipv4()));
        if let Some(mtu) = self.plugin["mtu"].as_i64().filter(|mtu| has_ipv6 && (68..IPV6_MTU).contains(mtu)) {
            problems.push(self.error("mtu", format!("IPv6 needs an MTU of at least {IPV6_MTU}, not {mtu}")));
        }
        problems
    }

    /// Reports routes and gateways that no address of the ranges reaches, as the plugin judges
    /// host-local's answers.
    fn routes(&self, reader: &dyn Plugin, before: &[Cidr]) -> Vec<Problem> {
        const NO_RANGES: &str = "no ranges in the configuration";
        let refused = |value: &Value| -> Vec<Option<String>> {
            let results = NetConf::parse(value.to_string()).and_then(|conf| {
                let is_host_local = conf.ipam_type() == "host-local";
                let results = if is_host_local { plugin_host_local::possible_results(&conf)? } else { Vec::new() };
                reader.examine_answers(&conf, &results, before)
            });
            match results {
                Ok(results) if results.is_empty() => vec![Some(NO_RANGES.to_owned())],
                Ok(results) => results.into_iter().map(|error| error.map(|error| error.to_string())).collect(),
                Err(error) => vec![Some(error.to_string())],
            }
        };
        // Defects that either plugin refuses by itself have been reported already.
        let by_itself = |conf: NetConf| {
            reader.examine(&conf)?;
            plugin_host_local::possible_results(&conf).map(|results| results.is_empty())
        };
        if NetConf::parse(self.request.to_string()).and_then(by_itself).unwrap_or(true) {
            return Vec::new();
        }
        let by_runtime = self.plugin["capabilities"]["ipRanges"] == json!(true);
        let always = !by_runtime && refused(&self.request).iter().all(Option::is_some);
        let check = |value: &Value| refused(value).into_iter().flatten().next().map_or(Ok(()), Err);
        let wrong = blame::all(&self.request, &["cniVersion", "name", "type"], &check);
        let problem = |(path, what): (String, String)| {
            if always { self.error(&path, what) } else { self.warning(&path, what) }
        };
        wrong.into_iter().map(problem).collect()
    }

    /// Checks tuning behind bridge, whose interface is a veth.
    fn tuned(&self, earlier: &Earlier) -> Option<Problem> {
        let mtu = self.plugin["mtu"].as_i64().filter(|mtu| *mtu != 0 && !VETH_MTU.contains(mtu))?;
        let is_tuned = self.kind == "tuning" && earlier.bridge.is_some() && i32::try_from(mtu).is_ok_and(|mtu| mtu > 0);
        let (least, most) = (VETH_MTU.start(), VETH_MTU.end());
        is_tuned
            .then(|| self.error("mtu", format!("the interface of bridge takes an MTU of {least} to {most}, not {mtu}")))
    }

    /// Returns the ranges from which host-local would reserve an address.
    fn pool(&self) -> Option<Pool> {
        if self.kind != "host-local" && self.ipam != "host-local" {
            return None;
        }
        let conf = NetConf::parse(self.request.to_string()).ok()?;
        Pool::read(&conf, &Notes::silent()).ok()
    }

    /// Adds the plugin's own effects for the next one.
    fn leave(self, earlier: &mut Earlier) {
        if let Some(pool) = self.pool() {
            earlier.reserved.push((self.at.to_owned(), pool));
        }
        if self.kind == "bridge" && earlier.bridge.is_none() {
            earlier.bridge = Some((self.at.to_owned(), self.bridge()));
        }
        earlier.interface |= !matches!(self.role(), Some(Role::Namespace | Role::Ipam));
        earlier.addresses |= self.role() != Some(Role::Namespace);
    }
}

/// Whether two configurations could hand out the same address.
fn overlap(a: &RangeSets, b: &RangeSets) -> bool {
    let meet = |one: &Range, other: &Range| one.contains(other.first()) || other.contains(one.first());
    ranges(a).any(|one| ranges(b).any(|other| meet(one, other)))
}

/// Whether every address of a range is in `sets`.
fn contains(sets: &RangeSets, range: &Range) -> bool {
    ranges(sets).any(|one| one.contains(range.first()) && one.contains(range.last()))
}

fn ranges(sets: &RangeSets) -> impl Iterator<Item = &Range> {
    sets.sets().iter().flat_map(RangeSet::ranges)
}
