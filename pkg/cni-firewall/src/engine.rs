//! Makes the changes that a feature plans in nf_tables or in a table of iptables.
//!
//! A feature reads rules and plans changes. It is called again if another process has changed the
//! rules in between, so a plan must depend only on what it reads.

use std::cell::RefCell;

use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

use crate::Backend;
use crate::iptables::{Chains, Edit, FAMILIES, Folders, Iptables, Table, Variant};
use crate::nft::{self, BaseChain, Batch, Hook, Kind, Nft, raced};
use crate::owner::AttachmentFilter;

/// Whether the kernel has nf_tables with NAT, which masquerading and port mappings need.
///
/// Makes the kernel check the creation of a NAT chain without creating it ([`Nft::rehearse`]),
/// which takes about 10 ms.
///
/// # Errors
/// The kernel refuses the check although it has nf_tables with NAT, for example because a privilege
/// is missing.
pub fn nft_usable() -> Result<bool> {
    let table = nft::Table { family: nft::Family::Inet, name: "cni_probe" };
    let mut batch = Batch::new();
    batch.ensure_table(table, None);
    let nat = BaseChain { kind: Kind::Nat, hook: Hook::Postrouting, priority: 100 };
    batch.ensure_base_chain(table, "probe", nat);
    match Nft::open().and_then(|mut nft| nft.rehearse(batch)) {
        Ok(()) => Ok(true),
        Err(error) if error.is_unsupported() => Ok(false),
        Err(error) => Err(error),
    }
}

/// The maximum number of tries of a [`change`]. Of n processes that change rules at once, each
/// fails at most n - 1 times, and a failed try costs little.
const TRIES_MAX: usize = 1024;

/// Makes the changes that `plan` adds to an empty batch of nf_tables, in one transaction. If
/// another process has changed any rule of the namespace since the call of `plan`, the kernel
/// refuses the transaction, and `plan` is called again. So `plan` can add changes that depend on
/// all that it has read, and reads each list only once ([`Nft::wait_for_generation`]).
///
/// `plan` is also called again if an index that it used lacked rules of another program. The kernel
/// has made the changes then, so the second call can find nothing to do.
///
/// # Errors
/// `plan` fails, or the kernel refuses the changes.
pub(crate) fn change(nft: &mut Nft, mut plan: impl FnMut(&mut Nft, &mut Batch) -> Result<()>) -> Result<()> {
    for _ in 0..TRIES_MAX {
        let mut batch = Batch::new();
        batch.only_at(nft.wait_for_generation()?);
        plan(nft, &mut batch)?;
        match nft.commit(batch) {
            Err(error) if raced(&error) => {}
            // Any other error is final: the kernel checks for changed rules first.
            result => return result,
        }
    }
    let cause = Cause::text(format!("other processes changed the rules during each of {TRIES_MAX} attempts"));
    Err(Error::new("failed to change nftables", cause))
}

/// The maximum number of tries of a change that fails with [`is_conflict`].
const CONFLICTS_MAX: usize = 32;

/// Whether a change may have failed because another process has created or deleted an object that
/// the change names, or has appended rules that the index of a chain lacks.
fn is_conflict(error: &Error) -> bool {
    error.is_not_found() || error.is_exists() || raced(error)
}

