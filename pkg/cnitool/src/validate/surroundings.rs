//! What a document needs of this host: its plugins, its kernel, and that other networks leave it its addresses.

use std::path::Path;

use cni::config::NetConf;
use cni::delegate::find_plugin;
use cni::libcni::NetworkList;
use cni::rollback::Notes;
use cni_ipam::Range;
use plugin_host_local::Pool;
use serde_json::{Value, json};

use super::Problem;
use crate::Call;
use crate::cli::{Shared, Variables};
use crate::node;

/// What this host lacks, and what is in the way. `own` is what is wrong with the document by itself.
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
                && let Err(error) = find_plugin(kind, &runtime.plugin_folders)
            {
                problems.push(Problem::new(format!("{at}{key}"), error.to_string()));
            }
        }
    }
    let Some(list) = load(document) else { return problems };
    // The plugins know best what they need of a kernel. Who is wrong or missing would only say so again.
    if own.is_empty() && problems.is_empty() {
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
            problems.push(Problem::new("", format!("this host cannot serve it: {error}")));
        }
    }
    problems.extend(overlaps(&list, path, shared, call));
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

/// Addresses that another configured network gives out too.
fn overlaps(list: &NetworkList, path: &Path, shared: &Shared, call: &Call<'_>) -> Vec<Problem> {
    let folder = shared.conf_folder(&Variables(&call.environment));
    let own = ranges(list);
    let is_list = list.plugins().len() > 1 || path.extension().is_some_and(|ending| ending == "conflist");
    let mut problems = Vec::new();
    for other in node::networks(&folder).unwrap_or_default() {
        if other.name() == list.name() {
            continue;
        }
        for (_, theirs) in ranges(&other) {
            for (index, ours) in &own {
                if ours.contains(theirs.first()) || theirs.contains(ours.first()) {
                    let at = if is_list { format!("plugins[{index}].ipam") } else { "ipam".to_owned() };
                    let what = format!("{ours} overlaps with {theirs} of network {:?}", other.name());
                    problems.push(Problem::new(at, what));
                }
            }
        }
    }
    problems
}
