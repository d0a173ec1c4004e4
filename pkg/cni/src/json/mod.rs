//! Parses JSON by the rules of Go's `encoding/json`.
//!
//! Existing configurations rely on these rules: keys of structures match in any case, `null` means
//! the default, and of duplicate keys the last one counts. serde_json refuses all three. So a
//! document is first parsed into a [`Json`] tree, which keeps order and duplicates, and structures
//! with a plain `#[derive(Deserialize)]` are then decoded from the tree.
//!
//! Keys of *structures* ignore case, keys of *maps* (`sysctl`, `capabilities`) never do.

use std::cell::RefCell;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeOwned, DeserializeSeed, IntoDeserializer, MapAccess, SeqAccess, Visitor};

/// The greatest depth of nested objects and arrays.
pub const MAX_DEPTH: usize = 128;

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

/// A document could not be parsed, or a structure not be decoded. Displays as `path: reason`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct JsonError {
    path: String,
    reason: String,
}

impl Json {
    /// Parses one document. Bytes that are not UTF-8 become U+FFFD, as in Go.
    ///
    /// # Errors
    /// Invalid JSON, text after the document, or nesting deeper than [`MAX_DEPTH`].
    pub fn parse(bytes: &[u8]) -> Result<Json, JsonError> {
        check_depth(bytes)?;
        let text = String::from_utf8_lossy(bytes);
        let mut reader = serde_json::Deserializer::from_str(&text);
        reader.disable_recursion_limit(); // `check_depth` has checked the depth
        let json = Json::deserialize(&mut reader).map_err(JsonError::new)?;
        reader.end().map_err(JsonError::new)?;
        Ok(json)
    }

    /// Returns the member of an object whose key is `name` in any case. Of duplicates, returns the
    /// last one that is not `null`. Returns `None` if there is none, or if this is not an object.
    pub fn get(&self, name: &str) -> Option<&Json> {
        let Json::Object(members) = self else { return None };
        let (_, value) =
            members.iter().rev().find(|(key, value)| key.eq_ignore_ascii_case(name) && *value != Json::Null)?;
        Some(value)
    }

    /// Returns the same as [`get`](Json::get), but `Some(Json::Null)` if the member exists and is
    /// `null`.
    pub fn get_or_null(&self, name: &str) -> Option<&Json> {
        let Json::Object(members) = self else { return None };
        let exists = members.iter().any(|(key, _)| key.eq_ignore_ascii_case(name));
        if exists { Some(self.get(name).unwrap_or(&Json::Null)) } else { None }
    }

    /// Returns the text of a string, or `None` for another value.
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
    /// do not have them. A value of a wrong type ends the search.
    pub fn unknown_keys<T: DeserializeOwned>(&self) -> Vec<UnknownKey> {
        let recorder = UnknownKeyRecorder::default();
        // A value of a wrong type is reported by `decode`.
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

/// Checks the depth of nesting by counting the brackets outside of strings, before serde_json,
/// whose own limit is switched off, recurses into them.
///
/// # Errors
/// The document is nested deeper than [`MAX_DEPTH`].
fn check_depth(bytes: &[u8]) -> Result<(), JsonError> {
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    for byte in bytes {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => {
                depth += 1;
                if depth > MAX_DEPTH {
                    return Err(JsonError::new(format!("nested deeper than {MAX_DEPTH} levels")));
                }
            }
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    Ok(())
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
    /// Returns an error about the document as a whole.
    fn new(reason: impl fmt::Display) -> JsonError {
        JsonError { path: String::new(), reason: reason.to_string() }
    }

    /// Puts a key, or an index as `[0]`, before the path.
    fn under(mut self, segment: impl fmt::Display) -> JsonError {
        let separator = if self.path.is_empty() || self.path.starts_with('[') { "" } else { "." };
        self.path = format!("{segment}{separator}{}", self.path);
        self
    }

    /// Returns the place in the document, such as `ipam.ranges[0]`, or the empty string for the
    /// whole document.
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
    pub known: &'static [&'static str],
}

/// Records the unknown keys while a tree is decoded.
#[derive(Default)]
struct UnknownKeyRecorder {
    /// The keys and indexes from the document to the value that is being decoded.
    path: RefCell<Vec<String>>,
    /// The unknown keys so far.
    unknown: RefCell<Vec<UnknownKey>>,
}

impl UnknownKeyRecorder {
    /// Records the keys of the object `json` that are not in `known`, the keys of the structure
    /// that is decoded from it.
    fn record_unknown(&self, json: &Json, known: &'static [&'static str]) {
        let Json::Object(members) = json else { return };
        for (key, _) in members {
            if known.iter().any(|name| name.eq_ignore_ascii_case(key)) {
                continue;
            }
            let path = self.path.borrow().iter().fold(String::new(), |path, segment| join(&path, segment));
            self.unknown.borrow_mut().push(UnknownKey { path: join(&path, key), known });
        }
    }
}

/// Appends a key or an index to a path: `ipam` and `ranges` give `ipam.ranges`, `ranges` and `[0]`
/// give `ranges[0]`.
fn join(path: &str, segment: &str) -> String {
    let separator = if path.is_empty() || segment.starts_with('[') { "" } else { "." };
    format!("{path}{separator}{segment}")
}

/// A serde deserializer that reads a value of a tree.
#[derive(Clone, Copy)]
struct Reader<'a> {
    json: &'a Json,
    /// Records unknown keys, if the caller asks for them.
    recorder: Option<&'a UnknownKeyRecorder>,
}

