//! The index of the folder of reservations: a cache, so that a verb need not read the whole folder.
//!
//! The index is one file, `<dataDir>/.cni/<network>/index`. It may be deleted at any time: the
//! files of the reservations are authoritative, and the next verb that takes the folder's lock
//! rebuilds the index. It has a header page ([`header`]) and a hash table ([`table`]) with two
//! kinds of entries: a [`Record`] of each file whose name is an address, and the addresses of each
//! attachment. Other kinds, which earlier builds stored, are ignored.
//!
//! # How a stale index is recognised
//!
//! After each change of the folder, these plugins set its mtime to a time in the past with random
//! nanoseconds ([`stamp_folder`]), and store this mtime in the header. When any program creates or
//! removes a file, the kernel sets the folder's mtime to the present time, and so the index is
//! stale if the two mtimes differ. The mtime that the kernel sets would not do for the header: its
//! clock ticks every few milliseconds, so two changes may leave the same mtime.
//!
//! Under the folder's lock, these plugins change the folder in five steps. The header is *dirty*
//! until the last:
//!
//! 1. [`Index::begin`] compares the folder with the header and makes the header dirty.
//! 2. The caller creates and removes files.
//! 3. [`Index::stamp_folder`] sets the folder's mtime.
//! 4. [`Index::put`] and [`Index::remove`] change the table in place.
//! 5. [`Index::finish`] writes a *clean* header with the new mtime.
//!
//! If the process is killed in between, the next verb finds the dirty header and rebuilds the
//! index. If a power loss undoes step 1 but not step 2, the folder's mtime differs from the
//! header's.
//!
//! In step 2, just before a new file gets its name, the caller stores a *provisional* record of the
//! file, with a placeholder for the nanoseconds of the ctime ([`PROVISIONAL_NANOS`]). If the
//! process is killed before step 4, the rebuild learns from this record in which boot the file was
//! created.
//!
//! # What an index can miss
//!
//! - A program that ignores the lock (Go's plugin takes it) changes the folder between steps 1 and
//!   3, which take microseconds. The next rebuild finds the change, at the latest when a range
//!   seems to be full ([`Index::is_exact`]). A rebuild itself misses nothing, because it sets the
//!   mtime before it reads the folder.
//! - A file is edited in place, which does not change the folder's mtime. Every verb reads a file
//!   before it acts on it, but until the next rebuild, the new owner's DEL does not find the file.

mod answers;
pub(crate) mod header;
mod occupied;
mod rebuild;
mod record;
pub(crate) mod table;

