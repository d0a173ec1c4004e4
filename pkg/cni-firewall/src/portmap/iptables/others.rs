//! Finds the rules of other containers that are for a wanted port or lead to this container's
//! address, and plans the removal of those whose container is dead.

use std::collections::BTreeSet;
use std::net::IpAddr;

use cni::machine::OnSigterm;

use super::super::conflict::{ConflictSearch, SearchedTables};
use super::super::{ClaimedPort, Holder};
use super::shape::{self, DNAT, Jump, MappingRules, Section};
use super::{Chains, FamilyRequest, candidate_jumps, delete_sections, jumps_to};
use crate::Backend;
use crate::engine::Store;
use crate::iptables::{Edit, Iptables, Rule, Variant, variant_prefix};
use cni::AttachmentId;
use cni_linux::error::{Error, Result};

/// Looks for a living container that has a wanted port, in the tables in which the ADD makes no
/// rules: those of both variants or, if `written` is iptables, those of the variant that it does
/// not use. Fails at the first such container. Until then, removes rules of dead containers that
/// lead to the container's addresses. In a family without a mapping, iptables-legacy is not read,
/// because that would cost a process.
///
/// # Errors
/// If a living container has a wanted port, if tables cannot be read, or on SIGTERM. If stale rules
/// cannot be removed, or iptables-legacy cannot be read, only adds a remark.
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
            // Most containers map no port: their ADD must not cost a process.
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
                Err(error) => return Err(error),
                Ok(()) => search.note_remarks(),
            }
        }
    }
    Ok(())
}

/// Whether the ADD must fail with this error of a search, instead of continuing with a remark: a
/// living container has a wanted port, or a signal ended a wait.
fn must_fail(error: &Error) -> bool {
    error.is_held() || error.is_terminated()
}

/// Searches the table of one family and variant, and removes the stale rules. Takes the lock only
/// if there are any.
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
    let edit = plan(&mut iptables.read(request.family, variant)?, search)?;
    if edit.is_empty() {
        return Ok(());
    }
    match iptables.change(request.family, variant, |nat| plan(nat, search)) {
        Err(error) if must_fail(&error) => return Err(error),
        Err(error) => search.remark(format_args!("the stale host port rules were not removed: {error}")),
        Ok(()) => {}
    }
    Ok(())
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
    // Chains with another prefix, to which an administrator may jump from DNAT, are not touched.
    let own_chain = shape::chain_name(&request.wanted.attachment);
    let is_of_other_container = |chain: &str| chain.starts_with(shape::PREFIX) && chain != own_chain;
    // The own chain is among those that need no search by address.
    let mut searched_chains = BTreeSet::from([own_chain.clone()]);
    for jump in candidate_jumps.iter().filter_map(Jump::read) {
        let can_match = request.claims.iter().any(|claim| jump.can_match(claim));
        if is_of_other_container(&jump.chain) && can_match && searched_chains.insert(jump.chain.clone()) {
            plan_displacement_in_chain(nat, request, &jump.chain, search, edit)?;
        }
    }
    match plan_displacement_by_address(nat, request, &searched_chains, search, edit) {
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

/// Does [`plan_displacement`] for the other containers' chains that lead to this container's
/// address, except `searched_chains`.
fn plan_displacement_by_address(
    nat: &mut Chains<'_>,
    request: &FamilyRequest<'_>,
    searched_chains: &BTreeSet<String>,
    search: &mut ConflictSearch<'_>,
    edit: &mut Edit,
) -> Result<()> {
    for chain in nat.list_chains_for_address(shape::PREFIX, request.container.address(), DNAT)? {
        if searched_chains.contains(&chain) {
            continue;
        }
        plan_displacement_in_chain(nat, request, &chain, search, edit)?;
    }
    Ok(())
}

/// Does [`plan_displacement`] for `chain`, the chain of another container. On failure `edit` is
/// unchanged.
fn plan_displacement_in_chain(
    nat: &mut Chains<'_>,
    request: &FamilyRequest<'_>,
    chain: &str,
    search: &mut ConflictSearch<'_>,
    edit: &mut Edit,
) -> Result<()> {
    let jumps = jumps_to(nat, chain)?;
    let Some(content) = nat.chain(chain)?.cloned() else { return Ok(()) };
    let other = OtherChain::new(chain, request, &jumps);
    let (mut removed, mut kept): (Vec<Section>, Vec<Section>) = Default::default();
    for section in shape::sections(&content.rules) {
        let (mut removed_part, mut kept_part) = (Section::default(), Section::default());
        for mapping in &section.mappings {
            let is_removed = match other.holder_of(&section, mapping, &request.claims) {
                Some(holder) => search.decide_removal(holder)?,
                None => false,
            };
            let part = if is_removed { &mut removed_part } else { &mut kept_part };
            part.mappings.push(mapping.clone());
        }
        // A marker that never had a mapping, written by `ensure_empty_chain`, is kept.
        let is_removed = kept_part.mappings.is_empty() && !removed_part.mappings.is_empty();
        let part = if is_removed { &mut removed_part } else { &mut kept_part };
        part.marker = section.marker;
        removed.push(removed_part);
        kept.push(kept_part);
    }
    // An empty chain is kept too: it does not show its owner.
    for sections in [&mut removed, &mut kept] {
        sections.retain(|section| section.rules().next().is_some());
    }
    delete_sections(edit, (chain, &content), &jumps, &removed, &kept);
    Ok(())
}

/// A chain of another container, and the data of the ADD that its rules are compared with.
struct OtherChain<'t> {
    chain: &'t str,
    /// The attachment of the ADD.
    attachment: &'t AttachmentId,
    /// The address of the ADD's container.
    address: IpAddr,
    /// The network and the container ID from the comment of a jump to the chain; `None` if no jump
    /// has such a comment.
    jump_owner: Option<(&'t str, &'t str)>,
    /// Whether the ADD's attachment or a jump to the chain has conditions. Both containers can then
    /// have the same port, for different packets. Conditions are not compared, because the kernel
    /// can return them in a form that differs from the configuration.
    conditions_differ: bool,
}

