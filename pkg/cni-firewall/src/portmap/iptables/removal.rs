//! Removes the rules of an attachment or of a network, and keeps those that other attachments need.
//!
//! A container's chain consists of [`Section`]s, mostly one for each attachment. The jumps to the
//! chain are not part of them.

use std::collections::BTreeSet;

use super::super::ClaimedPort;
use super::jumps_to;
use super::shape::{self, DNAT, Jump, SNAT, Section};
use crate::engine::Store;
use crate::iptables::{Chain, Chains, Edit, Rule};
use crate::owner::{ALIAS, AttachmentFilter, Untagged};
use cni::AttachmentId;
use cni_linux::error::Result;

/// The network and the container ID from the comment of a jump.
type JumpOwner<'j> = (&'j str, &'j str);

/// Removes the rules of the selected attachments, in both families and variants. Adds the claims of
/// these rules to `claims` even if the removal fails. Starts no process if netlink finds
/// nothing and iptables-legacy has no table.
///
/// Rules made by these plugins name their attachment in a marker. The rules of Go's plugin have
/// only the network and the container ID, in the comments of the jumps to their chain:
/// - For one attachment they stay if addresses of their family are known and they lead to another
///   one.
/// - As garbage they are removed if such comments exist, and all name the network and a container
///   without a valid attachment.
pub(in super::super) fn purge(
    store: &Store<'_>,
    filter: AttachmentFilter<'_>,
    claims: &mut BTreeSet<ClaimedPort>,
) -> Result<()> {
    match filter {
        AttachmentFilter::One { attachment, untagged } => {
            let chains = [shape::chain_name(attachment), shape::snat_chain_name(attachment)];
            store.purge_in_iptables(filter, &chains.each_ref().map(String::as_str), |nat| {
                let mut edit = Edit::new();
                claims.extend(plan_removal_of_one(nat, &mut edit, attachment, untagged)?);
                Ok(edit)
            })
        }
        AttachmentFilter::Garbage { network, valid } => {
            let selected = filter.owners(ALIAS);
            let valid_containers: BTreeSet<&str> = valid.iter().map(|(container_id, _)| container_id).collect();
            let is_garbage_owner =
                |(of, container_id): &JumpOwner<'_>| *of == network && !valid_containers.contains(container_id);
            let is_garbage = |section: &Section, owners: &[JumpOwner<'_>]| match section.alias() {
                Some(alias) => selected.contains(alias),
                None => !owners.is_empty() && owners.iter().all(is_garbage_owner),
            };
            store.purge_in_iptables(filter, &[DNAT], |nat| {
                let mut edit = Edit::new();
                claims.extend(plan_garbage(nat, &mut edit, is_garbage)?);
                Ok(edit)
            })
        }
    }
}

/// Adds to `edit` what [`purge`] removes for one attachment. Returns the claims of these rules.
fn plan_removal_of_one(
    nat: &mut Chains<'_>,
    edit: &mut Edit,
    attachment: &AttachmentId,
    untagged: Untagged<'_>,
) -> Result<Vec<ClaimedPort>> {
    let known = untagged.addresses_in(nat.family());
    let is_removed = |section: &Section, owners: &[JumpOwner<'_>]| {
        // Go's plugin made the sections without an alias.
        let leads_elsewhere = |address| known.is_some_and(|known| !known.contains(&address));
        let is_kept = section.alias().is_none() && section.address().is_some_and(leads_elsewhere);
        may_belong(section, owners, attachment) && !is_kept
    };
    let mut claims = Vec::new();
    let chain = shape::chain_name(attachment);
    if let Some(content) = nat.chain(&chain)?.cloned() {
        let jumps = jumps_to(nat, &chain)?;
        claims = plan_removal_from(edit, (&chain, &content), &jumps, is_removed);
    }
    // Very old releases of Go's plugin made this second chain.
    let snat_chain = shape::snat_chain_name(attachment);
    if let Some(snat_content) = nat.chain(&snat_chain)?.cloned() {
        for rule in nat.rules(SNAT)?.iter().filter(|rule| rule.target() == Some(&snat_chain)) {
            edit.delete(SNAT, rule);
        }
        edit.delete_chain(&snat_chain, &snat_content);
    }
    Ok(claims)
}

