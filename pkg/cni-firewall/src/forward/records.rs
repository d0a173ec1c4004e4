//! Writes and removes records in nf_tables, and all objects that the records require.
//!
//! A record is a rule without a verdict that names the owner and the policy of an address. Other
//! rules, and elements of sets, exist while a record requires them.

use std::collections::BTreeSet;
use std::net::IpAddr;

use cni_linux::error::{Cause, Error, Result};
use cni_linux::route;

use super::iptables::read_record;
use super::nftables::match_family;
use super::owner::{self, Ingress, OwnedAddress, Record, Wanted};
use super::{Written, egress};
use crate::iptables::rule_in_words;
use crate::nft::expr::{daddr, iifname, not, oifname, saddr};
use crate::nft::{Batch, Chain, Expr, Family, IfMissing, Key, Listed, Nft, Rule, Search, Table};
use crate::owner::AttachmentFilter;

/// Returns the rule without a verdict that records the owner and the policy of an address.
///
/// The comment is the owner's name. A match of the address as the destination stands for
/// `accepts_redirected`. The interface matches stand for the policy: none for `open`,
/// `iifname B oifname != B` for `same-bridge`, `iifname B oifname B` for `isolated`.
///
/// # Errors
/// The name of the bridge is too long for an interface.
fn record_rule(table: Table<'_>, owned: &OwnedAddress) -> Result<Rule> {
    let mut exprs = [match_family(table, owned.address), saddr(owned.address)].concat();
    if owned.accepts_redirected {
        exprs.extend(daddr(owned.address));
    }
    if let Some(bridge) = owned.ingress.bridge() {
        let (from_bridge, to_bridge) = iifname(bridge).zip(oifname(bridge)).ok_or_else(|| {
            Error::new(format!("failed to build a rule for bridge {bridge}"), Cause::text("the name is too long"))
        })?;
        exprs.extend(from_bridge);
        exprs.extend(if matches!(owned.ingress, Ingress::Isolated(_)) { to_bridge } else { not(to_bridge) });
    }
    Ok(Rule::new(exprs).with_comment(owned.owner.clone()))
}

/// Reads a rule that [`record_rule`] has written, in the words of iptables, which [`read_record`]
/// reads for both backends; `None` for other rules.
fn read_record_rule(listed: &Listed) -> Option<OwnedAddress> {
    // A rule names its family only in a table of both families, and `listed` does not have its
    // table. Decoded for the wrong family, a record has no address.
    let families = [route::Family::V4, route::Family::V6];
    families.into_iter().find_map(|family| read_record(&rule_in_words(family, listed)))
}

/// Returns the keys of a record in the index of its chain. A rule that is not a record has only
/// that of its comment.
fn keys(listed: &Listed) -> Vec<Key> {
    let comment = Key::comment(listed.rule.comment.as_deref().unwrap_or_default());
    std::iter::once(comment).chain(read_record_rule(listed).map(|owned| Key::address(owned.address))).collect()
}

/// An object in the table of a record that exists while a record requires it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Object {
    /// An element of a set.
    Element { set: String, address: IpAddr },
    /// A rule of a chain.
    Rule { chain: &'static str, exprs: Vec<Expr> },
    /// The chain of a network's egress rules, its sets, and the rules that lead to it. Here they
    /// are only removed. [`egress`] adds them, because a record does not have the destinations.
    Egress { chain: String },
}

impl Object {
    /// Whether the object exists.
    pub(super) fn exists(&self, nft: &mut Nft, table: Table<'_>) -> Result<bool> {
        match self {
            Object::Element { set, address } => nft.has_element(table, set, *address),
            Object::Rule { chain, exprs } => {
                Ok(nft.rules(table, chain)?.iter().any(|listed| listed.rule.exprs == *exprs))
            }
            Object::Egress { chain } => Ok(nft.find_chain(table, chain)?.is_some()),
        }
    }

    /// Returns the sentence that reports that the object is missing. `ingress` is the policy of the
    /// address that requires it.
    pub(super) fn missing_sentence(&self, table: Table<'_>, ingress: &Ingress) -> String {
        match self {
            Object::Element { set, address } => format!("nft set {table} {set} lacks {address}"),
            Object::Rule { chain, .. } => {
                // Only a policy with a bridge requires rules.
                let (bridge, policy) = (ingress.bridge().unwrap_or_default(), ingress.name());
                format!("nft chain {table} {chain} lacks the rule of bridge {bridge} for ingressPolicy {policy}")
            }
            Object::Egress { chain } => format!("nft chain {table} {chain} is missing"),
        }
    }

