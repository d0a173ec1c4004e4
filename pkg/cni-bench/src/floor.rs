//! Measures the floor: the time that the kernel alone needs for the attachment of an interface
//! plugin with host-local.
//!
//! This process makes the attachment itself, over one blocking socket per namespace, with the
//! fewest requests that lead to the same state. Nothing is checked, and nothing is undone after a
//! failure.

use std::fs::{self, File};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_ECHO, NLM_F_EXCL, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    InfoBridgePort, InfoData, InfoIpVlan, InfoKind, InfoMacVlan, InfoPortData, InfoVeth, InfoVlan, IpVlanMode,
    LinkAttribute, LinkFlags, LinkInfo, LinkMessage, MacVlanMode, State,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::{Socket, SocketAddr};
use nix::sched::{CloneFlags, setns};
use nix::sys::resource::UsageWho;

use crate::call::{Cost, cpu_time};
use crate::error::{Doing as _, Error, Result};
use crate::world::run;

/// The forwarding state of a bridge's port.
const FORWARDING: u8 = 3;
/// The multicast group of events about links (RTMGRP_LINK).
const LINK_EVENTS: u32 = 1;
/// No multicast group.
const NO_EVENTS: u32 = 0;

/// Makes attachments on the current node without a plugin.
#[derive(Debug)]
pub(crate) struct KernelAttacher {
    data: PathBuf,
    attachment: AttachmentKind,
    /// The number of the last attachment, from which its address is derived.
    last_number: std::cell::Cell<u32>,
}

/// A link that one request creates in the container's namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    /// A veth pair, of which one end stays on the node.
    Pair,
    /// On top of the node's `eth0`.
    Macvlan,
    /// On top of the node's `eth0`.
    Ipvlan,
    /// On top of the node's `eth0`.
    Vlan,
    Dummy,
}

/// What an attachment creates.
#[derive(Debug)]
enum AttachmentKind {
    /// A veth pair. Its end on the node is a port of the bridge with this index.
    Port(u32),
    /// A link, and the index of `eth0`.
    Link(Link, u32),
}

/// What [`KernelAttacher::add`] created, for [`KernelAttacher::del`].
#[derive(Debug)]
pub(crate) struct Made {
    link: u32,
    /// The connection to the link's namespace.
    connection: Connection,
    reservation: PathBuf,
}

/// The network namespace of a container.
struct Netns<'a> {
    path: &'a Path,
    file: File,
}

/// A netlink socket for routing in one network namespace.
#[derive(Debug)]
struct Connection(Socket);

impl KernelAttacher {
    /// Prepares attachments to a bridge: creates `br0` on the current node, up and with the
    /// gateway's address. `data` is the folder of the reservations.
    pub(crate) fn for_bridge(data: &Path) -> Result<KernelAttacher> {
        run(&["ip", "link", "add", "br0", "type", "bridge"])?;
        run(&["ip", "addr", "add", "10.1.0.1/16", "dev", "br0"])?;
        run(&["ip", "link", "set", "br0", "up"])?;
        let attachment = AttachmentKind::Port(Connection::open(NO_EVENTS)?.index_of("br0")?);
        Ok(KernelAttacher { data: data.to_owned(), attachment, last_number: std::cell::Cell::new(0) })
    }

    /// Prepares attachments with this kind of link. The current node must have an `eth0`. `data` is
    /// the folder of the reservations.
    pub(crate) fn for_link(data: &Path, link: Link) -> Result<KernelAttacher> {
        let attachment = AttachmentKind::Link(link, Connection::open(NO_EVENTS)?.index_of("eth0")?);
        Ok(KernelAttacher { data: data.to_owned(), attachment, last_number: std::cell::Cell::new(0) })
    }

    /// Makes an attachment with a new address, and returns what it created and its cost.
    pub(crate) fn add(&self, netns: &Path) -> Result<(Made, Cost)> {
        // The numbers repeat before the addresses leave 10.1.0.0/16.
        let number = self.last_number.get() % 60_000 + 1;
        self.last_number.set(number);
        // Host 1 is the gateway.
        let host = number + 10;
        let address = [10, 1, (host / 256) as u8, (host % 256) as u8];
        timed(|| self.attach(netns, address))
    }

    /// Reserves the address and creates the attachment in the namespace at `netns`.
    fn attach(&self, netns: &Path, address: [u8; 4]) -> Result<Made> {
        let reservation = self.reserve(address)?;
        let file = File::open(netns).doing(format_args!("failed to open {}", netns.display()))?;
        let netns = Netns { path: netns, file };
        let mac = [2, 0, address[0], address[1], address[2], address[3]];
        let (link, connection) = match self.attachment {
            AttachmentKind::Port(bridge) => attach_port(bridge, &netns, mac, address)?,
            AttachmentKind::Link(link, eth0) => attach_link(link, eth0, &netns, address)?,
        };
        Ok(Made { link, connection, reservation })
    }

