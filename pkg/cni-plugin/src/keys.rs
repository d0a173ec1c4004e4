//! Checks and converts the values of keys that several plugins have.
//!
//! Each plugin declares its keys in a structure of its own, which `cnitool validate` uses to report
//! unknown keys.

use std::ops::RangeInclusive;

use cni::config::NetConf;
use cni::json::Json;
use cni::{Cidr, Code, Error, Result};
use cni_firewall::Backend;
use cni_firewall::masquerade::MAX_EXCLUDED;
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
}

/// The packets that are masqueraded, and the backend of the rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MasqueradeScope {
    /// The backend, or `None` for the one that the host has.
    pub backend: Option<Backend>,
    /// Whether IPv4 packets are masqueraded.
    ipv4: bool,
    /// Whether IPv6 packets are masqueraded.
    ipv6: bool,
    /// Packets to these destinations keep their source.
    pub exclude: Vec<Cidr>,
}

/// The keys of `ipMasq` if it is an object.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct IpMasqKeys {
    ipv4: Option<bool>,
    ipv6: Option<bool>,
    exclude: Vec<String>,
}

impl MasqueradeScope {
    /// Returns the addresses whose packets are masqueraded.
    pub fn select(&self, addresses: &[Cidr]) -> Vec<Cidr> {
        let is_selected = |address: &Cidr| if address.is_ipv4() { self.ipv4 } else { self.ipv6 };
        addresses.iter().copied().filter(is_selected).collect()
    }

    /// Parses `ipMasq`, a boolean or an object, and `ipMasqBackend`. Returns `None` if all packets
    /// keep their source address.
    ///
    /// # Errors
    /// - Code 6 for a wrong type.
    /// - Code 7 for an unknown backend, an unknown key of the object, or an invalid `exclude`.
    pub fn parse(ip_masq: Option<Json>, backend: Option<String>) -> Result<Option<MasqueradeScope>> {
        let backend = masquerade_backend(backend)?;
        let (json, keys) = match ip_masq {
            None | Some(Json::Null | Json::Bool(false)) => return Ok(None),
            Some(Json::Bool(true)) => (None, IpMasqKeys::default()),
            Some(json @ Json::Object(_)) => {
                let wrong_type = |error| Error::caused(Code::DECODE, "failed to load netconf: ipMasq", error);
                let keys = json.decode().map_err(wrong_type)?;
                (Some(json), keys)
            }
            Some(_) => {
                return Err(Error::new(
                    Code::DECODE,
                    "failed to load netconf: ipMasq: expected a boolean or an object",
                ));
            }
        };
        if let Some(unknown) = json.and_then(|json| json.unknown_keys::<IpMasqKeys>().into_iter().next()) {
            return Err(Error::config(format!("unknown key {:?} in ipMasq", unknown.path)));
        }
        let mut exclude = Vec::with_capacity(keys.exclude.len());
        for text in &keys.exclude {
            let whole_family = "set \"ipv4\" or \"ipv6\" of ipMasq to false to exclude a whole family";
            let prefix = prefix(text, "ipMasq.exclude", whole_family)?;
            if !exclude.contains(&prefix) {
                exclude.push(prefix);
            }
        }
        let ipv4_count = exclude.iter().filter(|prefix| prefix.is_ipv4()).count();
        if ipv4_count.max(exclude.len() - ipv4_count) > MAX_EXCLUDED {
            return Err(Error::config(format!("ipMasq.exclude has more than {MAX_EXCLUDED} prefixes of one family")));
        }
        let (ipv4, ipv6) = (keys.ipv4.unwrap_or(true), keys.ipv6.unwrap_or(true));
        if !ipv4 && !ipv6 {
            return Ok(None);
        }
        Ok(Some(MasqueradeScope { backend, ipv4, ipv6, exclude }))
    }
}

