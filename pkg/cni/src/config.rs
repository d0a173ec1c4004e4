//! The network configuration that a plugin reads from its standard input.
//!
//! The skeleton parses the configuration once and checks the standard keys. A plugin decodes its
//! own keys from the same tree with [`NetConf::decode`]. A delegate gets exactly the bytes that
//! were read ([`NetConf::raw`]).

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::json::Json;
use crate::result::{AddResult, Dns};
use crate::rollback::Notes;
use crate::version::Version;
use crate::{Code, Error, Result, ident};

/// A configuration whose standard keys have been checked.
#[derive(Clone, Debug)]
pub struct NetConf {
    raw: Vec<u8>,
    json: Json,
    name: String,
    version: Version,
    ipam_type: String,
}

/// The standard keys of every plugin, except `name` and `cniVersion`, which [`network_name`] and
/// [`version_text`] read.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Standard {
    /// Not used, but checked to be a string.
    #[serde(rename = "type")]
    _kind: String,
    ipam: Option<Ipam>,
}

/// The standard key in `ipam`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Ipam {
    #[serde(rename = "type")]
    kind: String,
}

impl NetConf {
    /// Checks the standard keys and returns the configuration. `json` is the parsed `raw`, and
    /// `version` the version that the caller has read from it.
    ///
    /// # Errors
    /// - Code 6 if a value has a wrong type.
    /// - Code 7 if the name is missing or invalid.
    pub(crate) fn new(raw: Vec<u8>, json: Json, version: Version) -> Result<NetConf> {
        let standard: Standard =
            json.decode().map_err(|error| Error::caused(Code::DECODE, "error unmarshall network config", error))?;
        let name = network_name(&json)?.to_owned();
        Ok(NetConf { raw, json, name, version, ipam_type: standard.ipam.unwrap_or_default().kind })
    }

    /// Parses a configuration and checks its version and standard keys, as the skeleton does for
    /// ADD.
    ///
    /// # Errors
    /// - Code 1 if the version is not supported.
    /// - Code 6 if `raw` is not a JSON object, or a value has a wrong type.
    /// - Code 7 if the name is missing or invalid.
    pub fn parse(raw: impl Into<Vec<u8>>) -> Result<NetConf> {
        let raw = raw.into();
        let json = parse_object(&raw)?;
        // As in Go, an error about the name comes before one about the version.
        network_name(&json)?;
        let text = version_text(&json)?;
        let version = Version::find(&text).ok_or_else(|| incompatible(&text))?;
        NetConf::new(raw, json, version)
    }

    /// Returns the bytes as they were read.
    pub fn raw(&self) -> &[u8] {
        &self.raw
    }

    /// Returns the whole document.
    pub fn json(&self) -> &Json {
        &self.json
    }

    /// Returns the network's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the version in which results are encoded.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns `ipam.type`, or the empty string if there is none.
    pub fn ipam_type(&self) -> &str {
        &self.ipam_type
    }

    /// Decodes the plugin's own keys.
    ///
    /// # Errors
    /// Code 6 if a value has a wrong type. The message names the key's path.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T> {
        self.json.decode().map_err(|error| Error::caused(Code::DECODE, "failed to load netconf", error))
    }

    /// Like [`decode`](NetConf::decode), but the error has the message of Go's plugins bandwidth,
    /// portmap and sbr.
    ///
    /// # Errors
    /// As [`decode`](NetConf::decode).
    pub fn decode_chained<T: DeserializeOwned>(&self) -> Result<T> {
        let text = "failed to parse network configuration";
        self.json.decode().map_err(|error| Error::caused(Code::DECODE, text, error))
    }

    /// Decodes `prevResult`. Returns `None` if it is absent.
    ///
    /// # Errors
    /// Code 6 with Go's text if it is not a result in the configuration's version.
    pub fn prev_result(&self) -> Result<Option<AddResult>> {
        let Some(json) = self.json.get("prevResult") else { return Ok(None) };
        AddResult::decode_as(json, self.version)
            .map(Some)
            .map_err(|error| Error::caused(Code::DECODE, "could not parse prevResult", error))
    }
}

