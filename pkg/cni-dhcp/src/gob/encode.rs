//! Encodes structures, and the definitions of their types.

use super::{SLICE, STRUCT};

/// The definition of a type that is encoded.
#[derive(Clone, Copy, Debug)]
pub enum Definition<'a> {
    /// A structure: the name of each field, and the number of its type.
    Struct(&'a [(&'a str, i64)]),
    /// A slice: the number of the type of its elements.
    List(i64),
}

/// Appends the definition of the type `id`: Go's structure `wireType`, which the function
/// `definition` of the parent module explains. `name` is empty for a type that has no name in Go.
pub fn write_definition(out: &mut Vec<u8>, id: i64, name: &str, definition: Definition<'_>) {
    let mut common = Fields::default();
    common.text(name);
    common.int(id);
    let mut details = Fields::default();
    details.nested(common);
    let kind = match definition {
        Definition::Struct(fields) => {
            details.list(fields, |(name, id)| {
                let mut field = Fields::default();
                field.text(name);
                field.int(*id);
                field.end()
            });
            STRUCT
        }
        Definition::List(element) => {
            details.int(element);
            SLICE
        }
    };
    let mut wire_type = Fields::default();
    // The index of the field that is set is the kind.
    (0..kind).for_each(|_| wire_type.skip());
    wire_type.nested(details);
    // The negative number distinguishes a definition from a value.
    write_message(out, -id, &wire_type.end());
}

/// Appends a structure of the type with this number.
pub fn write_struct(out: &mut Vec<u8>, id: i64, fields: Fields) {
    write_message(out, id, &fields.end());
}

/// Appends a message: its length, the type number (negative for a definition), and the encoded
/// definition or value.
fn write_message(out: &mut Vec<u8>, id: i64, body: &[u8]) {
    let mut head = Vec::new();
    write_int(&mut head, id);
    write_uint(out, (head.len() + body.len()) as u64);
    out.extend(head);
    out.extend(body);
}

/// Encodes the fields of a structure, which must be added in their order. As in Go, a field with
/// the value zero is left out.
#[derive(Clone, Debug)]
pub struct Fields {
    bytes: Vec<u8>,
    /// The number that is encoded before the next field: the distance of the field's index from
    /// that of the last field that was not left out, or from -1 if there is none.
    distance: u64,
}

impl Default for Fields {
    fn default() -> Fields {
        Fields { bytes: Vec::new(), distance: 1 }
    }
}

impl Fields {
    /// Appends an encoded value as the next field.
    fn put(&mut self, value: &[u8]) {
        write_uint(&mut self.bytes, self.distance);
        self.bytes.extend(value);
        self.distance = 1;
    }

    /// Leaves out the next field, because its value is zero.
    pub fn skip(&mut self) {
        self.distance += 1;
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

/// Encodes bytes or a text: the length, then the bytes.
pub fn sized(data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_uint(&mut bytes, data.len() as u64);
    bytes.extend(data);
    bytes
}

/// Appends an unsigned number. [`Input::uint`](super::Input::uint) describes the encoding.
pub(super) fn write_uint(out: &mut Vec<u8>, number: u64) {
    if number < 128 {
        return out.push(number as u8);
    }
    let leading_zero_bytes = (number.leading_zeros() / 8) as usize;
    let significant = &number.to_be_bytes()[leading_zero_bytes..];
    out.push((significant.len() as u8).wrapping_neg());
    out.extend(significant);
}

/// Appends a signed number. [`Input::int`](super::Input::int) describes the encoding.
pub(super) fn write_int(out: &mut Vec<u8>, number: i64) {
    // The shift by 63 gives 0, or all bits set for a negative number.
    write_uint(out, ((number << 1) ^ (number >> 63)).cast_unsigned());
}
