//! Messages and attributes of netlink, read out of the kernel's bytes without trust: no input makes it panic, what it does
//! not know it skips.

use nix::errno::Errno;

/// A netlink message's header, and where its payload is.
#[derive(Debug)]
pub struct Message<'a> {
    /// Type.
    pub kind: u16,
    /// `NLM_F_*`.
    pub flags: u16,
    /// The request it answers.
    pub sequence: u32,
    /// What follows the header.
    pub payload: &'a [u8],
}

/// An answer: errno, then the request.
pub const NLMSG_ERROR: u16 = 2;
/// The end of a dump.
pub const NLMSG_DONE: u16 = 3;

const HEADER: usize = 16;

/// A length, padded as attributes and messages are.
pub fn align(len: usize) -> usize {
    len.saturating_add(3) & !3
}

/// A number of the machine at that place.
pub fn u16_ne(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// A number of the machine at that place.
pub fn u32_ne(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// A number in the network's byte order, if there are just its bytes.
pub fn u32_be(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

/// A number in the network's byte order, if there are just its bytes.
pub fn u64_be(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.try_into().ok()?))
}

/// A text of the kernel's, up to its end.
pub fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// The messages of one datagram, up to the first that does not fit into it.
pub fn messages(mut datagram: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
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

/// Attributes as (type, value), up to the first that does not fit.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    const TYPE_MASK: u16 = 0x3fff;
    std::iter::from_fn(move || {
        let len = usize::from(u16_ne(bytes, 0)?);
        let kind = u16_ne(bytes, 2)? & TYPE_MASK;
        let value = bytes.get(4..len)?;
        bytes = bytes.get(align(len)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The value of the first attribute of that kind.
pub fn attribute(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
}

/// An attribute that is a number in the network's byte order.
pub fn number(bytes: &[u8], wanted: u16) -> Option<u32> {
    attribute(bytes, wanted).and_then(u32_be)
}

/// The kernel's answer to one message, or the end of a dump: an errno, or none if all went well, and the extended
/// text.
pub fn answer(message: &Message<'_>) -> Option<(Option<Errno>, Option<String>)> {
    const NLM_F_CAPPED: u16 = 0x100;
    const NLM_F_ACK_TLVS: u16 = 0x200;
    const NLMSGERR_ATTR_MSG: u16 = 1;
    let code = i32::from_ne_bytes(message.payload.get(..4)?.try_into().ok()?);
    let errno = (code != 0).then(|| Errno::from_raw(code.saturating_neg()));
    let mut said = None;
    if message.flags & NLM_F_ACK_TLVS != 0 {
        // The request comes back before the attributes: its header alone if capped, else all of it. The end of a dump
        // carries no request.
        let request = match message.flags & NLM_F_CAPPED {
            _ if message.kind == NLMSG_DONE => 0,
            0 => usize::try_from(u32_ne(message.payload, 4)?).ok()?,
            _ => HEADER,
        };
        let tlvs = message.payload.get(align(request).saturating_add(4)..).unwrap_or_default();
        said = attribute(tlvs, NLMSGERR_ATTR_MSG).map(text);
    }
    Some((errno, said))
}
