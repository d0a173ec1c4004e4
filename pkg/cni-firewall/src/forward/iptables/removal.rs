//! Plans the removal of addresses: their records, their accepting rules, and the isolation that no
//! remaining address requires.

use std::collections::BTreeSet;
use std::net::IpAddr;

use cni_linux::error::Result;
use cni_linux::route::Family;

use super::super::owner::{Ingress, OwnedAddress, Record};
use super::shape::{STAGE_2, accept_rules, address_rules, isolation_rules, read_record, redirected_rule};
use super::{CNI_FORWARD, OWNERS, STAGE_1, find_rules_of};
use crate::iptables::{Chains, Edit, Rule, SearchFor, single_address};

/// The records and addresses whose rules are removed.
#[derive(Clone, Copy, Default)]
pub(super) struct Removal<'r> {
    /// Rules of [`OWNERS`], with all copies of each.
    pub(super) records: &'r [&'r Record<Rule>],
    /// Further addresses, of either family, whose rules may have no record.
    pub(super) unrecorded_addresses: &'r [IpAddr],
    /// Addresses that keep their rules even if a removed record names them.
    pub(super) staying: &'r [OwnedAddress],
    /// Addresses that keep their accepting rules, and whose isolation is unknown: the Go plugin may
    /// have written the rules, and it writes no records.
    pub(super) accepted_for_others: &'r [IpAddr],
}

impl Removal<'_> {
    /// Adds to `edit` the removal of the records, and of the rules of their addresses and of the
    /// unrecorded ones, and the isolation rules, that no other record and no address in `staying`
    /// or `accepted_for_others` requires.
    pub(super) fn add_to(&self, edit: &mut Edit, filter: &mut Chains<'_>) -> Result<()> {
        let candidates = self.candidates(filter.family());
        if candidates.is_empty() {
            return Ok(());
        }
        let mut rules_for_candidates =
            |chain| find_rules_of(filter, chain, candidates.iter().copied(), None, SearchFor::Compare);
        let (accepting, records) = (rules_for_candidates(CNI_FORWARD)?, rules_for_candidates(OWNERS)?);
        let unneeded = self.unneeded_rules(&candidates, &records);
        for rule in accepting.iter().filter(|rule| rule.whole && unneeded.contains(&rule.words)) {
            edit.delete(CNI_FORWARD, rule);
        }
        for record in self.records {
            edit.delete(OWNERS, &record.rule);
        }
        // Without this chain nothing is isolated, and the other records need not be read.
        if filter.has_chain(STAGE_1)? {
            let remaining = self.remaining(filter.rules(OWNERS)?);
            end_isolation(filter, edit, &remaining, &unneeded)?;
        }
        Ok(())
    }

    /// Returns the addresses of one family that may lose their accepting rules: those of the
    /// records, and the unrecorded ones.
    fn candidates(&self, family: Family) -> BTreeSet<IpAddr> {
        let unrecorded = self.unrecorded_addresses.iter().copied().filter(|address| Family::of(*address) == family);
        unrecorded.chain(self.records.iter().map(|record| record.owned.address)).collect()
    }

    /// Returns the accepting rules of the candidates, except those that an address with an owner
    /// requires, and those that `accepted_for_others` keeps. `records` are all rules of [`OWNERS`]
    /// for the candidates.
    fn unneeded_rules(&self, candidates: &BTreeSet<IpAddr>, records: &[Rule]) -> BTreeSet<Vec<String>> {
        let rules_of = |address: &IpAddr| [&accept_rules(*address)[..], &[redirected_rule(*address)]].concat();
        let mut unneeded: BTreeSet<Vec<String>> = candidates.iter().flat_map(rules_of).collect();
        let required = self.remaining(records);
        let kept = self.accepted_for_others.iter().flat_map(|address| accept_rules(*address));
        for words in required.iter().flat_map(address_rules).chain(kept) {
            unneeded.remove(&words);
        }
        unneeded
    }

    /// Returns the addresses that have an owner after the removal: `staying`, and those in other
    /// records of `rules`, which are rules of [`OWNERS`].
    fn remaining(&self, rules: &[Rule]) -> Vec<OwnedAddress> {
        let removed: BTreeSet<&OwnedAddress> = self.records.iter().map(|record| &record.owned).collect();
        let recorded = rules.iter().filter_map(read_record).filter(|owned| !removed.contains(owned));
        self.staying.iter().cloned().chain(recorded).collect()
    }
}

/// Adds to `edit` the removal of the isolation rules that no address in `remaining` requires. The
/// caller removes the rules of [`CNI_FORWARD`] with the words in `removed`.
///
/// Removes nothing while [`CNI_FORWARD`] accepts an address without an owner: the Go plugin has
/// attached that container, and the isolation that the container requires is unknown.
fn end_isolation(
    filter: &mut Chains<'_>,
    edit: &mut Edit,
    remaining: &[OwnedAddress],
    removed: &BTreeSet<Vec<String>>,
) -> Result<()> {
    let known: BTreeSet<IpAddr> = remaining.iter().map(|owned| owned.address).collect();
    for rule in filter.rules(CNI_FORWARD)? {
        let Some(address) = single_address(rule, "-s").filter(|address| !known.contains(address)) else { continue };
        let [_, accept_from] = accept_rules(address);
        if rule.matches(&accept_from) && !removed.contains(&accept_from) {
            return Ok(());
        }
    }
    let required: BTreeSet<(&str, Vec<String>)> =
        remaining.iter().flat_map(|owned| isolation_rules(&owned.ingress)).collect();
    for (chain, interface_option) in [(STAGE_1, "-i"), (STAGE_2, "-o")] {
        for rule in filter.rules(chain)? {
            let Some(bridge) = rule.value(interface_option) else { continue };
            let policies = [Ingress::SameBridge(bridge.to_owned()), Ingress::Isolated(bridge.to_owned())];
            // Other rules were written by another program.
            let is_isolation = policies.iter().flat_map(isolation_rules).any(|(_, words)| rule.matches(&words));
            if is_isolation && !required.contains(&(chain, rule.words.clone())) {
                edit.delete(chain, rule);
            }
        }
    }
    Ok(())
}
