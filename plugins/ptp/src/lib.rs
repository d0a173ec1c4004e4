//! The plugin `ptp` (point to point): creates a veth pair with one end in the container's network
//! namespace; the host routes the container's addresses to the other end.
//!
//! The host's end of each pair has the gateway's address, with a full-length prefix. In the
//! container only the gateway is directly on the link, and the container reaches its own subnet
//! through the gateway.
//!
//! This file reads the configuration and sets up the host's side. [`cni_plugin::interface`] does
//! the rest. DEL need not remove the host's addresses and routes: the kernel removes them with the
//! host's end of the pair.

use std::time::Duration;

use cni::config::NetConf;
use cni::json::Json;
use cni::result::{AddResult, IpConfig};
use cni::rollback::Rollback;
use cni::skel::{Call, RestoreMode};
use cni::{Cidr, Result};
use cni_linux::{Dad, Family, Link, Netlink, Route, SavedRoute, Watch, sysctl};
use cni_plugin::interface::veth::{self, Choices, Pair};
use cni_plugin::interface::{
    AttachmentContext, Check, CreatedLink, Gateway, HostEnd, HostState, Interface, Layer3, Layer3Policy, SubnetRoute,
    check_forwarding, failed, forwarding_sysctl, host_interface,
};
use cni_plugin::keys::{self, MasqueradeScope};
use serde::Deserialize;

/// How long ADD waits until both ends of the pair have a carrier and can send frames. This takes
/// milliseconds, or longer on an overloaded machine.
const CARRIER_DEADLINE: Duration = Duration::from_secs(5);

/// The scope of the host's IPv4 routes to containers, as Go's plugin sets it (`RT_SCOPE_HOST`).
const SCOPE_HOST: u8 = 254;

/// The part of the plugin `ptp` that differs from the other interface plugins.
#[derive(Clone, Copy, Debug)]
pub struct Ptp;

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Conf {
    /// Whether packets that leave the network are masqueraded.
    masquerade: Option<MasqueradeScope>,
    /// The MTU of both ends, or `None` for the kernel's default.
    mtu: Option<u32>,
}

/// The keys of the configuration, unchecked.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Keys {
    ip_masq: Option<Json>,
    ip_masq_backend: Option<String>,
    mtu: i64,
}

impl Interface for Ptp {
    type Keys = Keys;
    type Conf = Conf;
    type Link = Pair;

    const NAME: &'static str = "ptp";
    const KIND: &'static str = "veth";
    const HOST_END: HostEnd = HostEnd::Veth { listed_after: 0 };

    fn parse(&self, conf: &NetConf, _args: &str) -> Result<Conf> {
        let keys: Keys = conf.decode()?;
        let masquerade = MasqueradeScope::parse(keys.ip_masq, keys.ip_masq_backend)?;
        keys::require_ipam(conf)?;
        Ok(Conf { masquerade, mtu: keys::mtu(keys.mtu, keys::VETH_MTU)? })
    }

    fn layer3<'c>(&self, conf: &'c Conf) -> Layer3Policy<'c> {
        Layer3Policy {
            masquerade: conf.masquerade.as_ref(),
            gateway: Gateway::Required,
            subnet: SubnetRoute::ThroughGateway,
            ..Layer3Policy::default()
        }
    }

    fn create<'a>(
        &self,
        context: &AttachmentContext<'a, Conf>,
        rollback: &mut Rollback<'a>,
    ) -> Result<CreatedLink<Pair>> {
        let choices = Choices { mtu: context.conf.mtu, ..Choices::default() };
        let pair = veth::create(context, &choices, rollback)?;
        let interfaces = vec![host_interface(&pair.name, Some(pair.mac)), context.container_interface(pair.peer_mac)];
        let result = AddResult { interfaces, ..AddResult::default() };
        Ok(CreatedLink { index: pair.peer_index, mac: pair.peer_mac, result, interface_position: 1, link: pair })
    }

    /// Enables forwarding, adds the gateways' addresses to the host's end of the pair, and adds a
    /// route through this end to each of the container's addresses.
    fn configure_host<'a>(
        &self,
        context: &AttachmentContext<'a, Conf>,
        created: &mut CreatedLink<Pair>,
        layer3: &Layer3,
        _rollback: &mut Rollback<'a>,
    ) -> Result<HostState> {
        let mut state = HostState::default();
        for ip in &layer3.ips {
            sysctl::ensure(forwarding_sysctl(Family::of(ip.address.address())), "1")?;
            // Several addresses may have the same gateway.
            let Some(gateway) = ip.gateway.filter(|gateway| !state.added.contains(gateway)) else { continue };
            // Duplicate address detection would delay answers of the gateway and forwarded packets.
            context.host.add_address(created.link.index, Cidr::host(gateway), Dad::Skip)?;
            // For forwarded packets, the kernel resolves neighbours from a link-local address, and
            // the one that the kernel adds itself is tentative at first.
            if gateway.is_ipv6() {
                context.host.add_link_local(created.link.index, created.link.mac)?;
            }
            state.added.push(gateway);
        }
        for ip in &layer3.ips {
            add_route(context, &host_route(ip, created.link.index))?;
        }
        Ok(state)
    }

    /// Waits until both ends of the pair have a carrier.
    fn wait_for_frames(
        &self,
        context: &AttachmentContext<'_, Conf>,
        created: &CreatedLink<Pair>,
        watch: &Watch,
    ) -> Result<()> {
        let machine = context.call.machine;
        let deadline = machine.now() + CARRIER_DEADLINE;
        context.host.wait_carrier(watch, created.link.index, deadline, machine)?;
        Ok(context.container.wait_carrier_in(&context.netns, created.index, deadline, machine)?)
    }

    fn check(&self, check: &Check<'_, Conf>) -> Result<()> {
        let host_end = check.host_end("the other end of the container's veth was not found on the host")?;
        check.compare_interface()?;
        check.compare_layer3()?;
        check_host_end(&check.context.host, &host_end, &check.layer3.ips)?;
        check.compare_masquerade(&check.layer3.ips)?;
        check.wait_for_dad(check.settle_deadline())
    }

    fn restore_rules<'a>(&self, call: &'a Call<'_>, mode: RestoreMode<'_, 'a>) -> Result<Option<Vec<String>>> {
        let check = Check::open(self, call)?;
        check.restore_masquerade(&check.layer3.ips, mode)
    }
}

