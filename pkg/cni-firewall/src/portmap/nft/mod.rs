//! Maps host ports with nf_tables: each call makes one transaction for both families, and runs no
//! program. Only mappings with conditions that [`conditions`] does not compile are written by the
//! program `nft` (module `program`).
//!
//! Module `shape` shows the rules. An ADD reads the existing rules (module `identity`), finds
//! conflicts in them and plans its transaction. The kernel accepts the transaction only if no rule
//! has changed since, so no lock is needed: of several racing ADDs, one succeeds each time.
//!
//! After a transaction that deletes a rule, closing the socket waits for an RCU grace period of the
//! kernel (some 10 ms), so an ADD deletes only rules that are outdated or conflict with it. The
//! shared chains are never flushed or removed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::conditions;
use super::conflict::{ConflictSearch, SearchedTables};
use super::{ClaimedPort, FamilyRequest, Holder, Policy, Refusal, Snat, older_mapping_remark};
use crate::engine::{self, Store};
use crate::nft::{Batch, Expr, Key, Nft, Rule};
use crate::owner::{AttachmentFilter, OwnerTag, Untagged};
use cni::AttachmentId;
use cni::config::ValidAttachments;
use cni_linux::error::Result;
use cni_linux::route::Family;

mod check;
pub(crate) mod identity;
mod program;
pub(crate) mod shape;
#[cfg(test)]
mod tests;

pub(super) use check::check;
use identity::{ContainerRule, HostLink, Identity, Ownership, read_all_rules, read_rules, rules_naming_container};
use program::ProgramMappings;
use shape::{CONTAINER_CHAINS, HOSTPORTS, MASQUERADING, Shared};

/// The request of an ADD in one family, and what exists there.
struct FamilyPlan<'w> {
    request: FamilyRequest<'w>,
    shared: Shared,
    rules: Vec<ContainerRule>,
}

/// Replaces the attachment's rules in one transaction. If a living container has a wanted port,
/// fails and changes nothing. Mappings whose conditions [`conditions`] does not compile are written
/// afterwards by the program `nft`.
pub(super) fn ensure(store: &Store<'_>, search: &mut ConflictSearch<'_>, changed: &mut bool) -> Result<(), Refusal> {
    let wanted = search.wanted;
    let program_mappings = ProgramMappings::uncompiled(wanted)?;
    let identity = Identity::new(&wanted.attachment);
    let host_link = match search.find_host_link(&wanted.attachment)? {
        Some(_) => HostLink::Present,
        None => HostLink::Absent,
    };
    let appended: &[&str] = if wanted.snat == Snat::No { &[HOSTPORTS] } else { &[HOSTPORTS, MASQUERADING] };
    let plan = |nft: &mut Nft, batch: &mut Batch| {
        let (mut plans, mut dead_rules) = (Vec::new(), Vec::new());
        search.begin(SearchedTables::Written);
        // A family in which no port is mapped needs the chains and the masquerading too: Go's CHECK
        // looks for them.
        for request in wanted.families_with_address() {
            let shared = Shared::read(nft, request.family, wanted.snat)?;
            let rules = read_rules(nft, request.family, &shared.chains, &keys(&request, &identity), appended)?;
            if wanted.policy == Policy::RefuseIfAlive {
                dead_rules.extend(dead_rules_among(&rules, &request, &identity, search)?);
                remark_older_mappings(&rules, &request, &identity, search);
            }
            plans.push(FamilyPlan { request, shared, rules });
        }
        for plan in &plans {
            plan.shared.add_missing(batch);
        }
        delete_rules(batch, &dead_rules);
        for plan in &plans {
            plan.add_own_rules(batch, &identity, host_link);
        }
        Ok(())
    };
    store.ensure_in_nftables(plan, changed)?;
    for mappings in &program_mappings {
        *changed = true;
        mappings.run(store.machine)?;
    }
    Ok(())
}

