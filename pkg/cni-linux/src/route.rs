//! Routes.
//!
//! What a route in the way means is the caller's to judge; this room adds exclusively and shows
//! what is there.
//!
//! IPv4 identifies routes by destination, TOS and metric *within a
//! table*, so a route with another gateway is "the same"; IPv6 turns metric 0 into 1024 and knows
//! no scopes; the table's number in the header has eight bits, larger ones are an attribute.

use std::net::IpAddr;

use cni::Cidr;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, Parseable as _};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteNextHop, RouteNextHopFlags,
    RouteProtocol, RouteType,
};

use crate::error::{Cause, Error, Result};
use crate::netlink::{Kind, Netlink, Reply};

mod saved;

pub use saved::SavedRoute;

/// The table that is meant when none is named.
pub const MAIN_TABLE: u32 = 254;

/// The table of this host's own addresses, which the kernel fills.
pub const LOCAL_TABLE: u32 = 255;

/// The metric that IPv6 uses for 0.
const IPV6_DEFAULT_METRIC: u32 = 1024;

/// A family of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// The family of an address.
    pub fn of(address: IpAddr) -> Family {
        if address.is_ipv4() { Family::V4 } else { Family::V6 }
    }

    /// Both.
    pub const ALL: [Family; 2] = [Family::V4, Family::V6];

    pub(crate) fn number(self) -> AddressFamily {
        match self {
            Family::V4 => AddressFamily::Inet,
            Family::V6 => AddressFamily::Inet6,
        }
    }
}

/// A unicast route, to be added or as it is. In one that was read, numbers the kernel filled in are
/// set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Where to; without host bits.
    pub dst: Cidr,
    /// The next station, or `None` if the destination is on the link.
    pub gw: Option<IpAddr>,
    /// The index of the interface it leaves by.
    pub oif: u32,
    /// The largest packet along it.
    pub mtu: Option<u32>,
    /// The largest TCP segment to announce along it.
    pub advmss: Option<u32>,
    /// The metric: of several to one destination the lowest counts. `None` and 0: the kernel's
    /// default.
    pub priority: Option<u32>,
    /// The table; `None` and 0: the main one.
    pub table: Option<u32>,
    /// How far the destination is: 0 beyond, 253 on the link, 254 on this host. `None`: 0. IPv6
    /// ignores it.
    pub scope: Option<u8>,
    /// The address that the host's own packets along it have as their source, or the kernel's
    /// choice. Not set in a route that was read.
    pub source: Option<IpAddr>,
    /// Whether the gateway is taken to be on the link although no route says so.
    pub onlink: bool,
    /// The program that made the route: 3 ("boot") is the number that Go's plugins write, and
    /// [`Route::new`].
    pub protocol: u8,
}

impl Route {
    /// A route with everything else left to the kernel.
    pub fn new(dst: Cidr, gw: Option<IpAddr>, oif: u32) -> Route {
        Route {
            dst,
            gw,
            oif,
            mtu: None,
            advmss: None,
            priority: None,
            table: None,
            scope: None,
            source: None,
            onlink: false,
            protocol: RouteProtocol::Boot.into(),
        }
    }

    /// The number of the table it is in.
    pub fn table_id(&self) -> u32 {
        match self.table {
            None | Some(0) => MAIN_TABLE,
            Some(table) => table,
        }
    }

    /// The metric as the kernel will store it.
    pub fn metric(&self) -> u32 {
        match self.priority {
            None | Some(0) if !self.dst.is_ipv4() => IPV6_DEFAULT_METRIC,
            metric => metric.unwrap_or(0),
        }
    }

    /// Whether both are, to the kernel, routes to the same place of the same rank: one stands in
    /// the other's way.
    pub fn conflicts_with(&self, other: &Route) -> bool {
        (self.dst, self.table_id(), self.metric()) == (other.dst, other.table_id(), other.metric())
    }

    /// Whether this is the route to the network of one of the interface's own addresses, made by
    /// the kernel with the address.
    pub fn is_connected(&self, oif: u32) -> bool {
        self.protocol == u8::from(RouteProtocol::Kernel) && self.gw.is_none() && self.oif == oif
    }

