//! The chain from which forwarded packets reach the rules of the backend `nftables`.

use std::fmt;
use std::net::IpAddr;

use super::nftables::{FAMILIES, FORWARD, OWN_CHAIN, OWN_TABLE, OWNERS, STAGE_1, STAGE_2};
use crate::nft::{Family, Table};

/// The chain from which forwarded packets reach the chain `cni_forward`: one of the
/// administrator's, or that of the plugins' own table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminChain {
    pub(super) family: Family,
    pub(super) table: String,
    pub(super) chain: String,
}

impl fmt::Display for AdminChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.table(), self.chain)
    }
}

impl AdminChain {
    /// Parses family, table and chain, as `inet filter forward`. `None` if the text has another
    /// form, or names a table or chain that the plugins write themselves.
    pub fn parse(text: &str) -> Option<AdminChain> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [family, table, chain] = words.as_slice() else { return None };
        let family = FAMILIES.into_iter().find(|known| known.name() == *family)?;
        let is_name = |name: &str| name.len() <= 128 && !name.chars().any(char::is_control);
        let is_own = *table == OWN_TABLE || [FORWARD, OWNERS, STAGE_1, STAGE_2].contains(chain);
        if is_own || !is_name(table) || !is_name(chain) {
            return None;
        }
        Some(AdminChain { family, table: (*table).to_owned(), chain: (*chain).to_owned() })
    }

    /// Returns the base chain of the plugins' own table.
    pub(super) fn own() -> AdminChain {
        AdminChain { family: Family::Inet, table: OWN_TABLE.to_owned(), chain: OWN_CHAIN.to_owned() }
    }

    pub(super) fn table(&self) -> Table<'_> {
        Table { family: self.family, name: &self.table }
    }

    pub(super) fn is_in_own_table(&self) -> bool {
        self.table == OWN_TABLE
    }

    /// Whether packets of the address's family reach the chain.
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
    fn a_place_is_a_family_a_table_and_a_chain() {
        let place = AdminChain::parse("inet filter forward").unwrap();
        assert_eq!((place.table().to_string(), place.chain.as_str()), ("inet filter".to_owned(), "forward"));
        for wrong in ["", "filter forward", "arp filter forward", "inet filter forward x", "inet cni_firewall forward"]
        {
            assert_eq!(AdminChain::parse(wrong), None, "{wrong}");
        }
        assert!(AdminChain::parse("inet filter cni_forward").is_none());
    }
}
