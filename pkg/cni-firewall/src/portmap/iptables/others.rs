//! Finds the rules of other containers for a wanted port or to this container's address, and plans
//! the removal of those whose container is dead.

use std::collections::BTreeSet;
use std::net::IpAddr;

use cni::Cidr;

use super::super::conflict::{Liveness, LivenessProbe};
use super::super::{ClaimedPort, Forwarding, Holder};
use super::shape::{self, DNAT, Group, Jump, Section};
use super::{Chains, Plan, serves_any};
use crate::iptables::Rule;
use cni::AttachmentId;
use cni_linux::error::Result;
use cni_linux::route::Family;

/// Adds to `plan` the removal of dead containers' rules for the wanted ports and to this
/// container's address. If a living container has a wanted port, stops and sets `plan.held` to that
/// container. `candidate_jumps` are the rules of [`DNAT`] that may be for the ports. If the search
/// for rules to the address fails, adds a remark to the plan instead of failing.
pub(super) fn plan_displacement(
    nat: &mut Chains<'_>,
    wanted: &Forwarding,
    (container, claims): (Cidr, &[ClaimedPort]),
    candidate_jumps: &[Rule],
    (probe, plan): (&mut LivenessProbe, &mut Plan),
) -> Result<()> {
    // Chains with another prefix, to which an administrator may jump from DNAT, are not touched.
    let own_chain = shape::chain(&wanted.attachment);
    let is_of_other_container = |chain: &str| chain.starts_with(shape::PREFIX) && chain != own_chain;
    let mut port_chains = BTreeSet::new();
    for jump in candidate_jumps.iter().filter_map(Jump::read) {
        if is_of_other_container(&jump.chain) && claims.iter().any(|claim| jump.serves(claim)) {
            port_chains.insert(jump.chain);
        }
    }
    for chain in &port_chains {
        plan_displacement_in_chain(nat, wanted, (container, claims), chain, (probe, plan))?;
        if plan.held.is_some() {
            return Ok(());
        }
    }
    let mut plan_by_address = || -> Result<()> {
        for chain in nat.list_chains_for_address(DNAT, shape::PREFIX, container.address())? {
            if !is_of_other_container(&chain) || port_chains.contains(&chain) {
                continue;
            }
            plan_displacement_in_chain(nat, wanted, (container, claims), &chain, (probe, plan))?;
            if plan.held.is_some() {
                break;
            }
        }
        Ok(())
    };
    // Rules that lead here from other ports do not keep the wanted ports from working, so the ADD
    // does not fail.
    if let Err(error) = plan_by_address() {
        plan.remarks.push(format!(
            "failed to find all stale host port rules that lead to {}, so some may remain: {error}",
            container.address()
        ));
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
    (probe, plan): (&mut LivenessProbe, &mut Plan),
) -> Result<()> {
    let jumps = nat.rules_leading_to(DNAT, chain)?;
    let Some(content) = nat.chain(chain)?.cloned() else { return Ok(()) };
    let other = OtherChain::new(chain, wanted, container.address(), &jumps);
    let sections = shape::sections(&content.rules);
    let (mut removed, mut kept): (Vec<&Rule>, Vec<&Group>) = (Vec::new(), Vec::new());
    let mut remarks = Vec::new();
    for section in &sections {
        let kept_before_section = kept.len();
        for group in &section.groups {
            let Some(holder) = other.holder_of(section, group, claims) else {
                kept.push(group);
                continue;
            };
            let has_wanted_port = claims.iter().any(|claim| claim.overlaps(&holder.claim));
            match probe.liveness_of(wanted, &holder)? {
                Liveness::Alive if has_wanted_port => {
                    plan.held = Some(holder);
                    return Ok(());
                }
                Liveness::Alive => kept.push(group),
                Liveness::Dead => {
                    remarks.push(holder.removal_remark(wanted));
                    removed.extend(&group.rules);
                }
                Liveness::Unknown => {
                    let note = if has_wanted_port { holder.port_taken_remark() } else { holder.unknown_owner_remark() };
                    remarks.push(note);
                    kept.push(group);
                }
            }
        }
        // A marker is removed with the last mapping of its section. A chain that only has a marker
        // is the one that `ensure_empty_chains` creates.
        if kept.len() == kept_before_section && !section.groups.is_empty() {
            removed.extend(&section.marker);
        }
    }
    plan.remarks.append(&mut remarks);
    // Nothing is removed either from an empty chain, which does not show its owner.
    if removed.is_empty() {
        return Ok(());
    }
    if kept.is_empty() {
        jumps.iter().for_each(|jump| plan.edit.delete(DNAT, jump));
        plan.edit.delete_chain(chain, &content);
        return Ok(());
    }
    removed.iter().for_each(|rule| plan.edit.delete(chain, rule));
    // A kept rule without a readable claim may need any of the jumps, so all jumps are kept.
    let kept_claims: Option<Vec<ClaimedPort>> = kept.iter().map(|group| group.claim).collect();
    if let Some(kept_claims) = kept_claims {
        for jump in jumps.iter().filter(|jump| !serves_any(jump, &kept_claims)) {
            plan.edit.delete(DNAT, jump);
        }
    }
    Ok(())
}

/// A chain of another container, and what its rules are compared with.
struct OtherChain<'t> {
    chain: &'t str,
    /// This attachment.
    attachment: &'t AttachmentId,
    /// This container's address.
    address: IpAddr,
    /// The network and the container ID in the comment of a jump to the chain; `None` if no jump
    /// names them.
    jump_owner: Option<(&'t str, &'t str)>,
    /// Whether this attachment or a jump to the chain has conditions. Then both containers can have
    /// the same port, for different packets.
    has_conditions: bool,
}

