//! The keys of a result that this crate does not know. A plugin that passes `prevResult` on passes
//! them on too.

use serde_json::{Map, Value};

use crate::json::Json;
use crate::version::Shape;

/// The unknown keys of a result with their values, as a JSON value of the result's structure, in
/// which the known keys are missing. Elements of arrays keep their positions; `null` if nothing is
/// unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unknown(Value);

/// A known key, and the known keys of the object (or of the objects in the array) that is its
/// value. An empty list means that the whole value is known.
struct Known(&'static str, &'static [Known]);

const DNS: Known =
    Known("dns", &[Known("nameservers", &[]), Known("domain", &[]), Known("search", &[]), Known("options", &[])]);

/// The known keys of results of 0.1.0 and 0.2.0. Keys of other versions are listed too, so that
/// they are dropped instead of being passed on.
const OLDEST: [Known; 7] = [
    Known("cniVersion", &[]),
    Known("ip4", &[]),
    Known("ip6", &[]),
    Known("interfaces", &[]),
    Known("ips", &[]),
    Known("routes", &[]),
    DNS,
];

/// The known keys of results of 0.3.0 and newer.
const IPS: [Known; 7] = [
    Known("cniVersion", &[]),
    Known("ip4", &[]),
    Known("ip6", &[]),
    Known(
        "interfaces",
        &[
            Known("name", &[]),
            Known("mac", &[]),
            Known("mtu", &[]),
            Known("sandbox", &[]),
            Known("socketPath", &[]),
            Known("pciID", &[]),
        ],
    ),
    Known("ips", &[Known("version", &[]), Known("interface", &[]), Known("address", &[]), Known("gateway", &[])]),
    Known(
        "routes",
        &[
            Known("dst", &[]),
            Known("gw", &[]),
            Known("mtu", &[]),
            Known("advmss", &[]),
            Known("priority", &[]),
            Known("table", &[]),
            Known("scope", &[]),
        ],
    ),
    DNS,
];

impl Unknown {
    /// Returns the unknown keys of a result that has the given form.
    pub(super) fn of(json: &Json, shape: Shape) -> Unknown {
        Unknown(match shape {
            Shape::Ip4Ip6 => unknown(json, &OLDEST),
            Shape::VersionedIps | Shape::Ips => unknown(json, &IPS),
        })
    }

    /// Returns the unknown keys without those in elements of `interfaces`, `ips` and `routes`,
    /// which results of 0.1.0 and 0.2.0 do not have.
    #[must_use]
    pub fn without_elements(&self) -> Unknown {
        let mut members = self.0.clone();
        if let Value::Object(members) = &mut members {
            members.retain(|name, _| !["interfaces", "ips", "routes"].contains(&name.as_str()));
        }
        Unknown(if members.as_object().is_some_and(Map::is_empty) { Value::Null } else { members })
    }

    /// Whether there are no unknown keys.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_null()
    }

    /// Adds the unknown keys to an encoded result.
    pub(super) fn add_to(&self, result: &mut Value) {
        add(result, &self.0);
    }
}

/// Returns `json` without the keys in `known`; `null` if no other key is in it.
fn unknown(json: &Json, known: &[Known]) -> Value {
    match json {
        Json::Array(items) => {
            let items: Vec<Value> = items.iter().map(|item| unknown(item, known)).collect();
            if items.iter().all(Value::is_null) { Value::Null } else { Value::Array(items) }
        }
        Json::Object(members) => {
            let mut unknown_members = Map::new();
            for (key, value) in members {
                match known.iter().find(|Known(name, _)| name.eq_ignore_ascii_case(key)) {
                    None => drop(unknown_members.insert(key.clone(), Value::from(value))),
                    Some(Known(_, [])) => {}
                    Some(_) if *value == Json::Null => {}
                    // Of duplicate keys, the last one that is not null counts, so its unknown keys
                    // replace those of an earlier one.
                    Some(Known(name, inner)) => match unknown(value, inner) {
                        Value::Null => drop(unknown_members.remove(*name)),
                        value => drop(unknown_members.insert((*name).to_owned(), value)),
                    },
                }
            }
            if unknown_members.is_empty() { Value::Null } else { Value::Object(unknown_members) }
        }
        _ => Value::Null,
    }
}

/// Merges `unknown` into `result`: adds the members that `result` does not have, and merges the
/// objects and the array elements that both have.
fn add(result: &mut Value, unknown: &Value) {
    match (result, unknown) {
        (Value::Object(members), Value::Object(unknown)) => {
            for (key, value) in unknown {
                match members.get_mut(key) {
                    Some(member) => add(member, value),
                    None => drop(members.insert(key.clone(), value.clone())),
                }
            }
        }
        (Value::Array(items), Value::Array(unknown)) => {
            items.iter_mut().zip(unknown).for_each(|(item, unknown)| add(item, unknown));
        }
        _ => {}
    }
}
