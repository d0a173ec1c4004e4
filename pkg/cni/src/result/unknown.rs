//! The keys of a result that this crate does not know. A plugin that passes `prevResult` on keeps
//! these keys.

use serde_json::{Map, Value};

use crate::json::Json;
use crate::version::Shape;

/// The unknown keys of a result with their values, as a copy of the result without the known keys.
/// In the copy, a part without unknown keys is missing or, as an element of an array in which other
/// elements have unknown keys, `null`: `{"ips": [{"address": "10.1.2.3/24"}, {"x": 1}]}` gives
/// `{"ips": [null, {"x": 1}]}`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unknown(Value);

/// A known key, and the known keys in its value, which is an object or an array of objects. An
/// empty list means that the whole value is known.
struct Known(&'static str, &'static [&'static str]);

/// The key `dns`, which all results have.
const DNS: Known = Known("dns", &["nameservers", "domain", "search", "options"]);

/// The known keys of results of 0.1.0 and 0.2.0. Keys of newer versions are listed too, so that
/// they are dropped instead of being passed on.
const IP4_IP6_KEYS: [Known; 7] = [
    Known("cniVersion", &[]),
    Known("ip4", &[]),
    Known("ip6", &[]),
    Known("interfaces", &[]),
    Known("ips", &[]),
    Known("routes", &[]),
    DNS,
];

/// The known keys of results of 0.3.0 and newer. Keys of older versions are listed too, so that
/// they are dropped instead of being passed on.
const IPS_KEYS: [Known; 7] = [
    Known("cniVersion", &[]),
    Known("ip4", &[]),
    Known("ip6", &[]),
    Known("interfaces", &["name", "mac", "mtu", "sandbox", "socketPath", "pciID"]),
    Known("ips", &["version", "interface", "address", "gateway"]),
    Known("routes", &["dst", "gw", "gws", "mtu", "advmss", "priority", "table", "scope"]),
    DNS,
];

impl Unknown {
    /// Returns the unknown keys of a result that has the given form.
    pub(super) fn find_in(json: &Json, shape: Shape) -> Unknown {
        Unknown(match shape {
            Shape::Ip4Ip6 => without_known(json, &IP4_IP6_KEYS),
            Shape::VersionedIps | Shape::Ips => without_known(json, &IPS_KEYS),
        })
    }

    /// Returns the unknown keys for a result of 0.1.0 or 0.2.0: without those in the elements of
    /// `interfaces`, `ips` and `routes`, which these versions do not have.
    #[must_use]
    pub fn without_elements(&self) -> Unknown {
        let Value::Object(members) = &self.0 else { return self.clone() };
        let mut members = members.clone();
        members.retain(|key, _| !["interfaces", "ips", "routes"].contains(&key.as_str()));
        Unknown(object_or_null(members))
    }

    /// Whether there are no unknown keys.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_null()
    }

    /// Adds the unknown keys to an encoded result.
    pub(super) fn add_to(&self, result: &mut Value) {
        merge(result, &self.0);
    }
}

/// Returns a part of a result without the keys in `known`, or `null` if it has no other keys.
fn without_known(json: &Json, known: &[Known]) -> Value {
    match json {
        Json::Array(items) => {
            let items: Vec<Value> = items.iter().map(|item| without_known(item, known)).collect();
            if items.iter().all(Value::is_null) { Value::Null } else { Value::Array(items) }
        }
        Json::Object(members) => object_or_null(unknown_members(members, known)),
        Json::Null | Json::Bool(_) | Json::Number(_) | Json::String(_) => Value::Null,
    }
}

/// Returns the members of an object without the known keys. A known key whose value has unknown
/// keys stays, with only the unknown keys in its value.
fn unknown_members(members: &[(String, Json)], known: &[Known]) -> Map<String, Value> {
    let mut unknown = Map::new();
    for (key, value) in members {
        let Some(Known(name, names_inside)) = known.iter().find(|Known(name, _)| name.eq_ignore_ascii_case(key)) else {
            unknown.insert(key.clone(), Value::from(value));
            continue;
        };
        let is_wholly_known = names_inside.is_empty();
        // Of duplicate keys, the last one that is not `null` is used.
        if is_wholly_known || *value == Json::Null {
            continue;
        }
        // The unknown keys in an earlier duplicate are not used.
        unknown.remove(*name);
        let known_inside: Vec<Known> = names_inside.iter().map(|name| Known(name, &[])).collect();
        let inside = without_known(value, &known_inside);
        if !inside.is_null() {
            unknown.insert((*name).to_owned(), inside);
        }
    }
    unknown
}

/// Returns an object with these members, or `null` if there are none.
fn object_or_null(members: Map<String, Value>) -> Value {
    if members.is_empty() { Value::Null } else { Value::Object(members) }
}

/// Merges `unknown` into `result`: adds the members that `result` does not have, and merges the
/// objects and the array elements that both have.
fn merge(result: &mut Value, unknown: &Value) {
    match (result, unknown) {
        (Value::Object(members), Value::Object(unknown)) => {
            for (key, value) in unknown {
                if let Some(member) = members.get_mut(key) {
                    merge(member, value);
                } else {
                    members.insert(key.clone(), value.clone());
                }
            }
        }
        (Value::Array(items), Value::Array(unknown)) => {
            items.iter_mut().zip(unknown).for_each(|(item, unknown)| merge(item, unknown));
        }
        // `null`: there is nothing unknown in this part of the result.
        _ => {}
    }
}
