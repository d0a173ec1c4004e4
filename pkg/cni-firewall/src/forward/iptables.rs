//! Forwarding in iptables' table `filter`, in the form of the Go plugin, with one chain more.
//!
//! For each container address ADDRESS and each isolated bridge BRIDGE:
//! ```text
//! -A FORWARD --comment "CNI firewall plugin rules (ingressPolicy: same-bridge|isolated)" -j CNI-ISOLATION-STAGE-1
//! -A FORWARD --comment "CNI firewall plugin rules" -j CNI-FORWARD
//! -A CNI-FORWARD --comment "CNI firewall plugin admin overrides" -j CNI-ADMIN
//! -A CNI-FORWARD -d ADDRESS -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
//! -A CNI-FORWARD -s ADDRESS -j ACCEPT
//! -A CNI-ISOLATION-STAGE-1 -i BRIDGE -o BRIDGE --comment "... (ingressPolicy: isolated)" -j DROP     # isolated alone
//! -A CNI-ISOLATION-STAGE-1 -i BRIDGE ! -o BRIDGE --comment "... (ingressPolicy: POLICY)" -j CNI-ISOLATION-STAGE-2
//! -A CNI-ISOLATION-STAGE-2 -o BRIDGE --comment "... (ingressPolicy: same-bridge|isolated)" -j DROP
//! -A CNI-FW-OWNERS -s ADDRESS [-i BRIDGE [!] -o BRIDGE] --comment cni:NETWORK/CONTAINER/IFNAME
//! ```
//! Both stages end with a RETURN. The last chain is not written by Go, and no rule leads to it: its
//! rules, the *records*, only name the attachment that has an address, and its isolated bridge.
//!
//! CNI-FORWARD accepts packets that come from a container, so the jump to the first stage must be
//! before that to CNI-FORWARD. The Go plugin inserts each jump at the beginning of FORWARD when it
//! first needs it and never moves one.
//!
//! These functions only plan: they read [`Chains`] and return an [`Edit`].

use std::net::IpAddr;

use cni::Cidr;

use super::owner::{self, Ingress, OwnedAddress, octets};
use crate::iptables::{Chains, Edit, Rule};
use cni_linux::error::Result;
use cni_linux::route::Family;

/// The built-in chain that every forwarded packet passes.
const BASE: &str = "FORWARD";
pub(crate) const FORWARD: &str = "CNI-FORWARD";
pub(crate) const OWNERS: &str = "CNI-FW-OWNERS";
pub(crate) const STAGE_1: &str = "CNI-ISOLATION-STAGE-1";
const STAGE_2: &str = "CNI-ISOLATION-STAGE-2";
/// The chain for the administrator's rules, unless the configuration names another one.
pub const ADMIN: &str = "CNI-ADMIN";

const JUMP_COMMENT: &str = "CNI firewall plugin rules";
const ADMIN_JUMP_COMMENT: &str = "CNI firewall plugin admin overrides";
const ISOLATION_COMMENT: &str = "CNI firewall plugin rules (ingressPolicy: same-bridge|isolated)";

/// Returns the words as owned strings.
fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// Returns the words of a rule with these matches, this comment and this target.
fn commented(matches: &[&str], comment: &str, target: &str) -> Vec<String> {
    words(&[matches, &["-m", "comment", "--comment", comment, "-j", target]].concat())
}

/// Returns the two rules of [`FORWARD`] for an address: the first accepts replies to the address,
/// the second all packets from it.
fn accept_rules(address: IpAddr) -> [Vec<String>; 2] {
    let host = Cidr::host(address).to_string();
    [
        words(&["-d", &host, "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"]),
        words(&["-s", &host, "-j", "ACCEPT"]),
    ]
}

