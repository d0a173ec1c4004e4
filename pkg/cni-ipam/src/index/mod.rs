//! The index: what is in the folder of reservations, so that no verb has to read all of it.
//!
//! One file, `<dataDir>/.cni/<network>/index`: a header page and a table ([`table`]) with four
//! kinds of entries: records by address, addresses by holder, the words of a tree of occupied
//! addresses ([`bits`]), and the oldest of a set. It never decides who may have an address, and may
//! be deleted at any time.
//!
//! # Why a stale index is never used
//!
//! Every program that changes the folder holds its lock, Go's plugin included, and so do all
//! functions here but [`peek`]. Creating or removing a name makes the kernel set the folder's mtime
//! to the time of day. A clean header names an mtime that the kernel never writes by itself: a past
//! second and random nanoseconds, set by us. So while folder and header agree, no name has come or
//! gone since. The order of a change:
//!
//! 1. [`Index::begin`] compares folder and header, and makes the header dirty.
//! 2. The caller links and unlinks. What it is about to link it [`put`](Index::put)s before, as far
//!    as it knows it: killed right after the link, it has left a record of its own for the rebuild,
//!    which no other could make.
//! 3. [`Index::mark`] sets a new past mtime on the folder and remembers it, in memory only.
//! 4. [`Index::put`] and [`Index::remove`] change the table in place.
//! 5. [`Index::finish`] writes the header with the new stamp, clean.
//!
//! Killed between 1 and 5, the header is dirty; and even if the page with the dirty mark were lost,
//! from 2 on the folder's mtime differs from the header's. Either way the next holder of the lock
//! rebuilds. A change by a program that ignores the lock is noticed too, except between 1 and 3, a
//! few microseconds; the next rebuild finds it, which an exhausted range starts
//! ([`Index::is_exact`]). A rebuild marks first and reads afterwards, so that it has no such gap.
//! Editing a file in place does not change the folder's mtime. Reservations are not edited in
//! normal operation, and an operation reads the file before acting on it; but the new owner is
//! found only after the next rebuild.
//!
//! Without step 3 this would be unsound. The kernel's clock for mtime
//! ticks every few milliseconds, so two changes may leave the same mtime.

mod answers;
pub(crate) mod bits;
pub(crate) mod header;
mod oldest;
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
use crate::ranges::{Range, number};
use header::{Counter, Header, STATE, Stamp};
use record::{RECORD, family, to_payload};
use table::{HEADER, Key, Storage, Table, TableError};

pub(crate) use rebuild::{Content, LONGEST, is_unchanged, names_in, read, read_name, scan};
#[cfg(feature = "fuzzing")]
pub(crate) use rebuild::{canonical, classify};
pub(crate) use record::{Holder, LINKING, Record};
pub(crate) use table::hash;

const HOLDER: u8 = 2;
/// How many records room is made for before one of them has been read.
const ROOM: usize = 1 << 16;

/// The index of one folder, while its lock is held.
#[derive(Debug)]
pub(crate) struct Index {
    table: Table,
    header: Header,
    /// Where it lies; `None` in memory.
    path: Option<PathBuf>,
    /// Whether a header may be written: the folder has the mtime that this index set.
    marked: bool,
}

/// Opens the index if it is true for the folder as it is now.
pub(crate) fn open(path: &Path, folder: &Stamp, host: &Host) -> Option<Index> {
    let file = open_file(path, OpenOptions::new().read(true).write(true)).ok()?;
    let header = read_header(&file)?;
    if !header.clean || header.stamp != *folder || header.machine != host.machine() || header.boot != host.boot() {
        return None;
    }
    let table = Table::over(Storage::File(file), header.slots, header.used);
    Some(Index { table, header, path: Some(path.to_owned()), marked: false })
}

/// Opens a file of the sidecar: only a regular file is accepted. Opening never blocks and follows
/// no symbolic link.
fn open_file(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let file = options.custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a regular file")) }
}

/// The header, if the file is as long as it says: nothing is sized by what it says otherwise.
fn read_header(file: &File) -> Option<Header> {
    let mut page = [0; HEADER as usize];
    file.read_exact_at(&mut page, 0).ok()?;
    let header = Header::decode(&page)?;
    (header.file_size()? == file.metadata().ok()?.len()).then_some(header)
}

/// The header of an index without the lock, whatever state it is in.
pub(crate) fn peek_header(path: &Path) -> Option<Header> {
    read_header(&open_file(path, OpenOptions::new().read(true)).ok()?)
}

