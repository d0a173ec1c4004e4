//! Writes and reads the matches and targets of xtables that plugins write.
//!
//! Each is written in one form. A structure from the kernel is read as words only if these words
//! give the same structure when they are written. So a negated match, a match that compares
//! anything else, and a target with another option are not read.

use std::mem::offset_of;
use std::net::{IpAddr, SocketAddr};

use super::xt::{self, Addrtype, Conntrack, Extension, Mark, Multiport, NatV4, Range2, Sctp, SetMark, Tcp};
use crate::nft::Expr;
use cni::cidr::{from_octets, octets};
use cni_linux::route::Family;

/// The bit of RTN_LOCAL in an addrtype match, which has a set of route types.
const LOCAL_ROUTE_TYPE: u16 = 1 << libc::RTN_LOCAL;
/// The flag of an sctp match that compares the destination port.
const SCTP_DESTINATION_PORTS: u32 = 2;
/// The flag of a conntrack match that compares the state.
const CONNTRACK_STATE: u16 = 1;
/// The bits and names of the known connection states, in the order in which iptables prints them.
const CONNTRACK_STATES: [(u16, &str); 5] =
    [(1, "INVALID"), (8, "NEW"), (4, "RELATED"), (2, "ESTABLISHED"), (128, "DNAT")];
/// The flag of a NAT range that has addresses.
const MAP_IPS: u32 = 1;
/// The flag of a NAT range that has ports.
const PROTO_SPECIFIED: u32 = 2;

/// A match or target with its structure.
pub(super) struct Info {
    extension: Extension,
    bytes: Vec<u8>,
}

impl Info {
    /// Returns the match or target with a structure of zeros.
    fn new(extension: Extension) -> Info {
        Info { extension, bytes: vec![0; extension.size.next_multiple_of(xt::ALIGN)] }
    }

    /// Writes the bytes of a field at the field's offset. Does nothing if they do not fit into the
    /// structure.
    #[must_use]
    fn with(mut self, offset: usize, bytes: &[u8]) -> Info {
        if let Some(field) = self.bytes.get_mut(offset..offset + bytes.len()) {
            field.copy_from_slice(bytes);
        }
        self
    }

    /// Returns the expression of a match.
    pub(super) fn into_match(self) -> Expr {
        let Extension { name, revision, .. } = self.extension;
        Expr::XtMatch { name: name.to_owned(), revision, info: self.bytes }
    }

    /// Returns the expression of a target.
    pub(super) fn into_target(self) -> Expr {
        let Extension { name, revision, .. } = self.extension;
        Expr::XtTarget { name: name.to_owned(), revision, info: self.bytes }
    }

    /// Whether this is the structure `info` of the revision. Its padding is not compared.
    fn equals(&self, revision: u32, info: &[u8]) -> bool {
        let size = self.extension.size;
        revision == self.extension.revision && info.get(..size) == self.bytes.get(..size)
    }
}

/// Writes the match of this name with one option and its value. `None` if plugins do not write this
/// match, option or value.
pub(super) fn write_match(name: &str, option: &str, value: &str) -> Option<Info> {
    Some(match (name, option) {
        // The last byte of the field must be NUL. iptables cuts a longer comment.
        ("comment", "--comment") if value.len() < xt::COMMENT.size && !value.contains('\0') => {
            Info::new(xt::COMMENT).with(0, value.as_bytes())
        }
        ("multiport", "--dports") => {
            let ports: Vec<u16> = value.split(',').map(decimal).collect::<Option<_>>()?;
            if ports.len() > xt::PORTS_MAX {
                return None;
            }
            let count = u8::try_from(ports.len()).ok()?;
            let port_bytes: Vec<u8> = ports.iter().flat_map(|port| port.to_ne_bytes()).collect();
            Info::new(xt::MULTIPORT)
                .with(offset_of!(Multiport, kind), &[xt::MULTIPORT_DESTINATION])
                .with(offset_of!(Multiport, count), &[count])
                .with(offset_of!(Multiport, ports), &port_bytes)
        }
        ("addrtype", "--dst-type") if value == "LOCAL" => {
            Info::new(xt::ADDRTYPE).with(offset_of!(Addrtype, destination), &LOCAL_ROUTE_TYPE.to_ne_bytes())
        }
        ("mark", "--mark") => {
            let (value, mask) = value_and_mask(value)?;
            Info::new(xt::MARK)
                .with(offset_of!(Mark, value), &value.to_ne_bytes())
                .with(offset_of!(Mark, mask), &mask.to_ne_bytes())
        }
        ("conntrack", "--ctstate") => {
            let mut states = 0;
            for name in value.split(',') {
                let (bit, _) = CONNTRACK_STATES.iter().find(|(_, known)| *known == name)?;
                states |= bit;
            }
            Info::new(xt::CONNTRACK)
                .with(offset_of!(Conntrack, matched), &CONNTRACK_STATE.to_ne_bytes())
                .with(offset_of!(Conntrack, states), &states.to_ne_bytes())
        }
        // A port is a range: first and last port. The structure of udp begins like that of tcp.
        ("tcp" | "udp", "--dport") => {
            let port: u16 = decimal(value)?;
            Info::new(if name == "tcp" { xt::TCP } else { xt::UDP })
                .with(offset_of!(Tcp, source_ports), &[0, u16::MAX].map(u16::to_ne_bytes).concat())
                .with(offset_of!(Tcp, destination_ports), &[port, port].map(u16::to_ne_bytes).concat())
        }
        ("sctp", "--dport") => {
            let port: u16 = decimal(value)?;
            // Chunk type 255 means that an entry is unused. The four entries must be like those
            // that iptables writes, which compares them when it looks for a rule to delete.
            let unused_chunk_flags = [[u8::MAX, 0, 0]; 4].concat();
            Info::new(xt::SCTP)
                .with(offset_of!(Sctp, destination_ports), &[port, port].map(u16::to_ne_bytes).concat())
                .with(offset_of!(Sctp, chunk_flags), &unused_chunk_flags)
                .with(offset_of!(Sctp, matched), &SCTP_DESTINATION_PORTS.to_ne_bytes())
        }
        _ => return None,
    })
}

