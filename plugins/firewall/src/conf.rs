//! The configuration of `firewall`: JSON in, impossible states out.
//!
//! ADD, CHECK and STATUS read all of it. DEL and GC read where firewalld may have addresses, and
//! take a mistake for an absent key, so that none can keep them from cleaning.

use cni::config::NetConf;
use cni::json::{Json, UnknownKey};
use cni::{Error, Result};
use cni_firewall::Backend;
use cni_firewall::forward::{ADMIN, AdminChain, Ingress};
use cni_firewall::iptables::check_conditions;
use serde::Deserialize;

/// The zone that firewalld has for what is trusted.
const ZONE: &str = "trusted";

/// A sound configuration.
#[derive(Clone, Debug)]
pub(crate) struct Conf {
    /// `None` leaves the choice to the host.
    pub(crate) backend: Option<BackendChoice>,
    pub(crate) policy: Policy,
    /// The chain for the administrator's rules in iptables.
    pub(crate) admin: String,
    /// The administrator's chain in nftables.
    pub(crate) place: Option<AdminChain>,
    /// The zone of firewalld.
    pub(crate) zone: String,
}

/// `backend`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BackendChoice {
    /// Rules of our own.
    Rules(Backend),
    /// A zone of firewalld's.
    Firewalld,
}

/// `ingressPolicy`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    Open,
    SameBridge,
    Isolated,
}

impl Policy {
    /// The policy for containers on this bridge.
    pub(crate) fn on(self, bridge: String) -> Ingress {
        match self {
            Policy::Open => Ingress::Open,
            Policy::SameBridge => Ingress::SameBridge(bridge),
            Policy::Isolated => Ingress::Isolated(bridge),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        self.on(String::new()).name()
    }
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Raw {
    backend: String,
    ingress_policy: String,
    iptables_admin_chain_name: String,
    nftables_chain: String,
    firewalld_zone: String,
}

impl Raw {
    fn choice(&self) -> Option<BackendChoice> {
        match self.backend.as_str() {
            "firewalld" => Some(BackendChoice::Firewalld),
            // As in Go an unknown name leaves the choice to the host.
            name => Backend::by_name(name).map(BackendChoice::Rules),
        }
    }

    fn zone(&self) -> String {
        if self.firewalld_zone.is_empty() { ZONE.into() } else { self.firewalld_zone.clone() }
    }
}

/// The keys that DEL and GC read. A mistake in the configuration does not keep them from cleaning.
#[derive(Clone, Debug)]
pub(crate) struct CleanupConf {
    /// The zone that addresses without a record are removed from.
    pub(crate) zone: String,
    /// Whether the configuration leaves open that firewalld was chosen.
    pub(crate) may_be_firewalld: bool,
}

impl CleanupConf {
    pub(crate) fn new(conf: &NetConf) -> CleanupConf {
        let raw: Raw = conf.decode().unwrap_or_default();
        let may_be_firewalld = match raw.choice() {
            Some(choice) => choice == BackendChoice::Firewalld,
            None => raw.nftables_chain.is_empty(),
        };
        CleanupConf { zone: raw.zone(), may_be_firewalld }
    }
}

impl Conf {
    /// Reads the configuration.
    ///
    /// # Errors
    /// 6 and 7.
    pub(crate) fn new(conf: &NetConf) -> Result<Conf> {
        let raw: Raw = conf.decode()?;
        let policy = match raw.ingress_policy.as_str() {
            "" | "open" => Policy::Open,
            "same-bridge" => Policy::SameBridge,
            "isolated" => Policy::Isolated,
            other => return Err(Error::config(format!("unknown ingress policy: {other:?}"))),
        };
        let (backend, zone) = (raw.choice(), raw.zone());
        let admin = if raw.iptables_admin_chain_name.is_empty() { ADMIN.into() } else { raw.iptables_admin_chain_name };
        let fits = admin.len() <= 28 && !admin.starts_with(['-', '!']) && !admin.contains(char::is_whitespace);
        if !fits || check_conditions(&[&admin]).is_err() {
            return Err(Error::config(format!("iptablesAdminChainName: {admin:?} is not a name of a chain")));
        }
        let place = match raw.nftables_chain.as_str() {
            "" => None,
            text => Some(AdminChain::parse(text).ok_or_else(|| {
                let msg = format!("nftablesChain: {text:?} is not a family (inet, ip or ip6), a table and a chain");
                Error::config(msg)
            })?),
        };
        if place.is_some() && backend.is_some_and(|choice| choice != BackendChoice::Rules(Backend::Nftables)) {
            return Err(Error::config("nftablesChain is only for \"backend\": \"nftables\""));
        }
        let backend = backend.or(place.as_ref().map(|_| BackendChoice::Rules(Backend::Nftables)));
        Ok(Conf { backend, policy, admin, place, zone })
    }
}

/// The keys that the plugin does not read.
pub(crate) fn unknown_keys(json: &Json) -> Vec<UnknownKey> {
    json.unknown_keys::<Raw>()
}
