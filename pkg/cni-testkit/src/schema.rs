//! The JSON Schemas of the network configuration and of the result, as the project keeps them in
//! `tests/schema/`.

use std::sync::OnceLock;

use jsonschema::Validator;
use serde_json::Value;

static CONFIG: OnceLock<Validator> = OnceLock::new();
static RESULT: OnceLock<Validator> = OnceLock::new();

/// Why `config` is not a network configuration; empty if it is one.
pub(crate) fn of_config(config: &Value) -> Vec<String> {
    let schema = CONFIG.get_or_init(|| compile(include_str!("../../../tests/schema/network-config.schema.json")));
    // A prevResult below 1.0.0 has a shape that the schema does not describe.
    let mut config = config.clone();
    if config["cniVersion"].as_str().is_some_and(|version| !version.starts_with("1.")) {
        config.as_object_mut().map(|object| object.remove("prevResult"));
    }
    errors(schema, &config)
}

/// Why `result` is not a result of version 1.x; empty if it is one.
pub(crate) fn of_result(result: &Value) -> Vec<String> {
    let schema = RESULT.get_or_init(|| compile(include_str!("../../../tests/schema/result.schema.json")));
    errors(schema, result)
}

fn compile(text: &str) -> Validator {
    let schema = serde_json::from_str(text).expect("a schema is JSON");
    jsonschema::validator_for(&schema).expect("a schema compiles")
}

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
        assert_eq!(of_config(&config), Vec::<String>::new());
        assert_ne!(of_config(&json!({"cniVersion": "1.0.0", "name": "n"})), Vec::<String>::new());
        assert_eq!(
            of_result(&json!({"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.1/8"}]})),
            Vec::<String>::new()
        );
        assert_ne!(of_result(&json!({"cniVersion": "1.0.0", "ips": [{"interface": 0}]})), Vec::<String>::new());
    }
}
