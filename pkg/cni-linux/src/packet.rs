//! Sends and receives UDP over IPv4 on an interface that may have no address yet: encodes and
//! decodes Ethernet frames for a packet socket.
//!
//! Closing a packet socket waits 4 to 20 ms for an RCU grace period (Linux 6.18). The checksum of a
//! received UDP packet is not verified, because the kernel does not compute it for packets between
//! interfaces of one machine.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::sys::socket::{self, AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, sockopt};

use crate::mac::Mac;
use crate::sys;

/// The length of an Ethernet header.
const ETHERNET_LENGTH: usize = 14;
/// The length of an IPv4 header without options.
const IP_LENGTH: usize = 20;
/// The length of a UDP header.
const UDP_LENGTH: usize = 8;
/// The type of an Ethernet frame that contains an IPv4 packet.
const ETHERTYPE_IPV4: [u8; 2] = [8, 0];
/// The number of UDP in an IPv4 header.
const PROTOCOL_UDP: u8 = 17;
/// The first byte of an IPv4 header without options: version 4, and a length of 5 words.
const VERSION_AND_LENGTH: u8 = 0x45;
const TIME_TO_LIVE: u8 = 64;

/// One UDP packet.
#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    /// The source.
    pub from: SocketAddrV4,
    /// The destination.
    pub to: SocketAddrV4,
    /// The content.
    pub payload: &'a [u8],
}

impl Datagram<'_> {
    /// Returns the packet as an Ethernet frame to the broadcast address, with `source` as the
    /// sender.
    pub fn to_broadcast_frame(&self, source: Mac) -> Vec<u8> {
        let ethernet = [&Mac::BROADCAST.0[..], &source.0, &ETHERTYPE_IPV4].concat();
        [ethernet, self.ip_header(), self.udp_packet()].concat()
    }

    /// Returns the IPv4 header.
    fn ip_header(&self) -> Vec<u8> {
        let with_checksum = |sum: u16| {
            [
                // The second byte is the type of service.
                &[VERSION_AND_LENGTH, 0][..],
                &self.total_length(IP_LENGTH + UDP_LENGTH),
                // The identification, and the flags with the fragment's offset.
                &[0; 4],
                &[TIME_TO_LIVE, PROTOCOL_UDP],
                &sum.to_be_bytes(),
                &self.from.ip().octets(),
                &self.to.ip().octets(),
            ]
            .concat()
        };
        // The checksum is computed over the header with 0 in the checksum field.
        let sum = checksum(&with_checksum(0));
        with_checksum(sum)
    }

    /// Returns the UDP header and the payload.
    fn udp_packet(&self) -> Vec<u8> {
        let length = self.total_length(UDP_LENGTH);
        let with_checksum = |sum: u16| {
            let ports = [self.from.port().to_be_bytes(), self.to.port().to_be_bytes()].concat();
            [&ports, &length[..], &sum.to_be_bytes(), self.payload].concat()
        };
        // The checksum also covers a pseudo header: both addresses, the protocol, the length.
        let addresses = [self.from.ip().octets(), self.to.ip().octets()].concat();
        let pseudo_header = [&addresses, &[0, PROTOCOL_UDP][..], &length].concat();
        let sum = checksum(&[pseudo_header, with_checksum(0)].concat());
        // In a packet, 0 means "no checksum". All ones is the same value in ones' complement.
        with_checksum(if sum == 0 { u16::MAX } else { sum })
    }

    /// Returns the length of the payload and `header_length` bytes of headers, in network byte
    /// order.
    fn total_length(&self, header_length: usize) -> [u8; 2] {
        u16::try_from(header_length + self.payload.len()).unwrap_or(u16::MAX).to_be_bytes()
    }

    /// Decodes an Ethernet frame. Returns `None` if it is not a complete and unfragmented UDP
    /// packet over IPv4.
    pub fn from_frame(frame: &[u8]) -> Option<Datagram<'_>> {
        // Positions in the IPv4 header.
        const FRAGMENT_FIELD: usize = 6;
        const PROTOCOL_FIELD: usize = 9;
        const SOURCE_FIELD: usize = 12;
        const DESTINATION_FIELD: usize = 16;
        /// The fragment's offset in its packet, and the flag "more fragments".
        const FRAGMENT_MASK: u16 = 0x3fff;
        let (ethernet, ip) = frame.split_at_checked(ETHERNET_LENGTH)?;
        let (version, header_words) = (ip.first()? >> 4, ip.first()? & 15);
        let (ip_header, udp) = ip.split_at_checked(usize::from(header_words) * 4)?;
        if !ethernet.ends_with(&ETHERTYPE_IPV4) || version != 4 || ip_header.len() < IP_LENGTH {
            return None;
        }
        let number = |header: &[u8], position: usize| Some(u16::from_be_bytes(*header.get(position..)?.first_chunk()?));
        let address = |position: usize| Some(Ipv4Addr::from(*ip_header.get(position..)?.first_chunk::<4>()?));
        let is_fragment = number(ip_header, FRAGMENT_FIELD)? & FRAGMENT_MASK != 0;
        if ip_header[PROTOCOL_FIELD] != PROTOCOL_UDP || is_fragment {
            return None;
        }
        // The UDP header: source port, destination port, length, checksum.
        let udp_length = usize::from(number(udp, 4)?);
        Some(Datagram {
            from: SocketAddrV4::new(address(SOURCE_FIELD)?, number(udp, 0)?),
            to: SocketAddrV4::new(address(DESTINATION_FIELD)?, number(udp, 2)?),
            payload: udp.get(UDP_LENGTH..udp_length)?,
        })
    }
}

