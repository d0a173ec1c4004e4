//! Encodes requests about links: `struct ifinfomsg` and its attributes.
//!
//! The packet crate's `LinkMessage` is not used: it supports every option of every kind of link,
//! and adds the code for all of them, 120 KB, to each binary.

use std::os::fd::{AsFd as _, AsRawFd as _};

use netlink_packet_core::Emitable;

use super::LinkFlag;
use super::decode::native_u32;
use crate::mac::Mac;
use crate::netlink::wire::{attribute, emitted, new_attribute, new_nest};
use crate::netlink::{Body, attributes, text};
use crate::netns::Netns;

/// The length of `struct ifinfomsg` in bytes.
const HEADER: usize = 16;

/// `AF_BRIDGE`, as the one byte that the header has for a family.
const AF_BRIDGE: u8 = 7;

/// The attribute of a new veth that describes the other end, as a complete request.
const VETH_INFO_PEER: u16 = 1;

/// The attribute, in `IFLA_AF_SPEC`, of a bridge's VLAN: `struct bridge_vlan_info`.
pub(crate) const IFLA_BRIDGE_VLAN_INFO: u16 = 2;

/// A request about one link. The methods add to the request and return it.
#[derive(Clone, Debug)]
pub(crate) struct LinkRequest {
    family: u8,
    index: u32,
    flags: u32,
    /// The mask of the flags that the request sets or clears.
    change: u32,
    attributes: Vec<u8>,
}

impl LinkRequest {
    /// Returns a request about the link with this index.
    pub(crate) fn new(index: u32) -> LinkRequest {
        LinkRequest { family: 0, index, flags: 0, change: 0, attributes: Vec::new() }
    }

    /// Returns a request about a link that its attributes describe: one to create or to look up.
    pub(crate) fn without_index() -> LinkRequest {
        LinkRequest::new(0)
    }

    /// Returns the index of the link; 0 for a request without an index.
    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// Addresses the request to the kernel's bridge code (`AF_BRIDGE`), for VLANs.
    pub(crate) fn of_bridge(mut self) -> LinkRequest {
        self.family = AF_BRIDGE;
        self
    }

    /// Sets the link up.
    pub(crate) fn up(self) -> LinkRequest {
        self.flag(libc::IFF_UP, LinkFlag::On)
    }

    /// Sets or clears a flag (`IFF_*`).
    pub(crate) fn flag(mut self, flag: libc::c_int, setting: LinkFlag) -> LinkRequest {
        self.change |= flag.cast_unsigned();
        if setting == LinkFlag::On {
            self.flags |= flag.cast_unsigned();
        }
        self
    }

    /// Calls `add`, a method of this type, if there is a value for it.
    pub(crate) fn optional<T>(self, value: Option<T>, add: fn(LinkRequest, T) -> LinkRequest) -> LinkRequest {
        match value {
            Some(value) => add(self, value),
            None => self,
        }
    }

    /// Adds an attribute (`IFLA_*`).
    pub(crate) fn with(mut self, kind: u16, value: &[u8]) -> LinkRequest {
        self.attributes.extend(new_attribute(kind, value));
        self
    }

    /// Adds an attribute (`IFLA_*`) with a native-endian number.
    fn with_number(self, kind: u16, number: u32) -> LinkRequest {
        self.with(kind, &number.to_ne_bytes())
    }

    /// Adds an attribute (`IFLA_*`) with a zero-terminated text.
    fn with_text(self, kind: u16, value: &str) -> LinkRequest {
        self.with(kind, &terminated(value))
    }

    pub(crate) fn name(self, name: &str) -> LinkRequest {
        self.with_text(libc::IFLA_IFNAME, name)
    }

    /// Names an alternative name of the link.
    pub(crate) fn altname(mut self, altname: &str) -> LinkRequest {
        let altname = new_attribute(libc::IFLA_ALT_IFNAME, &terminated(altname));
        self.attributes.extend(new_nest(libc::IFLA_PROP_LIST, &altname));
        self
    }

    pub(crate) fn alias(self, alias: &str) -> LinkRequest {
        self.with_text(libc::IFLA_IFALIAS, alias)
    }

    pub(crate) fn mac(self, mac: Mac) -> LinkRequest {
        self.with(libc::IFLA_ADDRESS, &mac.0)
    }

    pub(crate) fn mtu(self, mtu: u32) -> LinkRequest {
        self.with_number(libc::IFLA_MTU, mtu)
    }

    pub(crate) fn txqlen(self, packets: u32) -> LinkRequest {
        self.with_number(libc::IFLA_TXQLEN, packets)
    }

    pub(crate) fn group(self, group: u32) -> LinkRequest {
        self.with_number(libc::IFLA_GROUP, group)
    }

    /// Sets the index of the bridge, VRF or bond that the link becomes a port of; 0 detaches the
    /// link.
    pub(crate) fn master(self, index: u32) -> LinkRequest {
        self.with_number(libc::IFLA_MASTER, index)
    }

