//! Reads consistent lists of tables, chains and rules.

use std::collections::BTreeSet;
use std::net::IpAddr;

use netlink_packet_core::NLM_F_DUMP;

use super::batch::Batch;
use super::decode;
use super::request::{Request, RequestType};
use super::{BaseChain, Chain, Family, Listed, Nft, Table};
use cni_linux::error::{Cause, Error, Result};

/// How often a reading is repeated while other processes change rules: the maximum number of
/// readings of one list until two successive ones agree.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Retries {
    /// A change of the rules invalidates at most two readings, so only a constant stream of changes
    /// reaches this bound.
    Many = 512,
    /// For long lists that are not worth waiting for, or that can be read in another way.
    Few = 4,
}

impl Nft {
    /// Returns the chain's rules, in order; none if the chain does not exist. The kernel sends only
    /// this chain.
    pub fn rules(&mut self, table: Table<'_>, chain: &str) -> Result<Vec<Listed>> {
        self.rules_where(table, chain, |_| true)
    }

    /// Returns the chain's rules for which `matches` is true, in order. `matches` gets a rule's
    /// bytes as the kernel sends them: rules that do not match are not decoded, which saves most of
    /// the time.
    pub fn rules_where(
        &mut self,
        table: Table<'_>,
        chain: &str,
        matches: impl Fn(&[u8]) -> bool,
    ) -> Result<Vec<Listed>> {
        let what = format!("failed to list nft chain {table} {chain}");
        self.dump_rules(&what, table, Some(chain), |_, rule| if matches(rule) { decode::rule(rule) } else { None })
    }

    /// Returns the rules of all chains of the table for which `matches` is true, each with its
    /// chain's name, in order. `matches` gets the name and the rule's bytes. This is one request,
    /// however many chains the table has.
    pub fn rules_of_table(
        &mut self,
        table: Table<'_>,
        matches: impl Fn(&[u8], &[u8]) -> bool,
    ) -> Result<Vec<(String, Listed)>> {
        let what = format!("failed to list nft table {table}");
        self.dump_rules(&what, table, None, |chain, rule| {
            if !matches(chain, rule) {
                return None;
            }
            Some((String::from_utf8_lossy(chain).into_owned(), decode::rule(rule)?))
        })
    }

    /// Lists the rules of `chain`, or of all chains of the table if no chain is given. Returns what
    /// `read` returns for each rule's chain and bytes. If `read` returns `None`, leaves the rule
    /// out.
    fn dump_rules<T>(
        &mut self,
        what: &str,
        table: Table<'_>,
        chain: Option<&str>,
        read: impl Fn(&[u8], &[u8]) -> Option<T>,
    ) -> Result<Vec<T>> {
        let in_table = Request::in_table(RequestType::GetRule, table);
        let request = match chain {
            Some(chain) => in_table.text(2, chain),
            None => in_table,
        };
        let rules = self.dump(what, request, |payload| {
            let place = decode::place(payload)?;
            // Old kernels send all rules of the family.
            let is_wanted_chain = chain.is_none_or(|chain| place.chain == chain.as_bytes());
            if place.table != table.name.as_bytes() || !is_wanted_chain {
                return None;
            }
            // The handle is returned even if the rule is left out: `dump` compares all handles.
            Some((place.handle, read(place.chain, payload)))
        })?;
        Ok(rules.into_iter().flatten().collect())
    }

    /// Calls `read` until the ruleset does not change during the call, and returns its result.
    /// Within `read` each list is read only once if the ruleset does not change. `retries` is the
    /// maximum number of calls, and of readings of each list in a call. `what` begins an error's
    /// text. Not for chains at whose beginning other processes insert rules; see
    /// [`wait_for_generation`](Nft::wait_for_generation) for the reason.
    pub(crate) fn read_at_once<T>(
        &mut self,
        what: &str,
        retries: Retries,
        mut read: impl FnMut(&mut Nft) -> Result<T>,
    ) -> Result<T> {
        for _ in 0..retries as usize {
            let generation = self.wait_for_generation()?;
            self.retries = retries;
            let result = read(self);
            self.retries = Retries::Many;
            // `wait_for_generation` has set this until the next commit, which may never come.
            self.one_reading_suffices = false;
            let value = result?;
            if self.generation()? == generation {
                return Ok(value);
            }
        }
        Err(too_many_changes(what, retries))
    }

    /// Returns the table's chains; none if the table does not exist. The kernel sends the chains of
    /// the whole family.
    pub fn chains(&mut self, table: Table<'_>) -> Result<Vec<Chain>> {
        let chains = self.chains_where(table.family, |in_table, _| in_table == table.name)?;
        Ok(chains.into_iter().map(|(_, chain)| chain).collect())
    }