    /// Adds to `batch` the creation of the object unless it exists, which the kernel checks for an
    /// element. The set or the chain must exist, or `batch` must create it. Does nothing for
    /// [`Egress`](Object::Egress).
    fn ensure(&self, nft: &mut Nft, batch: &mut Batch, table: Table<'_>) -> Result<()> {
        match self {
            Object::Element { set, address } => batch.ensure_element(table, set, *address),
            Object::Rule { chain, exprs } if !self.exists(nft, table)? => {
                batch.append_rule(table, chain, &Rule::new(exprs.clone()));
            }
            Object::Rule { .. } | Object::Egress { .. } => {}
        }
        Ok(())
    }

    /// Adds the removal of the object to `batch`, if it exists.
    fn purge(&self, nft: &mut Nft, batch: &mut Batch, table: Table<'_>) -> Result<()> {
        match self {
            Object::Element { set, address } if nft.has_element(table, set, *address)? => {
                batch.delete_element(table, set, *address);
            }
            Object::Element { .. } => {}
            Object::Rule { chain, exprs } => {
                for listed in nft.rules(table, chain)?.iter().filter(|listed| listed.rule.exprs == *exprs) {
                    batch.delete_rule(table, chain, listed.handle);
                }
            }
            Object::Egress { chain } => egress::remove_network(nft, batch, chain)?,
        }
        Ok(())
    }
}

/// A record in nf_tables, with the rule's handle.
pub(crate) type NftRecord = Record<u64>;

/// Returns the records among these rules.
fn records_among(rules: &[Listed]) -> Vec<NftRecord> {
    rules.iter().filter_map(|listed| Some(Record { rule: listed.handle, owned: read_record_rule(listed)? })).collect()
}

/// How many keys are searched for. For more, every record is read, because each record that is
/// found by the chain's index is a request.
const SEARCHED_MAX: usize = 16;

/// A chain of records.
pub(crate) struct RecordChain {
    family: Family,
    table: String,
    pub(crate) name: &'static str,
    /// The chain in the kernel; `None` if it does not exist.
    pub(super) existing: Option<Chain>,
    /// Returns the objects that a record requires.
    objects: fn(&OwnedAddress) -> Vec<Object>,
}

impl RecordChain {
    /// Looks the chain up.
    pub(super) fn find(
        nft: &mut Nft,
        table: Table<'_>,
        name: &'static str,
        objects: fn(&OwnedAddress) -> Vec<Object>,
    ) -> Result<RecordChain> {
        let existing = nft.find_chain(table, name)?;
        Ok(RecordChain { family: table.family, table: table.name.to_owned(), name, existing, objects })
    }

