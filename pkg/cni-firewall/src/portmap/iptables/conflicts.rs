//! Searches tables that an ADD does not read itself for conflicting rules of other containers.

use super::super::conflict::{ConflictAction, Conflicts, LivenessProbe};
use super::super::{ClaimedPort, Forwarding, Policy};
use super::shape::DNAT;
use super::{IptablesPortMap, Plan, candidate_jumps, plan_displacement, program_name};
use crate::iptables::{Chains, Edit, Variant};
use cni::Cidr;
use cni_linux::error::{Error, Result};
use cni_linux::route::Family;

/// The tables that an ADD does not read itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnreadTables {
    /// The tables of both variants: the ADD uses the nftables backend.
    Both,
    /// The tables of the variant in which the ADD makes no rules.
    OtherVariant,
}

/// The outcome of a search for conflicts in one table.
enum SearchOutcome {
    /// The table was searched. The plan has the removals of dead containers' rules and, if there is
    /// one, the living holder of a wanted port.
    Searched(Box<Plan>),
    /// The table was not searched, for this reason. The ADD can continue without the search.
    Skipped(String),
}

impl IptablesPortMap<'_> {
    /// Searches the tables of `unread` for a living container that has a wanted port, and for rules
    /// of dead containers that are for a wanted port or lead to the container's addresses. With
    /// [`ConflictAction::Displace`] also removes the dead containers' rules. Finds nothing with
    /// [`Policy::Ignore`]. In a family without a mapping, iptables-legacy is not read, because that
    /// would cost a process.
    ///
    /// # Errors
    /// If tables cannot be read or changed, or on SIGTERM. If programs of iptables-legacy are not
    /// installed, only adds a remark; with [`ConflictAction::Keep`], also if they fail.
    pub fn conflicts(
        &mut self,
        wanted: &Forwarding,
        unread: UnreadTables,
        action: ConflictAction,
    ) -> Result<Conflicts> {
        let (mut conflicts, mut probe) = (Conflicts::default(), LivenessProbe::default());
        if wanted.policy == Policy::Ignore {
            return Ok(conflicts);
        }
        for (container, claims) in wanted.families_with_address() {
            let family = Family::of(container.address());
            // An ADD searches a variant itself only if it maps ports.
            let variant_of_add = match unread {
                UnreadTables::OtherVariant if !claims.is_empty() => self.iptables.chosen_variant(family)?,
                UnreadTables::OtherVariant | UnreadTables::Both => None,
            };
            for variant in self.iptables.variants_to_search(family, &[DNAT])? {
                if Some(variant) == variant_of_add {
                    continue;
                }
                // Most containers map no port: their ADD must not cost a process.
                if variant == Variant::Legacy && claims.is_empty() {
                    continue;
                }
                let name = format!("{}-{variant}", program_name(family));
                let plan = match self.search_table(wanted, (container, &claims), variant, action, &mut probe)? {
                    SearchOutcome::Searched(plan) => plan,
                    SearchOutcome::Skipped(why) => {
                        conflicts.remarks.push(format!(
                            "{name} has a table nat, but it was not searched for other containers' host ports: {why}"
                        ));
                        continue;
                    }
                };
                conflicts.found_dead |= !plan.edit.is_empty();
                conflicts.remarks.extend(plan.remarks.into_iter().map(|remark| format!("{remark} ({name})")));
                if plan.living_holder.is_some() {
                    return Ok(Conflicts { held: plan.living_holder, ..conflicts });
                }
            }
        }
        Ok(conflicts)
    }

    /// Searches the table of one family and variant for conflicts. With
    /// [`ConflictAction::Displace`] also removes the rules of dead containers, unless a living
    /// container has a wanted port.
    fn search_table(
        &mut self,
        wanted: &Forwarding,
        (container, claims): (Cidr, &[ClaimedPort]),
        variant: Variant,
        action: ConflictAction,
        probe: &mut LivenessProbe,
    ) -> Result<SearchOutcome> {
        let family = Family::of(container.address());
        // With `Keep`, the ADD runs the programs of iptables-legacy only for this search.
        let is_optional = variant == Variant::Legacy && action == ConflictAction::Keep;
        let skip_if_optional = |error: Error| {
            if is_optional && !error.is_terminated() {
                Ok(SearchOutcome::Skipped(error.to_string()))
            } else {
                Err(error)
            }
        };
        match self.iptables.can_remove(family, variant) {
            Ok(true) => {}
            Ok(false) => return Ok(SearchOutcome::Skipped("its programs are not installed".to_owned())),
            Err(error) => return skip_if_optional(error),
        }
        let mut plan_for_table = |nat: &mut Chains<'_>| {
            // Jumps are found by port numbers, so without a port there are none to find.
            let jumps = if claims.is_empty() { Vec::new() } else { candidate_jumps(nat, wanted, claims)? };
            let mut plan = Plan::default();
            plan_displacement(nat, wanted, (container, claims), &jumps, probe, &mut plan)?;
            Ok(plan)
        };
        match action {
            ConflictAction::Keep => match self.iptables.read(family, variant) {
                Ok(mut nat) => Ok(SearchOutcome::Searched(Box::new(plan_for_table(&mut nat)?))),
                Err(error) => skip_if_optional(error),
            },
            ConflictAction::Displace => {
                // `change` can plan several times; the last plan is the applied one.
                let mut last_plan = Plan::default();
                self.iptables.change(family, variant, |nat| {
                    last_plan = plan_for_table(nat)?;
                    Ok(if last_plan.living_holder.is_some() { Edit::new() } else { last_plan.edit.clone() })
                })?;
                Ok(SearchOutcome::Searched(Box::new(last_plan)))
            }
        }
    }
}
