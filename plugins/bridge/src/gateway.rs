//! The gateways' addresses on the bridge, or on the VLAN's own interface, and forwarding.
//!
//! Other attachments share both, so a failed ADD leaves them. What `forceAddress` removed is put
//! back.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::rc::Rc;

use cni::AttachmentId;
use cni::rollback::Rollback;
use cni::{Cidr, Code, Error, Result};
use cni_linux::{Dad, Link, Netlink, Target, VethSpec, VlanFlags, sysctl};
use cni_plugin::interface::veth::{made_up_mac, no_router_advertisements};
use cni_plugin::interface::{AttachmentContext, CreatedLink, Gateway, HostState, Layer3, forwarding, host_interface};

use crate::attach::AttachedPort;
use crate::conf::{Conf, vlan_gateway_name};

/// The alias of the bridge's end of a VLAN gateway.
const VLAN_GATEWAY: &str = "cni-bridge: VLAN gateway";

/// Puts the gateways' addresses onto the link that is to have them, if the bridge is to be the
/// gateway. A link of their own is added to the result.
pub(crate) fn serve<'a>(
    context: &AttachmentContext<'a, Conf>,
    created: &mut CreatedLink<AttachedPort>,
    layer3: &Layer3,
    rollback: &mut Rollback<'a>,
) -> Result<HostState> {
    let link = gateway_link(&context.host, &created.link.bridge, &context.conf)?;
    created.link.gateway = Some(link.index);
    if link.index != created.link.bridge.index {
        created.result.interfaces.push(host_interface(&link.name, link.mac));
    }
    let neighbours_on = Some(link.index);
    let added = Plan::new(context, link, layer3)?.serve(context, rollback)?;
    Ok(HostState { added, neighbours_on })
}

/// The gateways of an attachment, once nothing can be refused any more.
struct Plan {
    link: Link,
    missing: Vec<Cidr>,
    in_the_way: Vec<Cidr>,
    /// Whether each family with a gateway is IPv4.
    families: BTreeSet<bool>,
}

impl Plan {
    /// Finds which gateways' addresses `link` lacks and which other addresses are in their way.
    ///
    /// # Errors
    /// 102 with Go's text if an address is in the way and `forceAddress` is not set.
    fn new(context: &AttachmentContext<'_, Conf>, link: Link, layer3: &Layer3) -> Result<Plan> {
        let (host, conf) = (&context.host, &context.conf);
        let mut plan = Plan { link, missing: Vec::new(), in_the_way: Vec::new(), families: BTreeSet::new() };
        if conf.gateway == Gateway::None {
            return Ok(plan);
        }
        let gateways = layer3.gateways();
        plan.families = gateways.iter().map(Cidr::is_ipv4).collect();
        let existing: Vec<Cidr> = host.list_addresses(plan.link.index)?.iter().map(|address| address.cidr).collect();
        for gateway in gateways.iter().filter(|gateway| !existing.contains(gateway)) {
            plan.missing.push(*gateway);
            for address in existing.iter().filter(|address| is_in_the_way(**address, *gateway)) {
                if gateways.contains(address) || conf.own_gateways.contains(address) {
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
                if !plan.in_the_way.contains(address) {
                    plan.in_the_way.push(*address);
                }
            }
        }
        Ok(plan)
    }

    /// Removes the addresses that are in the way, adds the missing ones and lets the host forward.
    /// Returns those that were missing.
    fn serve<'a>(self, context: &AttachmentContext<'a, Conf>, rollback: &mut Rollback<'a>) -> Result<Vec<IpAddr>> {
        let (host, conf, notes) = (&context.host, &context.conf, &context.call.notes);
        let Plan { link, missing, in_the_way, families } = self;
        if !in_the_way.is_empty() {
            let saved = host.save_addresses(link.index, &in_the_way)?;
            let undo = Rc::clone(host);
            rollback.push(format!("put back what forceAddress removed from {}", link.name), move || {
                saved.iter().map(|address| undo.restore_address(address)).fold(Ok(()), Result::and)
            });
        }
        for address in in_the_way {
            notes.note(format_args!("{address} is removed from {} (forceAddress)", link.name));
            match host.delete_address(link.index, address) {
                Err(error) if !error.is_not_found() => return Err(error.into()),
                _ => {}
            }
        }
        let mut added = Vec::new();
        for gateway in missing {
            match host.add_address(link.index, gateway, conf.dad()) {
                Err(error) if !error.is_exists() => return Err(error.into()),
                Err(_) => {}
                Ok(()) => added.push(gateway.address()),
            }
            if let (false, Dad::Skip, Some(mac)) = (gateway.is_ipv4(), conf.dad(), link.mac) {
                host.add_link_local(link.index, mac)?;
            }
        }
        for is_ipv4 in families {
            sysctl::ensure(forwarding(is_ipv4), "1")?;
        }
        Ok(added)
    }
}

/// Whether `existing` keeps the gateway from the link. As in Go: any other IPv4 address, an IPv6
/// one whose network overlaps.
fn is_in_the_way(existing: Cidr, gateway: Cidr) -> bool {
    if existing.is_ipv4() != gateway.is_ipv4() {
        return false;
    }
    gateway.is_ipv4()
        || existing.network().contains(gateway.address())
        || gateway.network().contains(existing.address())
}

/// The link that has the gateway's address: the bridge, or for a VLAN a veth whose other end is in
/// that VLAN.
fn gateway_link(host: &Netlink, bridge: &Link, conf: &Conf) -> Result<Link> {
    let (Some(vlan), true) = (conf.gateway_vlan(), conf.gateway != Gateway::None) else {
        return Ok(bridge.clone());
    };
    let name = vlan_gateway_name(&bridge.name, vlan);
    let port_name = AttachmentId::new(&bridge.name, "vlan", vlan.to_string()).host_name(0);
    if let Some(link) = host.find_link(&name)? {
        // Down: the ADD that creates it was cut off, or has not finished. Setting it up is its last
        // step.
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
    let (mac, peer_mac) = (made_up_mac()?, made_up_mac()?);
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
            no_router_advertisements(&name);
        }
        // Another first ADD was faster.
        Err(error) if error.is_exists() => {}
        Err(error) => return Err(error.into()),
    }
    Ok(host.link(&name)?)
}

/// Puts the port of a VLAN gateway into its VLAN, and last of all the gateway's end up. May be done
/// again.
fn ready_vlan_gateway(host: &Netlink, port: u32, gateway: u32, vlan: u16) -> Result<()> {
    for old in host.vlans(port)?.iter().filter(|old| old.vid != vlan) {
        host.del_vlan(port, old.vid, Target::Master)?;
    }
    host.add_vlan(port, vlan, VlanFlags::Access, Target::Master)?;
    Ok(host.set_up(gateway)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_other_ipv4_but_only_an_overlapping_ipv6_conflicts() {
        let cidr = |text: &str| text.parse::<Cidr>().unwrap();
        assert!(is_in_the_way(cidr("10.0.0.1/24"), cidr("10.1.0.1/24")));
        assert!(!is_in_the_way(cidr("fd00::1/64"), cidr("fd01::1/64")));
        assert!(is_in_the_way(cidr("fd00::1/48"), cidr("fd00::2/64")));
        assert!(!is_in_the_way(cidr("fd00::1/64"), cidr("10.1.0.1/24")));
    }
}
