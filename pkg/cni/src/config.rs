//! The network configuration that a plugin reads from its standard input.
//!
//! Parsed once by the skeleton: the standard keys are checked here, a plugin decodes its own keys
//! from the same tree with [`NetConf::decode`], and a delegate gets the very bytes that came in
//! ([`NetConf::raw`]).

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::json::Json;
use crate::result::{AddResult, Dns};
use crate::rollback::Notes;
use crate::version::Version;
use crate::{Code, Error, Result, ident};

/// A configuration whose standard keys are sound.
#[derive(Clone, Debug)]
pub struct NetConf {
    raw: Vec<u8>,
    json: Json,
    name: String,
    version: Version,
    ipam_type: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Standard {
    #[serde(rename = "type")]
    _kind: String,
    ipam: Option<Ipam>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Ipam {
    #[serde(rename = "type")]
    kind: String,
}

impl NetConf {
    /// Reads a configuration whose version has already been found supported.
    ///
    /// # Errors
    /// Code 6 for JSON, 7 for the name.
    pub(crate) fn new(raw: Vec<u8>, json: Json, version: Version) -> Result<NetConf> {
        let standard: Standard =
            json.decode().map_err(|error| Error::caused(Code::DECODE, "error unmarshall network config", error))?;
        let name = name(&json)?.to_owned();
        Ok(NetConf { raw, json, name, version, ipam_type: standard.ipam.unwrap_or_default().kind })
    }

    /// Reads and checks a configuration by itself, as the skeleton does for ADD.
    ///
    /// # Errors
    /// 1 for the version, 6 for JSON, 7 for the name.
    pub fn parse(raw: impl Into<Vec<u8>>) -> Result<NetConf> {
        let raw = raw.into();
        let json = parse_object(&raw)?;
        name(&json)?;
        let text = version_text(&json)?;
        let version = Version::find(&text).ok_or_else(|| incompatible("incompatible CNI versions", &text))?;
        NetConf::new(raw, json, version)
    }

    /// The bytes as they came in.
    pub fn raw(&self) -> &[u8] {
        &self.raw
    }

    /// The whole document.
    pub fn json(&self) -> &Json {
        &self.json
    }

    /// The network's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The version in which the runtime wants its answers.
    pub fn version(&self) -> Version {
        self.version
    }

    /// `ipam.type`; empty if there is none.
    pub fn ipam_type(&self) -> &str {
        &self.ipam_type
    }

    /// The plugin's own keys.
    ///
    /// # Errors
    /// Code 6; the message names the key's path.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T> {
        self.json.decode().map_err(|error| Error::caused(Code::DECODE, "failed to load netconf", error))
    }

    /// `prevResult`, which must be of the configuration's own family of versions.
    ///
    /// # Errors
    /// Code 6 with Go's text.
    pub fn prev_result(&self) -> Result<Option<AddResult>> {
        let Some(json) = self.json.get("prevResult") else { return Ok(None) };
        AddResult::decode_as(json, self.version)
            .map(Some)
            .map_err(|error| Error::caused(Code::DECODE, "could not parse prevResult", error))
    }
}

/// The name resolution that a runtime wants for a container, from `runtimeConfig.dns`: a convention
/// of the specification, which names the keys `servers` and `searches`; `dns` of a configuration
/// has `nameservers` and `search`.
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
        let either = |one: Vec<String>, other| if one.is_empty() { other } else { one };
        Dns {
            nameservers: either(dns.servers, dns.nameservers),
            domain: dns.domain,
            search: either(dns.searches, dns.search),
            options: dns.options,
        }
    }
}

/// Returns what replaces IPAM's name resolution in the result of a plugin that creates an
/// interface: `runtimeConfig.dns` as a whole if it is present, else `dns` of the configuration as a
/// whole if it has a value. `None` leaves IPAM's. Go's plugins ignore `runtimeConfig.dns`, so a
/// value of a wrong type is ignored too, with a note.
pub fn dns_override(of_runtime: Option<&Json>, of_conf: Dns, notes: &Notes) -> Option<Dns> {
    let of_runtime = of_runtime.and_then(|json| match json.decode::<RuntimeDns>() {
        Ok(dns) => Some(Dns::from(dns)),
        Err(error) => {
            notes.note(format_args!("runtimeConfig.dns is ignored: {error}"));
            None
        }
    });
    of_runtime.or_else(|| Some(of_conf).filter(|dns| !dns.is_empty()))
}