    /// Sets the index of the link that this one is on top of.
    pub(crate) fn on_top_of(self, index: u32) -> LinkRequest {
        self.with_number(libc::IFLA_LINK, index)
    }

    /// Sets the namespace that the link is to be created in or moved to.
    pub(crate) fn netns(self, netns: &Netns) -> LinkRequest {
        self.with(libc::IFLA_NET_NS_FD, &netns.as_fd().as_raw_fd().to_ne_bytes())
    }

    /// Looks the link up in the namespace that has this ID in the connection's namespace.
    pub(crate) fn netns_id(self, id: i32) -> LinkRequest {
        self.with(libc::IFLA_IF_NETNSID, &id.to_ne_bytes())
    }

    /// Sets what an answer contains or omits (`RTEXT_FILTER_*`).
    pub(crate) fn answer_filter(self, filter: libc::c_int) -> LinkRequest {
        self.with_number(libc::IFLA_EXT_MASK, filter.cast_unsigned())
    }

    /// Sets the kind of link, and the encoded options of that kind.
    pub(crate) fn kind(self, kind: &str, options: &[u8]) -> LinkRequest {
        self.info((libc::IFLA_INFO_KIND, kind), (libc::IFLA_INFO_DATA, options))
    }

    /// Sets the encoded options that the link has as a port of this kind of master.
    pub(crate) fn port(self, master_kind: &str, options: &[u8]) -> LinkRequest {
        self.info((libc::IFLA_INFO_SLAVE_KIND, master_kind), (libc::IFLA_INFO_SLAVE_DATA, options))
    }

    /// Adds `IFLA_LINKINFO` with two attributes, each given as type and value: the kind and the
    /// options. Empty options are omitted.
    fn info(self, (kind_type, kind): (u16, &str), (options_type, options): (u16, &[u8])) -> LinkRequest {
        let mut info = new_attribute(kind_type, &terminated(kind));
        if !options.is_empty() {
            info.extend(new_attribute(options_type, options));
        }
        self.with(libc::IFLA_LINKINFO, &info)
    }

    /// Sets the kind to veth, with this description of the other end.
    pub(crate) fn veth(self, peer: &LinkRequest) -> LinkRequest {
        self.kind("veth", &new_attribute(VETH_INFO_PEER, &emitted(peer)))
    }
}

impl Emitable for LinkRequest {
    fn buffer_len(&self) -> usize {
        HEADER + self.attributes.len()
    }

    /// Writes `struct ifinfomsg` and the attributes.
    fn emit(&self, buffer: &mut [u8]) {
        // The family is the first byte (so little-endian); three unused ones follow.
        let header = [u32::from(self.family).to_le_bytes(), self.index.to_ne_bytes()];
        let flags = [self.flags.to_ne_bytes(), self.change.to_ne_bytes()];
        let bytes = [header.concat(), flags.concat(), self.attributes.clone()].concat();
        buffer[..bytes.len()].copy_from_slice(&bytes);
    }
}

impl Body for LinkRequest {
    /// Describes a request about a link: `index 7 down mtu 1400`, or without an index
    /// `br0 type bridge`.
    fn describe(&self) -> Vec<String> {
        let mut words = Vec::new();
        if self.index != 0 {
            words.push(format!("index {}", self.index));
        }
        for (flag, on, off) in [
            (libc::IFF_UP, "up", "down"),
            (libc::IFF_PROMISC, "promisc on", "promisc off"),
            (libc::IFF_ALLMULTI, "allmulticast on", "allmulticast off"),
        ] {
            let flag = flag.cast_unsigned();
            if self.change & flag != 0 {
                words.push(if self.flags & flag != 0 { on } else { off }.to_owned());
            }
        }
        for (kind, value) in attributes(&self.attributes) {
            // Used only for the attributes whose value is a number.
            let number = native_u32(value).unwrap_or_default();
            match kind {
                // Without an index, the name identifies the link; with one, the name is to be set.
                libc::IFLA_IFNAME if self.index == 0 => words.insert(0, text(value)),
                libc::IFLA_IFNAME => words.push(format!("name {}", text(value))),
                libc::IFLA_MTU => words.push(format!("mtu {number}")),
                libc::IFLA_ADDRESS => words.extend(Mac::from_slice(value).map(|mac| format!("address {mac}"))),
                libc::IFLA_IFALIAS => words.push(format!("alias {:?}", text(value))),
                libc::IFLA_GROUP => words.push(format!("group {number}")),
                libc::IFLA_TXQLEN => words.push(format!("txqueuelen {number}")),
                libc::IFLA_MASTER if number == 0 => words.push("nomaster".to_owned()),
                libc::IFLA_MASTER => words.push(format!("master index {number}")),
                libc::IFLA_LINK => words.push(format!("link index {number}")),
                libc::IFLA_NET_NS_FD => words.push("netns of the container".to_owned()),
                libc::IFLA_LINKINFO => words.extend(describe_info(value)),
                libc::IFLA_PROP_LIST => {
                    words.extend(attributes(value).map(|(_, name)| format!("altname {}", text(name))))
                }
                libc::IFLA_AF_SPEC => {
                    // `struct bridge_vlan_info`: flags and VLAN ID.
                    if let Some([_, _, low, high, ..]) = attribute(value, IFLA_BRIDGE_VLAN_INFO) {
                        words.push(format!("vid {}", u16::from_ne_bytes([*low, *high])));
                    }
                }
                _ => {}
            }
        }
        words
    }
}