use std::collections::HashMap;
use std::fs::{File, FileTimes, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::host::{Host, Timestamp};
use header::{CLEAN_AT, Header, Stamp};
use record::{RECORD, address_to_payload};
use table::{Key, PAGE_LENGTH, Storage, Table, TableError};

pub(crate) use occupied::OccupiedAddresses;
#[cfg(feature = "fuzzing")]
pub(crate) use rebuild::classify;
pub(crate) use rebuild::{Content, MAX_LENGTH, address_of_name, is_unchanged, names_in, read, read_name, scan};
pub(crate) use record::{Holder, PROVISIONAL_NANOS, Record};
pub(crate) use table::hash;

/// The tag of the entries with the addresses of an attachment, which have the ranks 0, 1, 2, ….
const OWNED: u8 = 2;

/// The index of one folder. The caller holds the folder's lock, except in [`peek`].
#[derive(Debug)]
pub(crate) struct Index {
    table: Table,
    header: Header,
    /// The path of the index file, or `None` if the index is in memory or is only read.
    path: Option<PathBuf>,
    /// Whether the folder was stamped after the header was last written, so that the next header
    /// may be clean.
    has_new_stamp: bool,
}

/// Opens the index. Returns `None` if it must be rebuilt: it is missing, damaged or dirty, is of
/// another machine or boot, or its header does not have the folder's stamp.
pub(crate) fn open(path: &Path, folder_stamp: &Stamp, host: &Host) -> Option<Index> {
    let file = open_file(path, OpenOptions::new().read(true).write(true)).ok()?;
    let header = read_header(&file)?;
    let describes_folder = header.clean && header.stamp == *folder_stamp;
    // The header's `oldest_reclaimable` is only right for the machine and boot that wrote it.
    let is_of_this_boot = header.machine == host.machine() && header.boot == host.boot();
    if !describes_folder || !is_of_this_boot {
        return None;
    }
    let table = Table::in_storage(Storage::File(file), header.slots, header.used);
    Some(Index { table, header, path: Some(path.to_owned()), has_new_stamp: false })
}

/// Opens an index file. Only a regular file is accepted: symbolic links are not followed, and
/// opening a FIFO does not block.
fn open_file(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let file = options.custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a regular file")) }
}

/// Reads the header. Returns `None` if the header is invalid or does not match the file's length,
/// because memory is allocated according to the header.
fn read_header(file: &File) -> Option<Header> {
    let mut page = [0; PAGE_LENGTH as usize];
    file.read_exact_at(&mut page, 0).ok()?;
    let header = Header::decode(&page)?;
    (header.file_size()? == file.metadata().ok()?.len()).then_some(header)
}

/// Reads the header of an index without the lock, even if it is dirty or stale.
pub(crate) fn peek_header(path: &Path) -> Option<Header> {
    read_header(&open_file(path, OpenOptions::new().read(true)).ok()?)
}

/// Queries an index without the lock, for STATUS. `folder_stamp` reads the folder's stamp, before
/// and after the query. Returns `None` if the index is missing, dirty or stale, if its header is
/// damaged, if the folder changed during the query, or if `query` failed.
pub(crate) fn peek<T>(
    path: &Path,
    folder_stamp: impl Fn() -> Option<Stamp>,
    query: impl FnOnce(&Index) -> io::Result<T>,
) -> Option<T> {
    let file = open_file(path, OpenOptions::new().read(true)).ok()?;
    let header = read_header(&file).filter(|header| header.clean)?;
    // The index takes `file`, so the second reading of the header needs another handle.
    let header_file = file.try_clone().ok()?;
    if folder_stamp()? != header.stamp {
        return None;
    }
    let table = Table::in_storage(Storage::File(file), header.slots, header.used);
    let index = Index { table, header, path: None, has_new_stamp: false };
    let answer = query(&index).ok()?;
    // A change makes the header dirty before it changes the table, and its clean header has a new
    // stamp. So the answer is right if the header is the same as before.
    let has_same_header = read_header(&header_file).as_ref() == Some(&index.header);
    let has_same_stamp = folder_stamp()? == index.header.stamp;
    (has_same_header && has_same_stamp).then_some(answer)
}

/// Returns the records of an index, even if the index is dirty or stale: a record still describes
/// the file if the file has the inode and times in the record. Skips damaged records. Returns no
/// records if the index or its header cannot be read.
pub(crate) fn old_records(path: &Path, host: &Host) -> HashMap<IpAddr, Record> {
    read_records(path, host).unwrap_or_default()
}

/// Does the work of [`old_records`]. Returns `None` if the index or its header cannot be read.
fn read_records(path: &Path, host: &Host) -> Option<HashMap<IpAddr, Record>> {
    let file = open_file(path, OpenOptions::new().read(true)).ok()?;
    let header = read_header(&file)?;
    // The index may come from another machine, with a copied disk. The boots of that machine mean
    // nothing here.
    let is_of_this_machine = header.machine != 0 && header.machine == host.machine();
    let mut records = HashMap::new();
    let table = Table::in_storage(Storage::File(file), header.slots, header.used);
    let visited = table.for_each(|key, payload| {
        if key.tag == RECORD {
            let mut record = Record::decode(key, payload);
            if !is_of_this_machine {
                record.boot = 0;
            }
            records.insert(record.address, record);
        }
    });
    visited.ok()?;
    Some(records)
}

impl Index {
    /// Returns a new index in memory with these records, at most one for each address.
    pub(crate) fn build(records: &[Record], host: &Host) -> Result<Index, TableError> {
        let unreadable = records.iter().any(|record| record.holder == Holder::Unreadable);
        let foreign = records.iter().any(|record| record.holder == Holder::Foreign);
        let (machine, boot) = (host.machine(), host.boot());
        let header = Header { machine, boot, exact: true, unreadable, foreign, ..Header::default() };
        // Two entries per record.
        let mut index =
            Index { table: Table::in_memory(records.len() as u64 * 2), header, path: None, has_new_stamp: false };
        // The same as `put`, but faster, because no address has a record yet. `ranks` counts the
        // addresses of each attachment.
        let mut ranks: HashMap<u64, u32> = HashMap::with_capacity(records.len());
        for record in records {
            index.table.put(&Record::key(record.address), &record.encode())?;
            if let Holder::Content(hash) = record.holder {
                let rank = ranks.entry(hash).or_default();
                index.put_owned(hash, *rank, record.address)?;
                *rank += 1;
            }
        }
        Ok(index)
    }

    /// Step 1 of a change: makes the header dirty. Returns `false`, and changes nothing, if another
    /// program has changed the folder since the index was opened. An index in memory is not
    /// compared with the folder, because no later verb uses it.
    pub(crate) fn begin(&mut self, folder: &File) -> Result<bool, TableError> {
        if let Storage::File(file) = &self.table.storage {
            if Stamp::of(&folder.metadata()?) != self.header.stamp {
                return Ok(false);
            }
            file.write_all_at(&0_u64.to_le_bytes(), CLEAN_AT)?;
        }
        // Until step 3, a change by a program that ignores the lock would be missed.
        self.header.exact = false;
        Ok(true)
    }

    /// Step 3 of a change: sets the folder's mtime, see [`stamp_folder`].
    pub(crate) fn stamp_folder(&mut self, folder: &File) -> io::Result<()> {
        let stamp = stamp_folder(folder)?;
        self.set_stamp(stamp);
        Ok(())
    }

    /// Stores the folder's new stamp, which [`stamp_folder`] returned. For a rebuild, which stamps
    /// the folder before the index exists.
    pub(crate) fn set_stamp(&mut self, stamp: Stamp) {
        self.header.stamp = stamp;
        self.has_new_stamp = true;
    }

    /// Step 5 of a change: writes a clean header. Writes none if step 3 was left out, as for an
    /// index in memory.
    pub(crate) fn finish(&mut self) -> Result<(), TableError> {
        if self.table.is_crowded() {
            self.grow()?;
        }
        if !self.has_new_stamp {
            return Ok(());
        }
        self.has_new_stamp = false;
        self.header.clean = true;
        (self.header.slots, self.header.used) = (self.table.slots(), self.table.used());
        Ok(self.table.storage.write(&self.header.encode(), 0)?)
    }

    /// Writes an index that is in memory to the file at `path`, which is replaced atomically, and
    /// uses the file from then on. The header is clean if `has_new_stamp` is set. Writes nothing if
    /// the index is in a file already.
    pub(crate) fn save(&mut self, path: &Path) -> Result<(), TableError> {
        (self.header.slots, self.header.used) = (self.table.slots(), self.table.used());
        self.header.clean = self.has_new_stamp;
        let page = self.header.encode();
        let Storage::Memory(bytes) = &mut self.table.storage else { return Ok(()) };
        bytes[..page.len()].copy_from_slice(&page);
        // The lock is held, so an existing temporary file was left by a killed process.
        let temporary = path.with_extension("new");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = open_file(&temporary, &mut options)
            .map_err(|error| io::Error::other(format!("failed to open {}: {error}", temporary.display())))?;
        file.write_all_at(bytes, 0)?;
        std::fs::rename(&temporary, path)?;
        self.table = Table::in_storage(Storage::File(file), self.header.slots, self.header.used);
        self.path = Some(path.to_owned());
        self.has_new_stamp = false;
        Ok(())
    }

    /// Moves all entries to a table with twice as many slots. An index file is replaced, not
    /// changed in place.
    fn grow(&mut self) -> Result<(), TableError> {
        // `in_memory` takes a number of entries and creates more slots than that, a power of two.
        // So for the present number of slots, it creates twice as many.
        let mut larger = Table::in_memory(self.table.slots());
        let mut outcome = Ok(());
        self.table.for_each(|key, payload| {
            if outcome.is_ok() {
                outcome = larger.put(key, payload);
            }
        })?;
        outcome?;
        self.table = larger;
        if let Some(path) = self.path.clone() {
            // The change of the index is not complete, so the header must stay dirty until
            // `finish`. `save` writes a dirty header while `has_new_stamp` is false.
            let has_new_stamp = std::mem::replace(&mut self.has_new_stamp, false);
            self.save(&path)?;
            self.has_new_stamp = has_new_stamp;
        }
        Ok(())
    }

    /// Whether the index is in a file, not only in memory.
    pub(crate) fn is_on_disk(&self) -> bool {
        matches!(self.table.storage, Storage::File(_))
    }

    /// Whether the index is certain to know every created and removed file. A rebuild makes it
    /// exact, until the next [`begin`](Index::begin).
    pub(crate) fn is_exact(&self) -> bool {
        self.header.exact
    }

    /// Whether another machine may also use the folder, on a shared file system. Then new records
    /// have no boot.
    pub(crate) fn is_shared(&self) -> bool {
        self.header.shared
    }

    /// Records that the folder is shared. The header is written with the next change.
    pub(crate) fn set_shared(&mut self) {
        self.header.shared = true;
    }

    /// Returns a lower bound of the ctimes of the reclaimable reservations, which are those of
    /// earlier boots. Returns `None` if there are none.
    pub(crate) fn oldest_reclaimable(&self) -> Option<Timestamp> {
        self.header.oldest_reclaimable
    }

    /// Sets the time for [`oldest_reclaimable`](Index::oldest_reclaimable). The header is written
    /// with the next change.
    pub(crate) fn set_oldest_reclaimable(&mut self, time: Option<Timestamp>) {
        self.header.oldest_reclaimable = time;
    }

    /// Adds the record of an address, or replaces it.
    pub(crate) fn put(&mut self, record: &Record) -> Result<(), TableError> {
        let before = self.record(record.address)?;
        self.table.put(&Record::key(record.address), &record.encode())?;
        self.update_owned(record.address, before, Some(*record))
    }

    /// Removes the record of an address, whose file has been removed.
    pub(crate) fn remove(&mut self, address: IpAddr) -> Result<(), TableError> {
        let before = self.record(address)?;
        self.table.remove(&Record::key(address))?;
        self.update_owned(address, before, None)
    }

    /// Updates the addresses of the attachments after the record of `address` has changed from
    /// `before` to `after`. `None` stands for a missing record.
    fn update_owned(
        &mut self,
        address: IpAddr,
        before: Option<Record>,
        after: Option<Record>,
    ) -> Result<(), TableError> {
        let hash_of = |record: Option<Record>| match record.map(|record| record.holder) {
            Some(Holder::Content(hash)) => Some(hash),
            _ => None,
        };
        if hash_of(before) == hash_of(after) {
            return Ok(());
        }
        if let Some(hash) = hash_of(before) {
            self.remove_owned(hash, address)?;
        }
        if let Some(hash) = hash_of(after) {
            let rank = self.owned_by(hash)?.len() as u32;
            self.put_owned(hash, rank, address)?;
        }
        Ok(())
    }

    /// Returns the key of the entry with an address of an attachment. `hash` is the hash of the
    /// content that the attachment's files have; `rank` counts its addresses from 0.
    fn owned_key(hash: u64, rank: u32) -> Key {
        Key { tag: OWNED, family: 0, rank, number: u128::from(hash) }
    }

    /// Stores an address of the attachment with this hash under a rank.
    fn put_owned(&mut self, hash: u64, rank: u32, address: IpAddr) -> Result<(), TableError> {
        self.table.put(&Index::owned_key(hash, rank), &address_to_payload(address))
    }

    /// Removes an address of the attachment with this hash. The last address gets the rank of the
    /// removed address, so that the ranks have no gap.
    fn remove_owned(&mut self, hash: u64, address: IpAddr) -> Result<(), TableError> {
        let addresses = self.owned_by(hash)?;
        // The rank of an address is its position.
        let Some(rank) = addresses.iter().position(|other| *other == address) else {
            return Err(TableError::Corrupt);
        };
        let last = addresses.len() - 1;
        if rank != last {
            self.put_owned(hash, rank as u32, addresses[last])?;
        }
        self.table.remove(&Index::owned_key(hash, last as u32))
    }

    /// Returns an index with this table and header, for fuzzing. Its checksums are right, so the
    /// content is used even if it is wrong.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn forged(table: Table, header: Header) -> Index {
        Index { table, header, path: None, has_new_stamp: true }
    }

    /// Returns the number of reads and writes of the table so far.
    #[cfg(test)]
    pub(crate) fn accesses(&self) -> u64 {
        self.table.accesses()
    }
}

