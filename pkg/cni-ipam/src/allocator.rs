//! Chooses the address that an attachment gets from each range set. Nothing is reserved and no file
//! is read: the caller provides the occupied addresses.
//!
//! The allocation is a round robin: it continues after the address that was allocated last, so that
//! a released address stays unused as long as possible. A runtime may request one address for each
//! set, in several places ([`Requested`]).

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

use cni::config::parse_requested_address;
use cni::rollback::Notes;
use cni::{Code, Error, Result};

use crate::ranges::{Range, RangeSet, RangeSets, address, number};

/// All addresses of both families, as blocks: pairs of the first and the last address.
pub(crate) const ALL: [(IpAddr, IpAddr); 2] = [
    (IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::BROADCAST)),
    (IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::from_bits(u128::MAX))),
];

/// Returns the next free address of a set after `last`, the address that was allocated last. Begins
/// with the first range if `last` is `None` or in none of the ranges. Only addresses in one of
/// `blocks`, which are sorted, are returned. Returns `None` if all these are occupied.
pub(crate) fn next_in_round_robin<E>(
    set: &RangeSet,
    blocks: &[(IpAddr, IpAddr)],
    last: Option<IpAddr>,
    mut is_occupied: impl FnMut(IpAddr) -> Result<bool, E>,
) -> Result<Option<IpAddr>, E> {
    let ranges = set.ranges();
    // All ranges of a set have the same family.
    let Some(like) = ranges.first().map(Range::first) else { return Ok(None) };
    let whole = |range: &Range| number(range.first())..=number(range.last());
    let range_of = |address: IpAddr| ranges.iter().position(|range| range.contains(address));
    // The numbers of the set's addresses in the order of the search.
    let mut parts: Vec<RangeInclusive<u128>> = Vec::with_capacity(ranges.len() + 1);
    match last.and_then(|last| Some((number(last), range_of(last)?))) {
        Some((last, current)) => {
            // The rest of the current range, then the other ranges in order, then the beginning of
            // the current range up to the last address itself.
            let (first, end) = whole(&ranges[current]).into_inner();
            parts.extend(last.checked_add(1).map(|next| next..=end));
            parts.extend(ranges[current + 1..].iter().chain(&ranges[..current]).map(whole));
            parts.push(first..=last);
        }
        None => parts.extend(ranges.iter().map(whole)),
    }
    let in_family = |(first, _): &&(IpAddr, IpAddr)| first.is_ipv4() == like.is_ipv4();
    let common = |part: &RangeInclusive<u128>, (first, last): &(IpAddr, IpAddr)| {
        number(*first).max(*part.start())..=number(*last).min(*part.end())
    };
    let numbers =
        parts.iter().flat_map(|part| blocks.iter().filter(in_family).flat_map(move |block| common(part, block)));
    for number in numbers {
        let candidate = address(like, number);
        if !is_occupied(candidate)? && !set.is_gateway(candidate) {
            return Ok(Some(candidate));
        }
    }
    Ok(None)
}

/// Whether a block has an address of the set that can be allocated and is not one of `occupied`,
/// which are sorted. The blocks are sorted too.
pub fn has_free(set: &RangeSet, blocks: &[(IpAddr, IpAddr)], occupied: &[IpAddr]) -> bool {
    let is_occupied = |address| Ok::<_, Infallible>(occupied.binary_search(&address).is_ok());
    matches!(next_in_round_robin(set, blocks, None, is_occupied), Ok(Some(_)))
}

/// The requested addresses of each source, such as `runtimeConfig.ips`. The sources are in the
/// order of their precedence, the highest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Requested {
    sources: Vec<(&'static str, Vec<IpAddr>)>,
}

impl Requested {
    /// Returns a request for no particular address.
    pub fn none() -> Requested {
        Requested::default()
    }

    /// Adds the addresses of a source, which has lower precedence than all sources before it. Each
    /// text is `address` or `address/length`. The length is ignored.
    ///
    /// # Errors
    /// Code 7 with Go's text for an empty or malformed text.
    pub fn add<'a>(&mut self, source: &'static str, texts: impl IntoIterator<Item = &'a str>) -> Result<()> {
        let mut addresses: Vec<IpAddr> = Vec::new();
        for text in texts {
            if text.is_empty() {
                return Err(Error::config("cannot understand ip: IP <nil> not v4 nor v6").with_details(source));
            }
            let address = parse_requested_address(text).map_err(|error| error.with_details(source))?;
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        self.sources.push((source, addresses));
        Ok(())
    }