/// Fails if a living container has a wanted port, in either family. If none has, removes the rules
/// of dead containers that lead to the container's addresses; a failure to do so is only a remark.
/// For an ADD that makes its own rules with iptables or has no mappings.
pub(super) fn search_other_tables(search: &mut ConflictSearch<'_>) -> Result<()> {
    let mut nft = Nft::open()?;
    // Mostly there is nothing to remove. Then one reading of each list is enough.
    nft.wait_for_generation()?;
    if !find_dead_rules(&mut nft, search)?.is_empty() {
        let plan = |nft: &mut Nft, batch: &mut Batch| {
            delete_rules(batch, &find_dead_rules(nft, search)?);
            Ok(())
        };
        match engine::change(&mut nft, plan) {
            Err(error) if error.is_held() => return Err(error),
            Err(error) => search.remark(format_args!("the stale host port rules were not removed: {error}")),
            Ok(()) => {}
        }
    }
    search.note_remarks();
    Ok(())
}

/// Returns the rules of dead containers that must be removed, in all families in which the
/// container has an address. Fails if a living container has a wanted port.
fn find_dead_rules(nft: &mut Nft, search: &mut ConflictSearch<'_>) -> Result<Vec<ContainerRule>> {
    let (identity, mut dead_rules) = (Identity::new(&search.wanted.attachment), Vec::new());
    search.begin(SearchedTables::Other("nftables".to_owned()));
    for request in search.wanted.families_with_address() {
        let rules = identity::read_conflicting(nft, &request)?;
        dead_rules.extend(dead_rules_among(&rules, &request, &identity, search)?);
    }
    Ok(dead_rules)
}

/// Returns the keys of the rules that an ADD has to read: those of its container, those for its
/// ports, and those that lead to the container's address.
fn keys(request: &FamilyRequest<'_>, identity: &Identity) -> Vec<Key> {
    let mut keys = vec![Key::comment(&identity.comment), Key::address(request.container.address())];
    keys.extend(request.claims.iter().map(|claim| Key::port(claim.host_port)));
    keys
}

/// Adds the removal of these rules to the batch.
fn delete_rules(batch: &mut Batch, rules: &[ContainerRule]) {
    for ContainerRule { family, chain, listed } in rules {
        batch.delete_rule(shape::table(*family), chain, listed.handle);
    }
}

/// Returns the rules of dead containers that must be removed.
///
/// # Errors
/// Those of [`ConflictSearch::decide_removal`].
fn dead_rules_among(
    rules: &[ContainerRule],
    request: &FamilyRequest<'_>,
    identity: &Identity,
    search: &mut ConflictSearch<'_>,
) -> Result<Vec<ContainerRule>> {
    let address = Some(request.container.address());
    let mut dead_rules: Vec<ContainerRule> = Vec::new();
    for found in rules.iter().filter(|found| found.chain != MASQUERADING) {
        let Some(holder) = holder_of(&found.listed.rule, request, identity) else { continue };
        if search.decide_removal(holder)? {
            dead_rules.push(found.clone());
        }
    }
    // With the mappings of a dead container to this address, its masquerading rules for the
    // address are removed. They have the same comment and tags.
    let leads_here = |rule: &Rule| shape::container(rule) == address;
    let is_of_dead = |rule: &Rule| {
        let mut mappings = dead_rules.iter().map(|found| &found.listed.rule).filter(|mapping| leads_here(mapping));
        mappings.any(|mapping| mapping.comment == rule.comment && mapping.tags == rule.tags)
    };
    let is_removed = |found: &&ContainerRule| {
        found.chain == MASQUERADING && leads_here(&found.listed.rule) && is_of_dead(&found.listed.rule)
    };
    let masquerades: Vec<ContainerRule> = rules.iter().filter(is_removed).cloned().collect();
    dead_rules.extend(masquerades);
    Ok(dead_rules)
}

/// Returns the other container that a conflicting rule belongs to. `None` for a rule that does not
/// conflict: it is not a mapping, it has this container's ID, or it neither claims a wanted port
/// nor leads to this container's address.
fn holder_of(rule: &Rule, request: &FamilyRequest<'_>, identity: &Identity) -> Option<Holder> {
    let (claim, condition_count) = shape::read_mapping(rule)?;
    let leads_here = claim.container.ip() == request.container.address();
    if !leads_here && !request.claims.iter().any(|wanted| wanted.overlaps(&claim)) {
        return None;
    }
    if rule.comment.as_deref() == Some(&identity.comment) {
        return None;
    }
    // Conditions that do not compile, for example those in the syntax of iptables, count as
    // different from those of every rule.
    let conditions = conditions::compile(request.conditions(), request.family).ok();
    let tag = OwnerTag::of(rule);
    Some(Holder {
        container: rule.comment.clone().unwrap_or_else(|| "(unknown)".to_owned()),
        network: tag.alias().and_then(AttachmentId::parse).map(|marked| marked.network),
        alias: tag.alias().map(str::to_owned),
        had_link: identity::had_link(rule),
        conditions_differ: conditions.is_none_or(|conditions| rule.exprs[..condition_count] != conditions),
        claim,
    })
}

