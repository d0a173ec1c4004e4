//! The configuration of `dhcp`, which both plugin and daemon read.

use std::collections::BTreeSet;
use std::path::PathBuf;

use cni::config::NetConf;
use cni::json::{Json, UnknownKey};
use cni::result::Route;
use cni::{Error, Result};
use cni_dhcp::message::DEFAULT_REQUEST;
use cni_dhcp::message::v6::{MAX_DUID, MIN_DUID};
use serde::{Deserialize, Serialize};

use crate::option::option_code;

/// The path of the daemon's socket if neither a flag nor the configuration names one.
pub(crate) const DEFAULT_SOCKET: &str = "/run/cni/dhcp.sock";
/// The longest value of an option in bytes: a message stores the length in one byte.
const MAX_OPTION: usize = 255;
/// The code of the option with the MTU.
const INTERFACE_MTU: u8 = 26;

#[derive(Default, Deserialize)]
#[serde(default)]
struct Keys {
    ipam: Ipam,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Ipam {
    daemon_socket_path: String,
    priority: u32,
    provide: Vec<Provide>,
    request: Vec<Request>,
    routes: Vec<Route>,
    ipv4: Option<bool>,
    ipv6: Option<String>,
    client_id: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Provide {
    option: String,
    value: String,
    from_arg: String,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Request {
    skip_default: bool,
    option: String,
}

/// Where the MTU of a lease is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum MtuTarget {
    /// On the routes, because the option is requested only by default.
    #[default]
    Routes,
    /// On the interface and the routes, because `request` lists the option.
    Interface,
}

/// What DHCPv6 is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ipv6Mode {
    /// An address, and name resolution.
    Stateful,
    /// Name resolution only.
    Stateless,
}

/// The keys of `ipam`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Conf {
    /// The daemon's socket.
    pub(crate) socket: PathBuf,
    /// The priority (metric) of the routes.
    pub(crate) priority: Option<u32>,
    /// The codes and values of the options that the client sends.
    pub(crate) provide: Vec<(u8, Vec<u8>)>,
    /// The codes of the options that the client requests.
    pub(crate) request: Vec<u8>,
    /// Where the MTU of the lease is set.
    pub(crate) mtu_target: MtuTarget,
    /// The routes that are added to those of the lease.
    pub(crate) routes: Vec<Route>,
    /// Whether a DHCPv4 lease is requested.
    pub(crate) has_ipv4: bool,
    /// `None` without DHCPv6.
    pub(crate) ipv6: Option<Ipv6Mode>,
    /// The DUID of the configuration.
    pub(crate) duid: Option<Vec<u8>>,
}

impl Conf {
    /// Reads the configuration. `args` is CNI_ARGS, of which only the pairs that a `fromArg` names
    /// are used.
    ///
    /// # Errors
    /// Code 6 for a wrong type, 7 for an invalid option, with Go's texts where it has them.
    pub(crate) fn read(conf: &NetConf, args: &str) -> Result<Conf> {
        let mut ipam = conf.decode::<Keys>()?.ipam;
        ipam.routes.iter_mut().try_for_each(Route::settle_gateways)?;
        let listed = listed_options(&ipam.request)?;
        let ipv6 = parse_mode(ipam.ipv6.as_deref().unwrap_or_default())?;
        let has_ipv4 = ipam.ipv4.unwrap_or(true);
        let duid = ipam.client_id.as_deref().filter(|text| !text.is_empty()).map(parse_duid).transpose()?;
        match ipv6 {
            None if !has_ipv4 => return Err(Error::config("\"ipv4\": false needs \"ipv6\": \"stateful\"")),
            Some(Ipv6Mode::Stateless) if !has_ipv4 => {
                return Err(Error::config("\"ipv4\": false needs \"ipv6\": \"stateful\"")
                    .with_details("\"stateless\" requests no address"));
            }
            None if duid.is_some() => {
                return Err(Error::config("clientId needs the key ipv6")
                    .with_details("provide has the client identifier of DHCPv4, dhcp-client-identifier"));
            }
            _ => {}
        }
        Ok(Conf {
            socket: socket(conf),
            priority: Some(ipam.priority).filter(|priority| *priority != 0),
            provide: provided_options(&ipam.provide, args)?,
            mtu_target: if listed.contains(&INTERFACE_MTU) { MtuTarget::Interface } else { MtuTarget::Routes },
            request: requested_options(listed, &ipam.request),
            // The answer of the daemon has no `gws`, as that of Go's daemon.
            routes: ipam.routes.iter().flat_map(Route::paths).collect(),
            has_ipv4,
            ipv6,
            duid,
        })
    }
}

