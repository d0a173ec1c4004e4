//! Decides about the rules of other containers: those about a wanted port, and those to the
//! container's own address.

use std::collections::BTreeSet;
use std::net::IpAddr;

use cni::Cidr;

use super::super::conflict::{Liveness, LivenessProbe};
use super::super::{ClaimedPort, Forwarding, Holder};
use super::shape::{self, DNAT, Group, Jump, Section};
use super::{Chains, Plan, is_needed};
use crate::iptables::Rule;
use cni::AttachmentId;
use cni_linux::error::Result;

/// Plans the removal of dead containers' rules for the wanted ports and to the container's address;
/// stops at a living container that has a wanted port. `ways` are the rules of [`DNAT`] about the
/// ports. If rules that only lead to the address cannot be read, the plan has a remark.
pub(super) fn displace(
    nat: &mut Chains<'_>,
    wanted: &Forwarding,
    (container, claims): (Cidr, &[ClaimedPort]),
    ways: &[Rule],
    (judge, plan): (&mut LivenessProbe, &mut Plan),
) -> Result<()> {
    let serves = |jump: &Jump| claims.iter().any(|claim| jump.serves(claim));
    // An administrator may lead from there to a chain of his own.
    let is_theirs = |chain: &String| chain.starts_with(shape::PREFIX) && *chain != shape::chain(&wanted.attachment);
    let about: BTreeSet<String> =
        ways.iter().filter_map(Jump::of).filter(serves).map(|jump| jump.chain).filter(is_theirs).collect();
    for chain in &about {
        displace_of(nat, wanted, (container, claims), chain, (judge, plan))?;
        if plan.held.is_some() {
            return Ok(());
        }
    }
    let towards = nat.list_chains_for_address(DNAT, shape::PREFIX, container.address()).and_then(|chains| {
        for chain in chains.iter().filter(|chain| is_theirs(chain) && !about.contains(*chain)) {
            displace_of(nat, wanted, (container, claims), chain, (judge, plan))?;
            if plan.held.is_some() {
                break;
            }
        }
        Ok(())
    });
    if let Err(error) = towards {
        plan.remarks.push(format!("failed to look for ports of former containers, whose rules may be left: {error}"));
    }
    Ok(())
}

/// The same for one chain. On failure nothing is planned.
fn displace_of(
    nat: &mut Chains<'_>,
    wanted: &Forwarding,
    (container, claims): (Cidr, &[ClaimedPort]),
    chain: &str,
    (judge, plan): (&mut LivenessProbe, &mut Plan),
) -> Result<()> {
    let jumps = nat.rules_leading_to(DNAT, chain)?;
    let Some(there) = nat.chain(chain)?.cloned() else { return Ok(()) };
    let theirs = Theirs::new(chain, wanted, container.address(), &jumps);
    let (mut gone, mut left): (Vec<&Rule>, Vec<&Group>) = (Vec::new(), Vec::new());
    let (sections, mut remarks) = (shape::sections(&there.rules), Vec::new());
    for section in &sections {
        let stayed = left.len();
        for group in &section.groups {
            let holder = theirs.holder(section, group, claims);
            let is_wanted = |holder: &Holder| claims.iter().any(|claim| claim.overlaps(&holder.claim));
            let fate = holder.as_ref().map(|holder| judge.liveness_of(wanted, holder)).transpose()?;
            match (holder, fate) {
                (Some(holder), Some(Liveness::Alive)) if is_wanted(&holder) => {
                    plan.held = Some(holder);
                    return Ok(());
                }
                (Some(holder), Some(Liveness::Dead)) => {
                    remarks.push(holder.removal_note(wanted));
                    gone.extend(&group.rules);
                    continue;
                }
                (Some(holder), Some(Liveness::Unknown)) if is_wanted(&holder) => remarks.push(holder.port_taken_note()),
                (Some(holder), Some(Liveness::Unknown)) => remarks.push(holder.unknown_owner_note()),
                _ => {}
            }
            left.push(group);
        }
        if left.len() == stayed {
            gone.extend(&section.marker);
        }
    }
    plan.remarks.append(&mut remarks);
    // An empty chain does not show whose it is.
    if gone.is_empty() {
        return Ok(());
    }
    if left.is_empty() {
        jumps.iter().for_each(|jump| plan.edit.delete(DNAT, jump));
        plan.edit.delete_chain(chain, &there);
    } else {
        gone.iter().for_each(|rule| plan.edit.delete(chain, rule));
        let still: Option<Vec<ClaimedPort>> = left.iter().map(|group| group.claim).collect();
        // A rule that is not understood may need any of the jumps.
        let needless = |jump: &&Rule| still.as_ref().is_some_and(|still| !is_needed(jump, still));
        jumps.iter().filter(needless).for_each(|jump| plan.edit.delete(DNAT, jump));
    }
    Ok(())
}

/// A chain of another container.
struct Theirs<'t> {
    chain: &'t str,
    mark: &'t AttachmentId,
    /// The address of this container.
    address: IpAddr,
    /// The network and container that the way to the chain names.
    named: Option<(&'t str, &'t str)>,
    /// Whether neither side has conditions.
    plain: bool,
}

impl<'t> Theirs<'t> {
    fn new(chain: &'t str, wanted: &'t Forwarding, address: IpAddr, jumps: &'t [Rule]) -> Theirs<'t> {
        let plain = wanted.conditions(cni_linux::route::Family::of(address)).is_empty()
            && jumps.iter().filter_map(Jump::of).all(|jump| jump.plain);
        let named = jumps.iter().find_map(|jump| shape::read_comment(jump.comment()?));
        Theirs { chain, mark: &wanted.attachment, address, named, plain }
    }

    /// The other container whose mapping this is, if it claims what is wanted or leads to this
    /// container's address.
    fn holder(&self, section: &Section, group: &Group, claims: &[ClaimedPort]) -> Option<Holder> {
        let claim = group.claim?;
        let concerns = claim.container.ip() == self.address || claims.iter().any(|wanted| wanted.overlaps(&claim));
        let marked = section.alias().and_then(AttachmentId::parse);
        let container = match (self.named, marked.as_ref()) {
            (Some((_, id)), _) => Some(id),
            (None, Some(marked)) => marked.container_id.as_deref(),
            (None, None) => None,
        };
        if !concerns || container == Some(self.mark.container_id.as_str()) {
            return None;
        }
        let network = marked.as_ref().map(|marked| marked.network.as_str()).or(self.named.map(|(network, _)| network));
        Some(Holder {
            container: container.map_or_else(|| format!("(chain {})", self.chain), str::to_owned),
            network: network.map(str::to_owned),
            alias: section.alias().map(str::to_owned),
            had_link: section.had_link(),
            conditions_differ: !self.plain,
            claim,
        })
    }
}
