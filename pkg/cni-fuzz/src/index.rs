//! The index of host-local's store: a file with a header and a table of addresses. A valid header
//! is written back unchanged. A query to a forged table with valid checksums returns an answer or
//! an error about damage, and does not panic. An index that is kept up to date agrees with a model.
//!
//! The input: one byte that selects what follows: a header, the entries of a forged table, changes
//! to an index, or a header without its checksum, which the target adds. Every input is also
//! read as the file of released addresses, which is read as it was written.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cni_ipam::fuzzing::{
    ConsistentIndex, CraftedEntry, ask_forged, read_forged_header, read_header, rewritten_releases,
};

use crate::input::Input;

/// Runs the target with one input.
pub fn run(data: &[u8]) {
    drop(rewritten_releases(data, 1 << 40));
    let mut input = Input::new(data);
    match input.byte() % 4 {
        0 => drop(read_header(input.rest())),
        1 => {
            let addresses: Vec<IpAddr> = (0..3).map(|_| address(&mut input)).collect();
            let hashes = [input.u64(), input.u64()];
            ask_forged(&entries(&mut input, 64), &addresses, &hashes);
        }
        2 => compare_with_model(&mut input),
        _ => drop(read_forged_header(input.rest())),
    }
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

/// Returns up to `max` entries of a forged index. Most have an existing tag and address family.
pub(crate) fn entries(input: &mut Input<'_>, max: usize) -> Vec<CraftedEntry> {
    let mut entries = Vec::new();
    while !input.is_empty() && entries.len() < max {
        let number = match address(input) {
            IpAddr::V4(v4) => u128::from(v4.to_bits()),
            IpAddr::V6(v6) => v6.to_bits(),
        };
        let mut payload = [0; 40];
        let bytes = input.bytes();
        let length = bytes.len().min(payload.len());
        payload[..length].copy_from_slice(&bytes[..length]);
        let shift = u32::from(input.byte() % 128);
        entries.push(CraftedEntry {
            slot: u64::from(input.u16()),
            tag: input.one_of(&[1, 2, 16, 255, 0]),
            family: input.one_of(&[4, 6, 0, 9]),
            rank: u32::from(input.byte()),
            number: number >> shift,
            payload,
        });
    }
    entries
}

/// Makes up to 200 changes to an index and to a model, a map from each address to the hash of its
/// holder, and compares the answers of both.
fn compare_with_model(input: &mut Input<'_>) {
    let mut index = ConsistentIndex::new();
    let mut model: BTreeMap<IpAddr, u64> = BTreeMap::new();
    for _ in 0..200 {
        if input.is_empty() {
            break;
        }
        let (address, selector) = (address(input), input.byte() % 8);
        if selector == 0 {
            index.set(address, None);
            model.remove(&address);
        } else {
            // The hashes 0 to 2 stand for addresses without a known holder.
            let hash = u64::from(selector) + 2;
            index.set(address, Some(hash));
            model.insert(address, hash);
        }
        assert_eq!(index.holder(address), model.get(&address).copied(), "the holder of {address}");
    }
    assert_eq!(index.len(), model.len(), "the number of addresses");
    for hash in 3..10 {
        let held: Vec<IpAddr> =
            model.iter().filter(|(_, holder)| **holder == hash).map(|(address, _)| *address).collect();
        assert_eq!(index.held(hash), held, "the addresses of the holder {hash}");
    }
}
