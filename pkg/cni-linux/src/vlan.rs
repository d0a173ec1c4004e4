//! Lists and changes the VLANs of a bridge's ports and of the bridge itself.
//!
//! To change a port's VLANs, pass the port's index and [`Target::Port`]; to change the bridge's own
//! VLANs, pass the bridge's index and [`Target::Bridge`].
//!
//! The kernel lists consecutive VLANs with equal flags as two entries, the first and the last. It
//! sends the list of ports in parts and continues by position: for each port that is deleted
//! meanwhile, another port may be missing from the list (Linux 6.18).
//!
//! On a kernel without VLAN filtering every change fails with [`Error::is_unsupported`], and every
//! list is empty.

use netlink_packet_route::link::{BridgeVlanInfo, BridgeVlanInfoFlags};

use crate::error::{Cause, Error, Result};
use crate::link::request::IFLA_BRIDGE_VLAN_INFO;
use crate::link::{self, LinkRequest};
use crate::netlink::wire::new_attribute;
use crate::netlink::{Kind, Netlink, Reply, attributes};

/// The attribute, in `IFLA_AF_SPEC`, that selects whether a request is about a port or the bridge
/// itself.
const IFLA_BRIDGE_FLAGS: u16 = 0;

/// How many times the list is read if it does not contain the port.
const LIST_ATTEMPTS: usize = 20;

/// A VLAN of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vlan {
    /// The VLAN's ID, 1 to 4094.
    pub vid: u16,
    /// Whether the port assigns received untagged frames to this VLAN.
    pub pvid: bool,
    /// Whether the port sends this VLAN's frames untagged.
    pub untagged: bool,
}

/// How a port handles the tags of a VLAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VlanFlags {
    /// The port receives and sends the VLAN's frames with a tag: a trunk port.
    Tagged,
    /// The port assigns received untagged frames to the VLAN and sends its frames untagged: an
    /// access port.
    Access,
}

/// Whether a request is about a bridge's port or the bridge itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A port; the request has the port's index.
    Port,
    /// The bridge, as a station in its own network; the request has the bridge's index.
    Bridge,
}

impl Netlink {
    /// Returns the VLANs of a port or bridge, ascending. Reads the list of all ports, because the
    /// kernel cannot list a single port. Reads it again if the port is missing, because the kernel
    /// may omit an existing port (see the module's description).
    ///
    /// # Errors
    /// [`Error::is_not_found`] if the interface is missing from every list.
    pub fn vlans(&self, index: u32) -> Result<Vec<Vlan>> {
        let failed = |cause| Error::new(format_args!("failed to list the VLANs of {}", self.label(index)), cause);
        let request = LinkRequest::without_index().of_bridge().answer_filter(libc::RTEXT_FILTER_BRVLAN_COMPRESSED);
        for _ in 0..LIST_ATTEMPTS {
            let links = self.dump(Kind::GetLink, &request).map_err(failed)?;
            if let Some(entries) = links.iter().find_map(|link| decode_entries(link, index)) {
                return Ok(expand_ranges(entries));
            }
        }
        Err(failed(Cause::LinkNotFound))
    }

    /// Adds a port, or a bridge itself, to a VLAN. Does nothing if the port or bridge is in the
    /// VLAN with these flags.
    pub fn add_vlan(&self, index: u32, vid: u16, flags: VlanFlags, target: Target) -> Result<()> {
        let flags = match flags {
            VlanFlags::Tagged => BridgeVlanInfoFlags::empty(),
            VlanFlags::Access => BridgeVlanInfoFlags::Pvid | BridgeVlanInfoFlags::Untagged,
        };
        let request = vlan_request(index, vid, flags, target);
        self.change(Kind::SetLink, index, &request, 0, |link| format!("failed to add VLAN {vid} to {link}"))
    }

    /// Removes a port, or a bridge itself, from a VLAN.
    pub fn del_vlan(&self, index: u32, vid: u16, target: Target) -> Result<()> {
        let request = vlan_request(index, vid, BridgeVlanInfoFlags::empty(), target);
        self.change(Kind::DelLink, index, &request, 0, |link| format!("failed to remove VLAN {vid} from {link}"))
    }
}

