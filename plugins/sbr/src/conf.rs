//! Reads and checks the configuration of the plugin `sbr`.

use std::net::IpAddr;

use cni::config::NetConf;
use cni::{Error, Result};
use cni_linux::Family;
use serde::Deserialize;

/// A checked configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Conf {
    /// ADD adds rules that lead to this table, which another program fills. No route is changed.
    Table(u32),
    /// ADD moves the interface's routes into unused tables, one for each address, and adds rules
    /// that lead there.
    FreeTables {
        /// The configured gateways, at most one of each family.
        gateways: Vec<IpAddr>,
        /// Which of the interface's routes the main table has afterwards.
        main_table: MainTable,
    },
}

/// Which of the interface's routes the main table has after ADD, apart from those that always stay:
/// IPv6 link-local routes, and routes of a family in which the interface has no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MainTable {
    /// None.
    Emptied,
    /// `addSourceHints`: a route to the network of each address, with the address as the source of
    /// packets to that network, and the IPv4 routes to other networks on the link.
    SourceHints,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Keys {
    table: Option<i64>,
    gateways: Vec<String>,
    add_source_hints: bool,
}

impl Conf {
    /// Reads the configuration. If `table` is set, `gateways` and `addSourceHints` are ignored, as
    /// in Go's plugin.
    ///
    /// # Errors
    /// - Code 6 if a key has the wrong type.
    /// - Code 7 if the table or a gateway is invalid, or `gateways` has more than two entries or
    ///   two of one family.
    pub(crate) fn new(conf: &NetConf) -> Result<Conf> {
        let keys: Keys = conf.decode_chained()?;
        if let Some(table) = keys.table {
            let table = u32::try_from(table).ok().filter(|table| *table != 0);
            let table = table.ok_or_else(|| Error::config("table must be a number from 1 to 4294967295"))?;
            return Ok(Conf::Table(table));
        }
        if keys.gateways.len() > 2 {
            let msg = "gateways list cannot contain more than 2 entries (one IPv4, one IPv6)";
            return Err(Error::config(msg));
        }
        let mut gateways: Vec<IpAddr> = Vec::new();
        for text in &keys.gateways {
            let gateway: IpAddr =
                text.parse().map_err(|_| Error::config(format!("invalid static gateway IP address: {text}")))?;
            let gateway = gateway.to_canonical();
            if let Some(first) = gateways.iter().find(|first| first.is_ipv4() == gateway.is_ipv4()) {
                let family = if gateway.is_ipv4() { "IPv4" } else { "IPv6" };
                let msg = format!("gateways list contains multiple {family} addresses: {first} and {text}");
                return Err(Error::config(msg));
            }
            gateways.push(gateway);
        }
        let main_table = if keys.add_source_hints { MainTable::SourceHints } else { MainTable::Emptied };
        Ok(Conf::FreeTables { gateways, main_table })
    }

    /// Returns the configured gateway of a family, or `None` if there is none.
    pub(crate) fn gateway(&self, family: Family) -> Option<IpAddr> {
        match self {
            Conf::Table(_) => None,
            Conf::FreeTables { gateways, .. } => {
                gateways.iter().copied().find(|gateway| Family::of(*gateway) == family)
            }
        }
    }
}
