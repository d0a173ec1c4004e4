//! CHECK: is everything in the tables as an ADD would have it?

use super::super::{ClaimedPort, Forwarding, Snat, conditions};
use super::shape::{self, ALL, ENTRIES, HOSTPORTS, MASQUERADING};
use super::{Identity, NftPortMap, State, identity};
use crate::nft::Expr;
use cni_linux::error::Result;
use cni_linux::route::Family;

impl NftPortMap {
    /// Returns a sentence for each rule that differs from what [`ensure`](NftPortMap::ensure)
    /// writes; empty if all is well. Accepts Go's rules, with its conditions in the shared chains,
    /// and doubled ones.
    pub fn check(&mut self, wanted: &Forwarding) -> Result<Vec<String>> {
        let identity = Identity::new(&wanted.attachment);
        let addresses = wanted.addresses();
        let mut differences = Vec::new();
        for (container, claims) in wanted.families() {
            let family = Family::of(container.address());
            let table = shape::table(family);
            let state = self.state(container, wanted, &identity, &[])?;
            for chain in &state.missing {
                differences.push(format!("nft chain {table} {chain} is missing"));
            }
            let (mut mapped, mut masqueraded, mut by_go) = (Vec::new(), Vec::new(), false);
            for (chain, rules) in &state.rules {
                for listed in identity.own(rules, &addresses, shape::container) {
                    by_go |= identity.owner(&listed.rule) == identity::Ownership::Container;
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
            let is_it = |claim: &ClaimedPort, there: &ClaimedPort, rule: &Vec<Expr>| match &conditions {
                Some(conditions) if !by_go => *rule == [conditions.clone(), shape::forward(claim)].concat(),
                Some(_) => there == claim,
                // The program `nft` may have written the host address as a condition.
                None => there == claim || ClaimedPort { host_ip: None, ..*there } == *claim,
            };
            for claim in &claims {
                if !mapped.iter().any(|(there, rule)| is_it(claim, there, rule)) {
                    let msg = format!("nft chain {table} {HOSTPORTS} has no rule that maps {claim} to");
                    differences.push(format!("{msg} {}", claim.container));
                }
            }
            let strays = state.strays(&identity, &addresses);
            for claim in &claims {
                if let Some(first) = state.first(&identity, claim).filter(|first| strays.contains(first)) {
                    let to = first.container;
                    differences.push(format!("nft chain {table} {HOSTPORTS} leads {claim} to {to} first"));
                }
            }
            let is_wanted =
                |there: &ClaimedPort, rule: &Vec<Expr>| claims.iter().any(|claim| is_it(claim, there, rule));
            let asked_for = |there: &ClaimedPort, rule: &Vec<Expr>| claims.contains(there) || is_wanted(there, rule);
            for (claim, _) in mapped.iter().filter(|(there, rule)| !asked_for(there, rule)) {
                let msg = format!("nft chain {table} {HOSTPORTS} also maps {claim} to {}", claim.container);
                differences.push(format!("{msg}, which was not asked for"));
            }
            let has =
                |snat| shape::masquerades(container.address(), snat).iter().all(|rule| masqueraded.contains(&rule));
            // Go's plugin ignores `masqAll` here.
            let is_gos = by_go && wanted.snat == Snat::All && has(Snat::Hairpin);
            if !has(wanted.snat) && !is_gos {
                let msg = format!("nft chain {table} {MASQUERADING} lacks a rule for {}", container.address());
                differences.push(msg);
            }
        }
        Ok(differences)
    }
}

impl State {
    /// The chains from which no way leads on. A base chain with Go's conditions in it has one for
    /// what Go made.
    fn without_a_way(&self, by_go: bool) -> Vec<&'static str> {
        let is_gap = |name: &'static str| self.gaps.iter().any(|(chain, _)| *chain == name);
        let shared = ENTRIES.into_iter().map(|(name, _)| name).filter(|_| !by_go).chain([ALL]);
        shared.filter(|name| is_gap(name) && !self.missing.contains(name)).collect()
    }
}
