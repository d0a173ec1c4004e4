//! Reads and checks the configuration of the plugin `host-device`.
//!
//! Nothing is looked up on the host here: [`device`](crate::device) does that. A configuration that
//! selects no device is valid here, because STATUS has no `runtimeConfig`, which may select one.
//! [`device`](crate::device) refuses it.

use std::path::{Component, PathBuf};

use cni::config::NetConf;
use cni::{Error, Result};
use cni_linux::Mac;
use cni_plugin::keys;
use serde::Deserialize;

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Conf {
    /// The first of the keys `device`, `hwaddr` and `kernelpath` that is given.
    pub(crate) selector: Option<Selector>,
    /// The address of a PCI device.
    pub(crate) pci: Option<String>,
    /// The name of a PCI or auxiliary device, which the runtime has allocated.
    pub(crate) device_id: Option<String>,
    /// Whether a user-space program (DPDK) drives the device, whichever kernel driver the device
    /// has.
    pub(crate) dpdk_mode: bool,
}

/// The property by which a device is selected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Selector {
    /// The name of the interface.
    Name(String),
    /// The hardware address of the interface.
    Mac(Mac),
    /// The device's folder below `/sys/devices`.
    KernelPath(PathBuf),
    /// The address of a PCI device, such as `0000:00:1f.6`.
    Pci(String),
    /// The name of a device on the auxiliary bus, such as `mlx5_core.sf.2`.
    Auxiliary(String),
}

impl Selector {
    /// Returns the key of the configuration that selects the device.
    pub(crate) fn key(&self) -> &'static str {
        match self {
            Selector::Name(_) => "device",
            Selector::Mac(_) => "hwaddr",
            Selector::KernelPath(_) => "kernelpath",
            Selector::Pci(_) => "pciBusID",
            Selector::Auxiliary(_) => "runtimeConfig.deviceID",
        }
    }
}

/// The keys of the configuration, unchecked.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Keys {
    pub(crate) device: String,
    pub(crate) hwaddr: String,
    pub(crate) kernelpath: String,
    #[serde(rename = "pciBusID")]
    pub(crate) pci_bus_id: String,
    #[serde(rename = "DPDKMode")]
    dpdk_mode: bool,
    #[serde(rename = "runtimeConfig")]
    pub(crate) runtime_config: RuntimeConfig,
}

/// The object `runtimeConfig`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RuntimeConfig {
    #[serde(rename = "deviceID")]
    pub(crate) device_id: String,
}

impl Conf {
    /// Reads the configuration. An empty text counts as a key that is not given.
    ///
    /// # Errors
    /// - Code 6 if a key has a value of a wrong type.
    /// - Code 7 for a text that cannot be a MAC address, a path or a device name.
    pub(crate) fn new(conf: &NetConf) -> Result<Conf> {
        let keys: Keys = conf.decode()?;
        let (pci, device_id) = (keys::non_empty(keys.pci_bus_id), keys::non_empty(keys.runtime_config.device_id));
        for (key, name) in [("pciBusID", &pci), ("runtimeConfig.deviceID", &device_id)] {
            // The name becomes a part of a path in sysfs.
            if let Some(name) = name
                && (name.contains('/') || name == "." || name == "..")
            {
                return Err(Error::config(format!("{key}: {name:?} is not the name of a device")));
            }
        }
        let mac = parse_mac(&keys.hwaddr)?;
        let selector = match (keys::non_empty(keys.device), mac, keys::non_empty(keys.kernelpath)) {
            (Some(name), _, _) => Some(Selector::Name(name)),
            (None, Some(mac), _) => Some(Selector::Mac(mac)),
            (None, None, Some(path)) => Some(Selector::KernelPath(check_kernel_path(path)?)),
            (None, None, None) => None,
        };
        Ok(Conf { selector, pci, device_id, dpdk_mode: keys.dpdk_mode })
    }
}

/// Parses `hwaddr`. Returns `None` if it is empty.
///
/// # Errors
/// Code 7, with the text of Go's plugin, if it is not a MAC address.
fn parse_mac(text: &str) -> Result<Option<Mac>> {
    let invalid =
        |error| Error::config(format!("failed to find host device: failed to parse MAC address {text:?}: {error}"));
    if text.is_empty() { Ok(None) } else { text.parse().map(Some).map_err(invalid) }
}

/// Checks that `kernelpath` is below `/sys/devices` and has no `..`. Returns it as a path.
///
/// # Errors
/// [`not_a_kernel_path`] otherwise.
fn check_kernel_path(text: String) -> Result<PathBuf> {
    let path = PathBuf::from(&text);
    let has_dots = path.components().any(|part| part == Component::ParentDir);
    if path.starts_with("/sys/devices") && !has_dots { Ok(path) } else { Err(not_a_kernel_path(&text)) }
}

/// Returns the error for a `kernelpath` outside `/sys/devices`, with the text of Go's plugin.
pub(crate) fn not_a_kernel_path(text: &str) -> Error {
    Error::config(format!(
        "failed to find host device: kernel device path {text:?} must be absolute and begin with /sys/devices/"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(keys: &str) -> Result<Conf> {
        let conf = format!(r#"{{"cniVersion":"1.0.0","name":"net","type":"host-device"{keys}}}"#);
        Conf::new(&NetConf::parse(conf)?)
    }

    #[test]
    fn the_first_selector_wins() {
        let all = [r#","device":"d""#, r#","hwaddr":"02:00:00:00:00:01""#, r#","kernelpath":"/sys/devices/p""#];
        for (place, key) in ["device", "hwaddr", "kernelpath"].into_iter().enumerate() {
            assert_eq!(parse(&all[place..].concat()).unwrap().selector.unwrap().key(), key);
        }
    }

    #[test]
    fn what_can_select_nothing_is_refused() {
        let prefix = "failed to find host device: ";
        for (keys, text) in [
            (
                r#","hwaddr":"zz""#,
                format!("{prefix}failed to parse MAC address \"zz\": address zz: invalid MAC address"),
            ),
            (
                r#","kernelpath":"/sys/devices/../x""#,
                format!(
                    "{prefix}kernel device path \"/sys/devices/../x\" must be absolute and begin with /sys/devices/"
                ),
            ),
            (r#","pciBusID":"../x""#, "pciBusID: \"../x\" is not the name of a device".to_owned()),
        ] {
            let error = parse(keys).unwrap_err();
            assert_eq!((error.code(), error.msg()), (cni::Code::INVALID_CONFIG, text.as_str()));
        }
        assert!(parse("").unwrap().selector.is_none(), "the runtime may select the device");
    }
}
