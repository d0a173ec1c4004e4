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
use super::owner::{self, OwnedAddress, Record, Wanted};
use crate::iptables::{Chains, Edit, Part, Rule, SearchFor};
use crate::nft::RulePosition::{self, First, Last};
use crate::owner::{AttachmentFilter, SelectedOwners, Untagged};

mod removal;
mod shape;
#[cfg(test)]
mod tests;

use removal::Removal;
pub use shape::ADMIN;
use shape::{
    ADMIN_JUMP_COMMENT, FORWARD, ISOLATION_COMMENT, JUMP_COMMENT, STAGE_2, accept_rules, address_rules, commented_rule,
    end_of_stage, isolation_rules, record_rule,
};
pub(crate) use shape::{CNI_FORWARD, OWNERS, STAGE_1, read_record};

/// Returns the records among these rules of [`OWNERS`].
fn records_among(rules: &[Rule]) -> Vec<Record<Rule>> {
    rules.iter().filter_map(|rule| Some(Record { rule: rule.clone(), owned: read_record(rule)? })).collect()
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
    purpose: SearchFor,
) -> Result<Vec<Rule>> {
    if addresses.len() > SEARCHED_MAX {
        return Ok(filter.rules(chain)?.to_vec());
    }
    let parts: Vec<Part<'_>> = addresses.map(Part::Address).chain(other).collect();
    filter.find_rules(chain, &parts, purpose, |_| true)
}

/// Existing rules by chain and words, with all copies of each.
#[derive(Default)]
struct ExistingRules(BTreeMap<(&'static str, Vec<String>), Vec<Rule>>);

impl ExistingRules {
    /// Reads the rules with the same parts as those that the addresses require.
    fn read(
        filter: &mut Chains<'_>,
        addresses: &[OwnedAddress],
        admin_chain: &str,
        purpose: SearchFor,
    ) -> Result<ExistingRules> {
        let mut existing = ExistingRules::default();
        let ips = addresses.iter().map(|owned| owned.address);
        // One search finds the jump and the accepting rules, because the chain can be long.
        let jump_to_admin = Part::Target(admin_chain);
        existing.add(CNI_FORWARD, find_rules_of(filter, CNI_FORWARD, ips, Some(jump_to_admin), purpose)?);
        if isolates(addresses) {
            existing.add(STAGE_1, filter.rules(STAGE_1)?.to_vec());
            existing.add(STAGE_2, filter.rules(STAGE_2)?.to_vec());
        }
        Ok(existing)
    }

    /// Adds rules of a chain.
    fn add(&mut self, chain: &'static str, rules: Vec<Rule>) {
        for rule in rules.into_iter().filter(Rule::is_whole) {
            self.0.entry((chain, rule.words.clone())).or_default().push(rule);
        }
    }

    /// Returns the rules that have exactly these words.
    fn find(&self, chain: &'static str, words: &[String]) -> &[Rule] {
        self.0.get(&(chain, words.to_vec())).map_or(&[], Vec::as_slice)
    }
}

/// Whether the policy of these addresses isolates a bridge. All addresses of an attachment have the
/// same policy.
fn isolates(addresses: &[OwnedAddress]) -> bool {
    addresses.iter().any(|owned| owned.ingress.bridge().is_some())
}

/// Returns the chains that addresses require.
fn required_chains<'a>(addresses: &[OwnedAddress], admin_chain: &'a str) -> Vec<&'a str> {
    let isolation = if isolates(addresses) { &[STAGE_1, STAGE_2][..] } else { &[] };
    [&[CNI_FORWARD, admin_chain], isolation].concat()
}

/// Returns the rules that addresses require, except the jumps from [`FORWARD`]: the chain and the
/// words of each, and where the rule is added. Of several rules that are added at the beginning of
/// a chain, the last one becomes the first.
fn required_rules(addresses: &[OwnedAddress], admin_chain: &str) -> Vec<(&'static str, Vec<String>, RulePosition)> {
    let mut required = vec![(CNI_FORWARD, commented_rule(&[], ADMIN_JUMP_COMMENT, admin_chain), First)];
    for owned in addresses {
        required.extend(address_rules(owned).into_iter().map(|words| (CNI_FORWARD, words, Last)));
    }
    let isolating = addresses.iter().find(|owned| owned.ingress.bridge().is_some());
    for (chain, words) in isolating.iter().flat_map(|owned| isolation_rules(&owned.ingress)).rev() {
        required.push((chain, words, First));
    }
    required
}

