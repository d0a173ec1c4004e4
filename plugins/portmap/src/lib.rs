//! `portmap`: connections to ports of the host go to ports of a container. Always behind another
//! plugin, whose result it passes on as it is.
//!
//! Modules: `conf` reads the configuration; `forward` implements ADD: it computes the rules from
//! the configuration and the earlier result, and installs them; `check` and `clean` (DEL and GC)
//! are the other verbs. The rules themselves are [`cni_firewall::portmap`]'s.
//!
//! Many runtimes pass no `runtimeConfig` to DEL. DEL therefore finds the rules by the attachment's
//! key, in both backends, without the configuration.

mod check;
mod clean;
mod conf;
mod forward;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;

use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::machine::OnSigterm;
use cni::result::AddResult;
use cni::skel::{Added, Call, Plugin, RestoreMode, Restored, Role};
use cni::{Code, Error, Result};
use cni_firewall::iptables::{Iptables, Table};
use cni_firewall::nft_usable;
use cni_firewall::portmap::{Mapping, Policy};
use cni_linux::route;

use cni_firewall::Backend;
use conf::Conf;

/// The plugin.
#[derive(Clone, Copy, Debug)]
pub struct Portmap;

/// Returns the mappings that every attachment of a configuration requests because the configuration
/// itself lists them; none if the configuration allows conflicts (`portConflict`).
pub fn fixed_ports(conf: &NetConf) -> Vec<Mapping> {
    match Conf::new(conf) {
        Ok(Conf { policy: Policy::RefuseIfAlive, mappings, .. }) => mappings,
        Ok(_) | Err(_) => Vec::new(),
    }
}

impl Plugin for Portmap {
    fn name(&self) -> &'static str {
        "portmap"
    }

    fn role(&self) -> Role {
        Role::Chained
    }

    fn examine(&self, conf: &NetConf) -> Result<()> {
        Conf::new(conf).map(drop)
    }

    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        conf::unknown_keys(json)
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let (conf, result) = wanted(call)?;
        let rollback = forward::add(call, &conf, &result)?;
        Ok(Added { result, rollback })
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        let conf = parse(call)?;
        let prev = call.conf.prev_result()?.ok_or_else(|| Error::config("Required prevResult missing"))?;
        check::check(call, &conf, &prev)
    }

    fn del(&self, call: &Call<'_>) -> Result<()> {
        clean::del(call)
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        clean::gc(call, valid)
    }

    fn status(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(&call.conf)?;
        let not_ready = |error: cni_linux::Error| Error::from(error).with_code(Code::NOT_AVAILABLE);
        let iptables =
            || Iptables::open(Table::Nat, call.machine, call.notes.clone(), OnSigterm::Kill)?.probe(route::Family::V4);
        let nftables = || match nft_usable().map_err(not_ready) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::new(Code::NOT_AVAILABLE, "this kernel has no nf_tables with NAT")),
            Err(error) => Err(error),
        };
        match conf.backend {
            Some(Backend::Iptables) => iptables().map_err(not_ready),
            Some(Backend::Nftables) => nftables(),
            None => iptables().map_err(not_ready).or_else(|error| {
                nftables().map_err(|other| {
                    let msg = "neither iptables nor nftables is usable";
                    Error::new(Code::NOT_AVAILABLE, msg).with_details(format!("{error}; {other}"))
                })
            }),
        }
    }

    fn restore_rules<'a>(&self, call: &'a Call<'_>, mode: RestoreMode) -> Result<Option<Restored<'a>>> {
        let (conf, result) = wanted(call)?;
        if conf.mappings.is_empty() {
            return Ok(None);
        }
        let write = || forward::add(call, &conf, &result);
        Restored::after_check(call, mode, self.check(call), write).map(Some)
    }
}

/// Returns the configuration and the result that ADD reads.
fn wanted(call: &Call<'_>) -> Result<(Conf, AddResult)> {
    let parsed = |error: Error| error.context("failed to parse config");
    let conf = parse(call).map_err(parsed)?;
    let prev = call.conf.prev_result().map_err(parsed)?;
    Ok((conf, prev.ok_or_else(|| Error::config("must be called as chained plugin"))?))
}

/// Reads the configuration, and logs which mapping has a bad port: Go's text about it, the error,
/// does not say.
fn parse(call: &Call<'_>) -> Result<Conf> {
    Conf::new(&call.conf).inspect_err(|error| {
        if let Some(mapping) = Conf::refused_port(&call.conf, error) {
            call.notes.note(format_args!("portmap: {mapping}: {}", error.msg()));
        }
    })
}
