//! The configuration of `firewall`: JSON in, impossible states out.
//!
//! ADD, CHECK and STATUS read all of it. DEL and GC read nothing, so that no mistake in it can keep them from cleaning.

use cni::config::NetConf;
use cni::json::{Json, UnknownKey};
use cni::{Code, Error, Result};
use cni_firewall::Backend;
use cni_firewall::forward::{ADMIN, Ingress, Place};
use cni_firewall::iptables::check_conditions;
use serde::Deserialize;

/// A sound configuration.
#[derive(Clone, Debug)]
pub(crate) struct Conf {
    /// `None` leaves the choice to the host.
    pub(crate) backend: Option<Backend>,
    pub(crate) policy: Policy,
    /// The chain for the administrator's rules in iptables.
    pub(crate) admin: String,
    /// The administrator's chain in nftables.
    pub(crate) place: Option<Place>,
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
    // Read for backend firewalld alone, which does not exist yet.
    firewalld_zone: String,
}

impl Conf {
    /// Reads the configuration.
    ///
    /// # Errors
    /// 6 and 7; 2 for `"backend": "firewalld"`.
    pub(crate) fn new(conf: &NetConf) -> Result<Conf> {
        let raw: Raw = conf.decode()?;
        let policy = match raw.ingress_policy.as_str() {
            "" | "open" => Policy::Open,
            "same-bridge" => Policy::SameBridge,
            "isolated" => Policy::Isolated,
            other => return Err(Error::config(format!("unknown ingress policy: {other:?}"))),
        };
        let backend = match raw.backend.as_str() {
            "firewalld" => {
                let msg = "\"backend\": \"firewalld\" is not supported; \"iptables\" and \"nftables\" are";
                return Err(Error::new(Code::UNSUPPORTED_FIELD, msg));
            }
            // As in Go an unknown name leaves the choice to the host.
            name => Backend::by_name(name),
        };
        let admin = if raw.iptables_admin_chain_name.is_empty() { ADMIN.into() } else { raw.iptables_admin_chain_name };
        let fits = admin.len() <= 28 && !admin.starts_with(['-', '!']) && !admin.contains(char::is_whitespace);
        if !fits || check_conditions(&[&admin]).is_err() {
            return Err(Error::config(format!("iptablesAdminChainName: {admin:?} is not a name of a chain")));
        }
        let place = match raw.nftables_chain.as_str() {
            "" => None,
            text => Some(Place::parse(text).ok_or_else(|| {
                let msg = format!("nftablesChain: {text:?} is not a family (inet, ip or ip6), a table and a chain");
                Error::config(msg)
            })?),
        };
        if place.is_some() && backend == Some(Backend::Iptables) {
            return Err(Error::config("nftablesChain is only for \"backend\": \"nftables\""));
        }
        // A zone without firewalld has no meaning, and Go says nothing about it.
        let _ = raw.firewalld_zone;
        Ok(Conf { backend: backend.or(place.as_ref().map(|_| Backend::Nftables)), policy, admin, place })
    }
}

/// The keys that nobody here reads.
pub(crate) fn unknown_keys(json: &Json) -> Vec<UnknownKey> {
    json.unknown_keys::<Raw>()
}
