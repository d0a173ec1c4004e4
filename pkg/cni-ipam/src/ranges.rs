//! Ranges and range sets of a configuration, checked by Go's rules and refused with Go's texts.
//!
//! Each range *set* yields one address; the ranges inside a set are one pool. It never reads a
//! store. A gateway need not be in its subnet, a range begins at the network's first host (the
//! default gateway, which the allocator steps over), and an explicit `.0` or `.255` may be
//! allocated.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cni::{Cidr, Error, Result};
use serde::Deserialize;

/// A range as it stands in a configuration: texts, so that what is wrong with them is said in Go's
/// words.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RangeConf {
    /// The network, without host bits.
    pub subnet: Option<String>,
    /// The first address; by default the network's first host.
    pub range_start: Option<String>,
    /// The last address; by default the one below an IPv4 broadcast address, for IPv6 the network's
    /// last.
    pub range_end: Option<String>,
    /// The gateway; by default the network's first host.
    pub gateway: Option<String>,
}

/// Addresses of one network that may be handed out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    subnet: Cidr,
    first: IpAddr,
    last: IpAddr,
    gateway: IpAddr,
}

/// A pool of ranges of one family, none overlapping another: one address of it per attachment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeSet(Vec<Range>);

/// All sets of a network, none overlapping another. At least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeSets(Vec<RangeSet>);

/// The number behind an address: 32 bits of an IPv4, 128 of an IPv6 one.
pub(crate) fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// The address of the family of `like` with this number; cut to the family's width.
pub(crate) fn address(like: IpAddr, number: u128) -> IpAddr {
    match like {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::from_bits(number as u32)),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::from_bits(number)),
    }
}

/// An address as Go's `net.ParseIP` reads it: no zone, no leading zeros, an IPv4-mapped one is
/// IPv4.
pub fn parse_ip(text: &str) -> Option<IpAddr> {
    text.parse::<IpAddr>().ok().map(|ip| ip.to_canonical())
}

/// Fails if there are two addresses of one family; each item says whether one is of IPv4. Versions
/// below 0.3.0 know one address per family.
///
/// # Errors
/// Code 7 and Go's text.
pub fn require_one_per_family(version: &str, families: impl Iterator<Item = bool>) -> Result<()> {
    let (ipv4, ipv6): (Vec<bool>, Vec<bool>) = families.partition(|is_ipv4| *is_ipv4);
    if ipv4.len() > 1 || ipv6.len() > 1 {
        return Err(Error::config(format!("CNI version {version} does not support more than 1 address per family")));
    }
    Ok(())
}

fn optional_ip(text: Option<&str>) -> Result<Option<IpAddr>> {
    match text {
        None | Some("") => Ok(None),
        Some(text) => parse_ip(text).map(Some).ok_or_else(|| Error::config(format!("invalid IP address: {text}"))),
    }
}

impl RangeConf {
    fn parse(&self) -> Result<(Option<Cidr>, [Option<IpAddr>; 3])> {
        let subnet = self.subnet.as_deref().map(str::parse::<Cidr>).transpose();
        let subnet = subnet.map_err(|error| Error::config(error.to_string()))?;
        let [start, end, gateway] =
            [&self.range_start, &self.range_end, &self.gateway].map(|text| optional_ip(text.as_deref()));
        Ok((subnet, [start?, end?, gateway?]))
    }

    /// Checks one range and fills in its defaults.
    ///
    /// # Errors
    /// Code 7 and Go's text.
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
            return Err(Error::config(format!("RangeStart {first} not in network {subnet}"))
                .with_details(format!("the range would end at {last}, before it begins")));
        }
        Ok(Range { subnet, first, last, gateway: gateway.unwrap_or(first_host) })
    }
}

impl Range {
    /// The network.
    pub fn subnet(&self) -> Cidr {
        self.subnet
    }

    /// The lowest address handed out.
    pub fn first(&self) -> IpAddr {
        self.first
    }

    /// The highest address handed out.
    pub fn last(&self) -> IpAddr {
        self.last
    }

    /// The gateway; not always inside the network, nor even of its family.
    pub fn gateway(&self) -> IpAddr {
        self.gateway
    }

    /// Whether `address` lies between the first and the last one. The other family never does.
    pub fn contains(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.first.is_ipv4() && (number(self.first)..=number(self.last)).contains(&number(address))
    }

    fn overlaps(&self, other: &Range) -> bool {
        self.contains(other.first) || other.contains(self.first)
    }
}

/// The first in the order given that shares an address with any other.
///
/// In the order of addresses, in which all of IPv4 comes before all of IPv6, it is enough to look
/// at what came before and at the next one: a configuration may have tens of thousands.
fn first_overlapping<'a>(ranges: impl Iterator<Item = &'a Range>) -> Option<usize> {
    let mut sorted: Vec<(usize, &Range)> = ranges.enumerate().collect();
    sorted.sort_unstable_by_key(|(_, range)| range.first);
    let mut reached = None;
    let mut first = None;
    for (at, (position, range)) in sorted.iter().enumerate() {
        let next = sorted.get(at + 1).is_some_and(|(_, next)| next.first <= range.last);
        if next || reached >= Some(range.first) {
            first = Some(first.unwrap_or(*position).min(*position));
        }
        reached = reached.max(Some(range.last));
    }
    first
}