    /// Whether both do the same: rivals that also agree in gateway, interface, MTU, MSS and, for
    /// IPv4, scope. Who made them does not matter.
    pub fn is_same(&self, other: &Route) -> bool {
        let scope = |route: &Route| if route.dst.is_ipv4() { route.scope.unwrap_or(0) } else { 0 };
        let metrics = |route: &Route| (route.mtu.unwrap_or(0), route.advmss.unwrap_or(0));
        self.conflicts_with(other)
            && (self.gw, self.oif, scope(self), metrics(self)) == (other.gw, other.oif, scope(other), metrics(other))
    }
}

impl std::fmt::Display for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.dst)?;
        if let Some(gw) = self.gw {
            write!(f, " via {gw}")?;
        }
        if let Some(metric) = self.priority.filter(|metric| *metric != 0) {
            write!(f, " metric {metric}")?;
        }
        if self.table_id() != MAIN_TABLE {
            write!(f, " table {}", self.table_id())?;
        }
        Ok(())
    }
}

impl Netlink {
    /// Adds a route.
    ///
    /// # Errors
    /// [`Error::is_exists`] if a [rival](Route::conflicts_with) is there, be it identical: see
    /// [`Netlink::list_conflicting`].
    pub fn add_route(&self, route: &Route) -> Result<()> {
        self.request(Kind::NewRoute, &message(route), NLM_F_CREATE | NLM_F_EXCL).map(drop).map_err(|cause| {
            Error::new(format_args!("failed to add route {route} dev {}", self.label(route.oif)), cause)
        })
    }

