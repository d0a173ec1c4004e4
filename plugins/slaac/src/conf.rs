//! The configuration of `slaac`.

use std::net::Ipv6Addr;
use std::time::Duration;

use cni::config::NetConf;
use cni::delegate::{self, answer_margin};
use cni::json::{Json, UnknownKey};
use cni::{Error, Result};
use serde::Deserialize;

/// How long ADD waits for a router if the configuration has no `timeout`, in seconds.
const DEFAULT_TIMEOUT: u64 = 10;

/// The keys in `ipam`, or of the chained plugin's own object.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Keys {
    timeout: Option<u64>,
    required: Option<bool>,
    addr_gen_mode: Option<String>,
    token: Option<String>,
}

/// The configuration of an interface plugin that runs slaac.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Delegated {
    ipam: Keys,
}

/// How the plugin is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Usage {
    /// An interface plugin runs it, because `ipam.type` is `slaac`.
    Ipam,
    /// The list contains it, after the plugin that created the interface.
    Chained,
}

impl Usage {
    /// Returns how the plugin is used with this configuration.
    pub(crate) fn of(conf: &NetConf) -> Usage {
        if conf.ipam_type() == "slaac" { Usage::Ipam } else { Usage::Chained }
    }
}

/// What an ADD does if no router answers in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRouter {
    /// ADD fails.
    Fail,
    /// ADD succeeds with what the interface has.
    Succeed,
}

/// How the interface chooses the lower 64 bits of its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddrGenMode {
    /// From its hardware address.
    Eui64,
    /// From a secret of the attachment and the prefix (RFC 7217).
    StablePrivacy,
    /// As `Eui64`, but it has no link-local address, and so sends no solicitation.
    None,
}

/// A checked configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conf {
    pub(crate) usage: Usage,
    /// How long ADD waits for a router.
    pub(crate) limit: Duration,
    pub(crate) no_router: NoRouter,
    /// `None` for the namespace's default.
    pub(crate) addr_gen_mode: Option<AddrGenMode>,
    /// The lower 64 bits of the addresses; `None` for those of the mode.
    pub(crate) token: Option<Ipv6Addr>,
}

impl Conf {
    /// Reads the configuration.
    ///
    /// # Errors
    /// Code 6 for a wrong type, 7 for an invalid value.
    pub(crate) fn read(conf: &NetConf) -> Result<Conf> {
        let usage = Usage::of(conf);
        let keys = match usage {
            Usage::Ipam => conf.decode::<Delegated>()?.ipam,
            Usage::Chained => conf.decode::<Keys>()?,
        };
        let timeout = keys.timeout.unwrap_or(DEFAULT_TIMEOUT);
        if !(1..=55).contains(&timeout) {
            return Err(Error::config(format!("invalid timeout {timeout}: must be between 1 and 55 seconds")));
        }
        let mut limit = Duration::from_secs(timeout);
        if usage == Usage::Ipam {
            // The interface plugin ends this plugin then, and reports an invalid value. Go's
            // interface plugins do not read the key.
            let delegate_limit = delegate::timeout(conf).unwrap_or(delegate::DEFAULT_TIMEOUT);
            limit = limit.min(delegate_limit - answer_margin(delegate_limit));
        }
        Ok(Conf {
            usage,
            limit,
            no_router: if keys.required.unwrap_or(true) { NoRouter::Fail } else { NoRouter::Succeed },
            addr_gen_mode: parse_mode(keys.addr_gen_mode.as_deref().unwrap_or_default())?,
            token: parse_token(keys.token.as_deref().unwrap_or_default())?,
        })
    }
}

/// Parses `addrGenMode`. Returns `None` if it is empty.
fn parse_mode(text: &str) -> Result<Option<AddrGenMode>> {
    match text {
        "" => Ok(None),
        "eui64" => Ok(Some(AddrGenMode::Eui64)),
        "stable-privacy" => Ok(Some(AddrGenMode::StablePrivacy)),
        "none" => Ok(Some(AddrGenMode::None)),
        _ => Err(Error::config(format!("invalid addrGenMode {text:?}: must be eui64, stable-privacy or none"))),
    }
}

/// Parses `token`. Returns `None` if it is empty.
fn parse_token(text: &str) -> Result<Option<Ipv6Addr>> {
    if text.is_empty() {
        return Ok(None);
    }
    let is_token = |token: &Ipv6Addr| token.to_bits() != 0 && token.to_bits() >> 64 == 0;
    match text.parse::<Ipv6Addr>().ok().filter(is_token) {
        Some(token) => Ok(Some(token)),
        None => Err(Error::config(format!("invalid token {text:?}: must be an IPv6 address below ::1:0:0:0:0"))),
    }
}

/// Returns the keys that this plugin does not read: those of `ipam` except `type`, or, for the
/// chained plugin, those of its object.
pub(crate) fn unknown_keys(json: &Json) -> Vec<UnknownKey> {
    let is_delegate = json.get("ipam").and_then(|ipam| ipam.get("type")).and_then(Json::as_str) == Some("slaac");
    if !is_delegate {
        return json.unknown_keys::<Keys>();
    }
    let mut unknown = json.unknown_keys::<Delegated>();
    unknown.retain(|key| {
        key.path.split_once('.').is_some_and(|(object, name)| object == "ipam" && !name.eq_ignore_ascii_case("type"))
    });
    unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(keys: &str) -> Result<Conf> {
        Conf::read(&NetConf::parse(format!(r#"{{"cniVersion":"1.0.0","name":"n","type":"x"{keys}}}"#))?)
    }

    #[test]
    fn keys_are_in_ipam_or_in_the_chained_object() {
        for (keys, usage) in [
            (r#","ipam":{"type":"slaac","timeout":3,"required":false,"token":"::5"}"#, Usage::Ipam),
            (r#","timeout":3,"required":false,"token":"::5""#, Usage::Chained),
        ] {
            let conf = read(keys).unwrap();
            assert_eq!((conf.usage, conf.limit), (usage, Duration::from_secs(3)));
            assert_eq!((conf.no_router, conf.token), (NoRouter::Succeed, Some(Ipv6Addr::from_bits(5))));
        }
    }

    #[test]
    fn the_wait_ends_before_the_delegates_deadline() {
        let limit = |keys: &str| read(&format!(r#","ipam":{{"type":"slaac"{keys}}}"#)).unwrap().limit.as_secs_f64();
        assert_eq!(limit(""), 10.0);
        assert_eq!(limit(r#","timeout":55"#), 50.0);
        assert_eq!(limit(r#"},"delegateTimeout":8,"x":{"y":1"#), 6.0);
        assert_eq!(read(r#","timeout":55"#).unwrap().limit.as_secs(), 55);
    }

    #[test]
    fn invalid_values_are_named() {
        for (keys, msg) in [
            (r#""timeout":0"#, "invalid timeout 0: must be between 1 and 55 seconds"),
            (r#""timeout":56"#, "invalid timeout 56: must be between 1 and 55 seconds"),
            (r#""addrGenMode":"random""#, r#"invalid addrGenMode "random": must be eui64, stable-privacy or none"#),
            (r#""token":"5""#, r#"invalid token "5": must be an IPv6 address below ::1:0:0:0:0"#),
            (r#""token":"::""#, r#"invalid token "::": must be an IPv6 address below ::1:0:0:0:0"#),
            (r#""token":"fd00::5""#, r#"invalid token "fd00::5": must be an IPv6 address below ::1:0:0:0:0"#),
        ] {
            assert_eq!(read(&format!(r#","ipam":{{"type":"slaac",{keys}}}"#)).unwrap_err().msg(), msg);
        }
    }
}
