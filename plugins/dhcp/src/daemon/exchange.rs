//! The exchange of messages with servers, over sockets in the container's namespace.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV4, SocketAddrV6, UdpSocket};

use cni::Cidr;
use cni_dhcp::lease::Path;
use cni_linux::packet::{Datagram, PacketSocket, udp_socket};
use cni_linux::{Mac, Netlink};
use tokio::io::unix::AsyncFd;

use super::network::{Interface, register};

/// The UDP ports of DHCP clients and servers.
const CLIENT_PORT: u16 = 68;
const SERVER_PORT: u16 = 67;
/// The UDP ports of DHCPv6 clients, and of servers and relays.
const CLIENT_PORT_V6: u16 = 546;
const SERVER_PORT_V6: u16 = 547;
/// The group of all DHCPv6 servers and relays on a link.
const ALL_SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
/// The size in bytes of the buffer for a received frame. Option 57 of each message limits the
/// answers of servers to 1500 bytes.
const MAX_FRAME: usize = 2048;

impl Interface {
    /// Opens the sockets for messages on a path, in the interface's namespace.
    fn open_sockets(&self, path: Path) -> io::Result<Sockets> {
        let gone = || io::Error::other(format!("the network namespace of {} no longer exists", self.name));
        let netns = self.open().map_err(io::Error::other)?.ok_or_else(gone)?;
        let open_inside = || -> io::Result<Sockets> {
            // The UDP socket cannot be opened if the interface does not have the leased address
            // yet. The packet socket then sends instead.
            let udp = match path {
                Path::Multicast => return self.open_multicast(),
                Path::Unicast { from, .. } => udp_socket(SocketAddrV4::new(from, CLIENT_PORT).into(), &self.name).ok(),
                Path::Broadcast | Path::BroadcastFrom(_) => None,
            };
            Ok(Sockets::V4 { udp, packet: register(PacketSocket::open(self.index, CLIENT_PORT)?)? })
        };
        netns.run(open_inside).map_err(io::Error::other)?
    }

    /// Opens the socket of DHCPv6, in the namespace of the calling thread, which must be the
    /// interface's.
    fn open_multicast(&self) -> io::Result<Sockets> {
        let netlink = Netlink::open().map_err(io::Error::other)?;
        let address = self.link_local(&netlink).map_err(io::Error::other)?;
        let missing = || io::Error::other("it has no usable link-local address; IPv6 may be disabled");
        let local = SocketAddrV6::new(address.ok_or_else(missing)?, CLIENT_PORT_V6, 0, self.index);
        Ok(Sockets::V6 { udp: register(udp_socket(local.into(), &self.name)?)?, index: self.index })
    }

    /// Sends DHCPRELEASE, or RELEASE of DHCPv6. If a DHCPv4 server is in `network`, the released
    /// address with its prefix, the message is also sent in a frame to the broadcast MAC: the UDP
    /// packet may still wait for ARP when the interface is deleted right after the release.
    pub(crate) fn send_release(&self, bytes: &[u8], path: Path, network: Cidr) -> io::Result<()> {
        let sockets = self.open_sockets(path)?;
        let mut sent = sockets.send(self.mac, bytes, path);
        // Without the UDP socket, `send` has already sent a frame.
        if let (Sockets::V4 { udp: Some(_), packet }, Path::Unicast { to, .. }) = (&sockets, path)
            && network.contains(to.into())
        {
            // It is enough if one of the two messages is sent.
            sent = send_frame(packet.get_ref(), self.mac, bytes, path).or(sent);
        }
        sockets.close();
        sent
    }
}

/// The sockets in the container's namespace for the messages of one path.
enum Sockets {
    /// Those of DHCPv4.
    V4 {
        /// Sends messages to one server, which the kernel routes. Nothing is read from it.
        udp: Option<UdpSocket>,
        /// Sends broadcasts, and receives all messages on the interface, including a broadcast
        /// DHCPNAK.
        packet: AsyncFd<PacketSocket>,
    },
    /// That of DHCPv6.
    V6 {
        udp: AsyncFd<UdpSocket>,
        /// The interface's index.
        index: u32,
    },
}