    /// Reserves the address as host-local does, under its lock, and returns the reservation's file.
    fn reserve(&self, address: [u8; 4]) -> Result<PathBuf> {
        let address = Ipv4Addr::from(address).to_string();
        let path = self.data.join(&address);
        let write = || -> io::Result<()> {
            let lock = File::options().create(true).truncate(false).write(true).open(self.data.join("lock"))?;
            lock.lock()?;
            fs::write(&path, "floor\r\neth0")?;
            fs::write(self.data.join("last_reserved_ip.0"), &address)
        };
        write().doing(format_args!("failed to reserve {address} in {}", self.data.display()))?;
        Ok(path)
    }

    /// Removes an attachment. Returns the cost of the whole removal and that of its RTM_DELLINK.
    pub(crate) fn del(&self, made: Made) -> Result<(Cost, Cost)> {
        let (dellink_cost, whole_cost) = timed(|| {
            let request = RouteNetlinkMessage::DelLink(about(made.link, []));
            let (_, dellink_cost) = timed(|| made.connection.ask(request, 0))?;
            fs::remove_file(&made.reservation)
                .doing(format_args!("failed to remove {}", made.reservation.display()))?;
            Ok(dellink_cost)
        })?;
        Ok((whole_cost, dellink_cost))
    }
}

/// Makes an attachment as the bridge plugin does: creates a veth pair between bridge and container,
/// sets the alias of the node's end and the container's sysctls, configures the container's end,
/// waits until the node's end forwards, and announces the address. Returns the index of the node's
/// end and the connection to the node's namespace.
fn attach_port(bridge: u32, netns: &Netns<'_>, mac: [u8; 6], address: [u8; 4]) -> Result<(u32, Connection)> {
    let host = Connection::open(NO_EVENTS)?;
    // The index is known, but the plugin has to look it up, so this request is measured too.
    host.index_of("br0")?;
    let (outer, inner) = host.create_pair(Some(bridge), netns, Some(mac))?;
    // Subscribed before the container's end is set up, so that no change of the port is missed.
    let events = Connection::open(LINK_EVENTS)?;
    let alias = LinkAttribute::IfAlias("cni:benchnet/floor/eth0".to_owned());
    host.ask(RouteNetlinkMessage::SetLink(about(outer, [alias])), 0)?;
    let container = connect_inside(netns, || {
        for (sysctl, value) in [("ipv6/conf/eth0/accept_dad", "0"), ("ipv4/conf/eth0/arp_notify", "1")] {
            // A kernel without IPv6 has no `accept_dad`.
            let _ = fs::write(format!("/proc/sys/net/{sysctl}"), value);
        }
    })?;
    container.configure(inner, address)?;
    while !host.forwards(outer)? {
        events.0.recv_from_full().doing("failed to wait until br0 forwards packets of its port")?;
    }
    // Because of `arp_notify`, setting the MAC makes the kernel announce the address.
    let announce = about(inner, [LinkAttribute::Address(mac.to_vec())]);
    container.ask(RouteNetlinkMessage::SetLink(announce), 0)?;
    Ok((outer, host))
}

/// Makes an attachment with a link of this kind: creates the link in the container's namespace and
/// configures it. Returns the index of the link that a DEL removes, and the connection to the
/// namespace of that link.
fn attach_link(link: Link, eth0: u32, netns: &Netns<'_>, address: [u8; 4]) -> Result<(u32, Connection)> {
    // Not `eth0`: kernels before 6.2 refuse a name that the node has, even for another namespace.
    const NAME: &str = "floor0";
    let host = Connection::open(NO_EVENTS)?;
    let (kind, data) = match link {
        Link::Pair => {
            let (outer, inner) = host.create_pair(None, netns, None)?;
            connect_inside(netns, || ())?.configure(inner, address)?;
            return Ok((outer, host));
        }
        Link::Macvlan => (InfoKind::MacVlan, Some(InfoData::MacVlan(vec![InfoMacVlan::Mode(MacVlanMode::Bridge)]))),
        Link::Ipvlan => (InfoKind::IpVlan, Some(InfoData::IpVlan(vec![InfoIpVlan::Mode(IpVlanMode::L2)]))),
        Link::Vlan => (InfoKind::Vlan, Some(InfoData::Vlan(vec![InfoVlan::Id(5)]))),
        Link::Dummy => (InfoKind::Dummy, None),
    };
    let place = [LinkAttribute::IfName(NAME.to_owned()), LinkAttribute::NetNsFd(netns.file.as_raw_fd())];
    let mut message = about(0, place);
    if link != Link::Dummy {
        message.attributes.push(LinkAttribute::Link(eth0));
    }
    let info = [LinkInfo::Kind(kind)].into_iter().chain(data.map(LinkInfo::Data)).collect();
    message.attributes.push(LinkAttribute::LinkInfo(info));
    host.ask(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)?;
    let container = connect_inside(netns, || ())?;
    let index = container.index_of(NAME)?;
    container.configure(index, address)?;
    Ok((index, container))
}

