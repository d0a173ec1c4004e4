//! Lists and adds routes.
//!
//! If a [conflicting](Route::conflicts_with) route exists, an addition fails and changes nothing;
//! the caller can list the conflicting routes. Only [`Netlink::add_route_in_front`] and
//! [`Netlink::append_route`] add a route despite a conflict. [`Netlink::add_default_route_behind`]
//! avoids the conflict by a larger metric.
//!
//! IPv6 replaces metric 0 with 1024 and has no scopes. A table number above 255 does not fit into
//! the message's header and is sent as an attribute.

use std::net::IpAddr;

use cni::Cidr;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, Parseable as _};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteNextHop, RouteNextHopFlags,
    RoutePreference, RouteProtocol, RouteType,
};

use crate::error::{Cause, Error, Result};
use crate::netlink::{Kind, Netlink, Reply};

mod behind;
mod saved;

pub use saved::SavedRoute;

/// The table that is used by default.
pub const MAIN_TABLE: u32 = 254;

/// The table of this host's own addresses, which the kernel maintains.
pub const LOCAL_TABLE: u32 = 255;

/// The metric that IPv6 uses instead of 0.
const IPV6_DEFAULT_METRIC: u32 = 1024;

/// A family of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl std::fmt::Display for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        })
    }
}

impl Family {
    /// Returns the family of an address.
    pub fn of(address: IpAddr) -> Family {
        if address.is_ipv4() { Family::V4 } else { Family::V6 }
    }

    /// Both families.
    pub const ALL: [Family; 2] = [Family::V4, Family::V6];

    /// Returns the constant of netlink-packet-route.
    pub(crate) fn number(self) -> AddressFamily {
        match self {
            Family::V4 => AddressFamily::Inet,
            Family::V6 => AddressFamily::Inet6,
        }
    }
}

/// A unicast route with at most one gateway, either to be added or returned by the kernel. In a
/// returned route, the metric, table and scope are always set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The destination, without host bits.
    pub dst: Cidr,
    /// The gateway; `None` if the destination is on the link.
    pub gw: Option<IpAddr>,
    /// The index of the outgoing interface.
    pub oif: u32,
    /// The MTU along the route.
    pub mtu: Option<u32>,
    /// The largest TCP segment size (MSS) to announce along the route.
    pub advmss: Option<u32>,
    /// The metric: the kernel prefers the route with the lowest. `None` and 0 stand for the
    /// kernel's default.
    pub priority: Option<u32>,
    /// The table; `None` and 0 stand for the main table.
    pub table: Option<u32>,
    /// The scope: 0 beyond the link, 253 on the link, 254 on this host. `None` stands for 0. IPv6
    /// ignores it.
    pub scope: Option<u8>,
    /// The source address of packets that this host sends along the route; `None` for the kernel's
    /// choice. In a route that the kernel returned, only [`SavedRoute::routes`] sets it.
    pub source: Option<IpAddr>,
    /// Whether the kernel treats the gateway as reachable on the link even if no route covers it.
    pub onlink: bool,
    /// The preference of the router that advertised the route (RFC 4191): 1 for high, 0 for medium
    /// and for all other routes, -1 for low. It is only read.
    pub preference: i8,
    /// The number (`rtm_protocol`) of the kind of program that added the route. Go's plugins and
    /// [`Route::new`] use 3 ("boot").
    pub protocol: u8,
}

