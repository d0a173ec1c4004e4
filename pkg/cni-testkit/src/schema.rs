//! Checks network configurations and results with the JSON Schemas in `tests/schema/`.

use std::sync::OnceLock;

use jsonschema::Validator;
use serde_json::Value;

static CONFIG: OnceLock<Validator> = OnceLock::new();
static RESULT: OnceLock<Validator> = OnceLock::new();

/// Returns why `config` is not a network configuration, or nothing if it is one.
pub(crate) fn config_errors(config: &Value) -> Vec<String> {
    let schema = CONFIG.get_or_init(|| compile(include_str!("../../../tests/schema/network-config.schema.json")));
    // The schema does not describe results of versions below 1.0.0.
    let mut config = config.clone();
    if config["cniVersion"].as_str().is_some_and(|version| !version.starts_with("1.")) {
        config.as_object_mut().map(|object| object.remove("prevResult"));
    }
    errors(schema, &config)
}

/// Returns why `result` is not a result of version 1.x, or nothing if it is one.
pub(crate) fn result_errors(result: &Value) -> Vec<String> {
    let schema = RESULT.get_or_init(|| compile(include_str!("../../../tests/schema/result.schema.json")));
    errors(schema, result)
}

/// Returns why `document` is not what cnitool or cni-install prints for `verb` (`ipam list`) with
/// `--json`, according to the documentation, or nothing if it is. A document with a `code` is an
/// error.
pub fn report_errors(verb: &str, document: &Value) -> Vec<String> {
    let mut schema: Value =
        serde_json::from_str(include_str!("../../../docs/cnitool.schema.json")).expect("a schema is JSON");
    let name = if document.get("code").is_some() { "error".to_owned() } else { verb.replace(' ', "-") };
    assert!(schema["$defs"][&name].is_object(), "docs/cnitool.schema.json has no schema of {name}");
    schema["$ref"] = format!("#/$defs/{name}").into();
    errors(&jsonschema::validator_for(&schema).expect("a schema compiles"), document)
}

/// Compiles a schema.
fn compile(text: &str) -> Validator {
    let schema = serde_json::from_str(text).expect("a schema is JSON");
    jsonschema::validator_for(&schema).expect("a schema compiles")
}

/// Returns each error with its path in `value`.
fn errors(schema: &Validator, value: &Value) -> Vec<String> {
    schema.iter_errors(value).map(|error| format!("{}: {error}", error.instance_path())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn schemas_accept_good_and_reject_bad_documents() {
        let config = json!({"cniVersion": "1.0.0", "name": "n", "type": "bridge", "ipam": {"type": "host-local"}});
        assert_eq!(config_errors(&config), Vec::<String>::new());
        assert_ne!(config_errors(&json!({"cniVersion": "1.0.0", "name": "n"})), Vec::<String>::new());
        assert_eq!(
            result_errors(&json!({"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.1/8"}]})),
            Vec::<String>::new()
        );
        assert_ne!(result_errors(&json!({"cniVersion": "1.0.0", "ips": [{"interface": 0}]})), Vec::<String>::new());
        let link = |mtu| json!({"kind": "interface", "ok": true, "problem": null, "name": "eth0", "mtu": mtu});
        let of = |fact| json!({"network": "n", "containerID": "c", "ifname": "eth0", "netns": "", "facts": [fact]});
        let report = |mtu| json!({"attachments": [of(link(mtu))], "leftOver": []});
        assert_eq!(report_errors("inspect", &report(json!(1500))), Vec::<String>::new());
        assert_ne!(report_errors("inspect", &report(json!("1500"))), Vec::<String>::new());
    }
}
