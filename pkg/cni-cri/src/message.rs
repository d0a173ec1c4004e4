//! The messages of `ListPodSandbox`, in the wire format of protocol buffers.
//!
//! An answer (`ListPodSandboxResponse`) has a field 1 for each pod, a message with the pod's ID in
//! field 1. All other fields are skipped.

use cni::{Code, Error};

/// The request, in gRPC's frame: not compressed, 0 bytes long. It has no filter, so it asks for
/// pods in every state.
pub(crate) const EMPTY: [u8; 5] = [0; 5];

/// Returns the message in the body of an answer.
///
/// # Errors
/// Code 6 if there is not exactly one message, or it is compressed.
pub(crate) fn unframe(body: &[u8]) -> Result<&[u8], Error> {
    let message = match body {
        [0, a, b, c, d, message @ ..] if u32::from_be_bytes([*a, *b, *c, *d]) as usize == message.len() => {
            Some(message)
        }
        _ => None,
    };
    message.ok_or_else(|| Error::new(Code::DECODE, "the answer is not one whole message"))
}

/// Returns the pods' IDs in an answer.
///
/// # Errors
/// Code 6 if the answer is malformed, or a pod has no ID.
pub(crate) fn parse_pods(mut message: &[u8]) -> Result<Vec<String>, Error> {
    let malformed = || Error::new(Code::DECODE, "the list of pods is malformed");
    let mut ids = Vec::new();
    while !message.is_empty() {
        let (1, pod) = take_field(&mut message).ok_or_else(malformed)? else { continue };
        let (mut pod, mut id) = (pod.ok_or_else(malformed)?, None);
        while !pod.is_empty() {
            let (number, content) = take_field(&mut pod).ok_or_else(malformed)?;
            if number == 1 {
                // Of a field that is repeated in spite of its definition, the last one counts.
                id = content;
            }
        }
        let id = id.and_then(|id| str::from_utf8(id).ok()).filter(|id| !id.is_empty());
        ids.push(id.ok_or_else(|| Error::new(Code::DECODE, "a pod in the list has no ID"))?.to_owned());
    }
    Ok(ids)
}

/// A field's number, and its content if that has a length.
type Field<'a> = (u64, Option<&'a [u8]>);

/// Takes a field from the beginning of a message; `None` if the message is malformed.
fn take_field<'a>(message: &mut &'a [u8]) -> Option<Field<'a>> {
    let key = take_varint(message)?;
    let content = match key & 7 {
        0 => take_varint(message).map(|_| None)?,
        1 => message.split_off(..8).map(|_| None)?,
        2 => {
            let length = usize::try_from(take_varint(message)?).ok()?;
            Some(message.split_off(..length)?)
        }
        5 => message.split_off(..4).map(|_| None)?,
        _ => return None,
    };
    let number = key >> 3;
    (number != 0).then_some((number, content))
}

/// Takes a number from the beginning of a message: seven bits in each byte, the lowest first. The
/// last byte has a 0 as its highest bit.
fn take_varint(message: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let byte = u64::from(*message.split_off_first()?);
        number |= (byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_and_other_fields_are_skipped() {
        // Pods with the metadata, state and creation time that runtimes send, and unknown fields.
        let answer = b"\x0a\x13\x0a\x03abc\x12\x02\x0a\x00\x18\x01\x20\x80\x01\x4d1234\x0a\x05\x0a\x03def\x11abcdefgh";
        assert_eq!(parse_pods(answer).unwrap(), ["abc", "def"]);
        assert_eq!(parse_pods(b"").unwrap(), Vec::<String>::new());
        assert_eq!(parse_pods(b"\x0a\x06\x0a\x01a\x0a\x01b").unwrap(), ["b"]);
    }

    #[test]
    fn a_list_that_is_not_understood_in_full_is_refused() {
        let whole = b"\x0a\x05\x0a\x03abc\x0a\x05\x0a\x03def";
        for end in (1..whole.len()).filter(|end| *end != 7) {
            assert_eq!(parse_pods(&whole[..end]).unwrap_err().code(), Code::DECODE, "{end}");
        }
        let long_number = [&[0x08][..], &[0x80; 10], &[0]].concat();
        for (answer, why) in [
            (&b"\x0a\x00"[..], "no ID"),
            (b"\x0a\x02\x0a\x00", "no ID"),
            (b"\x0a\x02\x08\x01", "no ID"),
            (b"\x0a\x03\x0a\x01\xff", "no ID"),
            (b"\x08\x01", "malformed"),
            (b"\x02\x00", "malformed"),
            (b"\x0b", "malformed"),
            (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "malformed"),
            (&long_number, "malformed"),
        ] {
            let error = parse_pods(answer).unwrap_err();
            assert!(error.code() == Code::DECODE && error.msg().contains(why), "{answer:?}: {error}");
        }
    }

    #[test]
    fn a_body_is_one_message_that_is_not_compressed() {
        assert_eq!(unframe(b"\0\0\0\0\x02ab").unwrap(), b"ab");
        assert_eq!(unframe(&EMPTY).unwrap(), b"");
        for body in
            [&b""[..], b"\0\0\0\0", b"\0\0\0\0\x02a", b"\0\0\0\0\x01ab", b"\x01\0\0\0\x02ab", b"\0\0\0\0\0\0\0\0\0\0"]
        {
            assert_eq!(unframe(body).unwrap_err().code(), Code::DECODE, "{body:?}");
        }
    }
}