    /// Returns the requested address of each set, or `None` for a set without one. Writes a note
    /// about an address that a source of higher precedence overrides.
    ///
    /// # Errors
    /// Code 7 with Go's text if an address is in no set, or if one source names several addresses
    /// of one set.
    pub fn assign(&self, sets: &RangeSets, notes: &Notes) -> Result<Vec<Option<IpAddr>>> {
        // The requested address of each set, with the source that requests it.
        let mut choices: Vec<Option<(IpAddr, &str)>> = vec![None; sets.sets().len()];
        let mut refused = Vec::new();
        for (source, addresses) in &self.sources {
            for address in addresses {
                let Some(set) = sets.sets().iter().position(|set| set.find(*address).is_some()) else {
                    refused.push(*address);
                    continue;
                };
                match choices[set] {
                    None => choices[set] = Some((*address, source)),
                    Some((chosen, _)) if chosen == *address => {}
                    Some((_, chosen_by)) if chosen_by == *source => refused.push(*address),
                    Some((chosen, chosen_by)) => {
                        notes.note(format_args!(
                            "{address} from {source} is not used, because {chosen_by} requests {chosen}"
                        ));
                    }
                }
            }
        }
        if refused.is_empty() {
            return Ok(choices.into_iter().map(|choice| choice.map(|(address, _)| address)).collect());
        }
        refused.dedup();
        let refused: Vec<String> = refused.iter().map(IpAddr::to_string).collect();
        let msg = format!("failed to allocate all requested IPs: {}", refused.join(" "));
        Err(Error::new(Code::INVALID_CONFIG, msg)
            .with_details("a requested address must be in a range set, and each range set provides one address"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranges::RangeConf;
    use proptest::prelude::*;
    use std::cell::RefCell;
    use std::collections::BTreeSet;
    use std::rc::Rc;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn set(ranges: &[(&str, &str, &str, &str)]) -> RangeSet {
        let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let conf = |(subnet, start, end, gateway): &(&str, &str, &str, &str)| RangeConf {
            subnet: text(subnet),
            range_start: text(start),
            range_end: text(end),
            gateway: text(gateway),
        };
        RangeSet::check(&ranges.iter().map(conf).collect::<Vec<_>>()).unwrap()
    }

    fn next(set: &RangeSet, last: Option<IpAddr>, taken: &BTreeSet<IpAddr>) -> Option<IpAddr> {
        let Ok(next) = next_in_round_robin(set, &ALL, last, |address| Ok::<_, Infallible>(taken.contains(&address)));
        next
    }

    fn after(set: &RangeSet, last: Option<&str>, taken: &[&str]) -> Option<String> {
        let taken: BTreeSet<IpAddr> = taken.iter().map(|text| ip(text)).collect();
        next(set, last.map(ip), &taken).map(|address| address.to_string())
    }

    #[test]
    fn the_first_address_follows_the_gateway() {
        let net = set(&[("10.0.0.0/29", "", "", "")]);
        assert_eq!(after(&net, None, &[]).as_deref(), Some("10.0.0.2"));
        assert_eq!(after(&net, Some("10.0.0.2"), &[]).as_deref(), Some("10.0.0.3"), "free again, but not its turn");
    }

    #[test]
    fn round_robin_wraps_and_ignores_addresses_out_of_range() {
        let net = set(&[("10.0.0.0/29", "", "", "")]);
        assert_eq!(after(&net, Some("10.0.0.6"), &[]).as_deref(), Some("10.0.0.2"));
        assert_eq!(after(&net, Some("10.9.0.6"), &[]).as_deref(), Some("10.0.0.2"));
        let all = ["10.0.0.2", "10.0.0.3", "10.0.0.5", "10.0.0.6"];
        assert_eq!(
            after(&net, Some("10.0.0.4"), &all).as_deref(),
            Some("10.0.0.4"),
            "the last one tried is the last itself"
        );
    }

    #[test]
    fn a_slash_30_gives_one_address() {
        let net = set(&[("10.0.0.0/30", "", "", "")]);
        assert_eq!(after(&net, None, &[]).as_deref(), Some("10.0.0.2"));
        assert_eq!(after(&net, Some("10.0.0.2"), &["10.0.0.2"]), None);
    }

    #[test]
    fn ranges_of_a_set_are_used_in_order() {
        let pool = set(&[("10.0.0.0/30", "", "", ""), ("10.1.0.0/30", "", "", "")]);
        assert_eq!(after(&pool, Some("10.0.0.2"), &["10.0.0.2"]).as_deref(), Some("10.1.0.2"));
        assert_eq!(after(&pool, Some("10.1.0.2"), &["10.1.0.2"]).as_deref(), Some("10.0.0.2"));
    }

    #[test]
    fn allocation_stops_at_the_last_address_of_a_family() {
        let v4 = set(&[("255.255.255.0/24", "255.255.255.254", "255.255.255.255", "")]);
        assert_eq!(after(&v4, Some("255.255.255.254"), &[]).as_deref(), Some("255.255.255.255"));
        assert_eq!(after(&v4, Some("255.255.255.255"), &[]).as_deref(), Some("255.255.255.254"));
        let last = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff";
        let v6 = set(&[(
            "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ff00/120",
            "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe",
            last,
            "",
        )]);
        assert_eq!(after(&v6, Some(last), &[]).as_deref(), Some("ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe"));
        assert_eq!(after(&v6, None, &["ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe"]).as_deref(), Some(last));
        let gateway = set(&[("255.255.255.0/24", "255.255.255.254", "255.255.255.255", "255.255.255.255")]);
        assert_eq!(after(&gateway, Some("255.255.255.254"), &["255.255.255.254"]), None);
    }

    #[test]
    fn only_addresses_in_a_block_are_allocated() {
        let pool = set(&[("10.0.0.0/24", "10.0.0.6", "", ""), ("10.1.0.0/16", "", "", "")]);
        let blocks = ["10.0.0.0-10.0.0.7", "10.1.200.0-10.1.200.1", "fd00::-fd00::f"]
            .map(|text| text.split_once('-').map(|(first, last)| (ip(first), ip(last))).unwrap());
        let mut allocated = Vec::new();
        let mut last = Some(ip("10.0.0.7"));
        while let Ok(Some(next)) =
            next_in_round_robin(&pool, &blocks, last, |address| Ok::<_, Infallible>(allocated.contains(&address)))
        {
            allocated.push(next);
            last = Some(next);
        }
        assert_eq!(allocated, ["10.1.200.0", "10.1.200.1", "10.0.0.6", "10.0.0.7"].map(ip));
        assert!(has_free(&pool, &blocks, &["10.0.0.6", "10.0.0.7", "10.1.200.0"].map(ip)));
        assert!(!has_free(&pool, &blocks, &["10.0.0.6", "10.0.0.7", "10.1.200.0", "10.1.200.1"].map(ip)));
        assert!(!has_free(&pool, &[], &[]));
    }

    #[test]
    fn one_block_of_a_large_network_is_found_at_once() {
        let pool = set(&[("fd00::/64", "", "", "")]);
        let block = [(ip("fd00::ffff:0:0"), ip("fd00::ffff:0:1"))];
        let next = next_in_round_robin(&pool, &block, Some(ip("fd00::1")), |_| Ok::<_, Infallible>(false));
        assert_eq!(next, Ok(Some(ip("fd00::ffff:0:0"))));
    }

    proptest! {
        #[test]
        fn every_address_except_gateways_is_allocated_once(
            first in 0u8..10, size in 1u8..20, gap in 1u8..5, second in 1u8..20, gateway in 0u8..40, start in 0u8..60,
        ) {
            let at = |offset: u8| format!("10.0.0.{offset}");
            let (end, begin) = (first + size, first + size + gap);
            let pool = set(&[
                ("10.0.0.0/24", &at(first), &at(end), &at(gateway)),
                ("10.0.0.0/24", &at(begin), &at(begin + second), "10.0.0.200"),
            ]);
            let mut taken = BTreeSet::new();
            let mut last = Some(ip(&at(start)));
            while let Some(found) = next(&pool, last, &taken) {
                prop_assert!(pool.find(found).is_some() && !pool.is_gateway(found));
                prop_assert!(taken.insert(found), "{} came twice", found);
                last = Some(found);
            }
            prop_assert_eq!(taken.len() as u128, pool.capacity());
        }
    }

    fn two_sets() -> RangeSets {
        let conf = |subnet: &str| vec![RangeConf { subnet: Some(subnet.to_owned()), ..RangeConf::default() }];
        RangeSets::check(&[], &RangeConf::default(), &[conf("10.0.0.0/24"), conf("fd00::/64")]).unwrap()
    }

    fn requested(sources: &[(&'static str, &[&str])]) -> Requested {
        let mut requested = Requested::none();
        for (source, texts) in sources {
            requested.add(source, texts.iter().copied()).unwrap();
        }
        requested
    }

    #[test]
    fn the_strongest_source_wins_and_the_loser_is_logged() {
        let lines = Rc::new(RefCell::new(Vec::new()));
        let sink = Rc::clone(&lines);
        let notes = Notes::new(move |line| sink.borrow_mut().push(line.to_owned()));
        let requested =
            requested(&[("ips", &["10.0.0.5/24"]), ("args", &["10.0.0.6", "fd00::7"]), ("IP", &["10.0.0.5"])]);
        let assigned = requested.assign(&two_sets(), &notes).unwrap();
        assert_eq!(assigned, [Some(ip("10.0.0.5")), Some(ip("fd00::7"))]);
        assert_eq!(*lines.borrow(), ["10.0.0.6 from args is not used, because ips requests 10.0.0.5"]);
    }

    #[test]
    fn an_address_outside_all_sets_fails_with_gos_text() {
        for (sources, msg) in [
            (&[("ips", &["1.1.1.1", "10.0.0.5"][..])][..], "failed to allocate all requested IPs: 1.1.1.1"),
            (&[("ips", &["10.0.0.5", "10.0.0.6"])], "failed to allocate all requested IPs: 10.0.0.6"),
            (&[("ips", &["10.0.0.5"]), ("IP", &["1.1.1.1"])], "failed to allocate all requested IPs: 1.1.1.1"),
        ] {
            let error = requested(sources).assign(&two_sets(), &Notes::silent()).unwrap_err();
            assert_eq!((error.msg(), error.code()), (msg, Code::INVALID_CONFIG));
        }
        for (text, msg) in [
            ("foo", "invalid IP address foo"),
            ("", "cannot understand ip: IP <nil> not v4 nor v6"),
            ("1.1.1.1/33", "invalid IP address 1.1.1.1/33"),
        ] {
            assert_eq!(Requested::none().add("ips", [text]).unwrap_err().msg(), msg);
        }
    }
}
