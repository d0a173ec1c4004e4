//! The bridge itself: found or made, and fit for what the configuration asks of it.
//!
//! It is shared, so nothing of it is ever rolled back or deleted. A bridge that we make has its MAC
//! from the first moment on: one that takes its ports' MACs changes with them, and loses its own
//! with the last of them.

use std::net::IpAddr;
use std::time::Duration;

use cni::AttachmentId;
use cni::machine::Machine;
use cni::result::Interface;
use cni::skel::Call;
use cni::{Cidr, Code, Error, Result};
use cni_linux::{BridgeSpec, Link, LinkFlag, Mac, Netlink, Watch};
use cni_plugin::interface::veth::{made_up_mac, no_router_advertisements};
use cni_plugin::interface::{PortMark, host_interface};

use crate::conf::Conf;
use crate::record;

/// The alias of a bridge whose MAC we have pinned. The next ADD sees by this alias that there is
/// nothing to do, without listing the ports; the kernel does not report whether an address was set
/// or came with a port.
const PINNED: &str = "cni-bridge: MAC pinned";

/// How long another ADD may take from making its port to marking it, which are two requests.
const MARK_DEADLINE: Duration = Duration::from_secs(1);

/// Finds or makes the bridge. Its MAC is pinned before the port of this ADD is attached.
///
/// # Errors
/// 7 if the name is another kind of link's or VLAN filtering would harm foreign ports, 2 if the
/// kernel has no VLAN filtering.
pub(crate) fn ensure(host: &Netlink, conf: &Conf, machine: &dyn Machine) -> Result<Link> {
    let wrapped = |error: cni_linux::Error| {
        let unsupported = conf.vlans.is_some() && error.is_unsupported();
        let error = Error::from(error).context(format_args!("failed to create bridge {:?}", conf.bridge));
        if unsupported { no_vlan_filtering(error, conf) } else { error }
    };
    let link = match host.find_link(&conf.bridge).map_err(wrapped)? {
        Some(link) => link,
        None => {
            let mac = made_up_mac()?;
            let spec = BridgeSpec {
                mtu: conf.mtu,
                mac: Some(mac),
                vlan_filtering: conf.vlans.is_some(),
                up: true,
                ..BridgeSpec::named(&conf.bridge)
            };
            match host.create_bridge(&spec) {
                Ok(link) => {
                    no_router_advertisements(&link.name);
                    host.set_alias(link.index, PINNED).map_err(wrapped)?;
                    Link { alias: Some(PINNED.to_owned()), mac: Some(mac), up: true, ..link }
                }
                // Another ADD made it between our look and our request.
                Err(error) if error.is_exists() => host.link(&conf.bridge).map_err(wrapped)?,
                Err(error) => return Err(wrapped(error)),
            }
        }
    };
    if !link.is_bridge() {
        let msg = format!("failed to create bridge {0:?}: {0:?} already exists but is not a bridge", conf.bridge);
        return Err(Error::config(msg));
    }
    // Adds the missing settings, in as few requests as possible: on a bridge in use there are none.
    // A bridge that another program made may learn routes, which is the kernel's default.
    if !link.up || link.alias.as_deref() != Some(PINNED) {
        no_router_advertisements(&link.name);
    }
    let link = pin(host, link, conf)?;
    if conf.vlans.is_some() && !link.bridge.as_ref().is_some_and(|bridge| bridge.vlan_filtering) {
        switch_vlan_filtering_on(host, &link, conf, machine)?;
    }
    if !link.up {
        host.set_up(link.index).map_err(wrapped)?;
    }
    if conf.promiscuous && !link.promisc {
        host.set_promisc(link.index, LinkFlag::On).map_err(wrapped)?;
    }
    Ok(link)
}

/// Code 2 naming key and value.
pub(crate) fn no_vlan_filtering(error: Error, conf: &Conf) -> Error {
    let asked = match conf.vlans.as_ref() {
        Some(vlans) => match vlans.access {
            Some(vlan) => format!("\"vlan\": {vlan}"),
            None => format!("\"vlanTrunk\": {:?}", vlans.trunk),
        },
        None => String::new(),
    };
    let msg = format!("{}: {asked} needs a kernel with bridge VLAN filtering", error.msg());
    Error::new(Code::UNSUPPORTED_FIELD, msg)
}

/// Checks for STATUS that the kernel has VLAN filtering, if the configuration needs it.
///
/// # Errors
/// Code 2 naming key and value.
pub(crate) fn check_vlan_filtering(call: &Call<'_>, conf: &Conf) -> Result<()> {
    if conf.vlans.is_none() {
        return Ok(());
    }
    match cni_linux::probe_vlan_filtering() {
        Ok(()) => Ok(()),
        Err(error) if error.is_unsupported() => {
            Err(no_vlan_filtering(Error::config(format!("bridge {:?}", conf.bridge)), conf))
        }
        Err(error) => {
            call.notes.note(format_args!(
                "STATUS assumes that the kernel has bridge VLAN filtering, because it failed to find out: {error}"
            ));
            Ok(())
        }
    }
}

