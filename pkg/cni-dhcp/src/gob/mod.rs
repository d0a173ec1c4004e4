//! Decodes any value of Go's encoding `gob`. The module `encode` encodes structures.
//!
//! A stream is a sequence of messages. Each begins with its length and a type number. A message
//! with a negative number defines a type. A message with a positive number has a value of a type
//! that was defined earlier. The fields of a structure are matched by name, and fields with the
//! value zero are absent, so the two ends may be different releases.
//! <https://pkg.go.dev/encoding/gob> describes the format.

mod encode;

use std::collections::HashMap;

pub use encode::{Definition, Fields, sized, write_definition, write_struct};

/// The length in bytes of the largest message that is decoded.
pub const MAX_MESSAGE: usize = 4 << 20;
/// The longest name of a field. Go's calls have names of at most 14 bytes.
const MAX_NAME: usize = 64;
/// The number of levels to which values may be nested.
const MAX_DEPTH: u32 = 32;
/// The number of types that a stream may define.
const MAX_TYPES: usize = 256;

/// The number of Go's type `bool`. Streams use Go's own types without a definition.
const BOOL: i64 = 1;
/// The number of Go's type `int`.
pub const INT: i64 = 2;
/// The number of Go's type `uint`.
pub const UINT: i64 = 3;
/// The number of Go's type `float64`.
const FLOAT: i64 = 4;
/// The number of Go's type `[]byte`.
pub const BYTES: i64 = 5;
/// The number of Go's type `string`.
pub const TEXT: i64 = 6;

// The kinds of a defined type. Each is the index of a field of `wireType` (see `definition`).
const ARRAY: usize = 0;
const SLICE: usize = 1;
const STRUCT: usize = 2;
const MAP: usize = 3;
const GOB_ENCODER: usize = 4;
const TEXT_MARSHALER: usize = 6;

/// The reason why a stream cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid gob: {0}")]
pub struct GobError(&'static str);

type Result<T> = std::result::Result<T, GobError>;

/// A decoded value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A boolean.
    Bool(bool),
    /// A signed number.
    Int(i64),
    /// An unsigned number.
    Uint(u64),
    /// A floating-point number, as its bits.
    Float(u64),
    /// Bytes.
    Bytes(Vec<u8>),
    /// Text.
    Text(String),
    /// A slice or an array.
    List(Vec<Value>),
    /// A map.
    Map(Vec<(Value, Value)>),
    /// A structure: the fields that are not zero, by name.
    Struct(Vec<(String, Value)>),
}

impl Value {
    /// Returns a field of a structure, or `None` if it is absent or the value is not a structure.
    pub fn get(&self, name: &str) -> Option<&Value> {
        match self {
            Value::Struct(fields) => fields.iter().find(|(field, _)| field == name).map(|(_, value)| value),
            _ => None,
        }
    }

    /// Returns the text in a field of a structure; empty if the field is absent or has another
    /// type.
    pub fn text(&self, name: &str) -> &str {
        match self.get(name) {
            Some(Value::Text(text)) => text,
            _ => "",
        }
    }

    /// Returns the bytes in a field of a structure; empty if the field is absent or has another
    /// type.
    pub fn bytes(&self, name: &str) -> &[u8] {
        match self.get(name) {
            Some(Value::Bytes(bytes)) => bytes,
            _ => &[],
        }
    }

    /// Returns the signed number in a field of a structure, or `None` if the field is absent or has
    /// another type.
    pub fn int(&self, name: &str) -> Option<i64> {
        match self.get(name) {
            Some(Value::Int(number)) => Some(*number),
            _ => None,
        }
    }

    /// Returns the list in a field of a structure; empty if the field is absent or has another
    /// type.
    pub fn list(&self, name: &str) -> &[Value] {
        match self.get(name) {
            Some(Value::List(list)) => list,
            _ => &[],
        }
    }
}

/// A type that a stream has defined. An `i64` is the number of another type.
#[derive(Clone, Debug)]
enum Type {
    /// A structure: the name and type of each field.
    Struct(Vec<(String, i64)>),
    /// A slice or array: the type of its elements.
    List(i64),
    /// A map: the types of its keys and values.
    Map(i64, i64),
    /// A type that encodes its own values (`GobEncoder` and others). They are decoded as bytes.
    Opaque,
}

/// Decodes one stream.
#[derive(Debug, Default)]
pub struct Reader {
    /// The types that the stream has defined, by their numbers.
    types: HashMap<i64, Type>,
}

