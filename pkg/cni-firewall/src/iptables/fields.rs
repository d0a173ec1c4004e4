//! Reads and names what rules of nf_tables compare: addresses, interfaces and protocols.

use cni::cidr::from_octets;
use cni_linux::route::Family;

/// Reads `bytes`, which must be four, as a number in the machine's byte order.
pub(super) fn number(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_ne_bytes)
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
        Some(mask) if mask.len() != data.len() => return None,
        Some(mask) => {
            let mut bits = [0; 16];
            bits[..mask.len()].copy_from_slice(mask);
            let bits = u128::from_be_bytes(bits);
            if bits.count_ones() != bits.leading_ones() {
                return None;
            }
            bits.leading_ones() as usize
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
