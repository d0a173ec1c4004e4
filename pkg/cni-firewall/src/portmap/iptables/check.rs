//! CHECK: is everything in the tables as an ADD would have it?

use super::super::{ClaimedPort, Forwarding};
use super::shape::{self, DNAT, Jump, Section};
use super::{Chains, IptablesPortMap, is_own, shared_rules};
use crate::iptables::Rule;
use cni::Cidr;
use cni_linux::error::Result;
use cni_linux::route::Family;

impl IptablesPortMap<'_> {
    /// Returns a sentence for each rule that differs from what [`ensure`](IptablesPortMap::ensure)
    /// writes; empty if all is well. Accepts Go's rules, doubled too. Does not compare conditions,
    /// because the kernel prints them in its own spelling.
    pub fn check(&mut self, wanted: &Forwarding) -> Result<Vec<String>> {
        let chain = shape::chain(&wanted.attachment);
        let mut differences = Vec::new();
        for (container, claims) in wanted.families() {
            let family = Family::of(container.address());
            let mut best: Option<Vec<String>> = None;
            for variant in self.iptables.variants_to_search(family, &[&chain])? {
                let mut nat = self.iptables.read(family, variant)?;
                if !nat.has_chain(&chain)? {
                    continue;
                }
                let found = differences_of(&mut nat, wanted, container, &claims)?;
                if best.as_ref().is_none_or(|best| found.len() < best.len()) {
                    best = Some(found);
                }
            }
            let name = if family == Family::V4 { "iptables" } else { "ip6tables" };
            let found = best.unwrap_or_else(|| vec![format!("chain {chain} is missing")]);
            differences.extend(found.into_iter().map(|difference| format!("{name}: {difference}")));
        }
        Ok(differences)
    }
}

fn differences_of(
    nat: &mut Chains<'_>,
    wanted: &Forwarding,
    container: Cidr,
    claims: &[ClaimedPort],
) -> Result<Vec<String>> {
    let mut differences = Vec::new();
    let chain = shape::chain(&wanted.attachment);
    for (chain, words) in shared_rules(wanted) {
        if !nat.rules(chain)?.iter().any(|rule| rule.matches(&words)) {
            differences.push(format!("chain {chain} lacks `{}`", words.join(" ")));
        }
    }
    let jumps = nat.rules_leading_to(DNAT, &chain)?;
    let there = nat.rules(&chain)?;
    let sections = shape::sections(there);
    let (own, others): (Vec<&Section>, Vec<&Section>) = sections.iter().partition(|section| is_own(section, wanted));
    let others: Vec<&Section> = others.into_iter().filter(|section| section.marker.is_none()).collect();
    // Includes Go's rules for another address: Go makes the rule that marks connections to a port
    // once for all addresses.
    let rules: Vec<&Rule> = own.iter().chain(&others).flat_map(|section| section.rules()).collect();
    for claim in claims {
        for words in shape::forward(wanted, container, claim) {
            if !rules.iter().any(|rule| rule.matches(&words)) {
                differences.push(format!("chain {chain} lacks `{}`", words.join(" ")));
            }
        }
        if !jumps.iter().filter_map(Jump::of).any(|jump| jump.serves(claim)) {
            differences.push(format!("chain {DNAT} has no rule that leads {claim} to {chain}"));
        }
        let is_anothers =
            |first: &ClaimedPort| others.iter().any(|section| section.claims().any(|there| there == *first));
        if let Some(first) = shape::first(there, claim).filter(is_anothers) {
            differences.push(format!("chain {chain} leads {claim} to {} first", first.container));
        }
    }
    for claim in own.iter().flat_map(|section| section.claims()).filter(|claim| !claims.contains(claim)) {
        differences.push(format!("chain {chain} also maps {claim} to {}, which was not asked for", claim.container));
    }
    Ok(differences)
}
