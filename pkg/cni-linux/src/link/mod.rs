//! Interfaces: what they are (here) and how they are changed (`change`).
//!
//! A [`Link`] is a picture of one moment, never a handle: verbs take its index, because names can be given away and
//! indexes, within a boot, practically cannot. The newcomer's mistake: reading [`Link::up`] as "works". It is the
//! administrator's wish; [`Link::running`] and, for a bridge's port, [`PortState::Forwarding`] are the fact.

mod change;

use std::fmt;

use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::link::{
    BridgePortState, BridgeStpState, InfoBridge, InfoBridgePort, InfoData, InfoKind, InfoPortData, LinkAttribute,
    LinkExtentMask, LinkFlags, LinkInfo, LinkLayerType, LinkMessage, State,
};

pub use change::Promisc;

use crate::error::{Cause, Error, Result};
use crate::mac::Mac;
use crate::netlink::Netlink;

/// The longest name of an interface, in bytes.
pub const NAME_MAX: usize = 15;

/// One interface, as it was when it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The index, from 1; unique in its namespace.
    pub index: u32,
    /// The name.
    pub name: String,
    /// What made it.
    pub kind: LinkKind,
    /// The hardware address, if it is an Ethernet one.
    pub mac: Option<Mac>,
    /// The largest packet in bytes.
    pub mtu: u32,
    /// Whether it was told to be up.
    pub up: bool,
    /// Whether it works, by the kernel's judgement.
    pub oper_state: OperState,
    /// Whether it works or, where the kernel does not know (`lo`), is up. A link just made is not known either.
    pub running: bool,
    /// How many want all frames. A packet capture and a bridge's port count too.
    pub promiscuity: u32,
    /// Whether the administrator wants all frames.
    pub promisc: bool,
    /// Whether the administrator wants all multicast frames.
    pub allmulti: bool,
    /// The length of the transmit queue in packets.
    pub txqlen: u32,
    /// The alias: where ours carry their [mark](crate::mark).
    pub alias: Option<String>,
    /// The index of the bridge (or other device) it is a port of.
    pub master: Option<u32>,
    /// The index of a veth's other end, or of the interface below, **in that one's namespace**.
    pub peer_index: Option<u32>,
    /// This namespace's number for the one of `peer_index`; `None` if it is this one.
    pub peer_netnsid: Option<i32>,
    /// What it is as a port, if it is one of a bridge.
    pub port: Option<Port>,
    /// What it is as a bridge, if it is one.
    pub bridge: Option<BridgeInfo>,
}

/// What made an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// `lo`.
    Loopback,
    /// Hardware, or a driver that says nothing of itself.
    Device,
    /// A software bridge.
    Bridge,
    /// One end of a pair.
    Veth,
    /// Anything else, by the kernel's name: `macvlan`, `vlan`, `dummy`, …
    Other(String),
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LinkKind::Loopback => "loopback",
            LinkKind::Device => "device",
            LinkKind::Bridge => "bridge",
            LinkKind::Veth => "veth",
            LinkKind::Other(kind) => kind,
        })
    }
}

/// The kernel's judgement of whether an interface works (RFC 2863).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperState {
    /// Not judged: by drivers that never do (`lo`), and for a moment in every interface just made.
    Unknown,
    /// It does not: it is down, has no carrier, or the interface below does not work.
    Down,
    /// It waits for something outside, an authentication say.
    Dormant,
    /// It works.
    Up,
}

/// A bridge's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// Whether frames pass.
    pub state: PortState,
    /// Whether a frame may leave by the port it came in by.
    pub hairpin: bool,
    /// Whether it exchanges no frames with other isolated ports. Always false on a kernel without the feature.
    pub isolated: bool,
}

/// Whether a bridge's port lets frames pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// It, or the bridge, is down, or has no carrier.
    Disabled,
    /// Frames pass.
    Forwarding,
    /// The spanning tree protocol holds it back: listening, learning or blocking.
    HeldBack,
}

/// A bridge's own settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BridgeInfo {
    /// Whether it tells VLANs apart. `false` too if the kernel cannot.
    pub vlan_filtering: bool,
    /// The VLAN every new port is put into, untagged; 0 for none. A port just added is in no other.
    pub default_pvid: u16,
    /// Whether it runs a spanning tree, which holds a new port back for twice the forward delay.
    pub spanning_tree: bool,
}

impl Link {
    /// Whether it is a bridge.
    pub fn is_bridge(&self) -> bool {
        self.kind == LinkKind::Bridge
    }

    /// Whether it is an end of a veth pair.
    pub fn is_veth(&self) -> bool {
        self.kind == LinkKind::Veth
    }
}

impl Netlink {
    /// The interface of that name (or alternative name) in this connection's namespace.
    pub fn find_link(&self, name: &str) -> Result<Option<Link>> {
        // The kernel refuses such a name as a malformed question; there can be none.
        if name.is_empty() || name.len() > NAME_MAX {
            return Ok(None);
        }
        self.get_link(0, Some(name)).map_err(|cause| Error::new(format_args!("failed to look up {name}"), cause))
    }

    /// The interface of that index.
    pub fn find_link_by_index(&self, index: u32) -> Result<Option<Link>> {
        self.get_link(index, None)
            .map_err(|cause| Error::new(format_args!("failed to look up interface {index}"), cause))
    }

    /// The interface of that name, which must exist.
    ///
    /// # Errors
    /// `failed to find NAME: Link not found`, with [`Error::is_not_found`].
    pub fn link(&self, name: &str) -> Result<Link> {
        self.find_link(name)?.ok_or_else(|| Error::new(format_args!("failed to find {name}"), Cause::LinkNotFound))
    }