/// Asks a question of an index without the lock, for STATUS: the answer counts only if header and
/// folder agreed before and after it. `None` if they did not, or there is no index.
pub(crate) fn peek<T>(
    path: &Path,
    folder: impl Fn() -> Option<Stamp>,
    ask: impl FnOnce(&Index) -> Result<Option<T>, TableError>,
) -> Option<T> {
    let file = open_file(path, OpenOptions::new().read(true)).ok()?;
    let header = read_header(&file).filter(|header| header.clean)?;
    let again = file.try_clone().ok()?;
    if folder()? != header.stamp {
        return None;
    }
    let table = Table::over(Storage::File(file), header.slots, header.used);
    let index = Index { table, header, path: None, marked: false };
    let answer = ask(&index).ok()??;
    // A change makes the header dirty before it touches the table, and gives it another stamp
    // afterwards.
    let unchanged = read_header(&again).as_ref() == Some(&index.header) && folder()? == index.header.stamp;
    unchanged.then_some(answer)
}

/// The records an index holds, and its header, whatever state it is in: each record is true for the
/// file whose inode and times it names.
pub(crate) fn old_records(path: &Path, host: &Host) -> (HashMap<IpAddr, Record>, Header) {
    let read = || -> Option<(HashMap<IpAddr, Record>, Header)> {
        let file = open_file(path, OpenOptions::new().read(true)).ok()?;
        let header = read_header(&file)?;
        let mut records = HashMap::with_capacity(ROOM.min(header.used as usize / 2));
        let read = Table::over(Storage::File(file), header.slots, header.used).for_each(|key, payload| {
            if key.tag == RECORD {
                let mut record = Record::decode(key, payload);
                if header.machine != host.machine() || header.machine == 0 {
                    // A copied disk, or who knows: the files may be what they were, but not who
                    // made them when.
                    record.boot = 0;
                }
                records.insert(record.address, record);
            }
        });
        read.ok()?;
        Some((records, header))
    };
    read().unwrap_or_default()
}

impl Index {
    /// An index of these records, each of another address, in memory. It counts what the former one
    /// counted, whose header this is.
    pub(crate) fn of(records: &[Record], former: &Header, host: &Host) -> Result<Index, TableError> {
        let unread = records.iter().any(|record| record.holder == Holder::Unread);
        let foreign = records.iter().any(|record| record.holder == Holder::Unknown);
        let (machine, boot) = (host.machine(), host.boot());
        let header = Header { machine, boot, exact: true, unread, foreign, ..Header::default() };
        // Two entries per record, and the words of the tree: few, unless the addresses lie far
        // apart.
        let entries = records.len() as u64 * 2 + records.len() as u64 / 32;
        let mut index = Index { table: Table::in_memory(entries), header, path: None, marked: false };
        index.header.counters = former.counters.iter().map(|counter| Counter { used: 0, ..*counter }).collect();
        // As `put` does, but without asking what was there before.
        let mut ranks: HashMap<u64, u32> = HashMap::with_capacity(records.len());
        for record in records {
            let (family, number) = (family(record.address), number(record.address));
            index.table.put(&Record::key(record.address), &record.encode())?;
            if let Holder::Content(hash) = record.holder {
                let rank = ranks.entry(hash).or_default();
                index.put_held(hash, *rank, record.address)?;
                *rank += 1;
            }
            if record.is_occupied() {
                bits::occupy(&mut index.table, family, number)?;
                index
                    .header
                    .counters
                    .iter_mut()
                    .filter(|counter| counter.has(family, number))
                    .for_each(|c| c.used += 1);
            }
            if index.table.is_crowded() {
                index.grow()?;
            }
        }
        Ok(index)
    }

    /// Step 1: whether the folder is still as this index has it. From here on the header is dirty.
    pub(crate) fn begin(&mut self, folder: &File) -> Result<bool, TableError> {
        if let Storage::File(file) = &self.table.storage {
            if Stamp::of(&folder.metadata()?) != self.header.stamp {
                return Ok(false);
            }
            file.write_all_at(&[0; 8], STATE)?;
        }
        self.header.exact = false;
        Ok(true)
    }

    /// Step 3, or before a rebuild reads the folder: a stamp that only we can have set.
    pub(crate) fn mark(&mut self, folder: &File) -> io::Result<()> {
        let stamp = mark(folder)?;
        self.marked_as(stamp);
        Ok(())
    }

