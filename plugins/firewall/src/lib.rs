//! `firewall`: packets from and to a container pass the node's filter, and bridges can be isolated.
//! Always behind another plugin, whose result it passes on as it is.
//!
//! `conf` reads the configuration; the rules themselves are [`cni_firewall::forward`]'s, and
//! `firewalld` is the backend without any. The container's namespace is never entered.
//!
//! DEL often comes without `prevResult`. What has to go is found by its owner, in both backends,
//! whatever the configuration says by then.

mod bus;
mod conf;
pub mod firewalld;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;

use std::net::IpAddr;
use std::rc::Rc;

use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::skel::{Added, Call, Plugin, RestoreMode, Restored, Role};
use cni::{Code, Error, Result};
use cni_firewall::forward::sources::{self, AttachmentFilter};
use cni_firewall::forward::{self, Forward, Ingress, PreviousRules, Wanted};
use cni_firewall::{Backend, nft_usable};
use cni_linux::{Netlink, sysctl};

use conf::{BackendChoice, CleanupConf, Conf, Policy};
use firewalld::Zone;

/// The plugin.
#[derive(Clone, Copy, Debug)]
pub struct Firewall;

const NO_RESULT: &str = "missing prevResult from earlier plugin";

impl Plugin for Firewall {
    fn name(&self) -> &'static str {
        "firewall"
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
        let conf = Conf::new(&call.conf)?;
        let result = call.conf.prev_result()?.ok_or_else(|| Error::config(NO_RESULT))?;
        let mut rollback = call.rollback();
        let wanted = wanted(call, &conf, &result)?;
        if wanted.addresses.is_empty() {
            return Ok(Added { result, rollback });
        }
        let choice = self.choice(call, &conf)?;
        match choice {
            BackendChoice::Rules(backend) => rules(call, &conf, &wanted, backend, &mut rollback)?,
            BackendChoice::Firewalld => {
                if conf.policy != Policy::Open {
                    rules(call, &conf, &wanted, Backend::Nftables, &mut rollback)?;
                }
                let zone = self.zone(call, &conf.zone);
                let former = Rc::new(firewalld::PreviousZones::default());
                let (undone, mark, before) = (zone.clone(), wanted.mark.clone(), former.clone());
                rollback.push("put the sources back as they were", move || undone.put_back(&mark, &before));
                zone.add(&wanted.mark, &wanted.addresses, &former)?;
            }
        }
        remark(call, &conf, choice);
        Ok(Added { result, rollback })
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(&call.conf)?;
        let prev = call.conf.prev_result()?.ok_or_else(|| Error::config(NO_RESULT))?;
        let wanted = wanted(call, &conf, &prev)?;
        match self.missing(call, &conf, &wanted)?.as_slice() {
            [] => Ok(()),
            missing => Err(Error::new(Code::CHECK_FAILED, missing.join("; "))),
        }
    }

    fn del(&self, call: &Call<'_>) -> Result<()> {
        let addresses = call.conf.prev_result().map(|prev| prev.map_or_else(Vec::new, |prev| addresses(&prev)));
        let addresses = addresses.unwrap_or_else(|error| {
            call.notes.note(format_args!("firewall: prevResult is not used: {error}"));
            Vec::new()
        });
        let lenient = CleanupConf::new(&call.conf);
        let mark = call.attachment();
        let may_have: &[IpAddr] = if lenient.may_be_firewalld { &addresses } else { &[] };
        let in_zone = self.zone(call, &lenient.zone).purge(AttachmentFilter::Of(&mark), may_have);
        // The Go plugin has no other rules for them, and its isolation names no containers.
        let go = in_zone.as_deref().unwrap_or_default();
        let rest: Vec<IpAddr> = addresses.into_iter().filter(|address| !go.contains(address)).collect();
        Error::join([forward(call).purge(&mark, &rest).err().map(Error::from), in_zone.err()].into_iter().flatten())
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        let valid: Vec<(&str, &str)> = valid.iter().collect();
        let network = call.conf.name();
        let zone = self.zone(call, &CleanupConf::new(&call.conf).zone);
        let in_zone = zone.purge(AttachmentFilter::Garbage { network, valid: &valid }, &[]);
        Error::join([forward(call).gc(network, &valid).err().map(Error::from), in_zone.err()].into_iter().flatten())
    }

    fn status(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(&call.conf)?;
        let choice = self.choice(call, &conf).map_err(|error| error.with_code(Code::NOT_AVAILABLE))?;
        let backend = match choice {
            BackendChoice::Rules(backend) => backend,
            BackendChoice::Firewalld => {
                let ready = self.zone(call, &conf.zone).probe();
                return ready.map_err(|error| error.with_code(Code::NOT_AVAILABLE));
            }
        };
        let not_ready = |error: cni_linux::Error| Error::from(error).with_code(Code::NOT_AVAILABLE);
        if backend == Backend::Nftables && !nft_usable().map_err(not_ready)? {
            return Err(Error::new(Code::NOT_AVAILABLE, "this kernel has no nf_tables"));
        }
        forward(call).probe(backend, conf.place.as_ref()).map_err(not_ready)
    }

    fn restore_rules<'a>(&self, call: &'a Call<'_>, mode: RestoreMode) -> Result<Option<Restored<'a>>> {
        let write = || Ok(self.add(call)?.rollback);
        Restored::after_check(call, mode, self.check(call), write).map(Some)
    }
}

