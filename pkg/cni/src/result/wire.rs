//! The shapes a result has on the wire, and nothing else.
//!
//! Up to 0.4.0 keys come in declared order and `dns` is always there; from 1.0.0 on keys are sorted
//! and an empty `dns` is left out. Programs that compare texts exist, so both are kept. A result
//! with unknown members is sorted in every version.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{AddResult, Dns, Encoded, Interface, IpConfig, ResultError, Route, Unknown, optional_address};
use crate::Cidr;
use crate::json::Json;
use crate::version::{Shape, Version};
use std::net::IpAddr;

pub(super) fn decode(json: &Json, shape: Shape) -> Result<AddResult, ResultError> {
    let known = match shape {
        Shape::Ip4Ip6 => json.decode::<ReadIp4Ip6>().map(AddResult::from),
        // `ips[].version` of 0.3.0 to 0.4.0 says nothing that the address does not say.
        Shape::VersionedIps | Shape::Ips => json.decode::<ReadIps>().map(AddResult::from),
    };
    let known = known.map_err(ResultError::Json)?;
    Ok(AddResult { unknown: Unknown::of(json, shape), ..known })
}

pub(super) fn encode(result: &AddResult, version: Version) -> Result<Encoded<'_>, ResultError> {
    let known = match version.shape() {
        Shape::Ip4Ip6 => Wire::Ip4Ip6(WriteIp4Ip6::new(result, version)?),
        Shape::VersionedIps => Wire::VersionedIps(WriteVersionedIps::new(result, version)),
        Shape::Ips => Wire::Sorted(sorted(&WriteIps::new(result, version))),
    };
    let unknown = match known {
        Wire::Ip4Ip6(_) => result.unknown.without_elements(),
        Wire::VersionedIps(_) | Wire::Sorted(_) => result.unknown.clone(),
    };
    if unknown.is_empty() {
        return Ok(Encoded(known));
    }
    let mut all = Value::Object(sorted(&known).into_iter().collect());
    unknown.add_to(&mut all);
    Ok(Encoded(Wire::Sorted(sorted(&all))))
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Wire<'a> {
    Ip4Ip6(WriteIp4Ip6<'a>),
    VersionedIps(WriteVersionedIps<'a>),
    Sorted(BTreeMap<String, Value>),
}

/// serde_json's map is a BTreeMap unless a dependency turns `preserve_order` on; the outer level is
/// sorted in any case.
fn sorted(value: &impl Serialize) -> BTreeMap<String, Value> {
    match serde_json::to_value(value) {
        Ok(Value::Object(members)) => members.into_iter().collect(),
        _ => BTreeMap::new(),
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ReadIps {
    interfaces: Vec<Interface>,
    ips: Vec<IpConfig>,
    routes: Vec<Route>,
    dns: Dns,
}

impl From<ReadIps> for AddResult {
    fn from(read: ReadIps) -> AddResult {
        AddResult {
            interfaces: read.interfaces,
            ips: read.ips,
            routes: read.routes,
            dns: read.dns,
            ..AddResult::default()
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ReadIp4Ip6 {
    ip4: Option<ReadFamily>,
    ip6: Option<ReadFamily>,
    dns: Dns,
}

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
            result.routes.extend(family.routes.into_iter().map(|route| Route::new(route.dst, route.gw)));
        }
        result
    }
}

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

#[derive(Debug, Serialize)]
struct WriteFamily {
    ip: Cidr,
    #[serde(skip_serializing_if = "Option::is_none")]
    gateway: Option<IpAddr>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    routes: Vec<Route>,
}

impl<'a> WriteIp4Ip6<'a> {
    /// The first address of each family; a route goes with its family's address, if there is one.
    fn new(result: &'a AddResult, version: Version) -> Result<Self, ResultError> {
        let family = |is_ipv4: bool| {
            let ip = result.ips.iter().find(|ip| ip.address.is_ipv4() == is_ipv4)?;
            let routes = result.routes.iter().filter(|route| route.dst.is_ipv4() == is_ipv4);
            Some(WriteFamily {
                ip: ip.address,
                gateway: ip.gateway,
                routes: routes.map(|route| Route::new(route.dst, route.gw)).collect(),
            })
        };
        let (ip4, ip6) = (family(true), family(false));
        if ip4.is_none() && ip6.is_none() {
            return Err(ResultError::NoAddress);
        }
        Ok(WriteIp4Ip6 { cni_version: version.as_str(), ip4, ip6, dns: &result.dns })
    }
}

#[derive(Debug, Serialize)]
pub(super) struct WriteVersionedIps<'a> {
    #[serde(rename = "cniVersion")]
    cni_version: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    interfaces: Vec<Interface>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ips: Vec<WriteVersionedIp<'a>>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    routes: &'a [Route],
    dns: &'a Dns,
}

#[derive(Debug, Serialize)]
struct WriteVersionedIp<'a> {
    version: &'static str,
    #[serde(flatten)]
    ip: &'a IpConfig,
}

impl<'a> WriteVersionedIps<'a> {
    fn new(result: &'a AddResult, version: Version) -> Self {
        let versioned =
            |ip: &'a IpConfig| WriteVersionedIp { version: if ip.address.is_ipv4() { "4" } else { "6" }, ip };
        WriteVersionedIps {
            cni_version: version.as_str(),
            interfaces: result.interfaces.iter().map(without_new_fields).collect(),
            ips: result.ips.iter().map(versioned).collect(),
            routes: &result.routes,
            dns: &result.dns,
        }
    }
}

#[derive(Serialize)]
struct WriteIps<'a> {
    #[serde(rename = "cniVersion")]
    cni_version: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    interfaces: Vec<Interface>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    ips: &'a [IpConfig],
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    routes: &'a [Route],
    #[serde(skip_serializing_if = "Dns::is_empty")]
    dns: &'a Dns,
}

impl<'a> WriteIps<'a> {
    fn new(result: &'a AddResult, version: Version) -> Self {
        let interfaces = match version {
            Version::V1_1_0 => result.interfaces.clone(),
            _ => result.interfaces.iter().map(without_new_fields).collect(),
        };
        WriteIps {
            cni_version: version.as_str(),
            interfaces,
            ips: &result.ips,
            routes: &result.routes,
            dns: &result.dns,
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
