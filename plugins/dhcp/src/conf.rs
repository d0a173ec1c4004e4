//! The configuration of `dhcp`, which both plugin and daemon read.

use std::path::PathBuf;

use cni::config::NetConf;
use cni::json::{Json, UnknownKey};
use cni::{Error, Result};
use cni_dhcp::message::DEFAULT_REQUEST;
use serde::Deserialize;

pub(crate) const DEFAULT_SOCKET: &str = "/run/cni/dhcp.sock";

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
}

impl Conf {
    /// Reads the configuration. `args` is CNI_ARGS, from which an option's `fromArg` takes its
    /// value; other pairs are ignored.
    ///
    /// # Errors
    /// Code 6 for a wrong type, 7 for an invalid option, with Go's texts where it has them.
    pub(crate) fn read(conf: &NetConf, args: &str) -> Result<Conf> {
        let ipam = conf.decode::<Keys>()?.ipam;
        let mut provide: Vec<(u8, Vec<u8>)> = Vec::new();
        for entry in &ipam.provide {
            let code = option(&entry.option)?;
            let mut pairs = args.split(';').filter_map(|pair| pair.split_once('='));
            let value = match pairs.find(|(key, _)| !key.is_empty() && *key == entry.from_arg) {
                Some((_, value)) => value,
                None if entry.value.is_empty() => continue,
                None => &entry.value,
            };
            if value.len() > 255 {
                let text = format!("value of option {} is {} bytes long, at most 255 fit", entry.option, value.len());
                return Err(Error::config(text));
            }
            provide.retain(|(other, _)| *other != code);
            provide.push((code, value.into()));
        }
        let mut request = Vec::new();
        for entry in ipam.request.iter().filter(|entry| !entry.option.is_empty()) {
            request.push(option(&entry.option)?);
        }
        if !ipam.request.iter().any(|entry| entry.skip_default) {
            request.extend(DEFAULT_REQUEST);
        }
        // Each code once, at its first place.
        let mut is_requested = [false; 256];
        request.retain(|code| !std::mem::replace(&mut is_requested[usize::from(*code)], true));
        Ok(Conf {
            socket: socket(conf),
            priority: Some(ipam.priority).filter(|priority| *priority != 0),
            provide,
            request,
        })
    }
}

/// Returns the path of the daemon's socket, even if other keys of the configuration are invalid.
pub(crate) fn socket(conf: &NetConf) -> PathBuf {
    let path = conf.json().get("ipam").and_then(|ipam| ipam.get("daemonSocketPath")).and_then(Json::as_str);
    path.filter(|path| !path.is_empty()).unwrap_or(DEFAULT_SOCKET).into()
}

/// Returns the keys of `ipam` that the plugin does not read.
pub(crate) fn unknown_keys(json: &Json) -> Vec<UnknownKey> {
    let mut unknown = json.unknown_keys::<Keys>();
    unknown.retain(|key| {
        key.path.split_once('.').is_some_and(|(place, rest)| place == "ipam" && !rest.eq_ignore_ascii_case("type"))
    });
    unknown
}

/// Returns the code of an option, which is given as a number or by one of six names.
///
/// # Errors
/// Code 7 for another text, and for the options that a message has in any case.
fn option(text: &str) -> Result<u8> {
    let names = [
        ("dhcp-client-identifier", 61),
        ("subnet-mask", 1),
        ("routers", 3),
        ("host-name", 12),
        ("user-class", 77),
        ("vendor-class-identifier", 60),
    ];
    let named = names.iter().find(|(name, _)| *name == text).map(|(_, code)| *code);
    named
        .or_else(|| text.parse().ok())
        .filter(|code| !matches!(code, 0 | 50..=55 | 57 | 255))
        .ok_or_else(|| Error::config(format!("Can not parse option {text:?}")))
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
        for wrong in ["hostname", "256", "-1", "53"] {
            let error = read(&format!(r#"{{"request":[{{"option":"{wrong}"}}]}}"#), "").unwrap_err();
            assert!(error.msg().contains("Can not parse option"), "{error}");
        }
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
    fn default_options_can_be_skipped() {
        assert_eq!(read("{}", "").unwrap().request, DEFAULT_REQUEST);
        assert_eq!(read(r#"{"request":[{"skipDefault":true,"option":"3"}]}"#, "").unwrap().request, [3]);
    }
}
