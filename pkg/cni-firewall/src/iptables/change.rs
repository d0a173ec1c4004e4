//! Plans and applies changes, and does both again if another program changed the table in between.

use super::edit::Edit;
use super::tool::{self, ProgramKind, Runner};
use super::{Chains, Iptables, LOCK_LIMIT, NetnsLock, Variant, transaction};
use crate::nft::Batch;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

/// How many times a change is planned at most.
const ATTEMPTS: usize = 8;

/// How the additions of an edit are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    /// Over netlink if [`transaction::additions`] can express them, else by `iptables-restore`.
    /// Only for iptables-nft.
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

impl FailedEdit {
    /// Whether applying the edit with this text by this `writer` would only repeat the failed
    /// attempt.
    fn would_be_repeated(&self, text: &str, writer: Writer) -> bool {
        self.text == text && self.writer == writer && !is_concurrent_change(&self.error)
    }
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
    /// - Applying an edit reaches a deadline.
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
        // How many families are finished, counted from the first.
        let mut finished_count = 0;
        // The failure of the first family that is not finished.
        let mut last_failure: Option<FailedEdit> = None;
        for attempt in 0..ATTEMPTS {
            for PlannedEdit { family, variant, edit, text } in
                self.plan_edits(&families[finished_count..], &mut plan)?
            {
                let writer = self.choose_writer(family, variant, attempt);
                // The failed family is the first of this attempt. `take` clears the failure, so
                // that the families after it are not compared with it.
                if let Some(failure) = last_failure.take()
                    && failure.would_be_repeated(&text, writer)
                {
                    return Err(failure.error);
                }
                if edit.is_empty() {
                    finished_count += 1;
                    continue;
                }
                let result = self.apply(family, variant, &edit, writer, &text);
                // A legacy program that fails has changed nothing. With iptables-nft the additions
                // may have been made before the error.
                *changed |= result.is_ok() || variant == Variant::Nft;
                match result {
                    Ok(()) => finished_count += 1,
                    Err(error) if error.is_deadline() || error.is_terminated() => return Err(error),
                    Err(error) => {
                        last_failure = Some(FailedEdit { text, writer, error });
                        break;
                    }
                }
            }
            if finished_count == families.len() {
                return Ok(());
            }
        }
        Err(match last_failure {
            Some(failure) => failure.error,
            // Never reached: an attempt after which families remain has stored its failure.
            None => Error::new("failed to change iptables", Cause::text("other processes kept changing its rules")),
        })
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
        let lock = self.lock()?;
        if self.nft.generation()? == generation
            && self.apply(family, Variant::Nft, &edit, Writer::Netlink, &text).is_ok()
        {
            return Ok(());
        }
        drop(lock);
        self.change(family, Variant::Nft, plan)
    }

    /// Calls `plan` with the table of each family.
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
        let Runner { machine, on_sigterm } = self.runner;
        let lock = NetnsLock::acquire(machine, on_sigterm, self.folders.lock_folder(), LOCK_LIMIT)?;
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
    fn choose_writer(&self, family: Family, variant: Variant, attempt: usize) -> Writer {
        if variant == Variant::Legacy {
            return Writer::Program;
        }
        let is_installed = || self.tool(family, variant, ProgramKind::Restore).is_ok();
        if attempt > 0 && is_installed() { Writer::Program } else { Writer::Netlink }
    }

    /// Applies one edit. With iptables-legacy the restore program makes all changes, from `text`.
    /// With iptables-nft one transaction over netlink makes them; if the program has to write the
    /// additions, it does that first, and the transaction makes the other changes.
    fn apply(&mut self, family: Family, variant: Variant, edit: &Edit, writer: Writer, text: &str) -> Result<()> {
        if variant == Variant::Legacy {
            let program = self.tool(family, variant, ProgramKind::Restore)?;
            return tool::restore(self.runner, &program, text);
        }
        let mut batch = self.batch_with_additions(family, edit, writer)?;
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

    /// Returns a transaction of iptables-nft with the additions of the edit. If the program has to
    /// write the additions, runs the program and returns an empty transaction.
    fn batch_with_additions(&mut self, family: Family, edit: &Edit, writer: Writer) -> Result<Batch> {
        if writer == Writer::Netlink
            && let Some(batch) = transaction::additions(&mut self.nft, self.table, family, edit)?
        {
            return Ok(batch);
        }
        if edit.has_additions() {
            let program = self.tool(family, Variant::Nft, ProgramKind::Restore)?;
            tool::restore(self.runner, &program, &edit.additions_text(self.table)?)?;
        }
        Ok(Batch::new())
    }
}

/// Whether the program failed because the table changed between the program's own reading and
/// writing. The kernel returns EAGAIN to the program, whose stderr has only the text of the errno.
fn is_concurrent_change(error: &Error) -> bool {
    error.to_string().contains("Resource temporarily unavailable")
}
