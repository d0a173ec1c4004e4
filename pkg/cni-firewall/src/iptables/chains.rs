//! Reads the chains of a table: with iptables-nft each over netlink, when it is first requested;
//! with iptables-legacy all at once, from the output of the save program.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use super::{Chain, Rule, Table, compat};
use crate::nft::{self, IfMissing, Key, Listed, Nft, Retries, Search};
use cni::Cidr;
use cni::cidr::octets;
use cni_linux::error::Result;
use cni_linux::route::Family;

/// The chains of one table, family and variant. With iptables-nft a chain is read when it is first
/// requested.
#[derive(Debug)]
pub struct Chains<'a> {
    family: Family,
    /// The table of nf_tables that iptables-nft uses.
    table: nft::Table<'static>,
    /// The connection over which chains of iptables-nft are read; `None` for iptables-legacy.
    nft: Option<&'a mut Nft>,
    /// The chains that have been read, by name; `None` for one that does not exist.
    read_chains: BTreeMap<String, Option<Chain>>,
    /// The chains of iptables-nft that were looked for; `None` for one that does not exist.
    found_chains: BTreeMap<String, Option<nft::Chain>>,
    /// Whether an index is made for a long chain that has none. Only for a plan whose transaction
    /// then writes the index: making one reads the whole chain.
    pub(super) makes_indexes: bool,
}

/// A part of a rule by which rules are searched.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part<'a> {
    /// The chain or target that the rule leads to.
    Target(&'a str),
    /// The comment.
    Comment(&'a str),
    /// The beginning of the comment.
    CommentBeginning(&'a str),
    /// The only address that the rule matches, as source or destination.
    Address(IpAddr),
}

impl Part<'_> {
    /// Returns the bytes that a rule with this part contains.
    fn bytes(self) -> Vec<u8> {
        match self {
            Part::Target(text) | Part::Comment(text) | Part::CommentBeginning(text) => text.into(),
            Part::Address(address) => octets(address),
        }
    }

    /// Returns the key by which an index finds the rules with this part; `None` for the beginning
    /// of a comment, because a key is the hash of a whole comment.
    fn key(self) -> Option<Key> {
        match self {
            Part::Target(target) => Some(Key::target(target)),
            Part::Comment(comment) => Some(Key::comment(comment)),
            Part::CommentBeginning(_) => None,
            Part::Address(address) => Some(Key::address(address)),
        }
    }
}

/// Returns the function that gives the keys of a rule of this family: those of its target, its
/// comment and its addresses. There is one function for each family, because `Search::keys_of` is a
/// plain function, which cannot capture the family.
pub(super) fn keys_in(family: Family) -> fn(&Listed) -> Vec<Key> {
    fn keys(family: Family, listed: &Listed) -> Vec<Key> {
        let rule = compat::rule_in_words(family, listed);
        let addresses = ["-s", "-d"].into_iter().filter_map(|option| single_address(&rule, option));
        // A rule without a target gets the key of an empty name. If the rule had no key at all,
        // every search would return it.
        let target = Key::target(rule.target().unwrap_or_default());
        std::iter::once(target).chain(rule.comment().map(Key::comment)).chain(addresses.map(Key::address)).collect()
    }
    match family {
        Family::V4 => |listed| keys(Family::V4, listed),
        Family::V6 => |listed| keys(Family::V6, listed),
    }
}

/// Returns the only address that the rule matches with this option, `-s` or `-d`; `None` if it
/// matches any, or a network.
pub(crate) fn single_address(rule: &Rule, option: &str) -> Option<IpAddr> {
    let cidr: Cidr = rule.value(option)?.parse().ok()?;
    if cidr == Cidr::host(cidr.address()) { Some(cidr.address()) } else { None }
}

/// What a search in the chain that jumps to the chains of containers looks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JumpSearch<'a> {
    /// The host ports: rules that match one of them are found.
    pub(crate) ports: &'a [u16],
    /// The chain of a container: rules that jump to this chain are found too.
    pub(crate) target: &'a str,
    /// The address that the caller's own rules lead to: an index that lacks a key is trusted. With
    /// `None`, all rules are read then.
    pub(crate) address: Option<IpAddr>,
    /// Returns the keys of a jump in the index; none for a rule that every search must return.
    pub(crate) keys_of: fn(&Listed) -> Vec<Key>,
    /// How often the chain is read if it has no index.
    pub(crate) retries: Retries,
}