/// The document as an object.
pub(crate) fn parse_object(raw: &[u8]) -> Result<Json> {
    let error = |why: String| Error::new(Code::DECODE, format!("error unmarshall network config: {why}"));
    match Json::parse(raw) {
        Ok(json @ Json::Object(_)) => Ok(json),
        Ok(_) => Err(error("it is not a JSON object".to_owned())),
        Err(why) => Err(error(why.to_string())),
    }
}

/// The network's name, checked.
pub(crate) fn name(json: &Json) -> Result<&str> {
    let name = match json.get("name") {
        None => "",
        Some(Json::String(text)) => text.as_str(),
        Some(_) => return Err(Error::new(Code::DECODE, "error unmarshall network config: name: expected a string")),
    };
    ident::check_network_name(name)?;
    Ok(name)
}

/// Returns the value of `cniVersion`; 0.1.0 if it is absent or empty.
pub(crate) fn version_text(json: &Json) -> Result<String> {
    match json.get("cniVersion") {
        None => Ok("0.1.0".to_owned()),
        Some(Json::String(text)) if text.is_empty() => Ok("0.1.0".to_owned()),
        Some(Json::String(text)) => Ok(text.clone()),
        Some(_) => Err(Error::new(Code::DECODE, "decoding version from network config: cniVersion: expected a string")),
    }
}

/// Code 1 with Go's text and details.
pub fn incompatible(msg: &str, config: &str) -> Error {
    let supported: Vec<String> = Version::ALL.iter().map(|version| format!("\"{version}\"")).collect();
    Error::new(Code::INCOMPATIBLE_VERSION, msg)
        .with_details(format!("config is \"{config}\", plugin supports [{}]", supported.join(" ")))
}

/// The attachments that a GC request calls valid: (container ID, interface name).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ValidAttachments(BTreeSet<(String, String)>);

#[derive(Deserialize)]
struct Attachment {
    #[serde(default, rename = "containerID")]
    container_id: String,
    #[serde(default)]
    ifname: String,
}

impl ValidAttachments {
    /// Reads `cni.dev/valid-attachments`, or `cni.dev/attachments`. `null` is an empty list, as
    /// Go's libcni sends it.
    ///
    /// # Errors
    /// Code 7 if the key is missing or not a list, or if an element lacks its ID or name: nothing
    /// is removed then.
    pub(crate) fn from_config(json: &Json) -> Result<ValidAttachments> {
        const KEY: &str = "cni.dev/valid-attachments";
        let list = json.get_or_null(KEY).or_else(|| json.get_or_null("cni.dev/attachments"));
        let items = match list {
            None => return Err(Error::config(format!("GC needs the key {KEY}: without it nothing is removed"))),
            Some(Json::Null) => return Ok(ValidAttachments::default()),
            Some(Json::Array(items)) => items,
            Some(_) => return Err(Error::config(format!("{KEY} is not a list: nothing is removed"))),
        };
        let attachment = |(index, item): (usize, &Json)| match item.decode::<Attachment>() {
            Ok(Attachment { container_id, ifname }) if !container_id.is_empty() && !ifname.is_empty() => {
                Ok((container_id, ifname))
            }
            Ok(_) => {
                Err(Error::config(format!("{KEY}[{index}] lacks its containerID or its ifname: nothing is removed")))
            }
            Err(error) => Err(Error::config(format!("{KEY}[{index}]: {error}: nothing is removed"))),
        };
        items.iter().enumerate().map(attachment).collect::<Result<_>>().map(ValidAttachments)
    }

    /// Whether this attachment is still valid.
    pub fn contains(&self, container_id: &str, ifname: &str) -> bool {
        self.0.contains(&(container_id.to_owned(), ifname.to_owned()))
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(id, ifname)| (id.as_str(), ifname.as_str()))
    }
}

impl<I: Into<String>, N: Into<String>> FromIterator<(I, N)> for ValidAttachments {
    fn from_iter<T: IntoIterator<Item = (I, N)>>(pairs: T) -> ValidAttachments {
        ValidAttachments(pairs.into_iter().map(|(id, ifname)| (id.into(), ifname.into())).collect())
    }
}

/// An `ip` or `ip/prefix`, as `ips` and `IP` give it: the address alone.
///
/// # Errors
/// Go's text.
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
        assert_eq!(chosen("null", r#"{"nameservers":[]}"#), None);
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
