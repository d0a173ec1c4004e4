//! STATUS: counts the used addresses, without the lock and without waiting.
//!
//! Nothing is written. The names in the folder are counted. If a set is exhausted according to the
//! names, the files that have no link are read too, because the address of a blank file is free.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use cni::{Code, Error, Result};
use nix::sys::statfs::statfs;
use nix::unistd::{AccessFlags, access};

use super::Store;
use crate::content::address_of_name;
use crate::links;
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
        let by_names = usage_of(sets, &self.names()?);
        if !by_names.iter().any(Usage::is_exhausted) {
            return Ok(by_names);
        }
        Ok(self.occupied_by_files().map_or(by_names, |occupied| usage_of(sets, &occupied)))
    }

    /// Returns the addresses whose files are not blank, without those that the next ADD would
    /// reclaim. Returns `None` if the folder cannot be read.
    fn occupied_by_files(&self) -> Option<Vec<IpAddr>> {
        let folder = File::open(self.path()).ok()?;
        let scan = links::scan(self.path(), &folder, &self.links()).ok()?;
        let reclaimable: HashSet<IpAddr> = self.reclaimable(&scan, &folder).into_iter().collect();
        Some(scan.occupied().filter(|address| !reclaimable.contains(address)).collect())
    }

    /// Writes a note with the addresses whose files are not regular files. Takes no lock.
    pub fn report_foreign(&self) {
        let mut foreign = Vec::new();
        for entry in std::fs::read_dir(self.path()).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| !kind.is_file()) {
                foreign.extend(address_of_name(entry.file_name().as_bytes()));
            }
        }
        self.note_foreign(&mut foreign);
    }

    /// Returns the number of names in the folder that are addresses, or 0 if the folder does not
    /// exist. Takes no lock and opens no file.
    ///
    /// # Errors
    /// Code 5 if the folder exists but cannot be read.
    pub fn count(&self) -> Result<usize> {
        self.names().map(|names| names.len())
    }

    /// Returns the addresses that have a file, sorted, or none if the folder cannot be read. Takes
    /// no lock.
    pub fn occupied(&self) -> Vec<IpAddr> {
        self.names().unwrap_or_default()
    }

    /// Returns the names in the folder that are addresses, sorted, or none if the folder does not
    /// exist.
    ///
    /// # Errors
    /// Code 5 if the folder exists but cannot be read.
    pub(super) fn names(&self) -> Result<Vec<IpAddr>> {
        let mut names = match links::names_in(self.path()) {
            Ok(names) => names.into_iter().map(|(address, _)| address).collect(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(self.io_error("read", error)),
        };
        names.sort_unstable();
        Ok(names)
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
