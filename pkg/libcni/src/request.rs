//! What one plugin of a list gets on its standard input.
//!
//! Its own object verbatim, with the list's `name` and `cniVersion`, and with what the verb adds:
//! `prevResult`, `runtimeConfig`, the valid attachments of a GC. `capabilities` is between the list
//! and the runtime and is left out, as the specification says (Go leaves it in).

use serde::Serialize;
use serde_json::value::RawValue;

use super::list::{NetworkList, PluginConf};
use super::members::Members;
use cni::Result;
use cni::config::ValidAttachments;

/// The keys that a verb adds to a plugin's object.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AddedKeys<'a> {
    /// The result so far.
    pub(super) prev_result: Option<&'a RawValue>,
    /// The values for capabilities. A plugin gets those that it declares.
    pub(super) capability_args: Option<&'a Members>,
    /// For GC.
    pub(super) valid: Option<&'a ValidAttachments>,
}

#[derive(Serialize)]
struct WireAttachment<'a> {
    #[serde(rename = "containerID")]
    container_id: &'a str,
    ifname: &'a str,
}

/// The bytes for one plugin.
pub(super) fn derive(list: &NetworkList, plugin: &PluginConf, extras: AddedKeys<'_>) -> Result<Vec<u8>> {
    let mut request = plugin.members().clone();
    request.remove("capabilities");
    request.set("cniVersion", list.cni_version())?;
    request.set("name", list.name())?;
    let runtime_config = runtime_config(plugin, extras.capability_args);
    // An empty one does not replace what the administrator wrote.
    if !runtime_config.is_empty() {
        request.set("runtimeConfig", &runtime_config)?;
    }
    if let Some(result) = extras.prev_result {
        request.set("prevResult", result)?;
    }
    if let Some(valid) = extras.valid {
        let wire = |(container_id, ifname)| WireAttachment { container_id, ifname };
        let valid: Vec<WireAttachment<'_>> = valid.iter().map(wire).collect();
        // The second name is an early one that plugins in the field read.
        request.set("cni.dev/valid-attachments", &valid)?;
        request.set("cni.dev/attachments", &valid)?;
    }
    request.to_bytes()
}

fn runtime_config(plugin: &PluginConf, args: Option<&Members>) -> Members {
    let Some(args) = args else { return Members::default() };
    let given = |name: &str| args.get_exact(name).map(|value| (name.to_owned(), value.to_owned()));
    plugin.capabilities().filter_map(given).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(plugin: &str, extras: AddedKeys<'_>) -> String {
        let text = format!(r#"{{"cniVersion":"1.0.0","name":"n","plugins":[{plugin}]}}"#);
        let list = NetworkList::parse(text.as_bytes()).unwrap();
        String::from_utf8(derive(&list, &list.plugins()[0], extras).unwrap()).unwrap()
    }

    #[test]
    fn the_plugins_object_stays_as_it_is_and_gets_name_and_version() {
        assert_eq!(
            request(r#"{"type":"x", "mtu": 1.50e3, "y":{"B":null, "a":[]}}"#, AddedKeys::default()),
            r#"{"type":"x","mtu":1.50e3,"y":{"B":null, "a":[]},"cniVersion":"1.0.0","name":"n"}"#
        );
    }

    #[test]
    fn nothing_that_is_injected_survives_in_another_spelling() {
        let result: Box<RawValue> = serde_json::from_str(r#"{"ips": []}"#).unwrap();
        let args = Members::parse(r#"{"a":[1]}"#).unwrap();
        let extras = AddedKeys { prev_result: Some(&result), capability_args: Some(&args), valid: None };
        let plugin = r#"{"type":"x","Name":"m","NAME":"o","cniversion":"0.1.0","PrevResult":{"old":1},"prevresult":2,"RuntimeConfig":{"z":1},"Capabilities":{"a":true}}"#;
        assert_eq!(
            request(plugin, extras),
            r#"{"type":"x","cniVersion":"1.0.0","name":"n","runtimeConfig":{"a":[1]},"prevResult":{"ips": []}}"#
        );
    }

    #[test]
    fn runtime_config_has_declared_and_given_capabilities_only() {
        let with = |plugin: &str, args: &str| {
            let args = Members::parse(args).unwrap();
            request(plugin, AddedKeys { capability_args: Some(&args), ..AddedKeys::default() })
        };
        let args = r#"{"b":{"x": 1},"c":2,"d":3,"A":4}"#;
        let plugin = r#"{"type":"x","runtimeConfig":{"inline":1},"capabilities":{"a":true,"b":true,"c":false}}"#;
        assert_eq!(
            with(plugin, args),
            r#"{"type":"x","cniVersion":"1.0.0","name":"n","runtimeConfig":{"b":{"x": 1}}}"#
        );
        let inline = r#"{"type":"x","runtimeConfig":{"inline":1},"cniVersion":"1.0.0","name":"n"}"#;
        assert_eq!(with(plugin, "{}"), inline);
        assert_eq!(with(r#"{"type":"x","runtimeConfig":{"inline":1}}"#, args), inline);
    }

    #[test]
    fn gc_gets_the_valid_attachments_under_both_key_spellings() {
        let one = ValidAttachments::from_iter([("c", "eth0")]);
        let text = request(r#"{"type":"x"}"#, AddedKeys { valid: Some(&one), ..AddedKeys::default() });
        let list = r#"[{"containerID":"c","ifname":"eth0"}]"#;
        assert!(
            text.ends_with(&format!(r#""cni.dev/valid-attachments":{list},"cni.dev/attachments":{list}}}"#)),
            "{text}"
        );
        let none = ValidAttachments::default();
        let text = request(r#"{"type":"x"}"#, AddedKeys { valid: Some(&none), ..AddedKeys::default() });
        assert!(text.contains(r#""cni.dev/valid-attachments":[]"#), "{text}");
    }
}
