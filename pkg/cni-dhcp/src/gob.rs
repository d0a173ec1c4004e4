//! Go's encoding `gob`: any value is read by the type definitions that precede it, and structures
//! are written.
//!
//! A stream is a sequence of messages, each preceded by its length. A message with a negative type
//! number defines a type. Fields are matched by name, and a field that is zero is absent, so both
//! sides may be of different releases.

use std::collections::HashMap;

/// The largest message that is read.
pub const MAX_MESSAGE: usize = 4 << 20;
/// The longest name of a field. Go's calls have names of at most 14 bytes.
const MAX_NAME: usize = 64;
/// How deep structures may be nested.
const MAX_DEPTH: u32 = 32;
/// How many types a stream may define.
const MAX_TYPES: usize = 256;

/// Why a stream cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid gob: {0}")]
pub struct GobError(&'static str);

type Result<T> = std::result::Result<T, GobError>;

/// A value.
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
    /// Returns a structure's field.
    pub fn get(&self, name: &str) -> Option<&Value> {
        match self {
            Value::Struct(fields) => fields.iter().find(|(field, _)| field == name).map(|(_, value)| value),
            _ => None,
        }
    }

    /// Returns a structure's text; empty if the field is absent or of another type.
    pub fn text(&self, name: &str) -> &str {
        match self.get(name) {
            Some(Value::Text(text)) => text,
            _ => "",
        }
    }

    /// Returns a structure's bytes; empty if the field is absent or of another type.
    pub fn bytes(&self, name: &str) -> &[u8] {
        match self.get(name) {
            Some(Value::Bytes(bytes)) => bytes,
            _ => &[],
        }
    }

    /// Returns a structure's signed number.
    pub fn int(&self, name: &str) -> Option<i64> {
        match self.get(name) {
            Some(Value::Int(number)) => Some(*number),
            _ => None,
        }
    }

    /// Returns a structure's list; empty if the field is absent or of another type.
    pub fn list(&self, name: &str) -> &[Value] {
        match self.get(name) {
            Some(Value::List(list)) => list,
            _ => &[],
        }
    }
}

#[derive(Clone, Debug)]
enum Type {
    Struct(Vec<(String, i64)>),
    List(i64),
    Map(i64, i64),
    /// The bytes that a type's own method encodes.
    Opaque,
}

/// The reader of one stream.
#[derive(Debug, Default)]
pub struct Reader {
    types: HashMap<i64, Type>,
}