/// Runs `work` in a namespace, and returns a connection to that namespace. Uses a new thread, so
/// that the calling thread stays in its own namespace.
fn connect_inside(netns: &Netns<'_>, work: impl FnOnce() + Send) -> Result<Connection> {
    let visit = || -> Result<Connection> {
        setns(&netns.file, CloneFlags::CLONE_NEWNET)
            .doing(format_args!("failed to enter the network namespace {}", netns.path.display()))?;
        work();
        Connection::open(NO_EVENTS)
    };
    thread::scope(|scope| {
        scope
            .spawn(visit)
            .join()
            .unwrap_or_else(|_| Err(Error::new("internal error: the thread in a network namespace panicked")))
    })
}

/// Runs `work`, and returns its result and its cost. The CPU time is that of this process.
fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, Cost)> {
    let before = cpu_time(UsageWho::RUSAGE_SELF)?;
    let begin = Instant::now();
    let value = work()?;
    let wall = begin.elapsed().as_secs_f64() * 1e3;
    Ok((value, Cost { wall, cpu: cpu_time(UsageWho::RUSAGE_SELF)? - before }))
}

/// Returns a message about the link with this index, or about one that its attributes describe if
/// the index is 0.
fn about(index: u32, attributes: impl Into<Vec<LinkAttribute>>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = attributes.into();
    message
}

/// Returns the first link in the kernel's answers.
fn first_link(answers: Vec<RouteNetlinkMessage>) -> Option<LinkMessage> {
    answers.into_iter().find_map(|answer| match answer {
        RouteNetlinkMessage::NewLink(link) => Some(link),
        _ => None,
    })
}

/// Whether this is the information about a bridge port in the forwarding state.
fn is_forwarding_port(info: &LinkInfo) -> bool {
    let LinkInfo::PortData(InfoPortData::BridgePort(port)) = info else { return false };
    port.iter().any(|entry| matches!(entry, InfoBridgePort::State(state) if u8::from(*state) == FORWARDING))
}

impl Connection {
    /// Opens a socket in the calling thread's namespace, subscribed to these multicast groups:
    /// [`LINK_EVENTS`] or [`NO_EVENTS`].
    fn open(groups: u32) -> Result<Connection> {
        let mut socket = Socket::new(netlink_sys::protocols::NETLINK_ROUTE).doing("failed to open a netlink socket")?;
        if groups != NO_EVENTS {
            socket.bind(&SocketAddr::new(0, groups)).doing("failed to subscribe to the kernel's link events")?;
        }
        Ok(Connection(socket))
    }

