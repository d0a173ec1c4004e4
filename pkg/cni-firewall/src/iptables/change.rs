//! Applies planned changes, and plans again after a concurrent change by another program.

use super::edit::Edit;
use super::tool::{self, ProgramKind, Runner};
use super::{Chains, Iptables, LOCK_LIMIT, NetnsLock, Variant, fields, transaction};
use crate::nft::Batch;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

/// How often a change is planned before it fails.
const ATTEMPTS: usize = 8;

/// How additions to iptables-nft are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    /// Over netlink, as far as the rules' words are known here; else by the program.
    Netlink,
    /// By `iptables-restore`.
    Program,
}

/// The planned changes of one family.
struct PlannedEdit {
    family: Family,
    variant: Variant,
    edit: Edit,
    /// The edit for `iptables-restore`, also used to recognize the same edit in the next attempt.
    text: String,
}

/// An edit that could not be applied.
struct FailedEdit {
    text: String,
    writer: Writer,
    error: Error,
}

impl Iptables<'_> {
    /// Plans the changes of all `families`, then applies them one after the other. An error usually
    /// means that another process changed the table in between, so the families that are not
    /// applied yet are planned again, up to [`ATTEMPTS`] times. If the same edit would be applied
    /// in the same way again, the cause is another, and the error is returned. Also ends, with
    /// success, if `plan` returns `None`. Sets `changed` to the number of families, from the first,
    /// that may have been changed.
    pub(super) fn attempt_all(
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
                // If the kernel refused the rules, the program writes them next: it may know how
                // this kernel wants them, and else has the better message.
                let has_program = || self.tool(family, variant, ProgramKind::Restore).is_ok();
                let writer = if variant == Variant::Nft && (attempt == 0 || !has_program()) {
                    Writer::Netlink
                } else {
                    Writer::Program
                };
                // The failure of the previous attempt was that of this family, the first remaining
                // one.
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
        Err(match last_failure {
            Some(failure) => failure.error,
            None => Error::new("failed to change iptables", Cause::text("other processes kept changing its rules")),
        })
    }

    /// Applies one edit. With iptables-legacy the program makes all of it, from `text`. With
    /// iptables-nft all is one transaction over netlink; where the program has to write the
    /// additions, it does so first.
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
        for (chain, rule) in &edit.put_back {
            if let Some(raw) = &rule.raw {
                let protocol = rule.value("-p").and_then(fields::protocol_number);
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
}

/// Whether the program found that the table had changed between its own reading and writing. The
/// kernel reports that as EAGAIN, of which only the text reaches us.
fn is_concurrent_change(error: &Error) -> bool {
    error.to_string().contains("Resource temporarily unavailable")
}
