//! Lets forwarded packets from and to containers pass the node's filter, and isolates bridges from
//! each other.
//!
//! The firewall plugin uses [`Forward`], which writes the rules of one attachment
//! ([`AttachmentId`]) to one of two [`Backend`]s: `iptables` in the form of the Go plugin,
//! `nftables` as elements of sets. Both record which attachment has an address (`owner`), so that
//! the attachment's name is enough to remove its rules. Rules of the Go plugin, which does not
//! record owners, are found by their address.
//!
//! All calls act in the network namespace of the calling thread, which must be the host's. The
//! shared chains and the jumps to them stay when the last container is removed, as with Go: the
//! administrator may have added rules.

use std::net::IpAddr;

use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;

use super::engine::Store;
use super::iptables::{Chains, FAMILIES, Iptables, Table, Variant};
use super::nft::Nft;
use super::owner::AttachmentFilter;
use crate::Backend;
use cni::AttachmentId;
use cni_linux::error::{Error, Result};
use cni_linux::route::Family;

pub mod egress;
pub(super) mod iptables;
pub(super) mod nftables;
pub(super) mod owner;
pub(super) mod records;
pub mod sources;

pub use egress::{Egress, EgressDefault};
pub use iptables::ADMIN;
pub use nftables::{EntryChain, list_dropping_chains};
pub use owner::Ingress;
use owner::OwnedAddress;

/// The rules that one attachment needs.
#[derive(Clone, Debug)]
pub struct ForwardRules {
    /// The attachment.
    pub attachment: AttachmentId,
    /// The container's addresses.
    pub addresses: Vec<IpAddr>,
    /// Which containers may open connections to this one.
    pub ingress: Ingress,
    /// Whether new connections are accepted that were redirected to the container (DNAT).
    pub accepts_redirected: bool,
    /// The destinations to which the container may open connections; `None` for all.
    pub egress: Option<Egress>,
    /// iptables: the chain for the administrator's rules.
    pub iptables_admin_chain: String,
    /// nftables: the administrator's chain that jumps to the rules, which are in the same table.
    /// `None`: the rules are in the plugins' own table.
    pub nftables_admin_chain: Option<EntryChain>,
}

impl ForwardRules {
    /// Returns the addresses, each with its owner and its ingress policy.
    fn owned_addresses(&self) -> Vec<OwnedAddress> {
        let owned = |address: &IpAddr| OwnedAddress {
            owner: owner::name(&self.attachment),
            address: *address,
            ingress: self.ingress.clone(),
            accepts_redirected: self.accepts_redirected,
        };
        self.addresses.iter().map(owned).collect()
    }

    /// Returns the addresses of one family.
    fn of_family(&self, family: Family) -> Vec<OwnedAddress> {
        self.owned_addresses().into_iter().filter(|owned| Family::of(owned.address) == family).collect()
    }

    /// Returns the families of the addresses, each once, IPv4 first.
    fn families(&self) -> Vec<Family> {
        FAMILIES.into_iter().filter(|family| !self.of_family(*family).is_empty()).collect()
    }
}

/// What an ADD has written, for its undo. [`Forward::ensure`] fills it in, even on an error.
#[derive(Debug, Default)]
pub struct Written {
    /// Whether rules of the attachment may have been written. If so, the caller owes an
    /// [`undo`](Forward::undo) if its ADD fails.
    pub changed: bool,
    /// Whether the attachment, or one without a DEL that had one of its addresses, was recorded
    /// before. If so, there may be egress rules that do not belong to the attachment any more.
    pub replaced: bool,
    /// Addresses that iptables already accepted although no record names them: rules of another
    /// attachment, written by the Go plugin.
    accepted_for_others: Vec<IpAddr>,
}

/// Forwarding in one network namespace.
pub struct Forward<'m> {
    store: Store<'m>,
}

