//! ADD: bridge, port, protection, address, and only then a container's end that is up.
//!
//! The order is the point (D12 of the decisions): no frame passes before flags, VLANs and spoof rules are in force, and
//! nobody is told of an address before frames can reach it.

use std::rc::Rc;
use std::time::Duration;

use cni::delegate::Delegate;
use cni::result::{AddResult, Interface};
use cni::skel::{Added, Call};
use cni::{Error, Result};
use cni_linux::link::{OperState, PortState};
use cni_linux::{Link, Mac, Netlink, Netns, Target, VethSpec, VlanFlags, Watch};

use crate::conf::{Conf, vlan_gateway_name};
use crate::gateway::Served;
use crate::layer3::{self, Layer3};
use crate::port::{self, PortEnds};
use crate::{device, gateway, mark, masquerade};

/// How long a port may take to forward. It takes milliseconds; this is for a machine under stress.
const PORT_DEADLINE: Duration = Duration::from_secs(5);

/// The alias of the bridge's end of a VLAN gateway.
pub(crate) const VLAN_GATEWAY: &str = "cni-bridge: VLAN gateway";

pub(crate) fn add<'a>(call: &'a Call<'_>, conf: &Conf) -> Result<Added<'a>> {
    let netns = Netns::open(call.netns()?)?;
    let host = Rc::new(Netlink::open()?);
    let container = host.open_in(&netns)?;
    let mark = mark(call);
    // The kernel would refuse this too, but only after a bridge has been made for it.
    if container.find_link(&call.ifname)?.is_some() {
        return Err(port::name_taken(&call.ifname, &mark.host_name(0)));
    }
    if conf.spoof_check {
        port::refuse_second(&host, &mark, None)?;
    }
    // Dropped in reverse on failure: an address is given back only after the interface that had it is gone.
    let mut lease = call.rollback();
    let mut rollback = call.rollback();

    let bridge = device::ensure(&host, conf, call.machine)?;
    let port = port::create(&host, &netns, &bridge, &mark, conf, &mut rollback)?;
    let ends = PortEnds { index: port.index, name: &port.name, peer_mac: port.peer_mac };
    port::protect(&host, &ends, &mark, conf, &mut rollback).map_err(|error| match error.errno() {
        Some(errno) if errno == EOPNOTSUPP && conf.vlans.is_some() => device::no_vlan_filtering(error, conf),
        _ => error,
    })?;

    let mut result = AddResult {
        interfaces: vec![
            interface(&bridge.name, None),
            interface(&port.name, Some(port.mac)),
            Interface { sandbox: sandbox(call), ..interface(&call.ifname, Some(port.peer_mac)) },
        ],
        ..AddResult::default()
    };
    if let Some(kind) = &conf.ipam {
        let ipam = Delegate::find(call, kind)?.lease(&mut lease)?;
        let mut layer3 = Layer3::new(&ipam, conf, 2, &[])?;
        masquerade::ensure(call, conf, &mark, &layer3.addresses(), &mut rollback)?;
        let link = gateway_link(&host, &bridge, conf)?;
        let gateway = gateway::Plan::new(&host, link, conf, &layer3)?.serve(conf, &call.notes, &mut rollback)?;
        bring_up(
            call,
            conf,
            &Ends { host: &host, container: &container, netns: &netns },
            &gateway,
            &ends,
            port.peer_index,
            &mut layer3,
        )?;
        if gateway.link.index != bridge.index {
            result.interfaces.push(interface(&gateway.link.name, gateway.link.mac));
        }
        (result.ips, result.routes, result.dns) = (layer3.ips, layer3.routes, ipam.dns);
    } else if !conf.container_down {
        let watch = Watch::open()?;
        container.set_up(port.peer_index)?;
        let ends = Ends { host: &host, container: &container, netns: &netns };
        wait_for_frames(call, &ends, &watch, &[port.index], port.peer_index)?;
    }
    result.interfaces[0] = interface(&bridge.name, device::final_mac(&host, &bridge)?);
    if let Some(dns) = &conf.dns {
        result.dns = dns.clone();
    }
    lease.append(rollback);
    Ok(Added { result, rollback: lease })
}

const EOPNOTSUPP: i32 = 95;

/// Both sides of an attachment.
#[derive(Clone, Copy)]
pub(crate) struct Ends<'a> {
    pub(crate) host: &'a Netlink,
    pub(crate) container: &'a Netlink,
    pub(crate) netns: &'a Netns,
}