/// Does [`change`] for a plan that names all objects on which it depends: it deletes by handle, and
/// creates with [`Batch::create_chain`]. So other changes of the ruleset do not make it fail.
///
/// If an object that is to be removed is in use, removes each object in a transaction of its own,
/// and makes the rest of the plan if all could be removed. Before Linux 5.0, a chain counts as in
/// use even if the same transaction removes the jump to it. On later kernels, a rule of another
/// program jumps to the chain. `plan` is called again before each of these steps.
///
/// # Errors
/// As [`change`]; the first object that is still in use.
pub(crate) fn change_by_handle(nft: &mut Nft, mut plan: impl FnMut(&mut Nft, &mut Batch) -> Result<()>) -> Result<()> {
    let mut plan_batch = |nft: &mut Nft| {
        let mut batch = Batch::new();
        plan(nft, &mut batch)?;
        Ok(batch)
    };
    retry_conflicts(nft, |nft| {
        let batch = plan_batch(nft)?;
        match nft.commit(batch) {
            Err(error) if error.errno() == Some(libc::EBUSY) => {}
            result => return result,
        }
        let removals = plan_batch(nft)?.into_removals();
        // Not stopped by the first failure, so that as much as possible is removed.
        let results: Vec<Result<()>> = removals.map(|removal| nft.commit(removal)).collect();
        // A conflict does not matter: the next plan starts from what another process has left.
        if let Some(error) = results.into_iter().filter_map(Result::err).find(|error| !is_conflict(error)) {
            return Err(error);
        }
        let rest = plan_batch(nft)?;
        nft.commit(rest)
    })
}

/// Calls `change`, which reads rules and changes them. If it fails with [`is_conflict`], calls it
/// again, at most [`CONFLICTS_MAX`] times in all. An error that persists although no process has
/// changed a rule since the last try has another cause, and is final.
pub(crate) fn retry_conflicts(nft: &mut Nft, mut change: impl FnMut(&mut Nft) -> Result<()>) -> Result<()> {
    let mut generation_after_last = None;
    for _ in 1..CONFLICTS_MAX {
        let error = match change(nft) {
            Err(error) if is_conflict(&error) => error,
            result => return result,
        };
        let generation = Some(nft.generation()?);
        if generation == generation_after_last {
            return Err(error);
        }
        generation_after_last = generation;
    }
    // The last try: any error is final.
    change(nft)
}

/// The rules of one feature in one network namespace: in nf_tables and in a table of iptables.
pub(crate) struct Store<'m> {
    pub(crate) machine: &'m dyn Machine,
    /// Receives remarks for the operator.
    pub(crate) notes: Notes,
    pub(crate) folders: Folders,
    table: Table,
    /// What a remark calls the rules.
    rules: &'static str,
    /// The connections that have removed rules. Closing one waits for an RCU grace period.
    open_nft: RefCell<Vec<Nft>>,
    open_iptables: RefCell<Vec<Iptables<'m>>>,
}