/// Adds a remark for each mapping of this container to another address that overlaps a claim.
fn remark_older_mappings(
    rules: &[ContainerRule],
    request: &FamilyRequest<'_>,
    identity: &Identity,
    search: &mut ConflictSearch<'_>,
) {
    for older in mappings_to_other_addresses(rules, identity, &request.wanted.addresses()) {
        if request.claims.iter().any(|claim| claim.overlaps(&older)) {
            search.remark(older_mapping_remark(&older));
        }
    }
}

/// Returns the mappings that name only this container and lead to none of `addresses`.
fn mappings_to_other_addresses(rules: &[ContainerRule], identity: &Identity, addresses: &[IpAddr]) -> Vec<ClaimedPort> {
    let others = rules.iter().filter(|found| identity.leads_elsewhere(&found.listed.rule, addresses));
    others.filter_map(ContainerRule::claim).collect()
}

impl FamilyPlan<'_> {
    /// Adds the attachment's own rules of the family: in each chain whose existing rules differ
    /// from the wanted ones, deletes the existing and appends the wanted ones. If the conditions
    /// do not compile, the program `nft` writes the mappings afterwards.
    fn add_own_rules(&self, batch: &mut Batch, identity: &Identity, host_link: HostLink) {
        let FamilyRequest { wanted, family, container, claims } = &self.request;
        let (table, addresses) = (shape::table(*family), wanted.addresses());
        for chain in CONTAINER_CHAINS {
            let of_chain = self.rules.iter().filter(|found| found.chain == chain);
            let own: Vec<&ContainerRule> =
                of_chain.filter(|found| identity.owns(&found.listed.rule, &addresses)).collect();
            let new_rules = match chain {
                HOSTPORTS => mapping_rules(&self.request, claims),
                MASQUERADING => shape::masquerade_rules(container.address(), wanted.snat),
                // Only older releases of Go add rules to `HOSTIP_HOSTPORTS`.
                _ => Vec::new(),
            };
            if own.iter().map(|found| &found.listed.rule.exprs).eq(&new_rules) {
                continue;
            }
            for found in own {
                batch.delete_rule(table, chain, found.listed.handle);
            }
            for exprs in new_rules {
                batch.append_rule(table, chain, &identity.sign(Rule::new(exprs), host_link));
            }
        }
    }
}

/// Returns the rules that map `claims`; none if the conditions do not compile.
fn mapping_rules(request: &FamilyRequest<'_>, claims: &[ClaimedPort]) -> Vec<Vec<Expr>> {
    let Ok(conditions) = conditions::compile(request.conditions(), request.family) else { return Vec::new() };
    claims.iter().map(|claim| [conditions.as_slice(), &shape::mapping_rule(claim)].concat()).collect()
}

/// Removes the rules of the selected attachments in both families, in one transaction. Adds the
/// claims of these rules to `claims` even if the removal fails: if only the kernel's answer was
/// lost, the rules are gone.
///
/// For one attachment, a rule that names only the container is removed if it leads to one of the
/// attachment's known addresses: those of the filter, and those in the rules that name the
/// attachment. If no address of its family is known, it is removed in any case, as by Go's plugin,
/// unless the filter has [`Untagged::Covering`].
///
/// For garbage, a rule that names only the container is removed if all rules that name a network
/// and have its container and address are garbage. Others stay, such as those of Go's plugin. If
/// the container of such a mapping has no valid attachment, a note says so.
pub(super) fn purge(store: &Store<'_>, filter: AttachmentFilter<'_>, claims: &mut BTreeSet<ClaimedPort>) -> Result<()> {
    // A set, because a repeated plan finds the same rules again.
    let mut remarks = BTreeSet::new();
    let result = store.purge_in_nftables(|nft, batch| {
        let rules = match filter {
            AttachmentFilter::One { attachment, untagged } => {
                let identity = Identity::new(attachment);
                let rules = rules_naming_container(nft, &identity)?;
                select_one(rules, &identity, untagged)
            }
            AttachmentFilter::Garbage { network, valid } => {
                select_garbage(read_all_rules(nft)?, network, valid, &mut remarks)
            }
        };
        delete_rules(batch, &rules);
        claims.extend(rules.iter().filter_map(ContainerRule::claim));
        Ok(())
    });
    for remark in remarks {
        store.notes.note(format_args!("portmap: {remark}"));
    }
    result
}

