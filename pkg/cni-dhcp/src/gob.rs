//! Decodes any value of Go's encoding `gob`, and encodes structures.
//!
//! A stream is a sequence of messages. Each begins with its length and a type number. A message
//! with a negative number defines a type; a message with a positive number has a value of a type
//! that was defined before it. A structure's fields are matched by name, and a field with the value
//! zero is absent, so both ends may be different releases. <https://pkg.go.dev/encoding/gob> has
//! the format.

use std::collections::HashMap;

/// The length in bytes of the largest message that is decoded.
pub const MAX_MESSAGE: usize = 4 << 20;
/// The longest name of a field. Go's calls have names of at most 14 bytes.
const MAX_NAME: usize = 64;
/// The number of levels to which values may be nested.
const MAX_DEPTH: u32 = 32;
/// The number of types that a stream may define.
const MAX_TYPES: usize = 256;

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

/// A type that a stream has defined. The numbers are those of other types.
#[derive(Clone, Debug)]
enum Type {
    /// A structure: the name and type of each field.
    Struct(Vec<(String, i64)>),
    /// A slice or array: the type of its elements.
    List(i64),
    /// A map: the types of its keys and values.
    Map(i64, i64),
    /// A type with an encoding of its own (`GobEncoder` and others). It is decoded as bytes.
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
                return Err(GobError("the message is too long"));
            }
            let Some(message) = input.0.get(..length) else { return Ok(None) };
            let used = received.len() - input.0.len() + length;
            let value = self.message(Input(message));
            received.drain(..used);
            if let Some(value) = value? {
                return Ok(Some(value));
            }
        }
    }

    /// Decodes one message: returns its value, or stores the type that it defines and returns
    /// `None`.
    fn message(&mut self, mut input: Input<'_>) -> Result<Option<Value>> {
        let id = input.int()?;
        if id < 0 {
            let kind = definition(&mut input)?;
            if self.types.len() >= MAX_TYPES {
                return Err(GobError("there are too many types"));
            }
            self.types.insert(id.checked_neg().ok_or(GobError("a type has no number"))?, kind);
            return input.end().map(|()| None);
        }
        // A zero precedes a value that is not a structure.
        if !matches!(self.types.get(&id), Some(Type::Struct(_))) && input.uint()? != 0 {
            return Err(GobError("a value does not begin with zero"));
        }
        let value = self.value(id, &mut input, 0)?;
        input.end().map(|()| Some(value))
    }

    /// Decodes a value of the type `id`. `depth` is the number of values around it.
    fn value(&self, id: i64, input: &mut Input<'_>, depth: u32) -> Result<Value> {
        if depth > MAX_DEPTH {
            return Err(GobError("a value is nested too deeply"));
        }
        Ok(match id {
            // Go's own types, which no stream defines.
            1 => Value::Bool(input.uint()? != 0),
            2 => Value::Int(input.int()?),
            3 => Value::Uint(input.uint()?),
            4 => Value::Float(input.uint()?.swap_bytes()),
            5 => Value::Bytes(input.bytes()?.to_vec()),
            6 => Value::Text(input.text()?),
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

/// Decodes a type definition, which is Go's structure `wireType`. It has one field for each of
/// seven kinds (array, slice, structure, map, and three with an encoding of their own), of which
/// one is set. The first field of that one is the name and number of the type, which are skipped.
fn definition(input: &mut Input<'_>) -> Result<Type> {
    let mut defined = None;
    input.fields(|input, kind| {
        let (mut members, mut first, mut second) = (Vec::new(), 0, 0);
        input.fields(|input, index| {
            match (kind, index) {
                (_, 0) => input
                    .fields(|input, index| if index == 0 { input.bytes().map(drop) } else { input.int().map(drop) })?,
                (2, 1) => {
                    for _ in 0..input.count()? {
                        let (mut name, mut id) = (String::new(), 0);
                        input.fields(|input, index| {
                            match index {
                                0 => name = input.text()?,
                                _ => id = input.int()?,
                            }
                            Ok(())
                        })?;
                        // Each decoded structure has a copy of the name, so a long one would cost
                        // memory.
                        if name.len() > MAX_NAME {
                            return Err(GobError("a field's name is too long"));
                        }
                        members.push((name, id));
                    }
                }
                (_, 1) => first = input.int()?,
                _ => second = input.int()?,
            }
            Ok(())
        })?;
        defined = Some(match kind {
            0 | 1 => Type::List(first),
            2 => Type::Struct(std::mem::take(&mut members)),
            3 => Type::Map(first, second),
            4..=6 => Type::Opaque,
            _ => return Err(GobError("a type has an unknown kind")),
        });
        Ok(())
    })?;
    defined.ok_or(GobError("a type has no kind"))
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

    /// Decodes the length that begins a message. Returns `None` if its bytes have not all been
    /// received yet.
    fn length(&mut self) -> Result<Option<usize>> {
        let Some(first) = self.0.first() else { return Ok(None) };
        // A number above 127 begins with the negated number of the bytes that follow, at most 8.
        let following = if *first > 127 { usize::from(first.wrapping_neg()) } else { 0 };
        if following > 8 {
            return Err(GobError("a number is too long"));
        }
        if self.0.len() <= following {
            return Ok(None);
        }
        self.size().map(Some)
    }

    /// Decodes an unsigned number: one byte up to 127, otherwise the negated number of bytes, and
    /// these bytes with the highest first.
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

    /// Decodes a signed number: its lowest bit is set if it is negative and the others are
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

    /// Decodes the number of elements of a list. Each element has at least one byte, so a number
    /// above the length of the rest is an error.
    fn count(&mut self) -> Result<usize> {
        let count = self.size()?;
        if count > self.0.len() { Err(GobError("a list is cut off")) } else { Ok(count) }
    }

    /// Decodes a byte slice: its length, and the bytes.
    fn bytes(&mut self) -> Result<&'a [u8]> {
        let length = self.size()?;
        self.take(length)
    }

    /// Decodes a string, with the replacement character for bytes that are not UTF-8.
    fn text(&mut self) -> Result<String> {
        self.bytes().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    /// Calls `decode_field` with the index of each field of a structure. Before each field is the
    /// distance of its index from that of the field before, and after the last one is a zero.
    fn fields(&mut self, mut decode_field: impl FnMut(&mut Self, usize) -> Result<()>) -> Result<()> {
        let mut next = 0_usize;
        loop {
            match self.size()? {
                0 => return Ok(()),
                distance => next = next.checked_add(distance).ok_or(GobError("a field is not defined"))?,
            }
            decode_field(self, next - 1)?;
        }
    }

    /// Fails if the message has further bytes.
    fn end(&self) -> Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(GobError("a message is too long")) }
    }
}

/// The number of Go's type `int`.
pub const INT: i64 = 2;
/// The number of Go's type `uint`.
pub const UINT: i64 = 3;
/// The number of Go's type `[]byte`.
pub const BYTES: i64 = 5;
/// The number of Go's type `string`.
pub const TEXT: i64 = 6;

/// The definition of a type that is encoded.
#[derive(Clone, Copy, Debug)]
pub enum Definition<'a> {
    /// A structure: the name of each field, and the number of its type.
    Struct(&'a [(&'a str, i64)]),
    /// A slice: the number of the type of its elements.
    List(i64),
}

