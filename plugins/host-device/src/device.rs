//! The device that a configuration selects on this host.
//!
//! sysfs shows the network interfaces of a device that are in the host's namespace, and only those.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cni::{Error, Result};
use cni_linux::route::Family;
use cni_linux::{Link, LinkKind, Mac, Netlink};

use crate::conf::{Conf, Selector, not_a_kernel_path};

const PCI: &str = "/sys/bus/pci/devices";
const AUXILIARY: &str = "/sys/bus/auxiliary/devices";

/// Go's words where nothing selects a device.
const NOTHING: &str = r#"specify either "device", "hwaddr", "kernelpath" or "pciBusID""#;

/// The drivers of devices that a program drives by itself.
const DPDK_DRIVERS: [&str; 3] = ["vfio-pci", "uio_pci_generic", "igb_uio"];

/// A device of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// A program drives it: there is no interface.
    Dpdk,
    /// An interface.
    Interface(Selector),
}

impl Device {
    /// Resolves the names in `conf`, by Go's precedence.
    ///
    /// # Errors
    /// 7, with Go's texts, for a device that this host does not have.
    pub(crate) fn of(conf: &Conf) -> Result<Device> {
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
        if is_dpdk || conf.dpdk_mode {
            return Ok(Device::Dpdk);
        }
        let selector = conf.selector.clone().or(pci.map(Selector::Pci)).or(auxiliary.map(Selector::Auxiliary));
        selector.map(Device::Interface).ok_or_else(|| Error::config(NOTHING))
    }
}

fn has_dpdk_driver(address: &str) -> Result<bool> {
    let device = Path::new(PCI).join(address);
    let missing = |path: &Path, error: &io::Error| {
        Error::config(format!("error with host device: lstat {}: {}", path.display(), go_text(error)))
    };
    let real = fs::canonicalize(&device).map_err(|error| missing(&device, &error))?;
    let link = real.join("driver");
    let driver = fs::canonicalize(&link).map_err(|error| missing(&link, &error))?;
    Ok(DPDK_DRIVERS.iter().any(|name| driver.ends_with(name)))
}

/// Finds the interface in the host's namespace.
///
/// # Errors
/// 7, with Go's texts, if there is none.
pub(crate) fn find(host: &Netlink, selector: &Selector) -> Result<Link> {
    let name = match selector {
        Selector::Name(name) => name.clone(),
        Selector::Mac(mac) => return by_mac(host, *mac),
        Selector::KernelPath(path) => {
            let real = fs::canonicalize(path).unwrap_or_else(|_| path.clone());
            if !real.starts_with("/sys/devices") {
                return Err(not_a_kernel_path(&path.display().to_string()));
            }
            first_name(&real.join("net"))?
        }
        Selector::Pci(address) => first_name(&pci_folder(address)?)?,
        Selector::Auxiliary(name) => first_name(&Path::new(AUXILIARY).join(name).join("net"))?,
    };
    let link = host.find_link(&name)?;
    link.ok_or_else(|| {
        not_found("Link not found").with_details(format!("{}: the host has no interface {name:?}", selector.key()))
    })
}

/// The names of the interfaces of a device that are in the host's namespace. `device` is a PCI or
/// auxiliary device's name, or an absolute path, which `join` takes as it is.
pub(crate) fn names_of(device: &str) -> Vec<String> {
    let folders = [pci_folder(device).unwrap_or_default(), Path::new(AUXILIARY).join(device).join("net")];
    folders.iter().flat_map(|folder| entries(folder).unwrap_or_default()).collect()
}

fn not_found(reason: impl std::fmt::Display) -> Error {
    Error::config(format!("failed to find host device: {reason}"))
}

/// The text of an error of the file system, with Go's words for the usual one.
fn go_text(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or directory".to_owned(),
        _ => error.to_string(),
    }
}

/// Where sysfs lists the interfaces of a PCI device: a virtio device is between the two.
fn pci_folder(address: &str) -> Result<PathBuf> {
    let device = Path::new(PCI).join(address);
    let own = device.join("net");
    if own.exists() {
        return Ok(own);
    }
    let mut below = entries(&device).unwrap_or_default();
    below.retain(|name| name.starts_with("virtio"));
    match below.first() {
        Some(virtio) => Ok(device.join(virtio).join("net")),
        None => Err(not_found(format!("no net directory under pci device {address}"))),
    }
}

fn first_name(folder: &Path) -> Result<String> {
    let names = entries(folder).map_err(|error| {
        let folder = folder.display();
        not_found(format!("failed to read directory {folder}: \"open {folder}: {}\"", go_text(&error)))
    })?;
    let none = || not_found(format!("failed to find network device in path {}", folder.display()));
    names.into_iter().next().ok_or_else(none)
}

/// The names in a folder, sorted.
fn entries(folder: &Path) -> io::Result<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// An interface stacked on a device often has the device's address: the device is meant.
fn by_mac(host: &Netlink, mac: Mac) -> Result<Link> {
    let mut links = host.list_links()?;
    links.retain(|link| link.mac == Some(mac));
    if links.iter().any(|link| link.kind == LinkKind::Device) {
        links.retain(|link| link.kind == LinkKind::Device);
    }
    if links.len() > 1 {
        let names: Vec<&str> = links.iter().map(|link| link.name.as_str()).collect();
        return Err(Error::config(format!("hwaddr: {mac} is the address of several interfaces: {}", names.join(", "))));
    }
    links.pop().ok_or_else(|| not_found("failed to find physical interface"))
}

/// Whether the host's only default routes lead over this interface.
///
/// # Errors
/// The kernel's.
pub(crate) fn has_the_only_default_routes(host: &Netlink, device: &Link) -> Result<bool> {
    if !device.up {
        return Ok(false);
    }
    let mut defaults = host.list_all_routes(Family::V4)?;
    defaults.extend(host.list_all_routes(Family::V6)?);
    defaults.retain(|route| route.dst.is_default_route());
    Ok(!defaults.is_empty() && defaults.iter().all(|route| route.oif == device.index))
}
