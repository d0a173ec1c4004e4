//! Encodes and decodes the three forms of a result's JSON, see [`Shape`].
//!
//! The text is that of the Go plugins, because some programs compare it. Up to 0.4.0 the keys are
//! in declared order, and `dns` is always present. From 1.0.0 on the keys are sorted, and an empty
//! `dns` is left out. A result with keys that this crate does not know is sorted in every version.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{AddResult, Dns, Encoded, Interface, IpConfig, ResultError, Route, Unknown, optional_address};
use crate::Cidr;
use crate::json::Json;
use crate::version::{Shape, Version};
use std::net::IpAddr;

/// Decodes a result that has the given form.
///
/// # Errors
/// The JSON does not have this form.
pub(super) fn decode(json: &Json, shape: Shape) -> Result<AddResult, ResultError> {
    let decoded = match shape {
        Shape::Ip4Ip6 => json.decode::<ReadIp4Ip6>().map(AddResult::from),
        // `ips[].version` of 0.3.0 to 0.4.0 is ignored: the address has its family already.
        Shape::VersionedIps | Shape::Ips => json.decode().map(|read: ReadIps| {
            let ReadIps { interfaces, ips, routes, dns } = read;
            AddResult { interfaces, ips, routes, dns, ..AddResult::default() }
        }),
    };
    let decoded = decoded.map_err(ResultError::Json)?;
    Ok(AddResult { unknown: Unknown::find_in(json, shape), ..decoded })
}

/// Converts a result, including its unknown keys, to the form that `version` has.
///
/// # Errors
/// [`ResultError::NoAddress`] if `version` is 0.1.0 or 0.2.0 and the result has no address.
pub(super) fn encode(result: &AddResult, version: Version) -> Result<Encoded<'_>, ResultError> {
    let shape = version.shape();
    let known = match shape {
        Shape::Ip4Ip6 => Wire::Ip4Ip6(WriteIp4Ip6::new(result, version)?),
        Shape::VersionedIps => Wire::Ips(WriteIps::new(result, version)),
        Shape::Ips => Wire::Sorted(sorted(&WriteIps::new(result, version))),
    };
    let unknown = match shape {
        Shape::Ip4Ip6 => result.unknown.without_elements(),
        Shape::VersionedIps | Shape::Ips => result.unknown.clone(),
    };
    if unknown.is_empty() {
        return Ok(Encoded(known));
    }
    let mut with_unknown = Value::Object(sorted(&known).into_iter().collect());
    unknown.add_to(&mut with_unknown);
    Ok(Encoded(Wire::Sorted(sorted(&with_unknown))))
}

/// A result in one of the forms, for serialization.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Wire<'a> {
    /// The form of 0.1.0 and 0.2.0, with the keys in declared order.
    Ip4Ip6(WriteIp4Ip6<'a>),
    /// The form of 0.3.0 to 0.4.0, with the keys in declared order.
    Ips(WriteIps<'a>),
    /// Any form, with the keys sorted.
    Sorted(BTreeMap<String, Value>),
}

/// Returns the members of a structure or an object, sorted by key. Inner objects are sorted too as
/// long as no dependency enables serde_json's feature `preserve_order`.
fn sorted(object: &impl Serialize) -> BTreeMap<String, Value> {
    match serde_json::to_value(object) {
        Ok(Value::Object(members)) => members.into_iter().collect(),
        // Does not happen: `object` becomes an object, and no part of it fails to serialize.
        _ => BTreeMap::new(),
    }
}

/// A result of 0.3.0 or newer, for decoding.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ReadIps {
    interfaces: Vec<Interface>,
    ips: Vec<IpConfig>,
    routes: Vec<Route>,
    dns: Dns,
}

/// A result of 0.1.0 or 0.2.0, for decoding.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ReadIp4Ip6 {
    ip4: Option<ReadFamily>,
    ip6: Option<ReadFamily>,
    dns: Dns,
}

/// The value of `ip4` or `ip6`, for decoding.
#[derive(Deserialize)]
struct ReadFamily {
    ip: Cidr,
    #[serde(default, deserialize_with = "optional_address")]
    gateway: Option<IpAddr>,
    #[serde(default)]
    routes: Vec<Route>,
}

