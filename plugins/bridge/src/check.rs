//! Implements CHECK: whether the attachment is as ADD left it.
//!
//! The MAC of the bridge is not checked: on a bridge that a Go plugin created, the MAC changes with
//! the ports, which does not disturb any container.

use cni::result::IpConfig;
use cni::skel::RestoreMode;
use cni::{Cidr, Result};
use cni_firewall::spoof::SpoofCheck;
use cni_linux::{Family, Link, Mac, Netlink, PortState, Watch};
use cni_plugin::interface::{Gateway, PortMark, check_forwarding, failed};

use crate::conf::{Conf, vlan_gateway_name};
use crate::{device, port};

type Check<'a> = cni_plugin::interface::Check<'a, Conf>;

/// Compares the attachment with the state in which ADD left it. Unless the container's end is
/// configured to be down, waits for a limited time until the port forwards and duplicate address
/// detection is over.
///
/// # Errors
/// Code 101 for the first difference.
pub(crate) fn check(check: &Check<'_>) -> Result<()> {
    let (host, conf) = (&*check.context.host, &check.context.conf);
    let outer = host_end(check)?;
    let bridge = find_bridge(host, conf)?;
    check.compare_interface()?;
    check_port(check, &bridge, &outer)?;
    check.compare_layer3()?;
    if conf.has_ipam {
        let own_ips = own_addresses(check, &outer);
        if conf.gateway != Gateway::None {
            check_gateway(host, conf, &bridge, &own_ips)?;
        }
        check.compare_masquerade(&own_ips)?;
    }
    if conf.container_down {
        return Ok(());
    }
    let deadline = check.settle_deadline();
    if outer.port.is_none_or(|port| port.state != PortState::Forwarding) {
        let watch = Watch::open()?;
        host.wait_port_forwarding(&watch, outer.index, deadline, check.context.call.machine)
            .map_err(|error| failed(format!("{} does not forward: {error}", outer.name)))?;
    }
    check.wait_for_dad(deadline)
}

/// Returns the host's end of the container's interface.
///
/// # Errors
/// Code 101 with Go's text if there is none.
fn host_end(check: &Check<'_>) -> Result<Link> {
    check.host_end(&format!("CNI veth created for bridge {} was not found", check.context.conf.bridge))
}

/// Returns the missing rules of `ipMasq` and `macspoofchk` and, with [`RestoreMode::Write`], writes
/// them again. Returns `None` if the configuration has neither key.
pub(crate) fn restore_rules<'a>(check: &Check<'a>, mut mode: RestoreMode<'_, 'a>) -> Result<Option<Vec<String>>> {
    let outer = host_end(check)?;
    let addresses = own_addresses(check, &outer);
    if !check.context.conf.spoof_check {
        return check.restore_masquerade(&addresses, mode);
    }
    let (mac, missing) = check_spoof_rules(check, &outer)?;
    if let RestoreMode::Write(rollback) = &mut mode
        && !missing.is_empty()
    {
        port::guard(&outer.name, mac, &check.context.attachment, rollback)?;
    }
    let masquerade = check.restore_masquerade(&addresses, mode)?.unwrap_or_default();
    Ok(Some([masquerade, missing].concat()))
}

/// Returns the only MAC that the container may send from, and a sentence for each difference in the
/// rules of `macspoofchk`.
fn check_spoof_rules(check: &Check<'_>, outer: &Link) -> Result<(Mac, Vec<String>)> {
    let (call, inner) = (check.context.call, &check.inner);
    let mac = check.expected_mac().ok_or_else(|| failed(format!("{} has no hardware address", inner.name)))?;
    Ok((mac, SpoofCheck::open()?.check(&call.container_id, &call.ifname, &outer.name, mac)?))
}

/// Returns the bridge.
///
/// # Errors
/// Code 101 if it does not exist, is not a bridge, is down, or is not promiscuous although the
/// configuration requires that, or has a setting that differs from the configured one.
fn find_bridge(host: &Netlink, conf: &Conf) -> Result<Link> {
    let name = &conf.bridge;
    let link = host.find_link(name)?.ok_or_else(|| failed(format!("Interface name {name} not found")))?;
    if !link.is_bridge() {
        return Err(failed(format!("Interface {name} not of type bridge")));
    }
    if !link.up {
        return Err(failed(format!("bridge {name} is down")));
    }
    // Promiscuity is a counter, which a packet capture also raises, so only 0 is wrong.
    if conf.promiscuous && link.promiscuity == 0 {
        let msg = format!("Bridge interface {name} configured Promisc Mode true doesn't match current state: false");
        return Err(failed(msg));
    }
    let differences = device::differing_settings(&link, conf);
    if !differences.is_empty() {
        return Err(failed(format!("bridge {name}: {}", differences.join("; "))));
    }
    Ok(link)
}

