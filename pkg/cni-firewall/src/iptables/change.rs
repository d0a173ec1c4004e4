//! Plans and applies changes, and does both again if another program changed the table in between.

use std::time::Duration;

use super::chains::keys_in;
use super::edit::{Edit, IfExists};
use super::extensions::{self, KnownExtension};
use super::tool::{ProgramKind, Programs};
use super::{Chains, Iptables, NetnsLock, Table, Variant, encode};
use crate::nft::{BaseChain, Batch, Chain, Hook, Kind, Nft};
use cni_linux::error::{Error, Result};
use cni_linux::route::Family;

/// How long a change waits for the lock of the network namespace at most.
const LOCK_LIMIT: Duration = Duration::from_secs(30);
/// How many times a change is planned at most.
const ATTEMPTS: usize = 8;

/// How the additions of an edit are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    /// Over netlink if [`encode_additions`] can express them, else by `iptables-restore`. Only for
    /// iptables-nft.
    Netlink,
    /// By `iptables-restore`.
    Program,
}

/// The planned changes of one family.
struct PlannedEdit {
    family: Family,
    variant: Variant,
    edit: Edit,
    /// The edit as the input of `iptables-restore`. Edits of one family are compared by this text.
    text: String,
}

/// An edit that could not be applied in the last attempt.
struct FailedEdit {
    text: String,
    writer: Writer,
    error: Error,
}

