//! Decodes the kernel's messages about links.

use netlink_packet_route::link::{BridgePortState, LinkFlags, LinkLayerType, State};

use super::{
    BridgeInfo, IFLA_BR_GROUP_FWD_MASK, IFLA_BR_MCAST_SNOOPING, IFLA_BR_STP_STATE, IFLA_BR_VLAN_FILTERING,
    IFLA_BRPORT_ISOLATED, IFLA_BRPORT_MODE, IFLA_BRPORT_NEIGH_SUPPRESS, IFLA_VRF_TABLE, Ipv4Sysctls, Link, LinkKind,
    OperState, Port, PortState, Stacked, parts,
};
use crate::bond::BondMode;
use crate::mac::Mac;
use crate::netlink::wire::attribute;
use crate::netlink::{Reply, attributes, text};

/// The attribute of a link for the hardware address that the device was built with.
const IFLA_PERM_ADDRESS: u16 = 54;

/// The attributes of a link for the name and the bus of the hardware device below it.
const IFLA_PARENT_DEV_NAME: u16 = 56;
const IFLA_PARENT_DEV_BUS_NAME: u16 = 57;

/// Decodes a message about a link. Returns `None` for other messages, and for malformed attributes.
///
/// The packet crate's decoder is not used: it decodes every attribute of every kind of link, and
/// fails if one of these attributes has an unexpected form. See ARCHITECTURE.md, "Dependencies".
pub(crate) fn decode(reply: &Reply) -> Option<Link> {
    let (header, encoded) = parts(reply)?;
    let mut link = Link {
        index: header.index,
        up: header.flags.contains(LinkFlags::Up),
        promisc: header.flags.contains(LinkFlags::Promisc),
        allmulti: header.flags.contains(LinkFlags::Allmulti),
        ..Link::default()
    };
    if header.link_layer_type == LinkLayerType::Loopback {
        link.kind = LinkKind::Loopback;
    }
    let (mut parent_bus, mut parent_name) = (None, None);
    for (kind, value) in attributes(encoded) {
        match kind {
            IFLA_PERM_ADDRESS => link.permanent_mac = Mac::from_slice(value),
            IFLA_PARENT_DEV_NAME => parent_name = Some(text(value)),
            IFLA_PARENT_DEV_BUS_NAME => parent_bus = Some(text(value)),
            libc::IFLA_IFNAME => link.name = text(value),
            libc::IFLA_ADDRESS => link.mac = Mac::from_slice(value),
            libc::IFLA_MTU => link.mtu = native_u32(value)?,
            libc::IFLA_OPERSTATE => link.oper_state = oper_state(State::from(*value.first()?)),
            libc::IFLA_PROMISCUITY => link.promiscuity = native_u32(value)?,
            libc::IFLA_TXQLEN => link.txqlen = native_u32(value)?,
            libc::IFLA_GROUP => link.group = native_u32(value)?,
            libc::IFLA_IFALIAS => link.alias = Some(text(value)),
            libc::IFLA_MASTER => link.master = Some(native_u32(value)?),
            libc::IFLA_LINK => link.peer_index = Some(native_u32(value)?),
            libc::IFLA_LINK_NETNSID => link.peer_netnsid = Some(native_u32(value)?.cast_signed()),
            libc::IFLA_LINKINFO => decode_info(&mut link, value),
            libc::IFLA_AF_SPEC => link.ipv4 = decode_ipv4(value),
            libc::IFLA_PROP_LIST => link.altnames = attributes(value).map(|(_, name)| text(name)).collect(),
            _ => {}
        }
    }
    link.parent = parent_name.map(|name| format!("{}/{name}", parent_bus.unwrap_or_default()));
    link.running = match link.oper_state {
        OperState::Up => true,
        OperState::Unknown => link.up && header.flags.contains(LinkFlags::Running),
        OperState::Down | OperState::Dormant => false,
    };
    Some(link)
}

/// Converts the packet crate's operational state. States that [`OperState`] lacks count as down,
/// unknown numbers as unknown.
fn oper_state(state: State) -> OperState {
    match state {
        State::Up => OperState::Up,
        State::Dormant => OperState::Dormant,
        State::Unknown | State::Other(_) => OperState::Unknown,
        _ => OperState::Down,
    }
}

/// Decodes a native-endian number; `None` if there are fewer than 4 bytes.
pub(super) fn native_u32(value: &[u8]) -> Option<u32> {
    value.first_chunk().copied().map(u32::from_ne_bytes)
}

/// Decodes the IPv4 part of IFLA_AF_SPEC: the values of all sysctls, in the order of the kernel's
/// numbers, which begin with 1.
fn decode_ipv4(families: &[u8]) -> Option<Ipv4Sysctls> {
    const AF_INET: u16 = libc::AF_INET.unsigned_abs() as u16;
    const IFLA_INET_CONF: u16 = 1;
    const IPV4_DEVCONF_FORWARDING: usize = 1;
    const IPV4_DEVCONF_ROUTE_LOCALNET: usize = 26;
    let (values, _) = attribute(attribute(families, AF_INET)?, IFLA_INET_CONF)?.as_chunks::<4>();
    let is_on = |number: usize| values.get(number - 1).is_some_and(|value| u32::from_ne_bytes(*value) != 0);
    Some(Ipv4Sysctls { forwarding: is_on(IPV4_DEVCONF_FORWARDING), route_localnet: is_on(IPV4_DEVCONF_ROUTE_LOCALNET) })
}

