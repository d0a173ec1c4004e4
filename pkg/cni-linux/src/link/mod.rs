//! Looks up interfaces; the submodules create and change them.
//!
//! A [`Link`] is a snapshot, not a handle. Methods that change an interface take its index: a name
//! can be given to another interface, but an index is practically never reused before a reboot.
//! [`Link::up`] is the administrator's setting; whether the link works is [`Link::running`] and,
//! for a bridge's port, [`PortState::Forwarding`].

mod change;
mod create;
mod decode;
mod netns_id;
pub(crate) mod request;
mod stacked;

use std::fmt;

use netlink_packet_core::Emitable as _;
use netlink_packet_route::link::LinkHeader;

pub use change::LinkFlag;
pub(crate) use decode::decode;
pub(crate) use request::LinkRequest;
pub use stacked::{IpvlanMode, MacvlanMode, Stacked, StackedSpec};

use crate::bond::BondMode;
use crate::error::{Cause, Error, Result};
use crate::mac::Mac;
use crate::netlink::wire::attribute;
use crate::netlink::{Body, Kind, Netlink, Reply};

/// The attributes of a bridge for the spanning tree protocol, for the forwarding of frames to
/// reserved addresses, and for multicast snooping.
pub(crate) const IFLA_BR_STP_STATE: u16 = 5;
pub(crate) const IFLA_BR_GROUP_FWD_MASK: u16 = 9;
pub(crate) const IFLA_BR_MCAST_SNOOPING: u16 = 23;

/// The attribute of a bridge for VLAN filtering.
pub(crate) const IFLA_BR_VLAN_FILTERING: u16 = 7;

/// The attribute of a bridge's port for hairpin mode.
pub(crate) const IFLA_BRPORT_MODE: u16 = 4;

/// The attribute of a bridge's port for isolation.
pub(crate) const IFLA_BRPORT_ISOLATED: u16 = 33;

/// The attribute of a bridge's port for the suppression of neighbour requests.
pub(crate) const IFLA_BRPORT_NEIGH_SUPPRESS: u16 = 32;

/// The attribute of a VRF for its routing table.
const IFLA_VRF_TABLE: u16 = 1;

/// The longest name of an interface, in bytes.
pub const NAME_MAX: usize = 15;

/// An interface, as it was when the kernel was asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// The index, at least 1, unique in the namespace.
    pub index: u32,
    /// The name.
    pub name: String,
    /// The alternative names.
    pub altnames: Vec<String>,
    /// The kind of link.
    pub kind: LinkKind,
    /// The hardware address, if it is an Ethernet one.
    pub mac: Option<Mac>,
    /// The largest packet in bytes.
    pub mtu: u32,
    /// Whether it is administratively up.
    pub up: bool,
    /// Whether it works, according to the kernel.
    pub oper_state: OperState,
    /// Whether it works or, if the kernel does not report that (`lo`, and any link just created),
    /// whether it has the flags `IFF_UP` and `IFF_RUNNING`.
    pub running: bool,
    /// The number of users that keep promiscuous mode on: the administrator, the bridge that it is
    /// a port of, and each packet capture.
    pub promiscuity: u32,
    /// Whether the administrator has switched promiscuous mode on.
    pub promisc: bool,
    /// Whether the administrator has switched the reception of all multicast frames on.
    pub allmulti: bool,
    /// The length of the transmit queue in packets.
    pub txqlen: u32,
    /// The group, 0 by default.
    pub group: u32,
    /// The alias. For a link that these plugins created it names the [attachment](cni::attachment).
    pub alias: Option<String>,
    /// The index of the bridge, VRF or bond that it is attached to.
    pub master: Option<u32>,
    /// The index of a veth's other end or of the interface below, **in the namespace of that
    /// interface**.
    pub peer_index: Option<u32>,
    /// The ID that the namespace of `peer_index` has in this namespace, -1 if that namespace has no
    /// ID; `None` if `peer_index` is in this namespace.
    pub peer_netnsid: Option<i32>,
    /// The state and flags of a bridge's port, if it is one.
    pub port: Option<Port>,
    /// The hardware address that the device was built with; `None` for a virtual interface.
    pub permanent_mac: Option<Mac>,
    /// The hardware device below the interface as `BUS/NAME`, such as `pci/0000:00:1f.6`, if there
    /// is one.
    pub parent: Option<String>,
    /// The IPv4 sysctls of the link; `None` without IPv4, as on a link whose MTU is too small.
    pub ipv4: Option<Ipv4Sysctls>,
    /// The settings of a bridge, if it is one.
    pub bridge: Option<BridgeInfo>,
    /// The routing table of a VRF, if it is one.
    pub vrf_table: Option<u32>,
    /// The mode of a bond, if it is one.
    pub bond_mode: Option<BondMode>,
    /// The mode or VLAN ID, if it is a macvlan, ipvlan or vlan.
    pub stacked: Option<Stacked>,
}

