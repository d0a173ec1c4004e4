//! The keys that every interface plugin has besides its own: `dns`, `runtimeConfig.dns`, and those
//! about the advertisements of routers.

use cni::config::{ConfDns, NetConf, dns_override};
use cni::json::{Json, UnknownKey};
use cni::result::Dns;
use cni::rollback::Notes;
use cni::{Error, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{AcceptRa, Gateway, Layer3Policy};

/// The IPAM plugin whose addresses come from advertisements.
pub(super) const SLAAC: &str = "slaac";

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Keys {
    accept_ra: Option<String>,
    enable_slaac: Option<bool>,
    dns: ConfDns,
    runtime_config: RuntimeConfig,
}

/// The object `runtimeConfig`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct RuntimeConfig {
    dns: Option<Json>,
}

/// The values of the keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CommonConf {
    /// Whether the container's interface accepts advertisements.
    pub(super) accept_ra: AcceptRa,
    /// The result's `dns`; `None` for that of the IPAM plugin.
    pub(super) dns: Option<Dns>,
}

impl CommonConf {
    /// Reads the keys. `policy` is that of the plugin for the same configuration. Writes to `notes`
    /// if `runtimeConfig.dns` is ignored.
    ///
    /// # Errors
    /// - Code 6 for a wrong type.
    /// - Code 7 for an unknown value, for keys that contradict each other, and for the IPAM plugin
    ///   slaac on an interface that ignores advertisements or whose gateway is the host.
    pub(super) fn read(conf: &NetConf, policy: &Layer3Policy<'_>, notes: &Notes) -> Result<CommonConf> {
        let keys: Keys = conf.decode()?;
        let accept_ra = parse_accept_ra(keys.accept_ra.unwrap_or_default(), keys.enable_slaac)?;
        if conf.ipam_type() == SLAAC {
            if accept_ra == AcceptRa::No {
                return Err(Error::config("the IPAM plugin slaac needs an interface that accepts advertisements")
                    .with_details("acceptRa or enableSlaac forbids them"));
            }
            if policy.gateway != Gateway::None {
                return Err(Error::config("the IPAM plugin slaac needs a router on the network as the gateway")
                    .with_details("this configuration makes the host the gateway, which sends no advertisements"));
            }
        }
        Ok(CommonConf { accept_ra, dns: dns_override(keys.runtime_config.dns.as_ref(), keys.dns, notes) })
    }
}

/// Parses `acceptRa` and `enableSlaac`, which mean the same.
///
/// # Errors
/// Code 7 for an unknown value, and if the keys contradict each other.
fn parse_accept_ra(text: String, enable_slaac: Option<bool>) -> Result<AcceptRa> {
    let accept_ra = match text.as_str() {
        "" => None,
        "default" => Some(AcceptRa::Default),
        "no" => Some(AcceptRa::No),
        "yes" => Some(AcceptRa::Yes),
        other => {
            return Err(Error::config(format!("invalid acceptRa {other:?}: must be one of default, no and yes")));
        }
    };
    let Some(enabled) = enable_slaac else { return Ok(accept_ra.unwrap_or(AcceptRa::Default)) };
    let of_slaac = if enabled { AcceptRa::Yes } else { AcceptRa::No };
    if accept_ra.is_some_and(|accept_ra| accept_ra != of_slaac) {
        return Err(Error::config(format!("acceptRa {text:?} contradicts enableSlaac {enabled}")));
    }
    Ok(of_slaac)
}

