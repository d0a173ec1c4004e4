//! Gives cni-fuzz access to the internals of the store: the texts of reservations and of releases,
//! and valid and forged headers and tables of the index.

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use crate::host::Host;
use crate::index::header::{Header, MAX_SLOTS};
use crate::index::table::{Key, MIN_SLOTS, PAGE_LENGTH, PAYLOAD_LENGTH, SLOT_LENGTH, Storage, Table};
use crate::index::{self, Content, Holder, Index, Record};
use crate::store::cooldown::Released;

/// Returns the address whose reservation has this file name; `None` for other names.
pub fn address_of_name(name: &[u8]) -> Option<IpAddr> {
    index::address_of_name(name)
}

/// Returns the trimmed text of a reservation's file; `None` if the file is blank or not a
/// reservation.
pub fn reservation_text(bytes: &[u8]) -> Option<Vec<u8>> {
    match index::classify(bytes) {
        Content::Text(text) => Some(text),
        Content::Absent | Content::Blank | Content::Foreign => None,
    }
}

/// Reads the file of released addresses at the time `now`, in milliseconds, and returns its text as
/// written again.
///
/// # Panics
/// The text is read differently after it was written, or has a time after `now`.
pub fn rewritten_releases(text: &[u8], now: u64) -> String {
    let written = Released::parse(text, now).to_text();
    let again = Released::parse(written.as_bytes(), now);
    assert!(again.damaged == 0 && !again.is_from_future, "{written:?}");
    assert_eq!(again.to_text(), written);
    written
}

/// Decodes the first page of an index and checks the header. Returns `false` if the page is
/// refused.
///
/// # Panics
/// The header is impossible, or differs after encoding and decoding.
pub fn read_header(page: &[u8]) -> bool {
    let Some(header) = Header::decode(page) else { return false };
    assert!(header.slots.is_power_of_two() && header.used < header.slots);
    let size = header.file_size();
    assert!(size.is_some_and(|size| size <= PAGE_LENGTH + MAX_SLOTS * SLOT_LENGTH as u64), "{size:?}");
    let Some(again) = Header::decode(&header.encode()) else { panic!("{header:?} is refused after encoding") };
    assert_eq!(again, header);
    true
}

/// Does [`read_header`] for a page with this body and the checksum of this body.
pub fn read_forged_header(body: &[u8]) -> bool {
    let mut page = Header::default().encode();
    // The magic number and the flag `clean`.
    page.truncate(16);
    page.extend((body.len() as u64).to_le_bytes());
    page.extend(index::hash(body).to_le_bytes());
    page.extend(body);
    read_header(&page)
}

/// One entry of a forged table.
#[derive(Clone, Copy, Debug)]
pub struct CraftedEntry {
    /// The number of its slot, modulo the number of slots.
    pub slot: u64,
    /// The kind of the entry; 0 makes an empty slot.
    pub tag: u8,
    /// The address family: 4, 6, or an invalid number.
    pub family: u8,
    /// The position among entries that are otherwise equal.
    pub rank: u32,
    /// An address or a hash, depending on the kind.
    pub number: u128,
    /// The content of the entry.
    pub payload: [u8; PAYLOAD_LENGTH],
}

/// Returns the bytes of an index file with these entries, with zeros instead of the header, and the
/// number of used slots.
fn forged_table(slots: u64, entries: &[CraftedEntry]) -> (Vec<u8>, u64) {
    let mut bytes = vec![0; (PAGE_LENGTH + slots * SLOT_LENGTH as u64) as usize];
    let mut used = 0;
    for entry in entries {
        let key = Key { tag: entry.tag, family: entry.family, rank: entry.rank, number: entry.number };
        if entry.tag != 0 {
            let at = (PAGE_LENGTH + (entry.slot % slots) * SLOT_LENGTH as u64) as usize;
            bytes[at..at + SLOT_LENGTH].copy_from_slice(&key.encode(&entry.payload));
            used += 1;
        }
    }
    (bytes, used)
}

