//! The key `staticNeighbors`: permanent entries of the interface's neighbour table.

use std::net::IpAddr;

use cni::{Code, Error, Result};
use cni_linux::{Link, Mac, Neighbour, Netlink};
use serde::{Deserialize, Serialize};

use crate::backup::Record;

/// An entry in the backup that DEL removes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SavedNeighbour {
    pub(crate) ip: String,
    pub(crate) mac: String,
}

impl SavedNeighbour {
    /// Returns the backup's form of an entry.
    fn of(neighbour: &Neighbour) -> SavedNeighbour {
        SavedNeighbour { ip: neighbour.ip.to_string(), mac: neighbour.mac.to_string() }
    }

    /// Returns the entry, or `None` if the backup is damaged.
    fn read(&self) -> Option<Neighbour> {
        Some(Neighbour { ip: self.ip.parse().ok()?, mac: self.mac.parse().ok()? })
    }
}

/// Parses the entries of the configuration, each with IP address and MAC.
///
/// # Errors
/// Code 7 if an address is not a unicast address, or occurs twice.
pub(crate) fn parse<'a>(entries: impl Iterator<Item = (&'a str, &'a str)>) -> Result<Vec<Neighbour>> {
    let mut all: Vec<Neighbour> = Vec::new();
    for (ip, mac) in entries {
        let is_unicast = |ip: &IpAddr| !ip.is_unspecified() && !ip.is_multicast() && !ip.is_loopback();
        let Some(ip) = ip.parse().ok().filter(is_unicast) else {
            return Err(Error::config(format!("staticNeighbors: {ip:?} is not the IP address of a neighbour")));
        };
        let is_unicast = |mac: &Mac| !mac.is_multicast() && !mac.is_zero();
        let Some(mac) = mac.parse().ok().filter(is_unicast) else {
            return Err(Error::config(format!("staticNeighbors: {mac:?} is not a unicast MAC")));
        };
        if all.iter().any(|neighbour| neighbour.ip == ip) {
            return Err(Error::config(format!("staticNeighbors: {ip} occurs twice")));
        }
        all.push(Neighbour { ip, mac });
    }
    Ok(all)
}

/// Returns those of `wanted` that the interface does not have yet.
///
/// # Errors
/// Code 102 if an IP address has a permanent entry with another MAC.
pub(crate) fn missing(netlink: &Netlink, link: &Link, wanted: &[Neighbour]) -> Result<Vec<Neighbour>> {
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let existing = netlink.list_permanent_neighbours(link.index)?;
    let mut missing = Vec::with_capacity(wanted.len());
    for neighbour in wanted {
        match existing.iter().find(|existing| existing.ip == neighbour.ip) {
            None => missing.push(*neighbour),
            Some(existing) if existing.mac == neighbour.mac => {}
            Some(Neighbour { ip, mac }) => {
                let msg = format!("staticNeighbors: {} has the permanent neighbour {ip} with the MAC {mac}", link.name);
                return Err(Error::new(Code::CONFLICT, msg));
            }
        }
    }
    Ok(missing)
}

/// Adds entries that ADD will create to the record.
pub(crate) fn save(record: &mut Record, missing: &[Neighbour]) {
    for saved in missing.iter().map(SavedNeighbour::of) {
        record.neighbours.retain(|old| old.ip != saved.ip);
        record.neighbours.push(saved);
    }
}

/// Removes those of `neighbours` that the interface still has, with this MAC. Continues after an
/// error, and returns all errors.
pub(crate) fn purge(netlink: &Netlink, index: u32, neighbours: &[Neighbour]) -> Result<()> {
    if neighbours.is_empty() {
        return Ok(());
    }
    let existing = netlink.list_permanent_neighbours(index)?;
    let own = neighbours.iter().filter(|neighbour| existing.contains(neighbour));
    Error::join(own.filter_map(|neighbour| netlink.purge_neighbour(index, neighbour.ip).err()).map(Error::from))
}

/// Returns the entries in the record.
pub(crate) fn saved(record: &Record) -> Vec<Neighbour> {
    record.neighbours.iter().filter_map(SavedNeighbour::read).collect()
}
