//! Reclaims reservations that these plugins created in an earlier boot: releases them, because no
//! container survives a reboot.
//!
//! A reservation is reclaimed only if all of this is certain:
//!
//! - The file has the inode of its link and the content that the link names.
//! - The link was made on this machine, in another boot.
//! - The file is older than this boot.
//! - The folder is on a file system that no other machine can be using.
//!
//! So files of the Go plugin, changed files, copies of a disk, and everything on a machine without
//! an ID stay. So does everything on a tmpfs, which is empty after a real reboot, and on an
//! overlay, below which there may be a shared file system.
//!
//! The symbolic link `boot` in the sidecar records that this has been done in a boot ([`Search`]).

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use nix::sys::statfs::{BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, F2FS_SUPER_MAGIC, FsType, NILFS_SUPER_MAGIC, fstatfs};

use cni::Result;

use super::{Locked, Store, address_list};
use crate::content::{self, Content, hash};
use crate::host::{Boot, Host};
use crate::links::{Link, Scan};

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

/// The last search for reservations of earlier boots, as recorded in the symbolic link `boot`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Search {
    /// The boot in which the folder was searched.
    boot: Boot,
    /// Whether the folder is on a file system of which [`is_local`] is `true`.
    is_local: bool,
    /// The time of the boot, in seconds, if a reservation of an earlier boot was not older: the
    /// clock was not set yet. If the clock is set later, the boot's time changes.
    booted: Option<i64>,
}

impl Search {
    /// Reads the record in a sidecar. Returns `None` if it is missing or damaged.
    fn read(sidecar: &Path) -> Option<Search> {
        let target = std::fs::read_link(sidecar.join("boot")).ok()?;
        let mut words = target.to_str()?.split(' ');
        let boot = Boot::parse(words.next()?)?;
        let is_local = words.next()? == "local";
        Some(Search { boot, is_local, booted: words.next().and_then(|seconds| seconds.parse().ok()) })
    }

    /// Replaces the record in a sidecar. After an error, the next ADD or GC searches again.
    fn write(&self, sidecar: &Path) {
        let target = format!("{} {}", self.boot, if self.is_local { "local" } else { "shared" });
        let target = self.booted.map_or(target.clone(), |seconds| format!("{target} {seconds}"));
        let temporary = sidecar.join("boot.new");
        let _ = std::fs::remove_file(&temporary);
        let _ = symlink(target, &temporary).and_then(|()| std::fs::rename(&temporary, sidecar.join("boot")));
    }

    /// Whether nothing has changed since the search.
    fn is_valid(&self, host: &Host) -> bool {
        let is_same_time = |seconds: i64| host.booted().is_some_and(|(now, _)| (now - seconds).abs() < CLOCK_DRIFT);
        Some(self.boot) == host.boot() && self.booted.is_none_or(is_same_time)
    }
}

/// How many seconds the boot's time may change without the clock having been set.
const CLOCK_DRIFT: i64 = 60;

/// The reservations of earlier boots in a folder.
struct Earlier {
    /// Those that are certain to be dead.
    reclaimable: Vec<Link>,
    /// Whether others are not older than this boot.
    has_newer: bool,
}

/// Finds the reservations of earlier boots. Returns `None` if the boot or its time is not known.
fn find_earlier(scan: &Scan, path: &Path, folder: &File, host: &Host) -> Option<Earlier> {
    let (boot, booted) = (host.boot()?, host.booted()?);
    let mut earlier = Earlier { reclaimable: Vec::new(), has_newer: false };
    let is_earlier = |link: &Link| link.boot.is_some_and(|made| made.is_other_boot_of_same_machine(&boot));
    for (link, inode) in scan.held.iter().filter(|(link, _)| is_earlier(link)) {
        let Ok(metadata) = std::fs::symlink_metadata(path.join(link.address.to_string())) else { continue };
        if (metadata.ctime(), metadata.ctime_nsec() as u32) >= booted {
            earlier.has_newer = true;
            continue;
        }
        let content = content::read(folder, link.address);
        if metadata.ino() == *inode && matches!(content, Ok(Content::Text(text)) if hash(&text) == link.owner) {
            earlier.reclaimable.push(link.clone());
        }
    }
    Some(earlier)
}

impl Locked {
    /// Returns the boot for the links of new reservations. Returns `None` on a shared file system,
    /// where another boot ID does not prove that the container is gone.
    pub(super) fn recorded_boot(&self) -> Option<Boot> {
        let boot = self.store.options.host.boot()?;
        let search = Search::read(&self.store.sidecar).filter(|search| search.boot == boot);
        search.map_or_else(|| is_local(&self.folder.file), |search| search.is_local).then_some(boot)
    }

    /// Releases reservations of an earlier boot, and writes a note about them. Does nothing with
    /// [`RebootPolicy::Keep`].
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read. For a reservation that cannot be removed, there is only
    /// a note.
    pub(super) fn reclaim(&mut self) -> Result<()> {
        let host = self.store.options.host.clone();
        let Some(boot) = host.boot() else { return Ok(()) };
        if self.store.options.after_reboot == RebootPolicy::Keep || self.store.is_searched() {
            return Ok(());
        }
        let scan = self.scan()?;
        let mut search = Search { boot, is_local: is_local(&self.folder.file), booted: None };
        if search.is_local {
            let earlier = find_earlier(&scan, &self.folder.path, &self.folder.file, &host);
            let Some(Earlier { reclaimable, has_newer }) = earlier else { return Ok(()) };
            search.booted = host.booted().filter(|_| has_newer).map(|(seconds, _)| seconds);
            self.release_earlier(&reclaimable);
        }
        search.write(&self.store.sidecar);
        Ok(())
    }

    /// Releases these reservations of an earlier boot, and writes a note about them.
    fn release_earlier(&mut self, reclaimable: &[Link]) {
        let (mut removed, error) = self.remove(reclaimable);
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
    }
}

impl Store {
    /// Whether the folder need not be searched for reservations of earlier boots.
    pub(super) fn is_searched(&self) -> bool {
        Search::read(&self.sidecar).is_some_and(|search| search.is_valid(&self.options.host))
    }

    /// Returns the addresses that the next ADD would reclaim, for STATUS: none if that cannot be
    /// determined. Takes no lock.
    pub(super) fn reclaimable(&self, scan: &Scan, folder: &File) -> Vec<IpAddr> {
        if self.options.after_reboot == RebootPolicy::Keep || self.is_searched() || !is_local(folder) {
            return Vec::new();
        }
        let earlier = find_earlier(scan, &self.path, folder, &self.options.host);
        earlier.map_or(Vec::new(), |earlier| earlier.reclaimable.iter().map(|link| link.address).collect())
    }
}
