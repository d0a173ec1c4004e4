//! Compares the rules of an attachment with those that an ADD would write, for CHECK.

use std::net::IpAddr;

use super::super::{ClaimedPort, Forwarding, Snat, conditions};
use super::identity::{ContainerRule, Identity, Ownership, rules_naming_container};
use super::shape::{self, HOSTIP_HOSTPORTS, HOSTPORTS, HOSTPORTS_ALL, MASQUERADING, Shared};
use super::{FamilyState, mappings_to_other_addresses};
use crate::nft::{Expr, Key, Nft, Retries};
use cni_linux::error::Result;

/// The existing rules of an attachment in one family.
struct OwnRules<'s> {
    /// The claim and the expressions of each rule that maps a port.
    mappings: Vec<(ClaimedPort, &'s [Expr])>,
    /// The expressions of the rules in [`MASQUERADING`].
    masquerades: Vec<&'s [Expr]>,
    /// Whether the rules count as written by Go's plugin: all of them name only the container. The
    /// mappings that the program `nft` writes for these plugins do so too, but the masquerading
    /// rules beside them name the attachment.
    has_go_rules: bool,
}

impl<'s> OwnRules<'s> {
    /// Selects the attachment's rules.
    fn new(rules: &'s [ContainerRule], identity: &Identity, addresses: &[IpAddr]) -> OwnRules<'s> {
        let (mut mappings, mut masquerades, mut names_container_only) = (Vec::new(), Vec::new(), true);
        for found in rules.iter().filter(|found| identity.owns(&found.listed.rule, addresses)) {
            names_container_only &= identity.ownership_of(&found.listed.rule) == Ownership::Container;
            let exprs = found.listed.rule.exprs.as_slice();
            if found.chain == MASQUERADING {
                masquerades.push(exprs);
            } else if let Some(claim) = found.claim() {
                mappings.push((claim, exprs));
            }
        }
        let has_rules = !mappings.is_empty() || !masquerades.is_empty();
        OwnRules { mappings, masquerades, has_go_rules: has_rules && names_container_only }
    }

    /// Whether all masquerading rules for `snat` exist.
    fn has_masquerades(&self, container: IpAddr, snat: Snat) -> bool {
        shape::masquerade_rules(container, snat).iter().all(|exprs| self.masquerades.contains(&exprs.as_slice()))
    }
}

/// Returns a sentence for each rule that differs from what [`ensure`](super::ensure) writes; empty
/// if none differs, `None` if the attachment has no rule. Accepts duplicates, and the rules of
/// Go's plugin, which has the conditions in the base chains.
pub(in super::super) fn check(wanted: &Forwarding) -> Result<Option<Vec<String>>> {
    let (identity, addresses) = (Identity::new(&wanted.attachment), wanted.addresses());
    // Rules of other containers for the ports are not read.
    let keys = [Key::comment(&identity.comment)];
    let read = |nft: &mut Nft| {
        let families = wanted.families().map(|request| FamilyState::read(nft, request, &keys, &[]));
        families.collect::<Result<Vec<_>>>()
    };
    let mut nft = Nft::open()?;
    let what = "failed to read the host ports in nftables";
    let states = nft.read_at_once(what, Retries::Many, read)?;
    let has_own = |rules: &[ContainerRule]| rules.iter().any(|found| identity.owns(&found.listed.rule, &addresses));
    if !states.iter().any(|state| has_own(&state.rules)) {
        // The attachment may still have rules in a family in which no port is mapped.
        let all = nft.read_at_once(what, Retries::Many, |nft| rules_naming_container(nft, &identity))?;
        if !has_own(&all) {
            return Ok(None);
        }
    }
    Ok(Some(states.iter().flat_map(|state| differences_in(state, &identity)).collect()))
}

/// Returns the differences in one family.
fn differences_in(state: &FamilyState<'_>, identity: &Identity) -> Vec<String> {
    let FamilyState { request, shared, rules } = state;
    let (wanted, container) = (request.wanted, request.container.address());
    let own = OwnRules::new(rules, identity, &wanted.addresses());
    let mut differences = shared_chain_differences(shared, &own);
    differences.extend(mapping_differences(state, identity, &own));
    // Go's plugin ignores `masqAll` with nftables.
    let has_go_masquerades =
        own.has_go_rules && wanted.snat == Snat::All && own.has_masquerades(container, Snat::Hairpin);
    if !own.has_masquerades(container, wanted.snat) && !has_go_masquerades {
        let table = shape::table(request.family);
        differences.push(format!("nft chain {table} {MASQUERADING} lacks a masquerade rule for {container}"));
    }
    differences
}

/// Returns a sentence for each shared chain that is missing or lacks a jump. With the rules of Go's
/// plugin, the base chains may lack it.
fn shared_chain_differences(shared: &Shared, own: &OwnRules<'_>) -> Vec<String> {
    let table = shape::table(shared.family);
    let mut differences = Vec::new();
    for (chain, _) in &shared.missing_chains {
        differences.push(format!("nft chain {table} {chain} is missing"));
    }
    for chain in shared.chains_without_jump() {
        // Go's jumps in the base chains have conditions, so they are not found.
        if own.has_go_rules && chain != HOSTPORTS_ALL {
            continue;
        }
        differences.push(format!("nft chain {table} {chain} lacks a jump to the chains of the mappings"));
    }
    differences
}

/// Returns a sentence for each claim that is not mapped, for each claim for which a mapping to
/// another address takes precedence, and for each mapping of the attachment that is not wanted.
fn mapping_differences(state: &FamilyState<'_>, identity: &Identity, own: &OwnRules<'_>) -> Vec<String> {
    let FamilyState { request, rules, .. } = state;
    let (chain, claims) = (format!("nft chain {} {HOSTPORTS}", shape::table(request.family)), &request.claims);
    let conditions = conditions::compile(request.conditions(), request.family);
    // Whether an existing mapping is what the ADD or Go's plugin writes for the claim `wanted`.
    let maps = |(claim, exprs): &(ClaimedPort, &[Expr]), wanted: &ClaimedPort| match &conditions {
        // Go's mappings have no conditions: it puts them into the base chains.
        Ok(_) if own.has_go_rules => claim == wanted,
        Ok(conditions) => **exprs == [conditions.as_slice(), &shape::mapping_rule(wanted)].concat(),
        // The program `nft` writes the mappings, and their conditions cannot be compared. If they
        // end with an address, `read_mapping` takes it for the host address, which `wanted` then
        // lacks.
        Err(_) => claim == wanted || ClaimedPort { host_ip: None, ..*claim } == *wanted,
    };
    let mut differences = Vec::new();
    for claim in claims {
        if !own.mappings.iter().any(|found| maps(found, claim)) {
            differences.push(format!("{chain} has no rule that maps {claim} to {}", claim.container));
        }
    }
    let to_other_addresses = mappings_to_other_addresses(rules, identity, &request.wanted.addresses());
    for claim in claims {
        if let Some(first) = first_mapping(rules, identity, claim)
            && to_other_addresses.contains(&first)
        {
            let address = first.container;
            differences.push(format!("{chain} maps {claim} to {address}, in a rule before the requested one"));
        }
    }
    for found in &own.mappings {
        let (claim, _) = found;
        // A mapping of a requested claim counts as requested even if its conditions differ.
        if !claims.iter().any(|wanted| wanted == claim || maps(found, wanted)) {
            differences.push(format!("{chain} also maps {claim} to {}, which was not requested", claim.container));
        }
    }
    differences
}

/// Returns the first mapping of this container, of any of its attachments, whose port a packet for
/// `claim` can match; conditions are not compared. Rules of other containers are not read. Packets
/// pass [`HOSTIP_HOSTPORTS`] before [`HOSTPORTS`].
fn first_mapping(rules: &[ContainerRule], identity: &Identity, claim: &ClaimedPort) -> Option<ClaimedPort> {
    let of_chain = |chain| rules.iter().filter(move |found| found.chain == chain);
    let of_container = of_chain(HOSTIP_HOSTPORTS)
        .chain(of_chain(HOSTPORTS))
        .filter(|found| identity.ownership_of(&found.listed.rule) != Ownership::Other);
    of_container.filter_map(ContainerRule::claim).find(|found| found.overlaps(claim))
}
