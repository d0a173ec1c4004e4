//! Queries of an index.
//!
//! A query changes nothing and reads only the table. An answer describes an earlier state of the
//! folder, so the caller reads an address's file before acting on it.

use std::io;
use std::net::IpAddr;

use super::oldest::oldest_key;
use super::record::{RECORD, family, from_payload, to_address};
use super::table::TableError;
use super::{Holder, Index, Record, bits, is_of};
use crate::ranges::{Range, RangeSet, number};

impl Index {
    /// Returns the record of an address.
    pub(crate) fn record(&self, address: IpAddr) -> Result<Option<Record>, TableError> {
        let key = Record::key(address);
        Ok(self.table.get(&key)?.map(|payload| Record::decode(&key, &payload)))
    }

    /// Everything that is known.
    pub(crate) fn records(&self) -> io::Result<Vec<Record>> {
        let mut records = Vec::new();
        self.table.for_each(|key, payload| {
            if key.tag == RECORD {
                records.push(Record::decode(key, payload));
            }
        })?;
        Ok(records)
    }

    /// The addresses whose files could not be read when the folder was. Costs a pass over the table
    /// where there are any.
    pub(crate) fn unread(&self) -> io::Result<Vec<IpAddr>> {
        if !self.header.unread {
            return Ok(Vec::new());
        }
        let unread = self.records()?.into_iter().filter(|record| record.holder == Holder::Unread);
        Ok(unread.map(|record| record.address).collect())
    }

    /// Returns the addresses that files other than reservations occupied when the folder was read.
    /// Costs a pass over the table if there are any.
    pub(crate) fn foreign(&self) -> io::Result<Vec<IpAddr>> {
        if !self.header.foreign {
            return Ok(Vec::new());
        }
        let foreign = self.records()?.into_iter().filter(|record| record.holder == Holder::Unknown);
        Ok(foreign.map(|record| record.address).collect())
    }

    /// Returns the set's addresses that have been taken longest, the oldest first, as a rebuild for
    /// this set found them, which is true while the index is exact. Empty if no rebuild was for
    /// this set.
    pub(crate) fn oldest(&self, set: &RangeSet) -> Result<Vec<IpAddr>, TableError> {
        let mut known = Vec::new();
        while let Some(payload) = self.table.get(&oldest_key(set, known.len() as u32))? {
            known.push(from_payload(&payload));
        }
        Ok(known)
    }

    /// The addresses whose files have a content of this hash, in no order.
    pub(crate) fn held(&self, hash: u64) -> Result<Vec<IpAddr>, TableError> {
        let mut held = Vec::new();
        while let Some(address) = self.held_at(hash, held.len() as u32)? {
            held.push(address);
        }
        Ok(held)
    }

    fn held_at(&self, hash: u64, rank: u32) -> Result<Option<IpAddr>, TableError> {
        let Some(payload) = self.table.get(&Index::held_key(hash, rank))? else { return Ok(None) };
        Ok(Some(from_payload(&payload)))
    }

    /// How many addresses are listed under a hash; ranks have no gaps, so this is a search and no
    /// count.
    pub(super) fn count_held(&self, hash: u64) -> Result<u32, TableError> {
        let (mut low, mut high) = (0, 1);
        while self.held_at(hash, high - 1)?.is_some() {
            (low, high) = (high, high.saturating_mul(2));
        }
        // Ranks below `low` exist, `high - 1` does not.
        high -= 1;
        while low < high {
            let middle = low + (high - low) / 2;
            if self.held_at(hash, middle)?.is_some() { low = middle + 1 } else { high = middle }
        }
        Ok(low)
    }

    /// The lowest free address from `from` on, in its family.
    pub(crate) fn next_free(&self, from: IpAddr) -> Result<Option<IpAddr>, TableError> {
        let family = family(from);
        let found = bits::next_free(&self.table, family, number(from))?;
        Ok(found.map(|number| to_address(family.number(), number)))
    }

    /// Whether an address is taken.
    pub(crate) fn is_occupied(&self, address: IpAddr) -> Result<bool, TableError> {
        bits::is_occupied(&self.table, family(address), number(address))
    }

    /// How many addresses of a range are taken, if the range is among the counted ones.
    pub(crate) fn counted(&self, range: &Range) -> Option<u64> {
        self.header.counters.iter().find(|counter| is_of(counter, range)).map(|counter| counter.used)
    }
}