/// Reads the option and the value of a match with the structure `info`. `None` for a match that
/// [`write_match`] does not write, and for a comment, which has its own reader.
pub(super) fn read_match(name: &str, revision: u32, info: &[u8]) -> Option<(&'static str, String)> {
    let (option, value) = match name {
        "multiport" => {
            let count = usize::from(*info.get(offset_of!(Multiport, count))?);
            let port = |index| u16_at(info, offset_of!(Multiport, ports) + 2 * index);
            let ports: Vec<u16> = (0..count).map(port).collect::<Option<_>>()?;
            ("--dports", ports.iter().map(u16::to_string).collect::<Vec<_>>().join(","))
        }
        "addrtype" => ("--dst-type", "LOCAL".to_owned()),
        "mark" => {
            let (value, mask) = (u32_at(info, offset_of!(Mark, value))?, u32_at(info, offset_of!(Mark, mask))?);
            ("--mark", mark_text(value, mask))
        }
        "conntrack" => {
            let states = u16_at(info, offset_of!(Conntrack, states))?;
            let known = CONNTRACK_STATES.iter().filter(|(bit, _)| states & bit != 0);
            ("--ctstate", known.map(|(_, name)| *name).collect::<Vec<_>>().join(","))
        }
        "tcp" | "udp" => ("--dport", u16_at(info, offset_of!(Tcp, destination_ports))?.to_string()),
        "sctp" => ("--dport", u16_at(info, offset_of!(Sctp, destination_ports))?.to_string()),
        _ => return None,
    };
    let is_same = write_match(name, option, &value)?.equals(revision, info);
    is_same.then_some((option, value))
}