/// Layer 3, once the gateway is served: the container's end, then, once frames pass, the announcement.
pub(crate) fn bring_up(
    call: &Call<'_>,
    conf: &Conf,
    ends: &Ends<'_>,
    gateway: &Served,
    port: &PortEnds<'_>,
    container_index: u32,
    layer3: &mut Layer3,
) -> Result<()> {
    let Ends { host, container, netns } = *ends;
    layer3::prepare_namespace(netns, &call.ifname, conf, layer3)?;
    // Listening starts before there is anything to hear.
    let watch = Watch::open()?;
    let inner = if conf.dad { Some(Watch::open_in(netns)?) } else { None };
    layer3::configure(container, container_index, conf, layer3, &call.notes)?;
    wait_for_frames(call, ends, &watch, &[port.index, gateway.link.index], container_index)?;
    if let Some(inner) = &inner {
        layer3::wait_for_dad(container, inner, container_index, call.machine)?;
    } else {
        // With duplicate address detection the gateway's takes seconds more, and is nobody's first packet's business.
        layer3::wait_for_own(host, gateway.added.iter().copied(), call, Watch::open)?;
    }
    let own = layer3.ips.iter().map(|ip| ip.address.address());
    layer3::wait_for_own(container, own, call, || Watch::open_in(netns))?;
    // An address that another container had a moment ago: its neighbours, and the host, still know the old MAC.
    container.announce(container_index, port.peer_mac)?;
    for ip in &layer3.ips {
        host.correct_neighbour(gateway.link.index, ip.address.address(), port.peer_mac)?;
    }
    Ok(())
}

/// Waits until frames pass: the port (the first of `on_host`) forwards, and it, the other links of the host and the
/// container's end have their carriers. Each is told of it by a worker of the kernel's, in no order to rely on, and drops
/// what it is given to send until then.
fn wait_for_frames(call: &Call<'_>, ends: &Ends<'_>, watch: &Watch, on_host: &[u32], inner: u32) -> Result<()> {
    let deadline = call.machine.now() + PORT_DEADLINE;
    let machine = call.machine.0;
    let wait = || -> cni_linux::Result<()> {
        if let [port, others @ ..] = on_host {
            let port = ends.host.wait_port_forwarding(watch, *port, deadline, machine)?;
            if port.port.is_some_and(|state| state.state == PortState::Forwarding) {
                for link in others {
                    ends.host.wait_carrier(watch, *link, deadline, machine)?;
                }
            } else {
                call.notes.note(format_args!("{}: the bridge's spanning tree holds the port back for now", port.name));
            }
        }
        // By now it nearly always has its own; only otherwise is it worth a visit to its namespace.
        if ends.container.find_link_by_index(inner)?.is_none_or(|link| link.oper_state != OperState::Up) {
            ends.container.wait_carrier(&Watch::open_in(ends.netns)?, inner, deadline, machine)?;
        }
        Ok(())
    };
    wait().map_err(|error| Error::from(error).context("bridge port in error state"))
}

/// The link that has the gateway's address: the bridge, or for a VLAN a veth whose other end is in that VLAN.
///
/// It is shared like the bridge, and like it never removed.
pub(crate) fn gateway_link(host: &Netlink, bridge: &Link, conf: &Conf) -> Result<Link> {
    let (Some(vlan), true) = (conf.gateway_vlan(), conf.gateway != crate::conf::Gateway::None) else {
        return Ok(bridge.clone());
    };
    let name = vlan_gateway_name(&bridge.name, vlan);
    let port_name = cni_linux::Mark::new(&bridge.name, "vlan", vlan.to_string()).host_name(0);
    if let Some(link) = host.find_link(&name)? {
        // Down: whoever made it was cut off, or is at it this moment. Up is what the making ends with.
        if !link.up
            && let Some(port) = link.peer_index.map(|port| host.find_link_by_index(port)).transpose()?.flatten()
        {
            let unmarked = port.alias.is_none() && port.name == port_name;
            if unmarked {
                host.set_alias(port.index, VLAN_GATEWAY)?;
            }
            if unmarked || port.alias.as_deref() == Some(VLAN_GATEWAY) {
                ready_vlan_gateway(host, port.index, link.index, vlan)?;
            }
        }
        return Ok(link);
    }
    let (mac, peer_mac) = (device::made_up_mac()?, device::made_up_mac()?);
    let spec = VethSpec {
        mtu: conf.mtu,
        alias: Some(VLAN_GATEWAY),
        master: Some(bridge.index),
        up: true,
        ..VethSpec::new(&port_name, peer_mac, &name, mac)
    };
    match host.create_veth(&spec) {
        Ok(veth) => {
            if let Err(error) = ready_vlan_gateway(host, veth.index, veth.peer_index, vlan) {
                host.purge_link(veth.index)?;
                return Err(error);
            }
            device::no_router_advertisements(&name);
        }
        // Another first ADD was faster.
        Err(error) if error.is_exists() => {}
        Err(error) => return Err(error.into()),
    }
    Ok(host.link(&name)?)
}

/// Puts the port of a VLAN gateway into its VLAN, and last of all the gateway's end up. May be done again.
fn ready_vlan_gateway(host: &Netlink, port: u32, gateway: u32, vlan: u16) -> Result<()> {
    for old in host.vlans(port)?.iter().filter(|old| old.vid != vlan) {
        host.del_vlan(port, old.vid, Target::Master)?;
    }
    host.add_vlan(port, vlan, VlanFlags::Access, Target::Master)?;
    Ok(host.set_up(gateway)?)
}

/// An interface of the host, as the result names it.
pub(crate) fn interface(name: &str, mac: Option<Mac>) -> Interface {
    Interface { name: name.to_owned(), mac: mac.map(|mac| mac.to_string()).unwrap_or_default(), ..Interface::default() }
}

/// CNI_NETNS, letter by letter: CHECK compares it.
pub(crate) fn sandbox(call: &Call<'_>) -> String {
    call.environment.netns.clone()
}
