//! The gateways' addresses on the bridge, or on the VLAN's own interface, and forwarding.
//!
//! Other attachments share both, so a failed ADD leaves them. What `forceAddress` removed is put back.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::rc::Rc;

use cni::rollback::{Notes, Rollback};
use cni::{Cidr, Code, Error, Result};
use cni_linux::{Link, Netlink, sysctl};

use crate::conf::{self, Conf};
use crate::layer3::{Layer3, dad};

/// The gateways of an attachment, once nothing can be refused any more.
pub(crate) struct Plan<'a> {
    host: &'a Rc<Netlink>,
    link: Link,
    missing: Vec<Cidr>,
    in_the_way: Vec<Cidr>,
    /// Whether each family with a gateway is IPv4.
    families: BTreeSet<bool>,
}

/// The link that has the gateways' addresses, and those that it did not have before.
pub(crate) struct Served {
    pub(crate) link: Link,
    pub(crate) added: Vec<IpAddr>,
}

impl<'a> Plan<'a> {
    /// Finds which gateways' addresses `link` lacks and which other addresses are in their way.
    ///
    /// # Errors
    /// 102 with Go's text if an address is in the way and `forceAddress` is not set.
    pub(crate) fn new(host: &'a Rc<Netlink>, link: Link, conf: &Conf, layer3: &Layer3) -> Result<Plan<'a>> {
        let mut plan = Plan { host, link, missing: Vec::new(), in_the_way: Vec::new(), families: BTreeSet::new() };
        if conf.gateway == conf::Gateway::None {
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
    pub(crate) fn serve(self, conf: &Conf, notes: &Notes, rollback: &mut Rollback<'_>) -> Result<Served> {
        let Plan { host, link, missing, in_the_way, families } = self;
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
            match host.add_address(link.index, gateway, dad(conf)) {
                Err(error) if !error.is_exists() => return Err(error.into()),
                Err(_) => {}
                Ok(()) => added.push(gateway.address()),
            }
        }
        for is_ipv4 in families {
            sysctl::ensure(forwarding(is_ipv4), "1")?;
        }
        Ok(Served { link, added })
    }
}

/// The sysctl that lets the host forward a family.
pub(crate) fn forwarding(is_ipv4: bool) -> &'static str {
    if is_ipv4 { "net/ipv4/ip_forward" } else { "net/ipv6/conf/all/forwarding" }
}

/// Whether `existing` keeps the gateway from the link. As in Go: any other IPv4 address, an IPv6 one
/// whose network overlaps.
fn is_in_the_way(existing: Cidr, gateway: Cidr) -> bool {
    if existing.is_ipv4() != gateway.is_ipv4() {
        return false;
    }
    gateway.is_ipv4()
        || existing.network().contains(gateway.address())
        || gateway.network().contains(existing.address())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_other_ipv4_address_is_in_the_way_but_ipv6_only_if_it_overlaps() {
        let cidr = |text: &str| text.parse::<Cidr>().unwrap();
        assert!(is_in_the_way(cidr("10.0.0.1/24"), cidr("10.1.0.1/24")));
        assert!(!is_in_the_way(cidr("fd00::1/64"), cidr("fd01::1/64")));
        assert!(is_in_the_way(cidr("fd00::1/48"), cidr("fd00::2/64")));
        assert!(!is_in_the_way(cidr("fd00::1/64"), cidr("10.1.0.1/24")));
    }
}
