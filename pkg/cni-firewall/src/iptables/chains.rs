//! Reads the chains of a table: with iptables-nft each over netlink, when it is first requested;
//! with iptables-legacy all at once, from the output of the save program.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::super::nft::{self, Nft};
use super::{Chain, Rule, Table, compat};
use cni_linux::error::Result;
use cni_linux::route::Family;

/// The chains of one table, family and variant. With iptables-nft a chain is read when it is first
/// requested.
#[derive(Debug)]
pub struct Chains<'a> {
    pub(super) table: Table,
    pub(super) family: Family,
    /// The connection over which chains of iptables-nft are read; `None` for iptables-legacy.
    pub(super) nft: Option<&'a mut Nft>,
    /// The chains that have been read, by name; `None` for one that does not exist.
    pub(super) read_chains: BTreeMap<String, Option<Chain>>,
}

impl Chains<'_> {
    /// Returns the chains in the output of a save program, for tests of plans.
    #[cfg(test)]
    pub(crate) fn of_text(table: Table, family: Family, saved: &str) -> Chains<'static> {
        Chains { table, family, nft: None, read_chains: super::parse(saved) }
    }

    /// Returns the family of the table.
    pub fn family(&self) -> Family {
        self.family
    }

    /// Whether the chain exists. Does not read its rules.
    pub fn has_chain(&mut self, name: &str) -> Result<bool> {
        match (self.read_chains.get(name), &mut self.nft) {
            (Some(chain), _) => Ok(chain.is_some()),
            (None, Some(nft)) => Ok(nft.find_chain(self.table.in_nf_tables(self.family), name)?.is_some()),
            (None, None) => Ok(false),
        }
    }

    /// Returns the chain with its rules; `None` if it does not exist.
    pub fn chain(&mut self, name: &str) -> Result<Option<&Chain>> {
        if !self.read_chains.contains_key(name)
            && let Some(nft) = &mut self.nft
        {
            let chain = read_chain(nft, self.table, self.family, name)?;
            self.read_chains.insert(name.to_owned(), chain);
        }
        Ok(self.read_chains.get(name).and_then(Option::as_ref))
    }

    /// Returns the chain's rules; an empty slice if it does not exist.
    pub fn rules(&mut self, name: &str) -> Result<&[Rule]> {
        Ok(self.chain(name)?.map_or(&[], |chain| chain.rules.as_slice()))
    }

    /// Returns the chain's rules that jump to `target`. In a long chain this is much cheaper than
    /// searching [`rules`](Chains::rules).
    pub fn rules_leading_to(&mut self, name: &str, target: &str) -> Result<Vec<Rule>> {
        self.find_rules(name, &[target.as_bytes()], |rule| rule.target() == Some(target))
    }

    /// Returns the chain's rules, in order, for which `is_wanted` is true. Every wanted rule must
    /// contain one of the `needles`, which are texts, or addresses in network byte order: over
    /// netlink only rules with a needle are decoded, so the search is cheap in a long chain.
    pub fn find_rules(
        &mut self,
        name: &str,
        needles: &[&[u8]],
        is_wanted: impl Fn(&Rule) -> bool,
    ) -> Result<Vec<Rule>> {
        if !self.read_chains.contains_key(name)
            && let Some(nft) = &mut self.nft
        {
            let has_needle = |rule: &[u8]| needles.iter().any(|needle| nft::mentions(rule, needle));
            let listed = nft.rules_where(self.table.in_nf_tables(self.family), name, has_needle)?;
            let rules = listed.into_iter().map(|listed| compat::rule_in_words(self.family, listed));
            return Ok(rules.filter(is_wanted).collect());
        }
        Ok(self.rules(name)?.iter().filter(|rule| is_wanted(rule)).cloned().collect())
    }

    /// Returns the chain's rules, in order, that contain one of these port numbers or the name of
    /// the chain `target`. The result can contain some other rules too: over netlink the rules are
    /// searched as bytes, and a chain that has already been read is returned whole. An index in the
    /// result is not a position in the chain.
    pub fn rules_mentioning(&mut self, name: &str, ports: &[u16], target: &str) -> Result<Vec<Rule>> {
        if self.read_chains.contains_key(name) {
            return Ok(self.rules(name)?.to_vec());
        }
        let Some(nft) = &mut self.nft else { return Ok(Vec::new()) };
        // Matches of xtables have ports in the machine's byte order, comparisons of nf_tables in
        // network byte order.
        let patterns: Vec<[u8; 2]> = ports.iter().flat_map(|port| [port.to_ne_bytes(), port.to_be_bytes()]).collect();
        let is_candidate = |rule: &[u8]| nft::has_any_pair(rule, &patterns) || nft::mentions(rule, target);
        let listed = nft.rules_at_once(self.table.in_nf_tables(self.family), name, is_candidate)?;
        Ok(listed.into_iter().map(|listed| compat::rule_in_words(self.family, listed)).collect())
    }

    /// Returns the chains whose names begin with `prefix` and that have a rule with this address.
    /// The result can contain some other chains too, because only text or bytes are compared.
    ///
    /// # Errors
    /// If the chains cannot be read, or if other processes keep changing rules: the reading is
    /// repeated only a few times.
    pub fn list_chains_for_address(&mut self, prefix: &str, address: IpAddr) -> Result<Vec<String>> {
        match self.nft {
            Some(_) => self.list_nft_chains_for_address(prefix, address),
            None => Ok(self.list_legacy_chains_for_address(prefix, &address.to_string())),
        }
    }

    /// Does [`list_chains_for_address`](Chains::list_chains_for_address) in iptables-legacy, where
    /// all chains have been read. `address` is the text in rules.
    fn list_legacy_chains_for_address(&self, prefix: &str, address: &str) -> Vec<String> {
        let mentions_address = |rule: &Rule| rule.words.iter().any(|word| word.contains(address));
        let mut found = Vec::new();
        for (name, chain) in &self.read_chains {
            if name.starts_with(prefix) && chain.iter().any(|chain| chain.rules.iter().any(mentions_address)) {
                found.push(name.clone());
            }
        }
        found
    }

    /// Does [`list_chains_for_address`](Chains::list_chains_for_address) in iptables-nft. Looks for
    /// the address in the bytes of the rules.
    fn list_nft_chains_for_address(&mut self, prefix: &str, address: IpAddr) -> Result<Vec<String>> {
        let Some(nft) = &mut self.nft else { return Ok(Vec::new()) };
        let octets = match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        let table = self.table.in_nf_tables(self.family);
        let what = format!("failed to list nft table {table}");
        let read = |nft: &mut Nft| {
            nft.rules_of_table(table, |chain, rule| {
                chain.starts_with(prefix.as_bytes()) && nft::mentions(rule, &octets)
            })
        };
        let found = nft.with_few_retries(|nft| nft.read_at_once(&what, read))?;
        let names: BTreeSet<String> = found.into_iter().map(|(chain, _)| chain).collect();
        Ok(names.into_iter().collect())
    }

    /// Reads all chains for whose name `is_wanted` is true, with one list of the chains and one of
    /// the rules, and returns their names.
    pub fn read_chains_where(&mut self, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<String>> {
        let Some(nft) = &mut self.nft else {
            return Ok(self.read_chains.keys().filter(|name| is_wanted(name)).cloned().collect());
        };
        let (table, family) = (self.table.in_nf_tables(self.family), self.family);
        let read = |nft: &mut Nft| {
            let mut chains = nft.chains(table)?;
            chains.retain(|chain| is_wanted(&chain.name));
            let mut read_chains: BTreeMap<String, Chain> = BTreeMap::new();
            for chain in chains {
                read_chains.insert(chain.name, Chain { rules: Vec::new(), handle: Some(chain.handle) });
            }
            let is_read = |name: &[u8]| std::str::from_utf8(name).is_ok_and(|name| read_chains.contains_key(name));
            for (name, listed) in nft.rules_of_table(table, |name, _| is_read(name))? {
                if let Some(chain) = read_chains.get_mut(&name) {
                    chain.rules.push(compat::rule_in_words(family, listed));
                }
            }
            Ok(read_chains)
        };
        let what = format!("failed to list the chains of nft table {table}");
        let read_chains = match nft.with_few_retries(|nft| nft.read_at_once(&what, read)) {
            // Other processes keep changing rules: each list is read until it is consistent.
            Err(error) if error.errno().is_none() => read(nft)?,
            result => result?,
        };
        let names = read_chains.keys().cloned().collect();
        self.read_chains.extend(read_chains.into_iter().map(|(name, chain)| (name, Some(chain))));
        Ok(names)
    }

    /// Returns the chain's rules that jump to a chain, by the name of that chain.
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

/// Reads a chain of iptables-nft with its rules; `None` if it does not exist.
fn read_chain(nft: &mut Nft, table: Table, family: Family, name: &str) -> Result<Option<Chain>> {
    let table = table.in_nf_tables(family);
    let Some(chain) = nft.find_chain(table, name)? else { return Ok(None) };
    let listed = nft.rules(table, name)?;
    let rules = listed.into_iter().map(|listed| compat::rule_in_words(family, listed)).collect();
    Ok(Some(Chain { rules, handle: Some(chain.handle) }))
}
