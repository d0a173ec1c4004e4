//! Parses JSON by the rules of Go's `encoding/json`.
//!
//! Existing configurations rely on three rules that serde_json does not follow:
//!
//! - `null` means the default.
//! - Keys of structures match in any case; keys of maps (`sysctl`) are case-sensitive.
//! - Of duplicate keys of a structure, the last one that is not `null` is used.
//!
//! So a document is first parsed into a [`Json`] tree, which keeps order and duplicates, and
//! structures with a plain `#[derive(Deserialize)]` are then decoded from the tree.

use std::cell::RefCell;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeOwned, DeserializeSeed, IntoDeserializer, MapAccess, SeqAccess, Visitor};

/// A JSON value. Objects keep the order of their keys, and duplicates.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// Any number.
    Number(serde_json::Number),
    /// Any string.
    String(String),
    /// `[...]`
    Array(Vec<Json>),
    /// `{...}`, with all members in the document's order, duplicates included.
    Object(Vec<(String, Json)>),
}

/// The error of a document that is not JSON, or of a value that does not have the decoded type.
/// Displays as `path: reason`, or as `reason` if it is about the whole document.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct JsonError {
    path: String,
    reason: String,
}

impl Json {
    /// Parses one document. Bytes that are not UTF-8 become U+FFFD, as in Go.
    ///
    /// # Errors
    /// Invalid JSON, text after the document, or nesting of 128 levels or more, which serde_json
    /// refuses.
    pub fn parse(bytes: &[u8]) -> Result<Json, JsonError> {
        let text = crate::text::lossy(bytes);
        let mut parser = serde_json::Deserializer::from_str(&text);
        let json = Json::deserialize(&mut parser).map_err(JsonError::new)?;
        parser.end().map_err(JsonError::new)?;
        Ok(json)
    }

    /// Returns the value of an object's key `name`, which matches in any case. Of duplicate keys,
    /// the last one that is not `null` is used. Returns `None` if the key is missing or has only
    /// `null` values, or if this is not an object.
    pub fn get(&self, name: &str) -> Option<&Json> {
        let Json::Object(members) = self else { return None };
        let (_, value) =
            members.iter().rev().find(|(key, value)| key.eq_ignore_ascii_case(name) && *value != Json::Null)?;
        Some(value)
    }

    /// Returns the same as [`get`](Json::get), except `Some(Json::Null)` for a key that has only
    /// `null` values.
    pub fn get_or_null(&self, name: &str) -> Option<&Json> {
        let Json::Object(members) = self else { return None };
        let exists = members.iter().any(|(key, _)| key.eq_ignore_ascii_case(name));
        if exists { self.get(name).or(Some(&Json::Null)) } else { None }
    }

    /// Returns the text of a string, or `None` if the value is not a string.
    pub fn as_str(&self) -> Option<&str> {
        if let Json::String(text) = self { Some(text) } else { None }
    }

    /// Decodes a structure by Go's rules. Ignores keys that `T` does not have.
    ///
    /// # Errors
    /// A value has the wrong type; the error has its path.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, JsonError> {
        T::deserialize(Reader { json: self, recorder: None })
    }

    /// Returns the keys that [`decode`](Json::decode) ignores, because `T` and the structures in it
    /// do not have them. The search ends at a value of a wrong type, so later keys are missing.
    pub fn unknown_keys<T: DeserializeOwned>(&self) -> Vec<UnknownKey> {
        let recorder = UnknownKeyRecorder::default();
        // Only the recorded keys matter. `decode` reports a value of a wrong type.
        let _ = T::deserialize(Reader { json: self, recorder: Some(&recorder) });
        recorder.unknown.into_inner()
    }

    /// Returns the kind of this value for serde's message about a wrong type.
    fn kind(&self) -> de::Unexpected<'_> {
        match self {
            Json::Null => de::Unexpected::Unit,
            Json::Bool(value) => de::Unexpected::Bool(*value),
            Json::Number(_) => de::Unexpected::Other("number"),
            Json::String(text) => de::Unexpected::Str(text),
            Json::Array(_) => de::Unexpected::Seq,
            Json::Object(_) => de::Unexpected::Map,
        }
    }
}

