//! `host-device`: an interface of the host moves into a container's network namespace, and back.
//!
//! While the interface is in the container, its alias is the name that it had on the host, as Go's
//! plugin writes it: so either plugin can give it back. The kernel moves a hardware interface back
//! by itself when its namespace ends, under the container's name and still with the alias: DEL
//! finds it then in the host's namespace. `conf` reads the configuration, `device` finds what it
//! selects. Everything else around the link is [`cni_plugin::interface`]'s.

mod conf;
mod device;

use std::rc::Rc;

use cni::AttachmentId;
use cni::config::NetConf;
use cni::result::{AddResult, Interface as ResultInterface};
use cni::rollback::{Notes, Rollback};
use cni::skel::Call;
use cni::{Code, Error, Result, ident};
use cni_linux::{Link, Mac, Netlink, Netns};
use cni_plugin::interface::{
    AttachmentContext, CreatedLink, HostEnd, Interface, Layer3Policy, Ownership, Release, host_interface, name_taken,
};

pub use conf::{Conf, Keys};

use device::{Device, find, has_the_only_default_routes, names_of};

/// The plugin's part that is not every interface plugin's.
#[derive(Clone, Copy, Debug)]
pub struct HostDevice;

impl Interface for HostDevice {
    type Keys = Keys;
    type Conf = Conf;
    type Link = ();

    const NAME: &'static str = "host-device";
    const KIND: &'static str = "device";
    const HOST_END: HostEnd = HostEnd::None;
    /// As in Go: DEL may have to be repeated until the host's name is free.
    const RELEASE: Release = Release::BeforeLink;

    fn parse(&self, conf: &NetConf, _args: &str, notes: &Notes) -> Result<Conf> {
        Conf::new(conf, notes)
    }

    fn layer3<'c>(&self, conf: &'c Conf) -> Layer3Policy<'c> {
        Layer3Policy { ipam: conf.ipam.as_deref(), dns: conf.dns.as_ref(), ..Layer3Policy::default() }
    }

    fn is_in_kernel(&self, conf: &Conf) -> Result<bool> {
        Ok(Device::of(conf)? != Device::Dpdk)
    }

    fn is_kind(&self, _link: &Link) -> bool {
        true
    }

    fn create<'a>(
        &self,
        context: &AttachmentContext<'a, Conf>,
        rollback: &mut Rollback<'a>,
    ) -> Result<CreatedLink<()>> {
        let (index, mac) = match Device::of(&context.conf)? {
            Device::Dpdk => (0, None),
            Device::Interface(selector) => {
                let device = find(&context.host, &selector)?;
                if has_the_only_default_routes(&context.host, &device)? {
                    context.call.notes.note(format_args!("{}", cut_off(&device)));
                }
                (take(context, &device, rollback)?, device.mac)
            }
        };
        let sandbox = context.call.sandbox().to_owned();
        let interface = ResultInterface { sandbox, ..host_interface(&context.call.ifname, mac) };
        let result = AddResult { interfaces: vec![interface], ..AddResult::default() };
        Ok(CreatedLink { index, mac: mac.unwrap_or(Mac::ZERO), result, interface: 0, link: () })
    }

    /// Go marks the interface by its alias alone, and a later plugin may change its hardware
    /// address.
    fn claims(&self, call: &Call<'_>, prev: Option<&AddResult>, inner: &Link) -> Option<Ownership> {
        let is_prev = inner.mac.is_some() && inner.mac == mac_of(call, prev);
        let is_ours = is_prev || host_name(inner).is_some_and(|name| keys_of(call).allow(name, inner.mac));
        Some(if is_ours { Ownership::Ours } else { Ownership::NotOurs })
    }

    /// Gives the interface back to the host, down, under the name that it had there.
    fn remove(&self, _call: &Call<'_>, container: &Netlink, inner: &Link) -> Result<()> {
        let name = host_name(inner).ok_or_else(|| {
            let msg = format!("failed to find original ifname for {:?} (alias is not set)", inner.name);
            Error::new(Code::CONFLICT, msg).with_details("the interface was left in the container")
        })?;
        // The kernel would move the interface before it refuses the name.
        if Netlink::open()?.find_link(name)?.is_some() {
            let msg = format!("failed to move {name:?} to hostNS: file exists");
            let details =
                format!("the host has another interface {name}; until a DEL without it the container keeps the device");
            return Err(Error::new(Code::CONFLICT, msg).with_details(details));
        }
        Ok(container.move_link(inner.index, &Netns::current()?, name, "")?)
    }

    /// Gives the interface its name back where the kernel has moved it to the host.
    fn clean(&self, call: &Call<'_>, _mark: &AttachmentId) -> Result<()> {
        let (keys, host) = (keys_of(call), Netlink::open()?);
        if host.find_link(&keys.device)?.is_some_and(|link| link.alias.is_none()) {
            return Ok(());
        }
        let prev = call.conf.prev_result().ok().flatten();
        let mac = mac_of(call, prev.as_ref());
        for link in host.list_links()? {
            let Some(name) = host_name(&link).filter(|_| keys.select(&link, mac)) else { continue };
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
}

/// Moves the host's interface into the container. Returns its index there.
fn take<'a>(context: &AttachmentContext<'a, Conf>, device: &Link, rollback: &mut Rollback<'a>) -> Result<u32> {
    let AttachmentContext { host, container, call, .. } = context;
    let (home, undo_host, undo_container, before) =
        (Netns::current()?, Rc::clone(host), container.clone(), device.clone());
    rollback.push(format!("give {} back to the host", device.name), move || {
        put_back(&undo_host, &undo_container, &home, &before)
    });
    // First, so that the interface is found wherever the move ends.
    host.set_alias(device.index, &device.name)?;
    let moved = host.move_link(device.index, &context.netns, &call.ifname, &device.name);
    moved.map_err(|error| match error.is_exists() {
        true => name_taken::<HostDevice>(&context.mark),
        false => Error::from(error).context("failed to move link"),
    })?;
    Ok(container.link(&call.ifname)?.index)
}

