//! Describes the owner of an address: the attachment that has the address, and its ingress policy.
//!
//! The rules that accept an address cannot name an attachment: in iptables they are Go's, byte for
//! byte, and in nftables the addresses are elements of a set. So each backend has a chain that
//! records the owners: it has one rule without a verdict for each address of each attachment, with
//! the owner's name as its comment. No rule leads to that chain.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::owner::OwnerForm;
use cni::AttachmentId;
use cni::attachment::Marked;
use cni::hash::sha512_hex;
use cni_linux::Netlink;
use cni_linux::error::Result;

/// The longest comment that `nft` accepts. With a longer one, `nft` could not load its own output
/// of `nft list ruleset`.
const NAME_MAX: usize = 128;
/// The number of hex digits of a hash in a name.
const HASH_DIGITS: usize = 32;

/// The ingress policy: which other containers may open connections to a container.
///
/// Every policy except `Open` isolates the container's bridge: no packet passes from one isolated
/// bridge to another.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ingress {
    /// All containers.
    #[default]
    Open,
    /// Containers on this bridge, and on bridges that are not isolated.
    SameBridge(String),
    /// Only containers on bridges that are not isolated, so not those on this bridge.
    Isolated(String),
}

impl Ingress {
    /// Returns the bridge that is isolated; `None` for [`Open`](Ingress::Open).
    pub fn bridge(&self) -> Option<&str> {
        match self {
            Ingress::Open => None,
            Ingress::SameBridge(bridge) | Ingress::Isolated(bridge) => Some(bridge),
        }
    }

    /// Returns the policy's name in configurations.
    pub fn name(&self) -> &'static str {
        match self {
            Ingress::Open => "open",
            Ingress::SameBridge(_) => "same-bridge",
            Ingress::Isolated(_) => "isolated",
        }
    }
}

/// One address of one attachment.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct OwnedAddress {
    /// The attachment's [`name`].
    pub(crate) owner: String,
    pub(crate) address: IpAddr,
    pub(crate) ingress: Ingress,
    /// Whether new connections are accepted that were redirected to the address (DNAT), as those to
    /// the host ports of portmap.
    pub(crate) accepts_redirected: bool,
}

impl OwnedAddress {
    /// Returns an address with the policy `open`, without redirected connections.
    pub(super) fn open(owner: &str, address: IpAddr) -> OwnedAddress {
        OwnedAddress { owner: owner.to_owned(), address, ingress: Ingress::Open, accepts_redirected: false }
    }
}

/// Returns the hash that replaces a network or a container ID in a name that would be too long.
fn hashed(text: &str) -> String {
    format!("#{}", sha512_hex(&[text.as_bytes()], HASH_DIGITS))
}

/// Returns the attachment's name as an owner: its alias, `cni:NETWORK/CONTAINER/IFNAME`, or the
/// same with hashes of network and container if the alias is longer than [`NAME_MAX`].
pub(crate) fn name(attachment: &AttachmentId) -> String {
    let alias = attachment.alias();
    if alias.len() <= NAME_MAX {
        return alias;
    }
    format!("cni:{}/{}/{}", hashed(&attachment.network), hashed(&attachment.container_id), attachment.ifname)
}

/// The form of the owners of records: their [`name`]s. Those of a network's attachments begin with
/// the network's name or with its hash.
pub(crate) const NAME: OwnerForm = OwnerForm {
    name,
    prefixes: |network| vec![AttachmentId::network_prefix(network), AttachmentId::network_prefix(&hashed(network))],
};

/// An existing record.
#[derive(Clone, Debug)]
pub(crate) struct Record<R> {
    /// The rule: with iptables as it was read, with nftables its handle.
    pub(super) rule: R,
    /// What it records.
    pub(crate) owned: OwnedAddress,
}

/// The addresses that an ADD records.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    /// The [`name`] of the attachment.
    pub(super) owner: &'a str,
    /// All its addresses.
    pub(super) addresses: &'a [OwnedAddress],
    /// Those that belong to this table: after the ADD, the table has a record of each.
    pub(super) in_table: &'a [OwnedAddress],
}

impl Wanted<'_> {
    /// Returns those of a table's `records` that the ADD removes: those of the attachment that are
    /// not `in_table`, and the [outdated](outdated_records) ones of other attachments. Sets
    /// `replaced` to true if `records` has any of the attachment, or an outdated one.
    ///
    /// # Errors
    /// As [`outdated_records`].
    pub(super) fn stale_records<'r, R>(
        &self,
        records: &'r [Record<R>],
        replaced: &mut bool,
    ) -> Result<Vec<&'r Record<R>>> {
        let outdated: BTreeSet<_> = outdated_records(records, self.owner, self.addresses)?.into_iter().collect();
        let in_table: BTreeSet<&OwnedAddress> = self.in_table.iter().collect();
        let is_own = |record: &Record<R>| record.owned.owner == self.owner;
        *replaced |= !outdated.is_empty() || records.iter().any(is_own);
        let is_stale = |record: &&Record<R>| {
            if is_own(record) { !in_table.contains(&record.owned) } else { outdated.contains(&record.owned) }
        };
        Ok(records.iter().filter(is_stale).collect())
    }
}

/// Returns the contents of the outdated `records`: those that another attachment of the same
/// network has for one of `addresses`. The IPAM plugin has just given the address to the attachment
/// `owner`, and a network gives an address to one container at a time. So the other attachment has
/// ended without a DEL. A record is not outdated if a link on the host names its attachment: then
/// the configuration may give the address to two containers.
///
/// # Errors
/// If the links of the host cannot be read, which is only necessary if there is such a record.
pub(super) fn outdated_records<'r, R>(
    records: &'r [Record<R>],
    owner: &str,
    addresses: &[OwnedAddress],
) -> Result<Vec<&'r OwnedAddress>> {
    // The beginning of an owner's name: `cni:` and the network's name or hash.
    let network = |owner: &str| owner.split('/').next().map(str::to_owned);
    let addresses: BTreeSet<IpAddr> = addresses.iter().map(|owned| owned.address).collect();
    let mut outdated: Vec<&OwnedAddress> = records.iter().map(|record| &record.owned).collect();
    outdated.retain(|record| {
        record.owner != owner && network(&record.owner) == network(owner) && addresses.contains(&record.address)
    });
    if outdated.is_empty() {
        return Ok(outdated);
    }
    let mut owners_with_link = BTreeSet::new();
    for link in Netlink::open()?.list_links()? {
        // An alias with a hash in place of the container ID does not name the attachment.
        let marked = link.alias.as_deref().and_then(AttachmentId::parse);
        if let Some(Marked { network, container_id: Some(container_id), ifname }) = marked {
            owners_with_link.insert(name(&AttachmentId::new(network, container_id, ifname)));
        }
    }
    outdated.retain(|record| !owners_with_link.contains(&record.owner));
    Ok(outdated)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_is_hashed_and_keeps_its_network() {
        let short = AttachmentId::new("net", "c".repeat(64), "eth0");
        assert_eq!(name(&short), short.alias());
        for (network, container) in [("n".repeat(200), "c"), ("net".to_owned(), &*"c".repeat(128))] {
            let long = name(&AttachmentId::new(&network, container, "eth0"));
            assert!(long.len() <= NAME_MAX && AttachmentId::parse(&long).is_some(), "{long}");
            assert!((NAME.prefixes)(&network).iter().any(|prefix| long.starts_with(prefix)), "{long}");
            assert!(!(NAME.prefixes)("other").iter().any(|prefix| long.starts_with(prefix)), "{long}");
        }
    }
}