/// Sets the folder's mtime to a unique time that the kernel never sets by itself: yesterday, with
/// random nanoseconds. Returns the folder's new stamp.
///
/// # Errors
/// The mtime cannot be set, or the file system does not store nanoseconds: then it would not be
/// unique.
pub(crate) fn stamp_folder(folder: &File) -> io::Result<Stamp> {
    let nanoseconds = random_nanos()?;
    let yesterday = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs().saturating_sub(86_400);
    folder.set_times(FileTimes::new().set_modified(UNIX_EPOCH + Duration::new(yesterday, nanoseconds)))?;
    let stamp = Stamp::of(&folder.metadata()?);
    if stamp.mtime != (yesterday as i64, nanoseconds) {
        return Err(io::Error::other("the file system does not keep nanoseconds, or the folder was changed meanwhile"));
    }
    Ok(stamp)
}

/// Returns a random number of nanoseconds that is not divisible by 1000, unlike the times that
/// coarse clocks and tools that copy files produce.
pub(crate) fn random_nanos() -> io::Result<u32> {
    let random = getrandom::u32().map_err(|error| io::Error::other(error.to_string()))?;
    let thousands = random % 999_999_000 / 1000 * 1000;
    let remainder = 1 + random % 999;
    Ok(thousands + remainder)
}

#[cfg(test)]
mod tests;
