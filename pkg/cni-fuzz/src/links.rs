//! The other files of host-local's store: names of links, and released addresses. Only one name is
//! accepted for a link, and the file of released addresses is read as it was written.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cni_ipam::fuzzing::{read_link, rewritten_releases};

use crate::input::Input;

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    drop(rewritten_releases(data, 1 << 40));
    read_link(&String::from_utf8_lossy(data));
}

/// Returns an address. Most are from a few small networks, so that they are often neighbours; three
/// of these networks are at an end of their address family.
pub(crate) fn address(input: &mut Input<'_>) -> IpAddr {
    let low = input.u16();
    match input.byte() % 6 {
        0 => Ipv4Addr::from_bits(0x0a00_0000 | u32::from(low & 0x3ff)).into(),
        1 => Ipv4Addr::from_bits(u32::MAX - u32::from(low & 0xff)).into(),
        2 => Ipv4Addr::from_bits(u32::from(low & 0xff)).into(),
        3 => Ipv6Addr::from_bits(0xfd00 << 112 | u128::from(low & 0x3ff)).into(),
        4 => Ipv6Addr::from_bits(u128::MAX - u128::from(low & 0xff)).into(),
        _ => Ipv6Addr::from_bits(input.u128()).into(),
    }
}
