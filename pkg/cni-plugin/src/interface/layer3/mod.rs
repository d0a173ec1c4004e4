//! Addresses and routes: completes and checks IPAM's answer, and configures it in the container.

use std::net::IpAddr;
use std::time::Duration;

use cni::machine::Machine;
use cni::result::{AddResult, IpConfig, Route as ResultRoute};
use cni::rollback::Notes;
use cni::skel::Call;
use cni::{Cidr, Code, Error, Result};
use cni_linux::route::MAIN_TABLE;
use cni_linux::{Dad, Family, Netlink, Route, Watch, announce, sysctl};

use super::{AttachmentContext, Gateway, HostEnd, Layer3Policy, SubnetRoute};

/// How long duplicate address detection may take.
const DAD_DEADLINE: Duration = Duration::from_secs(5);

/// How long to wait until the kernel accepts packets for an IPv6 address. A kernel worker does that
/// within microseconds unless the machine is overloaded.
const USABLE_DEADLINE: Duration = Duration::from_secs(1);

/// RT_SCOPE_LINK. With this scope or a larger number the destination is on the link itself, so that
/// the route has no gateway.
pub const SCOPE_LINK: u8 = 253;

/// A container's addresses and routes. For ADD they come from IPAM or an earlier plugin's result
/// and are checked; for CHECK they come unchecked from `prevResult`.
#[derive(Clone, Debug)]
pub struct Layer3 {
    /// The container's addresses, each with its gateway.
    pub ips: Vec<IpConfig>,
    /// The routes as the result lists them.
    pub routes: Vec<ResultRoute>,
    /// How the container reaches its own subnets.
    pub(super) subnet: SubnetRoute,
}

impl Layer3 {
    /// Completes the `answer` of the IPAM plugin with the gateways and default routes that `policy`
    /// asks for, and checks it. `position` is the position of CNI_IFNAME in the result's
    /// interfaces. `earlier_ips` has the addresses that earlier plugins gave to the container.
    ///
    /// # Errors
    /// Code 7 if the answer has no addresses, lacks a gateway that `policy` requires, or has a
    /// route that cannot work.
    pub(super) fn new(
        answer: &AddResult,
        policy: &Layer3Policy<'_>,
        position: usize,
        earlier_ips: &[IpConfig],
    ) -> Result<Layer3> {
        if answer.ips.is_empty() {
            return Err(Error::config("IPAM plugin returned missing IP config"));
        }
        let mut layer3 = Layer3 { ips: answer.ips.clone(), routes: answer.routes.clone(), subnet: policy.subnet };
        layer3.routes.iter_mut().try_for_each(ResultRoute::settle_gateways)?;
        for ip in &mut layer3.ips {
            ip.interface = Some(position);
            if ip.gateway.is_some() {
                continue;
            }
            match policy.gateway {
                Gateway::None => {}
                Gateway::Address | Gateway::DefaultRoute => {
                    ip.gateway = ip.address.first().map(|first| first.address());
                }
                Gateway::Required => {
                    return Err(Error::config(format!(
                        "IPAM plugin returned address {} without a gateway",
                        ip.address
                    )));
                }
            }
        }
        if policy.gateway == Gateway::DefaultRoute {
            layer3.add_default_routes();
        }
        // An address whose entry names no interface counts as one of CNI_IFNAME.
        let earlier_on_ifname = earlier_ips.iter().filter(|ip| ip.interface.is_none_or(|other| other == position));
        layer3.check_routes(earlier_on_ifname)?;
        Ok(layer3)
    }

    /// Returns the container's addresses, with their prefixes.
    pub fn addresses(&self) -> Vec<Cidr> {
        self.ips.iter().map(|ip| ip.address).collect()
    }

    /// Returns the gateways as addresses for a link of the host that acts as the gateway: each with
    /// the prefix length of the container's address, without duplicates.
    pub fn gateways(&self) -> Vec<Cidr> {
        let mut gateways = Vec::new();
        for ip in &self.ips {
            let Some(gateway) = ip.gateway else { continue };
            // `None` only for the IPv4 gateway of an IPv6 address whose prefix is longer than 32.
            let Some(gateway) = Cidr::new(gateway, ip.address.prefix()) else { continue };
            if !gateways.contains(&gateway) {
                gateways.push(gateway);
            }
        }
        gateways
    }