impl Iptables<'_> {
    /// Makes the changes of several families under one lock. All families are planned before any is
    /// changed. If an edit cannot be applied, usually because another process changed the table
    /// after it was read, this family and those after it are planned again. Families that are
    /// already changed stay changed. Sets `changed` to true if a family may have been changed, even
    /// on an error.
    ///
    /// # Errors
    /// - The lock, `plan` or reading fails, or an edit has a word that cannot be quoted.
    /// - Applying an edit reaches a deadline or is ended by SIGTERM.
    /// - Applying an edit fails in the last of [`ATTEMPTS`] attempts, or in an earlier one if the
    ///   next would be the same and the error does not [report a concurrent
    ///   change](is_concurrent_change).
    pub(crate) fn change_all(
        &mut self,
        families: &[(Family, Variant)],
        mut plan: impl FnMut(&mut Chains<'_>) -> Result<Edit>,
        changed: &mut bool,
    ) -> Result<()> {
        let _lock = self.lock()?;
        let mut unfinished = families;
        // The failure of the first family that is not finished.
        let mut last_failure: Option<FailedEdit> = None;
        for attempt in 0..ATTEMPTS {
            for planned in self.plan_edits(unfinished, &mut plan)? {
                let writer = self.choose_writer(&planned, attempt);
                // The same edit by the same writer would fail again, except beside a concurrent
                // change. The failed family is the first of this attempt. `take` clears the
                // failure, so that the families after it are not compared with it.
                if let Some(failure) = last_failure.take()
                    && failure.text == planned.text
                    && failure.writer == writer
                    && !is_concurrent_change(&failure.error)
                {
                    return Err(failure.error);
                }
                if !planned.edit.is_empty() {
                    let result = self.apply(&planned, writer);
                    // A legacy program that fails has changed nothing. With iptables-nft the
                    // additions may have been made before the error.
                    *changed |= result.is_ok() || planned.variant == Variant::Nft;
                    if let Err(error) = result {
                        if error.is_deadline() || error.is_terminated() {
                            return Err(error);
                        }
                        last_failure = Some(FailedEdit { text: planned.text, writer, error });
                        break;
                    }
                }
                unfinished = &unfinished[1..];
            }
            if last_failure.is_none() {
                break;
            }
        }
        last_failure.map_or(Ok(()), |failure| Err(failure.error))
    }

    /// Makes the removals that `plan` returns in iptables-nft. Reads without the lock, so that no
    /// other process waits for a `plan` that reads many chains. Under the lock, applies the edit if
    /// no rule of the namespace was changed since. Otherwise, or if that fails, plans again as
    /// [`change`](Iptables::change) does. Takes no lock if nothing is to be removed.
    ///
    /// # Errors
    /// The same as [`change`](Iptables::change).
    pub(crate) fn remove_from_nft(
        &mut self,
        family: Family,
        mut plan: impl FnMut(&mut Chains<'_>) -> Result<Edit>,
    ) -> Result<()> {
        let generation = self.nft.generation()?;
        let edit = plan(&mut self.read(family, Variant::Nft)?)?;
        if edit.is_empty() {
            return Ok(());
        }
        let text = edit.restore_text(self.table)?;
        let planned = PlannedEdit { family, variant: Variant::Nft, edit, text };
        let lock = self.lock()?;
        if self.nft.generation()? == generation && self.apply(&planned, Writer::Netlink).is_ok() {
            return Ok(());
        }
        drop(lock);
        self.change(family, Variant::Nft, plan)
    }

    /// Calls `plan` with the table of each family and returns the edits. `plan` can make missing
    /// indexes, because the transaction of the edit writes them.
    fn plan_edits(
        &mut self,
        families: &[(Family, Variant)],
        plan: &mut impl FnMut(&mut Chains<'_>) -> Result<Edit>,
    ) -> Result<Vec<PlannedEdit>> {
        let mut planned = Vec::new();
        for (family, variant) in families {
            let mut chains = self.read(*family, *variant)?;
            chains.makes_indexes = true;
            let edit = plan(&mut chains)?;
            let text = edit.restore_text(self.table)?;
            planned.push(PlannedEdit { family: *family, variant: *variant, edit, text });
        }
        Ok(planned)
    }

    /// Locks iptables of the network namespace. Logs the remark of the lock, if it has one, once
    /// for this object.
    fn lock(&mut self) -> Result<NetnsLock> {
        let Programs { machine, on_sigterm, folders } = &self.programs;
        let lock = NetnsLock::acquire(*machine, *on_sigterm, &folders.lock_folder, LOCK_LIMIT)?;
        if let Some(remark) = lock.remark()
            && let Some(notes) = self.notes.take()
        {
            notes.note(remark);
        }
        Ok(lock)
    }

    /// Returns the writer for an attempt; `attempt` counts from 0. For iptables-legacy this is
    /// always the program. For iptables-nft the first attempt uses netlink, and later ones the
    /// program if it is installed: the kernel may accept the program's form of the rules, and if
    /// not, the program's error message may be better.
    fn choose_writer(&self, planned: &PlannedEdit, attempt: usize) -> Writer {
        let PlannedEdit { family, variant, .. } = *planned;
        let is_installed = || self.tool(family, variant, ProgramKind::Restore).is_ok();
        if variant == Variant::Legacy || (attempt > 0 && is_installed()) { Writer::Program } else { Writer::Netlink }
    }

    /// Applies one edit. With iptables-legacy the restore program makes all changes. With
    /// iptables-nft one transaction over netlink makes them; if the program has to write the
    /// additions, it does that first, and the transaction makes the other changes.
    fn apply(&mut self, planned: &PlannedEdit, writer: Writer) -> Result<()> {
        let PlannedEdit { family, variant, ref edit, ref text } = *planned;
        if variant == Variant::Legacy {
            let program = self.tool(family, variant, ProgramKind::Restore)?;
            return self.programs.restore(&program, text);
        }
        let over_netlink = match writer {
            Writer::Netlink => encode_additions(&mut self.nft, self.table, family, edit)?,
            Writer::Program => None,
        };
        if over_netlink.is_none() && edit.has_additions() {
            let program = self.tool(family, variant, ProgramKind::Restore)?;
            self.programs.restore(&program, &edit.additions().restore_text(self.table)?)?;
        }
        let mut batch = over_netlink.unwrap_or_default();
        let table = self.table.in_nf_tables(family);
        // Rules and chains of iptables-nft were read over netlink, so all have a handle.
        for (chain, rule) in edit.old_copies.iter().chain(&edit.deleted) {
            if let Some(handle) = rule.handle {
                batch.delete_rule(table, chain, handle);
            }
        }
        for (name, handle) in &edit.deleted_chains {
            if let Some(handle) = handle {
                batch.delete_chain(table, name, *handle);
            }
        }
        self.nft.commit(batch)
    }
}

/// Whether the program failed because the table changed between the program's own reading and
/// writing. The kernel returns EAGAIN to the program, whose stderr has only the text of the errno.
fn is_concurrent_change(error: &Error) -> bool {
    error.to_string().contains("Resource temporarily unavailable")
}

/// Returns the names and properties of the base chains that iptables creates in a table.
fn built_in_chains(table: Table) -> &'static [(&'static str, BaseChain)] {
    const NAT: [(&str, BaseChain); 4] = [
        ("PREROUTING", BaseChain { kind: Kind::Nat, hook: Hook::Prerouting, priority: -100 }),
        ("INPUT", BaseChain { kind: Kind::Nat, hook: Hook::Input, priority: 100 }),
        ("OUTPUT", BaseChain { kind: Kind::Nat, hook: Hook::Output, priority: -100 }),
        ("POSTROUTING", BaseChain { kind: Kind::Nat, hook: Hook::Postrouting, priority: 100 }),
    ];
    const FILTER: [(&str, BaseChain); 3] = [
        ("INPUT", BaseChain { kind: Kind::Filter, hook: Hook::Input, priority: 0 }),
        ("FORWARD", BaseChain { kind: Kind::Filter, hook: Hook::Forward, priority: 0 }),
        ("OUTPUT", BaseChain { kind: Kind::Filter, hook: Hook::Output, priority: 0 }),
    ];
    match table {
        Table::Nat => &NAT,
        Table::Filter => &FILTER,
    }
}

