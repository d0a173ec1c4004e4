//! Finds free addresses in an index.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Index;
use super::table::TableError;
use crate::allocator::Occupied;

/// How many addresses a search looks up one by one. After that, reading the whole table is faster.
const MAX_LOOKUPS: u32 = 64;

/// A search for free addresses. The round robin continues after the address that was allocated
/// last, so the next one is nearly always free.
pub(crate) struct FreeAddresses<'a> {
    index: &'a Index,
    lookups: u32,
    /// All occupied addresses, or `None` before the whole table was read.
    occupied: Option<HashSet<IpAddr>>,
}

impl<'a> FreeAddresses<'a> {
    /// Returns a search in this index.
    pub(crate) fn new(index: &'a Index) -> FreeAddresses<'a> {
        FreeAddresses { index, lookups: 0, occupied: None }
    }

    /// Whether an address is occupied.
    fn is_occupied(&mut self, address: IpAddr) -> Result<bool, TableError> {
        if let Some(occupied) = &self.occupied {
            return Ok(occupied.contains(&address));
        }
        if self.lookups < MAX_LOOKUPS {
            self.lookups += 1;
            return Ok(self.index.record(address)?.is_some_and(|record| record.is_occupied()));
        }
        let occupied = self.occupied.insert(self.index.occupied()?.into_iter().collect());
        Ok(occupied.contains(&address))
    }
}

impl Occupied for FreeAddresses<'_> {
    type Error = TableError;

    fn next_free(&mut self, from: IpAddr) -> Result<Option<IpAddr>, TableError> {
        let mut address = from;
        while self.is_occupied(address)? {
            match successor(address) {
                Some(next) => address = next,
                None => return Ok(None),
            }
        }
        Ok(Some(address))
    }
}

/// Returns the next address of the same family, or `None` after the last one.
fn successor(address: IpAddr) -> Option<IpAddr> {
    match address {
        IpAddr::V4(v4) => v4.to_bits().checked_add(1).map(|bits| Ipv4Addr::from_bits(bits).into()),
        IpAddr::V6(v6) => v6.to_bits().checked_add(1).map(|bits| Ipv6Addr::from_bits(bits).into()),
    }
}
