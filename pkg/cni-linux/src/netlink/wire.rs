//! Encodes and decodes netlink messages and attributes.
//!
//! No input makes a decoder panic; it skips unknown attributes and stops at malformed ones.

use netlink_packet_core::Emitable;

/// A netlink message: the fields of its header, and its payload.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// The type.
    pub kind: u16,
    /// `NLM_F_*`.
    pub flags: u16,
    /// The sequence number; an answer has that of its request.
    pub sequence: u32,
    /// The bytes after the header.
    pub payload: &'a [u8],
}

/// The type of an acknowledgement: an errno, 0 for success, then the request.
pub const NLMSG_ERROR: u16 = 2;
/// The type of the message that ends a dump.
pub(crate) const NLMSG_DONE: u16 = 3;

/// The length of a message's header.
pub(crate) const HEADER: usize = 16;
/// The length of the errno at the beginning of an acknowledgement.
const ERRNO: usize = 4;
/// The length of an attribute's header: length and type.
const ATTRIBUTE_HEADER: usize = 4;
/// The flag of an attribute whose value consists of attributes.
const NLA_F_NESTED: u16 = 1 << 15;

impl Message<'_> {
    /// Appends the encoded message to `bytes`: the header (`struct nlmsghdr`), the payload, and
    /// padding to a multiple of 4 bytes. The header's length field does not count the padding.
    pub fn write(&self, bytes: &mut Vec<u8>) {
        let begin = bytes.len();
        bytes.extend(u32::try_from(HEADER + self.payload.len()).unwrap_or(u32::MAX).to_ne_bytes());
        bytes.extend(self.kind.to_ne_bytes());
        bytes.extend(self.flags.to_ne_bytes());
        bytes.extend(self.sequence.to_ne_bytes());
        // The sender's port ID, which the kernel fills in.
        bytes.extend([0; 4]);
        bytes.extend(self.payload);
        bytes.resize(begin + align(bytes.len() - begin), 0);
    }
}

/// Returns the encoded form of a message body of the packet crates.
pub fn emitted(object: &(impl Emitable + ?Sized)) -> Vec<u8> {
    let mut bytes = vec![0; object.buffer_len()];
    object.emit(&mut bytes);
    bytes
}

/// Returns an encoded attribute, padded to a multiple of 4 bytes.
pub fn new_attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = u16::try_from(ATTRIBUTE_HEADER + value.len()).unwrap_or(u16::MAX);
    let mut bytes = [&len.to_ne_bytes(), &kind.to_ne_bytes(), value].concat();
    bytes.resize(align(bytes.len()), 0);
    bytes
}

/// Returns an encoded attribute whose value is a list of encoded attributes.
pub fn new_nest(kind: u16, attributes: &[u8]) -> Vec<u8> {
    new_attribute(kind | NLA_F_NESTED, attributes)
}

/// Rounds a length up to a multiple of 4, to which attributes and messages are padded.
fn align(len: usize) -> usize {
    len.saturating_add(3) & !3
}

/// Returns the native-endian 16-bit number at an offset; `None` if fewer than 2 bytes are there.
fn u16_ne(bytes: &[u8], offset: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(offset..offset + 2)?.try_into().ok()?))
}

/// Returns the native-endian 32-bit number at an offset; `None` if fewer than 4 bytes are there.
pub(crate) fn u32_ne(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(offset..offset + 4)?.try_into().ok()?))
}

/// Decodes a number in network byte order; `None` if there are not exactly 4 bytes.
fn u32_be(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

/// Decodes a number in network byte order; `None` if there are not exactly 8 bytes.
pub fn u64_be(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.try_into().ok()?))
}

/// Decodes a text, which ends at the first zero byte, or else at the end of the bytes.
pub fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Returns the messages of one datagram, up to the first malformed one.
pub fn messages(mut datagram: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        // `struct nlmsghdr`: length, type, flags, sequence number, port ID.
        let len = usize::try_from(u32_ne(datagram, 0)?).ok()?;
        let message = Message {
            kind: u16_ne(datagram, 4)?,
            flags: u16_ne(datagram, 6)?,
            sequence: u32_ne(datagram, 8)?,
            payload: datagram.get(HEADER..len)?,
        };
        datagram = datagram.get(align(len)..).unwrap_or_default();
        Some(message)
    })
}

