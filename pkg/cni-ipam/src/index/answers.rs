//! Queries an index. The queries change nothing and read no file except the index.
//!
//! An answer may be outdated, so the caller reads the file of an address before it acts on the
//! answer.

use std::io;
use std::net::IpAddr;

use super::record::{RECORD, UNRELIABLE_CTIME, address_from_payload};
use super::table::TableError;
use super::{Holder, Index, Record};
use crate::ranges::RangeSet;

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

    /// Returns the occupied addresses, in no order. Reads the whole table.
    pub(crate) fn occupied(&self) -> io::Result<Vec<IpAddr>> {
        let mut occupied = Vec::new();
        self.table.for_each(|key, payload| {
            if key.tag == RECORD {
                let record = Record::decode(key, payload);
                occupied.extend(record.is_occupied().then_some(record.address));
            }
        })?;
        Ok(occupied)
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
        let order = |record: &Record| (since(record), record.address);
        if reserved.len() > OLDEST {
            // Sorting all records of a large set would take as long as reading them.
            reserved.select_nth_unstable_by_key(OLDEST, order);
            reserved.truncate(OLDEST);
        }
        reserved.sort_unstable_by_key(order);
        Ok(reserved.into_iter().map(|record| record.address).collect())
    }

    /// Returns the addresses whose files have a content with this hash, in no order: the addresses
    /// of one attachment, unless two contents have the same hash. The rank of an address is its
    /// position.
    pub(crate) fn owned_by(&self, hash: u64) -> Result<Vec<IpAddr>, TableError> {
        let mut addresses = Vec::new();
        while let Some(payload) = self.table.get(&Index::owned_key(hash, addresses.len() as u32))? {
            addresses.push(address_from_payload(&payload));
        }
        Ok(addresses)
    }
}
