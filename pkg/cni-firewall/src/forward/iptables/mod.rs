//! Plans the rules of forwarding in iptables' table `filter`: those of the Go plugin, and a chain
//! that records owners.
//!
//! For each container address ADDRESS and each isolated bridge BRIDGE:
//! ```text
//! -A FORWARD --comment "CNI firewall plugin rules (ingressPolicy: same-bridge|isolated)" -j CNI-ISOLATION-STAGE-1
//! -A FORWARD --comment "CNI firewall plugin rules" -j CNI-FORWARD
//! -A CNI-FORWARD --comment "CNI firewall plugin admin overrides" -j CNI-ADMIN
//! -A CNI-FORWARD -d ADDRESS -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
//! -A CNI-FORWARD -s ADDRESS -j ACCEPT
//! -A CNI-FORWARD -d ADDRESS -m conntrack --ctstate DNAT -j ACCEPT                                 # only for acceptMappedPorts
//! -A CNI-ISOLATION-STAGE-1 -i BRIDGE -o BRIDGE --comment "... (ingressPolicy: isolated)" -j DROP  # only for isolated
//! -A CNI-ISOLATION-STAGE-1 -i BRIDGE ! -o BRIDGE --comment "... (ingressPolicy: POLICY)" -j CNI-ISOLATION-STAGE-2
//! -A CNI-ISOLATION-STAGE-2 -o BRIDGE --comment "... (ingressPolicy: same-bridge|isolated)" -j DROP
//! -A CNI-FW-OWNERS -s ADDRESS [-d ADDRESS] [-i BRIDGE [!] -o BRIDGE] --comment cni:NETWORK/CONTAINER/IFNAME
//! ```
//! Both stages end with a RETURN. Go writes neither the third rule of an address nor CNI-FW-OWNERS.
//! No rule leads to that chain: its rules, the *records*, only name the attachment that has an
//! address, and its isolated bridge. A record of an address with the third rule has `-d ADDRESS`.
//!
//! CNI-FORWARD accepts all packets that come from a container, so the jump to the first stage must
//! precede the jump to CNI-FORWARD. The Go plugin does not ensure that: it inserts each jump at the
//! beginning of FORWARD when it first needs that jump, and never moves a jump.
//!
//! These functions only plan: they read [`Chains`] and return an [`Edit`], which the caller
//! applies.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use cni_linux::error::Result;

use super::Written;
use super::owner::{self, Ingress, OwnedAddress};
use crate::iptables::{Chains, Edit, Part, Purpose, Rule, single_address};
use crate::owner::{AttachmentFilter, Untagged};

mod removal;
mod shape;
#[cfg(test)]
mod tests;

use removal::Removal;
pub use shape::ADMIN;
use shape::{
    ADMIN_JUMP_COMMENT, FORWARD, ISOLATION_COMMENT, JUMP_COMMENT, STAGE_2, accept_rules, commented_rule, end_of_stage,
    record_rule, redirected_rule, stage_1_rules, stage_2_rule,
};
pub(crate) use shape::{CNI_FORWARD, OWNERS, STAGE_1, read_record};

/// A rule of [`OWNERS`] and what it records.
struct Record {
    rule: Rule,
    owned: OwnedAddress,
}

impl Record {
    /// Reads a rule of [`OWNERS`]; `None` if it is not a record.
    fn read(rule: &Rule) -> Option<Record> {
        Some(Record { rule: rule.clone(), owned: read_record(rule)? })
    }
}

/// Returns the records that have one of the parts.
fn find_records(filter: &mut Chains<'_>, parts: &[Part<'_>], purpose: Purpose) -> Result<Vec<Record>> {
    let rules = filter.find_rules(OWNERS, parts, purpose, |rule| rule.target().is_none())?;
    Ok(rules.iter().filter_map(Record::read).collect())
}

/// Returns the rules that have exactly these words.
fn matching<'r>(rules: &'r [Rule], words: &'r [String]) -> impl Iterator<Item = &'r Rule> {
    rules.iter().filter(move |rule| rule.matches(words))
}

/// Whether one of `rules` has exactly these words.
fn contains(rules: &[Rule], words: &[String]) -> bool {
    matching(rules, words).next().is_some()
}

/// Adds to `edit` the removal of all but the first of the rules with these words: simultaneous ADDs
/// of the Go plugin can both add the same rule.
fn delete_duplicates(edit: &mut Edit, chain: &str, rules: &[Rule], words: &[String]) {
    for duplicate in matching(rules, words).skip(1) {
        edit.delete(chain, duplicate);
    }
}

