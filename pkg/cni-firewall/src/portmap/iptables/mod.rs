//! Maps host ports with iptables of either variant, with at most two processes for each family and
//! attempt. A change is attempted again if another program has disturbed it.
//!
//! The rules are those of `shape`; [`crate::iptables`] locks, reads and writes, and repeats
//! attempts. Rules of an attachment are replaced only where they differ, so an ADD that finds
//! everything in place writes nothing. Exception: jumps to the container's chain that have
//! conditions are always replaced.
//!
//! The container's chain is emptied only if all rules in it belong to the attachment: another
//! interface of the container may have rules there, written by these plugins or by Go's. The chains
//! and rules that all containers share are never removed, except duplicates of these rules.

use cni::machine::OnSigterm;

use super::conflict::{ConflictSearch, SearchedTables};
use super::{ClaimedPort, FamilyRequest, Forwarding, Policy};
use crate::engine::Store;
use crate::iptables::{Chains, Edit, FAMILIES, IfMissing, JumpSearch, Part, Rule, Variant, program_prefix};
use crate::nft::Retries;
use cni_linux::error::Result;
use cni_linux::route::Family;

mod removal;
pub(crate) mod shape;
#[cfg(test)]
mod tests;

use removal::{delete_rules, plan_displacement};
pub(super) use removal::{purge, search_other_tables};
use shape::{DNAT, MASQ, RuleGroup, SETMARK, can_match_any};

