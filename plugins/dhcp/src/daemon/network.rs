//! The daemon's access to a container's namespace: checks the interface, sends and receives
//! messages, adds and deletes addresses.
//!
//! No descriptor stays open between two exchanges with a server. It would keep the namespace, and
//! with it the host's end of a veth, alive after the container has ended.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Duration;

use cni::Cidr;
use cni::result::AddResult;
use cni_dhcp::lease::Path;
use cni_linux::packet::{Datagram, PacketSocket, udp_socket};
use cni_linux::{Dad, Error, Family, Link, LinkKind, Mac, Netlink, Netns, OperState, Route, Watch};
use tokio::io::unix::AsyncFd;

/// The UDP ports of DHCP clients and servers.
const CLIENT_PORT: u16 = 68;
const SERVER_PORT: u16 = 67;
/// The size in bytes of the buffer for a received frame. Option 57 of each message limits the
/// answers of servers to 1500 bytes.
const MAX_FRAME: usize = 2048;

/// An attachment's interface.
#[derive(Clone, Debug)]
pub(crate) struct Interface {
    /// The path of the namespace.
    pub(crate) netns: PathBuf,
    /// The device and inode numbers of the namespace.
    pub(crate) netns_id: (u64, u64),
    pub(crate) name: String,
    pub(crate) index: u32,
    pub(crate) mac: Mac,
}

/// Finds an interface by its name in a namespace.
///
/// # Errors
/// The text for the plugin: the namespace cannot be opened, or the interface is not found or has no
/// MAC.
pub(crate) fn find(netns: PathBuf, name: &str) -> Result<Interface, String> {
    let namespace = Netns::open(&netns).map_err(|error| error.to_string())?;
    let link = namespace.run(Netlink::open).and_then(|netlink| netlink?.link(name));
    let link = link.map_err(|error| match error.is_not_found() {
        true => format!("error looking up {name:?}: Link not found"),
        false => format!("error looking up {name:?}: {error}"),
    })?;
    let mac = link.mac.ok_or_else(|| format!("interface {name} has no Ethernet address"))?;
    Ok(Interface { netns, netns_id: namespace.id(), name: name.to_owned(), index: link.index, mac })
}

/// Registers a descriptor with tokio, so that a task can wait until it is readable.
#[expect(
    deprecated,
    reason = "the successor is unsafe because a type may change its descriptor; the types used here do not"
)]
pub(crate) fn register<T: AsRawFd>(fd: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::new(fd)
}

/// Whether the link has a carrier. If the driver does not report the carrier, an interface that is
/// up counts as having one, except a veth, which reports its carrier a moment later.
fn has_carrier(link: &Link) -> bool {
    link.oper_state == OperState::Up || (link.oper_state == OperState::Unknown && link.up && !link.is_veth())
}

