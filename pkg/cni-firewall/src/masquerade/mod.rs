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

use cni::Cidr;
use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;

use super::engine::Store;
use super::iptables::{Chains, FAMILIES, Table};
use super::nft::{Batch, Nft};
use super::owner::AttachmentFilter;
use crate::Backend;
use cni::AttachmentId;
use cni_linux::error::{Error, Result};
use cni_linux::route::Family;

pub(super) mod iptables;
pub(super) mod nftables;

/// The largest number of excluded destinations of each family: a rule of nf_tables has at most 128
/// expressions, and each destination takes three.
pub const MAX_EXCLUDED: usize = 32;

/// Masquerading in one network namespace.
///
/// Closing a netlink connection that has removed rules waits for an RCU grace period, so such
/// connections stay open until this value is dropped. Deleting a link also waits for a grace
/// period. If [`purge`](Masquerade::purge) is called before a link is deleted, and this value is
/// dropped afterwards, the two waits overlap.
pub struct Masquerade<'m> {
    store: Store<'m>,
    /// Packets to these destinations keep their source.
    exclude: Vec<Cidr>,
}

impl<'m> Masquerade<'m> {
    /// Returns a value that has not opened anything yet; `notes` receives remarks for the operator.
    pub fn new(machine: &'m dyn Machine, notes: Notes) -> Masquerade<'m> {
        Masquerade { store: Store::new(machine, notes, Table::Nat, "masquerade rules"), exclude: Vec::new() }
    }

    /// Returns the value with further destinations that [`ensure`](Masquerade::ensure) does not
    /// masquerade, besides the networks of the addresses. At most [`MAX_EXCLUDED`] of a family.
    pub fn excluding(self, exclude: &[Cidr]) -> Masquerade<'m> {
        Masquerade { exclude: exclude.to_vec(), ..self }
    }

