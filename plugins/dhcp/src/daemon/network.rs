//! What the daemon does in a container's namespace: looks at the interface, sends, listens, moves
//! an address.
//!
//! Nothing stays open between two exchanges. A descriptor would keep the namespace alive after its
//! container, and with it the host's end of a veth.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Duration;

use cni::Cidr;
use cni::result::AddResult;
use cni_dhcp::lease::Path;
use cni_linux::packet::{Datagram, PacketSocket, udp_socket};
use cni_linux::{Dad, Error, Link, Mac, Netlink, Netns, OperState, Route, Watch};
use tokio::io::unix::AsyncFd;

const CLIENT_PORT: u16 = 68;
const SERVER_PORT: u16 = 67;
/// No server's message is longer: option 57 says 1500.
const MAX_FRAME: usize = 2048;

/// An attachment's interface.
#[derive(Clone, Debug)]
pub(crate) struct Interface {
    /// The path of the namespace.
    pub(crate) netns: PathBuf,
    /// Its device and inode.
    pub(crate) netns_id: (u64, u64),
    pub(crate) name: String,
    pub(crate) index: u32,
    pub(crate) mac: Mac,
}

/// Finds an interface.
pub(crate) fn find(netns: PathBuf, name: &str) -> Result<Interface, String> {
    let namespace = Netns::open(&netns).map_err(|error| error.to_string())?;
    let link = namespace.run(Netlink::open).and_then(|netlink| netlink?.link(name));
    let link = link.map_err(|_| format!("error looking up {name:?}: Link not found"))?;
    let mac = link.mac.ok_or_else(|| format!("interface {name} has no Ethernet address"))?;
    Ok(Interface { netns, netns_id: namespace.id(), name: name.to_owned(), index: link.index, mac })
}

/// Registers a descriptor with the runtime.
#[expect(
    deprecated,
    reason = "its successor is unsafe, for types whose descriptor may be closed or change: these own one"
)]
pub(crate) fn registered<T: AsRawFd>(fd: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::new(fd)
}

fn has_carrier(link: &Link) -> bool {
    link.oper_state == OperState::Up || (link.oper_state == OperState::Unknown && link.up && !link.is_veth())
}