/// `runtimeConfig.dns`, the name resolution that a runtime wants for a container. The
/// specification's conventions name its keys `servers` and `searches`. The keys `nameservers` and
/// `search` of a configuration's `dns` are accepted too, and used if those are missing or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct RuntimeDns {
    servers: Vec<String>,
    nameservers: Vec<String>,
    searches: Vec<String>,
    search: Vec<String>,
    domain: String,
    options: Vec<String>,
}

impl From<RuntimeDns> for Dns {
    fn from(dns: RuntimeDns) -> Dns {
        let RuntimeDns { servers, nameservers, searches, search, domain, options } = dns;
        Dns {
            nameservers: if servers.is_empty() { nameservers } else { servers },
            domain,
            search: if searches.is_empty() { search } else { searches },
            options,
        }
    }
}

/// The key `dns` of an interface plugin's configuration. A list that is present and not null counts
/// as set even if it is empty, as in Go: so an administrator can ask for none of IPAM's servers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ConfDns {
    nameservers: Option<Vec<String>>,
    domain: String,
    search: Option<Vec<String>>,
    options: Option<Vec<String>>,
}

impl ConfDns {
    /// Returns the name resolution, or `None` if no field is set.
    fn into_dns(self) -> Option<Dns> {
        let ConfDns { nameservers, domain, search, options } = self;
        let has_list = nameservers.is_some() || search.is_some() || options.is_some();
        let or_none = Option::unwrap_or_default;
        let dns = Dns { nameservers: or_none(nameservers), domain, search: or_none(search), options: or_none(options) };
        (has_list || !dns.domain.is_empty()).then_some(dns)
    }
}

/// Returns the name resolution that replaces IPAM's in the result of an interface plugin, or `None`
/// if the result keeps IPAM's. `runtime_dns`, the value of `runtimeConfig.dns`, is used if it
/// exists, even if it is an empty object. Otherwise `conf_dns`, the configuration's `dns`, is used
/// if a field of it is set.
///
/// A `runtime_dns` of a wrong type is noted and ignored: the Go plugins do not read
/// `runtimeConfig.dns`, so such a configuration works with them.
pub fn dns_override(runtime_dns: Option<&Json>, conf_dns: ConfDns, notes: &Notes) -> Option<Dns> {
    if let Some(json) = runtime_dns {
        match json.decode::<RuntimeDns>() {
            Ok(dns) => return Some(Dns::from(dns)),
            Err(error) => notes.note(format_args!("runtimeConfig.dns is ignored: {error}")),
        }
    }
    conf_dns.into_dns()
}

/// Parses a configuration.
///
/// # Errors
/// Code 6 if `raw` is not a JSON object.
pub(crate) fn parse_object(raw: &[u8]) -> Result<Json> {
    let decode_error = |why: String| Error::new(Code::DECODE, format!("error unmarshall network config: {why}"));
    match Json::parse(raw) {
        Ok(json @ Json::Object(_)) => Ok(json),
        Ok(_) => Err(decode_error("it is not a JSON object".to_owned())),
        Err(why) => Err(decode_error(why.to_string())),
    }
}

/// Returns the network's name.
///
/// # Errors
/// - Code 6 if the name is not a string.
/// - Code 7 if the name is missing or invalid.
pub(crate) fn network_name(json: &Json) -> Result<&str> {
    let name = match json.get("name") {
        None => "",
        Some(Json::String(text)) => text.as_str(),
        Some(_) => return Err(Error::new(Code::DECODE, "error unmarshall network config: name: expected a string")),
    };
    ident::check_network_name(name)?;
    Ok(name)
}

/// Returns the value of `cniVersion`, or `0.1.0` if that is absent or empty.
///
/// # Errors
/// Code 6 if `cniVersion` is not a string.
pub(crate) fn version_text(json: &Json) -> Result<String> {
    match json.get("cniVersion") {
        Some(Json::String(text)) if !text.is_empty() => Ok(text.clone()),
        Some(Json::String(_)) | None => Ok("0.1.0".to_owned()),
        Some(_) => Err(Error::new(Code::DECODE, "decoding version from network config: cniVersion: expected a string")),
    }
}

/// Returns the error, code 1, for a `cniVersion` that is not supported, with Go's text and details.
pub(crate) fn incompatible(cni_version: &str) -> Error {
    let supported: Vec<String> = Version::ALL.iter().map(|version| format!("\"{version}\"")).collect();
    Error::new(Code::INCOMPATIBLE_VERSION, "incompatible CNI versions")
        .with_details(format!("config is \"{cni_version}\", plugin supports [{}]", supported.join(" ")))
}

