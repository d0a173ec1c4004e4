//! Checks and converts the values of keys that several plugins have.
//!
//! Each plugin declares its keys in a structure of its own, which `cnitool validate` uses to report
//! unknown keys.

use std::ops::RangeInclusive;

use cni::config::NetConf;
use cni::json::Json;
use cni::{Error, Result};
use cni_firewall::Backend;
use cni_linux::Mac;
use serde::Deserialize;

/// The MTUs that the kernel accepts for a veth, in bytes.
pub const VETH_MTU: RangeInclusive<u32> = 68..=65535;

/// The object `args`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Args {
    /// The keys for CNI plugins. `args` may have more objects, for other programs.
    pub cni: ArgsCni,
}

/// The object `args.cni`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ArgsCni {
    /// The hardware address of CNI_IFNAME.
    pub mac: String,
}

/// The object `runtimeConfig`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RuntimeConfig {
    /// The hardware address of CNI_IFNAME.
    pub mac: String,
    /// The name resolution of the container.
    pub dns: Option<Json>,
}

/// The object `runtimeConfig` of a plugin that takes no hardware address.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RuntimeDnsConfig {
    /// The name resolution of the container.
    pub dns: Option<Json>,
}

/// Whether packets that leave the network get the host's address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Masquerading {
    /// The packets keep their source address.
    #[default]
    Off,
    /// The packets get the host's address. The rules are those of this backend; `None` stands for
    /// the backend that the host has.
    On(Option<Backend>),
}

/// Parses `ipMasqBackend`. Returns `None` if it is absent or empty.
///
/// # Errors
/// Code 7 with the Go plugins' text for an unknown name.
pub fn masquerade_backend(name: Option<String>) -> Result<Option<Backend>> {
    let Some(name) = name.and_then(non_empty) else { return Ok(None) };
    match Backend::by_name(&name) {
        Some(backend) => Ok(Some(backend)),
        None => Err(Error::config(format!("unknown ipmasq backend {name:?}"))),
    }
}

/// Checks the key `mtu`. Returns `None` for 0, which leaves the kernel's default.
///
/// # Errors
/// Code 7 for a value outside `accepted`.
pub fn mtu(configured: i64, accepted: RangeInclusive<u32>) -> Result<Option<u32>> {
    match u32::try_from(configured) {
        Ok(0) => Ok(None),
        Ok(mtu) if accepted.contains(&mtu) => Ok(Some(mtu)),
        _ => {
            let (smallest, largest) = accepted.into_inner();
            Err(Error::config(format!("invalid MTU {configured} (must be between {smallest} and {largest}, or 0)")))
        }
    }
}

/// Parses the first non-empty text of `sources` as a hardware address. Returns `None` if all are
/// empty.
///
/// # Errors
/// The address is invalid. The text is the end of the Go plugins' messages, whose beginnings
/// differ.
pub fn mac(sources: [&str; 3]) -> Result<Option<Mac>, String> {
    let Some(text) = sources.into_iter().find(|text| !text.is_empty()) else { return Ok(None) };
    let mac: Mac = text.parse().map_err(|_| format!("address {text}: invalid MAC address"))?;
    if mac.is_multicast() || mac.is_zero() {
        return Err(format!("cannot assign requested address: {mac} is not a unicast address"));
    }
    Ok(Some(mac))
}

/// Returns `text`, or `None` if it is empty.
pub fn non_empty(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

/// Returns `ipam.type`, or `None` if it is absent or empty.
pub fn ipam_type(conf: &NetConf) -> Option<String> {
    non_empty(conf.ipam_type().to_owned())
}