/// Returns the bytes of a text with the zero byte that ends it.
fn terminated(text: &str) -> Vec<u8> {
    [text.as_bytes(), &[0]].concat()
}

/// Describes the content of `IFLA_LINKINFO` for the log; for a veth with its other end.
fn describe_info(info: &[u8]) -> Vec<String> {
    let mut words = Vec::new();
    let kind = attribute(info, libc::IFLA_INFO_KIND).map(text);
    words.extend(kind.as_ref().map(|kind| format!("type {kind}")));
    if let Some(options) = attribute(info, libc::IFLA_INFO_DATA) {
        let peer_request = if kind.as_deref() == Some("veth") { attribute(options, VETH_INFO_PEER) } else { None };
        words.push(match peer_request.and_then(|request| request.get(HEADER..)) {
            Some(peer_attributes) => {
                let peer = LinkRequest { attributes: peer_attributes.to_vec(), ..LinkRequest::without_index() };
                format!("peer ( {} )", peer.describe().join(" "))
            }
            None => "with options".to_owned(),
        });
    }
    if attribute(info, libc::IFLA_INFO_SLAVE_DATA).is_some() {
        words.push("with options of a port".to_owned());
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use netlink_packet_core::Parseable as _;
    use netlink_packet_route::link::{InfoBridge, InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo, LinkMessage};

    fn words(request: &LinkRequest) -> String {
        request.describe().join(" ")
    }

    #[test]
    fn the_text_of_a_request_has_all_its_parts() {
        let new = LinkRequest::without_index().kind("bridge", &[]).name("br0").mtu(1400).mac(Mac([2, 0, 0, 0, 0, 7]));
        assert_eq!(words(&new), "br0 type bridge mtu 1400 address 02:00:00:00:00:07");
        let set = LinkRequest::new(7).flag(libc::IFF_UP, LinkFlag::Off).master(3).alias("a b").group(4).txqlen(5);
        assert_eq!(words(&set), "index 7 down master index 3 alias \"a b\" group 4 txqueuelen 5");
        let flags =
            LinkRequest::new(7).flag(libc::IFF_PROMISC, LinkFlag::On).flag(libc::IFF_ALLMULTI, LinkFlag::Off).master(0);
        assert_eq!(words(&flags), "index 7 promisc on allmulticast off nomaster");
        let peer = LinkRequest::without_index().name("eth0").mtu(9000);
        assert_eq!(words(&LinkRequest::without_index().name("v").veth(&peer)), "v type veth peer ( eth0 mtu 9000 )");
        let stacked = LinkRequest::without_index().on_top_of(2).name("m").kind("vlan", &new_attribute(1, &[5, 0]));
        assert_eq!(words(&stacked), "m link index 2 type vlan with options");
        assert_eq!(
            words(&LinkRequest::new(7).name("x").port("bridge", &[0; 4])),
            "index 7 name x with options of a port"
        );
    }

    /// Compares the bytes of requests with those that the packet crate writes for the same message.
    #[test]
    fn a_request_has_the_bytes_of_the_packet_crate() {
        let peer = LinkRequest::without_index().name("eth0").mac(Mac([2; 6])).mtu(1400);
        let veth = LinkRequest::without_index().up().name("veth0").master(3).group(9).veth(&peer);
        let bridge = LinkRequest::without_index().name("br0").kind("bridge", &new_attribute(7, &[1]));
        let set = LinkRequest::new(7).alias("x").txqlen(0).of_bridge().netns_id(-1).answer_filter(8);
        for request in [veth.clone(), bridge.clone(), set] {
            let read = LinkMessage::parse(&emitted(&request)[..]).unwrap();
            let mut written = vec![0; read.buffer_len()];
            read.emit(&mut written);
            assert_eq!(written, emitted(&request), "{read:?}");
        }
        let read = LinkMessage::parse(&emitted(&bridge)[..]).unwrap();
        let data = InfoData::Bridge(vec![InfoBridge::VlanFiltering(true)]);
        let info = vec![LinkInfo::Kind(InfoKind::Bridge), LinkInfo::Data(data)];
        assert_eq!(read.attributes, [LinkAttribute::IfName("br0".to_owned()), LinkAttribute::LinkInfo(info)]);
        let read = LinkMessage::parse(&emitted(&veth)[..]).unwrap();
        let Some(LinkAttribute::LinkInfo(info)) = read.attributes.last() else { panic!("{read:?}") };
        let LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))) = &info[1] else { panic!("{info:?}") };
        assert_eq!(peer.attributes[0], LinkAttribute::IfName("eth0".to_owned()));
    }
}
