//! Reads and checks the configuration of `portmap`.
//!
//! ADD, CHECK and STATUS read all keys and fail if one is invalid. DEL reads only the mappings, and
//! ignores invalid ones. GC reads nothing. So a mistake never prevents the removal of rules.

use std::collections::BTreeMap;
use std::net::IpAddr;

use cni::config::NetConf;
use cni::json::Json;
use cni::{Error, Result};
use cni_firewall::Backend;
use cni_firewall::iptables::{CHAIN_NAME_MAX, check_conditions, is_chain_name};
use cni_firewall::portmap::conditions::syntax_of;
use cni_firewall::portmap::{ClaimedPort, Mapping, Policy, Protocol, SetMark, Snat};
use serde::Deserialize;

/// The bit of the packet mark for masquerading, if the configuration names none.
const DEFAULT_MARK_BIT: u8 = 13;

/// Go's text about an invalid `markMasqBit`, which misspells the key.
const INVALID_MARK_BIT: &str = "MasqMarkBit must be between 0 and 31";

/// A valid configuration.
#[derive(Clone, Debug)]
pub(crate) struct Conf {
    /// The configured backend, or the only one that has the configured options; `None` leaves the
    /// choice to the host.
    pub(crate) backend: Option<Backend>,
    pub(crate) snat: Snat,
    pub(crate) set_mark: SetMark,
    pub(crate) conditions_v4: Vec<String>,
    pub(crate) conditions_v6: Vec<String>,
    pub(crate) policy: Policy,
    pub(crate) mappings: Vec<Mapping>,
}

/// The plugin's keys as they are in JSON.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawConf {
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
    /// Code 6 if a key's value has the wrong type, code 7 if it is invalid. The texts are Go's
    /// where Go has one. Those about ports and about `markMasqBit` do not name the key;
    /// [`Conf::refused_key`] finds it.
    pub(crate) fn new(conf: &NetConf) -> Result<Conf> {
        let raw: RawConf = conf.decode_chained()?;
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
        let external_chain = raw.external_set_mark_chain.as_deref();
        let set_mark = parse_set_mark(raw.mark_masq_bit, external_chain)?;
        let backend = required_backend(raw.backend.as_deref().unwrap_or_default(), external_chain, &v4, &v6)?;
        for (key, conditions) in [("conditionsV4", &v4), ("conditionsV6", &v6)] {
            let refused = |token: &str| {
                Error::config(format!("{key}: {token:?} is not allowed: conditions may only contain matches"))
            };
            match syntax_of(conditions) {
                Some(Backend::Iptables) => check_conditions(conditions).map_err(|token| refused(&token))?,
                Some(Backend::Nftables) => check_nft(conditions).map_err(|token| refused(&token))?,
                None => {}
            }
        }
        let mappings = check_mappings(raw.runtime_config.port_mappings.unwrap_or_default())?;
        Ok(Conf { backend, snat, set_mark, conditions_v4: v4, conditions_v6: v6, policy, mappings })
    }

    /// Returns the valid mappings, for DEL.
    pub(crate) fn valid_mappings(conf: &NetConf) -> Vec<Mapping> {
        let items = listed_mappings(conf).iter().enumerate();
        items.filter_map(|(index, item)| check_mapping(&item.decode().ok()?, index).ok()).collect()
    }

    /// Returns what [`Conf::new`] has refused with this error: `portMappings[1]` for an invalid
    /// port, `"markMasqBit": 40` for an invalid bit. `None` for other errors, which name the key
    /// themselves.
    ///
    /// The error cannot contain this: other programs compare it with Go's text, and libcni appends
    /// the details to the text.
    pub(crate) fn refused_key(conf: &NetConf, error: &Error) -> Option<String> {
        if error.msg() == INVALID_MARK_BIT {
            let bit: i64 = conf.json().get("markMasqBit")?.decode().ok()?;
            return Some(format!("\"markMasqBit\": {bit}"));
        }
        for (index, item) in listed_mappings(conf).iter().enumerate() {
            let Ok(raw) = item.decode::<RawMapping>() else { continue };
            // Errors with details name the mapping themselves.
            if let Err(refusal) = check_mapping(&raw, index)
                && (refusal.msg(), refusal.details()) == (error.msg(), "")
            {
                return Some(format!("portMappings[{index}]"));
            }
        }
        None
    }
}