    pub(crate) fn table(&self) -> Table<'_> {
        Table { family: self.family, name: &self.table }
    }

    /// Returns the records of all attachments.
    pub(crate) fn records(&self, nft: &mut Nft) -> Result<Vec<NftRecord>> {
        let Some(chain) = &self.existing else { return Ok(Vec::new()) };
        Ok(records_among(&nft.rules(self.table(), &chain.name)?))
    }

    /// Returns the records that have one of the `wanted` keys: that of an owner's name as the
    /// comment, or that of an address. The result can contain other records too. Of a long chain,
    /// reads only the rules that its index has for the keys, or all rules for more than
    /// [`SEARCHED_MAX`] keys.
    pub(super) fn search(&self, nft: &mut Nft, wanted: &[Key], if_missing: IfMissing) -> Result<Vec<NftRecord>> {
        // No chain, or too many keys.
        let Some(chain) = self.existing.as_ref().filter(|_| wanted.len() <= SEARCHED_MAX) else {
            return self.records(nft);
        };
        let search = Search { keys_of: keys, appended: &[], wanted, if_missing };
        let rules = nft.rules_with_keys(self.table(), chain, search)?;
        Ok(records_among(&rules))
    }

    /// Adds to `batch` the changes after which the attachment has exactly the records of
    /// `wanted.in_table` in this chain, with all objects that they require. Removes the [stale
    /// records](Wanted::stale_records). Sets `written.replaced`, and `written.changed` if a record
    /// is added. The chain must exist, or `batch` must create it. An index is also trusted if no
    /// record is added: otherwise each ADD would read the whole chain of an earlier configuration.
    pub(super) fn ensure(
        &self,
        nft: &mut Nft,
        batch: &mut Batch,
        wanted: &Wanted<'_>,
        written: &mut Written,
    ) -> Result<()> {
        let addresses = wanted.addresses.iter().map(|owned| Key::address(owned.address));
        let keys: Vec<Key> = addresses.chain([Key::comment(wanted.owner)]).collect();
        let records = self.search(nft, &keys, IfMissing::TrustIndex)?;
        let stale = wanted.stale_records(&records, &mut written.replaced)?;
        self.remove(nft, batch, &stale, wanted.in_table)?;
        written.changed |= self.add(nft, batch, &records, wanted.in_table)?;
        Ok(())
    }

    /// Adds to `batch` the removal of the selected attachments' records, and of the objects that
    /// only these require.
    pub(super) fn purge(&self, nft: &mut Nft, batch: &mut Batch, selection: AttachmentFilter<'_>) -> Result<()> {
        let is_selected = selection.selector(owner::NAME);
        let records = match selection {
            AttachmentFilter::One { attachment, .. } => {
                self.search(nft, &[Key::comment(&owner::name(attachment))], IfMissing::ReadAll)?
            }
            AttachmentFilter::Garbage { .. } => self.records(nft)?,
        };
        let removed = records.iter().filter(|record| is_selected(&record.owned.owner));
        self.remove(nft, batch, &removed.collect::<Vec<&NftRecord>>(), &[])
    }

    /// Adds to `batch` the removal of the records `removed`, and of the objects that no other
    /// record and no address in `staying` requires. The caller adds the missing records of
    /// `staying`.
    pub(super) fn remove(
        &self,
        nft: &mut Nft,
        batch: &mut Batch,
        removed: &[&NftRecord],
        staying: &[OwnedAddress],
    ) -> Result<()> {
        for record in removed {
            batch.delete_rule(self.table(), self.name, record.rule);
        }
        let mut unneeded: BTreeSet<Object> = removed.iter().flat_map(|record| (self.objects)(&record.owned)).collect();
        if unneeded.is_empty() {
            return Ok(());
        }
        // An element is only required by records of its address, but a rule or a chain can be
        // required by any record.
        let records = if unneeded.iter().all(|object| matches!(object, Object::Element { .. })) {
            let keys: Vec<Key> = removed.iter().map(|record| Key::address(record.owned.address)).collect();
            self.search(nft, &keys, IfMissing::ReadAll)?
        } else {
            self.records(nft)?
        };
        let removed_handles: BTreeSet<u64> = removed.iter().map(|record| record.rule).collect();
        let remaining = records.iter().filter(|record| !removed_handles.contains(&record.rule));
        for object in remaining.map(|record| &record.owned).chain(staying).flat_map(self.objects) {
            unneeded.remove(&object);
        }
        for object in unneeded {
            object.purge(nft, batch, self.table())?;
        }
        Ok(())
    }

    /// Adds to `batch` the records of `wanted` that are not among `records`, and the missing
    /// objects that `wanted` requires. Returns whether it adds a record. All chains and sets must
    /// exist, or `batch` must create them.
    pub(super) fn add(
        &self,
        nft: &mut Nft,
        batch: &mut Batch,
        records: &[NftRecord],
        wanted: &[OwnedAddress],
    ) -> Result<bool> {
        // `ensured`: two addresses can require the same rule, and `Object::ensure` does not see
        // that `batch` already adds the rule.
        let (mut adds_record, mut ensured) = (false, BTreeSet::new());
        for owned in wanted {
            if !records.iter().any(|record| record.owned == *owned) {
                batch.append_rule(self.table(), self.name, &record_rule(self.table(), owned)?);
                adds_record = true;
            }
            for object in (self.objects)(owned) {
                if ensured.insert(object.clone()) {
                    object.ensure(nft, batch, self.table())?;
                }
            }
        }
        Ok(adds_record)
    }
}