impl Sockets {
    /// Sends a message on its path: with the UDP socket if there is one, otherwise in a frame.
    fn send(&self, mac: Mac, payload: &[u8], path: Path) -> io::Result<()> {
        match (self, path) {
            (Sockets::V6 { udp, index }, _) => {
                let to = SocketAddrV6::new(ALL_SERVERS, SERVER_PORT_V6, 0, *index);
                udp.get_ref().send_to(payload, to).map(drop)
            }
            (Sockets::V4 { udp: Some(socket), .. }, Path::Unicast { to, .. }) => {
                socket.send_to(payload, (to, SERVER_PORT)).map(drop)
            }
            (Sockets::V4 { packet, .. }, _) => send_frame(packet.get_ref(), mac, payload, path),
        }
    }

    /// Waits for the next message of a server.
    async fn receive(&self) -> io::Result<Vec<u8>> {
        let mut buffer = [0; MAX_FRAME];
        loop {
            // An outer error of `try_io` means that nothing has arrived after all.
            match self {
                Sockets::V4 { packet, .. } => {
                    let mut ready = packet.readable().await?;
                    let Ok(length) = ready.try_io(|socket| socket.get_ref().receive(&mut buffer)) else { continue };
                    if let Some(datagram) = Datagram::from_frame(&buffer[..length?])
                        && datagram.from.port() == SERVER_PORT
                    {
                        return Ok(datagram.payload.to_vec());
                    }
                }
                Sockets::V6 { udp, .. } => {
                    let mut ready = udp.readable().await?;
                    let Ok(length) = ready.try_io(|socket| socket.get_ref().recv(&mut buffer)) else { continue };
                    return Ok(buffer[..length?].to_vec());
                }
            }
        }
    }

    /// Closes the sockets. Closing a packet socket takes up to 20 ms, so another thread does it,
    /// and the other tasks do not wait.
    fn close(self) {
        if let Sockets::V4 { packet, .. } = self {
            let packet_socket = packet.into_inner();
            tokio::task::spawn_blocking(move || drop(packet_socket));
        }
    }
}

/// Sends a message of DHCPv4 in a frame to the broadcast MAC.
fn send_frame(socket: &PacketSocket, mac: Mac, payload: &[u8], path: Path) -> io::Result<()> {
    let (from, to) = match path {
        Path::BroadcastFrom(from) => (from, Ipv4Addr::BROADCAST),
        Path::Unicast { from, to } => (from, to),
        // DHCPv6 has no packet socket.
        Path::Broadcast | Path::Multicast => (Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST),
    };
    let (from, to) = (SocketAddrV4::new(from, CLIENT_PORT), SocketAddrV4::new(to, SERVER_PORT));
    socket.send(&Datagram { from, to, payload }.to_broadcast_frame(mac))
}

/// The open sockets of an exchange with servers, with the path that they are for.
#[derive(Default)]
pub(crate) struct Exchange(Option<(Path, Sockets)>);

impl Exchange {
    /// Sends a message. If the open sockets are for another path, replaces them.
    pub(crate) fn send(&mut self, interface: &Interface, bytes: &[u8], path: Path) -> io::Result<()> {
        if let Some((open_path, sockets)) = &self.0
            && *open_path == path
        {
            return sockets.send(interface.mac, bytes, path);
        }
        self.close();
        let (_, sockets) = self.0.insert((path, interface.open_sockets(path)?));
        sockets.send(interface.mac, bytes, path)
    }

    /// Waits for the next message of a server. Without open sockets it waits forever.
    pub(crate) async fn receive(&self) -> io::Result<Vec<u8>> {
        match &self.0 {
            Some((_, sockets)) => sockets.receive().await,
            None => std::future::pending().await,
        }
    }

    /// Closes the sockets, if any are open.
    pub(crate) fn close(&mut self) {
        if let Some((_, sockets)) = self.0.take() {
            sockets.close();
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.close();
    }
}
