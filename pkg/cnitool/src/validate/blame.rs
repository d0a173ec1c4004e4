//! Which key an error is about: the one without which the error would not be.
//!
//! A plugin's reading stops at the first thing that is wrong. So that is taken out, and the plugin
//! asked again, until nothing is wrong; what had to be taken out is the path. No knowledge of any
//! key is needed for it.

use std::ops::Range;

use serde_json::Value;

/// A step into a document.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Key(String),
    Index(usize),
}

/// In a list longer than this not every element is taken out on its own.
const LONG: usize = 64;

/// No document is asked about more often than this.
const MOST: usize = 32;

/// Everything that `check` finds wrong with `document`: (path, what). `kept` are members at the top
/// that are never to blame.
pub(super) fn all(
    document: &Value,
    kept: &[&str],
    check: &dyn Fn(&Value) -> Result<(), String>,
) -> Vec<(String, String)> {
    let mut document = document.clone();
    let (mut found, mut removed) = (Vec::<(Vec<Step>, String)>::new(), Vec::<Vec<Step>>::new());
    for _ in 0..MOST {
        let Err(error) = check(&document) else { break };
        let mut path = Vec::new();
        descend(&document, kept, &error, check, &mut path);
        let place = original(&path, &removed);
        // A missing key, or an error of the object that a key was removed from, is a consequence of
        // the removal.
        let is_consequence = found.iter().any(|(before, _)| before.starts_with(&place));
        if !is_consequence {
            found.push((place, error));
        }
        if path.is_empty() || is_consequence {
            break;
        }
        // A list can do without an element more often than an element without a member.
        let element = path.iter().position(|step| matches!(step, Step::Index(_)));
        path.truncate(element.map_or(path.len(), |at| at + 1));
        remove(&mut document, &path);
        removed.push(path);
    }
    found.into_iter().map(|(path, error)| (text(&path), error)).collect()
}

/// A path of the document as it was before these were removed, one after the other.
fn original(path: &[Step], removed: &[Vec<Step>]) -> Vec<Step> {
    let mut path = path.to_vec();
    for gone in removed.iter().rev() {
        let Some((Step::Index(at), list)) = gone.split_last() else { continue };
        if path.starts_with(list)
            && let Some(Step::Index(index)) = path.get_mut(list.len())
            && *index >= *at
        {
            *index += 1;
        }
    }
    path
}

/// Goes down to the smallest part without which the error would be another one, or none.
fn descend(
    document: &Value,
    kept: &[&str],
    error: &str,
    check: &dyn Fn(&Value) -> Result<(), String>,
    path: &mut Vec<Step>,
) {
    let Some(here) = get(document, path) else { return };
    let steps: Vec<Step> = match here {
        Value::Object(members) => members.keys().map(|key| Step::Key(key.clone())).collect(),
        Value::Array(items) if items.len() <= LONG => (0..items.len()).map(Step::Index).collect(),
        Value::Array(items) => halve(document, items.len(), error, check, path).map(Step::Index).to_vec(),
        _ => return,
    };
    let mut best: Option<(u8, Step)> = None;
    for step in steps {
        if path.is_empty() && matches!(&step, Step::Key(key) if kept.contains(&key.as_str())) {
            continue;
        }
        path.push(step.clone());
        let mut without = document.clone();
        remove(&mut without, path);
        let removed = check(&without);
        // An element that is emptied leaves the others their numbers.
        let emptied = match step {
            Step::Key(_) => removed.clone(),
            Step::Index(_) => {
                let mut without = document.clone();
                empty(&mut without, path);
                check(&without)
            }
        };
        path.pop();
        let clarity = match (removed, emptied) {
            (Ok(()), _) | (_, Ok(())) => 3,
            (Err(other), _) if unnumbered(&other) != unnumbered(error) => 2,
            (_, Err(other)) if other != error => 1,
            _ => continue,
        };
        if best.as_ref().is_none_or(|(before, _)| clarity > *before) {
            best = Some((clarity, step));
        }
    }
    if let Some((_, step)) = best {
        path.push(step);
        descend(document, kept, error, check, path);
    }
}

/// Returns the first and the last element that the error needs of a list of `len` at `path`, by
/// halving.
fn halve(
    document: &Value,
    len: usize,
    error: &str,
    check: &dyn Fn(&Value) -> Result<(), String>,
    path: &[Step],
) -> [usize; 2] {
    let is_same = |kept: Range<usize>| {
        let mut document = document.clone();
        if let Some(Value::Array(items)) = get_mut(&mut document, path) {
            items.truncate(kept.end);
            items.drain(..kept.start.min(items.len()));
        }
        check(&document).is_err_and(|other| unnumbered(&other) == unnumbered(error))
    };
    // The error is there with the elements up to `end`, and not with those up to `before`.
    let (mut before, mut end) = (0, len);
    while end - before > 1 {
        let middle = before + (end - before) / 2;
        if is_same(0..middle) { end = middle } else { before = middle }
    }
    // It is there with the elements from `start` on, and not with those from `behind` on.
    let (mut start, mut behind) = (0, end);
    while behind - start > 1 {
        let middle = start + (behind - start) / 2;
        if is_same(middle..end) { start = middle } else { behind = middle }
    }
    [start, end - 1]
}

/// Returns the error without numbers: without a list's element the same error may speak of another
/// number.
fn unnumbered(error: &str) -> String {
    error.replace(|c: char| c.is_ascii_digit(), "")
}

fn get_mut<'v>(document: &'v mut Value, path: &[Step]) -> Option<&'v mut Value> {
    path.iter().try_fold(document, |value, step| match step {
        Step::Key(key) => value.get_mut(key),
        Step::Index(index) => value.get_mut(index),
    })
}

fn get<'v>(document: &'v Value, path: &[Step]) -> Option<&'v Value> {
    path.iter().try_fold(document, |value, step| match step {
        Step::Key(key) => value.get(key),
        Step::Index(index) => value.get(index),
    })
}

fn remove(document: &mut Value, path: &[Step]) {
    let Some((last, before)) = path.split_last() else { return };
    let parent = get_mut(document, before);
    match (parent, last) {
        (Some(Value::Object(members)), Step::Key(key)) => drop(members.remove(key)),
        (Some(Value::Array(items)), Step::Index(index)) if *index < items.len() => drop(items.remove(*index)),
        _ => {}
    }
}

fn empty(document: &mut Value, path: &[Step]) {
    if let Some(value) = get_mut(document, path) {
        *value = Value::Null;
    }
}

fn text(path: &[Step]) -> String {
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
        let found = all(&json!({ "list": list }), &[], &check);
        let paths: Vec<&str> = found.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(paths, ["list[300].id", "list[1900].id", "list[1000].id"]);
        assert!(asked.get() < 200, "{}", asked.get());
    }

    #[test]
    fn each_error_is_blamed_on_the_smallest_part_it_hangs_on() {
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
        let found = all(
            &json!({"mtu": 11, "list": [{"id": 1}, {"id": 0}, {"id": 0, "x": 1}], "a": true, "b": true}),
            &[],
            &check,
        );
        let paths: Vec<&str> = found.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(paths, ["mtu", "list[1].id", "list[2].id", "a"]);
        let missing = |value: &Value| if value.get("name").is_some() { Ok(()) } else { Err("no name".to_owned()) };
        assert_eq!(all(&json!({"x": 1}), &[], &missing), [(String::new(), "no name".to_owned())]);
    }
}