/// Whether an address from `first` to `last` lies in one of the ranges, which are sorted and do not
/// overlap.
fn overlaps_any(sorted: &[&Range], first: IpAddr, last: IpAddr) -> bool {
    let begun = sorted.partition_point(|range| range.first <= last);
    sorted[..begun].last().is_some_and(|range| range.last >= first)
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
    /// Code 7 and Go's text, without Go's prefix for the set's position.
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
        if let Some(position) = first_overlapping(ranges.iter())
            && let (one, behind) = (&ranges[position], &ranges[position + 1..])
            && let Some(other) = behind.iter().find(|other| one.overlaps(other))
        {
            return Err(Error::config(format!("subnets {one} and {other} overlap")));
        }
        Ok(RangeSet(ranges))
    }

    /// The ranges, in the order of the configuration, which is the order of the round robin.
    pub fn ranges(&self) -> &[Range] {
        &self.0
    }

    /// Whether the set is of IPv4.
    pub fn is_ipv4(&self) -> bool {
        self.0.first().is_some_and(|range| range.subnet.is_ipv4())
    }

    /// The range that `address` lies in.
    pub fn find(&self, address: IpAddr) -> Option<&Range> {
        self.0.iter().find(|range| range.contains(address))
    }

    /// The ranges in the order of their addresses.
    fn sorted(&self) -> Vec<&Range> {
        let mut sorted: Vec<&Range> = self.0.iter().collect();
        sorted.sort_unstable_by_key(|range| range.first);
        sorted
    }

    /// Whether a range of the set has this gateway. A gateway is never handed out, by whichever
    /// range of the set.
    pub fn is_gateway(&self, address: IpAddr) -> bool {
        self.0.iter().any(|range| range.gateway == address)
    }

    /// The distinct gateways that lie inside the set's ranges: addresses that are never handed out.
    pub fn inner_gateways(&self) -> Vec<IpAddr> {
        let sorted = self.sorted();
        let mut gateways: Vec<IpAddr> =
            self.0.iter().map(Range::gateway).filter(|ip| overlaps_any(&sorted, *ip, *ip)).collect();
        gateways.sort_unstable();
        gateways.dedup();
        gateways
    }

    /// How many addresses can be handed out.
    pub fn capacity(&self) -> u128 {
        let addresses = self
            .0
            .iter()
            .fold(0u128, |sum, range| sum.saturating_add((number(range.last) - number(range.first)).saturating_add(1)));
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
    /// Merges and checks the ranges of a configuration, in Go's order: those of the runtime
    /// (`ipRanges`), the one written directly into `ipam` (ignored without a subnet),
    /// `ipam.ranges`.
    ///
    /// # Errors
    /// Code 7 and Go's text.
    pub fn check(runtime: &[Vec<RangeConf>], single: &RangeConf, sets: &[Vec<RangeConf>]) -> Result<RangeSets> {
        let single = single.subnet.is_some().then(|| std::slice::from_ref(single));
        let all = runtime.iter().map(Vec::as_slice).chain(single).chain(sets.iter().map(Vec::as_slice));
        let mut checked = Vec::new();
        // Go meets what does not parse while it decodes, before it counts sets: these texts have no
        // prefix.
        for (position, conf) in all.clone().enumerate().flat_map(|(i, set)| set.iter().map(move |conf| (i, conf))) {
            conf.parse().map_err(|error| error.with_details(format!("in range set {position}")))?;
        }
        for (position, set) in all.enumerate() {
            checked.push(RangeSet::check(set).map_err(|error| error.context(format!("invalid range set {position}")))?);
        }
        if checked.is_empty() {
            return Err(Error::config("no IP ranges specified"));
        }
        Ok(RangeSets(checked))
    }

    /// Fails if a configuration of a version that knows one address per family (below 0.3.0) asks
    /// for more.
    ///
    /// # Errors
    /// Code 7 and Go's text.
    pub fn require_one_per_family(&self, version: &str) -> Result<()> {
        require_one_per_family(version, self.0.iter().map(RangeSet::is_ipv4))
    }

    /// Fails if two sets share an address. Apart from [`check`](RangeSets::check), because Go looks
    /// for it last.
    ///
    /// # Errors
    /// Code 7 and Go's text.
    pub fn require_disjoint(&self) -> Result<()> {
        let all =
            self.0.iter().enumerate().flat_map(|(set, RangeSet(ranges))| ranges.iter().map(move |one| (set, one)));
        let Some((i, _)) = first_overlapping(all.clone().map(|(_, range)| range)).and_then(|at| all.clone().nth(at))
        else {
            return Ok(());
        };
        let sorted = self.0[i].sorted();
        match all.into_iter().find(|(j, range)| *j > i && overlaps_any(&sorted, range.first, range.last)) {
            Some((j, _)) => Err(Error::config(format!("range set {i} overlaps with {j}"))),
            None => Ok(()),
        }
    }

    /// The sets. A set's position is the number in `last_reserved_ip.<i>`.
    pub fn sets(&self) -> &[RangeSet] {
        &self.0
    }
}

#[cfg(test)]
mod tests;
