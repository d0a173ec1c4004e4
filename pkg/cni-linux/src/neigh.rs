//! The host's memory of which hardware address an IP address has.
//!
//! Entries we write are reachable, never permanent: the kernel forgets them by itself. The newcomer's mistake: making
//! an entry for every container. Only one that exists, left by the address's last holder, needs correcting.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE, Parseable as _};
use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourMessage, NeighbourState};
use netlink_packet_route::{AddressFamily, neighbour};

use crate::error::{Cause, Error, Result};
use crate::mac::Mac;
use crate::netlink::{Kind, Netlink, Reply};

/// An entry of the neighbour table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// The hardware address, once known.
    pub mac: Option<Mac>,
    /// Whether somebody wrote it to stay.
    pub permanent: bool,
}

impl Netlink {
    /// What is known of one neighbour. One question for one entry: no table is read.
    pub fn find_neighbour(&self, index: u32, ip: IpAddr) -> Result<Option<Neighbour>> {
        let found = match self.get(Kind::GetNeighbour, &message(index, ip)) {
            Ok(answer) => answer.and_then(decode).map(Some).ok_or_else(|| Cause::text("no answer came")),
            Err(cause) if cause.errno() == Some(libc::ENOENT) => Ok(None),
            Err(cause) => Err(cause),
        };
        found.map_err(|cause| {
            Error::new(format_args!("failed to look up neighbour {ip} on {}", self.label(index)), cause)
        })
    }

    /// Writes a neighbour's address as just confirmed, whether or not there was an entry.
    pub fn replace_neighbour(&self, index: u32, ip: IpAddr, mac: Mac) -> Result<()> {
        self.write_neighbour(index, ip, mac, NLM_F_CREATE | NLM_F_REPLACE).map(drop)
    }

    /// Corrects a neighbour's address where there is an entry; makes none. Returns whether there was one. One request.
    pub fn correct_neighbour(&self, index: u32, ip: IpAddr, mac: Mac) -> Result<bool> {
        self.write_neighbour(index, ip, mac, NLM_F_REPLACE)
    }

    fn write_neighbour(&self, index: u32, ip: IpAddr, mac: Mac, flags: u16) -> Result<bool> {
        let mut message = message(index, ip);
        message.header.state = NeighbourState::Reachable;
        message.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()));
        match self.request(Kind::NewNeighbour, &message, flags) {
            Ok(_) => Ok(true),
            Err(cause) if flags & NLM_F_CREATE == 0 && cause.errno() == Some(libc::ENOENT) => Ok(false),
            Err(cause) => {
                Err(Error::new(format_args!("failed to set neighbour {ip} on {} to {mac}", self.label(index)), cause))
            }
        }
    }
}

fn message(index: u32, ip: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = if ip.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.ifindex = index;
    message.attributes.push(NeighbourAttribute::Destination(neighbour::NeighbourAddress::from(ip)));
    message
}

fn decode(reply: Reply) -> Option<Neighbour> {
    let NeighbourMessage { header, attributes, .. } = NeighbourMessage::parse(reply.body(Kind::NewNeighbour)?).ok()?;
    let mac = attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(bytes) => Mac::from_slice(bytes),
        _ => None,
    });
    Some(Neighbour { mac, permanent: header.state == NeighbourState::Permanent })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, output};
    use crate::{BridgeSpec, Dad};

    #[test]
    fn an_entry_is_found_corrected_and_not_made_without_need() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let bridge = netlink.create_bridge(&BridgeSpec { up: true, ..BridgeSpec::named("br0") }).unwrap();
            let (old, new) = (Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2]));
            for (net, ip) in [("10.1.0.1/24", "10.1.0.7"), ("fd00::1/64", "fd00::7")] {
                netlink.add_address(bridge.index, net.parse().unwrap(), Dad::Skip).unwrap();
                let ip = ip.parse().unwrap();
                assert_eq!(netlink.find_neighbour(bridge.index, ip).unwrap(), None);
                assert!(!netlink.correct_neighbour(bridge.index, ip, new).unwrap());
                assert_eq!(netlink.find_neighbour(bridge.index, ip).unwrap(), None);
                netlink.replace_neighbour(bridge.index, ip, old).unwrap();
                assert!(netlink.correct_neighbour(bridge.index, ip, new).unwrap());
                let found = netlink.find_neighbour(bridge.index, ip).unwrap().unwrap();
                assert_eq!(found, Neighbour { mac: Some(new), permanent: false });
                let shown = output(&format!("ip neighbour show {ip} dev br0"));
                assert!(shown.contains("02:00:00:00:00:02 REACHABLE"), "{shown}");
            }
        });
    }
}