impl<'t> OtherChain<'t> {
    /// Describes `chain`. `jumps` are all rules of [`DNAT`] that jump to the chain.
    fn new(chain: &'t str, request: &'t FamilyRequest<'_>, jumps: &'t [Rule]) -> OtherChain<'t> {
        let conditions_differ =
            !request.conditions().is_empty() || jumps.iter().filter_map(Jump::read).any(|jump| jump.has_conditions);
        let jump_owner = jumps.iter().find_map(|jump| shape::read_comment(jump.comment()?));
        let (attachment, address) = (&request.wanted.attachment, request.container.address());
        OtherChain { chain, attachment, address, jump_owner, conditions_differ }
    }

    /// Returns the container that has this mapping, if the mapping claims a wanted port or leads to
    /// the address of the ADD's container. `None` for any other mapping, for one without a readable
    /// claim, and if the mapping belongs to the ADD's container.
    fn holder_of(&self, section: &Section, mapping: &MappingRules, claims: &[ClaimedPort]) -> Option<Holder> {
        let claim = mapping.claim?;
        let leads_here = claim.container.ip() == self.address;
        if !leads_here && !claims.iter().any(|wanted| wanted.overlaps(&claim)) {
            return None;
        }
        // The marker's alias is `cni:NETWORK/CONTAINER/IFNAME`; rules of Go's plugin have none.
        let marked = section.alias().and_then(AttachmentId::parse);
        let marked_network = marked.as_ref().map(|marked| marked.network.as_str());
        let marked_container_id = marked.as_ref().and_then(|marked| marked.container_id.as_deref());
        let (jump_network, jump_container_id) = self.jump_owner.unzip();
        let network = marked_network.or(jump_network);
        // The marker has only the hash of a long container ID, so the ID in the jump is preferred.
        let container_id = jump_container_id.or(marked_container_id);
        if container_id == Some(self.attachment.container_id.as_str()) {
            return None;
        }
        Some(Holder {
            container: container_id.map_or_else(|| format!("(chain {})", self.chain), str::to_owned),
            network: network.map(str::to_owned),
            alias: section.alias().map(str::to_owned),
            had_link: section.had_link(),
            conditions_differ: self.conditions_differ,
            claim,
        })
    }
}
