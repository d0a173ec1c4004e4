//! The configuration of `tuning`.
//!
//! A setting in `args.cni` overrides the plugin's own key, even if it is `false`, 0 or an empty
//! MAC, as in Go. The MAC has two more sources. Their order is: `args.cni`, `runtimeConfig`,
//! CNI_ARGS, the plugin's own key. The plugin bridge uses a different order.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cni::config::NetConf;
use cni::json::Json;
use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_linux::{Mac, Neighbour};
use cni_plugin::keys;
use serde::Deserialize;

use crate::key::{Key, cut};
use crate::neighbours;

/// The folder of backups if the configuration names none. It is Go's.
const DEFAULT_DATA_DIR: &str = "/run/cni/tuning";

/// A valid configuration.
#[derive(Clone, Debug)]
pub(crate) struct Conf {
    /// The sysctls in the order in which ADD writes them.
    pub(crate) sysctls: Vec<Sysctl>,
    /// The changes to the interface.
    pub(crate) link: LinkConf,
    /// The features of the interface that are turned on or off.
    pub(crate) features: Vec<Feature>,
    /// The permanent neighbours of the interface.
    pub(crate) neighbours: Vec<Neighbour>,
}

/// A feature of the interface, by the kernel's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Feature {
    pub(crate) name: String,
    pub(crate) is_on: bool,
}

/// A sysctl and the value that ADD writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sysctl {
    pub(crate) key: Key,
    pub(crate) value: String,
}

