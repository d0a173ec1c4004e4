//! The plugin `bond`: creates a bond in the container's network namespace, an interface that sends
//! and receives over several others, its ports. The ports are interfaces of the host, which ADD
//! moves into the container, or interfaces that earlier attachments have created there.
//!
//! ADD records the ports on the host. DEL and GC return each port under its name, up or down as it
//! was, with its MAC and MTU. The pod decides nothing about that: see
//! [`BorrowedLink`](cni_plugin::interface::BorrowedLink).
//!
//! `conf` reads the configuration, `record` stores and returns the ports.
//! [`cni_plugin::interface`] does the rest: IPAM, addresses, routes, CHECK, GC.

mod conf;
mod record;

use std::rc::Rc;

use cni::AttachmentId;
use cni::config::{NetConf, ValidAttachments};
use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_linux::{Link, Netlink, Netns};
use cni_plugin::interface::{AttachmentContext, Check, CreatedLink, HostEnd, Interface, Release, ensure_free, failed};
use cni_plugin::record::AttachmentRecord as _;

pub use conf::{Conf, Keys};

use conf::Place;
use record::Record;

/// The part of the plugin `bond` that differs from the other interface plugins.
#[derive(Clone, Copy, Debug)]
pub struct Bond;

impl Interface for Bond {
    type Keys = Keys;
    type Conf = Conf;
    type Link = ();

    const NAME: &'static str = "bond";
    const KIND: &'static str = "bond";
    const HOST_END: HostEnd = HostEnd::None;
    /// As with host-device: DEL may have to be repeated until the names of the ports are free on
    /// the host.
    const RELEASE: Release = Release::BeforeLink;

    fn parse(&self, conf: &NetConf, _args: &str) -> Result<Conf> {
        Conf::new(conf)
    }

