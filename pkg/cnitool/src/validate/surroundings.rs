//! What a document needs of this host: its plugins, its kernel, and that other networks leave it
//! its addresses and host ports.

use std::path::Path;

use cni::config::NetConf;
use cni::delegate::{check_plugin_name, find_plugin};
use cni::rollback::Notes;
use cni_firewall::portmap::Mapping;
use cni_ipam::Range;
use cni_linux::Stacked;
use libcni::NetworkList;
use plugin_host_local::Pool;
use serde_json::{Value, json};

use super::{Problem, is_sound};
use crate::Call;
use crate::cli::{Shared, Variables};
use crate::node;

/// Returns the problems that this host adds: missing parts and conflicts. `own` has the problems of
/// the document itself.
pub(super) fn check(
    document: &Value,
    path: &Path,
    own: &[Problem],
    shared: &Shared,
    call: &Call<'_>,
    notes: &Notes,
) -> Vec<Problem> {
    let runtime = shared.runtime(call, notes);
    let mut problems = Vec::new();
    let plugins: Vec<(String, &Value)> = match document["plugins"].as_array() {
        Some(plugins) => plugins.iter().enumerate().map(|(index, one)| (format!("plugins[{index}]."), one)).collect(),
        None => vec![(String::new(), document)],
    };
    for (at, plugin) in &plugins {
        for (key, kind) in [("type", &plugin["type"]), ("ipam.type", &plugin["ipam"]["type"])] {
            if let Some(kind) = kind.as_str().filter(|kind| !kind.is_empty())
                && check_plugin_name(kind).is_ok()
                && let Err(error) = find_plugin(kind, &runtime.plugin_folders)
            {
                problems.push(Problem::error(format!("{at}{key}"), error.to_string()));
            }
        }
    }
    let Some(list) = load(document) else { return problems };
    // The plugins know best what they need of a kernel. Who is wrong or missing would only say so
    // again.
    if is_sound(own) && problems.is_empty() {
        // Asked in the newest version, because older ones cannot be.
        let mut newest = document.clone();
        newest["cniVersion"] = json!("1.1.0");
        if let Some(members) = newest.as_object_mut() {
            members.remove("cniVersions");
        }
        let speaks = |kind: &str| {
            runtime.supported_versions(kind).is_ok_and(|versions| versions.iter().any(|version| version == "1.1.0"))
        };
        if let Some(newest) = load(&newest).filter(|list| list.plugins().iter().all(|plugin| speaks(plugin.kind())))
            && let Err(error) = runtime.status(&newest)
        {
            problems.push(Problem::error("", format!("this host cannot handle an ADD: {error}")));
        }
    }
    problems.extend(lost_routes(&list, document));
    problems.extend(overlaps(&list, path, shared, call));
    problems
}

/// The devices without which this host would have no default route.
fn lost_routes(list: &NetworkList, document: &Value) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (index, plugin) in list.plugins().iter().enumerate().filter(|(_, plugin)| plugin.kind() == "host-device") {
        let at = if document["plugins"].is_array() { format!("plugins[{index}].") } else { String::new() };
        let conf = list.request(plugin, None).and_then(NetConf::parse).ok();
        let lost = conf.as_ref().and_then(plugin_host_device::lost_default_route);
        problems.extend(lost.map(|(key, what)| Problem::warning(format!("{at}{key}"), what)));
    }
    problems
}

fn load(document: &Value) -> Option<NetworkList> {
    let raw = document.to_string();
    let list = if document.get("plugins").is_some() {
        NetworkList::parse(raw.as_bytes())
    } else {
        NetworkList::parse_single(raw.as_bytes())
    };
    list.ok()
}

/// The ranges of a network, each with its plugin's index.
fn ranges(list: &NetworkList) -> Vec<(usize, Range)> {
    let mut all = Vec::new();
    for (index, plugin) in list.plugins().iter().enumerate() {
        let Ok(conf) = list.request(plugin, None).and_then(NetConf::parse) else { continue };
        if plugin.kind() != "host-local" && conf.ipam_type() != "host-local" {
            continue;
        }
        if let Ok(Pool { ranges: Some(sets), .. }) = Pool::read(&conf, &Notes::silent()) {
            all.extend(sets.sets().iter().flat_map(|set| set.ranges()).map(|range| (index, range.clone())));
        }
    }
    all
}

/// The host ports that stand in a network's configuration itself, each with its plugin's index.
/// Those that a runtime asks for are not known before it does.
fn host_ports(list: &NetworkList) -> Vec<(usize, Mapping)> {
    let mut all = Vec::new();
    for (index, plugin) in list.plugins().iter().enumerate().filter(|(_, plugin)| plugin.kind() == "portmap") {
        if let Ok(conf) = list.request(plugin, None).and_then(NetConf::parse) {
            all.extend(plugin_portmap::fixed_ports(&conf).into_iter().map(|mapping| (index, mapping)));
        }
    }
    all
}

/// The modes that a network gives to ipvlan masters, each with its plugin's index.
fn ipvlan_modes(list: &NetworkList) -> Vec<(usize, String, Stacked)> {
    let mut all = Vec::new();
    for (index, plugin) in list.plugins().iter().enumerate().filter(|(_, plugin)| plugin.kind() == "ipvlan") {
        if let Ok(conf) = list.request(plugin, None).and_then(NetConf::parse)
            && let Some((master, mode)) = plugin_ipvlan::mode_of_master(&conf)
        {
            all.push((index, master, mode));
        }
    }
    all
}

/// Returns the addresses, ports and settings that another configured network also uses.
fn overlaps(list: &NetworkList, path: &Path, shared: &Shared, call: &Call<'_>) -> Vec<Problem> {
    let folder = shared.conf_folder(&Variables(&call.environment));
    let (own, own_ports, own_modes) = (ranges(list), host_ports(list), ipvlan_modes(list));
    let is_list = list.plugins().len() > 1 || path.extension().is_some_and(|ending| ending == "conflist");
    let at = |index: &usize, key: &str| if is_list { format!("plugins[{index}].{key}") } else { key.to_owned() };
    let mut problems = Vec::new();
    for other in node::networks(&folder).unwrap_or_default() {
        if other.name() == list.name() {
            continue;
        }
        let whose = format!("of network {:?}", other.name());
        for (_, theirs) in ranges(&other) {
            for (index, ours) in &own {
                if ours.contains(theirs.first()) || theirs.contains(ours.first()) {
                    problems
                        .push(Problem::warning(at(index, "ipam"), format!("{ours} overlaps with {theirs} {whose}")));
                }
            }
        }
        for (_, theirs) in host_ports(&other) {
            for (index, ours) in own_ports.iter().filter(|(_, ours)| ours.overlaps(&theirs)) {
                let what =
                    format!("{} port {} of the host is mapped by portmap {whose} too", ours.protocol, ours.host_port);
                problems.push(Problem::warning(at(index, "runtimeConfig.portMappings"), what));
            }
        }
        for (_, master, theirs) in ipvlan_modes(&other) {
            for (index, _, ours) in own_modes.iter().filter(|(_, own, ours)| *own == master && *ours != theirs) {
                let what = format!(
                    "mode {ours} for master {master} differs from {theirs} {whose}: a master has one mode, the last ADD sets it for all containers"
                );
                problems.push(Problem::warning(at(index, "mode"), what));
            }
        }
    }
    problems
}
