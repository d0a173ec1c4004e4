//! Finds conflicting rules of other containers in tables that an ADD does not read itself.

use super::super::conflict::{ConflictAction, Conflicts, LivenessProbe};
use super::super::{Forwarding, Policy};
use super::shape::DNAT;
use super::{IptablesPortMap, Plan, candidate_jumps, displace, program_name};
use crate::iptables::{Chains, Edit, Variant};
use cni_linux::error::Result;
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
    /// With [`ConflictAction::Keep`] a failing program of iptables-legacy is only a remark, because
    /// the ADD does not need the program otherwise.
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
        for (container, claims) in wanted.every_family() {
            let family = Family::of(container.address());
            // The variant that the ADD reads itself.
            let skipped_variant = if unread == UnreadTables::Both || claims.is_empty() {
                None
            } else {
                self.iptables.chosen_variant(family)?
            };
            for variant in self.iptables.variants_to_search(family, &[DNAT])? {
                // Most containers map no port: their ADD must not cost a process.
                if Some(variant) == skipped_variant || (variant == Variant::Legacy && claims.is_empty()) {
                    continue;
                }
                let name = format!("{}-{variant}", program_name(family));
                let not_searched = |why: &str| {
                    format!("{name} has a table nat, but it was not searched for other containers' host ports: {why}")
                };
                let is_optional = variant == Variant::Legacy && action == ConflictAction::Keep;
                match self.iptables.can_remove(family, variant) {
                    Ok(true) => {}
                    Ok(false) => {
                        conflicts.remarks.push(not_searched("its programs are not installed"));
                        continue;
                    }
                    Err(error) if is_optional && !error.is_terminated() => {
                        conflicts.remarks.push(not_searched(&error.to_string()));
                        continue;
                    }
                    Err(error) => return Err(error),
                }
                let mut plan_displacement = |nat: &mut Chains<'_>| {
                    // Jumps are found by port numbers, so without a port there are none to find.
                    let jumps = if claims.is_empty() { Vec::new() } else { candidate_jumps(nat, wanted, &claims)? };
                    let mut plan = Plan::default();
                    displace(nat, wanted, (container, &claims), &jumps, (&mut probe, &mut plan))?;
                    Ok(plan)
                };
                let plan = match action {
                    ConflictAction::Keep => match self.iptables.read(family, variant) {
                        Ok(mut nat) => plan_displacement(&mut nat)?,
                        Err(error) if is_optional && !error.is_terminated() => {
                            conflicts.remarks.push(not_searched(&error.to_string()));
                            continue;
                        }
                        Err(error) => return Err(error),
                    },
                    ConflictAction::Displace => {
                        let mut last_plan = Plan::default();
                        self.iptables.change(family, variant, |nat| {
                            last_plan = plan_displacement(nat)?;
                            Ok(if last_plan.held.is_some() { Edit::new() } else { last_plan.edit.clone() })
                        })?;
                        last_plan
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
}
