//! The members of a result that this crate does not know. A plugin that hands on a `prevResult`
//! hands them on too.

use serde_json::{Map, Value};

use crate::json::Json;
use crate::version::Shape;

/// The unknown members of a result, each in its place: by name in objects, by position in arrays.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unknown(Value);

/// A known member, and the members of the structure in it. Without any, all of the value is known.
struct Known(&'static str, &'static [Known]);

const DNS: Known =
    Known("dns", &[Known("nameservers", &[]), Known("domain", &[]), Known("search", &[]), Known("options", &[])]);

/// The members of every version. One of another version's is dropped, not unknown.
const OLDEST: [Known; 7] = [
    Known("cniVersion", &[]),
    Known("ip4", &[]),
    Known("ip6", &[]),
    Known("interfaces", &[]),
    Known("ips", &[]),
    Known("routes", &[]),
    DNS,
];

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
    /// The unknown members of a result in that shape.
    pub(super) fn of(json: &Json, shape: Shape) -> Unknown {
        Unknown(match shape {
            Shape::Ip4Ip6 => unknown(json, &OLDEST),
            Shape::VersionedIps | Shape::Ips => unknown(json, &IPS),
        })
    }

    /// Returns the unknown keys outside of list elements, which the oldest versions do not have.
    #[must_use]
    pub fn without_elements(&self) -> Unknown {
        let mut members = self.0.clone();
        if let Value::Object(members) = &mut members {
            members.retain(|name, _| !["interfaces", "ips", "routes"].contains(&name.as_str()));
        }
        Unknown(if members.as_object().is_some_and(Map::is_empty) { Value::Null } else { members })
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_null()
    }

    /// Adds them to an encoded result.
    pub(super) fn add_to(&self, result: &mut Value) {
        add(result, &self.0);
    }
}

/// Returns the part of `json` that is not known; `null` if nothing is unknown.
fn unknown(json: &Json, known: &[Known]) -> Value {
    match json {
        Json::Array(items) => {
            let items: Vec<Value> = items.iter().map(|item| unknown(item, known)).collect();
            if items.iter().all(Value::is_null) { Value::Null } else { Value::Array(items) }
        }
        Json::Object(members) => {
            let mut rest = Map::new();
            for (key, value) in members {
                match known.iter().find(|Known(name, _)| name.eq_ignore_ascii_case(key)) {
                    None => drop(rest.insert(key.clone(), Value::from(value))),
                    // The last duplicate that is not null counts.
                    Some(Known(_, [])) => {}
                    Some(_) if *value == Json::Null => {}
                    Some(Known(name, inner)) => match unknown(value, inner) {
                        Value::Null => drop(rest.remove(*name)),
                        value => drop(rest.insert((*name).to_owned(), value)),
                    },
                }
            }
            if rest.is_empty() { Value::Null } else { Value::Object(rest) }
        }
        _ => Value::Null,
    }
}

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
