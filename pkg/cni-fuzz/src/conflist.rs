//! Network lists, as a runtime reads them, and the configuration that the runtime passes to each
//! plugin. An accepted list has plugins, each with a type. A plugin's configuration has the list's
//! name and version, and in `runtimeConfig` only the capabilities that the plugin declares. All
//! keys except `RUNTIME_KEYS` stay unchanged and in order.

use cni::Code;
use cni::config::{NetConf, ValidAttachments};
use cni::json::Json;
use libcni::{AddedKeys, Members, NetworkList, PluginConf};

/// The keys that the runtime adds to a plugin's configuration or removes from it.
const RUNTIME_KEYS: [&str; 7] = [
    "capabilities",
    "cniVersion",
    "name",
    "runtimeConfig",
    "prevResult",
    "cni.dev/valid-attachments",
    "cni.dev/attachments",
];

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    for list in [NetworkList::parse(data), NetworkList::parse_single(data)].into_iter().flatten() {
        assert!(!list.plugins().is_empty() && !list.name().is_empty(), "accepted without plugins or name: {list:?}");
        let again = NetworkList::parse(list.raw()).expect("failed to parse the bytes of an accepted list");
        assert_eq!((again.name(), again.cni_version()), (list.name(), list.cni_version()));
        // These may fail, but must not panic.
        let _ = (list.version(), list.disable_check(), list.disable_gc());
        let capabilities = list.capabilities();
        for plugin in list.plugins() {
            assert!(!plugin.kind().is_empty(), "accepted without a type: {plugin:?}");
            let are_in_list = plugin.capabilities().all(|capability| capabilities.contains(&capability));
            assert!(are_in_list, "the list's {capabilities:?} lack a capability of {plugin:?}");
            check_request(&list, plugin);
        }
    }
}

/// Returns all keys of `members` with their values.
fn entries(members: &Members) -> Vec<(String, Json)> {
    let bytes = members.to_bytes().expect("failed to write the members");
    let Ok(Json::Object(members)) = Json::parse(&bytes) else {
        panic!("the members are not an object: {}", String::from_utf8_lossy(&bytes))
    };
    members
}

/// Checks the request of a plugin: the configuration that the plugin gets on stdin.
fn check_request(list: &NetworkList, plugin: &PluginConf) {
    let result = serde_json::value::RawValue::from_string(r#"{"ips":[]}"#.to_owned()).expect("JSON");
    let args = Members::parse(r#"{"portMappings":[],"mac":"x","ips":["1.2.3.4"],"":0}"#).expect("JSON");
    let valid = ValidAttachments::from_iter([("c1", "eth0")]);
    let added = AddedKeys { prev_result: Some(&result), capability_args: Some(&args), valid: Some(&valid) };
    let bytes = list.request(plugin, added).expect("failed to write the request");
    let Ok(json @ Json::Object(_)) = Json::parse(&bytes) else {
        // It cannot be nested too deeply for the parser: the plugin's members are one level less
        // deep than in the list, which was parsed, and the added keys have few levels.
        panic!("the request is not an object: {}", String::from_utf8_lossy(&bytes))
    };
    assert_eq!(json.get("name").and_then(Json::as_str), Some(list.name()));
    assert_eq!(json.get("cniVersion").and_then(Json::as_str), Some(list.cni_version()));
    assert_eq!(json.get("type").and_then(Json::as_str), Some(plugin.kind()));
    assert!(json.get("capabilities").is_none(), "the request has `capabilities`: {json:?}");
    let is_declared = |name: &str| plugin.capabilities().any(|capability| capability == name);
    if ["portMappings", "mac", "ips", ""].iter().any(|name| is_declared(name)) {
        let Some(Json::Object(config)) = json.get("runtimeConfig") else {
            panic!("the request has no runtimeConfig: {json:?}")
        };
        let undeclared = config.iter().find(|(name, _)| !is_declared(name));
        assert_eq!(undeclared, None, "runtimeConfig has an undeclared capability");
    }
    let is_plugin_key = |(key, _): &(String, Json)| !RUNTIME_KEYS.iter().any(|name| key.eq_ignore_ascii_case(name));
    let Json::Object(sent) = json else { return };
    let sent: Vec<_> = sent.into_iter().filter(is_plugin_key).collect();
    let in_list: Vec<_> = entries(plugin.members()).into_iter().filter(is_plugin_key).collect();
    assert_eq!(sent, in_list, "the plugin's own keys");
    match NetConf::parse(bytes) {
        Ok(conf) => assert_eq!(conf.name(), list.name()),
        // Only the plugin checks these: a version that is not supported, an invalid name, and a key
        // of a wrong type.
        Err(error) => assert!(
            [Code::INCOMPATIBLE_VERSION, Code::INVALID_CONFIG, Code::DECODE].contains(&error.code()),
            "unexpected code of {error:?}"
        ),
    }
}
