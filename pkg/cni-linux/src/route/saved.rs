//! Saves routes with all their attributes, to move them to another table or to restore them.
//!
//! A saved route is added with `NLM_F_APPEND`: with `NLM_F_EXCL`, only the first of several IPv4
//! routes to one destination would be restored. The kernel still answers EEXIST to an identical
//! route.

use std::net::IpAddr;

use netlink_packet_core::{Emitable as _, NLM_F_APPEND, NLM_F_CREATE, Parseable as _};
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteNextHopFlags, RouteType,
};

use super::{Family, Route, parse, paths_request, route_request, to_ip, unicast_routes};
use crate::error::{Error, Result};
use crate::netlink::{Kind, Netlink};

/// A route of any type with all its attributes.
#[derive(Clone, Debug)]
pub struct SavedRoute(RouteMessage);

impl From<&Route> for SavedRoute {
    fn from(route: &Route) -> SavedRoute {
        SavedRoute(route_request(route))
    }
}

impl SavedRoute {
    /// Returns the route over the gateways of `paths`, as
    /// [`add_multipath_route`](Netlink::add_multipath_route) adds it; `None` if `paths` is empty.
    pub fn over(paths: &[Route]) -> Option<SavedRoute> {
        paths_request(paths).map(SavedRoute)
    }

    /// Returns the route as bytes in the kernel's format, for a record that
    /// [`from_bytes`](SavedRoute::from_bytes) reads in the same namespace.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.0.buffer_len()];
        self.0.emit(&mut bytes);
        bytes
    }

    /// Reads the bytes of [`to_bytes`](SavedRoute::to_bytes). Returns `None` for others.
    pub fn from_bytes(bytes: &[u8]) -> Option<SavedRoute> {
        RouteMessage::parse(bytes).ok().map(SavedRoute)
    }

    /// Whether both are unicast routes that are [equal](Route::is_same) in each of their paths.
    pub fn is_same(&self, other: &SavedRoute) -> bool {
        let (paths, other_paths) = (self.routes(), other.routes());
        !paths.is_empty()
            && paths.len() == other_paths.len()
            && paths.iter().zip(&other_paths).all(|(path, other)| path.is_same(other))
    }

    /// Returns the same route in another table.
    #[must_use]
    pub fn in_table(&self, table: u32) -> SavedRoute {
        let mut message = self.0.clone();
        message.header.table = u8::try_from(table).unwrap_or(RouteHeader::RT_TABLE_UNSPEC);
        message.attributes.retain(|attribute| !matches!(attribute, RouteAttribute::Table(_)));
        message.attributes.push(RouteAttribute::Table(table));
        SavedRoute(message)
    }

    /// Returns the family of the destination.
    pub fn family(&self) -> Family {
        if self.0.header.address_family == Family::V4.number() { Family::V4 } else { Family::V6 }
    }

    /// Returns the number of the table.
    pub fn table_id(&self) -> u32 {
        let from_attribute = self.0.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Table(table) => Some(*table),
            _ => None,
        });
        from_attribute.unwrap_or(self.0.header.table.into())
    }

    /// Whether the destination is that of a default route, for a route of any type.
    pub fn is_default(&self) -> bool {
        self.0.header.destination_prefix_length == 0
    }

    /// Returns the metric.
    pub fn metric(&self) -> u32 {
        let from_attribute = self.0.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Priority(metric) => Some(*metric),
            _ => None,
        });
        from_attribute.unwrap_or(0)
    }

    /// Returns the same route with another metric.
    #[must_use]
    pub fn with_metric(&self, metric: u32) -> SavedRoute {
        let mut message = self.0.clone();
        message.attributes.retain(|attribute| !matches!(attribute, RouteAttribute::Priority(_)));
        message.attributes.push(RouteAttribute::Priority(metric));
        SavedRoute(message)
    }

    /// Returns the route as one [`Route`], or one for each gateway of a multipath route, with the
    /// source address. Returns no routes if the type is not unicast.
    pub fn routes(&self) -> Vec<Route> {
        let source = self.0.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::PrefSource(address) => to_ip(address),
            _ => None,
        });
        unicast_routes(self.0.clone()).into_iter().map(|route| Route { source, ..route }).collect()
    }

    /// Whether this is a unicast route with the interface `index` as its only outgoing interface.
    pub fn leaves_by(&self, index: u32) -> bool {
        let routes = self.routes();
        !routes.is_empty() && routes.iter().all(|route| route.oif == index)
    }

    /// Whether the route's source address or one of its gateways is in `network`.
    pub fn belongs_to(&self, network: cni::Cidr) -> bool {
        let is_in = |address: Option<IpAddr>| address.is_some_and(|address| network.contains(address));
        self.routes().iter().any(|route| is_in(route.gw) || is_in(route.source))
    }

    /// Returns the route as an error message names it.
    fn label(&self) -> String {
        self.routes().first().map_or_else(|| "of a type other than unicast".to_owned(), Route::to_string)
    }
}

