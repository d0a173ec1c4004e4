//! The plugin `host-device`: ADD moves an interface of the host into the container's network
//! namespace, DEL moves it back.
//!
//! ADD records on the host which interface it moves. DEL identifies the interface by that record
//! and by properties that the kernel guarantees, because the pod can change name, alias and
//! hardware address. Without a record, because Go's plugin has moved the interface, DEL uses the
//! alias:
//!
//! While the interface is in the container, its alias is the name that it had on the host. Go's
//! plugin does the same, so each plugin can move back an interface that the other one has moved.
//! When a namespace ends, the kernel itself moves a hardware interface to the host, with its alias
//! and the name that it had in the container. DEL then finds the interface by the alias and renames
//! it.
//!
//! `conf` reads the configuration, `device` finds the device that it selects, `record` stores the
//! records, `give_back` returns a recorded interface to the host.
//! [`cni_plugin::interface`] does the rest: IPAM, addresses, routes, CHECK, GC.

mod conf;
mod device;
mod give_back;
mod record;

use std::rc::Rc;

use cni::AttachmentId;
use cni::config::{NetConf, ValidAttachments};
use cni::result::{AddResult, Interface as ResultInterface};
use cni::rollback::{Notes, Rollback};
use cni::skel::Call;
use cni::{Code, Error, Result, ident};
use cni_linux::{Link, Mac, Netlink, Netns};
use cni_plugin::interface::{
    AttachmentContext, CreatedLink, HostEnd, Interface, Layer3Policy, Ownership, Release, host_interface, name_taken,
};
use cni_plugin::record::AttachmentRecord as _;

pub use conf::{Conf, Keys};

use device::{Device, find, has_the_only_default_routes, list_interfaces};
use give_back::ensure_free;
use record::Record;

/// The part of the plugin `host-device` that differs from the other interface plugins.
#[derive(Clone, Copy, Debug)]
pub struct HostDevice;

impl Interface for HostDevice {
    type Keys = Keys;
    type Conf = Conf;
    type Link = ();

    const NAME: &'static str = "host-device";
    const KIND: &'static str = "device";
    const HOST_END: HostEnd = HostEnd::None;
    /// The addresses are released first, as in Go's plugin: the interface cannot be moved back
    /// before its name is free on the host, and DEL may have to be repeated until then.
    const RELEASE: Release = Release::BeforeLink;

    fn parse(&self, conf: &NetConf, _args: &str, notes: &Notes) -> Result<Conf> {
        Conf::new(conf, notes)
    }