    /// Adds one route over several gateways, among which the kernel spreads the traffic. `paths`
    /// are [rivals](Route::conflicts_with): what they have in common is taken from the first.
    ///
    /// # Errors
    /// [`Error::is_exists`] if a rival is there.
    pub fn add_multipath_route(&self, paths: &[Route]) -> Result<()> {
        self.add_paths(paths, NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Adds one route over one or several gateways before its [rivals](Route::conflicts_with),
    /// which no packet takes then.
    ///
    /// # Errors
    /// [`Error::is_exists`] if an identical one with the same protocol is there.
    pub fn add_route_in_front(&self, paths: &[Route]) -> Result<()> {
        self.add_paths(paths, NLM_F_CREATE)
    }

    fn add_paths(&self, paths: &[Route], flags: u16) -> Result<()> {
        let Some(first) = paths.first() else { return Ok(()) };
        let message = if paths.len() == 1 { message(first) } else { multipath_message(first, paths) };
        self.request(Kind::NewRoute, &message, flags).map(drop).map_err(|cause| {
            let gateways: Vec<String> = paths.iter().filter_map(|path| Some(path.gw?.to_string())).collect();
            let doing = match gateways.is_empty() {
                true => format!("failed to add route {}", first.dst),
                false => format!("failed to add route {} via {}", first.dst, gateways.join(" and ")),
            };
            Error::new(doing, cause)
        })
    }

    /// The unicast routes of one family in one table, `None` being the main one. A route over
    /// several gateways is listed once for each.
    pub fn list_routes(&self, family: Family, table: Option<u32>) -> Result<Vec<Route>> {
        let table = table.filter(|table| *table != 0).unwrap_or(MAIN_TABLE);
        self.dump_routes(family, Some(table))
    }

    /// The index of the interface of the default route: in the main table the one with the lowest
    /// metric, IPv4 before IPv6, of several gateways the first.
    pub fn find_default_interface(&self) -> Result<Option<u32>> {
        for family in [Family::V4, Family::V6] {
            let routes = self.list_routes(family, None)?.into_iter();
            if let Some(route) = routes.filter(|route| route.dst.is_default_route()).min_by_key(Route::metric) {
                return Ok(Some(route.oif));
            }
        }
        Ok(None)
    }

    /// The unicast routes of one family in every table.
    pub fn list_all_routes(&self, family: Family) -> Result<Vec<Route>> {
        self.dump_routes(family, None)
    }

    /// The routes that stand in `route`'s way, among them an identical one.
    pub fn list_conflicting(&self, route: &Route) -> Result<Vec<Route>> {
        let routes = self.list_routes(Family::of(route.dst.address()), route.table)?;
        Ok(routes.into_iter().filter(|there| there.conflicts_with(route)).collect())
    }

    /// The index of the interface by which packets to `address` leave this host, as its rules and
    /// routes decide it.
    ///
    /// # Errors
    /// The kernel's, ENETUNREACH above all, if there is no way.
    pub fn outgoing_interface(&self, address: IpAddr) -> Result<u32> {
        let failed = |cause: Cause| Error::new(format_args!("failed to find the route to {address}"), cause);
        let route = self.look_up(address).map_err(failed)?;
        let oif = route.into_iter().flat_map(|route| route.attributes).find_map(|attribute| match attribute {
            RouteAttribute::Oif(index) => Some(index),
            _ => None,
        });
        oif.ok_or_else(|| failed(Cause::text("the kernel named no interface")))
    }

    /// Whether packets to `address` are taken in by this namespace.
    ///
    /// For an IPv6 address this comes a moment after it was added: a worker of the kernel's joins
    /// its group for neighbour discovery, then routes it, and until then packets to it are lost.
    pub fn is_local_address(&self, address: IpAddr) -> Result<bool> {
        match self.look_up(address) {
            Ok(route) => Ok(route.is_some_and(|route| route.header.kind == RouteType::Local)),
            // No route, or one that is unreachable, prohibited, a black hole: until its own is
            // there, another may cover it.
            Err(cause)
                if matches!(
                    cause.errno(),
                    Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EACCES | libc::EINVAL)
                ) =>
            {
                Ok(false)
            }
            Err(cause) => Err(Error::new(format_args!("failed to find the route to {address}"), cause)),
        }
    }

    fn look_up(&self, address: IpAddr) -> Result<Option<RouteMessage>, Cause> {
        let mut message = RouteMessage::default();
        message.header.address_family = Family::of(address).number();
        message.header.destination_prefix_length = if address.is_ipv4() { 32 } else { 128 };
        message.attributes.push(RouteAttribute::Destination(address.into()));
        let answer = self.get(Kind::GetRoute, &message)?;
        Ok(answer.and_then(|reply| RouteMessage::parse(reply.body(Kind::NewRoute)?).ok()))
    }

    fn dump_routes(&self, family: Family, table: Option<u32>) -> Result<Vec<Route>> {
        let mut message = RouteMessage::default();
        message.header.address_family = family.number();
        message.attributes.extend(table.map(RouteAttribute::Table));
        let answer = match self.dump(Kind::GetRoute, &message) {
            Ok(answer) => answer,
            // The table has never had a route.
            Err(cause) if table.is_some() && cause.errno() == Some(libc::ENOENT) => Vec::new(),
            Err(cause) => return Err(Error::new("failed to list the routes", cause)),
        };
        let routes = answer.into_iter().flat_map(decode);
        Ok(routes.filter(|route| table.is_none_or(|table| route.table_id() == table)).collect())
    }
}

fn message(route: &Route) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header = RouteHeader {
        address_family: Family::of(route.dst.address()).number(),
        destination_prefix_length: route.dst.prefix(),
        protocol: route.protocol.into(),
        scope: route.scope.unwrap_or(0).into(),
        kind: RouteType::Unicast,
        flags: if route.onlink { RouteFlags::Onlink } else { RouteFlags::empty() },
        // 0 makes the kernel look at the attribute.
        table: u8::try_from(route.table_id()).unwrap_or(RouteHeader::RT_TABLE_UNSPEC),
        ..RouteHeader::default()
    };
    let attributes = &mut message.attributes;
    if route.table_id() > u8::MAX.into() {
        attributes.push(RouteAttribute::Table(route.table_id()));
    }
    if route.dst.prefix() > 0 {
        attributes.push(RouteAttribute::Destination(route.dst.address().into()));
    }
    attributes.extend(route.gw.map(|gw| RouteAttribute::Gateway(gw.into())));
    attributes.push(RouteAttribute::Oif(route.oif));
    attributes.extend(route.priority.map(RouteAttribute::Priority));
    attributes.extend(route.source.map(|source| RouteAttribute::PrefSource(source.into())));
    let mut metrics = Vec::new();
    metrics.extend(route.mtu.map(RouteMetric::Mtu));
    metrics.extend(route.advmss.map(RouteMetric::Advmss));
    if !metrics.is_empty() {
        attributes.push(RouteAttribute::Metrics(metrics));
    }
    message
}