/// Returns the rules of the policy's bridge in [`STAGE_1`], in order; none for the policy `open`.
fn stage_1_rules(ingress: &Ingress) -> Vec<Vec<String>> {
    let comment = format!("CNI firewall plugin rules (ingressPolicy: {})", ingress.name());
    match ingress {
        Ingress::Open => Vec::new(),
        Ingress::SameBridge(bridge) => vec![commented(&["-i", bridge, "!", "-o", bridge], &comment, STAGE_2)],
        Ingress::Isolated(bridge) => vec![
            commented(&["-i", bridge, "-o", bridge], &comment, "DROP"),
            commented(&["-i", bridge, "!", "-o", bridge], &comment, STAGE_2),
        ],
    }
}

/// Returns the rule of an isolated bridge in [`STAGE_2`].
fn stage_2_rule(bridge: &str) -> Vec<String> {
    commented(&["-o", bridge], ISOLATION_COMMENT, "DROP")
}

/// Returns the last rule of both stages.
fn end_of_stage() -> Vec<String> {
    commented(&[], ISOLATION_COMMENT, "RETURN")
}

/// Returns the record of an address for [`OWNERS`]. The interface matches store the policy, as in
/// [`STAGE_1`]: none for `open`, `-i B ! -o B` for `same-bridge`, `-i B -o B` for `isolated`.
fn record_rule(owned: &OwnedAddress) -> Vec<String> {
    let host = Cidr::host(owned.address).to_string();
    let bridge = match &owned.ingress {
        Ingress::Open => Vec::new(),
        Ingress::SameBridge(bridge) => vec!["-i", bridge, "!", "-o", bridge],
        Ingress::Isolated(bridge) => vec!["-i", bridge, "-o", bridge],
    };
    words(&[&["-s", &host][..], &bridge, &["-m", "comment", "--comment", &owned.owner]].concat())
}

/// Returns the rule's value of `-s` or `-d` if it is a single address.
fn single_address(rule: &Rule, option: &str) -> Option<IpAddr> {
    let cidr: Cidr = rule.value(option)?.parse().ok()?;
    (cidr == Cidr::host(cidr.address())).then(|| cidr.address())
}

/// Returns the owner, the address and the policy that a rule written as [`record_rule`] records;
/// `None` for other rules. Also reads the records of the nftables backend, put into words.
pub(crate) fn read_owner(rule: &Rule) -> Option<(&str, IpAddr, Ingress)> {
    let owner = rule.comment()?;
    if rule.target().is_some() || !owner::is_name(owner) {
        return None;
    }
    // `value` finds nothing for a negated option, so `! -o` counts as none.
    let ingress = match (rule.value("-i"), rule.value("-o")) {
        (None, _) => Ingress::Open,
        (Some(bridge), None) => Ingress::SameBridge(bridge.to_owned()),
        (Some(bridge), Some(_)) => Ingress::Isolated(bridge.to_owned()),
    };
    Some((owner, single_address(rule, "-s")?, ingress))
}

/// A rule of [`OWNERS`] and what it records.
struct Record {
    rule: Rule,
    owned: OwnedAddress,
}

impl Record {
    /// Reads a rule of [`OWNERS`]; `None` if it is not a record.
    fn read(rule: &Rule) -> Option<Record> {
        let (owner, address, ingress) = read_owner(rule)?;
        Some(Record { rule: rule.clone(), owned: OwnedAddress { owner: owner.to_owned(), address, ingress } })
    }
}

/// Returns the records that contain one of the `needles`, texts or addresses in network byte order.
fn find_records(filter: &mut Chains<'_>, needles: &[&[u8]]) -> Result<Vec<Record>> {
    let rules = filter.find_rules(OWNERS, needles, |rule| rule.target().is_none())?;
    Ok(rules.iter().filter_map(Record::read).collect())
}

/// Returns the records of the attachment `owner`.
fn find_own_records(filter: &mut Chains<'_>, owner: &str) -> Result<Vec<Record>> {
    let mut records = find_records(filter, &[owner.as_bytes()])?;
    // The search also finds longer names that contain this one.
    records.retain(|record| record.owned.owner == owner);
    Ok(records)
}