/// Appends the definition of a type with this number. Types that have no name in Go have an empty
/// one.
pub fn write_definition(out: &mut Vec<u8>, id: i64, name: &str, definition: Definition<'_>) {
    let mut common = Fields::default();
    common.text(name);
    common.int(id);
    let mut kind = Fields::default();
    kind.nested(common);
    match definition {
        Definition::Struct([]) => {}
        Definition::Struct(fields) => kind.list(fields, |(name, id)| {
            let mut field = Fields::default();
            field.text(name);
            field.int(*id);
            field.end()
        }),
        Definition::List(element) => kind.int(element),
    }
    // The index of the kind's field in `wireType` (see `definition`), plus one.
    let gap = if matches!(definition, Definition::List(_)) { 2 } else { 3 };
    let mut wire_type = Fields { gap, ..Fields::default() };
    wire_type.put(&kind.end());
    write_message(out, -id, &wire_type.end());
}

/// Appends a structure of the type with this number.
pub fn write_struct(out: &mut Vec<u8>, id: i64, fields: Fields) {
    write_message(out, id, &fields.end());
}

/// Appends a message: its length, the type number, and the encoded definition or value.
fn write_message(out: &mut Vec<u8>, id: i64, body: &[u8]) {
    let mut head = Vec::new();
    write_int(&mut head, id);
    write_uint(out, (head.len() + body.len()) as u64);
    out.extend(head);
    out.extend(body);
}

/// Encodes the fields of a structure, which must be added in their order. A field with the value
/// zero is left out, as Go does.
#[derive(Clone, Debug)]
pub struct Fields {
    bytes: Vec<u8>,
    /// The distance of the next field's index from that of the last field that was not left out.
    gap: u64,
}