/// Adds to `edit` the removal of all but the first of these copies of a rule: simultaneous ADDs of
/// the Go plugin can both add the same rule.
fn delete_duplicates(edit: &mut Edit, chain: &str, copies: &[Rule]) {
    for duplicate in copies.iter().skip(1) {
        edit.delete(chain, duplicate);
    }
}

/// Returns the edit after which exactly `addresses` are the addresses of the attachment `owner`, in
/// the family of `filter`. Removes the [stale records](Wanted::stale_records).
/// Adds to `written.accepted_for_others` the addresses that are accepted but have no record: the Go
/// plugin wrote these rules. Sets `written.replaced`.
pub(super) fn ensure(
    filter: &mut Chains<'_>,
    owner: &str,
    addresses: &[OwnedAddress],
    admin_chain: &str,
    written: &mut Written,
) -> Result<Edit> {
    let mut edit = Edit::new();
    for chain in required_chains(addresses, admin_chain).into_iter().chain([OWNERS]) {
        if !filter.has_chain(chain)? {
            edit.create_chain(chain);
        }
    }
    let jumps = if isolates(addresses) { &[STAGE_1, CNI_FORWARD][..] } else { &[CNI_FORWARD] };
    order_jumps(filter, &mut edit, jumps)?;
    let existing = ExistingRules::read(filter, addresses, admin_chain, SearchFor::Append)?;
    let ips = addresses.iter().map(|owned| owned.address);
    let found = find_rules_of(filter, OWNERS, ips, Some(Part::Comment(owner)), SearchFor::Append)?;
    let records = records_among(&found);
    for (chain, words, position) in required_rules(addresses, admin_chain) {
        let copies = existing.find(chain, &words);
        delete_duplicates(&mut edit, chain, copies);
        if copies.is_empty() {
            edit.add_rule(chain, words, position);
        }
    }
    if isolates(addresses) {
        for stage in [STAGE_1, STAGE_2] {
            if existing.find(stage, &end_of_stage()).is_empty() {
                edit.append(stage, end_of_stage());
            }
        }
    }
    let recorded: BTreeSet<&OwnedAddress> = records.iter().map(|record| &record.owned).collect();
    let recorded_addresses: BTreeSet<IpAddr> = records.iter().map(|record| record.owned.address).collect();
    for owned in addresses {
        let is_accepted = address_rules(owned).iter().any(|words| !existing.find(CNI_FORWARD, words).is_empty());
        if is_accepted && !recorded_addresses.contains(&owned.address) {
            written.accepted_for_others.push(owned.address);
        }
        if !recorded.contains(owned) {
            edit.append(OWNERS, record_rule(owned));
        }
    }
    let wanted = Wanted { owner, addresses, in_table: addresses };
    let stale_records = wanted.stale_records(&records, &mut written.replaced)?;
    let removal = Removal { records: &stale_records, staying: addresses, ..Removal::default() };
    removal.add_to(&mut edit, filter)?;
    Ok(edit)
}

/// Adds to `edit` the changes after which [`FORWARD`] has at most one jump each to [`STAGE_1`] and
/// [`CNI_FORWARD`], in this order. A missing jump is only added if its target is in `required`.
fn order_jumps(filter: &mut Chains<'_>, edit: &mut Edit, required: &[&str]) -> Result<()> {
    // FORWARD, which can be long, is not read if neither chain exists: no rule can jump to a chain
    // that does not exist.
    let has_target = filter.has_chain(CNI_FORWARD)? || filter.has_chain(STAGE_1)?;
    let jumps = if has_target { find_jumps(filter)? } else { Vec::new() };
    let first = jumps.first().cloned();
    let mut existing = ExistingRules::default();
    existing.add(FORWARD, jumps);
    let jump_to_forward = commented_rule(&[], JUMP_COMMENT, CNI_FORWARD);
    let copies = existing.find(FORWARD, &jump_to_forward);
    delete_duplicates(edit, FORWARD, copies);
    let adds_forward_jump = required.contains(&CNI_FORWARD) && copies.is_empty();
    if adds_forward_jump {
        edit.insert(FORWARD, jump_to_forward);
    }
    let jump_to_stage_1 = commented_rule(&[], ISOLATION_COMMENT, STAGE_1);
    let copies = existing.find(FORWARD, &jump_to_stage_1);
    if copies.is_empty() && !required.contains(&STAGE_1) {
        return Ok(());
    }
    // A jump to CNI_FORWARD that is added above comes before the existing jumps.
    let is_first = !adds_forward_jump && first.is_some_and(|rule| rule.matches(&jump_to_stage_1));
    if !is_first || copies.len() != 1 {
        edit.put_first(FORWARD, jump_to_stage_1, copies);
    }
    Ok(())
}

