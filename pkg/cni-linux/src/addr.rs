//! Lists, adds and deletes the addresses of interfaces.
//!
//! A new IPv6 address is *tentative*, and unusable, until the kernel has searched for duplicates on
//! the link (duplicate address detection, DAD). Without a carrier the address stays tentative.
//! Setting an interface down removes its IPv6 addresses.

use std::net::IpAddr;

use cni::Cidr;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, Parseable as _};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};

use crate::error::{Error, Result};
use crate::mac::Mac;
use crate::netlink::{Kind, Netlink, Reply};

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addr {
    /// The address with its prefix length.
    pub cidr: Cidr,
    /// The interface's index.
    pub index: u32,
    /// The scope: 0 everywhere, 253 this link, 254 this host.
    pub scope: u8,
    /// Whether DAD is still running or waits for a carrier.
    pub tentative: bool,
    /// Whether DAD found the address on another host of the link.
    pub dad_failed: bool,
    /// Whether the address never expires.
    pub permanent: bool,
}

/// An address with all attributes that the kernel reported, so that it can be restored unchanged.
#[derive(Clone, Debug)]
pub struct SavedAddr(AddressMessage);

/// Whether the kernel does DAD for a new IPv6 address. Has no effect for IPv4.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dad {
    /// As the interface's sysctls are set.
    Normal,
    /// No DAD: the address is usable at once.
    #[default]
    Skip,
}

impl Netlink {
    /// Returns the addresses of an interface, of both families.
    pub fn list_addresses(&self, index: u32) -> Result<Vec<Addr>> {
        Ok(self.address_messages(index)?.iter().filter_map(decode).collect())
    }

    /// Returns the kernel's messages about the addresses of an interface. Filters the answer,
    /// because an old kernel ignores the index in the request.
    fn address_messages(&self, index: u32) -> Result<Vec<AddressMessage>> {
        let mut message = AddressMessage::default();
        message.header.index = index;
        let answer = match self.dump(Kind::GetAddress, &message) {
            Ok(answer) => answer,
            Err(cause) => {
                return Err(Error::new(format_args!("failed to list the addresses of {}", self.label(index)), cause));
            }
        };
        Ok(answer.into_iter().filter_map(parse).filter(|message| message.header.index == index).collect())
    }

    /// Returns those of `cidrs` that the interface has, in the kernel's order, for
    /// [`restore_address`](Netlink::restore_address).
    pub fn save_addresses(&self, index: u32, cidrs: &[Cidr]) -> Result<Vec<SavedAddr>> {
        let mut messages = self.address_messages(index)?;
        messages.retain(|message| decode(message).is_some_and(|addr| cidrs.contains(&addr.cidr)));
        Ok(messages.into_iter().map(SavedAddr).collect())
    }

    /// Adds a saved address to its interface again, without DAD. Does nothing if the interface has
    /// the address.
    pub fn restore_address(&self, saved: &SavedAddr) -> Result<()> {
        let mut message = saved.0.clone();
        if message.header.family == AddressFamily::Inet6 {
            for attribute in &mut message.attributes {
                if let AddressAttribute::Flags(flags) = attribute {
                    flags.insert(AddressFlags::Nodad);
                }
            }
        }
        match self.request(Kind::NewAddress, &message, NLM_F_CREATE | NLM_F_EXCL) {
            Ok(_) => Ok(()),
            Err(cause) if cause.errno() == Some(libc::EEXIST) => Ok(()),
            Err(cause) => {
                let cidr = decode(&message).map(|addr| addr.cidr.to_string()).unwrap_or_default();
                Err(Error::new(
                    format_args!("failed to restore the address {cidr} of {}", self.label(message.header.index)),
                    cause,
                ))
            }
        }
    }

    /// Returns every address of the namespace.
    pub fn list_all_addresses(&self) -> Result<Vec<Addr>> {
        let answer = self.dump(Kind::GetAddress, &AddressMessage::default());
        let answer = answer.map_err(|cause| Error::new("failed to list the addresses", cause))?;
        Ok(answer.into_iter().filter_map(parse).filter_map(|message| decode(&message)).collect())
    }

