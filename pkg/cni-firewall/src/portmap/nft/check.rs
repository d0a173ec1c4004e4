//! Compares the rules of an attachment with those that an ADD would write, for CHECK.

use std::net::IpAddr;

use super::super::{ClaimedPort, Forwarding, Snat, conditions};
use super::shape::{self, HOSTPORTS, HOSTPORTS_ALL, MASQUERADING};
use super::{Identity, NftPortMap, State, identity, read_state};
use crate::nft::{Expr, Nft};
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
    /// Selects the attachment's rules in `state`.
    fn new(state: &'s State, identity: &Identity, addresses: &[IpAddr]) -> OwnRules<'s> {
        let mut own = OwnRules { has_go_rules: true, ..OwnRules::default() };
        for (chain, rules) in &state.rules {
            for listed in identity.own_rules(rules, addresses, shape::container) {
                own.has_go_rules &= identity.ownership_of(&listed.rule) == identity::Ownership::Container;
                let exprs = listed.rule.exprs.as_slice();
                if *chain == MASQUERADING {
                    own.masquerades.push(exprs);
                } else if let Some((claim, _)) = shape::read_mapping(&listed.rule) {
                    own.mappings.push(OwnMapping { claim, exprs });
                }
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

impl NftPortMap {
    /// Returns a sentence for each rule that differs from what [`ensure`](NftPortMap::ensure)
    /// writes; empty if there is no difference. Accepts duplicates, and the rules of Go's plugin,
    /// which has the conditions in the base chains.
    pub fn check(&mut self, wanted: &Forwarding) -> Result<Vec<String>> {
        let identity = Identity::new(&wanted.attachment);
        // No claims are passed, so that rules of other containers for the ports are not read.
        let read = |nft: &mut Nft| {
            let families = wanted.families();
            families
                .map(|(container, _)| read_state(nft, container, wanted, &identity, &[], true))
                .collect::<Result<Vec<_>>>()
        };
        let states = self.nft.read_at_once("failed to read the host ports in nftables", read)?;
        let mut differences = Vec::new();
        for ((container, claims), state) in wanted.families().zip(states) {
            let own = OwnRules::new(&state, &identity, &wanted.addresses());
            differences.extend(shared_chain_differences(&state, &own));
            differences.extend(mapping_differences(wanted, &claims, &state, &own));
            let container = container.address();
            // Go's plugin ignores `masqAll` with nftables.
            let has_go_masquerades =
                own.has_go_rules && wanted.snat == Snat::All && own.has_masquerades(container, Snat::Hairpin);
            if !own.has_masquerades(container, wanted.snat) && !has_go_masquerades {
                let table = shape::table(state.family);
                differences.push(format!("nft chain {table} {MASQUERADING} lacks a masquerade rule for {container}"));
            }
        }
        Ok(differences)
    }
}

/// Returns a sentence for each shared chain that is missing or lacks a jump.
fn shared_chain_differences(state: &State, own: &OwnRules<'_>) -> Vec<String> {
    let table = shape::table(state.family);
    let mut differences = Vec::new();
    for chain in &state.missing_chains {
        differences.push(format!("nft chain {table} {chain} is missing"));
    }
    for chain in state.chains_without_jump() {
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
fn mapping_differences(wanted: &Forwarding, claims: &[ClaimedPort], state: &State, own: &OwnRules<'_>) -> Vec<String> {
    let table = shape::table(state.family);
    let identity = Identity::new(&wanted.attachment);
    let conditions = conditions::compile(wanted.conditions(state.family), state.family).ok();
    let conditions = conditions.as_deref();
    let mut differences = Vec::new();
    for claim in claims {
        if !own.mappings.iter().any(|found| own.matches_claim(found, claim, conditions)) {
            let address = claim.container;
            differences.push(format!("nft chain {table} {HOSTPORTS} has no rule that maps {claim} to {address}"));
        }
    }
    let to_other_addresses = state.mappings_to_other_addresses(&identity, &wanted.addresses());
    for claim in claims {
        if let Some(first) = state.first_mapping(&identity, claim)
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

impl State {
    /// Returns the shared chains that exist and lack a jump to the next chain.
    fn chains_without_jump(&self) -> Vec<&'static str> {
        let mut chains: Vec<&'static str> = self.missing_rules.iter().map(|(chain, _)| *chain).collect();
        // A chain can lack both of its jumps.
        chains.dedup();
        chains.retain(|chain| !self.missing_chains.contains(chain));
        chains
    }
}
