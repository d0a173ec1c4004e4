//! Writes and reads the matches and targets of xtables that plugins write.
//!
//! Each is written in one form. A structure from the kernel is read as words only if these words
//! give the same structure when they are written. So a negated match, a match that compares
//! anything else, and a target with another option are not read.
//!
//! The structures consist of bytes and numbers of fixed size, so each field has the same offset on
//! every processor. Only the padding after the last field differs ([`ALIGN`]).

use std::net::{IpAddr, SocketAddr};

use crate::nft::expr::ExtensionKind::{self, Match, Target};
use crate::nft::expr::{Expr, Xtables};
use cni::cidr::{from_octets, octets};
use cni_linux::netlink::wire::text;
use cni_linux::route::Family;

/// A match or target that plugins write.
#[derive(Clone, Copy, Debug)]
pub(super) struct KnownExtension {
    pub(super) kind: ExtensionKind,
    pub(super) name: &'static str,
    pub(super) revision: u32,
    /// The size of its structure, without padding.
    size: usize,
}

/// Returns the description of an extension.
const fn known(kind: ExtensionKind, name: &'static str, revision: u32, size: usize) -> KnownExtension {
    KnownExtension { kind, name, revision, size }
}

/// A text that ends with NUL.
pub(super) const COMMENT: KnownExtension = known(Match, "comment", 0, 256);
/// `struct xt_multiport_v1`: which ports are compared (1 byte), their count (1), up to 15 ports,
/// flags of ranges, inversion.
const MULTIPORT: KnownExtension = known(Match, "multiport", 1, 48);
/// `struct xt_addrtype_info_v1`: the sets of route types of the source and of the destination (2
/// bytes each), flags.
const ADDRTYPE: KnownExtension = known(Match, "addrtype", 1, 8);
/// `struct xt_mark_mtinfo1`: value, mask, inversion.
const MARK: KnownExtension = known(Match, "mark", 1, 12);
/// `struct xt_conntrack_mtinfo3`: the fields from `match_flags` on are the set of compared
/// properties, the set of inverted ones, the set of states (2 bytes each).
const CONNTRACK: KnownExtension = known(Match, "conntrack", 3, 164);
/// `struct xt_tcp`: the first and the last source port, the first and the last destination port,
/// flags.
const TCP: KnownExtension = known(Match, "tcp", 0, 12);
/// `struct xt_udp`: ports as in [`TCP`], flags.
const UDP: KnownExtension = known(Match, "udp", 0, 10);
/// `struct xt_sctp_info`: the first and the last destination port, the same of the source, chunk
/// types, four entries for flags of chunks (3 bytes each) and their count, the set of compared
/// fields, inversion.
const SCTP: KnownExtension = known(Match, "sctp", 0, 292);
/// `struct nf_nat_ipv4_multi_range_compat`: the number of ranges, and one range: flags, first and
/// last address, first and last port.
pub(super) const MASQUERADE_V4: KnownExtension = known(Target, "MASQUERADE", 0, 20);
/// `struct nf_nat_range`: flags, first and last address (16 bytes each), first and last port.
pub(super) const MASQUERADE_V6: KnownExtension = known(Target, "MASQUERADE", 0, NAT_RANGE_SIZE);
/// `struct nf_nat_range2`, which begins as `struct nf_nat_range`. Revision 2, because iptables-nft
/// reads every DNAT target as the newest revision that it and the kernel have.
const DNAT: KnownExtension = known(Target, "DNAT", 2, 44);
/// `struct xt_mark_tginfo2`: value, mask.
const SET_MARK: KnownExtension = known(Target, "MARK", 2, 8);

/// The size of `struct nf_nat_range`.
const NAT_RANGE_SIZE: usize = 40;
/// The alignment of structures: the kernel and iptables round the size of each up to a multiple of
/// this, except on 32-bit x86.
const ALIGN: usize = 8;
/// The maximum number of ports in a multiport match.
const PORTS_MAX: usize = 15;
/// The first byte of a multiport match that compares destination ports.
const MULTIPORT_DESTINATION: u8 = 1;
/// The bit of RTN_LOCAL in an addrtype match, which has a set of route types.
const LOCAL_ROUTE_TYPE: u16 = 1 << libc::RTN_LOCAL;
/// The offset of the flags of chunks in an sctp match.
const SCTP_CHUNK_FLAGS_AT: usize = 268;
/// The flag of an sctp match that compares the destination port.
const SCTP_DESTINATION_PORTS: u32 = 2;
/// The offset of `match_flags` in a conntrack match.
const CONNTRACK_MATCHED_AT: usize = 146;
/// The flag of a conntrack match that compares the state.
const CONNTRACK_STATE: u16 = 1;
/// The bits and names of the known connection states, in the order in which iptables prints them.
const CONNTRACK_STATES: [(u16, &str); 5] =
    [(1, "INVALID"), (8, "NEW"), (4, "RELATED"), (2, "ESTABLISHED"), (128, "DNAT")];
