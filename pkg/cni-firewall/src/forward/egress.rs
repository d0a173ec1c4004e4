//! Drops connections that the containers of a network open to denied destinations.
//!
//! The rules are in the plugins' own table of nf_tables with every backend: a packet that one table
//! drops stays dropped, so they precede all accepting rules, in whatever order other programs put
//! theirs. For each network, where HASH is a hash of its name, and each container address ADDRESS:
//! ```text
//! table inet cni_firewall {
//!     set cni_egress_HASH_4 { type ipv4_addr; elements = { ADDRESS } }
//!     set cni_egress_HASH_6 { type ipv6_addr; elements = { ADDRESS } }
//!     chain cni_egress_owners { ip saddr ADDRESS comment "cni:NETWORK/CONTAINER/IFNAME" }
//!     chain cni_egress_HASH {
//!         comment "NETWORK"
//!         ip daddr ALLOWED return
//!         ip daddr DENIED counter drop
//!         counter drop                          # only for the default deny
//!     }
//!     chain cni_egress {
//!         ct state established,related return
//!         ip saddr @cni_egress_HASH_4 jump cni_egress_HASH
//!         ip6 saddr @cni_egress_HASH_6 jump cni_egress_HASH
//!     }
//!     chain egress_forward { type filter hook forward priority filter - 1; jump cni_egress }
//!     chain egress_input { type filter hook input priority filter - 1;
//!         icmpv6 type nd-router-solicit-nd-neighbor-advert return
//!         jump cni_egress
//!     }}
//! ```
//! The sets and the chain of a network are removed with its last attachment. No rule leads to
//! `cni_egress_owners`, whose rules are the records.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};

use cni::hash::sha512_hex;
use cni::{AttachmentId, Cidr};
use cni_linux::error::Result;

use super::ForwardRules;
use super::nftables::{FAMILY_SAMPLES, OWN_TABLE, OWN_TABLE_COMMENT, match_family, set_of};
use super::owner::{self, OwnedAddress};
use super::records::{NftRecord, Object, RecordChain};
use crate::engine;
use crate::nft::expr::{
    Expr, Verdict, ct_established_related, daddr, icmpv6_types, in_set, jump, l4proto, masked, saddr,
};
use crate::nft::{BaseChain, Batch, Family, Hook, Kind, Nft, Rule, Table, decode};

pub(crate) const TABLE: Table<'_> = Table { family: Family::Inet, name: OWN_TABLE };
/// The chain of the records.
pub(crate) const OWNERS: &str = "cni_egress_owners";
/// The chain that leads to the chains of the networks.
const EGRESS: &str = "cni_egress";
/// The base chains. They precede the chains with the priority `filter`, which is 0.
const FORWARD: (&str, BaseChain) =
    ("egress_forward", BaseChain { kind: Kind::Filter, hook: Hook::Forward, priority: -1 });
const INPUT: (&str, BaseChain) = ("egress_input", BaseChain { kind: Kind::Filter, hook: Hook::Input, priority: -1 });
/// The number of the protocol ICMPv6.
const ICMPV6: u8 = 58;
/// The number of hex digits of the hash in a network's names.
const HASH_DIGITS: usize = 16;

/// The destinations to which the containers of a network may open connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Egress {
    /// Destinations that are allowed, also if they are in `deny`.
    pub allow: Vec<Cidr>,
    /// Destinations that are denied.
    pub deny: Vec<Cidr>,
    /// What applies to all other destinations.
    pub default: EgressDefault,
    /// The container's link-local addresses, which no result has. Packets from them reach the host.
    pub link_local: Vec<Ipv6Addr>,
}

/// What applies to destinations that are neither allowed nor denied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EgressDefault {
    /// They are allowed.
    #[default]
    Allow,
    /// They are denied.
    Deny,
}

/// Returns the name of the chain for the network of this owner: `cni_egress_HASH`.
pub(crate) fn network_chain(owner: &str) -> String {
    format!("{EGRESS}_{}", sha512_hex(&[network(owner).as_bytes()], HASH_DIGITS))
}