/// Returns the request that adds a port or bridge to a VLAN, or removes it from the VLAN.
fn vlan_request(index: u32, vid: u16, flags: BridgeVlanInfoFlags, target: Target) -> LinkRequest {
    /// The interface's master handles the request.
    const BRIDGE_FLAGS_MASTER: u16 = 1;
    /// The interface itself handles the request.
    const BRIDGE_FLAGS_SELF: u16 = 2;
    let target_flag = match target {
        Target::Port => BRIDGE_FLAGS_MASTER,
        Target::Bridge => BRIDGE_FLAGS_SELF,
    };
    // `struct bridge_vlan_info`.
    let vlan_info = [flags.bits().to_ne_bytes(), vid.to_ne_bytes()].concat();
    let mut spec = new_attribute(IFLA_BRIDGE_FLAGS, &target_flag.to_ne_bytes());
    spec.extend(new_attribute(IFLA_BRIDGE_VLAN_INFO, &vlan_info));
    LinkRequest::new(index).of_bridge().with(libc::IFLA_AF_SPEC, &spec)
}

/// Returns the VLAN entries in a message about the port or bridge `index`; `None` if the message is
/// about another interface, or malformed.
fn decode_entries(reply: &Reply, index: u32) -> Option<Vec<BridgeVlanInfo>> {
    let (header, link_attributes) = link::parts(reply)?;
    if header.index != index {
        return None;
    }
    let mut entries = Vec::new();
    for (link_kind, spec) in attributes(link_attributes) {
        if link_kind != libc::IFLA_AF_SPEC {
            continue;
        }
        for (kind, value) in attributes(spec) {
            if kind == IFLA_BRIDGE_VLAN_INFO {
                entries.extend(decode_entry(value));
            }
        }
    }
    Some(entries)
}

/// Decodes a `struct bridge_vlan_info`: flags and VLAN ID. Returns `None` if `value` is too short.
fn decode_entry(value: &[u8]) -> Option<BridgeVlanInfo> {
    let (flags, rest) = value.split_first_chunk()?;
    let flags = BridgeVlanInfoFlags::from_bits_retain(u16::from_ne_bytes(*flags));
    Some(BridgeVlanInfo { flags, vid: u16::from_ne_bytes(*rest.first_chunk()?) })
}

