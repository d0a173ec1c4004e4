//! Reads and changes a table of iptables, without starting a process where that is possible.
//!
//! There are two variants of iptables. The tables of **iptables-nft** are tables of nf_tables, for
//! example `ip nat` and `ip6 nat`: they are read and changed over netlink, in one transaction.
//! Exception: `iptables-restore` adds the rules that this crate cannot write over netlink, mostly
//! rules with conditions that users configure (docs/decisions/rules.md).
//!
//! The tables of **iptables-legacy** are visible only to its own programs. The save program runs
//! only where `/proc/net/ip{,6}_tables_names` lists the table, because the kernel creates a table
//! when it is read. The processes of one [`change`](Iptables::change), for each family and attempt:
//!
//! | | iptables-nft | iptables-legacy |
//! | --- | --- | --- |
//! | nothing to do, no table | none | none |
//! | nothing to do | none | 1 save |
//! | rules added | none, or 1 restore | 1 restore, and 1 save if the table exists |
//! | rules removed | none | 1 save, 1 restore |
//!
//! Reading and then writing is not a transaction. [`Iptables::change`] therefore holds the
//! [`NetnsLock`], and calls its closure `plan` again if a program that does not take this lock
//! changed the table in between. So `plan` must depend only on the [`Chains`] that it is given, and
//! must not call `change`, which would wait for the lock that its own process holds.

use std::collections::BTreeMap;
use std::fmt;

use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;

use super::nft::{self, Nft};
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

mod chains;
mod change;
mod compat;
mod edit;
mod encode;
mod extensions;
mod lock;
mod rule;
mod tool;

pub(crate) use super::nft::IfMissing;
pub use chains::Chains;
pub(crate) use chains::{JumpSearch, Part, single_address};
pub(crate) use compat::{rule_in_words, words};
pub use edit::{CHAIN_NAME_MAX, Edit, check_conditions, is_chain_name};
pub use lock::NetnsLock;
pub use rule::{Rule, quote, split};
pub use tool::Folders;

use tool::{ProgramKind, Programs, Tool, legacy_table_exists};
pub(crate) use tool::{parse, program_prefix, variant_prefix};

/// Both families, in the order in which they are processed.
pub const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// A table of iptables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// `filter`, whose rules accept and drop packets.
    Filter,
    /// `nat`, whose rules translate addresses and ports.
    Nat,
}

impl Table {
    /// Returns the table's name in iptables, which is also its name in nf_tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Table::Filter => "filter",
            Table::Nat => "nat",
        }
    }

    /// Returns the table of nf_tables in which iptables-nft stores this table.
    fn in_nf_tables(self, family: Family) -> nft::Table<'static> {
        let family = match family {
            Family::V4 => nft::Family::Ip,
            Family::V6 => nft::Family::Ip6,
        };
        nft::Table { family, name: self.name() }
    }
}

/// A variant of iptables. Its `Display` is the part of program names: `iptables-nft-restore`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Variant {
    /// The iptables that stores its rules in nf_tables.
    Nft,
    /// The older iptables, with tables of its own in the kernel.
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

/// A chain as it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// The chain's rules, in order.
    pub rules: Vec<Rule>,
    /// The chain's number in nf_tables; `None` for a chain of iptables-legacy.
    pub(crate) handle: Option<u64>,
}

/// One table of iptables in the network namespace of the thread that uses it.
pub struct Iptables<'m> {
    table: Table,
    programs: Programs<'m>,
    nft: Nft,
    /// Where a remark about the lock is logged; `None` after the first remark.
    notes: Option<Notes>,
}

impl<'m> Iptables<'m> {
    /// Opens a connection in the calling thread's network namespace. Programs are searched in PATH,
    /// then in the system's folders. `on_sigterm` decides whether SIGTERM ends the wait for the
    /// lock: [`OnSigterm::Kill`] for ADD and CHECK, [`OnSigterm::Finish`] for calls that clean up.
    /// SIGTERM never ends a program that runs. Remarks for the operator go to `notes`.
    pub fn open(table: Table, machine: &'m dyn Machine, notes: Notes, on_sigterm: OnSigterm) -> Result<Iptables<'m>> {
        Iptables::open_with(table, machine, notes, on_sigterm, Folders::new(std::env::var_os("PATH")))
    }

    /// Does the same as [`open`](Iptables::open), but with these folders.
    pub fn open_with(
        table: Table,
        machine: &'m dyn Machine,
        notes: Notes,
        on_sigterm: OnSigterm,
        folders: Folders,
    ) -> Result<Iptables<'m>> {
        let programs = Programs { machine, on_sigterm, folders };
        Ok(Iptables { table, programs, nft: Nft::open()?, notes: Some(notes) })
    }

    /// Returns the variant that the administrator has chosen: the variant of `iptables-restore`. If
    /// no program has this name, returns iptables-nft if that is installed, else iptables-legacy;
    /// `None` if neither is. Runs the program, with `--version`, only if the name of its file does
    /// not contain the variant.
    pub fn chosen_variant(&self, family: Family) -> Result<Option<Variant>> {
        Ok(self.programs.chosen(family)?.map(|program| program.variant))
    }

