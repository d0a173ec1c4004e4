//! Forwarding in nf_tables, for addresses A and isolated bridges B. No Go plugin has this backend.
//! ```text
//! table inet cni_firewall {                       # or the table of the chain that the configuration names
//!     set cni_pods4 { type ipv4_addr; elements = { A } }
//!     set cni_pods6 { type ipv6_addr; elements = { A } }
//!     chain cni_owners { ip saddr A [iifname B oifname [!=] B] comment "cni:NETWORK/CONTAINER/IFNAME" }
//!     chain cni_isolation_1 {
//!         iifname B oifname B drop                 # isolated alone
//!         iifname B oifname != B jump cni_isolation_2                      }
//!     chain cni_isolation_2 { oifname B drop                               }
//!     chain cni_forward {
//!         jump cni_isolation_1
//!         ip saddr @cni_pods4 accept
//!         ip daddr @cni_pods4 ct state established,related accept
//!         (the same for ip6)                                               }
//!     chain forward { type filter hook forward priority filter; jump cni_forward }}
//! ```
//! A packet's cost does not grow with the number of containers: their addresses are elements of
//! sets. No rule leads to `cni_owners`.
//!
//! An `accept` ends the base chain that it was reached from, and no other: a table that drops
//! unknown packets still drops them. So the configuration can name a chain, and all of this is in
//! the table of that chain then.

use std::cell::RefCell;
use std::fmt;
use std::net::IpAddr;

use super::iptables::read_owner;
use super::owner::{self, Ingress, Owned};
use crate::iptables::rule_in_words;
use crate::nft::expr::{Expr, Verdict, ct_established_related, daddr, iifname, in_set, nfproto, not, oifname, saddr};
use crate::nft::{self, BaseChain, Batch, Family, Hook, Kind, Listed, Nft, Rule, SetKind, Table};
use crate::retry;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route;

pub(super) const OWN: &str = "cni_firewall";
pub(super) const OWN_COMMENT: &str = "CNI firewall plugin";
const ENTRY: &str = "forward";
/// `filter`
const BASE: BaseChain = BaseChain { kind: Kind::Filter, hook: Hook::Forward, priority: 0 };
const FORWARD: &str = "cni_forward";
pub(crate) const OWNERS: &str = "cni_owners";
const STAGE_1: &str = "cni_isolation_1";
const STAGE_2: &str = "cni_isolation_2";
const JUMP_COMMENT: &str = "CNI firewall plugin rules";
const FAMILIES: [Family; 3] = [Family::Inet, Family::Ip, Family::Ip6];

/// A chain of the administrator's that packets of containers come by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminChain {
    family: Family,
    table: String,
    chain: String,
}

impl fmt::Display for AdminChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.table(), self.chain)
    }
}

impl AdminChain {
    /// Reads `inet filter forward`: family, table, chain. `None` if it is none.
    pub fn parse(text: &str) -> Option<AdminChain> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [family, table, chain] = words.as_slice() else { return None };
        let family = FAMILIES.into_iter().find(|known| known.name() == *family)?;
        let is_name = |name: &str| name.len() <= 128 && !name.chars().any(char::is_control);
        let is_ours = [FORWARD, OWNERS, STAGE_1, STAGE_2].contains(chain) || *table == OWN;
        (is_name(table) && is_name(chain) && !is_ours).then(|| AdminChain {
            family,
            table: (*table).to_owned(),
            chain: (*chain).to_owned(),
        })
    }

    fn own() -> AdminChain {
        AdminChain { family: Family::Inet, table: OWN.to_owned(), chain: ENTRY.to_owned() }
    }

    fn table(&self) -> Table<'_> {
        Table { family: self.family, name: &self.table }
    }

    fn is_own(&self) -> bool {
        self.table == OWN
    }

    fn sees(&self, address: IpAddr) -> bool {
        match self.family {
            Family::Ip => address.is_ipv4(),
            Family::Ip6 => address.is_ipv6(),
            Family::Inet | Family::Bridge => true,
        }
    }
}

