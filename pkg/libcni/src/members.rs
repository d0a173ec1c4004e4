//! A JSON object whose values stay as they were written.
//!
//! A runtime passes on configurations that it does not understand completely: a number must keep
//! its digits, and an unknown key must not get lost. [`Json`] is for reading, [`Members`] for
//! passing on.
//!
//! Plugins ignore the case of keys, as Go does. So before a key is added, the keys that differ from
//! it only in case are removed.

use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};

use cni::json::Json;
use cni::{Code, Error, Result};

/// The keys and values of an object in their order, duplicates included. Each value is verbatim.
#[derive(Clone, Debug, Default)]
pub struct Members(Vec<(String, Box<RawValue>)>);

impl Members {
    /// Reads an object.
    ///
    /// # Errors
    /// Code 6 if it is not a JSON object.
    pub fn parse(text: &str) -> Result<Members> {
        Ok(Members::parse_with_json(text)?.0)
    }

    /// Reads an object, and also returns the same object for reading.
    ///
    /// # Errors
    /// Code 6 if it is not a JSON object.
    pub(super) fn parse_with_json(text: &str) -> Result<(Members, Json)> {
        let undecodable = |why: String| Error::new(Code::DECODE, why);
        // `Json` checks more than serde_json (depth, nothing after the object), and its errors have
        // the position.
        let json = Json::parse(text.as_bytes()).map_err(|error| undecodable(error.to_string()))?;
        if !matches!(json, Json::Object(_)) {
            return Err(undecodable("it is not a JSON object".to_owned()));
        }
        let members = serde_json::from_str(text).map_err(|error| undecodable(error.to_string()))?;
        Ok((members, json))
    }

    /// Returns the value of a key as Go reads it into a struct: the case of the key is ignored, and
    /// the last value that is not `null` is used.
    pub fn get(&self, name: &str) -> Option<&RawValue> {
        let mut values =
            self.0.iter().rev().filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| &**value);
        values.find(|value| value.get() != "null")
    }

    /// Returns the value of a key as Go reads it into a map: the key must be exactly `name`, and
    /// the last one is used.
    pub fn get_exact(&self, name: &str) -> Option<&RawValue> {
        self.0.iter().rev().find(|(key, _)| key == name).map(|(_, value)| &**value)
    }

    /// Removes all keys that are `name` in any case.
    pub fn remove(&mut self, name: &str) {
        self.0.retain(|(key, _)| !key.eq_ignore_ascii_case(name));
    }

    /// Sets a key, and removes all keys that differ from it only in the case of ASCII letters. The
    /// key becomes the last one, so it wins even if a plugin's decoder, like Go's, also ignores the
    /// case of other letters.
    ///
    /// # Errors
    /// Code 999 if the value cannot be written as JSON.
    pub fn set(&mut self, name: &str, value: &(impl Serialize + ?Sized)) -> Result<()> {
        let value = to_raw_value(value)
            .map_err(|error| Error::caused(Code::INTERNAL, format!("failed to write {name} as JSON"), error))?;
        self.remove(name);
        self.0.push((name.to_owned(), value));
        Ok(())
    }

    /// Whether the object has no keys.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the JSON text of the object.
    ///
    /// # Errors
    /// Code 999 if a key cannot be written, which does not happen.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|error| Error::caused(Code::INTERNAL, "failed to write JSON", error))
    }
}

/// Removes the white space between the tokens of a valid JSON text.
pub(super) fn compact(json: &str) -> String {
    let mut compacted = String::with_capacity(json.len());
    let (mut in_string, mut escaped) = (false, false);
    for c in json.chars() {
        if in_string || !matches!(c, ' ' | '\t' | '\r' | '\n') {
            compacted.push(c);
        }
        if escaped {
            escaped = false;
        } else if c == '\\' {
            escaped = true;
        } else if c == '"' {
            in_string = !in_string;
        }
    }
    compacted
}

impl FromIterator<(String, Box<RawValue>)> for Members {
    fn from_iter<T: IntoIterator<Item = (String, Box<RawValue>)>>(members: T) -> Members {
        Members(members.into_iter().collect())
    }
}

impl Serialize for Members {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in &self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Members, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Members;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Members, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = access.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(members: &Members) -> String {
        String::from_utf8(members.to_bytes().unwrap()).unwrap()
    }

    #[test]
    fn values_keep_their_spelling() {
        let members =
            Members::parse(r#"{"a": 1.50e2, "b":{ "x" : [1,  18446744073709551616] }, "a":"\u00e9"}"#).unwrap();
        assert_eq!(text(&members), r#"{"a":1.50e2,"b":{ "x" : [1,  18446744073709551616] },"a":"\u00e9"}"#);
    }

    #[test]
    fn setting_a_key_replaces_all_its_spellings() {
        let mut members = Members::parse(r#"{"Name":1,"x":2,"NAME":3,"name":4}"#).unwrap();
        members.set("name", "n").unwrap();
        assert_eq!(text(&members), r#"{"x":2,"name":"n"}"#);
    }

    #[test]
    fn a_structures_key_is_found_in_any_case_and_a_maps_key_is_not() {
        let members = Members::parse(r#"{"A":1,"a":null}"#).unwrap();
        assert_eq!(members.get("a").map(RawValue::get), Some("1"));
        assert_eq!(members.get_exact("a").map(RawValue::get), Some("null"));
        assert!(members.get_exact("b").is_none());
    }

    #[test]
    fn compacting_removes_white_space_outside_strings_only() {
        assert_eq!(compact("{ \"a b\" :\n [ 1.0 , \"c\\\" d\" ] }"), r#"{"a b":[1.0,"c\" d"]}"#);
    }

    #[test]
    fn a_value_that_is_not_an_object_is_refused() {
        for text in ["", "[]", "null", "{} {}", "{"] {
            assert_eq!(Members::parse(text).unwrap_err().code(), Code::DECODE, "{text:?}");
        }
    }
}