impl Firewall {
    fn zone<'m>(&self, call: &Call<'m>, name: &str) -> Zone<'m> {
        Zone { machine: call.machine, name: name.to_owned() }
    }

    /// The backend that is asked for; else firewalld if it runs, as with Go, else the one that the
    /// host has.
    fn choice(&self, call: &Call<'_>, conf: &Conf) -> Result<BackendChoice> {
        match conf.backend {
            Some(choice) => Ok(choice),
            None if self.zone(call, &conf.zone).is_running()? => Ok(BackendChoice::Firewalld),
            None => Ok(BackendChoice::Rules(forward(call).chosen()?)),
        }
    }

    /// Returns a sentence for each rule that is missing.
    fn missing(&self, call: &Call<'_>, conf: &Conf, wanted: &Wanted) -> Result<Vec<String>> {
        match self.choice(call, conf)? {
            BackendChoice::Rules(backend) => Ok(forward(call).check(wanted, backend)?),
            BackendChoice::Firewalld => {
                let mut missing = self.zone(call, &conf.zone).check(&wanted.addresses)?;
                // Without a record it was the Go plugin, or firewalld did not run yet.
                let is_recorded = !sources::find(AttachmentFilter::Of(&wanted.mark))?.own.is_empty();
                if !missing.is_empty() && !is_recorded && conf.backend.is_none() {
                    let rules = forward(call);
                    return Ok(rules.check(wanted, rules.chosen()?)?);
                }
                if is_recorded && conf.policy != Policy::Open {
                    missing.extend(forward(call).check(wanted, Backend::Nftables)?);
                }
                Ok(missing)
            }
        }
    }
}

/// Puts rules in force.
fn rules<'a>(
    call: &'a Call<'_>,
    conf: &Conf,
    wanted: &Wanted,
    backend: Backend,
    rollback: &mut Rollback<'a>,
) -> Result<()> {
    let former = Rc::new(PreviousRules::default());
    let (undone, before) = (wanted.clone(), former.clone());
    rollback.push("put the rules back as they were", move || forward(call).put_back(&undone, &before));
    if let Err(error) = forward(call).ensure(wanted, backend, &former) {
        return Err(refusal(call, error, conf, backend));
    }
    Ok(())
}

fn forward<'m>(call: &Call<'m>) -> Forward<'m> {
    Forward::new(call.machine, call.notes.clone())
}