/// Where the rules for an address are: in the table of the administrator's chain, if that sees its
/// packets.
fn place_of<'p>(owned: &Owned, place: Option<&'p AdminChain>, own: &'p AdminChain) -> &'p AdminChain {
    place.filter(|place| place.sees(owned.address)).unwrap_or(own)
}

fn set_of(address: IpAddr) -> (&'static str, SetKind) {
    if address.is_ipv4() { ("cni_pods4", SetKind::Ipv4) } else { ("cni_pods6", SetKind::Ipv6) }
}

/// The expressions that `nft` puts before an address in a table of both families.
fn family(table: Table<'_>, address: IpAddr) -> Vec<Expr> {
    let number = if address.is_ipv4() { libc::NFPROTO_IPV4 } else { libc::NFPROTO_IPV6 };
    match table.family {
        Family::Inet => nfproto(u8::try_from(number).unwrap_or_default()),
        _ => Vec::new(),
    }
}

fn jump(chain: &str) -> Expr {
    Expr::Verdict(Verdict::Jump(chain.to_owned()))
}

/// The rules of [`FORWARD`].
fn forward_rules(place: &AdminChain) -> Vec<Vec<Expr>> {
    let table = place.table();
    let mut rules = vec![vec![jump(STAGE_1)]];
    for any in [IpAddr::from([0; 4]), IpAddr::from([0; 16])].into_iter().filter(|any| place.sees(*any)) {
        let (set, _) = set_of(any);
        let accept = Expr::Verdict(Verdict::Accept);
        rules.push([family(table, any), in_set(saddr(any), set), vec![accept.clone()]].concat());
        rules.push([family(table, any), in_set(daddr(any), set), ct_established_related(), vec![accept]].concat());
    }
    rules
}

fn interface(matched: Option<Vec<Expr>>, bridge: &str) -> Result<Vec<Expr>> {
    matched
        .ok_or_else(|| Error::new(format!("failed to match interface {bridge}"), Cause::text("the name is too long")))
}

/// The rules of both stages for one bridge, each with its chain.
fn isolation(ingress: &Ingress) -> Result<Vec<(&'static str, Vec<Expr>)>> {
    let Some(bridge) = ingress.bridge() else { return Ok(Vec::new()) };
    let (from, to) = (interface(iifname(bridge), bridge)?, interface(oifname(bridge), bridge)?);
    let drop = vec![Expr::Verdict(Verdict::Drop)];
    let mut rules = Vec::new();
    if matches!(ingress, Ingress::Isolated(_)) {
        rules.push((STAGE_1, [from.clone(), to.clone(), drop.clone()].concat()));
    }
    rules.push((STAGE_1, [from, not(to.clone()), vec![jump(STAGE_2)]].concat()));
    rules.push((STAGE_2, [to, drop].concat()));
    Ok(rules)
}

pub(super) fn owner_rule(table: Table<'_>, owned: &Owned) -> Result<Rule> {
    let mut exprs = [family(table, owned.address), saddr(owned.address)].concat();
    if let Some(bridge) = owned.ingress.bridge() {
        let to = interface(oifname(bridge), bridge)?;
        exprs.extend(interface(iifname(bridge), bridge)?);
        exprs.extend(if matches!(owned.ingress, Ingress::Isolated(_)) { to } else { not(to) });
    }
    Ok(Rule::new(exprs).with_comment(owned.owner.clone()))
}

pub(crate) fn read(listed: &Listed) -> Option<Owned> {
    // The address has one family; in the other's words it is nothing.
    [route::Family::V4, route::Family::V6].into_iter().find_map(|family| {
        let rule = rule_in_words(family, listed.clone());
        let (owner, address, ingress) = read_owner(&rule)?;
        Some(Owned { owner: owner.to_owned(), address, ingress })
    })
}

/// The tables in which there are owners, and these, each with the rule's handle.
pub(crate) fn owners(nft: &mut Nft) -> Result<Vec<(Family, String, Vec<Listed>)>> {
    let mut all = Vec::new();
    for family in FAMILIES {
        for (name, _) in nft.chains_where(family, |_, chain| chain.name == OWNERS)? {
            let rules = nft.rules(Table { family, name: &name }, OWNERS)?;
            all.push((family, name, rules));
        }
    }
    Ok(all)
}

