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

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::owner::{self, Ingress, OwnedAddress, Wanted};
use super::records::{Object, RecordChain};
use super::{ForwardRules, Written, egress};
use crate::engine;
use crate::nft::expr::{
    Expr, Verdict, ct_dnat, ct_established_related, daddr, iifname, in_set, jump, nfproto, not, oifname, saddr,
};
use crate::nft::{self, BaseChain, Batch, Family, Hook, IfMissing, Key, Kind, Nft, Rule, Table};
use cni_linux::error::{Cause, Error, Result};

/// The name of the plugins' own table, used where no administrator's chain is configured.
pub(super) const OWN_TABLE: &str = "cni_firewall";
pub(super) const OWN_TABLE_COMMENT: &str = "CNI firewall plugin";
/// The base chain of the own table.
const OWN_CHAIN: &str = "forward";
/// The type, hook and priority of [`OWN_CHAIN`]; 0 is the priority that `nft` calls `filter`.
const OWN_CHAIN_HOOK: BaseChain = BaseChain { kind: Kind::Filter, hook: Hook::Forward, priority: 0 };
/// The chain that accepts packets from and to containers.
const CNI_FORWARD: &str = "cni_forward";
/// The chain that records the addresses' owners, to which no rule leads.
pub(crate) const OWNERS: &str = "cni_owners";
/// The chain for packets from isolated bridges.
const STAGE_1: &str = "cni_isolation_1";
/// The chain for packets that leave an isolated bridge: drops those to another isolated bridge.
const STAGE_2: &str = "cni_isolation_2";
const JUMP_COMMENT: &str = "CNI firewall plugin rules";
const FAMILIES: [Family; 3] = [Family::Inet, Family::Ip, Family::Ip6];
/// One address of each family, where only the family is of interest.
pub(super) const FAMILY_SAMPLES: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];

/// The beginnings of the sets' names: of containers' addresses, and of those whose redirected
/// connections are accepted.
const PODS: &str = "cni_pods";
const REDIRECTED: &str = "cni_mapped";

/// The longest name of a table or chain that is accepted; the kernel's limit is higher.
const NAME_MAX: usize = 128;

/// The chain that jumps to the chain `cni_forward` of the same table: a chain of the administrator,
/// or the base chain of the plugins' own table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryChain {
    family: Family,
    /// The name; [`OWN_TABLE`] only for the plugins' own chain, because [`EntryChain::parse`]
    /// refuses this name in every family.
    table: String,
    chain: String,
}

impl fmt::Display for EntryChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.table(), self.chain)
    }
}

impl EntryChain {
    /// Parses the administrator's chain, written as family, table and chain: `inet filter forward`.
    /// `None` if the text has a different form, names a table or chain that the plugins create, or
    /// has a name with a control character or of more than 128 bytes.
    pub fn parse(text: &str) -> Option<EntryChain> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [family, table, chain] = words.as_slice() else { return None };
        let family = FAMILIES.into_iter().find(|known| known.name() == *family)?;
        let is_name = |name: &str| name.len() <= NAME_MAX && !name.chars().any(char::is_control);
        let is_own = *table == OWN_TABLE || [CNI_FORWARD, OWNERS, STAGE_1, STAGE_2].contains(chain);
        if is_own || !is_name(table) || !is_name(chain) {
            return None;
        }
        Some(EntryChain { family, table: (*table).to_owned(), chain: (*chain).to_owned() })
    }

    /// Returns the base chain of the plugins' own table.
    fn own() -> EntryChain {
        EntryChain { family: Family::Inet, table: OWN_TABLE.to_owned(), chain: OWN_CHAIN.to_owned() }
    }

    fn table(&self) -> Table<'_> {
        Table { family: self.family, name: &self.table }
    }

    /// Returns the [`FAMILY_SAMPLES`] of the families of which the chain's table sees packets.
    fn family_samples(&self) -> impl Iterator<Item = IpAddr> {
        FAMILY_SAMPLES.into_iter().filter(|sample| self.sees(*sample))
    }

    /// Whether the chain's table sees packets of the address's family.
    fn sees(&self, address: IpAddr) -> bool {
        match self.family {
            Family::Ip => address.is_ipv4(),
            Family::Ip6 => address.is_ipv6(),
            Family::Inet | Family::Bridge => true,
        }
    }
}

/// Returns the name, which begins with `prefix`, of the set for addresses of the same family as
/// `address`.
pub(super) fn set_of(prefix: &str, address: IpAddr) -> String {
    if address.is_ipv4() { format!("{prefix}4") } else { format!("{prefix}6") }
}