impl<'t> OtherChain<'t> {
    /// Describes `chain`, to which `jumps` of [`DNAT`] lead, for an ADD of `wanted`. `address` is
    /// the address of the ADD's container.
    fn new(chain: &'t str, wanted: &'t Forwarding, address: IpAddr, jumps: &'t [Rule]) -> OtherChain<'t> {
        let has_conditions = !wanted.conditions(Family::of(address)).is_empty()
            || jumps.iter().filter_map(Jump::read).any(|jump| !jump.is_plain);
        let jump_owner = jumps.iter().find_map(|jump| shape::read_comment(jump.comment()?));
        OtherChain { chain, attachment: &wanted.attachment, address, jump_owner, has_conditions }
    }

    /// Returns the other container that has this mapping, if the mapping claims a wanted port or
    /// leads to this container's address. `None` for any other mapping, for one without a readable
    /// claim, and if the mapping belongs to this container.
    fn holder_of(&self, section: &Section, group: &Group, claims: &[ClaimedPort]) -> Option<Holder> {
        let claim = group.claim?;
        let leads_here = claim.container.ip() == self.address;
        if !leads_here && !claims.iter().any(|wanted| wanted.overlaps(&claim)) {
            return None;
        }
        // Both the comment of the jump and the marker of the section can name network and
        // container. The marker has only the hash of a long container ID, so the container ID in
        // the jump is preferred.
        let marked = section.alias().and_then(AttachmentId::parse);
        let (mut network, mut container_id) = (None, None);
        if let Some(marked) = &marked {
            network = Some(marked.network.as_str());
            container_id = marked.container_id.as_deref();
        }
        if let Some((jump_network, jump_container_id)) = self.jump_owner {
            network = network.or(Some(jump_network));
            container_id = Some(jump_container_id);
        }
        if container_id == Some(self.attachment.container_id.as_str()) {
            return None;
        }
        Some(Holder {
            container: container_id.map_or_else(|| format!("(chain {})", self.chain), str::to_owned),
            network: network.map(str::to_owned),
            alias: section.alias().map(str::to_owned),
            had_link: section.had_link(),
            conditions_differ: self.has_conditions,
            claim,
        })
    }
}
