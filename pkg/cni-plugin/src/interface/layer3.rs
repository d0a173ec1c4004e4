//! Addresses and routes: what IPAM said, completed, checked, and put into the container.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use cni::machine::Machine;
use cni::result::{AddResult, IpConfig, Route as ResultRoute};
use cni::rollback::Notes;
use cni::skel::Call;
use cni::{Cidr, Code, Error, Result};
use cni_linux::route::MAIN_TABLE;
use cni_linux::{Dad, Netlink, Route, Watch, announce, sysctl};

use super::{AttachmentContext, Gateway, Layer3Policy, SubnetRoute};

/// How long duplicate address detection may take.
const DAD_DEADLINE: Duration = Duration::from_secs(5);

/// A worker of the kernel's needs microseconds; for that long it may be kept from its work.
const OWN_DEADLINE: Duration = Duration::from_secs(1);

/// The scope from which on a destination is on the link itself, so that a gateway makes no sense.
const SCOPE_LINK: u8 = 253;

/// The addresses and routes to configure, checked.
#[derive(Clone, Debug)]
pub struct Layer3 {
    /// The container's addresses, each with its gateway.
    pub ips: Vec<IpConfig>,
    /// The routes as they will stand in the result.
    pub routes: Vec<ResultRoute>,
    /// How the container reaches its own subnets.
    pub(super) subnet: SubnetRoute,
}

impl Layer3 {
    /// Completes IPAM's answer by the configuration: gateways, the default routes, the interface's
    /// index. `before`: the addresses that the container has from earlier plugins.
    ///
    /// # Errors
    /// 7 for an answer without addresses and for routes that could not work, before anything is
    /// configured.
    pub(super) fn new(
        ipam: &AddResult,
        policy: &Layer3Policy<'_>,
        interface: usize,
        before: &[IpConfig],
    ) -> Result<Layer3> {
        if ipam.ips.is_empty() {
            return Err(Error::config("IPAM plugin returned missing IP config"));
        }
        let mut layer3 = Layer3 { ips: ipam.ips.clone(), routes: ipam.routes.clone(), subnet: policy.subnet };
        for ip in &mut layer3.ips {
            ip.interface = Some(interface);
            match policy.gateway {
                _ if ip.gateway.is_some() => {}
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
        let before = before.iter().filter(|ip| ip.interface.is_none_or(|index| index == interface));
        layer3.check_routes(before)?;
        Ok(layer3)
    }

    /// The container's addresses, with their prefixes.
    pub fn addresses(&self) -> Vec<Cidr> {
        self.ips.iter().map(|ip| ip.address).collect()
    }

    /// The gateways, each with the prefix of its address.
    pub fn gateways(&self) -> Vec<Cidr> {
        let mut gateways = Vec::new();
        for ip in &self.ips {
            if let Some(gateway) = ip.gateway.and_then(|gateway| Cidr::new(gateway, ip.address.prefix()))
                && !gateways.contains(&gateway)
            {
                gateways.push(gateway);
            }
        }
        gateways
    }

    /// One default route per family, in the order of the addresses. One that IPAM lists without a
    /// gateway means this one.
    fn add_default_routes(&mut self) {
        let first = self.ips.first().is_none_or(|ip| ip.address.is_ipv4());
        for is_ipv4 in [first, !first] {
            let Some(gateway) = self.family_gateway(is_ipv4) else { continue };
            let default = Cidr::default_route(gateway);
            // As in Go: one with a gateway of its own is enough, whatever its metric and table.
            if self.routes.iter().any(|route| route.dst.network() == default && route.gw.is_some()) {
                continue;
            }
            let existing = self.routes.iter_mut().find(|route| {
                route.dst.network() == default
                    && route.table.is_none_or(|table| table == 0 || table == MAIN_TABLE)
                    && route.priority.unwrap_or(0) == 0
            });
            match existing {
                Some(route) => route.gw = Some(gateway),
                None => self.routes.push(ResultRoute::new(default, Some(gateway))),
            }
        }
    }

    /// The first gateway of a family, which its routes use unless they name one.
    fn family_gateway(&self, is_ipv4: bool) -> Option<IpAddr> {
        self.ips.iter().filter(|ip| ip.address.is_ipv4() == is_ipv4).find_map(|ip| ip.gateway)
    }

    /// The next hop that a route will have.
    fn next_hop(&self, route: &ResultRoute) -> Option<IpAddr> {
        match route.gw {
            // An on-link route in releases that have no `scope`.
            Some(IpAddr::V4(gw)) if gw.is_unspecified() => None,
            Some(gw) => Some(gw),
            // The kernel ignores the scope of an IPv6 route.
            None if route.dst.is_ipv4() && route.scope.is_some_and(|scope| scope >= SCOPE_LINK) => None,
            None => self.family_gateway(route.dst.is_ipv4()),
        }
    }

    fn check_routes<'a>(&'a self, before: impl Iterator<Item = &'a IpConfig>) -> Result<()> {
        let mut on_link: Vec<Cidr> = self.ips.iter().chain(before).map(|ip| ip.address.network()).collect();
        if self.subnet == SubnetRoute::ThroughGateway {
            on_link.extend(self.ips.iter().filter_map(|ip| ip.gateway.map(Cidr::host)));
        }
        for route in &self.routes {
            let ResultRoute { dst, .. } = route;
            // The kernel ignores the host bits of an IPv6 route.
            if dst.is_ipv4() && !dst.is_network() {
                let network = dst.network();
                return Err(Error::config(format!("route {dst} has host bits set; the network address is {network}")));
            }
            let Some(gw) = self.next_hop(route) else {
                on_link.push(dst.network());
                continue;
            };
            if gw.is_ipv4() != dst.is_ipv4() {
                return Err(Error::config(format!("route {dst} via {gw}: the gateway is of the other address family")));
            }
            let link_local = matches!(gw, IpAddr::V6(v6) if v6.is_unicast_link_local());
            if !link_local && !on_link.iter().any(|network| network.contains(gw)) {
                let msg =
                    format!("route {dst} via {gw}: no address or earlier route of the container reaches the gateway");
                return Err(Error::config(msg));
            }
        }
        Ok(())
    }

    /// Whether there is an IPv6 address.
    fn has_ipv6(&self) -> bool {
        self.ips.iter().any(|ip| !ip.address.is_ipv4())
    }

    /// The routes as the kernel is to have them.
    pub(super) fn kernel_routes(&self, interface_index: u32) -> impl Iterator<Item = Route> + '_ {
        self.subnet_routes(interface_index).into_iter().chain(self.routes.iter().map(move |route| Route {
            mtu: route.mtu,
            advmss: route.advmss,
            priority: route.priority,
            table: route.table,
            scope: route.scope,
            ..Route::new(route.dst.network(), self.next_hop(route), interface_index)
        }))
    }