    fn layer3<'c>(&self, conf: &'c Conf) -> Layer3Policy<'c> {
        Layer3Policy { ipam: conf.ipam.as_deref(), dns: conf.dns.as_ref(), ..Layer3Policy::default() }
    }

    fn is_in_kernel(&self, conf: &Conf) -> Result<bool> {
        Ok(Device::selected_by(conf)? != Device::Dpdk)
    }

    fn is_kind(&self, _link: &Link) -> bool {
        true
    }

    /// Moves the selected device into the container, unless a user-space program drives the device.
    /// Prints a note if the host loses its default routes.
    fn create<'a>(
        &self,
        context: &AttachmentContext<'a, Conf>,
        rollback: &mut Rollback<'a>,
    ) -> Result<CreatedLink<()>> {
        let (index, mac) = match Device::selected_by(&context.conf)? {
            // No interface: index 0, see `CreatedLink`.
            Device::Dpdk => (0, None),
            Device::Interface(selector) => {
                let device = find(&context.host, &selector)?;
                if has_the_only_default_routes(&context.host, &device)? {
                    context.call.notes.note(format_args!("{}", default_route_warning(&device)));
                }
                (move_to_container(context, &device, rollback)?, device.mac)
            }
        };
        let sandbox = context.call.sandbox().to_owned();
        let interface = ResultInterface { sandbox, ..host_interface(&context.call.ifname, mac) };
        let result = AddResult { interfaces: vec![interface], ..AddResult::default() };
        Ok(CreatedLink { index, mac: mac.unwrap_or(Mac::ZERO), result, interface_position: 0, link: () })
    }

    /// Returns `Ours` if the interface has the hardware address in `prevResult`, or if the
    /// configuration may have selected it. The address alone does not suffice, because a later
    /// plugin may have changed it. Never returns `None`, because the alias does not name an
    /// attachment.
    fn claims(&self, call: &Call<'_>, prev: Option<&AddResult>, inner: &Link) -> Option<Ownership> {
        let has_prev_mac = inner.mac.is_some() && inner.mac == prev_mac(call, prev);
        let may_be_selected = || host_name(inner).is_some_and(|name| keys_of(call).may_have_selected(name, inner.mac));
        Some(if has_prev_mac || may_be_selected() { Ownership::Ours } else { Ownership::NotOurs })
    }

    fn remove_recorded(&self, call: &Call<'_>, container: &Netlink, netns: &Netns) -> Result<bool> {
        let Some(record) = Record::find(&call.attachment())? else { return Ok(false) };
        give_back::from_container(call, &record, container, netns)?;
        Ok(true)
    }

    /// Moves an interface without a record back to the host, where it gets its former name and is
    /// down. The configured name comes before the alias, which the pod can write.
    ///
    /// # Errors
    /// - Code 102 if the former name is unknown, or another interface of the host has it.
    /// - The errors of the kernel.
    fn remove(&self, call: &Call<'_>, container: &Netlink, inner: &Link) -> Result<()> {
        let configured = keys_of(call).device;
        let name = host_name(inner).map(|alias| if configured.is_empty() { alias } else { &configured });
        let name = name.ok_or_else(|| {
            let why = match inner.alias.as_deref() {
                None | Some("") => "alias is not set".to_owned(),
                Some(alias) => format!("its alias {alias:?} is not an interface name"),
            };
            let msg = format!("failed to find original ifname for {:?} ({why})", inner.name);
            Error::new(Code::CONFLICT, msg).with_details("the interface was left in the container")
        })?;
        ensure_free(name)?;
        Ok(container.move_link(inner.index, &Netns::current()?, name, "")?)
    }

    /// Renames the interface if the kernel has moved it to the host, because the container's
    /// namespace ended: gives it the recorded name or else the one in its alias, and removes the
    /// alias.
    fn clean(&self, call: &Call<'_>, attachment: &AttachmentId) -> Result<()> {
        let (keys, host) = (keys_of(call), Netlink::open()?);
        if let Some(record) = Record::find(attachment)? {
            return give_back::complete(call, &record, &host);
        }
        // Usually the device is already on the host again, and the list of all links is not needed.
        if host.find_link(&keys.device)?.is_some_and(|link| link.alias.is_none()) {
            return Ok(());
        }
        // An unreadable `prevResult` was already noted when DEL began.
        let prev = call.conf.prev_result().ok().flatten();
        let prev_mac = prev_mac(call, prev.as_ref());
        for link in host.list_links()? {
            let Some(alias) = host_name(&link) else { continue };
            let name = if keys.device.is_empty() { alias } else { &keys.device };
            if !keys.identifies(&link, prev_mac) {
                continue;
            }
            if link.name != name {
                if link.up {
                    host.set_down(link.index)?;
                }
                host.set_name(link.index, name)?;
            }
            host.set_alias(link.index, "")?;
        }
        Ok(())
    }

    /// Completes the return of interfaces whose attachments are not in `valid`. Leaves those that
    /// are still in a container.
    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        let stale = Record::list_stale(call, valid)?;
        if stale.is_empty() {
            return Ok(());
        }
        let host = Netlink::open()?;
        Error::join(stale.iter().filter_map(|record| give_back::complete(call, record, &host).err()))
    }
}

/// Moves `device` from the host into the container, where it is named CNI_IFNAME. Returns its index
/// in the container.
///
/// # Errors
/// - Code 102 if the container has an interface of that name.
/// - Code 100 if the kernel refuses the move.
fn move_to_container<'a>(
    context: &AttachmentContext<'a, Conf>,
    device: &Link,
    rollback: &mut Rollback<'a>,
) -> Result<u32> {
    let AttachmentContext { host, container, call, .. } = context;
    let (undo_host, undo_container, before) = (Rc::clone(host), container.clone(), device.clone());
    let record = Record::new(&context.attachment, &context.netns, device);
    let undo_record = record.clone();
    rollback.push(format!("move {} back to the host", device.name), move || {
        undo_move(&undo_host, &undo_container, &undo_record, &before)
    });
    // The record and the alias are written before the move, so that DEL recognises the interface
    // even if this process is killed.
    record.write()?;
    host.set_alias(device.index, &device.name)?;
    let moved = host.move_link(device.index, &context.netns, &call.ifname, &device.name);
    moved.map_err(|error| {
        if error.is_exists() {
            name_taken::<HostDevice>(&context.attachment)
        } else {
            Error::from(error).context("failed to move link")
        }
    })?;
    Ok(container.link(&call.ifname)?.index)
}

