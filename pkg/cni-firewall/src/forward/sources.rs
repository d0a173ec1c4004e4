//! Records which attachments have an address in a zone of firewalld. firewalld calls such an
//! address a *source*.
//!
//! firewalld does not record owners. So the chain `cni_firewalld` of the table `inet cni_firewall`
//! has a rule without a verdict for each address, with the owner's name as its comment. No rule
//! leads to that chain. firewalld does not flush the table when it reloads or stops.

use std::net::IpAddr;

use super::Written;
use super::nftables::{OWN_TABLE, OWN_TABLE_COMMENT};
use super::owner::{self, OwnedAddress, Wanted};
use super::records::RecordChain;
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
    pub selected: Vec<IpAddr>,
    /// The addresses of all attachments that are not selected.
    pub others: Vec<IpAddr>,
}

/// Returns the recorded addresses of all attachments, divided by `selection`.
///
/// # Errors
/// If the records cannot be read.
pub fn find(selection: AttachmentFilter<'_>) -> Result<Sources> {
    let is_selected = selection.selector(owner::NAME);
    let mut sources = Sources::default();
    let mut nft = Nft::open()?;
    for record in find_record_chain(&mut nft)?.records(&mut nft)? {
        let owned = record.owned;
        let addresses = if is_selected(&owned.owner) { &mut sources.selected } else { &mut sources.others };
        addresses.push(owned.address);
    }
    Ok(sources)
}

/// Looks up the chain of the records. A record requires no other object.
pub(crate) fn find_record_chain(nft: &mut Nft) -> Result<RecordChain> {
    RecordChain::find(nft, TABLE, RECORDS, |_| Vec::new())
}

/// Records `addresses` as those of the attachment. Removes its other records, and the outdated
/// ones: those that attachments without a DEL have left for `addresses`. Returns whether there were
/// records of the attachment or outdated ones.
///
/// # Errors
/// If records cannot be read or written.
/// [`Error::is_unsupported`](cni_linux::error::Error::is_unsupported) on a kernel without
/// nf_tables.
pub fn record(attachment: &AttachmentId, addresses: &[IpAddr]) -> Result<bool> {
    let owner = owner::name(attachment);
    let records: Vec<OwnedAddress> = addresses.iter().map(|address| OwnedAddress::open(&owner, *address)).collect();
    let mut written = Written::default();
    let plan = |nft: &mut Nft, batch: &mut Batch| {
        let chain = find_record_chain(nft)?;
        // Not for an existing chain: that would make closing the socket slow.
        if chain.existing.is_none() {
            batch.ensure_table(TABLE, Some(OWN_TABLE_COMMENT));
            batch.ensure_chain(TABLE, RECORDS, None);
        }
        let wanted = Wanted { owner: &owner, addresses: &records, in_table: &records };
        chain.ensure(nft, batch, &wanted, &mut written)
    };
    engine::change(&mut Nft::open()?, plan)?;
    Ok(written.replaced)
}

/// Removes the records of the selected attachments.
///
/// # Errors
/// If records cannot be read or removed.
pub fn forget(selection: AttachmentFilter<'_>) -> Result<()> {
    engine::change(&mut Nft::open()?, |nft, batch| find_record_chain(nft)?.purge(nft, batch, selection))
}
