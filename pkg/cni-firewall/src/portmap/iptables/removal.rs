//! Plans the removal of rules: those of the selected attachments, and for an ADD those of dead
//! containers that are for a wanted port or lead to the ADD's container. Keeps the rules that other
//! attachments need.
//!
//! A container's chain consists of [`RuleGroup`]s. The jumps to the chain are not part of them.

use std::collections::BTreeSet;

use cni::machine::OnSigterm;

use super::super::conflict::{ConflictSearch, Holder, SearchedTables, must_fail};
use super::super::{ClaimedPort, FamilyRequest};
use super::shape::{self, DNAT, RuleGroup, SNAT, can_match_any};
use super::{candidate_jumps, jumps_to};
use crate::Backend;
use crate::engine::Store;
use crate::iptables::{Chain, Chains, Edit, Iptables, Rule, Variant, variant_prefix};
use crate::nft::Retries;
use crate::owner::{ALIAS, AttachmentFilter, Untagged};
use cni::AttachmentId;
use cni_linux::error::Result;

/// The network and the container ID from the comment of a jump.
type JumpOwner<'j> = (&'j str, &'j str);

/// Returns the owner that a jump's comment names, if it names one.
fn jump_owner(jump: &Rule) -> Option<JumpOwner<'_>> {
    shape::read_comment(jump.comment()?)
}

/// Removes the rules of the selected attachments, in both families and variants. Adds the claims of
/// these rules to `claims` even if the removal fails. Starts no process if netlink finds
/// nothing and iptables-legacy has no table.
///
/// Rules made by these plugins name their attachment in a marker. The rules of Go's plugin have
/// only the network and the container ID, in the comments of the jumps to their chain:
/// - For one attachment, Go's rules in its container's chain are removed. Exceptions: the rules
///   lead to an address that [`Untagged::addresses_in`] excludes, or all these comments name other
///   containers.
/// - As garbage, Go's rules are removed if such comments exist, and all name the network and a
///   container without a valid attachment.
pub(in super::super) fn purge(
    store: &Store<'_>,
    filter: AttachmentFilter<'_>,
    claims: &mut BTreeSet<ClaimedPort>,
) -> Result<()> {
    match filter {
        AttachmentFilter::One { attachment, untagged } => {
            let chains = [shape::chain_name(attachment), shape::snat_chain_name(attachment)];
            store.purge_in_iptables(filter, &chains.each_ref().map(String::as_str), |nat| {
                plan_removal_of_one(nat, attachment, untagged, claims)
            })
        }
        AttachmentFilter::Garbage { network, valid } => {
            let is_selected = filter.selector(ALIAS);
            let valid_containers: BTreeSet<&str> = valid.iter().map(|(container_id, _)| container_id).collect();
            let is_garbage_owner =
                |(of_network, id): &JumpOwner<'_>| *of_network == network && !valid_containers.contains(id);
            let is_garbage = |group: &RuleGroup<'_>, owners: &[JumpOwner<'_>]| match group.alias() {
                Some(alias) => is_selected(alias),
                None => !owners.is_empty() && owners.iter().all(is_garbage_owner),
            };
            store.purge_in_iptables(filter, &[DNAT], |nat| plan_garbage(nat, is_garbage, claims))
        }
    }
}

/// Returns the removal of the rules that [`purge`] removes for one attachment. Adds their claims to
/// `claims`.
fn plan_removal_of_one(
    nat: &mut Chains<'_>,
    attachment: &AttachmentId,
    untagged: Untagged<'_>,
    claims: &mut BTreeSet<ClaimedPort>,
) -> Result<Edit> {
    // The addresses to one of which a rule of Go's plugin must lead; `None` if it may lead to any.
    let known = untagged.addresses_in(nat.family());
    let is_removed = |group: &RuleGroup<'_>, owners: &[JumpOwner<'_>]| match group.alias() {
        Some(alias) => alias == attachment.alias(),
        // Go's plugin made the rules. They belong to another container if all owners are other
        // containers: two containers can share a chain, because its name is a hash of network and
        // container ID without a separator.
        None => {
            let leads_elsewhere =
                |claim: ClaimedPort| known.is_some_and(|known| !known.contains(&claim.container.ip()));
            let may_be_of_container =
                owners.is_empty() || owners.contains(&(&attachment.network, &attachment.container_id));
            may_be_of_container && !group.claim.is_some_and(leads_elsewhere)
        }
    };
    let mut edit = Edit::new();
    let chain = shape::chain_name(attachment);
    if let Some(content) = nat.chain(&chain)?.cloned() {
        let jumps = jumps_to(nat, &chain, Retries::Many)?;
        claims.extend(plan_removal_from(&mut edit, (&chain, &content), &jumps, is_removed));
    }
    // Very old releases of Go's plugin made this second chain.
    let snat_chain = shape::snat_chain_name(attachment);
    if let Some(snat_content) = nat.chain(&snat_chain)?.cloned() {
        for rule in nat.rules(SNAT)?.iter().filter(|rule| rule.target() == Some(&snat_chain)) {
            edit.delete(SNAT, rule);
        }
        edit.delete_chain(&snat_chain, &snat_content);
    }
    Ok(edit)
}