/// Sysctls of a link below `net/ipv4/conf`.
///
/// They are in the kernel's message about the link. Opening their files takes longer the more
/// network namespaces the machine has: their folders of the same name are in one list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ipv4Sysctls {
    /// `forwarding`: whether the host forwards packets that arrive on the link.
    pub forwarding: bool,
    /// `route_localnet`: whether packets with a loopback address may pass the link.
    pub route_localnet: bool,
}

/// The kind of an interface, by its driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LinkKind {
    /// `lo`.
    Loopback,
    /// Hardware, or a driver that does not report a kind.
    #[default]
    Device,
    /// A software bridge.
    Bridge,
    /// One end of a veth pair.
    Veth,
    /// Another kind, by the kernel's name: `macvlan`, `vlan`, `dummy`, …
    Other(String),
}

impl fmt::Display for LinkKind {
    /// Writes the kind, mostly by the kernel's name.
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

/// Whether an interface works, according to the kernel (RFC 2863).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OperState {
    /// Unknown: some drivers never report it (`lo`), and every interface just created is in this
    /// state for a moment.
    #[default]
    Unknown,
    /// It does not work: it is down, has no carrier, or the interface below it does not work.
    Down,
    /// It waits for an external event, such as an authentication.
    Dormant,
    /// It works.
    Up,
}

/// The state and flags of a bridge's port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Port {
    /// Whether the bridge lets frames pass.
    pub state: PortState,
    /// Hairpin mode: whether a frame may leave through the port on which it arrived.
    pub hairpin: bool,
    /// Port isolation: whether the port exchanges no frames with other isolated ports. Always
    /// `false` on a kernel without the feature.
    pub isolated: bool,
    /// Whether the bridge answers neighbour requests for addresses behind the port that it knows,
    /// and does not send them to the port. Requests from a port that has this setting too are sent.
    /// Always `false` on a kernel without the feature.
    pub neigh_suppress: bool,
}

/// Whether a bridge's port lets frames pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PortState {
    /// Frames do not pass: the port or the bridge is down, or the port has no carrier.
    #[default]
    Disabled,
    /// Frames pass.
    Forwarding,
    /// Frames do not pass yet, because of the spanning tree protocol: listening, learning or
    /// blocking.
    HeldBack,
}

/// A bridge's own settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BridgeInfo {
    /// Whether it filters frames by VLAN. Always `false` on a kernel without the feature.
    pub vlan_filtering: bool,
    /// The VLAN that every new port is put into, untagged; 0 for none.
    pub default_pvid: u16,
    /// Whether it runs the spanning tree protocol, which blocks a new port for twice the forward
    /// delay.
    pub spanning_tree: bool,
    /// Which frames to reserved addresses it forwards: bit N is for `01:80:c2:00:00:0N`.
    pub group_fwd_mask: u16,
    /// Whether it sends multicast frames only to the ports that have asked for them. Always `false`
    /// on a kernel without the feature.
    pub mcast_snooping: bool,
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

    /// Whether it has a carrier, as far as the kernel has noticed.
    ///
    /// In state [`OperState::Unknown`], an interface that is up counts as having a carrier, except
    /// a veth. A bridge works in this state, and stays in it until the first loss of its carrier. A
    /// veth is in this state for a moment after its creation, before the kernel notices that the
    /// veth has no carrier.
    pub fn has_carrier(&self) -> bool {
        self.oper_state == OperState::Up || (self.oper_state == OperState::Unknown && self.up && !self.is_veth())
    }

    /// Whether it is an end of a veth pair.
    pub fn is_veth(&self) -> bool {
        self.kind == LinkKind::Veth
    }
}

