//! The plugin `portmap`: maps ports of the host to ports of a container. It is a chained plugin,
//! and returns the result of the plugin before it unchanged.
//!
//! `conf` reads the configuration; `add`, `check` and `del` implement the verbs.
//! [`cni_firewall::portmap`] writes the rules.
//!
//! Many runtimes pass no `runtimeConfig` to DEL. So DEL finds the rules by the attachment that they
//! name, in both backends, without the configuration.

mod add;
mod check;
mod conf;
mod del;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;

use std::collections::BTreeSet;

use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::machine::OnSigterm;
use cni::result::AddResult;
use cni::skel::{Added, Call, Plugin, RestoreMode, Role, missing_rules};
use cni::{Code, Error, Result};
use cni_firewall::iptables::{Iptables, Table};
use cni_firewall::portmap::{Mapping, Policy};
use cni_firewall::{AttachmentFilter, Backend, nft_usable};
use cni_linux::route;

use conf::Conf;

/// The plugin.
#[derive(Clone, Copy, Debug)]
pub struct Portmap;

/// Returns the mappings in a configuration file itself: each attachment of the file requests these
/// ports. Empty if the configuration allows conflicts (`portConflict`) or is invalid.
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

    /// Maps the ports to the container's addresses in `prevResult`, and returns `prevResult`
    /// unchanged.
    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let (conf, result) = read_request(call)?;
        let mut rollback = call.rollback();
        add::add(call, &conf, &result, &mut rollback)?;
        Ok(Added { result, rollback })
    }

    /// Fails if a port does not lead to the container's addresses in `prevResult`.
    fn check(&self, call: &Call<'_>) -> Result<()> {
        let conf = parse(call)?;
        let prev = call.conf.prev_result()?.ok_or_else(|| Error::config("Required prevResult missing"))?;
        check::check(call, &conf, &prev)
    }

    fn del(&self, call: &Call<'_>) -> Result<()> {
        del::del(call)
    }

    /// Removes the rules of the network's attachments that are not in `valid`, then the tracked
    /// connections that were mapped to them.
    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        del::purge(call, BTreeSet::new(), AttachmentFilter::Garbage { network: call.conf.name(), valid })
    }

    /// Fails with code 50 if the configured backend does not work on this host or, if none is
    /// configured, neither backend does.
    fn status(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(&call.conf)?;
        match conf.backend {
            Some(Backend::Iptables) => probe_iptables(call),
            Some(Backend::Nftables) => probe_nftables(),
            None => {
                let Err(iptables_error) = probe_iptables(call) else { return Ok(()) };
                let Err(nftables_error) = probe_nftables() else { return Ok(()) };
                Err(Error::new(Code::NOT_AVAILABLE, "neither iptables nor nftables is usable")
                    .with_details(format!("{iptables_error}; {nftables_error}")))
            }
        }
    }

    /// Returns what CHECK finds missing; empty if CHECK succeeds, `None` if the configuration has
    /// no mappings. With [`RestoreMode::Write`], then writes the rules as ADD does if any are
    /// missing.
    fn restore_rules<'a>(&self, call: &'a Call<'_>, mode: RestoreMode<'_, 'a>) -> Result<Option<Vec<String>>> {
        let (conf, result) = read_request(call)?;
        if conf.mappings.is_empty() {
            return Ok(None);
        }
        let missing = missing_rules(self.check(call))?;
        if let RestoreMode::Write(rollback) = mode
            && !missing.is_empty()
        {
            add::add(call, &conf, &result, rollback)?;
        }
        Ok(Some(missing))
    }
}

/// Fails with code 50 if iptables does not work on this host.
fn probe_iptables(call: &Call<'_>) -> Result<()> {
    let opened = Iptables::open(Table::Nat, call.machine, call.notes.clone(), OnSigterm::Kill);
    opened
        .and_then(|mut iptables| iptables.probe(route::Family::V4))
        .map_err(|error| Error::from(error).with_code(Code::NOT_AVAILABLE))
}

/// Fails with code 50 if nftables does not work on this host.
fn probe_nftables() -> Result<()> {
    match nft_usable() {
        Ok(true) => Ok(()),
        Ok(false) => Err(Error::new(Code::NOT_AVAILABLE, "this kernel has no nf_tables with NAT")),
        Err(error) => Err(Error::from(error).with_code(Code::NOT_AVAILABLE)),
    }
}

/// Returns the configuration and `prevResult`, which ADD requires.
fn read_request(call: &Call<'_>) -> Result<(Conf, AddResult)> {
    let add_context = |error: Error| error.context("failed to parse config");
    let conf = parse(call).map_err(add_context)?;
    let prev = call.conf.prev_result().map_err(add_context)?;
    Ok((conf, prev.ok_or_else(|| Error::config("must be called as chained plugin"))?))
}

/// Reads the configuration. If the error does not name the refused key, because the text is Go's,
/// also prints a note that does.
fn parse(call: &Call<'_>) -> Result<Conf> {
    Conf::new(&call.conf).inspect_err(|error| {
        if let Some(key) = Conf::refused_key(&call.conf, error) {
            call.notes.note(format_args!("portmap: {key}: {}", error.msg()));
        }
    })
}