/// # Errors
/// ENOENT if there is no such chain.
fn must_exist(nft: &mut Nft, place: Option<&AdminChain>) -> Result<()> {
    let Some(place) = place else { return Ok(()) };
    match nft.find_chain(place.table(), &place.chain)? {
        Some(_) => Ok(()),
        None => Err(Error::new(format!("failed to find nft chain {place}"), Cause::from(nix::errno::Errno::ENOENT))),
    }
}

/// The addresses and bridges that an attachment had before an ADD.
#[derive(Debug, Default)]
pub(super) struct PreviousRules {
    pub(super) owned: Vec<Owned>,
    /// Where that was.
    pub(super) place: Option<AdminChain>,
}

/// Makes these the addresses of the attachment `owner`, in one transaction; what it had before is
/// stored in `former`.
///
/// # Errors
/// ENOENT if there is no chain `place`.
pub(super) fn ensure(
    nft: &mut Nft,
    owner: &str,
    wanted: &[Owned],
    place: Option<&AdminChain>,
    former: &RefCell<Option<PreviousRules>>,
) -> Result<()> {
    let own = AdminChain::own();
    let place_of = |owned: &Owned| place_of(owned, place, &own);
    must_exist(nft, place)?;
    retry(|| {
        let mut batch = Batch::new();
        batch.only_at(nft.wait_for_generation()?);
        let mut had = PreviousRules::default();
        for (family, name, rules) in owners(nft)? {
            let table = Table { family, name: &name };
            let stays = |owned: &&Owned| place_of(owned).table() == table;
            let here: Vec<Owned> = wanted.iter().filter(stays).cloned().collect();
            let own: Vec<Owned> = rules.iter().filter_map(read).filter(|owned| owned.owner == owner).collect();
            if !own.is_empty() {
                had.place = place.filter(|place| place.table() == table).cloned();
                had.owned.extend(own);
            }
            let is_gone = |owned: &Owned| owned.owner == owner && !here.contains(owned);
            forget(nft, &mut batch, table, &rules, &Leaving { is_gone: &is_gone, still: &here })?;
        }
        former.replace(Some(had));
        for place in [place, Some(&own)].into_iter().flatten() {
            let here: Vec<&Owned> = wanted.iter().filter(|owned| place_of(owned) == place).collect();
            if !here.is_empty() {
                add(nft, &mut batch, place, &here)?;
            }
        }
        nft.commit(batch)
    })
}

/// Adds what is missing in one table.
fn add(nft: &mut Nft, batch: &mut Batch, place: &AdminChain, wanted: &[&Owned]) -> Result<()> {
    let table = place.table();
    if place.is_own() {
        batch.ensure_table(table, Some(OWN_COMMENT));
        if !nft.has_base_chain(table, ENTRY, BASE)? {
            batch.ensure_base_chain(table, ENTRY, BASE, None);
        }
    }
    for chain in [OWNERS, STAGE_2, STAGE_1, FORWARD] {
        nft.add_missing_chain(batch, table, chain)?;
    }
    let expected = forward_rules(place);
    for any in [IpAddr::from([0; 4]), IpAddr::from([0; 16])].into_iter().filter(|any| place.sees(*any)) {
        let (set, kind) = set_of(any);
        batch.ensure_set(table, set, kind);
    }
    if !nft.rules(table, FORWARD)?.iter().map(|listed| &listed.rule.exprs).eq(&expected) {
        batch.flush_chain(table, FORWARD);
        for exprs in expected {
            batch.append_rule(table, FORWARD, &Rule::new(exprs));
        }
    }
    if !leads_on(nft, place)? {
        batch.insert_rule(table, &place.chain, &Rule::new(vec![jump(FORWARD)]).with_comment(JUMP_COMMENT));
    }
    let there: Vec<Owned> = nft.rules(table, OWNERS)?.iter().filter_map(read).collect();
    let mut isolated: Vec<(&str, Vec<Expr>)> = Vec::new();
    for owned in wanted {
        if !there.contains(owned) {
            batch.append_rule(table, OWNERS, &owner_rule(table, owned)?);
        }
        batch.ensure_element(table, set_of(owned.address).0, owned.address);
        for rule in isolation(&owned.ingress)? {
            if !isolated.contains(&rule) {
                isolated.push(rule);
            }
        }
    }
    for (chain, exprs) in isolated {
        if !nft.rules(table, chain)?.iter().any(|listed| listed.rule.exprs == exprs) {
            batch.append_rule(table, chain, &Rule::new(exprs));
        }
    }
    Ok(())
}

