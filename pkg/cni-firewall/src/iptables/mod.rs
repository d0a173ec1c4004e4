//! A table of iptables: reading and changing it, without a process where that is possible.
//!
//! There are two iptables. The tables of **iptables-nft** are tables of nf_tables, `ip nat` and
//! `ip6 nat` for example: they are read and changed over netlink, in one transaction. Only rules in
//! words that plugins do not write themselves go through `iptables-restore`
//! (docs/decisions/rules.md). The tables of **iptables-legacy** are visible to its own programs
//! alone; they run only where `/proc/net/ip{,6}_tables_names` names such a table, since looking
//! would create one. A [`change`](Iptables::change) starts these programs, per family and attempt:
//!
//! | | iptables-nft | iptables-legacy |
//! | --- | --- | --- |
//! | nothing to do, no table | none | none |
//! | nothing to do | none | 1 save |
//! | rules added | none; 1 restore for foreign words | 1 restore, and 1 save if the table exists |
//! | rules removed | none | 1 save, 1 restore |
//!
//! Reading and then writing is not a transaction: [`Iptables::change`] holds the [`NetnsLock`]
//! meanwhile, and plans again if a program that does not take the lock changed the table in
//! between.
//!
//! A plan must depend on nothing but the [`Chains`] that it is given, because it is repeated after
//! a failure, and must not call `change`, because the lock is held.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;

use super::nft::{self, Batch, Nft};
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

mod chains;
mod compat;
mod edit;
mod encode;
mod lock;
mod rule;
mod tool;
mod transaction;
mod xt;

pub use chains::Chains;
pub(crate) use compat::rule as rule_in_words;
pub(crate) use compat::words;
pub use edit::{Edit, check_conditions};
pub use lock::NetnsLock;
pub use rule::{Rule, quote, split};
pub use tool::Folders;

use chains::find_chain;
use tool::{ProgramKind, Runner, Tool};

/// How long a change waits for others' changes in this namespace.
pub const LOCK_LIMIT: Duration = Duration::from_secs(30);
/// How often a change is planned because the rules it is based on have changed.
const ATTEMPTS: usize = 8;
/// Both families, in the order in which they are processed.
pub const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// A table of iptables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// Which packets pass.
    Filter,
    /// Addresses and ports.
    Nat,
}

impl Table {
    /// As iptables has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Table::Filter => "filter",
            Table::Nat => "nat",
        }
    }

    /// The table of nf_tables in which iptables-nft keeps it.
    fn of(self, family: Family) -> nft::Table<'static> {
        let family = match family {
            Family::V4 => nft::Family::Ip,
            Family::V6 => nft::Family::Ip6,
        };
        nft::Table { family, name: self.name() }
    }
}

/// Which iptables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Variant {
    /// On nf_tables.
    Nft,
    /// The older one. Displays, like the other, as it is called in the names of programs.
    Legacy,
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Variant::Nft => "nft",
            Variant::Legacy => "legacy",
        })
    }
}

/// How additions to iptables-nft are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Over netlink where the rules can be put so.
    Netlink,
    /// `iptables-restore` writes the rules.
    Program,
}

/// A chain as it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// Its rules, in order.
    pub rules: Vec<Rule>,
    pub(crate) handle: Option<u64>,
}

/// The outcome of a removal in all families and variants.
#[derive(Debug)]
pub struct Cleaned {
    /// Where there may be something that could not be looked at, because the programs are not
    /// installed.
    pub unreached: Vec<(Family, Variant)>,
    /// All that went wrong.
    pub outcome: Result<()>,
}

/// One table of iptables in the network namespace of the thread that uses it.
pub struct Iptables<'m> {
    table: Table,
    runner: Runner<'m>,
    folders: Folders,
    /// `None`: a kernel without nf_tables.
    nft: Option<Nft>,
    /// For what there is to say of the lock; taken when it has been said.
    notes: Option<Notes>,
}

impl fmt::Debug for Iptables<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iptables")
            .field("table", &self.table)
            .field("folders", &self.folders)
            .field("nft", &self.nft)
            .finish_non_exhaustive()
    }
}

