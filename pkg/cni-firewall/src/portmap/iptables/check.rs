//! Compares the rules of an attachment with those that an ADD would write, for CHECK.

use super::super::{ClaimedPort, Forwarding};
use super::shape::{self, DNAT, Jump, Section};
use super::{Chains, IptablesPortMap, find_shared_rule, is_own, jumps_to, program_name, shared_rules};
use crate::iptables::Rule;
use cni::Cidr;
use cni_linux::error::Result;
use cni_linux::route::Family;

impl IptablesPortMap<'_> {
    /// Returns a sentence for each difference from the rules that
    /// [`ensure`](IptablesPortMap::ensure) writes; empty if there is none. If both variants have
    /// the container's chain, returns only the shorter of their lists of differences. Accepts
    /// the rules of Go's plugin, and duplicates. Does not compare conditions, because the kernel
    /// can return them in a form that differs from the configuration.
    pub fn check(&mut self, wanted: &Forwarding) -> Result<Vec<String>> {
        let chain = shape::chain_name(&wanted.attachment);
        let mut differences = Vec::new();
        for (container, claims) in wanted.families() {
            let family = Family::of(container.address());
            let mut shortest: Option<Vec<String>> = None;
            for variant in self.iptables.variants_to_search(family, &[&chain])? {
                let mut nat = self.iptables.read(family, variant)?;
                if !nat.has_chain(&chain)? {
                    continue;
                }
                let found = differences_in(&mut nat, wanted, container, &claims)?;
                if shortest.as_ref().is_none_or(|shortest| found.len() < shortest.len()) {
                    shortest = Some(found);
                }
            }
            let found = shortest.unwrap_or_else(|| vec![format!("chain {chain} is missing")]);
            let name = program_name(family);
            differences.extend(found.into_iter().map(|difference| format!("{name}: {difference}")));
        }
        Ok(differences)
    }
}

/// Returns the differences in one table: missing rules, older mappings of this container that take
/// precedence over a wanted one, and mappings that were not requested.
fn differences_in(
    nat: &mut Chains<'_>,
    wanted: &Forwarding,
    container: Cidr,
    claims: &[ClaimedPort],
) -> Result<Vec<String>> {
    let mut differences = Vec::new();
    let chain = shape::chain_name(&wanted.attachment);
    for (shared_chain, words) in shared_rules(wanted) {
        if find_shared_rule(nat, shared_chain, &words)?.is_empty() {
            differences.push(format!("chain {shared_chain} lacks `{}`", words.join(" ")));
        }
    }
    let jumps = jumps_to(nat, &chain)?;
    let chain_rules = nat.rules(&chain)?;
    let sections = shape::sections(chain_rules);
    let (own, others): (Vec<&Section>, Vec<&Section>) = sections.iter().partition(|section| is_own(section, wanted));
    let unmarked: Vec<&Section> = others.into_iter().filter(|section| section.marker.is_none()).collect();
    // An unmarked section for another address counts too: it can have the rule that marks
    // connections to a port, because Go makes that rule only once, with the first address.
    let accepted_rules: Vec<&Rule> = own.iter().chain(&unmarked).flat_map(|section| section.rules()).collect();
    let unmarked_claims: Vec<ClaimedPort> = unmarked.iter().flat_map(|section| section.claims()).collect();
    for claim in claims {
        for words in shape::mapping_rules(wanted, container, claim) {
            if !accepted_rules.iter().any(|rule| rule.matches(&words)) {
                differences.push(format!("chain {chain} lacks `{}`", words.join(" ")));
            }
        }
        if !jumps.iter().filter_map(Jump::read).any(|jump| jump.can_match(claim)) {
            differences.push(format!("chain {DNAT} lacks a rule that jumps to {chain} for {claim}"));
        }
        // The first rule for the port takes precedence, even if it leads to another address.
        if let Some(first) = shape::first_overlapping_claim(chain_rules, claim)
            && unmarked_claims.contains(&first)
        {
            differences
                .push(format!("chain {chain} maps {claim} to {}, in a rule before the requested one", first.container));
        }
    }
    for claim in own.iter().flat_map(|section| section.claims()) {
        if !claims.contains(&claim) {
            differences
                .push(format!("chain {chain} also maps {claim} to {}, which was not requested", claim.container));
        }
    }
    Ok(differences)
}
