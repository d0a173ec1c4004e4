//! Decides about the rules of other containers: those about a wanted port, and those to the
//! container's own address.

use std::net::IpAddr;

use cni::Cidr;

use super::super::conflict::{Liveness, LivenessProbe};
use super::super::{ClaimedPort, Forwarding, Holder};
use super::shape::{self, HOSTIP_HOSTPORTS, HOSTPORTS, MASQUERADING};
use super::{Identity, NftPortMap, State, identity};
use crate::nft::{Expr, Listed, Rule, mentions};
use cni_linux::error::Result;
use cni_linux::route::Family;

/// The properties of an ADD that the rules of others are compared with, in one family.
pub(super) struct Others<'o> {
    pub(super) identity: &'o Identity,
    pub(super) container: Cidr,
    pub(super) claims: &'o [ClaimedPort],
    /// The compiled conditions; `None` if they are not compiled.
    pub(super) plain: Option<&'o [Expr]>,
}

/// The decision about them.
#[derive(Default)]
pub(super) struct HolderDecision {
    /// The living container that has a wanted port, if any: then nothing must be changed.
    pub(super) held: Option<Holder>,
    /// The rules of dead containers: chain and handle.
    pub(super) displaced: Vec<(&'static str, u64)>,
    pub(super) remarks: Vec<String>,
}

impl Others<'_> {
    pub(super) fn judge(
        &self,
        state: &State,
        wanted: &Forwarding,
        judge: &mut LivenessProbe,
    ) -> Result<HolderDecision> {
        let (mut judged, mut stale) = (HolderDecision::default(), Vec::new());
        for (chain, listed) in state.listed().filter(|(chain, _)| *chain != MASQUERADING) {
            let Some(holder) = self.holder(&listed.rule) else { continue };
            let is_wanted = self.claims.iter().any(|claim| claim.overlaps(&holder.claim));
            match judge.liveness_of(wanted, &holder)? {
                Liveness::Alive if is_wanted => return Ok(HolderDecision { held: Some(holder), ..judged }),
                Liveness::Alive => {}
                Liveness::Dead => {
                    judged.displaced.push((chain, listed.handle));
                    judged.remarks.push(holder.removal_note(wanted));
                    if shape::container(&listed.rule) == Some(self.container.address()) {
                        stale.push(&listed.rule);
                    }
                }
                Liveness::Unknown if is_wanted => judged.remarks.push(holder.port_taken_note()),
                Liveness::Unknown => judged.remarks.push(holder.unknown_owner_note()),
            }
        }
        // The stale owner's masquerading for this address is removed with its mappings.
        let is_of = |one: &Rule, other: &Rule| (&one.comment, &one.tags) == (&other.comment, &other.tags);
        let masquerades = state.listed().filter(|(chain, listed)| {
            *chain == MASQUERADING
                && shape::container(&listed.rule) == Some(self.container.address())
                && stale.iter().any(|rule| is_of(rule, &listed.rule))
        });
        judged.displaced.extend(masquerades.map(|(chain, listed)| (chain, listed.handle)));
        Ok(judged)
    }

    /// Returns the other container whose mapping this is, if it claims what is wanted or leads to
    /// the container's address.
    fn holder(&self, rule: &Rule) -> Option<Holder> {
        let (claim, prefix) = shape::read(rule)?;
        let concerns = claim.container.ip() == self.container.address()
            || self.claims.iter().any(|wanted| wanted.overlaps(&claim));
        if rule.comment.as_deref() == Some(&self.identity.comment) || !concerns {
            return None;
        }
        Some(Holder {
            container: rule.comment.clone().unwrap_or_else(|| "(unknown)".to_owned()),
            network: identity::network(rule),
            alias: identity::alias(rule),
            had_link: identity::had_link(rule),
            conditions_differ: self.plain.is_none() || rule.exprs.get(..prefix) != self.plain,
            claim,
        })
    }
}

impl State {
    /// Returns the mappings to other addresses that name this container and no attachment.
    pub(super) fn strays(&self, identity: &Identity, addresses: &[IpAddr]) -> Vec<ClaimedPort> {
        let rules = self.rules.iter().filter(|(chain, _)| *chain != MASQUERADING);
        let strays = rules.flat_map(|(_, rules)| identity.strays(rules, addresses, shape::container));
        strays.filter_map(|listed| Some(shape::read(&listed.rule)?.0)).collect()
    }

    /// Returns the first mapping of this container that a packet for the claim meets.
    pub(super) fn first(&self, identity: &Identity, claim: &ClaimedPort) -> Option<ClaimedPort> {
        let chain = |name| self.rules.iter().filter(move |(chain, _)| *chain == name).flat_map(|(_, rules)| rules);
        let mut mapped = chain(HOSTIP_HOSTPORTS)
            .chain(chain(HOSTPORTS))
            .filter(|listed| identity.owner(&listed.rule) != identity::Ownership::Other)
            .filter_map(|listed| Some(shape::read(&listed.rule)?.0));
        mapped.find(|there| there.overlaps(claim))
    }

    fn listed(&self) -> impl Iterator<Item = (&'static str, &Listed)> {
        self.rules.iter().flat_map(|(chain, rules)| rules.iter().map(move |listed| (*chain, listed)))
    }
}

impl NftPortMap {
    /// Reads the containers' rules about a claimed port and about this container's address, of one
    /// family. Does not read the shared chains.
    pub(super) fn suspects(&mut self, container: Cidr, claims: &[ClaimedPort]) -> Result<State> {
        let (family, address) = (Family::of(container.address()), shape::octets(container.address()));
        let table = shape::table(family);
        let mut state = State { family, missing: Vec::new(), gaps: Vec::new(), rules: Vec::new() };
        for chain in [HOSTPORTS, HOSTIP_HOSTPORTS] {
            let is_about = |rule: &[u8]| shape::names_port(rule, claims) || mentions(rule, &address);
            state.rules.push((chain, self.nft.rules_where(table, chain, is_about)?));
        }
        if state.listed().any(|(_, listed)| shape::container(&listed.rule) == Some(container.address())) {
            let rules = self.nft.rules_where(table, MASQUERADING, |rule| mentions(rule, &address))?;
            state.rules.push((MASQUERADING, rules));
        }
        Ok(state)
    }
}