impl<'m> Iptables<'m> {
    /// Opens a connection in the calling thread's namespace; programs are looked for in PATH, then
    /// in the system's folders. SIGTERM ends the wait for the lock in an ADD or a CHECK
    /// ([`OnSigterm::Kill`]), not in what cleans up ([`OnSigterm::Finish`]); a program that runs is
    /// always finished. Remarks for the operator go to `notes`.
    pub fn open(table: Table, machine: &'m dyn Machine, notes: Notes, on_sigterm: OnSigterm) -> Result<Iptables<'m>> {
        Iptables::open_with(table, machine, notes, on_sigterm, Folders::new(std::env::var_os("PATH")))
    }

    /// The same with other folders.
    pub fn open_with(
        table: Table,
        machine: &'m dyn Machine,
        notes: Notes,
        on_sigterm: OnSigterm,
        folders: Folders,
    ) -> Result<Iptables<'m>> {
        let nft = match Nft::open() {
            Ok(nft) => Some(nft),
            Err(error) if error.is_unsupported() => None,
            Err(error) => return Err(error),
        };
        Ok(Iptables { table, runner: Runner { machine, on_sigterm }, folders, nft, notes: Some(notes) })
    }

    /// From now on SIGTERM does not end the wait for the lock either: the changes that follow undo
    /// those of an interrupted call.
    pub fn finish_on_sigterm(&mut self) {
        self.runner.on_sigterm = OnSigterm::Finish;
    }

    /// The variant that the machine's owner has chosen; `None` if there is no `iptables-restore`.
    /// No process, unless a script stands where the program should be.
    pub fn chosen_variant(&self, family: Family) -> Result<Option<Variant>> {
        Ok(tool::chosen(&self.folders, self.runner, family)?.map(|tool| tool.variant))
    }

    /// The variant in which new rules are made: the chosen one. Where none is installed it is
    /// iptables-nft if the kernel has what its rules need, since they are written without a
    /// program.
    pub fn variant_for_new_rules(&mut self, family: Family) -> Result<Option<Variant>> {
        match (self.chosen_variant(family)?, &mut self.nft) {
            (None, Some(nft)) => Ok(transaction::is_possible(nft, self.table, family)?.then_some(Variant::Nft)),
            (chosen, _) => Ok(chosen),
        }
    }

    /// Whether the chosen program can work here: runs it (one process) on a text that changes
    /// nothing. Without a program, whether it can be done without.
    pub fn probe(&mut self, family: Family) -> Result<()> {
        match tool::chosen(&self.folders, self.runner, family)? {
            Some(tool) => tool::restore(self.runner, &tool, &format!("*{}\nCOMMIT\n", self.table.name())),
            None if self.variant_for_new_rules(family)?.is_some() => Ok(()),
            None => Err(missing(family, None)),
        }
    }

    /// Where one of these chains may be: iptables-nft if it has one of them, iptables-legacy if it
    /// has a table at all. No process.
    pub fn variants_to_search(&mut self, family: Family, chains: &[&str]) -> Result<Vec<Variant>> {
        let mut holders = Vec::new();
        for chain in chains {
            if holders.is_empty() && self.find_chain(family, chain)?.is_some() {
                holders.push(Variant::Nft);
            }
        }
        // If this is not known, reading the table will show it, or why it cannot be read.
        if legacy_table_exists(self.table, family).unwrap_or(true) {
            holders.push(Variant::Legacy);
        }
        Ok(holders)
    }

    /// Whether changes of what this variant has are possible: over netlink always, else if its
    /// programs are there.
    pub fn can_remove(&self, family: Family, variant: Variant) -> Result<bool> {
        let find = |job| tool::find(&self.folders, self.runner, family, variant, job);
        Ok(variant == Variant::Nft || (find(ProgramKind::Save)?.is_some() && find(ProgramKind::Restore)?.is_some()))
    }