/// Returns the elements of sets and the isolation rules that an address requires.
fn objects(owned: &OwnedAddress) -> Vec<Object> {
    let element = |prefix| Object::Element { set: set_of(prefix, owned.address), address: owned.address };
    let mut objects = vec![element(PODS)];
    if owned.accepts_redirected {
        objects.push(element(REDIRECTED));
    }
    objects.extend(isolation_rules(&owned.ingress));
    objects
}

/// Returns the expressions that match the address's family, as `nft` writes them before an address
/// in a table that sees both families. Empty in a table of one family.
pub(super) fn match_family(table: Table<'_>, address: IpAddr) -> Vec<Expr> {
    if table.family == Family::Inet { nfproto(address) } else { Vec::new() }
}

/// Returns the rules of [`CNI_FORWARD`] in the table of `entry_chain`: the jump to [`STAGE_1`],
/// then rules that accept packets from containers and the replies and, with `accepts_redirected`,
/// redirected connections to the addresses in the sets [`REDIRECTED`].
fn forward_rules(entry_chain: &EntryChain, accepts_redirected: bool) -> Vec<Vec<Expr>> {
    let table = entry_chain.table();
    let mut rules = vec![vec![jump(STAGE_1)]];
    for sample in entry_chain.family_samples() {
        let pods = set_of(PODS, sample);
        // `in_set` turns the comparison with `sample` into a lookup in the set.
        let mut matches =
            vec![in_set(saddr(sample), &pods), [in_set(daddr(sample), &pods), ct_established_related()].concat()];
        if accepts_redirected {
            let redirected = set_of(REDIRECTED, sample);
            matches.push([in_set(daddr(sample), &redirected), ct_dnat()].concat());
        }
        for exprs in matches {
            rules.push([match_family(table, sample), exprs, vec![Expr::Verdict(Verdict::Accept)]].concat());
        }
    }
    rules
}

/// Returns the rules that isolate the policy's bridge; none for the policy `open`, and for a name
/// that is too long for an interface, for which no record can be written.
fn isolation_rules(ingress: &Ingress) -> Vec<Object> {
    let bridge_matches = ingress.bridge().and_then(|bridge| iifname(bridge).zip(oifname(bridge)));
    let Some((from_bridge, to_bridge)) = bridge_matches else { return Vec::new() };
    let drop = vec![Expr::Verdict(Verdict::Drop)];
    let rule = |chain, exprs: &[Vec<Expr>]| Object::Rule { chain, exprs: exprs.concat() };
    let mut rules = Vec::new();
    if matches!(ingress, Ingress::Isolated(_)) {
        rules.push(rule(STAGE_1, &[from_bridge.clone(), to_bridge.clone(), drop.clone()]));
    }
    rules.push(rule(STAGE_1, &[from_bridge, not(to_bridge.clone()), vec![jump(STAGE_2)]]));
    rules.push(rule(STAGE_2, &[to_bridge, drop]));
    rules
}

/// Fails if an administrator's chain is configured but does not exist: with ENOENT, or with the
/// error of a kernel without nf_tables.
fn check_exists(nft: &mut Nft, admin_chain: Option<&EntryChain>) -> Result<()> {
    let Some(chain) = admin_chain else { return Ok(()) };
    match nft.find_chain(chain.table(), &chain.chain)? {
        Some(_) => Ok(()),
        None => Err(nft.unsupported_error().unwrap_or_else(|| {
            Error::new(format!("failed to find nft chain {chain}"), Cause::from(nix::errno::Errno::ENOENT))
        })),
    }
}

/// Returns the chains that lead to the rules of `addresses`, each with the addresses: `admin_chain`
/// for those whose packets it sees, [`EntryChain::own`] for the others. No group is empty.
fn by_entry_chain(
    addresses: &[OwnedAddress],
    admin_chain: Option<&EntryChain>,
) -> Vec<(EntryChain, Vec<OwnedAddress>)> {
    let is_in_admin_chain = |owned: &OwnedAddress| admin_chain.is_some_and(|chain| chain.sees(owned.address));
    let (in_admin_chain, in_own) = addresses.iter().cloned().partition(is_in_admin_chain);
    let mut groups: Vec<(EntryChain, Vec<OwnedAddress>)> = Vec::new();
    groups.extend(admin_chain.map(|chain| (chain.clone(), in_admin_chain)));
    groups.push((EntryChain::own(), in_own));
    groups.retain(|(_, group)| !group.is_empty());
    groups
}

