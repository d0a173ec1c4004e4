//! Interfaces: what they are (here), how they are created (`create`) and changed (`change`);
//! `stacked` is about those on top of another one.
//!
//! A [`Link`] is a picture of one moment, never a handle: verbs take its index, because names can
//! be given away and indexes, within a boot, practically cannot. [`Link::up`] is the
//! administrator's setting; whether the link works is [`Link::running`] and, for a bridge's port,
//! [`PortState::Forwarding`].

mod change;
mod create;
pub(crate) mod request;
mod stacked;

use std::fmt;

use netlink_packet_core::Emitable as _;
use netlink_packet_route::link::{BridgePortState, LinkFlags, LinkHeader, LinkLayerType, State};

pub use change::LinkFlag;
pub(crate) use request::LinkRequest;
pub use stacked::{IpvlanMode, MacvlanMode, Stacked, StackedSpec};

use crate::error::{Cause, Error, Reason, Result};
use crate::mac::Mac;
use crate::netlink::{Kind, Netlink, Reply, attributes, text};

/// In the options of a bridge: whether it filters by VLAN.
pub(crate) const IFLA_BR_VLAN_FILTERING: u16 = 7;

/// In the options of a bridge's port: hairpin mode.
pub(crate) const IFLA_BRPORT_MODE: u16 = 4;

/// In the options of a bridge's port: isolation.
pub(crate) const IFLA_BRPORT_ISOLATED: u16 = 33;

/// In the options of a VRF: its routing table.
const IFLA_VRF_TABLE: u16 = 1;

/// The longest name of an interface, in bytes.
pub const NAME_MAX: usize = 15;

/// One interface, as it was when it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The index, from 1; unique in its namespace.
    pub index: u32,
    /// The name.
    pub name: String,
    /// The kind of link.
    pub kind: LinkKind,
    /// The hardware address, if it is an Ethernet one.
    pub mac: Option<Mac>,
    /// The largest packet in bytes.
    pub mtu: u32,
    /// Whether it is administratively up.
    pub up: bool,
    /// Whether it works, by the kernel's judgement.
    pub oper_state: OperState,
    /// Whether it works or, where the kernel does not know (`lo`), is up. A link just made is not
    /// known either.
    pub running: bool,
    /// How many want all frames. A packet capture and a bridge's port count too.
    pub promiscuity: u32,
    /// Whether the administrator wants all frames.
    pub promisc: bool,
    /// Whether the administrator wants all multicast frames.
    pub allmulti: bool,
    /// The length of the transmit queue in packets.
    pub txqlen: u32,
    /// The group; 0 unless it was given one.
    pub group: u32,
    /// The alias; of a link of these plugins it names the [attachment](cni::attachment).
    pub alias: Option<String>,
    /// The index of the bridge (or other device) it is a port of.
    pub master: Option<u32>,
    /// The index of a veth's other end, or of the interface below, **in that one's namespace**.
    pub peer_index: Option<u32>,
    /// This namespace's number for the one of `peer_index`; `None` if it is this one.
    pub peer_netnsid: Option<i32>,
    /// Its properties as a port of a bridge, if it is one.
    pub port: Option<Port>,
    /// Its properties as a bridge, if it is one.
    pub bridge: Option<BridgeInfo>,
    /// The routing table of a VRF, if it is one.
    pub vrf_table: Option<u32>,
    /// Its properties on top of a master, if it is of such a kind.
    pub stacked: Option<Stacked>,
}

