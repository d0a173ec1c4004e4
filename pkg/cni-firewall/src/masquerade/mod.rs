//! Masquerading: packets from a container to addresses outside its network get the host's address
//! as their source.
//!
//! Plugins use [`Masquerade`], which writes the rules of one attachment ([`AttachmentId`]) to one
//! of two [`Backend`]s, in the form of the Go plugins. ADD chooses the backend; CHECK, DEL and GC
//! look at both, because the configuration and the host may have changed after ADD.
//!
//! All calls act in the network namespace of the calling thread, which must be the host's. Removing
//! rules needs neither the attachment's addresses nor the configuration, and no program except
//! those of iptables-legacy for rules there. An attachment without rules is not an error.

use std::cell::RefCell;
use std::fmt;
use std::net::IpAddr;

use cni::Cidr;
use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;

use super::iptables::{Cleaned, FAMILIES, Folders, Iptables, Reading, Table, Variant};
use super::nft::{Listed, Nft};
use crate::Backend;
use cni::AttachmentId;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

pub(super) mod iptables;
pub(super) mod nftables;

/// Masquerading in one network namespace.
///
/// Closing a netlink connection that has removed rules waits for an RCU grace period, so such
/// connections stay open until this value is dropped. Deleting a link also waits for a grace
/// period. If [`purge`](Masquerade::purge) is called before a link is deleted, and this value is
/// dropped afterwards, the two waits overlap.
pub struct Masquerade<'m> {
    machine: &'m dyn Machine,
    notes: Notes,
    folders: Folders,
    open_connections: RefCell<OpenConnections<'m>>,
}

/// The rules that an attachment had before an ADD, in each backend and family that the ADD has
/// read, so that a failed ADD undoes only its own changes ([`Masquerade::put_back`]). Filled in by
/// [`Masquerade::ensure`] before each change.
#[derive(Debug, Default)]
pub struct PreviousRules {
    /// `None` if the ADD has not read nf_tables.
    nftables: RefCell<Option<Vec<Listed>>>,
    /// One element for each family that the ADD has read.
    iptables: RefCell<Vec<(Family, Variant, iptables::PreviousAddresses)>>,
}

/// The connections that have removed rules.
#[derive(Default)]
struct OpenConnections<'m> {
    nft: Vec<Nft>,
    iptables: Vec<Iptables<'m>>,
}

impl fmt::Debug for Masquerade<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Masquerade").field("folders", &self.folders).finish_non_exhaustive()
    }
}

