//! Corrects outdated entries of the neighbour table, which has the hardware address of each IP
//! address on a link.
//!
//! Only an existing entry is corrected, such as that of the attachment that had the IP address
//! before; none is created. A corrected entry is "reachable", not "permanent", so it can expire.

use std::net::IpAddr;

use netlink_packet_core::NLM_F_REPLACE;
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
}