/// The attachments that GC must keep, each a container ID and an interface name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ValidAttachments(BTreeSet<(String, String)>);

/// An element of `cni.dev/valid-attachments`.
#[derive(Deserialize)]
struct WireAttachment {
    #[serde(default, rename = "containerID")]
    container_id: String,
    #[serde(default)]
    ifname: String,
}

impl ValidAttachments {
    /// Reads `cni.dev/valid-attachments`, or `cni.dev/attachments` if that key is missing. `null`
    /// counts as an empty list, because Go's libcni sends `null` for an empty list.
    ///
    /// # Errors
    /// Code 7 if both keys are missing, the value is not a list, or an element has no container ID
    /// or no interface name.
    pub(crate) fn from_config(json: &Json) -> Result<ValidAttachments> {
        const KEYS: [&str; 2] = ["cni.dev/valid-attachments", "cni.dev/attachments"];
        let first_present = KEYS.into_iter().find_map(|key| json.get_or_null(key).map(|list| (key, list)));
        let Some((key, list)) = first_present else {
            return Err(Error::config(format!("GC needs the key {}: without it nothing is removed", KEYS[0])));
        };
        let items = match list {
            Json::Null => return Ok(ValidAttachments::default()),
            Json::Array(items) => items,
            _ => return Err(Error::config(format!("{key} is not a list: nothing is removed"))),
        };
        let mut valid = BTreeSet::new();
        for (index, item) in items.iter().enumerate() {
            let WireAttachment { container_id, ifname } =
                item.decode().map_err(|error| Error::config(format!("{key}[{index}]: {error}: nothing is removed")))?;
            if container_id.is_empty() || ifname.is_empty() {
                return Err(Error::config(format!(
                    "{key}[{index}] has no containerID or no ifname: nothing is removed"
                )));
            }
            valid.insert((container_id, ifname));
        }
        Ok(ValidAttachments(valid))
    }

    /// Whether GC must keep this attachment.
    pub fn contains(&self, container_id: &str, ifname: &str) -> bool {
        self.0.contains(&(container_id.to_owned(), ifname.to_owned()))
    }

    /// Returns the container ID and the interface name of each attachment, sorted.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(id, ifname)| (id.as_str(), ifname.as_str()))
    }
}

impl<I: Into<String>, N: Into<String>> FromIterator<(I, N)> for ValidAttachments {
    fn from_iter<T: IntoIterator<Item = (I, N)>>(pairs: T) -> ValidAttachments {
        ValidAttachments(pairs.into_iter().map(|(id, ifname)| (id.into(), ifname.into())).collect())
    }
}