/// The changes to the interface. A setting that is `None` is not changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LinkConf {
    pub(crate) mac: Option<Mac>,
    /// Whether promiscuous mode is turned on. If false, the mode is not changed.
    pub(crate) promisc: bool,
    /// In bytes.
    pub(crate) mtu: Option<u32>,
    pub(crate) allmulti: Option<bool>,
    /// In packets.
    pub(crate) txqlen: Option<u32>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Raw {
    sysctl: Option<Json>,
    mac: String,
    promisc: bool,
    mtu: i64,
    allmulti: Option<bool>,
    #[serde(rename = "txQLen")]
    txqlen: Option<i64>,
    /// `null` does not change the feature.
    ethtool: BTreeMap<String, Option<bool>>,
    static_neighbors: Vec<RawNeighbor>,
    runtime_config: RuntimeConfig,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawNeighbor {
    ip: String,
    mac: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RuntimeConfig {
    mac: String,
}

/// `args.cni`, in which 0 and `false` differ from an absent key.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Args {
    sysctl: Option<Json>,
    mac: Option<String>,
    promisc: Option<bool>,
    mtu: Option<i64>,
    allmulti: Option<bool>,
    #[serde(rename = "txQLen")]
    txqlen: Option<i64>,
}

impl LinkConf {
    /// Whether nothing is changed.
    pub(crate) fn is_empty(&self) -> bool {
        *self == LinkConf::default()
    }
}

impl Conf {
    /// Whether the interface is changed.
    pub(crate) fn changes_interface(&self) -> bool {
        !self.link.is_empty() || !self.features.is_empty() || !self.neighbours.is_empty()
    }

    /// Reads the configuration, and `MAC` of CNI_ARGS.
    ///
    /// # Errors
    /// - Code 4 if CNI_ARGS is invalid.
    /// - Code 6 if a key has a wrong type.
    /// - Code 7 if a value is invalid, with Go's text where Go has one.
    pub(crate) fn new(call: &Call<'_>) -> Result<Conf> {
        let args = call.args()?;
        args.check_known(&["MAC"])?;
        Conf::parse(&call.conf, args.get("MAC").unwrap_or_default(), &call.ifname)
    }

    /// Reads the configuration of a network, without an attachment.
    pub(crate) fn of_network(conf: &NetConf) -> Result<Conf> {
        Conf::parse(conf, "", "")
    }

    /// Reads the configuration. `cni_args_mac` is the value of `MAC` in CNI_ARGS. Without an
    /// attachment, `cni_args_mac` and `ifname` are empty.
    fn parse(conf: &NetConf, cni_args_mac: &str, ifname: &str) -> Result<Conf> {
        let raw: Raw = conf.decode()?;
        // Only checked here. ADD, DEL and GC read the value when they need it.
        data_dir(conf)?;
        let args = match conf.json().get("args").and_then(|args| args.get("cni")) {
            Some(cni @ Json::Object(_)) => cni
                .decode::<Args>()
                .map_err(|why| Error::caused(Code::DECODE, "failed to load netconf: args.cni", why))?,
            // The specification does not define `args`, so other types are ignored.
            _ => Args::default(),
        };
        let mut sysctls = Sysctls::new("sysctl", raw.sysctl, ifname)?;
        sysctls.overlay(Sysctls::new("args.cni.sysctl", args.sysctl, ifname)?);
        let mac_text = args.mac.unwrap_or_else(|| {
            let sources = [raw.runtime_config.mac, cni_args_mac.to_owned(), raw.mac];
            sources.into_iter().find(|text| !text.is_empty()).unwrap_or_default()
        });
        // If both values are invalid, the error is about the MAC, as in Go.
        let invalid = |why| Error::config(format!("invalid args {} for MAC addr: {why}", cut(&mac_text)));
        let mac = keys::mac([cut(&mac_text), "", ""]).map_err(invalid)?;
        let mtu = convert_number("mtu", args.mtu.unwrap_or(raw.mtu))?;
        let link = LinkConf {
            mac,
            promisc: args.promisc.unwrap_or(raw.promisc),
            // As in Go, 0 means that the MTU is not changed.
            mtu: Some(mtu).filter(|mtu| *mtu != 0),
            allmulti: args.allmulti.or(raw.allmulti),
            txqlen: args.txqlen.or(raw.txqlen).map(|length| convert_number("txQLen", length)).transpose()?,
        };
        let feature = |(name, is_on): (String, Option<bool>)| is_on.map(|is_on| Feature { name, is_on });
        let features = raw.ethtool.into_iter().filter_map(feature).collect();
        let neighbours = neighbours::parse(raw.static_neighbors.iter().map(|raw| (raw.ip.as_str(), raw.mac.as_str())))?;
        Ok(Conf { sysctls: sysctls.all, link, features, neighbours })
    }
}

/// Returns the keys that this plugin does not read. It reads `dataDir` in [`data_dir`].
pub(crate) fn unknown_keys(json: &Json) -> Vec<cni::json::UnknownKey> {
    let mut unknown = json.unknown_keys::<Raw>();
    unknown.retain(|key| !key.path.eq_ignore_ascii_case("dataDir"));
    unknown
}

/// Returns the path of the folder of backups. DEL and GC read no other key.
///
/// # Errors
/// Code 6 if `dataDir` is not a string.
pub(crate) fn data_dir(conf: &NetConf) -> Result<PathBuf> {
    match conf.json().get("dataDir") {
        None => Ok(PathBuf::from(DEFAULT_DATA_DIR)),
        Some(Json::String(path)) if path.is_empty() => Ok(PathBuf::from(DEFAULT_DATA_DIR)),
        Some(Json::String(path)) => Ok(cni::file::clean(path)),
        Some(_) => Err(Error::new(Code::DECODE, "failed to load netconf: dataDir: expected a string")),
    }
}

/// The sysctls of a map in their order.
struct Sysctls {
    all: Vec<Sysctl>,
    /// The index in `all` for the path of each [reading](crate::key) of a key.
    by_path: BTreeMap<String, usize>,
}

impl Sysctls {
    /// Reads a map of sysctls. `place` is its path in the configuration, for errors.
    ///
    /// # Errors
    /// Code 6 for a wrong type, 7 for an invalid key and for two keys of the same sysctl.
    fn new(place: &str, map: Option<Json>, ifname: &str) -> Result<Sysctls> {
        let decode_error = |what: &str| Err(Error::new(Code::DECODE, format!("failed to load netconf: {place}{what}")));
        let members = match map {
            None => Vec::new(),
            Some(Json::Object(members)) => members,
            Some(_) => return decode_error(": expected a map of names to values"),
        };
        let mut sysctls = Sysctls { all: Vec::with_capacity(members.len()), by_path: BTreeMap::new() };
        for (written, value) in members {
            let value = match value {
                Json::String(text) => text,
                Json::Null => String::new(),
                _ => return decode_error(&format!(".{}: expected a string", cut(&written))),
            };
            let sysctl = Sysctl { key: Key::new(&written, &value, ifname)?, value };
            if let Some(first) = sysctls.find(&sysctl.key) {
                let first = cut(&sysctls.all[first].key.written);
                let details = format!("{place}: {first} and {}", cut(&written));
                return Err(Error::config("duplicated sysctl keys are not allowed").with_details(details));
            }
            sysctls.push(sysctl);
        }
        Ok(sysctls)
    }

    /// Adds the sysctls of `other`. A sysctl that exists already keeps its place and gets the key
    /// and the value in `other`.
    fn overlay(&mut self, other: Sysctls) {
        for sysctl in other.all {
            match self.find(&sysctl.key) {
                Some(index) => self.all[index] = sysctl,
                None => self.push(sysctl),
            }
        }
    }

    /// Returns the index of a sysctl that may mean the same file as `key`.
    fn find(&self, key: &Key) -> Option<usize> {
        key.readings.iter().find_map(|reading| self.by_path.get(&reading.path)).copied()
    }

    /// Adds a sysctl at the end.
    fn push(&mut self, sysctl: Sysctl) {
        let paths = sysctl.key.readings.iter().map(|reading| (reading.path.clone(), self.all.len()));
        self.by_path.extend(paths);
        self.all.push(sysctl);
    }
}

/// Converts the value of a key. The driver may have tighter limits.
///
/// # Errors
/// Code 7 if the value is not between 0 and `i32::MAX`.
fn convert_number(key: &str, value: i64) -> Result<u32> {
    match u32::try_from(value) {
        Ok(value) if i32::try_from(value).is_ok() => Ok(value),
        _ => Err(Error::config(format!("invalid {key} {value} (must be between 0 and {})", i32::MAX))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(keys: &str, cni_args_mac: &str) -> Result<Conf> {
        let conf = format!(r#"{{"cniVersion":"1.0.0","name":"net","type":"tuning"{keys}}}"#);
        Conf::parse(&NetConf::parse(conf)?, cni_args_mac, "eth0")
    }

    fn pairs(keys: &str) -> Vec<(String, String)> {
        let all = parse(keys, "").unwrap().sysctls;
        all.into_iter().map(|sysctl| (sysctl.key.readings[0].path.clone(), sysctl.value)).collect()
    }

    fn refusal(keys: &str) -> (u32, String) {
        let error = parse(keys, "").unwrap_err();
        (error.code().0, error.msg().to_owned())
    }

    #[test]
    fn an_empty_configuration_changes_nothing() {
        for keys in ["", r#","args":5"#, r#","args":{"cni":[1]}"#, r#","sysctl":null,"mac":null,"mtu":0,"txQLen":null"#]
        {
            let conf = parse(keys, "").unwrap();
            assert!(conf.sysctls.is_empty() && conf.link.is_empty(), "{keys}");
        }
    }

    #[test]
    fn the_mac_comes_from_the_first_source_that_has_one() {
        let own = r#","mac":"02:00:00:00:00:01""#;
        let runtime = r#","runtimeConfig":{"mac":"02:00:00:00:00:02"}"#;
        let args = r#","args":{"cni":{"mac":"02:00:00:00:00:03"}}"#;
        let variable = "02:00:00:00:00:04";
        for (keys, variable, expected) in [
            (format!("{own}{runtime}{args}"), variable, 3),
            (format!("{own}{runtime}"), variable, 2),
            (own.to_owned(), variable, 4),
            (own.to_owned(), "", 1),
        ] {
            assert_eq!(parse(&keys, variable).unwrap().link.mac, Some(Mac([2, 0, 0, 0, 0, expected])), "{keys}");
        }
        let none = format!(r#"{own}{runtime},"args":{{"cni":{{"mac":""}}}}"#);
        assert_eq!(parse(&none, variable).unwrap().link.mac, None);
    }

    #[test]
    fn args_override_even_with_false_or_zero() {
        let own = r#","promisc":true,"mtu":1400,"allmulti":true,"txQLen":77"#;
        let link = |keys: &str| parse(&format!("{own}{keys}"), "").unwrap().link;
        let all = LinkConf { mac: None, promisc: true, mtu: Some(1400), allmulti: Some(true), txqlen: Some(77) };
        assert_eq!(link(""), all);
        assert_eq!(link(r#","args":{"cni":{"x":1,"mtu":null}}"#), all);
        let no = r#","args":{"cni":{"promisc":false,"mtu":0,"allmulti":false,"txQLen":0}}"#;
        assert_eq!(link(no), LinkConf { allmulti: Some(false), txqlen: Some(0), ..LinkConf::default() });
    }

    #[test]
    fn sysctls_keep_their_order_and_args_replace_or_follow() {
        let own = r#","sysctl":{"net.z":"1","net.a":"2","net.ipv4.conf.IFNAME.m":null}"#;
        let args = r#","args":{"cni":{"sysctl":{"net.n":"4","net/a":"5"}}}"#;
        let expected = [("net/z", "1"), ("net/a", "5"), ("net/ipv4/conf/eth0/m", ""), ("net/n", "4")];
        let expected = expected.map(|(path, value)| (path.to_owned(), value.to_owned()));
        assert_eq!(pairs(&format!("{own}{args}")), expected);
        assert_eq!(pairs(args), [("net/n".to_owned(), "4".to_owned()), ("net/a".to_owned(), "5".to_owned())]);
    }

    #[test]
    fn duplicates_are_refused_in_every_spelling_and_place() {
        for map in [
            r#"{"net.a":"1","net.a":"1"}"#,
            r#"{"net.a":"1","net/a":"2"}"#,
            r#"{"net.ipv4.conf.IFNAME.a":"1","net.b":"3","net.ipv4.conf.eth0.a":"2"}"#,
        ] {
            for keys in [format!(r#","sysctl":{map}"#), format!(r#","args":{{"cni":{{"sysctl":{map}}}}}"#)] {
                assert_eq!(refusal(&keys), (7, "duplicated sysctl keys are not allowed".into()), "{keys}");
            }
        }
        // Keys of maps are case-sensitive.
        assert_eq!(pairs(r#","sysctl":{"net.a":"1","net.A":"2"}"#).len(), 2);
    }

    #[test]
    fn invalid_values_are_refused() {
        for (keys, code, begin) in [
            (r#","mac":"zz""#, 7, "invalid args zz for MAC addr: address zz: invalid MAC address"),
            (r#","mac":"01:00:00:00:00:01""#, 7, "invalid args 01:00:00:00:00:01 for MAC addr: cannot assign"),
            (r#","mac":"00:00:00:00:00:00""#, 7, "invalid args 00:00:00:00:00:00 for MAC addr: cannot assign"),
            (r#","mtu":-1"#, 7, "invalid mtu -1 "),
            (r#","mtu":4294967296"#, 7, "invalid mtu 4294967296 "),
            (r#","txQLen":-1"#, 7, "invalid txQLen -1 "),
            (r#","args":{"cni":{"txQLen":-5}}"#, 7, "invalid txQLen -5 "),
            (r#","sysctl":{"kernel.hostname":"x"}"#, 7, "invalid net sysctl key: \"kernel/hostname\""),
            (r#","sysctl":{"net.a":1}"#, 6, "failed to load netconf: sysctl.net.a: expected a string"),
            (r#","sysctl":["net.a"]"#, 6, "failed to load netconf: sysctl: expected a map"),
            (r#","args":{"cni":{"sysctl":5}}"#, 6, "failed to load netconf: args.cni.sysctl: expected a map"),
            (r#","args":{"cni":{"mtu":"5"}}"#, 6, "failed to load netconf: args.cni: mtu"),
            (r#","mtu":1.5"#, 6, "failed to load netconf: mtu"),
            (r#","dataDir":5"#, 6, "failed to load netconf: dataDir"),
        ] {
            let (found, msg) = refusal(keys);
            assert!(found == code && msg.starts_with(begin), "{keys}: {found} {msg}");
        }
    }
}