/// Returns the name of the network in an owner's name, or its hash.
fn network(owner: &str) -> &str {
    owner.split('/').next().unwrap_or_default().trim_start_matches("cni:")
}

/// Returns the name of the set of the network with this chain, for addresses of the same family as
/// `address`.
fn network_set(chain: &str, address: IpAddr) -> String {
    set_of(&format!("{chain}_"), address)
}

/// Returns the element of a set that a record requires.
fn element(owned: &OwnedAddress) -> Object {
    let set = network_set(&network_chain(&owned.owner), owned.address);
    Object::Element { set, address: owned.address }
}

/// Returns what a record requires: the element, and the chain of the network.
fn objects(owned: &OwnedAddress) -> Vec<Object> {
    vec![element(owned), Object::Egress { chain: network_chain(&owned.owner) }]
}

/// Looks up the chain of the records.
pub(super) fn find_record_chain(nft: &mut Nft) -> Result<RecordChain> {
    RecordChain::find(nft, TABLE, OWNERS, objects)
}

/// Returns the rules of a network's chain.
fn network_rules(egress: &Egress) -> Vec<Vec<Expr>> {
    let daddr_in =
        |cidr: &Cidr| [match_family(TABLE, cidr.address()), masked(daddr(cidr.address()), cidr.prefix())].concat();
    // `Other` writes a counter without attributes, which the kernel starts at 0.
    let drop = [Expr::Other("counter".to_owned()), Expr::Verdict(Verdict::Drop)];
    let mut rules = Vec::new();
    for allowed in &egress.allow {
        rules.push([daddr_in(allowed), vec![Expr::Verdict(Verdict::Return)]].concat());
    }
    for denied in &egress.deny {
        rules.push([daddr_in(denied), drop.to_vec()].concat());
    }
    if egress.default == EgressDefault::Deny {
        rules.push(drop.to_vec());
    }
    rules
}

/// Returns the rules of a base chain.
fn hook_rules(hook: Hook) -> Vec<Vec<Expr>> {
    let mut rules = vec![vec![jump(EGRESS)]];
    if hook == Hook::Input {
        // Without neighbour discovery, which connection tracking ignores, a container reaches
        // nothing over IPv6. The types are those from router solicitations to advertisements of
        // neighbours.
        let ipv6 = match_family(TABLE, Ipv6Addr::UNSPECIFIED.into());
        let discovery = [ipv6, l4proto(ICMPV6), icmpv6_types(133, 136)].concat();
        rules.insert(0, [discovery, vec![Expr::Verdict(Verdict::Return)]].concat());
    }
    rules
}

/// Returns the first rule of [`EGRESS`].
fn established_rule() -> Vec<Expr> {
    [ct_established_related(), vec![Expr::Verdict(Verdict::Return)]].concat()
}

/// Returns the rules of [`EGRESS`] that lead to a network's chain.
fn dispatch_rules(chain: &str) -> [Vec<Expr>; 2] {
    FAMILY_SAMPLES.map(|sample| {
        let set = network_set(chain, sample);
        [match_family(TABLE, sample), in_set(saddr(sample), &set), vec![jump(chain)]].concat()
    })
}

/// Returns the container's addresses with their owner.
fn owned_addresses(owner: &str, addresses: &[IpAddr], egress: &Egress) -> Vec<OwnedAddress> {
    let link_local = egress.link_local.iter().map(|address| IpAddr::V6(*address));
    addresses.iter().copied().chain(link_local).map(|address| OwnedAddress::open(owner, address)).collect()
}

/// Whether the chain has exactly these rules.
fn has_rules(nft: &mut Nft, chain: &str, wanted: &[Vec<Expr>]) -> Result<bool> {
    Ok(nft.rules(TABLE, chain)?.iter().map(|listed| &listed.rule.exprs).eq(wanted))
}

/// Writes the egress rules of `rules`, or removes those of the attachment if it has none. Also
/// removes the egress rules of attachments without a DEL that had one of the addresses. Sets
/// `changed` to true if rules of the attachment may have been written, even on an error; the caller
/// then owes a [`purge`] if its ADD fails.
///
/// # Errors
/// The rules cannot be read or written.
pub fn ensure(rules: &ForwardRules, changed: &mut bool) -> Result<()> {
    replace(&owner::name(&rules.attachment), &rules.addresses, rules.egress.as_ref(), changed)
}