impl From<&Json> for serde_json::Value {
    fn from(json: &Json) -> serde_json::Value {
        match json {
            Json::Null => serde_json::Value::Null,
            Json::Bool(value) => (*value).into(),
            Json::Number(number) => number.clone().into(),
            Json::String(text) => text.clone().into(),
            Json::Array(items) => items.iter().map(serde_json::Value::from).collect(),
            Json::Object(members) => {
                members.iter().map(|(key, value)| (key.clone(), serde_json::Value::from(value))).collect()
            }
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Json, D::Error> {
        struct Build;
        impl<'de> Visitor<'de> for Build {
            type Value = Json;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }
            fn visit_unit<E>(self) -> Result<Json, E> {
                Ok(Json::Null)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
                Ok(Json::Bool(value))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
                Ok(Json::Number(value.into()))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
                Ok(Json::Number(value.into()))
            }
            fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
                // Only NaN and infinity are not numbers, and JSON has neither.
                Ok(serde_json::Number::from_f64(value).map_or(Json::Null, Json::Number))
            }
            fn visit_str<E>(self, value: &str) -> Result<Json, E> {
                Ok(Json::String(value.to_owned()))
            }
            fn visit_string<E>(self, value: String) -> Result<Json, E> {
                Ok(Json::String(value))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
                let mut array = Vec::new();
                while let Some(item) = items.next_element()? {
                    array.push(item);
                }
                Ok(Json::Array(array))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Json, A::Error> {
                let mut object = Vec::new();
                while let Some(member) = members.next_entry()? {
                    object.push(member);
                }
                Ok(Json::Object(object))
            }
        }
        deserializer.deserialize_any(Build)
    }
}

impl JsonError {
    /// Returns an error with an empty path, to which [`under`](JsonError::under) adds keys and
    /// indexes.
    fn new(reason: impl fmt::Display) -> JsonError {
        JsonError { path: String::new(), reason: reason.to_string() }
    }

    /// Adds `parent`, a key or an index such as `[0]`, at the beginning of the path.
    fn under(mut self, parent: &str) -> JsonError {
        self.path = join(parent, &self.path);
        self
    }

    /// Returns the path of the value that the error is about, such as `ipam.ranges[0]`, or the
    /// empty string for the whole document.
    pub fn path(&self) -> &str {
        &self.path
    }
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path.as_str() {
            "" => f.write_str(&self.reason),
            path => write!(f, "{path}: {}", self.reason),
        }
    }
}

impl de::Error for JsonError {
    fn custom<T: fmt::Display>(reason: T) -> JsonError {
        JsonError::new(reason)
    }
}

/// A key of a document that the decoded structure does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownKey {
    /// The path of the key, for example `ipam.ranges[0][0].subnets`.
    pub path: String,
    /// The keys that the structure has.
    pub known: Vec<&'static str>,
}

/// Records the unknown keys while a tree is decoded. All [`Reader`]s of the tree share it.
#[derive(Default)]
struct UnknownKeyRecorder {
    /// The keys and indexes that lead to the value that is being decoded.
    path: RefCell<Vec<String>>,
    /// The unknown keys so far.
    unknown: RefCell<Vec<UnknownKey>>,
}

impl UnknownKeyRecorder {
    /// Records the keys of the object `json` that are not in `known`, the keys of the structure
    /// that is decoded from the object.
    fn record_unknown(&self, json: &Json, known: &'static [&'static str]) {
        let Json::Object(members) = json else { return };
        let object_path = self.path.borrow().iter().fold(String::new(), |path, segment| join(&path, segment));
        for (key, _) in members {
            if !known.iter().any(|name| name.eq_ignore_ascii_case(key)) {
                self.unknown.borrow_mut().push(UnknownKey { path: join(&object_path, key), known: known.to_vec() });
            }
        }
    }
}

/// Joins two parts of a path, each of which may be empty: `ipam` and `ranges` give `ipam.ranges`,
/// `ranges` and `[0]` give `ranges[0]`.
fn join(parent: &str, child: &str) -> String {
    let separator = if parent.is_empty() || child.is_empty() || child.starts_with('[') { "" } else { "." };
    format!("{parent}{separator}{child}")
}

/// A serde deserializer that reads a value of a tree.
#[derive(Clone, Copy)]
struct Reader<'a> {
    json: &'a Json,
    /// Records unknown keys, if the caller asks for them.
    recorder: Option<&'a UnknownKeyRecorder>,
}

impl Reader<'_> {
    /// Decodes the value with `seed`. `segment` is the value's key, or its index such as `[0]`, for
    /// the paths of unknown keys and of an error.
    fn decode_at<'de, S: DeserializeSeed<'de>>(self, segment: &str, seed: S) -> Result<S::Value, JsonError> {
        if let Some(recorder) = self.recorder {
            recorder.path.borrow_mut().push(segment.to_owned());
        }
        let decoded = seed.deserialize(self);
        if let Some(recorder) = self.recorder {
            recorder.path.borrow_mut().pop();
        }
        decoded.map_err(|error| error.under(segment))
    }

    /// Returns the error about a value of the wrong type.
    fn mismatch<'de, V: Visitor<'de>>(&self, visitor: &V) -> JsonError {
        de::Error::invalid_type(self.json.kind(), visitor)
    }
}

