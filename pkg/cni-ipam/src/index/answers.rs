//! Queries an index. The queries change nothing and read no file except the index.
//!
//! An answer may be outdated, so the caller reads the file of an address before it acts on the
//! answer.

use std::io;
use std::net::IpAddr;

use super::record::{RECORD, UNRELIABLE_CTIME, address_from_payload, family, to_address};
use super::table::TableError;
use super::{Holder, Index, Record, bits};
use crate::ranges::{RangeSet, number};

/// How many of the oldest reservations [`Index::oldest`] returns.
const OLDEST: usize = 3;

impl Index {
    /// Returns the record of an address, or `None` if the address has no file and so is free.
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

    /// Returns the addresses whose files could not be read during the last rebuild. Reads the whole
    /// table if there are any.
    pub(crate) fn unreadable(&self) -> io::Result<Vec<IpAddr>> {
        if !self.header.unreadable {
            return Ok(Vec::new());
        }
        let unreadable = self.records()?.into_iter().filter(|record| record.holder == Holder::Unreadable);
        Ok(unreadable.map(|record| record.address).collect())
    }

    /// Returns the addresses whose files are not reservations. Reads the whole table if there are
    /// any.
    pub(crate) fn foreign(&self) -> io::Result<Vec<IpAddr>> {
        if !self.header.foreign {
            return Ok(Vec::new());
        }
        let foreign = self.records()?.into_iter().filter(|record| record.holder == Holder::Foreign);
        Ok(foreign.map(|record| record.address).collect())
    }

    /// Returns the addresses of the set that have been reserved longest, the oldest first. Reads
    /// the whole table.
    pub(crate) fn oldest(&self, set: &RangeSet) -> io::Result<Vec<IpAddr>> {
        let mut reserved = self.records()?;
        reserved.retain(|record| record.is_occupied() && set.can_allocate(record.address));
        // A file whose ctime is unreliable had usually just changed when it was read, so it counts
        // as the newest.
        let since = |record: &Record| if record.ctime == UNRELIABLE_CTIME { (i64::MAX, 0) } else { record.ctime };
        reserved.sort_unstable_by_key(|record| (since(record), record.address));
        Ok(reserved.into_iter().take(OLDEST).map(|record| record.address).collect())
    }

    /// Returns the addresses whose files have a content with this hash, in no order: the addresses
    /// of one attachment, unless two contents have the same hash.
    pub(crate) fn owned_by(&self, hash: u64) -> Result<Vec<IpAddr>, TableError> {
        let mut addresses = Vec::new();
        while let Some(address) = self.owned_at(hash, addresses.len() as u32)? {
            addresses.push(address);
        }
        Ok(addresses)
    }

    /// Returns the address with this hash and rank. Ranks begin at 0 and have no gaps. Returns
    /// `None` for a rank after the last one.
    fn owned_at(&self, hash: u64, rank: u32) -> Result<Option<IpAddr>, TableError> {
        let Some(payload) = self.table.get(&Index::owned_key(hash, rank))? else { return Ok(None) };
        Ok(Some(address_from_payload(&payload)))
    }

    /// Returns the number of addresses with this hash. Finds the first unused rank by a binary
    /// search, because reading all ranks would be slow for many addresses.
    pub(super) fn count_owned(&self, hash: u64) -> Result<u32, TableError> {
        // All ranks below `low` exist. `high` is raised until the rank `high` does not exist.
        let (mut low, mut high) = (0, 0);
        while self.owned_at(hash, high)?.is_some() {
            low = high + 1;
            high = low.saturating_mul(2) - 1;
        }
        while low < high {
            let middle = low + (high - low) / 2;
            if self.owned_at(hash, middle)?.is_some() { low = middle + 1 } else { high = middle }
        }
        Ok(low)
    }

    /// Returns the lowest free address that is `from` or higher, in the same family. Returns `None`
    /// if there is none.
    pub(crate) fn next_free(&self, from: IpAddr) -> Result<Option<IpAddr>, TableError> {
        let family = family(from);
        let found = bits::next_free(&self.table, family, number(from))?;
        Ok(found.map(|number| to_address(family.number(), number)))
    }
}
