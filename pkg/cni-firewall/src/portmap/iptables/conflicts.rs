//! Finds conflicting rules of other containers in tables that an ADD does not read itself.

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
    /// The tables of both variants: the ADD uses nf_tables.
    Both,
    /// The tables of the variant in which the ADD makes no rules.
    OtherVariant,
}

impl IptablesPortMap<'_> {
    /// Returns the living holder of a wanted port, if there is one, and whether there are rules of
    /// dead containers for the ports or to the container's addresses, in the tables of `unread`.
    /// With [`ConflictAction::Displace`] also removes the dead containers' rules. Finds nothing
    /// with [`Policy::Ignore`]. In a family without a mapping, iptables-legacy is not read, because
    /// that would cost a process.
    ///
    /// # Errors
    /// If tables cannot be read or changed. With [`ConflictAction::Keep`] a failing program of
    /// iptables-legacy is only a remark, because the ADD does not need the program otherwise.
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
            // The variant that the ADD reads itself; none in a family without a mapping.
            let skipped_variant = match unread {
                UnreadTables::OtherVariant if !claims.is_empty() => self.iptables.chosen_variant(family)?,
                UnreadTables::OtherVariant | UnreadTables::Both => None,
            };
            for variant in self.iptables.variants_to_search(family, &[DNAT])? {
                // Most containers map no port: their ADD must not cost a process.
                if Some(variant) == skipped_variant || (variant == Variant::Legacy && claims.is_empty()) {
                    continue;
                }
                let name = format!("{}-{variant}", program_name(family));
                let plan = match self.search_table(wanted, (container, &claims), variant, action, &mut probe)? {
                    Ok(plan) => plan,
                    Err(why) => {
                        conflicts.remarks.push(format!(
                            "{name} has a table nat, but it was not searched for other containers' host ports: {why}"
                        ));
                        continue;
                    }
                };
                conflicts.found_dead |= !plan.edit.is_empty();
                conflicts.remarks.extend(plan.remarks.into_iter().map(|remark| format!("{remark} ({name})")));
                if plan.held.is_some() {
                    return Ok(Conflicts { held: plan.held, ..conflicts });
                }
            }
        }
        Ok(conflicts)
    }

    /// Finds the conflicts in the table of one family and variant, and with
    /// [`ConflictAction::Displace`] removes the rules of dead containers. Returns the plan of the
    /// removal, which names the living holder of a wanted port, if there is one. An inner `Err` is
    /// the reason why the table was not searched, where the ADD can go on without that.
    fn search_table(
        &mut self,
        wanted: &Forwarding,
        (container, claims): (Cidr, &[ClaimedPort]),
        variant: Variant,
        action: ConflictAction,
        probe: &mut LivenessProbe,
    ) -> Result<Result<Plan, String>> {
        let family = Family::of(container.address());
        let is_optional = variant == Variant::Legacy && action == ConflictAction::Keep;
        let not_searched = |error: Error| {
            if is_optional && !error.is_terminated() { Ok(Err(error.to_string())) } else { Err(error) }
        };
        match self.iptables.can_remove(family, variant) {
            Ok(true) => {}
            Ok(false) => return Ok(Err("its programs are not installed".to_owned())),
            Err(error) => return not_searched(error),
        }
        let mut plan_for_table = |nat: &mut Chains<'_>| {
            // Jumps are found by port numbers, so without a port there are none to find.
            let jumps = if claims.is_empty() { Vec::new() } else { candidate_jumps(nat, wanted, claims)? };
            let mut plan = Plan::default();
            plan_displacement(nat, wanted, (container, claims), &jumps, (&mut *probe, &mut plan))?;
            Ok(plan)
        };
        match action {
            ConflictAction::Keep => match self.iptables.read(family, variant) {
                Ok(mut nat) => plan_for_table(&mut nat).map(Ok),
                Err(error) => not_searched(error),
            },
            ConflictAction::Displace => {
                // `change` can plan several times; the last plan is the applied one.
                let mut last_plan = Plan::default();
                self.iptables.change(family, variant, |nat| {
                    last_plan = plan_for_table(nat)?;
                    Ok(if last_plan.held.is_some() { Edit::new() } else { last_plan.edit.clone() })
                })?;
                Ok(Ok(last_plan))
            }
        }
    }
}
