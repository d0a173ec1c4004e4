//! Which attachment an address belongs to that firewalld has in one of its zones.
//!
//! firewalld does not know owners. So each address has a rule without a verdict in the chain
//! `cni_firewalld` of the table `inet cni_firewall`, to which nothing leads, and the rule's comment
//! is the owner's name. firewalld neither flushes that table when it reloads nor removes it when it
//! stops.

use std::net::IpAddr;

use super::nftables::{OWN, OWN_COMMENT, owner_rule, read};
use super::owner::{self, Ingress, Owned};
use crate::nft::{Batch, Family, Nft, Table};
use crate::retry;
use cni::AttachmentId;
use cni_linux::error::Result;

const SOURCES: &str = "cni_firewalld";
const TABLE: Table<'_> = Table { family: Family::Inet, name: OWN };

/// Some of the attachments.
#[derive(Clone, Copy, Debug)]
pub enum AttachmentFilter<'a> {
    /// This one.
    Of(&'a AttachmentId),
    /// All of a network but these (containerID, ifname).
    Garbage {
        /// The network's name.
        network: &'a str,
        /// The attachments that are still valid.
        valid: &'a [(&'a str, &'a str)],
    },
}

impl AttachmentFilter<'_> {
    fn includes(&self) -> impl Fn(&Owned) -> bool {
        let (exact, prefixes, valid) = match self {
            AttachmentFilter::Of(mark) => (Some(owner::name(mark)), None, Vec::new()),
            AttachmentFilter::Garbage { network, valid } => {
                let name =
                    |(container, ifname): &(&str, &str)| owner::name(&AttachmentId::new(*network, *container, *ifname));
                (None, Some(owner::prefixes(network)), valid.iter().map(name).collect())
            }
        };
        move |owned| {
            let is_of_network = prefixes.iter().flatten().any(|prefix| owned.owner.starts_with(prefix));
            exact.as_ref() == Some(&owned.owner) || is_of_network && !valid.contains(&owned.owner)
        }
    }
}

/// The recorded addresses.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The addresses of the selected attachments.
    pub own: Vec<IpAddr>,
    /// The addresses of all other attachments.
    pub others: Vec<IpAddr>,
}

/// Returns what is recorded; nothing on a kernel without nf_tables.
///
/// # Errors
/// The kernel's.
pub fn find(whose: AttachmentFilter<'_>) -> Result<Sources> {
    let recorded = match Nft::open().and_then(|mut nft| all(&mut nft)) {
        Err(error) if error.is_unsupported() => return Ok(Sources::default()),
        recorded => recorded?,
    };
    let is_own = whose.includes();
    let (own, others): (Vec<Owned>, Vec<Owned>) = recorded.into_iter().partition(|owned| is_own(owned));
    let addresses = |all: Vec<Owned>| all.into_iter().map(|owned| owned.address).collect();
    Ok(Sources { own: addresses(own), others: addresses(others) })
}

/// Returns all that is recorded.
pub(crate) fn all(nft: &mut Nft) -> Result<Vec<Owned>> {
    Ok(nft.rules(TABLE, SOURCES)?.iter().filter_map(read).collect())
}

/// Makes these the recorded addresses of the attachment.
///
/// # Errors
/// The kernel's; EOPNOTSUPP and the like without nf_tables.
pub fn record(mark: &AttachmentId, addresses: &[IpAddr]) -> Result<()> {
    let owner = owner::name(mark);
    let owned = |address: &IpAddr| Owned { owner: owner.clone(), address: *address, ingress: Ingress::Open };
    change(AttachmentFilter::Of(mark), &addresses.iter().map(owned).collect::<Vec<_>>())
}

/// Removes the records of these attachments.
///
/// # Errors
/// The kernel's.
pub fn forget(whose: AttachmentFilter<'_>) -> Result<()> {
    match change(whose, &[]) {
        Err(error) if error.is_unsupported() => Ok(()),
        done => done,
    }
}

fn change(whose: AttachmentFilter<'_>, wanted: &[Owned]) -> Result<()> {
    let mut nft = Nft::open()?;
    let is_own = whose.includes();
    retry(|| {
        let mut batch = Batch::new();
        batch.only_at(nft.wait_for_generation()?);
        let mut there = Vec::new();
        for listed in nft.rules(TABLE, SOURCES)? {
            let Some(owned) = read(&listed) else { continue };
            if wanted.contains(&owned) {
                there.push(owned);
            } else if is_own(&owned) {
                batch.delete_rule(TABLE, SOURCES, listed.handle);
            }
        }
        let missing: Vec<&Owned> = wanted.iter().filter(|owned| !there.contains(owned)).collect();
        if !missing.is_empty() {
            batch.ensure_table(TABLE, Some(OWN_COMMENT));
            nft.add_missing_chain(&mut batch, TABLE, SOURCES)?;
        }
        for owned in missing {
            batch.append_rule(TABLE, SOURCES, &owner_rule(TABLE, owned)?);
        }
        nft.commit(batch)
    })
}