/// Whether a section of the container's chain belongs, or may belong, to the attachment. `owners`
/// are from the comments of the jumps to the chain. A section without a marker does not belong to
/// the attachment if all `owners` are other containers: two containers can share a chain, because
/// its name is a hash of network and container ID without a separator.
fn may_belong(section: &Section, owners: &[JumpOwner<'_>], attachment: &AttachmentId) -> bool {
    if let Some(alias) = section.alias() {
        return alias == attachment.alias();
    }
    owners.is_empty() || owners.contains(&(&attachment.network, &attachment.container_id))
}

/// Adds to `edit` the removal of the sections of all containers' chains for which `is_garbage` is
/// true, as [`plan_removal_from`] does for one chain. Reads each chain once. Returns the claims of
/// the removed sections.
pub(super) fn plan_garbage(
    nat: &mut Chains<'_>,
    edit: &mut Edit,
    is_garbage: impl Fn(&Section, &[JumpOwner<'_>]) -> bool,
) -> Result<Vec<ClaimedPort>> {
    let chains = nat.read_chains_where(|name| name.starts_with(shape::PREFIX))?;
    if chains.is_empty() {
        return Ok(Vec::new());
    }
    let jumps = nat.rules_by_target(DNAT)?;
    let mut claims = Vec::new();
    for chain in chains {
        let Some(content) = nat.chain(&chain)? else { continue };
        let jumps = jumps.get(&chain).map_or(&[][..], Vec::as_slice);
        claims.extend(plan_removal_from(edit, (&chain, content), jumps, &is_garbage));
    }
    Ok(claims)
}

/// Adds to `edit` the removal of the sections of a chain for which `is_removed` is true, of the
/// `jumps` that no kept section needs, and of the chain if no section is kept. `jumps` are all
/// jumps to the chain; `is_removed` is called with a section and the owners that the comments of
/// all jumps name. Returns the claims of the removed sections.
fn plan_removal_from(
    edit: &mut Edit,
    (chain, content): (&str, &Chain),
    jumps: &[Rule],
    is_removed: impl Fn(&Section, &[JumpOwner<'_>]) -> bool,
) -> Vec<ClaimedPort> {
    let owners: Vec<JumpOwner<'_>> =
        jumps.iter().filter_map(|jump| jump.comment().and_then(shape::read_comment)).collect();
    let (removed, kept): (Vec<Section>, Vec<Section>) =
        shape::sections(&content.rules).into_iter().partition(|section| is_removed(section, &owners));
    delete_sections(edit, (chain, content), jumps, &removed, &kept);
    removed.iter().flat_map(Section::claims).collect()
}

/// Adds to `edit` the removal of the sections `removed` of a chain, of the `jumps` to the chain
/// that no section of `kept` needs, and of the chain if `kept` is empty. Changes nothing if
/// `removed` is empty.
pub(super) fn delete_sections(
    edit: &mut Edit,
    (chain, content): (&str, &Chain),
    jumps: &[Rule],
    removed: &[Section],
    kept: &[Section],
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
    let kept_claims: Vec<ClaimedPort> = kept.iter().flat_map(Section::claims).collect();
    // A section without a marker and an address may be of an attachment in `kept`, so its rules are
    // removed only with the whole chain, above. Its jumps are those that no other section needs:
    // without them, no packet reaches it.
    for section in removed.iter().filter(|section| section.shows_owner()) {
        delete_section(edit, chain, section, &kept_claims);
    }
    // A mapping with an unknown claim may need any of the jumps.
    if kept.iter().flat_map(|section| &section.mappings).any(|mapping| mapping.claim.is_none()) {
        return;
    }
    for jump in jumps.iter().filter(|jump| !can_match_any(jump, &kept_claims)) {
        edit.delete(DNAT, jump);
    }
}

/// Adds to `edit` the removal of a section, except the rules that mark connections to a port in
/// `kept_claims`: Go makes such a rule only once for all addresses of a container, and
/// iptables-legacy, which does not number rules, would remove the first rule with the same words,
/// perhaps one of a kept section.
pub(super) fn delete_section(edit: &mut Edit, chain: &str, section: &Section, kept_claims: &[ClaimedPort]) {
    for rule in section.rules() {
        let (protocol, port) = (rule.value("-p"), rule.value("--dport"));
        let is_kept_port = |claim: &ClaimedPort| {
            protocol == Some(claim.protocol.name()) && port == Some(claim.host_port.to_string().as_str())
        };
        let has_kept_port = kept_claims.iter().any(is_kept_port);
        if rule.target() == Some("DNAT") || !has_kept_port {
            edit.delete(chain, rule);
        }
    }
}

/// Whether this rule of [`DNAT`] can match packets to the host port of one of the claims. False for
/// a rule without a target.
pub(super) fn can_match_any(jump: &Rule, claims: &[ClaimedPort]) -> bool {
    let Some(jump) = Jump::read(jump) else { return false };
    claims.iter().any(|claim| jump.can_match(claim))
}
