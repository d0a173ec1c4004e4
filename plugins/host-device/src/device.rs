//! Finds the device that a configuration selects on this host.
//!
//! Devices are looked up in sysfs, which only shows the interfaces in the host's own namespace: a
//! device whose interface is in a container appears to have none.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cni::{Error, Result};
use cni_linux::route::Family;
use cni_linux::{Link, LinkKind, Mac, Netlink};

use crate::conf::{Conf, Selector, not_a_kernel_path};

/// The folder with a link to the folder of each PCI device, named by its address.
const PCI: &str = "/sys/bus/pci/devices";
/// The folder with a link to the folder of each device on the auxiliary bus.
const AUXILIARY: &str = "/sys/bus/auxiliary/devices";

/// The text of Go's plugin for a configuration that selects no device.
const NO_SELECTOR: &str = r#"specify either "device", "hwaddr", "kernelpath" or "pciBusID""#;

/// The kernel drivers that leave a device to a user-space program, such as one with DPDK.
const DPDK_DRIVERS: [&str; 3] = ["vfio-pci", "uio_pci_generic", "igb_uio"];

/// A device of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// A device without an interface, because a user-space program drives it.
    Dpdk,
    /// A device with an interface, and the property by which it is found.
    Interface(Selector),
}

impl Device {
    /// Returns the device that `conf` selects: [`Dpdk`](Device::Dpdk) if `DPDKMode` is set, or if
    /// `runtimeConfig.deviceID` or else `pciBusID` names a PCI device with a driver for DPDK.
    /// Otherwise the first key that is set decides, in the order of Go's plugin: `device`,
    /// `hwaddr`, `kernelpath`, `runtimeConfig.deviceID`, `pciBusID`. `DPDKMode` alone selects no
    /// device.
    ///
    /// # Errors
    /// - Code 7, with the texts of Go's plugin, if no key selects a device, or if this host does
    ///   not have the device that `runtimeConfig.deviceID` names.
    /// - The errors of [`has_dpdk_driver`].
    pub(crate) fn selected_by(conf: &Conf) -> Result<Device> {
        let (mut pci, mut auxiliary) = (conf.pci.clone(), None);
        if let Some(id) = &conf.device_id {
            if Path::new(PCI).join(id).exists() {
                pci = Some(id.clone());
            } else if Path::new(AUXILIARY).join(id).exists() {
                (pci, auxiliary) = (None, Some(id.clone()));
            } else {
                return Err(Error::config(format!("runtime config DeviceID {id} not found or unsupported")));
            }
        }
        let is_dpdk = match &pci {
            Some(address) => has_dpdk_driver(address)?,
            None => false,
        };
        let selector = conf.selector.clone().or(pci.map(Selector::Pci)).or(auxiliary.map(Selector::Auxiliary));
        let selector = selector.ok_or_else(|| Error::config(NO_SELECTOR))?;
        Ok(if is_dpdk || conf.dpdk_mode { Device::Dpdk } else { Device::Interface(selector) })
    }
}

/// Whether the driver of the PCI device with this address is one of [`DPDK_DRIVERS`].
///
/// # Errors
/// Code 7, with the text of Go's plugin, if there is no such device or it has no driver.
fn has_dpdk_driver(address: &str) -> Result<bool> {
    let device = Path::new(PCI).join(address);
    let missing = |path: &Path, error: &io::Error| {
        Error::config(format!("error with host device: lstat {}: {}", path.display(), go_text(error)))
    };
    let device_folder = fs::canonicalize(&device).map_err(|error| missing(&device, &error))?;
    let driver_link = device_folder.join("driver");
    let driver = fs::canonicalize(&driver_link).map_err(|error| missing(&driver_link, &error))?;
    Ok(DPDK_DRIVERS.iter().any(|name| driver.ends_with(name)))
}

/// Returns the interface that `selector` selects in the host's namespace.
///
/// # Errors
/// - Code 7, with the texts of Go's plugin, if there is none.
/// - The errors of the kernel.
pub(crate) fn find(host: &Netlink, selector: &Selector) -> Result<Link> {
    let name = match selector {
        Selector::Name(name) => name.clone(),
        Selector::Mac(mac) => return find_by_mac(host, *mac),
        Selector::KernelPath(path) => {
            // If the path does not exist, `first_entry` reports that.
            let real = fs::canonicalize(path).unwrap_or_else(|_| path.clone());
            if !real.starts_with("/sys/devices") {
                return Err(not_a_kernel_path(&path.display().to_string()));
            }
            first_entry(&real.join("net"))?
        }
        Selector::Pci(address) => first_entry(&pci_folder(address)?)?,
        Selector::Auxiliary(name) => first_entry(&Path::new(AUXILIARY).join(name).join("net"))?,
    };
    let link = host.find_link(&name)?;
    link.ok_or_else(|| {
        not_found("Link not found").with_details(format!("{}: the host has no interface {name:?}", selector.key()))
    })
}