/// How many addresses are searched for in a chain. For more, every rule is read, because the search
/// compares each rule with each address.
const SEARCHED_MAX: usize = 16;

/// Returns the rules of `chain` that have one of the addresses or the other part. The result can
/// contain some other rules too.
fn find_rules_of(
    filter: &mut Chains<'_>,
    chain: &str,
    addresses: impl ExactSizeIterator<Item = IpAddr>,
    other: Option<Part<'_>>,
    purpose: Purpose,
) -> Result<Vec<Rule>> {
    if addresses.len() > SEARCHED_MAX {
        return Ok(filter.rules(chain)?.to_vec());
    }
    let parts: Vec<Part<'_>> = addresses.map(Part::Address).chain(other).collect();
    filter.find_rules(chain, &parts, purpose, |_| true)
}

/// Returns the rules by the single address that they match, as source or destination.
fn by_address(rules: &[Rule]) -> BTreeMap<IpAddr, Vec<Rule>> {
    let mut by_address: BTreeMap<IpAddr, Vec<Rule>> = BTreeMap::new();
    for rule in rules {
        if let Some(address) = single_address(rule, "-s").or_else(|| single_address(rule, "-d")) {
            by_address.entry(address).or_default().push(rule.clone());
        }
    }
    by_address
}

/// Returns the rules for `address` in the result of [`by_address`].
fn rules_for(rules: &BTreeMap<IpAddr, Vec<Rule>>, address: IpAddr) -> &[Rule] {
    rules.get(&address).map_or(&[], Vec::as_slice)
}

/// Returns the rules that [`CNI_FORWARD`] must have for an address.
fn required_rules(owned: &OwnedAddress) -> Vec<Vec<String>> {
    let mut rules = accept_rules(owned.address).to_vec();
    if owned.accepts_redirected {
        rules.push(redirected_rule(owned.address));
    }
    rules
}

/// Returns the policy of these addresses and the bridge that it isolates; `None` for the policy
/// `open`. All addresses of an attachment have the same policy.
fn isolation_of(addresses: &[OwnedAddress]) -> Option<(&Ingress, &str)> {
    addresses.iter().find_map(|owned| Some((&owned.ingress, owned.ingress.bridge()?)))
}

/// Returns the edit after which exactly `addresses` are the addresses of the attachment `owner`, in
/// the family of `filter`. Removes the [outdated records](owner::outdated_records) of `addresses`.
/// Adds to `written.accepted_for_others` the addresses that have rules but no record: the Go plugin
/// wrote these rules. Sets `written.replaced`.
pub(super) fn ensure(
    filter: &mut Chains<'_>,
    owner: &str,
    addresses: &[OwnedAddress],
    admin_chain: &str,
    written: &mut Written,
) -> Result<Edit> {
    let mut edit = Edit::new();
    for chain in [CNI_FORWARD, admin_chain, OWNERS] {
        if !filter.has_chain(chain)? {
            edit.create_chain(chain);
        }
    }
    match isolation_of(addresses) {
        Some((ingress, bridge)) => {
            isolate(filter, &mut edit, ingress, bridge)?;
            order_jumps(filter, &mut edit, &[STAGE_1, CNI_FORWARD])?;
        }
        None => order_jumps(filter, &mut edit, &[CNI_FORWARD])?,
    }

    let mut find = |chain, other| {
        let addresses = addresses.iter().map(|owned| owned.address);
        find_rules_of(filter, chain, addresses, Some(other), Purpose::Append)
    };
    // One search finds the jump and the accepting rules, because the chain can be long.
    let existing_rules = find(CNI_FORWARD, Part::Target(admin_chain))?;
    let records: Vec<Record> = find(OWNERS, Part::Comment(owner))?.iter().filter_map(Record::read).collect();
    let jump_to_admin = commented_rule(&[], ADMIN_JUMP_COMMENT, admin_chain);
    delete_duplicates(&mut edit, CNI_FORWARD, &existing_rules, &jump_to_admin);
    if !contains(&existing_rules, &jump_to_admin) {
        edit.insert(CNI_FORWARD, jump_to_admin);
    }
    let accepting = by_address(&existing_rules);
    let recorded: BTreeSet<&OwnedAddress> = records.iter().map(|record| &record.owned).collect();
    let recorded_addresses: BTreeSet<IpAddr> = records.iter().map(|record| record.owned.address).collect();
    for owned in addresses {
        let existing = rules_for(&accepting, owned.address);
        if !existing.is_empty() && !recorded_addresses.contains(&owned.address) {
            written.accepted_for_others.push(owned.address);
        }
        for rule in required_rules(owned) {
            delete_duplicates(&mut edit, CNI_FORWARD, existing, &rule);
            if !contains(existing, &rule) {
                edit.append(CNI_FORWARD, rule);
            }
        }
        if !recorded.contains(owned) {
            edit.append(OWNERS, record_rule(owned));
        }
    }
    let wanted: BTreeSet<&OwnedAddress> = addresses.iter().collect();
    let all_owned = records.iter().map(|record| record.owned.clone());
    let outdated: BTreeSet<OwnedAddress> = owner::outdated_records(all_owned, owner, addresses)?.into_iter().collect();
    written.replaced |= !outdated.is_empty() || records.iter().any(|record| record.owned.owner == owner);
    let is_stale = |record: &&Record| {
        let is_own = record.owned.owner == owner;
        (is_own && !wanted.contains(&record.owned)) || outdated.contains(&record.owned)
    };
    let stale_records: Vec<&Record> = records.iter().filter(is_stale).collect();
    if !stale_records.is_empty() {
        let removal = Removal { records: &stale_records, staying: addresses, ..Removal::default() };
        edit.extend(removal.plan(filter)?);
    }
    Ok(edit)
}

