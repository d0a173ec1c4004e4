//! STATUS: counts the used addresses, without the lock and without waiting.
//!
//! It writes nothing. If the index is true for the folder before and after reading it, a few reads
//! are enough. Otherwise the names in the folder are counted. The address of a blank file is free,
//! so if the names alone mean that a set is exhausted, the files are read too.

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

/// The number of used addresses of a range set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The set as text.
    pub set: String,
    /// The number of used addresses.
    pub used: u128,
    /// The number of addresses that can be allocated, without the gateways.
    pub total: u128,
}

impl Usage {
    /// Whether no address is free.
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
    /// Returns the usage of each set. Takes no lock and changes nothing.
    ///
    /// # Errors
    /// Code 5 if the folder exists but cannot be read.
    pub fn usage(&self, sets: &RangeSets) -> Result<Vec<Usage>> {
        let is_in_set = |set: &RangeSet, name: &IpAddr| set.find(*name).is_some() && !set.is_gateway(*name);
        let stamp = || std::fs::metadata(self.path()).ok().map(|metadata| Stamp::of(&metadata));
        let from_index = index::peek(&self.index_path(), stamp, |index| {
            let counts = sets.sets().iter().map(|set| used(index, set));
            counts.collect::<Result<Option<Vec<u128>>, _>>()
        });
        let to_usage = |counts: Vec<u128>| -> Vec<Usage> {
            let usage = |(set, used): (&RangeSet, u128)| Usage { set: set.to_string(), used, total: set.capacity() };
            sets.sets().iter().zip(counts).map(usage).collect()
        };
        let count = |addresses: Vec<IpAddr>| {
            let count_in = |set| addresses.iter().filter(|address| is_in_set(set, address)).count() as u128;
            to_usage(sets.sets().iter().map(count_in).collect())
        };
        let mut usage = match from_index {
            Some(counts) => to_usage(counts),
            None => {
                let by_names = count(self.names()?);
                let occupied = if by_names.iter().any(Usage::is_exhausted) { self.occupied() } else { None };
                occupied.map_or(by_names, count)
            }
        };
        // Reservations of an earlier boot do not count, because the next ADD releases them.
        if usage.iter().any(Usage::is_exhausted) {
            let reclaimable = self.reclaimable();
            for (usage, set) in usage.iter_mut().zip(sets.sets()) {
                let free = reclaimable.iter().filter(|address| is_in_set(set, address)).count();
                usage.used = usage.used.saturating_sub(free as u128);
            }
        }
        Ok(usage)
    }
}

impl Store {
    /// Writes a note with the addresses whose files are not reservations, as far as the index knows
    /// them. Takes no lock.
    pub fn report_foreign(&self) {
        let stamp = || std::fs::metadata(self.path()).ok().map(|metadata| Stamp::of(&metadata));
        let foreign = index::peek(&self.index_path(), stamp, |index| Ok(Some(index.foreign()?)));
        self.note_foreign(&mut foreign.unwrap_or_default());
    }

    /// Returns the number of names in the folder that are addresses, 0 if the folder does not
    /// exist. Takes no lock and opens no file.
    ///
    /// # Errors
    /// Code 5 if the folder exists but cannot be read.
    pub fn count(&self) -> Result<usize> {
        self.names().map(|names| names.len())
    }

    /// Returns the addresses whose files are not blank, or `None` if the folder cannot be read.
    /// Reads only files for which even an outdated index has no record.
    fn occupied(&self) -> Option<Vec<IpAddr>> {
        let folder = File::open(self.path()).ok()?;
        let (known, _) = index::old_records(&self.index_path(), &self.options.host);
        let records = index::scan(self.path(), &folder, &known).ok()?;
        Some(records.into_iter().filter(Record::is_occupied).map(|record| record.address).collect())
    }

    /// Returns the names in the folder that are addresses.
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

    /// Checks that ADD can write to the network's folder or, if that does not exist, to the nearest
    /// existing folder above it. Returns an error in `Some` if the disk has no free blocks or
    /// inodes, which may pass by itself.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be written until an operator repairs something.
    pub fn check_writable(&self) -> Result<Option<Error>> {
        for path in self.path().ancestors() {
            let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
            let failed = |error| Error::caused(Code::IO, format_args!("{} cannot be written", path.display()), error);
            match std::fs::metadata(path) {
                Ok(metadata) if metadata.is_dir() => {
                    access(path, AccessFlags::W_OK | AccessFlags::X_OK).map_err(|errno| failed(errno.into()))?;
                    let stat = statfs(path).map_err(|errno| failed(errno.into()))?;
                    // A file system that does not count blocks or inodes reports a total of 0.
                    let has_no_blocks = stat.blocks() > 0 && stat.blocks_free() == 0;
                    let has_no_inodes = stat.files() > 0 && stat.files_free() == 0;
                    let is_full = has_no_blocks || has_no_inodes;
                    return Ok(if is_full { Some(failed(std::io::ErrorKind::StorageFull.into())) } else { None });
                }
                Ok(_) => return Err(failed(std::io::ErrorKind::NotADirectory.into())),
                // With a dangling symbolic link, ADD could not create the folder.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound && !path.is_symlink() => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(None)
    }
}

/// Returns the number of used addresses of a set according to the index's counters, or `None` if
/// one of its ranges has no counter.
fn used(index: &Index, set: &RangeSet) -> Result<Option<u128>, index::table::TableError> {
    let mut sum: u128 = 0;
    for range in set.ranges() {
        let Some(used) = index.counted(range) else { return Ok(None) };
        sum += u128::from(used);
    }
    for gateway in set.inner_gateways() {
        // Saturating, in case the counter is damaged.
        sum = sum.saturating_sub(u128::from(index.is_occupied(gateway)?));
    }
    Ok(Some(sum))
}