/// Reads the comment of a match `comment`.
pub(super) fn read_comment(info: &[u8]) -> String {
    let text = info.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// Writes the target of this name with these options. `None` if plugins do not write them.
pub(super) fn write_target(family: Family, name: &str, options: &[&str]) -> Option<Info> {
    Some(match (name, options) {
        // The kernel requires exactly one NAT range; this one has no addresses or ports.
        ("MASQUERADE", []) if family == Family::V4 => {
            Info::new(xt::MASQUERADE_V4).with(offset_of!(NatV4, count), &1_u32.to_ne_bytes())
        }
        ("MASQUERADE", []) => Info::new(xt::MASQUERADE_V6),
        ("DNAT", ["--to-destination", destination]) => {
            let (address, port) = socket_address(destination)?;
            if Family::of(address) != family {
                return None;
            }
            let flags = if port.is_some() { MAP_IPS | PROTO_SPECIFIED } else { MAP_IPS };
            let (octets, port) = (octets(address), port.unwrap_or(0).to_be_bytes());
            Info::new(xt::DNAT)
                .with(offset_of!(Range2, flags), &flags.to_ne_bytes())
                .with(offset_of!(Range2, first), &octets)
                .with(offset_of!(Range2, last), &octets)
                .with(offset_of!(Range2, first_port), &port)
                .with(offset_of!(Range2, last_port), &port)
        }
        ("MARK", ["--set-xmark", mark]) => {
            let (value, mask) = value_and_mask(mark)?;
            Info::new(xt::SET_MARK)
                .with(offset_of!(SetMark, value), &value.to_ne_bytes())
                .with(offset_of!(SetMark, mask), &mask.to_ne_bytes())
        }
        _ => return None,
    })
}

/// Reads the options of a target with the structure `info`. `None` for a target that
/// [`write_target`] does not write.
pub(super) fn read_target(family: Family, name: &str, revision: u32, info: &[u8]) -> Option<Vec<String>> {
    if name == "DNAT" && revision != xt::DNAT.revision {
        return read_target(family, name, xt::DNAT.revision, &newest_dnat(family, revision, info)?);
    }
    let options = match name {
        "MASQUERADE" => Vec::new(),
        "DNAT" => {
            let address_len = if family == Family::V4 { 4 } else { 16 };
            let first_at = offset_of!(Range2, first);
            let address = from_octets(info.get(first_at..first_at + address_len)?)?;
            let port = u16_at(info, offset_of!(Range2, first_port))?;
            let has_port = u32_at(info, offset_of!(Range2, flags))? & PROTO_SPECIFIED != 0;
            let with_port = || SocketAddr::new(address, u16::from_be(port)).to_string();
            vec!["--to-destination".to_owned(), if has_port { with_port() } else { address.to_string() }]
        }
        "MARK" => {
            let (value, mask) = (u32_at(info, offset_of!(SetMark, value))?, u32_at(info, offset_of!(SetMark, mask))?);
            vec!["--set-xmark".to_owned(), format!("{value:#x}/{mask:#x}")]
        }
        _ => return None,
    };
    let words: Vec<&str> = options.iter().map(String::as_str).collect();
    let is_same = write_target(family, name, &words)?.equals(revision, info);
    is_same.then_some(options)
}

/// Converts the structure of an older revision of DNAT to that of the newest. `None` if it does not
/// have one range.
fn newest_dnat(family: Family, revision: u32, info: &[u8]) -> Option<Vec<u8>> {
    let mut newest = Info::new(xt::DNAT);
    if revision == 0 && family == Family::V4 {
        if u32_at(info, offset_of!(NatV4, count))? != 1 {
            return None;
        }
        // Each field has four bytes; the last port is the two bytes after the first.
        for (from, to) in [
            (offset_of!(NatV4, flags), offset_of!(Range2, flags)),
            (offset_of!(NatV4, first), offset_of!(Range2, first)),
            (offset_of!(NatV4, last), offset_of!(Range2, last)),
            (offset_of!(NatV4, first_port), offset_of!(Range2, first_port)),
        ] {
            newest = newest.with(to, info.get(from..from + 4)?);
        }
        return Some(newest.bytes);
    }
    // A `Range`, with which the newest structure begins.
    Some(newest.with(0, info.get(..size_of::<xt::Range>())?).bytes)
}

/// Reads two bytes as a number in the machine's byte order.
fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(offset..offset + 2)?.try_into().ok()?))
}

/// Reads four bytes as a number in the machine's byte order.
fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(offset..offset + 4)?.try_into().ok()?))
}

/// Reads an address with or without a port: `10.0.0.2:80`, `[fd00::2]:80`, `fd00::2`. `None` for
/// any other text.
fn socket_address(text: &str) -> Option<(IpAddr, Option<u16>)> {
    if let Ok(address) = text.parse() {
        return Some((address, None));
    }
    let socket: SocketAddr = text.parse().ok()?;
    Some((socket.ip(), Some(socket.port())))
}

/// Reads a number in decimal digits. `None` for a number with a leading 0, which iptables reads as
/// octal.
pub(super) fn decimal<T: std::str::FromStr>(text: &str) -> Option<T> {
    let is_plain = text == "0" || (!text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit()));
    if is_plain { text.parse().ok() } else { None }
}

/// Reads the value and the mask of a packet mark: `0x2000/0x3000`, or decimal. Without a mask in
/// the text, the mask has all bits.
fn value_and_mask(text: &str) -> Option<(u32, u32)> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => decimal(text),
    };
    match text.split_once('/') {
        Some((value, mask)) => Some((number(value)?, number(mask)?)),
        None => Some((number(text)?, u32::MAX)),
    }
}

/// Returns a packet mark as iptables prints it: `0x2000/0x3000`, or `0x2000` if the mask has all
/// bits.
pub(super) fn mark_text(value: u32, mask: u32) -> String {
    if mask == u32::MAX { format!("{value:#x}") } else { format!("{value:#x}/{mask:#x}") }
}