/// Returns the removal of the rules of all containers' chains for which `is_garbage` is true, as
/// [`plan_removal_from`] does for one chain. Reads each chain once. Adds the claims of the removed
/// rules to `claims`.
pub(super) fn plan_garbage(
    nat: &mut Chains<'_>,
    is_garbage: impl Fn(&RuleGroup<'_>, &[JumpOwner<'_>]) -> bool,
    claims: &mut BTreeSet<ClaimedPort>,
) -> Result<Edit> {
    let mut edit = Edit::new();
    let chains = nat.read_chains_where(|name| name.starts_with(shape::PREFIX))?;
    if chains.is_empty() {
        return Ok(edit);
    }
    let jumps_by_chain = nat.rules_by_target(DNAT)?;
    for chain in chains {
        let Some(content) = nat.chain(&chain)? else { continue };
        let jumps = jumps_by_chain.get(&chain).map_or(&[][..], Vec::as_slice);
        claims.extend(plan_removal_from(&mut edit, (&chain, content), jumps, &is_garbage));
    }
    Ok(edit)
}

/// Adds to `edit` the removal of the rules of a chain for which `is_removed` is true, of the
/// `jumps` that no kept rule needs, and of the chain if no rule is kept. `jumps` are all jumps to
/// the chain; `is_removed` is called with a group of rules and the owners that the comments of all
/// jumps name. Returns the claims of the removed rules.
fn plan_removal_from(
    edit: &mut Edit,
    (chain, content): (&str, &Chain),
    jumps: &[Rule],
    is_removed: impl Fn(&RuleGroup<'_>, &[JumpOwner<'_>]) -> bool,
) -> Vec<ClaimedPort> {
    let owners: Vec<JumpOwner<'_>> = jumps.iter().filter_map(jump_owner).collect();
    let (removed, kept): (Vec<_>, Vec<_>) =
        shape::groups(&content.rules).into_iter().partition(|group| is_removed(group, &owners));
    delete_groups(edit, (chain, content), jumps, &removed, &kept);
    removed.iter().filter_map(|group| group.claim).collect()
}

/// Searches the tables in which the ADD makes no rules for rules of other containers. Removes those
/// of dead containers that lead to the container's addresses. `written` is the backend in which the
/// ADD makes its rules; `None` if it makes none.
///
/// In a family in which a port is mapped, searches both variants, except the one that the ADD
/// writes. In any other family, searches only iptables-nft.
///
/// # Errors
/// - A living container has a wanted port.
/// - The tables of iptables-nft cannot be read; those of iptables-legacy only become a note.
/// - SIGTERM. Any other failure to remove rules is only a remark.
pub(in super::super) fn search_other_tables(
    store: &Store<'_>,
    search: &mut ConflictSearch<'_>,
    written: Option<Backend>,
) -> Result<()> {
    let mut iptables = store.open(OnSigterm::Kill)?;
    for request in search.wanted.families_with_address() {
        let (family, is_mapped) = (request.family, !request.claims.is_empty());
        let is_written = is_mapped && written == Some(Backend::Iptables);
        let written_variant = if is_written { iptables.chosen_variant(family)? } else { None };
        for variant in iptables.variants_to_search(family, &[DNAT])? {
            // Most containers map no port: their ADD must not cost a process of iptables-legacy.
            if Some(variant) == written_variant || (variant == Variant::Legacy && !is_mapped) {
                continue;
            }
            let name = variant_prefix(family, variant);
            search.begin(SearchedTables::Other(name.clone()));
            match search_table(&mut iptables, &request, variant, search) {
                Err(error) if variant == Variant::Legacy && !must_fail(&error) => store.notes.note(format_args!(
                    "portmap: {name} has a table nat, but it was not searched for other containers' host ports: \
                     {error}"
                )),
                result => result?,
            }
        }
    }
    Ok(())
}

