//! Finds the rules of other containers that are for a wanted port or lead to this container's
//! address, and plans the removal of those whose container is dead.

use std::collections::BTreeSet;
use std::net::IpAddr;

use cni::Cidr;

use super::super::conflict::{Fate, LivenessProbe};
use super::super::{ClaimedPort, Forwarding, Holder};
use super::shape::{self, DNAT, Jump, MappingRules, Section};
use super::{Chains, Plan, can_match_any, jumps_to};
use crate::iptables::Rule;
use cni::AttachmentId;
use cni_linux::error::Result;
use cni_linux::route::Family;

/// Adds to `plan` the removal of dead containers' rules: those that lead to this container's
/// address and, if `plan.conflict_action` is to displace them, those for the wanted ports. If a
/// living container has a wanted port, stops and sets `plan.living_holder`. `candidate_jumps` are
/// the rules of [`DNAT`] that may be for the ports. If the search by address fails, adds a remark
/// to the plan instead of failing.
pub(super) fn plan_displacement(
    nat: &mut Chains<'_>,
    wanted: &Forwarding,
    (container, claims): (Cidr, &[ClaimedPort]),
    candidate_jumps: &[Rule],
    probe: &mut LivenessProbe,
    plan: &mut Plan,
) -> Result<()> {
    // Chains with another prefix, to which an administrator may jump from DNAT, are not touched.
    let own_chain = shape::chain_name(&wanted.attachment);
    let is_of_other_container = |chain: &str| chain.starts_with(shape::PREFIX) && chain != own_chain;
    let mut port_chains = BTreeSet::new();
    for jump in candidate_jumps.iter().filter_map(Jump::read) {
        if is_of_other_container(&jump.chain) && claims.iter().any(|claim| jump.can_match(claim)) {
            port_chains.insert(jump.chain);
        }
    }
    for chain in &port_chains {
        plan_displacement_in_chain(nat, wanted, (container, claims), chain, probe, plan)?;
        if plan.living_holder.is_some() {
            return Ok(());
        }
    }
    // The wanted ports work even if rules for other ports lead to this container too, so the ADD
    // does not fail.
    if let Err(error) = plan_displacement_by_address(nat, wanted, (container, claims), &port_chains, probe, plan) {
        plan.remarks.push(format!(
            "failed to find all stale host port rules that lead to {}, so some may remain: {error}",
            container.address()
        ));
    }
    Ok(())
}

/// Does [`plan_displacement`] for the other containers' chains that lead to this container's
/// address, except `searched_chains`. Fails if other processes keep changing rules.
fn plan_displacement_by_address(
    nat: &mut Chains<'_>,
    wanted: &Forwarding,
    (container, claims): (Cidr, &[ClaimedPort]),
    searched_chains: &BTreeSet<String>,
    probe: &mut LivenessProbe,
    plan: &mut Plan,
) -> Result<()> {
    let own_chain = shape::chain_name(&wanted.attachment);
    for chain in nat.list_chains_for_address(shape::PREFIX, container.address(), DNAT)? {
        if chain == own_chain || searched_chains.contains(&chain) {
            continue;
        }
        nat.with_few_retries(|nat| plan_displacement_in_chain(nat, wanted, (container, claims), &chain, probe, plan))?;
        if plan.living_holder.is_some() {
            break;
        }
    }
    Ok(())
}

/// Does [`plan_displacement`] for `chain`, the chain of another container. On failure the plan is
/// unchanged.
fn plan_displacement_in_chain(
    nat: &mut Chains<'_>,
    wanted: &Forwarding,
    (container, claims): (Cidr, &[ClaimedPort]),
    chain: &str,
    probe: &mut LivenessProbe,
    plan: &mut Plan,
) -> Result<()> {
    let jumps = jumps_to(nat, chain)?;
    let Some(content) = nat.chain(chain)?.cloned() else { return Ok(()) };
    let other = OtherChain::new(chain, wanted, container.address(), &jumps);
    let sections = shape::sections(&content.rules);
    let (mut removed, mut kept): (Vec<&Rule>, Vec<&MappingRules>) = (Vec::new(), Vec::new());
    let mut remarks = Vec::new();
    for section in &sections {
        let mut has_kept_mapping = false;
        for mapping in &section.mappings {
            let fate = match other.holder_of(section, mapping, claims) {
                Some(holder) => probe.decide(wanted, holder, plan.conflict_action, &mut remarks)?,
                None => Fate::Keep,
            };
            match fate {
                Fate::Keep => {
                    kept.push(mapping);
                    has_kept_mapping = true;
                }
                Fate::Remove => removed.extend(&mapping.rules),
                Fate::RefuseAdd(holder) => {
                    plan.living_holder = Some(holder);
                    return Ok(());
                }
            }
        }
        // A marker that never had a mapping, written by `ensure_empty_chains`, is kept.
        if !has_kept_mapping && !section.mappings.is_empty() {
            removed.extend(&section.marker);
        }
    }
    plan.remarks.append(&mut remarks);
    // An empty chain is kept too: it does not show its owner.
    if removed.is_empty() {
        return Ok(());
    }
    if kept.is_empty() {
        for jump in &jumps {
            plan.edit.delete(DNAT, jump);
        }
        plan.edit.delete_chain(chain, &content);
        return Ok(());
    }
    for rule in removed {
        plan.edit.delete(chain, rule);
    }
    // `None` if the claim of a kept mapping is unknown: the mapping may need any of the jumps.
    let kept_claims: Option<Vec<ClaimedPort>> = kept.iter().map(|mapping| mapping.claim).collect();
    if let Some(kept_claims) = kept_claims {
        for jump in jumps.iter().filter(|jump| !can_match_any(jump, &kept_claims)) {
            plan.edit.delete(DNAT, jump);
        }
    }
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
    /// Describes `chain`. `jumps` are all rules of [`DNAT`] that jump to the chain; `wanted` and
    /// `address` are those of the ADD.
    fn new(chain: &'t str, wanted: &'t Forwarding, address: IpAddr, jumps: &'t [Rule]) -> OtherChain<'t> {
        let conditions_differ = !wanted.conditions(Family::of(address)).is_empty()
            || jumps.iter().filter_map(Jump::read).any(|jump| jump.has_conditions);
        let jump_owner = jumps.iter().find_map(|jump| shape::read_comment(jump.comment()?));
        OtherChain { chain, attachment: &wanted.attachment, address, jump_owner, conditions_differ }
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
