//! Ranges and range sets of a configuration, checked by Go's rules and refused with Go's texts.
//!
//! An attachment gets one address from each range *set*; the ranges of a set are one pool.
//!
//! As in Go:
//!
//! - A gateway may be outside its subnet.
//! - By default, a range begins at the network's first host, which is also the default gateway and
//!   is not allocated.
//! - Network and broadcast address may be allocated if the range is configured to include them.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cni::{Cidr, Error, Result};
use serde::Deserialize;

/// A range as in the configuration. The values are texts, so that errors about them can have Go's
/// texts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RangeConf {
    /// The network, without host bits.
    pub subnet: Option<String>,
    /// The first address; by default the network's first host.
    pub range_start: Option<String>,
    /// The last address; by default the last one before an IPv4 broadcast address, or the last
    /// address of an IPv6 network.
    pub range_end: Option<String>,
    /// The gateway; by default the network's first host.
    pub gateway: Option<String>,
}

/// A range of addresses in one network that may be allocated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    subnet: Cidr,
    first: IpAddr,
    last: IpAddr,
    gateway: IpAddr,
}

/// Ranges of one address family that do not overlap and form one pool: an attachment gets one
/// address from the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeSet(Vec<Range>);

/// All range sets of a network, at least one. They may overlap, unless
/// [`require_disjoint`](RangeSets::require_disjoint) has succeeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeSets(Vec<RangeSet>);

/// Returns an address as a number, of 32 bits for IPv4 and 128 bits for IPv6.
pub fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// Returns the address with this number in the family of `like`. The number is truncated to 32 bits
/// for IPv4.
pub fn address(like: IpAddr, number: u128) -> IpAddr {
    match like {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::from_bits(number as u32)),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::from_bits(number)),
    }
}

/// Parses an address as Go's `net.ParseIP` does: zones and leading zeros are invalid, and an
/// IPv4-mapped address becomes IPv4. Returns `None` for an invalid text.
pub fn parse_ip(text: &str) -> Option<IpAddr> {
    text.parse::<IpAddr>().ok().map(|ip| ip.to_canonical())
}

/// Checks that there is at most one address of each family, as results of versions below 0.3.0
/// require. `are_ipv4` has an item for each address: whether it is an IPv4 address.
///
/// # Errors
/// Code 7 with Go's text.
pub fn require_one_per_family(version: &str, are_ipv4: impl Iterator<Item = bool>) -> Result<()> {
    let (mut ipv4_count, mut ipv6_count) = (0, 0);
    for is_ipv4 in are_ipv4 {
        if is_ipv4 { ipv4_count += 1 } else { ipv6_count += 1 }
    }
    if ipv4_count > 1 || ipv6_count > 1 {
        return Err(Error::config(format!("CNI version {version} does not support more than 1 address per family")));
    }
    Ok(())
}

/// Parses an address. Returns `None` if it is absent or empty.
fn optional_ip(text: Option<&str>) -> Result<Option<IpAddr>> {
    match text {
        None | Some("") => Ok(None),
        Some(text) => parse_ip(text).map(Some).ok_or_else(|| Error::config(format!("invalid IP address: {text}"))),
    }
}

impl RangeConf {
    /// Parses the texts. Returns the subnet, and an array with start, end and gateway.
    fn parse(&self) -> Result<(Option<Cidr>, [Option<IpAddr>; 3])> {
        let subnet = self.subnet.as_deref().map(str::parse::<Cidr>).transpose();
        let subnet = subnet.map_err(|error| Error::config(error.to_string()))?;
        let [start, end, gateway] =
            [&self.range_start, &self.range_end, &self.gateway].map(|text| optional_ip(text.as_deref()));
        Ok((subnet, [start?, end?, gateway?]))
    }

    /// Checks the range and returns it with the defaults.
    ///
    /// # Errors
    /// Code 7 with Go's text.
    pub fn check(&self) -> Result<Range> {
        let (subnet, [start, end, gateway]) = self.parse()?;
        let subnet = subnet.ok_or_else(|| Error::config("IP <nil> not v4 nor v6"))?;
        if subnet.prefix() > subnet.bits() - 2 {
            return Err(Error::config(format!("Network {} too small to allocate from", subnet.network())));
        }
        if !subnet.is_network() {
            return Err(Error::config(format!(
                "Network has host bits set. For a subnet mask of length {} the network address is {}",
                subnet.prefix(),
                subnet.network().address()
            )));
        }
        let base = subnet.address();
        let first_host = address(base, number(base) + 1);
        let first = start.unwrap_or(first_host);
        if !subnet.contains(first) {
            return Err(Error::config(format!("RangeStart {first} not in network {subnet}")));
        }
        let last = end.unwrap_or(match subnet.last() {
            broadcast @ IpAddr::V4(_) => address(base, number(broadcast) - 1),
            last => last,
        });
        if !subnet.contains(last) {
            return Err(Error::config(format!("RangeEnd {last} not in network {subnet}")));
        }
        if number(first) > number(last) {
            // Go has no text of its own for this case.
            return Err(Error::config(format!("RangeStart {first} not in network {subnet}"))
                .with_details(format!("the range would end at {last}, before it begins")));
        }
        Ok(Range { subnet, first, last, gateway: gateway.unwrap_or(first_host) })
    }
}