/// Parses a prefix in the list `key`. `whole_family` is the end of the error for the length 0: what
/// to configure instead.
///
/// # Errors
/// Code 7 if it is not a prefix, has host bits, or is a whole address family.
pub fn prefix(text: &str, key: &str, whole_family: &str) -> Result<Cidr> {
    let invalid = |why: &str| Error::config(format!("invalid prefix {text:?} in {key}: {why}"));
    let prefix: Cidr = text.parse().map_err(|_| invalid("it must be an address with a length, such as 10.0.0.0/8"))?;
    if prefix.network() != prefix {
        return Err(invalid(&format!("it has host bits; the network is {}", prefix.network())));
    }
    if prefix.prefix() == 0 {
        return Err(invalid(whole_family));
    }
    Ok(prefix)
}

/// Parses `ipMasqBackend`. Returns `None` if it is absent or empty.
///
/// # Errors
/// Code 7 with the Go plugins' text for an unknown name.
fn masquerade_backend(name: Option<String>) -> Result<Option<Backend>> {
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

/// Checks that the configuration has an IPAM plugin.
///
/// # Errors
/// Code 7 with the Go plugins' text if it has none.
pub fn require_ipam(conf: &NetConf) -> Result<()> {
    match conf.ipam_type() {
        "" => Err(Error::config("no plugin name provided").with_details("\"ipam\" has no \"type\"")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masquerading(json: &str) -> Result<Option<MasqueradeScope>> {
        MasqueradeScope::parse(Some(Json::parse(json.as_bytes()).unwrap()), None)
    }

    #[test]
    fn ip_masq_is_a_boolean_or_an_object() {
        for off in ["false", "null", r#"{"ipv4": false, "ipv6": false}"#] {
            assert_eq!(masquerading(off).unwrap(), None, "{off}");
        }
        for on in ["{}", r#"{"ipv4": null, "IPv6": true, "exclude": null}"#] {
            assert_eq!(masquerading(on).unwrap(), masquerading("true").unwrap(), "{on}");
        }
        let json = r#"{"ipv6": false, "exclude": ["10.0.0.0/8", "fd00::/8", "10.0.0.0/8"]}"#;
        let scope = masquerading(json).unwrap().unwrap();
        let cidrs = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<Cidr>>();
        assert_eq!(scope.exclude, cidrs(&["10.0.0.0/8", "fd00::/8"]));
        assert_eq!(scope.select(&cidrs(&["10.1.0.2/24", "fd00::2/64"])), cidrs(&["10.1.0.2/24"]));
    }

    #[test]
    fn an_invalid_ip_masq_is_refused() {
        let many: Vec<String> = (0..33).map(|n| format!("\"10.{n}.0.0/16\"")).collect();
        let many = format!(r#"{{"exclude": [{}]}}"#, many.join(","));
        for (json, code, words) in [
            (r#"{"exclude": ["10.0.0.0"]}"#, Code::INVALID_CONFIG, "10.0.0.0"),
            (r#"{"exclude": ["10.0.0.1/8"]}"#, Code::INVALID_CONFIG, "the network is 10.0.0.0/8"),
            (r#"{"exclude": ["0.0.0.0/0"]}"#, Code::INVALID_CONFIG, "to false"),
            (r#"{"exclude": ["::/0"]}"#, Code::INVALID_CONFIG, "to false"),
            (&many, Code::INVALID_CONFIG, "more than 32"),
            (r#"{"excluded": []}"#, Code::INVALID_CONFIG, "unknown key \"excluded\""),
            (r#"{"exclude": "10.0.0.0/8"}"#, Code::DECODE, "exclude"),
            (r#"{"ipv4": "yes"}"#, Code::DECODE, "ipv4"),
            ("\"yes\"", Code::DECODE, "ipMasq"),
            ("[]", Code::DECODE, "ipMasq"),
        ] {
            let error = masquerading(json).unwrap_err();
            assert_eq!(error.code(), code, "{json}: {error}");
            assert!(error.to_string().contains(words), "{json}: {error}");
        }
    }
}
