//! schema: prints the JSON Schema of a network, or of the keys of one plugin.
//!
//! The schema is made from the types that parse a configuration: for each place in a configuration,
//! the plugin's own code says which keys it knows there, and which kinds of values it refuses.

use clap::Args;
use cni::Error;
use cni::config::NetConf;
use cni::json::Json;
use cni::skel::{Plugin, Role};
use cni_multicall::{PLUGINS, find};
use serde_json::{Map, Value, json};

use crate::call::{Exit, Streams};
use crate::report::{did_you_mean, write_json};
use crate::validate::{LIST_KEYS, STANDARD_KEYS};

/// The arguments of `schema`.
#[derive(Debug, Args)]
pub(crate) struct Schema {
    /// Only the keys of this plugin; of an IPAM plugin those of "ipam"
    plugin: Option<String>,
}

/// Keys that plugins read apart from the structure of their keys, with spaces between them.
const SEPARATE_KEYS: &str = "acceptRa blockSize clusterConf enableSlaac dataDir delegateTimeout fullIsUnavailable \
                             layer2 lockTimeout reclaimAfterReboot releaseCooldown reuse type";

/// Runs `cnitool schema`.
///
/// # Errors
/// Code 7 if the plugin is not one of this project; 5 if stdout cannot be written.
pub(crate) fn run(args: &Schema, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    let mut schema = match &args.plugin {
        None => of_list(),
        Some(name) => {
            let hint = || did_you_mean(name, PLUGINS.iter().map(|plugin| plugin.name()));
            let unknown = || Error::config(format!("{name} is not a plugin of this project{}", hint()));
            of_plugin(find(name).ok_or_else(unknown)?)
        }
    };
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema".into();
    write_json(streams, &schema).map(|()| Exit::Done)
}

/// Returns the schema of a list, in which the type of each plugin selects the schema of its keys.
fn of_list() -> Value {
    let is_ipam = |plugin: &&&dyn Plugin| matches!(plugin.role(), Role::Ipam | Role::IpamOrChained);
    let select = |plugin: &&dyn Plugin| {
        let name = plugin.name();
        json!({"if": {"properties": {"type": {"const": name}}}, "then": {"$ref": format!("#/$defs/{name}")}})
    };
    let by_type = |chosen: Vec<Value>| json!({"type": "object", "required": ["type"], "allOf": chosen});
    let defs: Map<String, Value> =
        PLUGINS.iter().map(|plugin| (plugin.name().to_owned(), of_plugin(*plugin))).collect();
    let mut items = by_type(PLUGINS.iter().filter(|plugin| plugin.role() != Role::Ipam).map(select).collect());
    items["properties"]["ipam"]["allOf"] = PLUGINS.iter().filter(is_ipam).map(select).collect();
    let mut properties: Map<String, Value> = LIST_KEYS.iter().map(|key| ((*key).to_owned(), json!({}))).collect();
    for key in ["cniVersion", "name"] {
        properties[key] = json!({"type": "string"});
    }
    properties["plugins"] = json!({"type": "array", "items": items});
    let required = ["name", "plugins"];
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false, "$defs": defs})
}

/// Returns the schema of the keys of one plugin.
fn of_plugin(plugin: &dyn Plugin) -> Value {
    let name = plugin.name();
    let is_ipam = plugin.role() == Role::Ipam;
    let base = json!({"cniVersion": "1.0.0", "name": "n", "type": name, "prevResult": {"cniVersion": "1.0.0"}});
    let wrap = |value: Value| {
        let mut conf = base.clone();
        if is_ipam {
            conf["ipam"] = value;
        } else if let (Value::Object(conf), Value::Object(keys)) = (&mut conf, value) {
            conf.extend(keys);
        }
        conf
    };
    let mut schema = of_place(plugin, if is_ipam { "ipam" } else { "" }, &wrap);
    if !is_ipam {
        for key in STANDARD_KEYS {
            schema["properties"][key] = schema["properties"].get(key).cloned().unwrap_or_else(|| json!({}));
        }
    }
    schema["type"] = "object".into();
    schema["properties"]["type"] = json!({"const": name});
    schema
}

