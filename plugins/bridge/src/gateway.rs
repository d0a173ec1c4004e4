//! Adds the gateways' addresses to the bridge, or to a VLAN's gateway interface, and enables
//! forwarding.
//!
//! Other attachments use the same addresses and sysctls, so a failed ADD leaves them. It only
//! restores the addresses that `forceAddress` removed.

use std::net::IpAddr;
use std::rc::Rc;

use cni::AttachmentId;
use cni::rollback::Rollback;
use cni::{Cidr, Code, Error, Result};
use cni_linux::{Dad, Family, Link, Netlink, Target, VethSpec, VlanFlags, sysctl};
use cni_plugin::interface::veth::{made_up_mac, refuse_router_advertisements};
use cni_plugin::interface::{
    AttachmentContext, CreatedLink, Gateway, HostState, Layer3, forwarding_sysctl, host_interface,
};

use crate::add::AttachedPort;
use crate::conf::{Conf, vlan_gateway_name};
use crate::device;

/// The alias of the port that connects a VLAN's gateway interface to the bridge.
pub(crate) const VLAN_GATEWAY: &str = "cni-bridge: VLAN gateway";

/// Adds the gateways' addresses to their link, if the configuration makes the bridge the gateway,
/// and lists a VLAN's gateway interface in the result. Returns the added addresses, and the link on
/// which neighbour entries for the container can be outdated (even without a gateway).
///
/// # Errors
/// - Code 102 with Go's text if the link has a conflicting address and `forceAddress` is not set.
/// - The errors of the kernel.
pub(crate) fn add_gateways<'a>(
    context: &AttachmentContext<'a, Conf>,
    created: &mut CreatedLink<AttachedPort>,
    layer3: &Layer3,
    rollback: &mut Rollback<'a>,
) -> Result<HostState> {
    let link = ensure_gateway_link(&context.host, &created.link.bridge, &context.conf)?;
    created.link.gateway_link = Some(link.index);
    if link.index != created.link.bridge.index {
        created.result.interfaces.push(host_interface(&link.name, link.mac));
    }
    let neighbours_on = Some(link.index);
    let added = Plan::new(context, link, layer3)?.execute(context, rollback)?;
    Ok(HostState { added, neighbours_on })
}

/// The changes that add an attachment's gateways. They are planned before the first is made, so an
/// ADD that fails because of a conflicting address changes no address.
struct Plan {
    /// The link for the gateways' addresses.
    link: Link,
    /// The gateways' addresses that the link lacks.
    missing: Vec<Cidr>,
    /// The addresses of the link that are removed because of `forceAddress`.
    conflicting: Vec<Cidr>,
    /// The families that have a gateway, whose packets the host must forward.
    families: Vec<Family>,
}

impl Plan {
    /// Finds which gateways' addresses `link` lacks and which of its addresses conflict with them.
    ///
    /// # Errors
    /// Code 102 with Go's text if an address conflicts and `forceAddress` is not set.
    fn new(context: &AttachmentContext<'_, Conf>, link: Link, layer3: &Layer3) -> Result<Plan> {
        let (host, conf) = (&context.host, &context.conf);
        let mut plan = Plan { link, missing: Vec::new(), conflicting: Vec::new(), families: Vec::new() };
        if conf.gateway == Gateway::None {
            return Ok(plan);
        }
        let gateways = layer3.gateways();
        plan.families = Family::ALL.to_vec();
        plan.families.retain(|family| gateways.iter().any(|gateway| Family::of(gateway.address()) == *family));
        let existing: Vec<Cidr> = host.list_addresses(plan.link.index)?.iter().map(|address| address.cidr).collect();
        for gateway in gateways.iter().filter(|gateway| !existing.contains(gateway)) {
            plan.missing.push(*gateway);
            for address in existing.iter().filter(|address| conflicts(**address, *gateway)) {
                // Another gateway of this network is not a conflict.
                if gateways.contains(address) || conf.configured_gateways.contains(address) {
                    continue;
                }
                if !conf.force_address {
                    let msg = format!(
                        "failed to set bridge addr: {:?} already has an IP address different from {gateway}",
                        plan.link.name
                    );
                    let details = format!("it has {address}; \"forceAddress\": true replaces it");
                    return Err(Error::new(Code::CONFLICT, msg).with_details(details));
                }
                if !plan.conflicting.contains(address) {
                    plan.conflicting.push(*address);
                }
            }
        }
        Ok(plan)
    }