/// Writes the attachment's rules and removes those of dead containers that conflict with them:
/// IPv4, then IPv6. Both families are checked for living holders of the ports before either is
/// changed. A family in which no port is mapped comes last, and gets a chain without mappings. Sets
/// `changed` to true if rules may have been changed, even on an error.
///
/// # Errors
/// - A living container has a wanted port. It can have taken the port after the first family was
///   changed.
/// - The host's links cannot be read, or a change fails, for example because rules cannot be
///   written over netlink and iptables is not installed.
pub(super) fn ensure(store: &Store<'_>, search: &mut ConflictSearch<'_>, changed: &mut bool) -> Result<()> {
    let wanted = search.wanted;
    search.begin(SearchedTables::Written);
    let host_link = search.find_host_link(&wanted.attachment)?;
    let plan = |nat: &mut Chains<'_>, search: &mut ConflictSearch<'_>| {
        let family = nat.family();
        match wanted.families_with_address().find(|request| request.family == family) {
            Some(request) => plan_family(nat, &request, host_link.as_deref(), search),
            None => Ok(Edit::new()),
        }
    };
    let mapped_families = wanted.families().map(|request| request.family);
    store.ensure_in_iptables(mapped_families, |nat| plan(nat, search), changed)?;
    // Where the container has an address but no port is mapped, only the CHECK of Go's plugin needs
    // the container's chain and the jumps to it.
    for request in wanted.families_with_address().filter(|request| request.claims.is_empty()) {
        match store.ensure_in_iptables([request.family], |nat| plan(nat, search), changed) {
            Err(error) if error.is_terminated() || error.is_deadline() => return Err(error),
            Err(error) => search.remark(format_args!(
                "failed to create the empty portmap chain in {}, which only the CHECK of Go's portmap needs: {error}",
                program_prefix(request.family)
            )),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Plans all changes for one family: the removal of dead containers' rules, the shared rules, and
/// the container's own. `host_link` is the link on the host that has the attachment's alias. Fails
/// if a living container has a wanted port.
fn plan_family(
    nat: &mut Chains<'_>,
    request: &FamilyRequest<'_>,
    host_link: Option<&str>,
    search: &mut ConflictSearch<'_>,
) -> Result<Edit> {
    let mut edit = Edit::new();
    let candidate_jumps = candidate_jumps(nat, request)?;
    if request.wanted.policy == Policy::RefuseIfAlive {
        plan_displacement(nat, request, &candidate_jumps, search, &mut edit)?;
    }
    plan_shared_rules(nat, request.wanted, &mut edit)?;
    let older_mappings = plan_own_rules(nat, request, &candidate_jumps, host_link, &mut edit)?;
    search.remark_older_mappings(older_mappings);
    Ok(edit)
}

/// Whether rules of the container's chain belong to this attachment: their marker names the
/// attachment, or they have no marker (Go's plugin made them) and lead to one of the container's
/// addresses. True for the empty group of an empty chain, so that the chain is replaced as a whole.
fn is_own(group: &RuleGroup<'_>, wanted: &Forwarding) -> bool {
    match group.alias() {
        Some(alias) => alias == wanted.attachment.alias(),
        None => group.rules.is_empty() || group.claim.is_some_and(|claim| wanted.is_container(claim.container.ip())),
    }
}

/// Returns the rules of a shared chain with these words: more than one if there are duplicates.
fn find_shared_rules(nat: &mut Chains<'_>, chain: &str, words: &[String]) -> Result<Vec<Rule>> {
    // The target is the last word, or MARK before its option.
    let target = words.iter().skip_while(|word| *word != "-j").nth(1).map_or("", String::as_str);
    nat.find_rules(chain, &[Part::Target(target)], IfMissing::ReadAll, |rule| rule.matches(words))
}

/// Plans the shared chains and rules that are missing, and the removal of duplicates.
fn plan_shared_rules(nat: &mut Chains<'_>, wanted: &Forwarding, edit: &mut Edit) -> Result<()> {
    let rules = shape::shared_rules(wanted);
    for chain in [SETMARK, MASQ, DNAT] {
        let is_used = chain == DNAT || rules.iter().any(|(name, _)| *name == chain);
        if is_used && !nat.has_chain(chain)? {
            edit.create_chain(chain);
        }
    }
    for (chain, words) in rules {
        let existing = find_shared_rules(nat, chain, &words)?;
        if !existing.is_empty() {
            for duplicate in &existing[1..] {
                edit.delete(chain, duplicate);
            }
        } else if chain == "POSTROUTING" {
            // At the beginning, as Go inserts it: an earlier rule of another program might accept
            // the packets.
            edit.insert(chain, words);
        } else {
            edit.append(chain, words);
        }
    }
    Ok(())
}

/// Plans the rules in the container's own chain and the jumps to it, where they differ from the
/// existing ones. Jumps with conditions are always replaced. `candidate_jumps` contains all rules
/// of [`DNAT`] that jump to the container's chain.
///
/// Returns the mappings to other addresses of the container, by rules of Go's plugin that stay
/// before the new rules.
fn plan_own_rules(
    nat: &mut Chains<'_>,
    request: &FamilyRequest<'_>,
    candidate_jumps: &[Rule],
    host_link: Option<&str>,
    edit: &mut Edit,
) -> Result<Vec<ClaimedPort>> {
    let wanted = request.wanted;
    let chain = shape::chain_name(&wanted.attachment);
    let mut new_rules = vec![shape::marker_rule(&wanted.attachment, host_link)];
    new_rules.extend(request.claims.iter().flat_map(|claim| shape::mapping_rules(wanted, request.container, claim)));
    let groups = shape::groups(nat.rules(&chain)?);
    let (own, others): (Vec<_>, Vec<_>) = groups.into_iter().partition(|group| is_own(group, wanted));
    let claims_of_others: Vec<ClaimedPort> = others.iter().filter_map(|group| group.claim).collect();
    let own_rules: Vec<&Rule> = own.iter().flat_map(|group| group.rules).collect();
    let is_in_place =
        own_rules.len() == new_rules.len() && own_rules.iter().zip(&new_rules).all(|(rule, words)| rule.matches(words));
    if !is_in_place {
        if others.is_empty() {
            edit.replace_chain(&chain);
        } else {
            delete_rules(edit, &chain, own_rules, &claims_of_others);
        }
        for words in new_rules {
            edit.append(&chain, words);
        }
    }
    let jumps: Vec<&Rule> = candidate_jumps.iter().filter(|rule| rule.target() == Some(&chain)).collect();
    plan_jumps(request, &jumps, &claims_of_others, edit);
    let by_go = others.iter().filter(|group| group.marker.is_none());
    Ok(by_go.filter_map(|group| group.claim).collect())
}

/// Plans the jumps to the container's chain: adds those that are not among `existing`, and removes
/// those that are neither wanted nor needed by `claims_of_others`, the claims of other attachments
/// in the chain.
fn plan_jumps(request: &FamilyRequest<'_>, existing: &[&Rule], claims_of_others: &[ClaimedPort], edit: &mut Edit) {
    let conditions = request.conditions();
    let mut unmatched: Vec<&Rule> = existing.to_vec();
    for words in shape::jump_rules(request.wanted, conditions) {
        // Conditions cannot be compared, because the kernel can return them in a form that differs
        // from the configuration: a jump with conditions is always replaced.
        match unmatched.iter().position(|jump| conditions.is_empty() && jump.matches(&words)) {
            // Removes one jump only: duplicates of a wanted jump stay in the list.
            Some(position) => {
                unmatched.remove(position);
            }
            None => edit.append(DNAT, words),
        }
    }
    for jump in unmatched {
        if !can_match_any(jump, claims_of_others) {
            edit.delete(DNAT, jump);
        }
    }
}

/// Returns the rules of [`DNAT`] for a claimed port and those that jump to the container's chain.
/// The result can contain some other rules too. An index is also trusted where the ADD appends no
/// rule: otherwise each new port would make it read the whole chain.
fn candidate_jumps(nat: &mut Chains<'_>, request: &FamilyRequest<'_>) -> Result<Vec<Rule>> {
    let ports: Vec<u16> = request.claims.iter().map(|claim| claim.host_port).collect();
    let chain = shape::chain_name(&request.wanted.attachment);
    let address = Some(request.container.address());
    let (keys_of, retries) = (shape::jump_keys_in(request.family), Retries::Many);
    nat.find_jumps(DNAT, JumpSearch { ports: &ports, target: &chain, address, keys_of, retries })
}

/// Returns the rules of [`DNAT`] that jump to `chain`.
fn jumps_to(nat: &mut Chains<'_>, chain: &str, retries: Retries) -> Result<Vec<Rule>> {
    let keys_of = shape::jump_keys_in(nat.family());
    let search = JumpSearch { ports: &[], target: chain, address: None, keys_of, retries };
    let mut jumps = nat.find_jumps(DNAT, search)?;
    jumps.retain(|rule| rule.target() == Some(chain));
    Ok(jumps)
}

/// Returns a sentence for each difference from the rules that [`ensure`] writes;
/// empty if there is none, `None` if the container has no chain. If both variants have the
/// container's chain, returns only the shorter of their lists of differences. Accepts the rules of
/// Go's plugin, and duplicates. Does not compare conditions, because the kernel can return them in
/// a form that differs from the configuration.
pub(super) fn check(store: &Store<'_>, wanted: &Forwarding) -> Result<Option<Vec<String>>> {
    let chain = shape::chain_name(&wanted.attachment);
    let mut iptables = store.open(OnSigterm::Kill)?;
    let (mut has_chain, mut differences) = (false, Vec::new());
    for request in wanted.families() {
        let mut by_variant = Vec::new();
        for variant in iptables.variants_to_search(request.family, &[&chain])? {
            let mut nat = iptables.read(request.family, variant)?;
            if nat.has_chain(&chain)? {
                by_variant.push(differences_in(&mut nat, &request)?);
            }
        }
        has_chain |= !by_variant.is_empty();
        let shortest = by_variant.into_iter().min_by_key(Vec::len);
        let found = shortest.unwrap_or_else(|| vec![format!("chain {chain} is missing")]);
        let name = program_prefix(request.family);
        differences.extend(found.into_iter().map(|difference| format!("{name}: {difference}")));
    }
    // The container may still have its chain in a family in which no port is mapped.
    let is_unmapped = |family: &Family| wanted.families().all(|request| request.family != *family);
    for family in FAMILIES.into_iter().filter(is_unmapped) {
        if has_chain {
            break;
        }
        for variant in iptables.variants_to_search(family, &[&chain])? {
            // iptables-nft is among the variants only if it has the chain.
            has_chain |= variant == Variant::Nft || iptables.read(family, variant)?.has_chain(&chain)?;
        }
    }
    Ok(has_chain.then_some(differences))
}

/// Returns the differences in one table: missing rules, older mappings of this container that take
/// precedence over a wanted one, and mappings that were not requested.
fn differences_in(nat: &mut Chains<'_>, request: &FamilyRequest<'_>) -> Result<Vec<String>> {
    let FamilyRequest { wanted, container, claims, .. } = request;
    let mut differences = Vec::new();
    let chain = shape::chain_name(&wanted.attachment);
    for (shared_chain, words) in shape::shared_rules(wanted) {
        if find_shared_rules(nat, shared_chain, &words)?.is_empty() {
            differences.push(format!("chain {shared_chain} lacks `{}`", words.join(" ")));
        }
    }
    let jumps = jumps_to(nat, &chain, Retries::Many)?;
    let chain_rules = nat.rules(&chain)?;
    let groups = shape::groups(chain_rules);
    let (own, others): (Vec<_>, Vec<_>) = groups.into_iter().partition(|group| is_own(group, wanted));
    let unmarked: Vec<_> = others.into_iter().filter(|group| group.marker.is_none()).collect();
    // Rules without a marker count too, even for another address: one can be the rule that jumps to
    // `SETMARK` or to the configured chain. Go makes that rule only once for a port, with the first
    // address.
    let accepted_rules: Vec<&Rule> = own.iter().chain(&unmarked).flat_map(|group| group.rules).collect();
    let unmarked_claims: Vec<ClaimedPort> = unmarked.iter().filter_map(|group| group.claim).collect();
    for claim in claims {
        for words in shape::mapping_rules(wanted, *container, claim) {
            if !accepted_rules.iter().any(|rule| rule.matches(&words)) {
                differences.push(format!("chain {chain} lacks `{}`", words.join(" ")));
            }
        }
        if !jumps.iter().any(|jump| can_match_any(jump, &[*claim])) {
            differences.push(format!("chain {DNAT} lacks a rule that jumps to {chain} for {claim}"));
        }
        // The first rule for the port takes precedence, even if it leads to another address.
        let first = chain_rules.iter().filter_map(shape::read_claim).find(|found| found.overlaps(claim));
        if let Some(first) = first.filter(|found| unmarked_claims.contains(found)) {
            differences
                .push(format!("chain {chain} maps {claim} to {}, in a rule before the requested one", first.container));
        }
    }
    for claim in own.iter().filter_map(|group| group.claim) {
        if !claims.contains(&claim) {
            differences
                .push(format!("chain {chain} also maps {claim} to {}, which was not requested", claim.container));
        }
    }
    Ok(differences)
}
