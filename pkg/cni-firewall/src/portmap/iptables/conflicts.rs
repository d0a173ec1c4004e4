//! Searches the tables of iptables in which an ADD makes no rules for those of other containers.

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

impl IptablesPortMap<'_> {
    /// Looks in the tables of `unread` for a living container that has a wanted port. In the tables
    /// before that one, removes rules of dead containers that lead to the container's addresses.
    /// Finds nothing with [`Policy::Ignore`]. In a family without a mapping, iptables-legacy is not
    /// read, because that would cost a process.
    ///
    /// # Errors
    /// If tables cannot be read, or on SIGTERM. If stale rules cannot be removed, or
    /// iptables-legacy cannot be read, only adds a remark.
    pub fn conflicts(&mut self, wanted: &Forwarding, unread: UnreadTables) -> Result<Conflicts> {
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
                // Most containers map no port: their ADD must not cost a process.
                if Some(variant) == variant_of_add || (variant == Variant::Legacy && claims.is_empty()) {
                    continue;
                }
                let name = format!("{}-{variant}", program_name(family));
                let plan = match self.search_table(wanted, (container, &claims), variant, &mut probe) {
                    Ok(plan) => plan,
                    Err(error) if variant == Variant::Legacy && !error.is_terminated() => {
                        conflicts.remarks.push(format!(
                            "{name} has a table nat, but it was not searched for other containers' host ports: {error}"
                        ));
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                conflicts.remarks.extend(plan.remarks.into_iter().map(|remark| format!("{remark} ({name})")));
                if plan.living_holder.is_some() {
                    return Ok(Conflicts { held: plan.living_holder, ..conflicts });
                }
            }
        }
        Ok(conflicts)
    }

    /// Searches the table of one family and variant, and removes the stale rules. Takes the lock
    /// only if there are any.
    fn search_table(
        &mut self,
        wanted: &Forwarding,
        (container, claims): (Cidr, &[ClaimedPort]),
        variant: Variant,
        probe: &mut LivenessProbe,
    ) -> Result<Plan> {
        let family = Family::of(container.address());
        let mut plan_table = |nat: &mut Chains<'_>| {
            // Jumps are found by port numbers, so without a port there are none to find.
            let jumps = if claims.is_empty() { Vec::new() } else { candidate_jumps(nat, wanted, (container, claims))? };
            let mut plan = Plan::new(ConflictAction::Keep);
            plan_displacement(nat, wanted, (container, claims), &jumps, probe, &mut plan)?;
            Ok::<Plan, Error>(plan)
        };
        let mut plan = plan_table(&mut self.iptables.read(family, variant)?)?;
        if plan.living_holder.is_some() || plan.edit.is_empty() {
            return Ok(plan);
        }
        let removed = self.iptables.change(family, variant, |nat| {
            // `change` can plan several times; the last plan is the applied one.
            plan = plan_table(nat)?;
            Ok(if plan.living_holder.is_some() { Edit::new() } else { std::mem::take(&mut plan.edit) })
        });
        match removed {
            Err(error) if error.is_terminated() => return Err(error),
            Err(error) => plan.remarks.push(format!("the stale host port rules were not removed: {error}")),
            Ok(()) => {}
        }
        Ok(plan)
    }
}
