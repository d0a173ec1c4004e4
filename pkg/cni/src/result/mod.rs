//! The result of an ADD: one type, in the newest shape.
//!
//! All code works on [`AddResult`]; the older shapes exist only in `wire`, which reads and writes
//! them. A result of a delegate or in `prevResult` is decoded by its own version. The answer is
//! encoded in the version of the configuration; if that cannot express it, the call fails while
//! everything can still be rolled back.
//!
//! 0 is a value: a route's table 0 or an IP's interface 0 is kept, an absent one stays absent.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::Cidr;
use crate::json::{Json, JsonError};
use crate::version::{Shape, Version};

mod unknown;
mod wire;

pub use unknown::Unknown;

/// The result of an ADD: interfaces, addresses, routes, name servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddResult {
    /// Every interface made or used, on the host and in the container.
    pub interfaces: Vec<Interface>,
    /// The addresses, each perhaps with the index of its interface.
    pub ips: Vec<IpConfig>,
    /// The routes.
    pub routes: Vec<Route>,
    /// Name resolution.
    pub dns: Dns,
    /// The keys that this crate does not know. Encoded again in the same place.
    pub unknown: Unknown,
}

/// An interface of a result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Interface {
    /// Its name in its namespace.
    pub name: String,
    /// Its hardware address, lower case with colons; empty if unknown.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mac: String,
    /// Its MTU in bytes; 1.1.0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// The path of its network namespace; empty on the host.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub sandbox: String,
    /// A socket behind it; 1.1.0.
    #[serde(rename = "socketPath", skip_serializing_if = "String::is_empty")]
    pub socket_path: String,
    /// The PCI device below it; 1.1.0.
    #[serde(rename = "pciID", skip_serializing_if = "String::is_empty")]
    pub pci_id: String,
}

/// An address of a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpConfig {
    /// The index of its interface in [`AddResult::interfaces`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface: Option<usize>,
    /// The address and its prefix length.
    pub address: Cidr,
    /// The gateway of its network.
    #[serde(skip_serializing_if = "Option::is_none", default, deserialize_with = "optional_address")]
    pub gateway: Option<IpAddr>,
}

/// A route of a result. All keys stay in every version from 0.3.0 on: an IPAM plugin
/// hands them to its caller. A 0 stays in `table` and `scope` alone, as in Go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The destination; host bits as they were given.
    pub dst: Cidr,
    /// The next hop; absent means the address's gateway.
    #[serde(skip_serializing_if = "Option::is_none", default, deserialize_with = "optional_address")]
    pub gw: Option<IpAddr>,
    /// The path MTU in bytes.
    #[serde(skip_serializing_if = "Option::is_none", default, deserialize_with = "unless_zero")]
    pub mtu: Option<u32>,
    /// The advertised segment size in bytes.
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
    /// A route with nothing but its destination and next hop.
    pub fn new(dst: Cidr, gw: Option<IpAddr>) -> Route {
        Route { dst, gw, mtu: None, advmss: None, priority: None, table: None, scope: None }
    }
}

/// Name resolution for the container.
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
    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        *self == Dns::default()
    }
}

/// Why a result could not be decoded, or not be expressed in a version. Displays Go's text where it
/// has one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResultError {
    /// The JSON does not have the shape of its version.
    #[error("{0}")]
    Json(JsonError),
    /// The result names a version that its family does not have.
    #[error(
        "result type supports [{}] but unmarshalled CNIVersion is \"{found}\"",
        .family.versions().map(Version::as_str).collect::<Vec<_>>().join(" ")
    )]
    WrongVersion {
        /// The versions of the family that was asked for.
        family: Shape,
        /// The value in the result.
        found: String,
    },
    /// The result names an unknown version.
    #[error("unsupported CNI result version \"{0}\"")]
    UnknownVersion(String),
    /// 0.1.0 and 0.2.0 cannot say anything without an address.
    #[error("cannot convert: no valid IP addresses")]
    NoAddress,
}

impl AddResult {
    /// Reads a result that says itself which version it has; one that does not has `default`.
    ///
    /// # Errors
    /// [`ResultError`]
    pub fn decode(json: &Json, default: Version) -> Result<AddResult, ResultError> {
        let version = match version_text(json)? {
            "" => default,
            text => Version::find(text).ok_or_else(|| ResultError::UnknownVersion(text.to_owned()))?,
        };
        wire::decode(json, version.shape())
    }

    /// Reads a result that must be of the same family of shapes as `version`, as Go reads
    /// `prevResult`.
    ///
    /// # Errors
    /// [`ResultError`]
    pub fn decode_as(json: &Json, version: Version) -> Result<AddResult, ResultError> {
        let found = version_text(json)?;
        let family = version.shape();
        if !found.is_empty() && Version::find(found).map(Version::shape) != Some(family) {
            return Err(ResultError::WrongVersion { family, found: found.to_owned() });
        }
        wire::decode(json, family)
    }

    /// Returns the index of a container's interface: CNI_IFNAME in CNI_NETNS, compared as texts.
    pub fn find_interface(&self, name: &str, sandbox: &str) -> Option<usize> {
        self.interfaces.iter().position(|interface| interface.name == name && interface.sandbox == sandbox)
    }

    /// Writes the result in the shape of `version`: four spaces of indentation, no newline at the
    /// end, as Go writes.
    ///
    /// # Errors
    /// [`ResultError::NoAddress`]
    pub fn encode(&self, version: Version) -> Result<Vec<u8>, ResultError> {
        Ok(pretty(&self.to_value(version)?))
    }

    /// The same as one JSON value with its `cniVersion`, for a `prevResult` or a cache.
    ///
    /// # Errors
    /// [`ResultError::NoAddress`]
    pub fn to_value(&self, version: Version) -> Result<Encoded<'_>, ResultError> {
        wire::encode(self, version)
    }
}

/// A result in the shape of some version, ready to be serialized.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct Encoded<'a>(wire::Wire<'a>);

fn version_text(json: &Json) -> Result<&str, ResultError> {
    match json.get("cniVersion") {
        None => Ok(""),
        Some(Json::String(text)) => Ok(text),
        Some(_) => Err(ResultError::Json(serde::de::Error::custom("cniVersion: invalid type: expected a string"))),
    }
}

/// An address that may be absent or, as Go's decoder has it, empty.
fn optional_address<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<IpAddr>, D::Error> {
    match String::deserialize(deserializer)?.as_str() {
        "" => Ok(None),
        text => match text.parse() {
            Ok(IpAddr::V6(v6)) => Ok(Some(v6.to_canonical())),
            Ok(address) => Ok(Some(address)),
            Err(_) => Err(serde::de::Error::custom(format_args!("invalid IP address: {text}"))),
        },
    }
}

/// A number that is absent where it is 0, as Go writes these.
fn unless_zero<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    Ok(Option::deserialize(deserializer)?.filter(|number| *number != 0))
}

/// JSON as the Go plugins print it: indented by four spaces, no newline at the end.
pub(crate) fn pretty(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1024);
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, formatter);
    // Our own types have string keys and a Vec never fails to grow: there is nothing that could
    // fail here.
    let written = value.serialize(&mut serializer);
    debug_assert!(written.is_ok());
    bytes
}

#[cfg(test)]
mod tests;