impl Interface {
    /// Opens the interface's namespace. Returns `None` if it is gone or its path leads to another
    /// one.
    fn open(&self) -> Result<Option<Netns>, Error> {
        match Netns::open(&self.netns) {
            Ok(netns) if netns.id() == self.netns_id => Ok(Some(netns)),
            Ok(_) => Ok(None),
            Err(error) if error.is_no_netns() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens a netlink socket in the interface's namespace. Returns `None` if the namespace is
    /// gone.
    fn netlink(&self) -> Result<Option<Netlink>, Error> {
        match self.open()? {
            Some(netns) => netns.run(Netlink::open)?.map(Some),
            None => Ok(None),
        }
    }

    /// Whether the interface or its namespace is gone. Returns false after an error.
    pub(crate) fn is_gone(&self) -> bool {
        match self.netlink() {
            Ok(Some(netlink)) => matches!(netlink.find_link_by_index(self.index), Ok(None)),
            Ok(None) => true,
            Err(_) => false,
        }
    }

    /// Sets the interface up and waits until it has a carrier. Also succeeds after `timeout`: a
    /// lease is requested even without a carrier.
    ///
    /// # Errors
    /// The interface or its namespace is gone, or the kernel's error.
    pub(crate) async fn bring_up(&self, timeout: Duration) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let netns = self
            .open()
            .map_err(text)?
            .ok_or_else(|| format!("the network namespace of {} no longer exists", self.name))?;
        let watch = Watch::open_in(&netns).map_err(text)?;
        let netlink = netns.run(Netlink::open).and_then(|netlink| netlink).map_err(text)?;
        drop(netns);
        let watch = register(watch).map_err(|error| error.to_string())?;
        let wait_for_carrier = async {
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
        tokio::time::timeout(timeout, wait_for_carrier).await.unwrap_or(Ok(()))
    }

    /// Returns the MTU of the interface. Returns `None` after an error, and if the interface is
    /// gone.
    pub(crate) fn mtu(&self) -> Option<u32> {
        let netlink = self.netlink().ok()??;
        netlink.find_link_by_index(self.index).ok()?.map(|link| link.mtu)
    }

    /// Sets the MTU of the interface. Raises it only if nothing else limits the packets: the other
    /// end of a veth, and the master of an ipvlan, drop packets that are longer than their own MTU.
    ///
    /// # Errors
    /// The text for the log: the MTU is not raised, the interface is gone, or the kernel's error.
    pub(crate) fn set_mtu(&self, mtu: u32) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let gone = || format!("{} no longer exists", self.name);
        let netlink = self.netlink().map_err(text)?.ok_or_else(gone)?;
        let link = netlink.find_link_by_index(self.index).map_err(text)?.ok_or_else(gone)?;
        if mtu > link.mtu && (link.is_veth() || link.kind == LinkKind::Other("ipvlan".to_owned())) {
            return Err(format!("the MTU {} of a {} is never raised", link.mtu, link.kind));
        }
        if mtu == link.mtu { Ok(()) } else { netlink.set_mtu(self.index, mtu).map_err(text) }
    }

    /// Whether the interface has this address. Returns false after an error.
    pub(crate) fn has_address(&self, address: Cidr) -> bool {
        let Ok(Some(netlink)) = self.netlink() else { return false };
        let Ok(addresses) = netlink.list_addresses(self.index) else { return false };
        addresses.iter().any(|existing| existing.cidr == address)
    }

    /// Adds the address and the routes of a lease, unless they exist. A default route is added
    /// behind those of other networks. Does nothing if the namespace is gone.
    pub(crate) fn add_address_and_routes(&self, result: &AddResult) -> Result<(), Error> {
        let Some(netlink) = self.netlink()? else { return Ok(()) };
        let accept_existing =
            |outcome: Result<(), Error>| outcome.or_else(|error| if error.is_exists() { Ok(()) } else { Err(error) });
        for ip in &result.ips {
            accept_existing(netlink.add_address(self.index, ip.address, Dad::Normal))?;
        }
        let routes = result.routes.iter().map(|route| Route {
            mtu: route.mtu,
            advmss: route.advmss,
            priority: route.priority,
            table: route.table,
            scope: route.scope,
            ..Route::new(route.dst, route.gw, self.index)
        });
        // All routes are tried, even if one is invalid. The first error is returned.
        let mut outcome = Ok(());
        for route in routes {
            outcome = outcome.and(add_route(&netlink, &route));
        }
        outcome
    }

    /// Deletes an address. It is not an error if the interface does not have it or the namespace
    /// is gone.
    pub(crate) fn delete_address(&self, address: Cidr) -> Result<(), Error> {
        let Some(netlink) = self.netlink()? else { return Ok(()) };
        match netlink.delete_address(self.index, address) {
            Err(error) if error.is_not_found() => Ok(()),
            outcome => outcome,
        }
    }

    /// Opens the sockets for messages on a path, in the interface's namespace.
    fn open_sockets(&self, path: Path) -> io::Result<Sockets> {
        let gone = || io::Error::other(format!("the network namespace of {} no longer exists", self.name));
        let netns = self.open().map_err(io::Error::other)?.ok_or_else(gone)?;
        let open_inside = || -> io::Result<Sockets> {
            // The UDP socket cannot be opened if the interface does not have the leased address
            // yet. The packet socket then sends instead.
            let udp = match path {
                Path::Unicast { from, .. } => udp_socket(SocketAddrV4::new(from, CLIENT_PORT), &self.name).ok(),
                Path::Broadcast | Path::BroadcastFrom(_) => None,
            };
            Ok(Sockets { udp, packet: register(PacketSocket::open(self.index, CLIENT_PORT)?)? })
        };
        netns.run(open_inside).map_err(io::Error::other)?
    }

    /// Sends DHCPRELEASE. If the server is in `network`, the released address with its prefix, the
    /// message is also sent in a frame to the broadcast MAC: the UDP packet may still wait for ARP
    /// when the interface is deleted right after the release.
    pub(crate) fn send_release(&self, bytes: &[u8], path: Path, network: Cidr) -> io::Result<()> {
        // A release is always unicast, to the server of the lease.
        let Path::Unicast { to, .. } = path else { return Ok(()) };
        let sockets = self.open_sockets(path)?;
        let mut sent = sockets.send(self.mac, bytes, path);
        // Without the UDP socket, `send` has already sent a frame.
        if sockets.udp.is_some() && network.contains(to.into()) {
            // It is enough if one of the two messages is sent.
            sent = sockets.send_frame(self.mac, bytes, path).or(sent);
        }
        sockets.close();
        sent
    }
}

/// The sockets in the container's namespace for the messages of one path.
struct Sockets {
    /// Sends messages to one server, which the kernel routes. Nothing is read from it.
    udp: Option<UdpSocket>,
    /// Sends broadcasts, and receives all messages on the interface, including a broadcast DHCPNAK.
    packet: AsyncFd<PacketSocket>,
}

impl Sockets {
    /// Sends a message on its path: with the UDP socket if there is one, otherwise in a frame.
    fn send(&self, mac: Mac, payload: &[u8], path: Path) -> io::Result<()> {
        match (&self.udp, path) {
            (Some(socket), Path::Unicast { to, .. }) => socket.send_to(payload, (to, SERVER_PORT)).map(drop),
            _ => self.send_frame(mac, payload, path),
        }
    }