/// Whether rules can be written over netlink: this process must be a 64-bit one, and the kernel
/// must have the xtables match `comment` and, for the table nat, the target `MASQUERADE`.
pub(super) fn can_write_rules(nft: &mut Nft, table: Table, family: Family) -> Result<bool> {
    // A 32-bit process cannot know the sizes of the structures in a 64-bit kernel.
    if cfg!(target_pointer_width = "32") {
        return Ok(false);
    }
    let masquerade = if family == Family::V4 { extensions::MASQUERADE_V4 } else { extensions::MASQUERADE_V6 };
    let nft_family = table.in_nf_tables(family).family;
    let mut kernel_has = |known: KnownExtension| nft.has_extension(nft_family, known.kind, known.name, known.revision);
    Ok(kernel_has(extensions::COMMENT)? && (table != Table::Nat || kernel_has(masquerade)?))
}

/// Returns a transaction that creates the edit's chains and rules and, if they are missing, the
/// table and the base chains to which the rules are added. `None` if `iptables-restore` has to do
/// that: in a 32-bit process, for words that [`encode`] does not know, and if a base chain is
/// missing in a table that was made with `nft`.
fn encode_additions(nft: &mut Nft, table: Table, family: Family, edit: &Edit) -> Result<Option<Batch>> {
    if cfg!(target_pointer_width = "32") {
        return Ok(None);
    }
    let encoded: Option<Vec<_>> = edit.rules.iter().map(|added| encode::rule(family, &added.words)).collect();
    let Some(encoded) = encoded else { return Ok(None) };
    let (mut batch, nft_table) = (Batch::new(), table.in_nf_tables(family));
    let mut missing = Vec::new();
    for (name, base) in built_in_chains(table) {
        if !edit.rules.iter().any(|added| added.chain == *name) {
            continue;
        }
        // A base chain that exists must not be in the transaction: closing the socket would then
        // wait for an RCU grace period. The chain's index, if there is one, is loaded so
        // that the commit updates the index.
        match nft.find_chain(nft_table, name)? {
            Some(chain) => nft.keep_index(nft_table, &chain, keys_in(family))?,
            None => missing.push((name, *base)),
        }
    }
    if !missing.is_empty() {
        let existing_chains = nft.chains(nft_table)?;
        // A base chain that iptables would not create shows that the table was made with `nft`.
        let is_made_with_nft =
            |chain: &Chain| chain.base.is_some_and(|base| !built_in_chains(table).contains(&(&chain.name, base)));
        if existing_chains.iter().any(is_made_with_nft) {
            return Ok(None);
        }
        // A table without chains may be missing. If the table exists, `ensure_table` has no effect.
        if existing_chains.is_empty() {
            batch.ensure_table(nft_table, None);
        }
    }
    for (name, base) in missing {
        batch.ensure_base_chain(nft_table, name, base);
    }
    for (name, if_exists) in &edit.chains {
        if *if_exists == IfExists::Empty && nft.find_chain(nft_table, name)?.is_some() {
            batch.flush_chain(nft_table, name);
        } else {
            batch.create_chain(nft_table, name);
        }
    }
    for (added, exprs) in edit.rules.iter().zip(&encoded) {
        batch.add_xtables_rule(nft_table, &added.chain, exprs, added.position);
    }
    Ok(Some(batch))
}
