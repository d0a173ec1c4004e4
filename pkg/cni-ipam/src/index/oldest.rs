//! Finds the oldest reservations of a range set. The error for a full set lists them, because they
//! are the most likely leftovers.
//!
//! A rebuild during an ADD stores the oldest reservations of the ADD's sets in the table: a runtime
//! repeats a failed ADD every second, and reading 65,000 records each time would take longer than
//! everything else. The stored reservations are not updated, because they are only used while the
//! index is [exact](Index::is_exact). For other sets, all records are read.

use std::net::IpAddr;

use super::record::{Record, UNRELIABLE_CTIME, address_to_payload};
use super::table::{Key, TableError};
use super::{Index, hash};
use crate::host::Timestamp;
use crate::ranges::{RangeSet, RangeSets};

/// The number of reservations that are found and stored for a set.
const COUNT: usize = 3;
/// The tag of the entries that store the oldest reservations of a set.
const OLDEST: u8 = 4;

/// Returns the key of the entry for the set's oldest reservation (`rank` 0), the next one (1) and
/// so on.
pub(super) fn oldest_key(set: &RangeSet, rank: u32) -> Key {
    // The text of a range does not include its gateway, but the oldest reservations depend on it,
    // because a gateway is never one of them.
    let text: String = set.ranges().iter().map(|range| format!("{range} {},", range.gateway())).collect();
    Key { tag: OLDEST, family: 0, rank, number: u128::from(hash(text.as_bytes())) }
}

/// Returns the addresses of the set that have been reserved longest, the oldest first. `records`
/// are all records of the index.
pub(super) fn oldest_of(records: &[Record], set: &RangeSet) -> Vec<IpAddr> {
    let mut oldest: Vec<(Timestamp, IpAddr)> = Vec::with_capacity(COUNT + 1);
    for record in records {
        // A file whose ctime is unreliable had usually just changed when it was read, so it counts
        // as the newest.
        let since = if record.ctime == UNRELIABLE_CTIME { (i64::MAX, 0) } else { record.ctime };
        let entry = (since, record.address);
        // Checked first, because the other conditions take longer.
        let is_among_oldest = oldest.len() < COUNT || oldest.last() > Some(&entry);
        if is_among_oldest && record.is_occupied() && set.can_allocate(record.address) {
            oldest.insert(oldest.partition_point(|other| *other < entry), entry);
            oldest.truncate(COUNT);
        }
    }
    oldest.into_iter().map(|(_, address)| address).collect()
}

impl Index {
    /// Returns the addresses of the set that have been reserved longest, the oldest first. Reads
    /// all records, unlike [`oldest`](Index::oldest).
    pub(crate) fn search_oldest(&self, set: &RangeSet) -> Result<Vec<IpAddr>, TableError> {
        Ok(oldest_of(&self.records()?, set))
    }

    /// Finds the oldest reservations of each set and stores them for [`oldest`](Index::oldest).
    /// `records` are all records of this index.
    pub(crate) fn store_oldest(&mut self, sets: &RangeSets, records: &[Record]) -> Result<(), TableError> {
        for set in sets.sets() {
            for (rank, address) in oldest_of(records, set).into_iter().enumerate() {
                self.table.put(&oldest_key(set, rank as u32), &address_to_payload(address))?;
            }
            if self.table.is_crowded() {
                self.grow()?;
            }
        }
        Ok(())
    }
}
