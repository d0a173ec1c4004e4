//! Reads and checks the configuration of the plugin `bond`.

use cni::config::NetConf;
use cni::{Error, Result, ident};
use cni_linux::{BondMode, BondOptions, HashPolicy};
use cni_plugin::keys;
use serde::Deserialize;

/// How often the carrier of the ports is checked if `miimon` is missing, in milliseconds. Never,
/// which is the kernel's default, would defeat the purpose of a bond.
const DEFAULT_MIIMON: u32 = 100;

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Conf {
    /// The options of the bond.
    pub(crate) options: BondOptions,
    /// The MTU of the bond and its ports in bytes; `None` for 1500.
    pub(crate) mtu: Option<u32>,
    /// The names of the ports, at least two, each once.
    pub(crate) links: Vec<String>,
    /// The namespace that has the ports.
    pub(crate) place: Place,
    /// The name of the bond, which must be CNI_IFNAME; empty if it is not configured.
    pub(crate) ifname: String,
}

/// The namespace that has the ports before ADD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The host's: ADD moves the ports into the container.
    Host,
    /// The container's: earlier attachments created the ports.
    Container,
}

/// The keys of the configuration, unchecked.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Keys {
    ifname: String,
    mode: String,
    miimon: Option<Number>,
    links: Vec<LinkKeys>,
    links_in_container: bool,
    fail_over_mac: Option<u8>,
    mtu: i64,
    all_slaves_active: Option<Switch>,
    tlb_dynamic_lb: Option<Switch>,
    xmit_hash_policy: String,
}

/// A port of the bond.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct LinkKeys {
    name: String,
}

/// A number, which may be written as a text.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Number {
    Number(u32),
    Text(String),
}

/// A switch, which may be written as 0 or 1.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Switch {
    Bool(bool),
    Number(u8),
}

impl Switch {
    /// Returns 0 or 1.
    ///
    /// # Errors
    /// Code 7 for another number.
    fn value(&self, key: &str) -> Result<u8> {
        match self {
            Switch::Bool(on) => Ok(u8::from(*on)),
            Switch::Number(number @ (0 | 1)) => Ok(*number),
            Switch::Number(number) => Err(Error::config(format!("{key} must be 0 or 1, not {number}"))),
        }
    }
}

impl Keys {
    /// Returns the names of the ports.
    pub(crate) fn links(&self) -> impl Iterator<Item = &str> {
        self.links.iter().map(|link| link.name.as_str())
    }

    /// Returns the namespace that has the ports before ADD.
    pub(crate) fn place(&self) -> Place {
        if self.links_in_container { Place::Container } else { Place::Host }
    }
}

impl Conf {
    /// Reads the configuration.
    ///
    /// # Errors
    /// - Code 6 if a key has a value of a wrong type.
    /// - Code 7 for an invalid value, or fewer than two ports.
    pub(crate) fn new(conf: &NetConf) -> Result<Conf> {
        let keys: Keys = conf.decode()?;
        let links: Vec<String> = keys.links().map(str::to_owned).collect();
        if links.len() < 2 {
            return Err(Error::config(format!("Bonding requires at least two links, we have {}", links.len())));
        }
        for (position, name) in links.iter().enumerate() {
            if ident::check_interface_name(name).is_err() || links[..position].contains(name) {
                return Err(Error::config(format!("links: {name:?} is not an interface name, or is listed twice")));
            }
        }
        let unknown = |key: &str, name: &str| Error::config(format!("unknown {key} {name:?}"));
        let hash_policy = match keys.xmit_hash_policy.as_str() {
            "" => None,
            name => Some(HashPolicy::by_name(name).ok_or_else(|| unknown("xmitHashPolicy", name))?),
        };
        if let Some(fail_over_mac @ 3..) = keys.fail_over_mac {
            return Err(Error::config(format!("FailOverMac mode should be 0, 1 or 2 actual: {fail_over_mac}")));
        }
        let options = BondOptions {
            mode: BondMode::by_name(&keys.mode).ok_or_else(|| unknown("mode", &keys.mode))?,
            miimon: match &keys.miimon {
                None => DEFAULT_MIIMON,
                Some(Number::Number(number)) => *number,
                Some(Number::Text(text)) => text
                    .parse()
                    .map_err(|_| Error::config(format!("Failed to convert bondMiimon value ({text}) to an int")))?,
            },
            fail_over_mac: keys.fail_over_mac,
            all_slaves_active: keys.all_slaves_active.as_ref().map(|on| on.value("allSlavesActive")).transpose()?,
            tlb_dynamic_lb: keys.tlb_dynamic_lb.as_ref().map(|on| on.value("tlbDynamicLb")).transpose()?,
            hash_policy,
        };
        Ok(Conf { mtu: keys::mtu(keys.mtu, keys::VETH_MTU)?, place: keys.place(), options, links, ifname: keys.ifname })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(keys: &str) -> Result<Conf> {
        let conf = format!(r#"{{"cniVersion":"1.0.0","name":"net","type":"bond"{keys}}}"#);
        Conf::new(&NetConf::parse(conf)?)
    }

    const LINKS: &str = r#","links":[{"name":"net1"},{"name":"net2"}]"#;

    #[test]
    fn numbers_and_switches_may_be_texts_or_numbers() {
        for (miimon, expected) in [(r#","miimon":"250""#, 250), (r#","miimon":250"#, 250), ("", 100)] {
            let conf = parse(&format!(r#"{LINKS},"mode":"balance-rr"{miimon}"#)).unwrap();
            assert_eq!(conf.options.miimon, expected, "{miimon}");
        }
        let all =
            r#","mode":"balance-tlb","allSlavesActive":1,"tlbDynamicLb":false,"xmitHashPolicy":"layer3+4","mtu":1400"#;
        let conf = parse(&format!("{LINKS}{all}")).unwrap();
        assert_eq!((conf.options.all_slaves_active, conf.options.tlb_dynamic_lb), (Some(1), Some(0)));
        assert_eq!((conf.options.hash_policy, conf.mtu), (HashPolicy::by_name("layer3+4"), Some(1400)));
    }

    #[test]
    fn what_cannot_be_a_bond_is_refused() {
        let mode = r#","mode":"active-backup""#;
        for (keys, text) in [
            (mode.to_owned(), "Bonding requires at least two links, we have 0"),
            (format!(r#"{mode},"links":[{{"name":"a"}},{{"name":"a"}}]"#), "links: \"a\" is not an interface name"),
            (format!(r#"{mode},"links":[{{"name":"a"}},{{}}]"#), "links: \"\" is not an interface name"),
            (LINKS.to_owned(), "unknown mode \"\""),
            (format!(r#"{LINKS}{mode},"miimon":"x""#), "Failed to convert bondMiimon value (x) to an int"),
            (format!(r#"{LINKS}{mode},"failOverMac":3"#), "FailOverMac mode should be 0, 1 or 2 actual: 3"),
            (format!(r#"{LINKS}{mode},"tlbDynamicLb":2"#), "tlbDynamicLb must be 0 or 1, not 2"),
            (format!(r#"{LINKS}{mode},"xmitHashPolicy":"layer5""#), "unknown xmitHashPolicy \"layer5\""),
            (format!(r#"{LINKS}{mode},"mtu":67"#), "invalid MTU 67"),
        ] {
            let error = parse(&keys).unwrap_err();
            assert!(error.code() == cni::Code::INVALID_CONFIG && error.msg().starts_with(text), "{keys}: {error}");
        }
    }
}