/// Removes the attachment's egress rules.
///
/// # Errors
/// The rules cannot be read or removed.
pub fn purge(attachment: &AttachmentId) -> Result<()> {
    replace(&owner::name(attachment), &[], None, &mut false)
}

/// Makes the rules for the attachment `owner` those of `egress`, in one transaction; without
/// `egress`, removes them. Also removes all egress rules of the attachments that have an [outdated
/// record](owner::outdated_records) of `addresses`. Sets `changed` to true if an address may have
/// been recorded, even on an error.
fn replace(owner: &str, addresses: &[IpAddr], egress: Option<&Egress>, changed: &mut bool) -> Result<()> {
    let own = owned_addresses(owner, addresses, egress.unwrap_or(&Egress::default()));
    let wanted: &[OwnedAddress] = if egress.is_some() { &own } else { &[] };
    let plan = |nft: &mut Nft, batch: &mut Batch| {
        let chain = find_record_chain(nft)?;
        let records = chain.records(nft)?;
        // Of `own`, because `wanted` is empty without `egress`.
        let outdated = owner::outdated_records(&records, owner, &own)?;
        // All records of these owners are removed, also those of their link-local addresses, which
        // IPAM does not allocate again.
        let outdated_owners: BTreeSet<&String> = outdated.into_iter().map(|owned| &owned.owner).collect();
        let is_removed = |NftRecord { owned, .. }: &&NftRecord| {
            if owned.owner == owner { !wanted.contains(owned) } else { outdated_owners.contains(&owned.owner) }
        };
        let removed: Vec<&NftRecord> = records.iter().filter(is_removed).collect();
        chain.remove(nft, batch, &removed, wanted)?;
        if let Some(egress) = egress {
            add_chains(nft, batch, owner, egress)?;
        }
        *changed |= chain.add(nft, batch, &records, wanted)?;
        Ok(())
    };
    engine::change(&mut Nft::open()?, plan)
}

/// Adds to `batch` the missing chains that all networks share, the chain and the sets of the
/// owner's network, and the rules of all these chains except the records. The rules of the two base
/// chains and of the network's chain, which no other program writes, are replaced if they differ.
fn add_chains(nft: &mut Nft, batch: &mut Batch, owner: &str, egress: &Egress) -> Result<()> {
    batch.ensure_table(TABLE, Some(OWN_TABLE_COMMENT));
    for (name, base) in [FORWARD, INPUT] {
        if !nft.has_base_chain(TABLE, name, base)? {
            batch.ensure_base_chain(TABLE, name, base);
        }
    }
    for chain in [OWNERS, EGRESS] {
        nft.add_missing_chain(batch, TABLE, chain)?;
    }
    let chain = network_chain(owner);
    if nft.find_chain(TABLE, &chain)?.is_none() {
        batch.ensure_chain(TABLE, &chain, Some(network(owner)));
    }
    for sample in FAMILY_SAMPLES {
        let set = network_set(&chain, sample);
        batch.ensure_set(TABLE, &set, sample);
    }
    let base_chains = [FORWARD, INPUT].map(|(name, base)| (name, hook_rules(base.hook)));
    for (name, rules) in base_chains.into_iter().chain([(chain.as_str(), network_rules(egress))]) {
        if !has_rules(nft, name, &rules)? {
            batch.replace_rules(TABLE, name, rules);
        }
    }
    // This chain is not replaced: it has the rules of all networks.
    let existing = nft.rules(TABLE, EGRESS)?;
    if existing.first().is_none_or(|first| first.rule.exprs != established_rule()) {
        batch.insert_rule(TABLE, EGRESS, &Rule::new(established_rule()));
    }
    for exprs in dispatch_rules(&chain) {
        if !existing.iter().any(|listed| listed.rule.exprs == exprs) {
            batch.append_rule(TABLE, EGRESS, &Rule::new(exprs));
        }
    }
    Ok(())
}