/// Returns the names of a device's interfaces in the host's namespace; none if there is no such
/// device or `device` is empty. `device` is the name of a PCI or auxiliary device, or the absolute
/// path of a device's folder, which [`Path::join`] returns unchanged.
pub(crate) fn list_interfaces(device: &str) -> Vec<String> {
    let mut names = Vec::new();
    let auxiliary_folder = Path::new(AUXILIARY).join(device).join("net");
    for folder in pci_folder(device).into_iter().chain([auxiliary_folder]) {
        // A folder that does not exist has no interfaces.
        names.extend(entries(&folder).unwrap_or_default());
    }
    names
}

/// Whether `parent`, the name of the device below an interface, is that of `device`, or of the
/// virtio device in it. `device` is as for [`list_interfaces`].
pub(crate) fn is_at(device: &str, parent: &str) -> bool {
    let folders = [PCI, AUXILIARY].map(|bus| Path::new(bus).join(device));
    let has_name = |folder: &PathBuf| {
        let real = fs::canonicalize(folder).unwrap_or_else(|_| folder.clone());
        real.ends_with(parent) || (parent.starts_with("virtio") && real.join(parent).exists())
    };
    !device.is_empty() && folders.iter().any(has_name)
}

/// Returns the error for a device that does not exist or has no interface, with the text of Go's
/// plugin.
fn not_found(reason: impl std::fmt::Display) -> Error {
    Error::config(format!("failed to find host device: {reason}"))
}

/// Returns the text of an I/O error. For a missing file, it is the text of Go's plugin.
fn go_text(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or directory".to_owned(),
        _ => error.to_string(),
    }
}

/// Returns the folder in sysfs with the interfaces of the PCI device `address`: `net` in the
/// device's folder or, for a virtio device, one level deeper in `virtioN`.
///
/// # Errors
/// Code 7 if neither exists.
fn pci_folder(address: &str) -> Result<PathBuf> {
    let device = Path::new(PCI).join(address);
    let net = device.join("net");
    if net.exists() {
        return Ok(net);
    }
    let children = entries(&device).unwrap_or_default();
    match children.iter().find(|name| name.starts_with("virtio")) {
        Some(virtio) => Ok(device.join(virtio).join("net")),
        None => Err(not_found(format!("no net directory under pci device {address}"))),
    }
}

/// Returns the first interface in `folder`, a folder `net` of sysfs, in alphabetical order.
///
/// # Errors
/// Code 7, with the texts of Go's plugin, if the folder cannot be read or is empty.
fn first_entry(folder: &Path) -> Result<String> {
    let names = entries(folder).map_err(|error| {
        let folder = folder.display();
        not_found(format!("failed to read directory {folder}: \"open {folder}: {}\"", go_text(&error)))
    })?;
    let is_empty = || not_found(format!("failed to find network device in path {}", folder.display()));
    names.into_iter().next().ok_or_else(is_empty)
}

/// Returns the names in `folder`, sorted.
fn entries(folder: &Path) -> io::Result<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Returns the interface with the hardware address `mac`. A VLAN or bridge on top of a device often
/// has the address of the device. In that case, returns the device.
///
/// # Errors
/// Code 7 if no interface has the address, or the choice is ambiguous.
fn find_by_mac(host: &Netlink, mac: Mac) -> Result<Link> {
    let mut links = host.list_links()?;
    links.retain(|link| link.mac == Some(mac));
    if links.iter().any(|link| link.kind == LinkKind::Device) {
        links.retain(|link| link.kind == LinkKind::Device);
    }
    if links.len() > 1 {
        let names: Vec<&str> = links.iter().map(|link| link.name.as_str()).collect();
        return Err(Error::config(format!(
            "hwaddr: {mac} is the address of several interfaces ({}): choose one with \"device\"",
            names.join(", ")
        )));
    }
    links.pop().ok_or_else(|| not_found("failed to find physical interface"))
}

/// Whether the host has default routes and all of them lead over `device`.
///
/// # Errors
/// Code 100 if the kernel cannot be asked.
pub(crate) fn has_the_only_default_routes(host: &Netlink, device: &Link) -> Result<bool> {
    // No route leads over an interface that is down.
    if !device.up {
        return Ok(false);
    }
    let mut defaults = host.list_all_routes(Family::V4)?;
    defaults.extend(host.list_all_routes(Family::V6)?);
    defaults.retain(|route| route.dst.is_default_route());
    Ok(!defaults.is_empty() && defaults.iter().all(|route| route.oif == device.index))
}
