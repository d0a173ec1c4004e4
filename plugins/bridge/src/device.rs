//! Finds or creates the bridge, and applies the settings that the configuration requires.
//!
//! The bridge is shared, so its creation and its settings are never rolled back.
//!
//! A bridge whose MAC was never set has the MAC of one of its ports, which changes when ports come
//! and go. To *pin* the MAC is to set it explicitly. A bridge created here has a pinned MAC from
//! the beginning. For other bridges, [`pin_mac`] decides.

use std::net::IpAddr;
use std::time::Duration;

use cni::AttachmentId;
use cni::machine::Machine;
use cni::result::Interface;
use cni::skel::Call;
use cni::{Cidr, Code, Error, Result};
use cni_linux::{BridgeSpec, Link, LinkFlag, Netlink, Watch};
use cni_plugin::interface::veth::{made_up_mac, refuse_router_advertisements};
use cni_plugin::interface::{PortMark, host_interface};

use crate::conf::{Conf, Mtu};
use crate::gateway::VLAN_GATEWAY;
use crate::record;

/// The alias of a bridge whose MAC is pinned. The kernel does not report whether a MAC was set or
/// came from a port. With this alias, the next ADD need not read the ports.
const PINNED: &str = "cni-bridge: MAC pinned";

/// How long to wait for another ADD that has created its port, but has not yet set the alias that
/// marks the port as a container's.
const MARK_DEADLINE: Duration = Duration::from_secs(1);

/// Finds or creates the bridge and applies the missing settings. Must be called before this ADD
/// attaches its port, which could change a MAC that is not pinned.
///
/// # Errors
/// - Code 7 if a link of this name is not a bridge, or VLAN filtering would cut off ports of other
///   programs.
/// - Code 2 if the kernel has no VLAN filtering, or ignores a setting.
/// - The other errors of the kernel.
pub(crate) fn ensure(host: &Netlink, conf: &Conf, machine: &dyn Machine) -> Result<Link> {
    let wrap_error = |error| creation_error(error, conf);
    let link = match host.find_link(&conf.bridge).map_err(wrap_error)? {
        Some(link) => link,
        None => create(host, conf)?,
    };
    if !link.is_bridge() {
        let msg = format!("failed to create bridge {0:?}: {0:?} already exists but is not a bridge", conf.bridge);
        return Err(Error::config(msg));
    }
    // A bridge that another program created may accept router advertisements, the kernel's default.
    // On a pinned bridge that is up, an earlier ADD has already disabled them.
    if !link.up || link.alias.as_deref() != Some(PINNED) {
        refuse_router_advertisements(&link.name);
    }
    let link = pin_mac(host, link, conf)?;
    if conf.vlans.is_some() && !link.bridge.as_ref().is_some_and(|bridge| bridge.vlan_filtering) {
        enable_vlan_filtering(host, &link, conf, machine)?;
    }
    configure(host, &link, conf)?;
    if !link.up {
        host.set_up(link.index).map_err(wrap_error)?;
    }
    if conf.promiscuous && !link.promisc {
        host.set_promisc(link.index, LinkFlag::On).map_err(wrap_error)?;
    }
    Ok(link)
}

/// Creates the bridge. If another ADD has created it meanwhile, returns that bridge, which may lack
/// some of the settings.
fn create(host: &Netlink, conf: &Conf) -> Result<Link> {
    let wrap_error = |error| creation_error(error, conf);
    let mac = made_up_mac()?;
    let spec = BridgeSpec {
        mtu: match conf.mtu {
            Some(Mtu::Fixed(mtu)) => Some(mtu),
            Some(Mtu::Uplink) | None => None,
        },
        mac: Some(mac),
        vlan_filtering: conf.vlans.is_some(),
        up: true,
        ..BridgeSpec::named(&conf.bridge)
    };
    match host.create_bridge(&spec) {
        Ok(link) => {
            refuse_router_advertisements(&link.name);
            host.set_alias(link.index, PINNED).map_err(wrap_error)?;
            Ok(Link { alias: Some(PINNED.to_owned()), mac: Some(mac), up: true, ..link })
        }
        Err(error) if error.is_exists() => host.link(&conf.bridge).map_err(wrap_error),
        Err(error) => Err(wrap_error(error)),
    }
}

/// Changes the settings of the bridge that differ from the configured ones.
///
/// # Errors
/// - Code 2 if the kernel ignores a setting.
/// - The other errors of the kernel.
fn configure(host: &Netlink, link: &Link, conf: &Conf) -> Result<()> {
    if differing_settings(link, conf).is_empty() {
        return Ok(());
    }
    host.set_bridge(link.index, &conf.settings)?;
    // A kernel without multicast snooping ignores the setting.
    let changed = host.find_link_by_index(link.index)?;
    match changed.map(|link| differing_settings(&link, conf)) {
        Some(ignored) if !ignored.is_empty() => {
            let msg = format!("bridge {:?}: {} after it was set", link.name, ignored.join("; "));
            Err(Error::new(Code::UNSUPPORTED_FIELD, msg))
        }
        _ => Ok(()),
    }
}