/// Whether a rule of the chain leads to ours, wherever the administrator has put it.
fn leads_on(nft: &mut Nft, place: &AdminChain) -> Result<bool> {
    let leads = |listed: &Listed| {
        let to_ours =
            |expr: &Expr| matches!(expr, Expr::Verdict(Verdict::Jump(to) | Verdict::Goto(to)) if to == FORWARD);
        listed.rule.exprs.last().is_some_and(to_ours)
    };
    let found = nft.rules_where(place.table(), &place.chain, |rule| nft::mentions(rule, FORWARD))?;
    Ok(found.iter().any(leads))
}

/// Removes what there is of the attachment.
pub(super) fn purge(nft: &mut Nft, owner: &str) -> Result<()> {
    remove(nft, &|owned| owned.owner == owner)
}

/// Removes what names the network and none of these owners.
pub(super) fn gc(nft: &mut Nft, network: &str, valid: &[String]) -> Result<()> {
    let prefixes = owner::prefixes(network);
    let is_of = |owner: &str| prefixes.iter().any(|prefix| owner.starts_with(prefix));
    remove(nft, &|owned| is_of(&owned.owner) && !valid.contains(&owned.owner))
}

fn remove(nft: &mut Nft, is_gone: &dyn Fn(&Owned) -> bool) -> Result<()> {
    retry(|| {
        let mut batch = Batch::new();
        batch.only_at(nft.wait_for_generation()?);
        for (family, name, rules) in owners(nft)? {
            forget(nft, &mut batch, Table { family, name: &name }, &rules, &Leaving { is_gone, still: &[] })?;
        }
        nft.commit(batch)
    })
}

/// Which owners of a table go.
struct Leaving<'a> {
    is_gone: &'a dyn Fn(&Owned) -> bool,
    /// The addresses that are about to be added.
    still: &'a [Owned],
}

/// Removes the owners that are gone, addresses that have no owner then, and the isolation of
/// bridges that no attachment asks for.
fn forget(nft: &mut Nft, batch: &mut Batch, table: Table<'_>, rules: &[Listed], leaving: &Leaving<'_>) -> Result<()> {
    let Leaving { is_gone, still } = leaving;
    let all: Vec<(u64, Owned)> = rules.iter().filter_map(|listed| Some((listed.handle, read(listed)?))).collect();
    let (gone, left): (Vec<_>, Vec<_>) = all.into_iter().partition(|(_, owned)| is_gone(owned));
    if gone.is_empty() {
        return Ok(());
    }
    let left: Vec<&Owned> = left.iter().map(|(_, owned)| owned).chain(still.iter()).collect();
    let mut free: Vec<IpAddr> = gone.iter().map(|(_, owned)| owned.address).collect();
    free.sort();
    free.dedup();
    free.retain(|address| !left.iter().any(|owned| owned.address == *address));
    for (handle, _) in &gone {
        batch.delete_rule(table, OWNERS, *handle);
    }
    for address in free {
        let (set, _) = set_of(address);
        if nft.has_element(table, set, address)? {
            batch.delete_element(table, set, address);
        }
    }
    let mut asked_for = Vec::new();
    for owned in left {
        asked_for.extend(isolation(&owned.ingress)?);
    }
    for chain in [STAGE_1, STAGE_2] {
        for listed in nft.rules(table, chain)? {
            if !asked_for.iter().any(|(of, exprs)| *of == chain && *exprs == listed.rule.exprs) {
                batch.delete_rule(table, chain, listed.handle);
            }
        }
    }
    Ok(())
}

