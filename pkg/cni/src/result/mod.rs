//! The result of an ADD, as one type for all specification versions.
//!
//! All code uses [`AddResult`], which has the fields of the newest version. Only `wire` knows the
//! older forms of the JSON. A result of a delegate or in `prevResult` is decoded by its own
//! version. The answer to the runtime is encoded in the configuration's version, without the parts
//! that this version does not have, such as an interface's MTU before 1.1.0 (but see [`Route`]).
//! Only a result without an address cannot be encoded in 0.1.0 and 0.2.0: ADD fails and is rolled
//! back.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::Cidr;
use crate::error::Error;
use crate::json::{Json, JsonError};
use crate::version::{Shape, Version};

mod unknown;
mod wire;

pub use unknown::Unknown;

/// The result of an ADD: interfaces, addresses, routes, name servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddResult {
    /// All interfaces that were created or used, on the host and in the container.
    pub interfaces: Vec<Interface>,
    /// The addresses.
    pub ips: Vec<IpConfig>,
    /// The routes.
    pub routes: Vec<Route>,
    /// The name resolution.
    pub dns: Dns,
    /// The keys that this crate does not know, which are encoded again in the same place.
    pub unknown: Unknown,
}

/// An interface of a result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Interface {
    /// The name in its namespace.
    pub name: String,
    /// The hardware address in lower case with colons, or the empty string if it is not known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mac: String,
    /// The MTU in bytes (since 1.1.0).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// The path of the network namespace, or the empty string on the host.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub sandbox: String,
    /// The path of the socket file of an interface that is not in the kernel (since 1.1.0).
    #[serde(rename = "socketPath", skip_serializing_if = "String::is_empty")]
    pub socket_path: String,
    /// The address of the PCI device (since 1.1.0).
    #[serde(rename = "pciID", skip_serializing_if = "String::is_empty")]
    pub pci_id: String,
}

/// An address of a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpConfig {
    /// The position of the address's interface in [`AddResult::interfaces`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface: Option<usize>,
    /// The address and its prefix length.
    pub address: Cidr,
    /// The gateway of the address's network.
    #[serde(skip_serializing_if = "Option::is_none", default, deserialize_with = "optional_address")]
    pub gateway: Option<IpAddr>,
}

/// The largest number of gateways in [`Route::gws`]. The kernel accepts more, but that many paths
/// are more likely a mistake.
pub const MAX_GATEWAYS: usize = 64;

/// A route of a result. In every version from 0.3.0 on, all these keys are encoded, even those that
/// 1.1.0 added, because interface plugins need them from their IPAM plugin. As in Go, only `table`
/// and `scope` distinguish 0 from an absent value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The destination, with the host bits that were given.
    pub dst: Cidr,
    /// The gateway. `None` means the gateway of the container's address.
    #[serde(skip_serializing_if = "Option::is_none", default, deserialize_with = "optional_address")]
    pub gw: Option<IpAddr>,
    /// The gateways of a route over several paths, see [`Route::gateways`]. No version of the
    /// specification has this key yet.
    #[serde(skip_serializing_if = "Option::is_none", default, deserialize_with = "addresses")]
    pub gws: Option<Vec<IpAddr>>,
    /// The path MTU in bytes.
    #[serde(skip_serializing_if = "Option::is_none", default, deserialize_with = "unless_zero")]
    pub mtu: Option<u32>,
    /// The advertised maximum segment size in bytes.
    #[serde(skip_serializing_if = "Option::is_none", default, deserialize_with = "unless_zero")]
    pub advmss: Option<u32>,
    /// The metric.
    #[serde(skip_serializing_if = "Option::is_none", default, deserialize_with = "unless_zero")]
    pub priority: Option<u32>,
    /// The routing table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub table: Option<u32>,
    /// The scope, as the kernel numbers it (0 global, 253 link, 254 host).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<u8>,
}

