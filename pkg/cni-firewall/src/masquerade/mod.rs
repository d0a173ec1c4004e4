//! Masquerading: what leaves a container for outside its network goes with the host's address.
//!
//! [`Masquerade`] is what plugins see: one attachment ([`AttachmentId`]) and its addresses, kept by
//! one of two [`Backend`]s in the shapes of the Go plugins. Where new rules go is chosen once, at
//! ADD; everything else looks at both, since configuration and host may have changed since.
//!
//! Acts in the network namespace of the calling thread, which must be the host's. Removing needs no
//! address, no program (except those of iptables-legacy, for rules there) and no knowledge of how
//! the rules were made. An attachment without rules is not an error when removing: most calls end
//! so.

use std::cell::RefCell;
use std::fmt;
use std::net::IpAddr;

use cni::Cidr;
use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;

use super::iptables::{Cleaned, FAMILIES, Folders, Iptables, Table, Variant};
use super::nft::{Listed, Nft};
use crate::Backend;
use cni::AttachmentId;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

pub(super) mod iptables;
pub(super) mod nftables;

/// Masquerading in one network namespace.
///
/// The kernel frees removed rules after an RCU grace period, for which the closing of a connection
/// waits. Those that have removed something are kept until this is dropped:
/// [`purge`](Masquerade::purge) before a link is deleted, which waits for one too, and drop this
/// after.
pub struct Masquerade<'m> {
    machine: &'m dyn Machine,
    notes: Notes,
    folders: Folders,
    kept: RefCell<Kept<'m>>,
}

/// The rules that an attachment had before an ADD, in each backend and family that the ADD has
/// read, so that a failed ADD undoes only its own changes ([`Masquerade::put_back`]). Filled in by
/// [`Masquerade::ensure`] before each change.
#[derive(Debug, Default)]
pub struct PreviousRules {
    nftables: RefCell<Option<Vec<Listed>>>,
    iptables: RefCell<Vec<(Family, Variant, iptables::FamilyRules)>>,
}

#[derive(Default)]
struct Kept<'m> {
    nft: Vec<Nft>,
    iptables: Vec<Iptables<'m>>,
}

impl fmt::Debug for Masquerade<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Masquerade").field("folders", &self.folders).finish_non_exhaustive()
    }
}