impl Route {
    /// Returns a route to `dst` over `gw` and the interface `oif`. The rest is left to the kernel.
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
            preference: 0,
            protocol: RouteProtocol::Boot.into(),
        }
    }

    /// Returns the number of the route's table.
    pub fn table_id(&self) -> u32 {
        match self.table {
            None | Some(0) => MAIN_TABLE,
            Some(table) => table,
        }
    }

    /// Returns the metric that the kernel stores for the route.
    pub fn metric(&self) -> u32 {
        let metric = self.priority.unwrap_or(0);
        if metric == 0 && !self.dst.is_ipv4() { IPV6_DEFAULT_METRIC } else { metric }
    }

    /// Whether the kernel refuses to add one route while the other exists: both have the same
    /// destination, table and metric, even if the gateways differ. Does not compare the TOS,
    /// although the kernel accepts IPv4 routes that differ only in their TOS.
    pub fn conflicts_with(&self, other: &Route) -> bool {
        (self.dst, self.table_id(), self.metric()) == (other.dst, other.table_id(), other.metric())
    }

    /// Whether the kernel itself added this route, without a gateway, for the network of an address
    /// of the interface `oif`.
    pub fn is_connected(&self, oif: u32) -> bool {
        self.protocol == u8::from(RouteProtocol::Kernel) && self.gw.is_none() && self.oif == oif
    }

    /// Whether both routes are equal in destination, table, metric, gateway, interface, MTU, MSS
    /// and, for IPv4, scope. Does not compare the other fields, such as the protocol.
    pub fn is_same(&self, other: &Route) -> bool {
        let scope = |route: &Route| if route.dst.is_ipv4() { route.scope.unwrap_or(0) } else { 0 };
        let mtu_and_mss = |route: &Route| (route.mtu.unwrap_or(0), route.advmss.unwrap_or(0));
        self.conflicts_with(other)
            && (self.gw, self.oif, scope(self)) == (other.gw, other.oif, scope(other))
            && mtu_and_mss(self) == mtu_and_mss(other)
    }
}

impl std::fmt::Display for Route {
    /// Writes destination, gateway, metric and table like ip-route(8), without default values.
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
    /// [`Error::is_exists`] if a [conflicting](Route::conflicts_with) route exists, which may be
    /// identical: see [`Netlink::list_conflicting`].
    pub fn add_route(&self, route: &Route) -> Result<()> {
        self.change(Kind::NewRoute, route.oif, &route_request(route), NLM_F_CREATE | NLM_F_EXCL, |link| {
            format!("failed to add route {route} dev {link}")
        })
    }