impl Default for Fields {
    fn default() -> Fields {
        Fields { bytes: Vec::new(), gap: 1 }
    }
}

impl Fields {
    /// Appends an encoded value as the next field.
    fn put(&mut self, value: &[u8]) {
        write_uint(&mut self.bytes, self.gap);
        self.bytes.extend(value);
        self.gap = 1;
    }

    /// Leaves out the next field, because its value is zero.
    pub fn skip(&mut self) {
        self.gap += 1;
    }

    /// Appends a text as the next field.
    pub fn text(&mut self, text: &str) {
        self.data(text.as_bytes());
    }

    /// Appends bytes as the next field.
    pub fn data(&mut self, data: &[u8]) {
        if data.is_empty() { self.skip() } else { self.put(&sized(data)) }
    }

    /// Appends a signed number as the next field.
    pub fn int(&mut self, number: i64) {
        let mut bytes = Vec::new();
        write_int(&mut bytes, number);
        if number == 0 { self.skip() } else { self.put(&bytes) }
    }

    /// Appends an unsigned number as the next field.
    pub fn uint(&mut self, number: u64) {
        let mut bytes = Vec::new();
        write_uint(&mut bytes, number);
        if number == 0 { self.skip() } else { self.put(&bytes) }
    }

    /// Appends a structure as the next field. Go never leaves out a structure.
    pub fn nested(&mut self, fields: Fields) {
        self.put(&fields.end());
    }

    /// Appends a list as the next field. `encode` returns an element's bytes.
    pub fn list<T>(&mut self, items: &[T], mut encode: impl FnMut(&T) -> Vec<u8>) {
        if items.is_empty() {
            return self.skip();
        }
        let mut bytes = Vec::new();
        write_uint(&mut bytes, items.len() as u64);
        items.iter().for_each(|item| bytes.extend(encode(item)));
        self.put(&bytes);
    }

    /// Ends the structure and returns its bytes.
    pub fn end(mut self) -> Vec<u8> {
        self.bytes.push(0);
        self.bytes
    }
}

/// Encodes bytes or a text as an element of a list.
pub fn sized(data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_uint(&mut bytes, data.len() as u64);
    bytes.extend(data);
    bytes
}

/// Appends an unsigned number. [`Input::uint`] describes the encoding.
fn write_uint(out: &mut Vec<u8>, number: u64) {
    if number < 128 {
        return out.push(number as u8);
    }
    let bytes = number.to_be_bytes();
    let zeros = (number.leading_zeros() / 8) as usize;
    out.push(((8 - zeros) as u8).wrapping_neg());
    out.extend(&bytes[zeros..]);
}

/// Appends a signed number. [`Input::int`] describes the encoding.
fn write_int(out: &mut Vec<u8>, number: i64) {
    write_uint(out, ((number << 1) ^ (number >> 63)).cast_unsigned());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_are_read_as_they_were_written(number: i64, size: u64) {
            let mut bytes = Vec::new();
            write_int(&mut bytes, number);
            write_uint(&mut bytes, size);
            let mut input = Input(&bytes);
            prop_assert_eq!((input.int().unwrap(), input.uint().unwrap()), (number, size));
            prop_assert!(input.0.is_empty());
        }

        #[test]
        fn any_bytes_are_read_or_refused(mut bytes: Vec<u8>) {
            let mut reader = Reader::default();
            let before = bytes.len();
            let _ = reader.take(&mut bytes);
            prop_assert!(bytes.len() <= before);
        }

        #[test]
        fn a_damaged_call_is_read_or_refused(at in 40..400_usize, byte: u8) {
            let mut bytes = include_bytes!("../testdata/allocate-daemon")[34..].to_vec();
            let at = at % bytes.len();
            bytes[at] = byte;
            let mut reader = Reader::default();
            while let Ok(Some(_)) = reader.take(&mut bytes) {}
        }
    }

    #[test]
    fn hostile_numbers_and_types_are_refused() {
        let read = |bytes: &[u8]| Reader::default().take(&mut bytes.to_vec());
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[0xfe, 1]), Ok(None), "half of a length");
        assert!(read(&[0x80; 300]).is_err(), "a length of 128 bytes");
        assert!(read(&[0xf8, 255, 255, 255, 255, 255, 255, 255, 255]).is_err(), "a length of all there is");
        // A list of itself, without end.
        let mut bytes = Vec::new();
        write_definition(&mut bytes, 65, "x", Definition::List(65));
        bytes.extend([70, 0xff, 130, 0]);
        bytes.extend([1; 67]);
        assert!(Reader::default().take(&mut bytes).is_err());
    }
}
