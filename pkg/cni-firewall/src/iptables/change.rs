//! Applies planned changes, and plans again after a concurrent change by another program.

use super::edit::Edit;
use super::tool::{self, ProgramKind, Runner};
use super::{Chains, Iptables, LOCK_LIMIT, NetnsLock, Variant, fields, transaction};
use crate::nft::Batch;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

/// How often a change is planned at most.
const ATTEMPTS: usize = 8;

/// How additions to iptables-nft are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    /// Over netlink if [`transaction::additions`] can express them; else by `iptables-restore`.
    Netlink,
    /// By `iptables-restore`.
    Program,
}

/// The planned changes of one family.
struct PlannedEdit {
    family: Family,
    variant: Variant,
    edit: Edit,
    /// The edit as the input of `iptables-restore`. Edits with equal texts are the same edit.
    text: String,
}

/// An edit that could not be applied.
struct FailedEdit {
    text: String,
    writer: Writer,
    error: Error,
}

impl Iptables<'_> {
    /// Plans the edits of all `families`, then applies them in order. If an edit cannot be applied,
    /// usually because another process changed the table in between, the families that are not
    /// applied yet are planned again. Ends with success if `plan` returns `None`. Sets `changed` to
    /// the number of families, from the first, that may have been changed.
    ///
    /// # Errors
    /// - An error of `plan`, or of reading.
    /// - A deadline or SIGTERM, at once.
    /// - The error of an edit, after [`ATTEMPTS`] attempts. Also earlier, if the next attempt would
    ///   repeat the same edit and the error does not [report a concurrent
    ///   change](is_concurrent_change).
    pub(super) fn attempt_all(
        &mut self,
        families: &[(Family, Variant)],
        mut plan: impl FnMut(&mut Chains<'_>) -> Result<Option<Edit>>,
        changed: &mut usize,
    ) -> Result<()> {
        let _lock = self.lock()?;
        *changed = 0;
        let mut remaining = families;
        let mut last_failure: Option<FailedEdit> = None;
        for attempt in 0..ATTEMPTS {
            let mut planned = Vec::new();
            for (family, variant) in remaining {
                let Some(edit) = plan(&mut self.read(*family, *variant)?)? else { return Ok(()) };
                let text = edit.restore_text(self.table)?;
                planned.push(PlannedEdit { family: *family, variant: *variant, edit, text });
            }
            for PlannedEdit { family, variant, edit, text } in planned {
                let writer = self.choose_writer(family, variant, attempt);
                // The previous attempt failed at the first remaining family. Only that family
                // reaches this line with a failure, because `take` clears it.
                if let Some(failure) = last_failure.take() {
                    let is_repeated = failure.text == text && failure.writer == writer;
                    if is_repeated && !is_concurrent_change(&failure.error) {
                        return Err(failure.error);
                    }
                }
                let applied = if edit.is_empty() { Ok(()) } else { self.apply(family, variant, &edit, writer, &text) };
                // A legacy program that fails has changed nothing. With iptables-nft the additions
                // may have been made before the error.
                if !edit.is_empty() && (applied.is_ok() || variant == Variant::Nft) {
                    *changed = families.len() - remaining.len() + 1;
                }
                match applied {
                    Ok(()) => remaining = remaining.get(1..).unwrap_or_default(),
                    Err(error) if error.is_deadline() || error.is_terminated() => return Err(error),
                    Err(error) => {
                        last_failure = Some(FailedEdit { text, writer, error });
                        break;
                    }
                }
            }
            if remaining.is_empty() {
                return Ok(());
            }
        }
        // `last_failure` is `Some`: every attempt that leaves families stores its failure.
        Err(match last_failure {
            Some(failure) => failure.error,
            None => Error::new("failed to change iptables", Cause::text("other processes kept changing its rules")),
        })
    }

    /// Locks iptables of the network namespace. The first lock with a remark logs the remark.
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

    /// Returns the writer for an attempt, of which the first is 0. After a failed attempt the
    /// program writes the rules, if it is installed: it may know the form that this kernel accepts,
    /// or have the better error message.
    fn choose_writer(&self, family: Family, variant: Variant, attempt: usize) -> Writer {
        let has_program = || self.tool(family, variant, ProgramKind::Restore).is_ok();
        if variant == Variant::Nft && (attempt == 0 || !has_program()) { Writer::Netlink } else { Writer::Program }
    }

    /// Applies one edit. With iptables-legacy the restore program makes all changes, from `text`.
    /// With iptables-nft one transaction over netlink makes them; if the program has to write the
    /// additions, it does that first, and the transaction makes the other changes.
    fn apply(&mut self, family: Family, variant: Variant, edit: &Edit, writer: Writer, text: &str) -> Result<()> {
        if variant == Variant::Legacy {
            let program = self.tool(family, variant, ProgramKind::Restore)?;
            return tool::restore(self.runner, &program, text);
        }
        // `None`: the program has to write the additions.
        let additions = match (writer, &mut self.nft) {
            (Writer::Netlink, Some(nft)) => transaction::additions(nft, self.table, family, edit)?,
            _ => None,
        };
        let table = self.table.in_nf_tables(family);
        let mut batch = match additions {
            Some(batch) => batch,
            None => {
                if edit.has_additions() {
                    let program = self.tool(family, variant, ProgramKind::Restore)?;
                    tool::restore(self.runner, &program, &(edit.additions_text(self.table)? + "COMMIT\n"))?;
                }
                Batch::new()
            }
        };
        // Rules and chains of iptables-nft were read over netlink, so all have bytes and a handle.
        for (chain, rule) in &edit.put_back {
            if let Some(raw) = &rule.raw {
                let protocol = rule.value("-p").and_then(fields::protocol_number);
                batch.put_back(table, chain, raw, protocol);
            }
        }
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
        match &mut self.nft {
            Some(nft) => nft.commit(batch),
            None => Ok(()),
        }
    }
}

/// Whether the program failed because the table changed between the program's own reading and
/// writing. The kernel reports that to the program as EAGAIN; stderr has only the text of this
/// errno.
fn is_concurrent_change(error: &Error) -> bool {
    error.to_string().contains("Resource temporarily unavailable")
}