/// Checks that the host's end `outer` is up, is a port of the bridge for this attachment, and has
/// the configured settings.
///
/// # Errors
/// Code 101 for the first difference.
fn check_port(check: &Check<'_>, bridge: &Link, outer: &Link) -> Result<()> {
    let (host, conf) = (&*check.context.host, &check.context.conf);
    let name = &outer.name;
    if outer.master != Some(bridge.index) {
        return Err(failed(format!("{name} is not attached to bridge {}", bridge.name)));
    }
    if !outer.up {
        return Err(failed(format!("{name} is down")));
    }
    if PortMark::of(outer).is_some_and(|port_mark| !port_mark.belongs_to(&check.context.attachment)) {
        return Err(failed(format!("{name} was attached to {} by another attachment", bridge.name)));
    }
    let Some(settings) = outer.port else {
        return Err(failed(format!("the kernel reports no settings of {name} as a port of bridge {}", bridge.name)));
    };
    if let Some(expected) = conf.neigh_suppress.filter(|expected| *expected != settings.neigh_suppress) {
        let found = settings.neigh_suppress;
        return Err(failed(format!("{name}: neighSuppress is {found}, expected {expected}")));
    }
    for (what, found, expected) in
        [("hairpin mode", settings.hairpin, conf.hairpin), ("port isolation", settings.isolated, conf.isolated)]
    {
        if found == expected {
            continue;
        }
        let msg = format!("{name}: {what} is {found}, expected {expected}");
        // Hairpin mode that another program has set, such as the kubelet, costs no packet.
        if conf.hairpin || settings.isolated != conf.isolated {
            return Err(failed(msg));
        }
        check.context.call.notes.note(msg);
    }
    if let Some(vlans) = &conf.vlans {
        let missing = port::missing_vlans(host, outer.index, vlans)?;
        if !missing.is_empty() {
            return Err(failed(format!("{name} lacks {}", missing.join(", "))));
        }
    }
    if conf.spoof_check {
        let (_, differences) = check_spoof_rules(check, outer)?;
        if !differences.is_empty() {
            return Err(failed(differences.join("; ")));
        }
    }
    Ok(())
}

/// Returns the addresses in the result that this plugin's IPAM assigned. In chained use, the result
/// also has the earlier plugin's addresses, which have no gateway here and are not masqueraded.
fn own_addresses(check: &Check<'_>, outer: &Link) -> Vec<IpConfig> {
    match PortMark::of(outer) {
        Some(port_mark) => port_mark.added_ips(&check.prev).cloned().collect(),
        None => check.layer3.ips.clone(),
    }
}

/// Checks that the link for the gateways (the bridge, or the VLAN's gateway interface) has the
/// gateways of `own_ips`, and that the host forwards packets of their families.
///
/// # Errors
/// Code 101 for the first difference.
fn check_gateway(host: &Netlink, conf: &Conf, bridge: &Link, own_ips: &[IpConfig]) -> Result<()> {
    let link = match conf.gateway_vlan() {
        None => bridge.clone(),
        Some(vlan) => {
            let name = vlan_gateway_name(&bridge.name, vlan);
            host.find_link(&name)?.ok_or_else(|| failed(format!("Interface name {name} not found")))?
        }
    };
    let existing = host.list_addresses(link.index)?;
    for ip in own_ips {
        let Some(gateway) = ip.gateway.and_then(|gateway| Cidr::new(gateway, ip.address.prefix())) else { continue };
        // Another prefix does no harm if the container's address is in it.
        let reaches_container = |cidr: Cidr| cidr.address() == gateway.address() && cidr.contains(ip.address.address());
        if !existing.iter().any(|address| reaches_container(address.cidr)) {
            return Err(failed(format!("{} does not have the gateway's address {gateway}", link.name)));
        }
        check_forwarding(&link, Family::of(ip.address.address()))?;
    }
    Ok(())
}
