//! Finds conflicting rules of other containers in nf_tables, for an ADD that makes its own rules
//! with iptables or has no mappings.

use super::super::conflict::{ConflictAction, Conflicts, LivenessProbe};
use super::super::{Forwarding, Policy, conditions};
use super::{ConflictSearch, Identity, NftPortMap, shape};
use crate::nft::{Batch, raced};
use crate::retry;
use cni_linux::error::Result;
use cni_linux::route::Family;

impl NftPortMap {
    /// Looks, in both families, for a living container that has a wanted port. If there is none,
    /// removes the rules of dead containers that lead to the container's addresses; a failure to do
    /// so is only a remark. Finds nothing with [`Policy::Ignore`].
    ///
    /// # Errors
    /// The rules or the host's links cannot be read.
    pub fn conflicts(&mut self, wanted: &Forwarding) -> Result<Conflicts> {
        if wanted.policy == Policy::Ignore {
            return Ok(Conflicts::default());
        }
        let mut probe = LivenessProbe::default();
        retry(|| self.find_conflicts(wanted, &mut probe))
    }

    /// Makes one attempt of [`conflicts`](NftPortMap::conflicts). Fails if another process changes
    /// a rule between the reading and the removal.
    fn find_conflicts(&mut self, wanted: &Forwarding, probe: &mut LivenessProbe) -> Result<Conflicts> {
        let identity = Identity::new(&wanted.attachment);
        let (mut conflicts, mut batch) = (Conflicts::default(), Batch::new());
        batch.only_at(self.nft.wait_for_generation()?);
        for (container, claims) in wanted.families_with_address() {
            let family = Family::of(container.address());
            let state = self.read_conflicting(container, &claims)?;
            // Conditions in the syntax of iptables do not compile here. The conditions of every
            // rule then count as different.
            let conditions = conditions::compile(wanted.conditions(family), family).ok();
            let (conditions, action) = (conditions.as_deref(), ConflictAction::Keep);
            let search = ConflictSearch { identity: &identity, container, claims: &claims, conditions, action };
            let decision = search.decide(&state, wanted, probe)?;
            if decision.held.is_some() {
                return Ok(Conflicts { held: decision.held, ..conflicts });
            }
            let table = shape::table(family);
            for (chain, handle) in decision.dead_rules {
                batch.delete_rule(table, chain, handle);
            }
            conflicts.remarks.extend(decision.remarks.into_iter().map(|remark| format!("{remark} (nftables)")));
        }
        if !batch.is_empty()
            && let Err(error) = self.nft.commit(batch)
        {
            if raced(&error) {
                return Err(error);
            }
            conflicts.remarks.push(format!("failed to remove stale host port rules from nftables: {error}"));
        }
        Ok(conflicts)
    }
}
