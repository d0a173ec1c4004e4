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
//! records and returns a recorded interface to the host. `add` moves the interface, `del` returns
//! one without a record. [`cni_plugin::interface`] does the rest: IPAM, addresses, routes, CHECK,
//! GC.

mod add;
mod conf;
mod del;
mod device;
mod record;

use cni::AttachmentId;
use cni::config::{NetConf, ValidAttachments};
use cni::result::{AddResult, Interface as ResultInterface};
use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Error, Result, ident};
use cni_linux::{Link, LinkKind, Mac, Netlink, Netns};
use cni_plugin::interface::{AttachmentContext, CreatedLink, HostEnd, Interface, Release, host_interface};
use cni_plugin::record::AttachmentRecord as _;

pub use conf::{Conf, Keys};

use device::{Device, find, has_the_only_default_routes, is_at, list_interfaces};
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

    fn parse(&self, conf: &NetConf, _args: &str) -> Result<Conf> {
        Conf::new(conf)
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
                let found = find(&context.host, &selector);
                // What the kernel has moved back may have the name that it had in a container.
                let is_untouched = |link: &Link| link.alias.is_none() && link.permanent_mac.is_none();
                let device = match found {
                    Ok(device) if is_untouched(&device) => device,
                    _ if record::complete_fallen_back(context.call, &context.host)? => find(&context.host, &selector)?,
                    found => found?,
                };
                if has_the_only_default_routes(&context.host, &device)? {
                    context.call.notes.note(format_args!("{}", default_route_warning(&device)));
                }
                (add::move_to_container(context, &device, rollback)?, device.mac)
            }
        };
        let sandbox = context.call.sandbox().to_owned();
        let interface = ResultInterface { sandbox, ..host_interface(&context.call.ifname, mac) };
        let result = AddResult { interfaces: vec![interface], ..AddResult::default() };
        Ok(CreatedLink { index, mac: mac.unwrap_or(Mac::ZERO), result, interface_position: 0, link: () })
    }

    /// Returns `true` if the interface has the hardware address in `prevResult`, or if the
    /// configuration may have selected it. The address alone does not suffice, because a later
    /// plugin may have changed it. Never returns `None`, because the alias does not name an
    /// attachment.
    fn claims(&self, call: &Call<'_>, prev: Option<&AddResult>, inner: &Link) -> Option<bool> {
        let has_prev_mac = inner.mac.is_some() && inner.mac == prev_mac(call, prev);
        let may_be_selected =
            || host_name(inner).is_some_and(|name| keys_of(call).may_have_selected(name, inner) && !is_dpdk(call));
        Some(has_prev_mac || may_be_selected())
    }

    fn remove_recorded(&self, call: &Call<'_>, container: &Netlink, netns: &Netns) -> Result<bool> {
        match Record::find(&call.attachment())? {
            Some(record) => record.give_back(call, container, netns).map(|()| true),
            None => record::keep_for_another(call, container, netns),
        }
    }

    fn remove(&self, call: &Call<'_>, container: &Netlink, inner: &Link) -> Result<()> {
        del::remove(call, container, inner)
    }

    fn clean(&self, call: &Call<'_>, attachment: &AttachmentId) -> Result<()> {
        del::clean(call, attachment)
    }

    /// Completes the return of interfaces whose attachments are not in `valid`. Leaves those that
    /// are still in a container.
    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        let stale = Record::list_stale(call, valid)?;
        if stale.is_empty() {
            return Ok(());
        }
        let host = Netlink::open()?;
        Error::join(stale.iter().filter_map(|record| record.complete(call, &host).err()))
    }
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

/// Whether the configuration selects a device without an interface, so that ADD has moved none.
fn is_dpdk(call: &Call<'_>) -> bool {
    let selected = Conf::new(&call.conf).and_then(|conf| Device::selected_by(&conf));
    selected.is_ok_and(|device| device == Device::Dpdk)
}

/// Returns the configuration's keys, or none if it cannot be decoded: DEL must work with every
/// configuration.
fn keys_of(call: &Call<'_>) -> Keys {
    call.conf.decode().unwrap_or_default()
}

impl Keys {
    /// Whether the configuration may have selected `inner`, which is now in the container. `name`
    /// is the name that it had on the host.
    fn may_have_selected(&self, name: &str, inner: &Link) -> bool {
        match (self.device.as_str(), self.hwaddr.parse().ok()) {
            // Another key selected the device. A pod cannot create an interface of a device.
            ("", None) => inner.kind == LinkKind::Device && self.may_be_on_device(inner),
            ("", hwaddr) => inner.mac == hwaddr,
            (device, _) => name == device,
        }
    }

    /// Whether `inner` is an interface of a configured device, as far as the kernel reports the
    /// device of an interface.
    fn may_be_on_device(&self, inner: &Link) -> bool {
        // The bus and the name: `pci/0000:00:1f.6`.
        let Some((_, parent)) = inner.parent.as_ref().and_then(|parent| parent.rsplit_once('/')) else { return true };
        self.devices().iter().any(|device| is_at(device, parent))
    }

    /// Returns the values of the keys that select an interface by its device; empty if not given.
    fn devices(&self) -> [&str; 3] {
        [&self.pci_bus_id, &self.runtime_config.device_id, &self.kernelpath]
    }

    /// Whether `link`, a link of the host with an alias, is the device of this configuration.
    /// `prev_mac` is the hardware address in `prevResult`.
    fn identifies(&self, link: &Link, prev_mac: Option<Mac>) -> bool {
        let hwaddr = self.hwaddr.parse::<Mac>().ok();
        let devices = self.devices();
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
    let conf = Conf::new(conf).ok()?;
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
