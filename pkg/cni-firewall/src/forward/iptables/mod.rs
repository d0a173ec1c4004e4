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
use cni_linux::route::Family;

use super::owner::{self, Ingress, OwnedAddress, Record, Wanted};
use super::{ForwardRules, Written};
use crate::iptables::{Chains, Edit, IfMissing, Part, Rule, single_address};
use crate::nft::RulePosition::{self, First, Last};
use crate::owner::AttachmentFilter;

mod shape;
#[cfg(test)]
mod tests;

pub use shape::ADMIN;
use shape::{
    ADMIN_JUMP_COMMENT, FORWARD, ISOLATION_COMMENT, JUMP_COMMENT, STAGE_1, STAGE_2, accept_rules, address_rules,
    commented_rule, end_of_stage, isolation_rules, record_rule, redirected_rule,
};
pub(crate) use shape::{CNI_FORWARD, OWNERS, read_record};

/// Returns the records among these rules of [`OWNERS`].
fn records_among(rules: &[Rule]) -> Vec<Record<Rule>> {
    rules.iter().filter_map(|rule| Some(Record { rule: rule.clone(), owned: read_record(rule)? })).collect()
}

/// How many parts of rules are searched for in a chain. For more, every rule is read, because the
/// search compares each rule with each part.
const SEARCHED_MAX: usize = 16;

/// Returns the rules of `chain` that have one of the parts. The result can contain some other rules
/// too.
fn find_rules(filter: &mut Chains<'_>, chain: &str, parts: &[Part<'_>], if_missing: IfMissing) -> Result<Vec<Rule>> {
    if parts.len() > SEARCHED_MAX {
        return Ok(filter.rules(chain)?.to_vec());
    }
    filter.find_rules(chain, parts, if_missing, |_| true)
}

