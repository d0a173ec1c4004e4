//! Makes the changes that a feature plans: in nf_tables with [`change`], in a table of iptables with
//! [`Store`].
//!
//! A feature reads rules and plans changes. It is called again if another process has changed the
//! rules in between, so a plan must depend only on what it reads.

use std::fmt;

use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

use crate::iptables::{Chains, Cleaned, Edit, Folders, Iptables, Reading, Table};
use crate::nft::{Batch, Nft};
use crate::retry;

/// Makes the changes that `plan` adds to a batch of nf_tables, in one transaction. Returns whether
/// there were any.
///
/// # Errors
/// `plan` fails, or the kernel refuses the changes.
pub(crate) fn change(nft: &mut Nft, mut plan: impl FnMut(&mut Nft, &mut Batch) -> Result<()>) -> Result<bool> {
    retry(|| {
        let mut batch = Batch::new();
        // If another process changes the ruleset before the commit, `retry` plans again.
        batch.only_at(nft.wait_for_generation()?);
        plan(nft, &mut batch)?;
        let has_changes = !batch.is_empty();
        nft.commit(batch)?;
        Ok(has_changes)
    })
}

/// The table of iptables that holds the rules of one feature, in one network namespace.
pub(crate) struct Store<'m> {
    pub(crate) machine: &'m dyn Machine,
    /// Receives remarks for the operator.
    pub(crate) notes: Notes,
    pub(crate) folders: Folders,
    pub(crate) table: Table,
    /// What a remark calls the rules.
    pub(crate) rules: &'static str,
}

impl fmt::Debug for Store<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("table", &self.table).field("folders", &self.folders).finish_non_exhaustive()
    }
}

impl<'m> Store<'m> {
    /// Opens the table.
    pub(crate) fn open(&self, on_sigterm: OnSigterm) -> Result<Iptables<'m>> {
        Iptables::open_with(self.table, self.machine, self.notes.clone(), on_sigterm, self.folders.clone())
    }

    /// Makes the changes that `plan` returns for each family, in the variant that the host uses for
    /// the family. Sets `changed` to true if rules may have been changed, even on an error.
    ///
    /// # Errors
    /// Rules of a family cannot be written at all, and nothing is changed; or as
    /// [`Iptables::change_all`].
    pub(crate) fn ensure(
        &self,
        families: impl IntoIterator<Item = Family>,
        mut plan: impl FnMut(&mut Chains<'_>) -> Result<Edit>,
        changed: &mut bool,
    ) -> Result<()> {
        let mut iptables = self.open(OnSigterm::Kill)?;
        let mut families_with_variant = Vec::new();
        for family in families {
            let Some(variant) = iptables.variant_for_new_rules(family)? else {
                // There is neither a program nor a usable kernel. The probe fails with the reason.
                return iptables.probe(family);
            };
            families_with_variant.push((family, variant));
        }
        if families_with_variant.is_empty() {
            return Ok(());
        }
        iptables.change_all(&families_with_variant, |chains| plan(chains).map(Some), changed)
    }

    /// Makes the removals that `plan` returns, in each family and variant that may have one of
    /// `chains`. A failure in one does not stop the others; all failures are joined. A variant
    /// whose programs are missing is not an error but a note.
    pub(crate) fn clean(
        &self,
        iptables: &mut Iptables<'_>,
        chains: &[&str],
        reading: Reading,
        plan: impl FnMut(&mut Chains<'_>) -> Result<Edit>,
    ) -> Result<()> {
        let Cleaned { unreached, outcome } = iptables.clean(chains, reading, plan);
        for (family, variant) in unreached {
            self.notes.note(format_args!(
                "{} may be left in table {} of iptables-{variant} for {family}: its programs, which could read the \
                 table, are not installed",
                self.rules,
                self.table.name()
            ));
        }
        outcome
    }
}

/// Checks that rules can be written: by a program, or over netlink. Starts no process, except an
/// iptables program that has to report its variant.
///
/// # Errors
/// The reason why rules cannot be written.
pub(crate) fn probe(iptables: &mut Iptables<'_>) -> Result<()> {
    match iptables.variant_for_new_rules(Family::V4)? {
        Some(_) => Ok(()),
        None => {
            let cause = Cause::text("it is neither in PATH nor in /usr/sbin");
            Err(Error::new("failed to find iptables-restore", cause))
        }
    }
}