impl<'a> Chains<'a> {
    /// Returns the chains of iptables-nft, which are read over `nft`, or those of iptables-legacy,
    /// which are `read_chains`.
    pub(super) fn new(
        table: Table,
        family: Family,
        nft: Option<&'a mut Nft>,
        read_chains: BTreeMap<String, Option<Chain>>,
    ) -> Chains<'a> {
        let (table, found_chains) = (table.in_nf_tables(family), BTreeMap::new());
        Chains { family, table, nft, read_chains, found_chains, makes_indexes: false }
    }

    /// Returns the chains in the output of a save program, for tests of plans.
    #[cfg(test)]
    pub(crate) fn of_text(table: Table, family: Family, saved: &str) -> Chains<'static> {
        Chains::new(table, family, None, super::parse(saved))
    }

    /// Returns the family of the table.
    pub fn family(&self) -> Family {
        self.family
    }

    /// Whether the chain exists. Does not read its rules.
    pub fn has_chain(&mut self, name: &str) -> Result<bool> {
        match self.read_chains.get(name) {
            Some(chain) => Ok(chain.is_some()),
            None => Ok(self.find(name)?.is_some()),
        }
    }

    /// Returns the chain of iptables-nft without its rules; `None` if it does not exist, and always
    /// for iptables-legacy.
    fn find(&mut self, name: &str) -> Result<Option<nft::Chain>> {
        let Some(nft) = &mut self.nft else { return Ok(None) };
        if let Some(found) = self.found_chains.get(name) {
            return Ok(found.clone());
        }
        let found = nft.find_chain(self.table, name)?;
        self.found_chains.insert(name.to_owned(), found.clone());
        Ok(found)
    }

    /// Returns the chain with its rules; `None` if it does not exist.
    pub fn chain(&mut self, name: &str) -> Result<Option<&Chain>> {
        if !self.read_chains.contains_key(name)
            && let Some(nft) = &mut self.nft
        {
            let chain = match nft.find_chain(self.table, name)? {
                Some(chain) => Some(Chain {
                    rules: in_words(self.family, &nft.rules(self.table, name)?),
                    handle: Some(chain.handle),
                }),
                None => None,
            };
            self.read_chains.insert(name.to_owned(), chain);
        }
        Ok(self.read_chains.get(name).and_then(Option::as_ref))
    }

    /// Returns the chain's rules; an empty slice if it does not exist.
    pub fn rules(&mut self, name: &str) -> Result<&[Rule]> {
        Ok(self.chain(name)?.map_or(&[], |chain| chain.rules.as_slice()))
    }

    /// Returns the chain's rules, in order, that have one of the parts and for which `is_wanted` is
    /// true. Only `is_wanted` is exact: the result can contain rules without any of the parts,
    /// because only bytes or hashes are compared, and a chain that has already been read is not
    /// searched for parts.
    ///
    /// Of a long chain over netlink, reads only the rules that the chain's index has for a part.
    /// [`scan_rules`](Chains::scan_rules) is for a chain at whose beginning rules are inserted,
    /// which cannot keep an index, and for [`Part::CommentBeginning`], which has no key.
    pub(crate) fn find_rules(
        &mut self,
        name: &str,
        parts: &[Part<'_>],
        if_missing: IfMissing,
        is_wanted: impl Fn(&Rule) -> bool,
    ) -> Result<Vec<Rule>> {
        let keys: Option<Vec<Key>> = parts.iter().map(|part| part.key()).collect();
        if !self.read_chains.contains_key(name)
            && let Some(wanted) = &keys
            && let Some(chain) = self.find(name)?.filter(nft::is_long)
            && let Some(nft) = &mut self.nft
        {
            let search = Search { keys_of: keys_in(self.family), appended: &[], wanted, if_missing };
            let found = if self.makes_indexes {
                Some(nft.rules_with_keys(self.table, &chain, search)?)
            } else {
                nft.rules_by_index(self.table, &chain, search)?
            };
            if let Some(found) = found {
                return Ok(in_words(self.family, &found).into_iter().filter(is_wanted).collect());
            }
        }
        self.scan_rules(name, parts, is_wanted)
    }

    /// Does [`find_rules`](Chains::find_rules) without an index. Over netlink, decodes only the
    /// rules that contain the bytes of a part. In a chain that has already been read, only
    /// `is_wanted` decides.
    pub(crate) fn scan_rules(
        &mut self,
        name: &str,
        parts: &[Part<'_>],
        is_wanted: impl Fn(&Rule) -> bool,
    ) -> Result<Vec<Rule>> {
        if !self.read_chains.contains_key(name)
            && let Some(nft) = &mut self.nft
        {
            let needles: Vec<Vec<u8>> = parts.iter().map(|part| part.bytes()).collect();
            let has_part = |rule: &[u8]| needles.iter().any(|needle| nft::mentions(rule, needle));
            let found = nft.rules_where(self.table, name, has_part)?;
            return Ok(in_words(self.family, &found).into_iter().filter(is_wanted).collect());
        }
        Ok(self.rules(name)?.iter().filter(|rule| is_wanted(rule)).cloned().collect())
    }

    /// Returns the chain's rules, in order, that have one of the ports or jump to the chain
    /// `target`. The result can contain some other rules too: over netlink the rules are searched
    /// as bytes, and a chain that has already been read is returned whole. The nth rule of the
    /// result is therefore not the nth rule of the chain.
    ///
    /// The rules of a long chain are found by its index.
    pub(crate) fn find_jumps(&mut self, name: &str, search: JumpSearch<'_>) -> Result<Vec<Rule>> {
        if self.read_chains.contains_key(name) {
            return Ok(self.rules(name)?.to_vec());
        }
        let JumpSearch { ports, target, address, keys_of, retries } = search;
        if let Some(chain) = self.find(name)?.filter(nft::is_long) {
            let wanted: Vec<Key> = ports.iter().map(|port| Key::port(*port)).chain([Key::target(target)]).collect();
            let appended: Vec<Key> = address.into_iter().map(Key::address).collect();
            let if_missing = if address.is_some() { IfMissing::TrustIndex } else { IfMissing::ReadAll };
            let index_search = Search { keys_of, appended: &appended, wanted: &wanted, if_missing };
            if let Some(found) = self.find_indexed(&chain, index_search)? {
                return Ok(in_words(self.family, &found));
            }
        }
        let Some(nft) = &mut self.nft else { return Ok(Vec::new()) };
        // Matches of xtables have ports in the machine's byte order, comparisons of nf_tables in
        // network byte order.
        let patterns: Vec<[u8; 2]> = ports.iter().flat_map(|port| [port.to_ne_bytes(), port.to_be_bytes()]).collect();
        let is_candidate = |rule: &[u8]| nft::has_any_pair(rule, &patterns) || nft::mentions(rule, target);
        let what = format!("failed to list nft chain {} {name}", self.table);
        let found = nft.read_at_once(&what, retries, |nft| nft.rules_where(self.table, name, is_candidate))?;
        Ok(in_words(self.family, &found))
    }

    /// Does [`find_jumps`](Chains::find_jumps) in a long chain by its index; `None` if the chain
    /// has no usable index and `makes_indexes` is false.
    ///
    /// A missing index is made from a list of the whole table, not only of this chain: the keys of
    /// a jump include the addresses to which the rules of its target chain lead, so that
    /// [`list_chains_for_address`](Chains::list_chains_for_address) can search by address.
    fn find_indexed(&mut self, chain: &nft::Chain, search: Search<'_>) -> Result<Option<Vec<Listed>>> {
        let Some(nft) = &mut self.nft else { return Ok(None) };
        let (table, family) = (self.table, self.family);
        if let Some(found) = nft.rules_by_index(table, chain, search)? {
            return Ok(Some(found));
        }
        if !self.makes_indexes {
            return Ok(None);
        }
        let what = format!("failed to list nft table {table}");
        let rules = nft.read_at_once(&what, Retries::Many, |nft| nft.rules_of_table(table, |_, _| true))?;
        // By the name of a chain: the keys of the addresses to which its rules lead.
        let mut address_keys: BTreeMap<&str, Vec<Key>> = BTreeMap::new();
        for (name, listed) in &rules {
            let address = destination(&compat::rule_in_words(family, listed));
            address_keys.entry(name).or_default().extend(address.map(Key::address));
        }
        let jumps: Vec<&Listed> =
            rules.iter().filter(|(name, _)| *name == chain.name).map(|(_, listed)| listed).collect();
        let entries = jumps.iter().map(|listed| {
            let mut keys = (search.keys_of)(listed);
            // A rule without keys stays without: every search must return it.
            if !keys.is_empty()
                && let Some(target) = compat::rule_in_words(family, listed).target()
            {
                keys.extend(address_keys.get(target).into_iter().flatten());
            }
            (listed.handle, keys)
        });
        nft.add_index(table, chain, search, entries)?;
        Ok(Some(jumps.into_iter().filter(|listed| search.wants(listed)).cloned().collect()))
    }

    /// Returns the chains whose names begin with `prefix` and that have a rule with this address.
    /// The result can contain some other chains too, because only text, bytes or hashes are
    /// compared. If `find_jumps` has used the index of the chain `from`, returns only chains that
    /// `from` jumps to.
    ///
    /// # Errors
    /// If the chains cannot be read, or if other processes keep changing rules: the reading is
    /// repeated only a few times.
    pub fn list_chains_for_address(&mut self, prefix: &str, address: IpAddr, from: &str) -> Result<BTreeSet<String>> {
        let Some(nft) = &mut self.nft else {
            // All chains of iptables-legacy have been read.
            let text = address.to_string();
            let mentions_address = |rule: &Rule| rule.words.iter().any(|word| word.contains(&text));
            let has_address = |chain: &Chain| chain.rules.iter().any(mentions_address);
            let found = self.read_chains.iter().filter(|(_, chain)| chain.as_ref().is_some_and(has_address));
            return Ok(found.map(|(name, _)| name).filter(|name| name.starts_with(prefix)).cloned().collect());
        };
        // `false`: an index that lacks the address is trusted. Most ADDs are for a new address, and
        // would otherwise read the whole table.
        if let Some(Some(chain)) = self.found_chains.get(from)
            && let Some(found) = nft.rules_by_used_index(self.table, chain, &[Key::address(address)], false)?
        {
            let jumps = in_words(self.family, &found);
            let targets = jumps.iter().filter_map(Rule::target).filter(|target| target.starts_with(prefix));
            return Ok(targets.map(str::to_owned).collect());
        }
        let bytes = octets(address);
        let matches = |chain: &[u8], rule: &[u8]| chain.starts_with(prefix.as_bytes()) && nft::mentions(rule, &bytes);
        let what = format!("failed to list nft table {}", self.table);
        let found = nft.read_at_once(&what, Retries::Few, |nft| nft.rules_of_table(self.table, matches))?;
        Ok(found.into_iter().map(|(chain, _)| chain).collect())
    }

    /// Reads all chains for whose name `is_wanted` is true, with one list of the chains and one of
    /// the rules, and returns the names of the chains. The chains of iptables-legacy have already
    /// been read.
    pub fn read_chains_where(&mut self, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<String>> {
        let Some(nft) = &mut self.nft else {
            return Ok(self.read_chains.keys().filter(|name| is_wanted(name)).cloned().collect());
        };
        let (table, family) = (self.table, self.family);
        let read = |nft: &mut Nft| {
            let mut read_chains: BTreeMap<String, Option<Chain>> = BTreeMap::new();
            for chain in nft.chains(table)?.into_iter().filter(|chain| is_wanted(&chain.name)) {
                read_chains.insert(chain.name, Some(Chain { rules: Vec::new(), handle: Some(chain.handle) }));
            }
            let is_read = |name: &[u8]| std::str::from_utf8(name).is_ok_and(|name| read_chains.contains_key(name));
            for (name, listed) in nft.rules_of_table(table, |name, _| is_read(name))? {
                if let Some(Some(chain)) = read_chains.get_mut(&name) {
                    chain.rules.push(compat::rule_in_words(family, &listed));
                }
            }
            Ok(read_chains)
        };
        let what = format!("failed to list the chains of nft table {table}");
        let read_chains = match nft.read_at_once(&what, Retries::Few, read) {
            // `read_at_once` fails without an errno if other processes keep changing rules. Then
            // the two lists can be of different instants, but each is consistent.
            Err(error) if error.errno().is_none() => read(nft)?,
            result => result?,
        };
        let names = read_chains.keys().cloned().collect();
        self.read_chains.extend(read_chains);
        Ok(names)
    }

    /// Returns the chain's rules that have a target, by the name of the target: a chain or, for
    /// example, `RETURN`.
    pub fn rules_by_target(&mut self, name: &str) -> Result<BTreeMap<String, Vec<Rule>>> {
        let mut by_target: BTreeMap<String, Vec<Rule>> = BTreeMap::new();
        for rule in self.rules(name)? {
            if let Some(target) = rule.target() {
                by_target.entry(target.to_owned()).or_default().push(rule.clone());
            }
        }
        Ok(by_target)
    }
}

/// Returns rules of nf_tables in the words of iptables.
fn in_words(family: Family, listed: &[Listed]) -> Vec<Rule> {
    listed.iter().map(|listed| compat::rule_in_words(family, listed)).collect()
}

/// Returns the address that the target DNAT of the rule leads to; `None` if the target is another
/// one, or without a port.
fn destination(rule: &Rule) -> Option<IpAddr> {
    let address: SocketAddr = rule.value("--to-destination")?.parse().ok()?;
    Some(address.ip())
}
