//! Checks a document without its host: the keys of the list, and the keys of each plugin with the
//! plugin's own code.

use cni::config::NetConf;
use cni::delegate::check_plugin_name;
use cni::ident;
use cni::json::{Json, UnknownKey};
use cni::skel::{Plugin, Role};
use libcni::NetworkList;
use serde_json::{Value, json};

use super::document::{ListedPlugin, is_list};
use super::{Problem, locate};
use crate::report::did_you_mean;

/// The longest name of a network, in bytes. A runtime's result cache has a file
/// `<network>-<container ID>-<interface>` for each attachment. The name of a file has at most 255
/// bytes, of which the ID may need 64 and the interface 15.
const MAX_NAME: usize = 255 - "-".len() - 64 - "-".len() - 15;

/// The keys of a list that runtimes read.
pub(crate) const LIST_KEYS: [&str; 8] =
    ["cniVersion", "cniVersions", "name", "plugins", "disableCheck", "disableGC", "loadOnlyInlinedPlugins", "args"];
/// The keys that every plugin's object may have.
pub(crate) const STANDARD_KEYS: [&str; 9] =
    ["cniVersion", "name", "type", "capabilities", "ipam", "dns", "args", "runtimeConfig", "prevResult"];

/// Returns the problems that the document with these plugins has on every host.
pub(super) fn check(document: &Value, plugins: &[ListedPlugin<'_>]) -> Vec<Problem> {
    let Some(members) = document.as_object() else { return vec![Problem::error("", "not a JSON object")] };
    let is_list = is_list(document);
    let mut problems = Vec::new();
    let parse = if is_list { NetworkList::parse } else { NetworkList::parse_single };
    let check_as_runtime = |value: &Value| {
        let version = parse(value.to_string().as_bytes()).and_then(|list| list.version());
        version.map(drop).map_err(|error| match error.details() {
            "" => error.to_string(),
            details => format!("{error}: {details}"),
        })
    };
    let errors = locate::errors(document, &["plugins", "name"], &check_as_runtime);
    problems.extend(errors.into_iter().map(|(path, what)| Problem::error(path, what)));
    problems.extend(check_name(document));
    for key in members.keys().filter(|key| is_list && !LIST_KEYS.iter().any(|name| name.eq_ignore_ascii_case(key))) {
        problems.push(Problem::warning(key, unknown_text(key, &LIST_KEYS)));
    }
    if !is_list || document["plugins"].is_array() {
        problems.extend(plugins.iter().flat_map(check_plugin));
    }
    problems
}

/// Checks the network's name. Accepts a missing name, which [`check`] reports with the list's keys.
fn check_name(document: &Value) -> Option<Problem> {
    let name = document["name"].as_str().filter(|name| !name.is_empty())?;
    if let Err(error) = ident::check_network_name(name) {
        return Some(Problem::error("name", error.msg()));
    }
    let length = name.len();
    let what = format!(
        "network name is too long: {length} bytes, at most {MAX_NAME} fit into the name of a file of the runtime's \
         result cache, <network>-<container ID>-<interface>"
    );
    (length > MAX_NAME).then(|| Problem::error("name", what))
}

/// Returns the problems of one plugin.
fn check_plugin(listed: &ListedPlugin<'_>) -> Vec<Problem> {
    let ListedPlugin { kind, ipam, object, request, .. } = listed;
    let names = [("type", kind), ("ipam.type", ipam)].into_iter().filter(|(_, name)| !name.is_empty());
    let refused = names.filter_map(|(key, name)| Some(listed.error(key, check_plugin_name(name).err()?.msg())));
    let mut problems: Vec<Problem> = refused.collect();
    let capabilities = &object["capabilities"];
    // The interface plugin and its IPAM plugin get the same configuration.
    let mut in_keys = check_keys([kind, ipam], request, capabilities);
    if *kind == "flannel" {
        in_keys.extend(check_delegate(request, capabilities));
    }
    problems.extend(in_keys.into_iter().map(|problem| Problem { path: listed.path_of(&problem.path), ..problem }));
    problems.extend(unused_capabilities(listed));
    problems
}

/// Returns the problems in the keys of flannel's delegate and of the delegate's IPAM plugin, which
/// get a configuration that flannel makes from `request`. The paths are those in `request`.
/// flannel's own errors are reported elsewhere.
fn check_delegate(request: &Value, capabilities: &Value) -> Vec<Problem> {
    let made = NetConf::parse(request.to_string()).and_then(|conf| plugin_flannel::example_delegate(&conf));
    let Ok(delegated) = made else { return Vec::new() };
    let kinds = [&delegated["type"], &delegated["ipam"]["type"]].map(|kind| kind.as_str().unwrap_or_default());
    let mut problems = check_keys(kinds, &delegated, capabilities);
    for Problem { path, .. } in problems.iter_mut().filter(|one| one.path != "ipam" && !one.path.starts_with("ipam.")) {
        path.insert_str(0, "delegate.");
    }
    problems
}

/// Returns the problems in the keys of the plugins of these types, which all get the configuration
/// `request`, with the paths in that. `capabilities` are those of the list's plugin.
fn check_keys(kinds: [&str; 2], request: &Value, capabilities: &Value) -> Vec<Problem> {
    let mut problems = Vec::new();
    for plugin in kinds.into_iter().filter(|kind| !kind.is_empty()).filter_map(cni_multicall::find) {
        problems.extend(unknown_keys(plugin, request));
        let runtime_sets_ranges = plugin.role() == Role::Ipam && capabilities["ipRanges"] == json!(true);
        let check = |value: &Value| {
            let outcome = NetConf::parse(value.to_string()).and_then(|conf| plugin.examine(&conf));
            match outcome {
                // If the runtime provides the ranges, the file may lack them, and may request an
                // address that is in no range of the file.
                Err(error) if runtime_sets_ranges && error.msg() == "no IP ranges specified" => Ok(()),
                Err(error) if runtime_sets_ranges && error.msg().starts_with("failed to allocate ") => Ok(()),
                // Reported with the list's keys.
                Err(error) if error.code() == cni::Code::INCOMPATIBLE_VERSION => Ok(()),
                outcome => outcome.map_err(|error| error.to_string()),
            }
        };
        let errors = locate::errors(request, &["cniVersion", "name", "type"], &check);
        problems.extend(errors.into_iter().map(|(path, what)| Problem::error(path, what)));
    }
    problems
}

/// Returns a warning for each key in the configuration `request` that `plugin` does not read.
fn unknown_keys(plugin: &dyn Plugin, request: &Value) -> Vec<Problem> {
    let Ok(json) = Json::parse(request.to_string().as_bytes()) else { return Vec::new() };
    let mut problems = Vec::new();
    for UnknownKey { path, known: mut known_names } in plugin.unknown_keys(&json) {
        let is_top_level = !path.contains('.');
        let is_standard = is_top_level && STANDARD_KEYS.iter().any(|name| name.eq_ignore_ascii_case(&path));
        let is_set_by_runtime =
            ["runtimeConfig.", "prevResult.", "cni.dev/"].iter().any(|start| path.starts_with(start));
        if is_standard || is_set_by_runtime {
            continue;
        }
        let name = path.rsplit('.').next().unwrap_or_default();
        if is_top_level {
            known_names.extend(STANDARD_KEYS);
        }
        let what = unknown_text(name, &known_names);
        problems.push(Problem::warning(path, what));
    }
    problems
}

/// Returns a warning for each declared capability that neither the plugin `kind` nor its IPAM
/// plugin `ipam` reads. Returns none if one of the two is a plugin of another project.
fn unused_capabilities(listed: &ListedPlugin<'_>) -> Vec<Problem> {
    let ListedPlugin { kind, ipam, object, .. } = listed;
    let Some(declared) = object["capabilities"].as_object() else { return Vec::new() };
    let mut readers: Vec<&dyn Plugin> = Vec::new();
    for kind in [*kind, *ipam].into_iter().filter(|kind| !kind.is_empty()) {
        let Some(plugin) = cni_multicall::find(kind) else { return Vec::new() };
        readers.push(plugin);
    }
    let mut problems = Vec::new();
    for name in declared.keys() {
        // The key in which the runtime passes the capability's value.
        let path = format!("runtimeConfig.{name}");
        let conf = json!({"runtimeConfig": {name.as_str(): null}});
        let Ok(conf) = Json::parse(conf.to_string().as_bytes()) else { continue };
        // `None` if the plugin reads the key. An unknown `runtimeConfig` covers all its keys.
        let find_unknown =
            |reader: &&dyn Plugin| reader.unknown_keys(&conf).into_iter().find(|key| path.starts_with(&key.path));
        let unknown: Vec<UnknownKey> = readers.iter().filter_map(find_unknown).collect();
        let is_read = unknown.len() < readers.len();
        if !is_read {
            let known_names = unknown.iter().flat_map(|key| key.known.iter().copied());
            let what = format!("{kind} does not use this capability{}", did_you_mean(name, known_names));
            problems.push(listed.warning(&format!("capabilities.{name}"), what));
        }
    }
    problems
}

/// Returns the text of the warning about an unknown key, with a [suggestion](did_you_mean).
fn unknown_text(name: &str, known: &[&str]) -> String {
    format!("unknown key, which is ignored{}", did_you_mean(name, known.iter().copied()))
}