/// Defines the methods for scalars: `null` gives the type's zero, any other value must have the
/// type.
macro_rules! scalars {
    ($($method:ident => $visit:ident($zero:expr)),* $(,)?) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonError> {
            match self.json {
                Json::Null => visitor.$visit($zero),
                _ => self.deserialize_any(visitor),
            }
        }
    )*};
}

impl<'de> de::Deserializer<'de> for Reader<'_> {
    type Error = JsonError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonError> {
        match self.json {
            Json::Null => visitor.visit_unit(),
            Json::Bool(value) => visitor.visit_bool(*value),
            Json::Number(number) => number.deserialize_any(visitor).map_err(JsonError::new),
            Json::String(text) => visitor.visit_str(text),
            Json::Array(_) => self.deserialize_seq(visitor),
            Json::Object(_) => self.deserialize_map(visitor),
        }
    }

    scalars! {
        deserialize_bool => visit_bool(false),
        deserialize_i8 => visit_i64(0), deserialize_i16 => visit_i64(0),
        deserialize_i32 => visit_i64(0), deserialize_i64 => visit_i64(0),
        deserialize_u8 => visit_u64(0), deserialize_u16 => visit_u64(0),
        deserialize_u32 => visit_u64(0), deserialize_u64 => visit_u64(0),
        deserialize_i128 => visit_i64(0), deserialize_u128 => visit_u64(0),
        deserialize_f32 => visit_f64(0.0), deserialize_f64 => visit_f64(0.0),
        deserialize_char => visit_str(""), deserialize_str => visit_str(""), deserialize_string => visit_str(""),
    }

    serde::forward_to_deserialize_any! { bytes byte_buf unit unit_struct tuple_struct identifier ignored_any }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonError> {
        match self.json {
            Json::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, JsonError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonError> {
        let items = match self.json {
            Json::Null => [].iter(),
            Json::Array(items) => items.iter(),
            _ => return Err(self.mismatch(&visitor)),
        };
        visitor.visit_seq(Items { items: items.enumerate(), recorder: self.recorder })
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, JsonError> {
        self.deserialize_seq(visitor)
    }

    /// Passes all members in the document's order, duplicates included: the type that collects them
    /// decides which duplicate it keeps.
    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonError> {
        let members: Vec<(&str, &Json)> = match self.json {
            Json::Null => Vec::new(),
            Json::Object(members) => members.iter().map(|(key, value)| (key.as_str(), value)).collect(),
            _ => return Err(self.mismatch(&visitor)),
        };
        visitor.visit_map(Members { unread: members.into_iter(), key_read: None, recorder: self.recorder })
    }

    /// Passes each field for which [`Json::get`] finds a value, under the structure's spelling of
    /// the key. A `null` instead of the object counts as an object without members.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, JsonError> {
        if let Some(recorder) = self.recorder {
            recorder.record_unknown(self.json, fields);
        }
        if !matches!(self.json, Json::Null | Json::Object(_)) {
            return Err(self.mismatch(&visitor));
        }
        let members: Vec<(&str, &Json)> =
            fields.iter().filter_map(|field| Some((*field, self.json.get(field)?))).collect();
        visitor.visit_map(Members { unread: members.into_iter(), key_read: None, recorder: self.recorder })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, JsonError> {
        match self.json {
            Json::String(text) => visitor.visit_enum(text.as_str().into_deserializer()),
            _ => Err(self.mismatch(&visitor)),
        }
    }
}

/// The elements of an array, for serde.
struct Items<'a> {
    items: std::iter::Enumerate<std::slice::Iter<'a, Json>>,
    recorder: Option<&'a UnknownKeyRecorder>,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = JsonError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, JsonError> {
        let Some((index, item)) = self.items.next() else { return Ok(None) };
        let reader = Reader { json: item, recorder: self.recorder };
        reader.decode_at(&format!("[{index}]"), seed).map(Some)
    }
}

/// The members of an object, for serde.
struct Members<'a> {
    unread: std::vec::IntoIter<(&'a str, &'a Json)>,
    /// The member whose key has been read and whose value has not.
    key_read: Option<(&'a str, &'a Json)>,
    recorder: Option<&'a UnknownKeyRecorder>,
}

impl<'de> MapAccess<'de> for Members<'_> {
    type Error = JsonError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, JsonError> {
        self.key_read = self.unread.next();
        match self.key_read {
            Some((key, _)) => seed.deserialize(key.into_deserializer()).map(Some),
            None => Ok(None),
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, JsonError> {
        let Some((key, value)) = self.key_read.take() else {
            return Err(JsonError::new("a value was requested before its key"));
        };
        Reader { json: value, recorder: self.recorder }.decode_at(key, seed)
    }
}

#[cfg(test)]
mod tests;
