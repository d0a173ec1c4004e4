//! Compares the rules of an attachment with those that an ADD would write, for CHECK.

use cni::machine::OnSigterm;

use super::super::{ClaimedPort, Forwarding};
use super::shape::{self, DNAT, Jump, Section};
use super::{Chains, FamilyRequest, find_shared_rule, is_own, jumps_to, program_name, shared_rules};
use crate::engine::Store;
use crate::iptables::{FAMILIES, Rule, Variant};
use cni_linux::error::Result;
use cni_linux::route::Family;

/// Returns a sentence for each difference from the rules that [`ensure`](super::ensure) writes;
/// empty if there is none, `None` if the container has no chain. If both variants have the
/// container's chain, returns only the shorter of their lists of differences. Accepts the rules of
/// Go's plugin, and duplicates. Does not compare conditions, because the kernel can return them in
/// a form that differs from the configuration.
pub(in super::super) fn check(store: &Store<'_>, wanted: &Forwarding) -> Result<Option<Vec<String>>> {
    let chain = shape::chain_name(&wanted.attachment);
    let mut iptables = store.open(OnSigterm::Kill)?;
    let (mut is_found, mut differences) = (false, Vec::new());
    for request in wanted.families() {
        let mut shortest: Option<Vec<String>> = None;
        for variant in iptables.variants_to_search(request.family, &[&chain])? {
            let mut nat = iptables.read(request.family, variant)?;
            if !nat.has_chain(&chain)? {
                continue;
            }
            let found = differences_in(&mut nat, &request)?;
            if shortest.as_ref().is_none_or(|shortest| found.len() < shortest.len()) {
                shortest = Some(found);
            }
        }
        is_found |= shortest.is_some();
        let found = shortest.unwrap_or_else(|| vec![format!("chain {chain} is missing")]);
        let name = program_name(request.family);
        differences.extend(found.into_iter().map(|difference| format!("{name}: {difference}")));
    }
    // The container may still have its chain in a family in which no port is mapped.
    let is_unmapped = |family: &Family| wanted.families().all(|request| request.family != *family);
    for family in FAMILIES.into_iter().filter(is_unmapped) {
        if is_found {
            break;
        }
        for variant in iptables.variants_to_search(family, &[&chain])? {
            // iptables-nft is among the variants only if it has the chain.
            is_found |= variant == Variant::Nft || iptables.read(family, variant)?.has_chain(&chain)?;
        }
    }
    Ok(is_found.then_some(differences))
}

/// Returns the differences in one table: missing rules, older mappings of this container that take
/// precedence over a wanted one, and mappings that were not requested.
fn differences_in(nat: &mut Chains<'_>, request: &FamilyRequest<'_>) -> Result<Vec<String>> {
    let FamilyRequest { wanted, container, claims, .. } = request;
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
        for words in shape::mapping_rules(wanted, *container, claim) {
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