impl Reader {
    /// Removes the next value and the type definitions before it from the received bytes, and
    /// returns the value. Returns `None` if the bytes do not have a whole value yet.
    ///
    /// # Errors
    /// The stream is invalid; nothing after the error can be decoded.
    pub fn take(&mut self, received: &mut Vec<u8>) -> Result<Option<Value>> {
        loop {
            let mut input = Input(received);
            let Some(length) = input.length()? else { return Ok(None) };
            if length > MAX_MESSAGE {
                return Err(GobError("a message is longer than 4 MiB"));
            }
            let Some(message) = input.0.get(..length) else { return Ok(None) };
            let end_of_message = received.len() - input.0.len() + length;
            let value = self.message(Input(message));
            received.drain(..end_of_message);
            // A type definition has no value, so the next message follows.
            if let Some(value) = value? {
                return Ok(Some(value));
            }
        }
    }

    /// Decodes one message. Returns its value, or `None` if the message defines a type, which is
    /// stored.
    fn message(&mut self, mut input: Input<'_>) -> Result<Option<Value>> {
        let id = input.int()?;
        if id < 0 {
            let defined = definition(&mut input)?;
            if self.types.len() >= MAX_TYPES {
                return Err(GobError("there are too many types"));
            }
            self.types.insert(id.checked_neg().ok_or(GobError("the number of a type is out of range"))?, defined);
            input.expect_end()?;
            return Ok(None);
        }
        // A zero precedes a value that is not a structure.
        if !matches!(self.types.get(&id), Some(Type::Struct(_))) && input.uint()? != 0 {
            return Err(GobError("a value does not begin with zero"));
        }
        let value = self.value(id, &mut input, 0)?;
        input.expect_end()?;
        Ok(Some(value))
    }

    /// Decodes a value of the type `id`. `depth` is the number of values that contain this one.
    fn value(&self, id: i64, input: &mut Input<'_>, depth: u32) -> Result<Value> {
        if depth > MAX_DEPTH {
            return Err(GobError("a value is nested too deeply"));
        }
        Ok(match id {
            BOOL => Value::Bool(input.uint()? != 0),
            INT => Value::Int(input.int()?),
            UINT => Value::Uint(input.uint()?),
            // The bytes are in reverse order, because the last ones are often zero.
            FLOAT => Value::Float(input.uint()?.swap_bytes()),
            BYTES => Value::Bytes(input.bytes()?.to_vec()),
            TEXT => Value::Text(input.text()?),
            _ => match self.types.get(&id).ok_or(GobError("a type is not defined"))? {
                Type::Opaque => Value::Bytes(input.bytes()?.to_vec()),
                Type::List(element) => {
                    let count = input.count()?;
                    Value::List((0..count).map(|_| self.value(*element, input, depth + 1)).collect::<Result<_>>()?)
                }
                Type::Map(key, element) => {
                    let count = input.count()?;
                    let mut pair =
                        || Ok((self.value(*key, input, depth + 1)?, self.value(*element, input, depth + 1)?));
                    Value::Map((0..count).map(|_| pair()).collect::<Result<_>>()?)
                }
                Type::Struct(fields) => {
                    let mut values = Vec::new();
                    input.fields(|input, index| {
                        let (name, id) = fields.get(index).ok_or(GobError("a field is not defined"))?;
                        values.push((name.clone(), self.value(*id, input, depth + 1)?));
                        Ok(())
                    })?;
                    Value::Struct(values)
                }
            },
        })
    }
}

/// Decodes a type definition, which is Go's structure `wireType`. `wireType` has one field for each
/// of seven kinds: array, slice, structure, map, and three that encode their own values. Only the
/// field of the type's kind is set. Its value is a structure as well: field 0 is the name and
/// number of the type, and the other fields depend on the kind.
fn definition(input: &mut Input<'_>) -> Result<Type> {
    let mut defined = None;
    input.fields(|input, kind| {
        defined = Some(type_of_kind(input, kind)?);
        Ok(())
    })?;
    defined.ok_or(GobError("a type has no kind"))
}

/// Decodes the structure that defines a type of this kind.
fn type_of_kind(input: &mut Input<'_>, kind: usize) -> Result<Type> {
    // Of an array or slice, field 1 is the type of the elements; of a map, the fields 1 and 2 are
    // the types of keys and values. An array's field 2 is its length, which is not used.
    let (mut field_1, mut field_2) = (0, 0);
    let mut members = Vec::new();
    input.fields(|input, index| {
        match (kind, index) {
            (_, 0) => skip_name_and_number(input)?,
            (STRUCT, 1) => members = struct_members(input)?,
            (_, 1) => field_1 = input.int()?,
            _ => field_2 = input.int()?,
        }
        Ok(())
    })?;
    match kind {
        ARRAY | SLICE => Ok(Type::List(field_1)),
        STRUCT => Ok(Type::Struct(members)),
        MAP => Ok(Type::Map(field_1, field_2)),
        GOB_ENCODER..=TEXT_MARSHALER => Ok(Type::Opaque),
        _ => Err(GobError("a type has an unknown kind")),
    }
}

