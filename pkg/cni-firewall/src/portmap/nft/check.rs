//! Compares the rules of an attachment with those that an ADD would write, for CHECK.

use std::net::IpAddr;

use super::super::{ClaimedPort, Forwarding, Snat, conditions};
use super::shape::{self, ENTRY_CHAINS, HOSTPORTS, HOSTPORTS_ALL, MASQUERADING};
use super::{Identity, NftPortMap, State, identity};
use crate::nft::Expr;
use cni_linux::error::Result;
use cni_linux::route::Family;

/// The existing rules of an attachment in one family.
#[derive(Default)]
struct OwnRules<'s> {
    mappings: Vec<(ClaimedPort, &'s Vec<Expr>)>,
    masquerades: Vec<&'s Vec<Expr>>,
    /// Whether one of the rules names only the container, as those of Go's plugin do. The rules
    /// that the program `nft` wrote do, too.
    untagged: bool,
}

impl<'s> OwnRules<'s> {
    /// Selects the attachment's rules in `state`.
    fn new(state: &'s State, identity: &Identity, addresses: &[IpAddr]) -> OwnRules<'s> {
        let mut own = OwnRules::default();
        for (chain, rules) in &state.rules {
            for listed in identity.own_rules(rules, addresses, shape::container) {
                own.untagged |= identity.ownership_of(&listed.rule) == identity::Ownership::Container;
                match shape::read_mapping(&listed.rule) {
                    Some((claim, _)) if *chain != MASQUERADING => own.mappings.push((claim, &listed.rule.exprs)),
                    _ => own.masquerades.push(&listed.rule.exprs),
                }
            }
        }
        own
    }

    /// Whether all masquerading rules for `snat` exist.
    fn has_masquerades(&self, container: IpAddr, snat: Snat) -> bool {
        shape::masquerade_rules(container, snat).iter().all(|exprs| self.masquerades.contains(&exprs))
    }
}

impl NftPortMap {
    /// Returns a sentence for each rule that differs from what [`ensure`](NftPortMap::ensure)
    /// writes; empty if there is no difference. Accepts the rules of Go's plugin, also if they are
    /// there twice, and with its conditions in the base chains.
    pub fn check(&mut self, wanted: &Forwarding) -> Result<Vec<String>> {
        let identity = Identity::new(&wanted.attachment);
        let addresses = wanted.addresses();
        let mut differences = Vec::new();
        for (container, claims) in wanted.families() {
            let family = Family::of(container.address());
            let table = shape::table(family);
            // No claims are passed, so that rules of other containers for the ports are not read.
            let state = self.read_state(container, wanted, &identity, &[])?;
            let own = OwnRules::new(&state, &identity, &addresses);
            for chain in &state.missing_chains {
                differences.push(format!("nft chain {table} {chain} is missing"));
            }
            // Go puts conditions before the jumps of the base chains, which then differ.
            for chain in state.chains_without_jump(!own.untagged) {
                differences.push(format!("nft chain {table} {chain} lacks a jump to the chains of the mappings"));
            }
            let conditions = conditions::compile(wanted.conditions(family), family).ok();
            let is_mapping_of = |claim: &ClaimedPort, found: &ClaimedPort, exprs: &Vec<Expr>| match &conditions {
                Some(conditions) if !own.untagged => {
                    *exprs == [conditions.clone(), shape::mapping_rule(claim)].concat()
                }
                // Rules made by Go have no conditions: Go puts them into the base chains.
                Some(_) => found == claim,
                // The conditions cannot be compiled here, so the program `nft` wrote the rule. They
                // may end with an address, which is then read as the host address.
                None => found == claim || ClaimedPort { host_ip: None, ..*found } == *claim,
            };
            for claim in &claims {
                if !own.mappings.iter().any(|(found, exprs)| is_mapping_of(claim, found, exprs)) {
                    let address = claim.container;
                    differences
                        .push(format!("nft chain {table} {HOSTPORTS} has no rule that maps {claim} to {address}"));
                }
            }
            let to_other_addresses = state.mappings_to_other_addresses(&identity, &addresses);
            for claim in &claims {
                if let Some(first) = state.first_mapping(&identity, claim)
                    && to_other_addresses.contains(&first)
                {
                    let address = first.container;
                    differences.push(format!(
                        "nft chain {table} {HOSTPORTS} maps {claim} to {address}, in a rule before the requested one"
                    ));
                }
            }
            for (found, exprs) in &own.mappings {
                if !claims.contains(found) && !claims.iter().any(|claim| is_mapping_of(claim, found, exprs)) {
                    differences.push(format!(
                        "nft chain {table} {HOSTPORTS} also maps {found} to {}, which was not requested",
                        found.container
                    ));
                }
            }
            // Go's plugin ignores `masqAll` with nftables.
            let is_masqueraded_as_by_go =
                own.untagged && wanted.snat == Snat::All && own.has_masquerades(container.address(), Snat::Hairpin);
            if !own.has_masquerades(container.address(), wanted.snat) && !is_masqueraded_as_by_go {
                differences.push(format!(
                    "nft chain {table} {MASQUERADING} lacks a masquerade rule for {}",
                    container.address()
                ));
            }
        }
        Ok(differences)
    }
}

impl State {
    /// Returns the shared chains that exist and lack a jump to the next chain. The base chains are
    /// among them only with `compare_base_chains`.
    fn chains_without_jump(&self, compare_base_chains: bool) -> Vec<&'static str> {
        let mut chains = Vec::new();
        if compare_base_chains {
            chains.extend(ENTRY_CHAINS.map(|(name, _)| name));
        }
        chains.push(HOSTPORTS_ALL);
        chains.retain(|name| {
            let lacks_rule = self.missing_rules.iter().any(|(chain, _)| chain == name);
            lacks_rule && !self.missing_chains.contains(name)
        });
        chains
    }
}
