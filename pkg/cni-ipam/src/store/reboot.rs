//! Reclaims reservations that these plugins created in an earlier boot: releases them, because no
//! container survives a reboot.
//!
//! A reservation is reclaimed only if all of this is certain:
//!
//! - The file still has the inode and times in its record.
//! - The record was made on this machine, in another boot.
//! - The file is older than this boot.
//! - The folder is on a file system that no other machine can be using.
//!
//! So files of the Go plugin, changed files, copies of a disk, and everything on a machine without
//! an ID stay. So does everything on a tmpfs, which is empty after a real reboot, and on an
//! overlay, below which there may be a shared file system.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;

use nix::sys::statfs::{BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, F2FS_SUPER_MAGIC, FsType, NILFS_SUPER_MAGIC, fstatfs};

use cni::Result;

use super::{Locked, Store, Trouble, Trust, address_list};
use crate::host::Timestamp;
use crate::index::table::TableError;
use crate::index::{self, Record};

/// The treatment of reservations of an earlier boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RebootPolicy {
    /// The first ADD or GC after a reboot releases them.
    Reclaim,
    /// They stay until their owner's DEL or a GC of the network releases them.
    Keep,
}

/// The file systems that only one kernel at a time can use, and that outlive a reboot. ext2 and
/// ext3 have the same number as ext4.
const LOCAL_FILE_SYSTEMS: [FsType; 6] = [
    EXT4_SUPER_MAGIC,
    // nix has no name for it on musl, with which the release is built.
    FsType(0x5846_5342 /* XFS */),
    BTRFS_SUPER_MAGIC,
    F2FS_SUPER_MAGIC,
    NILFS_SUPER_MAGIC,
    FsType(0x2fc1_2fc1 /* ZFS */),
];

/// Whether the folder is on a file system that no other machine can be using, and that outlives a
/// reboot.
pub(super) fn is_local(folder: &File) -> bool {
    fstatfs(folder.as_fd()).is_ok_and(|stat| LOCAL_FILE_SYSTEMS.contains(&stat.filesystem_type()))
}

/// Returns the ctime of the oldest record, or `None` if there are no records.
fn oldest_ctime<'a>(records: impl Iterator<Item = &'a Record>) -> Option<Timestamp> {
    records.map(|record| record.ctime).min()
}

impl Locked {
    /// Returns the ctime of the oldest record of an earlier boot. Returns `None` if there is none,
    /// or the folder is not on a local file system. A new index stores this ctime, so that a verb
    /// searches the records only if the ctime is before the present boot.
    pub(super) fn oldest_reclaimable_in(&self, records: &[Record]) -> Option<Timestamp> {
        let host = &self.store.options.host;
        let oldest = oldest_ctime(records.iter().filter(|record| record.is_of_earlier_boot(host)));
        oldest.filter(|_| is_local(&self.folder.file))
    }

    /// Releases reservations of an earlier boot, and writes a note about them. Does nothing with
    /// [`RebootPolicy::Keep`].
    ///
    /// # Errors
    /// - Code 5 if the folder cannot be read. For a reservation that cannot be removed, there is
    ///   only a note.
    /// - Code 11 if the folder keeps changing.
    pub(super) fn reclaim(&mut self) -> Result<()> {
        if self.store.options.after_reboot == RebootPolicy::Keep {
            return Ok(());
        }
        let reclaimable = self.attempt(Locked::find_reclaimable)?;
        if reclaimable.is_empty() {
            return Ok(());
        }
        let (mut removed, error) = self.remove(&reclaimable);
        removed.sort_unstable();
        let notes = &self.store.options.notes;
        if !removed.is_empty() {
            let plural = if removed.len() == 1 { "" } else { "s" };
            notes.note(format_args!(
                "released {} reservation{plural} in {}, made before this boot: {}",
                removed.len(),
                self.folder.path.display(),
                address_list(&removed)
            ));
        }
        if let Some(error) = error {
            notes.note(format_args!("some reservations made before this boot were not released: {error}"));
        }
        Ok(())
    }

    /// Returns the addresses of the reservations that can be reclaimed, which the caller then
    /// releases. Updates the index's [`oldest_reclaimable`](index::Index::oldest_reclaimable), so
    /// that the next verb need not search again.
    ///
    /// # Errors
    /// - [`Trouble::Stale`] if the index must be rebuilt first.
    /// - [`Trouble::Index`] if the index cannot be read.
    /// - [`Trouble::Final`] with code 5 if the folder cannot be read.
    fn find_reclaimable(&mut self) -> Result<Vec<IpAddr>, Trouble> {
        let Some(oldest) = self.index()?.oldest_reclaimable() else { return Ok(Vec::new()) };
        let host = self.store.options.host.clone();
        let Some(booted) = host.booted() else { return Ok(Vec::new()) };
        if oldest >= booted {
            // The boot IDs differ, but the files are not older than this boot: the clock is not set
            // yet, or the ID was replaced.
            return Ok(Vec::new());
        }
        let mut records = self.index()?.records().map_err(TableError::Io)?;
        records.retain(|record| record.is_of_earlier_boot(&host));
        let (older, not_older): (Vec<Record>, Vec<Record>) =
            records.into_iter().partition(|record| record.ctime < booted);
        let is_unchanged = |record: &&Record| index::is_unchanged(&self.folder.file, record);
        let reclaimable: Vec<IpAddr> = older.iter().filter(is_unchanged).map(|record| record.address).collect();
        // An edit of a file in place does not change the folder's mtime, so the index has missed
        // it. One rebuild is enough, because it compares each file with its record.
        if reclaimable.len() < older.len() && self.trust == Trust::WholeIndex {
            return Err(Trouble::Stale);
        }
        self.index()?.set_oldest_reclaimable(oldest_ctime(not_older.iter()));
        Ok(reclaimable)
    }
}

impl Store {
    /// Returns the addresses that the next ADD would reclaim, for STATUS. Takes no lock. Returns
    /// `None` if it would reclaim none according to the policy or the index's header, or if the
    /// addresses cannot be determined.
    pub(super) fn reclaimable(&self) -> Option<Vec<IpAddr>> {
        let (host, path) = (&self.options.host, self.index_path());
        if self.options.after_reboot == RebootPolicy::Keep {
            return None;
        }
        let header = index::peek_header(&path)?;
        // In an index of an earlier boot, `oldest_reclaimable` does not include the reservations of
        // that boot, so the records must be read.
        let is_of_this_boot = header.boot == host.boot();
        if is_of_this_boot && header.oldest_reclaimable.is_none() {
            return None;
        }
        let booted = host.booted()?;
        let folder = File::open(self.path()).ok().filter(is_local)?;
        let is_reclaimable = |record: &Record| {
            record.is_of_earlier_boot(host) && record.ctime < booted && index::is_unchanged(&folder, record)
        };
        let records = index::old_records(&path, host);
        Some(records.into_values().filter(is_reclaimable).map(|record| record.address).collect())
    }
}
