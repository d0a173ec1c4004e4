//! The ranges that ADDs have asked for in this boot, for STATUS, which is not given those of the runtime.
//!
//! It remembers and forgets; it judges nothing. What a newcomer gets wrong: pods of one network may come with different
//! ranges, so one that is full says little; only if all that are known are full is the next ADD sure to fail.

use std::net::IpAddr;

use super::bits::Family;
use super::header::{Reader, Writer};
use super::record::to_address;
use crate::ranges::{Range, RangeSet, RangeSets, number};

/// How many ranges are remembered in all.
pub(super) const RANGES: usize = 28;
/// How many bytes a range takes in the page.
pub(super) const RANGE: usize = 9 * 8;

/// What was asked for, the latest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked(Vec<RangeSets>);

impl Asked {
    /// Everything that is remembered, the latest first.
    pub(crate) fn all(&self) -> &[RangeSets] {
        &self.0
    }

    /// Remembers what an ADD asks for; the oldest makes way. What is too large alone is not remembered.
    pub(crate) fn remember(&mut self, sets: &RangeSets) {
        if self.0.first() == Some(sets) {
            return;
        }
        self.0.retain(|known| known != sets);
        self.0.insert(0, sets.clone());
        while self.0.iter().map(size).sum::<usize>() > RANGES {
            self.0.pop();
        }
    }

    pub(super) fn encode(&self, page: &mut Writer) {
        page.u64(self.0.iter().map(size).sum::<usize>() as u64);
        for (asked, sets) in self.0.iter().enumerate() {
            for (set, range) in
                sets.sets().iter().enumerate().flat_map(|(i, set)| set.ranges().iter().map(move |r| (i, r)))
            {
                page.u64((asked as u64) << 32 | set as u64);
                page.u64(u64::from(range.subnet().prefix()));
                for address in [range.first(), range.last(), range.gateway()] {
                    page.u128(number(address));
                }
                page.u64(u64::from(family(range.first()).number()) << 8 | u64::from(family(range.gateway()).number()));
            }
        }
    }

    pub(super) fn decode(page: &mut Reader<'_>) -> Option<Asked> {
        let count = usize::try_from(page.u64()?).ok().filter(|count| *count <= RANGES)?;
        let mut asked: Vec<Vec<Vec<Range>>> = Vec::new();
        for _ in 0..count {
            let place = page.u64()?;
            let prefix = u8::try_from(page.u64()?).ok()?;
            let (first, last, gateway) = (page.u128()?, page.u128()?, page.u128()?);
            let families = page.u64()?;
            let (own, other) = ((families >> 8) as u8, families as u8);
            let range =
                Range::restored(prefix, to_address(own, first), to_address(own, last), to_address(other, gateway))?;
            // Written in order, so that each is the last one or behind it.
            let (position, set) = ((place >> 32) as usize, place as u32 as usize);
            if position == asked.len() {
                asked.push(Vec::new());
            }
            let sets = asked.get_mut(position)?;
            if set == sets.len() {
                sets.push(Vec::new());
            }
            sets.get_mut(set)?.push(range);
        }
        let sets = |sets: Vec<Vec<Range>>| RangeSets::restored(sets.into_iter().map(RangeSet::restored).collect());
        Some(Asked(asked.into_iter().map(sets).collect()))
    }
}

fn family(address: IpAddr) -> Family {
    super::record::family(address)
}

fn size(sets: &RangeSets) -> usize {
    sets.sets().iter().map(|set| set.ranges().len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranges::RangeConf;

    fn sets(subnets: &[&[&str]]) -> RangeSets {
        let conf = |subnet: &&str| RangeConf {
            subnet: Some((*subnet).to_owned()),
            gateway: Some("fd00:9::1".to_owned()),
            ..RangeConf::default()
        };
        let sets: Vec<Vec<RangeConf>> = subnets.iter().map(|set| set.iter().map(conf).collect()).collect();
        RangeSets::check(&[], &RangeConf::default(), &sets).unwrap()
    }

    #[test]
    fn what_was_asked_for_survives_the_page_and_the_latest_comes_first() {
        let (one, two) = (sets(&[&["10.0.0.0/24", "10.1.0.0/28"], &["fd00::/64"]]), sets(&[&["0.0.0.0/0"]]));
        let mut asked = Asked::default();
        for sets in [&one, &two, &two, &one] {
            asked.remember(sets);
        }
        assert_eq!(asked.all(), [one, two]);
        let mut page = Writer(Vec::new());
        asked.encode(&mut page);
        assert_eq!(page.0.len(), 8 + 4 * RANGE);
        assert_eq!(Asked::decode(&mut Reader(&page.0)), Some(asked));
    }

    #[test]
    fn the_oldest_makes_way() {
        let mut asked = Asked::default();
        for n in 0..40 {
            asked.remember(&sets(&[&[&format!("10.{n}.0.0/24")]]));
        }
        assert_eq!(asked.all().len(), RANGES);
        assert_eq!(asked.all()[0], sets(&[&["10.39.0.0/24"]]));
        let subnets: Vec<String> = (0..40).map(|n| format!("10.{n}.0.0/24")).collect();
        asked.remember(&sets(&[&subnets.iter().map(String::as_str).collect::<Vec<_>>()]));
        assert_eq!(asked.all(), [] as [RangeSets; 0], "too large to be remembered, so nothing is known");
    }
}
