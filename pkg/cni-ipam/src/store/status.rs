//! STATUS: how many addresses are used, without the lock and without waiting.
//!
//! It writes nothing and rebuilds nothing. With an index that is true and stays so while it is
//! read, the answer costs a few reads; else the names in the folder are counted. A name may be that
//! of a blank file, whose address is free, so where the names alone mean "full" the files are read
//! too.

use std::fmt;
use std::fs::File;
use std::net::IpAddr;
use std::path::Path;

use cni::{Code, Error, Result};
use nix::sys::statfs::statfs;
use nix::unistd::{AccessFlags, access};

use super::Store;
use crate::index::header::Stamp;
use crate::index::{self, Index, Record};
use crate::ranges::{RangeSet, RangeSets};

/// How full a range set is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The set, as messages name it.
    pub set: String,
    /// Addresses taken, by whomever.
    pub used: u128,
    /// Addresses that can be given out at all: the gateways are not among them.
    pub total: u128,
}

impl Usage {
    /// Whether the next ADD fails.
    pub fn is_exhausted(&self) -> bool {
        self.used >= self.total
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} of {} used", self.set, self.used, self.total)
    }
}

impl Store {
    /// How full each set is. Takes no lock, never waits, changes nothing.
    ///
    /// # Errors
    /// Code 5 if the folder is there but cannot be read.
    pub fn usage(&self, sets: &RangeSets) -> Result<Vec<Usage>> {
        let in_set = |set: &RangeSet, name: &IpAddr| set.find(*name).is_some() && !set.is_gateway(*name);
        let stamp = || std::fs::metadata(self.path()).ok().map(|metadata| Stamp::of(&metadata));
        let peeked = index::peek(&self.index_path(), stamp, |index| {
            let counts = sets.sets().iter().map(|set| used(index, set));
            counts.collect::<Result<Option<Vec<u128>>, _>>()
        });
        let usage = |counts: Vec<u128>| -> Vec<Usage> {
            let usage = |(set, used): (&RangeSet, u128)| Usage { set: set.to_string(), used, total: set.capacity() };
            sets.sets().iter().zip(counts).map(usage).collect()
        };
        let counted = |taken: Vec<IpAddr>| {
            let count = |set| taken.iter().filter(|address| in_set(set, address)).count() as u128;
            usage(sets.sets().iter().map(count).collect())
        };
        let mut usage = match peeked {
            Some(counts) => usage(counts),
            None => {
                let named = counted(self.names()?);
                let occupied = if named.iter().any(Usage::is_exhausted) { self.occupied() } else { None };
                occupied.map_or(named, counted)
            }
        };
        // After a reboot the next ADD reclaims the reservations.
        if usage.iter().any(Usage::is_exhausted) {
            let dead = self.reclaimable();
            for (usage, set) in usage.iter_mut().zip(sets.sets()) {
                usage.used = usage.used.saturating_sub(dead.iter().filter(|dead| in_set(set, dead)).count() as u128);
            }
        }
        Ok(usage)
    }
}

impl Store {
    /// Notes the addresses that files other than reservations occupy, as far as the index knows.
    /// Takes no lock.
    pub fn report_foreign(&self) {
        let stamp = || std::fs::metadata(self.path()).ok().map(|metadata| Stamp::of(&metadata));
        let foreign = index::peek(&self.index_path(), stamp, |index| Ok(Some(index.foreign()?)));
        self.note_foreign(&mut foreign.unwrap_or_default());
    }

    /// How many names in the folder are addresses. Takes no lock and opens no file; a missing
    /// folder has none.
    ///
    /// # Errors
    /// Code 5 if the folder is there but cannot be read.
    pub fn count(&self) -> Result<usize> {
        self.names().map(|names| names.len())
    }

    /// Returns the addresses whose files are not blank. Only files that the index, true or not,
    /// does not know are read. `None` if the folder cannot be read.
    fn occupied(&self) -> Option<Vec<IpAddr>> {
        let folder = File::open(self.path()).ok()?;
        let (known, _) = index::old_records(&self.index_path(), &self.options.host);
        let records = index::scan(self.path(), &folder, &known).ok()?;
        Some(records.into_iter().filter(Record::is_occupied).map(|record| record.address).collect())
    }

    fn names(&self) -> Result<Vec<IpAddr>> {
        match index::names_in(self.path()) {
            Ok(names) => Ok(names.into_iter().collect()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => {
                let doing = format!("failed to read {}", self.path().display());
                Err(Error::caused(Code::IO, doing, error))
            }
        }
    }

    /// Returns the shortage that keeps an ADD from writing here for now: a disk without free blocks
    /// or inodes. The place is the network's folder or, where that is missing, the nearest folder
    /// above it.
    ///
    /// # Errors
    /// Code 5, with the path, if the place cannot be written to until an operator repairs
    /// something.
    pub fn check_writable(&self) -> Result<Option<Error>> {
        for path in self.path().ancestors() {
            let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
            let failed = |error| Error::caused(Code::IO, format_args!("{} cannot be written", path.display()), error);
            match std::fs::metadata(path) {
                Ok(metadata) if metadata.is_dir() => {
                    access(path, AccessFlags::W_OK | AccessFlags::X_OK).map_err(|errno| failed(errno.into()))?;
                    let room = statfs(path).map_err(|errno| failed(errno.into()))?;
                    // File systems that do not count inodes or blocks report 0 of 0.
                    let blocks = room.blocks() > 0 && room.blocks_free() == 0;
                    let files = room.files() > 0 && room.files_free() == 0;
                    return Ok((blocks || files).then(|| failed(std::io::ErrorKind::StorageFull.into())));
                }
                Ok(_) => return Err(failed(std::io::ErrorKind::NotADirectory.into())),
                // A dangling link prevents ADD from making the folder.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound && !path.is_symlink() => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(None)
    }
}

/// Returns the index's count of a set's taken addresses; `None` if one of its ranges is not
/// counted.
fn used(index: &Index, set: &RangeSet) -> Result<Option<u128>, index::table::TableError> {
    let mut sum: u128 = 0;
    for range in set.ranges() {
        let Some(used) = index.counted(range) else { return Ok(None) };
        sum += u128::from(used);
    }
    for gateway in set.inner_gateways() {
        // Never below 0, even if the counter is damaged.
        sum = sum.saturating_sub(u128::from(index.is_occupied(gateway)?));
    }
    Ok(Some(sum))
}
