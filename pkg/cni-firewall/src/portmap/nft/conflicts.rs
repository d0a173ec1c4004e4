//! Finds conflicting rules of other containers in nf_tables, for an ADD that writes its own rules
//! with iptables or has no mappings.

use super::super::conflict::{ConflictAction, Conflicts, LivenessProbe};
use super::super::{Forwarding, Policy, conditions};
use super::{ConflictSearch, Identity, NftPortMap, shape};
use crate::nft::Batch;
use crate::retry;
use cni_linux::error::Result;
use cni_linux::route::Family;

impl NftPortMap {
    /// Finds, in both families, the rules of other containers for a wanted port or to the
    /// container's addresses. With [`ConflictAction::Displace`], removes those of dead containers,
    /// unless a living container has a wanted port. Finds nothing with [`Policy::Ignore`].
    pub fn conflicts(&mut self, wanted: &Forwarding, action: ConflictAction) -> Result<Conflicts> {
        if wanted.policy == Policy::Ignore {
            return Ok(Conflicts::default());
        }
        let mut probe = LivenessProbe::default();
        retry(|| self.find_conflicts(wanted, action, &mut probe))
    }

    /// Makes one attempt of [`conflicts`](NftPortMap::conflicts). Fails if another process changes
    /// a rule between the reading and the removal.
    fn find_conflicts(
        &mut self,
        wanted: &Forwarding,
        action: ConflictAction,
        probe: &mut LivenessProbe,
    ) -> Result<Conflicts> {
        let identity = Identity::new(&wanted.attachment);
        let (mut conflicts, mut batch) = (Conflicts::default(), Batch::new());
        batch.only_at(self.nft.wait_for_generation()?);
        for (container, claims) in wanted.families_with_address() {
            let family = Family::of(container.address());
            let state = self.read_conflicting(container, &claims)?;
            // Conditions in the syntax of iptables do not compile here. The conditions of every
            // rule then count as different.
            let conditions = conditions::compile(wanted.conditions(family), family).ok();
            let search =
                ConflictSearch { identity: &identity, container, claims: &claims, conditions: conditions.as_deref() };
            let decision = search.decide(&state, wanted, probe)?;
            if decision.held.is_some() {
                return Ok(Conflicts { held: decision.held, ..conflicts });
            }
            conflicts.found_dead |= !decision.dead_rules.is_empty();
            let table = shape::table(family);
            for (chain, handle) in decision.dead_rules {
                batch.delete_rule(table, chain, handle);
            }
            conflicts.remarks.extend(decision.remarks.into_iter().map(|remark| format!("{remark} (nftables)")));
        }
        if action == ConflictAction::Displace {
            self.nft.commit(batch)?;
        }
        Ok(conflicts)
    }
}