impl Route {
    /// Returns a route that has only a destination and a gateway.
    pub fn new(dst: Cidr, gw: Option<IpAddr>) -> Route {
        Route { dst, gw, gws: None, mtu: None, advmss: None, priority: None, table: None, scope: None }
    }

    /// Returns the gateways: those of `gws`, then `gw` unless it is one of them. An empty list
    /// means the gateway of the container's address.
    pub fn gateways(&self) -> Vec<IpAddr> {
        let mut gateways = self.gws.clone().unwrap_or_default();
        gateways.extend(self.gw.filter(|gw| !gateways.contains(gw)));
        gateways
    }

    /// Returns the route once for each gateway, without `gws`: the paths of one route. Returns the
    /// route itself if it has no gateway.
    pub fn paths(&self) -> Vec<Route> {
        let base = Route { gw: None, gws: None, ..*self };
        let gateways = self.gateways();
        if gateways.is_empty() {
            return vec![base];
        }
        gateways.into_iter().map(|gw| Route { gw: Some(gw), ..base.clone() }).collect()
    }

    /// Checks `gws`, and sets `gw` to its first gateway if `gw` is missing, so that a program that
    /// does not know `gws` uses one of the gateways. Does nothing without `gws`.
    ///
    /// # Errors
    /// Code 7 if `gws` is empty, has more than [`MAX_GATEWAYS`] gateways, or a gateway is not of
    /// the destination's family.
    pub fn settle_gateways(&mut self) -> crate::Result<()> {
        let dst = self.dst;
        let Some(gws) = &self.gws else { return Ok(()) };
        let Some(first) = gws.first().copied() else {
            return Err(Error::config(format!("route {dst}: gws is empty")));
        };
        if gws.len() > MAX_GATEWAYS {
            let msg = format!("route {dst}: gws has {} gateways, at most {MAX_GATEWAYS} are allowed", gws.len());
            return Err(Error::config(msg));
        }
        self.check_family()?;
        self.gw.get_or_insert(first);
        Ok(())
    }

    /// Checks that the gateways are of the destination's family.
    ///
    /// # Errors
    /// Code 7 for the first one that is not.
    pub fn check_family(&self) -> crate::Result<()> {
        let dst = self.dst;
        match self.gateways().into_iter().find(|gw| gw.is_ipv4() != dst.is_ipv4()) {
            None => Ok(()),
            Some(gw) => Err(Error::config(format!("route {dst} via {gw}: the gateway is of the other address family"))),
        }
    }
}

/// The name resolution of the container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// The servers' addresses, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    /// The local domain.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// The search list.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Resolver options.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

impl Dns {
    /// Whether no field is set.
    pub fn is_empty(&self) -> bool {
        *self == Dns::default()
    }
}

/// The error of a result that cannot be decoded, or cannot be expressed in a version. Displays Go's
/// text if there is one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResultError {
    /// The JSON does not have the form of its version.
    #[error("{0}")]
    Json(JsonError),
    /// From [`decode_as`](AddResult::decode_as): the result's version is unknown, or its results
    /// have a different form than those of the configuration's version.
    #[error(
        "result type supports [{}] but unmarshalled CNIVersion is \"{found}\"",
        .expected.versions().map(Version::as_str).collect::<Vec<_>>().join(" ")
    )]
    WrongVersion {
        /// The form that results of the configuration's version have.
        expected: Shape,
        /// The result's `cniVersion`.
        found: String,
    },
    /// From [`decode`](AddResult::decode): the result's version is unknown.
    #[error("unsupported CNI result version \"{0}\"")]
    UnknownVersion(String),
    /// The result has no address, which 0.1.0 and 0.2.0 require.
    #[error("cannot convert: no valid IP addresses")]
    NoAddress,
}

impl AddResult {
    /// Decodes a result in the version of its `cniVersion`, or in `default` if it has none.
    ///
    /// # Errors
    /// The version is unknown, or the JSON does not have its form.
    pub fn decode(json: &Json, default: Version) -> Result<AddResult, ResultError> {
        let version = match version_text(json)? {
            "" => default,
            text => Version::find(text).ok_or_else(|| ResultError::UnknownVersion(text.to_owned()))?,
        };
        wire::decode(json, version.shape())
    }