impl Range {
    /// Returns the network.
    pub fn subnet(&self) -> Cidr {
        self.subnet
    }

    /// Returns the lowest address that may be allocated.
    pub fn first(&self) -> IpAddr {
        self.first
    }

    /// Returns the highest address that may be allocated.
    pub fn last(&self) -> IpAddr {
        self.last
    }

    /// Returns the gateway, which may be outside the network and even of the other family.
    pub fn gateway(&self) -> IpAddr {
        self.gateway
    }

    /// Whether `address` is from the first to the last address, and so of their family.
    pub fn contains(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.first.is_ipv4() && (number(self.first)..=number(self.last)).contains(&number(address))
    }

    /// Whether both ranges have an address in common.
    pub fn overlaps(&self, other: &Range) -> bool {
        self.contains(other.first) || other.contains(self.first)
    }
}

/// Returns the lowest position in `ranges` of a range that overlaps another range, or `None` if no
/// ranges overlap.
///
/// Sorts the ranges by their first addresses, IPv4 before IPv6. Then each range is compared only
/// with the next one, and with the highest address of all earlier ones: a configuration may have
/// tens of thousands of ranges.
fn first_overlapping<'a>(ranges: impl Iterator<Item = &'a Range>) -> Option<usize> {
    let mut sorted: Vec<(usize, &Range)> = ranges.enumerate().collect();
    sorted.sort_unstable_by_key(|(_, range)| range.first);
    let mut highest_so_far: Option<IpAddr> = None;
    let mut overlapping: Vec<usize> = Vec::new();
    for (sorted_position, (position, range)) in sorted.iter().enumerate() {
        let overlaps_next = sorted.get(sorted_position + 1).is_some_and(|(_, next)| next.first <= range.last);
        let overlaps_earlier = highest_so_far.is_some_and(|highest| highest >= range.first);
        if overlaps_next || overlaps_earlier {
            overlapping.push(*position);
        }
        highest_so_far = highest_so_far.max(Some(range.last));
    }
    overlapping.into_iter().min()
}

