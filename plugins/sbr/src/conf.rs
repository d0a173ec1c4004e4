//! The configuration of `sbr`: JSON in, impossible states out.

use std::net::IpAddr;

use cni::config::NetConf;
use cni::json::{Json, UnknownKey};
use cni::{Code, Error, Result};
use cni_linux::Family;
use serde::Deserialize;

/// A sound configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Conf {
    /// Adds rules to a table that another program fills. No route is changed.
    Table(u32),
    /// Rules to free tables, into which the interface's routes are moved.
    FreeTables {
        /// The configured gateways, at most one of each family.
        gateways: Vec<IpAddr>,
        /// The routes that stay in the main table.
        main: MainTable,
    },
}

/// The interface's routes that stay in the main table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MainTable {
    /// Nothing.
    Emptied,
    /// A route to the network of each address, which makes that address the source of packets to
    /// it.
    SourceHints,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Raw {
    table: Option<i64>,
    gateways: Vec<String>,
    add_source_hints: bool,
}

impl Conf {
    /// Reads the configuration. `gateways` and `addSourceHints` are not read where `table` is set,
    /// as in Go.
    ///
    /// # Errors
    /// 6 and 7, with Go's texts where it has them.
    pub(crate) fn new(conf: &NetConf) -> Result<Conf> {
        let raw: Raw = conf
            .json()
            .decode()
            .map_err(|error| Error::caused(Code::DECODE, "failed to parse network configuration", error))?;
        if let Some(table) = raw.table {
            let table = u32::try_from(table).ok().filter(|table| *table != 0);
            let table = table.ok_or_else(|| Error::config("table must be a number from 1 to 4294967295"))?;
            return Ok(Conf::Table(table));
        }
        if raw.gateways.len() > 2 {
            let msg = "gateways list cannot contain more than 2 entries (one IPv4, one IPv6)";
            return Err(Error::config(msg));
        }
        let mut gateways: Vec<IpAddr> = Vec::new();
        for text in &raw.gateways {
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
        let main = if raw.add_source_hints { MainTable::SourceHints } else { MainTable::Emptied };
        Ok(Conf::FreeTables { gateways, main })
    }

    /// The configured gateway of a family.
    pub(crate) fn gateway(&self, family: Family) -> Option<IpAddr> {
        match self {
            Conf::Table(_) => None,
            Conf::FreeTables { gateways, .. } => {
                gateways.iter().copied().find(|gateway| Family::of(*gateway) == family)
            }
        }
    }
}

/// Returns the keys that this plugin does not read.
pub(crate) fn unknown_keys(json: &Json) -> Vec<UnknownKey> {
    json.unknown_keys::<Raw>()
}
