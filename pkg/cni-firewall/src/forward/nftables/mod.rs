//! Writes, checks and removes the rules of forwarding in nf_tables. No Go plugin has this backend.
//!
//! The rules, for container addresses ADDRESS and isolated bridges BRIDGE:
//! ```text
//! table inet cni_firewall {                       # or the table of the administrator's chain
//!     set cni_pods4 { type ipv4_addr; elements = { ADDRESS } }
//!     set cni_pods6 { type ipv6_addr; elements = { ADDRESS } }
//!     set cni_mapped4, cni_mapped6                 # those with acceptMappedPorts, once there is one
//!     chain cni_owners { ip saddr ADDRESS [ip daddr ADDRESS] [iifname BRIDGE oifname [!=] BRIDGE] comment "cni:NETWORK/CONTAINER/IFNAME" }
//!     chain cni_isolation_1 {
//!         iifname BRIDGE oifname BRIDGE drop       # only for ingressPolicy isolated
//!         iifname BRIDGE oifname != BRIDGE jump cni_isolation_2            }
//!     chain cni_isolation_2 { oifname BRIDGE drop                          }
//!     chain cni_forward {
//!         jump cni_isolation_1
//!         ip saddr @cni_pods4 accept
//!         ip daddr @cni_pods4 ct state established,related accept
//!         ip daddr @cni_mapped4 ct status dnat accept                         # if the set exists
//!         (the same for ip6)                                               }
//!     chain forward { type filter hook forward priority filter; jump cni_forward }}
//! ```
//! A packet's cost does not grow with the number of containers, as their addresses are elements of
//! sets. No rule leads to `cni_owners`, which only records which attachment has an address.
//!
//! An `accept` ends only the base chain that it was reached from: a base chain of another table
//! that drops packets by default still drops them. So the configuration can name a chain of the
//! administrator. All rules are then written to the table of that chain, which jumps to
//! `cni_forward` in place of `forward`. The chain with this jump is the [`EntryChain`].

mod check;
mod records;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::entry_chain::EntryChain;
use super::owner::{self, Ingress, OwnedAddress};
use super::{Written, egress};
use crate::engine;
use crate::nft::expr::{
    Expr, Verdict, ct_dnat, ct_established_related, daddr, iifname, in_set, nfproto, not, oifname, saddr,
};
use crate::nft::{self, BaseChain, Batch, Family, Hook, Kind, Nft, Rule, SetKind, Table};
use crate::owner::AttachmentFilter;
use cni_linux::error::{Cause, Error, Result};

pub(super) use check::check;
pub(super) use records::owner_rule;
use records::{OwnersChain, Record};
pub(crate) use records::{list_records, read_owner_rule};

/// The name of the plugins' own table, used where no administrator's chain is configured.
pub(super) const OWN_TABLE: &str = "cni_firewall";
pub(super) const OWN_TABLE_COMMENT: &str = "CNI firewall plugin";
/// The base chain of the own table.
pub(super) const OWN_CHAIN: &str = "forward";
/// The type, hook and priority of [`OWN_CHAIN`]; 0 is the priority that `nft` calls `filter`.
const OWN_CHAIN_HOOK: BaseChain = BaseChain { kind: Kind::Filter, hook: Hook::Forward, priority: 0 };
/// The chain that accepts packets from and to containers.
pub(super) const CNI_FORWARD: &str = "cni_forward";
/// The chain that records the addresses' owners, to which no rule leads.
pub(crate) const OWNERS: &str = "cni_owners";
/// The chain for packets from isolated bridges.
pub(super) const STAGE_1: &str = "cni_isolation_1";
/// The chain for packets that leave an isolated bridge: drops those to another isolated bridge.
pub(super) const STAGE_2: &str = "cni_isolation_2";
const JUMP_COMMENT: &str = "CNI firewall plugin rules";
pub(super) const FAMILIES: [Family; 3] = [Family::Inet, Family::Ip, Family::Ip6];
/// One address of each family, where only the family is of interest.
pub(super) const FAMILY_SAMPLES: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];

/// Returns the addresses grouped by the entry chain that leads to their rules: `admin_chain`, if it
/// is configured and sees packets of the address's family, else `own`. No group is empty.
fn by_entry_chain<'a>(
    addresses: &'a [OwnedAddress],
    admin_chain: Option<&'a EntryChain>,
    own: &'a EntryChain,
) -> Vec<(&'a EntryChain, Vec<&'a OwnedAddress>)> {
    let is_in_admin_chain = |owned: &&OwnedAddress| admin_chain.is_some_and(|chain| chain.sees(owned.address));
    let (in_admin_chain, in_own): (Vec<_>, Vec<_>) = addresses.iter().partition(is_in_admin_chain);
    let mut groups = Vec::new();
    groups.extend(admin_chain.map(|chain| (chain, in_admin_chain)));
    groups.push((own, in_own));
    groups.retain(|(_, group)| !group.is_empty());
    groups
}

