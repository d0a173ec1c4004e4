//! Reads single parts of rules: the structures of xtables matches and targets, and the bytes with
//! which nf_tables compares.
//!
//! Functions that return an `Option` return `None` for too few bytes, and for an option that CNI
//! plugins do not write.

use std::mem::offset_of;

use super::xt::{self, Addrtype, Conntrack, Mark, Multiport, NatV4, Range, Sctp, SetMark, Tcp, Udp};
use cni::cidr::from_octets;
use cni_linux::route::Family;

/// The bit of RTN_LOCAL in an addrtype match, which has a set of route types.
pub(super) const LOCAL_ROUTE_TYPE: u16 = 1 << libc::RTN_LOCAL;
/// The flag of an sctp match that compares the destination port.
pub(super) const SCTP_DESTINATION_PORTS: u32 = 2;
/// The flag of a conntrack match that compares the state.
pub(super) const CONNTRACK_STATE: u16 = 1;
/// The bits and names of the known connection states, in the order in which iptables prints them.
pub(super) const CONNTRACK_STATES: [(u16, &str); 5] =
    [(1, "INVALID"), (8, "NEW"), (4, "RELATED"), (2, "ESTABLISHED"), (128, "DNAT")];
/// The flag of a NAT range that has addresses.
pub(super) const MAP_IPS: u32 = 1;
/// The flag of a NAT range that has ports.
pub(super) const PROTO_SPECIFIED: u32 = 2;

/// Reads two bytes as a number in the machine's byte order.
fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(offset..offset + 2)?.try_into().ok()?))
}

/// Reads four bytes as a number in the machine's byte order.
fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(offset..offset + 4)?.try_into().ok()?))
}

/// Reads two bytes as a number in network byte order.
fn be16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(offset..offset + 2)?.try_into().ok()?))
}

/// Reads the first and the last port of a range.
fn port_range_at(info: &[u8], offset: usize) -> Option<(u16, u16)> {
    Some((u16_at(info, offset)?, u16_at(info, offset + 2)?))
}

/// Reads `bytes`, which must be four, as a number in the machine's byte order.
pub(super) fn number(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_ne_bytes)
}

/// Returns a packet mark as iptables prints it: `0x2000/0x3000`, or `0x2000` if the mask has all
/// bits.
pub(super) fn mark_text(value: u32, mask: u32) -> String {
    if mask == u32::MAX { format!("{value:#x}") } else { format!("{value:#x}/{mask:#x}") }
}

/// Returns the prefix (`10.1.0.0/16`) that a comparison with `data` compares an address with.
/// Without a mask, the prefix has as many bytes as `data`, because nf_tables can compare only the
/// first bytes of an address. `None` for a mask with holes, for a mask whose length differs from
/// that of `data`, and for `data` that is empty or longer than an address.
pub(super) fn prefix(family: Family, mask: Option<&[u8]>, data: &[u8]) -> Option<String> {
    let address_len = if family == Family::V4 { 4 } else { 16 };
    if data.is_empty() || data.len() > address_len {
        return None;
    }
    let prefix_len = match mask {
        None => data.len() * 8,
        Some(mask) => {
            let full_bytes = mask.iter().take_while(|byte| **byte == 0xff).count();
            let partial_bits = mask.get(full_bytes).map_or(0, |byte| byte.leading_ones() as usize);
            let leading_bits = full_bytes * 8 + partial_bits;
            let set_bits: u32 = mask.iter().map(|byte| byte.count_ones()).sum();
            if mask.len() != data.len() || set_bits as usize != leading_bits {
                return None;
            }
            leading_bits
        }
    };
    let mut bytes = data.to_vec();
    bytes.resize(address_len, 0);
    Some(format!("{}/{prefix_len}", from_octets(&bytes)?))
}

/// Returns the interface name of a comparison with `data`, as iptables prints it. Without a NUL,
/// `data` is only the beginning of the matching names: `eth+`.
pub(super) fn interface(data: &[u8]) -> String {
    let end = data.iter().position(|byte| *byte == 0);
    let name = String::from_utf8_lossy(&data[..end.unwrap_or(data.len())]).into_owned();
    if end.is_some() { name } else { name + "+" }
}