/// Returns the undecoded mappings of `runtimeConfig`; none if there is no such list.
fn listed_mappings(conf: &NetConf) -> &[Json] {
    match conf.json().get("runtimeConfig").and_then(|config| config.get("portMappings")) {
        Some(Json::Array(items)) => items,
        _ => &[],
    }
}

/// Returns the keys that this plugin does not read.
pub(crate) fn unknown_keys(json: &cni::json::Json) -> Vec<cni::json::UnknownKey> {
    json.unknown_keys::<RawConf>()
}

/// Returns how packets are marked for masquerading. `bit` is the key `markMasqBit`, `chain` the key
/// `externalSetMarkChain`.
///
/// # Errors
/// Code 7 if both are given or one is invalid.
fn parse_set_mark(bit: Option<i64>, chain: Option<&str>) -> Result<SetMark> {
    match (bit, chain) {
        (Some(_), Some(_)) => Err(Error::config("Cannot specify externalSetMarkChain and markMasqBit")),
        (None, Some(chain)) => {
            if !is_chain_name(chain) {
                return Err(Error::config(format!(
                    "externalSetMarkChain: {chain:?} is not a chain name: it must be 1 to {CHAIN_NAME_MAX} bytes, \
                     without spaces or control characters, and must not begin with - or !"
                )));
            }
            Ok(SetMark::Chain(chain.to_owned()))
        }
        (None, None) => Ok(SetMark::Bit(DEFAULT_MARK_BIT)),
        (Some(bit), None) => match u8::try_from(bit) {
            Ok(bit @ 0..=31) => Ok(SetMark::Bit(bit)),
            _ => Err(Error::config(INVALID_MARK_BIT)),
        },
    }
}

/// Returns the backend that the configuration names (`name`, empty if absent), or else the one that
/// its options require; `None` if neither names one. `external_chain` is `externalSetMarkChain`;
/// `v4` and `v6` are the conditions.
///
/// # Errors
/// Code 7 if the name is unknown, or if options contradict the name or each other.
fn required_backend(name: &str, external_chain: Option<&str>, v4: &[String], v6: &[String]) -> Result<Option<Backend>> {
    let configured = match Backend::by_name(name) {
        None if !name.is_empty() => return Err(Error::config(format!("unrecognized backend {name:?}"))),
        backend => backend,
    };
    // The configured options that only one backend has.
    let options = [
        ("externalSetMarkChain", external_chain.map(|_| Backend::Iptables)),
        ("conditionsV4", syntax_of(v4)),
        ("conditionsV6", syntax_of(v6)),
    ];
    let options_of = |backend: Backend| {
        let names = options.iter().filter(|(_, required)| *required == Some(backend)).map(|(name, _)| *name);
        names.collect::<Vec<&str>>()
    };
    // If no backend is configured, the options decide. Go's plugin instead chooses by what the host
    // has, and then refuses options of the other backend.
    let implied = [Backend::Iptables, Backend::Nftables].into_iter().find(|backend| !options_of(*backend).is_empty());
    let Some(chosen) = configured.or(implied) else { return Ok(None) };
    let (other, options_of_other) = (chosen.other(), options_of(chosen.other()));
    if options_of_other.is_empty() {
        return Ok(Some(chosen));
    }
    Err(Error::config(format!(
        "{chosen} backend was requested but configuration contains {other}-specific options [{}]",
        options_of_other.join(" ")
    )))
}

/// The keywords of nft's language that are not allowed in a condition: statements and commands.
pub(crate) const FORBIDDEN_KEYWORDS: &str = "accept drop reject return jump goto continue queue dnat snat \
    masquerade redirect comment add delete flush insert table chain rule include define set vmap update notrack \
    tproxy synproxy dup fwd flow";