    /// Returns the chain of this name; `None` if it does not exist.
    pub fn find_chain(&mut self, table: Table<'_>, name: &str) -> Result<Option<Chain>> {
        let what = format!("failed to read nft chain {table} {name}");
        let request = Request::in_table(RequestType::GetChain, table).text(3, name);
        Ok(self.find(&what, &request, decode::chain)?.map(|(_, chain)| chain))
    }

    /// Whether the chain exists and has this type, hook and priority. Callers check this before
    /// [`Batch::ensure_base_chain`], which leaves an existing chain unchanged but costs time: the
    /// kernel handles it as an update, frees memory after an RCU grace period, and closing the
    /// socket waits for that (12 ms on Linux 6.18).
    pub fn has_base_chain(&mut self, table: Table<'_>, name: &str, base: BaseChain) -> Result<bool> {
        Ok(self.find_chain(table, name)?.is_some_and(|chain| chain.base == Some(base)))
    }

    /// Adds the chain's creation to the batch only if the chain does not exist: for an existing
    /// chain, [`Batch::ensure_chain`] makes closing the socket slow, as
    /// [`has_base_chain`](Nft::has_base_chain) explains.
    pub fn add_missing_chain(&mut self, batch: &mut Batch, table: Table<'_>, name: &str) -> Result<()> {
        if self.find_chain(table, name)?.is_none() {
            batch.ensure_chain(table, name, None);
        }
        Ok(())
    }

    /// Returns the chains of the family for which `matches` is true, given the table's name and the
    /// chain; each with its table's name.
    pub fn chains_where(
        &mut self,
        family: Family,
        matches: impl Fn(&str, &Chain) -> bool,
    ) -> Result<Vec<(String, Chain)>> {
        let what = format!("failed to list the nft chains of family {}", family.name());
        self.dump(&what, Request::new(RequestType::GetChain, family), |payload| {
            let (table, chain) = decode::chain(payload)?;
            if matches(&table, &chain) { Some((chain.handle, (table, chain))) } else { None }
        })
    }

    /// Returns the names of the family's tables.
    pub(crate) fn tables(&mut self, family: Family) -> Result<Vec<String>> {
        let what = format!("failed to list the nft tables of family {}", family.name());
        self.dump(&what, Request::new(RequestType::GetTable, family), decode::table)
    }

    /// Whether the set exists and contains the address.
    pub fn has_element(&mut self, table: Table<'_>, set: &str, address: IpAddr) -> Result<bool> {
        let what = format!("failed to read nft set {table} {set}");
        let request = Request::in_table(RequestType::GetElement, table).text(2, set).element(address);
        Ok(self.find(&what, &request, |_| Some(()))?.is_some())
    }

    /// Returns a list as it was at one instant: reads it until a reading is not interrupted and,
    /// unless `one_reading_suffices`, has the same handles as the reading before. Fails after
    /// [`Retries`] readings. `read_object` returns an object's handle and its value, or `None`
    /// to leave the object out.
    ///
    /// The kernel sends a long list in parts, and begins each part by counting objects from the
    /// start. If rules are added or removed meanwhile, the count is wrong. Usually the kernel then
    /// sets a flag, or the objects have different generations. But not always, because a
    /// transaction adds rules to the list before it increments the generation, and takes removed
    /// rules off the list afterwards (on Linux 6.18, rules were missing in 1 of 1,200 reads beside
    /// a busy writer).
    fn dump<T>(
        &mut self,
        what: &str,
        request: Request,
        read_object: impl Fn(&[u8]) -> Option<(u64, T)>,
    ) -> Result<Vec<T>> {
        let mut previous_handles = None;
        for _ in 0..self.retries as usize {
            let (mut handles, mut values, mut generations) = (Vec::new(), Vec::new(), BTreeSet::new());
            let is_uninterrupted = self.ask(what, &request, NLM_F_DUMP, |object| {
                generations.insert(decode::generation_low_bits(object));
                if let Some((handle, value)) = read_object(object) {
                    handles.push(handle);
                    values.push(value);
                }
            })?;
            let is_confirmed = self.one_reading_suffices || previous_handles.as_ref() == Some(&handles);
            if is_uninterrupted && generations.len() <= 1 && is_confirmed {
                return Ok(values);
            }
            previous_handles = Some(handles);
        }
        Err(too_many_changes(what, self.retries))
    }
}

/// Returns the error for a list that was changed during each of its readings.
fn too_many_changes(what: &str, retries: Retries) -> Error {
    let text = format!("other processes changed the rules during each of {} readings", retries as usize);
    Error::new(what, Cause::text(text))
}