/// Returns a protocol as iptables prints it: by name, or by number if CNI plugins do not use the
/// protocol.
pub(super) fn protocol_name(number: u8) -> String {
    match i32::from(number) {
        libc::IPPROTO_TCP => "tcp".into(),
        libc::IPPROTO_UDP => "udp".into(),
        libc::IPPROTO_SCTP => "sctp".into(),
        libc::IPPROTO_ICMP => "icmp".into(),
        libc::IPPROTO_ICMPV6 => "ipv6-icmp".into(),
        other => other.to_string(),
    }
}

/// Returns the number of the protocol that [`protocol_name`] prints as `name`, which can itself be
/// a number. `None` for any other name.
pub(super) fn protocol_number(name: &str) -> Option<u8> {
    name.parse().ok().or_else(|| (1..=u8::MAX).find(|number| protocol_name(*number) == name))
}

/// Reads the option and the ports of a multiport match: `("--dports", "80,8000:8010")`. `None` if
/// the match is negated, or if its kind or number of ports is invalid.
pub(super) fn multiport(info: &[u8]) -> Option<(&'static str, String)> {
    const RANGE_FLAGS: usize = offset_of!(Multiport, begins_range);
    let option = match info.get(offset_of!(Multiport, kind))? {
        0 => "--sports",
        1 => "--dports",
        2 => "--ports",
        _ => return None,
    };
    let port_count = usize::from(*info.get(offset_of!(Multiport, count))?);
    let range_flags = info.get(RANGE_FLAGS..RANGE_FLAGS + xt::PORTS_MAX)?;
    if port_count > xt::PORTS_MAX || *info.get(offset_of!(Multiport, invert))? != 0 {
        return None;
    }
    let mut text = String::new();
    for (index, begins_range) in range_flags.iter().enumerate().take(port_count) {
        text += &u16_at(info, offset_of!(Multiport, ports) + 2 * index)?.to_string();
        if index + 1 < port_count {
            text.push(if *begins_range == 0 { ',' } else { ':' });
        }
    }
    Some((option, text))
}

/// Whether an addrtype match is exactly `--dst-type LOCAL`.
pub(super) fn is_local_destination(info: &[u8]) -> bool {
    u16_at(info, offset_of!(Addrtype, source)) == Some(0)
        && u16_at(info, offset_of!(Addrtype, destination)) == Some(LOCAL_ROUTE_TYPE)
        && u32_at(info, offset_of!(Addrtype, flags)) == Some(0)
}

/// Reads the value and the mask of a mark match. `None` if the match is negated.
pub(super) fn mark(info: &[u8]) -> Option<(u32, u32)> {
    if *info.get(offset_of!(Mark, invert))? != 0 {
        return None;
    }
    Some((u32_at(info, offset_of!(Mark, value))?, u32_at(info, offset_of!(Mark, mask))?))
}

/// Reads the states of a conntrack match: `RELATED,ESTABLISHED`. `None` if the match is negated,
/// compares anything else, or has a state that is not in [`CONNTRACK_STATES`].
pub(super) fn conntrack_states(info: &[u8]) -> Option<String> {
    let matched = u16_at(info, offset_of!(Conntrack, matched))?;
    let inverted = u16_at(info, offset_of!(Conntrack, inverted))?;
    let states = u16_at(info, offset_of!(Conntrack, states))?;
    if matched != CONNTRACK_STATE || inverted != 0 {
        return None;
    }
    let (mut names, mut unknown_states) = (Vec::new(), states);
    for (bit, name) in CONNTRACK_STATES {
        if states & bit != 0 {
            names.push(name);
            unknown_states &= !bit;
        }
    }
    if unknown_states == 0 { Some(names.join(",")) } else { None }
}