/// Searches the table of one family and variant, removes the stale rules and writes the remarks.
/// Takes the lock only if there are stale rules.
fn search_table(
    iptables: &mut Iptables<'_>,
    request: &FamilyRequest<'_>,
    variant: Variant,
    search: &mut ConflictSearch<'_>,
) -> Result<()> {
    let plan = |nat: &mut Chains<'_>, search: &mut ConflictSearch<'_>| {
        // Jumps are found by port numbers, so without a port there are none to find.
        let jumps = if request.claims.is_empty() { Vec::new() } else { candidate_jumps(nat, request)? };
        let mut edit = Edit::new();
        plan_displacement(nat, request, &jumps, search, &mut edit)?;
        Ok(edit)
    };
    // The first plan only shows whether there is anything to remove, and mostly there is not.
    // `change` plans again, under the lock.
    let edit = plan(&mut iptables.read(request.family, variant)?, search)?;
    let mut removal = Ok(());
    if !edit.is_empty() {
        removal = iptables.change(request.family, variant, |nat| plan(nat, search));
    }
    search.finish(removal)
}

/// Adds to `edit` the removal of dead containers' rules: those that lead to this container's
/// address and, in the tables in which the ADD makes its rules, those for the wanted ports. Fails
/// if a living container has a wanted port. `candidate_jumps` are the rules of [`DNAT`] that may be
/// for the ports. If the search by address fails for another reason, only adds a remark.
pub(super) fn plan_displacement(
    nat: &mut Chains<'_>,
    request: &FamilyRequest<'_>,
    candidate_jumps: &[Rule],
    search: &mut ConflictSearch<'_>,
    edit: &mut Edit,
) -> Result<()> {
    // The container's own chain is not searched.
    let mut searched_chains = BTreeSet::from([shape::chain_name(&request.wanted.attachment)]);
    for jump in candidate_jumps.iter().filter(|jump| can_match_any(jump, &request.claims)) {
        // An administrator may jump from DNAT to chains with another prefix: they are not touched.
        if let Some(chain) = jump.target().filter(|chain| chain.starts_with(shape::PREFIX))
            && searched_chains.insert(chain.to_owned())
        {
            plan_displacement_in_chain(nat, request, (chain, Retries::Many), search, edit)?;
        }
    }
    // Fails soon if other processes keep changing rules.
    let by_address = nat.list_chains_for_address(shape::PREFIX, request.container.address(), DNAT);
    let result = by_address.and_then(|chains| {
        let mut chains = chains.difference(&searched_chains);
        chains.try_for_each(|chain| plan_displacement_in_chain(nat, request, (chain, Retries::Few), search, edit))
    });
    match result {
        Err(error) if error.is_held() => return Err(error),
        // The wanted ports work even if rules for other ports lead to this container too, so the
        // ADD does not fail.
        Err(error) => search.remark(format_args!(
            "failed to find all stale host port rules that lead to {}, so some may remain: {error}",
            request.container.address()
        )),
        Ok(()) => {}
    }
    Ok(())
}

/// Does [`plan_displacement`] for `chain`, the chain of another container. `retries` bounds the
/// reading of the jumps to it. On failure `edit` is unchanged.
fn plan_displacement_in_chain(
    nat: &mut Chains<'_>,
    request: &FamilyRequest<'_>,
    (chain, retries): (&str, Retries),
    search: &mut ConflictSearch<'_>,
    edit: &mut Edit,
) -> Result<()> {
    let jumps = jumps_to(nat, chain, retries)?;
    let Some(content) = nat.chain(chain)? else { return Ok(()) };
    let (mut displaced, mut kept) = (Vec::new(), Vec::new());
    for group in shape::groups(&content.rules) {
        let is_displaced = match group.claim.filter(|claim| search.conflicts_with(claim)) {
            Some(claim) => {
                let holder = holder_of(claim, &group, (chain, &jumps), request);
                // Two attachments of one container do not conflict.
                holder.container != request.wanted.attachment.container_id && search.decide_removal(holder)?
            }
            None => false,
        };
        if is_displaced { displaced.push(group) } else { kept.push(group) }
    }
    // A marker is removed with the last of its mappings. One that never had a mapping, which an ADD
    // writes in a family in which no port is mapped, is kept.
    let is_mapping_of = |group: &RuleGroup<'_>, marker| !group.is_marker() && group.marker == marker;
    let (unused_markers, kept): (Vec<RuleGroup<'_>>, Vec<RuleGroup<'_>>) = kept.iter().partition(|group| {
        group.is_marker()
            && displaced.iter().any(|other| is_mapping_of(other, group.marker))
            && !kept.iter().any(|other| is_mapping_of(other, group.marker))
    });
    delete_groups(edit, (chain, content), &jumps, &[unused_markers, displaced].concat(), &kept);
    Ok(())
}

