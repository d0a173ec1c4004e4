//! Reclaims reservations that these plugins created in an earlier boot: releases them, because no
//! container survives a reboot.
//!
//! A reservation is reclaimed only if all of this is certain: inode and times of its file are those
//! in the index, the record is of this machine and of another boot, the file is older than this
//! boot, and the folder is on a file system that no other machine can be using. So files that the
//! Go plugin created, changed files, copies of a disk, and everything on a machine without an ID
//! stay.
//!
//! Nothing is reclaimed on a tmpfs or an overlay. A tmpfs is empty after a boot, so there another
//! boot ID means that the ID was replaced. The file system below an overlay is not visible, so
//! other machines may be using it.

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
    /// The first ADD or GC of a boot releases them.
    Reclaim,
    /// They stay until their owner's DEL or a GC of the network releases them.
    Keep,
}

/// The file systems that only one kernel at a time uses, and that outlive a reboot. ext2 and ext3
/// have the number of ext4.
const LOCAL_FILE_SYSTEMS: [FsType; 6] = [
    EXT4_SUPER_MAGIC,
    // nix has no name for it on musl, with which the release is built.
    FsType(0x5846_5342 /* XFS */),
    BTRFS_SUPER_MAGIC,
    F2FS_SUPER_MAGIC,
    NILFS_SUPER_MAGIC,
    FsType(0x2fc1_2fc1 /* ZFS */),
];

/// Whether no other machine can be using the folder's file system.
pub(super) fn is_local(folder: &File) -> bool {
    fstatfs(folder.as_fd()).is_ok_and(|stat| LOCAL_FILE_SYSTEMS.contains(&stat.filesystem_type()))
}

/// Returns the ctime of the oldest record, or `None` without records.
fn oldest_ctime<'a>(records: impl Iterator<Item = &'a Record>) -> Option<Timestamp> {
    records.map(|record| record.ctime).min()
}

impl Locked {
    /// Returns the ctime of the oldest of these records that is of an earlier boot, or `None` if
    /// there is none or the folder's file system is not local. A new index stores it, so that a
    /// verb searches all records only if this one is older than the present boot.
    pub(super) fn oldest_reclaimable_in(&self, records: &[Record]) -> Option<Timestamp> {
        let host = &self.store.options.host;
        let oldest = oldest_ctime(records.iter().filter(|record| record.is_of_earlier_boot(host)));
        oldest.filter(|_| is_local(&self.folder.file))
    }

    /// Releases reservations of an earlier boot, with a note, unless the options say
    /// [`RebootPolicy::Keep`].
    ///
    /// # Errors
    /// - Code 5 if the folder cannot be read. A reservation that cannot be removed is only noted.
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
            notes.note(format_args!(
                "released {} in {}, made before this boot: {}",
                if removed.len() == 1 { "1 reservation".to_owned() } else { format!("{} reservations", removed.len()) },
                self.folder.path.display(),
                address_list(&removed)
            ));
        }
        if let Some(error) = error {
            notes.note(format_args!("some reservations made before this boot were not released: {error}"));
        }
        Ok(())
    }

    /// Returns the addresses of the reservations that can be reclaimed, and stores in the index
    /// that they need not be searched again.
    ///
    /// # Errors
    /// [`Trouble::Stale`] if the folder has to be read again first.
    fn find_reclaimable(&mut self) -> Result<Vec<IpAddr>, Trouble> {
        let Some(oldest) = self.index()?.oldest_reclaimable() else { return Ok(Vec::new()) };
        let host = self.store.options.host.clone();
        // If no reservation is older than this boot although its boot ID differs, the clock is not
        // set yet or the ID was replaced.
        let Some(booted) = host.booted().filter(|booted| oldest < *booted) else { return Ok(Vec::new()) };
        let records = self.index()?.records().map_err(TableError::Io)?;
        let of_earlier_boot = records.into_iter().filter(|record| record.is_of_earlier_boot(&host));
        let (mut older, not_older): (Vec<Record>, Vec<Record>) =
            of_earlier_boot.partition(|record| record.ctime < booted);
        let count = older.len();
        older.retain(|record| index::is_unchanged(&self.folder.file, record));
        // A file was changed in place, which does not change the folder's mtime, so the folder is
        // read again. Once is enough: a rebuild has compared each file with its record.
        if older.len() < count && self.trust == Trust::WholeIndex {
            return Err(Trouble::Stale);
        }
        self.index()?.set_oldest_reclaimable(oldest_ctime(not_older.iter()));
        Ok(older.into_iter().map(|record| record.address).collect())
    }
}

impl Store {
    /// Returns the addresses that the next ADD would reclaim. Takes no lock. Returns `None` if the
    /// options or the index exclude that there are any, or if this is not known because something
    /// cannot be read.
    pub(super) fn reclaimable(&self) -> Option<Vec<IpAddr>> {
        let (host, path) = (&self.options.host, self.index_path());
        if self.options.after_reboot == RebootPolicy::Keep {
            return None;
        }
        let header = index::peek_header(&path)?;
        // Only an index of this boot knows that none of its records is reclaimable.
        if header.boot == host.boot() && header.oldest_reclaimable.is_none() {
            return None;
        }
        let booted = host.booted()?;
        let folder = File::open(self.path()).ok().filter(is_local)?;
        let is_reclaimable = |record: &Record| {
            record.is_of_earlier_boot(host) && record.ctime < booted && index::is_unchanged(&folder, record)
        };
        let (records, _) = index::old_records(&path, host);
        Some(records.into_values().filter(is_reclaimable).map(|record| record.address).collect())
    }
}
