//! The configuration of `portmap`: JSON in, impossible states out.
//!
//! ADD and CHECK read all of it, STATUS all but the mappings. DEL takes from it what it can and GC
//! takes nothing, so that no mistake in it can keep them from cleaning.

use std::collections::BTreeMap;
use std::net::IpAddr;

use cni::config::NetConf;
use cni::json::Json;
use cni::{Code, Error, Result};
use cni_firewall::Backend;
use cni_firewall::iptables::check_conditions;
use cni_firewall::portmap::conditions::ConditionSyntax;
use cni_firewall::portmap::{ClaimedPort, Mapping, Policy, Protocol, SetMark, Snat};
use serde::Deserialize;

/// The bit of the masquerade mark if none is given.
const DEFAULT_BIT: u8 = 13;

/// A sound configuration.
#[derive(Clone, Debug)]
pub(crate) struct Conf {
    /// Asked for, or the only one in whose words the configuration is written; `None` leaves the
    /// choice to the host.
    pub(crate) backend: Option<Backend>,
    pub(crate) snat: Snat,
    pub(crate) set_mark: SetMark,
    pub(crate) conditions_v4: Vec<String>,
    pub(crate) conditions_v6: Vec<String>,
    pub(crate) policy: Policy,
    pub(crate) mappings: Vec<Mapping>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Raw {
    backend: Option<String>,
    snat: Option<bool>,
    masq_all: bool,
    mark_masq_bit: Option<i64>,
    external_set_mark_chain: Option<String>,
    conditions_v4: Option<Vec<String>>,
    conditions_v6: Option<Vec<String>>,
    port_conflict: String,
    runtime_config: RawRuntime,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawRuntime {
    port_mappings: Option<Vec<RawMapping>>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawMapping {
    host_port: i64,
    container_port: i64,
    protocol: Option<String>,
    #[serde(rename = "hostIP")]
    host_ip: Option<String>,
}

impl Conf {
    /// Reads the configuration.
    ///
    /// # Errors
    /// 6 and 7, with Go's texts where it has them, without its prefix. Go's text about a port names
    /// no mapping: [`Conf::refused_port`] does.
    pub(crate) fn new(conf: &NetConf) -> Result<Conf> {
        let raw: Raw = conf
            .json()
            .decode()
            .map_err(|error| Error::caused(Code::DECODE, "failed to parse network configuration", error))?;
        let policy = match raw.port_conflict.as_str() {
            "" => Policy::RefuseIfAlive,
            "ignore" => Policy::Ignore,
            other => return Err(Error::config(format!("\"portConflict\" can only be \"ignore\", not {other:?}"))),
        };
        let snat = match (raw.snat.unwrap_or(true), raw.masq_all) {
            (false, _) => Snat::No,
            (true, false) => Snat::Hairpin,
            (true, true) => Snat::All,
        };
        let (v4, v6) = (raw.conditions_v4.unwrap_or_default(), raw.conditions_v6.unwrap_or_default());
        let external = raw.external_set_mark_chain.is_some();
        let set_mark = set_mark(raw.mark_masq_bit, raw.external_set_mark_chain)?;
        let backend = backend(raw.backend.as_deref().unwrap_or_default(), external, &v4, &v6)?;
        for (key, conditions) in [("conditionsV4", &v4), ("conditionsV6", &v6)] {
            let refused = |token: &str| {
                Error::config(format!("{key}: {token:?} is not allowed: conditions may only contain matches"))
            };
            match ConditionSyntax::of(conditions) {
                Some(ConditionSyntax::Iptables) => check_conditions(conditions).map_err(|token| refused(&token))?,
                Some(ConditionSyntax::Nft) => check_nft(conditions).map_err(|token| refused(&token))?,
                None => {}
            }
        }
        let mappings = mappings(raw.runtime_config.port_mappings.unwrap_or_default())?;
        Ok(Conf { backend, snat, set_mark, conditions_v4: v4, conditions_v6: v6, policy, mappings })
    }

    /// The mappings alone, those that make no sense left out: for DEL.
    pub(crate) fn sound_mappings(conf: &NetConf) -> Vec<Mapping> {
        let mapping = |item: &Json| mapping(&item.decode::<RawMapping>().ok()?).ok();
        listed_mappings(conf).iter().filter_map(mapping).collect()
    }

    /// Returns the mapping whose port [`Conf::new`] has refused with this error, as
    /// `portMappings[1]`. The error has Go's text alone, which other programs compare.
    pub(crate) fn refused_port(conf: &NetConf, error: &Error) -> Option<String> {
        let is_refused = |item: &Json| {
            let refusal = item.decode::<RawMapping>().ok().and_then(|raw| mapping(&raw).err());
            matches!(refusal, Some(Refusal::Port(text)) if text == error.msg())
        };
        listed_mappings(conf).iter().position(is_refused).map(|index| format!("portMappings[{index}]"))
    }
}

fn listed_mappings(conf: &NetConf) -> &[Json] {
    match conf.json().get("runtimeConfig").and_then(|config| config.get("portMappings")) {
        Some(Json::Array(items)) => items,
        _ => &[],
    }
}

/// The reason why a mapping is refused.
enum Refusal {
    /// A bad port, in Go's words.
    Port(String),
    /// Any other defect, for which Go has no text.
    Other(String),
}

/// Returns the keys that this plugin does not read.
pub(crate) fn unknown_keys(json: &cni::json::Json) -> Vec<cni::json::UnknownKey> {
    json.unknown_keys::<Raw>()
}

fn set_mark(bit: Option<i64>, chain: Option<String>) -> Result<SetMark> {
    match (bit, chain) {
        (Some(_), Some(_)) => Err(Error::config("Cannot specify externalSetMarkChain and markMasqBit")),
        (None, Some(chain)) => {
            let fits = !chain.is_empty() && chain.len() <= 28 && !chain.starts_with(['-', '!']);
            if !fits || chain.contains(char::is_whitespace) || check_conditions(&[&chain]).is_err() {
                return Err(Error::config(format!("externalSetMarkChain: {chain:?} is not a chain name")));
            }
            Ok(SetMark::Chain(chain))
        }
        (None, None) => Ok(SetMark::Bit(DEFAULT_BIT)),
        (Some(bit), None) => match u8::try_from(bit) {
            Ok(bit @ 0..=31) => Ok(SetMark::Bit(bit)),
            _ => Err(Error::config("MasqMarkBit must be between 0 and 31")),
        },
    }
}

/// The backend that is asked for, or in whose words the configuration is written.
fn backend(asked: &str, external: bool, v4: &[String], v6: &[String]) -> Result<Option<Backend>> {
    let asked = match asked {
        "" => None,
        name => {
            let known = Backend::by_name(name);
            Some(known.ok_or_else(|| Error::config(format!("unrecognized backend {name:?}")))?)
        }
    };
    let (mut for_iptables, mut for_nft) = (Vec::new(), Vec::new());
    if external {
        for_iptables.push("externalSetMarkChain");
    }
    for (key, conditions) in [("conditionsV4", v4), ("conditionsV6", v6)] {
        match ConditionSyntax::of(conditions) {
            Some(ConditionSyntax::Iptables) => for_iptables.push(key),
            Some(ConditionSyntax::Nft) => for_nft.push(key),
            None => {}
        }
    }
    // Without a wish Go has its default here, and fails; the words decide, unless they contradict
    // each other.
    let chosen = asked.or(match (for_iptables.is_empty(), for_nft.is_empty()) {
        (true, true) => None,
        (true, false) => Some(Backend::Nftables),
        (false, _) => Some(Backend::Iptables),
    });
    let (wrong, keys) = match chosen {
        Some(Backend::Iptables) => (Backend::Nftables, for_nft),
        Some(Backend::Nftables) => (Backend::Iptables, for_iptables),
        None => return Ok(None),
    };
    if keys.is_empty() {
        return Ok(chosen);
    }
    let name = chosen.map(Backend::name).unwrap_or_default();
    Err(Error::config(format!(
        "{name} backend was requested but configuration contains {}-specific options [{}]",
        wrong.name(),
        keys.join(" ")
    )))
}

/// Words of nft's language that do something: a condition only matches, so none of them may stand
/// in one.
pub(crate) const ORDERS: [&str; 31] = [
    "accept",
    "drop",
    "reject",
    "return",
    "jump",
    "goto",
    "continue",
    "queue",
    "dnat",
    "snat",
    "masquerade",
    "redirect",
    "comment",
    "add",
    "delete",
    "flush",
    "insert",
    "table",
    "chain",
    "rule",
    "include",
    "define",
    "set",
    "vmap",
    "update",
    "notrack",
    "tproxy",
    "synproxy",
    "dup",
    "fwd",
    "flow",
];

/// Refuses words that end the match or the rule. The error is the offending word.
///
/// nft's scanner needs no blanks: `{1.2.3.4}accept` is a set and a verdict, and so are
/// `1.2.3.4accept` and `0x1jump` two tokens each. So a condition is split at digits and at all
/// characters that cannot be part of a name. Numbers may also end in letters (`0xejump`,
/// `fd00::ejump`, `5msjump`), so a statement is also found after such letters. Quoted text is a
/// name; an unclosed quote would swallow the text that this plugin writes after the condition.
pub(crate) fn check_nft(conditions: &[String]) -> Result<(), String> {
    let is_of_a_name = |char: char| char.is_ascii_alphabetic() || "_/.-".contains(char);
    let is_of_a_number = |char: char| char.is_ascii_hexdigit() || "xXhms_/.-".contains(char);
    let ends_in =
        |word: &str, order: &str| word.strip_suffix(order).is_some_and(|rest| rest.chars().all(is_of_a_number));
    for condition in conditions {
        let hostile = condition.chars().any(char::is_control) || condition.contains([';', '#', '\\', '$', '@']);
        let open = condition.matches('"').count() % 2 == 1;
        let mut words = condition.split('"').step_by(2).flat_map(|unquoted| unquoted.split(|char| !is_of_a_name(char)));
        let order = words.find_map(|word| ORDERS.iter().find(|order| ends_in(word, order)));
        if hostile || open || order.is_some() {
            return Err(order.map_or(condition.as_str(), |order| order).to_owned());
        }
    }
    Ok(())
}

fn mappings(raw: Vec<RawMapping>) -> Result<Vec<Mapping>> {
    let mut mappings: Vec<Mapping> = Vec::with_capacity(raw.len());
    let mut claimed = BTreeMap::new();
    for (index, raw) in raw.iter().enumerate() {
        let mapping = mapping(raw).map_err(|why| match why {
            Refusal::Port(text) => Error::config(text),
            Refusal::Other(text) => {
                Error::config(format!("{text} (portMappings[{index}])")).with_details("runtimeConfig.portMappings")
            }
        })?;
        // A map, because the pod's author chooses the number of mappings: comparing all pairs would
        // be quadratic.
        let before = claims(&mapping).filter_map(|claim| claimed.insert(claim, index)).min();
        if let Some(before) = before {
            let msg = format!("portMappings[{index}] requests the same host port as portMappings[{before}]");
            return Err(Error::config(format!("{msg}: {} port {}", mapping.protocol, mapping.host_port)));
        }
        mappings.push(mapping);
    }
    Ok(mappings)
}

/// Returns the claims that no other mapping may have too, once for each family: an unspecified
/// address is every address of its family.
fn claims(mapping: &Mapping) -> impl Iterator<Item = ClaimedPort> {
    let any_container = [IpAddr::from([127, 0, 0, 1]), IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1])];
    let mapping = Mapping { container_port: 0, ..*mapping };
    any_container.into_iter().filter_map(move |container| mapping.claim(container))
}

fn mapping(raw: &RawMapping) -> Result<Mapping, Refusal> {
    let port = |port: i64, what: &str| match u16::try_from(port) {
        Ok(port @ 1..) => Ok(port),
        _ => Err(Refusal::Port(format!("Invalid {what} port number: {port}"))),
    };
    let container_port = port(raw.container_port, "container")?;
    let host_port = port(raw.host_port, "host")?;
    let protocol = match raw.protocol.as_deref().unwrap_or_default() {
        "" => Protocol::Tcp,
        name => Protocol::by_name(name)
            .ok_or_else(|| Refusal::Other(format!("Invalid protocol {name:?}: not tcp, udp or sctp")))?,
    };
    let host_ip = match raw.host_ip.as_deref().unwrap_or_default() {
        "" => None,
        text => {
            let parsed: Result<IpAddr, _> = text.parse();
            Some(parsed.map_err(|_| Refusal::Other(format!("Invalid host IP {text:?}")))?.to_canonical())
        }
    };
    Ok(Mapping { protocol, host_ip, host_port, container_port })
}

#[cfg(test)]
mod tests;