/// The flag of a NAT range that has addresses.
const MAP_IPS: u32 = 1;
/// The flag of a NAT range that has ports.
const PROTO_SPECIFIED: u32 = 2;

impl KnownExtension {
    /// Returns the match or target whose structure, without padding, begins with these fields. All
    /// others are zero.
    fn with(self, fields: &[&[u8]]) -> Xtables {
        let mut info = fields.concat();
        info.resize(self.size, 0);
        Xtables { kind: self.kind, name: self.name.to_owned(), revision: self.revision, info }
    }
}

/// Writes the match or target of this name with these options. `None` if plugins do not write it.
pub(super) fn write(family: Family, kind: ExtensionKind, name: &str, options: &[&str]) -> Option<Expr> {
    let mut extension = without_padding(family, kind, name, options)?;
    extension.info.resize(extension.info.len().next_multiple_of(ALIGN), 0);
    Some(Expr::Xtables(extension))
}

/// Returns the match or target of this name with these options, without the padding after its
/// structure. `None` if plugins do not write it.
fn without_padding(family: Family, kind: ExtensionKind, name: &str, options: &[&str]) -> Option<Xtables> {
    Some(match (kind, name, options) {
        // The last byte of the structure must be NUL. iptables cuts a longer comment.
        (Match, "comment", ["--comment", comment]) if comment.len() < COMMENT.size && !comment.contains('\0') => {
            COMMENT.with(&[comment.as_bytes()])
        }
        (Match, "multiport", ["--dports", ports]) => {
            let ports: Vec<u16> = ports.split(',').map(decimal).collect::<Option<_>>()?;
            let count = u8::try_from(ports.len()).ok()?;
            if ports.len() > PORTS_MAX {
                return None;
            }
            let port_bytes: Vec<u8> = ports.into_iter().flat_map(u16::to_ne_bytes).collect();
            MULTIPORT.with(&[&[MULTIPORT_DESTINATION, count], &port_bytes])
        }
        (Match, "addrtype", ["--dst-type", "LOCAL"]) => ADDRTYPE.with(&[&[0; 2], &LOCAL_ROUTE_TYPE.to_ne_bytes()]),
        (Match, "mark", ["--mark", mark]) => {
            let (value, mask) = value_and_mask(mark)?;
            MARK.with(&[&value.to_ne_bytes(), &mask.to_ne_bytes()])
        }
        (Match, "conntrack", ["--ctstate", names]) => {
            let mut states = 0;
            for state in names.split(',') {
                let (bit, _) = CONNTRACK_STATES.iter().find(|(_, known_state)| *known_state == state)?;
                states |= bit;
            }
            let (matched, inverted) = (CONNTRACK_STATE.to_ne_bytes(), [0; 2]);
            CONNTRACK.with(&[&[0; CONNTRACK_MATCHED_AT], &matched, &inverted, &states.to_ne_bytes()])
        }
        // A port is a range of one port. These two matches always compare the source port too, so
        // its range is that of all ports; sctp compares only the fields in `matched`.
        (Match, "tcp" | "udp", ["--dport", port]) => {
            let port = decimal::<u16>(port)?.to_ne_bytes();
            let (first_source, last_source) = ([0; 2], [u8::MAX; 2]);
            let ports = if name == "tcp" { TCP } else { UDP };
            ports.with(&[&first_source, &last_source, &port, &port])
        }
        (Match, "sctp", ["--dport", port]) => {
            let port = decimal::<u16>(port)?.to_ne_bytes();
            let sources_and_chunks = [0; SCTP_CHUNK_FLAGS_AT - 4];
            // Chunk type 255 means that an entry is unused. The four entries must be like those
            // that iptables writes, which compares them when it looks for a rule to delete.
            let (unused_flags, count) = ([[u8::MAX, 0, 0]; 4], [0; 4]);
            let matched = SCTP_DESTINATION_PORTS.to_ne_bytes();
            SCTP.with(&[&port, &port, &sources_and_chunks, unused_flags.as_flattened(), &count, &matched])
        }
        // The kernel requires exactly one NAT range; this one has no addresses or ports.
        (Target, "MASQUERADE", []) if family == Family::V4 => MASQUERADE_V4.with(&[&1_u32.to_ne_bytes()]),
        (Target, "MASQUERADE", []) => MASQUERADE_V6.with(&[]),
        (Target, "DNAT", ["--to-destination", destination]) => {
            let (address, port) = socket_address(destination)?;
            if Family::of(address) != family {
                return None;
            }
            let flags = if port.is_some() { MAP_IPS | PROTO_SPECIFIED } else { MAP_IPS };
            // A range of one address and one port.
            let (mut address_bytes, port_bytes) = (octets(address), port.unwrap_or(0).to_be_bytes());
            address_bytes.resize(16, 0);
            DNAT.with(&[&flags.to_ne_bytes(), &address_bytes, &address_bytes, &port_bytes, &port_bytes])
        }
        (Target, "MARK", ["--set-xmark", mark]) => {
            let (value, mask) = value_and_mask(mark)?;
            SET_MARK.with(&[&value.to_ne_bytes(), &mask.to_ne_bytes()])
        }
        _ => return None,
    })
}