impl Netlink {
    /// Returns the interface with this name, or with this alternative name of at most [`NAME_MAX`]
    /// bytes, in this connection's namespace; `None` if there is none.
    pub fn find_link(&self, name: &str) -> Result<Option<Link>> {
        // The kernel would refuse the request as malformed.
        if name.is_empty() || name.len() > NAME_MAX {
            return Ok(None);
        }
        self.get_link(LinkRequest::without_index().name(name))
            .map_err(|cause| Error::new(format_args!("failed to look up {name}"), cause))
    }

    /// Returns the interface with this index; `None` if there is none.
    pub fn find_link_by_index(&self, index: u32) -> Result<Option<Link>> {
        self.get_link(LinkRequest::new(index))
            .map_err(|cause| Error::new(format_args!("failed to look up interface {index}"), cause))
    }

    /// Returns the interface with this name, which must exist.
    ///
    /// # Errors
    /// `failed to find NAME: Link not found`, with [`Error::is_not_found`].
    pub fn link(&self, name: &str) -> Result<Link> {
        self.find_link(name)?.ok_or_else(|| Error::new(format_args!("failed to find {name}"), Cause::LinkNotFound))
    }

    /// Whether the namespace of a veth's other end is being torn down, or the veth itself no longer
    /// exists. With that namespace the kernel also removes the veth; on a busy machine that takes
    /// up to a second. Returns `false` if `link` has no other end in another namespace.
    pub fn peer_is_gone(&self, link: &Link) -> Result<bool> {
        let (Some(netns_id), Some(peer_index)) = (link.peer_netnsid, link.peer_index) else { return Ok(false) };
        // -1 is NETNSA_NSID_NOT_ASSIGNED: a namespace that is being torn down has lost its ID.
        if netns_id < 0 {
            return Ok(true);
        }
        let request = LinkRequest::new(peer_index).netns_id(netns_id).answer_filter(libc::RTEXT_FILTER_SKIP_STATS);
        match self.get(Kind::GetLink, &request) {
            Ok(_) => Ok(false),
            // EINVAL: no process and no file keeps the namespace with this ID any more.
            Err(cause) if cause.errno() == Some(libc::EINVAL) => Ok(true),
            // ENODEV: after `link` was read, the other end was deleted, which also deletes this
            // end, or moved, after which this end still exists.
            Err(cause) if cause.errno() == Some(libc::ENODEV) => Ok(self.find_link_by_index(link.index)?.is_none()),
            Err(cause) => Err(Error::new(format_args!("failed to look up the other end of {}", link.name), cause)),
        }
    }

    /// Returns a veth's other end in another namespace, without entering that namespace. Returns
    /// `None` if the other end is in this namespace, or if the kernel cannot look it up there: its
    /// namespace has no ID in this one, or the kernel is older than 4.15.
    pub fn find_peer(&self, link: &Link) -> Result<Option<Link>> {
        let (Some(netns_id), Some(peer_index)) = (link.peer_netnsid, link.peer_index) else { return Ok(None) };
        let request = LinkRequest::new(peer_index).netns_id(netns_id).answer_filter(libc::RTEXT_FILTER_SKIP_STATS);
        let reply = self
            .get(Kind::GetLink, &request)
            .map_err(|cause| Error::new(format_args!("failed to look up the other end of {}", link.name), cause))?;
        // An older kernel ignores the ID: it looks in this namespace, and its answer has no ID.
        let id = netns_id.to_ne_bytes();
        let is_of_namespace = |reply: &Reply| {
            parts(reply).is_some_and(|(_, encoded)| attribute(encoded, libc::IFLA_IF_NETNSID) == Some(id.as_slice()))
        };
        Ok(reply.filter(is_of_namespace).as_ref().and_then(decode))
    }