/// Reads the destination port of a match of `tcp`, `udp` or `sctp`. `None` for a range of ports,
/// and for a match that is negated or compares anything else.
pub(super) fn destination_port(protocol: &str, info: &[u8]) -> Option<u16> {
    let (first, last) = match protocol {
        "sctp" => sctp_destination_ports(info)?,
        _ => tcp_or_udp_destination_ports(protocol, info)?,
    };
    if first == last { Some(first) } else { None }
}

/// Reads the range of destination ports of an sctp match that compares nothing else.
fn sctp_destination_ports(info: &[u8]) -> Option<(u16, u16)> {
    let matched = u32_at(info, offset_of!(Sctp, matched))?;
    let inverted = u32_at(info, offset_of!(Sctp, invert))?;
    if matched != SCTP_DESTINATION_PORTS || inverted != 0 {
        return None;
    }
    port_range_at(info, offset_of!(Sctp, destination_ports))
}

/// Reads the range of destination ports of a tcp or udp match that compares nothing else.
fn tcp_or_udp_destination_ports(protocol: &str, info: &[u8]) -> Option<(u16, u16)> {
    // Both structures have the ports at the same offsets. The bytes after the ports are 0 if the
    // match compares nothing else and is not negated.
    let other_options = match protocol {
        "tcp" => info.get(offset_of!(Tcp, option)..=offset_of!(Tcp, invert))?,
        _ => info.get(offset_of!(Udp, invert)..=offset_of!(Udp, invert))?,
    };
    let source_ports = port_range_at(info, offset_of!(Tcp, source_ports))?;
    if source_ports != (0, u16::MAX) || other_options.iter().any(|byte| *byte != 0) {
        return None;
    }
    port_range_at(info, offset_of!(Tcp, destination_ports))
}

/// Whether a MASQUERADE target has options: ports, or `--random` for example. False for a structure
/// that is too short.
pub(super) fn has_masquerade_options(family: Family, info: &[u8]) -> bool {
    let offset = if family == Family::V4 { offset_of!(NatV4, flags) } else { offset_of!(Range, flags) };
    u32_at(info, offset).is_some_and(|flags| flags != 0)
}

/// Reads the value and the mask of a MARK target.
pub(super) fn set_mark(info: &[u8]) -> Option<(u32, u32)> {
    Some((u32_at(info, offset_of!(SetMark, value))?, u32_at(info, offset_of!(SetMark, mask))?))
}

/// Reads the destination of a DNAT target: `10.0.0.2`, `10.0.0.2:80`, `[fd00::2]:80`. `None` if the
/// target has no address, several addresses or ports, or another option.
pub(super) fn dnat_destination(family: Family, revision: u32, info: &[u8]) -> Option<String> {
    let address_len = if family == Family::V4 { 4 } else { 16 };
    // Revision 0 in IPv4 has the structure `NatV4`; all others have or begin with a `Range`.
    let (flags_at, first_at, last_at, first_port_at) = if revision == 0 && family == Family::V4 {
        if u32_at(info, offset_of!(NatV4, count))? != 1 {
            return None;
        }
        (offset_of!(NatV4, flags), offset_of!(NatV4, first), offset_of!(NatV4, last), offset_of!(NatV4, first_port))
    } else {
        (offset_of!(Range, flags), offset_of!(Range, first), offset_of!(Range, last), offset_of!(Range, first_port))
    };
    let flags = u32_at(info, flags_at)?;
    let first_address = info.get(first_at..first_at + address_len)?;
    let last_address = info.get(last_at..last_at + address_len)?;
    // The last port is the two bytes after the first.
    let (first_port, last_port) = (be16_at(info, first_port_at)?, be16_at(info, first_port_at + 2)?);
    let has_address = flags & MAP_IPS != 0;
    let has_other_flags = flags & !(MAP_IPS | PROTO_SPECIFIED) != 0;
    if !has_address || has_other_flags || first_address != last_address {
        return None;
    }
    let address = from_octets(first_address)?;
    if flags & PROTO_SPECIFIED == 0 {
        return Some(address.to_string());
    }
    if first_port != last_port {
        return None;
    }
    Some(std::net::SocketAddr::new(address, first_port).to_string())
}
