//! Finds the keys that cause a plugin's errors, without knowing what the keys mean.
//!
//! A plugin's own check stops at the first error and does not return the key that caused it. So
//! single keys and list elements are removed on trial, and the check is repeated: if the error
//! disappears, the removed part is its cause. That part stays removed while the next error is
//! located in the same way.

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

/// How clearly the removal of a part shows that the part causes an error: the later variant is the
/// clearer one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Evidence {
    /// Without the part, the error is the same except perhaps for numbers. With null in its place,
    /// the error differs.
    OtherNumber,
    /// Without the part, there is a different error.
    OtherError,
    /// Without the part, or with null in its place, there is no error.
    NoError,
}

/// The length up to which every element of a list is removed on trial. [`bisect`] searches longer
/// lists.
const MAX_TRIED_ELEMENTS: usize = 64;

/// The largest number of errors that are located in a document.
const MAX_ERRORS: usize = 32;

/// A check of a document, which returns only the first error.
type Check<'a> = &'a dyn Fn(&Value) -> Result<(), String>;

/// Returns the errors that `check` finds in `document`, at most [`MAX_ERRORS`], each as the path of
/// its cause and the text of the error. `kept` are keys of the top level that are never removed.
pub(super) fn errors(document: &Value, kept: &[&str], check: Check<'_>) -> Vec<(String, String)> {
    let mut document = document.clone();
    let (mut found, mut removed) = (Vec::<(Vec<Step>, String)>::new(), Vec::<Vec<Step>>::new());
    for _ in 0..MAX_ERRORS {
        let Err(error) = check(&document) else { break };
        let mut path = Vec::new();
        find_cause(&document, kept, &error, check, &mut path);
        let original_path = path_before_removals(&path, &removed);
        // An error about an object or list from which a part was removed may only be a consequence
        // of the removal, for example that a key is missing.
        let is_consequence = found.iter().any(|(earlier, _)| earlier.starts_with(&original_path));
        if !is_consequence {
            found.push((original_path, error));
        }
        // An empty path means that no part was found whose removal changes the error.
        if path.is_empty() || is_consequence {
            break;
        }
        // If the cause is inside a list's element, the whole element is removed: a list without the
        // element is more likely to be valid than an element without one of its keys.
        let element = path.iter().position(|step| matches!(step, Step::Index(_)));
        path.truncate(element.map_or(path.len(), |position| position + 1));
        remove(&mut document, &path);
        removed.push(path);
    }
    found.into_iter().map(|(path, error)| (path_text(&path), error)).collect()
}

/// Converts a path in the document after the removals to a path in the original document. `removed`
/// has the removed paths in the order of removal. Each removal of a list's element has shifted the
/// following elements.
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

/// Extends `path` to the cause of `error`, which `check` returns for the whole document: the
/// smallest part without which the error disappears or changes.
fn find_cause(document: &Value, kept: &[&str], error: &str, check: Check<'_>, path: &mut Vec<Step>) {
    let mut trial = document.clone();
    let steps: Vec<Step> = match get_mut(&mut trial, path) {
        Some(Value::Object(members)) => members.keys().map(|key| Step::Key(key.clone())).collect(),
        Some(Value::Array(items)) if items.len() <= MAX_TRIED_ELEMENTS => (0..items.len()).map(Step::Index).collect(),
        Some(Value::Array(items)) => bisect(document, items.len(), error, check, path).map(Step::Index).to_vec(),
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
        // An element is also replaced by null on trial: this does not change the positions of the
        // other elements, which the error may contain as numbers.
        let when_null = match step {
            Step::Key(_) => when_removed.clone(),
            Step::Index(_) => {
                let mut with_null = document.clone();
                get_mut(&mut with_null, path).map(Value::take);
                check(&with_null)
            }
        };
        path.pop();
        let Some(evidence) = compare_errors(error, &when_removed, &when_null) else { continue };
        if best.as_ref().is_none_or(|(best_evidence, _)| evidence > *best_evidence) {
            best = Some((evidence, step));
        }
    }
    if let Some((_, step)) = best {
        path.push(step);
        find_cause(document, kept, error, check, path);
    }
}

/// Returns how clearly a part of the document is shown to cause `error`, or `None` if it is not the
/// cause. `when_removed` and `when_null` are the results of the check without the part, and with
/// null in its place.
fn compare_errors(error: &str, when_removed: &Result<(), String>, when_null: &Result<(), String>) -> Option<Evidence> {
    match (when_removed, when_null) {
        (Err(other), Err(_)) if without_digits(other) != without_digits(error) => Some(Evidence::OtherError),
        (Err(_), Err(other)) => (other != error).then_some(Evidence::OtherNumber),
        _ => Some(Evidence::NoError),
    }
}

/// Finds by bisection a short run of elements that cause `error`, in the list at `path`, which has
/// `len` elements. Returns the positions of the run's first and last element: an error about
/// two elements, such as a duplicate, needs both.
fn bisect(document: &Value, len: usize, error: &str, check: Check<'_>, path: &[Step]) -> [usize; 2] {
    let has_same_error_with_only = |kept: Range<usize>| {
        let mut document = document.clone();
        if let Some(Value::Array(items)) = get_mut(&mut document, path) {
            items.truncate(kept.end);
            items.drain(..kept.start.min(items.len()));
        }
        check(&document).is_err_and(|other| without_digits(&other) == without_digits(error))
    };
    // The shortest list of the first elements that has the error.
    let lengths: Vec<usize> = (1..len).collect();
    let last = lengths.partition_point(|end| !has_same_error_with_only(0..*end));
    // The shortest list up to that element that has the error.
    let starts: Vec<usize> = (1..=last).collect();
    let first = starts.partition_point(|start| has_same_error_with_only(*start..last + 1));
    [first, last]
}

/// Returns the text of an error without digits. After the removal of a list's element, the same
/// error may contain different numbers.
fn without_digits(error: &str) -> String {
    error.replace(|c: char| c.is_ascii_digit(), "")
}

/// Returns a mutable reference to the value that `path` leads to.
fn get_mut<'v>(document: &'v mut Value, path: &[Step]) -> Option<&'v mut Value> {
    path.iter().try_fold(document, |value, step| match step {
        Step::Key(key) => value.get_mut(key),
        Step::Index(index) => value.get_mut(index),
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
