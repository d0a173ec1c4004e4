//! Finds the keys that cause a plugin's errors, without knowing what the keys mean.
//!
//! A plugin's own check stops at the first error and does not return the key that caused it. So
//! single keys and list elements are removed on trial, and the check is repeated: the one without
//! which the error disappears is its cause. It stays removed, and the next error is located in the
//! same way, until there is none.

use std::ops::Range;

use serde_json::Value;

/// A step into a document. A path is a list of steps.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// The value of this key of an object.
    Key(String),
    /// The element at this position of a list.
    Index(usize),
}

/// How clearly a removal on trial shows that the removed part causes an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Evidence {
    /// Only a number in the text of the error differs without it.
    OtherNumber,
    /// There is another error without it.
    OtherError,
    /// There is no error without it.
    NoError,
}

/// The longest list of which every element is removed on trial. In a longer one [`bisect`]
/// searches.
const MAX_TRIED_ELEMENTS: usize = 64;

/// The largest number of errors that are located in a document.
const MAX_ERRORS: usize = 32;

/// Returns all errors that `check` finds in `document`, each as the path of its cause and the text
/// of the error. `kept` are keys of the top level that are never removed.
pub(super) fn errors(
    document: &Value,
    kept: &[&str],
    check: &dyn Fn(&Value) -> Result<(), String>,
) -> Vec<(String, String)> {
    let mut document = document.clone();
    let (mut found, mut removed) = (Vec::<(Vec<Step>, String)>::new(), Vec::<Vec<Step>>::new());
    for _ in 0..MAX_ERRORS {
        let Err(error) = check(&document) else { break };
        let mut path = Vec::new();
        find_cause(&document, kept, &error, check, &mut path);
        let original_path = path_before_removals(&path, &removed);
        // An error about an object or list from which a part was removed is a consequence of the
        // removal: for example, that a key is missing.
        let is_consequence = found.iter().any(|(earlier, _)| earlier.starts_with(&original_path));
        if !is_consequence {
            found.push((original_path, error));
        }
        if path.is_empty() || is_consequence {
            break;
        }
        // If the cause is inside a list's element, the whole element is removed: a list is more
        // often valid without an element than an element without one of its keys.
        let element = path.iter().position(|step| matches!(step, Step::Index(_)));
        path.truncate(element.map_or(path.len(), |position| position + 1));
        remove(&mut document, &path);
        removed.push(path);
    }
    found.into_iter().map(|(path, error)| (path_text(&path), error)).collect()
}

/// Converts a path in the document after the removals to one in the original document. `removed`
/// has the paths in the order of their removal; removing a list's element shifts those behind it.
fn path_before_removals(path: &[Step], removed: &[Vec<Step>]) -> Vec<Step> {
    let mut path = path.to_vec();
    for removed_path in removed.iter().rev() {
        let Some((Step::Index(removed_index), list)) = removed_path.split_last() else { continue };
        if path.starts_with(list)
            && let Some(Step::Index(index)) = path.get_mut(list.len())
            && *index >= *removed_index
        {
            *index += 1;
        }
    }
    path
}

/// Extends `path` to the smallest part of the document without which `error`, which `check` finds
/// in the whole document, disappears or changes.
fn find_cause(
    document: &Value,
    kept: &[&str],
    error: &str,
    check: &dyn Fn(&Value) -> Result<(), String>,
    path: &mut Vec<Step>,
) {
    let Some(value) = get(document, path) else { return };
    let steps: Vec<Step> = match value {
        Value::Object(members) => members.keys().map(|key| Step::Key(key.clone())).collect(),
        Value::Array(items) if items.len() <= MAX_TRIED_ELEMENTS => (0..items.len()).map(Step::Index).collect(),
        Value::Array(items) => bisect(document, items.len(), error, check, path).map(Step::Index).to_vec(),
        _ => return,
    };
    let mut best: Option<(Evidence, Step)> = None;
    for step in steps {
        if path.is_empty() && matches!(&step, Step::Key(key) if kept.contains(&key.as_str())) {
            continue;
        }
        path.push(step.clone());
        let mut without = document.clone();
        remove(&mut without, path);
        let when_removed = check(&without);
        // An element is also replaced by null on trial: then the others keep their numbers, which
        // may be in the text of the error.
        let when_null = match step {
            Step::Key(_) => when_removed.clone(),
            Step::Index(_) => {
                let mut with_null = document.clone();
                replace_by_null(&mut with_null, path);
                check(&with_null)
            }
        };
        path.pop();
        let evidence = match (when_removed, when_null) {
            (Ok(()), _) | (_, Ok(())) => Evidence::NoError,
            (Err(other), _) if without_digits(&other) != without_digits(error) => Evidence::OtherError,
            (_, Err(other)) if other != error => Evidence::OtherNumber,
            // The same error: this part is not its cause.
            _ => continue,
        };
        if best.as_ref().is_none_or(|(best_evidence, _)| evidence > *best_evidence) {
            best = Some((evidence, step));
        }
    }
    if let Some((_, step)) = best {
        path.push(step);
        find_cause(document, kept, error, check, path);
    }
}

