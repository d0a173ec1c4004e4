//! Checks a document against this host: its plugins are installed, the kernel supports what they
//! need, and no other configured network uses the same addresses or host ports.

use cni::delegate::{check_plugin_name, find_plugin};
use cni::rollback::Notes;
use cni::version::Version;
use cni_cluster::pool;
use cni_firewall::portmap::Mapping;
use cni_ipam::Range;
use cni_linux::Stacked;
use libcni::{NetworkList, Runtime};
use plugin_cluster_local::Keys;
use plugin_host_local::Pool;
use serde_json::Value;

use super::document::ListedPlugin;
use super::{Problem, chain, document, has_error};
use crate::call::Context;
use crate::node::{confs_of_type, reserving_confs};

/// Returns the problems that the document with these plugins has on this host.
/// `problems_everywhere` are the problems that it has on every host.
pub(super) fn check(
    document: &Value,
    plugins: &[ListedPlugin<'_>],
    problems_everywhere: &[Problem],
    context: &Context<'_>,
) -> Vec<Problem> {
    let runtime = context.runtime();
    let mut problems = missing_plugins(plugins, &runtime);
    // A document that a runtime can load has only plugins that are objects, so an index in `list`
    // is an index in `plugins` too.
    let Ok(list) = document::load(document) else { return problems };
    // STATUS checks that the kernel supports what the plugins need. It is not run after an error,
    // because it would report the same error again.
    if !has_error(problems_everywhere) && problems.is_empty() {
        problems.extend(check_status(&list, &runtime));
    }
    // A host-device plugin may move the interface with the host's only default routes.
    problems.extend(confs_of_type(&list, "host-device").filter_map(|(index, conf)| {
        let (key, what) = plugin_host_device::lost_default_route(&conf)?;
        Some(plugins.get(index)?.warning(key, what))
    }));
    problems.extend(conflicts(&list, plugins, context));
    problems
}

/// Returns an error for each plugin that is not installed. Skips invalid names, which
/// [`rules`](super::rules) reports.
fn missing_plugins(plugins: &[ListedPlugin<'_>], runtime: &Runtime<'_>) -> Vec<Problem> {
    let mut problems = Vec::new();
    for listed in plugins {
        for (key, kind) in
            [("type", listed.kind), ("ipam.type", listed.object["ipam"]["type"].as_str().unwrap_or_default())]
        {
            if check_plugin_name(kind).is_ok()
                && let Err(error) = find_plugin(kind, &runtime.plugin_folders)
            {
                problems.push(listed.error(key, error.to_string()));
            }
        }
    }
    problems
}

/// Runs STATUS of a network's plugins, and returns its error as a problem. Does nothing if one of
/// the plugins does not support STATUS.
fn check_status(list: &NetworkList, runtime: &Runtime<'_>) -> Option<Problem> {
    // Older versions have no STATUS.
    let first_version = Version::V1_1_0;
    let list = list.with_version(first_version);
    let has_status = |kind: &str| {
        let versions = runtime.supported_versions(kind);
        versions.is_ok_and(|versions| versions.iter().any(|version| version == first_version.as_str()))
    };
    if !list.plugins().iter().all(|plugin| has_status(plugin.kind())) {
        return None;
    }
    let error = runtime.status(&list).err()?;
    Some(Problem::error("", format!("this host cannot handle an ADD: {error}")))
}

/// Returns the ranges of a network, each with its plugin's index and, for cluster-local, the name
/// of its pool.
fn ranges(list: &NetworkList) -> Vec<(usize, Range, Option<String>)> {
    let mut all = Vec::new();
    for (index, kind, conf) in reserving_confs(list, None) {
        if let Ok(Pool { ranges: Some(sets), .. }) = Pool::read(&conf, &Notes::silent()) {
            let is_clustered = [kind, conf.ipam_type()].contains(&"cluster-local");
            let layer2 = Keys::read(&conf).ok().filter(|_| is_clustered).map(|keys| keys.layer2);
            let name = |range: &Range| layer2.as_ref().map(|layer2| pool::name(layer2, range.subnet()));
            let with_pool = |range: &Range| (index, range.clone(), name(range));
            all.extend(chain::ranges(&sets).map(with_pool));
        }
    }
    all
}

/// Returns the port mappings in a network's configuration file, each with its plugin's index. The
/// mappings that a runtime requests are not known.
fn port_mappings(list: &NetworkList) -> Vec<(usize, Mapping)> {
    let with_index =
        |(index, conf)| plugin_portmap::fixed_ports(&conf).into_iter().map(move |mapping| (index, mapping));
    confs_of_type(list, "portmap").flat_map(with_index).collect()
}

/// Returns the index, the master, and the mode that an ADD sets on the master, of each ipvlan
/// plugin of a network.
fn ipvlan_modes(list: &NetworkList) -> Vec<(usize, String, Stacked)> {
    let with_index = |(index, conf)| plugin_ipvlan::mode_of_master(&conf).map(|(master, mode)| (index, master, mode));
    confs_of_type(list, "ipvlan").filter_map(with_index).collect()
}

/// Returns a warning for each range, host port and ipvlan mode that conflicts with another
/// configured network. `plugins` are those of `list`.
fn conflicts(list: &NetworkList, plugins: &[ListedPlugin<'_>], context: &Context<'_>) -> Vec<Problem> {
    let (own_ranges, own_mappings, own_modes) = (ranges(list), port_mappings(list), ipvlan_modes(list));
    let mut problems = Vec::new();
    let mut warn = |index: &usize, key: &str, what: String| {
        problems.extend(plugins.get(*index).map(|plugin| plugin.warning(key, what)));
    };
    // If the folder cannot be read, no other network is known.
    for other in context.networks().unwrap_or_default() {
        if other.name() == list.name() {
            continue;
        }
        let of_network = format!("of network {:?}", other.name());
        for (_, other_range, other_pool) in ranges(&other) {
            for (index, range, pool) in &own_ranges {
                let (own, others) = (range.subnet(), other_range.subnet());
                let what = match (pool, &other_pool) {
                    // Networks may share a pool.
                    (Some(pool), Some(other_pool)) if pool == other_pool => continue,
                    (Some(pool), Some(other_pool))
                        if own.contains(others.address()) || others.contains(own.address()) =>
                    {
                        format!("pool {pool} overlaps with pool {other_pool} {of_network}")
                    }
                    _ if range.overlaps(&other_range) => {
                        format!("{range} overlaps with {other_range} {of_network}")
                    }
                    _ => continue,
                };
                warn(index, "ipam", what);
            }
        }
        for (_, other_mapping) in port_mappings(&other) {
            for (index, mapping) in own_mappings.iter().filter(|(_, mapping)| mapping.overlaps(&other_mapping)) {
                let what = format!(
                    "{} port {} of the host is mapped by portmap {of_network} too",
                    mapping.protocol, mapping.host_port
                );
                warn(index, "runtimeConfig.portMappings", what);
            }
        }
        for (_, master, other_mode) in ipvlan_modes(&other) {
            let differs =
                |(_, own_master, mode): &&(usize, String, Stacked)| *own_master == master && *mode != other_mode;
            for (index, _, mode) in own_modes.iter().filter(differs) {
                let what = format!(
                    "mode {mode} for master {master} differs from {other_mode} {of_network}: a master has one mode, which the last ADD sets for all containers"
                );
                warn(index, "mode", what);
            }
        }
    }
    problems
}
