//! The configuration of a network: a name, a version, and plugins in their order.
//!
//! Only the keys that the runtime needs are decoded; the plugins' objects stay verbatim.
//!
//! An unknown version is an error only when a verb is called, so that all networks of a folder can
//! be listed.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::members::Members;
use cni::json::Json;
use cni::version::{Version, parse_triple};
use cni::{Code, Error, Result};

/// A network configuration list.
#[derive(Clone, Debug)]
pub struct NetworkList {
    name: String,
    cni_version: String,
    disable_check: bool,
    disable_gc: bool,
    /// Whether plugins in the network's subfolder are ignored.
    pub(super) load_only_inlined: bool,
    pub(super) plugins: Vec<PluginConf>,
    raw: Vec<u8>,
}

/// One plugin of a list.
#[derive(Clone, Debug)]
pub struct PluginConf {
    kind: String,
    name: String,
    capabilities: Vec<String>,
    members: Members,
}

impl NetworkList {
    /// Parses a list. Does not add the plugins in the network's subfolder (see `folder.rs`).
    ///
    /// # Errors
    /// With Go's texts:
    /// - Code 6 if `raw` is not a JSON object, or a key has a wrong type.
    /// - Code 7 if a value is invalid, or there are no plugins.
    pub fn parse(raw: &[u8]) -> Result<NetworkList> {
        NetworkList::parse_inlined(raw)?.require_plugins()
    }

    /// Parses a list to which the caller adds the plugins of the network's subfolder. So the key
    /// `plugins` may be missing, except with `loadOnlyInlinedPlugins`.
    ///
    /// # Errors
    /// As [`parse`](NetworkList::parse), except for the missing key.
    pub(super) fn parse_inlined(raw: &[u8]) -> Result<NetworkList> {
        let failed = |error: Error| error.context("error parsing configuration list");
        let (members, json) = Members::parse_with_json(&String::from_utf8_lossy(raw)).map_err(failed)?;
        let name = match find_string(&json, "name").map_err(failed)? {
            None | Some("") => return Err(failed(Error::config("no name"))),
            Some(name) => name.to_owned(),
        };
        let load_only_inlined = bool_or_false(&json, "loadOnlyInlinedPlugins").map_err(failed)?;
        let plugins = match members.get("plugins") {
            Some(array) => parse_plugins(array).map_err(failed)?,
            None if load_only_inlined => {
                return Err(failed(Error::config("no 'plugins' key although loadOnlyInlinedPlugins is true")));
            }
            None => Vec::new(),
        };
        Ok(NetworkList {
            name,
            cni_version: highest_version(&json).map_err(failed)?,
            disable_check: bool_or_false(&json, "disableCheck").map_err(failed)?
                || json.get("args").is_some_and(args_disable_check),
            disable_gc: bool_or_false(&json, "disableGC").map_err(failed)?,
            load_only_inlined,
            plugins,
            raw: raw.to_vec(),
        })
    }

    /// Parses the configuration of a single plugin as a list with this plugin.
    ///
    /// # Errors
    /// As [`parse`](NetworkList::parse).
    pub fn parse_single(raw: &[u8]) -> Result<NetworkList> {
        let plugin = PluginConf::parse(&String::from_utf8_lossy(raw))?;
        let json = Json::parse(raw).map_err(|error| Error::new(Code::DECODE, error.to_string()))?;
        let mut list = Members::default();
        list.set("name", &plugin.name)?;
        list.set("cniVersion", find_string(&json, "cniVersion")?.unwrap_or_default())?;
        list.set("plugins", &[&plugin.members])?;
        NetworkList::parse(&list.to_bytes()?)
    }

    /// Returns the list.
    ///
    /// # Errors
    /// Code 7 if it has no plugins.
    pub(super) fn require_plugins(self) -> Result<NetworkList> {
        if self.plugins.is_empty() { Err(Error::config("no plugin configs found")) } else { Ok(self) }
    }

    /// Returns the network's name. The verbs check whether it is valid.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the `cniVersion` that is written into the plugins' configurations. It may be empty
    /// or unsupported.
    pub fn cni_version(&self) -> &str {
        &self.cni_version
    }