/// Returns the rules of [`FORWARD`] that lead to [`STAGE_1`] or [`CNI_FORWARD`], in their order.
fn find_jumps(filter: &mut Chains<'_>) -> Result<Vec<Rule>> {
    let targets = [STAGE_1, CNI_FORWARD];
    let is_jump = |rule: &Rule| rule.target().is_some_and(|target| targets.contains(&target));
    // No index: rules are inserted at the beginning of FORWARD.
    filter.scan_rules(FORWARD, &targets.map(Part::Target), is_jump)
}

/// Returns the edit that removes the rules of the selected attachments. The Go plugin writes rules
/// without a record: those for the addresses of [`Untagged::Covering`] are also removed, unless
/// another attachment owns the address. The accepting rules for the addresses that
/// `accepted_for_others` returns stay. For GC, the edit also puts the jumps from [`FORWARD`] in
/// order.
pub(super) fn purge(
    filter: &mut Chains<'_>,
    selection: AttachmentFilter<'_>,
    accepted_for_others: &dyn Fn() -> Vec<IpAddr>,
) -> Result<Edit> {
    let selected = selection.owners(owner::NAME);
    let parts: Vec<Part<'_>> = match &selected {
        SelectedOwners::One(owner) => vec![Part::Comment(owner)],
        SelectedOwners::Garbage { prefixes, .. } => {
            prefixes.iter().map(|prefix| Part::CommentBeginning(prefix)).collect()
        }
    };
    let found = filter.find_rules(OWNERS, &parts, SearchFor::Compare, |rule| rule.target().is_none())?;
    // The search by a prefix also finds names that contain it elsewhere.
    let records = records_among(&found);
    let records: Vec<_> = records.iter().filter(|record| selected.contains(&record.owned.owner)).collect();
    let unrecorded_addresses = match selection {
        AttachmentFilter::One { untagged: Untagged::Covering(addresses), .. } => addresses,
        _ => &[],
    };
    let mut edit = Edit::new();
    let accepted_for_others = &*if records.is_empty() { Vec::new() } else { accepted_for_others() };
    let removal = Removal { records: &records, unrecorded_addresses, accepted_for_others, ..Removal::default() };
    removal.add_to(&mut edit, filter)?;
    if matches!(selection, AttachmentFilter::Garbage { .. }) {
        order_jumps(filter, &mut edit, &[])?;
    }
    Ok(edit)
}

/// Returns a sentence for each chain or rule for `addresses` that is missing or in the wrong order;
/// empty if none. Records are not checked, because Go does not write them.
pub(super) fn check(filter: &mut Chains<'_>, addresses: &[OwnedAddress], admin_chain: &str) -> Result<Vec<String>> {
    let mut missing = Vec::new();
    for chain in required_chains(addresses, admin_chain) {
        if !filter.has_chain(chain)? {
            missing.push(format!("iptables chain {chain} is missing from table filter"));
        }
    }
    if !missing.is_empty() {
        return Ok(missing);
    }
    let jumps = find_jumps(filter)?;
    let first_target = jumps.first().and_then(Rule::target).map(str::to_owned);
    let mut existing = ExistingRules::read(filter, addresses, admin_chain, SearchFor::Compare)?;
    existing.add(FORWARD, jumps);
    let mut required = vec![(FORWARD, commented_rule(&[], JUMP_COMMENT, CNI_FORWARD))];
    if isolates(addresses) {
        required.push((FORWARD, commented_rule(&[], ISOLATION_COMMENT, STAGE_1)));
    }
    required.extend(required_rules(addresses, admin_chain).into_iter().map(|(chain, words, _)| (chain, words)));
    for (chain, words) in required {
        if existing.find(chain, &words).is_empty() {
            missing.push(format!("iptables chain {chain} has no rule {}", words.join(" ")));
        }
    }
    if isolates(addresses) && missing.is_empty() && first_target.as_deref() != Some(STAGE_1) {
        missing.push(format!("iptables chain {FORWARD} leads to {CNI_FORWARD} before {STAGE_1}: nothing is isolated"));
    }
    Ok(missing)
}

/// Whether [`CNI_FORWARD`] has a rule that accepts packets of one of the addresses.
pub(super) fn accepts_any(filter: &mut Chains<'_>, addresses: &[IpAddr]) -> Result<bool> {
    let accepting: BTreeSet<Vec<String>> = addresses.iter().flat_map(|address| accept_rules(*address)).collect();
    let rules = find_rules_of(filter, CNI_FORWARD, addresses.iter().copied(), None, SearchFor::Compare)?;
    Ok(rules.iter().any(|rule| rule.whole && accepting.contains(&rule.words)))
}