/// Queries and changes an index with these entries, which may contradict each other, but have the
/// right checksums. Each call must terminate, with an answer or with an error about damage.
pub fn ask_forged(entries: &[CraftedEntry], addresses: &[IpAddr], hashes: &[u64]) {
    // The hash of the records if `hashes` is empty.
    const OTHER_HASH: u64 = 9;
    let (bytes, used) = forged_table(MIN_SLOTS, entries);
    let header = Header { slots: MIN_SLOTS, used, ..Header::default() };
    let mut index = Index::forged(Table::in_storage(Storage::Memory(bytes), MIN_SLOTS, used), header);
    for hash in hashes {
        let _ = index.owned_by(*hash);
    }
    for address in addresses {
        let _ = index.record(*address);
        let hash = hashes.first().copied().unwrap_or(OTHER_HASH);
        let record = |holder| Record { address: *address, inode: 1, ctime: (1, 1), mtime_nanos: 1, holder, boot: 1 };
        let _ = index.put(&record(Holder::Content(hash)));
        let _ = index.remove(*address);
        let _ = index.put(&record(Holder::Foreign));
    }
    let _ = (index.records(), index.occupied(), index.finish());
}

/// Writes a forged index for the folder of reservations. The next [`Locked`](crate::Locked) trusts
/// it, because it has the folder's stamp and this host's IDs.
///
/// # Errors
/// The mtime of the folder cannot be set, or the index cannot be written.
pub fn plant(data_dir: &Path, network: &str, host: &Host, entries: &[CraftedEntry]) -> io::Result<()> {
    let (mut bytes, used) = forged_table(MIN_SLOTS, entries);
    let header = Header {
        clean: true,
        exact: true,
        slots: MIN_SLOTS,
        // A header of a full table is refused.
        used: used.min(MIN_SLOTS - 1),
        stamp: index::stamp_folder(&File::open(data_dir.join(network))?)?,
        machine: host.machine(),
        boot: host.boot(),
        ..Header::default()
    };
    let page = header.encode();
    bytes[..page.len()].copy_from_slice(&page);
    let sidecar = data_dir.join(".cni").join(network);
    std::fs::create_dir_all(&sidecar)?;
    std::fs::write(sidecar.join("index"), bytes)
}

/// An index in memory that gets only consistent changes, for comparison with a model. A failed
/// query returns an empty answer, which differs from the model's.
#[derive(Debug)]
pub struct ConsistentIndex(Index);

impl ConsistentIndex {
    /// Returns an empty index.
    ///
    /// # Panics
    /// The index cannot be created.
    pub fn new() -> ConsistentIndex {
        match Index::build(&[], &Host::new("m", "b")) {
            Ok(index) => ConsistentIndex(index),
            Err(error) => panic!("failed to create an empty index: {error}"),
        }
    }

    /// Sets the hash of the holder of an address; `None` frees the address.
    ///
    /// # Panics
    /// The index refuses the change.
    pub fn set(&mut self, address: IpAddr, holder: Option<u64>) {
        let done = match holder {
            Some(hash) => self.0.put(&Record {
                address,
                inode: 7,
                ctime: (8, 9),
                mtime_nanos: 10,
                holder: Holder::Content(hash),
                boot: 11,
            }),
            None => self.0.remove(address),
        };
        if let Err(error) = done.and_then(|()| self.0.finish()) {
            panic!("{address}: {error}");
        }
    }

    /// Returns the hash of the holder of an address; `None` if the address is free.
    pub fn holder(&self, address: IpAddr) -> Option<u64> {
        match self.0.record(address).ok().flatten()?.holder {
            Holder::Content(hash) => Some(hash),
            Holder::Free | Holder::Foreign | Holder::Unreadable => None,
        }
    }

    /// Returns the addresses of the holder with this hash, sorted.
    pub fn held(&self, hash: u64) -> Vec<IpAddr> {
        let mut held = self.0.owned_by(hash).unwrap_or_default();
        held.sort_unstable();
        held
    }

    /// Returns the number of addresses with a holder.
    pub fn len(&self) -> usize {
        self.0.records().map_or(0, |records| records.len())
    }

    /// Whether no address has a holder.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Default for ConsistentIndex {
    fn default() -> ConsistentIndex {
        ConsistentIndex::new()
    }
}