/// Reads the options of a match or target of a rule: `--dport 80`. `None` for one that [`write`]
/// does not write: the options are written again, and the result must be the same structure. The
/// comment of a match `comment` is read without this check.
pub(super) fn read(family: Family, extension: &Xtables) -> Option<Vec<String>> {
    let Xtables { kind, name, revision, info } = extension;
    let words = |option: &str, value: String| vec![option.to_owned(), value];
    let options = match (*kind, name.as_str()) {
        (Match, "comment") => return Some(words("--comment", text(info))),
        (Match, "multiport") => {
            let port = |index| u16_at(info, 2 + 2 * index);
            let ports: Vec<u16> = (0..usize::from(*info.get(1)?)).map(port).collect::<Option<_>>()?;
            words("--dports", ports.iter().map(u16::to_string).collect::<Vec<_>>().join(","))
        }
        (Match, "addrtype") => words("--dst-type", "LOCAL".to_owned()),
        (Match, "mark") => words("--mark", mark_text(u32_at(info, 0)?, u32_at(info, 4)?)),
        (Match, "conntrack") => {
            let states = u16_at(info, CONNTRACK_MATCHED_AT + 4)?;
            let known = CONNTRACK_STATES.iter().filter(|(bit, _)| states & bit != 0);
            words("--ctstate", known.map(|(_, name)| *name).collect::<Vec<_>>().join(","))
        }
        (Match, "tcp" | "udp") => words("--dport", u16_at(info, 4)?.to_string()),
        (Match, "sctp") => words("--dport", u16_at(info, 0)?.to_string()),
        (Target, "MASQUERADE") => Vec::new(),
        (Target, "DNAT") if *revision != DNAT.revision => {
            return read(family, &newest_dnat(family, *revision, info)?);
        }
        (Target, "DNAT") => {
            let address_len = if family == Family::V4 { 4 } else { 16 };
            let address = from_octets(info.get(4..4 + address_len)?)?;
            let port = u16::from_be(u16_at(info, 36)?);
            let has_port = u32_at(info, 0)? & PROTO_SPECIFIED != 0;
            let with_port = || SocketAddr::new(address, port).to_string();
            words("--to-destination", if has_port { with_port() } else { address.to_string() })
        }
        // iptables always prints the mask of this option, unlike that of `--mark`.
        (Target, "MARK") => words("--set-xmark", format!("{:#x}/{:#x}", u32_at(info, 0)?, u32_at(info, 4)?)),
        _ => return None,
    };
    // The fields that are not read above must be as `write` sets them.
    let option_words: Vec<&str> = options.iter().map(String::as_str).collect();
    let written = without_padding(family, *kind, name, &option_words)?;
    (written.revision == *revision && info.starts_with(&written.info)).then_some(options)
}

/// Converts the structure of an older revision of DNAT to that of the newest. `None` if it does not
/// have one range.
fn newest_dnat(family: Family, revision: u32, info: &[u8]) -> Option<Xtables> {
    if revision != 0 || family != Family::V4 {
        return Some(DNAT.with(&[info.get(..NAT_RANGE_SIZE)?]));
    }
    // The structure of `MASQUERADE_V4`.
    let [range_count, flags, first, last, ports, ..] = info.as_chunks::<4>().0 else { return None };
    if u32::from_ne_bytes(*range_count) != 1 {
        return None;
    }
    Some(DNAT.with(&[flags, first, &[0; 12], last, &[0; 12], ports]))
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