    /// The table as it is, without a lock. One process for iptables-legacy where there is a table,
    /// else none.
    pub fn read(&mut self, family: Family, variant: Variant) -> Result<Chains<'_>> {
        let (mut nft, mut read) = (None, BTreeMap::new());
        match variant {
            Variant::Nft => nft = self.nft.as_mut(),
            Variant::Legacy if legacy_table_exists(self.table, family)? => {
                let tool = self.tool(family, variant, ProgramKind::Save)?;
                read = parse(&tool::save(self.runner, &tool, self.table)?);
            }
            Variant::Legacy => {}
        }
        Ok(Chains { table: self.table, family, nft, read })
    }

    /// Makes the changes that `plan` finds necessary, under the namespace's lock. `plan` is called
    /// again if a program that does not take the lock changed the table meanwhile, so it must
    /// depend on nothing but its argument; an empty edit ends the change with success.
    ///
    /// # Errors
    /// What `plan` failed with, the lock's, the program's with what it wrote to stderr. With
    /// iptables-legacy nothing has been changed then; with iptables-nft additions may have been
    /// made when the removal of something else fails.
    pub fn change(
        &mut self,
        family: Family,
        variant: Variant,
        mut plan: impl FnMut(&mut Chains<'_>) -> Result<Edit>,
    ) -> Result<()> {
        self.change_all(&[(family, variant)], |nat| plan(nat).map(Some)).map(drop).map_err(|(_, error)| error)
    }

    /// The same for several families under one lock: all are read and planned before any is
    /// changed, and `plan` ends it all by `None`. If one has to be planned again, so are those
    /// that are not done yet.
    ///
    /// Returns how many families, from the first, may have been changed, also on failure.
    ///
    /// # Errors
    /// As [`change`](Iptables::change).
    pub fn change_all(
        &mut self,
        families: &[(Family, Variant)],
        plan: impl FnMut(&mut Chains<'_>) -> Result<Option<Edit>>,
    ) -> Result<usize, (usize, Error)> {
        let mut changed = 0;
        match self.attempt_all(families, plan, &mut changed) {
            Ok(()) => Ok(changed),
            Err(error) => Err((changed, error)),
        }
    }

    /// Plans a removal in every family and variant that may hold one of the chains, whatever
    /// becomes of the others.
    pub fn clean(&mut self, chains: &[&str], mut plan: impl FnMut(&mut Chains<'_>) -> Result<Edit>) -> Cleaned {
        let (mut unreached, mut results) = (Vec::new(), Vec::new());
        for family in FAMILIES {
            let variants = self.variants_to_search(family, chains).unwrap_or_else(|error| {
                results.push(Err(error));
                // Where iptables-legacy has no table this finds nothing and starts no program.
                vec![Variant::Legacy]
            });
            for variant in variants {
                match self.can_remove(family, variant) {
                    Ok(true) => results.push(self.change(family, variant, &mut plan)),
                    Ok(false) => unreached.push((family, variant)),
                    Err(error) => results.push(Err(error)),
                }
            }
        }
        Cleaned { unreached, outcome: Error::join(results.into_iter().filter_map(Result::err)) }
    }

    fn attempt_all(
        &mut self,
        families: &[(Family, Variant)],
        mut plan: impl FnMut(&mut Chains<'_>) -> Result<Option<Edit>>,
        changed: &mut usize,
    ) -> Result<()> {
        let Runner { machine, on_sigterm } = self.runner;
        let lock = NetnsLock::acquire(machine, on_sigterm, self.folders.locks(), LOCK_LIMIT)?;
        if let Some(remark) = lock.remark()
            && let Some(notes) = self.notes.take()
        {
            notes.note(remark);
        }
        let (mut left, mut failed) = (families, None::<(String, Way, Error)>);
        *changed = 0;
        for attempt in 0..ATTEMPTS {
            let mut edits = Vec::new();
            for (family, variant) in left {
                let Some(edit) = plan(&mut self.read(*family, *variant)?)? else { return Ok(()) };
                let text = edit.restore_text(self.table)?;
                edits.push((*family, *variant, edit, text));
            }
            for (family, variant, edit, text) in edits {
                // After the kernel's refusal the program writes the rules: it knows this kernel, or
                // has the message for it.
                let has_program = || self.tool(family, variant, ProgramKind::Restore).is_ok();
                let by_netlink = variant == Variant::Nft && (attempt == 0 || !has_program());
                let way = if by_netlink { Way::Netlink } else { Way::Program };
                if let Some((before, before_by, error)) = failed.take() {
                    // The same again would fail the same way.
                    if before == text && before_by == way && !is_momentary(&error) {
                        return Err(error);
                    }
                }
                let applied = if edit.is_empty() { Ok(()) } else { self.apply(family, variant, &edit, way, &text) };
                // A legacy program that fails has changed nothing; with the other something may be
                // added, not removed.
                if !edit.is_empty() && (applied.is_ok() || variant == Variant::Nft) {
                    *changed = families.len() - left.len() + 1;
                }
                match applied {
                    Ok(()) => left = left.get(1..).unwrap_or_default(),
                    Err(error) if error.is_deadline() || error.is_terminated() => return Err(error),
                    Err(error) => {
                        failed = Some((text, way, error));
                        break;
                    }
                }
            }
            if left.is_empty() {
                return Ok(());
            }
        }
        let cause = || Error::new("failed to change iptables", Cause::text("no attempt came to its end"));
        Err(failed.map_or_else(cause, |(_, _, error)| error))
    }

    fn apply(&mut self, family: Family, variant: Variant, edit: &Edit, way: Way, everything: &str) -> Result<()> {
        if variant == Variant::Legacy {
            let tool = self.tool(family, variant, ProgramKind::Restore)?;
            return tool::restore(self.runner, &tool, everything);
        }
        let added = match (way, &mut self.nft) {
            (Way::Netlink, Some(nft)) => transaction::additions(nft, self.table, family, edit)?,
            _ => None,
        };
        let table = self.table.of(family);
        let mut batch = match added {
            Some(batch) => batch,
            None => {
                if edit.has_additions() {
                    let tool = self.tool(family, variant, ProgramKind::Restore)?;
                    tool::restore(self.runner, &tool, &(edit.additions_text(self.table)? + "COMMIT\n"))?;
                }
                Batch::new()
            }
        };
        for (chain, rule) in &edit.put_back {
            if let Some(raw) = &rule.raw {
                let protocol = rule.value("-p").and_then(compat::protocol_number);
                batch.put_back(table, chain, raw, protocol);
            }
        }
        for (chain, rule) in edit.moved.iter().chain(&edit.deleted) {
            if let Some(handle) = rule.handle {
                batch.delete_rule(table, chain, handle);
            }
        }
        for (name, handle) in &edit.deleted_chains {
            if let Some(handle) = handle {
                batch.delete_chain(table, name, *handle);
            }
        }
        match &mut self.nft {
            Some(nft) => nft.commit(batch),
            None => Ok(()),
        }
    }

    fn tool(&self, family: Family, variant: Variant, job: ProgramKind) -> Result<Tool> {
        // The owner's choice if it is of this variant, so that a wrapper in its place is used.
        if job == ProgramKind::Restore
            && let Some(tool) = tool::chosen(&self.folders, self.runner, family)?
            && tool.variant == variant
        {
            return Ok(tool);
        }
        let found = tool::find(&self.folders, self.runner, family, variant, job)?;
        found.ok_or_else(|| missing(family, Some(variant)))
    }

    fn find_chain(&mut self, family: Family, name: &str) -> Result<Option<nft::Chain>> {
        match &mut self.nft {
            Some(nft) => find_chain(nft, self.table.of(family), name),
            None => Ok(None),
        }
    }
}

/// Returns whether legacy iptables has this table in the network namespace of the calling thread,
/// which may differ from the process's.
fn legacy_table_exists(table: Table, family: Family) -> Result<bool> {
    use std::io::ErrorKind::{NotFound, PermissionDenied};
    let path = match family {
        Family::V4 => "/proc/thread-self/net/ip_tables_names",
        Family::V6 => "/proc/thread-self/net/ip6_tables_names",
    };
    match std::fs::read_to_string(path) {
        Ok(names) => Ok(names.lines().any(|name| name == table.name())),
        // Without legacy tables in the kernel there is no such file. And a process that cannot read
        // it cannot change them either.
        Err(error) if [NotFound, PermissionDenied].contains(&error.kind()) => Ok(false),
        Err(error) => Err(Error::new(format_args!("failed to read {path}"), error)),
    }
}

/// Reads what a save program wrote of one table.
pub(crate) fn parse(saved: &str) -> BTreeMap<String, Option<Chain>> {
    let mut chains: BTreeMap<String, Option<Chain>> = BTreeMap::new();
    let empty = || Some(Chain::default());
    for line in saved.lines() {
        if let Some(chain) = line.strip_prefix(':') {
            chains.entry(chain.split(' ').next().unwrap_or_default().to_owned()).or_insert_with(empty);
        } else if let Some(rule) = line.strip_prefix("-A ") {
            let mut words = split(rule);
            if words.is_empty() {
                continue;
            }
            if let Some(chain) = chains.entry(words.remove(0)).or_insert_with(empty) {
                chain.rules.push(Rule { words, handle: None, whole: true, raw: None });
            }
        }
    }
    chains
}

/// Whether the kernel had changed the table between a legacy program's reading and its writing.
fn is_momentary(error: &Error) -> bool {
    error.to_string().contains("Resource temporarily unavailable")
}

fn missing(family: Family, variant: Option<Variant>) -> Error {
    let name = if family == Family::V4 { "iptables" } else { "ip6tables" };
    let name = variant.map_or_else(|| name.to_owned(), |variant| format!("{name}-{variant}"));
    Error::new(
        format!("failed to find the programs of {name}"),
        Cause::text("they are neither in PATH nor in /usr/sbin"),
    )
}

#[cfg(test)]
mod tests;