/// Returns the name and the type of the set for addresses of the same family as `address`.
fn set_of(address: IpAddr) -> (&'static str, SetKind) {
    if address.is_ipv4() { ("cni_pods4", SetKind::Ipv4) } else { ("cni_pods6", SetKind::Ipv6) }
}

/// Returns the name and the type of the set for addresses of the same family as `address` whose
/// redirected connections are accepted.
fn redirected_set_of(address: IpAddr) -> (&'static str, SetKind) {
    if address.is_ipv4() { ("cni_mapped4", SetKind::Ipv4) } else { ("cni_mapped6", SetKind::Ipv6) }
}

/// Returns the elements of sets that the address needs: the name of the set, and the address.
fn elements(owned: &OwnedAddress) -> Vec<(&'static str, IpAddr)> {
    let (set, _) = set_of(owned.address);
    let mut elements = vec![(set, owned.address)];
    if owned.accepts_redirected {
        let (set, _) = redirected_set_of(owned.address);
        elements.push((set, owned.address));
    }
    elements
}

/// Returns the expressions that match the address's family, as `nft` writes them before an address
/// in a table that sees both families. Empty in a table of one family.
pub(super) fn match_family(table: Table<'_>, address: IpAddr) -> Vec<Expr> {
    let number = if address.is_ipv4() { libc::NFPROTO_IPV4 } else { libc::NFPROTO_IPV6 };
    match table.family {
        // Both numbers fit into the byte.
        Family::Inet => nfproto(u8::try_from(number).unwrap_or_default()),
        _ => Vec::new(),
    }
}

/// Returns the expression that jumps to a chain.
pub(super) fn jump(chain: &str) -> Expr {
    Expr::Verdict(Verdict::Jump(chain.to_owned()))
}

/// What the rules of [`CNI_FORWARD`] accept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Accepted {
    /// Packets from containers, and the replies.
    FromContainers,
    /// Also redirected connections, to the addresses in the sets [`redirected_set_of`].
    Redirected,
}

impl Accepted {
    /// Returns what the rules must accept for these addresses.
    fn required_by<'a>(addresses: impl IntoIterator<Item = &'a OwnedAddress>) -> Accepted {
        let is_redirected = addresses.into_iter().any(|owned| owned.accepts_redirected);
        if is_redirected { Accepted::Redirected } else { Accepted::FromContainers }
    }
}

/// Returns the rules of [`CNI_FORWARD`] in the table of `entry_chain`.
fn forward_rules(entry_chain: &EntryChain, accepted: Accepted) -> Vec<Vec<Expr>> {
    let table = entry_chain.table();
    let mut rules = vec![vec![jump(STAGE_1)]];
    for sample in FAMILY_SAMPLES.into_iter().filter(|sample| entry_chain.sees(*sample)) {
        let (set, _) = set_of(sample);
        // `in_set` turns the comparison with `sample` into a lookup in the set.
        let mut matches =
            vec![in_set(saddr(sample), set), [in_set(daddr(sample), set), ct_established_related()].concat()];
        if accepted == Accepted::Redirected {
            let (set, _) = redirected_set_of(sample);
            matches.push([in_set(daddr(sample), set), ct_dnat()].concat());
        }
        for exprs in matches {
            rules.push([match_family(table, sample), exprs, vec![Expr::Verdict(Verdict::Accept)]].concat());
        }
    }
    rules
}

/// Unwraps the result of [`iifname`] or [`oifname`] for `bridge`. Fails if it is `None`, because
/// the name is too long for an interface.
fn require_match(exprs: Option<Vec<Expr>>, bridge: &str) -> Result<Vec<Expr>> {
    exprs.ok_or_else(|| {
        Error::new(format!("failed to build a rule for bridge {bridge}"), Cause::text("the name is too long"))
    })
}