/// Returns a [`Vlan`] for each VLAN ID. An entry with the flag `RangeBegin` and the next one with
/// `RangeEnd` stand for all IDs from the first to the second, with the second entry's flags.
fn expand_ranges(entries: impl IntoIterator<Item = BridgeVlanInfo>) -> Vec<Vlan> {
    let mut vlans = Vec::new();
    let mut range_begin = None;
    for BridgeVlanInfo { vid, flags } in entries {
        if flags.contains(BridgeVlanInfoFlags::RangeBegin) {
            range_begin = Some(vid);
            continue;
        }
        let first = match range_begin.take() {
            Some(begin) if flags.contains(BridgeVlanInfoFlags::RangeEnd) => begin,
            _ => vid,
        };
        vlans.extend((first..=vid).map(|vid| Vlan {
            vid,
            pvid: flags.contains(BridgeVlanInfoFlags::Pvid),
            untagged: flags.contains(BridgeVlanInfoFlags::Untagged),
        }));
    }
    vlans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::wire::emitted;
    use crate::testing::in_new_netns;
    use crate::{BridgeSpec, Mac, VethSpec};

    /// Decodes a message made here, because a kernel without VLAN filtering never sends one.
    #[test]
    fn the_entries_of_one_port_are_read_out_of_a_message() {
        let mut body = vec![0; 16];
        body[4..8].copy_from_slice(&7_u32.to_ne_bytes());
        // IFLA_AF_SPEC, nested, with IFLA_BRIDGE_FLAGS, then VLAN 10 (PVID, untagged) and VLAN 20.
        for half in [4 + 3 * 8_u16, 0x8000 | libc::IFLA_AF_SPEC, 6, 0, 1, 0, 8, 2, 6, 10, 8, 2, 0, 20] {
            body.extend(half.to_ne_bytes());
        }
        let reply = Reply::new(Kind::NewLink, &body);
        let vlan = |vid, access| Vlan { vid, pvid: access, untagged: access };
        assert_eq!(expand_ranges(decode_entries(&reply, 7).unwrap()), [vlan(10, true), vlan(20, false)]);
        // A port that is missing from the list is not a port without VLANs.
        assert!(decode_entries(&reply, 8).is_none());
    }

    #[test]
    fn ranges_of_vlans_are_expanded() {
        let entry = |vid, bits| BridgeVlanInfo { vid, flags: BridgeVlanInfoFlags::from_bits_retain(bits) };
        let plain = |vid| Vlan { vid, pvid: false, untagged: false };
        let access = Vlan { vid: 1, pvid: true, untagged: true };
        // 1 untagged and PVID; 10 to 12; 20; 4093 to 4094.
        let entries = [entry(1, 6), entry(10, 8), entry(12, 16), entry(20, 0), entry(4093, 8), entry(4094, 16)];
        assert_eq!(
            expand_ranges(entries),
            [access, plain(10), plain(11), plain(12), plain(20), plain(4093), plain(4094)]
        );
        assert_eq!(expand_ranges([]), []);
        // An end of a range without a beginning counts as a single VLAN.
        assert_eq!(expand_ranges([entry(7, 16)]), [plain(7)]);
    }

    #[test]
    fn an_interface_without_a_bridge_has_no_vlan_list() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            netlink.create_bridge(&BridgeSpec::named("br0")).unwrap();
            let error = netlink.vlans(netlink.link("lo").unwrap().index).unwrap_err();
            assert!(error.to_string().starts_with("failed to list the VLANs of lo"), "{error}");
        });
    }

    #[test]
    fn a_request_has_the_bytes_that_the_bridge_program_sends() {
        let access = BridgeVlanInfoFlags::Pvid | BridgeVlanInfoFlags::Untagged;
        let bytes = emitted(&vlan_request(7, 100, access, Target::Port));
        let (family, index, attributes) = (bytes[0], &bytes[4..8], &bytes[16..]);
        assert_eq!((i32::from(family), index), (libc::AF_BRIDGE, 7u32.to_ne_bytes().as_slice()));
        // IFLA_AF_SPEC (26) of 20 bytes: IFLA_BRIDGE_FLAGS (0) = BRIDGE_FLAGS_MASTER (1),
        // IFLA_BRIDGE_VLAN_INFO (2).
        let expected: Vec<u8> = [20u16, 26, 6, 0, 1, 0, 8, 2, 6, 100].into_iter().flat_map(u16::to_ne_bytes).collect();
        assert_eq!(attributes, expected);
    }

    #[test]
    fn a_port_enters_and_leaves_vlans() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let spec = BridgeSpec { vlan_filtering: true, ..BridgeSpec::named("br0") };
            let bridge = match netlink.create_bridge(&spec) {
                Ok(bridge) => bridge,
                Err(error) if error.is_unsupported() => {
                    let bridge = netlink.create_bridge(&BridgeSpec::named("br0")).unwrap();
                    let error = netlink.add_vlan(bridge.index, 5, VlanFlags::Tagged, Target::Bridge).unwrap_err();
                    assert!(error.is_unsupported(), "{error}");
                    assert_eq!(netlink.vlans(bridge.index).unwrap(), []);
                    return crate::testing::skip("this kernel has no VLAN filtering");
                }
                Err(error) => panic!("{error}"),
            };
            let spec = VethSpec::new("veth0", Mac([2, 0, 0, 0, 0, 1]), "eth0", Mac([2, 0, 0, 0, 0, 2]));
            let veth = netlink.create_veth(&VethSpec { master: Some(bridge.index), ..spec }).unwrap();
            let default = Vlan { vid: bridge.bridge.unwrap().default_pvid, pvid: true, untagged: true };
            assert_eq!(netlink.vlans(veth.index).unwrap(), [default]);
            netlink.del_vlan(veth.index, default.vid, Target::Port).unwrap();
            for vid in [100, 101, 102] {
                netlink.add_vlan(veth.index, vid, VlanFlags::Tagged, Target::Port).unwrap();
            }
            netlink.add_vlan(veth.index, 200, VlanFlags::Access, Target::Port).unwrap();
            let vids: Vec<u16> = netlink.vlans(veth.index).unwrap().iter().map(|vlan| vlan.vid).collect();
            assert_eq!(vids, [100, 101, 102, 200]);
            netlink.add_vlan(bridge.index, 100, VlanFlags::Tagged, Target::Bridge).unwrap();
            assert!(netlink.vlans(bridge.index).unwrap().iter().any(|vlan| vlan.vid == 100));
        });
    }
}