/// Returns the rules that [`purge`] removes for one attachment, of all rules that name its
/// container.
fn select_one(mut rules: Vec<ContainerRule>, identity: &Identity, untagged: Untagged<'_>) -> Vec<ContainerRule> {
    let mut known = untagged.addresses().to_vec();
    let named = rules.iter().map(|found| &found.listed.rule);
    known.extend(named.filter(|rule| identity.ownership_of(rule) == Ownership::This).filter_map(shape::container));
    let is_known = |family: Family| {
        untagged.addresses_in(family).is_some() || known.iter().any(|address| Family::of(*address) == family)
    };
    // A rule to another address of a known family shows that the container has another attachment.
    // Then addresses of the other family select no rule that names only the container.
    let has_other_attachment =
        rules.iter().any(|found| is_known(found.family) && identity.leads_elsewhere(&found.listed.rule, &known));
    rules.retain(|found| {
        let addresses: &[IpAddr] = if is_known(found.family) || has_other_attachment { &known } else { &[] };
        identity.owns(&found.listed.rule, addresses)
    });
    rules
}

/// Returns the rules that [`purge`] removes as garbage of a network, of all `rules`. Adds a remark
/// for each mapping that stays because its rule names no network.
fn select_garbage(
    mut rules: Vec<ContainerRule>,
    network: &str,
    valid: &ValidAttachments,
    remarks: &mut BTreeSet<String>,
) -> Vec<ContainerRule> {
    let mut valid_by_comment: BTreeMap<String, Vec<Identity>> = BTreeMap::new();
    for (container_id, ifname) in valid.iter() {
        let identity = Identity::new(&AttachmentId::new(network, container_id, ifname));
        valid_by_comment.entry(identity.comment.clone()).or_default().push(identity);
    }
    let valid_of = |rule: &Rule| rule.comment.as_ref().and_then(|comment| valid_by_comment.get(comment));
    let is_garbage = |rule: &Rule| {
        let is_this = |identity: &Identity| identity.ownership_of(rule) == Ownership::This;
        OwnerTag::of(rule).is_of_network(network) == Some(true)
            && !valid_of(rule).is_some_and(|valid| valid.iter().any(is_this))
    };
    let names_network = |rule: &Rule| OwnerTag::of(rule) != OwnerTag::Missing;
    let container_and_address = |rule: &Rule| rule.comment.clone().zip(shape::container(rule));
    // The containers and addresses of the rules that name a network, and whether all of these are
    // garbage.
    let mut owners: BTreeMap<(String, IpAddr), bool> = BTreeMap::new();
    for ContainerRule { listed, .. } in rules.iter().filter(|found| names_network(&found.listed.rule)) {
        if let Some(key) = container_and_address(&listed.rule) {
            let is_garbage = is_garbage(&listed.rule);
            owners.entry(key).and_modify(|all| *all &= is_garbage).or_insert(is_garbage);
        }
    }
    rules.retain(|found| {
        let rule = &found.listed.rule;
        if names_network(rule) {
            return is_garbage(rule);
        }
        let owner = container_and_address(rule).and_then(|key| owners.get(&key));
        if owner.is_none() && valid_of(rule).is_none() {
            remarks.extend(found.claim().map(|claim| unknown_network_remark(&claim, rule)));
        }
        owner == Some(&true)
    });
    rules
}

/// Returns the remark about a mapping that GC keeps because its rule names no network.
fn unknown_network_remark(claim: &ClaimedPort, rule: &Rule) -> String {
    let id = rule.comment.as_deref().unwrap_or("(unknown)");
    format!(
        "{claim} is mapped to {} of container {id} by a nftables rule that names no network: it was not removed, \
         because it may belong to another network",
        claim.container
    )
}
