//! Writes the configuration that one plugin of a list reads on its stdin.
//!
//! It is the plugin's object in the list, with the list's `name` and `cniVersion`, and with the
//! keys that the verb adds: `prevResult`, `runtimeConfig`, the valid attachments of a GC. As the
//! specification requires, `capabilities` is removed (Go keeps it).

use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::list::{NetworkList, PluginConf};
use super::members::Members;
use cni::Result;
use cni::config::ValidAttachments;

/// The keys that a verb adds to a plugin's object.
#[derive(Clone, Copy, Debug, Default)]
pub struct AddedKeys<'a> {
    /// `prevResult`: in an ADD the result of the plugin before this one, in other verbs the result
    /// of the whole ADD.
    pub prev_result: Option<&'a RawValue>,
    /// The value of each capability. Those that the plugin declares become its `runtimeConfig`.
    pub capability_args: Option<&'a Members>,
    /// The valid attachments of a GC.
    pub valid: Option<&'a ValidAttachments>,
}

impl NetworkList {
    /// Returns the configuration that `plugin` of this list reads on its stdin, with these keys
    /// added.
    ///
    /// # Errors
    /// Code 999 if a value cannot be written as JSON, which does not happen.
    pub fn request(&self, plugin: &PluginConf, added: AddedKeys<'_>) -> Result<Vec<u8>> {
        let mut request = plugin.members().clone();
        request.remove("capabilities");
        request.set("cniVersion", self.cni_version())?;
        request.set("name", self.name())?;
        let runtime_config = runtime_config(plugin, added.capability_args);
        // Without values for the plugin, a `runtimeConfig` that its object already has stays.
        if !runtime_config.is_empty() {
            request.set("runtimeConfig", &runtime_config)?;
        }
        if let Some(result) = added.prev_result {
            request.set("prevResult", result)?;
        }
        if let Some(valid) = added.valid {
            let valid: Vec<Value> =
                valid.iter().map(|(id, ifname)| json!({"containerID": id, "ifname": ifname})).collect();
            // The second key is from drafts of the specification; some released plugins read it.
            request.set("cni.dev/valid-attachments", &valid)?;
            request.set("cni.dev/attachments", &valid)?;
        }
        request.to_bytes()
    }
}

/// Returns the `runtimeConfig` of the plugin: the values of the capabilities that it declares.
fn runtime_config(plugin: &PluginConf, capability_args: Option<&Members>) -> Members {
    let Some(values) = capability_args else { return Members::default() };
    let value_of = |name: &str| values.get_exact(name).map(|value| (name.to_owned(), value.to_owned()));
    plugin.capabilities().filter_map(value_of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(plugin: &str, extras: AddedKeys<'_>) -> String {
        let text = format!(r#"{{"cniVersion":"1.0.0","name":"n","plugins":[{plugin}]}}"#);
        let list = NetworkList::parse(text.as_bytes()).unwrap();
        String::from_utf8(list.request(&list.plugins()[0], extras).unwrap()).unwrap()
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