/// Returns the Internet checksum (RFC 1071) of `bytes`: the complement of the sum of all 16-bit
/// words, where a carry is added to the lowest bit.
fn checksum(bytes: &[u8]) -> u16 {
    let word = |pair: &[u8]| u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// A non-blocking packet socket on one interface. It sends any frame, and receives only UDP packets
/// to one port.
#[derive(Debug)]
pub struct PacketSocket(OwnedFd);

impl PacketSocket {
    /// Opens a socket on the interface `index` of the calling thread's namespace. The socket
    /// receives the UDP packets to `port`.
    ///
    /// # Errors
    /// The interface does not exist, or the process lacks CAP_NET_RAW.
    pub fn open(index: u32, port: u16) -> io::Result<PacketSocket> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        // Without a protocol the socket receives nothing. `bind_packet` sets one, after the filter
        // is attached.
        let fd = socket::socket(AddressFamily::Packet, SockType::Raw, flags, None)?;
        sys::filter_udp_port(&fd, port)?;
        sys::bind_packet(&fd, index)?;
        Ok(PacketSocket(fd))
    }

    /// Sends one frame.
    ///
    /// # Errors
    /// The kernel refuses the frame. The errno is ENOBUFS if the interface does not send yet.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        socket::send(self.as_raw_fd(), frame, MsgFlags::empty())?;
        Ok(())
    }

    /// Receives one frame into `buffer`, and returns how many bytes were written. A frame that is
    /// longer than `buffer` is cut off.
    ///
    /// # Errors
    /// - [`io::ErrorKind::WouldBlock`]: no frame has arrived.
    /// - The kernel's error, for example ENETDOWN if the interface is down.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(socket::recv(self.as_raw_fd(), buffer, MsgFlags::empty())?)
    }
}

