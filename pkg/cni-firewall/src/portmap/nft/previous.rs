//! What an attachment had before an ADD, and how an ADD that fails puts it back.

use super::super::Forwarding;
use super::shape::{self, CONTAINERS};
use super::{Identity, NftPortMap, repeat};
use crate::nft::{Batch, Listed, mentions};
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

/// The rules that an attachment had, chain by chain.
#[derive(Clone, Debug, Default)]
pub struct PreviousRules {
    rules: Vec<(Family, &'static str, Vec<Listed>)>,
}

impl PreviousRules {
    pub(super) fn remember(&mut self, family: Family, chain: &'static str, rules: &[&Listed]) {
        self.rules.push((family, chain, rules.iter().copied().cloned().collect()));
    }

    fn of(&self, family: Family, chain: &str) -> &[Listed] {
        let found = self.rules.iter().find(|(of, name, _)| *of == family && *name == chain);
        found.map_or(&[], |(.., rules)| rules)
    }
}

/// Whether a set without a name belongs to the rule, which the kernel has dropped with it.
fn is_lost(rule: &Listed) -> bool {
    mentions(&rule.raw.exprs, "__set") || mentions(&rule.raw.exprs, "__map")
}

impl NftPortMap {
    /// Gives the attachment back what it had before an [`ensure`](NftPortMap::ensure), and takes
    /// what that added; in one transaction.
    ///
    /// # Errors
    /// Rules with sets in them, which only the program `nft` can write, do not come back: that is
    /// the error when all else is done.
    pub fn put_back(&mut self, wanted: &Forwarding, previous: &PreviousRules) -> Result<()> {
        let identity = Identity::new(&wanted.attachment);
        let lost = repeat(|| {
            let (mut batch, mut lost) = (Batch::new(), 0);
            batch.only_at(self.nft.wait_for_generation()?);
            for (container, _) in wanted.every_family() {
                let family = Family::of(container.address());
                let table = shape::table(family);
                for chain in CONTAINERS {
                    let had = previous.of(family, chain);
                    let rules = self.nft.rules_commented(table, chain, &identity.comment)?;
                    let own = identity.own(&rules, &wanted.addresses(), shape::container);
                    let handle = |listed: &Listed| listed.handle;
                    if own.iter().map(|listed| handle(listed)).eq(had.iter().map(handle)) {
                        continue;
                    }
                    for listed in own {
                        batch.delete_rule(table, chain, listed.handle);
                    }
                    if had.is_empty() || self.nft.find_chain(table, chain)?.is_none() {
                        continue;
                    }
                    lost += had.iter().filter(|listed| is_lost(listed)).count();
                    for listed in had.iter().filter(|listed| !is_lost(listed)) {
                        batch.put_back(table, chain, &listed.raw, None);
                    }
                }
            }
            self.nft.commit(batch)?;
            Ok(lost)
        })?;
        match lost {
            0 => Ok(()),
            lost => {
                let cause = Cause::text(format!("{lost} rules have sets in them, which are gone"));
                Err(Error::new("failed to put back the host ports as they were", cause))
            }
        }
    }
}
