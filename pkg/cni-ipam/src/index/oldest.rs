//! Finds the oldest reservations of a range set, which the error of a full set names: they are the
//! most likely leftovers.
//!
//! A rebuild that a full set has caused finds them and stores them in the table: a runtime repeats
//! a failed ADD every second, and reading 65,000 records each time would take longer than
//! everything else. They are not updated, because they are only used while no address has changed
//! since that rebuild (the index is exact). For another set all records are read.

use std::net::IpAddr;

use super::record::{Record, to_payload};
use super::table::{Key, TableError};
use super::{Index, hash};
use crate::host::Timestamp;
use crate::ranges::{RangeSet, RangeSets};

/// The number of reservations that are found and stored for a set.
const COUNT: usize = 3;
/// The tag of the table's entries that store them.
const TAG: u8 = 4;

/// Returns the key of the entry for the oldest reservation (`rank` 0), the next one (1) and so on.
pub(super) fn oldest_key(set: &RangeSet, rank: u32) -> Key {
    // The gateways matter because no attachment gets them, and the text of a set does not have
    // them.
    let text: String = set.ranges().iter().map(|range| format!("{range} {},", range.gateway())).collect();
    Key { tag: TAG, family: 0, rank, number: u128::from(hash(text.as_bytes())) }
}

/// Returns the addresses of the set that have been reserved longest, the oldest first. `records`
/// are all records of the index.
pub(super) fn oldest_of(records: &[Record], set: &RangeSet) -> Vec<IpAddr> {
    let mut oldest: Vec<(Timestamp, IpAddr)> = Vec::with_capacity(COUNT + 1);
    for record in records {
        // The ctime (0, 0) means that the file had just changed when the folder was read, so it
        // counts as the newest.
        let since = if record.ctime == (0, 0) { (i64::MAX, 0) } else { record.ctime };
        let entry = (since, record.address);
        let is_older = oldest.len() < COUNT || oldest.last() > Some(&entry);
        let is_in_set = |address| set.find(address).is_some() && !set.is_gateway(address);
        if is_older && record.is_occupied() && is_in_set(record.address) {
            oldest.insert(oldest.partition_point(|other| *other < entry), entry);
            oldest.truncate(COUNT);
        }
    }
    oldest.into_iter().map(|(_, address)| address).collect()
}

impl Index {
    /// Finds the oldest reservations of a set that are not stored, by reading all records.
    pub(crate) fn search_oldest(&self, set: &RangeSet) -> Result<Vec<IpAddr>, TableError> {
        Ok(oldest_of(&self.records()?, set))
    }

    /// Finds the oldest reservations of these sets and stores them. `records` are all records of
    /// this index.
    pub(crate) fn store_oldest(&mut self, full_sets: &RangeSets, records: &[Record]) -> Result<(), TableError> {
        for set in full_sets.sets() {
            for (rank, address) in oldest_of(records, set).into_iter().enumerate() {
                self.table.put(&oldest_key(set, rank as u32), &to_payload(address))?;
            }
            if self.table.is_crowded() {
                self.grow()?;
            }
        }
        Ok(())
    }
}