/// Returns the types and values of encoded attributes, up to the first malformed one.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    /// All bits of the type field except the two flags.
    const TYPE_MASK: u16 = 0x3fff;
    std::iter::from_fn(move || {
        let len = usize::from(u16_ne(bytes, 0)?);
        let kind = u16_ne(bytes, 2)? & TYPE_MASK;
        let value = bytes.get(ATTRIBUTE_HEADER..len)?;
        bytes = bytes.get(align(len)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// Returns the value of the first attribute of this type; `None` if there is none.
pub fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(other, _)| *other == kind).map(|(_, value)| value)
}

/// Decodes the first attribute of this type, a number in network byte order; `None` if there is no
/// such attribute, or its value does not have exactly 4 bytes.
pub fn number(bytes: &[u8], kind: u16) -> Option<u32> {
    attribute(bytes, kind).and_then(u32_be)
}

/// Decodes an acknowledgement or the end of a dump: returns the errno, 0 for success, and the
/// kernel's explanation, if there is one. `None` if the message is malformed, for example without
/// an errno.
pub fn outcome(message: &Message<'_>) -> Option<(i32, Option<String>)> {
    /// The acknowledgement contains only the header of the request.
    const NLM_F_CAPPED: u16 = 0x100;
    /// The message ends with attributes.
    const NLM_F_ACK_TLVS: u16 = 0x200;
    /// The attribute that has the explanation.
    const NLMSGERR_ATTR_MSG: u16 = 1;
    let negative_errno = i32::from_ne_bytes(*message.payload.first_chunk()?);
    let mut explanation = None;
    if message.flags & NLM_F_ACK_TLVS != 0 {
        // The length of the request, which is between the errno and the attributes.
        let request_len = if message.kind == NLMSG_DONE {
            // The end of a dump does not contain the request.
            0
        } else if message.flags & NLM_F_CAPPED != 0 {
            HEADER
        } else {
            // The whole request. The first field of its header is its length.
            usize::try_from(u32_ne(message.payload, ERRNO)?).ok()?
        };
        let attributes = message.payload.get(align(request_len).saturating_add(ERRNO)..).unwrap_or_default();
        explanation = attribute(attributes, NLMSGERR_ATTR_MSG).map(text);
    }
    Some((negative_errno.saturating_neg().max(0), explanation))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an attribute with `len` in its length field, whatever the length of `value`.
    fn attribute(len: u16, kind: u16, value: &[u8]) -> Vec<u8> {
        [&len.to_ne_bytes(), &kind.to_ne_bytes(), value].concat()
    }

    /// Returns the outcome of an acknowledgement that has, of the request, only the header.
    fn refused(code: i32, attributes: &[u8]) -> Option<(i32, Option<String>)> {
        let payload = [&code.to_ne_bytes(), &[0; HEADER][..], attributes].concat();
        outcome(&Message { kind: NLMSG_ERROR, flags: 0x300, sequence: 0, payload: &payload })
    }

    #[test]
    fn the_kernels_explanation_is_read_from_attributes() {
        // NLMSGERR_ATTR_OFFS (2), four bytes; then NLMSGERR_ATTR_MSG (1), padded.
        let bytes = [attribute(8, 2, &[9, 0, 0, 0]), attribute(9, 1, b"nope\0\0\0\0")].concat();
        let explanation = |bytes: &[u8]| refused(-17, bytes).unwrap().1;
        assert_eq!(explanation(&bytes).as_deref(), Some("nope"));
        assert_eq!(explanation(&bytes[..8]), None);
        assert_eq!(explanation(&[]), None);
        assert_eq!(explanation(&[255, 255, 1]), None);
    }

    #[test]
    fn an_acknowledgement_is_not_a_refusal() {
        assert_eq!(refused(0, &[]), Some((0, None)));
        assert_eq!(refused(-17, &attribute(8, 1, b"why\0")), Some((17, Some("why".to_owned()))));
        // An errno that libc has no name for (ENOTSUPP) stays what it is.
        assert_eq!(refused(-524, &[]), Some((524, None)));
    }

    #[test]
    fn what_is_written_is_read_back() {
        let value = new_nest(7, &[new_attribute(1, b"abc"), new_attribute(2, &[])].concat());
        let mut bytes = Vec::new();
        for sequence in [3, 4] {
            Message { kind: 16, flags: 5, sequence, payload: &value }.write(&mut bytes);
            Message { kind: 17, flags: 0, sequence, payload: b"x" }.write(&mut bytes);
        }
        let read: Vec<_> = messages(&bytes).map(|message| (message.kind, message.flags, message.sequence)).collect();
        assert_eq!(read, [(16, 5, 3), (17, 0, 3), (16, 5, 4), (17, 0, 4)]);
        let inner = super::attribute(messages(&bytes).next().unwrap().payload, 7).unwrap();
        assert_eq!(attributes(inner).collect::<Vec<_>>(), [(1, &b"abc"[..]), (2, &[])]);
    }

    #[test]
    fn no_length_in_a_datagram_reads_beyond_its_end() {
        let message = |length: u32, size: usize| {
            let mut bytes = length.to_ne_bytes().to_vec();
            bytes.resize(size, 7);
            bytes
        };
        let lengths = |bytes: &[u8]| messages(bytes).map(|message| HEADER + message.payload.len()).collect::<Vec<_>>();
        assert_eq!(lengths(&[message(18, 20), message(16, 16)].concat()), [18, 16]);
        // The last one's padding may be missing.
        assert_eq!(lengths(&[message(16, 16), message(18, 18)].concat()), [16, 18]);
        for (length, size) in [(0, 16), (15, 16), (17, 16), (u32::MAX, 16), (16, 3)] {
            let bytes = message(length, size.max(4));
            assert_eq!(lengths(&bytes[..size]), [0; 0], "{length} {size}");
        }
    }
}