/// Adds `route`, the host's route to one of the container's addresses. If the host already has
/// routes to that address, removes those over a veth that leads into no container, and adds `route`
/// behind those that lead elsewhere: a living container keeps its packets. Routes that lead
/// nowhere, such as a blackhole, stay behind it in IPv4.
fn add_route(context: &AttachmentContext<'_, Conf>, route: &Route) -> Result<()> {
    let AttachmentContext { host, call, .. } = context;
    match host.add_route(route) {
        Err(error) if error.is_exists() => {}
        added => return Ok(added?),
    }
    let mut is_in_use = false;
    for existing in host.save_routes(Family::of(route.dst.address()))? {
        let Some(other) = existing.routes().into_iter().find(|other| other.conflicts_with(route)) else { continue };
        // 0 if the kernel does not say which interface a nexthop object has.
        let link = if other.oif == 0 { None } else { host.find_link_by_index(other.oif)? };
        let name = link.as_ref().map_or("another interface", |link| &link.name);
        let has_no_container = |link: &Link| {
            // A pair with both ends on the host leads into no container either.
            link.is_veth() && (link.peer_netnsid.is_none() || host.peer_is_gone(link).unwrap_or(false))
        };
        let dst = route.dst;
        if existing.leaves_by(other.oif) && link.as_ref().is_some_and(has_no_container) {
            host.purge_route(&existing)?;
            call.notes.note(format_args!("ptp: removed the route to {dst} over {name}, which has no container"));
        } else {
            is_in_use = true;
            call.notes.note(format_args!("ptp: packets to {dst} leave by {name}, as long as its route exists"));
        }
    }
    if is_in_use {
        return Ok(host.append_route(&SavedRoute::from(route))?);
    }
    Ok(host.add_route_in_front(&[*route])?)
}

/// Returns the host's route to one address of the container, over the interface with this index.
fn host_route(ip: &IpConfig, host_end_index: u32) -> Route {
    let dst = Cidr::host(ip.address.address());
    Route { scope: dst.is_ipv4().then_some(SCOPE_HOST), ..Route::new(dst, None, host_end_index) }
}

/// Checks that the host's end of the pair is up and has the gateways' addresses, and that the host
/// forwards packets and has a route over `host_end` to each of the container's addresses.
///
/// # Errors
/// Code 101 with the first difference.
fn check_host_end(host: &Netlink, host_end: &Link, ips: &[IpConfig]) -> Result<()> {
    let name = &host_end.name;
    if !host_end.up {
        return Err(failed(format!("{name} is down")));
    }
    let addresses = host.list_addresses(host_end.index)?;
    for ip in ips {
        if let Some(gateway) = ip.gateway
            && !addresses.iter().any(|address| address.cidr.address() == gateway)
        {
            return Err(failed(format!("{name} does not have the gateway's address {gateway}")));
        }
        let route = host_route(ip, host_end.index);
        // The kernel uses the first one.
        let same_destination = host.list_conflicting(&route)?;
        match same_destination.iter().position(|existing| existing.oif == host_end.index) {
            Some(0) => {}
            Some(_) => return Err(failed(format!("the host has a route to {} before that over {name}", route.dst))),
            None => return Err(failed(format!("the host has no route to {} over {name}", route.dst))),
        }
        check_forwarding(host_end, Family::of(ip.address.address()))?;
    }
    Ok(())
}
