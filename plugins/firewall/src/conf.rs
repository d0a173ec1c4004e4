//! Reads and checks the configuration of `firewall`.
//!
//! ADD, CHECK and STATUS read all keys ([`Conf`]). DEL and GC only read whether and in which zone
//! firewalld may have addresses ([`CleanupConf`]), and ignore invalid keys, so that a mistake never
//! prevents the removal of rules.

use cni::config::NetConf;
use cni::json::{Json, UnknownKey};
use cni::{Code, Error, Result};
use cni_firewall::Backend;
use cni_firewall::forward::{ADMIN, Egress, EgressDefault, EntryChain, Ingress};
use cni_firewall::iptables::{CHAIN_NAME_MAX, is_chain_name};
use cni_plugin::keys;
use serde::Deserialize;

/// firewalld's predefined zone for trusted sources, used if the configuration names none.
const DEFAULT_ZONE: &str = "trusted";

/// A valid configuration.
#[derive(Clone, Debug)]
pub(crate) struct Conf {
    /// The configured backend; `None` leaves the choice to the host.
    pub(crate) backend: Option<BackendChoice>,
    pub(crate) policy: Policy,
    /// Whether connections to host ports of the container are accepted.
    pub(crate) accept_mapped_ports: bool,
    /// The destinations to which containers may open connections; `None` for all.
    pub(crate) egress: Option<Egress>,
    /// The chain for the administrator's rules in iptables.
    pub(crate) iptables_admin_chain: String,
    /// The administrator's chain in nftables that leads to the rules (`nftablesChain`). `None` if
    /// the rules are in the plugins' own table.
    pub(crate) nftables_admin_chain: Option<EntryChain>,
    /// The zone of firewalld.
    pub(crate) zone: String,
}

/// A backend that the key `backend` can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BackendChoice {
    /// Rules that this plugin writes.
    Rules(Backend),
    /// A zone of firewalld.
    Firewalld,
}

/// A value of the key `ingressPolicy`: an [`Ingress`] without the bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    Open,
    SameBridge,
    Isolated,
}

impl Policy {
    /// Returns the policy for containers on this bridge.
    pub(crate) fn for_bridge(self, bridge: String) -> Ingress {
        match self {
            Policy::Open => Ingress::Open,
            Policy::SameBridge => Ingress::SameBridge(bridge),
            Policy::Isolated => Ingress::Isolated(bridge),
        }
    }

    /// Returns the policy's name in configurations.
    pub(crate) fn name(self) -> &'static str {
        self.for_bridge(String::new()).name()
    }
}

/// The plugin's keys as they are in JSON. An absent key is the empty text.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawConf {
    backend: String,
    ingress_policy: String,
    accept_mapped_ports: bool,
    egress: Option<Json>,
    iptables_admin_chain_name: String,
    nftables_chain: String,
    firewalld_zone: String,
}

impl RawConf {
    /// Returns the configured backend; `None` leaves the choice to the host.
    fn backend_choice(&self) -> Option<BackendChoice> {
        match self.backend.as_str() {
            "firewalld" => Some(BackendChoice::Firewalld),
            // As with Go, an unknown name leaves the choice to the host.
            name => Backend::by_name(name).map(BackendChoice::Rules),
        }
    }

    /// Returns the configured or the default zone.
    fn zone(&self) -> String {
        if self.firewalld_zone.is_empty() { DEFAULT_ZONE.into() } else { self.firewalld_zone.clone() }
    }
}

/// The keys that DEL and GC read.
#[derive(Clone, Debug)]
pub(crate) struct CleanupConf {
    /// The zone in which the Go plugin may have added addresses, which have no records.
    pub(crate) zone: String,
    /// Whether ADD may have chosen firewalld with this configuration.
    pub(crate) may_be_firewalld: bool,
}

impl CleanupConf {
    /// Reads the configuration. If a key has the wrong type, all keys are ignored.
    pub(crate) fn new(conf: &NetConf) -> CleanupConf {
        let raw: RawConf = conf.decode().unwrap_or_default();
        let may_be_firewalld = match raw.backend_choice() {
            Some(choice) => choice == BackendChoice::Firewalld,
            // nftablesChain implies the backend nftables.
            None => raw.nftables_chain.is_empty(),
        };
        CleanupConf { zone: raw.zone(), may_be_firewalld }
    }
}