    /// Adds a default route for each address family that has a gateway, beginning with the family
    /// of the first address. A default route with a gateway in IPAM's answer is enough. One without
    /// a gateway gets the gateway if it is in the main table with metric 0.
    fn add_default_routes(&mut self) {
        let mut families = Family::ALL;
        if self.ips.first().is_some_and(|ip| !ip.address.is_ipv4()) {
            families.reverse();
        }
        for family in families {
            let Some(gateway) = self.family_gateway(family) else { continue };
            let default = Cidr::default_route(gateway);
            // As in Go, whatever the metric and table of the existing route.
            if self.routes.iter().any(|route| route.dst.network() == default && route.gw.is_some()) {
                continue;
            }
            // A new route would conflict with this one, which therefore gets the gateway.
            let conflicting = self.routes.iter_mut().find(|route| {
                route.dst.network() == default
                    && route.table.is_none_or(|table| table == 0 || table == MAIN_TABLE)
                    && route.priority.unwrap_or(0) == 0
            });
            match conflicting {
                Some(route) => route.gw = Some(gateway),
                None => self.routes.push(ResultRoute::new(default, Some(gateway))),
            }
        }
    }

    /// Returns the gateway for the family's routes that name no gateway: that of the first address
    /// of the family that has one. Returns `None` if no address of the family has a gateway.
    fn family_gateway(&self, family: Family) -> Option<IpAddr> {
        self.ips.iter().filter(|ip| Family::of(ip.address.address()) == family).find_map(|ip| ip.gateway)
    }

    /// Returns the gateway that the kernel will have for one path of a route, or `None` for a path
    /// over the link itself.
    fn next_hop(&self, route: &ResultRoute) -> Option<IpAddr> {
        match route.gw {
            // Configurations write 0.0.0.0 for a route over the link itself, because `scope` exists
            // only since specification 1.1.0.
            Some(IpAddr::V4(gw)) if gw.is_unspecified() => None,
            Some(gw) => Some(gw),
            // The kernel ignores the scope of an IPv6 route.
            None if route.dst.is_ipv4() && route.scope.is_some_and(|scope| scope >= SCOPE_LINK) => None,
            None => self.family_gateway(Family::of(route.dst.address())),
        }
    }

