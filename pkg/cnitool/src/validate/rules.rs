//! What a document says of itself: the list's keys, and each plugin's by the plugin's own reading.

use cni::config::NetConf;
use cni::delegate::check_plugin_name;
use cni::ident;
use cni::json::{Json, UnknownKey};
use cni::skel::{Plugin, Role};
use libcni::NetworkList;
use serde_json::{Value, json};

use super::{Problem, blame};
use crate::plugins;

/// The longest name of a network, in bytes. A runtime's result cache has a file
/// `<network>-<container ID>-<interface>` for each attachment: 255 bytes, of which 64 are left to
/// the ID and 15 to the interface.
const MAX_NAME: usize = 255 - "-".len() - 64 - "-".len() - 15;

/// The keys of a list that a runtime reads.
const LIST: [&str; 8] =
    ["cniVersion", "cniVersions", "name", "plugins", "disableCheck", "disableGC", "loadOnlyInlinedPlugins", "args"];
/// The keys that every plugin's object may have.
const STANDARD: [&str; 9] =
    ["cniVersion", "name", "type", "capabilities", "ipam", "dns", "args", "runtimeConfig", "prevResult"];

/// Everything that is wrong with a document by itself.
pub(super) fn check(document: &Value) -> Vec<Problem> {
    let Some(members) = document.as_object() else { return vec![Problem::error("", "not a JSON object")] };
    let is_list = members.contains_key("plugins") || !members.contains_key("type");
    let mut problems = Vec::new();
    let load = |value: &Value| {
        let raw = value.to_string();
        let list = match is_list {
            true => NetworkList::parse(raw.as_bytes()),
            false => NetworkList::parse_single(raw.as_bytes()),
        };
        list.and_then(|list| list.version().map(drop)).map_err(|error| match error.details() {
            "" => error.to_string(),
            details => format!("{error}: {details}"),
        })
    };
    let wrong = blame::all(document, &["plugins", "name"], &load);
    problems.extend(wrong.into_iter().map(|(path, what)| Problem::error(path, what)));
    problems.extend(name(document));
    if !is_list {
        problems.extend(plugin(document, document, ""));
        return problems;
    }
    for key in members.keys().filter(|key| !LIST.iter().any(|name| name.eq_ignore_ascii_case(key))) {
        problems.push(Problem::warning(key, unknown_text(key, &LIST)));
    }
    for (index, one) in document["plugins"].as_array().into_iter().flatten().enumerate() {
        problems.extend(plugin(document, one, &format!("plugins[{index}]")));
    }
    problems
}

/// Returns what is wrong with the network's name, if there is one.
fn name(document: &Value) -> Option<Problem> {
    let name = document["name"].as_str().filter(|name| !name.is_empty())?;
    if let Err(error) = ident::check_network_name(name) {
        return Some(Problem::error("name", error.msg()));
    }
    let length = name.len();
    (length > MAX_NAME).then(|| {
        let what = format!(
            "network name is too long: {length} bytes, at most {MAX_NAME} fit into the name of a file of the runtime's \
             result cache, <network>-<container ID>-<interface>"
        );
        Problem::error("name", what)
    })
}