    /// Sends a message in a frame to the broadcast MAC.
    fn send_frame(&self, mac: Mac, payload: &[u8], path: Path) -> io::Result<()> {
        let (from, to) = match path {
            Path::Broadcast => (Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST),
            Path::BroadcastFrom(from) => (from, Ipv4Addr::BROADCAST),
            Path::Unicast { from, to } => (from, to),
        };
        let (from, to) = (SocketAddrV4::new(from, CLIENT_PORT), SocketAddrV4::new(to, SERVER_PORT));
        self.packet.get_ref().send(&Datagram { from, to, payload }.to_broadcast_frame(mac))
    }

    /// Waits for the next message of a server.
    async fn receive(&self) -> io::Result<Vec<u8>> {
        let mut buffer = [0; MAX_FRAME];
        loop {
            let mut ready = self.packet.readable().await?;
            // An outer error means that no frame has arrived after all.
            let Ok(length) = ready.try_io(|socket| socket.get_ref().receive(&mut buffer)) else { continue };
            if let Some(datagram) = Datagram::from_frame(&buffer[..length?])
                && datagram.from.port() == SERVER_PORT
            {
                return Ok(datagram.payload.to_vec());
            }
        }
    }

    /// Closes the sockets. Closing a packet socket takes up to 20 ms, so another thread does it,
    /// and the other tasks do not wait.
    fn close(self) {
        let packet_socket = self.packet.into_inner();
        tokio::task::spawn_blocking(move || drop(packet_socket));
    }
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

/// Adds a route of a lease, unless it exists. If another network has the default route, adds the
/// lease's behind it, as the ADD of an interface plugin does.
fn add_route(netlink: &Netlink, route: &Route) -> Result<(), Error> {
    match netlink.add_route(route) {
        Err(error) if error.is_exists() => {}
        outcome => return outcome,
    }
    let is_same = |existing: &Route| {
        existing.dst == route.dst
            && (existing.oif, existing.gw, existing.table_id()) == (route.oif, route.gw, route.table_id())
    };
    let is_default = route.dst.prefix() == 0;
    if !is_default || netlink.list_all_routes(Family::of(route.dst.address()))?.iter().any(is_same) {
        return Ok(());
    }
    netlink.add_default_route_behind(&[*route]).map(drop)
}