    /// Checks that the kernel will accept the routes when they are added in their order: IPv4
    /// destinations have no host bits, and an address or an earlier route reaches each gateway.
    /// `earlier_ips` has the addresses that earlier plugins gave to the interface.
    ///
    /// # Errors
    /// Code 7 for the first route that cannot work.
    fn check_routes<'a>(&'a self, earlier_ips: impl Iterator<Item = &'a IpConfig>) -> Result<()> {
        // The networks that are reached over the link itself.
        let mut on_link: Vec<Cidr> = self.ips.iter().chain(earlier_ips).map(|ip| ip.address.network()).collect();
        if self.subnet == SubnetRoute::ThroughGateway {
            on_link.extend(self.ips.iter().filter_map(|ip| ip.gateway.map(Cidr::host)));
        }
        for route in self.routes.iter().flat_map(ResultRoute::paths) {
            let ResultRoute { dst, .. } = route;
            // The kernel ignores the host bits of an IPv6 route.
            if dst.is_ipv4() && !dst.is_network() {
                let network = dst.network();
                return Err(Error::config(format!("route {dst} has host bits set; the network address is {network}")));
            }
            let Some(gw) = self.next_hop(&route) else {
                on_link.push(dst.network());
                continue;
            };
            ResultRoute { gw: Some(gw), ..route.clone() }.check_family()?;
            // The kernel gives each interface with IPv6 a route to fe80::/64.
            let is_link_local = matches!(gw, IpAddr::V6(v6) if v6.is_unicast_link_local());
            if !is_link_local && !on_link.iter().any(|network| network.contains(gw)) {
                let msg =
                    format!("route {dst} via {gw}: no address or earlier route of the container reaches the gateway");
                return Err(Error::config(msg));
            }
        }
        Ok(())
    }

    /// Whether the container gets an IPv6 address.
    fn has_ipv6(&self) -> bool {
        self.ips.iter().any(|ip| !ip.address.is_ipv4())
    }

    /// Returns the routes that the kernel gets: first those of `subnet_routes`, then the routes of
    /// the result, in the result's order. `interface_index` is the index of CNI_IFNAME.
    pub(super) fn kernel_routes(&self, interface_index: u32) -> Vec<Route> {
        let mut routes = self.subnet_routes(interface_index);
        let paths = self.routes.iter().flat_map(ResultRoute::paths);
        routes.extend(paths.map(|path| kernel_route(&path, self.next_hop(&path), interface_index)));
        routes
    }

    /// Returns the routes by which the container reaches its subnets. Each address needs two with
    /// [`SubnetRoute::ThroughGateway`]: one to the gateway over the link, and one to the subnet
    /// through the gateway. With [`SubnetRoute::OnLink`] an address needs none, because the kernel
    /// adds the subnet's route with the address.
    fn subnet_routes(&self, interface_index: u32) -> Vec<Route> {
        let mut routes: Vec<Route> = Vec::new();
        if self.subnet == SubnetRoute::OnLink {
            return routes;
        }
        for ip in &self.ips {
            let Some(gateway) = ip.gateway else { continue };
            let source = Some(ip.address.address());
            let to_gateway =
                Route { scope: Some(SCOPE_LINK), source, ..Route::new(Cidr::host(gateway), None, interface_index) };
            let to_subnet = Route { source, ..Route::new(ip.address.network(), Some(gateway), interface_index) };
            for route in [to_gateway, to_subnet] {
                // Several addresses may share a gateway or a subnet. A subnet may consist of the
                // container's own address (/32), which needs no route.
                if route.dst != Cidr::host(ip.address.address()) && !routes.iter().any(|other| other.dst == route.dst) {
                    routes.push(route);
                }
            }
        }
        routes
    }
}

/// Writes the sysctls of the container's namespace that must be set before the interface is up and
/// has an address: those of duplicate address detection, and of announcements unless the link has a
/// `host_end`. If the container gets an IPv6 address, also enables IPv6 and keeps the address when
/// the interface is set down.
///
/// # Errors
/// `disable_ipv6` or `keep_addr_on_down` cannot be set. Errors of the other sysctls are ignored, as
/// in Go.
pub(super) fn prepare_namespace<C>(
    context: &AttachmentContext<'_, C>,
    dad: Dad,
    host_end: HostEnd,
    layer3: &Layer3,
) -> Result<()> {
    let ifname = &context.call.ifname;
    context
        .netns
        .run(|| {
            if dad == Dad::Normal {
                let _ = sysctl::write(&format!("net/ipv6/conf/{ifname}/enhanced_dad"), "1");
            }
            let accept_dad = if dad == Dad::Normal { "1" } else { "0" };
            let _ = sysctl::write(&format!("net/ipv6/conf/{ifname}/accept_dad"), accept_dad);
            // The kernel then announces the addresses when the interface is set up. A veth pair may
            // not pass frames yet, so its addresses are announced later.
            if host_end == HostEnd::None {
                let _ = announce::allow(ifname);
            }
            if layer3.has_ipv6() {
                for link in ["lo", ifname.as_str()] {
                    sysctl::ensure(&format!("net/ipv6/conf/{link}/disable_ipv6"), "0")?;
                }
                sysctl::ensure(&format!("net/ipv6/conf/{ifname}/keep_addr_on_down"), "1")?;
            }
            Ok(())
        })?
        .map_err(|error: cni_linux::Error| Error::from(error))
}