/// Sets the bridge's present MAC explicitly, so that the bridge keeps it: always if this ADD makes
/// the bridge the gateway, because every container would lose the gateway with each change of its
/// MAC; otherwise only if all ports are CNI's.
fn pin(host: &Netlink, link: Link, conf: &Conf) -> Result<Link> {
    if link.alias.as_deref() == Some(PINNED) || !(conf.puts_gateway_on_bridge() || belongs_to_cni(host, &link)) {
        return Ok(link);
    }
    // The owner's alias leaves no room for the sign. Setting the MAC at every ADD would drop all
    // neighbour entries each time, so the MAC is pinned before the first address, as Go does.
    if link.alias.is_some() && has_gateway_address(host, &link, conf)? {
        return Ok(link);
    }
    let mac = match link.mac {
        Some(mac) if !mac.is_zero() => mac,
        _ => made_up_mac()?,
    };
    host.set_mac(link.index, mac)?;
    if link.alias.is_some() {
        return Ok(Link { mac: Some(mac), ..link });
    }
    // The ADD that made the bridge may have ended before it pinned the MAC.
    no_router_advertisements(&link.name);
    host.set_alias(link.index, PINNED)?;
    Ok(Link { mac: Some(mac), alias: Some(PINNED.to_owned()), ..link })
}

/// Whether an earlier ADD has put a gateway's address on the bridge: one of the configuration's own
/// or, where only IPAM knows them, any but the kernel's link-local one.
fn has_gateway_address(host: &Netlink, link: &Link, conf: &Conf) -> Result<bool> {
    let is_link_local = |address| matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
    let is_gateway = |cidr: Cidr| match conf.own_gateways.is_empty() {
        true => !is_link_local(cidr.address()),
        false => conf.own_gateways.contains(&cidr),
    };
    Ok(host.list_addresses(link.index)?.iter().any(|address| is_gateway(address.cidr)))
}

/// Whether all ports of the bridge are CNI's, so that no other program needs its MAC to change.
fn belongs_to_cni(host: &Netlink, link: &Link) -> bool {
    let record = record::HostVeths::default();
    // Another ADD may have created the bridge a moment ago, with its MAC, and not have set the
    // alias yet; while hundreds of ports are added, the list is never complete. The next ADD looks
    // again, so this one does not fail.
    let Ok(ports) = host.list_ports(link.index) else { return false };
    // Without ports it may be waiting for its uplink, to take that one's MAC.
    ports.iter().all(|port| is_cni_port(port, &record)) && (!ports.is_empty() || link.mac.is_none_or(Mac::is_zero))
}

/// The bridge as the result lists it, once all ports are there: a MAC that is not pinned may have
/// become a port's. Go's CHECK compares it.
pub(crate) fn interface(host: &Netlink, bridge: &Link) -> Result<Interface> {
    let mac = match bridge.alias.as_deref() {
        Some(PINNED) => bridge.mac,
        _ => host.find_link_by_index(bridge.index)?.and_then(|bridge| bridge.mac),
    };
    Ok(host_interface(&bridge.name, mac))
}

/// Whether a port is a container's: by our mark, or by a runtime's record of what a CNI plugin
/// made.
fn is_cni_port(port: &Link, record: &record::HostVeths) -> bool {
    let marked = port
        .alias
        .as_deref()
        .is_some_and(|alias| AttachmentId::parse(alias).is_some() || PortMark::parse(alias).is_some());
    marked || (port.is_veth() && record.contains(&port.name))
}

fn switch_vlan_filtering_on(host: &Netlink, link: &Link, conf: &Conf, machine: &dyn Machine) -> Result<()> {
    let watch = Watch::open()?;
    let marked = watch.wait("a mark on every port", machine.now() + MARK_DEADLINE, machine, || {
        let ports = host.list_ports(link.index)?;
        Ok(ports.iter().all(|port| !port.is_veth() || port.alias.is_some()).then_some(()))
    });
    match marked {
        Err(error) if !error.is_deadline() => return Err(error.into()),
        _ => check_foreign_ports(host, link)?,
    }
    host.set_vlan_filtering(link.index).map_err(|error| {
        let unsupported = error.is_unsupported();
        let error = Error::from(error);
        if unsupported { no_vlan_filtering(error, conf) } else { error }
    })
}

/// Checks that VLAN filtering may be switched on: it drops the tagged traffic of other users at
/// once.
pub(crate) fn check_foreign_ports(host: &Netlink, link: &Link) -> Result<()> {
    let record = record::HostVeths::default();
    let ports = host.list_ports(link.index)?;
    let foreign: Vec<&str> =
        ports.iter().filter(|port| !is_cni_port(port, &record)).map(|port| port.name.as_str()).collect();
    if !foreign.is_empty() {
        return Err(Error::config(format!(
            "bridge {0:?} does not filter VLANs and has ports that are not CNI's ({1}), whose tagged traffic would stop: \
             switch it on yourself with `ip link set {0} type bridge vlan_filtering 1`, or use another bridge",
            link.name,
            foreign.join(", ")
        )));
    }
    Ok(())
}
