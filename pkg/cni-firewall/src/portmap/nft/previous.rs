//! Records the rules of an attachment before an ADD, and puts them back if the ADD fails.

use super::super::Forwarding;
use super::shape::{self, CONTAINER_CHAINS};
use super::{Identity, NftPortMap};
use crate::nft::{Batch, Listed, mentions};
use crate::retry;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

/// The rules that an attachment had, by family and chain.
#[derive(Clone, Debug, Default)]
pub struct PreviousRules {
    rules: Vec<(Family, &'static str, Vec<Listed>)>,
}

impl PreviousRules {
    /// Records the attachment's rules in one chain.
    pub(super) fn record(&mut self, family: Family, chain: &'static str, rules: &[&Listed]) {
        self.rules.push((family, chain, rules.iter().copied().cloned().collect()));
    }

    /// Returns the recorded rules of one chain; an empty slice if none were recorded.
    fn rules_of(&self, family: Family, chain: &str) -> &[Listed] {
        for (recorded_family, recorded_chain, rules) in &self.rules {
            if *recorded_family == family && *recorded_chain == chain {
                return rules;
            }
        }
        &[]
    }
}

/// Whether the rule uses an anonymous set or map, which the kernel removes with the rule.
fn uses_anonymous_set(rule: &Listed) -> bool {
    mentions(&rule.raw.exprs, "__set") || mentions(&rule.raw.exprs, "__map")
}

impl NftPortMap {
    /// Puts back the rules that the attachment had before an [`ensure`](NftPortMap::ensure), and
    /// removes those that `ensure` added, in one transaction.
    ///
    /// # Errors
    /// - The rules cannot be read or written.
    /// - A removed rule used an anonymous set or map, which only the program `nft` can write. All
    ///   other rules have been put back.
    pub fn put_back(&mut self, wanted: &Forwarding, previous: &PreviousRules) -> Result<()> {
        let identity = Identity::new(&wanted.attachment);
        let lost_count = retry(|| {
            let (mut batch, mut lost_count) = (Batch::new(), 0);
            batch.only_at(self.nft.wait_for_generation()?);
            for (container, _) in wanted.families_with_address() {
                let family = Family::of(container.address());
                for chain in CONTAINER_CHAINS {
                    let recorded = previous.rules_of(family, chain);
                    let rules = self.nft.rules_commented(shape::table(family), chain, &identity.comment)?;
                    let own = identity.own_rules(&rules, &wanted.addresses(), shape::container);
                    lost_count += self.put_back_chain(&mut batch, family, chain, recorded, &own)?;
                }
            }
            self.nft.commit(batch)?;
            Ok(lost_count)
        })?;
        if lost_count > 0 {
            let cause = Cause::text(format!(
                "{lost_count} of them used an anonymous set, which the kernel has removed. Repeat the ADD to write \
                 them again"
            ));
            return Err(Error::new("failed to put back all previous host port rules of the attachment", cause));
        }
        Ok(())
    }

    /// Adds to `batch` the replacement of `own`, the attachment's rules in one chain, with
    /// `recorded`. Returns how many of the recorded rules cannot be put back, because they used an
    /// anonymous set.
    fn put_back_chain(
        &mut self,
        batch: &mut Batch,
        family: Family,
        chain: &'static str,
        recorded: &[Listed],
        own: &[&Listed],
    ) -> Result<usize> {
        let table = shape::table(family);
        // The kernel never uses a handle again, so the same handles are the same rules.
        if own.iter().map(|listed| listed.handle).eq(recorded.iter().map(|listed| listed.handle)) {
            return Ok(0);
        }
        for listed in own {
            batch.delete_rule(table, chain, listed.handle);
        }
        if recorded.is_empty() {
            return Ok(0);
        }
        // A chain that another program has removed is not created again.
        if self.nft.find_chain(table, chain)?.is_none() {
            return Ok(0);
        }
        let mut lost_count = 0;
        for listed in recorded {
            if uses_anonymous_set(listed) {
                lost_count += 1;
            } else {
                batch.put_back(table, chain, &listed.raw, None);
            }
        }
        Ok(lost_count)
    }
}
