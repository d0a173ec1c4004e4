//! Compares the rules of an attachment with those that an ADD would write, for CHECK.

use std::net::IpAddr;

use super::super::{ClaimedPort, Forwarding, Snat, conditions};
use super::identity::{ContainerRule, Identity, Ownership, read_rules, rules_naming_container};
use super::shape::{self, HOSTIP_HOSTPORTS, HOSTPORTS, HOSTPORTS_ALL, MASQUERADING, Shared};
use super::{FamilyPlan, mappings_to_other_addresses};
use crate::nft::{Expr, Key, Nft, Retries};
use cni_linux::error::Result;

/// The existing rules of an attachment in one family.
#[derive(Default)]
struct OwnRules<'s> {
    mappings: Vec<OwnMapping<'s>>,
    /// The expressions of the rules in [`MASQUERADING`].
    masquerades: Vec<&'s [Expr]>,
    /// Whether the rules count as written by Go's plugin: all of them name only the container. The
    /// mappings that the program `nft` writes for these plugins do so too, but the masquerading
    /// rules beside them name the attachment.
    has_go_rules: bool,
}

/// An existing rule that maps a port.
struct OwnMapping<'s> {
    claim: ClaimedPort,
    exprs: &'s [Expr],
}

impl<'s> OwnRules<'s> {
    /// Selects the attachment's rules.
    fn new(rules: &'s [ContainerRule], identity: &Identity, addresses: &[IpAddr]) -> OwnRules<'s> {
        let mut own = OwnRules { has_go_rules: true, ..OwnRules::default() };
        for found in rules.iter().filter(|found| identity.owns(&found.listed.rule, addresses)) {
            own.has_go_rules &= identity.ownership_of(&found.listed.rule) == Ownership::Container;
            let exprs = found.listed.rule.exprs.as_slice();
            if found.chain == MASQUERADING {
                own.masquerades.push(exprs);
            } else if let Some(claim) = found.claim() {
                own.mappings.push(OwnMapping { claim, exprs });
            }
        }
        own.has_go_rules &= !(own.mappings.is_empty() && own.masquerades.is_empty());
        own
    }

    /// Whether `found`, one of the existing mappings, is what the ADD writes for `claim`.
    /// `conditions` are the compiled conditions; `None` if the program `nft` writes the mappings.
    fn matches_claim(&self, found: &OwnMapping<'_>, claim: &ClaimedPort, conditions: Option<&[Expr]>) -> bool {
        match conditions {
            // Go's mappings have no conditions: it puts them into the base chains.
            Some(_) if self.has_go_rules => found.claim == *claim,
            Some(conditions) => *found.exprs == [conditions, &shape::mapping_rule(claim)].concat(),
            // The conditions cannot be compared. If they end with an address, `read_mapping` takes
            // it for the host address, which `claim` then lacks.
            None => found.claim == *claim || ClaimedPort { host_ip: None, ..found.claim } == *claim,
        }
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
        let families = wanted.families().map(|request| {
            let shared = Shared::read(nft, request.family, wanted.snat)?;
            let rules = read_rules(nft, request.family, &shared.chains, &keys, &[])?;
            Ok(FamilyPlan { request, shared, rules })
        });
        families.collect::<Result<Vec<_>>>()
    };
    let mut nft = Nft::open()?;
    let what = "failed to read the host ports in nftables";
    let found = nft.read_at_once(what, Retries::Many, read)?;
    let has_own = |rules: &[ContainerRule]| rules.iter().any(|found| identity.owns(&found.listed.rule, &addresses));
    if !found.iter().any(|family| has_own(&family.rules)) {
        // The attachment may still have rules in a family in which no port is mapped.
        let all = nft.read_at_once(what, Retries::Many, |nft| rules_naming_container(nft, &identity))?;
        if !has_own(&all) {
            return Ok(None);
        }
    }
    Ok(Some(found.iter().flat_map(|family| differences_in(family, &identity)).collect()))
}

/// Returns the differences in one family.
fn differences_in(found: &FamilyPlan<'_>, identity: &Identity) -> Vec<String> {
    let FamilyPlan { request, shared, rules } = found;
    let (wanted, container) = (request.wanted, request.container.address());
    let own = OwnRules::new(rules, identity, &wanted.addresses());
    let mut differences = shared_chain_differences(shared, &own);
    differences.extend(mapping_differences(found, identity, &own));
    // Go's plugin ignores `masqAll` with nftables.
    let has_go_masquerades =
        own.has_go_rules && wanted.snat == Snat::All && own.has_masquerades(container, Snat::Hairpin);
    if !own.has_masquerades(container, wanted.snat) && !has_go_masquerades {
        let table = shape::table(request.family);
        differences.push(format!("nft chain {table} {MASQUERADING} lacks a masquerade rule for {container}"));
    }
    differences
}

/// Returns a sentence for each shared chain that is missing or lacks a jump.
fn shared_chain_differences(shared: &Shared, own: &OwnRules<'_>) -> Vec<String> {
    let table = shape::table(shared.family);
    let mut differences = Vec::new();
    for chain in &shared.missing_chains {
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
fn mapping_differences(found: &FamilyPlan<'_>, identity: &Identity, own: &OwnRules<'_>) -> Vec<String> {
    let FamilyPlan { request, rules, .. } = found;
    let (table, claims) = (shape::table(request.family), &request.claims);
    let conditions = conditions::compile(request.conditions(), request.family).ok();
    let conditions = conditions.as_deref();
    let mut differences = Vec::new();
    for claim in claims {
        if !own.mappings.iter().any(|found| own.matches_claim(found, claim, conditions)) {
            let address = claim.container;
            differences.push(format!("nft chain {table} {HOSTPORTS} has no rule that maps {claim} to {address}"));
        }
    }
    let to_other_addresses = mappings_to_other_addresses(rules, identity, &request.wanted.addresses());
    for claim in claims {
        if let Some(first) = first_mapping(rules, identity, claim)
            && to_other_addresses.contains(&first)
        {
            let address = first.container;
            differences.push(format!(
                "nft chain {table} {HOSTPORTS} maps {claim} to {address}, in a rule before the requested one"
            ));
        }
    }
    for found in &own.mappings {
        let OwnMapping { claim, .. } = found;
        // A mapping of a requested claim counts as requested even if its conditions differ.
        let is_wanted = claims.contains(claim)
            || claims.iter().any(|wanted_claim| own.matches_claim(found, wanted_claim, conditions));
        if !is_wanted {
            let address = claim.container;
            differences
                .push(format!("nft chain {table} {HOSTPORTS} also maps {claim} to {address}, which was not requested"));
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
