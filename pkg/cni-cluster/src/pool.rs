//! Pools and their blocks: names, sizes, and the order in which a node tries to claim the blocks.

use std::fmt;
use std::net::IpAddr;

use cni::{Cidr, Error, Result};
use cni_ipam::ranges::{Range, RangeSet, address, number};
use serde::{Deserialize, Serialize};

/// The largest number of addresses of a block.
pub const MAX_BLOCK_SIZE: u32 = 65_536;

/// A block: a power of two of addresses of a pool, aligned to that number.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Block {
    /// The first address. It differs in most blocks, so it is the first to be compared.
    pub first: IpAddr,
    /// The last address, in the same family.
    pub last: IpAddr,
    /// The name of the pool.
    pub pool: String,
}

impl Block {
    /// Returns the block of `size` addresses that contains an address of this pool.
    pub fn of(pool: &str, size: u32, member: IpAddr) -> Block {
        let above_first = u128::from(size).saturating_sub(1);
        let first = number(member) & !above_first;
        Block { pool: pool.to_owned(), first: address(member, first), last: address(member, first | above_first) }
    }

    /// Whether the addresses are of one family, and the first one is not after the last one.
    pub(crate) fn is_valid(&self) -> bool {
        self.first.is_ipv4() == self.last.is_ipv4() && self.first <= self.last
    }

    /// Whether the address is in the block.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.first <= address && address <= self.last
    }

    /// Whether one of the addresses is in the block.
    pub fn contains_any(&self, addresses: &[IpAddr]) -> bool {
        addresses.iter().any(|address| self.contains(*address))
    }

    /// Whether the block has an address in the set that is not a gateway.
    fn has_usable(&self, set: &RangeSet, gateways: &[IpAddr]) -> bool {
        set.ranges().iter().any(|range| {
            let (first, last) = (range.first().max(self.first), range.last().min(self.last));
            let is_inside = |gateway: &&IpAddr| first <= **gateway && **gateway <= last;
            first <= last && number(last) - number(first) >= gateways.iter().filter(is_inside).count() as u128
        })
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}-{} of pool {}", self.first, self.last, self.pool)
    }
}

/// Returns an address as it is spelled in names: IPv6 in full with `-` for `:`.
pub fn address_name(address: IpAddr) -> String {
    match address {
        IpAddr::V4(v4) => v4.to_string(),
        IpAddr::V6(v6) => v6.segments().map(|segment| format!("{segment:04x}")).join("-"),
    }
}

/// Returns the name of the pool of a subnet: `10.61.0.0-24`, or `<layer2>.10.61.0.0-24` with a
/// layer 2 network.
pub fn name(layer2: &str, subnet: Cidr) -> String {
    let separator = if layer2.is_empty() { "" } else { "." };
    format!("{layer2}{separator}{}-{}", address_name(subnet.network().address()), subnet.prefix())
}

/// Checks the value of the key `layer2`.
///
/// # Errors
/// Code 7 for anything but nothing, or 1 to 40 lower-case letters, digits and inner `-`.
pub fn check_layer2(layer2: &str) -> Result<()> {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if layer2.len() <= 40 && layer2.bytes().all(is_allowed) && layer2.trim_matches('-') == layer2 {
        return Ok(());
    }
    let rule = "it must have 1 to 40 lower-case letters, digits and \"-\", and begin and end with a letter or digit";
    Err(Error::config(format!("invalid layer2 {layer2:?}: {rule}")))
}

/// Checks the value of the key `blockSize`.
///
/// # Errors
/// Code 7 for anything but a power of two from 1 to 65536.
pub fn check_block_size(size: u32) -> Result<()> {
    if size.is_power_of_two() && size <= MAX_BLOCK_SIZE {
        return Ok(());
    }
    Err(Error::config(format!("invalid blockSize {size}: it must be a power of two from 1 to {MAX_BLOCK_SIZE}")))
}

/// Returns the size of the blocks of a new pool: the largest power of two from 1 to 256 that is at
/// most 1/64 of this number of addresses, which the network's ranges have in the subnet.
pub fn default_block_size(addresses: u128) -> u32 {
    1 << (addresses / 64).clamp(1, 256).ilog2()
}

