//! Implements ADD: writes the rules, or adds the addresses to a zone of firewalld, and prints notes
//! about what the rules cannot do.

use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_firewall::forward::{ForwardRules, Written, egress, list_dropping_chains};
use cni_firewall::{AttachmentFilter, Backend};
use cni_linux::sysctl;

use crate::conf::{BackendChoice, Conf, Policy};
use crate::firewalld::{AddedSources, Zone};
use crate::{NO_PREV_RESULT, choose_backend, explain_egress, forward, required_rules, zone};

/// Writes the rules for the addresses in `prevResult`, and pushes the undo onto `rollback`. Returns
/// `prevResult`.
pub(crate) fn add<'a>(call: &'a Call<'_>, rollback: &mut Rollback<'a>) -> Result<AddResult> {
    let conf = Conf::new(&call.conf)?;
    let result = call.conf.prev_result()?.ok_or_else(|| Error::config(NO_PREV_RESULT))?;
    let rules = required_rules(call, &conf, &result)?;
    if rules.addresses.is_empty() {
        return Ok(result);
    }
    let choice = choose_backend(call, &conf)?;
    let replaced = match choice {
        BackendChoice::Rules(backend) => write_rules(call, &conf, &rules, backend, rollback)?,
        BackendChoice::Firewalld => {
            // firewalld cannot isolate bridges, so rules of the backend nftables isolate them. The
            // records of the zone's sources show whether there was an earlier ADD.
            if conf.policy != Policy::Open {
                write_rules(call, &conf, &rules, Backend::Nftables, rollback)?;
            }
            add_to_zone(zone(call, &conf.zone), &rules, rollback)?
        }
    };
    // The records of the backend must be written before the egress rules. A later ADD without the
    // key `egress` only looks for old egress rules if it finds such a record (`replaced`). Go's DEL
    // removes neither.
    if rules.egress.is_some() || replaced {
        write_egress(rules, rollback)?;
    }
    note_dropping_chains(call, &conf, choice);
    note_inactive_isolation(call, &conf);
    Ok(result)
}

/// Writes the attachment's rules. Pushes their removal onto `rollback` if some may have been
/// written, even on an error. Returns whether there were [earlier records](Written::replaced).
fn write_rules<'a>(
    call: &'a Call<'_>,
    conf: &Conf,
    rules: &ForwardRules,
    backend: Backend,
    rollback: &mut Rollback<'a>,
) -> Result<bool> {
    let mut written = Written::default();
    let outcome = forward(call).ensure(rules, backend, &mut written);
    // Copied, because the undo takes `written`.
    let replaced = written.replaced;
    if written.changed {
        let attachment = rules.attachment.clone();
        rollback.push("remove the rules", move || forward(call).undo(&attachment, &written));
    }
    outcome.map_err(|error| explain_failure(call, error, conf, backend))?;
    Ok(replaced)
}

/// Writes the egress rules, or removes those of an earlier ADD. Pushes their removal onto
/// `rollback` if some may have been written, even on an error.
fn write_egress(rules: ForwardRules, rollback: &mut Rollback<'_>) -> Result<()> {
    let mut changed = false;
    let outcome = egress::ensure(&rules, &mut changed);
    if changed {
        rollback.push("remove the egress rules", move || egress::purge(&rules.attachment));
    }
    outcome.map_err(explain_egress)
}

/// Adds the addresses to the zone. Pushes their removal onto `rollback` if some may have been
/// added, even on an error. Returns whether there were [earlier records](AddedSources::replaced).
fn add_to_zone<'a>(zone: Zone<'a>, rules: &ForwardRules, rollback: &mut Rollback<'a>) -> Result<bool> {
    let mut added = AddedSources::default();
    let (attachment, addresses) = (rules.attachment.clone(), rules.addresses.clone());
    let outcome = zone.add(&attachment, &addresses, &mut added);
    // Copied, because the undo takes `added`.
    let replaced = added.replaced;
    if added.changed {
        rollback.push("remove the sources", move || {
            // On a kernel without nf_tables, the addresses are not recorded.
            zone.purge(AttachmentFilter::one(&attachment), &addresses, &added.foreign).map(drop)
        });
    }
    outcome?;
    Ok(replaced)
}

/// Converts the error of a failure to write rules. The code is 7 if the configured nftables chain
/// does not exist, and 2 if the backend does not work on this host; the text then reports that.
fn explain_failure(call: &Call<'_>, error: cni_linux::Error, conf: &Conf, backend: Backend) -> Error {
    if let Some(chain) = &conf.nftables_admin_chain
        && error.is_not_found()
    {
        return Error::from(error)
            .context(format!("nftablesChain: there is no chain {chain}"))
            .with_code(Code::INVALID_CONFIG);
    }
    // The error of an iptables program does not show whether the backend works at all, so that is
    // tested.
    let is_unusable = || backend == Backend::Iptables && forward(call).probe(backend, None).is_err();
    if error.is_unsupported() || is_unusable() {
        return Error::from(error)
            .context(format!("\"backend\": \"{}\" cannot be used on this host", backend.name()))
            .with_code(Code::UNSUPPORTED_FIELD);
    }
    error.into()
}

/// Prints a note if chains of other nftables tables drop packets that this ADD's rules accept. With
/// the backend iptables, only `cnitool doctor` reports such chains.
fn note_dropping_chains(call: &Call<'_>, conf: &Conf, choice: BackendChoice) {
    let (backend, advice) = match choice {
        // The list would have iptables' own chain FORWARD, whose policy the rules precede.
        BackendChoice::Rules(Backend::Iptables) => return,
        BackendChoice::Rules(Backend::Nftables) => ("backend nftables", "name the chain in \"nftablesChain\""),
        BackendChoice::Firewalld => ("firewalld", "accept the containers' addresses in that chain too"),
    };
    // The rules are written, so a failure to list the chains is not an error of ADD.
    let Ok(mut chains) = list_dropping_chains(conf.nftables_admin_chain.as_ref()) else { return };
    if choice == BackendChoice::Firewalld {
        // A chain in firewalld's own table, `inet firewalld`, drops packets only temporarily, while
        // firewalld reloads.
        chains.retain(|chain| !chain.contains(" firewalld"));
    }
    if !chains.is_empty() {
        call.notes.note(format_args!(
            "firewall: {} drops what it does not accept itself, and {backend} cannot change that from another \
             table: {advice}",
            chains.join(", ")
        ));
    }
}

/// Prints a note if the policy `isolated` has no effect within a bridge, because the kernel does
/// not pass bridged packets to the rules.
fn note_inactive_isolation(call: &Call<'_>, conf: &Conf) {
    let key = "net/bridge/bridge-nf-call-iptables";
    if conf.policy == Policy::Isolated && sysctl::read(key).map_or(true, |value| value != "1") {
        call.notes.note(format_args!(
            "firewall: sysctl {key} is not 1, so containers on one bridge reach each other despite \"isolated\""
        ));
    }
}