    fn create<'a>(
        &self,
        context: &AttachmentContext<'a, Conf>,
        rollback: &mut Rollback<'a>,
    ) -> Result<CreatedLink<()>> {
        let AttachmentContext { conf, host, container, netns, .. } = context;
        let call = context.call;
        if ![&*call.ifname, ""].contains(&&*conf.ifname) {
            let msg = format!("ifname {:?} is not CNI_IFNAME, {:?}", conf.ifname, call.ifname);
            return Err(Error::config(msg));
        }
        let place = if conf.place == Place::Host { host } else { container };
        let ports = find_ports(place, conf)?;
        let record = Record::new(&context.attachment, container, netns, conf.place, &ports);
        let (undo_record, undo_host, undo_container) = (record.clone(), Rc::clone(host), container.clone());
        let undo_netns = Netns::open(netns.path())?;
        rollback.push("return the ports of the bond", move || {
            undo_record.give_back(&undo_container, &undo_netns)?;
            undo_record.complete(call, &undo_host)
        });
        // Written before the first change, so that DEL recognises the ports even if this process is
        // killed.
        record.write()?;
        let bond = container.create_bond(&call.ifname, &conf.options, conf.mtu)?;
        container.set_alias(bond.index, &context.attachment.alias())?;
        for port in &ports {
            place.set_down(port.index)?;
            let index = if conf.place == Place::Host {
                let alias = port.alias.as_deref().unwrap_or_default();
                host.move_link(port.index, netns, &port.name, alias)?;
                container.link(&port.name)?.index
            } else {
                port.index
            };
            container.set_master(index, bond.index)?;
        }
        // The bond has got the MAC of its first port.
        let bond = container.link(&call.ifname)?;
        let mac = bond.mac.ok_or_else(|| Error::new(Code::KERNEL, format!("{} has no Ethernet address", bond.name)))?;
        let result = AddResult { interfaces: vec![context.container_interface(mac)], ..AddResult::default() };
        Ok(CreatedLink { index: bond.index, mac, result, interface_position: 0, link: () })
    }

    /// Also checks the mode, and that each configured interface is a port of the bond.
    fn check(&self, check: &Check<'_, Conf>) -> Result<()> {
        let (conf, bond) = (&check.context.conf, &check.inner);
        let mode = conf.options.mode;
        if bond.bond_mode != Some(mode) {
            let found = bond.bond_mode.map_or("unknown", |mode| mode.name());
            return Err(failed(format!("bond {} has mode {found}, expected {}", bond.name, mode.name())));
        }
        let ports = check.context.container.list_ports(bond.index)?;
        for name in &conf.links {
            // The name can be an alternative one.
            let link = check.context.container.find_link(name)?;
            if !link.is_some_and(|link| ports.iter().any(|port| port.index == link.index)) {
                return Err(failed(format!("{name} is not a port of bond {}", bond.name)));
            }
        }
        check.compare_interface()?;
        check.compare_layer3()?;
        check.wait_for_dad(check.settle_deadline())
    }

    fn remove_recorded(&self, call: &Call<'_>, container: &Netlink, netns: &Netns) -> Result<bool> {
        let Some(record) = Record::find(&call.attachment())? else { return Ok(false) };
        record.give_back(container, netns)?;
        Ok(true)
    }

    /// Removes a bond without a record, which the plugin of k8snetworkplumbingwg has created, and
    /// moves the configured ports to the host.
    fn remove(&self, call: &Call<'_>, container: &Netlink, inner: &Link) -> Result<()> {
        let keys: Keys = call.conf.decode().unwrap_or_default();
        let ports = container.list_ports(inner.index)?;
        for port in &ports {
            container.unset_master(port.index)?;
        }
        container.purge_link(inner.index)?;
        if keys.place() == Place::Container {
            return Ok(());
        }
        let mut errors = Vec::new();
        for port in ports.iter().filter(|port| keys.links().any(|name| name == port.name)) {
            let alias = port.alias.as_deref().unwrap_or_default();
            let move_to_host = || -> Result<()> {
                ensure_free(&port.name)?;
                Ok(container.move_link(port.index, &Netns::current()?, &port.name, alias)?)
            };
            errors.extend(move_to_host().err());
        }
        Error::join(errors)
    }

    fn clean(&self, call: &Call<'_>, attachment: &AttachmentId) -> Result<()> {
        match Record::find(attachment)? {
            Some(record) => record.complete(call, &Netlink::open()?),
            None => Ok(()),
        }
    }

    /// Completes the return of ports whose attachments are not in `valid`. Leaves those that are
    /// still in a container.
    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        let stale = Record::list_stale(call, valid)?;
        if stale.is_empty() {
            return Ok(());
        }
        let host = Netlink::open()?;
        Error::join(stale.iter().filter_map(|record| record.complete(call, &host).err()))
    }
}

/// Returns the configured ports, in their order.
///
/// # Errors
/// - Code 7 if one does not exist, its MTU is smaller than the configured one, or it is the other
///   end of another.
/// - Code 102 if one is a port of a bridge, VRF or bond.
fn find_ports(netlink: &Netlink, conf: &Conf) -> Result<Vec<Link>> {
    let mut ports = Vec::new();
    for name in &conf.links {
        let port = netlink.find_link(name)?.ok_or_else(|| {
            Error::config(format!("Failed to confirm that link ({name}) exists, error: Link not found"))
        })?;
        if let Some(mtu) = conf.mtu.filter(|mtu| *mtu > port.mtu) {
            let msg = format!("invalid MTU {mtu}, must be at most that of {name}, {}", port.mtu);
            return Err(Error::config(msg));
        }
        if port.master.is_some() {
            return Err(Error::new(Code::CONFLICT, format!("{name} is attached to another interface already")));
        }
        ports.push(port);
    }
    // In the container, neither could be recognised by its other end on the host.
    let is_beside = |port: &Link, other: &Link| port.peer_netnsid.is_none() && port.peer_index == Some(other.index);
    for port in &ports {
        if let Some(other) = ports.iter().find(|other| is_beside(port, other)) {
            return Err(Error::config(format!("links: {} is the other end of {}, or below it", other.name, port.name)));
        }
    }
    Ok(ports)
}