impl From<ReadIp4Ip6> for AddResult {
    fn from(read: ReadIp4Ip6) -> AddResult {
        let mut result = AddResult { dns: read.dns, ..AddResult::default() };
        for family in [read.ip4, read.ip6].into_iter().flatten() {
            result.ips.push(IpConfig { interface: None, address: family.ip, gateway: family.gateway });
            // A route of these versions has no other keys.
            result.routes.extend(family.routes.into_iter().map(|route| Route::new(route.dst, route.gw)));
        }
        result
    }
}

/// A result of 0.1.0 or 0.2.0, for encoding.
#[derive(Debug, Serialize)]
pub(super) struct WriteIp4Ip6<'a> {
    #[serde(rename = "cniVersion")]
    cni_version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ip4: Option<WriteFamily>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ip6: Option<WriteFamily>,
    dns: &'a Dns,
}

/// The value of `ip4` or `ip6`, for encoding.
#[derive(Debug, Serialize)]
struct WriteFamily {
    ip: Cidr,
    #[serde(skip_serializing_if = "Option::is_none")]
    gateway: Option<IpAddr>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    routes: Vec<Route>,
}

impl WriteFamily {
    /// Returns the first address of a family and all routes of this family, or `None` if the result
    /// has no such address. `is_of_family` decides whether an address or a destination is of the
    /// family.
    fn find(result: &AddResult, is_of_family: impl Fn(&Cidr) -> bool) -> Option<WriteFamily> {
        let ip = result.ips.iter().find(|ip| is_of_family(&ip.address))?;
        let routes = result.routes.iter().filter(|route| is_of_family(&route.dst));
        Some(WriteFamily {
            ip: ip.address,
            gateway: ip.gateway,
            // A route of these versions has no other keys.
            routes: routes.flat_map(Route::paths).map(|route| Route::new(route.dst, route.gw)).collect(),
        })
    }
}

impl<'a> WriteIp4Ip6<'a> {
    /// Returns the result in this form: the first address of each family, with the family's routes.
    ///
    /// # Errors
    /// [`ResultError::NoAddress`] if the result has no address.
    fn new(result: &'a AddResult, version: Version) -> Result<Self, ResultError> {
        let ip4 = WriteFamily::find(result, Cidr::is_ipv4);
        let ip6 = WriteFamily::find(result, |cidr| !cidr.is_ipv4());
        if ip4.is_none() && ip6.is_none() {
            return Err(ResultError::NoAddress);
        }
        Ok(WriteIp4Ip6 { cni_version: version.as_str(), ip4, ip6, dns: &result.dns })
    }
}

/// A result of 0.3.0 or newer, for encoding.
#[derive(Debug, Serialize)]
pub(super) struct WriteIps<'a> {
    #[serde(rename = "cniVersion")]
    cni_version: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    interfaces: Vec<Interface>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ips: Vec<WriteIp<'a>>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    routes: &'a [Route],
    #[serde(skip_serializing_if = "Option::is_none")]
    dns: Option<&'a Dns>,
}

/// An address. Up to 0.4.0 it has the number of its family as `version`: `4` or `6`.
#[derive(Debug, Serialize)]
struct WriteIp<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<&'static str>,
    #[serde(flatten)]
    ip: &'a IpConfig,
}

impl<'a> WriteIps<'a> {
    /// Returns the result in this form.
    fn new(result: &'a AddResult, version: Version) -> Self {
        let is_versioned = version.shape() == Shape::VersionedIps;
        let family = |ip: &IpConfig| if ip.address.is_ipv4() { "4" } else { "6" };
        let interfaces = match version {
            Version::V1_1_0 => result.interfaces.clone(),
            _ => result.interfaces.iter().map(without_new_fields).collect(),
        };
        WriteIps {
            cni_version: version.as_str(),
            interfaces,
            ips: result.ips.iter().map(|ip| WriteIp { version: is_versioned.then(|| family(ip)), ip }).collect(),
            routes: &result.routes,
            dns: (is_versioned || !result.dns.is_empty()).then_some(&result.dns),
        }
    }
}

/// Returns the interface without the fields that 1.1.0 added.
fn without_new_fields(interface: &Interface) -> Interface {
    Interface {
        name: interface.name.clone(),
        mac: interface.mac.clone(),
        sandbox: interface.sandbox.clone(),
        ..Interface::default()
    }
}