    /// Adds an address; for IPv4 with the broadcast address of its network, if the network has one.
    ///
    /// # Errors
    /// [`Error::is_exists`] if the interface has the address.
    pub fn add_address(&self, index: u32, cidr: Cidr, dad: Dad) -> Result<()> {
        self.add_with_flags(index, cidr, dad_flags(cidr, dad))
    }

    /// Adds an address as [`add_address`](Netlink::add_address) does, but the kernel does not add
    /// the route to its network.
    ///
    /// # Errors
    /// [`Error::is_exists`] if the interface has the address.
    pub fn add_address_without_route(&self, index: u32, cidr: Cidr, dad: Dad) -> Result<()> {
        self.add_with_flags(index, cidr, dad_flags(cidr, dad) | AddressFlags::Noprefixroute)
    }

    /// Adds the IPv6 link-local address that belongs to `mac`, usable at once. If the interface has
    /// the address but it is still tentative, deletes the address first.
    ///
    /// This address is the source of the neighbour solicitations for forwarded packets. If the
    /// kernel adds the address itself, it stays tentative for up to three seconds, and forwarded
    /// packets are lost until then.
    ///
    /// # Errors
    /// The kernel refuses the address.
    pub fn add_link_local(&self, index: u32, mac: Mac) -> Result<()> {
        // Never `None`: an IPv6 prefix can have 64 bits.
        let Some(cidr) = Cidr::new(mac.link_local().into(), 64) else { return Ok(()) };
        match self.add_address(index, cidr, Dad::Skip) {
            Err(error) if error.is_exists() => {}
            result => return result,
        }
        let is_tentative = self.list_addresses(index)?.iter().any(|addr| addr.cidr == cidr && addr.tentative);
        if !is_tentative {
            return Ok(());
        }
        let purged = self.purge_address(index, cidr);
        match self.add_address(index, cidr, Dad::Skip) {
            // Another ADD may do the same at the same time.
            Err(error) if error.is_exists() => purged,
            added => purged.and(added),
        }
    }

    /// Adds an address with these flags. Fails with EEXIST if the interface has the address.
    fn add_with_flags(&self, index: u32, cidr: Cidr, flags: AddressFlags) -> Result<()> {
        let mut message = address_request(index, cidr);
        // Neither a /31 (RFC 3021) nor a /32 has a broadcast address.
        if let IpAddr::V4(broadcast) = cidr.last()
            && cidr.prefix() < 31
        {
            message.attributes.push(AddressAttribute::Broadcast(broadcast));
        }
        if !flags.is_empty() {
            message.attributes.push(AddressAttribute::Flags(flags));
        }
        self.change(Kind::NewAddress, index, &message, NLM_F_CREATE | NLM_F_EXCL, |link| {
            format!("failed to add {cidr} to {link}")
        })
    }

    /// Deletes an address, if the interface exists and has it.
    pub fn purge_address(&self, index: u32, cidr: Cidr) -> Result<()> {
        let message = address_request(index, cidr);
        let deleted =
            self.change(Kind::DelAddress, index, &message, 0, |link| format!("failed to delete {cidr} from {link}"));
        deleted.or_else(|error| if error.is_not_found() { Ok(()) } else { Err(error) })
    }
}

/// Returns a request with the attributes that identify an address.
fn address_request(index: u32, cidr: Cidr) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.index = index;
    message.header.prefix_len = cidr.prefix();
    message.header.family = if cidr.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.attributes.push(AddressAttribute::Local(cidr.address()));
    message.attributes.push(AddressAttribute::Address(cidr.address()));
    message
}

/// Returns the flags of a new address that follow from `dad`.
fn dad_flags(cidr: Cidr, dad: Dad) -> AddressFlags {
    if dad == Dad::Skip && !cidr.is_ipv4() { AddressFlags::Nodad } else { AddressFlags::empty() }
}

/// Parses a message about an address. Returns `None` for other and malformed messages.
fn parse(reply: Reply) -> Option<AddressMessage> {
    AddressMessage::parse(reply.body(Kind::NewAddress)?).ok()
}