/// Returns the rules that isolate the policy's bridge, each with its chain; none for the policy
/// `open`.
fn isolation_rules(ingress: &Ingress) -> Result<Vec<(&'static str, Vec<Expr>)>> {
    let Some(bridge) = ingress.bridge() else { return Ok(Vec::new()) };
    let from_bridge = require_match(iifname(bridge), bridge)?;
    let to_bridge = require_match(oifname(bridge), bridge)?;
    let drop = vec![Expr::Verdict(Verdict::Drop)];
    let mut rules = Vec::new();
    if matches!(ingress, Ingress::Isolated(_)) {
        rules.push((STAGE_1, [from_bridge.clone(), to_bridge.clone(), drop.clone()].concat()));
    }
    rules.push((STAGE_1, [from_bridge, not(to_bridge.clone()), vec![jump(STAGE_2)]].concat()));
    rules.push((STAGE_2, [to_bridge, drop].concat()));
    Ok(rules)
}

/// Fails with ENOENT if an administrator's chain is configured but does not exist.
fn check_exists(nft: &mut Nft, admin_chain: Option<&EntryChain>) -> Result<()> {
    let Some(chain) = admin_chain else { return Ok(()) };
    match nft.find_chain(chain.table(), &chain.chain)? {
        Some(_) => Ok(()),
        None => Err(nft.absence().unwrap_or_else(|| {
            Error::new(format!("failed to find nft chain {chain}"), Cause::from(nix::errno::Errno::ENOENT))
        })),
    }
}

/// Makes `addresses` the only addresses of the attachment `owner`, in one transaction. Removes the
/// [outdated records](owner::outdated_records) of `addresses`. Sets `written.changed` to true if an
/// address may have been recorded, and `written.replaced`, even on an error.
///
/// # Errors
/// - ENOENT: the chain `admin_chain` does not exist.
/// - The rules cannot be read or written.
pub(super) fn ensure(
    nft: &mut Nft,
    owner: &str,
    addresses: &[OwnedAddress],
    admin_chain: Option<&EntryChain>,
    written: &mut Written,
) -> Result<()> {
    let own_chain = EntryChain::own();
    let groups = by_entry_chain(addresses, admin_chain, &own_chain);
    check_exists(nft, admin_chain)?;
    let plan = |nft: &mut Nft, batch: &mut Batch| {
        let (mut recorded_count, mut recorded_in) = (0, Vec::new());
        for owners in list_records(nft)?.owners {
            let table = owners.table();
            let mut wanted_here: Vec<OwnedAddress> = Vec::new();
            for (_, group) in groups.iter().filter(|(entry_chain, _)| entry_chain.table() == table) {
                wanted_here.extend(group.iter().copied().cloned());
            }
            let records = owners.find(nft, Some(owner), addresses.iter().map(|owned| owned.address), true)?;
            let recorded: Vec<OwnedAddress> = records.iter().map(|record| record.owned.clone()).collect();
            recorded_count += wanted_here.iter().filter(|owned| recorded.contains(owned)).count();
            let outdated = owner::outdated_records(recorded.clone(), owner, addresses)?;
            written.replaced |= !outdated.is_empty() || recorded.iter().any(|owned| owned.owner == owner);
            let is_removed = |record: &Record| {
                (record.owned.owner == owner && !wanted_here.contains(&record.owned))
                    || outdated.contains(&record.owned)
            };
            let removed: Vec<Record> = records.into_iter().filter(is_removed).collect();
            remove_addresses(nft, batch, &owners, &removed, &wanted_here)?;
            recorded_in.push((owners, recorded));
        }
        for (entry_chain, group) in &groups {
            let is_in_table = |(owners, _): &&(OwnersChain, _)| owners.table() == entry_chain.table();
            let recorded = recorded_in.iter().find(is_in_table).map_or(&[][..], |(_, recorded)| recorded);
            add_addresses(nft, batch, entry_chain, group, recorded)?;
        }
        written.changed |= recorded_count < addresses.len();
        Ok(())
    };
    engine::change(nft, plan).map(drop)
}

