//! Changes and deletes interfaces.
//!
//! Each method sends one request. Its error names the interface, which is looked up only after a
//! failure.

use std::net::Ipv6Addr;

use super::LinkRequest;
use crate::error::Result;
use crate::mac::Mac;
use crate::netlink::wire::new_attribute;
use crate::netlink::{Kind, Netlink};
use crate::netns::Netns;

/// The family of IPv6, as the type of an attribute in `IFLA_AF_SPEC`.
const AF_INET6: u16 = 10;
/// The attribute of the token in there.
const IFLA_INET6_TOKEN: u16 = 7;

/// The administrator's setting of an interface flag: up, promiscuous, all-multicast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkFlag {
    /// The flag is set.
    On,
    /// The administrator does not set the flag. Other users of the interface, such as a packet
    /// capture, may still keep the mode on.
    Off,
}

impl Netlink {
    /// Deletes an interface; of a veth pair, both ends. Takes 15 to 30 ms in the kernel.
    ///
    /// # Errors
    /// [`Error::is_not_found`](crate::Error::is_not_found) if the interface does not exist.
    pub fn delete_link(&self, index: u32) -> Result<()> {
        self.change(Kind::DelLink, index, &LinkRequest::new(index), 0, |link| format!("failed to delete {link}"))
    }

    /// Deletes an interface if it exists. Returns whether it existed.
    pub fn purge_link(&self, index: u32) -> Result<bool> {
        match self.delete_link(index) {
            Ok(()) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Sets an interface up.
    pub fn set_up(&self, index: u32) -> Result<()> {
        self.set_link(LinkRequest::new(index).up(), |link| format!("failed to set {link} up"))
    }

    /// Sets an interface down.
    pub fn set_down(&self, index: u32) -> Result<()> {
        self.set_link(LinkRequest::new(index).flag(libc::IFF_UP, LinkFlag::Off), |link| {
            format!("failed to set {link} down")
        })
    }

    /// Switches the administrator's setting of promiscuous mode on or off.
    pub fn set_promisc(&self, index: u32, promisc: LinkFlag) -> Result<()> {
        let request = LinkRequest::new(index).flag(libc::IFF_PROMISC, promisc);
        self.set_link(request, |link| format!("failed to set promiscuous mode of {link}"))
    }

    /// Switches the administrator's setting of all-multicast mode on or off.
    pub fn set_allmulti(&self, index: u32, allmulti: LinkFlag) -> Result<()> {
        let request = LinkRequest::new(index).flag(libc::IFF_ALLMULTI, allmulti);
        self.set_link(request, |link| format!("failed to set all-multicast of {link}"))
    }

    /// Sets the MTU, in bytes.
    pub fn set_mtu(&self, index: u32, mtu: u32) -> Result<()> {
        self.set_link(LinkRequest::new(index).mtu(mtu), |link| format!("failed to set the MTU of {link} to {mtu}"))
    }

    /// Sets the hardware address. A bridge then no longer takes its address from its ports.
    pub fn set_mac(&self, index: u32, mac: Mac) -> Result<()> {
        self.set_link(LinkRequest::new(index).mac(mac), |link| format!("failed to set the MAC of {link} to {mac}"))
    }

    /// Sets the alias, up to 255 bytes; an empty one removes it.
    pub fn set_alias(&self, index: u32, alias: &str) -> Result<()> {
        self.set_link(LinkRequest::new(index).alias(alias), |link| {
            format!("failed to set the alias of {link} to {alias:?}")
        })
    }

    /// Sets the alias and resets the group to 0, in one request. Until a link has its alias, the
    /// group marks the link as created by these plugins (see [`veth`](crate::veth)).
    pub(crate) fn set_first_alias(&self, index: u32, alias: &str) -> Result<()> {
        let request = LinkRequest::new(index).alias(alias).group(0);
        self.set_link(request, |link| format!("failed to set the alias of {link} to {alias:?}"))
    }

    /// Renames an interface.
    pub fn set_name(&self, index: u32, name: &str) -> Result<()> {
        self.set_link(LinkRequest::new(index).name(name), |link| format!("failed to rename {link} to {name}"))
    }

    /// Removes an alternative name.
    pub fn remove_altname(&self, index: u32, altname: &str) -> Result<()> {
        self.change(Kind::DelLinkProperty, index, &LinkRequest::new(index).altname(altname), 0, |link| {
            format!("failed to remove the alternative name {altname} of {link}")
        })
    }

    /// Moves an interface into another namespace and gives it this name and alias. After the move
    /// it is down, has no addresses and routes, and may have another index.
    ///
    /// # Errors
    /// [`Error::is_exists`](crate::Error::is_exists) if the name is taken in the other namespace.
    /// The interface may nevertheless have been moved, with its former name and alias.
    pub fn move_link(&self, index: u32, to: &Netns, name: &str, alias: &str) -> Result<()> {
        let request = LinkRequest::new(index).netns(to).name(name).alias(alias);
        self.set_link(request, |link| format!("failed to move {link} to {} as {name}", to.path().display()))
    }

    /// Sets the lower 64 bits of the addresses that the interface makes of advertised prefixes, its
    /// token; the unspecified address removes it.
    ///
    /// # Errors
    /// The kernel refuses a token for an interface that ignores router advertisements.
    pub fn set_token(&self, index: u32, token: Ipv6Addr) -> Result<()> {
        let token_attribute = new_attribute(IFLA_INET6_TOKEN, &token.octets());
        let family = new_attribute(AF_INET6, &token_attribute);
        let request = LinkRequest::new(index).with(libc::IFLA_AF_SPEC, &family);
        self.set_link(request, |link| format!("failed to set the token {token} of {link}"))
    }

    /// Sets the length of the transmit queue, in packets.
    pub fn set_txqlen(&self, index: u32, packets: u32) -> Result<()> {
        let request = LinkRequest::new(index).txqlen(packets);
        self.set_link(request, |link| format!("failed to set the transmit queue length of {link} to {packets}"))
    }

    /// Makes an interface a port of a bridge, VRF or bond. With a VRF, the kernel sets the
    /// interface down and up again, which removes its IPv6 addresses and its routes. A bond accepts
    /// only an interface that is down, and sets it up.
    pub fn set_master(&self, index: u32, master_index: u32) -> Result<()> {
        let request = LinkRequest::new(index).master(master_index);
        self.set_link(request, |link| format!("failed to attach {link} to {}", self.label(master_index)))
    }

    /// Detaches an interface from its bridge, VRF or bond. Does nothing if it is not attached to
    /// one.
    pub fn unset_master(&self, index: u32) -> Result<()> {
        self.set_link(LinkRequest::new(index).master(0), |link| {
            format!("failed to detach {link} from its bridge, VRF or bond")
        })
    }

    /// Sends a request that changes an existing link (RTM_SETLINK). `describe_failure` gets the
    /// link's name and returns the beginning of the error message.
    pub(crate) fn set_link(&self, request: LinkRequest, describe_failure: impl FnOnce(&str) -> String) -> Result<()> {
        self.change(Kind::SetLink, request.index(), &request, 0, describe_failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, new_netns, output};
    use crate::{BridgeSpec, LinkKind, VethSpec};

    #[test]
    fn every_setting_of_a_link_is_read_back() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let bridge = netlink.create_bridge(&BridgeSpec::named("br0")).unwrap();
            let mac = "02:00:00:00:00:07".parse().unwrap();
            netlink.set_mac(bridge.index, mac).unwrap();
            netlink.set_mtu(bridge.index, 1400).unwrap();
            netlink.set_alias(bridge.index, "cni:n/c/eth0").unwrap();
            netlink.set_txqlen(bridge.index, 77).unwrap();
            netlink.set_promisc(bridge.index, LinkFlag::On).unwrap();
            netlink.set_allmulti(bridge.index, LinkFlag::On).unwrap();
            netlink.set_up(bridge.index).unwrap();
            let link = netlink.link("br0").unwrap();
            assert_eq!((link.mac, link.mtu, link.txqlen), (Some(mac), 1400, 77));
            assert_eq!(link.alias.as_deref(), Some("cni:n/c/eth0"));
            assert!(link.up && link.promisc && link.allmulti && link.promiscuity == 1 && link.kind == LinkKind::Bridge);
            assert!(output("ip link show br0").contains("alias cni:n/c/eth0"));
            netlink.set_promisc(bridge.index, LinkFlag::Off).unwrap();
            netlink.set_allmulti(bridge.index, LinkFlag::Off).unwrap();
            netlink.set_down(bridge.index).unwrap();
            netlink.set_alias(bridge.index, "").unwrap();
            netlink.set_name(bridge.index, "br1").unwrap();
            let link = netlink.find_link_by_index(bridge.index).unwrap().unwrap();
            assert_eq!((link.up, link.promisc, link.allmulti, link.promiscuity), (false, false, false, 0));
            assert_eq!((link.alias, link.name.as_str()), (None, "br1"));
        });
    }

