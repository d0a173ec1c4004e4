//! Reads the shared chains and the rules of containers.

use super::super::identity::Identity;
use super::shape::{self, CONTAINER_CHAINS, ENTRY_CHAINS, HOSTIP_HOSTPORTS, HOSTPORTS, HOSTPORTS_ALL, MASQUERADING};
use super::{ClaimedPort, FamilyRequest, Snat};
use crate::iptables::FAMILIES;
use crate::nft::{Batch, Chain, Expr, Key, Listed, Nft, Rule, Search, mentions};
use cni::cidr::octets;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

/// A rule of a container.
#[derive(Clone, Debug)]
pub(super) struct ContainerRule {
    pub(super) family: Family,
    /// One of [`CONTAINER_CHAINS`].
    pub(super) chain: &'static str,
    pub(super) listed: Listed,
}

impl ContainerRule {
    /// Returns the claim of a mapping; `None` for any other rule.
    pub(super) fn claim(&self) -> Option<ClaimedPort> {
        shape::read_mapping(&self.listed.rule).map(|(claim, _)| claim)
    }
}

/// Reads the rules of containers in one family that have one of these keys; other rules can be
/// among them. `chains` are those that exist. To the chains `appended` the caller appends the rules
/// that it does not find, so their index is enough; see [`Search`].
pub(super) fn read_rules(
    nft: &mut Nft,
    family: Family,
    chains: &[Chain],
    keys: &[Key],
    appended: &[&str],
) -> Result<Vec<ContainerRule>> {
    let (table, mut rules) = (shape::table(family), Vec::new());
    for name in CONTAINER_CHAINS {
        let listed = match chains.iter().find(|chain| chain.name == name) {
            // It is short, because only older releases of Go add rules to it. So it is read without
            // looking for it first, and needs no index.
            _ if name == HOSTIP_HOSTPORTS && !chains.is_empty() => {
                let mut listed = nft.rules(table, name)?;
                listed.retain(|listed| shape::keys(listed).iter().any(|key| keys.contains(key)));
                listed
            }
            Some(chain) => {
                let reads_all_if_missing = !appended.contains(&name);
                let search = Search { keys_of: shape::keys, appended: &[], wanted: keys, reads_all_if_missing };
                nft.rules_with_keys(table, chain, search)?
            }
            None => continue,
        };
        rules.extend(listed.into_iter().map(|listed| ContainerRule { family, chain: name, listed }));
    }
    Ok(rules)
}

/// Returns those of the chains for [`read_rules`] that exist.
fn find_chains(nft: &mut Nft, family: Family) -> Result<Vec<Chain>> {
    let mut chains = Vec::new();
    for name in [HOSTPORTS, MASQUERADING] {
        chains.extend(nft.find_chain(shape::table(family), name)?);
    }
    Ok(chains)
}

/// Reads the rules of one family that contain a wanted port or the container's address. For a
/// caller that appends no rule: an index could not tell that the chain has none of them.
pub(super) fn read_conflicting(nft: &mut Nft, request: &FamilyRequest<'_>) -> Result<Vec<ContainerRule>> {
    let (family, address) = (request.family, request.container.address());
    let (table, octets) = (shape::table(family), octets(address));
    let mut rules: Vec<ContainerRule> = Vec::new();
    for chain in [HOSTPORTS, HOSTIP_HOSTPORTS] {
        let can_conflict = |rule: &[u8]| shape::names_port(rule, &request.claims) || mentions(rule, &octets);
        let listed = nft.rules_where(table, chain, can_conflict)?;
        rules.extend(listed.into_iter().map(|listed| ContainerRule { family, chain, listed }));
    }
    // Masquerading rules are removed only together with a mapping to the same address.
    if rules.iter().any(|found| shape::container(&found.listed.rule) == Some(address)) {
        let listed = nft.rules_where(table, MASQUERADING, |rule| mentions(rule, &octets))?;
        rules.extend(listed.into_iter().map(|listed| ContainerRule { family, chain: MASQUERADING, listed }));
    }
    Ok(rules)
}

