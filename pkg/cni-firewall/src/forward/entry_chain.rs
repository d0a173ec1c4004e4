//! Describes the chain from which forwarded packets reach the rules of the backend `nftables`.

use std::fmt;
use std::net::IpAddr;

use super::nftables::{CNI_FORWARD, FAMILIES, OWN_CHAIN, OWN_TABLE, OWNERS, STAGE_1, STAGE_2};
use crate::nft::{Family, Table};

/// The longest name of a table or chain that is accepted; the kernel's limit is higher.
const NAME_MAX: usize = 128;

/// The chain that jumps to the chain `cni_forward` of the same table: a chain of the administrator,
/// or the base chain of the plugins' own table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryChain {
    pub(super) family: Family,
    pub(super) table: String,
    pub(super) chain: String,
}

impl fmt::Display for EntryChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.table(), self.chain)
    }
}

impl EntryChain {
    /// Parses the administrator's chain, written as family, table and chain: `inet filter forward`.
    /// `None` if the text has a different form, or names a table or chain that the plugins create.
    pub fn parse(text: &str) -> Option<EntryChain> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [family, table, chain] = words.as_slice() else { return None };
        let family = FAMILIES.into_iter().find(|known| known.name() == *family)?;
        let is_name = |name: &str| name.len() <= NAME_MAX && !name.chars().any(char::is_control);
        let is_own = *table == OWN_TABLE || [CNI_FORWARD, OWNERS, STAGE_1, STAGE_2].contains(chain);
        if is_own || !is_name(table) || !is_name(chain) {
            return None;
        }
        Some(EntryChain { family, table: (*table).to_owned(), chain: (*chain).to_owned() })
    }

    /// Returns the base chain of the plugins' own table.
    pub(super) fn own() -> EntryChain {
        EntryChain { family: Family::Inet, table: OWN_TABLE.to_owned(), chain: OWN_CHAIN.to_owned() }
    }

    pub(super) fn table(&self) -> Table<'_> {
        Table { family: self.family, name: &self.table }
    }

    /// Whether the chain is in the plugins' own table, whose name `parse` refuses in every family.
    pub(super) fn is_in_own_table(&self) -> bool {
        self.table == OWN_TABLE
    }

    /// Whether the chain's table sees packets of the address's family.
    pub(super) fn sees(&self, address: IpAddr) -> bool {
        match self.family {
            Family::Ip => address.is_ipv4(),
            Family::Ip6 => address.is_ipv6(),
            Family::Inet | Family::Bridge => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_named_by_family_table_and_name() {
        let chain = EntryChain::parse("inet filter forward").unwrap();
        assert_eq!((chain.table().to_string(), chain.chain.as_str()), ("inet filter".to_owned(), "forward"));
        for wrong in ["", "filter forward", "arp filter forward", "inet filter forward x", "inet cni_firewall forward"]
        {
            assert_eq!(EntryChain::parse(wrong), None, "{wrong}");
        }
        assert!(EntryChain::parse("inet filter cni_forward").is_none());
    }
}
