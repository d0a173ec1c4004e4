//! Reads a file's text as the plugins read it: keys in their usual spelling, and the last of
//! duplicate keys.

use std::path::Path;

use cni::json::Json;
use libcni::{ConfFile, NetworkList};
use serde_json::{Map, Value};

use super::Problem;

/// The keys that are looked up here by name. Structures match them in any case.
const USUAL: [&str; 14] = [
    "cniVersion",
    "cniVersions",
    "name",
    "plugins",
    "disableCheck",
    "disableGC",
    "loadOnlyInlinedPlugins",
    "args",
    "type",
    "capabilities",
    "ipam",
    "dns",
    "runtimeConfig",
    "prevResult",
];

/// The comparison of an object's keys.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keys {
    /// In any case: a structure.
    Structure,
    /// Byte by byte: a map, or an object whose meaning is unknown here.
    Exact,
    /// Byte by byte, and tuning refuses a duplicate.
    Sysctls,
}

/// The endings of the files that a runtime reads.
const ENDINGS: [&str; 3] = ["conflist", "conf", "json"];

/// Reads a text. Duplicate keys go to `problems`.
///
/// # Errors
/// The text is not JSON; the problem has the place.
pub(super) fn read(text: &str, problems: &mut Vec<Problem>) -> Result<Value, Problem> {
    if let Err(error) = serde_json::from_str::<Value>(text) {
        let place = format!("@{}:{}", error.line(), error.column());
        return Err(Problem::error(place, format!("not JSON: {error}")));
    }
    let json = Json::parse(text.as_bytes()).map_err(|error| Problem::error("", format!("not JSON: {error}")))?;
    Ok(Reader { problems }.top(&json))
}

/// Adds the plugins from the folder named after the network, which belong to the list.
///
/// # Errors
/// A runtime cannot read the file.
pub(super) fn complete(document: &mut Value, path: &Path) -> Result<(), Problem> {
    if !path.extension().is_some_and(|ending| ENDINGS.iter().any(|one| ending == *one)) {
        return Ok(());
    }
    let is_list = path.extension().is_some_and(|ending| ending == "conflist");
    let list: NetworkList = match ConfFile::read(path.to_owned()).list {
        Ok(list) => list,
        Err(error) if !is_list && document.get("plugins").is_some() => {
            let what = format!("{error}: only a file whose name ends in .conflist is read as a list");
            return Err(Problem::error("plugins", what));
        }
        Err(error) => return Err(Problem::error("", error.to_string())),
    };
    let inlined = document["plugins"].as_array().map_or(0, Vec::len);
    if is_list && list.plugins().len() > inlined {
        let more = list.plugins().iter().skip(inlined).filter_map(|plugin| {
            let raw = plugin.members().to_bytes().ok()?;
            Some(Reader { problems: &mut Vec::new() }.plugin(&Json::parse(&raw).ok()?, ""))
        });
        let mut plugins = document["plugins"].as_array().cloned().unwrap_or_default();
        plugins.extend(more);
        document["plugins"] = Value::Array(plugins);
    }
    Ok(())
}

struct Reader<'p> {
    problems: &'p mut Vec<Problem>,
}