impl Conf {
    /// Reads the configuration.
    ///
    /// # Errors
    /// Code 6 if a key's value has the wrong type, code 7 if it is not valid.
    pub(crate) fn new(conf: &NetConf) -> Result<Conf> {
        let raw: RawConf = conf.decode()?;
        let policy = match raw.ingress_policy.as_str() {
            "" | "open" => Policy::Open,
            "same-bridge" => Policy::SameBridge,
            "isolated" => Policy::Isolated,
            other => return Err(Error::config(format!("unknown ingress policy: {other:?}"))),
        };
        // Called before a field is moved out of `raw`.
        let (configured_backend, zone) = (raw.backend_choice(), raw.zone());
        let egress = raw.egress.as_ref().map(egress).transpose()?;
        let iptables_admin_chain =
            if raw.iptables_admin_chain_name.is_empty() { ADMIN.into() } else { raw.iptables_admin_chain_name };
        if !is_chain_name(&iptables_admin_chain) {
            return Err(Error::config(format!(
                "iptablesAdminChainName: {iptables_admin_chain:?} is not a chain name: it must be at most \
                 {CHAIN_NAME_MAX} bytes, without spaces or control characters, and must not begin with - or !"
            )));
        }
        let nftables_admin_chain = match raw.nftables_chain.as_str() {
            "" => None,
            text => Some(EntryChain::parse(text).ok_or_else(|| {
                Error::config(format!(
                    "nftablesChain: {text:?} is not allowed: the value must be a family (inet, ip or ip6), a table and \
                     a chain, such as \"inet filter forward\", and these plugins must not have created the chain"
                ))
            })?),
        };
        let nftables = BackendChoice::Rules(Backend::Nftables);
        let backend = match (configured_backend, &nftables_admin_chain) {
            (Some(other), Some(_)) if other != nftables => {
                return Err(Error::config("nftablesChain is only for \"backend\": \"nftables\""));
            }
            (None, Some(_)) => Some(nftables),
            (configured, _) => configured,
        };
        Ok(Conf {
            backend,
            policy,
            accept_mapped_ports: raw.accept_mapped_ports,
            egress,
            iptables_admin_chain,
            nftables_admin_chain,
            zone,
        })
    }
}

/// The keys of `egress`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct EgressKeys {
    allow: Vec<String>,
    deny: Vec<String>,
    default: String,
}

/// The largest number of prefixes of one list of `egress`: a packet that opens a connection is
/// compared with each of them.
const PREFIXES_MAX: usize = 64;

/// Parses `egress`.
///
/// # Errors
/// - Code 6 for a wrong type.
/// - Code 7 for an unknown key, an invalid or too long list, an unknown `default`, and for rules
///   that deny nothing.
fn egress(json: &Json) -> Result<Egress> {
    let wrong_type = |error| Error::caused(Code::DECODE, "failed to load netconf: egress", error);
    let keys: EgressKeys = json.decode().map_err(wrong_type)?;
    if let Some(unknown) = json.unknown_keys::<EgressKeys>().first() {
        return Err(Error::config(format!("unknown key {:?} in egress", unknown.path)));
    }
    let default = match keys.default.as_str() {
        "" | "allow" => EgressDefault::Allow,
        "deny" => EgressDefault::Deny,
        other => return Err(Error::config(format!("egress.default: {other:?} is neither \"allow\" nor \"deny\""))),
    };
    if default == EgressDefault::Allow && keys.deny.is_empty() {
        return Err(Error::config(
            "egress denies nothing: list destinations in \"deny\", or set \"default\" to \"deny\"",
        ));
    }
    let prefixes = |name: &str, texts: &[String]| {
        if texts.len() > PREFIXES_MAX {
            return Err(Error::config(format!("{name} has more than {PREFIXES_MAX} prefixes")));
        }
        // The advice in the error for a prefix of length 0.
        let advice = "set \"default\" of egress to decide about all other destinations";
        texts.iter().map(|text| keys::prefix(text, name, advice)).collect()
    };
    let (allow, deny) = (prefixes("egress.allow", &keys.allow)?, prefixes("egress.deny", &keys.deny)?);
    Ok(Egress { allow, deny, default, link_local: Vec::new() })
}

/// Returns the keys of the configuration that the plugin does not read.
pub(crate) fn unknown_keys(json: &Json) -> Vec<UnknownKey> {
    json.unknown_keys::<RawConf>()
}