/// Returns those of `rules` that have exactly these words.
fn matching<'r>(rules: &'r [Rule], words: &'r [String]) -> impl Iterator<Item = &'r Rule> {
    rules.iter().filter(move |rule| rule.matches(words))
}

/// Whether one of `rules` has exactly these words.
fn contains(rules: &[Rule], words: &[String]) -> bool {
    matching(rules, words).next().is_some()
}

/// Removes all but the first of the rules with these words: simultaneous ADDs of the Go plugin can
/// both add the same rule.
fn delete_duplicates(edit: &mut Edit, chain: &str, rules: &[Rule], words: &[String]) {
    for duplicate in matching(rules, words).skip(1) {
        edit.delete(chain, duplicate);
    }
}

/// Returns the rules of [`FORWARD`] that contain one of the addresses.
fn find_forward_rules(filter: &mut Chains<'_>, addresses: &[IpAddr]) -> Result<Vec<Rule>> {
    let needles: Vec<Vec<u8>> = addresses.iter().map(|address| octets(*address)).collect();
    let needles: Vec<&[u8]> = needles.iter().map(Vec::as_slice).collect();
    filter.find_rules(FORWARD, &needles, |_| true)
}

/// Returns the edit after which exactly `addresses` are the addresses of the attachment `owner`, in
/// the family of `filter`.
pub(super) fn ensure(
    filter: &mut Chains<'_>,
    owner: &str,
    addresses: &[OwnedAddress],
    admin_chain: &str,
) -> Result<Edit> {
    let mut edit = Edit::new();
    for chain in [FORWARD, admin_chain, OWNERS] {
        if !filter.has_chain(chain)? {
            edit.create_chain(chain);
        }
    }
    // All addresses of an attachment have the same policy.
    match addresses.iter().map(|owned| &owned.ingress).find(|ingress| ingress.bridge().is_some()) {
        Some(ingress) => {
            isolate(filter, &mut edit, ingress)?;
            order_jumps(filter, &mut edit, &[STAGE_1, FORWARD])?;
        }
        None => order_jumps(filter, &mut edit, &[FORWARD])?,
    }

    // One search finds the jump and the accepting rules: the chain can be long.
    let mut needles: Vec<Vec<u8>> = addresses.iter().map(|owned| octets(owned.address)).collect();
    needles.push(admin_chain.as_bytes().to_vec());
    let needles: Vec<&[u8]> = needles.iter().map(Vec::as_slice).collect();
    let existing_rules = filter.find_rules(FORWARD, &needles, |_| true)?;
    let jump_to_admin = commented(&[], ADMIN_JUMP_COMMENT, admin_chain);
    delete_duplicates(&mut edit, FORWARD, &existing_rules, &jump_to_admin);
    if !contains(&existing_rules, &jump_to_admin) {
        edit.insert(FORWARD, jump_to_admin);
    }
    let own_records = find_own_records(filter, owner)?;
    for owned in addresses {
        for rule in accept_rules(owned.address) {
            delete_duplicates(&mut edit, FORWARD, &existing_rules, &rule);
            if !contains(&existing_rules, &rule) {
                edit.append(FORWARD, rule);
            }
        }
        if !own_records.iter().any(|record| record.owned == *owned) {
            edit.append(OWNERS, record_rule(owned));
        }
    }
    let stale_records: Vec<&Rule> =
        own_records.iter().filter(|record| !addresses.contains(&record.owned)).map(|record| &record.rule).collect();
    if !stale_records.is_empty() {
        edit.extend(remove_records(filter, &stale_records, &[], addresses)?);
    }
    Ok(edit)
}