impl Reader<'_> {
    /// Calls `decode` with this reader, while `segment`, its key or index, is part of the
    /// recorder's path.
    fn below<T>(self, segment: impl FnOnce() -> String, decode: impl FnOnce(Self) -> T) -> T {
        let Some(recorder) = self.recorder else { return decode(self) };
        recorder.path.borrow_mut().push(segment());
        let decoded = decode(self);
        recorder.path.borrow_mut().pop();
        decoded
    }
}

impl<'a> Reader<'a> {
    /// Returns the error about a value of the wrong type.
    fn mismatch<'de, V: Visitor<'de>>(&self, visitor: &V) -> JsonError {
        de::Error::invalid_type(self.json.kind(), visitor)
    }
}

/// Defines the methods for scalars: `null` gives the type's zero, any other value must have the
/// type.
macro_rules! scalars {
    ($($method:ident => $zero:ident($value:expr)),* $(,)?) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonError> {
            match self.json {
                Json::Null => visitor.$zero($value),
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
            Json::Array(items) => visitor.visit_seq(Items { items: items.iter(), index: 0, recorder: self.recorder }),
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
        deserialize_bytes => visit_bytes(b""), deserialize_byte_buf => visit_bytes(b""),
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonError> {
        match self.json {
            Json::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonError> {
        visitor.visit_unit()
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, JsonError> {
        visitor.visit_unit()
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, JsonError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonError> {
        match self.json {
            Json::Null => visitor.visit_seq(Items { items: [].iter(), index: 0, recorder: self.recorder }),
            Json::Array(items) => visitor.visit_seq(Items { items: items.iter(), index: 0, recorder: self.recorder }),
            _ => Err(self.mismatch(&visitor)),
        }
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, JsonError> {
        self.deserialize_seq(visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: usize,
        visitor: V,
    ) -> Result<V::Value, JsonError> {
        self.deserialize_seq(visitor)
    }

    /// Passes all members in the document's order. Which of duplicates counts is up to the type
    /// that collects them.
    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonError> {
        match self.json {
            Json::Null => {
                visitor.visit_map(Members { members: Vec::new().into_iter(), value: None, recorder: self.recorder })
            }
            Json::Object(members) => visitor.visit_map(Members {
                members: members.iter().map(|(key, value)| (key.as_str(), value)).collect::<Vec<_>>().into_iter(),
                value: None,
                recorder: self.recorder,
            }),
            _ => Err(self.mismatch(&visitor)),
        }
    }

    /// Passes each field that the object has, once and in the structure's spelling.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, JsonError> {
        if let Some(recorder) = self.recorder {
            recorder.record_unknown(self.json, fields);
        }
        match self.json {
            Json::Null | Json::Object(_) => visitor.visit_map(Members {
                members: fields
                    .iter()
                    .filter_map(|field| self.json.get(field).map(|value| (*field, value)))
                    .collect::<Vec<_>>()
                    .into_iter(),
                value: None,
                recorder: self.recorder,
            }),
            _ => Err(self.mismatch(&visitor)),
        }
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

    fn deserialize_identifier<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonError> {
        self.deserialize_any(visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonError> {
        visitor.visit_unit()
    }
}

/// The elements of an array, for serde.
struct Items<'a> {
    items: std::slice::Iter<'a, Json>,
    index: usize,
    recorder: Option<&'a UnknownKeyRecorder>,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = JsonError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, JsonError> {
        let Some(item) = self.items.next() else { return Ok(None) };
        let index = self.index;
        self.index += 1;
        let reader = Reader { json: item, recorder: self.recorder };
        let decoded = reader.below(|| format!("[{index}]"), |reader| seed.deserialize(reader));
        decoded.map(Some).map_err(|error| error.under(format_args!("[{index}]")))
    }
}

/// The members of an object, for serde.
struct Members<'a> {
    members: std::vec::IntoIter<(&'a str, &'a Json)>,
    /// The member whose key has been read and whose value has not.
    value: Option<(&'a str, &'a Json)>,
    recorder: Option<&'a UnknownKeyRecorder>,
}

impl<'de> MapAccess<'de> for Members<'_> {
    type Error = JsonError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, JsonError> {
        self.value = self.members.next();
        match self.value {
            Some((key, _)) => seed.deserialize(key.into_deserializer()).map(Some),
            None => Ok(None),
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, JsonError> {
        let Some((key, value)) = self.value.take() else {
            return Err(JsonError::new("a value was asked for before its key"));
        };
        let reader = Reader { json: value, recorder: self.recorder };
        reader.below(|| key.to_owned(), |reader| seed.deserialize(reader)).map_err(|error| error.under(key))
    }
}

#[cfg(test)]
mod tests;