/// Parses `ipv6`. Returns `None` if it is empty.
fn parse_mode(text: &str) -> Result<Option<Ipv6Mode>> {
    match text {
        "" => Ok(None),
        "stateful" => Ok(Some(Ipv6Mode::Stateful)),
        "stateless" => Ok(Some(Ipv6Mode::Stateless)),
        _ => Err(Error::config(format!("invalid ipv6 {text:?}: must be stateful or stateless"))),
    }
}

/// Parses `clientId`: the bytes of a DUID in hexadecimal, separated by colons.
fn parse_duid(text: &str) -> Result<Vec<u8>> {
    let is_byte = |part: &&str| part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit());
    let parse = |part: &str| Some(part).filter(is_byte).and_then(|part| u8::from_str_radix(part, 16).ok());
    let duid: Option<Vec<u8>> = text.split(':').map(parse).collect();
    duid.filter(|duid| (MIN_DUID..=MAX_DUID).contains(&duid.len())).ok_or_else(|| {
        let bytes = format!("a DUID is {MIN_DUID} to {MAX_DUID} bytes of two hexadecimal digits, separated by colons");
        Error::config(format!("invalid clientId {text:?}")).with_details(bytes)
    })
}

/// Returns the codes and values of the options in `provide`. If CNI_ARGS (`args`) has the key that
/// `fromArg` names, its value replaces `value`. An option with neither is left out.
///
/// # Errors
/// Code 7 for an invalid option, or a value that is too long.
fn provided_options(provide: &[Provide], args: &str) -> Result<Vec<(u8, Vec<u8>)>> {
    let mut options: Vec<(u8, Vec<u8>)> = Vec::new();
    for Provide { option, value, from_arg } in provide {
        let code = option_code(option)?;
        let mut pairs = args.split(';').filter_map(|pair| pair.split_once('='));
        let replacement = pairs.find(|(key, _)| !from_arg.is_empty() && *key == *from_arg);
        let value = match replacement {
            Some((_, value)) => value,
            None if value.is_empty() => continue,
            None => value,
        };
        if value.len() > MAX_OPTION {
            let length = value.len();
            let text = format!("value of option {option} is {length} bytes long, at most {MAX_OPTION} fit");
            return Err(Error::config(text));
        }
        // A later item replaces an earlier one with the same code.
        options.retain(|(other, _)| *other != code);
        options.push((code, value.into()));
    }
    Ok(options)
}

/// Returns the codes of the options in `request`.
///
/// # Errors
/// Code 7 for an invalid option.
fn listed_options(request: &[Request]) -> Result<Vec<u8>> {
    // An item with only `skipDefault` has no option.
    request.iter().filter(|item| !item.option.is_empty()).map(|item| option_code(&item.option)).collect()
}

/// Returns the codes of the listed options, followed by the default ones unless an item has
/// `skipDefault`. Repeated codes are dropped.
fn requested_options(mut codes: Vec<u8>, request: &[Request]) -> Vec<u8> {
    if !request.iter().any(|item| item.skip_default) {
        codes.extend(DEFAULT_REQUEST);
    }
    let mut seen = BTreeSet::new();
    codes.retain(|code| seen.insert(*code));
    codes
}

/// Returns the path of the daemon's socket. No other key of the configuration is decoded, so that
/// DEL and GC work even if one is invalid.
pub(crate) fn socket(conf: &NetConf) -> PathBuf {
    let path = conf.json().get("ipam").and_then(|ipam| ipam.get("daemonSocketPath")).and_then(Json::as_str);
    path.filter(|path| !path.is_empty()).unwrap_or(DEFAULT_SOCKET).into()
}