impl Reader<'_> {
    fn top(&mut self, json: &Json) -> Value {
        let mut top = self.plugin(json, "");
        if let (Some(Json::Array(plugins)), Some(slot)) = (json.get("plugins"), top.get_mut("plugins")) {
            let read = plugins.iter().enumerate().map(|(index, one)| self.plugin(one, &format!("plugins[{index}]")));
            *slot = Value::Array(read.collect());
        }
        top
    }

    /// Reads a plugin's object, or the whole document.
    fn plugin(&mut self, json: &Json, path: &str) -> Value {
        let is_tuning = json.get("type").and_then(Json::as_str) == Some("tuning");
        self.object(json, path, Keys::Structure, &mut |reader, key, value, path| match key {
            // The caller reads each of them as a plugin.
            "plugins" if path == "plugins" && matches!(value, Json::Array(_)) => Value::Null,
            "ipam" => {
                reader.object(value, path, Keys::Structure, &mut |reader, _, value, path| reader.plain(value, path))
            }
            "sysctl" if is_tuning => {
                reader.object(value, path, Keys::Sysctls, &mut |reader, _, value, path| reader.plain(value, path))
            }
            _ => reader.plain(value, path),
        })
    }

    /// Reads any other value; the meaning of its keys is unknown here.
    fn plain(&mut self, json: &Json, path: &str) -> Value {
        match json {
            Json::Null => Value::Null,
            Json::Bool(value) => Value::Bool(*value),
            Json::Number(number) => Value::Number(number.clone()),
            Json::String(text) => Value::String(text.clone()),
            Json::Array(items) => {
                let read = items.iter().enumerate().map(|(index, one)| self.plain(one, &format!("{path}[{index}]")));
                Value::Array(read.collect())
            }
            Json::Object(_) => {
                let keys = if path.ends_with("args.cni.sysctl") { Keys::Sysctls } else { Keys::Exact };
                self.object(json, path, keys, &mut |reader, _, value, path| reader.plain(value, path))
            }
        }
    }

    fn object(
        &mut self,
        json: &Json,
        path: &str,
        keys: Keys,
        read: &mut dyn FnMut(&mut Self, &str, &Json, &str) -> Value,
    ) -> Value {
        let Json::Object(members) = json else { return self.plain(json, path) };
        let mut object = Map::new();
        for (written, value) in members {
            let usual = USUAL.iter().find(|usual| keys == Keys::Structure && usual.eq_ignore_ascii_case(written));
            let key = usual.map_or(written.as_str(), |usual| *usual);
            let same = |other: &String| match keys {
                Keys::Structure => other.eq_ignore_ascii_case(key),
                Keys::Exact | Keys::Sysctls => other == key,
            };
            let at = if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
            let before = object.keys().find(|other| same(other)).cloned();
            if let Some(before) = before {
                self.problems.push(match keys {
                    Keys::Sysctls => Problem::error(&at, "duplicated sysctl keys are not allowed"),
                    Keys::Structure | Keys::Exact => Problem::warning(&at, "duplicate key: only the last value counts"),
                });
                // `null` is the default, and replaces nothing.
                if *value == Json::Null && keys == Keys::Structure {
                    continue;
                }
                object.remove(&before);
            }
            let value = read(self, key, value, &at);
            object.insert(key.to_owned(), value);
        }
        Value::Object(object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(text: &str) -> (Value, Vec<String>) {
        let mut problems = Vec::new();
        let value = super::read(text, &mut problems).unwrap();
        (
            value,
            problems.into_iter().map(|problem| format!("{}: {}", problem.severity.as_str(), problem.path)).collect(),
        )
    }

    #[test]
    fn keys_get_their_usual_spelling_and_the_last_duplicate_counts() {
        let (value, problems) = read(
            r#"{"NAME":"n","Plugins":[{"Type":"x","mtu":1,"MTU":2,"IPAM":{"TYPE":"y","A":1}}],"cniversion":"1.0.0","cniVersion":null}"#,
        );
        let expected = json!({"name": "n", "cniVersion": "1.0.0", "plugins": [{"type": "x", "MTU": 2, "ipam": {"type": "y", "A": 1}}]});
        assert_eq!(value, expected);
        assert_eq!(problems, ["warning: cniVersion", "warning: plugins[0].MTU"]);
    }

    #[test]
    fn map_keys_are_case_sensitive_and_a_sysctl_may_occur_once() {
        let (_, problems) = read(
            r#"{"plugins":[{"type":"tuning","sysctl":{"a":"1","A":"2","a":"3"},"args":{"cni":{"sysctl":{"b":"1","b":"2"}}}},{"type":"x","m":{"k":1,"K":2,"k":3}}]}"#,
        );
        let expected = ["error: plugins[0].sysctl.a", "error: plugins[0].args.cni.sysctl.b", "warning: plugins[1].m.k"];
        assert_eq!(problems, expected);
    }
}