    /// Returns the other end of `link`, a veth in another namespace, if that end is in this
    /// connection's namespace. Returns `None` if `link` is not a veth.
    ///
    /// Compares indexes, which a process in the namespace of `link` can choose for its own links.
    /// [`is_end_in`](Netlink::is_end_in) asks the kernel.
    pub fn find_other_end(&self, link: &Link) -> Result<Option<Link>> {
        let Some(index) = link.peer_index.filter(|_| link.is_veth()) else { return Ok(None) };
        // An unrelated interface of this namespace may have the index.
        let is_other_end = |other: &Link| other.is_veth() && other.peer_index == Some(link.index);
        Ok(self.find_link_by_index(index)?.filter(is_other_end))
    }

    /// Returns every interface of the namespace.
    pub fn list_links(&self) -> Result<Vec<Link>> {
        self.list(None).map_err(|cause| Error::new("failed to list the interfaces", cause))
    }

    /// Returns the ports of a bridge or other master.
    pub fn list_ports(&self, bridge_index: u32) -> Result<Vec<Link>> {
        self.list(Some(bridge_index)).map_err(|cause| {
            Error::new(format_args!("failed to list the ports of {}", self.label(bridge_index)), cause)
        })
    }

    /// Returns the link that `request` describes by its index or name; `None` if there is none.
    pub(crate) fn get_link(&self, request: LinkRequest) -> Result<Option<Link>, Cause> {
        match self.get(Kind::GetLink, &request.answer_filter(libc::RTEXT_FILTER_SKIP_STATS)) {
            Ok(answer) => match answer.as_ref().and_then(decode) {
                Some(link) => Ok(Some(link)),
                None => Err(Cause::text("the kernel's answer cannot be decoded")),
            },
            Err(cause) if cause.errno() == Some(libc::ENODEV) => Ok(None),
            Err(cause) => Err(cause),
        }
    }

    /// Returns all links, or only the ports of `master`. Filters the answer, because an old kernel
    /// ignores the master in the request.
    fn list(&self, master: Option<u32>) -> Result<Vec<Link>, Cause> {
        let request = LinkRequest::without_index().optional(master, LinkRequest::master);
        let links = self.dump(Kind::GetLink, &request.answer_filter(libc::RTEXT_FILTER_SKIP_STATS))?;
        let links = links.iter().filter_map(decode);
        Ok(links.filter(|link| master.is_none() || link.master == master).collect())
    }

    /// Sends a request that changes something about the interface `index`, with `flags` in addition
    /// to `NLM_F_REQUEST` and `NLM_F_ACK`. After a failure, `describe_failure` gets the interface's
    /// name and returns the beginning of the error message.
    pub(crate) fn change(
        &self,
        kind: Kind,
        index: u32,
        body: &dyn Body,
        flags: u16,
        describe_failure: impl FnOnce(&str) -> String,
    ) -> Result<()> {
        match self.request(kind, body, flags) {
            Ok(_) => Ok(()),
            Err(cause) => Err(Error::new(describe_failure(&self.label(index)), cause)),
        }
    }

    /// Returns the name of an interface for an error message, or `interface INDEX` if it cannot be
    /// found. Asks the kernel, so callers call it only after a failure.
    pub(crate) fn label(&self, index: u32) -> String {
        match self.get_link(LinkRequest::new(index)) {
            Ok(Some(link)) => link.name,
            _ => format!("interface {index}"),
        }
    }
}

/// Splits a message about a link into its header and its encoded attributes. Returns `None` for
/// other and malformed messages.
pub(crate) fn parts(reply: &Reply) -> Option<(LinkHeader, &[u8])> {
    let body = reply.body(Kind::NewLink)?;
    let header = LinkHeader::parse(body).ok()?;
    let attributes = body.get(header.buffer_len()..)?;
    Some((header, attributes))
}