/// Whether an address from `first` to `last` is in one of the ranges, which are sorted and do not
/// overlap each other.
fn overlaps_any(sorted: &[&Range], first: IpAddr, last: IpAddr) -> bool {
    // Of the ranges that begin at or before `last`, the last one reaches furthest.
    let count = sorted.partition_point(|range| range.first <= last);
    sorted[..count].last().is_some_and(|range| range.last >= first)
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl RangeSet {
    /// Checks the ranges of one set.
    ///
    /// # Errors
    /// Code 7 with Go's text. The caller adds the set's position.
    pub fn check(confs: &[RangeConf]) -> Result<RangeSet> {
        if confs.is_empty() {
            return Err(Error::config("empty range set"));
        }
        let mut ranges: Vec<Range> = Vec::with_capacity(confs.len());
        for conf in confs {
            let range = conf.check()?;
            if ranges.first().is_some_and(|first| first.subnet.is_ipv4() != range.subnet.is_ipv4()) {
                return Err(Error::config("mixed address families"));
            }
            ranges.push(range);
        }
        if let Some(position) = first_overlapping(ranges.iter()) {
            let range = &ranges[position];
            // Go names the first overlapping pair. No range before `position` overlaps another one.
            if let Some(other) = ranges[position + 1..].iter().find(|other| range.overlaps(other)) {
                return Err(Error::config(format!("subnets {range} and {other} overlap")));
            }
        }
        Ok(RangeSet(ranges))
    }

    /// Returns the ranges in the configuration's order, which is the order of the round robin.
    pub fn ranges(&self) -> &[Range] {
        &self.0
    }

    /// Whether it is a set of IPv4 addresses.
    pub fn is_ipv4(&self) -> bool {
        self.0.first().is_some_and(|range| range.subnet.is_ipv4())
    }

    /// Returns the range that contains `address`, or `None`.
    pub fn find(&self, address: IpAddr) -> Option<&Range> {
        self.0.iter().find(|range| range.contains(address))
    }

    /// Returns the ranges sorted by their addresses.
    fn sorted(&self) -> Vec<&Range> {
        let mut sorted: Vec<&Range> = self.0.iter().collect();
        sorted.sort_unstable_by_key(|range| range.first);
        sorted
    }

    /// Whether the address is the gateway of a range of the set, and so is not allocated from any
    /// range of the set.
    pub fn is_gateway(&self, address: IpAddr) -> bool {
        self.0.iter().any(|range| range.gateway == address)
    }

    /// Whether the address is in a range of the set and not a gateway of the set.
    pub fn can_allocate(&self, address: IpAddr) -> bool {
        self.find(address).is_some() && !self.is_gateway(address)
    }

    /// Returns the gateways that are inside the set's ranges, each once. They are never allocated.
    pub fn inner_gateways(&self) -> Vec<IpAddr> {
        // Sorted for a binary search: there may be thousands of ranges and gateways.
        let sorted = self.sorted();
        let is_inside = |gateway: &IpAddr| overlaps_any(&sorted, *gateway, *gateway);
        let mut gateways: Vec<IpAddr> = self.0.iter().map(Range::gateway).filter(is_inside).collect();
        gateways.sort_unstable();
        gateways.dedup();
        gateways
    }

    /// Returns the number of addresses that can be allocated. The number is at most `u128::MAX`,
    /// which is one less than the number of IPv6 addresses.
    pub fn capacity(&self) -> u128 {
        let size = |range: &Range| (number(range.last) - number(range.first)).saturating_add(1);
        let addresses = self.0.iter().map(size).fold(0, u128::saturating_add);
        addresses.saturating_sub(self.inner_gateways().len() as u128)
    }
}

impl fmt::Display for RangeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, range) in self.0.iter().enumerate() {
            write!(f, "{}{range}", if position == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl RangeSets {
    /// Merges and checks the ranges of a configuration in Go's order: `runtime` (`ipRanges`),
    /// `single` (the keys directly in `ipam`, ignored without a subnet), `sets` (`ipam.ranges`).
    ///
    /// # Errors
    /// Code 7 with Go's text.
    pub fn check(runtime: &[Vec<RangeConf>], single: &RangeConf, sets: &[Vec<RangeConf>]) -> Result<RangeSets> {
        let mut all: Vec<&[RangeConf]> = runtime.iter().map(Vec::as_slice).collect();
        if single.subnet.is_some() {
            all.push(std::slice::from_ref(single));
        }
        all.extend(sets.iter().map(Vec::as_slice));
        // Go parses all texts while it decodes the configuration, so errors in texts come before
        // all others, and do not begin with the set's position. `check` parses the texts again.
        for (position, set) in all.iter().enumerate() {
            for conf in *set {
                conf.parse().map_err(|error| error.with_details(format!("in range set {position}")))?;
            }
        }
        let mut checked = Vec::new();
        for (position, set) in all.into_iter().enumerate() {
            checked.push(RangeSet::check(set).map_err(|error| error.context(format!("invalid range set {position}")))?);
        }
        if checked.is_empty() {
            return Err(Error::config("no IP ranges specified"));
        }
        Ok(RangeSets(checked))
    }

    /// Checks that there is at most one set of each address family, as versions below 0.3.0
    /// require.
    ///
    /// # Errors
    /// Code 7 with Go's text.
    pub fn require_one_per_family(&self, version: &str) -> Result<()> {
        require_one_per_family(version, self.0.iter().map(RangeSet::is_ipv4))
    }

    /// Checks that no two sets have an address in common. Not part of [`check`](RangeSets::check),
    /// because Go checks it last.
    ///
    /// # Errors
    /// Code 7 with Go's text.
    pub fn require_disjoint(&self) -> Result<()> {
        // All ranges, each with the position of its set.
        let mut all: Vec<(usize, &Range)> = Vec::new();
        for (position, set) in self.0.iter().enumerate() {
            all.extend(set.0.iter().map(|range| (position, range)));
        }
        let Some(overlapping) = first_overlapping(all.iter().map(|(_, range)| *range)) else { return Ok(()) };
        let (set, _) = all[overlapping];
        let sorted = self.0[set].sorted();
        // The ranges of one set do not overlap, and no range before `overlapping` overlaps another
        // one. So the range that overlaps this set is in a later set.
        for (other_set, range) in all {
            if other_set > set && overlaps_any(&sorted, range.first, range.last) {
                return Err(Error::config(format!("range set {set} overlaps with {other_set}")));
            }
        }
        Ok(())
    }

    /// Returns the sets. The position of a set is the number in the file name
    /// `last_reserved_ip.<i>`.
    pub fn sets(&self) -> &[RangeSet] {
        &self.0
    }
}

#[cfg(test)]
mod tests;
