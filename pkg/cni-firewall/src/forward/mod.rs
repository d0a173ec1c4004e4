//! Forwarding: packets from and to containers pass the node's filter, and bridges can be isolated
//! from each other.
//!
//! [`Forward`] is what the plugin sees: one attachment ([`AttachmentId`]) and its addresses, kept
//! by one of two [`Backend`]s: `iptables` in the shapes of the Go plugin, `nftables` in sets. Both
//! record whose an address is (`owner`), so that removing needs no address and no knowledge of how
//! the rules were made.
//!
//! Acts in the network namespace of the calling thread, which must be the host's. The chains and
//! what leads to them stay when the last container has gone, as with Go: the administrator may have
//! filled one of them.

use std::cell::RefCell;
use std::fmt;
use std::net::IpAddr;

use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;

use super::iptables::{Cleaned, FAMILIES, Folders, Iptables, Table, Variant};
use super::nft::Nft;
use crate::Backend;
use cni::AttachmentId;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

pub(super) mod iptables;
pub(super) mod nftables;
pub(super) mod owner;
pub mod sources;

pub use iptables::ADMIN;
pub use nftables::AdminChain;
pub use owner::Ingress;
use owner::Owned;

/// The rules that one attachment wants.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The attachment.
    pub mark: AttachmentId,
    /// The container's addresses.
    pub addresses: Vec<IpAddr>,
    /// Which containers may open connections to it.
    pub ingress: Ingress,
    /// iptables: the chain for the administrator's rules.
    pub admin: String,
    /// nftables: the administrator's chain that leads to the rules, and in whose table they are.
    pub place: Option<AdminChain>,
}

impl Wanted {
    fn owned(&self) -> Vec<Owned> {
        let owner = owner::name(&self.mark);
        let owned = |address: &IpAddr| Owned { owner: owner.clone(), address: *address, ingress: self.ingress.clone() };
        self.addresses.iter().map(owned).collect()
    }

    fn of(&self, family: Family) -> Vec<Owned> {
        self.owned().into_iter().filter(|owned| Family::of(owned.address) == family).collect()
    }

    fn families(&self) -> Vec<Family> {
        FAMILIES.into_iter().filter(|family| !self.of(*family).is_empty()).collect()
    }
}

/// The addresses and bridges that an attachment had before an ADD, so that a failed ADD undoes only
/// its own changes. Filled in by [`Forward::ensure`].
#[derive(Debug, Default)]
pub struct PreviousRules {
    nftables: RefCell<Option<nftables::PreviousRules>>,
    iptables: RefCell<Vec<(Family, Variant, iptables::FamilyAddresses)>>,
}

/// Forwarding in one network namespace.
pub struct Forward<'m> {
    machine: &'m dyn Machine,
    notes: Notes,
    folders: Folders,
}

impl fmt::Debug for Forward<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Forward").field("folders", &self.folders).finish_non_exhaustive()
    }
}