impl Reader {
    /// Takes the next value out of what has been received. `None` if more must be received first.
    ///
    /// # Errors
    /// [`GobError`]; nothing of the stream can be read after one.
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
        // A value that is not a structure follows a zero.
        if !matches!(self.types.get(&id), Some(Type::Struct(_))) && input.uint()? != 0 {
            return Err(GobError("a value does not begin with zero"));
        }
        let value = self.value(id, &mut input, 0)?;
        input.end().map(|()| Some(value))
    }

    fn value(&self, id: i64, input: &mut Input<'_>, depth: u32) -> Result<Value> {
        if depth > MAX_DEPTH {
            return Err(GobError("a value is nested too deeply"));
        }
        Ok(match id {
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

/// Reads a type: which of seven shapes, then the shape's own fields. The first of them is always
/// the name and number.
fn definition(input: &mut Input<'_>) -> Result<Type> {
    let mut kind = None;
    input.fields(|input, shape| {
        let (mut members, mut first, mut second) = (Vec::new(), 0, 0);
        input.fields(|input, index| {
            match (shape, index) {
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
                        // Each value has a copy of it.
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
        kind = Some(match shape {
            0 | 1 => Type::List(first),
            2 => Type::Struct(std::mem::take(&mut members)),
            3 => Type::Map(first, second),
            4..=6 => Type::Opaque,
            _ => return Err(GobError("a type has an unknown shape")),
        });
        Ok(())
    })?;
    kind.ok_or(GobError("a type has no shape"))
}

/// The unread rest of a message.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(GobError("a message is cut off"))?;
        self.0 = rest;
        Ok(taken)
    }

    /// A message's length. `None` if not all of it has been received.
    fn length(&mut self) -> Result<Option<usize>> {
        match self.0.first() {
            None => Ok(None),
            // One byte, or the number of bytes that follow, negated.
            Some(first) if *first > 127 && self.0.len() <= usize::from(first.wrapping_neg()) => match *first {
                248.. => Ok(None),
                _ => Err(GobError("a number is too long")),
            },
            Some(_) => self.size().map(Some),
        }
    }

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

    fn int(&mut self) -> Result<i64> {
        let bits = self.uint()?;
        let half = (bits >> 1).cast_signed();
        Ok(if bits & 1 == 0 { half } else { !half })
    }

    fn size(&mut self) -> Result<usize> {
        self.uint()?.try_into().map_err(|_| GobError("a number is too large"))
    }

    /// A number of elements. Each of them needs at least a byte.
    fn count(&mut self) -> Result<usize> {
        self.size().and_then(|count| if count > self.0.len() { Err(GobError("a list is cut off")) } else { Ok(count) })
    }

    fn bytes(&mut self) -> Result<&'a [u8]> {
        let length = self.size()?;
        self.take(length)
    }

    fn text(&mut self) -> Result<String> {
        self.bytes().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    /// The fields of a structure: each has its distance from the one before.
    fn fields(&mut self, mut each: impl FnMut(&mut Self, usize) -> Result<()>) -> Result<()> {
        let mut next = 0_usize;
        loop {
            match self.size()? {
                0 => return Ok(()),
                distance => next = next.checked_add(distance).ok_or(GobError("a field is not defined"))?,
            }
            each(self, next - 1)?;
        }
    }

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

/// A type to be written.
#[derive(Clone, Copy, Debug)]
pub enum Definition<'a> {
    /// The fields with their types.
    Struct(&'a [(&'a str, i64)]),
    /// The type of the elements.
    List(i64),
}

/// Appends a type's definition. Go's types without a name of their own have an empty one.
pub fn write_definition(out: &mut Vec<u8>, id: i64, name: &str, definition: Definition<'_>) {
    let mut common = Fields::default();
    common.text(name);
    common.int(id);
    let mut shape = Fields::default();
    shape.nested(common);
    match definition {
        Definition::Struct([]) => {}
        Definition::Struct(fields) => shape.list(fields, |(name, id)| {
            let mut field = Fields::default();
            field.text(name);
            field.int(*id);
            field.end()
        }),
        Definition::List(element) => shape.int(element),
    }
    let gap = if matches!(definition, Definition::List(_)) { 2 } else { 3 };
    let mut kind = Fields { gap, ..Fields::default() };
    kind.put(&shape.end());
    write_message(out, -id, &kind.end());
}

/// Appends a structure's value.
pub fn write_struct(out: &mut Vec<u8>, id: i64, fields: Fields) {
    write_message(out, id, &fields.end());
}

fn write_message(out: &mut Vec<u8>, id: i64, body: &[u8]) {
    let mut head = Vec::new();
    write_int(&mut head, id);
    write_uint(out, (head.len() + body.len()) as u64);
    out.extend(head);
    out.extend(body);
}

/// A structure's fields, one after the other. A zero is left out.
#[derive(Clone, Debug)]
pub struct Fields {
    bytes: Vec<u8>,
    gap: u64,
}

impl Default for Fields {
    fn default() -> Fields {
        Fields { bytes: Vec::new(), gap: 1 }
    }
}

impl Fields {
    fn put(&mut self, value: &[u8]) {
        write_uint(&mut self.bytes, self.gap);
        self.bytes.extend(value);
        self.gap = 1;
    }

    /// Appends a field that is zero.
    pub fn skip(&mut self) {
        self.gap += 1;
    }

    /// Appends a text.
    pub fn text(&mut self, text: &str) {
        self.data(text.as_bytes());
    }

    /// Appends bytes.
    pub fn data(&mut self, data: &[u8]) {
        if data.is_empty() { self.skip() } else { self.put(&sized(data)) }
    }

    /// Appends a signed number.
    pub fn int(&mut self, number: i64) {
        let mut bytes = Vec::new();
        write_int(&mut bytes, number);
        if number == 0 { self.skip() } else { self.put(&bytes) }
    }

    /// Appends an unsigned number.
    pub fn uint(&mut self, number: u64) {
        let mut bytes = Vec::new();
        write_uint(&mut bytes, number);
        if number == 0 { self.skip() } else { self.put(&bytes) }
    }

    /// Appends a structure, which is never left out.
    pub fn nested(&mut self, fields: Fields) {
        self.put(&fields.end());
    }

    /// Appends a list.
    pub fn list<T>(&mut self, items: &[T], mut each: impl FnMut(&T) -> Vec<u8>) {
        if items.is_empty() {
            return self.skip();
        }
        let mut bytes = Vec::new();
        write_uint(&mut bytes, items.len() as u64);
        items.iter().for_each(|item| bytes.extend(each(item)));
        self.put(&bytes);
    }

    /// Returns the whole structure.
    pub fn end(mut self) -> Vec<u8> {
        self.bytes.push(0);
        self.bytes
    }
}

/// Returns bytes or a text as an element of a list.
pub fn sized(data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_uint(&mut bytes, data.len() as u64);
    bytes.extend(data);
    bytes
}

fn write_uint(out: &mut Vec<u8>, number: u64) {
    if number < 128 {
        return out.push(number as u8);
    }
    let bytes = number.to_be_bytes();
    let zeros = (number.leading_zeros() / 8) as usize;
    out.push(((8 - zeros) as u8).wrapping_neg());
    out.extend(&bytes[zeros..]);
}

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
