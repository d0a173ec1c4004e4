//! Creates interfaces, and waits until they have a carrier.

use std::time::Instant;

use cni::machine::Machine;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_ECHO, NLM_F_EXCL};

use super::{IFLA_VRF_TABLE, Link, LinkRequest, OperState};
use crate::error::{Cause, Error, Result};
use crate::mac::Mac;
use crate::netlink::wire::new_attribute;
use crate::netlink::{Kind, Netlink};
use crate::netns::Netns;
use crate::watch::Watch;
use cni::AttachmentId;

impl Netlink {
    /// Creates a dummy interface, down, in this connection's namespace.
    ///
    /// # Errors
    /// [`Error::is_exists`] if any interface has this name; [`Error::is_unsupported`] if the kernel
    /// does not support dummy interfaces.
    pub fn create_dummy(&self, name: &str, mac: Mac) -> Result<Link> {
        self.create_link(&LinkRequest::without_index().name(name).mac(mac).kind("dummy", &[]), name)
            .map_err(|cause| Error::new(format_args!("failed to create dummy interface {name}"), cause))
    }

    /// Creates a VRF, up, with this routing table. With the first VRF the kernel adds the routing
    /// rule that all VRFs share.
    ///
    /// # Errors
    /// [`Error::is_exists`] if any interface has this name; [`Error::is_unsupported`] if the kernel
    /// does not support VRFs.
    pub fn create_vrf(&self, name: &str, table: u32) -> Result<Link> {
        let options = new_attribute(IFLA_VRF_TABLE, &table.to_ne_bytes());
        let request = LinkRequest::without_index().up().name(name).kind("vrf", &options);
        self.create_link(&request, name)
            .map_err(|cause| Error::new(format_args!("failed to create VRF {name} with table {table}"), cause))
    }

    /// Creates an ifb (intermediate functional block), up, with the alias of this attachment.
    /// Packets that a filter redirects to an ifb wait in its queue, and then continue as if just
    /// received by the interface that they came from.
    ///
    /// # Errors
    /// [`Error::is_exists`] if any interface has this name. After any other error, no new interface
    /// is left, unless the kernel's answer was lost or the removal failed.
    pub fn create_ifb(&self, name: &str, mac: Mac, mtu: u32, attachment: &AttachmentId) -> Result<Link> {
        let request = LinkRequest::without_index().up().name(name).mac(mac).mtu(mtu).txqlen(0);
        // The kernel ignores an alias at creation. Until the alias is set, `purge_unmarked` finds
        // the ifb by its network's group.
        let request = request.group(AttachmentId::group(&attachment.network)).kind("ifb", &[]);
        let link = self
            .create_link(&request, name)
            .map_err(|cause| Error::new(format_args!("failed to create ifb {name}"), cause))?;
        if let Err(error) = self.set_first_alias(link.index, &attachment.alias()) {
            // An error of the removal is ignored: the first error is returned.
            let _ = self.purge_link(link.index);
            return Err(error);
        }
        Ok(link)
    }

    /// Creates a link (RTM_NEWLINK) and returns it. Fails with EEXIST if the name is in use.
    pub(crate) fn create_link(&self, request: &LinkRequest, name: &str) -> Result<Link, Cause> {
        let answer = self.request(Kind::NewLink, request, NLM_F_CREATE | NLM_F_EXCL | NLM_F_ECHO)?;
        // Kernels since 6.2 answer with the created link; older ones need a second request.
        match answer.iter().find_map(super::decode) {
            Some(link) => Ok(link),
            None => self.get_link(LinkRequest::without_index().name(name))?.ok_or(Cause::LinkNotFound),
        }
    }

    /// Waits until the kernel has noticed an interface's carrier, so that frames sent through the
    /// interface are not dropped. `watch` must have been opened in this connection's namespace
    /// before the change that brings the carrier.
    ///
    /// Needed for a bridge too: with its first port, the bridge gets a carrier, which a worker of
    /// the kernel notices later.
    ///
    /// # Errors
    /// [`Error::is_deadline`] at the deadline, [`Error::is_terminated`] after SIGTERM,
    /// [`Error::is_not_found`] if the interface does not exist.
    pub fn wait_carrier(&self, watch: &Watch, index: u32, deadline: Instant, machine: &dyn Machine) -> Result<()> {
        let what = format!("the carrier of interface {index}");
        watch.wait(&what, deadline, machine, || match self.find_link_by_index(index)? {
            Some(link) => Ok(link.has_carrier().then_some(())),
            None => Err(Error::new(format_args!("failed to find interface {index}"), Cause::LinkNotFound)),
        })
    }

    /// Waits until an interface has a carrier. `netns` is this connection's namespace. If the
    /// interface's state is not yet "up", the calling thread enters `netns` to open a watch.
    ///
    /// # Errors
    /// Those of [`wait_carrier`](Netlink::wait_carrier).
    pub fn wait_carrier_in(&self, netns: &Netns, index: u32, deadline: Instant, machine: &dyn Machine) -> Result<()> {
        if self.find_link_by_index(index)?.is_some_and(|link| link.oper_state == OperState::Up) {
            return Ok(());
        }
        self.wait_carrier(&Watch::open_in(netns)?, index, deadline, machine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BridgeSpec;
    use crate::testing::in_new_netns;
    use cni_testkit::{probe, require};

    #[test]
    fn a_vrf_is_created_with_its_table_and_accepts_ports() {
        require!(probe::vrf());
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            for (name, table) in [("red", 7), ("blue", 70_000)] {
                let made = netlink.create_vrf(name, table).unwrap();
                assert_eq!((made.vrf_table, made.up, made.kind.to_string().as_str()), (Some(table), true, "vrf"));
                assert_eq!(netlink.link(name).unwrap().vrf_table, Some(table));
                assert!(netlink.create_vrf(name, table).unwrap_err().is_exists());
            }
            let (red, bridge) = (netlink.link("red").unwrap(), BridgeSpec::named("br0"));
            let port = netlink.create_bridge(&bridge).unwrap();
            assert_eq!(port.vrf_table, None);
            netlink.set_master(port.index, red.index).unwrap();
            assert_eq!(netlink.list_ports(red.index).unwrap().len(), 1);
            netlink.unset_master(port.index).unwrap();
            assert_eq!(netlink.list_ports(red.index).unwrap(), []);
        });
    }

    #[test]
    fn an_ifb_is_created_up_and_with_its_alias() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let (mac, mark) = (Mac([2, 0, 0, 0, 0, 7]), AttachmentId::new("net", "c1", "eth0"));
            netlink.create_ifb("bwp0", mac, 1400, &mark).unwrap();
            let link = netlink.link("bwp0").unwrap();
            assert_eq!((link.mac, link.mtu, link.txqlen, link.group), (Some(mac), 1400, 0, 0));
            assert_eq!((link.up, link.is_ifb(), link.alias), (true, true, Some(mark.alias())));
            assert!(netlink.create_ifb("bwp0", mac, 1400, &mark).unwrap_err().is_exists());
            assert_eq!(netlink.list_links().unwrap().len(), 2);
        });
    }

    #[test]
    fn a_dummy_is_created_with_its_address() {
        require!(probe::dummy());
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let mac = Mac([2, 0, 0, 0, 0, 7]);
            let link = netlink.create_dummy("eth0", mac).unwrap();
            assert_eq!((link.mac, link.up, link.kind.to_string().as_str()), (Some(mac), false, "dummy"));
            assert!(netlink.create_dummy("eth0", mac).unwrap_err().is_exists());
        });
    }
}
