//! Queries an index. The queries change nothing and read only the table and the header.
//!
//! An answer may be outdated, because it describes the folder at an earlier time. So the caller
//! reads the file of an address before it acts on the answer.

use std::io;
use std::net::IpAddr;

use super::oldest::oldest_key;
use super::record::{RECORD, address_from_payload, family, to_address};
use super::table::TableError;
use super::{Holder, Index, Record, bits, is_counter_of};
use crate::ranges::{Range, RangeSet, number};

impl Index {
    /// Returns the record of an address. `None` if the address is free and has no file.
    pub(crate) fn record(&self, address: IpAddr) -> Result<Option<Record>, TableError> {
        let key = Record::key(address);
        Ok(self.table.get(&key)?.map(|payload| Record::decode(&key, &payload)))
    }

    /// Returns all records, in no order.
    pub(crate) fn records(&self) -> io::Result<Vec<Record>> {
        let mut records = Vec::new();
        self.table.for_each(|key, payload| {
            if key.tag == RECORD {
                records.push(Record::decode(key, payload));
            }
        })?;
        Ok(records)
    }

    /// Returns the addresses whose files could not be read when the folder was read. Reads the
    /// whole table if there are any.
    pub(crate) fn unread(&self) -> io::Result<Vec<IpAddr>> {
        if !self.header.unread {
            return Ok(Vec::new());
        }
        let unread = self.records()?.into_iter().filter(|record| record.holder == Holder::Unread);
        Ok(unread.map(|record| record.address).collect())
    }

    /// Returns the addresses whose names belong to something else than reservations. Reads the
    /// whole table if there are any.
    pub(crate) fn foreign(&self) -> io::Result<Vec<IpAddr>> {
        if !self.header.foreign {
            return Ok(Vec::new());
        }
        let foreign = self.records()?.into_iter().filter(|record| record.holder == Holder::Unknown);
        Ok(foreign.map(|record| record.address).collect())
    }

    /// Returns the addresses of the set that have been reserved longest, the oldest first, as the
    /// last rebuild has stored them. The answer is only right while the index is exact. Returns
    /// none if the rebuild was not for this set.
    pub(crate) fn oldest(&self, set: &RangeSet) -> Result<Vec<IpAddr>, TableError> {
        let mut known = Vec::new();
        while let Some(payload) = self.table.get(&oldest_key(set, known.len() as u32))? {
            known.push(address_from_payload(&payload));
        }
        Ok(known)
    }

    /// Returns the addresses whose files have a content with this hash, in no order. They belong to
    /// one attachment, unless two contents have the same hash.
    pub(crate) fn held(&self, hash: u64) -> Result<Vec<IpAddr>, TableError> {
        let mut addresses = Vec::new();
        while let Some(address) = self.held_at(hash, addresses.len() as u32)? {
            addresses.push(address);
        }
        Ok(addresses)
    }

    /// Returns the address with this rank among those with this hash. Ranks begin at 0 and have no
    /// gaps. Returns `None` for a rank after the last one.
    fn held_at(&self, hash: u64, rank: u32) -> Result<Option<IpAddr>, TableError> {
        let Some(payload) = self.table.get(&Index::held_key(hash, rank))? else { return Ok(None) };
        Ok(Some(address_from_payload(&payload)))
    }

    /// Returns how many addresses have this hash, which is the first rank that does not exist.
    /// Finds the rank by a binary search, because reading all ranks would be slow for many
    /// addresses.
    pub(super) fn count_held(&self, hash: u64) -> Result<u32, TableError> {
        let (mut low, mut beyond) = (0, 1);
        while self.held_at(hash, beyond - 1)?.is_some() {
            (low, beyond) = (beyond, beyond.saturating_mul(2));
        }
        // All ranks below `low` exist, the rank `high` does not.
        let mut high = beyond - 1;
        while low < high {
            let middle = low + (high - low) / 2;
            if self.held_at(hash, middle)?.is_some() { low = middle + 1 } else { high = middle }
        }
        Ok(low)
    }

    /// Returns the lowest free address of the family that is not below `from`. `None` if there is
    /// none.
    pub(crate) fn next_free(&self, from: IpAddr) -> Result<Option<IpAddr>, TableError> {
        let family = family(from);
        let found = bits::next_free(&self.table, family, number(from))?;
        Ok(found.map(|number| to_address(family.number(), number)))
    }

    /// Whether an address is occupied.
    pub(crate) fn is_occupied(&self, address: IpAddr) -> Result<bool, TableError> {
        bits::is_occupied(&self.table, family(address), number(address))
    }

    /// Returns how many addresses of the range are occupied, or `None` if the range has no counter.
    pub(crate) fn counted(&self, range: &Range) -> Option<u64> {
        self.header.counters.iter().find(|counter| is_counter_of(counter, range)).map(|counter| counter.used)
    }
}