/// Writes in one transaction everything that the addresses of `rules` require. Removes the other
/// addresses of the attachment from all tables, and the [outdated
/// records](super::owner::outdated_records) of its addresses. Sets `written.changed` and
/// `written.replaced`, even on an error.
///
/// # Errors
/// - ENOENT: the administrator's chain does not exist.
/// - The rules cannot be read or written.
pub(super) fn ensure(rules: &ForwardRules, written: &mut Written) -> Result<()> {
    let (mut nft, admin_chain) = (Nft::open()?, rules.nftables_admin_chain.as_ref());
    check_exists(&mut nft, admin_chain)?;
    let (owner, addresses) = (&owner::name(&rules.attachment), &rules.owned_addresses());
    let groups = by_entry_chain(addresses, admin_chain);
    let plan = |nft: &mut Nft, batch: &mut Batch| {
        // Also those in the tables of an earlier configuration: for these, `in_table` is empty.
        let mut chains = list_record_chains(nft)?;
        chains.retain(|chain| chain.name == OWNERS);
        for (entry_chain, group) in &groups {
            add_shared_chains(nft, batch, entry_chain, group)?;
            // The chain is not in the list if `batch` creates it.
            if !chains.iter().any(|chain| chain.table() == entry_chain.table()) {
                chains.push(RecordChain::find(nft, entry_chain.table(), OWNERS, objects)?);
            }
        }
        for chain in chains {
            let group = groups.iter().find(|(entry_chain, _)| entry_chain.table() == chain.table());
            let in_table = group.map_or(&[][..], |(_, group)| group);
            chain.ensure(nft, batch, &Wanted { owner, addresses, in_table }, written)?;
        }
        Ok(())
    };
    engine::change(&mut nft, plan)
}

/// Adds to `batch` the objects that all containers share and that are missing in the table of
/// `entry_chain`: chains, sets, the rules of [`CNI_FORWARD`] and the jump to it. Replaces the rules
/// of [`CNI_FORWARD`] if they are not [those](has_forward_rules) that `addresses` need.
fn add_shared_chains(
    nft: &mut Nft,
    batch: &mut Batch,
    entry_chain: &EntryChain,
    addresses: &[OwnedAddress],
) -> Result<()> {
    let table = entry_chain.table();
    if entry_chain.table == OWN_TABLE {
        batch.ensure_table(table, Some(OWN_TABLE_COMMENT));
        if !nft.has_base_chain(table, OWN_CHAIN, OWN_CHAIN_HOOK)? {
            batch.ensure_base_chain(table, OWN_CHAIN, OWN_CHAIN_HOOK);
        }
    }
    for chain in [OWNERS, STAGE_2, STAGE_1, CNI_FORWARD] {
        nft.add_missing_chain(batch, table, chain)?;
    }
    let ensure_sets = |batch: &mut Batch, prefix| {
        for sample in entry_chain.family_samples() {
            batch.ensure_set(table, &set_of(prefix, sample), sample);
        }
    };
    ensure_sets(batch, PODS);
    if !has_forward_rules(nft, entry_chain, addresses)? {
        // The new rules are for all containers. Another program may have changed the old rules, so
        // only the records show what the other containers need.
        let records = RecordChain::find(nft, table, OWNERS, objects)?.records(nft)?;
        let mut all = addresses.iter().chain(records.iter().map(|record| &record.owned));
        let accepts_redirected = all.any(|owned| owned.accepts_redirected);
        if accepts_redirected {
            ensure_sets(batch, REDIRECTED);
        }
        batch.replace_rules(table, CNI_FORWARD, forward_rules(entry_chain, accepts_redirected));
    }
    if !leads_to_forward(nft, entry_chain)? {
        batch.insert_rule(table, &entry_chain.chain, &Rule::new(vec![jump(CNI_FORWARD)]).with_comment(JUMP_COMMENT));
    }
    Ok(())
}

/// Whether [`CNI_FORWARD`] in the table of `entry_chain` has the [`forward_rules`] that these
/// addresses need, or those that also accept redirected connections.
fn has_forward_rules(nft: &mut Nft, entry_chain: &EntryChain, addresses: &[OwnedAddress]) -> Result<bool> {
    let rules = nft.rules(entry_chain.table(), CNI_FORWARD)?;
    let has = |wanted: Vec<Vec<Expr>>| rules.iter().map(|listed| &listed.rule.exprs).eq(&wanted);
    let needs_redirected = addresses.iter().any(|owned| owned.accepts_redirected);
    Ok(has(forward_rules(entry_chain, true)) || (!needs_redirected && has(forward_rules(entry_chain, false))))
}

