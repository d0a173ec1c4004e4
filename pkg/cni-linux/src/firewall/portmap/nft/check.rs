//! CHECK: is everything in the tables as an ADD would have it?

use super::super::{Claim, Forwarding, conditions};
use super::shape::{self, ALL, ENTRIES, HOSTPORTS, MASQUERADING};
use super::{Identity, NftPortMap, State, identity};
use crate::error::Result;
use crate::firewall::nft::Expr;
use crate::route::Family;

impl NftPortMap {
    /// What is not as [`ensure`](NftPortMap::ensure) would have it, one sentence each; empty if all is well. What Go
    /// made passes, with its conditions in the shared chains, and doubled.
    pub fn check(&mut self, wanted: &Forwarding) -> Result<Vec<String>> {
        let identity = Identity::new(&wanted.mark);
        let addresses = wanted.addresses();
        let mut differences = Vec::new();
        for (container, claims) in wanted.families() {
            let family = Family::of(container.address());
            let table = shape::table(family);
            let state = self.state(container, wanted.snat, &identity, &[])?;
            for chain in &state.missing {
                differences.push(format!("nft chain {table} {chain} is missing"));
            }
            let (mut mapped, mut masqueraded, mut by_go) = (Vec::new(), Vec::new(), false);
            for (chain, rules) in &state.rules {
                for listed in identity.own(rules, &addresses, shape::container) {
                    by_go |= identity.owner(&listed.rule) == identity::Owner::Container;
                    match shape::read(&listed.rule) {
                        Some((claim, _)) if *chain != MASQUERADING => mapped.push((claim, &listed.rule.exprs)),
                        _ => masqueraded.push(&listed.rule.exprs),
                    }
                }
            }
            differences.extend(
                state
                    .without_a_way(by_go)
                    .into_iter()
                    .map(|chain| format!("nft chain {table} {chain} has no rule that leads on to the mappings")),
            );
            let conditions = conditions::compile(wanted.conditions(family), family).ok();
            for claim in &claims {
                let exprs = conditions.clone().map(|conditions| [conditions, shape::forward(claim)].concat());
                let is_it = |there: &Claim, rule: &Vec<Expr>| match &exprs {
                    Some(exprs) if !by_go => rule == exprs,
                    _ => there == claim,
                };
                if !mapped.iter().any(|(there, rule)| is_it(there, rule)) {
                    let msg = format!("nft chain {table} {HOSTPORTS} has no rule that maps {claim} to");
                    differences.push(format!("{msg} {}", claim.container));
                }
            }
            for (claim, _) in mapped.iter().filter(|(claim, _)| !claims.contains(claim)) {
                let msg = format!("nft chain {table} {HOSTPORTS} also maps {claim} to {}", claim.container);
                differences.push(format!("{msg}, which was not asked for"));
            }
            for exprs in shape::masquerades(container.address(), wanted.snat) {
                if !masqueraded.contains(&&exprs) {
                    let msg = format!("nft chain {table} {MASQUERADING} lacks a rule for {}", container.address());
                    differences.push(msg);
                }
            }
        }
        Ok(differences)
    }
}

impl State {
    /// The chains from which no way leads on. A base chain with Go's conditions in it has one for what Go made.
    fn without_a_way(&self, by_go: bool) -> Vec<&'static str> {
        let is_gap = |name: &'static str| self.gaps.iter().any(|(chain, _)| *chain == name);
        let shared = ENTRIES.into_iter().map(|(name, _)| name).filter(|_| !by_go).chain([ALL]);
        shared.filter(|name| is_gap(name) && !self.missing.contains(name)).collect()
    }
}
