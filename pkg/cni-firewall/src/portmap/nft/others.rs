//! Finds the rules of other containers that map a wanted port or lead to the address of the ADD's
//! container, and decides which of them are removed.

use std::net::IpAddr;

use cni::Cidr;
use cni::cidr::octets;

use super::super::conflict::{ConflictAction, Fate, LivenessProbe};
use super::super::{ClaimedPort, Forwarding, Holder};
use super::shape::{self, HOSTIP_HOSTPORTS, HOSTPORTS, MASQUERADING};
use super::{Identity, NftPortMap, State, identity};
use crate::nft::{Expr, Listed, Rule, mentions};
use cni_linux::error::Result;
use cni_linux::route::Family;

/// A search for rules of other containers that conflict with an ADD in one family.
pub(super) struct ConflictSearch<'o> {
    /// The identity of the attachment of the ADD.
    pub(super) identity: &'o Identity,
    /// The address of *this container*, the container of the ADD.
    pub(super) container: Cidr,
    /// The wanted ports.
    pub(super) claims: &'o [ClaimedPort],
    /// The compiled conditions of the ADD; `None` if they cannot be compiled.
    pub(super) conditions: Option<&'o [Expr]>,
    pub(super) action: ConflictAction,
}

/// The decision about the rules of other containers.
#[derive(Default)]
pub(super) struct ConflictDecision {
    /// A living container that has a wanted port. If there is one, nothing must be changed.
    pub(super) held: Option<Holder>,
    /// The rules of dead containers, which the caller removes: chain and handle.
    pub(super) dead_rules: Vec<(&'static str, u64)>,
    /// Remarks for the operator.
    pub(super) remarks: Vec<String>,
}

impl ConflictSearch<'_> {
    /// Decides which rules of other containers in `state` are removed; stops at the first living
    /// container that has a wanted port. Fails if the host's links cannot be read.
    pub(super) fn decide(
        &self,
        state: &State,
        wanted: &Forwarding,
        probe: &mut LivenessProbe,
    ) -> Result<ConflictDecision> {
        let mut decision = ConflictDecision::default();
        // The mappings of dead containers to this container's address.
        let mut stale_mappings = Vec::new();
        for (chain, listed) in state.all_rules().filter(|(chain, _)| *chain != MASQUERADING) {
            let Some(holder) = self.holder_of(&listed.rule) else { continue };
            match probe.decide(wanted, holder, self.action, &mut decision.remarks)? {
                Fate::Keep => {}
                Fate::Remove => {
                    decision.dead_rules.push((chain, listed.handle));
                    if shape::container(&listed.rule) == Some(self.container.address()) {
                        stale_mappings.push(&listed.rule);
                    }
                }
                Fate::RefuseAdd(holder) => return Ok(ConflictDecision { held: Some(holder), ..decision }),
            }
        }
        // With the mappings of a dead container to this address, its masquerading rules for the
        // address are removed. They have the same comment and tags.
        for Listed { handle, rule, .. } in state.rules_of(MASQUERADING) {
            let is_of_dead =
                stale_mappings.iter().any(|mapping| mapping.comment == rule.comment && mapping.tags == rule.tags);
            if is_of_dead && shape::container(rule) == Some(self.container.address()) {
                decision.dead_rules.push((MASQUERADING, *handle));
            }
        }
        Ok(decision)
    }

    /// Returns the other container that a conflicting rule belongs to. `None` for a rule that does
    /// not conflict: it is not a mapping, it has this container's ID, or it neither claims a wanted
    /// port nor leads to this container's address.
    fn holder_of(&self, rule: &Rule) -> Option<Holder> {
        let (claim, condition_count) = shape::read_mapping(rule)?;
        let leads_here = claim.container.ip() == self.container.address();
        if !leads_here && !self.claims.iter().any(|wanted| wanted.overlaps(&claim)) {
            return None;
        }
        if rule.comment.as_deref() == Some(&self.identity.comment) {
            return None;
        }
        let conditions_differ = match self.conditions {
            Some(conditions) => rule.exprs.get(..condition_count) != Some(conditions),
            None => true,
        };
        Some(Holder {
            container: rule.comment.clone().unwrap_or_else(|| "(unknown)".to_owned()),
            network: identity::network(rule),
            alias: identity::alias(rule),
            had_link: identity::had_link(rule),
            conditions_differ,
            claim,
        })
    }
}

impl State {
    /// Returns the mappings among the [`Identity::rules_to_other_addresses`].
    pub(super) fn mappings_to_other_addresses(&self, identity: &Identity, addresses: &[IpAddr]) -> Vec<ClaimedPort> {
        let mut mappings = Vec::new();
        for (chain, rules) in &self.rules {
            if *chain == MASQUERADING {
                continue;
            }
            for listed in identity.rules_to_other_addresses(rules, addresses, shape::container) {
                mappings.extend(shape::read_mapping(&listed.rule).map(|(claim, _)| claim));
            }
        }
        mappings
    }

    /// Returns the first mapping of this container that a packet for `claim` can match. Packets
    /// pass [`HOSTIP_HOSTPORTS`] before [`HOSTPORTS`].
    pub(super) fn first_mapping(&self, identity: &Identity, claim: &ClaimedPort) -> Option<ClaimedPort> {
        for chain in [HOSTIP_HOSTPORTS, HOSTPORTS] {
            for listed in self.rules_of(chain) {
                if identity.ownership_of(&listed.rule) != identity::Ownership::Other
                    && let Some((found, _)) = shape::read_mapping(&listed.rule)
                    && found.overlaps(claim)
                {
                    return Some(found);
                }
            }
        }
        None
    }

    /// Returns the rules that were read in one chain.
    pub(super) fn rules_of(&self, chain: &str) -> &[Listed] {
        match self.rules.iter().find(|(name, _)| *name == chain) {
            Some((_, rules)) => rules,
            None => &[],
        }
    }

    /// Returns all rules of containers that were read, each with its chain.
    fn all_rules(&self) -> impl Iterator<Item = (&'static str, &Listed)> {
        self.rules.iter().flat_map(|(chain, rules)| rules.iter().map(move |listed| (*chain, listed)))
    }
}

impl NftPortMap {
    /// Reads the rules of one family that may conflict, because they contain a claimed port or the
    /// address of `container`. Does not look for missing shared chains and rules.
    pub(super) fn read_conflicting(&mut self, container: Cidr, claims: &[ClaimedPort]) -> Result<State> {
        let (family, address) = (Family::of(container.address()), octets(container.address()));
        let table = shape::table(family);
        let mut state = State::new(family);
        for chain in [HOSTPORTS, HOSTIP_HOSTPORTS] {
            let can_conflict = |rule: &[u8]| shape::names_port(rule, claims) || mentions(rule, &address);
            state.rules.push((chain, self.nft.rules_where(table, chain, can_conflict)?));
        }
        // Masquerading rules are removed only together with a mapping to the same address.
        if state.all_rules().any(|(_, listed)| shape::container(&listed.rule) == Some(container.address())) {
            let rules = self.nft.rules_where(table, MASQUERADING, |rule| mentions(rule, &address))?;
            state.rules.push((MASQUERADING, rules));
        }
        Ok(state)
    }
}
