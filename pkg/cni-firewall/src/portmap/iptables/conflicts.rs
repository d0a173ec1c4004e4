//! Finds rules here that concern an ADD with another backend or one without mappings.

use super::super::conflict::{ConflictAction, Conflicts, LivenessProbe};
use super::super::{Forwarding, Policy};
use super::shape::DNAT;
use super::{IptablesPortMap, Plan, displace, ways};
use crate::iptables::{Chains, Edit, Variant};
use cni_linux::error::Result;
use cni_linux::route::Family;

/// Which tables an ADD has not looked at itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnreadTables {
    /// The tables of both variants: the ADD uses nf_tables.
    Both,
    /// The tables of the variant in which the ADD makes no rules.
    OtherVariant,
}

impl IptablesPortMap<'_> {
    /// Judges the holders of the wanted ports, and the rules to the container's addresses, in
    /// tables that the ADD itself does not read, in all families. Runs one `iptables-legacy-save`
    /// for each family that has a legacy table; to displace a dead container's rules, another one
    /// and a restore. If a legacy program fails, an ADD that only reads logs that. Where nothing is
    /// mapped iptables-legacy is not read.
    pub fn conflicts(&mut self, wanted: &Forwarding, unread: UnreadTables, then: ConflictAction) -> Result<Conflicts> {
        let (mut conflicts, mut judge) = (Conflicts::default(), LivenessProbe::default());
        if wanted.policy == Policy::Ignore {
            return Ok(conflicts);
        }
        for (container, claims) in wanted.every_family() {
            let family = Family::of(container.address());
            let is_unread = unread == UnreadTables::Both || claims.is_empty();
            let seen = if is_unread { None } else { self.iptables.chosen_variant(family)? };
            for variant in self.iptables.variants_to_search(family, &[DNAT])? {
                // Most containers map no port: they must not cost a process.
                if Some(variant) == seen || (variant == Variant::Legacy && claims.is_empty()) {
                    continue;
                }
                let name = if family == Family::V4 { "iptables" } else { "ip6tables" };
                let unknown = |why: &str| {
                    format!("{name}-{variant} has a table nat, but {why}: who has ports in it is not known")
                };
                // A program of the older iptables that this ADD does not otherwise need must not be
                // what it fails by.
                let is_optional = variant == Variant::Legacy && then == ConflictAction::Keep;
                match self.iptables.can_remove(family, variant) {
                    Ok(true) => {}
                    Ok(false) => {
                        conflicts.remarks.push(unknown("its programs are not there"));
                        continue;
                    }
                    Err(error) if is_optional && !error.is_terminated() => {
                        conflicts.remarks.push(unknown(&error.to_string()));
                        continue;
                    }
                    Err(error) => return Err(error),
                }
                let mut judged = |nat: &mut Chains<'_>| {
                    // Without a port there is nothing to read by its number.
                    let ways = if claims.is_empty() { Vec::new() } else { ways(nat, wanted, &claims)? };
                    let mut plan = Plan::default();
                    displace(nat, wanted, (container, &claims), &ways, (&mut judge, &mut plan))?;
                    Ok(plan)
                };
                let plan = match then {
                    ConflictAction::Keep => match self.iptables.read(family, variant) {
                        Ok(mut nat) => judged(&mut nat)?,
                        Err(error) if is_optional && !error.is_terminated() => {
                            conflicts.remarks.push(unknown(&error.to_string()));
                            continue;
                        }
                        Err(error) => return Err(error),
                    },
                    ConflictAction::Displace => {
                        let mut last = Plan::default();
                        self.iptables.change(family, variant, |nat| {
                            last = judged(nat)?;
                            Ok(if last.held.is_some() { Edit::new() } else { last.edit.clone() })
                        })?;
                        last
                    }
                };
                conflicts.found_dead |= !plan.edit.is_empty();
                conflicts.remarks.extend(plan.remarks.into_iter().map(|remark| format!("{remark} ({name}-{variant})")));
                if plan.held.is_some() {
                    return Ok(Conflicts { held: plan.held, ..conflicts });
                }
            }
        }
        Ok(conflicts)
    }
}
