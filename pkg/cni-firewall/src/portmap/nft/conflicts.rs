//! Finds rules here that concern an ADD with iptables or one without mappings.

use super::super::conflict::{ConflictAction, Conflicts, LivenessProbe};
use super::super::{Forwarding, Policy, conditions};
use super::{Identity, NftPortMap, Others, repeat, shape};
use crate::nft::Batch;
use cni_linux::error::Result;
use cni_linux::route::Family;

impl NftPortMap {
    /// Judges the holders of the wanted ports and the rules to the container's addresses, in both
    /// families. Without nf_tables in the kernel there are none.
    pub fn conflicts(&mut self, wanted: &Forwarding, then: ConflictAction) -> Result<Conflicts> {
        if wanted.policy == Policy::Ignore {
            return Ok(Conflicts::default());
        }
        let mut judge = LivenessProbe::default();
        match repeat(|| self.judge_rivals(wanted, then, &mut judge)) {
            Err(error) if error.is_unsupported() => Ok(Conflicts::default()),
            conflicts => conflicts,
        }
    }

    fn judge_rivals(
        &mut self,
        wanted: &Forwarding,
        then: ConflictAction,
        judge: &mut LivenessProbe,
    ) -> Result<Conflicts> {
        let (identity, mut conflicts, mut batch) =
            (Identity::new(&wanted.attachment), Conflicts::default(), Batch::new());
        batch.only_at(self.nft.wait_for_generation()?);
        for (container, claims) in wanted.every_family() {
            let family = Family::of(container.address());
            let state = self.suspects(container, &claims)?;
            // Conditions in the words of iptables are of no use here; without any, both sides can
            // be compared.
            let plain = conditions::compile(wanted.conditions(family), family).ok();
            let others = Others { identity: &identity, container, claims: &claims, plain: plain.as_deref() };
            let judged = others.judge(&state, wanted, judge)?;
            if judged.held.is_some() {
                return Ok(Conflicts { held: judged.held, ..conflicts });
            }
            conflicts.found_dead |= !judged.displaced.is_empty();
            let table = shape::table(family);
            judged.displaced.iter().for_each(|(chain, handle)| batch.delete_rule(table, chain, *handle));
            conflicts.remarks.extend(judged.remarks.into_iter().map(|remark| format!("{remark} (nftables)")));
        }
        if then == ConflictAction::Displace {
            self.nft.commit(batch)?;
        }
        Ok(conflicts)
    }
}