    /// The routes to the gateways and, through them, to the subnets, where the kernel adds none
    /// with the addresses.
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
                // Several addresses may share a gateway or a subnet, and a subnet may have no other
                // address.
                if route.dst != Cidr::host(ip.address.address()) && !routes.iter().any(|other| other.dst == route.dst) {
                    routes.push(route);
                }
            }
        }
        routes
    }
}

/// Settings of the container's namespace that must stand before the interface is up and has an
/// address.
///
/// # Errors
/// Only where IPv6 cannot be switched on: the rest is a comfort, as in Go.
pub(super) fn prepare_namespace<C>(context: &AttachmentContext<'_, C>, dad: Dad, layer3: &Layer3) -> Result<()> {
    let ifname = &context.call.ifname;
    context
        .netns
        .run(|| {
            let (accept, enhanced) = if dad == Dad::Normal { ("1", Some("1")) } else { ("0", None) };
            if let Some(enhanced) = enhanced {
                let _ = sysctl::write(&format!("net/ipv6/conf/{ifname}/enhanced_dad"), enhanced);
            }
            let _ = sysctl::write(&format!("net/ipv6/conf/{ifname}/accept_dad"), accept);
            let _ = announce::allow(ifname);
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

/// Adds the addresses, then sets the interface up, then adds the routes.
///
/// Accepts identical routes that exist already. Puts a route to the interface's own subnet before
/// the kernel's. A default route in whose way another network's stands is left out, here and in the
/// result, as the specification asks.
///
/// # Errors
/// What the kernel refuses.
pub(super) fn configure(container: &Netlink, index: u32, dad: Dad, layer3: &mut Layer3, notes: &Notes) -> Result<()> {
    for ip in &layer3.ips {
        match layer3.subnet {
            SubnetRoute::OnLink => container.add_address(index, ip.address, dad)?,
            SubnetRoute::ThroughGateway => container.add_address_without_route(index, ip.address, dad)?,
        }
    }
    container.set_up(index)?;
    let wanted: Vec<Route> = layer3.kernel_routes(index).collect();
    let mut skipped = BTreeSet::new();
    let mut done: Vec<usize> = Vec::new();
    for (position, route) in wanted.iter().enumerate() {
        if done.contains(&position) {
            continue;
        }
        // Routes of this result to one destination with several gateways are one route over several
        // paths.
        let mut paths = vec![*route];
        let mut places = vec![position];
        for (other, rival) in wanted.iter().enumerate().skip(position + 1) {
            if rival.conflicts_with(route) {
                done.push(other);
                places.push(other);
                if !paths.iter().any(|path| path.is_same(rival)) {
                    paths.push(*rival);
                }
            }
        }
        match if paths.len() == 1 { container.add_route(route) } else { container.add_multipath_route(&paths) } {
            Ok(()) => {}
            Err(error) if error.is_exists() => {
                let rivals = container.list_conflicting(route)?;
                if rivals.iter().any(|rival| rival.is_same(route)) {
                    continue;
                }
                // As in Go, a route to the interface's own subnet goes before the kernel's.
                if rivals.iter().all(|rival| rival.is_connected(index)) {
                    container.add_route_in_front(&paths)?;
                    continue;
                }
                let other_network = rivals.iter().any(|rival| rival.oif != index);
                if !(route.dst.is_default_route() && other_network) {
                    return Err(error.into());
                }
                notes.note(format_args!("{route} was not added: the default route of another network exists already"));
                skipped.extend(places);
            }
            Err(error) => return Err(error.into()),
        }
    }
    // The result's own are behind those to the subnets.
    let mut position = wanted.len() - layer3.routes.len();
    layer3.routes.retain(|_| {
        position += 1;
        !skipped.contains(&(position - 1))
    });
    Ok(())
}

/// Waits until duplicate address detection has let every address pass.
///
/// # Errors
/// 102 for an address that another host on the link has, 11 if it takes too long.
pub(super) fn wait_for_dad(container: &Netlink, watch: &Watch, index: u32, machine: &dyn Machine) -> Result<()> {
    let deadline = machine.now() + DAD_DEADLINE;
    let failed = watch.wait("duplicate address detection", deadline, machine, || {
        let addresses = container.list_addresses(index)?;
        if let Some(address) = addresses.iter().find(|address| address.dad_failed) {
            return Ok(Some(Some(address.cidr)));
        }
        Ok(if addresses.iter().any(|address| address.tentative) { None } else { Some(None) })
    })?;
    match failed {
        None => Ok(()),
        Some(cidr) => Err(Error::new(Code::CONFLICT, format!("address {cidr} is in use by another host on the link"))
            .with_details("duplicate address detection failed (DADFAILED state)")),
    }
}

/// Waits until each of these addresses takes packets in. `listen` is called if one does not yet.
/// One that keeps not to is noted, no more: its route may be in another table than the one that is
/// asked, as in a VRF.
///
/// # Errors
/// The kernel's.
pub(super) fn wait_for_own(
    netlink: &Netlink,
    addresses: impl IntoIterator<Item = IpAddr>,
    call: &Call<'_>,
    listen: impl Fn() -> cni_linux::Result<Watch>,
) -> Result<()> {
    // An IPv4 address takes them in from the start.
    for address in addresses.into_iter().filter(IpAddr::is_ipv6) {
        if !netlink.is_local_address(address)? {
            let what = format!("{address} to become usable");
            let check = || Ok(netlink.is_local_address(address)?.then_some(()));
            match listen()?.wait(&what, call.machine.now() + OWN_DEADLINE, call.machine, check) {
                Err(error) if error.is_deadline() => call.notes.note(format_args!("{error}")),
                waited => waited?,
            }
        }
    }
    Ok(())
}

/// The sysctl that lets the host forward a family.
pub fn forwarding(is_ipv4: bool) -> &'static str {
    if is_ipv4 { "net/ipv4/ip_forward" } else { "net/ipv6/conf/all/forwarding" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni::json::Json;
    use cni::version::Version;

    fn layer3(ipam: &str, gateway: Gateway) -> Result<Layer3> {
        let ipam = AddResult::decode(&Json::parse(ipam.as_bytes()).unwrap(), Version::V1_1_0).unwrap();
        Layer3::new(&ipam, &Layer3Policy { gateway, ..Layer3Policy::default() }, 2, &[])
    }

    #[test]
    fn an_ipam_default_route_without_gateway_gets_the_own_one() {
        let made = layer3(
            r#"{"ips":[{"address":"10.1.0.5/24"},{"address":"fd00::5/64"}],"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0","table":7}]}"#,
            Gateway::DefaultRoute,
        )
        .unwrap();
        let routes: Vec<_> =
            made.routes.iter().map(|r| (r.dst.to_string(), r.gw.map(|gw| gw.to_string()), r.table)).collect();
        assert_eq!(
            routes,
            [
                ("0.0.0.0/0".into(), Some("10.1.0.1".into()), None),
                ("::/0".into(), None, Some(7)),
                ("::/0".into(), Some("fd00::1".into()), None)
            ]
        );
        assert_eq!(made.ips[0].interface, Some(2));
    }

    #[test]
    fn a_default_route_with_a_gateway_is_enough() {
        for route in [r#""priority":1024"#, r#""table":7"#, r#""priority":0"#] {
            let made = layer3(
                &format!(
                    r#"{{"ips":[{{"address":"10.1.0.5/24"}}],"routes":[{{"dst":"0.0.0.0/0","gw":"10.1.0.9",{route}}}]}}"#
                ),
                Gateway::DefaultRoute,
            );
            assert_eq!(made.unwrap().routes.len(), 1, "{route}");
        }
    }

    #[test]
    fn a_subnet_behind_its_gateway_has_two_routes() {
        let ipam = r#"{"ips":[{"address":"10.1.0.5/24","gateway":"10.1.0.1"},{"address":"10.1.0.6/24","gateway":"10.1.0.1"},
            {"address":"fd00::5/128","gateway":"fe80::1"}],"routes":[{"dst":"0.0.0.0/0"}]}"#;
        let ipam = AddResult::decode(&Json::parse(ipam.as_bytes()).unwrap(), Version::V1_1_0).unwrap();
        let policy = Layer3Policy { subnet: SubnetRoute::ThroughGateway, ..Layer3Policy::default() };
        let made = Layer3::new(&ipam, &policy, 1, &[]).unwrap();
        let routes: Vec<String> = made.kernel_routes(1).map(|route| route.to_string()).collect();
        assert_eq!(routes, ["10.1.0.1/32", "10.1.0.0/24 via 10.1.0.1", "fe80::1/128", "0.0.0.0/0 via 10.1.0.1"]);
        assert_eq!(made.kernel_routes(1).next().unwrap().source, Some([10, 1, 0, 5].into()));
    }

    #[test]
    fn a_gateway_may_be_required_of_ipam() {
        let error = layer3(r#"{"ips":[{"address":"10.1.0.5/24"}]}"#, Gateway::Required).unwrap_err();
        assert_eq!(
            (error.code(), error.msg()),
            (Code::INVALID_CONFIG, "IPAM plugin returned address 10.1.0.5/24 without a gateway")
        );
    }

    #[test]
    fn a_bridge_that_is_not_a_gateway_reports_none() {
        let made = layer3(r#"{"ips":[{"address":"10.1.0.5/24"}]}"#, Gateway::None).unwrap();
        assert_eq!((made.ips[0].gateway, made.routes.len()), (None, 0));
    }

    #[test]
    fn routes_that_cannot_work_are_refused_before_anything_is_done() {
        for (routes, why) in [
            (r#"{"dst":"10.9.0.1/16"}"#, "host bits"),
            (r#"{"dst":"10.9.0.0/16","gw":"fd00::1"}"#, "other address family"),
            (r#"{"dst":"10.9.0.0/16","gw":"10.2.0.1"}"#, "reaches the gateway"),
        ] {
            let ipam = format!(r#"{{"ips":[{{"address":"10.1.0.5/24"}}],"routes":[{routes}]}}"#);
            let error = layer3(&ipam, Gateway::None).unwrap_err();
            assert_eq!(error.code(), Code::INVALID_CONFIG);
            assert!(error.msg().contains(why), "{error}");
        }
        assert!(
            layer3(r#"{"ips":[]}"#, Gateway::None)
                .unwrap_err()
                .msg()
                .starts_with("IPAM plugin returned missing IP config")
        );
    }

    #[test]
    fn a_route_on_the_link_may_carry_the_next_ones_gateway() {
        let made = layer3(
            r#"{"ips":[{"address":"10.1.0.5/32"}],"routes":[{"dst":"169.254.1.1/32","scope":253},{"dst":"0.0.0.0/0","gw":"169.254.1.1"},{"dst":"fd00:1::/64","gw":"fe80::1"}]}"#,
            Gateway::None,
        )
        .unwrap();
        let hops: Vec<_> = made.kernel_routes(1).map(|route| route.gw.is_some()).collect();
        assert_eq!(hops, [false, true, true]);
    }

    #[test]
    fn the_unspecified_ipv4_address_is_not_a_gateway() {
        let made = layer3(
            r#"{"ips":[{"address":"10.1.0.5/24","gateway":"10.1.0.1"}],"routes":[{"dst":"10.9.0.0/16","gw":"0.0.0.0"}]}"#,
            Gateway::None,
        )
        .unwrap();
        assert_eq!(made.kernel_routes(1).map(|route| route.gw).collect::<Vec<_>>(), [None]);
        assert!(
            layer3(r#"{"ips":[{"address":"fd00::5/64"}],"routes":[{"dst":"fd01::/64","gw":"::"}]}"#, Gateway::None)
                .is_err()
        );
    }
}