/// Undoes [`move_to_container`], which may have failed at any point: moves the interface back if it
/// is in the container, restores its name, alias and state, and removes the record. `before` is the
/// device before ADD.
fn undo_move(host: &Netlink, container: &Netlink, record: &Record, before: &Link) -> Result<()> {
    let alias = before.alias.as_deref().unwrap_or_default();
    if let Some(moved) = give_back::find_in(record, container)? {
        container.move_link(moved.index, &Netns::current()?, &before.name, alias)?;
    } else if let Some(unmoved) = host.find_link(&before.name)?.filter(|link| record.fits(link, None)) {
        host.set_alias(unmoved.index, alias)?;
    }
    if before.up {
        host.set_up(host.link(&before.name)?.index)?;
    }
    record.purge()
}

/// Returns the name that the interface had on the host, which is its alias, or `None` if its alias
/// cannot be the name of an interface.
fn host_name(link: &Link) -> Option<&str> {
    link.alias.as_deref().filter(|alias| ident::check_interface_name(alias).is_ok())
}

/// Returns the hardware address that `prev`, the result of ADD, has for CNI_IFNAME.
fn prev_mac(call: &Call<'_>, prev: Option<&AddResult>) -> Option<Mac> {
    let prev = prev?;
    let interface =
        prev.interfaces.iter().find(|interface| interface.name == call.ifname && !interface.sandbox.is_empty())?;
    interface.mac.parse().ok()
}

/// Returns the configuration's keys, or none if it cannot be decoded: DEL must work with every
/// configuration.
fn keys_of(call: &Call<'_>) -> Keys {
    call.conf.decode().unwrap_or_default()
}

impl Keys {
    /// Whether the configuration may have selected an interface that is now in the container.
    /// `name` is the name that it had on the host, `mac` its hardware address.
    fn may_have_selected(&self, name: &str, mac: Option<Mac>) -> bool {
        match (self.device.as_str(), self.hwaddr.parse().ok()) {
            // Another key selected the device: that key gives neither a name nor an address.
            ("", None) => true,
            ("", hwaddr) => mac == hwaddr,
            (device, _) => name == device,
        }
    }

    /// Whether `link`, a link of the host with an alias, is the device of this configuration.
    /// `prev_mac` is the hardware address in `prevResult`.
    fn identifies(&self, link: &Link, prev_mac: Option<Mac>) -> bool {
        let hwaddr = self.hwaddr.parse::<Mac>().ok();
        let devices = [&self.pci_bus_id, &self.runtime_config.device_id, &self.kernelpath];
        let has_mac = |mac: Option<Mac>| mac.is_some() && link.mac == mac;
        if has_mac(prev_mac)
            || has_mac(hwaddr)
            || devices.iter().any(|device| list_interfaces(device).contains(&link.name))
        {
            return true;
        }
        // The configured name decides only if nothing else identifies the device.
        let only_by_name = prev_mac.is_none() && hwaddr.is_none() && devices.iter().all(|device| device.is_empty());
        only_by_name && !self.device.is_empty() && link.alias.as_ref() == Some(&self.device)
    }
}

/// Returns a warning if an ADD with this configuration would leave this host without a default
/// route, with the key of the configuration that selects the device. Returns `None` after an error.
pub fn lost_default_route(conf: &NetConf) -> Option<(&'static str, String)> {
    let conf = Conf::new(conf, &Notes::silent()).ok()?;
    let Device::Interface(selector) = Device::selected_by(&conf).ok()? else { return None };
    let host = Netlink::open().ok()?;
    let device = find(&host, &selector).ok()?;
    let is_lost = has_the_only_default_routes(&host, &device).ok()?;
    if is_lost { Some((selector.key(), default_route_warning(&device))) } else { None }
}

/// Returns the warning for a device with the host's only default routes.
fn default_route_warning(device: &Link) -> String {
    format!(
        "without {} this host has no default route: the container gets the interface that leads out of the host",
        device.name
    )
}
