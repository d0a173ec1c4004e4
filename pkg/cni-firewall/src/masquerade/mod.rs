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

use super::iptables::{Cleaned, FAMILIES, Folders, Iptables, Reading, Table};
use super::nft::Nft;
use crate::Backend;
use cni::AttachmentId;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

use iptables::Untagged;

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
    /// The attachment's other rules in the same backend are removed; in iptables, only those for
    /// the families of `addresses`. Without a `backend`, uses iptables, or nftables if iptables is
    /// not installed or does not work. Returns the backend in which rules were changed; `None` if
    /// all were in place.
    ///
    /// # Errors
    /// The rules cannot be read or written. Some may be in force then: [`undo`](Masquerade::undo)
    /// removes them.
    pub fn ensure(
        &self,
        attachment: &AttachmentId,
        backend: Option<Backend>,
        addresses: &[Cidr],
    ) -> Result<Option<Backend>> {
        match backend {
            Some(Backend::Iptables) => {
                let has_changed = self.ensure_in_iptables(attachment, addresses).map_err(|failure| failure.error)?;
                Ok(has_changed.then_some(Backend::Iptables))
            }
            Some(Backend::Nftables) => Masquerade::ensure_in_nftables(attachment, addresses),
            None => self.ensure_in_working_backend(attachment, addresses),
        }
    }

    /// Does [`ensure`](Masquerade::ensure) without a given backend: uses iptables. If iptables is
    /// not installed, or if it fails and [`Iptables::probe`] fails too, uses nftables.
    fn ensure_in_working_backend(&self, attachment: &AttachmentId, addresses: &[Cidr]) -> Result<Option<Backend>> {
        let mut iptables = self.iptables(OnSigterm::Kill)?;
        for family in families(addresses) {
            // `None` means that iptables is not installed.
            if iptables.chosen_variant(family)?.is_none() {
                return Masquerade::ensure_in_nftables(attachment, addresses);
            }
        }
        let failure = match self.ensure_in_iptables(attachment, addresses) {
            Ok(has_changed) => return Ok(has_changed.then_some(Backend::Iptables)),
            Err(failure) => failure,
        };
        // Neither a timeout nor SIGTERM means that iptables does not work.
        if failure.error.is_deadline() || failure.error.is_terminated() {
            return Err(failure.error);
        }
        // iptables is probed only after a failure, because the probe starts a process.
        if iptables.probe(failure.family).is_ok() {
            return Err(failure.error);
        }
        self.notes.note(format_args!("nftables is used, because iptables does not work: {}", failure.error));
        // Only what this call may have written: Go's rules can be those of another interface.
        self.purge_iptables(attachment, Untagged::Keep)?;
        Masquerade::ensure_in_nftables(attachment, addresses)
    }

    /// Does [`ensure`](Masquerade::ensure) in nf_tables.
    fn ensure_in_nftables(attachment: &AttachmentId, addresses: &[Cidr]) -> Result<Option<Backend>> {
        Ok(nftables::ensure(attachment, addresses)?.then_some(Backend::Nftables))
    }

    /// Does [`ensure`](Masquerade::ensure) in iptables, one family after the other, in the variant
    /// that the host uses for the family.
    fn ensure_in_iptables(&self, attachment: &AttachmentId, addresses: &[Cidr]) -> Result<bool, Failure> {
        let mut has_changed = false;
        for family in families(addresses) {
            let addresses: Vec<Cidr> = of_family(addresses, family).collect();
            has_changed |= self
                .ensure_family_in_iptables(attachment, family, &addresses)
                .map_err(|error| Failure { family, error })?;
        }
        Ok(has_changed)
    }

    /// Writes the rules for `addresses`, all of `family`, to iptables. Returns whether rules were
    /// changed.
    fn ensure_family_in_iptables(&self, attachment: &AttachmentId, family: Family, addresses: &[Cidr]) -> Result<bool> {
        let mut iptables = self.iptables(OnSigterm::Kill)?;
        let Some(variant) = iptables.variant_for_new_rules(family)? else {
            // There is neither a program nor a usable kernel. The probe fails with the reason.
            return iptables.probe(family).map(|()| false);
        };
        let mut has_changed = false;
        iptables.change(family, variant, |nat| {
            let edit = iptables::ensure(nat, attachment, addresses)?;
            // `|=`: after a conflict with another process this closure runs again, possibly after
            // a part of the first edit was made.
            has_changed |= !edit.is_empty();
            Ok(edit)
        })?;
        Ok(has_changed)
    }

    /// Undoes an [`ensure`](Masquerade::ensure) that changed rules in `backend`, or that failed
    /// there; in both backends if none is given. Removes the attachment's rules. In iptables, Go's
    /// rules stay unless they are for an address that `ensure` has masqueraded. Rules that `ensure`
    /// replaced stay lost.
    ///
    /// # Errors
    /// As [`purge`](Masquerade::purge).
    pub fn undo(&self, attachment: &AttachmentId, backend: Option<Backend>) -> Result<()> {
        match backend {
            Some(Backend::Iptables) => self.purge_iptables(attachment, Untagged::Keep),
            Some(Backend::Nftables) => self.in_nftables(|nft| nftables::purge(nft, attachment)),
            None => self.remove_attachment(attachment, Untagged::Keep),
        }
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
        let untagged = if addresses.is_empty() { Untagged::UnlessTagged } else { Untagged::Covering(addresses) };
        self.remove_attachment(attachment, untagged)
    }

    /// Removes the attachment's rules from both backends.
    fn remove_attachment(&self, attachment: &AttachmentId, untagged: Untagged<'_>) -> Result<()> {
        let results =
            [self.in_nftables(|nft| nftables::purge(nft, attachment)), self.purge_iptables(attachment, untagged)];
        Error::join(results.into_iter().filter_map(Result::err))
    }

    /// Removes the attachment's rules from all families and variants of iptables.
    fn purge_iptables(&self, attachment: &AttachmentId, untagged: Untagged<'_>) -> Result<()> {
        let chain = iptables::chain_name(&attachment.network, &attachment.container_id);
        self.clean(&[&chain], Reading::UnderLock, |nat| iptables::purge(nat, attachment, untagged))
    }

    /// Runs `change`, which removes rules, on a connection to nf_tables that stays open until this
    /// value is dropped.
    fn in_nftables(&self, change: impl FnOnce(&mut Nft) -> Result<()>) -> Result<()> {
        let mut nft = Nft::open()?;
        let result = change(&mut nft);
        self.open_connections.borrow_mut().nft.push(nft);
        result
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