/// All addresses of the result, whichever interface they are on, as in Go.
fn addresses(prev: &AddResult) -> Vec<IpAddr> {
    let mut all = Vec::new();
    for address in prev.ips.iter().map(|ip| ip.address.address()) {
        if !all.contains(&address) {
            all.push(address);
        }
    }
    all
}

/// Returns the rules that this attachment wants.
fn wanted(call: &Call<'_>, conf: &Conf, prev: &AddResult) -> Result<Wanted> {
    Ok(Wanted {
        mark: call.attachment(),
        addresses: addresses(prev),
        ingress: ingress(conf.policy, prev)?,
        admin: conf.admin.clone(),
        place: conf.place.clone(),
    })
}

/// The bridge to isolate: the first interface on the host that the result names, as in Go.
///
/// # Errors
/// There is none, or it is not a bridge: rules for a container's own interface would isolate
/// nothing.
fn ingress(policy: Policy, prev: &AddResult) -> Result<Ingress> {
    if policy == Policy::Open {
        return Ok(Ingress::Open);
    }
    let name = policy.name();
    let refused = |why: String| Error::config(format!("\"ingressPolicy\": {name:?} needs a bridge: {why}"));
    let first = prev.interfaces.iter().find(|interface| interface.sandbox.is_empty());
    let first = first.ok_or_else(|| refused("prevResult names no interface of the host".into()))?;
    match Netlink::open()?.find_link(&first.name)? {
        Some(link) if link.is_bridge() => Ok(policy.on(link.name)),
        Some(link) => Err(refused(format!("{} in prevResult is a {}", link.name, link.kind))),
        None => Err(refused(format!("{} in prevResult does not exist", first.name))),
    }
}

/// Returns the error for rules that could not be made, with the code for an unusable backend.
fn refusal(call: &Call<'_>, error: cni_linux::Error, conf: &Conf, backend: Backend) -> Error {
    let has_no_program = || backend == Backend::Iptables && forward(call).probe(backend, None).is_err();
    let is_absent = error.is_unsupported() || has_no_program();
    match &conf.place {
        Some(place) if error.is_not_found() => Error::from(error)
            .context(format!("nftablesChain: there is no chain {place}"))
            .with_code(Code::INVALID_CONFIG),
        _ if is_absent => Error::from(error)
            .context(format!("\"backend\": \"{}\" cannot be had on this host", backend.name()))
            .with_code(Code::UNSUPPORTED_FIELD),
        _ => error.into(),
    }
}

/// Prints a note if chains of other tables drop what the rules accept.
fn remark(call: &Call<'_>, conf: &Conf, choice: BackendChoice) {
    let overruled = match choice {
        // Its rules are in the table whose policy drops.
        BackendChoice::Rules(Backend::Iptables) => None,
        BackendChoice::Rules(Backend::Nftables) => Some(("backend nftables", "name the chain in \"nftablesChain\"")),
        BackendChoice::Firewalld => Some(("firewalld", "accept the containers' addresses in that chain too")),
    };
    if let Some((accepting, advice)) = overruled
        && let Ok(mut dropping) = forward::dropping(conf.place.as_ref())
    {
        // firewalld drops everything in a table of its own while it reloads.
        dropping.retain(|chain| choice != BackendChoice::Firewalld || !chain.contains(" firewalld"));
        if !dropping.is_empty() {
            call.notes.note(format_args!(
                "firewall: {} drops what it does not accept itself, and {accepting} cannot change that from another \
                 table: {advice}",
                dropping.join(", ")
            ));
        }
    }
    if conf.policy == Policy::Isolated {
        let key = "net/bridge/bridge-nf-call-iptables";
        if sysctl::read(key).map_or(true, |value| value != "1") {
            call.notes.note(format_args!(
                "firewall: sysctl {key} is not 1, so containers on one bridge reach each other despite \"isolated\""
            ));
        }
    }
}