/// Returns a sentence for each element or rule that is missing.
pub(super) fn check(nft: &mut Nft, wanted: &[Owned], place: Option<&AdminChain>) -> Result<Vec<String>> {
    let own = AdminChain::own();
    let mut missing = Vec::new();
    for here in [place, Some(&own)].into_iter().flatten() {
        let (wanted, place) = (wanted.iter().filter(|owned| place_of(owned, place, &own) == here), here);
        let here: Vec<&Owned> = wanted.collect();
        let table = place.table();
        if here.is_empty() {
            continue;
        }
        let expected = forward_rules(place);
        if !nft.rules(table, FORWARD)?.iter().map(|listed| &listed.rule.exprs).eq(&expected) {
            missing.push(format!("nft chain {table} {FORWARD} is missing or has other rules than it should"));
            continue;
        }
        let is_hooked_in = |chain: nft::Chain| !place.is_own() || chain.base == Some(BASE);
        if !nft.find_chain(table, &place.chain)?.is_some_and(is_hooked_in) || !leads_on(nft, place)? {
            missing.push(format!("nft chain {table} {} does not lead to {FORWARD}", place.chain));
        }
        for owned in here {
            let (set, _) = set_of(owned.address);
            if !nft.has_element(table, set, owned.address)? {
                missing.push(format!("nft set {table} {set} lacks {}", owned.address));
            }
            for (chain, exprs) in isolation(&owned.ingress)? {
                let bridge = owned.ingress.bridge().unwrap_or_default();
                let lacks = format!("nft chain {table} {chain} lacks a rule of {bridge} for {}", owned.ingress.name());
                if !nft.rules(table, chain)?.iter().any(|listed| listed.rule.exprs == exprs)
                    && !missing.contains(&lacks)
                {
                    missing.push(lacks);
                }
            }
        }
    }
    Ok(missing)
}

/// Whether the attachment has an address in some table.
pub(super) fn holds(nft: &mut Nft, owner: &str) -> Result<bool> {
    let all = owners(nft)?;
    Ok(all.iter().flat_map(|(.., rules)| rules).filter_map(read).any(|owned| owned.owner == owner))
}

/// Other tables that drop forwarded packets which they do not know, as `inet filter forward`.
pub(super) fn dropping(nft: &mut Nft, place: Option<&AdminChain>) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for family in FAMILIES {
        let drops = |_: &str, chain: &nft::Chain| {
            chain.drops && chain.base.is_some_and(|base| base.hook == Hook::Forward && base.kind == Kind::Filter)
        };
        for (table, chain) in nft.chains_where(family, drops)? {
            let is_place = place.is_some_and(|place| {
                (place.family, place.table.as_str(), place.chain.as_str()) == (family, &table, &chain.name)
            });
            if !is_place {
                found.push(format!("{} {}", Table { family, name: &table }, chain.name));
            }
        }
    }
    Ok(found)
}

/// Whether rules could be made here.
pub(super) fn probe(place: Option<&AdminChain>) -> Result<()> {
    let mut nft = Nft::open()?;
    must_exist(&mut nft, place)?;
    let own = AdminChain::own();
    let place = place.unwrap_or(&own);
    if nft.find_chain(place.table(), FORWARD)?.is_some() && leads_on(&mut nft, place)? {
        return Ok(());
    }
    let mut batch = Batch::new();
    add(&mut nft, &mut batch, place, &[])?;
    nft.rehearse(batch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_family_a_table_and_a_chain() {
        let place = AdminChain::parse("inet filter forward").unwrap();
        assert_eq!((place.table().to_string(), place.chain.as_str()), ("inet filter".to_owned(), "forward"));
        for wrong in ["", "filter forward", "arp filter forward", "inet filter forward x", "inet cni_firewall forward"]
        {
            assert_eq!(AdminChain::parse(wrong), None, "{wrong}");
        }
        assert!(AdminChain::parse("inet filter cni_forward").is_none());
    }
}