/// Adds the addresses to the interface `index`, sets it up, and adds the routes. Addresses and
/// routes of the IPAM plugin slaac exist already, and the kernel keeps renewing them.
///
/// A default route that conflicts with one over another interface is added behind the existing
/// default routes, which keep the traffic. Its metric then is in `layer3.routes`, and a note
/// reports it.
///
/// # Errors
/// The kernel refuses an address or a route.
pub(super) fn configure(container: &Netlink, index: u32, dad: Dad, layer3: &mut Layer3, notes: &Notes) -> Result<()> {
    for ip in &layer3.ips {
        let added = match layer3.subnet {
            SubnetRoute::OnLink => container.add_address(index, ip.address, dad),
            SubnetRoute::ThroughGateway => container.add_address_without_route(index, ip.address, dad),
        };
        match added {
            Err(error) if error.is_exists() && is_advertised(container, index, ip.address)? => {}
            result => result?,
        }
    }
    container.set_up(index)?;
    let routes = layer3.kernel_routes(index);
    // Default routes behind those of other networks, with their metrics.
    let mut behind: Vec<(Route, u32)> = Vec::new();
    for paths in merge_conflicting(&routes) {
        let route = paths[0];
        match add_route(container, index, &paths)? {
            AddedRoute::AsRequested => {}
            AddedRoute::Behind { metric } => {
                notes.note(format_args!(
                    "{route} was added with metric {metric}, behind the default route of another network"
                ));
                behind.push((route, metric));
            }
        }
    }
    for result_route in &mut layer3.routes {
        let kernel_route = kernel_route(result_route, None, index);
        // A route in `behind` stands for all routes that were merged with it.
        if let Some((_, metric)) = behind.iter().find(|(route, _)| kernel_route.conflicts_with(route)) {
            result_route.priority = Some(*metric);
        }
    }
    Ok(())
}

/// Whether the interface `index` has this IPv6 address for a limited time, as the kernel adds it
/// because of a router's advertisement, from which the IPAM plugin slaac knows it.
///
/// # Errors
/// The addresses cannot be listed.
fn is_advertised(container: &Netlink, index: u32, address: Cidr) -> Result<bool> {
    let existing = container.list_addresses(index)?;
    Ok(!address.is_ipv4() && existing.iter().any(|other| other.cidr == address && !other.permanent))
}

/// Returns the kernel's route for a route of a result, with the gateway `gw`, over the interface
/// `index`. A route of a result may have host bits, the kernel's has none.
pub fn kernel_route(route: &ResultRoute, gw: Option<IpAddr>, index: u32) -> Route {
    let ResultRoute { dst, mtu, advmss, priority, table, scope, .. } = *route;
    Route { mtu, advmss, priority, table, scope, ..Route::new(dst.network(), gw, index) }
}

/// Groups the routes to add: conflicting routes (same destination, table and metric) become the
/// paths of one multipath route, without duplicates. Any other route is a group of its own.
pub fn merge_conflicting(routes: &[Route]) -> Vec<Vec<Route>> {
    let mut merged: Vec<Vec<Route>> = Vec::new();
    for route in routes {
        match merged.iter_mut().find(|paths| paths[0].conflicts_with(route)) {
            Some(paths) if paths.iter().any(|path| path.is_same(route)) => {}
            Some(paths) => paths.push(*route),
            None => merged.push(vec![*route]),
        }
    }
    merged
}

/// The outcome of [`add_route`].
enum AddedRoute {
    /// The kernel has the route as requested: it was added, or an identical one existed.
    AsRequested,
    /// The route is a default route and was added with this metric, because the kernel has a
    /// default route with the requested metric over another interface.
    Behind { metric: u32 },
}