impl<'m> Masquerade<'m> {
    /// Returns a value that has not opened anything yet; `notes` receives remarks for the operator.
    pub fn new(machine: &'m dyn Machine, notes: Notes) -> Masquerade<'m> {
        Masquerade::with_folders(machine, notes, Folders::new(std::env::var_os("PATH")))
    }

    /// Does the same as [`new`](Masquerade::new), but with iptables' programs and lock in these
    /// folders.
    pub fn with_folders(machine: &'m dyn Machine, notes: Notes, folders: Folders) -> Masquerade<'m> {
        Masquerade { machine, notes, folders, open_connections: RefCell::default() }
    }

    /// Masquerades exactly `addresses`, each with its network's prefix length, for the attachment.
    /// The attachment's existing rules in the same backend are replaced and stored in `previous`;
    /// in iptables, only the rules for the families of `addresses`. Without a `backend`, uses
    /// iptables, or nftables if iptables is not installed or does not work.
    ///
    /// # Errors
    /// The rules cannot be read or written. Some may be in force then:
    /// [`put_back`](Masquerade::put_back) removes them.
    pub fn ensure(
        &self,
        attachment: &AttachmentId,
        backend: Option<Backend>,
        addresses: &[Cidr],
        previous: &PreviousRules,
    ) -> Result<()> {
        match backend {
            Some(Backend::Iptables) => {
                self.ensure_in_iptables(attachment, addresses, previous).map_err(|failure| failure.error)
            }
            Some(Backend::Nftables) => nftables::ensure(attachment, addresses, &previous.nftables),
            None => self.ensure_in_working_backend(attachment, addresses, previous),
        }
    }

    /// Does [`ensure`](Masquerade::ensure) without a given backend: uses iptables. If iptables is
    /// not installed, or if it fails and [`Iptables::probe`] fails too, uses nftables.
    fn ensure_in_working_backend(
        &self,
        attachment: &AttachmentId,
        addresses: &[Cidr],
        previous: &PreviousRules,
    ) -> Result<()> {
        let mut iptables = self.iptables(OnSigterm::Kill)?;
        for family in families(addresses) {
            // `None` means that iptables is not installed.
            if iptables.chosen_variant(family)?.is_none() {
                return nftables::ensure(attachment, addresses, &previous.nftables);
            }
        }
        let Err(failure) = self.ensure_in_iptables(attachment, addresses, previous) else { return Ok(()) };
        // Neither a timeout nor SIGTERM means that iptables does not work.
        if failure.error.is_deadline() || failure.error.is_terminated() {
            return Err(failure.error);
        }
        // iptables is probed only after a failure, because the probe starts a process.
        if iptables.probe(failure.family).is_ok() {
            return Err(failure.error);
        }
        self.notes.note(format_args!("nftables is used, because iptables does not work: {}", failure.error));
        // The addresses limit the removal: without them, Go's rules for another interface of the
        // container could be removed as well.
        self.purge_iptables(attachment, &addresses.iter().map(Cidr::address).collect::<Vec<_>>())?;
        nftables::ensure(attachment, addresses, &previous.nftables)
    }

    /// Does [`ensure`](Masquerade::ensure) in iptables, one family after the other, in the variant
    /// that the host uses for the family.
    fn ensure_in_iptables(
        &self,
        attachment: &AttachmentId,
        addresses: &[Cidr],
        previous: &PreviousRules,
    ) -> Result<(), Failure> {
        for family in families(addresses) {
            let addresses: Vec<Cidr> = of_family(addresses, family).collect();
            self.ensure_family_in_iptables(attachment, family, &addresses, previous)
                .map_err(|error| Failure { family, error })?;
        }
        Ok(())
    }

    /// Writes the rules for `addresses`, all of `family`, to iptables. The existing rules in this
    /// family are replaced, and stored in `previous`.
    fn ensure_family_in_iptables(
        &self,
        attachment: &AttachmentId,
        family: Family,
        addresses: &[Cidr],
        previous: &PreviousRules,
    ) -> Result<()> {
        let mut iptables = self.iptables(OnSigterm::Kill)?;
        let Some(variant) = iptables.variant_for_new_rules(family)? else {
            // There is neither a program nor a usable kernel. The probe fails with the reason.
            return iptables.probe(family);
        };
        iptables.change(family, variant, |nat| {
            let mut stored = previous.iptables.borrow_mut();
            // After a conflict with another process this closure runs again: only its first run
            // stores the addresses.
            if !stored.iter().any(|(stored_family, ..)| *stored_family == family) {
                stored.push((family, variant, iptables::PreviousAddresses::read(nat, attachment, addresses)?));
            }
            iptables::ensure(nat, attachment, addresses)
        })
    }

    /// Undoes an [`ensure`](Masquerade::ensure) of these addresses, even one that failed: removes
    /// the rules that `ensure` wrote and restores those that it replaced. Does not change a backend
    /// or family that `ensure` has not read.
    ///
    /// # Errors
    /// A backend or family cannot be changed. The others are still changed, and all failures are
    /// joined.
    pub fn put_back(&self, attachment: &AttachmentId, addresses: &[Cidr], previous: &PreviousRules) -> Result<()> {
        let mut results = Vec::new();
        if let Some(rules) = previous.nftables.take() {
            results.push(self.in_nftables(|nft| nftables::put_back(nft, attachment, &rules)));
        }
        for (family, variant, previous_addresses) in previous.iptables.take() {
            let addresses: Vec<Cidr> = of_family(addresses, family).collect();
            results.push(self.iptables(OnSigterm::Finish).and_then(|mut iptables| {
                iptables.change(family, variant, |nat| previous_addresses.put_back(nat, attachment, &addresses))
            }));
        }
        Error::join(results.into_iter().filter_map(Result::err))
    }

    /// Removes the attachment's rules from both backends. `addresses` are those of the ADD's
    /// result, empty if unknown. In iptables, rules of a Go plugin do not name the interface, so
    /// only those for `addresses` are removed. Without `addresses`, all Go rules of the container
    /// are removed, unless the attachment has rules of these plugins.
    ///
    /// # Errors
    /// A backend, family or variant cannot be changed. The others are still changed, and all
    /// failures are joined. Missing programs of iptables-legacy are not an error but a note.
    pub fn purge(&self, attachment: &AttachmentId, addresses: &[IpAddr]) -> Result<()> {
        let results =
            [self.in_nftables(|nft| nftables::purge(nft, attachment)), self.purge_iptables(attachment, addresses)];
        Error::join(results.into_iter().filter_map(Result::err))
    }

    /// Removes the attachment's rules from all families and variants of iptables.
    fn purge_iptables(&self, attachment: &AttachmentId, addresses: &[IpAddr]) -> Result<()> {
        let chain = iptables::chain_name(&attachment.network, &attachment.container_id);
        self.clean(&[&chain], Reading::UnderLock, |nat| iptables::purge(nat, attachment, addresses))
    }

    /// Runs `change`, which removes or restores rules, on a connection to nf_tables that stays open
    /// until this value is dropped. Does nothing on a kernel without nf_tables, which has no rules.
    fn in_nftables(&self, change: impl FnOnce(&mut Nft) -> Result<()>) -> Result<()> {
        let result = Nft::open().and_then(|mut nft| {
            let result = change(&mut nft);
            self.open_connections.borrow_mut().nft.push(nft);
            result
        });
        match result {
            Err(error) if error.is_unsupported() => Ok(()),
            result => result,
        }
    }

    /// Removes the rules of `network` that do not belong to an attachment in `valid` (container ID,
    /// interface name), from both backends.
    ///
    /// # Errors
    /// As [`purge`](Masquerade::purge).
    pub fn gc(&self, network: &str, valid: &[(&str, &str)]) -> Result<()> {
        let results = [
            self.in_nftables(|nft| nftables::gc(nft, network, valid)),
            // All masquerading rules are reached from this chain.
            self.clean(&[iptables::POSTROUTING], Reading::BeforeLock, |nat| iptables::gc(nat, network, valid)),
        ];
        Error::join(results.into_iter().filter_map(Result::err))
    }

    /// Calls `plan` for each family and variant of iptables that may have one of `chains`, and
    /// makes the removals that it returns. A failure in one does not stop the others; all failures
    /// are joined. A variant whose programs are missing is not an error but a note.
    fn clean(
        &self,
        chains: &[&str],
        reading: Reading,
        plan: impl FnMut(&mut super::iptables::Chains<'_>) -> Result<super::iptables::Edit>,
    ) -> Result<()> {
        let mut iptables = self.iptables(OnSigterm::Finish)?;
        let Cleaned { unreached, outcome } = iptables.clean(chains, reading, plan);
        for (family, variant) in unreached {
            self.notes.note(format_args!(
                "masquerade rules may be left in table nat of iptables-{variant} for {family}: its programs, which \
                 could read the table, are not installed"
            ));
        }
        self.open_connections.borrow_mut().iptables.push(iptables);
        outcome
    }

    /// Returns a sentence for each missing rule of the attachment's addresses; empty if all are
    /// masqueraded. Accepts Go's rules, in either backend.
    ///
    /// # Errors
    /// The rules of a backend, family or variant cannot be read.
    pub fn check(&self, attachment: &AttachmentId, addresses: &[Cidr]) -> Result<Vec<String>> {
        let mut missing = Vec::new();
        for family in families(addresses) {
            let addresses: Vec<Cidr> = of_family(addresses, family).collect();
            let mut missing_in_family = nftables::check(attachment, &addresses)?;
            if missing_in_family.is_empty() {
                continue;
            }
            let mut iptables = self.iptables(OnSigterm::Kill)?;
            let chain = iptables::chain_name(&attachment.network, &attachment.container_id);
            for variant in iptables.variants_to_search(family, &[&chain])? {
                let mut nat = iptables.read(family, variant)?;
                let missing_in_variant = iptables::check(&mut nat, attachment, &addresses)?;
                // The ADD used the variant that has the container's chain, so the missing rules of
                // that variant are reported, not those of nftables.
                if nat.has_chain(&chain)? {
                    missing_in_family = missing_in_variant;
                }
                if missing_in_family.is_empty() {
                    break;
                }
            }
            missing.extend(missing_in_family);
        }
        Ok(missing)
    }

    /// Checks that [`ensure`](Masquerade::ensure) can work here. Assumes that an installed iptables
    /// works, because a trial would start a process. Starts only `iptables-restore --version`, and
    /// only if the name of the program's file does not contain the variant.
    ///
    /// # Errors
    /// The reason why `ensure` cannot work.
    pub fn probe(&self, backend: Option<Backend>) -> Result<()> {
        let mut iptables = self.iptables(OnSigterm::Kill)?;
        let mut is_installed = false;
        for family in FAMILIES {
            is_installed |= iptables.chosen_variant(family)?.is_some();
        }
        match backend {
            Some(Backend::Nftables) => nftables::probe(),
            Some(Backend::Iptables) | None if is_installed => Ok(()),
            // Without iptables, `ensure` uses nftables.
            None => nftables::probe(),
            // The rules can be written over netlink.
            Some(Backend::Iptables) if iptables.variant_for_new_rules(Family::V4)?.is_some() => Ok(()),
            Some(Backend::Iptables) => Err(Error::new(
                "failed to find iptables-restore",
                Cause::text("it is neither in PATH nor in /usr/sbin"),
            )),
        }
    }

    /// Opens iptables' table nat.
    fn iptables(&self, on_sigterm: OnSigterm) -> Result<Iptables<'m>> {
        Iptables::open_with(Table::Nat, self.machine, self.notes.clone(), on_sigterm, self.folders.clone())
    }
}

/// An error and the family that it occurred in.
struct Failure {
    family: Family,
    error: Error,
}

/// Returns the families of `addresses`, each once, IPv4 first.
fn families(addresses: &[Cidr]) -> impl Iterator<Item = Family> {
    FAMILIES.into_iter().filter(|family| of_family(addresses, *family).next().is_some())
}

/// Returns the addresses of `family`.
fn of_family(addresses: &[Cidr], family: Family) -> impl Iterator<Item = Cidr> {
    addresses.iter().copied().filter(move |cidr| Family::of(cidr.address()) == family)
}

#[cfg(test)]
mod tests;
