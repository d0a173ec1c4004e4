//! Reads a table: chain by chain over netlink, or all at once from the list of a save
//! program.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::super::nft::{self, Nft};
use super::{Chain, Rule, Table, compat};
use cni_linux::error::Result;
use cni_linux::route::Family;

/// The chains of one table, family and variant. Of iptables-nft each chain is read when it is first
/// asked for.
#[derive(Debug)]
pub struct Chains<'a> {
    pub(super) table: Table,
    pub(super) family: Family,
    /// Where what has not been read yet can be read.
    pub(super) nft: Option<&'a mut Nft>,
    pub(super) read: BTreeMap<String, Option<Chain>>,
}

impl Chains<'_> {
    /// The family.
    pub fn family(&self) -> Family {
        self.family
    }

    /// Whether the chain exists; without reading its rules.
    pub fn has_chain(&mut self, name: &str) -> Result<bool> {
        match (self.read.get(name), &mut self.nft) {
            (Some(chain), _) => Ok(chain.is_some()),
            (None, Some(nft)) => Ok(find_chain(nft, self.table.of(self.family), name)?.is_some()),
            (None, None) => Ok(false),
        }
    }

    /// The chain, if it exists.
    pub fn chain(&mut self, name: &str) -> Result<Option<&Chain>> {
        if let (false, Some(nft)) = (self.read.contains_key(name), &mut self.nft) {
            let chain = read_chain(nft, self.table, self.family, name)?;
            self.read.insert(name.to_owned(), chain);
        }
        Ok(self.read.get(name).and_then(Option::as_ref))
    }

    /// The chain's rules; none if it does not exist.
    pub fn rules(&mut self, name: &str) -> Result<&[Rule]> {
        Ok(self.chain(name)?.map_or(&[], |chain| chain.rules.as_slice()))
    }

    /// Returns the chain's rules that jump to `target`. In a long chain this is much cheaper than
    /// to search all rules.
    pub fn rules_leading_to(&mut self, name: &str, target: &str) -> Result<Vec<Rule>> {
        self.find_rules(name, &[target.as_bytes()], |rule| rule.target() == Some(target))
    }

    /// Returns the chain's rules, in order, for which `wanted` is true. Each such rule must contain
    /// one of the `needles`, a text or an address in network byte order: rules without any are not
    /// even decoded, which makes this cheap in a long chain.
    pub fn find_rules(&mut self, name: &str, needles: &[&[u8]], wanted: impl Fn(&Rule) -> bool) -> Result<Vec<Rule>> {
        if let (false, Some(nft)) = (self.read.contains_key(name), &mut self.nft) {
            let could_be = |rule: &[u8]| needles.iter().any(|needle| nft::mentions(rule, needle));
            let found = match nft.rules_where(self.table.of(self.family), name, could_be) {
                Err(error) if error.is_unsupported() => Vec::new(),
                found => found?,
            };
            return Ok(found.into_iter().map(|listed| compat::rule(self.family, listed)).filter(wanted).collect());
        }
        Ok(self.rules(name)?.iter().filter(|rule| wanted(rule)).cloned().collect())
    }

    /// Returns the chain's rules that may concern one of these ports, or jump to `target`; perhaps
    /// others too. Only for chains to which rules are appended: the answer lacks rules, so a
    /// position counted in it would be wrong.
    pub fn rules_mentioning(&mut self, name: &str, ports: &[u16], target: &str) -> Result<Vec<Rule>> {
        if !self.read.contains_key(name)
            && let Some(nft) = &mut self.nft
        {
            // Matches of xtables have ports in the machine's order, those of nf_tables as on the
            // wire.
            let patterns: Vec<[u8; 2]> =
                ports.iter().flat_map(|port| [port.to_ne_bytes(), port.to_be_bytes()]).collect();
            let found = nft.rules_at_once(self.table.of(self.family), name, |rule| {
                nft::occurs(rule, &patterns) || nft::mentions(rule, target)
            });
            return match found {
                // A kernel without nf_tables has no rules in it.
                Err(error) if error.is_unsupported() => Ok(Vec::new()),
                found => Ok(found?.into_iter().map(|listed| compat::rule(self.family, listed)).collect()),
            };
        }
        Ok(self.rules(name)?.to_vec())
    }

    /// Returns the chains with this name prefix to which rules of the chain `name` lead and whose
    /// own rules could mention this address; perhaps others too. With iptables-nft no rule is
    /// decoded, but each of the chains is requested. No
    /// reading is repeated for long: beside a busy writer this fails.
    pub fn list_chains_for_address(&mut self, name: &str, prefix: &str, address: IpAddr) -> Result<Vec<String>> {
        let Some(nft) = &mut self.nft else {
            let text = address.to_string();
            let mut found: Vec<String> = Vec::new();
            for target in self.rules(name)?.iter().filter_map(Rule::target).map(str::to_owned).collect::<Vec<_>>() {
                let is_it = |rule: &Rule| rule.words.iter().any(|word| word.contains(&text));
                if target.starts_with(prefix) && !found.contains(&target) && self.rules(&target)?.iter().any(is_it) {
                    found.push(target);
                }
            }
            return Ok(found);
        };
        let octets = match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        let table = self.table.of(self.family);
        let found = nft.with_few_retries(|nft| {
            let targets = RefCell::new(BTreeSet::new());
            nft.rules_at_once(table, name, |rule| {
                targets.borrow_mut().extend(named(rule, prefix));
                false
            })?;
            let mut found = Vec::new();
            for target in targets.into_inner() {
                if nft.has_rule(table, &target, |rule| nft::mentions(rule, &octets))? {
                    found.push(target);
                }
            }
            Ok(found)
        });
        match found {
            Err(error) if error.is_unsupported() => Ok(Vec::new()),
            found => found,
        }
    }

    /// The names of all chains that begin so.
    pub fn chain_names(&mut self, prefix: &str) -> Result<Vec<String>> {
        let mut names: Vec<String> = match &mut self.nft {
            None => self.read.keys().cloned().collect(),
            Some(nft) => match nft.chains(self.table.of(self.family)) {
                Ok(chains) => chains.into_iter().map(|chain| chain.name).collect(),
                Err(error) if error.is_unsupported() => Vec::new(),
                Err(error) => return Err(error),
            },
        };
        names.retain(|name| name.starts_with(prefix));
        Ok(names)
    }
}

/// Returns every name in these bytes with this prefix; a comment may contain one too.
fn named(bytes: &[u8], prefix: &str) -> Vec<String> {
    let begins = |at: &usize| bytes.get(*at..).is_some_and(|rest| rest.starts_with(prefix.as_bytes()));
    let name = |at: usize| bytes.iter().skip(at).take_while(|byte| byte.is_ascii_graphic());
    (0..bytes.len()).filter(begins).map(|at| name(at).map(|byte| char::from(*byte)).collect()).collect()
}

fn read_chain(nft: &mut Nft, table: Table, family: Family, name: &str) -> Result<Option<Chain>> {
    let table = table.of(family);
    let Some(chain) = find_chain(nft, table, name)? else { return Ok(None) };
    let rules = nft.rules(table, name)?;
    let rules = rules.into_iter().map(|listed| compat::rule(family, listed)).collect();
    Ok(Some(Chain { rules, handle: Some(chain.handle) }))
}

pub(super) fn find_chain(nft: &mut Nft, table: nft::Table<'_>, name: &str) -> Result<Option<nft::Chain>> {
    match nft.find_chain(table, name) {
        Err(error) if error.is_unsupported() => Ok(None),
        found => found,
    }
}