/// The kind of an interface: the driver that made it.
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
    /// Whether it exchanges no frames with other isolated ports. Always false on a kernel without
    /// the feature.
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
    /// Whether it filters by VLAN. `false` too if the kernel cannot.
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

    /// Whether it is an intermediate functional block.
    pub fn is_ifb(&self) -> bool {
        self.kind == LinkKind::Other("ifb".to_owned())
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
        self.find_link(name)?.ok_or_else(|| Error::new(format_args!("failed to find {name}"), Reason::LinkNotFound))
    }

    /// Whether the namespace of a veth's other end is being torn down. The kernel removes the link
    /// itself a moment later; on a busy machine that takes a second.
    pub fn peer_is_gone(&self, link: &Link) -> Result<bool> {
        let (Some(number), Some(index)) = (link.peer_netnsid, link.peer_index) else { return Ok(false) };
        // NETNSA_NSID_NOT_ASSIGNED: the namespace has lost its ID, and gets no new one.
        if number < 0 {
            return Ok(true);
        }
        let request = LinkRequest::new(index).netns_id(number).answer_filter(libc::RTEXT_FILTER_SKIP_STATS);
        match self.get(Kind::GetLink, &request) {
            // The ID of a namespace that no process and no file holds any more.
            Err(cause) if cause.errno() == Some(libc::EINVAL) => Ok(true),
            // The other end has gone since this one was read, and this one with it, or was moved.
            Err(cause) if cause.errno() == Some(libc::ENODEV) => Ok(self.find_link_by_index(link.index)?.is_none()),
            Err(cause) => Err(Error::new(format_args!("failed to look up the other end of {}", link.name), cause)),
            Ok(_) => Ok(false),
        }
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
        let request = LinkRequest::new(index).optional(name, LinkRequest::name);
        match self.get(Kind::GetLink, &request.answer_filter(libc::RTEXT_FILTER_SKIP_STATS)) {
            Ok(answer) => match answer.as_ref().and_then(decode) {
                Some(link) => Ok(Some(link)),
                None => Err(Cause::text("the kernel's answer could not be understood")),
            },
            Err(cause) if cause.errno() == Some(libc::ENODEV) => Ok(None),
            Err(cause) => Err(cause),
        }
    }

    fn list(&self, master: Option<u32>) -> Result<Vec<Link>, Cause> {
        let request = LinkRequest::new(0).optional(master, LinkRequest::master);
        let links = self.dump(Kind::GetLink, &request.answer_filter(libc::RTEXT_FILTER_SKIP_STATS))?;
        let links = links.iter().filter_map(decode);
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

/// Header and attributes of a link in an answer. `None` for other messages.
pub(crate) fn parts(reply: &Reply) -> Option<(LinkHeader, &[u8])> {
    let body = reply.body(Kind::NewLink)?;
    let header = LinkHeader::parse(body).ok()?;
    let attributes = body.get(header.buffer_len()..)?;
    Some((header, attributes))
}

/// A link out of an answer. `None` for other messages.
///
/// By hand: the packet crate reads everything that any kind of link can say of itself, and fails
/// altogether where one attribute is not as it expects. See ARCHITECTURE.md, "Dependencies".
pub(crate) fn decode(reply: &Reply) -> Option<Link> {
    let (header, all) = parts(reply)?;
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
        group: 0,
        alias: None,
        master: None,
        peer_index: None,
        peer_netnsid: None,
        port: None,
        bridge: None,
        vrf_table: None,
        stacked: None,
    };
    if header.link_layer_type == LinkLayerType::Loopback {
        link.kind = LinkKind::Loopback;
    }
    for (kind, value) in attributes(all) {
        match kind {
            libc::IFLA_IFNAME => link.name = text(value),
            libc::IFLA_ADDRESS => link.mac = Mac::from_slice(value),
            libc::IFLA_MTU => link.mtu = number(value)?,
            libc::IFLA_OPERSTATE => link.oper_state = judgement(State::from(*value.first()?)),
            libc::IFLA_PROMISCUITY => link.promiscuity = number(value)?,
            libc::IFLA_TXQLEN => link.txqlen = number(value)?,
            libc::IFLA_GROUP => link.group = number(value)?,
            libc::IFLA_IFALIAS => link.alias = Some(text(value)),
            libc::IFLA_MASTER => link.master = Some(number(value)?),
            libc::IFLA_LINK => link.peer_index = Some(number(value)?),
            // -1: the namespace has no number here.
            libc::IFLA_LINK_NETNSID => link.peer_netnsid = Some(number(value)?.cast_signed()),
            libc::IFLA_LINKINFO => decode_info(&mut link, value),
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

fn number(value: &[u8]) -> Option<u32> {
    value.first_chunk().copied().map(u32::from_ne_bytes)
}

/// Decodes IFLA_LINKINFO: the link's kind, and its attributes as a bridge, VRF, stacked link or
/// bridge port.
fn decode_info(link: &mut Link, infos: &[u8]) {
    // The kernel sends each KIND before its DATA, and KIND decides how DATA is decoded.
    let mut is_port = false;
    for (kind, value) in attributes(infos) {
        match kind {
            libc::IFLA_INFO_KIND => {
                link.kind = match text(value).as_str() {
                    "bridge" => LinkKind::Bridge,
                    "veth" => LinkKind::Veth,
                    other => LinkKind::Other(other.to_owned()),
                };
            }
            libc::IFLA_INFO_DATA => match &link.kind {
                LinkKind::Bridge => link.bridge = Some(decode_bridge(value)),
                LinkKind::Other(kind) if kind == "vrf" => {
                    link.vrf_table =
                        attributes(value).find(|(kind, _)| *kind == IFLA_VRF_TABLE).and_then(|(_, id)| number(id));
                }
                LinkKind::Other(kind) => link.stacked = Stacked::decode(kind, value),
                _ => {}
            },
            libc::IFLA_INFO_SLAVE_KIND => is_port = text(value) == "bridge",
            libc::IFLA_INFO_SLAVE_DATA if is_port => link.port = Some(decode_port(value)),
            _ => {}
        }
    }
}

fn decode_bridge(options: &[u8]) -> BridgeInfo {
    const IFLA_BR_STP_STATE: u16 = 5;
    const IFLA_BR_VLAN_DEFAULT_PVID: u16 = 39;
    let mut bridge = BridgeInfo { vlan_filtering: false, default_pvid: 0, spanning_tree: false };
    for (kind, value) in attributes(options) {
        match kind {
            IFLA_BR_VLAN_FILTERING => bridge.vlan_filtering = is_on(value),
            IFLA_BR_VLAN_DEFAULT_PVID => {
                bridge.default_pvid = value.first_chunk().copied().map_or(0, u16::from_ne_bytes);
            }
            IFLA_BR_STP_STATE => bridge.spanning_tree = is_on(value),
            _ => {}
        }
    }
    bridge
}

fn decode_port(options: &[u8]) -> Port {
    const IFLA_BRPORT_STATE: u16 = 1;
    let mut port = Port { state: PortState::Disabled, hairpin: false, isolated: false };
    for (kind, value) in attributes(options) {
        match kind {
            IFLA_BRPORT_STATE => {
                port.state = match value.first().copied().map(BridgePortState::from) {
                    None | Some(BridgePortState::Disabled) => PortState::Disabled,
                    Some(BridgePortState::Forwarding) => PortState::Forwarding,
                    Some(_) => PortState::HeldBack,
                };
            }
            IFLA_BRPORT_MODE => port.hairpin = is_on(value),
            IFLA_BRPORT_ISOLATED => port.isolated = is_on(value),
            _ => {}
        }
    }
    port
}

/// Whether any of its bytes says so: switches have one byte, the spanning tree's has four.
fn is_on(value: &[u8]) -> bool {
    value.iter().any(|byte| *byte != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = u16::try_from(4 + value.len()).unwrap().to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    /// A message that a kernel without VLAN filtering never sends.
    #[test]
    fn a_bridge_and_a_port_are_read_out_of_a_links_own_attributes() {
        const NESTED: u16 = 0x8000;
        let bridge = [attribute(7, &[1]), attribute(39, &[0x64, 0]), attribute(5, &[1, 0, 0, 0])].concat();
        let port = [attribute(1, &[2]), attribute(4, &[1]), attribute(33, &[1])].concat();
        let infos = [
            attribute(libc::IFLA_INFO_SLAVE_KIND, b"bridge\0"),
            attribute(libc::IFLA_INFO_SLAVE_DATA, &port),
            attribute(libc::IFLA_INFO_KIND, b"bridge\0"),
            attribute(libc::IFLA_INFO_DATA | NESTED, &bridge),
        ];
        let mut body = vec![0; 16];
        body[4..8].copy_from_slice(&7_u32.to_ne_bytes());
        body.extend(attribute(libc::IFLA_IFNAME, b"br7\0"));
        body.extend(attribute(libc::IFLA_LINKINFO, &infos.concat()));
        let link = decode(&Reply::new(Kind::NewLink, &body)).unwrap();
        assert_eq!((link.index, link.name.as_str(), &link.kind), (7, "br7", &LinkKind::Bridge));
        assert_eq!(link.bridge, Some(BridgeInfo { vlan_filtering: true, default_pvid: 100, spanning_tree: true }));
        assert_eq!(link.port, Some(Port { state: PortState::HeldBack, hairpin: true, isolated: true }));
        // Cut off anywhere: no panic, and never another link.
        for end in 0..body.len() {
            let cut = decode(&Reply::new(Kind::NewLink, &body[..end]));
            assert!(cut.is_none_or(|cut| cut.index == 7 && "br7".starts_with(&cut.name)), "{end}");
        }
        assert_eq!(decode(&Reply::new(Kind::DelLink, &body)), None);
    }
}
