//! Whether an ADD with iptables wants a port that somebody has here.

use super::super::conflict::{Fate, Judge, Rivals, Then};
use super::super::{Forwarding, Policy, conditions};
use super::shape::{self, HOSTIP_HOSTPORTS, HOSTPORTS};
use super::{Identity, NftPortMap, State, collisions, repeat};
use crate::error::Result;
use crate::firewall::nft::Batch;
use crate::route::Family;

impl NftPortMap {
    /// Judges who has a wanted port, in both families. A kernel without nf_tables has nobody.
    pub fn rivals(&mut self, wanted: &Forwarding, then: Then) -> Result<Rivals> {
        if wanted.policy == Policy::Ignore {
            return Ok(Rivals::default());
        }
        let mut judge = Judge::default();
        match repeat(|| self.judge_rivals(wanted, then, &mut judge)) {
            Err(error) if error.is_unsupported() => Ok(Rivals::default()),
            rivals => rivals,
        }
    }

    fn judge_rivals(&mut self, wanted: &Forwarding, then: Then, judge: &mut Judge) -> Result<Rivals> {
        let (identity, mut rivals, mut batch) = (Identity::new(&wanted.mark), Rivals::default(), Batch::new());
        batch.only_at(self.nft.settle()?);
        for (container, claims) in wanted.families() {
            let family = Family::of(container.address());
            let table = shape::table(family);
            let mut state = State { family, missing: Vec::new(), gaps: Vec::new(), rules: Vec::new() };
            for chain in [HOSTPORTS, HOSTIP_HOSTPORTS] {
                let is_about = |rule: &[u8]| shape::names_port(rule, &claims);
                state.rules.push((chain, self.nft.rules_where(table, chain, is_about)?));
            }
            // Conditions in the words of iptables are of no use here; without any, both sides can be compared.
            let plain = conditions::compile(wanted.conditions(family), family).ok();
            for (chain, listed, holder) in collisions(&state, &identity, &claims, plain.as_deref()) {
                match judge.fate(wanted, &holder)? {
                    Fate::Alive => return Ok(Rivals { held: Some(holder), ..rivals }),
                    Fate::Dead => {
                        rivals.dead = true;
                        batch.delete_rule(table, chain, listed.handle);
                        rivals.remarks.push(format!("{holder}, which is gone: it was displaced (nftables)"));
                    }
                    Fate::Unknown => rivals
                        .remarks
                        .push(format!("{holder} already, which may go first as long as it is there (nftables)")),
                }
            }
        }
        if then == Then::Displace {
            self.nft.commit(batch)?;
        }
        Ok(rivals)
    }
}