    /// Returns the variant in which new rules are made: the chosen one or, if no variant is
    /// installed, iptables-nft over netlink. `None` if rules cannot be written over netlink either,
    /// because of the kernel or in a 32-bit plugin.
    pub fn variant_for_new_rules(&mut self, family: Family) -> Result<Option<Variant>> {
        if let Some(chosen) = self.chosen_variant(family)? {
            return Ok(Some(chosen));
        }
        let can_write = change::can_write_rules(&mut self.nft, self.table, family)?;
        Ok(can_write.then_some(Variant::Nft))
    }

    /// Checks that rules can be written: runs the chosen `iptables-restore` with input that changes
    /// nothing. If no such program is installed, checks that rules can be written over netlink.
    ///
    /// # Errors
    /// The program's error, or that no program is installed and rules cannot be written over
    /// netlink.
    pub fn probe(&mut self, family: Family) -> Result<()> {
        match self.programs.chosen(family)? {
            Some(tool) => self.programs.restore(&tool, &Edit::new().restore_text(self.table)?),
            None if self.variant_for_new_rules(family)?.is_some() => Ok(()),
            None => Err(programs_not_found(program_prefix(family))),
        }
    }

    /// Does [`probe`](Iptables::probe) for IPv4, but trusts that an installed program works. Starts
    /// no process, except a program that has to report its variant.
    ///
    /// # Errors
    /// As [`probe`](Iptables::probe).
    pub(crate) fn probe_installed(&mut self) -> Result<()> {
        if self.variant_for_new_rules(Family::V4)?.is_some() {
            return Ok(());
        }
        Err(Error::new("failed to find iptables-restore", Cause::text("it is neither in PATH nor in /usr/sbin")))
    }

    /// Returns the variants that may have one of these chains, without starting a process:
    /// iptables-nft if it has one of the chains, and iptables-legacy if it has the table, because
    /// only a program could read its chains.
    pub fn variants_to_search(&mut self, family: Family, chains: &[&str]) -> Result<Vec<Variant>> {
        let mut variants = Vec::new();
        for chain in chains {
            if self.nft.find_chain(self.table.in_nf_tables(family), chain)?.is_some() {
                variants.push(Variant::Nft);
                break;
            }
        }
        // On an error the table is assumed to exist; `read` checks again and returns the error.
        if legacy_table_exists(self.table, family).unwrap_or(true) {
            variants.push(Variant::Legacy);
        }
        Ok(variants)
    }

    /// Whether rules of this variant can be found and removed: always with iptables-nft, over
    /// netlink; with iptables-legacy only if its save and its restore program are installed.
    pub fn can_remove(&self, family: Family, variant: Variant) -> Result<bool> {
        if variant == Variant::Nft {
            return Ok(true);
        }
        for kind in [ProgramKind::Save, ProgramKind::Restore] {
            if self.programs.find(family, variant, kind)?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the table's chains, without taking the lock. For iptables-legacy, runs the save
    /// program if the table exists. For iptables-nft, [`Chains`] reads each chain when it is first
    /// requested.
    pub fn read(&mut self, family: Family, variant: Variant) -> Result<Chains<'_>> {
        let (mut nft, mut read_chains) = (None, BTreeMap::new());
        if variant == Variant::Nft {
            nft = Some(&mut self.nft);
        } else if legacy_table_exists(self.table, family)? {
            let tool = self.tool(family, variant, ProgramKind::Save)?;
            read_chains = parse(&self.programs.save(&tool, self.table)?);
        }
        Ok(Chains::new(self.table, family, nft, read_chains))
    }

    /// Makes the changes that `plan` returns, under the namespace's lock. `plan` is called again if
    /// a program that does not take the lock changed the table meanwhile, so `plan` must depend
    /// only on its argument. It can return an empty edit, which changes nothing.
    ///
    /// # Errors
    /// If `plan`, the lock, netlink or the program fails; a program's error has its stderr. On an
    /// error iptables-legacy is unchanged; iptables-nft may have the edit's additions without its
    /// removals.
    pub fn change(
        &mut self,
        family: Family,
        variant: Variant,
        plan: impl FnMut(&mut Chains<'_>) -> Result<Edit>,
    ) -> Result<()> {
        self.change_all(&[(family, variant)], plan, &mut false)
    }

    /// Returns the save or restore program of this variant. Prefers the restore program that the
    /// administrator has chosen, if it has this variant: it may be a wrapper. Fails if no such
    /// program is installed.
    fn tool(&self, family: Family, variant: Variant, kind: ProgramKind) -> Result<Tool> {
        if kind == ProgramKind::Restore
            && let Some(tool) = self.programs.chosen(family)?
            && tool.variant == variant
        {
            return Ok(tool);
        }
        let found = self.programs.find(family, variant, kind)?;
        found.ok_or_else(|| programs_not_found(&variant_prefix(family, variant)))
    }
}

/// Returns the error for programs that are not installed. `prefix` is the first part of their
/// names.
fn programs_not_found(prefix: &str) -> Error {
    let cause = Cause::text("they are neither in PATH nor in /usr/sbin");
    Error::new(format_args!("failed to find the programs of {prefix}"), cause)
}

#[cfg(test)]
mod tests;
