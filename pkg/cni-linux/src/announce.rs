//! Telling the neighbours on a link which hardware address an IP address has now.
//!
//! A reused address would otherwise be sent to its last holder until entries expire. The frames are complete and sent
//! as they are, so they say the same whatever the state of the address. The newcomer's mistake: announcing before the
//! bridge's port forwards; the frame is lost and nobody complains.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::error::{Error, Result};
use crate::mac::Mac;
use crate::sys;

/// Announces addresses on an interface of the calling thread's namespace: one gratuitous ARP request for each of
/// IPv4, one unsolicited neighbour advertisement for each of IPv6.
pub fn announce(index: u32, mac: Mac, addresses: &[IpAddr]) -> Result<()> {
    if addresses.is_empty() {
        return Ok(());
    }
    // Protocol 0: it receives nothing.
    let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None)
        .map_err(|errno| Error::new("failed to open a packet socket", errno))?;
    for address in addresses {
        let frame = match address {
            IpAddr::V4(ip) => gratuitous_arp(mac, *ip).to_vec(),
            IpAddr::V6(ip) => neighbour_advertisement(mac, *ip).to_vec(),
        };
        sys::send_frame(&socket, index, &frame)
            .map_err(|error| Error::new(format_args!("failed to announce {address} at {mac}"), error))?;
    }
    Ok(())
}

/// RFC 5227's announcement: a request in which sender and target are the same address. It corrects entries, and
/// obliges nobody to answer.
fn gratuitous_arp(mac: Mac, ip: Ipv4Addr) -> [u8; 42] {
    let mut frame = [0; 42];
    frame[0..6].copy_from_slice(&Mac::BROADCAST.0);
    frame[6..12].copy_from_slice(&mac.0);
    // ARP; then Ethernet, IPv4, address lengths 6 and 4, request.
    frame[12..22].copy_from_slice(&[0x08, 0x06, 0, 1, 0x08, 0x00, 6, 4, 0, 1]);
    frame[22..28].copy_from_slice(&mac.0);
    frame[28..32].copy_from_slice(&ip.octets());
    // 32..38, the target's hardware address, is what is not asked for: zero.
    frame[38..42].copy_from_slice(&ip.octets());
    frame
}

/// RFC 4861 §7.2.6: to all nodes, unsolicited, overriding what they know.
fn neighbour_advertisement(mac: Mac, ip: Ipv6Addr) -> [u8; 86] {
    const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    const OVERRIDE: u8 = 0x20;
    let mut frame = [0; 86];
    frame[0..6].copy_from_slice(&[0x33, 0x33, 0, 0, 0, 1]);
    frame[6..12].copy_from_slice(&mac.0);
    // IPv6; version 6, 32 bytes of ICMPv6, hop limit 255 (anything less is ignored as not from this link).
    frame[12..22].copy_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0, 0, 32, 58, 255]);
    frame[22..38].copy_from_slice(&ip.octets());
    frame[38..54].copy_from_slice(&ALL_NODES.octets());
    frame[54..62].copy_from_slice(&[136, 0, 0, 0, OVERRIDE, 0, 0, 0]);
    frame[62..78].copy_from_slice(&ip.octets());
    // Option: target link-layer address, one unit of eight bytes.
    frame[78..80].copy_from_slice(&[2, 1]);
    frame[80..86].copy_from_slice(&mac.0);
    let checksum = icmpv6_checksum(&frame);
    frame[56..58].copy_from_slice(&checksum.to_be_bytes());
    frame
}

/// Over both addresses, length and protocol, and the ICMPv6 part, whose own checksum is still zero.
fn icmpv6_checksum(frame: &[u8; 86]) -> u16 {
    let words = frame[22..].chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let mut sum: u32 = words.sum::<u32>() + 32 + 58;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, new_netns, output};
    use crate::{Dad, Netlink, VethSpec};

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 5]);

    #[test]
    fn an_arp_announcement_has_these_bytes() {
        let frame = gratuitous_arp(MAC, Ipv4Addr::new(10, 1, 2, 3));
        let expected = "ffffffffffff02000000000508060001080006040001\
                        0200000000050a0102030000000000000a010203";
        assert_eq!(hex(&frame), expected);
    }

    #[test]
    fn an_advertisement_has_these_bytes() {
        let frame = neighbour_advertisement(MAC, "fd00::5".parse().unwrap());
        // The checksum was computed by another program.
        let expected = "33330000000102000000000586dd6000000000203aff\
                        fd000000000000000000000000000005ff020000000000000000000000000001\
                        88005a8f20000000fd0000000000000000000000000000050201020000000005";
        assert_eq!(hex(&frame), expected);
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn a_neighbour_that_knew_another_address_is_corrected() {
        in_new_netns(|| {
            let host = Netlink::open().unwrap();
            let netns = new_netns();
            let container = host.open_in(&netns).unwrap();
            let spec = VethSpec { up: true, ..VethSpec::new("veth0", Mac([2, 0, 0, 0, 0, 1]), "eth0", MAC) };
            let veth = host.create_veth(&VethSpec { peer_netns: Some(&netns), ..spec }).unwrap();
            container.set_up(veth.peer_index).unwrap();
            let stale = Mac([2, 0, 0, 0, 0, 9]);
            let addresses: [IpAddr; 2] = ["10.1.0.7".parse().unwrap(), "fd00::7".parse().unwrap()];
            for net in ["10.1.0.1/24", "fd00::1/64"] {
                host.add_address(veth.index, net.parse().unwrap(), Dad::Skip).unwrap();
            }
            for address in addresses {
                host.replace_neighbour(veth.index, address, stale).unwrap();
            }
            netns.run(|| announce(veth.peer_index, MAC, &addresses)).unwrap().unwrap();
            for address in addresses {
                let known = host.find_neighbour(veth.index, address).unwrap().unwrap();
                assert_eq!(known.mac, Some(MAC), "{address}: {}", output("ip neighbour"));
            }
        });
    }
}
