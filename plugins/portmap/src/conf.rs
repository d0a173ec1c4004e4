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
use cni_firewall::portmap::conditions::Dialect;
use cni_firewall::portmap::{Claim, Mapping, Policy, Protocol, SetMark, Snat};
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
            "" => Policy::Judge,
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
            match Dialect::of(conditions) {
                Some(Dialect::Iptables) => check_conditions(conditions).map_err(|token| refused(&token))?,
                Some(Dialect::Nft) => check_nft(conditions).map_err(|token| refused(&token))?,
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
        match Dialect::of(conditions) {
            Some(Dialect::Iptables) => for_iptables.push(key),
            Some(Dialect::Nft) => for_nft.push(key),
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

/// What no other mapping may claim as well, once for each family: an unspecified address is every
/// address of its family.
fn claims(mapping: &Mapping) -> impl Iterator<Item = Claim> {
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
mod tests {
    use super::*;

    fn parse(keys: &str) -> Result<Conf> {
        let conf = format!(r#"{{"cniVersion":"1.0.0","name":"net","type":"portmap"{keys}}}"#);
        Conf::new(&NetConf::parse(conf)?)
    }

    #[track_caller]
    fn refusal(keys: &str) -> String {
        let error = parse(keys).unwrap_err();
        assert_eq!(error.code(), cni::Code::INVALID_CONFIG, "{keys}");
        error.msg().to_owned()
    }

    fn mapped(mapping: &str) -> String {
        format!(r#","runtimeConfig":{{"portMappings":[{mapping}]}}"#)
    }

    #[test]
    fn defaults_are_go_s() {
        let conf = parse("").unwrap();
        assert_eq!((conf.backend, conf.snat, conf.policy), (None, Snat::Hairpin, Policy::Judge));
        assert_eq!(conf.set_mark, SetMark::Bit(13));
        assert!(conf.mappings.is_empty());
        for nothing in [r#","runtimeConfig":null"#, r#","runtimeConfig":{"portMappings":null}"#, &mapped("")] {
            assert!(parse(nothing).unwrap().mappings.is_empty());
        }
        let conf = parse(r#","masqAll":true,"MARKMASQBIT":5,"portConflict":"ignore""#).unwrap();
        assert_eq!((conf.snat, conf.set_mark, conf.policy), (Snat::All, SetMark::Bit(5), Policy::Ignore));
        assert_eq!(parse(r#","masqAll":true,"snat":false"#).unwrap().snat, Snat::No);
    }

    #[test]
    fn a_mapping_is_read_as_it_is_meant() {
        let conf = parse(&mapped(r#"{"hostPort":8080,"containerPort":80},{"hostPort":8080,"containerPort":80,"protocol":"UDP","hostIP":"::ffff:192.0.2.1"}"#)).unwrap();
        let expected = Mapping { protocol: Protocol::Tcp, host_ip: None, host_port: 8080, container_port: 80 };
        assert_eq!(conf.mappings[0], expected);
        let expected = Mapping { protocol: Protocol::Udp, host_ip: "192.0.2.1".parse().ok(), ..expected };
        assert_eq!(conf.mappings[1], expected);
    }

    #[test]
    fn a_bad_port_is_refused_in_go_s_words_alone() {
        let good = r#"{"hostPort":1,"containerPort":1},"#;
        for (mapping, text) in [
            (r#"{"hostPort":0,"containerPort":80}"#, "Invalid host port number: 0"),
            (r#"{"hostPort":65536,"containerPort":80}"#, "Invalid host port number: 65536"),
            (r#"{"hostPort":80}"#, "Invalid container port number: 0"),
            (r#"{"hostPort":80,"containerPort":-1}"#, "Invalid container port number: -1"),
        ] {
            let keys = mapped(&format!("{good}{mapping}"));
            let error = parse(&keys).unwrap_err();
            assert_eq!(error.to_string(), text, "no details either");
            let conf = format!(r#"{{"cniVersion":"1.0.0","name":"net"{keys}}}"#);
            let refused = Conf::refused_port(&NetConf::parse(conf).unwrap(), &error);
            assert_eq!(refused.as_deref(), Some("portMappings[1]"));
        }
        let error = parse(r#","markMasqBit":32"#).unwrap_err();
        assert_eq!(error.to_string(), "MasqMarkBit must be between 0 and 31");
    }

    #[test]
    fn other_bad_mappings_are_refused_with_their_index() {
        let good = r#"{"hostPort":1,"containerPort":1},"#;
        for (mapping, text) in [
            (
                r#"{"hostPort":80,"containerPort":80,"protocol":"icmp"}"#,
                "Invalid protocol \"icmp\": not tcp, udp or sctp (portMappings[1])",
            ),
            (r#"{"hostPort":80,"containerPort":80,"hostIP":"10.0.0"}"#, "Invalid host IP \"10.0.0\" (portMappings[1])"),
            (
                r#"{"hostPort":1,"containerPort":80,"hostIP":"0.0.0.0"}"#,
                "portMappings[1] requests the same host port as portMappings[0]: tcp port 1",
            ),
        ] {
            assert_eq!(refusal(&mapped(&format!("{good}{mapping}"))), text);
        }
        let specific = mapped(&format!(r#"{good}{{"hostPort":1,"containerPort":80,"hostIP":"192.0.2.1"}}"#));
        assert_eq!(parse(&specific).unwrap().mappings.len(), 2);
        assert_eq!(parse(r#","runtimeConfig":{"portMappings":{}}"#).unwrap_err().code(), cni::Code::DECODE);
    }

    #[test]
    fn a_conflicting_mapping_names_the_first_in_either_family() {
        let of = |host_ip: &str| format!(r#"{{"hostPort":1,"containerPort":1,"hostIP":"{host_ip}"}}"#);
        let (any, v4, v6, one) = (of(""), of("0.0.0.0"), of("::"), of("192.0.2.1"));
        for (all, before) in [
            ([&v6, &v4, &any], Some("portMappings[2] requests the same host port as portMappings[0]: tcp port 1")),
            ([&one, &v4, &any], Some("portMappings[2] requests the same host port as portMappings[1]: tcp port 1")),
            ([&any, &one, &v6], Some("portMappings[2] requests the same host port as portMappings[0]: tcp port 1")),
            ([&v6, &one, &v4], None),
        ] {
            let keys = mapped(&all.map(String::as_str).join(","));
            assert_eq!(parse(&keys).err().as_ref().map(|error| error.msg()), before, "{keys}");
        }
    }

    #[test]
    fn many_mappings_are_not_compared_each_with_each() {
        let mapping = |port| format!(r#"{{"hostPort":{port},"containerPort":80}}"#);
        let keys = |count| mapped(&(1..=count).map(mapping).collect::<Vec<_>>().join(","));
        let (few, many) = (keys(4000), keys(16_000));
        let check = |keys: &str, count| assert_eq!(parse(keys).unwrap().mappings.len(), count);
        // 4 times as many: 16 times the work if each were compared with each.
        cni_testkit::assert_cost_below(8, || check(&few, 4000), || check(&many, 16_000));
    }

    #[test]
    fn del_takes_what_makes_sense() {
        let keys = mapped(r#"{"hostPort":0},7,{"hostPort":80,"containerPort":80}"#);
        let conf = format!(r#"{{"cniVersion":"1.0.0","name":"net","type":"portmap"{keys}}}"#);
        assert_eq!(Conf::sound_mappings(&NetConf::parse(conf).unwrap()).len(), 1);
        let conf = r#"{"name":"net","runtimeConfig":[1]}"#;
        assert_eq!(Conf::sound_mappings(&NetConf::parse(conf).unwrap()), []);
    }

    #[test]
    fn the_words_decide_the_backend() {
        for (keys, backend) in [
            (r#","conditionsV4":["-s","1.2.3.4"]"#, Some(Backend::Iptables)),
            (r#","conditionsV6":["ip6 saddr fd00::1"]"#, Some(Backend::Nftables)),
            (r#","externalSetMarkChain":"KUBE-MARK-MASQ""#, Some(Backend::Iptables)),
            (r#","backend":"nftables""#, Some(Backend::Nftables)),
            (r#","conditionsV4":[]"#, None),
        ] {
            assert_eq!(parse(keys).unwrap().backend, backend, "{keys}");
        }
        for (keys, text) in [
            (r#","backend":"x""#, "unrecognized backend \"x\""),
            (
                r#","backend":"iptables","conditionsV4":["ip","saddr"],"conditionsV6":["ip6"]"#,
                "iptables backend was requested but configuration contains nftables-specific options [conditionsV4 conditionsV6]",
            ),
            (
                r#","backend":"nftables","conditionsV4":["!","-s"],"externalSetMarkChain":"X""#,
                "nftables backend was requested but configuration contains iptables-specific options [externalSetMarkChain conditionsV4]",
            ),
            (
                r#","conditionsV4":["-s"],"conditionsV6":["ip6"]"#,
                "iptables backend was requested but configuration contains nftables-specific options [conditionsV6]",
            ),
            (r#","markMasqBit":32"#, "MasqMarkBit must be between 0 and 31"),
            (r#","markMasqBit":3,"externalSetMarkChain":"X""#, "Cannot specify externalSetMarkChain and markMasqBit"),
            (r#","portConflict":"steal""#, "\"portConflict\" can only be \"ignore\", not \"steal\""),
            (r#","externalSetMarkChain":"a b""#, "externalSetMarkChain: \"a b\" is not a chain name"),
        ] {
            assert_eq!(refusal(keys), text);
        }
    }

    #[test]
    fn a_match_of_nft_may_name_what_is_called_like_an_order() {
        for condition in ["iifname \\\"drop\\\"", "iifname eth-drop", "ip saddr { 10.0.0.1, 10.0.0.0/8 } ct state new"]
        {
            let conf = parse(&format!(r#","conditionsV4":["{condition}"]"#)).unwrap();
            assert_eq!(conf.backend, Some(Backend::Nftables), "{condition}");
        }
    }

    #[test]
    fn what_is_more_than_a_match_is_refused_by_name() {
        for (keys, token) in [
            (r#","conditionsV4":["-s","1.2.3.4","-j","ACCEPT"]"#, "\"-j\""),
            (r#","conditionsV4":["-s","1.2.3.4\nCOMMIT"]"#, "\"1.2.3.4\\nCOMMIT\""),
            (r#","conditionsV6":["-m","comment","--comment","COMMIT"]"#, "\"COMMIT\""),
            (r#","conditionsV4":["ip saddr 1.2.3.4 accept"]"#, "\"accept\""),
            (r#","conditionsV4":["ip saddr 1.2.3.4; flush ruleset"]"#, "\"flush\""),
            (r#","conditionsV4":["ip saddr {1.2.3.4}accept"]"#, "\"accept\""),
            (r#","conditionsV4":["ip saddr 1.2.3.4drop"]"#, "\"drop\""),
            (r#","conditionsV4":["ip saddr 1.12.accept"]"#, "\"accept\""),
            (r#","conditionsV4":["meta mark 0x1jump x"]"#, "\"jump\""),
            (r#","conditionsV4":["tcp sport 1-goto x"]"#, "\"goto\""),
            (r#","conditionsV4":["meta mark 0xejump x"]"#, "\"jump\""),
            (r#","conditionsV4":["meta mark 0X1Egoto x"]"#, "\"goto\""),
            (r#","conditionsV6":["ip6 saddr fd00::ejump x"]"#, "\"jump\""),
            (r#","conditionsV4":["ether saddr 00:11:22:33:44:eereturn"]"#, "\"return\""),
            (r#","conditionsV4":["ct expiration 1h5msqueue"]"#, "\"queue\""),
            (r#","conditionsV4":["tcp sport vmap {1:drop}"]"#, "\"vmap\""),
            (r#","conditionsV4":["iifname \"x"]"#, "iifname"),
            (r#","conditionsV4":["-fjACCEPT"]"#, "\"-fjACCEPT\""),
            (r#","conditionsV4":["ip saddr 1.2.3.4; ip saddr 1.2.3.5"]"#, "1.2.3.4; ip"),
        ] {
            assert!(refusal(keys).contains(token), "{}", refusal(keys));
        }
        for chain in ["-j", "a\\nb", "", "COMMIT", "twenty-nine-bytes-is-too-much"] {
            assert!(refusal(&format!(r#","externalSetMarkChain":"{chain}""#)).contains("not a chain name"));
        }
    }
}
