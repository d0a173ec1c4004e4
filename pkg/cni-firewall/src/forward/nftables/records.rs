//! Reads and writes the records: the rules that name the owners of addresses.

use std::net::IpAddr;

use cni_linux::error::Result;
use cni_linux::route;

use super::{FAMILIES, OWNERS, match_family, require_match};
use crate::forward::egress;
use crate::forward::iptables::read_record;
use crate::forward::owner::{Ingress, OwnedAddress};
use crate::iptables::rule_in_words;
use crate::nft::expr::{daddr, iifname, not, oifname, saddr};
use crate::nft::{Chain, Family, Key, Listed, Nft, Rule, Search, Table};

/// Returns the rule without a verdict that records the owner and the policy of an address. The
/// address as the destination too means that redirected connections are accepted.
pub(in crate::forward) fn owner_rule(table: Table<'_>, owned: &OwnedAddress) -> Result<Rule> {
    let mut exprs = [match_family(table, owned.address), saddr(owned.address)].concat();
    if owned.accepts_redirected {
        exprs.extend(daddr(owned.address));
    }
    if let Some(bridge) = owned.ingress.bridge() {
        let to_bridge = require_match(oifname(bridge), bridge)?;
        exprs.extend(require_match(iifname(bridge), bridge)?);
        exprs.extend(if matches!(owned.ingress, Ingress::Isolated(_)) { to_bridge } else { not(to_bridge) });
    }
    Ok(Rule::new(exprs).with_comment(owned.owner.clone()))
}

/// Reads a rule that [`owner_rule`] has written; `None` for other rules.
pub(crate) fn read_owner_rule(listed: &Listed) -> Option<OwnedAddress> {
    // The rule does not name its family. Decoded for the wrong family, it has no address.
    let families = [route::Family::V4, route::Family::V6];
    families.into_iter().find_map(|family| read_record(&rule_in_words(family, listed.clone())))
}

/// How many addresses are searched for. For more, every record is read, because each record that is
/// found by the chain's index is a request.
const SEARCHED_MAX: usize = 16;

/// The chain [`OWNERS`] of one table.
pub(crate) struct OwnersChain {
    family: Family,
    table: String,
    chain: Chain,
}

/// A rule of [`OWNERS`] and what it records.
pub(crate) struct Record {
    pub(super) handle: u64,
    pub(crate) owned: OwnedAddress,
}

impl OwnersChain {
    pub(crate) fn table(&self) -> Table<'_> {
        Table { family: self.family, name: &self.table }
    }

    /// Returns the records of all attachments.
    pub(crate) fn records(&self, nft: &mut Nft) -> Result<Vec<Record>> {
        Ok(nft.rules(self.table(), OWNERS)?.iter().filter_map(Record::read).collect())
    }

    /// Returns the records of the attachment `owner` and those of the addresses. The result can
    /// contain some other records too. Of a long chain only these are read, unless they are many.
    /// `appends` says whether the caller appends records that are not found.
    pub(super) fn find(
        &self,
        nft: &mut Nft,
        owner: Option<&str>,
        addresses: impl ExactSizeIterator<Item = IpAddr>,
        appends: bool,
    ) -> Result<Vec<Record>> {
        if addresses.len() > SEARCHED_MAX {
            return self.records(nft);
        }
        let wanted: Vec<Key> = owner.map(Key::comment).into_iter().chain(addresses.map(Key::address)).collect();
        let search = Search { keys_of: keys, appended: &[], wanted: &wanted, reads_all_if_missing: !appends };
        let rules = nft.rules_with_keys(self.table(), &self.chain, search)?;
        Ok(rules.iter().filter_map(Record::read).collect())
    }
}

impl Record {
    fn read(listed: &Listed) -> Option<Record> {
        Some(Record { handle: listed.handle, owned: read_owner_rule(listed)? })
    }
}

/// Returns the keys of a rule of [`OWNERS`]. A rule that is not a record has only that of its
/// comment.
fn keys(listed: &Listed) -> Vec<Key> {
    let comment = Key::comment(listed.rule.comment.as_deref().unwrap_or_default());
    std::iter::once(comment).chain(read_owner_rule(listed).map(|owned| Key::address(owned.address))).collect()
}

/// The chains of records in nf_tables.
pub(crate) struct Records {
    /// The chains [`OWNERS`] of all tables: an earlier configuration may have named an
    /// administrator's chain in another table.
    pub(crate) owners: Vec<OwnersChain>,
    /// Whether there are records of [`egress`].
    pub(crate) has_egress: bool,
}

/// Returns the chains of records in all tables.
pub(crate) fn list_records(nft: &mut Nft) -> Result<Records> {
    let mut records = Records { owners: Vec::new(), has_egress: false };
    for family in FAMILIES {
        for name in nft.tables(family)? {
            let table = Table { family, name: &name };
            records.has_egress |= table == egress::TABLE && nft.find_chain(table, egress::OWNERS)?.is_some();
            if let Some(chain) = nft.find_chain(table, OWNERS)? {
                records.owners.push(OwnersChain { family, table: name, chain });
            }
        }
    }
    Ok(records)
}
