//! Plans the removal of addresses: their records, their accepting rules, and the isolation that no
//! remaining address requires.

use std::collections::BTreeSet;
use std::net::IpAddr;

use cni_linux::error::Result;
use cni_linux::route::Family;

use super::super::owner::{Ingress, OwnedAddress};
use super::shape::{STAGE_2, accept_rules, read_record, redirected_rule, stage_1_rules, stage_2_rule};
use super::{CNI_FORWARD, OWNERS, Record, STAGE_1, by_address, find_rules_of, matching, rules_for};
use crate::iptables::{Chains, Edit, Purpose, Rule, single_address};

/// The records and addresses whose rules are removed.
#[derive(Clone, Copy, Default)]
pub(super) struct Removal<'r> {
    /// Rules of [`OWNERS`], with all copies of each.
    pub(super) records: &'r [&'r Record],
    /// Further addresses, of either family, whose rules may have no record.
    pub(super) unrecorded_addresses: &'r [IpAddr],
    /// Addresses that keep their rules even if a removed record names them.
    pub(super) staying: &'r [OwnedAddress],
    /// Addresses that also keep their rules, and whose isolation is unknown: the Go plugin may have
    /// written the rules, and it writes no records.
    pub(super) accepted_for_others: &'r [IpAddr],
}

impl Removal<'_> {
    /// Returns the edit that removes the records, the accepting rules of their addresses and of the
    /// unrecorded ones, and the isolation rules that no attachment requires any more. An address
    /// in another record, in `staying` or in `accepted_for_others` keeps its accepting rules; the
    /// rule for redirected connections stays if the record or `staying` says so.
    pub(super) fn plan(&self, filter: &mut Chains<'_>) -> Result<Edit> {
        let mut edit = Edit::new();
        let candidates = self.candidates(filter.family());
        if candidates.is_empty() {
            return Ok(edit);
        }
        // Both chains can be long, and have an index then.
        for chain in [CNI_FORWARD, OWNERS] {
            filter.has_chain(chain)?;
        }
        let existing_rules = by_address(&find(filter, CNI_FORWARD, &candidates)?);
        let removed: BTreeSet<&OwnedAddress> = self.records.iter().map(|record| &record.owned).collect();
        let remaining = self.remaining(filter, &candidates, &removed)?;
        let mut kept: BTreeSet<IpAddr> = remaining.iter().map(|owned| owned.address).collect();
        kept.extend(self.accepted_for_others);
        let redirected: BTreeSet<IpAddr> =
            remaining.iter().filter(|owned| owned.accepts_redirected).map(|owned| owned.address).collect();
        for address in &candidates {
            let mut unneeded = Vec::new();
            if !kept.contains(address) {
                unneeded.extend(accept_rules(*address));
            }
            if !redirected.contains(address) {
                unneeded.push(redirected_rule(*address));
            }
            for words in unneeded {
                for rule in matching(rules_for(&existing_rules, *address), &words) {
                    edit.delete(CNI_FORWARD, rule);
                }
            }
        }
        let released: Vec<IpAddr> = candidates.into_iter().filter(|address| !kept.contains(address)).collect();
        for record in self.records {
            edit.delete(OWNERS, &record.rule);
        }
        // Without this chain nothing is isolated, and the other records need not be read.
        if filter.has_chain(STAGE_1)? {
            let mut remaining: Vec<OwnedAddress> = self.staying.to_vec();
            for owned in filter.rules(OWNERS)?.iter().filter_map(read_record) {
                if !removed.contains(&owned) {
                    remaining.push(owned);
                }
            }
            end_isolation(filter, &mut edit, &remaining, &released)?;
        }
        Ok(edit)
    }

    /// Returns the addresses of one family that may lose their accepting rules: those of the
    /// records, and the unrecorded ones.
    fn candidates(&self, family: Family) -> Vec<IpAddr> {
        let mut candidates = self.unrecorded_addresses.to_vec();
        candidates.retain(|address| Family::of(*address) == family);
        candidates.extend(self.records.iter().map(|record| record.owned.address));
        candidates.sort();
        candidates.dedup();
        candidates
    }

    /// Returns the addresses that have an owner after the removal: `staying`, and those of
    /// `candidates` in other records.
    fn remaining(
        &self,
        filter: &mut Chains<'_>,
        candidates: &[IpAddr],
        removed: &BTreeSet<&OwnedAddress>,
    ) -> Result<Vec<OwnedAddress>> {
        let mut remaining = self.staying.to_vec();
        for owned in find(filter, OWNERS, candidates)?.iter().filter_map(read_record) {
            if !removed.contains(&owned) {
                remaining.push(owned);
            }
        }
        Ok(remaining)
    }
}

/// Returns the rules of `chain` that have one of the addresses.
fn find(filter: &mut Chains<'_>, chain: &str, addresses: &[IpAddr]) -> Result<Vec<Rule>> {
    find_rules_of(filter, chain, addresses.iter().copied(), None, Purpose::Read)
}

/// Adds to `edit` the removal of the isolation rules that no address in `remaining` requires.
/// `released` are the addresses whose accepting rules `edit` removes.
///
/// Removes nothing while [`CNI_FORWARD`] accepts an address without an owner: the Go plugin has
/// attached that container, and the isolation that the container requires is unknown.
fn end_isolation(
    filter: &mut Chains<'_>,
    edit: &mut Edit,
    remaining: &[OwnedAddress],
    released: &[IpAddr],
) -> Result<()> {
    let mut known: BTreeSet<IpAddr> = released.iter().copied().collect();
    known.extend(remaining.iter().map(|owned| owned.address));
    for rule in filter.rules(CNI_FORWARD)? {
        let Some(address) = single_address(rule, "-s") else { continue };
        let [_, accept_from] = accept_rules(address);
        if rule.matches(&accept_from) && !known.contains(&address) {
            return Ok(());
        }
    }
    for (chain, interface_option) in [(STAGE_1, "-i"), (STAGE_2, "-o")] {
        for rule in filter.rules(chain)? {
            let Some(bridge) = rule.value(interface_option) else { continue };
            let policies = policies_with_rule(rule, bridge);
            // Written by another program.
            if policies.is_empty() {
                continue;
            }
            if !remaining.iter().any(|owned| policies.contains(&owned.ingress)) {
                edit.delete(chain, rule);
            }
        }
    }
    Ok(())
}

/// Returns the policies for `bridge` whose isolation rules include `rule`.
fn policies_with_rule(rule: &Rule, bridge: &str) -> Vec<Ingress> {
    let mut policies = vec![Ingress::SameBridge(bridge.to_owned()), Ingress::Isolated(bridge.to_owned())];
    if rule.matches(&stage_2_rule(bridge)) {
        // Both policies have this rule.
        return policies;
    }
    policies.retain(|policy| stage_1_rules(policy).iter().any(|words| rule.matches(words)));
    policies
}