/// Undoes [`take`], however far it came.
fn put_back(host: &Netlink, container: &Netlink, home: &Netns, before: &Link) -> cni_linux::Result<()> {
    let is_it = |link: &Link| link.alias.as_ref() == Some(&before.name) && link.mac == before.mac;
    let alias = before.alias.as_deref().unwrap_or_default();
    if let Some(moved) = container.list_links()?.into_iter().find(is_it) {
        container.move_link(moved.index, home, &before.name, alias)?;
    } else if let Some(there) = host.find_link(&before.name)?.filter(is_it) {
        host.set_alias(there.index, alias)?;
    }
    if before.up { host.set_up(host.link(&before.name)?.index) } else { Ok(()) }
}

/// The name that an interface had on the host, by its alias.
fn host_name(link: &Link) -> Option<&str> {
    link.alias.as_deref().filter(|alias| ident::check_interface_name(alias).is_ok())
}

/// The hardware address of CNI_IFNAME by `prevResult`.
fn mac_of(call: &Call<'_>, prev: Option<&AddResult>) -> Option<Mac> {
    let prev = prev?;
    let place = prev.interfaces.iter().position(|one| one.name == call.ifname && !one.sandbox.is_empty())?;
    prev.interfaces[place].mac.parse().ok()
}

/// The keys of a configuration that can be read, else none: DEL must work with any.
fn keys_of(call: &Call<'_>) -> Keys {
    call.conf.decode().unwrap_or_default()
}

impl Keys {
    /// Whether an interface in the container that had this name on the host can be the device.
    fn allow(&self, name: &str, mac: Option<Mac>) -> bool {
        match (self.device.as_str(), self.hwaddr.parse().ok()) {
            ("", None) => true,
            ("", hwaddr) => mac == hwaddr,
            (device, _) => name == device,
        }
    }

    /// Whether a link of the host with an alias is the device: by `mac`, which `prevResult` has, or
    /// by the configuration.
    fn select(&self, link: &Link, mac: Option<Mac>) -> bool {
        let hwaddr = self.hwaddr.parse::<Mac>().ok();
        let ids = [&self.pci_bus_id, &self.runtime_config.device_id, &self.kernelpath];
        let has = |mac: Option<Mac>| mac.is_some() && link.mac == mac;
        if has(mac) || has(hwaddr) || ids.iter().any(|id| names_of(id).contains(&link.name)) {
            return true;
        }
        // The configured name decides only if nothing else identifies the device.
        let by_name = mac.is_none() && hwaddr.is_none() && ids.iter().all(|id| id.is_empty());
        by_name && !self.device.is_empty() && link.alias.as_ref() == Some(&self.device)
    }
}

/// Returns the key that selects the device, and a warning, if an ADD on this host would leave it
/// without a default route. What cannot be found is not judged.
pub fn lost_default_route(conf: &NetConf) -> Option<(&'static str, String)> {
    let Ok(Device::Interface(selector)) = Conf::new(conf, &Notes::silent()).and_then(|conf| Device::of(&conf)) else {
        return None;
    };
    let host = Netlink::open().ok()?;
    let device = find(&host, &selector).ok()?;
    has_the_only_default_routes(&host, &device).ok()?.then(|| (selector.key(), cut_off(&device)))
}

fn cut_off(device: &Link) -> String {
    format!(
        "without {} this host has no default route: the container gets the interface that leads out of the host",
        device.name
    )
}