/// Parses an address that a runtime requests in `ips` or in `IP` of CNI_ARGS: `address` or
/// `address/prefix`, whose prefix length is ignored. As in Go, an IPv4-mapped address becomes an
/// IPv4 address.
///
/// # Errors
/// Code 7 with Go's text if the text has neither form.
pub fn parse_requested_address(text: &str) -> Result<IpAddr> {
    let address = match text.parse::<crate::Cidr>() {
        Ok(cidr) => Some(cidr.address()),
        Err(_) => text.parse::<IpAddr>().ok().map(|address| address.to_canonical()),
    };
    address.ok_or_else(|| Error::config(format!("invalid IP address {text}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standard_keys_are_checked_with_gos_texts() {
        let error = |text: &str| {
            let error = NetConf::parse(text).unwrap_err();
            (error.code().0, error.msg().to_owned())
        };
        assert_eq!(error("{}"), (7, "missing network name".into()));
        assert_eq!(error(r#"{"name":"a/b"}"#), (7, "invalid characters found in network name".into()));
        assert_eq!(error(r#"{"name":"a","cniVersion":"0.4"}"#), (1, "incompatible CNI versions".into()));
        assert_eq!(error(r#"{"name":"a","cniVersion":4}"#).0, 6);
        assert_eq!(error("[]").0, 6);
        assert_eq!(error(r#"{"name":"a"} x"#).0, 6);
        assert_eq!(error(r#"{"name":"a","ipam":{"type":5}}"#).0, 6);
        let conf = NetConf::parse(r#"{"NAME":"a","type":"bridge","ipam":{"Type":"host-local"}}"#).unwrap();
        assert_eq!((conf.name(), conf.version(), conf.ipam_type()), ("a", Version::V0_1_0, "host-local"));
    }

    #[test]
    fn a_prev_result_without_a_version_inherits_the_configurations() {
        let conf =
            NetConf::parse(r#"{"name":"a","cniVersion":"0.2.0","prevResult":{"ip4":{"ip":"1.2.3.4/8"}}}"#).unwrap();
        assert_eq!(conf.prev_result().unwrap().unwrap().ips.len(), 1);
        let conf = NetConf::parse(r#"{"name":"a","cniVersion":"0.4.0","prevResult":{"cniVersion":"1.0.0"}}"#).unwrap();
        assert!(conf.prev_result().unwrap_err().msg().starts_with("could not parse prevResult: result type supports"));
        assert!(NetConf::parse(r#"{"name":"a","prevResult":null}"#).unwrap().prev_result().unwrap().is_none());
    }

    #[test]
    fn the_runtimes_dns_replaces_the_configurations_as_a_whole() {
        let chosen = |of_runtime: &str, of_conf: &str| {
            let of_runtime = Json::parse(of_runtime.as_bytes()).unwrap().decode::<Option<Json>>().unwrap();
            dns_override(
                of_runtime.as_ref(),
                Json::parse(of_conf.as_bytes()).unwrap().decode().unwrap(),
                &Notes::silent(),
            )
        };
        let of_conf = r#"{"nameservers":["192.0.2.9"],"domain":"conf.example","search":["c"],"options":["rotate"]}"#;
        let dns = |text: &str| Some(Json::parse(text.as_bytes()).unwrap().decode::<Dns>().unwrap());
        assert_eq!(chosen("null", of_conf), dns(of_conf));
        assert_eq!(chosen(r#"{"servers":"192.0.2.1"}"#, of_conf), dns(of_conf), "of a wrong type");
        assert_eq!(chosen("null", "{}"), None);
        assert_eq!(chosen("null", r#"{"nameservers":null,"domain":"","search":null,"options":null}"#), None);
        for list in ["nameservers", "search", "options"] {
            assert_eq!(chosen("null", &format!(r#"{{"{list}":[]}}"#)), Some(Dns::default()), "{list} is set");
        }
        assert_eq!(chosen("null", r#"{"domain":"d"}"#), dns(r#"{"domain":"d"}"#));
        assert_eq!(chosen(r#"{"servers":["192.0.2.1"]}"#, of_conf), dns(r#"{"nameservers":["192.0.2.1"]}"#));
        // Go's libcni writes absent values like this.
        assert_eq!(chosen(r#"{"Servers":null,"Searches":["s"],"Options":null}"#, of_conf), dns(r#"{"search":["s"]}"#));
        let all = r#"{"nameservers":["192.0.2.2"],"search":["t"],"domain":"d","options":["ndots:1"]}"#;
        assert_eq!(chosen(all, of_conf), dns(all));
        assert_eq!(chosen("{}", of_conf), Some(Dns::default()), "present and empty");
    }

    #[test]
    fn gc_acts_only_on_a_list_of_whole_attachments() {
        let valid = |text: &str| ValidAttachments::from_config(&Json::parse(text.as_bytes()).unwrap());
        for bad in [
            "{}",
            r#"{"cni.dev/valid-attachments":{}}"#,
            r#"{"cni.dev/valid-attachments":"x"}"#,
            r#"{"cni.dev/valid-attachments":[{"containerID":"a"}]}"#,
            r#"{"cni.dev/valid-attachments":[{"containerID":"a","ifname":"b"},{"ifname":"b"}]}"#,
            r#"{"cni.dev/valid-attachments":[null]}"#,
        ] {
            assert_eq!(valid(bad).unwrap_err().code(), Code::INVALID_CONFIG, "{bad}");
        }
        assert_eq!(valid(r#"{"cni.dev/valid-attachments":null}"#).unwrap(), ValidAttachments::default());
        assert_eq!(valid(r#"{"cni.dev/attachments":[]}"#).unwrap(), ValidAttachments::default());
        let one = valid(r#"{"cni.dev/valid-attachments":[{"containerID":"a","ifname":"b"}]}"#).unwrap();
        assert!(one.contains("a", "b") && !one.contains("a", "c"));
    }
}