/// Adds to `batch` all that is missing in the table of `entry_chain`: the chains, sets and rules
/// that all containers share, and the elements and rules for `addresses`, of which the table has
/// records of `recorded`.
fn add_addresses(
    nft: &mut Nft,
    batch: &mut Batch,
    entry_chain: &EntryChain,
    addresses: &[&OwnedAddress],
    recorded: &[OwnedAddress],
) -> Result<()> {
    let table = entry_chain.table();
    if entry_chain.is_in_own_table() {
        batch.ensure_table(table, Some(OWN_TABLE_COMMENT));
        if !nft.has_base_chain(table, OWN_CHAIN, OWN_CHAIN_HOOK)? {
            batch.ensure_base_chain(table, OWN_CHAIN, OWN_CHAIN_HOOK, None);
        }
    }
    for chain in [OWNERS, STAGE_2, STAGE_1, CNI_FORWARD] {
        nft.add_missing_chain(batch, table, chain)?;
    }
    for sample in FAMILY_SAMPLES.into_iter().filter(|sample| entry_chain.sees(*sample)) {
        let (set, kind) = set_of(sample);
        batch.ensure_set(table, set, kind);
    }
    let required = Accepted::required_by(addresses.iter().copied());
    if find_accepted(nft, entry_chain)?.is_none_or(|accepted| accepted < required) {
        // Another program may have changed rules that other containers need.
        let all: Vec<OwnedAddress> = nft.rules(table, OWNERS)?.iter().filter_map(read_owner_rule).collect();
        let required = required.max(Accepted::required_by(&all));
        if required == Accepted::Redirected {
            for sample in FAMILY_SAMPLES.into_iter().filter(|sample| entry_chain.sees(*sample)) {
                let (set, kind) = redirected_set_of(sample);
                batch.ensure_set(table, set, kind);
            }
        }
        batch.flush_chain(table, CNI_FORWARD);
        for exprs in forward_rules(entry_chain, required) {
            batch.append_rule(table, CNI_FORWARD, &Rule::new(exprs));
        }
    }
    if !leads_to_forward(nft, entry_chain)? {
        batch.insert_rule(table, &entry_chain.chain, &Rule::new(vec![jump(CNI_FORWARD)]).with_comment(JUMP_COMMENT));
    }
    add_elements(nft, batch, table, addresses, recorded)
}

/// Adds to `batch` the missing elements and rules for `addresses`. `recorded` are the addresses in
/// `table`. The chains and sets that all containers share must exist there, or `batch` must create
/// them.
fn add_elements(
    nft: &mut Nft,
    batch: &mut Batch,
    table: Table<'_>,
    addresses: &[&OwnedAddress],
    recorded: &[OwnedAddress],
) -> Result<()> {
    let mut isolation: Vec<(&str, Vec<Expr>)> = Vec::new();
    for owned in addresses {
        if !recorded.contains(owned) {
            batch.append_rule(table, OWNERS, &owner_rule(table, owned)?);
        }
        for (set, address) in elements(owned) {
            batch.ensure_element(table, set, address);
        }
        for rule in isolation_rules(&owned.ingress)? {
            if !isolation.contains(&rule) {
                isolation.push(rule);
            }
        }
    }
    for (chain, exprs) in isolation {
        if !nft.rules(table, chain)?.iter().any(|listed| listed.rule.exprs == exprs) {
            batch.append_rule(table, chain, &Rule::new(exprs));
        }
    }
    Ok(())
}

/// Returns what [`CNI_FORWARD`] in the table of `entry_chain` accepts; `None` if it has other rules
/// than the [`forward_rules`].
fn find_accepted(nft: &mut Nft, entry_chain: &EntryChain) -> Result<Option<Accepted>> {
    let rules = nft.rules(entry_chain.table(), CNI_FORWARD)?;
    let has_rules =
        |accepted: &Accepted| rules.iter().map(|listed| &listed.rule.exprs).eq(&forward_rules(entry_chain, *accepted));
    Ok([Accepted::FromContainers, Accepted::Redirected].into_iter().find(has_rules))
}

