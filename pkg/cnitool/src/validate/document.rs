//! Reads a file's text as the plugins read it: keys of structures may have any case, and of
//! duplicate keys the last value is used.

use std::path::Path;

use cni::ident;
use cni::json::Json;
use libcni::NetworkList;
use serde_json::{Map, Value, json};

use super::{LIST_KEYS, Problem, STANDARD_KEYS};

/// What an object is. It decides how the keys are compared.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ObjectKind {
    /// A list, a plugin or its `ipam`. Keys that differ only in case are equal, as in Go's
    /// structures.
    Structure,
    /// Keys are case-sensitive, as in Go's maps. Also used for objects of unknown structure.
    Map,
    /// As `Map`, but duplicate keys are errors, because tuning refuses them.
    Sysctls,
}

/// Returns the document in `text`, with the keys of structures in their usual spelling. Adds a
/// problem for each duplicate key.
///
/// # Errors
/// A problem with the position if the text is not JSON.
pub(super) fn read(text: &str, problems: &mut Vec<Problem>) -> Result<Value, Problem> {
    // Only the errors of serde_json have a position, and only `Json` keeps duplicate keys.
    if let Err(error) = serde_json::from_str::<Value>(text) {
        let position = format!("@{}:{}", error.line(), error.column());
        return Err(Problem::error(position, format!("not JSON: {error}")));
    }
    let json = Json::parse(text.as_bytes()).map_err(|error| Problem::error("", format!("not JSON: {error}")))?;
    Ok(read_value(&json, "", ObjectKind::Structure, problems))
}

/// Adds to `document` the plugins that a runtime adds from the folder named after the network.
/// `list` is what a runtime loads from the file at `path`. Does nothing if runtimes ignore files
/// with this extension.
///
/// # Errors
/// A problem if a runtime cannot load the file.
pub(super) fn add_plugins_of_folder(
    document: &mut Value,
    path: &Path,
    list: &cni::Result<NetworkList>,
) -> Result<(), Problem> {
    let extension = path.extension().unwrap_or_default();
    if !["conflist", "conf", "json"].iter().any(|known| extension == *known) {
        return Ok(());
    }
    let is_list = extension == "conflist";
    let list = match list {
        Ok(list) => list,
        Err(error) if !is_list && document.get("plugins").is_some() => {
            let what = format!("{error}: only a file whose name ends in .conflist is read as a list");
            return Err(Problem::error("plugins", what));
        }
        Err(error) => return Err(Problem::error("", error.to_string())),
    };
    let mut plugins = document["plugins"].as_array().cloned().unwrap_or_default();
    if is_list && list.plugins().len() > plugins.len() {
        for plugin in list.plugins().iter().skip(plugins.len()) {
            let Ok(raw) = plugin.members().to_bytes() else { continue };
            let Ok(json) = Json::parse(&raw) else { continue };
            // Problems of the folder's files are dropped: they have no position in this file.
            plugins.push(read_value(&json, "", ObjectKind::Structure, &mut Vec::new()));
        }
        document["plugins"] = Value::Array(plugins);
    }
    Ok(())
}

/// Whether the document is a list, and not one plugin. An object with neither `plugins` nor `type`
/// counts as a list.
pub(super) fn is_list(document: &Value) -> bool {
    document.get("plugins").is_some() || document.get("type").is_none()
}

/// Parses the document as a runtime does.
///
/// # Errors
/// Those of a runtime.
pub(super) fn load(document: &Value) -> cni::Result<NetworkList> {
    let parse = if is_list(document) { NetworkList::parse } else { NetworkList::parse_single };
    parse(document.to_string().as_bytes())
}

/// A plugin of a document.
pub(super) struct ListedPlugin<'a> {
    /// The path of its object, such as `plugins[0]`; empty in a file without a list.
    pub(super) path: String,
    /// Its `type`.
    pub(super) kind: &'a str,
    /// The type of its IPAM plugin; empty without one.
    pub(super) ipam: &'a str,
    /// Its object in the document.
    pub(super) object: &'a Value,
    /// The configuration that it would get on stdin.
    pub(super) request: Value,
}

impl ListedPlugin<'_> {
    /// Returns the path of one of the plugin's keys.
    pub(super) fn path_of(&self, key: &str) -> String {
        let separator = if self.path.is_empty() || key.is_empty() { "" } else { "." };
        format!("{}{separator}{key}", self.path)
    }

    /// Returns an error about one of the plugin's keys.
    pub(super) fn error(&self, key: &str, what: impl Into<String>) -> Problem {
        Problem::error(self.path_of(key), what)
    }

    /// Returns a warning about one of the plugin's keys.
    pub(super) fn warning(&self, key: &str, what: impl Into<String>) -> Problem {
        Problem::warning(self.path_of(key), what)
    }
}