/// Adds to `batch` the removal of a network's chain, of the rules that lead to it, and of the sets
/// in these rules.
pub(super) fn remove_network(nft: &mut Nft, batch: &mut Batch, chain: &str) -> Result<()> {
    let mut sets = BTreeSet::new();
    for listed in nft.rules(TABLE, EGRESS)? {
        if listed.rule.exprs.last() != Some(&jump(chain)) {
            continue;
        }
        batch.delete_rule(TABLE, EGRESS, listed.handle);
        let lookups = listed.rule.exprs.iter();
        sets.extend(
            lookups.filter_map(|expr| if let Expr::Lookup { set, .. } = expr { Some(set.clone()) } else { None }),
        );
    }
    if let Some(found) = nft.find_chain(TABLE, chain)? {
        batch.delete_chain(TABLE, chain, found.handle);
    }
    for set in sets {
        batch.delete_set(TABLE, &set);
    }
    Ok(())
}

/// Returns a sentence for each chain that is missing or has other rules than an ADD would write,
/// and for each missing element; empty if there is none. In `cni_egress`, which has the rules of
/// all networks, checks only the first rule and those of this network.
///
/// # Errors
/// The rules cannot be read.
pub fn check(rules: &ForwardRules) -> Result<Vec<String>> {
    let Some(egress) = &rules.egress else { return Ok(Vec::new()) };
    let (nft, owner) = (&mut Nft::open()?, owner::name(&rules.attachment));
    let chain = network_chain(&owner);
    let mut wrong_chains = Vec::new();
    for (name, base) in [FORWARD, INPUT] {
        if !nft.has_base_chain(TABLE, name, base)? || !has_rules(nft, name, &hook_rules(base.hook))? {
            wrong_chains.push(name);
        }
    }
    let existing = nft.rules(TABLE, EGRESS)?;
    let begins_right = existing.first().is_some_and(|first| first.rule.exprs == established_rule());
    let exists = |exprs: &Vec<Expr>| existing.iter().any(|listed| listed.rule.exprs == *exprs);
    if !begins_right || !dispatch_rules(&chain).iter().all(exists) {
        wrong_chains.push(EGRESS);
    }
    if !has_rules(nft, &chain, &network_rules(egress))? {
        wrong_chains.push(&chain);
    }
    let sentence = |name: &str| format!("nft chain {TABLE} {name} is missing or has other rules than it should");
    let mut missing: Vec<String> = wrong_chains.into_iter().map(sentence).collect();
    for owned in owned_addresses(&owner, &rules.addresses, egress) {
        let element = element(&owned);
        if !element.exists(nft, TABLE)? {
            missing.push(element.missing_sentence(TABLE, &owned.ingress));
        }
    }
    Ok(missing)
}

/// Checks that [`ensure`] can work here. Nothing changes.
///
/// # Errors
/// The reason why it cannot work.
pub fn probe() -> Result<()> {
    let mut nft = Nft::open()?;
    // An earlier ADD has written this chain and all others, so the kernel has what they need.
    if nft.has_base_chain(TABLE, INPUT.0, INPUT.1)? {
        return Ok(());
    }
    let mut batch = Batch::new();
    // As for a network with the name `probe`, which denies all destinations.
    add_chains(&mut nft, &mut batch, "cni:probe/", &Egress { default: EgressDefault::Deny, ..Egress::default() })?;
    nft.rehearse(batch)
}

/// Returns how many packets the rules of a network's chain have dropped since they were written.
pub(crate) fn count_dropped(nft: &mut Nft, chain: &str) -> Result<u64> {
    // A decoded rule does not have the value of its counter, so the closure reads the bytes and
    // selects no rule. A list may be read more than once: the map has one value for each rule.
    let packets = RefCell::new(BTreeMap::new());
    nft.rules_where(TABLE, chain, |rule| {
        let handle = decode::place(rule).map(|place| place.handle);
        packets.borrow_mut().insert(handle, decode::counted_packets(rule));
        false
    })?;
    Ok(packets.into_inner().into_values().sum())
}