/// Adds to `edit` the changes after which [`FORWARD`] has at most one jump each to [`STAGE_1`] and
/// [`CNI_FORWARD`], in this order. A missing jump is only added if its target is in `required`.
fn order_jumps(filter: &mut Chains<'_>, edit: &mut Edit, required: &[&str]) -> Result<()> {
    // FORWARD, which can be long, is not read if neither chain exists: no rule can jump to a chain
    // that does not exist.
    let has_target = filter.has_chain(CNI_FORWARD)? || filter.has_chain(STAGE_1)?;
    let jumps = if has_target { find_jumps(filter)? } else { Vec::new() };
    let jump_to_forward = commented_rule(&[], JUMP_COMMENT, CNI_FORWARD);
    let adds_forward_jump = required.contains(&CNI_FORWARD) && !contains(&jumps, &jump_to_forward);
    if adds_forward_jump {
        edit.insert(FORWARD, jump_to_forward.clone());
    }
    delete_duplicates(edit, FORWARD, &jumps, &jump_to_forward);

    let jump_to_stage_1 = commented_rule(&[], ISOLATION_COMMENT, STAGE_1);
    let jumps_to_stage_1: Vec<Rule> = matching(&jumps, &jump_to_stage_1).cloned().collect();
    if jumps_to_stage_1.is_empty() && !required.contains(&STAGE_1) {
        return Ok(());
    }
    // A jump to CNI_FORWARD that is added above comes before the existing jumps.
    let is_first = !adds_forward_jump && jumps.first().is_some_and(|rule| rule.matches(&jump_to_stage_1));
    if !is_first || jumps_to_stage_1.len() != 1 {
        edit.put_first(FORWARD, jump_to_stage_1, &jumps_to_stage_1);
    }
    Ok(())
}

/// Returns the rules of [`FORWARD`] that lead to [`STAGE_1`] or [`CNI_FORWARD`], in their order.
fn find_jumps(filter: &mut Chains<'_>) -> Result<Vec<Rule>> {
    let targets = [STAGE_1, CNI_FORWARD];
    let is_jump = |rule: &Rule| rule.target().is_some_and(|target| targets.contains(&target));
    filter.find_rules(FORWARD, &targets.map(Part::Target), Purpose::Read, is_jump)
}

/// Adds to `edit` the missing chains and rules of both stages for `bridge`, which the policy
/// `ingress` isolates.
fn isolate(filter: &mut Chains<'_>, edit: &mut Edit, ingress: &Ingress, bridge: &str) -> Result<()> {
    for (chain, bridge_rules) in [(STAGE_1, stage_1_rules(ingress)), (STAGE_2, vec![stage_2_rule(bridge)])] {
        if !filter.has_chain(chain)? {
            edit.create_chain(chain);
        }
        let rules = filter.rules(chain)?.to_vec();
        // Each rule is inserted at the beginning, so the last one must be inserted first.
        for rule in bridge_rules.into_iter().rev() {
            if !contains(&rules, &rule) {
                edit.insert(chain, rule);
            }
        }
        if !contains(&rules, &end_of_stage()) {
            edit.append(chain, end_of_stage());
        }
    }
    Ok(())
}