    /// Removes the conflicting addresses, adds the missing ones and enables forwarding. Returns the
    /// added addresses, without those that another ADD has added meanwhile. Registers with
    /// `rollback` an undo that only restores the removed addresses.
    fn execute<'a>(self, context: &AttachmentContext<'a, Conf>, rollback: &mut Rollback<'a>) -> Result<Vec<IpAddr>> {
        let (host, conf, notes) = (&context.host, &context.conf, &context.call.notes);
        let Plan { link, missing, conflicting, families } = self;
        if !conflicting.is_empty() {
            let saved = host.save_addresses(link.index, &conflicting)?;
            let undo = Rc::clone(host);
            rollback.push(format!("restore the addresses that forceAddress removed from {}", link.name), move || {
                // Tries every address, and returns the first error.
                saved.iter().map(|address| undo.restore_address(address)).fold(Ok(()), Result::and)
            });
        }
        for address in conflicting {
            notes.note(format_args!("{address} is removed from {} (forceAddress)", link.name));
            host.purge_address(link.index, address)?;
        }
        let mut added = Vec::new();
        for gateway in missing {
            match host.add_address(link.index, gateway, conf.dad) {
                Ok(()) => added.push(gateway.address()),
                Err(error) if error.is_exists() => {}
                Err(error) => return Err(error.into()),
            }
            // For forwarded packets, the kernel resolves neighbours from a link-local address. The
            // address that the kernel adds itself is tentative at first, so the first packets would
            // be lost. The address added here is usable at once.
            if !gateway.is_ipv4()
                && conf.dad == Dad::Skip
                && let Some(mac) = link.mac
            {
                host.add_link_local(link.index, mac)?;
            }
        }
        for family in families {
            sysctl::ensure(forwarding_sysctl(family), "1")?;
        }
        Ok(added)
    }
}

/// Whether `existing`, a different address of the link, conflicts with the gateway's address. As
/// with Go, all IPv4 addresses conflict, and IPv6 addresses if their networks overlap.
fn conflicts(existing: Cidr, gateway: Cidr) -> bool {
    if existing.is_ipv4() != gateway.is_ipv4() {
        return false;
    }
    gateway.is_ipv4()
        || existing.network().contains(gateway.address())
        || gateway.network().contains(existing.address())
}

/// Returns the link for the gateways' addresses: the bridge or, if the configuration has a VLAN and
/// makes the bridge the gateway, the VLAN's gateway interface. That interface is one end of a veth
/// pair, and the other end is a port of the bridge in the VLAN. Creates the pair if it is missing.
fn ensure_gateway_link(host: &Netlink, bridge: &Link, conf: &Conf) -> Result<Link> {
    let vlan = match (conf.gateway, conf.gateway_vlan()) {
        (Gateway::None, _) | (_, None) => return Ok(bridge.clone()),
        (_, Some(vlan)) => vlan,
    };
    let name = vlan_gateway_name(&bridge.name, vlan);
    // The name depends only on bridge and VLAN, so that each ADD knows the port of an earlier one.
    let port_name = AttachmentId::new(&bridge.name, "vlan", vlan.to_string()).host_name(0);
    if let Some(link) = host.find_link(&name)? {
        // Setting the link up is the last step of its creation. If the link is down, the ADD that
        // created it was killed, or is still running.
        if !link.up {
            complete_vlan_gateway(host, &link, &port_name, vlan)?;
        }
        return Ok(link);
    }
    let (mac, peer_mac) = (made_up_mac()?, made_up_mac()?);
    let spec = VethSpec {
        mtu: device::port_mtu(host, bridge, conf)?,
        alias: Some(VLAN_GATEWAY),
        master: Some(bridge.index),
        up: true,
        ..VethSpec::new(&port_name, peer_mac, &name, mac)
    };
    match host.create_veth(&spec) {
        Ok(veth) => {
            if let Err(error) = set_up_vlan_gateway(host, veth.index, veth.peer_index, vlan) {
                host.purge_link(veth.index)?;
                return Err(error);
            }
            refuse_router_advertisements(&name);
        }
        // Another ADD has created the pair meanwhile.
        Err(error) if error.is_exists() => {}
        Err(error) => return Err(error.into()),
    }
    Ok(host.link(&name)?)
}

/// Completes the creation of the VLAN gateway interface `link`, which an ADD has left unfinished.
/// Does nothing if another program created the link. The other end of a link that an ADD created
/// has the alias [`VLAN_GATEWAY`] or, before the alias is set, the name `port_name`.
fn complete_vlan_gateway(host: &Netlink, link: &Link, port_name: &str, vlan: u16) -> Result<()> {
    let Some(port_index) = link.peer_index else { return Ok(()) };
    let Some(port) = host.find_link_by_index(port_index)? else { return Ok(()) };
    let awaits_alias = port.alias.is_none() && port.name == port_name;
    if awaits_alias {
        host.set_alias(port.index, VLAN_GATEWAY)?;
    }
    if awaits_alias || port.alias.as_deref() == Some(VLAN_GATEWAY) {
        set_up_vlan_gateway(host, port.index, link.index, vlan)?;
    }
    Ok(())
}

/// Puts the port of a VLAN gateway into this VLAN only, then sets the gateway's end up. Can be
/// repeated.
fn set_up_vlan_gateway(host: &Netlink, port: u32, gateway: u32, vlan: u16) -> Result<()> {
    for old in host.vlans(port)?.iter().filter(|old| old.vid != vlan) {
        host.del_vlan(port, old.vid, Target::Port)?;
    }
    host.add_vlan(port, vlan, VlanFlags::Access, Target::Port)?;
    Ok(host.set_up(gateway)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_other_ipv4_and_overlapping_ipv6_address_conflicts() {
        let cidr = |text: &str| text.parse::<Cidr>().unwrap();
        assert!(conflicts(cidr("10.0.0.1/24"), cidr("10.1.0.1/24")));
        assert!(!conflicts(cidr("fd00::1/64"), cidr("fd01::1/64")));
        assert!(conflicts(cidr("fd00::1/48"), cidr("fd00::2/64")));
        assert!(!conflicts(cidr("fd00::1/64"), cidr("10.1.0.1/24")));
    }
}