/// Returns the keys of `ipam` that are not known. The interface plugin reads `type` and the keys
/// outside `ipam`.
pub(crate) fn unknown_keys(json: &Json) -> Vec<UnknownKey> {
    let mut unknown = json.unknown_keys::<Keys>();
    unknown.retain(|key| {
        key.path.split_once('.').is_some_and(|(object, name)| object == "ipam" && !name.eq_ignore_ascii_case("type"))
    });
    unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(ipam: &str, args: &str) -> Result<Conf> {
        Conf::read(&NetConf::parse(format!(r#"{{"cniVersion":"1.0.0","name":"n","type":"x","ipam":{ipam}}}"#))?, args)
    }

    #[test]
    fn options_have_numbers_and_names() {
        let conf = read(r#"{"provide":[{"option":"host-name","value":"a"},{"option":"60","value":"b"}]}"#, "").unwrap();
        assert_eq!(conf.provide, [(12, b"a".to_vec()), (60, b"b".to_vec())]);
        assert_eq!(
            read(r#"{"request":[{"option":"12"},{"option":"host-name"}]}"#, "").unwrap().request[..2],
            [12, 121]
        );
        for (wrong, details) in [
            ("hostname", "an option is a number from 1 to 254 or one of dhcp-client-identifier, "),
            ("256", "an option is a number from 1 to 254 or one of dhcp-client-identifier, "),
            ("-1", "an option is a number from 1 to 254 or one of dhcp-client-identifier, "),
            ("50", "the DHCP protocol itself uses this option, "),
        ] {
            let error = read(&format!(r#"{{"request":[{{"option":"{wrong}"}}]}}"#), "").unwrap_err();
            assert_eq!(error.msg(), format!("Can not parse option {wrong:?}"));
            assert!(error.details().starts_with(details), "{wrong}: {}", error.details());
        }
    }

    #[test]
    fn several_gateways_become_several_routes() {
        let routes = |gws: &str| read(&format!(r#"{{"routes":[{{"dst":"10.9.0.0/16","gws":{gws},"mtu":1400}}]}}"#), "");
        let conf = routes(r#"["10.1.0.8","10.1.0.9"]"#).unwrap();
        let paths: Vec<String> = conf.routes.iter().map(|route| format!("{:?} {:?}", route.gw, route.mtu)).collect();
        assert_eq!(paths, ["Some(10.1.0.8) Some(1400)", "Some(10.1.0.9) Some(1400)"]);
        assert!(conf.routes.iter().all(|route| route.gws.is_none()));
        assert_eq!(routes("[]").unwrap_err().msg(), "route 10.9.0.0/16: gws is empty");
    }

    #[test]
    fn a_value_from_cni_args_wins() {
        let ipam = r#"{"provide":[{"option":"12","value":"conf","fromArg":"K8S_POD_NAME"}]}"#;
        assert_eq!(read(ipam, "X;K8S_POD_NAME=a=b").unwrap().provide, [(12, b"a=b".to_vec())]);
        assert_eq!(read(ipam, "").unwrap().provide, [(12, b"conf".to_vec())]);
        let long = format!(r#"{{"provide":[{{"option":"12","value":"{}"}}]}}"#, "x".repeat(256));
        assert!(read(&long, "").is_err());
    }

    #[test]
    fn an_mtu_is_for_the_interface_only_if_it_is_listed() {
        assert_eq!(read("{}", "").unwrap().mtu_target, MtuTarget::Routes);
        for name in ["26", "mtu", "interface-mtu"] {
            let conf = read(&format!(r#"{{"request":[{{"option":"{name}"}}]}}"#), "").unwrap();
            assert_eq!(conf.mtu_target, MtuTarget::Interface, "{name}");
        }
    }

    #[test]
    fn default_options_can_be_skipped() {
        assert_eq!(read("{}", "").unwrap().request, DEFAULT_REQUEST);
        assert_eq!(read(r#"{"request":[{"skipDefault":true,"option":"3"}]}"#, "").unwrap().request, [3]);
    }
}
