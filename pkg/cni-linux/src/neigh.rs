//! Corrects outdated entries of the neighbour table, which has the hardware address of each IP
//! address on a link, and creates permanent ones.
//!
//! Correcting changes only an existing entry, such as that of the attachment that had the IP
//! address before, and makes it "reachable", so it can expire. A permanent entry stays until it or
//! its interface is removed.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE, Parseable};
use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourMessage, NeighbourState};
use netlink_packet_route::{AddressFamily, neighbour};

use crate::error::{Error, Result};
use crate::mac::Mac;
use crate::netlink::{Kind, Netlink};

impl Netlink {
    /// Sets the hardware address in the neighbour entry of `ip` on the interface `index`. Returns
    /// `false` if there is no entry.
    pub fn correct_neighbour(&self, index: u32, ip: IpAddr, mac: Mac) -> Result<bool> {
        let mut message = neighbour_request(index, ip);
        message.header.state = NeighbourState::Reachable;
        message.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()));
        match self.request(Kind::NewNeighbour, &message, NLM_F_REPLACE) {
            Ok(_) => Ok(true),
            Err(cause) if cause.errno() == Some(libc::ENOENT) => Ok(false),
            Err(cause) => {
                Err(Error::new(format_args!("failed to set neighbour {ip} on {} to {mac}", self.label(index)), cause))
            }
        }
    }
}

/// An IP address and the hardware address of its permanent neighbour entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// The IP address.
    pub ip: IpAddr,
    /// The hardware address.
    pub mac: Mac,
}

impl Netlink {
    /// Makes the neighbour entry on the interface `index` permanent. Replaces an existing entry.
    ///
    /// # Errors
    /// The kernel's error, for example if the interface is down.
    pub fn set_permanent_neighbour(&self, index: u32, neighbour: Neighbour) -> Result<()> {
        let Neighbour { ip, mac } = neighbour;
        let mut message = neighbour_request(index, ip);
        message.header.state = NeighbourState::Permanent;
        message.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()));
        self.change(Kind::NewNeighbour, index, &message, NLM_F_CREATE | NLM_F_REPLACE, |link| {
            format!("failed to add the permanent neighbour {ip} {mac} on {link}")
        })
    }

    /// Removes the neighbour entry of `ip` on the interface `index`, if there is one.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn purge_neighbour(&self, index: u32, ip: IpAddr) -> Result<()> {
        match self.request(Kind::DelNeighbour, &neighbour_request(index, ip), 0) {
            Ok(_) => Ok(()),
            Err(cause) if cause.errno() == Some(libc::ENOENT) => Ok(()),
            Err(cause) => {
                Err(Error::new(format_args!("failed to remove the neighbour {ip} on {}", self.label(index)), cause))
            }
        }
    }

    /// Returns the permanent neighbour entries of both families on the interface `index`.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn list_permanent_neighbours(&self, index: u32) -> Result<Vec<Neighbour>> {
        let mut all = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut request = NeighbourMessage::default();
            request.header.family = family;
            let answer = self
                .dump(Kind::GetNeighbour, &request)
                .map_err(|cause| Error::new("failed to list the neighbours", cause))?;
            let messages =
                answer.iter().filter_map(|reply| NeighbourMessage::parse(reply.body(Kind::NewNeighbour)?).ok());
            all.extend(messages.filter(|message| message.header.ifindex == index).filter_map(decode_permanent));
        }
        Ok(all)
    }
}

/// Decodes a permanent entry. Returns `None` for another entry.
fn decode_permanent(message: NeighbourMessage) -> Option<Neighbour> {
    if message.header.state != NeighbourState::Permanent {
        return None;
    }
    let (mut ip, mut mac) = (None, None);
    for attribute in message.attributes {
        match attribute {
            NeighbourAttribute::Destination(neighbour::NeighbourAddress::Inet(address)) => ip = Some(address.into()),
            NeighbourAttribute::Destination(neighbour::NeighbourAddress::Inet6(address)) => ip = Some(address.into()),
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = Some(Mac(bytes.try_into().ok()?)),
            _ => {}
        }
    }
    Some(Neighbour { ip: ip?, mac: mac? })
}

/// Returns a request about the neighbour entry of `ip` on the interface `index`.
fn neighbour_request(index: u32, ip: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = if ip.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.ifindex = index;
    message.attributes.push(NeighbourAttribute::Destination(neighbour::NeighbourAddress::from(ip)));
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, output};
    use crate::{BridgeSpec, Dad};

    #[test]
    fn an_entry_is_corrected_but_never_created() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let bridge = netlink.create_bridge(&BridgeSpec { up: true, ..BridgeSpec::named("br0") }).unwrap();
            let new = Mac([2, 0, 0, 0, 0, 2]);
            for (net, ip) in [("10.1.0.1/24", "10.1.0.7"), ("fd00::1/64", "fd00::7")] {
                netlink.add_address(bridge.index, net.parse().unwrap(), Dad::Skip).unwrap();
                let ip = ip.parse().unwrap();
                let shown = || output(&format!("ip neighbour show {ip} dev br0"));
                assert!(!netlink.correct_neighbour(bridge.index, ip, new).unwrap());
                assert_eq!(shown(), "");
                output(&format!("ip neighbour add {ip} dev br0 lladdr 02:00:00:00:00:01 nud reachable"));
                assert!(netlink.correct_neighbour(bridge.index, ip, new).unwrap());
                let shown = shown();
                assert!(shown.contains("02:00:00:00:00:02 REACHABLE"), "{shown}");
            }
        });
    }
    #[test]
    fn permanent_entries_are_set_listed_and_purged() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let bridge = netlink.create_bridge(&BridgeSpec { up: true, ..BridgeSpec::named("br0") }).unwrap();
            let other = netlink.create_bridge(&BridgeSpec { up: true, ..BridgeSpec::named("br1") }).unwrap();
            output("ip neighbour add 10.1.0.9 dev br0 lladdr 02:00:00:00:00:01 nud reachable");
            let of = |ip: &str, last| Neighbour { ip: ip.parse().unwrap(), mac: Mac([2, 0, 0, 0, 0, last]) };
            let wanted = [of("10.1.0.7", 7), of("10.1.0.9", 9), of("fd00::7", 7)];
            for neighbour in wanted {
                netlink.set_permanent_neighbour(bridge.index, neighbour).unwrap();
            }
            let mut listed = netlink.list_permanent_neighbours(bridge.index).unwrap();
            listed.sort_by_key(|neighbour| neighbour.ip);
            assert_eq!(listed, wanted);
            assert_eq!(netlink.list_permanent_neighbours(other.index).unwrap(), []);
            for neighbour in wanted {
                netlink.purge_neighbour(bridge.index, neighbour.ip).unwrap();
                netlink.purge_neighbour(bridge.index, neighbour.ip).unwrap();
            }
            assert_eq!(netlink.list_permanent_neighbours(bridge.index).unwrap(), []);
        });
    }
}