/// Skips the structure with the name and the number of a type that is being defined.
fn skip_name_and_number(input: &mut Input<'_>) -> Result<()> {
    input.fields(|input, index| match index {
        0 => input.bytes().map(drop),
        _ => input.int().map(drop),
    })
}

/// Decodes the names of a structure's fields, and the numbers of their types.
fn struct_members(input: &mut Input<'_>) -> Result<Vec<(String, i64)>> {
    let mut members = Vec::new();
    for _ in 0..input.count()? {
        let (mut name, mut id) = (String::new(), 0);
        input.fields(|input, index| {
            match index {
                0 => name = input.text()?,
                _ => id = input.int()?,
            }
            Ok(())
        })?;
        // Each decoded structure has a copy of the name, so a long one would cost memory.
        if name.len() > MAX_NAME {
            return Err(GobError("a field's name is too long"));
        }
        members.push((name, id));
    }
    Ok(members)
}

/// The rest of a message that is not decoded yet.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// Removes and returns the next bytes.
    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(GobError("a message is cut off"))?;
        self.0 = rest;
        Ok(taken)
    }

    /// Decodes the length at the beginning of a message. Returns `None` if not all bytes of the
    /// length have been received.
    fn length(&mut self) -> Result<Option<usize>> {
        let Some(first) = self.0.first() else { return Ok(None) };
        // See `uint`: a number above 127 has up to 8 further bytes.
        let following = if *first > 127 { usize::from(first.wrapping_neg()) } else { 0 };
        if following > 8 {
            return Err(GobError("a number is too long"));
        }
        if self.0.len() <= following {
            return Ok(None);
        }
        self.size().map(Some)
    }

    /// Decodes an unsigned number. A number up to 127 is one byte. A larger one is a byte with the
    /// negated count of the bytes that follow, and these bytes, the most significant first.
    fn uint(&mut self) -> Result<u64> {
        let first = self.take(1)?[0];
        if first < 128 {
            return Ok(first.into());
        }
        let bytes = self.take(usize::from(first.wrapping_neg()))?;
        if bytes.len() > 8 {
            return Err(GobError("a number is too long"));
        }
        Ok(bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// Decodes a signed number. The lowest bit is the sign: if it is set, the other bits are
    /// inverted.
    fn int(&mut self) -> Result<i64> {
        let bits = self.uint()?;
        let half = (bits >> 1).cast_signed();
        Ok(if bits & 1 == 0 { half } else { !half })
    }

    /// Decodes an unsigned number that is a length or an index.
    fn size(&mut self) -> Result<usize> {
        self.uint()?.try_into().map_err(|_| GobError("a number is too large"))
    }

    /// Decodes the number of elements of a list. Each element has at least one byte, so a number of
    /// elements above the number of remaining bytes is an error.
    fn count(&mut self) -> Result<usize> {
        let count = self.size()?;
        if count > self.0.len() { Err(GobError("a list is cut off")) } else { Ok(count) }
    }

    /// Decodes a byte slice: its length, then the bytes.
    fn bytes(&mut self) -> Result<&'a [u8]> {
        let length = self.size()?;
        self.take(length)
    }

    /// Decodes a string, with the replacement character for bytes that are not UTF-8.
    fn text(&mut self) -> Result<String> {
        self.bytes().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    /// Calls `decode_field` with the index of each field of a structure. The distance between the
    /// index of a field and that of the previous one precedes the field; for the first field, the
    /// previous index counts as -1. A zero ends the structure.
    fn fields(&mut self, mut decode_field: impl FnMut(&mut Self, usize) -> Result<()>) -> Result<()> {
        let mut index_plus_one = 0_usize;
        loop {
            match self.size()? {
                0 => return Ok(()),
                distance => {
                    index_plus_one = index_plus_one.checked_add(distance).ok_or(GobError("a field is not defined"))?;
                }
            }
            decode_field(self, index_plus_one - 1)?;
        }
    }

    /// Checks that the whole message has been decoded.
    ///
    /// # Errors
    /// The message has further bytes.
    fn expect_end(&self) -> Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(GobError("a message has bytes after its value")) }
    }
}

#[cfg(test)]
mod tests;