/// Decodes an address. Returns `None` if the message has no address, or an impossible prefix
/// length.
fn decode(message: &AddressMessage) -> Option<Addr> {
    let AddressMessage { header, attributes, .. } = message;
    let (mut local, mut address) = (None, None);
    // The header has the lowest eight flags. Kernels that have more send an attribute with all
    // flags.
    let mut flags = AddressFlags::from_bits_retain(header.flags.bits().into());
    for attribute in attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => address = Some(*ip),
            AddressAttribute::Flags(all) => flags = *all,
            _ => {}
        }
    }
    // On a point-to-point link IFA_ADDRESS is the peer's address and IFA_LOCAL this host's.
    // Elsewhere they are equal, and IPv6 omits IFA_LOCAL.
    let cidr = Cidr::new(local.or(address)?, header.prefix_len)?;
    Some(Addr {
        cidr,
        index: header.index,
        scope: header.scope.into(),
        tentative: flags.contains(AddressFlags::Tentative),
        dad_failed: flags.contains(AddressFlags::Dadfailed),
        permanent: flags.contains(AddressFlags::Permanent),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, machine, output};
    use crate::{BridgeSpec, VethSpec, Watch};
    use std::time::{Duration, Instant};

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    #[test]
    fn an_address_can_be_added_without_a_route() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let bridge = netlink.create_bridge(&BridgeSpec { up: true, ..BridgeSpec::named("br0") }).unwrap();
            for text in ["10.1.2.3/24", "fd00::5/64"] {
                netlink.add_address_without_route(bridge.index, cidr(text), Dad::Skip).unwrap();
                let addresses = netlink.list_addresses(bridge.index).unwrap();
                assert!(addresses.iter().any(|addr| addr.cidr == cidr(text) && !addr.tentative), "{addresses:?}");
            }
            assert_eq!((output("ip -4 route show"), output("ip -6 route show root fd00::/16")), Default::default());
        });
    }

    #[test]
    fn addresses_of_both_families_are_added_and_deleted() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let bridge = netlink.create_bridge(&BridgeSpec { up: true, ..BridgeSpec::named("br0") }).unwrap();
            for text in ["10.1.2.3/24", "10.9.9.0/31", "10.8.8.8/32", "fd00::5/64"] {
                netlink.add_address(bridge.index, cidr(text), Dad::Skip).unwrap();
            }
            let addresses = netlink.list_addresses(bridge.index).unwrap();
            for text in ["10.1.2.3/24", "10.9.9.0/31", "10.8.8.8/32", "fd00::5/64"] {
                let addr = addresses.iter().find(|addr| addr.cidr == cidr(text)).unwrap();
                assert!(addr.permanent && !addr.tentative && !addr.dad_failed && addr.scope == 0, "{addr:?}");
            }
            let shown = output("ip -4 address show br0");
            assert_eq!(shown.matches("brd").count(), 1, "{shown}");
            assert!(shown.contains("10.1.2.3/24 brd 10.1.2.255"), "{shown}");

            let error = netlink.add_address(bridge.index, cidr("10.1.2.3/24"), Dad::Normal).unwrap_err();
            assert!(error.is_exists(), "{error}");
            assert!(error.to_string().starts_with("failed to add 10.1.2.3/24 to br0: File exists"), "{error}");
            for text in ["10.1.2.3/24", "fd00::5/64"] {
                netlink.purge_address(bridge.index, cidr(text)).unwrap();
                netlink.purge_address(bridge.index, cidr(text)).unwrap();
            }
            let left = netlink.list_addresses(bridge.index).unwrap();
            let purged = ["10.1.2.3/24", "fd00::5/64"].map(cidr);
            assert!(left.iter().all(|addr| !purged.contains(&addr.cidr)), "{left:?}");
            netlink.purge_address(4711, cidr("10.1.2.3/24")).unwrap();
        });
    }

    #[test]
    fn a_deleted_address_is_restored_as_it_was() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let bridge = netlink.create_bridge(&BridgeSpec { up: true, ..BridgeSpec::named("br0") }).unwrap();
            for address in [
                "10.1.0.1/24 broadcast 10.1.0.200 label br0:a scope link",
                "10.1.0.2/24 scope link noprefixroute",
                "fd00::1/64 nodad valid_lft 3000 preferred_lft 2000",
            ] {
                output(&format!("ip address add {address} dev br0"));
            }
            // The kernel counts the lifetimes down.
            let shown = || {
                let lines = output("ip address show dev br0");
                lines.replace("2999sec", "3000sec").replace("1999sec", "2000sec")
            };
            let before = shown();
            let cidrs = ["10.1.0.1/24", "10.1.0.2/24", "10.1.0.3/24", "fd00::1/64"].map(cidr);
            let saved = netlink.save_addresses(bridge.index, &cidrs).unwrap();
            assert_eq!(saved.len(), 3);
            for cidr in cidrs {
                // 10.1.0.3 is absent, and the kernel deletes 10.1.0.2 with 10.1.0.1, whose
                // secondary address it is.
                netlink.purge_address(bridge.index, cidr).unwrap();
            }
            let left = netlink.list_addresses(bridge.index).unwrap();
            assert!(left.iter().all(|addr| !cidrs.contains(&addr.cidr)), "{left:?}");
            for _ in 0..2 {
                saved.iter().for_each(|saved| netlink.restore_address(saved).unwrap());
            }
            assert_eq!(shown(), before);
        });
    }

    #[test]
    fn only_the_interface_asked_for_is_listed() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let bridge = netlink.create_bridge(&BridgeSpec::named("br0")).unwrap();
            netlink.set_up(1).unwrap();
            netlink.add_address(bridge.index, cidr("10.1.2.3/24"), Dad::Normal).unwrap();
            let addresses = netlink.list_addresses(bridge.index).unwrap();
            assert_eq!(addresses.iter().map(|addr| addr.cidr).collect::<Vec<_>>(), [cidr("10.1.2.3/24")]);
            let all = netlink.list_all_addresses().unwrap();
            let loopback = all.iter().find(|addr| addr.cidr == cidr("127.0.0.1/8")).unwrap();
            assert_eq!((loopback.index, loopback.scope), (1, 254));
            assert!(all.iter().any(|addr| addr.cidr == cidr("::1/128")));
        });
    }

    #[test]
    fn the_link_local_address_stays_the_only_one() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let mac = Mac([2, 0, 0, 0, 0, 5]);
            let veth =
                netlink.create_veth(&VethSpec { up: true, ..VethSpec::new("v0", mac, "v1", Mac([2; 6])) }).unwrap();
            for _ in 0..2 {
                netlink.add_link_local(veth.index, mac).unwrap();
            }
            let (watch, deadline) = (Watch::open().unwrap(), Instant::now() + Duration::from_secs(30));
            netlink.set_up(veth.peer_index).unwrap();
            netlink.wait_carrier(&watch, veth.index, deadline, &machine()).unwrap();
            let bridge = BridgeSpec { up: true, mac: Some(mac), ..BridgeSpec::named("br0") };
            let bridge = netlink.create_bridge(&bridge).unwrap().index;
            netlink.add_link_local(bridge, mac).unwrap();
            for index in [veth.index, bridge] {
                let [addr] = netlink.list_addresses(index).unwrap()[..] else { panic!("not one address") };
                assert_eq!((addr.cidr, addr.tentative), (cidr("fe80::ff:fe00:5/64"), false));
            }
        });
    }

    #[test]
    fn without_skip_an_ipv6_address_is_tentative_at_first() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let bridge = netlink.create_bridge(&BridgeSpec { up: true, ..BridgeSpec::named("br0") }).unwrap();
            netlink.add_address(bridge.index, cidr("fd00::1/64"), Dad::Normal).unwrap();
            netlink.add_address(bridge.index, cidr("fd00::2/64"), Dad::Skip).unwrap();
            let tentative = |text| {
                let addresses = netlink.list_addresses(bridge.index).unwrap();
                addresses.iter().find(|addr| addr.cidr == cidr(text)).unwrap().tentative
            };
            assert!(tentative("fd00::1/64") && !tentative("fd00::2/64"));
        });
    }
}