/// Adds to `edit` what ensures that [`BASE`] has at most one jump to each of [`STAGE_1`] and
/// [`FORWARD`], and that the jump to [`STAGE_1`] precedes the other. A missing jump is only added
/// if its target is in `required`.
fn order_jumps(filter: &mut Chains<'_>, edit: &mut Edit, required: &[&str]) -> Result<()> {
    // BASE can be long. If neither chain exists, BASE is not read, because no rule can jump to a
    // chain that does not exist.
    let rules =
        if filter.has_chain(FORWARD)? || filter.has_chain(STAGE_1)? { find_base_jumps(filter)? } else { Vec::new() };
    let jump_to_forward = commented(&[], JUMP_COMMENT, FORWARD);
    let adds_forward_jump = required.contains(&FORWARD) && !contains(&rules, &jump_to_forward);
    if adds_forward_jump {
        edit.insert(BASE, jump_to_forward.clone());
    }
    delete_duplicates(edit, BASE, &rules, &jump_to_forward);

    let jump_to_stage_1 = commented(&[], ISOLATION_COMMENT, STAGE_1);
    let existing: Vec<Rule> = matching(&rules, &jump_to_stage_1).cloned().collect();
    if existing.is_empty() && !required.contains(&STAGE_1) {
        return Ok(());
    }
    // A new jump to FORWARD is inserted at the beginning of BASE, before the jump to STAGE_1.
    let is_first = !adds_forward_jump && rules.first().is_some_and(|rule| rule.matches(&jump_to_stage_1));
    if !is_first || existing.len() != 1 {
        edit.put_first(BASE, jump_to_stage_1, &existing);
    }
    Ok(())
}

/// Returns the rules of [`BASE`] that lead to [`STAGE_1`] or [`FORWARD`], in order.
fn find_base_jumps(filter: &mut Chains<'_>) -> Result<Vec<Rule>> {
    let targets = [STAGE_1, FORWARD];
    let is_jump = |rule: &Rule| rule.target().is_some_and(|target| targets.contains(&target));
    filter.find_rules(BASE, &targets.map(str::as_bytes), is_jump)
}