impl<'m> Store<'m> {
    /// Returns a store that has not opened anything yet.
    pub(crate) fn new(machine: &'m dyn Machine, notes: Notes, table: Table, rules: &'static str) -> Store<'m> {
        let (open_nft, open_iptables) = Default::default();
        Store { machine, notes, folders: Folders::new(std::env::var_os("PATH")), table, rules, open_nft, open_iptables }
    }

    /// Opens the table of iptables. `on_sigterm` is as in [`Iptables::open`].
    pub(crate) fn open(&self, on_sigterm: OnSigterm) -> Result<Iptables<'m>> {
        Iptables::open_with(self.table, self.machine, self.notes.clone(), on_sigterm, self.folders.clone())
    }

    /// Returns the backend for new rules if the configuration names none: iptables, or nftables if
    /// the programs of iptables are not installed for one of the families. Whether the programs
    /// work is not checked.
    ///
    /// # Errors
    /// If the variant of an installed program cannot be found out.
    pub(crate) fn default_backend(&self, families: impl IntoIterator<Item = Family>) -> Result<Backend> {
        let iptables = self.open(OnSigterm::Kill)?;
        for family in families {
            if iptables.chosen_variant(family)?.is_none() {
                return Ok(Backend::Nftables);
            }
        }
        Ok(Backend::Iptables)
    }

    /// Whether iptables, which has failed with `error`, does not work on this host for one of the
    /// families, and nftables works. Runs the programs of iptables.
    pub(crate) fn only_nftables_works(&self, error: &Error, families: impl IntoIterator<Item = Family>) -> bool {
        // These errors do not show that iptables does not work.
        if error.is_deadline() || error.is_terminated() || error.is_held() {
            return false;
        }
        let Ok(mut iptables) = self.open(OnSigterm::Kill) else { return false };
        let iptables_works = families.into_iter().all(|family| iptables.probe(family).is_ok());
        !iptables_works && matches!(nft_usable(), Ok(true))
    }

    /// Makes the changes that `plan` adds to a batch of nf_tables. Sets `changed` to true if rules
    /// may have been changed, even on an error.
    pub(crate) fn ensure_in_nftables(
        &self,
        mut plan: impl FnMut(&mut Nft, &mut Batch) -> Result<()>,
        changed: &mut bool,
    ) -> Result<()> {
        change(&mut Nft::open()?, |nft, batch| {
            plan(nft, batch)?;
            // After an error, the kernel may have made the changes: its answer can be lost.
            *changed |= !batch.is_empty();
            Ok(())
        })
    }

    /// Makes the changes that `plan` returns for iptables, for each family in the variant that the
    /// host uses for it. Sets `changed` to true if rules may have been changed, even on an error.
    ///
    /// # Errors
    /// Rules of a family cannot be written at all, and nothing is changed; or as
    /// [`Iptables::change_all`].
    pub(crate) fn ensure_in_iptables(
        &self,
        families: impl IntoIterator<Item = Family>,
        plan: impl FnMut(&mut Chains<'_>) -> Result<Edit>,
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
        // Nothing to change, so the lock is not taken.
        if families_with_variant.is_empty() {
            return Ok(());
        }
        iptables.change_all(&families_with_variant, plan, changed)
    }

    /// Makes the removals that `plan` adds to a batch of nf_tables.
    pub(crate) fn purge_in_nftables(&self, plan: impl FnMut(&mut Nft, &mut Batch) -> Result<()>) -> Result<()> {
        let mut nft = Nft::open()?;
        let result = change(&mut nft, plan);
        self.open_nft.borrow_mut().push(nft);
        result
    }

    /// Makes the removals that `plan` returns, for the attachments that `filter` selects, in each
    /// family and variant of iptables that may have one of `chains`. A failure in one does not stop
    /// the others; all failures are joined. A variant whose programs are missing is not an error
    /// but a note.
    pub(crate) fn purge_in_iptables(
        &self,
        filter: AttachmentFilter<'_>,
        chains: &[&str],
        mut plan: impl FnMut(&mut Chains<'_>) -> Result<Edit>,
    ) -> Result<()> {
        let mut iptables = self.open(OnSigterm::Finish)?;
        let mut errors = Vec::new();
        for family in FAMILIES {
            let found = iptables.variants_to_search(family, chains);
            // If iptables-nft cannot be read, iptables-legacy may have rules, which its own
            // programs can read.
            let variants = found.as_deref().unwrap_or(&[Variant::Legacy]).to_vec();
            errors.extend(found.err());
            for variant in variants {
                errors.extend(self.purge_in_variant(&mut iptables, (family, variant), filter, &mut plan).err());
            }
        }
        self.open_iptables.borrow_mut().push(iptables);
        Error::join(errors)
    }

    /// Does [`purge_in_iptables`](Store::purge_in_iptables) in one family and variant.
    fn purge_in_variant(
        &self,
        iptables: &mut Iptables<'_>,
        (family, variant): (Family, Variant),
        filter: AttachmentFilter<'_>,
        plan: impl FnMut(&mut Chains<'_>) -> Result<Edit>,
    ) -> Result<()> {
        if !iptables.can_remove(family, variant)? {
            self.notes.note(format_args!(
                "{} may be left in table {} of iptables-{variant} for {family}: its programs, which could read the \
                 table, are not installed",
                self.rules,
                self.table.name()
            ));
            return Ok(());
        }
        // GC reads the chains of all attachments: in iptables-nft without the lock, so that no
        // other process waits. In iptables-legacy every call reads the whole table, not only GC.
        if variant == Variant::Nft && matches!(filter, AttachmentFilter::Garbage { .. }) {
            iptables.remove_from_nft(family, plan)
        } else {
            iptables.change(family, variant, plan)
        }
    }
}