    #[test]
    fn a_moved_link_has_its_new_name_and_alias_at_once() {
        in_new_netns(|| {
            let (host, there, home) = (Netlink::open().unwrap(), new_netns(), Netns::current().unwrap());
            let container = host.open_in(&there).unwrap();
            let macs = [Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2])];
            let pair = host.create_veth(&VethSpec::new("dev0", macs[0], "peer0", macs[1])).unwrap();
            // In the other namespace, another link has the name that this one has here.
            container.create_veth(&VethSpec::new("dev0", macs[0], "peer0", macs[1])).unwrap();
            host.move_link(pair.index, &there, "eth0", "dev0").unwrap();
            assert_eq!(host.find_link("dev0").unwrap(), None);
            let moved = container.link("eth0").unwrap();
            assert_eq!((moved.mac, moved.alias.as_deref(), moved.up), (Some(macs[0]), Some("dev0"), false));
            container.move_link(moved.index, &home, "dev0", "").unwrap();
            assert_eq!(host.link("dev0").unwrap().alias, None);
            let error = host.move_link(host.link("dev0").unwrap().index, &there, "peer0", "dev0").unwrap_err();
            assert!(error.is_exists(), "{error}");
        });
    }

    #[test]
    fn an_absent_link_is_not_taken_for_a_failure() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            assert_eq!(netlink.find_link("nope").unwrap(), None);
            assert_eq!(netlink.find_link("").unwrap(), None);
            assert_eq!(netlink.find_link("a-name-that-is-too-long").unwrap(), None);
            assert_eq!(netlink.find_link_by_index(4711).unwrap(), None);
            let error = netlink.link("nope").unwrap_err();
            assert_eq!(error.to_string(), "failed to find nope: Link not found");
            assert!(error.is_not_found());
            assert!(netlink.delete_link(4711).unwrap_err().is_not_found());
            assert!(!netlink.purge_link(4711).unwrap());
        });
    }

    #[test]
    fn a_failure_names_the_interface() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let lo = netlink.link("lo").unwrap();
            assert_eq!(lo.kind, LinkKind::Loopback);
            let error = netlink.set_mac(lo.index, "01:00:00:00:00:01".parse().unwrap()).unwrap_err();
            assert!(error.to_string().starts_with("failed to set the MAC of lo to 01:00:00:00:00:01: "), "{error}");
        });
    }
}
