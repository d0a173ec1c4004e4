//! Maps host ports with iptables of either variant, with at most two processes for each family and
//! attempt. A change is attempted again if another program has disturbed it.
//!
//! The rules are those of `shape`; [`crate::iptables`] locks, reads and writes, and repeats
//! attempts. Rules of an attachment are replaced only where they differ, so an ADD that finds
//! everything in place writes nothing. Exception: jumps to the container's chain that have
//! conditions are always replaced.
//!
//! The container's chain is emptied only if all rules in it belong to the attachment: another
//! interface of the container may have rules there, written by these plugins or by Go's. The chains
//! and rules that all containers share are never removed, except duplicates of these rules.

use cni::Cidr;
use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;

use super::conflict::{ConflictAction, LivenessProbe};
use super::{ClaimedPort, EnsureOutcome, Forwarding, Holder, Policy, SetMark, Snat, older_mapping_remark};
use crate::iptables::{Chains, Edit, Iptables, JumpSearch, Part, Purpose, Rule, Table, Variant};
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

mod check;
mod conflicts;
mod others;
mod removal;
pub(crate) mod shape;
#[cfg(test)]
mod tests;

pub use conflicts::UnreadTables;
use others::plan_displacement;
use removal::{can_match_any, delete_section};
use shape::{DNAT, MASQ, SETMARK, Section};

/// Host ports in the tables `nat` of the calling thread's network namespace.
#[derive(Debug)]
pub struct IptablesPortMap<'m> {
    iptables: Iptables<'m>,
}

/// The changes for one family.
#[derive(Debug)]
struct Plan {
    edit: Edit,
    /// Remarks for the operator.
    remarks: Vec<String>,
    /// A living container that has a wanted port. If there is one, the edit must not be applied.
    living_holder: Option<Holder>,
    /// What happens to a dead container's rules for a wanted port.
    conflict_action: ConflictAction,
}

impl Plan {
    /// Returns a plan without changes.
    fn new(conflict_action: ConflictAction) -> Plan {
        Plan { edit: Edit::new(), remarks: Vec::new(), living_holder: None, conflict_action }
    }
}

/// A family in which an ADD maps ports.
struct MappedFamily {
    family: Family,
    /// The variant in which the rules are made.
    variant: Variant,
    /// The container's address.
    container: Cidr,
    /// The claims of this address.
    claims: Vec<ClaimedPort>,
    /// The remarks of the last plan: a family can be planned several times.
    remarks: Vec<String>,
}

