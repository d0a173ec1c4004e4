//! Explains the differences that are intended, each as narrowly as possible.
//!
//! An explanation names the paragraph of docs/differences.md, of a plugin's page, or the decision
//! that it follows from. A run counts how often each was needed, and reports those that thousands
//! of lists never needed: they should go.

mod left;
mod node;
mod outcomes;
mod rules;

use std::collections::BTreeSet;

use serde_json::Value;

use crate::compare::{Difference, Kind};
use crate::side::list;

/// A difference that is meant.
pub(crate) struct Explanation {
    /// Its name in the figures.
    pub(crate) name: &'static str,
    /// Where it is explained to users, or the decision behind it.
    pub(crate) reason: &'static str,
    /// Whether a difference in a case is this one.
    pub(crate) covers: fn(&Value, &Difference) -> bool,
}

/// All of them.
pub(crate) fn explanations() -> impl Iterator<Item = &'static Explanation> {
    [left::REFUSED, node::NODE, rules::RULES, outcomes::OUTCOMES].into_iter().flatten()
}

/// The number of the first explanation of a difference.
pub(crate) fn explanation(case: &Value, difference: &Difference) -> Option<usize> {
    explanations().position(|explanation| (explanation.covers)(case, difference))
}

/// Whether this is something that a refused ADD has left.
fn left(it: &Difference) -> bool {
    it.kind != Kind::Differs
}

fn is(value: &Option<String>, text: &str) -> bool {
    value.as_deref() == Some(text)
}

/// Whether Go's step came to this and ours to that: `done`, or words of the error.
fn outcome(it: &Difference, theirs: &str, ours: &str) -> bool {
    let came_to = |value: &Option<String>, words: &str| {
        let text = value.as_deref().unwrap_or_default();
        if words == "done" { text == "done" } else { text.contains(words) }
    };
    it.key == "outcome" && came_to(&it.expected, theirs) && came_to(&it.ours, ours)
}

fn plugins(case: &Value) -> impl Iterator<Item = &Value> {
    list(&case["lists"]).iter().flat_map(|of| list(&of["plugins"]))
}

fn has_plugin(case: &Value, name: &str) -> bool {
    plugins(case).any(|plugin| plugin["type"] == name)
}

/// The bridges of the case's lists. Keys are alike in any case.
fn bridges(case: &Value) -> impl Iterator<Item = &str> {
    let bridges = plugins(case).filter(|plugin| plugin["type"] == "bridge");
    bridges.map(|plugin| {
        let name = said(plugin, "bridge").as_str();
        name.filter(|name| !name.is_empty()).unwrap_or("cni0")
    })
}

fn mappings(case: &Value) -> impl Iterator<Item = &Value> {
    plugins(case).flat_map(|plugin| list(&plugin["runtimeConfig"]["portMappings"]))
}

/// Whether a container may have a default route of another network's.
fn other_default(case: &Value) -> bool {
    let first = case["inside"].to_string().contains("route add default");
    first || list(&case["lists"]).len() > 1 || two_interfaces(case)
}

/// Whether the other side does the step than the one that has attached: ours looks at what Go made,
/// and the reverse.
fn swapped(case: &Value, it: &Difference) -> bool {
    case["steps"][it.step]["swap"] == true
}

/// Whether one container has two interfaces.
fn two_interfaces(case: &Value) -> bool {
    let adds = list(&case["steps"]).iter().filter(|step| step["verb"] == "ADD");
    let places: std::collections::BTreeSet<(u64, String)> =
        adds.map(|step| (step["container"].as_u64().unwrap_or_default(), step["ifname"].to_string())).collect();
    let mut containers: Vec<u64> = places.into_iter().map(|(container, _)| container).collect();
    let all = containers.len();
    containers.dedup();
    containers.len() < all
}

/// The host's address of a mapping.
fn host_of(mapping: &Value) -> &str {
    said(mapping, "hostIP").as_str().unwrap_or_default()
}

/// Whether a mapping's protocol is in capitals.
fn has_capitals(case: &Value) -> bool {
    mappings(case).any(|mapping| said(mapping, "protocol").as_str().is_some_and(|said| said != said.to_lowercase()))
}

/// Whether an object has a key in two cases.
fn has_twins(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().any(has_twins),
        Value::Object(members) => {
            let names: BTreeSet<String> = members.keys().map(|key| key.to_lowercase()).collect();
            names.len() < members.len() || members.values().any(has_twins)
        }
        _ => false,
    }
}

/// The value of a key, which plugins know in any case.
fn said<'v>(object: &'v Value, key: &str) -> &'v Value {
    let odd = &object[key.to_uppercase()];
    if odd.is_null() { &object[key] } else { odd }
}