/// Builds one route over several gateways; what they have in common is taken from the first.
fn multipath_message(first: &Route, paths: &[Route]) -> RouteMessage {
    let mut message = message(&Route { gw: None, ..*first });
    message.attributes.retain(|attribute| !matches!(attribute, RouteAttribute::Oif(_)));
    let next_hop = |path: &Route| {
        let mut next_hop = RouteNextHop::default();
        next_hop.interface_index = path.oif;
        next_hop.attributes.extend(path.gw.map(|gw| RouteAttribute::Gateway(gw.into())));
        if path.onlink {
            next_hop.flags = RouteNextHopFlags::Onlink;
        }
        next_hop
    };
    message.attributes.push(RouteAttribute::MultiPath(paths.iter().map(next_hop).collect()));
    message
}

/// The unicast routes in an answer: none, one, or one for each gateway.
fn decode(reply: Reply) -> Vec<Route> {
    parse(&reply).map(routes).unwrap_or_default()
}

fn parse(reply: &Reply) -> Option<RouteMessage> {
    RouteMessage::parse(reply.body(Kind::NewRoute)?).ok()
}

/// The unicast routes in a message.
fn routes(RouteMessage { header, attributes, .. }: RouteMessage) -> Vec<Route> {
    let unspecified: IpAddr = match header.address_family {
        AddressFamily::Inet => IpAddr::from([0; 4]),
        AddressFamily::Inet6 => IpAddr::from([0; 16]),
        _ => return Vec::new(),
    };
    // A cloned route is a cached exception (a path's MTU, a redirect), not a configured route.
    if header.kind != RouteType::Unicast || header.flags.contains(RouteFlags::Cloned) {
        return Vec::new();
    }
    let mut destination = unspecified;
    let mut route = Route::new(Cidr::host(unspecified), None, 0);
    route.table = Some(header.table.into());
    route.scope = Some(header.scope.into());
    route.protocol = header.protocol.into();
    route.onlink = header.flags.contains(RouteFlags::Onlink);
    route.priority = Some(0);
    let mut hops = Vec::new();
    for attribute in attributes {
        match attribute {
            RouteAttribute::Destination(address) => destination = ip(&address).unwrap_or(unspecified),
            RouteAttribute::Gateway(address) => route.gw = ip(&address),
            RouteAttribute::Oif(index) => route.oif = index,
            RouteAttribute::Priority(metric) => route.priority = Some(metric),
            RouteAttribute::Table(table) => route.table = Some(table),
            RouteAttribute::Metrics(metrics) => {
                for metric in metrics {
                    match metric {
                        RouteMetric::Mtu(mtu) => route.mtu = Some(mtu),
                        RouteMetric::Advmss(advmss) => route.advmss = Some(advmss),
                        _ => {}
                    }
                }
            }
            RouteAttribute::MultiPath(next) => hops = next,
            _ => {}
        }
    }
    let Some(dst) = Cidr::new(destination, header.destination_prefix_length) else { return Vec::new() };
    route.dst = dst;
    if hops.is_empty() {
        return vec![route];
    }
    let over = |hop: netlink_packet_route::route::RouteNextHop| {
        let gw = hop.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Gateway(address) => ip(address),
            _ => None,
        });
        Route { gw, oif: hop.interface_index, ..route }
    };
    hops.into_iter().map(over).collect()
}

pub(crate) fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some((*address).into()),
        RouteAddress::Inet6(address) => Some((*address).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