/// Returns the blocks with at least one address that can be allocated from `set`, each once.
/// `pool_of` returns the name and the block size of a range's pool.
///
/// The first block and the step to the next one depend on `seed`, so that the nodes begin at
/// different blocks, and a node gets the same blocks again. If one of the blocks in `newest` is in
/// the set, the order begins after the first of them: a node that tried the blocks before it has
/// found them claimed.
pub fn candidates<'a>(
    set: &'a RangeSet,
    pool_of: &dyn Fn(&Range) -> (String, u32),
    seed: &str,
    newest: &[Block],
) -> impl Iterator<Item = Block> + use<'a> {
    // The blocks of each range: pool, size, first and last number, and the first one's position in
    // the order of all blocks.
    type Span = (String, u32, u128, u128, u128);
    let mut spans: Vec<Span> = Vec::with_capacity(set.ranges().len());
    let mut total = 0_u128;
    for range in set.ranges() {
        let (pool, size) = pool_of(range);
        let block_number = |member: IpAddr| number(member) / u128::from(size);
        let (first, last) = (block_number(range.first()), block_number(range.last()));
        spans.push((pool, size, first, last, total));
        total = total.saturating_add(last - first).saturating_add(1);
    }
    let hash = cni::hash::sha512(&[seed.as_bytes()]);
    let hash_number = |at: usize| hash[at..at + 8].iter().fold(0, |sum, byte| sum << 8 | u128::from(*byte));
    let mut step = hash_number(8) % total;
    // The step visits all blocks if it has no divisor in common with their number.
    while greatest_common_divisor(step, total) != 1 {
        step += 1;
    }
    let position_of = |spans: &[Span], block: &Block| {
        spans.iter().find_map(|(pool, size, first, last, start)| {
            let number = number(block.first) / u128::from(*size);
            (*pool == block.pool && (*first..=*last).contains(&number)).then(|| start + number - first)
        })
    };
    let newest = newest.iter().find_map(|block| position_of(&spans, block));
    let start = newest.map_or(hash_number(0) % total, |position| position + step);
    let gateways = set.inner_gateways();
    (0..total).filter_map(move |turn| {
        let position = (start + turn * step) % total;
        let at = spans.partition_point(|(.., start)| *start <= position) - 1;
        let (pool, size, first, _, start) = &spans[at];
        let member = address(set.ranges()[at].first(), (first + position - start) * u128::from(*size));
        let block = Block::of(pool, *size, member);
        // Two ranges may have addresses in one block. It counts only in the first of them.
        (position_of(&spans, &block) == Some(position) && block.has_usable(set, &gateways)).then_some(block)
    })
}

