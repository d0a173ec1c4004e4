//! `ptp`: a container's network namespace gets one end of a veth pair, and the host routes the
//! container's addresses to the other end.
//!
//! The host's end has the gateway's address, alone: each pair on the host has the same one. In the
//! container only the gateway is on the link; the container reaches its own subnet through the
//! gateway. Everything around the link is [`cni_plugin::interface`]'s.
//!
//! The host's addresses and routes are not undone one by one: they end with the host's end of the
//! pair.

use std::time::Duration;

use cni::config::{self, NetConf};
use cni::result::{AddResult, Dns, IpConfig};
use cni::rollback::{Notes, Rollback};
use cni::skel::{Call, RestoreMode, Restored};
use cni::{Cidr, Error, Result};
use cni_linux::{Dad, Link, Netlink, Route, Watch, sysctl};
use cni_plugin::interface::veth::{self, Choices, Pair};
use cni_plugin::interface::{
    AttachmentContext, Check, CreatedLink, Gateway, HostEnd, HostState, Interface, Layer3, Layer3Policy, SubnetRoute,
    failed, forwarding, host_interface,
};
use cni_plugin::keys::{self, Masquerading};
use serde::Deserialize;

/// How long the pair may take to get its carrier. It takes milliseconds; this is for a machine
/// under stress.
const CARRIER_DEADLINE: Duration = Duration::from_secs(5);

/// The scope of a route to an address that is on this host, as Go sets it.
const SCOPE_HOST: u8 = 254;

/// The plugin's part that is not every interface plugin's.
#[derive(Clone, Copy, Debug)]
pub struct Ptp;

/// A sound configuration.
#[derive(Clone, Debug)]
pub struct Conf {
    ipam: String,
    dns: Option<Dns>,
    masquerade: Masquerading,
    mtu: Option<u32>,
}

/// The keys, as they stand in the JSON.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Keys {
    ip_masq: bool,
    ip_masq_backend: Option<String>,
    mtu: i64,
    dns: Dns,
    runtime_config: keys::RuntimeDnsConfig,
}

impl Interface for Ptp {
    type Keys = Keys;
    type Conf = Conf;
    type Link = Pair;

    const NAME: &'static str = "ptp";
    const KIND: &'static str = "veth";
    const HOST_END: HostEnd = HostEnd::Veth { listed_after: 0 };

    fn parse(&self, conf: &NetConf, _args: &str, notes: &Notes) -> Result<Conf> {
        let keys: Keys = conf.decode()?;
        let backend = keys::masquerade_backend(keys.ip_masq_backend)?;
        Ok(Conf {
            ipam: keys::ipam(conf).ok_or_else(|| Error::config("no plugin name provided"))?,
            dns: config::dns_override(keys.runtime_config.dns.as_ref(), keys.dns, notes),
            masquerade: if keys.ip_masq { Masquerading::On(backend) } else { Masquerading::Off },
            mtu: keys::mtu(keys.mtu, keys::VETH_MTU)?,
        })
    }

    fn layer3<'c>(&self, conf: &'c Conf) -> Layer3Policy<'c> {
        Layer3Policy {
            ipam: Some(&conf.ipam),
            dns: conf.dns.as_ref(),
            masquerade: conf.masquerade,
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
        Ok(CreatedLink { index: pair.peer_index, mac: pair.peer_mac, result, interface: 1, link: pair })
    }

    /// The host forwards, answers as the gateway and knows the way to each address.
    fn serve<'a>(
        &self,
        context: &AttachmentContext<'a, Conf>,
        created: &mut CreatedLink<Pair>,
        layer3: &Layer3,
        _rollback: &mut Rollback<'a>,
    ) -> Result<HostState> {
        let mut served = HostState::default();
        for ip in &layer3.ips {
            sysctl::ensure(forwarding(ip.address.is_ipv4()), "1")?;
            let Some(gateway) = ip.gateway.filter(|gateway| !served.added.contains(gateway)) else { continue };
            // Without duplicate address detection, so that the gateway answers at once and packets
            // for the container are forwarded at once.
            context.host.add_address(created.link.index, Cidr::host(gateway), Dad::Skip)?;
            if gateway.is_ipv6() {
                context.host.add_link_local(created.link.index, created.link.mac)?;
            }
            served.added.push(gateway);
        }
        for ip in &layer3.ips {
            add_route(context, &route_to(ip, created.link.index))?;
        }
        Ok(served)
    }

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
        let outer = check.host_end("the other end of the container's veth was not found on the host")?;
        check.interface()?;
        check.layer3()?;
        check_host_end(&check.context.host, &outer, &check.layer3.ips)?;
        check.masquerade(&check.layer3.ips)?;
        check.wait_for_dad(check.dad_deadline())
    }

    fn restore_rules<'a>(&self, call: &'a Call<'_>, mode: RestoreMode) -> Result<Option<Restored<'a>>> {
        let check = Check::open(self, call)?;
        check.restore_masquerade(&check.layer3.ips, mode)
    }
}

/// Adds the host's route to an address. The route of a container that had the address before may be
/// left: the new one goes in front.
fn add_route(context: &AttachmentContext<'_, Conf>, route: &Route) -> Result<()> {
    match context.host.add_route(route) {
        Err(error) if error.is_exists() => {
            context.host.add_route_in_front(&[*route])?;
            let msg = format_args!("ptp: the host had a route to {} already; packets take the new one", route.dst);
            context.call.notes.note(msg);
            Ok(())
        }
        added => Ok(added?),
    }
}

/// The host's route to one address of the container.
fn route_to(ip: &IpConfig, host_end: u32) -> Route {
    let dst = Cidr::host(ip.address.address());
    Route { scope: dst.is_ipv4().then_some(SCOPE_HOST), ..Route::new(dst, None, host_end) }
}

/// CHECK: the host's end is up and has the gateways' addresses, and the host forwards to each
/// address over it.
fn check_host_end(host: &Netlink, outer: &Link, ips: &[IpConfig]) -> Result<()> {
    let name = &outer.name;
    if !outer.up {
        return Err(failed(format!("{name} is down")));
    }
    let there = host.list_addresses(outer.index)?;
    for ip in ips {
        if let Some(gateway) = ip.gateway
            && !there.iter().any(|address| address.cidr.address() == gateway)
        {
            return Err(failed(format!("{name} does not have the gateway's address {gateway}")));
        }
        let route = route_to(ip, outer.index);
        if !host.list_conflicting(&route)?.iter().any(|there| there.oif == outer.index) {
            return Err(failed(format!("the host has no route to {} over {name}", route.dst)));
        }
        let key = forwarding(ip.address.is_ipv4());
        if sysctl::read(key)? != "1" {
            return Err(failed(format!("sysctl {key} is off: the host does not forward")));
        }
    }
    Ok(())
}