    /// Returns [`cni_version`](NetworkList::cni_version) as a supported version.
    ///
    /// # Errors
    /// Code 1 if it is not supported.
    pub fn version(&self) -> Result<Version> {
        Version::find(&self.cni_version).ok_or_else(|| {
            let (name, version) = (&self.name, &self.cni_version);
            let supported = Version::ALL.map(Version::as_str).join(", ");
            let msg = format!("network {name:?} has cniVersion {version:?}, but this program supports {supported}");
            Error::new(Code::INCOMPATIBLE_VERSION, msg)
        })
    }

    /// Returns the list with another version.
    pub fn with_version(&self, version: Version) -> NetworkList {
        NetworkList { cni_version: version.as_str().to_owned(), ..self.clone() }
    }

    /// Whether the configuration disables CHECK, by `disableCheck` or by `args.cni.disable-check`
    /// of the list or of a plugin.
    pub fn disable_check(&self) -> bool {
        self.disable_check || self.plugins.iter().any(PluginConf::disable_check)
    }

    /// Whether the configuration disables GC, by `disableGC`.
    pub fn disable_gc(&self) -> bool {
        self.disable_gc
    }

    /// Returns the plugins in the order in which ADD runs them.
    pub fn plugins(&self) -> &[PluginConf] {
        &self.plugins
    }

    /// Returns the bytes that the list was parsed from. The result cache stores them.
    pub fn raw(&self) -> &[u8] {
        &self.raw
    }