impl Netlink {
    /// Returns the routes of one family in all tables, in the kernel's order, except routes that
    /// the kernel caches for a single destination.
    pub fn save_routes(&self, family: Family) -> Result<Vec<SavedRoute>> {
        let mut request = RouteMessage::default();
        request.header.address_family = family.number();
        let answer =
            self.dump(Kind::GetRoute, &request).map_err(|cause| Error::new("failed to list the routes", cause))?;
        let saved =
            answer.iter().filter_map(parse).filter(|message| !message.header.flags.contains(RouteFlags::Cloned));
        Ok(saved.map(|message| SavedRoute(to_request(message))).collect())
    }

    /// Adds a route after the [conflicting](Route::conflicts_with) ones; the kernel merges an IPv6
    /// route and the conflicting ones into one route over several gateways. Does nothing if an
    /// identical route exists.
    pub fn append_route(&self, route: &SavedRoute) -> Result<()> {
        let added = self.request(Kind::NewRoute, &route.0, NLM_F_CREATE | NLM_F_APPEND);
        let added = added.map(drop).map_err(|cause| self.failed("add", route, cause));
        added.or_else(|error| if error.is_exists() { Ok(()) } else { Err(error) })
    }

    /// Adds the routes as [`append_route`](Netlink::append_route) does, those through a gateway
    /// last: the kernel accepts a gateway only if a route to it exists. Tries all routes and
    /// returns the first error.
    pub fn append_routes(&self, routes: &[SavedRoute]) -> Result<()> {
        let (through_gateway, direct): (Vec<_>, Vec<_>) =
            routes.iter().partition(|route| route.routes().iter().any(|route| route.gw.is_some()));
        direct.into_iter().chain(through_gateway).map(|route| self.append_route(route)).fold(Ok(()), Result::and)
    }

    /// Deletes a route if it exists.
    pub fn purge_route(&self, route: &SavedRoute) -> Result<()> {
        let deleted = self.request(Kind::DelRoute, &route.0, 0);
        let deleted = deleted.map(drop).map_err(|cause| self.failed("delete", route, cause));
        deleted.or_else(|error| if error.is_not_found() { Ok(()) } else { Err(error) })
    }

    /// Returns the error for a route that could not be changed; `verb` is "add" or "delete".
    fn failed(&self, verb: &str, route: &SavedRoute, cause: crate::error::Cause) -> Error {
        let device = route.routes().first().map(|route| format!(" dev {}", self.label(route.oif))).unwrap_or_default();
        Error::new(format_args!("failed to {verb} route {}{device}", route.label()), cause)
    }
}