impl<'m> Forward<'m> {
    /// Returns a value that has not opened anything yet. `notes` receives remarks for the operator.
    pub fn new(machine: &'m dyn Machine, notes: Notes) -> Forward<'m> {
        Forward { store: Store::new(machine, notes, Table::Filter, "rules of containers") }
    }

    /// Returns the backend for new rules if the configuration names none: iptables, or nftables if
    /// iptables' programs are not installed.
    ///
    /// # Errors
    /// If the variant of the installed program cannot be found out.
    pub fn default_backend(&self) -> Result<Backend> {
        self.store.default_backend([Family::V4])
    }

    /// Writes `rules` to `backend`. Removes from it the attachment's other rules (iptables: in the
    /// families of the addresses), and the records that attachments without a DEL have left for the
    /// addresses. Fills in `written`, even on an error.
    ///
    /// # Errors
    /// If the rules cannot be read or written. Some may be in force then.
    pub fn ensure(&self, rules: &ForwardRules, backend: Backend, written: &mut Written) -> Result<()> {
        if backend == Backend::Nftables {
            return nftables::ensure(rules, written);
        }
        // A variable of its own, because `plan` borrows `written`.
        let mut changed = false;
        let plan = |filter: &mut Chains<'_>| iptables::ensure(filter, rules, written);
        let result = self.store.ensure_in_iptables(rules.families(), plan, &mut changed);
        written.changed |= changed;
        result
    }

    /// Removes the rules of the selected attachments from both backends. Rules of the Go plugin are
    /// only found by the addresses of [`for_del`](AttachmentFilter::for_del).
    ///
    /// The rules of iptables that accept an address which `accepted_for_others` returns stay, even
    /// if a removed record names the address. GC returns the addresses in use: the Go plugin, which
    /// records nothing, may have written their rules again after its DEL left the record.
    /// `accepted_for_others` is only called if a record is removed, but maybe several times.
    ///
    /// # Errors
    /// All failures, joined. Missing programs of iptables-legacy are not an error but a note.
    pub fn purge(&self, selection: AttachmentFilter<'_>, accepted_for_others: &dyn Fn() -> Vec<IpAddr>) -> Result<()> {
        let plan = |filter: &mut Chains<'_>| iptables::purge(filter, selection, accepted_for_others);
        let results = [
            self.store.purge_in_nftables(|nft, batch| {
                nftables::list_record_chains(nft)?.iter().try_for_each(|chain| chain.purge(nft, batch, selection))
            }),
            self.store.purge_in_iptables(selection, &[iptables::OWNERS, iptables::CNI_FORWARD], plan),
        ];
        Error::join(results.into_iter().filter_map(Result::err))
    }

    /// Removes the attachment's rules from both backends for an ADD that fails. Rules that another
    /// attachment had before the ADD stay.
    ///
    /// # Errors
    /// As [`purge`](Forward::purge).
    pub fn undo(&self, attachment: &AttachmentId, written: &Written) -> Result<()> {
        self.purge(AttachmentFilter::one(attachment), &|| written.accepted_for_others.clone())
    }

    /// Returns a sentence for each rule that is missing or in the wrong place; empty if none. Looks
    /// in `backend`, unless only the other backend has rules of the attachment. Accepts Go's rules.
    /// Starts a process only if there are tables of iptables-legacy, or if an iptables program has
    /// to report its variant.
    ///
    /// # Errors
    /// If rules cannot be read.
    pub fn check(&self, rules: &ForwardRules, backend: Backend) -> Result<Vec<String>> {
        let mut nft = Nft::open()?;
        let is_in_nftables = nftables::has_addresses_of(&mut nft, &owner::name(&rules.attachment))?;
        let mut iptables = self.store.open(OnSigterm::Kill)?;
        let (mut missing_in_iptables, mut is_in_iptables) = (Vec::new(), false);
        for family in rules.families() {
            let (missing, accepts_any) = check_in_iptables(&mut iptables, rules, family)?;
            missing_in_iptables.extend(missing);
            is_in_iptables |= accepts_any;
        }
        let checked_backend = match (is_in_nftables, is_in_iptables) {
            (true, false) => Backend::Nftables,
            (false, true) => Backend::Iptables,
            (true, true) | (false, false) => backend,
        };
        if checked_backend == Backend::Iptables {
            return Ok(missing_in_iptables);
        }
        nftables::check(&mut nft, rules)
    }

    /// Checks that [`ensure`](Forward::ensure) can work here. Starts no process, except an
    /// iptables program that has to report its variant.
    ///
    /// # Errors
    /// The reason why it cannot work.
    pub fn probe(&self, backend: Backend, nftables_admin_chain: Option<&EntryChain>) -> Result<()> {
        if backend == Backend::Nftables {
            return nftables::probe(nftables_admin_chain);
        }
        self.store.open(OnSigterm::Kill)?.probe_installed()
    }
}

/// Checks the rules of one family in the variants of iptables, the host's own first. Returns what
/// [`iptables::check`] returns for the first variant that accepts an address; if no variant does,
/// for the first one. If no variant can have rules, reports that the chain is missing.
fn check_in_iptables(iptables: &mut Iptables<'_>, rules: &ForwardRules, family: Family) -> Result<(Vec<String>, bool)> {
    let host_variant = iptables.chosen_variant(family)?.unwrap_or(Variant::Nft);
    let mut variants = iptables.variants_to_search(family, &[iptables::CNI_FORWARD])?;
    // `false` sorts before `true`.
    variants.sort_by_key(|variant| *variant != host_variant);
    let mut missing_in_first = None;
    for variant in variants {
        let (missing, accepts_any) = iptables::check(&mut iptables.read(family, variant)?, rules)?;
        if accepts_any {
            return Ok((missing, true));
        }
        missing_in_first.get_or_insert(missing);
    }
    let no_chain = || vec![format!("iptables chain {} is missing from table filter", iptables::CNI_FORWARD)];
    Ok((missing_in_first.unwrap_or_else(no_chain), false))
}