/// Returns a text for each setting of the bridge that is not as configured; empty if there is none.
pub(crate) fn differing_settings(link: &Link, conf: &Conf) -> Vec<String> {
    let (Some(found), wanted) = (&link.bridge, &conf.settings) else { return Vec::new() };
    let settings = [
        ("groupFwdMask", found.group_fwd_mask.to_string(), wanted.group_fwd_mask.map(|mask| mask.to_string())),
        ("mcastSnooping", found.mcast_snooping.to_string(), wanted.mcast_snooping.map(|on| on.to_string())),
        ("stp", found.spanning_tree.to_string(), wanted.spanning_tree.map(|on| on.to_string())),
    ];
    let mut differences = Vec::new();
    for (key, found, wanted) in settings {
        if let Some(wanted) = wanted.filter(|wanted| *wanted != found) {
            differences.push(format!("{key} is {found}, expected {wanted}"));
        }
    }
    differences
}

/// Returns the MTU of both ends of the veth pair of a port; `None` for the kernel's default.
pub(crate) fn port_mtu(host: &Netlink, bridge: &Link, conf: &Conf) -> Result<Option<u32>> {
    match conf.mtu {
        None => Ok(None),
        Some(Mtu::Fixed(mtu)) => Ok(Some(mtu)),
        Some(Mtu::Uplink) => {
            let record = record::HostInterfaces::default();
            let ports = host.list_ports(bridge.index)?;
            Ok(ports.iter().filter(|port| !is_cni_port(port, &record)).map(|port| port.mtu).min())
        }
    }
}

/// Returns the error for a bridge that could not be created or set up. If VLANs are configured and
/// the kernel does not support the request, the error names VLAN filtering as the missing feature.
fn creation_error(error: cni_linux::Error, conf: &Conf) -> Error {
    let lacks_vlan_filtering = conf.vlans.is_some() && error.is_unsupported();
    let error = Error::from(error).context(format_args!("failed to create bridge {:?}", conf.bridge));
    if lacks_vlan_filtering { vlan_filtering_error(error, conf) } else { error }
}

/// Returns an error of code 2 with the text of `error` and the configured key that needs VLAN
/// filtering.
fn vlan_filtering_error(error: Error, conf: &Conf) -> Error {
    let key = match conf.vlans.as_ref() {
        Some(vlans) => match vlans.access {
            Some(vlan) => format!("\"vlan\": {vlan}"),
            None => format!("\"vlanTrunk\": {:?}", vlans.trunk),
        },
        // All callers have checked that VLANs are configured.
        None => String::new(),
    };
    let msg = format!("{}: {key} needs a kernel with bridge VLAN filtering", error.msg());
    Error::new(Code::UNSUPPORTED_FIELD, msg)
}

/// Checks for STATUS that the kernel has VLAN filtering, if the configuration needs it. If that
/// cannot be determined, only prints a note.
///
/// # Errors
/// Code 2 if the kernel lacks VLAN filtering.
pub(crate) fn check_vlan_filtering(call: &Call<'_>, conf: &Conf) -> Result<()> {
    if conf.vlans.is_none() {
        return Ok(());
    }
    match cni_linux::probe_vlan_filtering() {
        Ok(()) => Ok(()),
        Err(error) if error.is_unsupported() => {
            Err(vlan_filtering_error(Error::config(format!("bridge {:?}", conf.bridge)), conf))
        }
        Err(error) => {
            call.notes.note(format_args!(
                "STATUS assumes that the kernel has bridge VLAN filtering, because it failed to find out: {error}"
            ));
            Ok(())
        }
    }
}

/// Pins the bridge's current MAC, unless it is already pinned or must not be pinned. Returns the
/// link with its new properties.
///
/// If this ADD adds a gateway's address to the bridge, the MAC is pinned whatever ports the bridge
/// has: with each change of the MAC, all containers would lose the gateway for a while. Otherwise
/// the MAC is not pinned if another program may need the bridge to take a port's MAC.
fn pin_mac(host: &Netlink, link: Link, conf: &Conf) -> Result<Link> {
    if link.alias.as_deref() == Some(PINNED) {
        return Ok(link);
    }
    if !conf.puts_gateway_on_bridge() && others_may_need_port_mac(host, &link) {
        return Ok(link);
    }
    // An alias that the administrator set is not replaced with `PINNED`, so an earlier ADD may have
    // pinned the MAC without a trace. Setting the MAC again would drop all neighbour entries of the
    // bridge. So the MAC is only set while the bridge has no gateway's address, as in Go.
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
    // A bridge without an alias may be from an ADD that was killed before these last two steps of
    // `create`.
    refuse_router_advertisements(&link.name);
    host.set_alias(link.index, PINNED)?;
    Ok(Link { mac: Some(mac), alias: Some(PINNED.to_owned()), ..link })
}