impl<'m> IptablesPortMap<'m> {
    /// Opens a connection in the calling thread's network namespace. `notes` and `on_sigterm` are
    /// those of [`Iptables::open`].
    pub fn open(machine: &'m dyn Machine, notes: Notes, on_sigterm: OnSigterm) -> Result<IptablesPortMap<'m>> {
        Ok(IptablesPortMap { iptables: Iptables::open(Table::Nat, machine, notes, on_sigterm)? })
    }

    /// Maps ports with `iptables`, which must be the table `nat`.
    pub fn new(iptables: Iptables<'m>) -> IptablesPortMap<'m> {
        IptablesPortMap { iptables }
    }

    /// Writes the rules of `wanted`: IPv4, then IPv6. Both families are checked for living holders
    /// of the ports before either is changed. Sets `changed` to true if rules may have been
    /// changed, even on an error or with a living holder: the caller then owes a
    /// [`purge`](IptablesPortMap::purge) if its ADD fails.
    ///
    /// # Errors
    /// If the host's links cannot be read, if rules cannot be written over netlink and iptables is
    /// not installed, or if a change fails.
    pub fn ensure(&mut self, wanted: &Forwarding, changed: &mut bool) -> Result<EnsureOutcome> {
        let mut probe = LivenessProbe::default();
        let host_link = probe.find_host_link(&wanted.attachment)?;
        let mut mapped_families = Vec::new();
        for (container, claims) in wanted.families() {
            let family = Family::of(container.address());
            let variant = self.variant_for_new_rules(family)?;
            mapped_families.push(MappedFamily { family, variant, container, claims, remarks: Vec::new() });
        }
        let holder = self.change_families(&mut mapped_families, wanted, host_link.as_deref(), &mut probe, changed)?;
        if let Some(holder) = holder {
            return Ok(EnsureOutcome::Held(holder));
        }
        let mut remarks: Vec<String> = mapped_families.into_iter().flat_map(|mapped| mapped.remarks).collect();
        self.ensure_empty_chains(wanted, host_link.as_deref(), changed, &mut remarks)?;
        Ok(EnsureOutcome::Done { remarks })
    }

    /// Makes the changes in all `mapped_families`. If a living container has a wanted port, stops
    /// and returns that container: it can have taken the port after the first family was changed.
    /// Sets `changed` as [`ensure`](IptablesPortMap::ensure) does.
    fn change_families(
        &mut self,
        mapped_families: &mut [MappedFamily],
        wanted: &Forwarding,
        host_link: Option<&str>,
        probe: &mut LivenessProbe,
        changed: &mut bool,
    ) -> Result<Option<Holder>> {
        let families: Vec<(Family, Variant)> =
            mapped_families.iter().map(|mapped| (mapped.family, mapped.variant)).collect();
        let mut living_holder = None;
        let plan = |nat: &mut Chains<'_>| {
            let family = nat.family();
            // Always found: `families` was made from `mapped_families`.
            let Some(mapped) = mapped_families.iter_mut().find(|mapped| mapped.family == family) else {
                return Ok(Some(Edit::new()));
            };
            let plan = plan_family(nat, wanted, (mapped.container, &mapped.claims), host_link, probe)?;
            if plan.living_holder.is_some() {
                living_holder = plan.living_holder;
                // `None` ends the change of both families.
                return Ok(None);
            }
            mapped.remarks = plan.remarks;
            Ok(Some(plan.edit))
        };
        self.iptables.change_all(&families, plan, changed)?;
        Ok(living_holder)
    }

    /// Creates the container's chain, without a mapping, and the rules that jump to the chain, in
    /// each family in which the container has an address but no port is mapped. Only the CHECK of
    /// Go's plugin needs these rules, so a failure to write them only adds a remark, and a family
    /// in which rules cannot be written is skipped.
    ///
    /// # Errors
    /// SIGTERM, a deadline, or a failure to find the variant of iptables.
    fn ensure_empty_chains(
        &mut self,
        wanted: &Forwarding,
        host_link: Option<&str>,
        changed: &mut bool,
        remarks: &mut Vec<String>,
    ) -> Result<()> {
        for (container, claims) in wanted.families_with_address() {
            if !claims.is_empty() {
                continue;
            }
            let family = Family::of(container.address());
            let Some(variant) = self.iptables.variant_for_new_rules(family)? else { continue };
            let mut probe = LivenessProbe::default();
            // The closure can run several times. The remarks are those of its last run.
            let mut last_remarks = Vec::new();
            let plan = |nat: &mut Chains<'_>| {
                // Without a claim there is no living holder, so the plan is complete.
                let plan = plan_family(nat, wanted, (container, &[]), host_link, &mut probe)?;
                last_remarks = plan.remarks;
                Ok(Some(plan.edit))
            };
            let result = self.iptables.change_all(&[(family, variant)], plan, changed);
            remarks.append(&mut last_remarks);
            match result {
                Err(error) if error.is_terminated() || error.is_deadline() => return Err(error),
                Err(error) => remarks.push(format!(
                    "failed to create the empty portmap chain in {}, which only the CHECK of Go's portmap needs: {error}",
                    program_name(family)
                )),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Returns the variant in which new rules are made. Fails if no variant can be used.
    fn variant_for_new_rules(&mut self, family: Family) -> Result<Variant> {
        self.iptables.variant_for_new_rules(family)?.ok_or_else(|| {
            let cause = Cause::text("it is neither in PATH nor in /usr/sbin");
            Error::new(format_args!("failed to find {}-restore", program_name(family)), cause)
        })
    }
}

/// Returns the name of this family's iptables, for messages.
fn program_name(family: Family) -> &'static str {
    match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    }
}

/// Plans all changes for one family: the removal of dead containers' rules, the shared rules, and
/// the container's own. `host_link` is the result of [`LivenessProbe::find_host_link`]. If a living
/// container has a wanted port, the plan is incomplete and must not be applied.
fn plan_family(
    nat: &mut Chains<'_>,
    wanted: &Forwarding,
    (container, claims): (Cidr, &[ClaimedPort]),
    host_link: Option<&str>,
    probe: &mut LivenessProbe,
) -> Result<Plan> {
    let mut plan = Plan::new(ConflictAction::Displace);
    let candidate_jumps = candidate_jumps(nat, wanted, (container, claims))?;
    if wanted.policy == Policy::RefuseIfAlive {
        plan_displacement(nat, wanted, (container, claims), &candidate_jumps, probe, &mut plan)?;
        if plan.living_holder.is_some() {
            return Ok(plan);
        }
    }
    plan_shared_rules(nat, wanted, &mut plan.edit)?;
    plan_own_rules(nat, wanted, (container, claims), &candidate_jumps, host_link, &mut plan)?;
    Ok(plan)
}

/// Whether a section of the container's chain belongs to this attachment: its marker names the
/// attachment, or it has no marker (Go's plugin made it) and all its mappings lead to the
/// container's addresses. True for the empty section of an empty chain, so that undoing an ADD also
/// removes an empty chain.
fn is_own(section: &Section, wanted: &Forwarding) -> bool {
    match section.alias() {
        Some(alias) => alias == wanted.attachment.alias(),
        None => section
            .mappings
            .iter()
            .all(|mapping| mapping.claim.is_some_and(|claim| wanted.is_container(claim.container.ip()))),
    }
}

/// Returns the rules that all containers share, each after the name of its chain.
fn shared_rules(wanted: &Forwarding) -> Vec<(&'static str, shape::RuleWords)> {
    let mut rules = Vec::new();
    if let SetMark::Bit(bit) = &wanted.set_mark
        && wanted.snat != Snat::No
    {
        rules.push((SETMARK, shape::set_mark_rule(*bit)));
        rules.push((MASQ, shape::masquerade_rule(*bit)));
        rules.push(("POSTROUTING", shape::masquerade_entry_rule()));
    }
    rules.push(("PREROUTING", shape::entry_rule()));
    rules.push(("OUTPUT", shape::entry_rule()));
    rules
}

/// Returns the rules of a shared chain with these words: more than one if there are duplicates.
fn find_shared_rule(nat: &mut Chains<'_>, chain: &str, words: &[String]) -> Result<Vec<Rule>> {
    // The target is the last word, or MARK before its option.
    let target = words.iter().skip_while(|word| *word != "-j").nth(1).map_or("", String::as_str);
    // POSTROUTING can be long.
    nat.has_chain(chain)?;
    nat.find_rules(chain, &[Part::Target(target)], Purpose::Read, |rule| rule.matches(words))
}

/// Plans the shared chains and rules that are missing, and the removal of duplicates.
fn plan_shared_rules(nat: &mut Chains<'_>, wanted: &Forwarding, edit: &mut Edit) -> Result<()> {
    let rules = shared_rules(wanted);
    for chain in [SETMARK, MASQ, DNAT] {
        let is_used = chain == DNAT || rules.iter().any(|(name, _)| *name == chain);
        if is_used && !nat.has_chain(chain)? {
            edit.create_chain(chain);
        }
    }
    for (chain, words) in rules {
        let existing = find_shared_rule(nat, chain, &words)?;
        if !existing.is_empty() {
            for duplicate in &existing[1..] {
                edit.delete(chain, duplicate);
            }
        } else if chain == "POSTROUTING" {
            // At the beginning, as Go inserts it: an earlier rule of another program might accept
            // the packets.
            edit.insert(chain, words);
        } else {
            edit.append(chain, words);
        }
    }
    Ok(())
}

/// Plans the rules in the container's own chain and the jumps to it, where they differ from the
/// existing ones. Jumps with conditions are always replaced. `candidate_jumps` contains all rules
/// of [`DNAT`] that jump to the container's chain.
fn plan_own_rules(
    nat: &mut Chains<'_>,
    wanted: &Forwarding,
    (container, claims): (Cidr, &[ClaimedPort]),
    candidate_jumps: &[Rule],
    host_link: Option<&str>,
    plan: &mut Plan,
) -> Result<()> {
    let chain = shape::chain_name(&wanted.attachment);
    let mut new_rules = vec![shape::marker_rule(&wanted.attachment, host_link)];
    new_rules.extend(claims.iter().flat_map(|claim| shape::mapping_rules(wanted, container, claim)));
    let sections = shape::sections(nat.rules(&chain)?);
    let (own, others): (Vec<&Section>, Vec<&Section>) = sections.iter().partition(|section| is_own(section, wanted));
    let claims_of_others: Vec<ClaimedPort> = others.iter().flat_map(|section| section.claims()).collect();
    let own_rules: Vec<&Rule> = own.iter().flat_map(|section| section.rules()).collect();
    let is_in_place =
        own_rules.len() == new_rules.len() && own_rules.iter().zip(&new_rules).all(|(rule, words)| rule.matches(words));
    if !is_in_place {
        if others.is_empty() {
            plan.edit.replace_chain(&chain);
        } else {
            for section in own {
                delete_section(&mut plan.edit, &chain, section, &claims_of_others);
            }
        }
        for words in new_rules {
            plan.edit.append(&chain, words);
        }
    }
    // The chain can still have rules of Go's plugin that map the ports to another address of the
    // container. They precede the new rules.
    if wanted.policy == Policy::RefuseIfAlive {
        let claims_of_go =
            others.iter().filter(|section| section.marker.is_none()).flat_map(|section| section.claims());
        for older in claims_of_go {
            if claims.iter().any(|claim| claim.overlaps(&older)) {
                plan.remarks.push(older_mapping_remark(&older));
            }
        }
    }
    let jumps: Vec<&Rule> = candidate_jumps.iter().filter(|rule| rule.target() == Some(&chain)).collect();
    let conditions = wanted.conditions(Family::of(container.address()));
    plan_jumps(wanted, conditions, &jumps, &claims_of_others, &mut plan.edit);
    Ok(())
}

/// Plans the jumps to the container's chain: adds those that are not among `existing`, and removes
/// those that are neither wanted nor needed by `claims_of_others`, the claims of other attachments
/// in the chain.
fn plan_jumps(
    wanted: &Forwarding,
    conditions: &[String],
    existing: &[&Rule],
    claims_of_others: &[ClaimedPort],
    edit: &mut Edit,
) {
    let mut unmatched: Vec<&Rule> = existing.to_vec();
    for words in shape::jump_rules(wanted, conditions) {
        // Conditions cannot be compared, because the kernel can return them in a form that differs
        // from the configuration: a jump with conditions is always replaced.
        let position =
            if conditions.is_empty() { unmatched.iter().position(|jump| jump.matches(&words)) } else { None };
        match position {
            // Removes one jump only: duplicates of a wanted jump stay in the list.
            Some(position) => {
                unmatched.remove(position);
            }
            None => edit.append(DNAT, words),
        }
    }
    for jump in unmatched {
        if !can_match_any(jump, claims_of_others) {
            edit.delete(DNAT, jump);
        }
    }
}

/// Returns the rules of [`DNAT`] for a claimed port and those that jump to the container's chain.
/// The result can contain some other rules too.
fn candidate_jumps(
    nat: &mut Chains<'_>,
    wanted: &Forwarding,
    (container, claims): (Cidr, &[ClaimedPort]),
) -> Result<Vec<Rule>> {
    let ports: Vec<u16> = claims.iter().map(|claim| claim.host_port).collect();
    let chain = shape::chain_name(&wanted.attachment);
    let search = JumpSearch { ports: &ports, target: &chain, address: Some(container.address()) };
    nat.find_jumps(DNAT, search, shape::JUMP_KEYS)
}

/// Returns the rules of [`DNAT`] that jump to `chain`. Reads [`DNAT`] only once, because rules are
/// only appended to it.
fn jumps_to(nat: &mut Chains<'_>, chain: &str) -> Result<Vec<Rule>> {
    let search = JumpSearch { ports: &[], target: chain, address: None };
    let mut jumps = nat.find_jumps(DNAT, search, shape::JUMP_KEYS)?;
    jumps.retain(|rule| rule.target() == Some(chain));
    Ok(jumps)
}
