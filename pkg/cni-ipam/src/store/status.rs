//! STATUS: counts the used addresses, without the lock and without waiting.
//!
//! Nothing is written. If the index describes the folder, its records are counted. Otherwise the
//! names in the folder are counted. If a set is exhausted according to the names, the files are
//! read too, because the address of a blank file is free.

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
    /// Returns the usage of a set with this number of used addresses.
    fn of(set: &RangeSet, used: u128) -> Usage {
        Usage { set: set.to_string(), used, total: set.capacity() }
    }

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
    /// Returns the usage of each set. If a set is exhausted, subtracts the reservations that the
    /// next ADD would reclaim. Takes no lock and changes nothing.
    ///
    /// # Errors
    /// Code 5 if the folder exists but cannot be read.
    pub fn usage(&self, sets: &RangeSets) -> Result<Vec<Usage>> {
        let mut usage = match self.usage_by_index(sets) {
            Some(usage) => usage,
            None => self.usage_by_files(sets)?,
        };
        // `reclaimable` reads the whole index, so it is not called if every set has free addresses.
        if usage.iter().any(Usage::is_exhausted) {
            let reclaimable = self.reclaimable().unwrap_or_default();
            for (usage, set) in usage.iter_mut().zip(sets.sets()) {
                usage.used = usage.used.saturating_sub(count_in(set, &reclaimable));
            }
        }
        Ok(usage)
    }

    /// Returns the usage of each set according to the names in the folder. If a set is exhausted by
    /// the names, reads the files, because the address of a blank file is free.
    ///
    /// # Errors
    /// Code 5 if the folder exists but cannot be read.
    fn usage_by_files(&self, sets: &RangeSets) -> Result<Vec<Usage>> {
        let by_names = usage_of(sets, &self.names()?);
        if !by_names.iter().any(Usage::is_exhausted) {
            return Ok(by_names);
        }
        Ok(match self.scan() {
            Some(occupied) => usage_of(sets, &occupied),
            None => by_names,
        })
    }

    /// Returns the usage of each set according to the records of the index. Returns `None` if the
    /// index does not describe the folder.
    fn usage_by_index(&self, sets: &RangeSets) -> Option<Vec<Usage>> {
        Some(usage_of(sets, &self.peek()?))
    }

    /// Returns the present stamp of the folder, or `None` if the folder cannot be read.
    fn stamp(&self) -> Option<Stamp> {
        std::fs::metadata(self.path()).ok().map(|metadata| Stamp::of(&metadata))
    }

    /// Writes a note with the addresses whose files are not reservations according to the index.
    /// Takes no lock.
    pub fn report_foreign(&self) {
        let foreign = index::peek(&self.index_path(), || self.stamp(), Index::foreign);
        self.note_foreign(&mut foreign.unwrap_or_default());
    }

    /// Returns the number of names in the folder that are addresses, or 0 if the folder does not
    /// exist. Takes no lock and opens no file.
    ///
    /// # Errors
    /// Code 5 if the folder exists but cannot be read.
    pub fn count(&self) -> Result<usize> {
        self.names().map(|names| names.len())
    }

    /// Returns the occupied addresses, sorted, or none if the folder cannot be read. Takes no lock.
    pub fn occupied(&self) -> Vec<IpAddr> {
        let mut occupied = self.peek().or_else(|| self.scan()).unwrap_or_default();
        occupied.sort_unstable();
        occupied
    }

    /// Returns the occupied addresses according to the records of the index, or `None` if the index
    /// does not describe the folder.
    fn peek(&self) -> Option<Vec<IpAddr>> {
        index::peek(&self.index_path(), || self.stamp(), Index::occupied)
    }

    /// Returns the addresses whose files are not blank, or `None` if the folder cannot be read.
    /// Reads only files that are new or changed since their record in the index.
    fn scan(&self) -> Option<Vec<IpAddr>> {
        let folder = File::open(self.path()).ok()?;
        let known = index::old_records(&self.index_path(), &self.options.host);
        let records = index::scan(self.path(), &folder, &known).ok()?;
        Some(records.into_iter().filter(Record::is_occupied).map(|record| record.address).collect())
    }

    /// Returns the names in the folder that are addresses, or none if the folder does not exist.
    ///
    /// # Errors
    /// Code 5 if the folder exists but cannot be read.
    fn names(&self) -> Result<Vec<IpAddr>> {
        match index::names_in(self.path()) {
            Ok(names) => Ok(names),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => {
                let doing = format!("failed to read {}", self.path().display());
                Err(Error::caused(Code::IO, doing, error))
            }
        }
    }

    /// Checks that ADD can write to the network's folder or, if that does not exist, to the nearest
    /// existing folder above it. Returns `Ok(None)` if ADD can. If only the disk is full, which may
    /// pass without a repair, returns `Ok(Some(error))`: the error that ADD would get, code 5.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be written until an operator repairs something.
    pub fn check_writable(&self) -> Result<Option<Error>> {
        for path in self.path().ancestors() {
            // The last ancestor of a relative path is empty.
            let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
            let not_writable =
                |error| Error::caused(Code::IO, format_args!("{} cannot be written", path.display()), error);
            match std::fs::metadata(path) {
                Ok(metadata) if metadata.is_dir() => {
                    access(path, AccessFlags::W_OK | AccessFlags::X_OK).map_err(|errno| not_writable(errno.into()))?;
                    let is_full = is_full(path).map_err(|errno| not_writable(errno.into()))?;
                    return Ok(is_full.then(|| not_writable(std::io::ErrorKind::StorageFull.into())));
                }
                Ok(_) => return Err(not_writable(std::io::ErrorKind::NotADirectory.into())),
                // With a dangling symbolic link, ADD could not create the folder.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound && !path.is_symlink() => {}
                Err(error) => return Err(not_writable(error)),
            }
        }
        Ok(None)
    }
}

/// Whether the path's file system has no free block or no free inode.
fn is_full(path: &Path) -> nix::Result<bool> {
    let stat = statfs(path)?;
    // A file system that does not count blocks or inodes reports a total of 0.
    let has_no_blocks = stat.blocks() > 0 && stat.blocks_free() == 0;
    let has_no_inodes = stat.files() > 0 && stat.files_free() == 0;
    Ok(has_no_blocks || has_no_inodes)
}

/// Returns the usage of each set if exactly these addresses are occupied.
fn usage_of(sets: &RangeSets, occupied: &[IpAddr]) -> Vec<Usage> {
    sets.sets().iter().map(|set| Usage::of(set, count_in(set, occupied))).collect()
}

/// Returns how many of the addresses belong to the set and are not its gateways.
fn count_in(set: &RangeSet, addresses: &[IpAddr]) -> u128 {
    addresses.iter().filter(|address| set.can_allocate(**address)).count() as u128
}