/// Adds to `edit` what is missing of the rules of both stages for the policy's bridge.
fn isolate(filter: &mut Chains<'_>, edit: &mut Edit, ingress: &Ingress) -> Result<()> {
    let Some(bridge) = ingress.bridge() else { return Ok(()) };
    for (chain, bridge_rules) in [(STAGE_1, stage_1_rules(ingress)), (STAGE_2, vec![stage_2_rule(bridge)])] {
        if !filter.has_chain(chain)? {
            edit.create_chain(chain);
        }
        let rules = filter.rules(chain)?.to_vec();
        // The order is reversed, because each insertion puts its rule before those inserted
        // earlier.
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

/// Returns the edit that removes the rules of the attachment `owner`, and the rules for `addresses`
/// that no other attachment owns: the Go plugin writes rules without a record.
pub(super) fn purge(filter: &mut Chains<'_>, owner: &str, addresses: &[IpAddr]) -> Result<Edit> {
    let own_records = find_own_records(filter, owner)?;
    let own_rules: Vec<&Rule> = own_records.iter().map(|record| &record.rule).collect();
    remove_records(filter, &own_rules, addresses, &[])
}

/// Returns the edit that removes the rules of the network's attachments whose owner names are not
/// in `valid`, and puts the jumps from [`BASE`] in order.
pub(super) fn gc(filter: &mut Chains<'_>, network: &str, valid: &[String]) -> Result<Edit> {
    let prefixes = owner::prefixes(network);
    let records = find_records(filter, &prefixes.each_ref().map(String::as_bytes))?;
    let is_garbage = |record: &&Record| {
        let owner = &record.owned.owner;
        prefixes.iter().any(|prefix| owner.starts_with(prefix)) && !valid.contains(owner)
    };
    let garbage: Vec<&Rule> = records.iter().filter(is_garbage).map(|record| &record.rule).collect();
    let mut edit = remove_records(filter, &garbage, &[], &[])?;
    order_jumps(filter, &mut edit, &[])?;
    Ok(edit)
}

/// Returns the edit that removes the records `removed`, the accepting rules of their addresses and
/// of the further `addresses`, and isolation that no attachment requires any more. An address that
/// another record or `staying` has keeps its rules.
fn remove_records(
    filter: &mut Chains<'_>,
    removed: &[&Rule],
    addresses: &[IpAddr],
    staying: &[OwnedAddress],
) -> Result<Edit> {
    let mut edit = Edit::new();
    let is_of_family = |address: &&IpAddr| Family::of(**address) == filter.family();
    let mut candidates: Vec<IpAddr> = addresses.iter().filter(is_of_family).copied().collect();
    candidates.extend(removed.iter().filter_map(|rule| Record::read(rule)).map(|record| record.owned.address));
    candidates.sort();
    candidates.dedup();
    if candidates.is_empty() {
        return Ok(edit);
    }
    let needles: Vec<Vec<u8>> = candidates.iter().map(|address| octets(*address)).collect();
    let needles: Vec<&[u8]> = needles.iter().map(Vec::as_slice).collect();
    let mut owned_addresses: Vec<IpAddr> = staying.iter().map(|owned| owned.address).collect();
    for record in find_records(filter, &needles)? {
        if !removed.contains(&&record.rule) {
            owned_addresses.push(record.owned.address);
        }
    }
    let accept_rules_here = find_forward_rules(filter, &candidates)?;
    let free: Vec<IpAddr> = candidates.into_iter().filter(|address| !owned_addresses.contains(address)).collect();
    for words in free.iter().flat_map(|address| accept_rules(*address)) {
        for rule in matching(&accept_rules_here, &words) {
            edit.delete(FORWARD, rule);
        }
    }
    for rule in removed {
        edit.delete(OWNERS, rule);
    }
    if filter.has_chain(STAGE_1)? {
        let mut remaining: Vec<OwnedAddress> = staying.to_vec();
        for record in filter.rules(OWNERS)?.iter().filter_map(Record::read) {
            if !removed.contains(&&record.rule) {
                remaining.push(record.owned);
            }
        }
        end_isolation(filter, &mut edit, &remaining, &free)?;
    }
    Ok(edit)
}

/// Adds to `edit` the removal of isolation rules that no address in `remaining` requires. All of
/// them stay while [`FORWARD`] accepts an address without an owner: the Go plugin has attached that
/// container, and which isolation it requires is unknown. `free` are the addresses whose accepting
/// rules this edit removes.
fn end_isolation(filter: &mut Chains<'_>, edit: &mut Edit, remaining: &[OwnedAddress], free: &[IpAddr]) -> Result<()> {
    for rule in filter.rules(FORWARD)? {
        let Some(address) = single_address(rule, "-s") else { continue };
        let [_, accept_from] = accept_rules(address);
        let has_owner = free.contains(&address) || remaining.iter().any(|owned| owned.address == address);
        if rule.matches(&accept_from) && !has_owner {
            return Ok(());
        }
    }
    for (chain, interface_option) in [(STAGE_1, "-i"), (STAGE_2, "-o")] {
        for rule in filter.rules(chain)? {
            let Some(bridge) = rule.value(interface_option) else { continue };
            // The policies that need this rule; none for a rule of another program.
            let mut policies = vec![Ingress::SameBridge(bridge.to_owned()), Ingress::Isolated(bridge.to_owned())];
            policies.retain(|policy| {
                rule.matches(&stage_2_rule(bridge)) || stage_1_rules(policy).iter().any(|words| rule.matches(words))
            });
            let is_required = remaining.iter().any(|owned| policies.contains(&owned.ingress));
            if !policies.is_empty() && !is_required {
                edit.delete(chain, rule);
            }
        }
    }
    Ok(())
}

/// The addresses of one family that had rules before an ADD.
#[derive(Clone, Debug, Default)]
pub(super) struct FamilyAddresses {
    /// The addresses of the attachment.
    own: Vec<OwnedAddress>,
    /// Addresses of the ADD that [`FORWARD`] accepted without a record of the attachment.
    others: Vec<IpAddr>,
}

impl FamilyAddresses {
    /// Reads the addresses that the attachment `owner` has, and which of `addresses`, which an ADD
    /// is about to give to it, are accepted already.
    pub(super) fn read(filter: &mut Chains<'_>, owner: &str, addresses: &[OwnedAddress]) -> Result<FamilyAddresses> {
        let own: Vec<OwnedAddress> = find_own_records(filter, owner)?.into_iter().map(|record| record.owned).collect();
        let hosts: Vec<IpAddr> = addresses.iter().map(|owned| owned.address).collect();
        let rules = find_forward_rules(filter, &hosts)?;
        let mut others = Vec::new();
        for address in hosts {
            let is_accepted = accept_rules(address).iter().any(|words| contains(&rules, words));
            let is_own = own.iter().any(|owned| owned.address == address);
            if is_accepted && !is_own {
                others.push(address);
            }
        }
        Ok(FamilyAddresses { own, others })
    }

    /// Returns the edit that undoes an [`ensure`] of `addresses` and restores these.
    pub(super) fn put_back(
        &self,
        filter: &mut Chains<'_>,
        owner: &str,
        addresses: &[OwnedAddress],
        admin_chain: &str,
    ) -> Result<Edit> {
        if !self.own.is_empty() {
            return ensure(filter, owner, &self.own, admin_chain);
        }
        let own_records = find_own_records(filter, owner)?;
        let own_rules: Vec<&Rule> = own_records.iter().map(|record| &record.rule).collect();
        let staying: Vec<OwnedAddress> =
            addresses.iter().filter(|owned| self.others.contains(&owned.address)).cloned().collect();
        remove_records(filter, &own_rules, &[], &staying)
    }
}

/// Returns a sentence for each rule of `addresses` that is missing or in the wrong order; empty if
/// all is well. Accepts Go's rules, which have no records.
pub(super) fn check(filter: &mut Chains<'_>, addresses: &[OwnedAddress], admin_chain: &str) -> Result<Vec<String>> {
    let isolation = addresses.iter().map(|owned| &owned.ingress).find(|ingress| ingress.bridge().is_some());
    let mut missing = Vec::new();
    let mut chains = vec![FORWARD, admin_chain];
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
    let base_jumps = find_base_jumps(filter)?;
    let mut require = |chain: &str, rules: &[Rule], words: &[String]| {
        if !contains(rules, words) {
            missing.push(format!("iptables chain {chain} has no rule {}", words.join(" ")));
        }
    };
    require(BASE, &base_jumps, &commented(&[], JUMP_COMMENT, FORWARD));
    let forward_rules = filter.rules(FORWARD)?;
    require(FORWARD, forward_rules, &commented(&[], ADMIN_JUMP_COMMENT, admin_chain));
    for words in addresses.iter().flat_map(|owned| accept_rules(owned.address)) {
        require(FORWARD, forward_rules, &words);
    }
    let Some(ingress) = isolation else { return Ok(missing) };
    require(BASE, &base_jumps, &commented(&[], ISOLATION_COMMENT, STAGE_1));
    let stage_1 = filter.rules(STAGE_1)?;
    for words in stage_1_rules(ingress) {
        require(STAGE_1, stage_1, &words);
    }
    let stage_2 = filter.rules(STAGE_2)?;
    require(STAGE_2, stage_2, &stage_2_rule(ingress.bridge().unwrap_or_default()));
    if missing.is_empty() && base_jumps.first().and_then(Rule::target) != Some(STAGE_1) {
        missing.push(format!("iptables chain {BASE} leads to {FORWARD} before {STAGE_1}: nothing is isolated"));
    }
    Ok(missing)
}

/// Whether [`FORWARD`] has a rule that accepts packets of one of the addresses.
pub(super) fn accepts_any(filter: &mut Chains<'_>, addresses: &[IpAddr]) -> Result<bool> {
    let rules = find_forward_rules(filter, addresses)?;
    Ok(addresses.iter().flat_map(|address| accept_rules(*address)).any(|words| contains(&rules, &words)))
}