/// Returns the edit that removes the rules of the selected attachments. The Go plugin writes rules
/// without a record: those for the addresses of [`Untagged::Covering`] are also removed, unless
/// another attachment owns the address. The accepting rules for `accepted_for_others` stay. For GC,
/// the edit also puts the jumps from [`FORWARD`] in order.
pub(super) fn purge(
    filter: &mut Chains<'_>,
    selection: AttachmentFilter<'_>,
    accepted_for_others: &[IpAddr],
) -> Result<Edit> {
    let selected = selection.owners(owner::NAME);
    let part = |beginning| match selection {
        AttachmentFilter::One { .. } => Part::Comment(beginning),
        AttachmentFilter::Garbage { .. } => Part::CommentBeginning(beginning),
    };
    let parts: Vec<Part<'_>> = selected.beginnings.iter().map(|beginning| part(beginning)).collect();
    filter.has_chain(OWNERS)?;
    let mut records = find_records(filter, &parts, Purpose::Read)?;
    // The search also finds names that contain a beginning.
    records.retain(|record| selected.contains(&record.owned.owner));
    let records: Vec<&Record> = records.iter().collect();
    let unrecorded_addresses = match selection {
        AttachmentFilter::One { untagged: Untagged::Covering(addresses), .. } => addresses,
        _ => &[],
    };
    let removal = Removal { records: &records, unrecorded_addresses, accepted_for_others, ..Removal::default() };
    let mut edit = removal.plan(filter)?;
    if matches!(selection, AttachmentFilter::Garbage { .. }) {
        order_jumps(filter, &mut edit, &[])?;
    }
    Ok(edit)
}

/// Returns a sentence for each chain or rule for `addresses` that is missing or in the wrong order;
/// empty if none. Records are not checked, because Go does not write them.
pub(super) fn check(filter: &mut Chains<'_>, addresses: &[OwnedAddress], admin_chain: &str) -> Result<Vec<String>> {
    let isolation = isolation_of(addresses);
    let mut missing = Vec::new();
    let mut chains = vec![CNI_FORWARD, admin_chain];
    if isolation.is_some() {
        chains.extend([STAGE_1, STAGE_2]);
    }
    for chain in chains {
        if !filter.has_chain(chain)? {
            missing.push(format!("iptables chain {chain} is missing from table filter"));
        }
    }
    if !missing.is_empty() {
        return Ok(missing);
    }
    let jumps = find_jumps(filter)?;
    let mut require = |chain: &str, rules: &[Rule], words: &[String]| {
        if !contains(rules, words) {
            missing.push(format!("iptables chain {chain} has no rule {}", words.join(" ")));
        }
    };
    require(FORWARD, &jumps, &commented_rule(&[], JUMP_COMMENT, CNI_FORWARD));
    let checked = addresses.iter().map(|owned| owned.address);
    let forward_rules = find_rules_of(filter, CNI_FORWARD, checked, Some(Part::Target(admin_chain)), Purpose::Read)?;
    require(CNI_FORWARD, &forward_rules, &commented_rule(&[], ADMIN_JUMP_COMMENT, admin_chain));
    let accepting = by_address(&forward_rules);
    for owned in addresses {
        for words in required_rules(owned) {
            require(CNI_FORWARD, rules_for(&accepting, owned.address), &words);
        }
    }
    let Some((ingress, bridge)) = isolation else { return Ok(missing) };
    require(FORWARD, &jumps, &commented_rule(&[], ISOLATION_COMMENT, STAGE_1));
    let stage_1 = filter.rules(STAGE_1)?;
    for words in stage_1_rules(ingress) {
        require(STAGE_1, stage_1, &words);
    }
    let stage_2 = filter.rules(STAGE_2)?;
    require(STAGE_2, stage_2, &stage_2_rule(bridge));
    if missing.is_empty() && jumps.first().and_then(Rule::target) != Some(STAGE_1) {
        missing.push(format!("iptables chain {FORWARD} leads to {CNI_FORWARD} before {STAGE_1}: nothing is isolated"));
    }
    Ok(missing)
}

/// Whether [`CNI_FORWARD`] has a rule that accepts packets of one of the addresses.
pub(super) fn accepts_any(filter: &mut Chains<'_>, addresses: &[IpAddr]) -> Result<bool> {
    let rules = by_address(&find_rules_of(filter, CNI_FORWARD, addresses.iter().copied(), None, Purpose::Read)?);
    let is_accepted = |address: &IpAddr| {
        let rules = rules_for(&rules, *address);
        accept_rules(*address).iter().any(|words| contains(rules, words))
    };
    Ok(addresses.iter().any(is_accepted))
}
