//! The parameters of a lease, and the result that follows from them.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use cni::Cidr;
use cni::result::{AddResult, Dns, IpConfig, Route};
use serde::{Deserialize, Serialize};

use super::v4;

/// The scope `link` (`RT_SCOPE_LINK`) of a route without a gateway.
const LINK_SCOPE: u8 = 253;

/// The identity of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Server {
    /// The address of a DHCPv4 server.
    Ipv4(Ipv4Addr),
    /// The DUID of a DHCPv6 server.
    Duid(Vec<u8>),
}

impl fmt::Display for Server {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Server::Ipv4(address) => address.fmt(formatter),
            Server::Duid(duid) => duid.iter().try_for_each(|byte| write!(formatter, "{byte:02x}")),
        }
    }
}

/// The parameters of an offer or a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseParameters {
    /// The leased address with its prefix length.
    #[serde(rename = "network")]
    pub cidr: Cidr,
    /// The server: its address (option 54) or its DUID.
    pub server: Server,
    /// The lease time in seconds (option 51); `u32::MAX` for a lease that never ends.
    pub seconds: u32,
    /// The seconds from the request until the client asks this server to extend the lease (T1).
    pub t1: u32,
    /// The seconds from the request until the client asks all servers to extend the lease (T2).
    pub t2: u32,
    /// The routers (option 3). The first one is the gateway in the result. Without classless
    /// routes, there is a default route through it.
    pub routers: Vec<Ipv4Addr>,
    /// The classless routes (option 121): destination, prefix and gateway. `None` if the option is
    /// absent or invalid. A valid option replaces all other routes.
    pub classless: Option<Vec<(Ipv4Addr, u8, Ipv4Addr)>>,
    /// The routes by address class (option 33): destination and gateway.
    pub classful: Vec<(Ipv4Addr, Ipv4Addr)>,
    /// The DNS servers (option 6; of DHCPv6, 23).
    pub nameservers: Vec<IpAddr>,
    /// The domain (option 15), empty without the option.
    pub domain: String,
    /// The search domains (option 119; of DHCPv6, 24).
    pub search: Vec<String>,
    /// The MTU of the interface (option 26).
    pub mtu: Option<u16>,
    /// The addresses and names of time servers (option 56 of DHCPv6). A result has no place for
    /// them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ntp: Vec<String>,
}

impl LeaseParameters {
    /// Returns the leased address of DHCPv4.
    pub fn address(&self) -> Ipv4Addr {
        v4(self.cidr)
    }

    /// Returns a route of the configuration with the lease's first router as its gateway if it has
    /// none, and with this priority if it has none. A route with the scope `link` needs no gateway.
    fn with_defaults(&self, route: &Route, priority: Option<u32>) -> Route {
        let is_on_link = route.scope.is_some_and(|scope| scope >= LINK_SCOPE) || !route.dst.is_ipv4();
        let router = if is_on_link { None } else { self.routers.first().copied().map(IpAddr::V4) };
        Route { gw: route.gw.or(router), priority: route.priority.or(priority), ..route.clone() }
    }

    /// Returns the result for an ADD.
    pub fn result(&self, choices: &RouteChoices<'_>) -> AddResult {
        let gateway = self.routers.first().copied().map(IpAddr::V4);
        let mut routes: Vec<Route> = match &self.classless {
            Some(list) => list.iter().filter_map(|(dst, prefix, gateway)| route_to(*dst, *prefix, *gateway)).collect(),
            None => {
                let classful =
                    self.classful.iter().filter_map(|(dst, gateway)| route_to(*dst, class_prefix(*dst), *gateway));
                let default = gateway.map(|gateway| Route::new(Cidr::default_route(gateway), Some(gateway)));
                classful.chain(default).collect()
            }
        };
        for route in &mut routes {
            route.priority = choices.priority;
        }
        let added: Vec<Route> =
            choices.routes.iter().map(|route| self.with_defaults(route, choices.priority)).collect();
        // The kernel refuses a second route with these properties.
        let identity = |route: &Route| (route.dst.network(), route.table, route.priority);
        routes.retain(|route| added.iter().all(|other| identity(other) != identity(route)));
        routes.extend(added);
        // A route with an MTU above that of the link would lose every packet in between.
        let mtu = self.mtu.map(u32::from).map(|mtu| choices.link_mtu.map_or(mtu, |link_mtu| mtu.min(link_mtu)));
        for route in &mut routes {
            route.mtu = route.mtu.or(mtu);
        }
        AddResult {
            ips: vec![IpConfig { interface: None, address: self.cidr, gateway }],
            routes,
            dns: Dns {
                nameservers: self.nameservers.iter().map(IpAddr::to_string).collect(),
                domain: self.domain.clone(),
                search: self.search.clone(),
                options: Vec::new(),
            },
            ..AddResult::default()
        }
    }
}

/// What a result has besides the lease, and what limits its routes.
#[derive(Clone, Copy, Debug, Default)]
pub struct RouteChoices<'a> {
    /// The priority (metric) of the routes that have none.
    pub priority: Option<u32>,
    /// The MTU of the interface, which is the largest MTU of the lease's routes.
    pub link_mtu: Option<u32>,
    /// The routes that are added to those of the lease. They replace routes of the lease with the
    /// same destination, table and priority.
    pub routes: &'a [Route],
}

/// Returns a route to a network. Host bits of `dst` are cleared. The gateway 0.0.0.0 means that the
/// network is on the link. Returns `None` if the prefix is invalid.
fn route_to(dst: Ipv4Addr, prefix: u8, gateway: Ipv4Addr) -> Option<Route> {
    let dst = Cidr::new(dst.into(), prefix)?.network();
    if gateway.is_unspecified() {
        Some(Route { scope: Some(LINK_SCOPE), ..Route::new(dst, None) })
    } else {
        Some(Route::new(dst, Some(gateway.into())))
    }
}

/// Returns the prefix length of a classful route's destination: 8, 16 or 24 for the classes A, B
/// and C, 32 for other classes, and 0 for the default route 0.0.0.0.
fn class_prefix(address: Ipv4Addr) -> u8 {
    match address.octets()[0] {
        _ if address.is_unspecified() => 0,
        0..128 => 8,
        128..192 => 16,
        192..224 => 24,
        _ => 32,
    }
}