impl<'m> Forward<'m> {
    /// Nothing is opened yet. Remarks for the operator go to `notes`.
    pub fn new(machine: &'m dyn Machine, notes: Notes) -> Forward<'m> {
        Forward { machine, notes, folders: Folders::new(std::env::var_os("PATH")) }
    }

    /// The backend that new rules are made in where none is asked for: iptables, unless its
    /// programs are not installed.
    ///
    /// # Errors
    /// A program that could not be asked which variant it is.
    pub fn chosen(&self) -> Result<Backend> {
        let chosen = self.iptables(OnSigterm::Kill)?.chosen_variant(Family::V4)?;
        Ok(if chosen.is_some() { Backend::Iptables } else { Backend::Nftables })
    }

    /// Puts `wanted` in force; what the attachment had before is replaced, and stored in `former`.
    ///
    /// # Errors
    /// Some rules may be in force then; [`put_back`](Forward::put_back) removes them.
    pub fn ensure(&self, wanted: &Wanted, backend: Backend, former: &PreviousRules) -> Result<()> {
        match backend {
            Backend::Iptables => self.ensure_in_iptables(wanted, former),
            Backend::Nftables => {
                let mut nft = Nft::open()?;
                let owned = wanted.owned();
                let place = wanted.place.as_ref();
                nftables::ensure(&mut nft, &owner::name(&wanted.mark), &owned, place, &former.nftables)
            }
        }
    }

    fn ensure_in_iptables(&self, wanted: &Wanted, former: &PreviousRules) -> Result<()> {
        let mut iptables = self.iptables(OnSigterm::Kill)?;
        let mut families = Vec::new();
        for family in wanted.families() {
            let Some(variant) = iptables.variant_for_new_rules(family)? else {
                // The error is that of a program that cannot be found.
                return iptables.probe(family);
            };
            families.push((family, variant));
        }
        let owner = owner::name(&wanted.mark);
        let changed = iptables.change_all(&families, |filter| {
            let addresses = wanted.of(filter.family());
            let mut all = former.iptables.borrow_mut();
            let variant = families.iter().find(|(family, _)| *family == filter.family());
            if let Some((family, variant)) =
                variant.filter(|(family, _)| !all.iter().any(|(known, ..)| known == family))
            {
                all.push((*family, *variant, iptables::FamilyAddresses::read(filter, &owner, &addresses)?));
            }
            iptables::ensure(filter, &owner, &addresses, &wanted.admin).map(Some)
        });
        changed.map(drop).map_err(|(_, error)| error)
    }

    /// Undoes an [`ensure`](Forward::ensure), complete or not: removes the rules that it made and
    /// restores those that it replaced.
    ///
    /// # Errors
    /// All that went wrong.
    pub fn put_back(&self, wanted: &Wanted, former: &PreviousRules) -> Result<()> {
        let owner = owner::name(&wanted.mark);
        let mut results = Vec::new();
        match former.nftables.take() {
            Some(had) if had.owned.is_empty() => results.push(self.in_nftables(|nft| nftables::purge(nft, &owner))),
            Some(had) => {
                results.push(self.in_nftables(|nft| {
                    nftables::ensure(nft, &owner, &had.owned, had.place.as_ref(), &RefCell::default())
                }))
            }
            None => {}
        }
        for (family, variant, had) in former.iptables.take() {
            let addresses = wanted.of(family);
            results.push(self.iptables(OnSigterm::Finish).and_then(|mut iptables| {
                iptables.change(family, variant, |filter| had.put_back(filter, &owner, &addresses, &wanted.admin))
            }));
        }
        Error::join(results.into_iter().filter_map(Result::err))
    }

    /// Removes what there is of the attachment in both backends. `addresses` are those of the ADD's
    /// result where they are known: a Go plugin that made the rules has not recorded whose they
    /// are.
    ///
    /// # Errors
    /// All that went wrong. Missing programs of iptables-legacy are not an error but a note.
    pub fn purge(&self, mark: &AttachmentId, addresses: &[IpAddr]) -> Result<()> {
        let owner = owner::name(mark);
        Error::join(
            [
                self.in_nftables(|nft| nftables::purge(nft, &owner)),
                self.clean(|filter| iptables::purge(filter, &owner, addresses)),
            ]
            .into_iter()
            .filter_map(Result::err),
        )
    }

    /// Removes what belongs to `network` and to no attachment of `valid` (containerID, ifname), in
    /// both backends.
    ///
    /// # Errors
    /// As [`purge`](Forward::purge).
    pub fn gc(&self, network: &str, valid: &[(&str, &str)]) -> Result<()> {
        let valid: Vec<String> = valid
            .iter()
            .map(|(container, ifname)| owner::name(&AttachmentId::new(network, *container, *ifname)))
            .collect();
        Error::join(
            [
                self.in_nftables(|nft| nftables::gc(nft, network, &valid)),
                self.clean(|filter| iptables::gc(filter, network, &valid)),
            ]
            .into_iter()
            .filter_map(Result::err),
        )
    }

    fn in_nftables(&self, remove: impl FnOnce(&mut Nft) -> Result<()>) -> Result<()> {
        match Nft::open().and_then(|mut nft| remove(&mut nft)) {
            Err(error) if error.is_unsupported() => Ok(()),
            done => done,
        }
    }

    fn clean(&self, plan: impl FnMut(&mut super::iptables::Chains<'_>) -> Result<super::iptables::Edit>) -> Result<()> {
        let holders = [iptables::OWNERS, iptables::FORWARD];
        let Cleaned { unreached, outcome } = self.iptables(OnSigterm::Finish)?.clean(&holders, plan);
        for (family, variant) in unreached {
            self.notes.note(format_args!(
                "iptables-{variant} may have a table filter for {family:?}, and its programs are not installed: rules of \
                 containers may be left in it"
            ));
        }
        outcome
    }

    /// Returns a sentence for each rule that is missing or in the wrong place; empty if all is
    /// well. Accepts Go's rules and, if they are there, those of the other backend. Changes nothing
    /// and starts no process, unless there are tables of iptables-legacy.
    ///
    /// # Errors
    /// The kernel's.
    pub fn check(&self, wanted: &Wanted, backend: Backend) -> Result<Vec<String>> {
        let owner = owner::name(&wanted.mark);
        let in_nftables = match Nft::open().and_then(|mut nft| nftables::holds(&mut nft, &owner)) {
            Err(error) if error.is_unsupported() => false,
            holds => holds?,
        };
        let mut iptables = self.iptables(OnSigterm::Kill)?;
        let (mut missing, mut in_iptables) = (Vec::new(), false);
        for family in wanted.families() {
            let addresses = wanted.of(family);
            let hosts: Vec<IpAddr> = addresses.iter().map(|owned| owned.address).collect();
            let chosen = iptables.chosen_variant(family)?.unwrap_or(Variant::Nft);
            let mut variants = iptables.variants_to_search(family, &[iptables::FORWARD])?;
            variants.sort_by_key(|variant| *variant != chosen);
            let mut worst = vec![format!("iptables chain {} is missing from table filter", iptables::FORWARD)];
            for variant in variants {
                let mut filter = iptables.read(family, variant)?;
                let lacking = iptables::check(&mut filter, &addresses, &wanted.admin)?;
                let holds = iptables::holds(&mut filter, &hosts)?;
                in_iptables |= holds;
                if lacking.is_empty() || holds {
                    worst = lacking;
                    break;
                }
            }
            missing.extend(worst);
        }
        let look_there = match backend {
            Backend::Nftables => in_nftables || !in_iptables,
            Backend::Iptables => in_nftables && !in_iptables,
        };
        if look_there {
            return nftables::check(&mut Nft::open()?, &wanted.owned(), wanted.place.as_ref());
        }
        Ok(missing)
    }

    /// Whether [`ensure`](Forward::ensure) can work here. Without iptables' program none runs.
    ///
    /// # Errors
    /// Why not.
    pub fn probe(&self, backend: Backend, place: Option<&AdminChain>) -> Result<()> {
        match backend {
            Backend::Nftables => nftables::probe(place),
            Backend::Iptables if self.iptables(OnSigterm::Kill)?.variant_for_new_rules(Family::V4)?.is_some() => Ok(()),
            Backend::Iptables => Err(Error::new(
                "failed to find iptables-restore",
                Cause::text("it is neither in PATH nor in /usr/sbin"),
            )),
        }
    }

    fn iptables(&self, on_sigterm: OnSigterm) -> Result<Iptables<'m>> {
        let (notes, folders) = (self.notes.clone(), self.folders.clone());
        Iptables::open_with(Table::Filter, self.machine, notes, on_sigterm, folders)
    }
}

/// The chains of nf_tables that drop forwarded packets which they do not know, as `inet filter
/// forward`, but for `place`: nothing that the backend `nftables` accepts elsewhere passes them.
/// None on a kernel without nf_tables.
///
/// # Errors
/// The kernel's.
pub fn dropping(place: Option<&AdminChain>) -> Result<Vec<String>> {
    match Nft::open().and_then(|mut nft| nftables::dropping(&mut nft, place)) {
        Err(error) if error.is_unsupported() => Ok(Vec::new()),
        found => found,
    }
}