/// Searches the list at `path`, which has `len` elements, by bisection. Returns the positions of
/// the first and the last element without which `error` disappears: an error about two elements,
/// such as a duplicate, needs both.
fn bisect(
    document: &Value,
    len: usize,
    error: &str,
    check: &dyn Fn(&Value) -> Result<(), String>,
    path: &[Step],
) -> [usize; 2] {
    let has_same_error = |kept: Range<usize>| {
        let mut document = document.clone();
        if let Some(Value::Array(items)) = get_mut(&mut document, path) {
            items.truncate(kept.end);
            items.drain(..kept.start.min(items.len()));
        }
        check(&document).is_err_and(|other| without_digits(&other) == without_digits(error))
    };
    // The first `end` elements have the error, the first `too_few` do not.
    let (mut too_few, mut end) = (0, len);
    while end - too_few > 1 {
        let middle = too_few + (end - too_few) / 2;
        if has_same_error(0..middle) { end = middle } else { too_few = middle }
    }
    // The elements from `start` to `end` have the error, those from `too_late` to `end` do not.
    let (mut start, mut too_late) = (0, end);
    while too_late - start > 1 {
        let middle = start + (too_late - start) / 2;
        if has_same_error(middle..end) { start = middle } else { too_late = middle }
    }
    [start, end - 1]
}

/// Returns the text of an error without digits. The same error may have other numbers after an
/// element of a list was removed.
fn without_digits(error: &str) -> String {
    error.replace(|c: char| c.is_ascii_digit(), "")
}

/// Returns the value that `path` leads to, for changes.
fn get_mut<'v>(document: &'v mut Value, path: &[Step]) -> Option<&'v mut Value> {
    path.iter().try_fold(document, |value, step| match step {
        Step::Key(key) => value.get_mut(key),
        Step::Index(index) => value.get_mut(index),
    })
}

/// Returns the value that `path` leads to.
fn get<'v>(document: &'v Value, path: &[Step]) -> Option<&'v Value> {
    path.iter().try_fold(document, |value, step| match step {
        Step::Key(key) => value.get(key),
        Step::Index(index) => value.get(index),
    })
}

/// Removes the key or element that `path` leads to.
fn remove(document: &mut Value, path: &[Step]) {
    let Some((last, parent_path)) = path.split_last() else { return };
    let parent = get_mut(document, parent_path);
    match (parent, last) {
        (Some(Value::Object(members)), Step::Key(key)) => drop(members.remove(key)),
        (Some(Value::Array(items)), Step::Index(index)) if *index < items.len() => drop(items.remove(*index)),
        _ => {}
    }
}

/// Replaces the value that `path` leads to by null.
fn replace_by_null(document: &mut Value, path: &[Step]) {
    if let Some(value) = get_mut(document, path) {
        *value = Value::Null;
    }
}

/// Returns the path as text, such as `plugins[0].mtu`.
fn path_text(path: &[Step]) -> String {
    path.iter().fold(String::new(), |text, step| match step {
        Step::Key(key) if text.is_empty() => key.clone(),
        Step::Key(key) => format!("{text}.{key}"),
        Step::Index(index) => format!("{text}[{index}]"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_long_list_is_asked_about_a_few_times() {
        let asked = std::cell::Cell::new(0);
        let check = |value: &Value| -> Result<(), String> {
            asked.set(asked.get() + 1);
            let ids: Vec<i64> =
                value["list"].as_array().into_iter().flatten().filter_map(|one| one["id"].as_i64()).collect();
            match ids.iter().find(|id| **id < 0) {
                Some(id) => Err(format!("id {id} is negative")),
                None if ids.contains(&1000) && ids.contains(&1700) => Err("not both".into()),
                None => Ok(()),
            }
        };
        let mut list: Vec<Value> = (0..2000).map(|id| json!({ "id": id })).collect();
        list[300] = json!({"id": -1});
        list[1900] = json!({"id": -2});
        let found = errors(&json!({ "list": list }), &[], &check);
        let paths: Vec<&str> = found.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(paths, ["list[300].id", "list[1900].id", "list[1000].id"]);
        assert!(asked.get() < 200, "{}", asked.get());
    }

    #[test]
    fn each_error_is_located_at_its_smallest_cause() {
        let check = |value: &Value| -> Result<(), String> {
            if value["mtu"].as_i64().is_some_and(|mtu| mtu > 10) {
                return Err(format!("mtu {} is too large", value["mtu"]));
            }
            for (index, one) in value["list"].as_array().into_iter().flatten().enumerate() {
                if one["id"] == 0 {
                    return Err(format!("id of {index} is 0"));
                }
            }
            if value["a"] == true && value["b"] == true { Err("not both".into()) } else { Ok(()) }
        };
        let found = errors(
            &json!({"mtu": 11, "list": [{"id": 1}, {"id": 0}, {"id": 0, "x": 1}], "a": true, "b": true}),
            &[],
            &check,
        );
        let paths: Vec<&str> = found.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(paths, ["mtu", "list[1].id", "list[2].id", "a"]);
        let missing = |value: &Value| if value.get("name").is_some() { Ok(()) } else { Err("no name".to_owned()) };
        assert_eq!(errors(&json!({"x": 1}), &[], &missing), [(String::new(), "no name".to_owned())]);
    }
}