    /// Every interface of the namespace.
    pub fn list_links(&self) -> Result<Vec<Link>> {
        self.list(None).map_err(|cause| Error::new("failed to list the interfaces", cause))
    }

    /// The ports of a bridge (or of any other master).
    pub fn list_ports(&self, bridge_index: u32) -> Result<Vec<Link>> {
        self.list(Some(bridge_index)).map_err(|cause| {
            Error::new(format_args!("failed to list the ports of {}", self.label(bridge_index)), cause)
        })
    }

    /// One link by name or index.
    pub(crate) fn get_link(&self, index: u32, name: Option<&str>) -> Result<Option<Link>, Cause> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.attributes.extend(name.map(|name| LinkAttribute::IfName(name.to_owned())));
        message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
        match self.get(RouteNetlinkMessage::GetLink(message)) {
            Ok(answer) => match answer.and_then(decode) {
                Some(link) => Ok(Some(link)),
                None => Err(Cause::text("the kernel's answer could not be understood")),
            },
            Err(cause) if cause.errno() == Some(libc::ENODEV) => Ok(None),
            Err(cause) => Err(cause),
        }
    }

    fn list(&self, master: Option<u32>) -> Result<Vec<Link>, Cause> {
        let mut message = LinkMessage::default();
        message.attributes.extend(master.map(LinkAttribute::Controller));
        message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
        let links = self.dump(RouteNetlinkMessage::GetLink(message))?;
        let links = links.into_iter().filter_map(decode);
        Ok(links.filter(|link| master.is_none() || link.master == master).collect())
    }

    /// The name of an interface for an error's text; asked for only when there is an error.
    pub(crate) fn label(&self, index: u32) -> String {
        match self.get_link(index, None) {
            Ok(Some(link)) => link.name,
            _ => format!("interface {index}"),
        }
    }
}

/// A link out of an answer. `None` for other messages.
pub(crate) fn decode(message: RouteNetlinkMessage) -> Option<Link> {
    let RouteNetlinkMessage::NewLink(LinkMessage { header, attributes, .. }) = message else { return None };
    let mut link = Link {
        index: header.index,
        name: String::new(),
        kind: LinkKind::Device,
        mac: None,
        mtu: 0,
        up: header.flags.contains(LinkFlags::Up),
        oper_state: OperState::Unknown,
        running: false,
        promiscuity: 0,
        promisc: header.flags.contains(LinkFlags::Promisc),
        allmulti: header.flags.contains(LinkFlags::Allmulti),
        txqlen: 0,
        alias: None,
        master: None,
        peer_index: None,
        peer_netnsid: None,
        port: None,
        bridge: None,
    };
    if header.link_layer_type == LinkLayerType::Loopback {
        link.kind = LinkKind::Loopback;
    }
    for attribute in attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name = name,
            LinkAttribute::Address(bytes) => link.mac = Mac::from_slice(&bytes),
            LinkAttribute::Mtu(mtu) => link.mtu = mtu,
            LinkAttribute::OperState(state) => link.oper_state = judgement(state),
            LinkAttribute::Promiscuity(count) => link.promiscuity = count,
            LinkAttribute::TxQueueLen(length) => link.txqlen = length,
            LinkAttribute::IfAlias(alias) => link.alias = Some(alias),
            LinkAttribute::Controller(index) => link.master = Some(index),
            LinkAttribute::Link(index) => link.peer_index = Some(index),
            // -1: the namespace has no number here.
            LinkAttribute::LinkNetNsId(id) => link.peer_netnsid = Some(id),
            LinkAttribute::LinkInfo(infos) => decode_info(&mut link, infos),
            _ => {}
        }
    }
    link.running = match link.oper_state {
        OperState::Up => true,
        OperState::Unknown => link.up && header.flags.contains(LinkFlags::Running),
        OperState::Down | OperState::Dormant => false,
    };
    Some(link)
}

fn judgement(state: State) -> OperState {
    match state {
        State::Up => OperState::Up,
        State::Dormant => OperState::Dormant,
        State::Unknown | State::Other(_) => OperState::Unknown,
        _ => OperState::Down,
    }
}

fn decode_info(link: &mut Link, infos: Vec<LinkInfo>) {
    for info in infos {
        match info {
            LinkInfo::Kind(InfoKind::Bridge) => link.kind = LinkKind::Bridge,
            LinkInfo::Kind(InfoKind::Veth) => link.kind = LinkKind::Veth,
            LinkInfo::Kind(kind) => link.kind = LinkKind::Other(kind.to_string()),
            LinkInfo::Data(InfoData::Bridge(options)) => {
                let mut bridge = BridgeInfo { vlan_filtering: false, default_pvid: 0, spanning_tree: false };
                for option in options {
                    match option {
                        InfoBridge::VlanFiltering(on) => bridge.vlan_filtering = on,
                        InfoBridge::VlanDefaultPvid(vid) => bridge.default_pvid = vid,
                        InfoBridge::StpState(state) => bridge.spanning_tree = state != BridgeStpState::Disabled,
                        _ => {}
                    }
                }
                link.bridge = Some(bridge);
            }
            LinkInfo::PortData(InfoPortData::BridgePort(options)) => {
                let mut port = Port { state: PortState::Disabled, hairpin: false, isolated: false };
                for option in options {
                    match option {
                        InfoBridgePort::State(BridgePortState::Disabled) => port.state = PortState::Disabled,
                        InfoBridgePort::State(BridgePortState::Forwarding) => port.state = PortState::Forwarding,
                        InfoBridgePort::State(_) => port.state = PortState::HeldBack,
                        InfoBridgePort::HairpinMode(on) => port.hairpin = on,
                        InfoBridgePort::Isolated(on) => port.isolated = on,
                        _ => {}
                    }
                }
                link.port = Some(port);
            }
            _ => {}
        }
    }
}