    /// The stamp that [`mark`] returned belongs to this index.
    pub(crate) fn marked_as(&mut self, stamp: Stamp) {
        self.header.stamp = stamp;
        self.marked = true;
    }

    /// Step 5: the table is true for the marked folder.
    pub(crate) fn finish(&mut self) -> Result<(), TableError> {
        if self.table.is_crowded() {
            self.grow()?;
        }
        if !self.marked {
            return Ok(());
        }
        self.marked = false;
        self.header.clean = true;
        self.header.sequence = self.header.sequence.wrapping_add(1);
        (self.header.slots, self.header.used) = (self.table.slots(), self.table.used());
        Ok(self.table.storage.write(&self.header.encode(), 0)?)
    }

    /// Writes an index of memory to its place, atomically, and goes on in the file.
    pub(crate) fn save(&mut self, path: &Path) -> Result<(), TableError> {
        (self.header.slots, self.header.used) = (self.table.slots(), self.table.used());
        self.header.clean = self.marked;
        self.header.sequence = self.header.sequence.wrapping_add(1);
        let page = self.header.encode();
        let Storage::Memory(bytes) = &mut self.table.storage else { return Ok(()) };
        bytes[..page.len()].copy_from_slice(&page);
        // One writer at a time: the lock is held. What a killed one left is overwritten.
        let temporary = path.with_extension("new");
        let mut options = OpenOptions::new();
        let file = open_file(&temporary, options.read(true).write(true).create(true).truncate(true).mode(0o600))?;
        file.write_all_at(bytes, 0)?;
        std::fs::rename(&temporary, path)?;
        self.table = Table::over(Storage::File(file), self.header.slots, self.header.used);
        self.path = Some(path.to_owned());
        self.marked = false;
        Ok(())
    }

    /// Moves to a table of twice the room. The file it comes from is replaced, not changed.
    fn grow(&mut self) -> Result<(), TableError> {
        let mut table = Table::in_memory(self.table.slots());
        let mut outcome = Ok(());
        self.table.for_each(|key, payload| {
            if outcome.is_ok() {
                outcome = table.put(key, payload);
            }
        })?;
        outcome?;
        self.table = table;
        if let Some(path) = self.path.clone() {
            // The index stays dirty until `finish` has written everything.
            let marked = std::mem::replace(&mut self.marked, false);
            self.save(&path)?;
            self.marked = marked;
        }
        Ok(())
    }

    /// Whether it outlives this process.
    pub(crate) fn is_on_disk(&self) -> bool {
        matches!(self.table.storage, Storage::File(_))
    }

    /// Whether nothing can have been overlooked: the folder was read in full and not been changed
    /// by us since.
    pub(crate) fn is_exact(&self) -> bool {
        self.header.exact
    }

    /// Whether another machine may have the folder on a disk of its own.
    pub(crate) fn is_shared(&self) -> bool {
        self.header.shared
    }

    /// Says so. Written with the index.
    pub(crate) fn set_shared(&mut self) {
        self.header.shared = true;
    }

    /// No reservation of an earlier boot that could be reclaimed was made before this; `None` if
    /// there is none.
    pub(crate) fn earlier(&self) -> Option<Timestamp> {
        self.header.earlier
    }

    /// Says from when on there are reservations that could be reclaimed. Written with the next
    /// change.
    pub(crate) fn set_earlier(&mut self, earlier: Option<Timestamp>) {
        self.header.earlier = earlier;
    }

    /// Adds or replaces what is known of an address.
    pub(crate) fn put(&mut self, record: &Record) -> Result<(), TableError> {
        let before = self.record(record.address)?;
        self.table.put(&Record::key(record.address), &record.encode())?;
        self.changed(record.address, before, Some(*record))
    }

    /// Forgets an address.
    pub(crate) fn remove(&mut self, address: IpAddr) -> Result<(), TableError> {
        let before = self.record(address)?;
        self.table.remove(&Record::key(address))?;
        self.changed(address, before, None)
    }

    fn changed(&mut self, address: IpAddr, before: Option<Record>, after: Option<Record>) -> Result<(), TableError> {
        let content = |record: Option<Record>| match record.map(|record| record.holder) {
            Some(Holder::Content(hash)) => Some(hash),
            _ => None,
        };
        if content(before) != content(after) {
            if let Some(hash) = content(before) {
                self.remove_held(hash, address)?;
            }
            if let Some(hash) = content(after) {
                let rank = self.count_held(hash)?;
                self.put_held(hash, rank, address)?;
            }
        }
        let occupied = |record: Option<Record>| record.is_some_and(|record| record.is_occupied());
        let (family, number) = (family(address), number(address));
        match (occupied(before), occupied(after)) {
            (false, true) => bits::occupy(&mut self.table, family, number)?,
            (true, false) => bits::vacate(&mut self.table, family, number)?,
            _ => return Ok(()),
        }
        for counter in self.header.counters.iter_mut() {
            if counter.has(family, number) {
                let used = counter.used;
                counter.used = if occupied(after) { used.saturating_add(1) } else { used.saturating_sub(1) };
            }
        }
        Ok(())
    }