/// Returns the greatest common divisor; of 0 and a number, the number.
fn greatest_common_divisor(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni_ipam::RangeConf;
    use std::collections::BTreeSet;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Returns the set of these ranges, each as subnet, first and last address.
    fn set(ranges: &[(&str, &str, &str)]) -> RangeSet {
        let conf = |(subnet, first, last): &(&str, &str, &str)| {
            let json = serde_json::json!({ "subnet": subnet, "rangeStart": first, "rangeEnd": last });
            serde_json::from_value::<RangeConf>(json).unwrap()
        };
        RangeSet::check(&ranges.iter().map(conf).collect::<Vec<_>>()).unwrap()
    }

    /// Returns the first addresses of the candidates of blocks of this size, in their order.
    fn firsts(set: &RangeSet, size: u32, seed: &str) -> Vec<String> {
        let pool_of = |range: &Range| (name("", range.subnet()), size);
        candidates(set, &pool_of, seed, &[]).map(|block| block.first.to_string()).collect()
    }

    #[test]
    fn a_pool_has_the_name_of_its_subnet() {
        let subnet = |text: &str| text.parse::<Cidr>().unwrap();
        assert_eq!(name("", subnet("10.61.0.7/24")), "10.61.0.0-24");
        assert_eq!(name("vlan20", subnet("10.61.0.0/24")), "vlan20.10.61.0.0-24");
        assert_eq!(name("", subnet("fd00:61::/64")), "fd00-0061-0000-0000-0000-0000-0000-0000-64");
    }

    #[test]
    fn a_layer2_name_can_be_part_of_an_object_name() {
        for valid in ["", "a", "vlan-20", "0", &"x".repeat(40)] {
            assert!(check_layer2(valid).is_ok(), "{valid}");
        }
        for invalid in ["-a", "a-", "A", "a.b", "a_b", "\u{e4}", &"x".repeat(41)] {
            assert_eq!(check_layer2(invalid).unwrap_err().code(), cni::Code::INVALID_CONFIG, "{invalid}");
        }
    }

    #[test]
    fn a_block_size_is_a_power_of_two_up_to_65536() {
        let is_valid = |size: &u32| check_block_size(*size).is_ok();
        let valid: Vec<u32> = (0..70_000).filter(is_valid).collect();
        assert_eq!(valid, (0..=16).map(|exponent| 1 << exponent).collect::<Vec<_>>());
    }

    #[test]
    fn the_default_block_size_is_a_64th_of_the_addresses() {
        for (addresses, size) in
            [(0, 1), (5, 1), (127, 1), (128, 2), (254, 2), (4094, 32), (16_384, 256), (u128::MAX, 256)]
        {
            assert_eq!(default_block_size(addresses), size, "{addresses}");
        }
    }

    #[test]
    fn a_block_is_aligned_to_its_size() {
        for (member, size, first, last) in [
            ("10.61.0.77", 64, "10.61.0.64", "10.61.0.127"),
            ("10.61.0.77", 1, "10.61.0.77", "10.61.0.77"),
            ("255.255.255.255", 65_536, "255.255.0.0", "255.255.255.255"),
            ("fd00::1:5", 256, "fd00::1:0", "fd00::1:ff"),
        ] {
            let expected = Block { pool: "p".to_owned(), first: address(first), last: address(last) };
            assert_eq!(Block::of("p", size, address(member)), expected);
            assert!(expected.contains(address(member)) && !expected.contains(address("9.0.0.1")));
        }
    }

    #[test]
    fn candidates_are_all_blocks_in_an_order_of_the_node() {
        let set = set(&[("10.61.0.0/20", "10.61.0.10", "10.61.15.250")]);
        let (one, other) = (firsts(&set, 16, "node1 net"), firsts(&set, 16, "node2 net"));
        assert_eq!((one.len(), other.len()), (256, 256));
        assert_ne!(one, other);
        assert_eq!(one, firsts(&set, 16, "node1 net"));
        let distinct: BTreeSet<&String> = one.iter().collect();
        assert_eq!(distinct, other.iter().collect());
        assert_eq!(distinct.len(), 256);
    }

    #[test]
    fn the_order_goes_on_after_the_newest_block() {
        let set = set(&[("10.61.0.0/24", "10.61.0.9", "10.61.0.40"), ("10.62.0.0/24", "", "")]);
        let pool_of = |range: &Range| (name("", range.subnet()), 4);
        let all: Vec<Block> = candidates(&set, &pool_of, "n", &[]).collect();
        let foreign = Block::of("10.63.0.0-24", 4, address("10.61.0.12"));
        for at in 0..all.len() {
            let after: Vec<Block> = candidates(&set, &pool_of, "n", &[foreign.clone(), all[at].clone()]).collect();
            let (before, rest) = all.split_at(at + 1);
            assert_eq!(after, [rest, before].concat(), "{}", all[at]);
        }
    }

    #[test]
    fn candidates_have_an_address_that_is_not_a_gateway() {
        // .1 is the gateway; .0 and .7 are the subnet's first and last address.
        let eight = firsts(&set(&[("10.61.0.0/29", "", "")]), 1, "n");
        let eight: BTreeSet<&str> = eight.iter().map(String::as_str).collect();
        assert_eq!(
            eight,
            (2..=6).map(|n| format!("10.61.0.{n}")).collect::<Vec<_>>().iter().map(String::as_str).collect()
        );
    }

    #[test]
    fn a_block_of_several_ranges_is_one_candidate() {
        let set = set(&[
            ("10.61.0.0/24", "10.61.0.100", "10.61.0.110"),
            ("10.61.0.0/24", "10.61.0.65", "10.61.0.70"),
            ("10.62.0.0/24", "10.62.0.10", "10.62.0.20"),
        ]);
        let mut firsts = firsts(&set, 64, "n");
        firsts.sort();
        assert_eq!(firsts, ["10.61.0.64", "10.62.0.0"]);
    }

    #[test]
    fn candidates_of_a_huge_range_come_at_once() {
        for (subnet, size) in [("fd00:61::/64", 256), ("::/0", 1)] {
            let set = set(&[(subnet, "", "")]);
            let pool_of = |range: &Range| (name("", range.subnet()), size);
            let first: BTreeSet<Block> = candidates(&set, &pool_of, "n", &[]).take(100).collect();
            assert_eq!(first.len(), 100, "{subnet}");
        }
    }
}