/// Decodes IFLA_LINKINFO: the link's kind, and its attributes as a bridge, VRF, stacked link or
/// bridge port.
fn decode_info(link: &mut Link, infos: &[u8]) {
    // The kernel sends each KIND before its DATA, and KIND decides how DATA is decoded.
    let mut is_bridge_port = false;
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
                    link.vrf_table = attribute(value, IFLA_VRF_TABLE).and_then(native_u32);
                }
                LinkKind::Other(kind) if kind == "bond" => link.bond_mode = BondMode::decode(value),
                LinkKind::Other(kind) => link.stacked = Stacked::decode(kind, value),
                _ => {}
            },
            libc::IFLA_INFO_SLAVE_KIND => is_bridge_port = text(value) == "bridge",
            libc::IFLA_INFO_SLAVE_DATA if is_bridge_port => link.port = Some(decode_port(value)),
            _ => {}
        }
    }
}

/// Decodes the options of a bridge (`IFLA_INFO_DATA`). A missing option is off or 0.
fn decode_bridge(options: &[u8]) -> BridgeInfo {
    const IFLA_BR_VLAN_DEFAULT_PVID: u16 = 39;
    let native_u16 = |value: &[u8]| value.first_chunk().copied().map_or(0, u16::from_ne_bytes);
    let mut bridge = BridgeInfo::default();
    for (kind, value) in attributes(options) {
        match kind {
            IFLA_BR_VLAN_FILTERING => bridge.vlan_filtering = is_on(value),
            IFLA_BR_VLAN_DEFAULT_PVID => bridge.default_pvid = native_u16(value),
            IFLA_BR_STP_STATE => bridge.spanning_tree = is_on(value),
            IFLA_BR_GROUP_FWD_MASK => bridge.group_fwd_mask = native_u16(value),
            IFLA_BR_MCAST_SNOOPING => bridge.mcast_snooping = is_on(value),
            _ => {}
        }
    }
    bridge
}

/// Decodes the options of a bridge's port (`IFLA_INFO_SLAVE_DATA`). A missing state is
/// [`PortState::Disabled`], any other missing option is off.
fn decode_port(options: &[u8]) -> Port {
    const IFLA_BRPORT_STATE: u16 = 1;
    let mut port = Port::default();
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
            IFLA_BRPORT_NEIGH_SUPPRESS => port.neigh_suppress = is_on(value),
            _ => {}
        }
    }
    port
}

/// Whether an option is on: any byte is not 0. An option has one byte, except that of the spanning
/// tree protocol, which has four.
fn is_on(value: &[u8]) -> bool {
    value.iter().any(|byte| *byte != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::{Kind, Netlink};
    use crate::sysctl;
    use crate::testing::in_new_netns;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = u16::try_from(4 + value.len()).unwrap().to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn the_ipv4_sysctls_of_a_link_are_in_its_message() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            for (forwarding, route_localnet) in [(false, false), (true, false), (false, true), (true, true)] {
                for (name, is_on) in [("forwarding", forwarding), ("route_localnet", route_localnet)] {
                    sysctl::write(&format!("net/ipv4/conf/lo/{name}"), if is_on { "1" } else { "0" }).unwrap();
                }
                let lo = netlink.find_link("lo").unwrap().unwrap();
                assert_eq!(lo.ipv4, Some(Ipv4Sysctls { forwarding, route_localnet }));
            }
        });
    }

    /// Decodes a message made here, because a kernel without VLAN filtering never sends one.
    #[test]
    fn a_bridge_and_a_port_are_read_out_of_a_links_own_attributes() {
        const NESTED: u16 = 0x8000;
        let bridge = [attribute(7, &[1]), attribute(39, &[0x64, 0]), attribute(5, &[1, 0, 0, 0])].concat();
        let bridge = [bridge, attribute(9, &0x4008_u16.to_ne_bytes()), attribute(23, &[1])].concat();
        let port = [attribute(1, &[2]), attribute(4, &[1]), attribute(33, &[1]), attribute(32, &[1])].concat();
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
        let expected = BridgeInfo {
            vlan_filtering: true,
            default_pvid: 100,
            spanning_tree: true,
            group_fwd_mask: 0x4008,
            mcast_snooping: true,
        };
        assert_eq!(link.bridge, Some(expected));
        let expected = Port { state: PortState::HeldBack, hairpin: true, isolated: true, neigh_suppress: true };
        assert_eq!(link.port, Some(expected));
        // A message that is cut off anywhere causes no panic and is not taken for another link.
        for end in 0..body.len() {
            let cut = decode(&Reply::new(Kind::NewLink, &body[..end]));
            assert!(cut.is_none_or(|cut| cut.index == 7 && "br7".starts_with(&cut.name)), "{end}");
        }
        assert_eq!(decode(&Reply::new(Kind::DelLink, &body)), None);
    }
}