impl Interface {
    /// Opens its namespace. `None` if it has gone.
    fn open(&self) -> Result<Option<Netns>, Error> {
        match Netns::open(&self.netns) {
            Ok(netns) if netns.id() == self.netns_id => Ok(Some(netns)),
            Ok(_) => Ok(None),
            Err(error) if error.is_no_netns() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn netlink(&self) -> Result<Option<Netlink>, Error> {
        self.open()?.map(|netns| netns.run(Netlink::open)?).transpose()
    }

    /// Whether the interface, or its namespace, has gone for certain.
    pub(crate) fn is_gone(&self) -> bool {
        match self.netlink() {
            Ok(Some(netlink)) => matches!(netlink.find_link_by_index(self.index), Ok(None)),
            Ok(None) => true,
            Err(_) => false,
        }
    }

    /// Sets the interface up and waits until it sends, at most `patience`. A lease is requested in
    /// either case.
    pub(crate) async fn bring_up(&self, patience: Duration) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let netns = self.open().map_err(text)?.ok_or("its network namespace has gone")?;
        let watch = Watch::open_in(&netns).map_err(text)?;
        let netlink = netns.run(Netlink::open).and_then(|netlink| netlink).map_err(text)?;
        drop(netns);
        let watch = registered(watch).map_err(|error| error.to_string())?;
        let running = async {
            loop {
                let link = netlink.find_link_by_index(self.index).map_err(text)?.ok_or("Link not found")?;
                if !link.up {
                    netlink.set_up(self.index).map_err(text)?;
                } else if has_carrier(&link) {
                    return Ok(());
                } else {
                    let mut ready = watch.readable().await.map_err(|error| error.to_string())?;
                    watch.get_ref().drain();
                    ready.clear_ready();
                }
            }
        };
        tokio::time::timeout(patience, running).await.unwrap_or(Ok(()))
    }

    /// Whether it has an address.
    pub(crate) fn has(&self, address: Cidr) -> bool {
        let addresses =
            self.netlink().and_then(|netlink| netlink.map(|netlink| netlink.list_addresses(self.index)).transpose());
        matches!(addresses, Ok(Some(addresses)) if addresses.iter().any(|known| known.cidr == address))
    }

    /// Adds the address and the routes of a lease. What is there already stays.
    pub(crate) fn add(&self, result: &AddResult) -> Result<(), Error> {
        let Some(netlink) = self.netlink()? else { return Ok(()) };
        let there = |done: Result<(), Error>| done.or_else(|error| if error.is_exists() { Ok(()) } else { Err(error) });
        for ip in &result.ips {
            there(netlink.add_address(self.index, ip.address, Dad::Normal))?;
        }
        let routes = result.routes.iter().map(|route| Route {
            mtu: route.mtu,
            priority: route.priority,
            scope: route.scope,
            ..Route::new(route.dst, route.gw, self.index)
        });
        // One that the server has invented keeps no other from being added.
        routes.map(|route| there(netlink.add_route(&route))).fold(Ok(()), Result::and)
    }

    /// Deletes an address, if the interface has it.
    pub(crate) fn delete(&self, address: Cidr) -> Result<(), Error> {
        match self.netlink()?.map(|netlink| netlink.delete_address(self.index, address)) {
            Some(Err(error)) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }

    /// Opens the sockets for a path.
    fn socket(&self, path: Path) -> io::Result<Socket> {
        let gone = || io::Error::other("its network namespace has gone");
        let netns = self.open().map_err(io::Error::other)?.ok_or_else(gone)?;
        let inside = || -> io::Result<Socket> {
            // Without the leased address there is none.
            let udp = match path {
                Path::Unicast { from, .. } => udp_socket(SocketAddrV4::new(from, CLIENT_PORT), &self.name).ok(),
                Path::Broadcast | Path::BroadcastFrom(_) => None,
            };
            Ok(Socket { udp, packet: registered(PacketSocket::open(self.index, CLIENT_PORT)?)? })
        };
        netns.run(inside).map_err(io::Error::other)?
    }

    /// Gives an address back. The interface may be removed at once afterwards, so a server on the
    /// link is sent a frame that needs no ARP, beside the packet that a server elsewhere needs.
    pub(crate) fn release(&self, bytes: &[u8], path: Path, network: Cidr) -> io::Result<()> {
        let Path::Unicast { to, .. } = path else { return Ok(()) };
        let socket = self.socket(path)?;
        let mut sent = socket.send(self.mac, bytes, path);
        if socket.udp.is_some() && network.contains(to.into()) {
            sent = socket.send_frame(self.mac, bytes, path).or(sent);
        }
        socket.close();
        sent
    }
}

/// The open sockets in the container's namespace.
struct Socket {
    /// For messages to one server, which the kernel routes. Nothing is read from it.
    udp: Option<UdpSocket>,
    /// Receives what comes to the interface, also what a server broadcasts to a client that has an
    /// address: a DHCPNAK.
    packet: AsyncFd<PacketSocket>,
}

impl Socket {
    fn send(&self, mac: Mac, payload: &[u8], path: Path) -> io::Result<()> {
        match (&self.udp, path) {
            (Some(socket), Path::Unicast { to, .. }) => socket.send_to(payload, (to, SERVER_PORT)).map(drop),
            _ => self.send_frame(mac, payload, path),
        }
    }

    fn send_frame(&self, mac: Mac, payload: &[u8], path: Path) -> io::Result<()> {
        let (from, to) = match path {
            Path::Broadcast => (Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST),
            Path::BroadcastFrom(from) => (from, Ipv4Addr::BROADCAST),
            Path::Unicast { from, to } => (from, to),
        };
        let (from, to) = (SocketAddrV4::new(from, CLIENT_PORT), SocketAddrV4::new(to, SERVER_PORT));
        self.packet.get_ref().send(&Datagram { from, to, payload }.to_broadcast_frame(mac))
    }

    async fn receive(&self) -> io::Result<Vec<u8>> {
        let mut buffer = [0; MAX_FRAME];
        loop {
            let mut ready = self.packet.readable().await?;
            match ready.try_io(|socket| socket.get_ref().receive(&mut buffer)) {
                Ok(length) => match Datagram::from_frame(&buffer[..length?]) {
                    Some(datagram) if datagram.from.port() == SERVER_PORT => return Ok(datagram.payload.to_vec()),
                    _ => {}
                },
                Err(_would_block) => {}
            }
        }
    }

    /// Closes it elsewhere: the close of a packet socket waits up to 20 ms, for which no other
    /// lease should wait.
    fn close(self) {
        let socket = self.packet.into_inner();
        tokio::task::spawn_blocking(move || drop(socket));
    }
}

/// An exchange with servers: the socket of the path in use.
#[derive(Default)]
pub(crate) struct Exchange(Option<(Path, Socket)>);

impl Exchange {
    fn open(&mut self, interface: &Interface, path: Path) -> io::Result<&Socket> {
        if self.0.as_ref().is_none_or(|(open, _)| *open != path) {
            self.close();
            self.0 = Some((path, interface.socket(path)?));
        }
        self.0.as_ref().map(|(_, socket)| socket).ok_or_else(|| io::Error::other("no socket"))
    }

    pub(crate) fn send(&mut self, interface: &Interface, bytes: &[u8], path: Path) -> io::Result<()> {
        self.open(interface, path)?.send(interface.mac, bytes, path)
    }

    /// The next message. Without a socket there is none.
    pub(crate) async fn receive(&self) -> io::Result<Vec<u8>> {
        match &self.0 {
            Some((_, socket)) => socket.receive().await,
            None => std::future::pending().await,
        }
    }

    pub(crate) fn close(&mut self) {
        if let Some((_, socket)) = self.0.take() {
            socket.close();
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.close();
    }
}
