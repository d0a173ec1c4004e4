//! Finds the oldest holders of a set: the attachments that the error of a used-up set names.
//!
//! A rebuild finds them for the sets that it was for and keeps them in the table: a node without a
//! free address is asked every second, and going through 65,000 records each time would take longer
//! than all the rest. Nothing updates them, because they are only asked for while the index is
//! exact, right after a rebuild. For another set the records are gone through, which still costs
//! far less than reading the folder again.

use std::net::IpAddr;

use super::record::{Record, to_payload};
use super::table::{Key, TableError};
use super::{Index, hash};
use crate::host::Timestamp;
use crate::ranges::{RangeSet, RangeSets};

/// How many are found.
const OLDEST: usize = 3;
/// The tag of their entries in the table.
const TAG: u8 = 4;

pub(super) fn oldest_key(set: &RangeSet, rank: u32) -> Key {
    // A set's text does not include the gateways, which no attachment gets.
    let text: String = set.ranges().iter().map(|range| format!("{range} {},", range.gateway())).collect();
    Key { tag: TAG, family: 0, rank, number: u128::from(hash(text.as_bytes())) }
}

/// The addresses of a set that have been taken longest, as far as these records tell, the oldest
/// first.
pub(super) fn oldest_of(records: &[Record], set: &RangeSet) -> Vec<IpAddr> {
    let mut oldest: Vec<(Timestamp, IpAddr)> = Vec::with_capacity(OLDEST + 1);
    for record in records {
        // A reservation that had just changed when the folder was read counts as new.
        let since = if record.ctime == (0, 0) { (i64::MAX, 0) } else { record.ctime };
        let entry = (since, record.address);
        let is_older = oldest.len() < OLDEST || oldest.last() > Some(&entry);
        let is_meant = |address| set.find(address).is_some() && !set.is_gateway(address);
        if is_older && record.is_occupied() && is_meant(record.address) {
            oldest.insert(oldest.partition_point(|other| *other < entry), entry);
            oldest.truncate(OLDEST);
        }
    }
    oldest.into_iter().map(|(_, address)| address).collect()
}

impl Index {
    /// Finds the oldest holders of a set that no rebuild was for, by a pass over the table.
    pub(crate) fn search_oldest(&self, set: &RangeSet) -> Result<Vec<IpAddr>, TableError> {
        Ok(oldest_of(&self.records()?, set))
    }

    /// Finds the oldest holders of these sets in `records`, which are all records of this index.
    pub(crate) fn find_oldest(&mut self, asking: &RangeSets, records: &[Record]) -> Result<(), TableError> {
        for set in asking.sets() {
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