/// Turns a route as the kernel reports it into a request that adds it: removes the attributes and
/// the flags (state of the link, hardware offload) that the kernel does not accept in a request.
fn to_request(mut message: RouteMessage) -> RouteMessage {
    // `onlink` is about a gateway, which only a unicast route has.
    if message.header.kind == RouteType::Unicast {
        message.header.flags &= RouteFlags::Onlink;
    } else {
        message.header.flags = RouteFlags::empty();
    }
    message.attributes.retain(|attribute| !matches!(attribute, RouteAttribute::CacheInfo(_)));
    for attribute in &mut message.attributes {
        if let RouteAttribute::MultiPath(hops) = attribute {
            for hop in hops {
                hop.flags &= RouteNextHopFlags::Onlink;
            }
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, output};

    /// Creates a veth `n0` with routes of every kind that a plugin or an administrator adds.
    /// Returns a connection and the index of `n0`.
    fn create_routes() -> (Netlink, u32) {
        let lines = [
            "ip link add n0 type veth peer name n1",
            "ip link set n0 up",
            "ip link set n1 up",
            "ip address add 10.2.0.2/24 dev n0",
            "ip address add fd02::2/64 dev n0 nodad",
            "ip route add 10.3.0.0/16 via 10.2.0.9 mtu 1300 advmss 900 metric 7",
            "ip route add 10.4.0.0/16 dev n0 scope link src 10.2.0.2",
            "ip route add 10.5.0.0/16 nexthop via 10.2.0.8 weight 3 nexthop via 10.9.0.7 dev n0 onlink",
            "ip route add 10.6.0.0/16 via 10.2.0.6",
            "ip route append 10.6.0.0/16 via 10.2.0.5",
            "ip route add blackhole 10.7.0.0/16 table 3000",
            "ip -6 route add fd03::/64 via fd02::9 mtu 1300",
            "ip -6 route add fd05::/64 nexthop via fd02::8 nexthop via fd02::7 weight 2",
        ];
        lines.iter().for_each(|line| drop(output(line)));
        let netlink = Netlink::open().unwrap();
        let index = netlink.link("n0").unwrap().index;
        (netlink, index)
    }

    fn shown(table: &str) -> String {
        let all = [
            output(&format!("ip -d -4 route show table {table}")),
            output(&format!("ip -d -6 route show table {table}")),
        ];
        all.concat().lines().filter(|line| !line.contains("fe80::")).map(|line| format!("{}\n", line.trim())).collect()
    }

    #[test]
    fn routes_are_moved_with_all_attributes_and_restored() {
        in_new_netns(|| {
            let (netlink, index) = create_routes();
            let before = shown("main");
            assert!(
                before.contains("advmss 900") && before.contains("onlink") && before.lines().count() >= 10,
                "{before}"
            );
            let all: Vec<SavedRoute> =
                Family::ALL.iter().flat_map(|family| netlink.save_routes(*family).unwrap()).collect();
            assert!(all.iter().any(|route| route.table_id() == 3000 && !route.leaves_by(index)));
            let main: Vec<_> = all.iter().filter(|route| route.table_id() == 254 && route.leaves_by(index)).collect();
            for route in &main {
                netlink.append_route(&route.in_table(1000)).unwrap();
                netlink.append_route(&route.in_table(1000)).unwrap();
            }
            for route in &main {
                netlink.purge_route(route).unwrap();
                netlink.purge_route(route).unwrap();
            }
            assert_eq!(shown("1000").replace(" table 1000", ""), before);
            assert_eq!(shown("main"), "");
            let read_back: Vec<_> =
                main.iter().map(|route| SavedRoute::from_bytes(&route.to_bytes()).unwrap()).collect();
            netlink.append_routes(&read_back).unwrap();
            assert_eq!(shown("main"), before);
        });
    }

    #[test]
    fn a_route_belongs_to_the_network_of_its_gateway_or_source() {
        in_new_netns(|| {
            let (netlink, _) = create_routes();
            let all = netlink.save_routes(Family::V4).unwrap();
            let to = |dst: &str| {
                all.iter().find(|route| route.routes().iter().any(|route| route.dst.to_string() == dst)).unwrap()
            };
            let network = "10.2.0.2/24".parse().unwrap();
            let other = "10.8.0.2/24".parse().unwrap();
            for dst in ["10.2.0.0/24", "10.3.0.0/16", "10.4.0.0/16", "10.5.0.0/16"] {
                assert!(to(dst).belongs_to(network) && !to(dst).belongs_to(other), "{dst}");
            }
        });
    }

    #[test]
    fn a_refused_route_is_named() {
        in_new_netns(|| {
            let (netlink, index) = create_routes();
            let route = Route {
                table: Some(7),
                ..Route::new("0.0.0.0/0".parse().unwrap(), Some("10.99.0.1".parse().unwrap()), index)
            };
            let error = netlink.append_route(&SavedRoute::from(&route)).unwrap_err().to_string();
            assert!(error.starts_with("failed to add route 0.0.0.0/0 via 10.99.0.1 table 7 dev n0: "), "{error}");
        });
    }
}