    /// Adds one route over several gateways, among which the kernel distributes the traffic. Each
    /// of `paths` contributes its gateway, interface and `onlink`; everything else is taken from
    /// the first. Does nothing if `paths` is empty.
    ///
    /// # Errors
    /// [`Error::is_exists`] if a [conflicting](Route::conflicts_with) route exists.
    pub fn add_multipath_route(&self, paths: &[Route]) -> Result<()> {
        self.add_paths(paths, NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Adds one route over one or several gateways even if [conflicting](Route::conflicts_with)
    /// routes exist. For IPv4, the kernel puts the new route first, and stops using the existing
    /// routes. For IPv6, the existing routes stay in use: the kernel puts the new route after
    /// them, or merges routes that have a gateway. For `paths`, see
    /// [`add_multipath_route`](Netlink::add_multipath_route).
    ///
    /// # Errors
    /// [`Error::is_exists`] if an identical route with the same protocol exists.
    pub fn add_route_in_front(&self, paths: &[Route]) -> Result<()> {
        self.add_paths(paths, NLM_F_CREATE)
    }

    /// Adds one route over the gateways of `paths`, with these `NLM_F_*` flags. Does nothing if
    /// `paths` is empty.
    fn add_paths(&self, paths: &[Route], flags: u16) -> Result<()> {
        let (Some(first), Some(request)) = (paths.first(), paths_request(paths)) else { return Ok(()) };
        self.request(Kind::NewRoute, &request, flags).map(drop).map_err(|cause| {
            let gateways: Vec<String> = paths.iter().filter_map(|path| path.gw).map(|gw| gw.to_string()).collect();
            let failure = if gateways.is_empty() {
                format!("failed to add route {}", first.dst)
            } else {
                format!("failed to add route {} via {}", first.dst, gateways.join(" and "))
            };
            Error::new(failure, cause)
        })
    }

    /// Returns the unicast routes of one family in one table; `None` and 0 stand for the main
    /// table. A route over several gateways is returned once for each gateway.
    pub fn list_routes(&self, family: Family, table: Option<u32>) -> Result<Vec<Route>> {
        let table = table.filter(|table| *table != 0).unwrap_or(MAIN_TABLE);
        self.dump_routes(family, Some(table))
    }

    /// Returns the index of the outgoing interface of the main table's default route; `None` if
    /// there is no default route. Prefers IPv4, then the lowest metric, then the first in the
    /// kernel's order.
    pub fn find_default_interface(&self) -> Result<Option<u32>> {
        for family in Family::ALL {
            let routes = self.list_routes(family, None)?.into_iter();
            if let Some(route) = routes.filter(|route| route.dst.is_default_route()).min_by_key(Route::metric) {
                return Ok(Some(route.oif));
            }
        }
        Ok(None)
    }

    /// Returns the unicast routes of one family in all tables.
    pub fn list_all_routes(&self, family: Family) -> Result<Vec<Route>> {
        self.dump_routes(family, None)
    }

    /// Returns the existing routes that [conflict](Route::conflicts_with) with `route`, including
    /// an identical one.
    pub fn list_conflicting(&self, route: &Route) -> Result<Vec<Route>> {
        let routes = self.list_routes(Family::of(route.dst.address()), route.table)?;
        Ok(routes.into_iter().filter(|existing| existing.conflicts_with(route)).collect())
    }

    /// Returns the index of the interface through which packets to `address` leave this host,
    /// according to the host's routing rules and routes.
    ///
    /// # Errors
    /// There is no route to the address (mostly ENETUNREACH).
    pub fn outgoing_interface(&self, address: IpAddr) -> Result<u32> {
        let failed = |cause: Cause| Error::new(format_args!("failed to find the route to {address}"), cause);
        let route = self.look_up(address).map_err(failed)?;
        for attribute in route.map(|route| route.attributes).unwrap_or_default() {
            if let RouteAttribute::Oif(index) = attribute {
                return Ok(index);
            }
        }
        Err(failed(Cause::text("the kernel's answer has no outgoing interface")))
    }

    /// Whether this namespace accepts packets to `address` as its own.
    ///
    /// For a new IPv6 address, returns `false` for some time: a worker of the kernel first joins
    /// the address's multicast group, then adds the local route. Packets that arrive before the
    /// local route exists are lost.
    pub fn is_local_address(&self, address: IpAddr) -> Result<bool> {
        match self.look_up(address) {
            Ok(route) => Ok(route.is_some_and(|route| route.header.kind == RouteType::Local)),
            // There is no route (ENETUNREACH), or the route's type is unreachable (EHOSTUNREACH),
            // prohibit (EACCES) or blackhole (EINVAL).
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

    /// Asks the kernel for the route to one address. Returns `None` if the answer cannot be
    /// decoded.
    fn look_up(&self, address: IpAddr) -> Result<Option<RouteMessage>, Cause> {
        let mut message = RouteMessage::default();
        message.header.address_family = Family::of(address).number();
        message.header.destination_prefix_length = if address.is_ipv4() { 32 } else { 128 };
        message.attributes.push(RouteAttribute::Destination(address.into()));
        let answer = self.get(Kind::GetRoute, &message)?;
        Ok(answer.and_then(|reply| RouteMessage::parse(reply.body(Kind::NewRoute)?).ok()))
    }

    /// Returns the unicast routes of one family, in one table or in all. Filters the answer,
    /// because an old kernel ignores the table in the request.
    fn dump_routes(&self, family: Family, table: Option<u32>) -> Result<Vec<Route>> {
        let mut message = RouteMessage::default();
        message.header.address_family = family.number();
        message.attributes.extend(table.map(RouteAttribute::Table));
        let answer = match self.dump(Kind::GetRoute, &message) {
            Ok(answer) => answer,
            // ENOENT: the table has no routes, because the kernel creates a table with its first
            // route.
            Err(cause) if table.is_some() && cause.errno() == Some(libc::ENOENT) => Vec::new(),
            Err(cause) => return Err(Error::new("failed to list the routes", cause)),
        };
        let routes = answer.into_iter().flat_map(decode);
        Ok(routes.filter(|route| table.is_none_or(|table| route.table_id() == table)).collect())
    }
}

/// Returns the request that adds a route.
fn route_request(route: &Route) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header = RouteHeader {
        address_family: Family::of(route.dst.address()).number(),
        destination_prefix_length: route.dst.prefix(),
        protocol: route.protocol.into(),
        scope: route.scope.unwrap_or(0).into(),
        kind: RouteType::Unicast,
        flags: if route.onlink { RouteFlags::Onlink } else { RouteFlags::empty() },
        // A number above 255 is in the attribute below, which replaces this field.
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

/// Returns the request that adds one route over the gateways of `paths`; everything else is taken
/// from the first. Returns `None` if `paths` is empty.
fn paths_request(paths: &[Route]) -> Option<RouteMessage> {
    let first = paths.first()?;
    Some(if paths.len() == 1 { route_request(first) } else { multipath_request(first, paths) })
}

/// Returns the request that adds one route over the gateways of `paths`; everything else is taken
/// from `first`.
fn multipath_request(first: &Route, paths: &[Route]) -> RouteMessage {
    let mut message = route_request(&Route { gw: None, ..*first });
    // The interface is given for each gateway instead.
    message.attributes.retain(|attribute| !matches!(attribute, RouteAttribute::Oif(_)));
    let to_next_hop = |path: &Route| {
        let mut next_hop = RouteNextHop::default();
        next_hop.interface_index = path.oif;
        next_hop.attributes.extend(path.gw.map(|gw| RouteAttribute::Gateway(gw.into())));
        if path.onlink {
            next_hop.flags = RouteNextHopFlags::Onlink;
        }
        next_hop
    };
    message.attributes.push(RouteAttribute::MultiPath(paths.iter().map(to_next_hop).collect()));
    message
}

/// Decodes a unicast route: returns one [`Route`], or one for each gateway; none for any other
/// route or message.
fn decode(reply: Reply) -> Vec<Route> {
    parse(&reply).map(unicast_routes).unwrap_or_default()
}

/// Parses a message about a route. Returns `None` for other and malformed messages.
fn parse(reply: &Reply) -> Option<RouteMessage> {
    RouteMessage::parse(reply.body(Kind::NewRoute)?).ok()
}

/// Converts a route as the kernel reports it: a unicast route becomes one [`Route`], or one for
/// each gateway. Returns none for a route of another type or family, or from the kernel's cache.
fn unicast_routes(RouteMessage { header, attributes, .. }: RouteMessage) -> Vec<Route> {
    let unspecified: IpAddr = match header.address_family {
        AddressFamily::Inet => IpAddr::from([0; 4]),
        AddressFamily::Inet6 => IpAddr::from([0; 16]),
        _ => return Vec::new(),
    };
    // A cloned route is a cache entry for a single destination, for example with a learned path
    // MTU.
    if header.kind != RouteType::Unicast || header.flags.contains(RouteFlags::Cloned) {
        return Vec::new();
    }
    // The destination and the interface are set below.
    let mut route = Route::new(Cidr::host(unspecified), None, 0);
    // If the table's number is above 255, only the attribute below has it.
    route.table = Some(header.table.into());
    route.scope = Some(header.scope.into());
    route.protocol = header.protocol.into();
    route.onlink = header.flags.contains(RouteFlags::Onlink);
    // The kernel sends no attribute for a metric of 0 or for the destination of a default route.
    route.priority = Some(0);
    let mut destination = unspecified;
    let mut next_hops = Vec::new();
    for attribute in attributes {
        match attribute {
            RouteAttribute::Destination(address) => destination = to_ip(&address).unwrap_or(unspecified),
            RouteAttribute::Gateway(address) => route.gw = to_ip(&address),
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
            RouteAttribute::MultiPath(hops) => next_hops = hops,
            RouteAttribute::Preference(RoutePreference::High) => route.preference = 1,
            RouteAttribute::Preference(RoutePreference::Low) => route.preference = -1,
            _ => {}
        }
    }
    let Some(dst) = Cidr::new(destination, header.destination_prefix_length) else { return Vec::new() };
    route.dst = dst;
    if next_hops.is_empty() {
        return vec![route];
    }
    // A route over several gateways has the gateways and interfaces only in its next hops.
    next_hops.into_iter().map(|hop| Route { gw: gateway(&hop), oif: hop.interface_index, ..route }).collect()
}

/// Returns the gateway of one path of a route; `None` if the path has none.
fn gateway(hop: &RouteNextHop) -> Option<IpAddr> {
    hop.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(address) => to_ip(address),
        _ => None,
    })
}

/// Converts an IP address; `None` for an address of another family.
pub(crate) fn to_ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some((*address).into()),
        RouteAddress::Inet6(address) => Some((*address).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