    /// Masquerades exactly `addresses`, each with its network's prefix length, for the attachment.
    /// The attachment's other rules in the same backend are removed; in iptables, only those for
    /// the families of `addresses`. Without a `backend`, uses iptables, or nftables if iptables is
    /// not installed or does not work. Returns the backend in which rules may have been changed;
    /// `None` if all were in place.
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
        let wanted = self.wanted(attachment, addresses);
        let chosen = match backend {
            Some(backend) => backend,
            None => self.store.default_backend(wanted.families())?,
        };
        let has_fallback = backend.is_none() && chosen == Backend::Iptables;
        match self.ensure_in(chosen, &wanted) {
            Err(error) if has_fallback && self.store.only_nftables_works(&error, wanted.families()) => {
                self.store.notes.note(format_args!("nftables is used, because iptables does not work: {error}"));
                // Only what this call may have written: Go's rules can be those of another
                // interface.
                self.undo(attachment, Some(Backend::Iptables))?;
                self.ensure_in(Backend::Nftables, &wanted)
            }
            result => result,
        }
    }

    /// Does [`ensure`](Masquerade::ensure) in this backend.
    fn ensure_in(&self, backend: Backend, wanted: &Wanted<'_>) -> Result<Option<Backend>> {
        let mut changed = false;
        match backend {
            Backend::Nftables => {
                let plan = |nft: &mut Nft, batch: &mut Batch| nftables::ensure(nft, batch, wanted);
                self.store.ensure_in_nftables(plan, &mut changed)?;
            }
            Backend::Iptables => {
                let plan = |nat: &mut Chains<'_>| iptables::ensure(nat, &wanted.of_family(nat.family()));
                self.store.ensure_in_iptables(wanted.families(), plan, &mut changed)?;
            }
        }
        Ok(changed.then_some(backend))
    }

    /// Undoes an [`ensure`](Masquerade::ensure) that changed rules in `backend`, or that failed
    /// there; in both backends if none is given. Removes the attachment's rules. In iptables, Go's
    /// rules stay unless they are for an address that `ensure` has masqueraded. Rules that `ensure`
    /// replaced stay lost.
    ///
    /// # Errors
    /// As [`purge`](Masquerade::purge).
    pub fn undo(&self, attachment: &AttachmentId, backend: Option<Backend>) -> Result<()> {
        let filter = AttachmentFilter::one(attachment);
        match backend {
            Some(backend) => self.purge_in(backend, filter),
            None => self.purge(filter),
        }
    }

    /// Removes the rules of the selected attachments from both backends. In nftables all rules name
    /// their attachment; in iptables those of the Go plugins are untagged.
    ///
    /// # Errors
    /// A backend, family or variant cannot be changed. The others are still changed, and all
    /// failures are joined. Missing programs of iptables-legacy are not an error but a note.
    pub fn purge(&self, filter: AttachmentFilter<'_>) -> Result<()> {
        let results = [Backend::Nftables, Backend::Iptables].map(|backend| self.purge_in(backend, filter));
        Error::join(results.into_iter().filter_map(Result::err))
    }

    /// Does [`purge`](Masquerade::purge) in this backend.
    fn purge_in(&self, backend: Backend, filter: AttachmentFilter<'_>) -> Result<()> {
        if backend == Backend::Nftables {
            return self.store.purge_in_nftables(|nft, batch| nftables::purge(nft, batch, filter));
        }
        let chain = match filter {
            AttachmentFilter::One { attachment, .. } => iptables::chain_of(attachment),
            // All masquerading rules are reached from this chain.
            AttachmentFilter::Garbage { .. } => iptables::POSTROUTING.to_owned(),
        };
        self.store.purge_in_iptables(filter, &[&chain], |nat| iptables::purge(nat, filter))
    }

    /// Returns a sentence for each missing rule of the attachment's addresses, and for each rule
    /// that wrongly excludes a destination; empty if all addresses are masqueraded, except to the
    /// excluded destinations. Accepts Go's rules, in either backend.
    ///
    /// # Errors
    /// The rules of a backend, family or variant cannot be read.
    pub fn check(&self, attachment: &AttachmentId, addresses: &[Cidr]) -> Result<Vec<String>> {
        let (all_wanted, mut nft, mut missing) = (self.wanted(attachment, addresses), Nft::open()?, Vec::new());
        for family in all_wanted.families() {
            let wanted = all_wanted.of_family(family);
            // nftables is read first, because reading iptables can start a program.
            let mut missing_in_family = nftables::check(&mut nft, &wanted)?;
            if missing_in_family.is_empty() {
                continue;
            }
            let mut iptables = self.store.open(OnSigterm::Kill)?;
            for variant in iptables.variants_to_search(family, &[&iptables::chain_of(attachment)])? {
                // The ADD used the variant that has the container's chain, so the missing rules of
                // that variant are reported, not those of nftables.
                if let Some(missing_in_variant) = iptables::check(&mut iptables.read(family, variant)?, &wanted)? {
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
        if backend == Some(Backend::Nftables) {
            return nftables::probe();
        }
        let mut iptables = self.store.open(OnSigterm::Kill)?;
        let mut is_installed = false;
        for family in FAMILIES {
            is_installed |= iptables.chosen_variant(family)?.is_some();
        }
        match backend {
            _ if is_installed => Ok(()),
            // The backend is iptables: without programs, `ensure` writes over netlink if it can.
            Some(_) => iptables.probe_installed(),
            // Without iptables, `ensure` uses nftables.
            None => nftables::probe(),
        }
    }

    /// Returns what `attachment` wants.
    fn wanted<'a>(&self, attachment: &'a AttachmentId, addresses: &[Cidr]) -> Wanted<'a> {
        Wanted { attachment, addresses: addresses.to_vec(), exclude: self.exclude.clone() }
    }
}

/// The masquerading that one attachment wants.
struct Wanted<'a> {
    attachment: &'a AttachmentId,
    /// The masqueraded addresses, each with its network's prefix length.
    addresses: Vec<Cidr>,
    /// The destinations to which packets keep their source, besides the networks of `addresses`.
    exclude: Vec<Cidr>,
}

impl<'a> Wanted<'a> {
    /// Returns the families of the addresses, each once, IPv4 first.
    fn families(&self) -> impl Iterator<Item = Family> {
        FAMILIES.into_iter().filter(|family| !self.of_family(*family).addresses.is_empty())
    }

    /// Returns the part for `family`.
    fn of_family(&self, family: Family) -> Wanted<'a> {
        let of_family =
            |cidrs: &[Cidr]| cidrs.iter().copied().filter(|cidr| Family::of(cidr.address()) == family).collect();
        Wanted { attachment: self.attachment, addresses: of_family(&self.addresses), exclude: of_family(&self.exclude) }
    }
}

#[cfg(test)]
mod tests;