/// Returns the plugins of a document that are objects. A document without a list is itself the only
/// plugin.
pub(super) fn plugins<'a>(document: &'a Value) -> Vec<ListedPlugin<'a>> {
    let listed = |(path, object): (String, &'a Value)| {
        let [kind, ipam] = [&object["type"], &object["ipam"]["type"]].map(|kind| kind.as_str().unwrap_or_default());
        // flannel's IPAM plugin gets another `ipam`, with ranges that only the node's subnet file
        // has.
        let ipam = if kind == "flannel" { "" } else { ipam };
        Some(ListedPlugin { path, kind, ipam, object, request: request(document, object)? })
    };
    match document["plugins"].as_array() {
        Some(objects) => {
            let paths = (0..).map(|index| format!("plugins[{index}]"));
            paths.zip(objects).filter_map(listed).collect()
        }
        None => listed((String::new(), document)).into_iter().collect(),
    }
}

/// Returns the configuration that the plugin would get on stdin, without the keys that the runtime
/// adds. Replaces a missing or invalid name or version by a valid value, so that it does not hide
/// errors in other keys. Returns `None` if `plugin` is not an object.
fn request(list: &Value, plugin: &Value) -> Option<Value> {
    let mut request = plugin.as_object()?.clone();
    request.remove("capabilities");
    for key in ["name", "cniVersion"] {
        match list.get(key) {
            Some(value) => request.insert(key.to_owned(), value.clone()),
            None => request.remove(key),
        };
    }
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

/// Reads a value. Objects are read as `kind`, those inside them as the keys above them say. Adds a
/// problem for each duplicate key.
fn read_value(json: &Json, path: &str, kind: ObjectKind, problems: &mut Vec<Problem>) -> Value {
    let members = match json {
        Json::Array(items) => {
            let items = items.iter().enumerate();
            return items.map(|(index, item)| read_value(item, &format!("{path}[{index}]"), kind, problems)).collect();
        }
        Json::Object(members) => members,
        scalar => return scalar.into(),
    };
    let is_structure = kind == ObjectKind::Structure;
    let is_tuning = json.get("type").and_then(Json::as_str) == Some("tuning");
    let mut object = Map::new();
    for (original_key, value) in members {
        // The keys that other modules look up by name.
        let mut known = LIST_KEYS.iter().chain(&STANDARD_KEYS).filter(|_| is_structure);
        let usual = known.find(|usual| usual.eq_ignore_ascii_case(original_key));
        let key = usual.map_or(original_key.as_str(), |usual| *usual);
        let is_same_key = |other: &String| if is_structure { other.eq_ignore_ascii_case(key) } else { other == key };
        let key_path = if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        if let Some(earlier_key) = object.keys().find(|other| is_same_key(other)).cloned() {
            problems.push(match kind {
                ObjectKind::Sysctls => Problem::error(&key_path, "duplicated sysctl keys are not allowed"),
                _ => Problem::warning(&key_path, "duplicate key: only the last value counts"),
            });
            // In Go's structures, `null` keeps the value of the earlier key.
            if *value == Json::Null && is_structure {
                continue;
            }
            object.remove(&earlier_key);
        }
        let value_kind = match (key, value) {
            ("plugins", Json::Array(_)) if path.is_empty() => ObjectKind::Structure,
            ("ipam", Json::Object(_)) if is_structure => ObjectKind::Structure,
            ("sysctl", Json::Object(_)) if is_structure && is_tuning => ObjectKind::Sysctls,
            (_, Json::Object(_)) if key_path.ends_with("args.cni.sysctl") => ObjectKind::Sysctls,
            _ => ObjectKind::Map,
        };
        object.insert(key.to_owned(), read_value(value, &key_path, value_kind, problems));
    }
    Value::Object(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (Value, Vec<String>) {
        let mut problems = Vec::new();
        let value = super::read(text, &mut problems).unwrap();
        (value, problems.into_iter().map(|problem| format!("{:?}: {}", problem.severity, problem.path)).collect())
    }

    #[test]
    fn keys_get_their_usual_spelling_and_the_last_duplicate_counts() {
        let (value, problems) = read(
            r#"{"NAME":"n","Plugins":[{"Type":"x","mtu":1,"MTU":2,"IPAM":{"TYPE":"y","A":1}}],"cniversion":"1.0.0","cniVersion":null}"#,
        );
        let expected = json!({"name": "n", "cniVersion": "1.0.0", "plugins": [{"type": "x", "MTU": 2, "ipam": {"type": "y", "A": 1}}]});
        assert_eq!(value, expected);
        assert_eq!(problems, ["Warning: plugins[0].MTU", "Warning: cniVersion"]);
    }

    #[test]
    fn map_keys_are_case_sensitive_and_a_sysctl_may_occur_once() {
        let (_, problems) = read(
            r#"{"plugins":[{"type":"tuning","sysctl":{"a":"1","A":"2","a":"3"},"args":{"cni":{"sysctl":{"b":"1","b":"2"}}}},{"type":"x","m":{"k":1,"K":2,"k":3}}]}"#,
        );
        let expected = ["Error: plugins[0].sysctl.a", "Error: plugins[0].args.cni.sysctl.b", "Warning: plugins[1].m.k"];
        assert_eq!(problems, expected);
    }
}