/// Existing rules by chain and words, with all copies of each.
#[derive(Default)]
struct ExistingRules(BTreeMap<(&'static str, Vec<String>), Vec<Rule>>);

impl ExistingRules {
    /// Reads the rules of [`CNI_FORWARD`] that match one of the addresses or jump to the
    /// administrator's chain and, if the policy isolates a bridge, all rules of both stages.
    fn read(
        filter: &mut Chains<'_>,
        rules: &ForwardRules,
        addresses: &[OwnedAddress],
        if_missing: IfMissing,
    ) -> Result<ExistingRules> {
        let mut existing = ExistingRules::default();
        // One search finds the jump and the accepting rules, because the chain can be long.
        let accepting = addresses.iter().map(|owned| Part::Address(owned.address));
        let parts: Vec<Part<'_>> = accepting.chain([Part::Target(&rules.iptables_admin_chain)]).collect();
        existing.add(CNI_FORWARD, find_rules(filter, CNI_FORWARD, &parts, if_missing)?);
        for stage in stages(&rules.ingress) {
            existing.add(stage, filter.rules(stage)?.to_vec());
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

/// Returns the chains that isolate the policy's bridge; none for the policy `open`.
fn stages(ingress: &Ingress) -> &'static [&'static str] {
    if ingress.bridge().is_some() { &[STAGE_1, STAGE_2] } else { &[] }
}

/// Returns the chains that the rules require.
fn required_chains(rules: &ForwardRules) -> Vec<&str> {
    [&[CNI_FORWARD, &rules.iptables_admin_chain], stages(&rules.ingress)].concat()
}

/// Returns the rules that these addresses require: the chain and the words of each, and where the
/// rule is added. Not among them are the jumps from [`FORWARD`], the RETURN that ends both stages,
/// and the records.
fn required_rules(rules: &ForwardRules, addresses: &[OwnedAddress]) -> Vec<(&'static str, Vec<String>, RulePosition)> {
    let jump_to_admin = commented_rule(&[], ADMIN_JUMP_COMMENT, &rules.iptables_admin_chain);
    let accepting = addresses.iter().flat_map(address_rules).map(|words| (CNI_FORWARD, words, Last));
    // In reverse: of several rules that are added at the beginning of a chain, the last one becomes
    // the first.
    let isolating = isolation_rules(&rules.ingress).into_iter().rev().map(|(chain, words)| (chain, words, First));
    std::iter::once((CNI_FORWARD, jump_to_admin, First)).chain(accepting).chain(isolating).collect()
}

/// Adds to `edit` the removal of all but the first of these copies of a rule: simultaneous ADDs of
/// the Go plugin can both add the same rule.
fn delete_duplicates(edit: &mut Edit, chain: &str, copies: &[Rule]) {
    for duplicate in copies.iter().skip(1) {
        edit.delete(chain, duplicate);
    }
}

/// Plans an ADD for the addresses of `rules` in the family of `filter`. The edit adds the missing
/// chains, jumps, rules and records. It removes copies of these rules, and the [stale
/// records](Wanted::stale_records) with the rules that only they require. Sets `written.replaced`.
///
/// Adds to `written.accepted_for_others` the addresses that are accepted but have no record: the Go
/// plugin wrote these rules.
pub(super) fn ensure(filter: &mut Chains<'_>, rules: &ForwardRules, written: &mut Written) -> Result<Edit> {
    let (owner, addresses) = (&owner::name(&rules.attachment), &rules.of_family(filter.family()));
    let mut edit = Edit::new();
    for chain in required_chains(rules).into_iter().chain([OWNERS]) {
        if !filter.has_chain(chain)? {
            edit.create_chain(chain);
        }
    }
    order_jumps(filter, &mut edit, &[&[CNI_FORWARD], stages(&rules.ingress)].concat())?;
    let existing = ExistingRules::read(filter, rules, addresses, IfMissing::TrustIndex)?;
    let of_addresses = addresses.iter().map(|owned| Part::Address(owned.address));
    let parts: Vec<Part<'_>> = of_addresses.chain([Part::Comment(owner)]).collect();
    let records = records_among(&find_rules(filter, OWNERS, &parts, IfMissing::TrustIndex)?);
    for (chain, words, position) in required_rules(rules, addresses) {
        let copies = existing.find(chain, &words);
        delete_duplicates(&mut edit, chain, copies);
        if copies.is_empty() {
            edit.add_rule(chain, words, position);
        }
    }
    for stage in stages(&rules.ingress) {
        if existing.find(stage, &end_of_stage()).is_empty() {
            edit.append(stage, end_of_stage());
        }
    }
    // An address can have the record of another owner or policy: then it has an owner, but its
    // record is missing.
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

/// Adds to `edit` the changes after which [`FORWARD`] has at most one jump each, in Go's form, to
/// [`STAGE_1`] and [`CNI_FORWARD`], in this order. A missing jump is only added if `required` has
/// the name of its target.
fn order_jumps(filter: &mut Chains<'_>, edit: &mut Edit, required: &[&str]) -> Result<()> {
    // FORWARD, which can be long, is not read if neither chain exists: no rule can jump to a chain
    // that does not exist.
    let has_target = filter.has_chain(CNI_FORWARD)? || filter.has_chain(STAGE_1)?;
    let jumps = if has_target { find_jumps(filter)? } else { Vec::new() };
    let copies_of =
        |words: &[String]| -> Vec<Rule> { jumps.iter().filter(|rule| rule.matches(words)).cloned().collect() };
    let jump_to_forward = commented_rule(&[], JUMP_COMMENT, CNI_FORWARD);
    let forward_copies = copies_of(&jump_to_forward);
    delete_duplicates(edit, FORWARD, &forward_copies);
    let adds_forward_jump = required.contains(&CNI_FORWARD) && forward_copies.is_empty();
    if adds_forward_jump {
        edit.insert(FORWARD, jump_to_forward);
    }
    let jump_to_stage_1 = commented_rule(&[], ISOLATION_COMMENT, STAGE_1);
    let stage_1_copies = copies_of(&jump_to_stage_1);
    if stage_1_copies.is_empty() && !required.contains(&STAGE_1) {
        return Ok(());
    }
    // A jump to CNI_FORWARD that is added above comes before the existing jumps.
    let is_first = !adds_forward_jump && jumps.first().is_some_and(|rule| rule.matches(&jump_to_stage_1));
    // Without a jump to STAGE_1, `is_first` is false.
    if !is_first || stage_1_copies.len() > 1 {
        edit.put_first(FORWARD, jump_to_stage_1, &stage_1_copies);
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
/// without a record: those for the known addresses of the attachment are also removed, unless
/// another attachment owns the address. The accepting rules for the addresses that
/// `accepted_for_others` returns stay. For GC, the edit also puts the jumps from [`FORWARD`] in
/// order, which the Go plugin does not ensure.
pub(super) fn purge(
    filter: &mut Chains<'_>,
    selection: AttachmentFilter<'_>,
    accepted_for_others: &dyn Fn() -> Vec<IpAddr>,
) -> Result<Edit> {
    // A rule with a target is not a record.
    let has_no_target = |rule: &Rule| rule.target().is_none();
    let (found_rules, unrecorded_addresses) = match selection {
        AttachmentFilter::One { attachment, untagged } => {
            let name = owner::name(attachment);
            let found = filter.find_rules(OWNERS, &[Part::Comment(&name)], IfMissing::ReadAll, has_no_target)?;
            (found, untagged.addresses())
        }
        AttachmentFilter::Garbage { network, .. } => {
            let prefixes = (owner::NAME.prefixes)(network);
            let parts: Vec<Part<'_>> = prefixes.iter().map(|prefix| Part::CommentBeginning(prefix)).collect();
            // An index cannot find the beginning of a comment, so the chain is scanned. Rules
            // without a record can only be found by an address, and GC has none.
            (filter.scan_rules(OWNERS, &parts, has_no_target)?, &[][..])
        }
    };
    // The searches also find some other names, for example those that contain a prefix elsewhere.
    let (found, is_selected) = (records_among(&found_rules), selection.selector(owner::NAME));
    let records: Vec<_> = found.iter().filter(|record| is_selected(&record.owned.owner)).collect();
    let mut edit = Edit::new();
    // Without a record to remove, only DEL removes accepting rules, and for DEL
    // `accepted_for_others` returns nothing. The call is left out, because for GC it reads libcni's
    // cached results.
    let kept = if records.is_empty() { Vec::new() } else { accepted_for_others() };
    let removal = Removal { records: &records, unrecorded_addresses, accepted_for_others: &kept, ..Removal::default() };
    removal.add_to(&mut edit, filter)?;
    if matches!(selection, AttachmentFilter::Garbage { .. }) {
        order_jumps(filter, &mut edit, &[])?;
    }
    Ok(edit)
}

/// Checks the rules for the addresses of `rules`, in the family of `filter`. Returns a sentence for
/// each chain or rule that is missing or in the wrong order, and whether a rule accepts packets of
/// one of the addresses. If chains are missing, the sentences report only these. Does not check the
/// records, which Go does not write, or the RETURN that ends both stages, without which packets
/// return too.
pub(super) fn check(filter: &mut Chains<'_>, rules: &ForwardRules) -> Result<(Vec<String>, bool)> {
    let (addresses, mut missing) = (&rules.of_family(filter.family()), Vec::new());
    for chain in required_chains(rules) {
        if !filter.has_chain(chain)? {
            missing.push(format!("iptables chain {chain} is missing from table filter"));
        }
    }
    let mut existing = ExistingRules::read(filter, rules, addresses, IfMissing::ReadAll)?;
    let mut accepting = addresses.iter().flat_map(|owned| accept_rules(owned.address));
    let accepts_any = accepting.any(|words| !existing.find(CNI_FORWARD, &words).is_empty());
    if !missing.is_empty() {
        return Ok((missing, accepts_any));
    }
    let jumps = find_jumps(filter)?;
    // `existing` does not keep the order.
    let stage_is_first = jumps.first().and_then(Rule::target) == Some(STAGE_1);
    existing.add(FORWARD, jumps);
    let mut required = vec![(FORWARD, commented_rule(&[], JUMP_COMMENT, CNI_FORWARD))];
    let isolates = rules.ingress.bridge().is_some();
    if isolates {
        required.push((FORWARD, commented_rule(&[], ISOLATION_COMMENT, STAGE_1)));
    }
    required.extend(required_rules(rules, addresses).into_iter().map(|(chain, words, _)| (chain, words)));
    for (chain, words) in required {
        if existing.find(chain, &words).is_empty() {
            missing.push(format!("iptables chain {chain} has no rule {}", words.join(" ")));
        }
    }
    if isolates && missing.is_empty() && !stage_is_first {
        missing.push(format!("iptables chain {FORWARD} leads to {CNI_FORWARD} before {STAGE_1}: nothing is isolated"));
    }
    Ok((missing, accepts_any))
}

/// The records and addresses whose rules are removed.
#[derive(Clone, Copy, Default)]
struct Removal<'r> {
    /// Rules of [`OWNERS`], with all copies of each.
    records: &'r [&'r Record<Rule>],
    /// Further addresses, of either family, whose rules may have no record.
    unrecorded_addresses: &'r [IpAddr],
    /// Addresses that keep their rules even if a removed record names them.
    staying: &'r [OwnedAddress],
    /// Addresses that keep their accepting rules, and whose isolation is unknown: the Go plugin may
    /// have written the rules, and it writes no records.
    accepted_for_others: &'r [IpAddr],
}

impl Removal<'_> {
    /// Adds to `edit` the removal of:
    /// - the records;
    /// - the accepting rules of their addresses and of the unrecorded ones that are not needed, see
    ///   [`unneeded_rules`](Removal::unneeded_rules);
    /// - the isolation rules that no other record and no address in `staying` requires, see
    ///   [`end_isolation`].
    fn add_to(&self, edit: &mut Edit, filter: &mut Chains<'_>) -> Result<()> {
        let family = filter.family();
        let unrecorded = self.unrecorded_addresses.iter().copied().filter(|address| Family::of(*address) == family);
        let candidates: BTreeSet<IpAddr> =
            unrecorded.chain(self.records.iter().map(|record| record.owned.address)).collect();
        if candidates.is_empty() {
            return Ok(());
        }
        let parts: Vec<Part<'_>> = candidates.iter().copied().map(Part::Address).collect();
        let accepting = find_rules(filter, CNI_FORWARD, &parts, IfMissing::ReadAll)?;
        let owner_rules = find_rules(filter, OWNERS, &parts, IfMissing::ReadAll)?;
        let unneeded = self.unneeded_rules(&candidates, &owner_rules);
        // A rule that is not whole does more than its words say, so another program wrote it.
        for rule in accepting.iter().filter(|rule| rule.whole && unneeded.contains(&rule.words)) {
            edit.delete(CNI_FORWARD, rule);
        }
        for record in self.records {
            edit.delete(OWNERS, &record.rule);
        }
        // Without this chain nothing is isolated, and the other records need not be read.
        if filter.has_chain(STAGE_1)? {
            let remaining = self.remaining(filter.rules(OWNERS)?);
            end_isolation(filter, edit, &remaining, &unneeded)?;
        }
        Ok(())
    }

    /// Returns the accepting rules of `candidates`, which are the addresses of the records and the
    /// unrecorded ones, except those that an address with an owner requires, and those that
    /// `accepted_for_others` keeps. `owner_rules` are all rules of [`OWNERS`] for the candidates.
    fn unneeded_rules(&self, candidates: &BTreeSet<IpAddr>, owner_rules: &[Rule]) -> BTreeSet<Vec<String>> {
        let rules_of = |address: &IpAddr| [&accept_rules(*address)[..], &[redirected_rule(*address)]].concat();
        let mut unneeded: BTreeSet<Vec<String>> = candidates.iter().flat_map(rules_of).collect();
        let remaining = self.remaining(owner_rules);
        // Without the rule for redirected connections, which Go does not write.
        let kept = self.accepted_for_others.iter().flat_map(|address| accept_rules(*address));
        for words in remaining.iter().flat_map(address_rules).chain(kept) {
            unneeded.remove(&words);
        }
        unneeded
    }

    /// Returns the addresses that have an owner after the removal: `staying`, and those in other
    /// records of `rules`, which are rules of [`OWNERS`].
    fn remaining(&self, rules: &[Rule]) -> Vec<OwnedAddress> {
        let removed: BTreeSet<&OwnedAddress> = self.records.iter().map(|record| &record.owned).collect();
        let recorded = rules.iter().filter_map(read_record).filter(|owned| !removed.contains(owned));
        self.staying.iter().cloned().chain(recorded).collect()
    }
}

/// Adds to `edit` the removal of the isolation rules that no address in `remaining` requires. The
/// caller removes the rules of [`CNI_FORWARD`] with the words in `removed`.
///
/// Removes nothing while [`CNI_FORWARD`] accepts an address without an owner: the Go plugin has
/// attached that container, and the isolation that the container requires is unknown.
fn end_isolation(
    filter: &mut Chains<'_>,
    edit: &mut Edit,
    remaining: &[OwnedAddress],
    removed: &BTreeSet<Vec<String>>,
) -> Result<()> {
    // First the exception: an accepting rule stays although its address has no owner.
    let known: BTreeSet<IpAddr> = remaining.iter().map(|owned| owned.address).collect();
    for rule in filter.rules(CNI_FORWARD)? {
        let Some(address) = single_address(rule, "-s").filter(|address| !known.contains(address)) else { continue };
        let [_, accept_from] = accept_rules(address);
        if rule.matches(&accept_from) && !removed.contains(&accept_from) {
            return Ok(());
        }
    }
    let required: BTreeSet<(&str, Vec<String>)> =
        remaining.iter().flat_map(|owned| isolation_rules(&owned.ingress)).collect();
    for (chain, interface_option) in [(STAGE_1, "-i"), (STAGE_2, "-o")] {
        for rule in filter.rules(chain)? {
            let Some(bridge) = rule.value(interface_option) else { continue };
            let policies = [Ingress::SameBridge(bridge.to_owned()), Ingress::Isolated(bridge.to_owned())];
            // Another program wrote a rule in another form, so that rule stays.
            let is_isolation = policies.iter().flat_map(isolation_rules).any(|(_, words)| rule.matches(&words));
            if is_isolation && !required.contains(&(chain, rule.words.clone())) {
                edit.delete(chain, rule);
            }
        }
    }
    Ok(())
}