/// Returns the problems of one plugin's object, at `at`.
fn plugin(list: &Value, plugin: &Value, at: &str) -> Vec<Problem> {
    let below = |path: &str| match (at, path) {
        ("", path) => path.to_owned(),
        (at, "") => at.to_owned(),
        (at, path) => format!("{at}.{path}"),
    };
    let kind = plugin["type"].as_str().unwrap_or_default();
    let ipam = plugin["ipam"]["type"].as_str().unwrap_or_default();
    let mut problems = Vec::new();
    let Some(whole) = request(list, plugin) else { return problems };
    for (key, kind) in [("type", kind), ("ipam.type", ipam)] {
        if !kind.is_empty()
            && let Err(error) = check_plugin_name(kind)
        {
            problems.push(Problem::error(below(key), error.msg()));
        }
    }
    for kind in [kind, ipam].into_iter().filter(|kind| !kind.is_empty()) {
        let Some(reader) = plugins::find(kind) else { continue };
        let is_ipam = reader.role() == Role::Ipam;
        let Ok(json) = Json::parse(whole.to_string().as_bytes()) else { continue };
        for UnknownKey { path, known } in reader.unknown_keys(&json) {
            let standard = !path.contains('.') && STANDARD.iter().any(|name| name.eq_ignore_ascii_case(&path));
            if standard
                || path.starts_with("runtimeConfig.")
                || path.starts_with("prevResult.")
                || path.starts_with("cni.dev/")
            {
                continue;
            }
            let name = path.rsplit('.').next().unwrap_or_default();
            let names: Vec<&str> = known
                .iter()
                .copied()
                .chain(if path.contains('.') { &[][..] } else { &STANDARD }.iter().copied())
                .collect();
            problems.push(Problem::warning(below(&path), unknown_text(name, &names)));
        }
        let by_runtime = plugin["capabilities"]["ipRanges"] == json!(true);
        let check = |value: &Value| {
            let outcome = NetConf::parse(value.to_string()).and_then(|conf| reader.examine(&conf));
            match outcome {
                // The runtime brings them.
                Err(error) if is_ipam && by_runtime && error.msg() == "no IP ranges specified" => Ok(()),
                Err(error) if is_ipam && by_runtime && error.msg().starts_with("failed to allocate ") => Ok(()),
                // Reported for the list.
                Err(error) if error.code() == cni::Code::INCOMPATIBLE_VERSION => Ok(()),
                outcome => outcome.map_err(|error| error.to_string()),
            }
        };
        let kept: &[&str] = &["cniVersion", "name", "type"];
        let wrong = blame::all(&whole, kept, &check);
        problems.extend(wrong.into_iter().map(|(path, what)| Problem::error(below(&path), what)));
    }
    problems.extend(capabilities(plugin, kind, ipam, &below));
    problems
}

/// Returns the configuration that the plugin would read, without the runtime's additions.
pub(super) fn request(list: &Value, plugin: &Value) -> Option<Value> {
    let mut request = plugin.as_object()?.clone();
    request.remove("capabilities");
    for key in ["name", "cniVersion"] {
        match list.get(key) {
            Some(value) => request.insert(key.to_owned(), value.clone()),
            None => request.remove(key),
        };
    }
    // A wrong name or version is reported for the list.
    let name = request.get("name").and_then(Value::as_str);
    if name.is_none_or(|name| ident::check_network_name(name).is_err()) {
        request.insert("name".to_owned(), json!("unnamed"));
    }
    let version = request.get("cniVersion").and_then(Value::as_str);
    if version.is_none_or(|version| cni::version::Version::find(version).is_none()) {
        request.insert("cniVersion".to_owned(), json!("1.0.0"));
    }
    Some(Value::Object(request))
}

/// Capabilities that neither the plugin nor its IPAM plugin would look at.
fn capabilities(plugin: &Value, kind: &str, ipam: &str, below: &dyn Fn(&str) -> String) -> Vec<Problem> {
    let Some(declared) = plugin["capabilities"].as_object() else { return Vec::new() };
    let readers: Option<Vec<&dyn Plugin>> =
        [kind, ipam].into_iter().filter(|kind| !kind.is_empty()).map(plugins::find).collect();
    // The keys of another project's plugin are not known.
    let Some(readers) = readers else { return Vec::new() };
    let mut problems = Vec::new();
    for name in declared.keys() {
        let probe = json!({"runtimeConfig": {name.as_str(): null}});
        let Ok(probe) = Json::parse(probe.to_string().as_bytes()) else { continue };
        let path = format!("runtimeConfig.{name}");
        let mut names: Vec<&str> = Vec::new();
        let ignores = |reader: &dyn Plugin, names: &mut Vec<&str>| {
            let unknown = reader.unknown_keys(&probe).into_iter().find(|key| path.starts_with(&key.path));
            names.extend(unknown.iter().flat_map(|key| key.known));
            unknown.is_some()
        };
        if readers.iter().all(|reader| ignores(*reader, &mut names)) {
            let what = format!("{kind} does not use this capability{}", suggestion(name, &names));
            problems.push(Problem::warning(below(&format!("capabilities.{name}")), what));
        }
    }
    problems
}

fn unknown_text(name: &str, known: &[&str]) -> String {
    format!("unknown key, which is ignored{}", suggestion(name, known))
}

/// `; did you mean "mtu"?`, if one of the names is close.
fn suggestion(name: &str, known: &[&str]) -> String {
    let lower = name.to_ascii_lowercase();
    let close = known.iter().map(|other| (distance(&lower, &other.to_ascii_lowercase()), *other)).min();
    match close {
        Some((distance, other)) if distance <= 1 + name.len() / 4 => format!("; did you mean {other:?}?"),
        _ => String::new(),
    }
}

/// How many letters must be changed, added, left out or swapped with their neighbour.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = change.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}
