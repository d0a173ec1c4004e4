//! Finds the line and column of a path in a JSON text, for example of the key `mtu` for
//! `plugins[0].mtu`.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Returns the line and column, both from 1, of the key or list element that `path` leads to in the
/// JSON `text`, or of its nearest existing parent if it does not exist. For a path
/// `@<line>:<column>`, returns that position.
pub(super) fn find(text: &str, path: &str) -> (usize, usize) {
    if let Some((line, column)) = path.strip_prefix('@').and_then(|position| position.split_once(':')) {
        return (line.parse().unwrap_or(1), column.parse().unwrap_or(1));
    }
    // The parts are slices of the text.
    let offset = deepest(text, path).map_or(0, |(_, part)| part.as_ptr().addr() - text.as_ptr().addr());
    let before = text.get(..offset).unwrap_or_default();
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    (before.matches('\n').count() + 1, column)
}

/// Returns the key or list element of the JSON `text` whose path has the most in common with
/// `path`, and the length of the common part in bytes. Of duplicate keys, returns the last one.
fn deepest<'a>(text: &'a str, path: &str) -> Option<(usize, &'a str)> {
    let Children(children) = serde_json::from_str(text).ok()?;
    let matching = children.into_iter().enumerate().filter_map(|(index, (key, value))| {
        let name = key.map_or_else(|| format!("[{index}]"), |key| key.get().trim_matches('"').to_owned());
        let (beginning, rest) = path.split_at_checked(name.len())?;
        // `plugins[0].mt` is not a parent of `plugins[0].mtu`.
        if !beginning.eq_ignore_ascii_case(&name) || !(rest.is_empty() || rest.starts_with(['.', '['])) {
            return None;
        }
        let (more, part) =
            deepest(value.get(), rest.strip_prefix('.').unwrap_or(rest)).unwrap_or((0, key.unwrap_or(value).get()));
        Some((name.len() + more, part))
    });
    matching.max_by_key(|(length, _)| *length)
}

/// The keys and values of an object, or the elements of a list.
struct Children<'a>(Vec<(Option<&'a RawValue>, &'a RawValue)>);

impl<'de> Deserialize<'de> for Children<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ChildrenVisitor;
        impl<'de> Visitor<'de> for ChildrenVisitor {
            type Value = Children<'de>;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object or a list")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let entries = std::iter::from_fn(|| map.next_entry().transpose());
                entries
                    .map(|entry| entry.map(|(key, value)| (Some(key), value)))
                    .collect::<Result<_, _>>()
                    .map(Children)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let elements = std::iter::from_fn(|| list.next_element().transpose());
                elements.map(|element| element.map(|value| (None, value))).collect::<Result<_, _>>().map(Children)
            }
        }
        deserializer.deserialize_any(ChildrenVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_leads_to_its_key_or_as_far_as_there_is_something() {
        let text = "{\n  \"name\": \"a\\\"]\",\n  \"plugins\": [\n    {\"type\": \"x\"}, {\"MTU\": [1, 2],\n     \"ü\": 1, \"b\": {\"c\": 1}}\n  ]\n}";
        for (path, expected) in [
            ("", (1, 1)),
            ("name", (2, 3)),
            ("plugins", (3, 3)),
            ("plugins[0]", (4, 5)),
            ("plugins[1].mtu", (4, 21)),
            ("plugins[1].mtu[1]", (4, 32)),
            ("plugins[1].b.c", (5, 20)),
            ("plugins[1].b.absent", (5, 14)),
            ("plugins[7].x", (3, 3)),
            ("nam", (1, 1)),
            ("@9:8", (9, 8)),
        ] {
            assert_eq!(find(text, path), expected, "{path}");
        }
    }

    #[test]
    fn no_text_brings_it_down() {
        for text in ["", "{", "{\"a", "[1,", "{\"a\":", "\"\\", "]]]", "{,}"] {
            let _ = find(text, "a.b[3]");
        }
    }
}