    /// Returns all capabilities that a plugin of the list declares, sorted.
    pub fn capabilities(&self) -> Vec<&str> {
        let mut all: Vec<&str> = self.plugins.iter().flat_map(|plugin| plugin.capabilities()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// The keys of a plugin's object that the runtime reads.
#[derive(Default, Deserialize)]
#[serde(default)]
struct RuntimeKeys {
    #[serde(rename = "type")]
    kind: String,
    name: String,
    capabilities: BTreeMap<String, bool>,
}

impl PluginConf {
    /// Parses a plugin's object.
    ///
    /// # Errors
    /// With Go's texts:
    /// - Code 6 if the text is not a JSON object, or a key has a wrong type.
    /// - Code 7 if there is no `type`.
    pub fn parse(text: &str) -> Result<PluginConf> {
        let failed = |error: Error| error.context("error parsing configuration");
        let (members, json) = Members::parse_with_json(text).map_err(failed)?;
        let keys: RuntimeKeys = json.decode().map_err(|error| failed(Error::new(Code::DECODE, error.to_string())))?;
        if keys.kind.is_empty() {
            return Err(failed(Error::config("missing 'type'")));
        }
        let capabilities = keys.capabilities.into_iter().filter(|(_, enabled)| *enabled).map(|(name, _)| name);
        Ok(PluginConf { kind: keys.kind, name: keys.name, capabilities: capabilities.collect(), members })
    }

    /// Returns the plugin's type, which is the name of its program.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Returns the capabilities that the plugin declares as `true`.
    pub fn capabilities(&self) -> impl Iterator<Item = &str> {
        self.capabilities.iter().map(String::as_str)
    }

    /// Returns the plugin's object, verbatim.
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// Returns the plugin as Go's errors name it: `type="bridge"`, with its own name if it has one.
    pub fn description(&self) -> String {
        match self.name.as_str() {
            "" => format!("type={:?}", self.kind),
            name => format!("type={:?} name={name:?}", self.kind),
        }
    }

    /// Whether `args.cni.disable-check` of this plugin disables CHECK for the list.
    fn disable_check(&self) -> bool {
        // `parse` has checked the whole object, so its part is valid JSON.
        let args = self.members.get("args").and_then(|args| Json::parse(args.get().as_bytes()).ok());
        args.is_some_and(|args| args_disable_check(&args))
    }
}

/// Parses the array `plugins` of a list.
///
/// # Errors
/// - Code 7 if `plugins` is not an array or is empty.
/// - The error of the first invalid plugin, with its index.
fn parse_plugins(array: &RawValue) -> Result<Vec<PluginConf>> {
    let objects: Vec<&RawValue> =
        serde_json::from_str(array.get()).map_err(|_| Error::config("'plugins' is not a list"))?;
    if objects.is_empty() {
        return Err(Error::config("no plugins in list"));
    }
    let mut plugins = Vec::new();
    for (index, object) in objects.iter().enumerate() {
        let plugin = PluginConf::parse(object.get());
        plugins.push(plugin.map_err(|error| error.context(format_args!("failed to parse plugin config {index}")))?);
    }
    Ok(plugins)
}

/// Returns the string under a key, or `None` without the key.
///
/// # Errors
/// Code 6 if the value is not a string.
fn find_string<'a>(json: &'a Json, key: &str) -> Result<Option<&'a str>> {
    match json.get(key) {
        None => Ok(None),
        Some(Json::String(text)) => Ok(Some(text)),
        Some(_) => Err(Error::new(Code::DECODE, format!("invalid type of {key}: expected a string"))),
    }
}

/// Returns the boolean under a key, false without the key. The strings `true` and `false`, in any
/// case, are accepted too.
///
/// # Errors
/// - Code 6 if the value is neither a boolean nor a string.
/// - Code 7 if the value is any other string.
fn bool_or_false(json: &Json, key: &str) -> Result<bool> {
    match json.get(key) {
        None => Ok(false),
        Some(Json::Bool(value)) => Ok(*value),
        Some(Json::String(text)) if text.eq_ignore_ascii_case("true") => Ok(true),
        Some(Json::String(text)) if text.eq_ignore_ascii_case("false") => Ok(false),
        Some(Json::String(text)) => Err(Error::config(format!("invalid {key} value {text:?}"))),
        Some(_) => Err(Error::new(Code::DECODE, format!("invalid type of {key}: expected a boolean"))),
    }
}

/// Whether `cni.disable-check` in the value of `args` is true, or a string `true` in any case. Any
/// other value counts as false, because `args` is free-form.
fn args_disable_check(args: &Json) -> bool {
    match args.get("cni").and_then(|cni| cni.get("disable-check")) {
        Some(Json::Bool(value)) => *value,
        Some(Json::String(text)) => text.eq_ignore_ascii_case("true"),
        _ => false,
    }
}

/// Returns the highest supported version of `cniVersions` and `cniVersion`. If none is supported,
/// it returns `cniVersion` as it was written.
///
/// # Errors
/// - Code 6 if `cniVersion` is not a string, or `cniVersions` is not a list of strings.
/// - Code 7 if an element of `cniVersions` is not a version.
fn highest_version(json: &Json) -> Result<String> {
    let single = find_string(json, "cniVersion")?.unwrap_or_default();
    let listed = match json.get("cniVersions") {
        None => return Ok(single.to_owned()),
        Some(Json::Array(items)) => items,
        Some(_) => return Err(Error::new(Code::DECODE, "invalid type of cniVersions: expected a list of strings")),
    };
    // An empty `cniVersion` is excluded, because `Version::find` reads it as 0.1.0.
    let mut highest = Some(single).filter(|text| !text.is_empty()).and_then(Version::find);
    for (index, item) in listed.iter().enumerate() {
        let Json::String(text) = item else {
            let msg = format!("invalid type of cniVersions[{index}]: expected a string");
            return Err(Error::new(Code::DECODE, msg));
        };
        parse_triple(text).map_err(|why| Error::config(format!("invalid cniVersions[{index}]: {why}")))?;
        // `find` returns `None` for an unsupported version, and `None` is less than any `Some`.
        highest = highest.max(Version::find(text));
    }
    Ok(highest.map_or_else(|| single.to_owned(), |version| version.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        NetworkList::parse(text.as_bytes()).unwrap_err().msg().to_owned()
    }

    fn list(head: &str) -> Result<NetworkList> {
        NetworkList::parse(format!(r#"{{"name":"n",{head}"plugins":[{{"type":"x"}}]}}"#).as_bytes())
    }

    #[test]
    fn an_invalid_list_is_refused_with_gos_messages() {
        assert_eq!(error(r#"{"plugins":[{"type":"x"}]}"#), "error parsing configuration list: no name");
        assert_eq!(error(r#"{"name":"n","plugins":[]}"#), "error parsing configuration list: no plugins in list");
        assert!(error(r#"{"name":"n","plugins":[{}]}"#).ends_with("error parsing configuration: missing 'type'"));
        assert_eq!(error(r#"{"name":"n"}"#), "no plugin configs found");
        for bad in [
            r#"{"name":5,"plugins":[{"type":"x"}]}"#,
            r#"{"name":"n","plugins":{}}"#,
            r#"{"name":"n","plugins":[{"type":"x","capabilities":{"a":"yes"}}]}"#,
            r#"{"name":"n","loadOnlyInlinedPlugins":true}"#,
            r#"{"name":"n","plugins":[5]}"#,
            "[]",
            "{",
        ] {
            assert!(error(bad).starts_with("error parsing configuration list: "), "{bad}");
        }
    }

    #[test]
    fn the_highest_supported_version_is_chosen() {
        let chosen = |head: &str| list(head).map(|list| list.cni_version().to_owned());
        for (head, expected) in [
            ("", ""),
            (r#""cniVersion":"1.2.3","#, "1.2.3"),
            (r#""cniVersion":"0.3.1","cniVersions":["0.4.0","1.1.0","9.9.9","1.0.0"],"#, "1.1.0"),
            (r#""cniVersion":"1.0.0","cniVersions":["0.4.0"],"#, "1.0.0"),
            (r#""cniVersion":"1.2.3","cniVersions":["0.4.0"],"#, "0.4.0"),
            (r#""cniVersions":[],"#, ""),
            (r#""cniVersions":["0.9.0"],"#, ""),
            (r#""cniVersion":"0.4.0","cniVersions":null,"#, "0.4.0"),
        ] {
            assert_eq!(chosen(head).unwrap(), expected, "{head}");
        }
        for bad in [r#""cniVersions":["broken"],"#, r#""cniVersions":[1],"#, r#""cniVersions":"1.0.0","#] {
            assert!(chosen(bad).is_err(), "{bad}");
        }
        let error = list(r#""cniVersion":"1.2.3","#).unwrap().version().unwrap_err();
        let text = r#"network "n" has cniVersion "1.2.3", but this program supports 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0"#;
        assert_eq!((error.code(), error.msg(), error.details()), (Code(1), text, ""));
    }

    #[test]
    fn switches_are_booleans_or_strings() {
        for (value, expected) in
            [("true", true), ("\"TRUE\"", true), ("\"false\"", false), ("false", false), ("null", false)]
        {
            let list = list(&format!(r#""disableCheck":{value},"disableGC":{value},"#)).unwrap();
            assert_eq!((list.disable_check(), list.disable_gc()), (expected, expected), "{value}");
        }
        for bad in ["1", "\"yes\"", "[]"] {
            assert!(list(&format!(r#""disableCheck":{bad},"#)).is_err(), "{bad}");
            assert!(list(&format!(r#""loadOnlyInlinedPlugins":{bad},"#)).is_err(), "{bad}");
        }
    }

    #[test]
    fn check_can_be_disabled_by_args_of_the_list_or_a_plugin() {
        assert!(list(r#""args":{"cni":{"disable-check":true}},"#).unwrap().disable_check());
        assert!(!list(r#""args":{"cni":{"disable-check":5}},"#).unwrap().disable_check());
        assert!(!list(r#""args":"anything","#).unwrap().disable_check());
        let single = NetworkList::parse_single(br#"{"name":"n","type":"x","args":{"cni":{"disable-check":"true"}}}"#);
        assert!(single.unwrap().disable_check());
    }

    #[test]
    fn a_single_configuration_becomes_a_list_of_one_unchanged() {
        let list = NetworkList::parse_single(br#"{"cniVersion":"0.4.0","name":"n","type":"x","mtu": 1.0e3}"#).unwrap();
        assert_eq!((list.name(), list.cni_version(), list.plugins().len()), ("n", "0.4.0", 1));
        assert_eq!(list.plugins()[0].members().get("mtu").map(RawValue::get), Some("1.0e3"));
        assert_eq!(list.plugins()[0].description(), r#"type="x" name="n""#);
        assert!(NetworkList::parse(list.raw()).is_ok());
        let nameless = NetworkList::parse_single(br#"{"type":"x"}"#).unwrap_err();
        assert_eq!(nameless.msg(), "error parsing configuration list: no name");
    }

    #[test]
    fn only_capabilities_that_are_switched_on_count() {
        let text = r#"{"name":"n","plugins":[{"type":"x","capabilities":{"b":true,"c":false}},{"type":"y","capabilities":{"a":true,"b":true}}]}"#;
        assert_eq!(NetworkList::parse(text.as_bytes()).unwrap().capabilities(), ["a", "b"]);
    }
}