/// Adds one route, which has several `paths` if it is a multipath route. Does nothing if an
/// identical route exists. A default route that conflicts with one over another interface, or with
/// one of another type, is added behind the existing default routes of its table. As in Go, a route
/// to the subnet of the interface `index` is added in front of the route to this subnet that the
/// kernel added with the address.
///
/// # Errors
/// The kernel refuses the route.
fn add_route(container: &Netlink, index: u32, paths: &[Route]) -> Result<AddedRoute> {
    let route = &paths[0];
    let added = if paths.len() == 1 { container.add_route(route) } else { container.add_multipath_route(paths) };
    let error = match added {
        Ok(()) => return Ok(AddedRoute::AsRequested),
        Err(error) if error.is_exists() => error,
        Err(error) => return Err(error.into()),
    };
    let existing = container.list_conflicting(route)?;
    if existing.iter().any(|other| other.is_same(route)) {
        return Ok(AddedRoute::AsRequested);
    }
    // `list_conflicting` returns no route of another type, such as a blackhole route.
    let is_of_other_type = existing.is_empty();
    if !is_of_other_type && existing.iter().all(|other| other.is_connected(index)) {
        container.add_route_in_front(paths)?;
        return Ok(AddedRoute::AsRequested);
    }
    let is_of_other_interface = existing.iter().any(|other| other.oif != index);
    if route.dst.is_default_route()
        && (is_of_other_type || is_of_other_interface)
        && let Some(metric) = container.add_default_route_behind(paths)?
    {
        return Ok(AddedRoute::Behind { metric });
    }
    let error = Error::from(error);
    Err(if is_of_other_type {
        error.with_details("the existing route is of another type, such as blackhole, unreachable or prohibit")
    } else {
        error
    })
}

/// Waits until duplicate address detection has finished for every address of the interface `index`.
///
/// # Errors
/// - Code 102 if another host on the link has one of the addresses.
/// - Code 11 after [`DAD_DEADLINE`].
pub(super) fn wait_for_dad(container: &Netlink, watch: &Watch, index: u32, machine: &dyn Machine) -> Result<()> {
    let deadline = machine.now() + DAD_DEADLINE;
    let mut duplicate: Option<Cidr> = None;
    watch.wait("duplicate address detection", deadline, machine, || {
        let addresses = container.list_addresses(index)?;
        duplicate = addresses.iter().find(|address| address.dad_failed).map(|address| address.cidr);
        let is_pending = addresses.iter().any(|address| address.tentative);
        // One duplicate ends the wait, even if the detection of other addresses is pending.
        Ok(if duplicate.is_some() || !is_pending { Some(()) } else { None })
    })?;
    let Some(cidr) = duplicate else { return Ok(()) };
    Err(Error::new(Code::CONFLICT, format!("address {cidr} is in use by another host on the link"))
        .with_details("duplicate address detection failed (DADFAILED state)"))
}

/// Waits until the kernel accepts packets for each of `addresses`. Calls `open_watch` only if an
/// address is not usable yet.
///
/// An address that is not usable after [`USABLE_DEADLINE`] only causes a note, not an error:
/// [`Netlink::is_local_address`] never finds an address that is in the routing table of a VRF.
///
/// # Errors
/// Those of the kernel; SIGTERM during a wait.
pub(super) fn wait_until_usable(
    netlink: &Netlink,
    addresses: impl IntoIterator<Item = IpAddr>,
    call: &Call<'_>,
    open_watch: impl Fn() -> cni_linux::Result<Watch>,
) -> Result<()> {
    // An IPv4 address accepts packets as soon as it is added.
    for address in addresses.into_iter().filter(IpAddr::is_ipv6) {
        if netlink.is_local_address(address)? {
            continue;
        }
        let what = format!("{address} to become usable");
        let deadline = call.machine.now() + USABLE_DEADLINE;
        let waited = open_watch()?.wait(&what, deadline, call.machine, || {
            let is_usable = netlink.is_local_address(address)?;
            Ok(is_usable.then_some(()))
        });
        match waited {
            Err(error) if error.is_deadline() => call.notes.note(format_args!("{error}")),
            result => result?,
        }
    }
    Ok(())
}

/// Returns the path below /proc/sys of the sysctl that lets the host forward packets of an address
/// family.
pub fn forwarding_sysctl(family: Family) -> &'static str {
    match family {
        Family::V4 => "net/ipv4/ip_forward",
        Family::V6 => "net/ipv6/conf/all/forwarding",
    }
}

#[cfg(test)]
mod tests;