    fn held_key(hash: u64, rank: u32) -> Key {
        Key { tag: HOLDER, family: 0, rank, number: u128::from(hash) }
    }

    fn put_held(&mut self, hash: u64, rank: u32, address: IpAddr) -> Result<(), TableError> {
        self.table.put(&Index::held_key(hash, rank), &to_payload(address))
    }

    fn remove_held(&mut self, hash: u64, address: IpAddr) -> Result<(), TableError> {
        let held = self.held(hash)?;
        let Some(rank) = held.iter().position(|other| *other == address) else { return Err(TableError::Corrupt) };
        let last = held.len() - 1;
        if rank != last {
            self.put_held(hash, rank as u32, held[last])?;
        }
        self.table.remove(&Index::held_key(hash, last as u32))
    }

    /// Returns the number of taken addresses of a range. The first question about a range costs one
    /// pass over the table; from then on the range has a counter.
    pub(crate) fn count(&mut self, range: &Range) -> Result<u64, TableError> {
        let sequence = self.header.sequence;
        if let Some(counter) = self.header.counters.iter_mut().find(|counter| is_of(counter, range)) {
            counter.last_asked = sequence;
            return Ok(counter.used);
        }
        let records = self.records()?;
        let used =
            records.iter().filter(|record| record.is_occupied() && range.contains(record.address)).count() as u64;
        self.header.start_counting(range);
        if let Some(counter) = self.header.counters.iter_mut().find(|counter| is_of(counter, range)) {
            counter.used = used;
        }
        Ok(used)
    }

    /// One whose every check holds, whatever it says.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn forged(table: Table, header: Header) -> Index {
        Index { table, header, path: None, marked: true }
    }

    /// Reads and writes so far.
    #[cfg(test)]
    pub(crate) fn accesses(&self) -> u64 {
        self.table.accesses()
    }
}

fn is_of(counter: &Counter, range: &Range) -> bool {
    (counter.family, counter.first, counter.last)
        == (family(range.first()), number(range.first()), number(range.last()))
}

impl Header {
    /// Adds a counter for a range that has none, or makes way for it. It must be counted
    /// afterwards.
    pub(crate) fn start_counting(&mut self, range: &Range) {
        if self.counters.iter().any(|counter| is_of(counter, range)) {
            return;
        }
        let (first, last) = (number(range.first()), number(range.last()));
        let counter = Counter { family: family(range.first()), first, last, used: 0, last_asked: self.sequence };
        if self.counters.len() < header::COUNTERS {
            self.counters.push(counter);
        } else if let Some(oldest) = self.counters.iter_mut().min_by_key(|counter| counter.last_asked) {
            *oldest = counter;
        }
    }
}

/// Gives the folder an mtime that the kernel never writes by itself, and returns the stamp that
/// results.
///
/// # Errors
/// Also where the file system keeps coarser times: the stamp would prove nothing.
pub(crate) fn mark(folder: &File) -> io::Result<Stamp> {
    let nanoseconds = random_nanos()?;
    // Yesterday: the kernel writes the present only, and a clock set back by exactly a day to the
    // nanosecond does not occur.
    let day = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs().saturating_sub(86_400);
    folder.set_times(FileTimes::new().set_modified(UNIX_EPOCH + Duration::new(day, nanoseconds)))?;
    let stamp = Stamp::of(&folder.metadata()?);
    if stamp.mtime != (day as i64, nanoseconds) {
        return Err(io::Error::other("the file system does not keep nanoseconds, or the folder was changed meanwhile"));
    }
    Ok(stamp)
}

/// A random number of nanoseconds, never a round one: coarse clocks and copying tools write those.
pub(crate) fn random_nanos() -> io::Result<u32> {
    let random = getrandom::u32().map_err(|error| io::Error::other(error.to_string()))?;
    Ok(random % 999_999_000 / 1000 * 1000 + 1 + random % 999)
}

#[cfg(test)]
mod tests;