impl AsRawFd for PacketSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns a non-blocking UDP socket in the calling thread's namespace, bound to this local address
/// and this interface. Other sockets can share the address and port (SO_REUSEADDR).
///
/// # Errors
/// EADDRNOTAVAIL if this host does not have the address, ENODEV if the interface does not exist.
pub fn udp_socket(local: SocketAddr, interface: &str) -> io::Result<UdpSocket> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let family = if local.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let fd = socket::socket(family, SockType::Datagram, flags, SockProtocol::Udp)?;
    socket::setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    socket::setsockopt(&fd, sockopt::BindToDevice, &interface.into())?;
    socket::bind(fd.as_raw_fd(), &SockaddrStorage::from(local))?;
    Ok(fd.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, new_netns};
    use crate::{Dad, Netlink, VethSpec, Watch};
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::time::{Duration, Instant};

    fn datagram(payload: &[u8]) -> Datagram<'_> {
        let address = |last, port| SocketAddrV4::new(Ipv4Addr::new(10, 1, 0, last), port);
        Datagram { from: address(2, 68), to: address(1, 67), payload }
    }

    #[test]
    fn a_frame_is_read_as_it_was_written() {
        let frame = datagram(b"odd").to_broadcast_frame(Mac([2, 0, 0, 0, 0, 5]));
        let read = Datagram::from_frame(&frame).unwrap();
        assert_eq!((read.from, read.to, read.payload), (datagram(b"").from, datagram(b"").to, &b"odd"[..]));
        for length in 0..frame.len() {
            assert!(Datagram::from_frame(&frame[..length]).is_none(), "cut off after {length} bytes");
        }
        for (at, byte) in [(12, 0x86), (14, 0x65), (14, 0x41), (20, 0x20), (23, 6), (39, 3)] {
            let mut other = frame.clone();
            other[at] = byte;
            assert!(Datagram::from_frame(&other).is_none(), "byte {at}");
        }
    }

    #[test]
    fn frames_reach_a_udp_socket_and_only_one_port_is_received() {
        in_new_netns(|| {
            let (host_mac, mac) = (Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 5]));
            let host = Netlink::open().unwrap();
            let netns = new_netns();
            let container = host.open_in(&netns).unwrap();
            let spec = VethSpec { up: true, ..VethSpec::new("veth0", host_mac, "eth0", mac) };
            let veth = host.create_veth(&VethSpec { peer_netns: Some(&netns), ..spec }).unwrap();
            container.set_up(veth.peer_index).unwrap();
            let machine = crate::testing::machine();
            let deadline = Instant::now() + Duration::from_secs(30);
            for (netlink, index) in [(&host, veth.index), (&container, veth.peer_index)] {
                let watch = if index == veth.index { Watch::open() } else { Watch::open_in(&netns) };
                netlink.wait_carrier(&watch.unwrap(), index, deadline, &machine).unwrap();
            }
            host.add_address(veth.index, "10.1.0.1/24".parse().unwrap(), Dad::Skip).unwrap();
            let refused = udp_socket(datagram(b"").from.into(), "veth0").unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::EADDRNOTAVAIL));
            let server = udp_socket(datagram(b"").to.into(), "veth0").unwrap();
            let wait = |fd: BorrowedFd<'_>| {
                poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::from(20_000_u16)).unwrap()
            };

            let client = netns.run(|| PacketSocket::open(veth.peer_index, 68)).unwrap().unwrap();
            client.send(&datagram(b"question").to_broadcast_frame(mac)).unwrap();
            let mut buffer = [0; 2000];
            assert_eq!(wait(server.as_fd()), 1);
            let (length, from) = server.recv_from(&mut buffer).unwrap();
            assert_eq!((&buffer[..length], from), (&b"question"[..], datagram(b"").from.into()));

            let everyone = Ipv4Addr::BROADCAST;
            server.set_broadcast(true).unwrap();
            for (port, text) in [(69, "other"), (68, "answer")] {
                server.send_to(text.as_bytes(), (everyone, port)).unwrap();
            }
            assert_eq!(wait(client.as_fd()), 1);
            let length = client.receive(&mut buffer).unwrap();
            assert_eq!(Datagram::from_frame(&buffer[..length]).unwrap().payload, b"answer");
            assert_eq!(client.receive(&mut buffer).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        });
    }
}
