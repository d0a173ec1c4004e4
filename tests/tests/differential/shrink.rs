//! A case cut down: keys and elements are taken away as long as the difference remains.

use serde_json::Value;

use crate::compare::{Difference, compare};
use crate::explained::explanation;

/// The smallest case found with an unexplained difference in the same place.
pub(crate) fn shrink(mut case: Value, difference: &Difference) -> (Value, Difference) {
    let mut shown = difference.clone();
    // Each round runs the case once for every key; a bound keeps a large one from taking an hour.
    let mut runs = 0;
    loop {
        let mut smaller = None;
        for pointer in removable(&case) {
            let candidate = without(&case, &pointer);
            runs += 1;
            if let Some(found) = still(&candidate, difference) {
                smaller = Some((candidate, found));
                break;
            }
            if runs > 400 {
                return (case, shown);
            }
        }
        match smaller {
            Some((candidate, found)) => (case, shown) = (candidate, found),
            None => return (case, shown),
        }
    }
}

fn still(case: &Value, difference: &Difference) -> Option<Difference> {
    let compared = std::panic::catch_unwind(|| compare(case)).ok()?;
    let same = |one: &&Difference| {
        let alike = difference.key != "outcome"
            || (beginning(&one.expected) == beginning(&difference.expected)
                && beginning(&one.ours) == beginning(&difference.ours));
        one.key == difference.key && one.verb == difference.verb && alike && explanation(case, one).is_none()
    };
    compared.differences.iter().find(same).cloned()
}

/// Who refused, with which code, and the first words of why: another error is another finding.
fn beginning(outcome: &Option<String>) -> String {
    let words = outcome.as_deref().unwrap_or_default().split_whitespace().take(7).collect::<Vec<_>>().join(" ");
    words.chars().filter(|c| !c.is_ascii_digit()).collect()
}

/// Pointers to all that may go, the large ones first.
fn removable(case: &Value) -> Vec<String> {
    let mut pointers = Vec::new();
    collect(case, String::new(), &mut pointers);
    pointers.retain(|pointer| {
        let parts: Vec<&str> = pointer.split('/').skip(1).collect();
        // The skeleton of a case, and what a step or plugin is.
        let fixed = parts.len() == 1 && ["lists", "steps", "inside"].contains(&parts[0])
            || parts.len() == 2 && parts[0] == "lists"
            || pointer.ends_with("/type")
            || pointer.ends_with("/verb")
            || pointer.ends_with("/plugins")
            || (parts[0] == "steps"
                && (pointer.ends_with("/container") || pointer.ends_with("/ifname") || pointer.ends_with("/list")))
            || (parts[0] == "inside" && parts.len() == 2);
        !fixed
    });
    pointers.sort_by_key(|pointer| pointer.matches('/').count());
    pointers
}

fn collect(value: &Value, path: String, into: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(fields) => {
            fields.iter().map(|(key, value)| (key.replace('~', "~0").replace('/', "~1"), value)).collect()
        }
        // From the end, so that the steps that come last go first.
        Value::Array(items) => {
            items.iter().enumerate().rev().map(|(index, value)| (index.to_string(), value)).collect()
        }
        _ => return,
    };
    for (key, child) in children {
        let path = format!("{path}/{key}");
        into.push(path.clone());
        collect(child, path, into);
    }
}

fn without(case: &Value, pointer: &str) -> Value {
    let mut case = case.clone();
    let (parent, key) = pointer.rsplit_once('/').expect("a pointer has a slash");
    let key = key.replace("~1", "/").replace("~0", "~");
    match case.pointer_mut(parent) {
        Some(Value::Object(fields)) => drop(fields.remove(&key)),
        Some(Value::Array(items)) => drop(items.remove(key.parse().expect("an index"))),
        _ => {}
    }
    case
}