impl<'m> Masquerade<'m> {
    /// Nothing is opened yet. Remarks for the operator go to `notes`.
    pub fn new(machine: &'m dyn Machine, notes: Notes) -> Masquerade<'m> {
        Masquerade::with_folders(machine, notes, Folders::new(std::env::var_os("PATH")))
    }

    /// The same with iptables' programs and lock in these folders.
    pub fn with_folders(machine: &'m dyn Machine, notes: Notes, folders: Folders) -> Masquerade<'m> {
        Masquerade { machine, notes, folders, kept: RefCell::default() }
    }

    /// Puts rules in force for the attachment's addresses, each with its network's prefix; what it
    /// had before is replaced, and stored in `former`. Without a `backend`: iptables, or nftables
    /// where iptables is not installed or does not work.
    ///
    /// # Errors
    /// Some rules may be in force then; [`put_back`](Masquerade::put_back) removes them.
    pub fn ensure(
        &self,
        mark: &AttachmentId,
        backend: Option<Backend>,
        addresses: &[Cidr],
        former: &PreviousRules,
    ) -> Result<()> {
        match backend {
            Some(Backend::Iptables) => {
                self.ensure_in_iptables(mark, addresses, former).map_err(|failure| failure.error)
            }
            Some(Backend::Nftables) => nftables::ensure(mark, addresses, &former.nftables),
            None => {
                let mut iptables = self.iptables(OnSigterm::Kill)?;
                for family in families(addresses) {
                    if iptables.chosen_variant(family)?.is_none() {
                        return nftables::ensure(mark, addresses, &former.nftables);
                    }
                }
                let Err(failure) = self.ensure_in_iptables(mark, addresses, former) else { return Ok(()) };
                if failure.error.is_deadline() || failure.error.is_terminated() {
                    return Err(failure.error);
                }
                // A process to learn whether iptables works is started only here, where it is
                // needed.
                match iptables.probe(failure.family) {
                    Ok(()) => Err(failure.error),
                    Err(_) => {
                        self.notes
                            .note(format_args!("iptables does not work here, nftables is used: {}", failure.error));
                        // The addresses are given, so that a rule of another interface does not
                        // count as a remainder of this one.
                        self.purge_iptables(mark, &addresses.iter().map(Cidr::address).collect::<Vec<_>>())?;
                        nftables::ensure(mark, addresses, &former.nftables)
                    }
                }
            }
        }
    }

    fn ensure_in_iptables(
        &self,
        mark: &AttachmentId,
        addresses: &[Cidr],
        former: &PreviousRules,
    ) -> Result<(), Failure> {
        for family in families(addresses) {
            let ensured = self.iptables(OnSigterm::Kill).and_then(|mut iptables| {
                let Some(variant) = iptables.variant_for_new_rules(family)? else {
                    // The error is that of a program that cannot be found.
                    return iptables.probe(family);
                };
                let addresses: Vec<Cidr> = of_family(addresses, family).collect();
                iptables.change(family, variant, |nat| {
                    let mut all = former.iptables.borrow_mut();
                    if !all.iter().any(|(known, ..)| *known == family) {
                        all.push((family, variant, iptables::FamilyRules::read(nat, mark, &addresses)?));
                    }
                    iptables::ensure(nat, mark, &addresses)
                })
            });
            ensured.map_err(|error| Failure { family, error })?;
        }
        Ok(())
    }

    /// Undoes an [`ensure`](Masquerade::ensure) of these addresses, complete or not: removes the
    /// rules that it made, restores those that it replaced, and leaves earlier rules and those in
    /// the other backend.
    ///
    /// # Errors
    /// All that went wrong.
    pub fn put_back(&self, mark: &AttachmentId, addresses: &[Cidr], former: &PreviousRules) -> Result<()> {
        let mut results = Vec::new();
        if let Some(listed) = former.nftables.take() {
            results.push(self.in_nftables(|nft| nftables::put_back(nft, mark, &listed)));
        }
        for (family, variant, had) in former.iptables.take() {
            let addresses: Vec<Cidr> = of_family(addresses, family).collect();
            results.push(
                self.iptables(OnSigterm::Finish).and_then(|mut iptables| {
                    iptables.change(family, variant, |nat| had.put_back(nat, mark, &addresses))
                }),
            );
        }
        Error::join(results.into_iter().filter_map(Result::err))
    }

    /// Removes what there is of the attachment in both backends. `addresses` are those of the ADD's
    /// result where they are known: they decide which rules of a Go plugin are this attachment's
    /// and which belong to another interface of the container; without them all are removed.
    ///
    /// # Errors
    /// All that went wrong. Missing programs of iptables-legacy are not an error but a note.
    pub fn purge(&self, mark: &AttachmentId, addresses: &[IpAddr]) -> Result<()> {
        Error::join(
            [self.in_nftables(|nft| nftables::purge(nft, mark)), self.purge_iptables(mark, addresses)]
                .into_iter()
                .filter_map(Result::err),
        )
    }

    fn purge_iptables(&self, mark: &AttachmentId, addresses: &[IpAddr]) -> Result<()> {
        let chain = iptables::chain_name(&mark.network, &mark.container_id);
        self.clean(&[&chain], |nat| iptables::purge(nat, mark, addresses))
    }

    fn in_nftables(&self, remove: impl FnOnce(&mut Nft) -> Result<()>) -> Result<()> {
        let removed = Nft::open().and_then(|mut nft| {
            let removed = remove(&mut nft);
            self.kept.borrow_mut().nft.push(nft);
            removed
        });
        match removed {
            Err(error) if error.is_unsupported() => Ok(()),
            done => done,
        }
    }

    /// Removes the rules of `network` that belong to no attachment of `valid` (containerID,
    /// ifname), in both backends.
    ///
    /// # Errors
    /// As [`purge`](Masquerade::purge).
    pub fn gc(&self, network: &str, valid: &[(&str, &str)]) -> Result<()> {
        Error::join(
            [
                self.in_nftables(|nft| nftables::gc(nft, network, valid)),
                // Without this chain no rule is reached.
                self.clean(&[iptables::POSTROUTING], |nat| iptables::gc(nat, network, valid)),
            ]
            .into_iter()
            .filter_map(Result::err),
        )
    }

    /// Plans a removal in every family and variant that may hold one of the chains, whatever
    /// becomes of the others.
    fn clean(
        &self,
        chains: &[&str],
        plan: impl FnMut(&mut super::iptables::Chains<'_>) -> Result<super::iptables::Edit>,
    ) -> Result<()> {
        let mut iptables = self.iptables(OnSigterm::Finish)?;
        let Cleaned { unreached, outcome } = iptables.clean(chains, plan);
        for (family, variant) in unreached {
            self.notes.note(format_args!(
                "iptables-{variant} may have a table nat for {family:?}, and its programs are not installed: \
                 masquerade rules may be left in it",
            ));
        }
        self.kept.borrow_mut().iptables.push(iptables);
        outcome
    }

    /// Returns a sentence for each of the attachment's addresses that is not masqueraded; empty if
    /// all is well. Accepts Go's rules, in whichever backend they are.
    pub fn check(&self, mark: &AttachmentId, addresses: &[Cidr]) -> Result<Vec<String>> {
        let mut missing = Vec::new();
        for family in families(addresses) {
            let addresses: Vec<Cidr> = of_family(addresses, family).collect();
            let mut worst = nftables::check(mark, &addresses)?;
            if worst.is_empty() {
                continue;
            }
            let mut iptables = self.iptables(OnSigterm::Kill)?;
            let chain = iptables::chain_name(&mark.network, &mark.container_id);
            for variant in iptables.variants_to_search(family, &[&chain])? {
                let mut nat = iptables.read(family, variant)?;
                let lacking = iptables::check(&mut nat, mark, &addresses)?;
                // Where the chain is, there the rules should be: what is said of that place is of
                // use.
                if lacking.is_empty() || nat.has_chain(&chain)? {
                    worst = lacking;
                }
                if worst.is_empty() {
                    break;
                }
            }
            missing.extend(worst);
        }
        Ok(missing)
    }

    /// Whether [`ensure`](Masquerade::ensure) can work here. No process: a program that is
    /// installed counts.
    ///
    /// # Errors
    /// Why not.
    pub fn probe(&self, backend: Option<Backend>) -> Result<()> {
        let mut iptables = self.iptables(OnSigterm::Kill)?;
        let mut installed = false;
        for family in FAMILIES {
            installed |= iptables.chosen_variant(family)?.is_some();
        }
        match backend {
            Some(Backend::Nftables) => nftables::probe(),
            _ if installed => Ok(()),
            Some(Backend::Iptables) if iptables.variant_for_new_rules(Family::V4)?.is_some() => Ok(()),
            Some(Backend::Iptables) => Err(Error::new(
                "failed to find iptables-restore",
                Cause::text("it is neither in PATH nor in /usr/sbin"),
            )),
            None => nftables::probe(),
        }
    }

    fn iptables(&self, on_sigterm: OnSigterm) -> Result<Iptables<'m>> {
        Iptables::open_with(Table::Nat, self.machine, self.notes.clone(), on_sigterm, self.folders.clone())
    }
}

/// An error and the family that it occurred in.
struct Failure {
    family: Family,
    error: Error,
}

/// The families that occur.
fn families(addresses: &[Cidr]) -> impl Iterator<Item = Family> {
    FAMILIES.into_iter().filter(|family| of_family(addresses, *family).next().is_some())
}

fn of_family(addresses: &[Cidr], family: Family) -> impl Iterator<Item = Cidr> {
    addresses.iter().copied().filter(move |cidr| Family::of(cidr.address()) == family)
}

#[cfg(test)]
mod tests;