    /// Decodes a result in the form of `version`, as Go decodes `prevResult`. If the result has a
    /// `cniVersion`, that version must use the same form.
    ///
    /// # Errors
    /// The result's `cniVersion` is unknown or has a different form, or the JSON does not have the
    /// form of `version`.
    pub fn decode_as(json: &Json, version: Version) -> Result<AddResult, ResultError> {
        let found = version_text(json)?;
        let expected = version.shape();
        if !found.is_empty() && Version::find(found).map(Version::shape) != Some(expected) {
            return Err(ResultError::WrongVersion { expected, found: found.to_owned() });
        }
        wire::decode(json, expected)
    }

    /// Returns the position of the interface with this name and sandbox in
    /// [`interfaces`](AddResult::interfaces), or `None` if there is none.
    pub fn find_interface(&self, name: &str, sandbox: &str) -> Option<usize> {
        self.interfaces.iter().position(|interface| interface.name == name && interface.sandbox == sandbox)
    }

    /// Encodes the result in `version` as indented JSON, as the Go plugins print it.
    ///
    /// # Errors
    /// [`ResultError::NoAddress`] if `version` is 0.1.0 or 0.2.0 and the result has no address.
    pub fn encode(&self, version: Version) -> Result<Vec<u8>, ResultError> {
        Ok(pretty(&self.to_value(version)?))
    }

    /// Converts the result to a value that serializes to the JSON of `version`, for a `prevResult`
    /// or the result cache.
    ///
    /// # Errors
    /// [`ResultError::NoAddress`] if `version` is 0.1.0 or 0.2.0 and the result has no address.
    pub fn to_value(&self, version: Version) -> Result<Encoded<'_>, ResultError> {
        wire::encode(self, version)
    }
}

/// A result in the form of one version, which serializes to JSON.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct Encoded<'a>(wire::Wire<'a>);

/// Returns the result's `cniVersion`, or the empty string if it is absent.
fn version_text(json: &Json) -> Result<&str, ResultError> {
    match json.get("cniVersion") {
        None => Ok(""),
        Some(Json::String(text)) => Ok(text),
        Some(_) => Err(ResultError::Json(serde::de::Error::custom("cniVersion: invalid type: expected a string"))),
    }
}

/// Decodes an address. As in Go, an empty string gives `None`, and an IPv4-mapped address is an
/// IPv4 address.
fn optional_address<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<IpAddr>, D::Error> {
    match String::deserialize(deserializer)?.as_str() {
        "" => Ok(None),
        text => match text.parse::<IpAddr>() {
            Ok(address) => Ok(Some(address.to_canonical())),
            Err(_) => Err(serde::de::Error::custom(format_args!("invalid IP address: {text}"))),
        },
    }
}

/// Decodes a list of addresses, see [`optional_address`]. An empty string is not an address here.
fn addresses<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<IpAddr>>, D::Error> {
    let parse = |text: &String| {
        let error = || serde::de::Error::custom(format_args!("invalid IP address: {text}"));
        text.parse::<IpAddr>().map(|address| address.to_canonical()).map_err(|_| error())
    };
    let texts = Option::<Vec<String>>::deserialize(deserializer)?;
    texts.map(|texts| texts.iter().map(parse).collect()).transpose()
}

/// Decodes a number. Returns `None` for 0, because Go does not encode 0 in these fields.
fn unless_zero<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    Ok(Option::deserialize(deserializer)?.filter(|number| *number != 0))
}

/// Encodes a value as JSON as the Go plugins print it: indented by four spaces, without a newline
/// at the end.
pub(crate) fn pretty(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1024);
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, formatter);
    // Serializing fails only for map keys that are not strings, which no type here has, and for
    // write errors, which a Vec does not have.
    let serialized = value.serialize(&mut serializer);
    debug_assert!(serialized.is_ok());
    bytes
}

#[cfg(test)]
mod tests;
