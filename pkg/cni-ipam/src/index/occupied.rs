//! Answers many times in a row whether an address is occupied, for the search for a free one.

use std::collections::HashSet;
use std::net::IpAddr;

use super::Index;
use super::table::TableError;

/// How many addresses are looked up one by one. After that, reading the whole table is faster.
const MAX_LOOKUPS: u32 = 64;

/// The occupied addresses during one search. The round robin continues after the address that was
/// allocated last, so the first lookup nearly always finds a free address.
pub(crate) struct OccupiedAddresses<'a> {
    index: &'a Index,
    lookups: u32,
    /// All occupied addresses, or `None` before the whole table was read.
    all: Option<HashSet<IpAddr>>,
}

impl<'a> OccupiedAddresses<'a> {
    /// Returns the occupied addresses of this index.
    pub(crate) fn new(index: &'a Index) -> OccupiedAddresses<'a> {
        OccupiedAddresses { index, lookups: 0, all: None }
    }

    /// Whether an address is occupied.
    pub(crate) fn contains(&mut self, address: IpAddr) -> Result<bool, TableError> {
        if let Some(all) = &self.all {
            return Ok(all.contains(&address));
        }
        if self.lookups < MAX_LOOKUPS {
            self.lookups += 1;
            return Ok(self.index.record(address)?.is_some_and(|record| record.is_occupied()));
        }
        let all = self.all.insert(self.index.occupied()?.into_iter().collect());
        Ok(all.contains(&address))
    }
}