    /// Sends a request and returns the messages that arrive before its acknowledgement. Fails if
    /// the kernel refuses the request.
    fn ask(&self, message: RouteNetlinkMessage, flags: u16) -> Result<Vec<RouteNetlinkMessage>> {
        let mut message = NetlinkMessage::from(message);
        message.header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
        message.finalize();
        let name = format!("a request of type {}", message.header.message_type);
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.0.send(&bytes, 0).doing(format_args!("failed to send {name} to the kernel"))?;
        let mut answers = Vec::new();
        loop {
            let (bytes, _) =
                self.0.recv_from_full().doing(format_args!("failed to read the kernel's answer to {name}"))?;
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let reply = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)
                    .doing(format_args!("failed to decode the kernel's answer to {name}"))?;
                // Messages are aligned to 4 bytes, and a header has 16.
                let length = (reply.header.length as usize).next_multiple_of(4).clamp(16, rest.len());
                rest = rest.get(length..).unwrap_or_default();
                match reply.payload {
                    NetlinkPayload::InnerMessage(message) => answers.push(message),
                    NetlinkPayload::Error(error) => match error.code {
                        // The acknowledgement.
                        None => return Ok(answers),
                        Some(_) => return Err(Error::new(format!("the kernel refused {name}: {}", error.to_io()))),
                    },
                    _ => {}
                }
            }
        }
    }

    /// Asks the kernel for the link whose index or name `message` has, and returns it.
    fn find_link(&self, message: LinkMessage) -> Result<LinkMessage> {
        let answers = self.ask(RouteNetlinkMessage::GetLink(message), 0)?;
        first_link(answers).ok_or_else(|| Error::new("the kernel's answer to RTM_GETLINK has no link"))
    }

    /// Returns the link with this name.
    fn find_link_by_name(&self, name: &str) -> Result<LinkMessage> {
        let message = about(0, [LinkAttribute::IfName(name.to_owned())]);
        self.find_link(message).doing(format_args!("failed to find the link {name}"))
    }

    /// Returns the index of the link with this name.
    fn index_of(&self, name: &str) -> Result<u32> {
        Ok(self.find_link_by_name(name)?.header.index)
    }

    /// Creates a veth pair between this namespace and `netns`. Attaches this namespace's end to
    /// `bridge` if that is given, and sets `mac` on the end in `netns` if that is given. Returns
    /// the indexes of this namespace's end and of the end in `netns`.
    fn create_pair(&self, bridge: Option<u32>, netns: &Netns<'_>, mac: Option<[u8; 6]>) -> Result<(u32, u32)> {
        const NAME: &str = "vethfloor";
        let place = [LinkAttribute::IfName("eth0".to_owned()), LinkAttribute::NetNsFd(netns.file.as_raw_fd())];
        let mut peer = about(0, place);
        peer.attributes.extend(mac.map(|mac| LinkAttribute::Address(mac.to_vec())));
        let pair = InfoData::Veth(InfoVeth::Peer(peer));
        let info = LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Veth), LinkInfo::Data(pair)]);
        let mut host = about(0, [LinkAttribute::IfName(NAME.to_owned()), info]);
        (host.header.flags, host.header.change_mask) = (LinkFlags::Up, LinkFlags::Up);
        host.attributes.extend(bridge.map(LinkAttribute::Controller));
        let answers = self.ask(RouteNetlinkMessage::NewLink(host), NLM_F_CREATE | NLM_F_EXCL | NLM_F_ECHO)?;
        let created = match first_link(answers) {
            Some(link) => link,
            // Kernels before 6.2 do not answer with the created link.
            None => self.find_link_by_name(NAME)?,
        };
        // IFLA_LINK of one end of a veth is the index of the other end.
        let peer_index = created.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::Link(index) => Some(*index),
            _ => None,
        });
        let peer_index = peer_index
            .ok_or_else(|| Error::new("the kernel's answer to RTM_NEWLINK lacks the index of the other end"))?;
        Ok((created.header.index, peer_index))
    }

    /// Gives a link its address, sets it up, and adds the default route.
    fn configure(&self, index: u32, address: [u8; 4]) -> Result<()> {
        self.add_address(index, address)?;
        self.set_up(index)?;
        self.add_default_route(index)
    }

    /// Adds an address with the prefix length 16.
    fn add_address(&self, index: u32, address: [u8; 4]) -> Result<()> {
        let mut message = AddressMessage::default();
        (message.header.family, message.header.prefix_len, message.header.index) = (AddressFamily::Inet, 16, index);
        message.attributes.push(AddressAttribute::Local(address.into()));
        message.attributes.push(AddressAttribute::Address(address.into()));
        self.ask(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL).map(drop)
    }

    /// Sets a link up.
    fn set_up(&self, index: u32) -> Result<()> {
        let mut message = about(index, []);
        (message.header.flags, message.header.change_mask) = (LinkFlags::Up, LinkFlags::Up);
        self.ask(RouteNetlinkMessage::SetLink(message), 0).map(drop)
    }

    /// Adds the default route via 10.1.0.1 on this link.
    fn add_default_route(&self, index: u32) -> Result<()> {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.header.protocol = RouteProtocol::Boot;
        message.header.scope = RouteScope::Universe;
        message.header.kind = RouteType::Unicast;
        message.attributes.push(RouteAttribute::Gateway(RouteAddress::Inet([10, 1, 0, 1].into())));
        message.attributes.push(RouteAttribute::Oif(index));
        self.ask(RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | NLM_F_EXCL).map(drop)
    }

    /// Whether the link is up and is a bridge port in the forwarding state.
    fn forwards(&self, index: u32) -> Result<bool> {
        let link = self.find_link(about(index, []))?;
        let (mut is_up, mut is_forwarding) = (false, false);
        for attribute in &link.attributes {
            match attribute {
                LinkAttribute::OperState(state) => is_up = *state == State::Up,
                LinkAttribute::LinkInfo(infos) => is_forwarding = infos.iter().any(is_forwarding_port),
                _ => {}
            }
        }
        Ok(is_up && is_forwarding)
    }
}