/// Returns the keys that neither `K`, the keys of a plugin, nor the common keys have.
pub(super) fn unknown_keys<K: DeserializeOwned>(json: &Json) -> Vec<UnknownKey> {
    let common = json.unknown_keys::<Keys>();
    let is_below = |key: &UnknownKey, other: &UnknownKey| {
        key.path.strip_prefix(other.path.as_str()).is_some_and(|rest| rest.starts_with(['.', '[']))
    };
    let mut unknown = Vec::new();
    for mut own in json.unknown_keys::<K>() {
        if let Some(same) = common.iter().find(|other| other.path == own.path) {
            own.known.extend(&same.known);
            unknown.push(own);
        } else if common.iter().any(|other| is_below(&own, other)) {
            unknown.push(own);
        } else {
            // The common keys have an object that the plugin's lack, such as `runtimeConfig`.
            unknown.extend(common.iter().filter(|other| is_below(other, &own)).cloned());
        }
    }
    unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conf(keys: &str) -> NetConf {
        NetConf::parse(format!(r#"{{"cniVersion":"1.0.0","name":"n","type":"x"{keys}}}"#)).unwrap()
    }

    fn read(keys: &str, gateway: Gateway) -> Result<CommonConf> {
        CommonConf::read(&conf(keys), &Layer3Policy { gateway, ..Layer3Policy::default() }, &Notes::silent())
    }

    #[test]
    fn both_keys_name_the_same_sysctls() {
        for (keys, expected) in [
            ("", AcceptRa::Default),
            (r#","acceptRa":"","enableSlaac":null"#, AcceptRa::Default),
            (r#","acceptRa":"default""#, AcceptRa::Default),
            (r#","acceptRa":"no""#, AcceptRa::No),
            (r#","acceptRa":"no","enableSlaac":false"#, AcceptRa::No),
            (r#","acceptRa":"yes""#, AcceptRa::Yes),
            (r#","enableSlaac":true"#, AcceptRa::Yes),
        ] {
            assert_eq!(read(keys, Gateway::None).unwrap().accept_ra, expected, "{keys}");
        }
    }

    #[test]
    fn contradictions_and_unknown_values_are_refused() {
        let slaac = |keys: &str| format!(r#","ipam":{{"type":"slaac"}}{keys}"#);
        for (keys, gateway, msg) in [
            (
                r#","acceptRa":"maybe""#,
                Gateway::None,
                r#"invalid acceptRa "maybe": must be one of default, no and yes"#,
            ),
            (r#","acceptRa":"no","enableSlaac":true"#, Gateway::None, r#"acceptRa "no" contradicts enableSlaac true"#),
            (
                r#","acceptRa":"default","enableSlaac":true"#,
                Gateway::None,
                r#"acceptRa "default" contradicts enableSlaac true"#,
            ),
            (
                r#","enableSlaac":false"#,
                Gateway::None,
                "the IPAM plugin slaac needs an interface that accepts advertisements",
            ),
            ("", Gateway::Address, "the IPAM plugin slaac needs a router on the network as the gateway"),
        ] {
            let error = read(&slaac(keys), gateway).unwrap_err();
            assert_eq!((error.code(), error.msg()), (cni::Code::INVALID_CONFIG, msg));
        }
    }

    #[test]
    fn a_key_is_unknown_if_both_structures_lack_it() {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Inner {
            _own: bool,
        }
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Own {
            #[serde(rename = "dns")]
            _dns: Inner,
            #[serde(rename = "list")]
            _list: Vec<Inner>,
        }
        let keys = r#","DNS":{"domain":"d","_own":true,"dmain":"d"},"runtimeConfig":{"dns":1,"mac":"m"},
            "list":[{"id":1}],"acceptra":"yes","foo":{"dns":1}"#;
        let mut unknown = unknown_keys::<Own>(conf(keys).json());
        unknown.retain(|key| !["cniVersion", "name", "type"].contains(&key.path.as_str()));
        let paths: Vec<&str> = unknown.iter().map(|key| key.path.as_str()).collect();
        assert_eq!(paths, ["runtimeConfig.mac", "foo", "dns.dmain", "list[0].id"]);
        assert_eq!(unknown[0].known, ["dns"]);
        assert_eq!(unknown[2].known, ["_own", "nameservers", "domain", "search", "options"]);
    }
}
