//! Releases reservations of an earlier boot that these plugins made: no container survives a
//! reboot.
//!
//! It decides by proof, never by likelihood: our record of a reservation must match inode and times
//! of its file exactly, the record must be of this machine and of another boot, the file older than
//! this boot, and the folder on a file system that no other machine can be using. A reservation
//! that lacks any of this proof stays: files that Go made, changed files, copies of a disk, a
//! machine without an ID.
//!
//! On a tmpfs nothing can be of an earlier boot, so there a different boot ID proves that the boot
//! ID was replaced. The file system below an overlay is not visible, so an overlay counts as
//! shared.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;

use nix::sys::statfs::{BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, F2FS_SUPER_MAGIC, FsType, NILFS_SUPER_MAGIC, fstatfs};

use cni::Result;

use super::{Locked, Store, Trouble, Trust};
use crate::host::Timestamp;
use crate::index::table::TableError;
use crate::index::{self, Record};

/// The treatment of reservations of an earlier boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RebootPolicy {
    /// The first ADD or GC of a boot releases them.
    Reclaim,
    /// They stay until a DEL or GC releases them.
    Keep,
}

/// File systems that one kernel at a time uses, and that outlive a reboot. ext2 and ext3 have
/// ext4's number.
const LOCAL: [FsType; 6] = [
    EXT4_SUPER_MAGIC,
    // Has no name in nix where the C library is musl, which the release is built for.
    FsType(0x5846_5342 /* XFS */),
    BTRFS_SUPER_MAGIC,
    F2FS_SUPER_MAGIC,
    NILFS_SUPER_MAGIC,
    FsType(0x2fc1_2fc1 /* ZFS */),
];

pub(super) fn is_local(folder: &File) -> bool {
    fstatfs(folder.as_fd()).is_ok_and(|stat| LOCAL.contains(&stat.filesystem_type()))
}

fn oldest<'a>(records: impl Iterator<Item = &'a Record>) -> Option<Timestamp> {
    records.map(|record| record.ctime).min()
}

impl Locked {
    /// Returns the time from which on some of these records can be reclaimed. A new index stores
    /// it, so that no verb has to search for it again.
    pub(super) fn earlier_in(&self, records: &[Record]) -> Option<Timestamp> {
        let host = &self.store.options.host;
        let oldest = oldest(records.iter().filter(|record| record.is_of_earlier_boot(host)));
        oldest.filter(|_| is_local(&self.folder.file))
    }

    /// Takes away what is dead since a reboot. Costs nothing where no reservation is of an earlier
    /// boot.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read. What cannot be removed is noted, and stays.
    pub(super) fn reclaim(&mut self) -> Result<()> {
        if self.store.options.earlier == RebootPolicy::Keep {
            return Ok(());
        }
        let dead = self.attempt(|locked| {
            let Some(earlier) = locked.index()?.earlier() else { return Ok(Vec::new()) };
            // Another boot ID, but nothing older than this boot: the clock is not set yet, or the
            // ID is not the kernel's.
            let Some(booted) = locked.store.options.host.booted().filter(|booted| earlier < *booted) else {
                return Ok(Vec::new());
            };
            let host = locked.store.options.host.clone();
            let records = locked.index()?.records().map_err(TableError::Io)?;
            let earlier = records.into_iter().filter(|record| record.is_of_earlier_boot(&host));
            let (mut dead, rest): (Vec<Record>, Vec<Record>) = earlier.partition(|record| record.ctime < booted);
            let before = dead.len();
            dead.retain(|record| index::is_unchanged(&locked.folder.file, record));
            // Touched without the folder's being changed: reading it again finds out.
            if dead.len() < before && locked.trust == Trust::Index {
                return Err(Trouble::Stale);
            }
            locked.index()?.set_earlier(oldest(rest.iter()));
            Ok(dead.into_iter().map(|record| record.address).collect())
        })?;
        if dead.is_empty() {
            return Ok(());
        }
        let (mut removed, error) = self.remove(&dead);
        removed.sort_unstable();
        let notes = &self.store.options.notes;
        if let (Some(first), Some(last)) = (removed.first(), removed.last()) {
            let (number, path) = (removed.len(), self.folder.path.display());
            notes.note(format_args!(
                "{number} reservations in {path} were made before this boot and are released: {first} to {last}"
            ));
        }
        if let Some(error) = error {
            notes.note(format_args!("some reservations made before this boot were not released: {error}"));
        }
        Ok(())
    }
}

impl Store {
    /// Returns the addresses that the next ADD would reclaim. Works without the lock, for STATUS:
    /// half-made changes are not counted.
    pub(super) fn reclaimable(&self) -> Vec<IpAddr> {
        let find = || -> Option<Vec<IpAddr>> {
            let (host, path) = (&self.options.host, self.index_path());
            let header = index::peek_header(&path)?;
            if self.options.earlier == RebootPolicy::Keep || (header.boot == host.boot() && header.earlier.is_none()) {
                return None;
            }
            let booted = host.booted()?;
            let folder = File::open(self.path()).ok().filter(is_local)?;
            let is_dead = |record: &Record| {
                record.is_of_earlier_boot(host) && record.ctime < booted && index::is_unchanged(&folder, record)
            };
            let (records, _) = index::old_records(&path, host);
            Some(records.into_values().filter(is_dead).map(|record| record.address).collect())
        };
        find().unwrap_or_default()
    }
}
