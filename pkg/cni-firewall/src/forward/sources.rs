//! Records which attachments have an address in a zone of firewalld. firewalld calls such an
//! address a *source*.
//!
//! firewalld does not record owners. So the chain `cni_firewalld` of the table `inet cni_firewall`
//! has a rule without a verdict for each address, with the owner's name as its comment. No rule
//! leads to that chain. firewalld does not flush the table when it reloads or stops.

use std::net::IpAddr;

use super::nftables::{OWN_TABLE, OWN_TABLE_COMMENT, owner_rule, read_owner_rule};
use super::owner::{self, Ingress, OwnedAddress};
use crate::engine;
use crate::nft::{Batch, Family, Nft, Table};
use crate::owner::AttachmentFilter;
use cni::AttachmentId;
use cni_linux::error::Result;

/// The chain of the records.
const RECORDS: &str = "cni_firewalld";
const TABLE: Table<'_> = Table { family: Family::Inet, name: OWN_TABLE };

/// The recorded addresses.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The addresses of the selected attachments.
    pub own: Vec<IpAddr>,
    /// The addresses of all attachments that are not selected.
    pub others: Vec<IpAddr>,
}

/// Returns the recorded addresses of all attachments, divided by `selection`.
///
/// # Errors
/// If the records cannot be read.
pub fn find(selection: AttachmentFilter<'_>) -> Result<Sources> {
    let selected = selection.owners(owner::NAME);
    let mut sources = Sources::default();
    for owned in list(&mut Nft::open()?)? {
        let addresses = if selected.contains(&owned.owner) { &mut sources.own } else { &mut sources.others };
        addresses.push(owned.address);
    }
    Ok(sources)
}

/// Returns the records of all attachments.
pub(crate) fn list(nft: &mut Nft) -> Result<Vec<OwnedAddress>> {
    Ok(nft.rules(TABLE, RECORDS)?.iter().filter_map(read_owner_rule).collect())
}

/// Records `addresses` as those of the attachment, and removes its other records and those that
/// attachments without a DEL have left for `addresses`. Returns whether there were records of the
/// attachment or such records.
///
/// # Errors
/// If records cannot be read or written.
/// [`Error::is_unsupported`](cni_linux::error::Error::is_unsupported) on a kernel without
/// nf_tables.
pub fn record(attachment: &AttachmentId, addresses: &[IpAddr]) -> Result<bool> {
    let owner = owner::name(attachment);
    let mut records = Vec::new();
    for address in addresses {
        records.push(OwnedAddress {
            owner: owner.clone(),
            address: *address,
            ingress: Ingress::Open,
            accepts_redirected: false,
        });
    }
    replace(AttachmentFilter::one(attachment), &records)
}

/// Removes the records of the selected attachments.
///
/// # Errors
/// If records cannot be read or removed.
pub fn forget(selection: AttachmentFilter<'_>) -> Result<()> {
    replace(selection, &[]).map(drop)
}

/// Replaces the records of the selected attachments with `records`, in one transaction. Returns
/// whether there were any, or others that are outdated.
fn replace(selection: AttachmentFilter<'_>, records: &[OwnedAddress]) -> Result<bool> {
    let mut nft = Nft::open()?;
    let selected = selection.owners(owner::NAME);
    let mut replaced = false;
    let plan = |nft: &mut Nft, batch: &mut Batch| {
        let mut existing = Vec::new();
        let rules = nft.rules(TABLE, RECORDS)?;
        let outdated = match records.first() {
            Some(first) => owner::outdated_records(rules.iter().filter_map(read_owner_rule), &first.owner, records)?,
            None => Vec::new(),
        };
        for listed in rules {
            let Some(owned) = read_owner_rule(&listed) else { continue };
            let is_replaced = selected.contains(&owned.owner) || outdated.contains(&owned);
            replaced |= is_replaced;
            if records.contains(&owned) {
                existing.push(owned);
            } else if is_replaced {
                batch.delete_rule(TABLE, RECORDS, listed.handle);
            }
        }
        let missing: Vec<&OwnedAddress> = records.iter().filter(|owned| !existing.contains(owned)).collect();
        if !missing.is_empty() {
            batch.ensure_table(TABLE, Some(OWN_TABLE_COMMENT));
            nft.add_missing_chain(batch, TABLE, RECORDS)?;
        }
        for owned in missing {
            batch.append_rule(TABLE, RECORDS, &owner_rule(TABLE, owned)?);
        }
        Ok(())
    };
    engine::change(&mut nft, plan)?;
    Ok(replaced)
}
