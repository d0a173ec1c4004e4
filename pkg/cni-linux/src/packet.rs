//! UDP over IPv4 on an interface that may have no address yet, by Ethernet frames over a packet
//! socket.
//!
//! Closing a packet socket waits for an RCU grace period of 4 to 20 ms (Linux 6.18). The checksum
//! of a received UDP packet is not checked, because between interfaces of one machine the kernel
//! does not fill it in.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::sys::socket::{self, AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, sockopt};

use crate::mac::Mac;
use crate::sys;

/// The lengths of the headers, in bytes.
const ETHERNET: usize = 14;
const IP: usize = 20;
const UDP: usize = 8;

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
    /// Encodes the packet as an Ethernet frame to the broadcast address. `source` is the sender's
    /// hardware address.
    pub fn to_broadcast_frame(&self, source: Mac) -> Vec<u8> {
        let mut frame = vec![0; ETHERNET + IP + UDP];
        let length = |headers: usize| u16::try_from(self.payload.len() + headers).unwrap_or(u16::MAX).to_be_bytes();
        // Ethernet: destination, source, EtherType 0x0800 (IPv4).
        frame[..6].fill(0xff);
        frame[6..12].copy_from_slice(&source.0);
        frame[12] = 8;
        // IPv4: version and header length, total length, TTL 64, protocol UDP, addresses, checksum.
        let ip = &mut frame[ETHERNET..];
        ip[0] = 0x45;
        ip[2..4].copy_from_slice(&length(IP + UDP));
        ip[8] = 64;
        ip[9] = 17;
        ip[12..16].copy_from_slice(&self.from.ip().octets());
        ip[16..20].copy_from_slice(&self.to.ip().octets());
        let sum = checksum(0, &ip[..IP]);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        // UDP: ports, length, checksum.
        ip[20..22].copy_from_slice(&self.from.port().to_be_bytes());
        ip[22..24].copy_from_slice(&self.to.port().to_be_bytes());
        ip[24..26].copy_from_slice(&length(UDP));
        frame.extend(self.payload);
        let udp = &frame[ETHERNET + IP..];
        // The UDP checksum includes a pseudo header: both addresses, the protocol, the length.
        let addresses = u32::from(u16::MAX - checksum(0, &frame[ETHERNET + 12..ETHERNET + IP]));
        let pseudo_header = addresses + 17 + udp.len() as u32;
        // 0 means "no checksum", so a sum of 0 is sent as 0xffff.
        let sum = match checksum(pseudo_header, udp) {
            0 => u16::MAX,
            sum => sum,
        };
        frame[ETHERNET + IP + 6..ETHERNET + IP + 8].copy_from_slice(&sum.to_be_bytes());
        frame
    }

    /// Decodes an Ethernet frame. Returns `None` if it is not a complete, unfragmented UDP packet
    /// over IPv4.
    pub fn from_frame(frame: &[u8]) -> Option<Datagram<'_>> {
        let ip = frame.get(ETHERNET..)?;
        let header = usize::from(ip.first()? & 15) * 4;
        let number = |at: usize| ip.get(at..at + 2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
        let is_ipv4 = frame[12..14] == [8, 0] && ip[0] >> 4 == 4 && header >= IP;
        let is_udp = *ip.get(9)? == 17;
        // More fragments follow, or the fragment's offset is not 0.
        let is_fragment = number(6)? & 0x3fff != 0;
        if !is_ipv4 || !is_udp || is_fragment {
            return None;
        }
        let length = usize::from(number(header + 4)?);
        let address = |at: usize| ip.get(at..at + 4).map(|bytes| Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]));
        Some(Datagram {
            from: SocketAddrV4::new(address(12)?, number(header)?),
            to: SocketAddrV4::new(address(16)?, number(header + 2)?),
            payload: ip.get(header + UDP..header + length)?,
        })
    }
}

/// Returns the Internet checksum (RFC 1071) of `bytes`, added to `start`.
fn checksum(start: u32, bytes: &[u8]) -> u16 {
    let word = |pair: &[u8]| u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    let mut sum = bytes.chunks(2).fold(start, |sum, pair| sum + word(pair));
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// A non-blocking socket for the Ethernet frames of one interface, which receives only UDP packets
/// to one port.
#[derive(Debug)]
pub struct PacketSocket(OwnedFd);

impl PacketSocket {
    /// Opens a socket on an interface of the calling thread's namespace.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open(index: u32, port: u16) -> io::Result<PacketSocket> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        // A socket without a protocol receives nothing until it is bound, which is after the filter
        // is attached.
        let fd = socket::socket(AddressFamily::Packet, SockType::Raw, flags, None)?;
        sys::filter_udp_port(&fd, port)?;
        sys::bind_packet(&fd, index)?;
        Ok(PacketSocket(fd))
    }

    /// Sends one frame.
    ///
    /// # Errors
    /// Those of the kernel; ENOBUFS if the interface does not send yet.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        socket::send(self.as_raw_fd(), frame, MsgFlags::empty())?;
        Ok(())
    }

    /// Receives one frame into `buffer` and returns its length.
    ///
    /// # Errors
    /// Those of the kernel; [`io::ErrorKind::WouldBlock`] if there is none.
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
/// and this interface.
///
/// # Errors
/// Those of the kernel; EADDRNOTAVAIL if the interface does not have the address.
pub fn udp_socket(local: SocketAddrV4, interface: &str) -> io::Result<UdpSocket> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket::socket(AddressFamily::Inet, SockType::Datagram, flags, SockProtocol::Udp)?;
    socket::setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    socket::setsockopt(&fd, sockopt::BindToDevice, &interface.into())?;
    socket::bind(fd.as_raw_fd(), &SockaddrIn::from(local))?;
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
            let refused = udp_socket(datagram(b"").from, "veth0").unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::EADDRNOTAVAIL));
            let server = udp_socket(datagram(b"").to, "veth0").unwrap();
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