/// Reads the rules in both families that have this container's comment, also those of its other
/// attachments: the caller asks [`Identity::ownership_of`]. Other rules can be among them.
pub(super) fn rules_naming_container(nft: &mut Nft, identity: &Identity) -> Result<Vec<ContainerRule>> {
    let (keys, mut rules) = ([Key::comment(&identity.comment)], Vec::new());
    for family in FAMILIES {
        let chains = find_chains(nft, family)?;
        rules.extend(read_rules(nft, family, &chains, &keys, &[])?);
    }
    Ok(rules)
}

/// Reads the rules of all containers in both families.
pub(super) fn read_all_rules(nft: &mut Nft) -> Result<Vec<ContainerRule>> {
    let mut rules = Vec::new();
    for (family, chain) in FAMILIES.into_iter().flat_map(|family| CONTAINER_CHAINS.map(|chain| (family, chain))) {
        let listed = nft.rules(shape::table(family), chain)?;
        rules.extend(listed.into_iter().map(|listed| ContainerRule { family, chain, listed }));
    }
    Ok(rules)
}

/// The shared chains and rules of one family.
pub(super) struct Shared {
    pub(super) family: Family,
    /// The chains that exist.
    pub(super) chains: Vec<Chain>,
    /// The chains that are needed and do not exist.
    pub(super) missing_chains: Vec<&'static str>,
    /// The rules that do not exist, each with its chain.
    missing_rules: Vec<(&'static str, Vec<Expr>)>,
}

impl Shared {
    /// Reads them. With [`Snat::No`], [`MASQUERADING`] need not exist. Fails if a base chain that
    /// is needed exists with another type, hook or priority.
    pub(super) fn read(nft: &mut Nft, family: Family, snat: Snat) -> Result<Shared> {
        let table = shape::table(family);
        let (chains, missing_chains, missing_rules) = Default::default();
        let mut shared = Shared { family, chains, missing_chains, missing_rules };
        for (name, base) in shape::SHARED_CHAINS {
            let is_needed = name != MASQUERADING || snat != Snat::No;
            let Some(chain) = nft.find_chain(table, name)? else {
                if is_needed {
                    shared.missing_chains.push(name);
                }
                continue;
            };
            if is_needed && base.is_some() && chain.base != base {
                let cause =
                    Cause::text("the chain exists, but not with the type, hook and priority that portmap needs");
                return Err(Error::new(format_args!("failed to use nft chain {table} {name}"), cause));
            }
            shared.chains.push(chain);
        }
        let [prerouting, output] = ENTRY_CHAINS.map(|name| (name, vec![shape::entry_rule()]));
        let hostports_all = (HOSTPORTS_ALL, shape::hostports_all_rules().to_vec());
        for (chain, wanted_rules) in [prerouting, output, hostports_all] {
            let is_missing = shared.missing_chains.contains(&chain);
            let existing = if is_missing { Vec::new() } else { nft.rules(table, chain)? };
            let is_absent = |rule: &Vec<Expr>| !existing.iter().any(|listed| listed.rule.exprs == *rule);
            shared.missing_rules.extend(wanted_rules.into_iter().filter(is_absent).map(|rule| (chain, rule)));
        }
        Ok(shared)
    }

    /// Adds the missing chains and rules to a transaction.
    pub(super) fn add_missing(&self, batch: &mut Batch) {
        let table = shape::table(self.family);
        if !self.missing_chains.is_empty() {
            batch.ensure_table(table, Some(shape::TABLE_COMMENT));
        }
        for (name, base) in shape::SHARED_CHAINS.into_iter().filter(|(name, _)| self.missing_chains.contains(name)) {
            match base {
                Some(base) => batch.ensure_base_chain(table, name, base, None),
                None => batch.ensure_chain(table, name, None),
            }
        }
        for (chain, exprs) in &self.missing_rules {
            batch.append_rule(table, chain, &Rule::new(exprs.clone()));
        }
    }

    /// Returns the chains that exist and lack a jump to the next chain.
    pub(super) fn chains_without_jump(&self) -> Vec<&'static str> {
        let mut chains: Vec<&'static str> = self.missing_rules.iter().map(|(chain, _)| *chain).collect();
        // A chain can lack both of its jumps.
        chains.dedup();
        chains.retain(|chain| !self.missing_chains.contains(chain));
        chains
    }
}