/// Whether a rule of `entry_chain` jumps or goes to [`CNI_FORWARD`], at whatever position the
/// administrator has put it.
fn leads_to_forward(nft: &mut Nft, entry_chain: &EntryChain) -> Result<bool> {
    let rules =
        nft.rules_where(entry_chain.table(), &entry_chain.chain, |payload| nft::mentions(payload, CNI_FORWARD))?;
    let verdicts = [jump(CNI_FORWARD), Expr::Verdict(Verdict::Goto(CNI_FORWARD.to_owned()))];
    Ok(rules.iter().any(|listed| listed.rule.exprs.last().is_some_and(|last| verdicts.contains(last))))
}

/// Returns the existing chains of records in all tables, because an earlier configuration may have
/// named an administrator's chain in another table: those of this module and that of [`egress`].
/// The chain of the module `sources` is left out: its addresses are in firewalld, not in rules.
pub(crate) fn list_record_chains(nft: &mut Nft) -> Result<Vec<RecordChain>> {
    let mut chains = Vec::new();
    for family in FAMILIES {
        for name in nft.tables(family)? {
            let table = Table { family, name: &name };
            chains.push(RecordChain::find(nft, table, OWNERS, objects)?);
            if table == egress::TABLE {
                chains.push(egress::find_record_chain(nft)?);
            }
        }
    }
    chains.retain(|chain| chain.existing.is_some());
    Ok(chains)
}

/// Whether a table records an address of the attachment `owner`.
pub(super) fn has_addresses_of(nft: &mut Nft, owner: &str) -> Result<bool> {
    for chain in list_record_chains(nft)?.iter().filter(|chain| chain.name == OWNERS) {
        let records = chain.search(nft, &[Key::comment(owner)], IfMissing::ReadAll)?;
        // The search can return records of other owners.
        if records.iter().any(|record| record.owned.owner == owner) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the base chains of nf_tables whose policy drops forwarded packets, except `admin_chain`.
/// Such a chain drops packets of containers although the backend `nftables` accepts them in its own
/// table. Each is returned as family, table and chain: `inet filter forward`.
///
/// # Errors
/// If chains cannot be read.
pub fn list_dropping_chains(admin_chain: Option<&EntryChain>) -> Result<Vec<String>> {
    let (mut nft, mut found) = (Nft::open()?, Vec::new());
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
    add_shared_chains(&mut nft, &mut batch, entry_chain, &[])?;
    nft.rehearse(batch)
}

/// Returns a sentence for each missing element or rule of `rules`; empty if none is missing. If the
/// rules of [`CNI_FORWARD`] in a table are missing or different, returns only that for this table.
/// Does not check the records.
pub(super) fn check(nft: &mut Nft, rules: &ForwardRules) -> Result<Vec<String>> {
    let mut missing = Vec::new();
    for (entry_chain, group) in by_entry_chain(&rules.owned_addresses(), rules.nftables_admin_chain.as_ref()) {
        let table = entry_chain.table();
        if !has_forward_rules(nft, &entry_chain, &group)? {
            missing.push(format!("nft chain {table} {CNI_FORWARD} is missing or has other rules than it should"));
            continue;
        }
        // How the administrator's chain is reached is not checked.
        let is_hooked_in = nft
            .find_chain(table, &entry_chain.chain)?
            .is_some_and(|chain| entry_chain.table != OWN_TABLE || chain.base == Some(OWN_CHAIN_HOOK));
        if !is_hooked_in || !leads_to_forward(nft, &entry_chain)? {
            missing.push(format!("nft chain {table} {} does not lead to {CNI_FORWARD}", entry_chain.chain));
        }
        for owned in &group {
            for object in objects(owned) {
                // Two addresses can require the same rule.
                let sentence = object.missing_sentence(table, &owned.ingress);
                if !object.exists(nft, table)? && !missing.contains(&sentence) {
                    missing.push(sentence);
                }
            }
        }
    }
    Ok(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_named_by_family_table_and_name() {
        let chain = EntryChain::parse("inet filter forward").unwrap();
        assert_eq!((chain.table().to_string(), chain.chain.as_str()), ("inet filter".to_owned(), "forward"));
        for wrong in ["", "filter forward", "arp filter forward", "inet filter forward x", "inet cni_firewall forward"]
        {
            assert_eq!(EntryChain::parse(wrong), None, "{wrong}");
        }
        assert!(EntryChain::parse("inet filter cni_forward").is_none());
    }
}