/// Returns the container that has the chain `chain`, as the holder of `claim`, which is that of
/// `group` in this chain. `jumps` are all rules of [`DNAT`] that jump to the chain.
fn holder_of(
    claim: ClaimedPort,
    group: &RuleGroup<'_>,
    (chain, jumps): (&str, &[Rule]),
    request: &FamilyRequest<'_>,
) -> Holder {
    let (jump_network, jump_container_id) = jumps.iter().find_map(jump_owner).unzip();
    // The marker's alias is `cni:NETWORK/CONTAINER/IFNAME`; rules of Go's plugin have none.
    let marked = group.alias().and_then(AttachmentId::parse);
    let network = marked.as_ref().map(|marked| marked.network.as_str()).or(jump_network);
    // The marker has only the hash of a long container ID, so the ID in the jump is preferred.
    let container_id = jump_container_id.or(marked.as_ref().and_then(|marked| marked.container_id.as_deref()));
    Holder {
        container: container_id.map_or_else(|| format!("(chain {chain})"), str::to_owned),
        network: network.map(str::to_owned),
        attachment: marked,
        had_link: group.had_link(),
        // Any conditions count as different, because the kernel can return them in a form that
        // differs from the configuration.
        conditions_differ: !request.conditions().is_empty() || jumps.iter().any(shape::has_conditions),
        claim,
    }
}

/// Adds to `edit` the removal of the rules `removed` of a chain, of the `jumps` to the chain that
/// no rule of `kept` needs, and of the chain if `kept` is empty. Rules that do not show their owner
/// are removed only with the whole chain. Changes nothing if `removed` is empty.
fn delete_groups(
    edit: &mut Edit,
    (chain, content): (&str, &Chain),
    jumps: &[Rule],
    removed: &[RuleGroup<'_>],
    kept: &[RuleGroup<'_>],
) {
    if removed.is_empty() {
        return;
    }
    if kept.is_empty() {
        for jump in jumps {
            edit.delete(DNAT, jump);
        }
        edit.delete_chain(chain, content);
        return;
    }
    let kept_claims: Vec<ClaimedPort> = kept.iter().filter_map(|group| group.claim).collect();
    // Rules that have neither a marker nor an address may be of an attachment in `kept`, so they
    // stay. The jumps that only these rules need are removed below: without them, no packet reaches
    // these rules.
    let with_owner = removed.iter().filter(|group| group.shows_owner());
    delete_rules(edit, chain, with_owner.flat_map(|group| group.rules), &kept_claims);
    // A mapping with an unknown claim may need any of the jumps.
    if kept.iter().any(|group| group.claim.is_none() && !group.is_marker()) {
        return;
    }
    for jump in jumps.iter().filter(|jump| !can_match_any(jump, &kept_claims)) {
        edit.delete(DNAT, jump);
    }
}

/// Adds to `edit` the removal of these rules of a chain, except those that mark connections to a
/// port in `kept_claims`. Kept mappings may need these: Go makes such a rule only once for all
/// addresses of a container. And iptables-legacy, which does not number rules, would remove the
/// first rule with the same words, perhaps one that is kept.
pub(super) fn delete_rules<'r>(
    edit: &mut Edit,
    chain: &str,
    rules: impl IntoIterator<Item = &'r Rule>,
    kept_claims: &[ClaimedPort],
) {
    for rule in rules {
        let (protocol, port) = (rule.value("-p"), rule.value("--dport").and_then(|port| port.parse().ok()));
        let has_port_of = |kept: &ClaimedPort| protocol == Some(kept.protocol.name()) && port == Some(kept.host_port);
        if rule.target() == Some("DNAT") || !kept_claims.iter().any(has_port_of) {
            edit.delete(chain, rule);
        }
    }
}