/// Whether a rule of `entry_chain` jumps or goes to [`CNI_FORWARD`], at whatever position the
/// administrator has put it.
fn leads_to_forward(nft: &mut Nft, entry_chain: &EntryChain) -> Result<bool> {
    let rules =
        nft.rules_where(entry_chain.table(), &entry_chain.chain, |payload| nft::mentions(payload, CNI_FORWARD))?;
    for listed in rules {
        if let Some(Expr::Verdict(Verdict::Jump(target) | Verdict::Goto(target))) = listed.rule.exprs.last()
            && target == CNI_FORWARD
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Adds to `batch` the removal of the selected attachments' addresses from all tables, and of their
/// egress rules.
pub(super) fn purge(nft: &mut Nft, batch: &mut Batch, filter: AttachmentFilter<'_>) -> Result<()> {
    let selected = filter.owners(owner::NAME);
    let records = list_records(nft)?;
    for owners in &records.owners {
        let mut found = match filter {
            AttachmentFilter::One { .. } => {
                let owner = selected.beginnings.first().map(String::as_str);
                owners.find(nft, owner, std::iter::empty(), false)?
            }
            AttachmentFilter::Garbage { .. } => owners.records(nft)?,
        };
        found.retain(|record| selected.contains(&record.owned.owner));
        remove_addresses(nft, batch, owners, &found, &[])?;
    }
    if records.has_egress {
        egress::purge(nft, batch, &|owned| selected.contains(&owned.owner))?;
    }
    Ok(())
}

/// Adds to `batch` the removal of the records `removed` of `owners`, and of the set elements and
/// isolation rules in the same table that no remaining record requires. The addresses in `staying`,
/// which the caller adds to the table, count as remaining records.
fn remove_addresses(
    nft: &mut Nft,
    batch: &mut Batch,
    owners: &OwnersChain,
    removed: &[Record],
    staying: &[OwnedAddress],
) -> Result<()> {
    if removed.is_empty() {
        return Ok(());
    }
    let table = owners.table();
    for record in removed {
        batch.delete_rule(table, OWNERS, record.handle);
    }
    let removed_handles: BTreeSet<u64> = removed.iter().map(|record| record.handle).collect();
    let remaining = |records: Vec<Record>| {
        let kept = records.into_iter().filter(|record| !removed_handles.contains(&record.handle));
        staying.iter().cloned().chain(kept.map(|record| record.owned)).collect::<Vec<OwnedAddress>>()
    };
    let addresses = removed.iter().map(|record| record.owned.address);
    let same_addresses = remaining(owners.find(nft, None, addresses, false)?);
    let required: BTreeSet<(&str, IpAddr)> = same_addresses.iter().flat_map(elements).collect();
    for (set, address) in removed.iter().flat_map(|record| elements(&record.owned)).collect::<BTreeSet<_>>() {
        if !required.contains(&(set, address)) && nft.has_element(table, set, address)? {
            batch.delete_element(table, set, address);
        }
    }
    remove_isolation(nft, batch, owners, remaining)
}

/// Adds to `batch` the removal of the isolation rules in the table of `owners` that no remaining
/// record requires. `remaining` returns those of all records.
fn remove_isolation(
    nft: &mut Nft,
    batch: &mut Batch,
    owners: &OwnersChain,
    remaining: impl Fn(Vec<Record>) -> Vec<OwnedAddress>,
) -> Result<()> {
    let table = owners.table();
    let mut existing = Vec::new();
    for chain in [STAGE_1, STAGE_2] {
        existing.extend(nft.rules(table, chain)?.into_iter().map(|listed| (chain, listed)));
    }
    // Without isolation, the other records, which can be many, are not read.
    if existing.is_empty() {
        return Ok(());
    }
    let mut required = Vec::new();
    for ingress in remaining(owners.records(nft)?).iter().map(|owned| &owned.ingress).collect::<BTreeSet<_>>() {
        required.extend(isolation_rules(ingress)?);
    }
    for (chain, listed) in existing {
        if !required.iter().any(|(required, exprs)| *required == chain && *exprs == listed.rule.exprs) {
            batch.delete_rule(table, chain, listed.handle);
        }
    }
    Ok(())
}

/// Whether a table records an address of the attachment `owner`.
pub(super) fn has_addresses_of(nft: &mut Nft, owner: &str) -> Result<bool> {
    for owners in list_records(nft)?.owners {
        let records = owners.find(nft, Some(owner), std::iter::empty(), false)?;
        if records.iter().any(|record| record.owned.owner == owner) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the base chains whose policy drops forwarded packets, except `admin_chain`, each as
/// family, table and chain: `inet filter forward`.
pub(super) fn list_dropping_chains(nft: &mut Nft, admin_chain: Option<&EntryChain>) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for family in FAMILIES {
        let drops_forwarded = |_: &str, chain: &nft::Chain| {
            chain.drops && chain.base.is_some_and(|base| base.hook == Hook::Forward && base.kind == Kind::Filter)
        };
        for (table, chain) in nft.chains_where(family, drops_forwarded)? {
            let chain = EntryChain { family, table, chain: chain.name };
            if Some(&chain) != admin_chain {
                found.push(chain.to_string());
            }
        }
    }
    Ok(found)
}

/// Checks that [`ensure`] can work here; fails with the reason if it cannot. Nothing changes.
pub(super) fn probe(admin_chain: Option<&EntryChain>) -> Result<()> {
    let mut nft = Nft::open()?;
    check_exists(&mut nft, admin_chain)?;
    let own_chain = EntryChain::own();
    let entry_chain = admin_chain.unwrap_or(&own_chain);
    // An earlier ADD has written these rules, so the kernel has what they need.
    if nft.find_chain(entry_chain.table(), CNI_FORWARD)?.is_some() && leads_to_forward(&mut nft, entry_chain)? {
        return Ok(());
    }
    let mut batch = Batch::new();
    add_addresses(&mut nft, &mut batch, entry_chain, &[], &[])?;
    nft.rehearse(batch)
}