/// Checks that conditions in nft's language contain only matches.
///
/// nft's scanner needs no spaces between tokens: `{1.2.3.4}accept` is a set and a statement, and
/// `1.2.3.4accept` and `0x1jump` are two tokens each. So a condition is split at digits and at all
/// characters that cannot be part of a name, and [`ends_in_keyword`] compares the end of each part
/// with the [`FORBIDDEN_KEYWORDS`].
///
/// # Errors
/// The keyword that was found, or the whole condition if it contains a forbidden character or an
/// unclosed quote. After an unclosed quote, nft would take the text that this plugin writes after
/// the condition as part of the condition.
pub(crate) fn check_nft(conditions: &[String]) -> Result<(), String> {
    let can_be_in_name = |char: char| char.is_ascii_alphabetic() || "_/.-".contains(char);
    for condition in conditions {
        // The first part is unquoted, the second quoted, and so on. Quoted parts are names.
        for unquoted in condition.split('"').step_by(2) {
            for word in unquoted.split(|char| !can_be_in_name(char)) {
                if let Some(keyword) = FORBIDDEN_KEYWORDS.split(' ').find(|keyword| ends_in_keyword(word, keyword)) {
                    return Err(keyword.to_owned());
                }
            }
        }
        // In nft's language, `;` ends a rule, `#` begins a comment, `\` continues a line, `$` reads
        // a variable, and `@` names a set or raw bytes.
        let has_forbidden = condition.chars().any(char::is_control) || condition.contains([';', '#', '\\', '$', '@']);
        let has_open_quote = condition.matches('"').count() % 2 == 1;
        if has_forbidden || has_open_quote {
            return Err(condition.clone());
        }
    }
    Ok(())
}

/// Whether `word` is the keyword, possibly after the letters of a number: nft reads `0xejump` as
/// `0xe jump` and `5msjump` as `5ms jump`.
fn ends_in_keyword(word: &str, keyword: &str) -> bool {
    let can_be_in_number = |char: char| char.is_ascii_hexdigit() || "xXhms_/.-".contains(char);
    word.strip_suffix(keyword).is_some_and(|rest| rest.chars().all(can_be_in_number))
}

/// Checks all mappings.
///
/// # Errors
/// Code 7 if one is invalid, or two request the same host port.
fn check_mappings(raw_mappings: Vec<RawMapping>) -> Result<Vec<Mapping>> {
    let mut mappings: Vec<Mapping> = Vec::with_capacity(raw_mappings.len());
    // The host ports of the mappings so far, each with the index of its mapping. A map is used
    // because comparing all pairs would take quadratic time in the number of mappings, which the
    // pod's author chooses.
    let mut claimed: BTreeMap<ClaimedPort, usize> = BTreeMap::new();
    for (index, raw) in raw_mappings.iter().enumerate() {
        let mapping = check_mapping(raw, index)?;
        let earlier = mapping.host_ports().filter_map(|claim| claimed.get(&claim).copied()).min();
        if let Some(earlier) = earlier {
            let msg = format!("portMappings[{index}] requests the same host port as portMappings[{earlier}]");
            return Err(Error::config(format!("{msg}: {} port {}", mapping.protocol, mapping.host_port)));
        }
        claimed.extend(mapping.host_ports().map(|claim| (claim, index)));
        mappings.push(mapping);
    }
    Ok(mappings)
}

/// Checks and converts the mapping at this index of the list. The default protocol is TCP. An IPv4
/// address in the form of an IPv6 address, `::ffff:192.0.2.1`, is converted to IPv4: its rules are
/// in that family.
///
/// # Errors
/// Code 7. The text about a port is Go's, and does not name the mapping. All other errors name it,
/// and have details.
fn check_mapping(raw: &RawMapping, index: usize) -> Result<Mapping> {
    let check_port = |port: i64, what: &str| match u16::try_from(port) {
        Ok(port @ 1..) => Ok(port),
        _ => Err(Error::config(format!("Invalid {what} port number: {port}"))),
    };
    let refused = |text: String| {
        Error::config(format!("{text} (portMappings[{index}])")).with_details("runtimeConfig.portMappings")
    };
    let container_port = check_port(raw.container_port, "container")?;
    let host_port = check_port(raw.host_port, "host")?;
    let protocol = match raw.protocol.as_deref().unwrap_or_default() {
        "" => Protocol::Tcp,
        name => Protocol::by_name(name)
            .ok_or_else(|| refused(format!("Invalid protocol {name:?}: not tcp, udp or sctp")))?,
    };
    let host_ip = match raw.host_ip.as_deref().unwrap_or_default() {
        "" => None,
        text => {
            let host_ip: Result<IpAddr, _> = text.parse();
            Some(host_ip.map_err(|_| refused(format!("Invalid host IP {text:?}")))?.to_canonical())
        }
    };
    Ok(Mapping { protocol, host_ip, host_port, container_port })
}

#[cfg(test)]
mod tests;