/// Whether the bridge has a gateway's address from an earlier ADD: one of the configured gateways
/// or, if the configuration has none, any address that is not link-local.
fn has_gateway_address(host: &Netlink, link: &Link, conf: &Conf) -> Result<bool> {
    let is_link_local = |address| matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
    let is_gateway = |cidr: Cidr| {
        if conf.configured_gateways.is_empty() {
            !is_link_local(cidr.address())
        } else {
            conf.configured_gateways.contains(&cidr)
        }
    };
    Ok(host.list_addresses(link.index)?.iter().any(|address| is_gateway(address.cidr)))
}

/// Whether a program other than the CNI plugins may need the bridge to take the MAC of one of its
/// ports, for example of an uplink.
fn others_may_need_port_mac(host: &Netlink, link: &Link) -> bool {
    // Listing can fail while many ports are being added. The next ADD tries again.
    let Ok(ports) = host.list_ports(link.index) else { return true };
    if ports.is_empty() {
        // A bridge with a MAC may be waiting for an uplink that another program attaches later. A
        // bridge with a zero MAC has already had ports, and the last one has left.
        return link.mac.is_some_and(|mac| !mac.is_zero());
    }
    let record = record::HostInterfaces::default();
    ports.iter().any(|port| !is_cni_port(port, &record))
}

/// Returns the bridge's entry in the result. Go's CHECK compares the MAC in this entry, so this
/// must be called after the port is attached, which can change a MAC that is not pinned.
pub(crate) fn interface(host: &Netlink, bridge: &Link) -> Result<Interface> {
    let mac = match bridge.alias.as_deref() {
        Some(PINNED) => bridge.mac,
        _ => host.find_link_by_index(bridge.index)?.and_then(|bridge| bridge.mac),
    };
    Ok(host_interface(&bridge.name, mac))
}

/// Whether a CNI plugin created a port: the port has these plugins' mark, connects a VLAN's gateway
/// interface to the bridge, or is in a runtime's `record`.
fn is_cni_port(port: &Link, record: &record::HostInterfaces) -> bool {
    let is_mark =
        |alias: &str| alias == VLAN_GATEWAY || AttachmentId::parse(alias).is_some() || PortMark::parse(alias).is_some();
    port.alias.as_deref().is_some_and(is_mark) || (port.is_veth() && record.contains(&port.name))
}

/// Enables VLAN filtering on a bridge that may already be in use.
///
/// # Errors
/// - Code 7 if that would cut off ports of other programs.
/// - Code 2 if the kernel has no VLAN filtering.
/// - The other errors of the kernel.
fn enable_vlan_filtering(host: &Netlink, link: &Link, conf: &Conf, machine: &dyn Machine) -> Result<()> {
    // Another ADD may have created its port and not yet set the port's alias, its mark. At the
    // deadline, `check_foreign_ports` decides about the ports without a mark.
    let watch = Watch::open()?;
    let what = format!("other ADDs to set the aliases of their ports of bridge {:?}", link.name);
    let marked = watch.wait(&what, machine.now() + MARK_DEADLINE, machine, || {
        let ports = host.list_ports(link.index)?;
        let are_veths_marked = ports.iter().all(|port| !port.is_veth() || port.alias.is_some());
        Ok(if are_veths_marked { Some(()) } else { None })
    });
    match marked {
        Err(error) if !error.is_deadline() => return Err(error.into()),
        _ => check_foreign_ports(host, link)?,
    }
    match host.enable_vlan_filtering(link.index) {
        Err(error) if error.is_unsupported() => Err(vlan_filtering_error(error.into(), conf)),
        result => Ok(result?),
    }
}

/// Checks that VLAN filtering can be enabled on the bridge.
///
/// # Errors
/// - Code 7 with the names of the ports of other programs, if there are any: VLAN filtering would
///   drop their tagged traffic.
/// - The errors of the kernel.
pub(crate) fn check_foreign_ports(host: &Netlink, link: &Link) -> Result<()> {
    let record = record::HostInterfaces::default();
    let ports = host.list_ports(link.index)?;
    let foreign: Vec<&str> =
        ports.iter().filter(|port| !is_cni_port(port, &record)).map(|port| port.name.as_str()).collect();
    if !foreign.is_empty() {
        return Err(Error::config(format!(
            "bridge {0:?} does not filter VLANs and has ports that are not CNI's ({1}), whose tagged traffic would stop: \
             switch VLAN filtering on yourself with `ip link set {0} type bridge vlan_filtering 1`, or use another bridge",
            link.name,
            foreign.join(", ")
        )));
    }
    Ok(())
}