/// Returns the schema of the value at `path` of a configuration. `wrap` returns a configuration
/// with a value at this place.
fn of_place(plugin: &dyn Plugin, path: &str, wrap: &dyn Fn(Value) -> Value) -> Value {
    let kinds = [
        ("boolean", json!(true)),
        ("integer", json!(1)),
        ("string", json!("")),
        ("array", json!([])),
        ("object", json!({})),
    ];
    let accepted: Vec<&str> = kinds
        .into_iter()
        .filter(|(_, value)| path.is_empty() || !is_refused(plugin, path, &wrap(value.clone())))
        .map(|(kind, _)| kind)
        .collect();
    let mut schema = json!({});
    match accepted[..] {
        [kind] => schema["type"] = kind.into(),
        // The plugin passes on any value.
        _ if accepted.len() == 5 => {}
        _ => schema["type"] = json!(accepted),
    }
    let join = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    let is_known = |key: &&str| {
        !plugin.unknown_keys(&parse(&wrap(json!({*key: null})))).iter().any(|unknown| unknown.path == join(key))
    };
    let unknown = plugin.unknown_keys(&parse(&wrap(json!({"?": null}))));
    if let Some(unknown) = unknown.into_iter().find(|unknown| unknown.path == join("?")) {
        let separate = SEPARATE_KEYS.split(' ').filter(is_known);
        let keys = unknown.known.iter().copied().chain(separate);
        let property = |key: &str| (key.to_owned(), of_place(plugin, &join(key), &|value| wrap(json!({key: value}))));
        schema["properties"] = keys.map(property).collect::<Map<_, _>>().into();
        schema["additionalProperties"] = false.into();
    }
    if accepted.contains(&"array") && accepted.len() < 5 {
        schema["items"] = of_place(plugin, &format!("{path}[0]"), &|value| wrap(json!([value])));
    }
    schema
}

/// Whether the plugin refuses the kind of the value at `path`.
fn is_refused(plugin: &dyn Plugin, path: &str, conf: &Value) -> bool {
    let outcome = NetConf::parse(conf.to_string()).and_then(|conf| plugin.examine(&conf));
    let text = outcome.err().map(|error| error.to_string()).unwrap_or_default();
    [": invalid type", ": expected"].iter().any(|words| text.contains(&format!("{path}{words}")))
}

/// Converts a configuration.
fn parse(conf: &Value) -> Json {
    Json::parse(conf.to_string().as_bytes()).unwrap_or(Json::Null)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// The networks in the plugins' pages that are run as they are.
    fn examples() -> Vec<(String, Value)> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/plugins");
        let pages = fs::read_dir(folder).unwrap().map(|page| fs::read_to_string(page.unwrap().path()).unwrap());
        let mut examples = Vec::new();
        for page in pages {
            for block in page.split("\n```json\n").skip(1) {
                let text = block.split("\n```").next().unwrap();
                let mut network: Value = serde_json::from_str(text).unwrap();
                if network["plugins"].is_null() {
                    network = json!({"cniVersion": "1.1.0", "name": "example", "plugins": [network]});
                }
                examples.push((text.to_owned(), network));
            }
        }
        examples
    }

    #[test]
    fn the_schema_accepts_every_documented_network() {
        let schema = jsonschema::validator_for(&of_list()).unwrap();
        let examples = examples();
        assert!(examples.len() > 10, "{}", examples.len());
        for (text, network) in examples {
            let errors: Vec<String> =
                schema.iter_errors(&network).map(|error| format!("{}: {error}", error.instance_path())).collect();
            assert_eq!(errors, [""; 0], "{text}");
        }
    }

    #[test]
    fn the_schema_refuses_unknown_keys_and_wrong_types() {
        let schema = jsonschema::validator_for(&of_list()).unwrap();
        let accepts = |plugin: Value| schema.is_valid(&json!({"name": "n", "plugins": [plugin]}));
        let ipam = json!({"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}]], "dataDir": "/x"});
        assert!(accepts(json!({"type": "bridge", "isGateway": true, "acceptRa": "no", "ipam": ipam})));
        assert!(accepts(json!({"type": "of-another-project", "any": 1})));
        for wrong in [
            json!({"type": "bridge", "isGatway": true}),
            json!({"type": "bridge", "isGateway": "yes"}),
            json!({"type": "bridge", "vlanTrunk": [{"id": "1"}]}),
            json!({"type": "bridge", "ipam": {"type": "host-local", "ranges": [{"subnet": "10.1.0.0/24"}]}}),
            json!({"any": 1}),
        ] {
            assert!(!accepts(wrong.clone()), "{wrong}");
        }
    }
}
