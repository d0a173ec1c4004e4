//! A hash table in a file, with slots of 64 bytes, linear probing, and changes in place.
//!
//! Each slot has its own checksum, which shows damage such as a page that did not reach the disk
//! ([`TableError::Corrupt`]). There are no tombstones: a removal moves later entries into the free
//! slot. So one change may write several slots. If the process is killed in between, the header is
//! dirty and the table is not used.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// The length of a slot in bytes.
pub(crate) const SLOT_LENGTH: usize = 64;
/// The length of a payload in bytes.
pub(crate) const PAYLOAD_LENGTH: usize = 40;
/// The length in bytes of the header page, which is before the first slot.
pub(crate) const PAGE_LENGTH: u64 = 4096;
/// The number of slots of the smallest table.
pub(crate) const MIN_SLOTS: u64 = 512;
/// How many slots a search reads at a time. As a table is at most 5/8 full, one read is nearly
/// always enough to find a key.
const CHUNK: u64 = 8;
/// How many slots [`Table::for_each`] reads at a time.
const LARGE_CHUNK: usize = 4096;

// The bytes of a slot's fields.
const CHECKSUM_AT: Range<usize> = 0..2;
const TAG_AT: usize = 2;
const FAMILY_AT: usize = 3;
const RANK_AT: Range<usize> = 4..8;
const NUMBER_AT: Range<usize> = 8..24;
const PAYLOAD_AT: Range<usize> = 24..SLOT_LENGTH;

/// The key of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    /// The kind of the entry; never 0, which is an empty slot.
    pub(crate) tag: u8,
    /// 4 or 6, or 0 if the number is not an address.
    pub(crate) family: u8,
    /// Distinguishes several entries with the same number.
    pub(crate) rank: u32,
    /// An address or a hash.
    pub(crate) number: u128,
}

/// The payload of an entry.
pub(crate) type Payload = [u8; PAYLOAD_LENGTH];

/// Where the header page and the slots are: in a file, or in memory if no file can be written.
#[derive(Debug)]
pub(crate) enum Storage {
    /// An open index file.
    File(File),
    /// The bytes that would be in the file.
    Memory(Vec<u8>),
}

/// Why the table could not be read or changed.
#[derive(Debug)]
pub(crate) enum TableError {
    /// The checksum of a slot is wrong, or the table has no free slot.
    Corrupt,
    /// The file could not be read or written.
    Io(io::Error),
}

impl From<io::Error> for TableError {
    fn from(error: io::Error) -> TableError {
        TableError::Io(error)
    }
}

impl std::fmt::Display for TableError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TableError::Corrupt => f.write_str("its content is damaged"),
            TableError::Io(error) => error.fmt(f),
        }
    }
}

impl Storage {
    /// Fills `buffer` with the bytes at `offset`.
    pub(crate) fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Storage::File(file) => file.read_exact_at(buffer, offset),
            Storage::Memory(bytes) => {
                let from = usize::try_from(offset).map_err(io::Error::other)?;
                let part = bytes.get(from..from + buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
                buffer.copy_from_slice(part);
                Ok(())
            }
        }
    }

    /// Writes all of `buffer` at `offset`.
    pub(crate) fn write(&mut self, buffer: &[u8], offset: u64) -> io::Result<()> {
        match self {
            Storage::File(file) => file.write_all_at(buffer, offset),
            Storage::Memory(bytes) => {
                let from = usize::try_from(offset).map_err(io::Error::other)?;
                let part = bytes.get_mut(from..from + buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
                part.copy_from_slice(buffer);
                Ok(())
            }
        }
    }
}

/// A table. Its slots begin after the header page of its storage.
#[derive(Debug)]
pub(crate) struct Table {
    /// The header page and the slots.
    pub(crate) storage: Storage,
    /// The number of slots, a power of two.
    slots: u64,
    /// The number of slots that have an entry.
    used: u64,
    /// The number of reads and writes so far.
    accesses: Cell<u64>,
}

type Slot = [u8; SLOT_LENGTH];

/// Returns the hash of a text, which is never 0 to 2. The algorithm is FNV-1a with a finaliser: the
/// hashes are stored in files, and those of the standard library may change.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    let fnv = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    // In a record, 0 to 2 stand for `Holder::Free`, `Foreign` and `Unreadable`.
    mix(fnv).max(3)
}

/// Distributes the bits of a number evenly (the finaliser of MurmurHash3).
fn mix(mut h: u64) -> u64 {
    h ^= h >> 33;
    h = h.wrapping_mul(0xff51_afd7_ed55_8ccd);
    h ^= h >> 33;
    h = h.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    h ^ (h >> 33)
}

impl Key {
    /// Returns the hash of the key.
    fn hash(&self) -> u64 {
        let small = u64::from(self.tag) << 40 | u64::from(self.family) << 32 | u64::from(self.rank);
        mix(mix(mix(small) ^ self.number as u64) ^ (self.number >> 64) as u64)
    }

    /// Returns the slot with this key and payload.
    pub(crate) fn encode(&self, payload: &Payload) -> Slot {
        let mut slot = [0; SLOT_LENGTH];
        slot[TAG_AT] = self.tag;
        slot[FAMILY_AT] = self.family;
        slot[RANK_AT].copy_from_slice(&self.rank.to_le_bytes());
        slot[NUMBER_AT].copy_from_slice(&self.number.to_le_bytes());
        slot[PAYLOAD_AT].copy_from_slice(payload);
        let sum = checksum(&slot);
        slot[CHECKSUM_AT].copy_from_slice(&sum);
        slot
    }
}

/// Returns the checksum of all other bytes of a slot. Mixes whole words instead of bytes, because a
/// rebuild computes hundreds of thousands of checksums.
fn checksum(slot: &[u8]) -> [u8; 2] {
    // The first word, with zeros instead of the checksum.
    let mut head = [0; 8];
    head[CHECKSUM_AT.end..].copy_from_slice(&slot[CHECKSUM_AT.end..NUMBER_AT.start]);
    // The constants are arbitrary, but part of the file's format.
    let initial = mix(u64::from_le_bytes(head) ^ 0x5107);
    let sum = slot[NUMBER_AT.start..].chunks_exact(8).fold(initial, |sum, bytes| {
        let mut word = [0; 8];
        word.copy_from_slice(bytes);
        (sum ^ u64::from_le_bytes(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    });
    ((mix(sum) >> 48) as u16).to_le_bytes()
}

/// Returns the entry in a slot, or `None` if the slot is free.
///
/// # Errors
/// [`TableError::Corrupt`] if the checksum is wrong, or a slot without a tag has other bytes.
pub(crate) fn decode(slot: &[u8]) -> Result<Option<(Key, Payload)>, TableError> {
    if slot[TAG_AT] == 0 {
        // A free slot has no checksum, so all its bytes are 0.
        return if slot.iter().all(|byte| *byte == 0) { Ok(None) } else { Err(TableError::Corrupt) };
    }
    if slot[CHECKSUM_AT] != checksum(slot) {
        return Err(TableError::Corrupt);
    }
    let (mut rank, mut number, mut payload) = ([0; 4], [0; 16], [0; PAYLOAD_LENGTH]);
    rank.copy_from_slice(&slot[RANK_AT]);
    number.copy_from_slice(&slot[NUMBER_AT]);
    payload.copy_from_slice(&slot[PAYLOAD_AT]);
    let (rank, number) = (u32::from_le_bytes(rank), u128::from_le_bytes(number));
    Ok(Some((Key { tag: slot[TAG_AT], family: slot[FAMILY_AT], rank, number }, payload)))
}

impl Table {
    /// Returns an empty table in memory that has room for this many entries without becoming
    /// [crowded](Table::is_crowded).
    pub(crate) fn in_memory(entries: u64) -> Table {
        // With 7/4 slots for each entry, the table is 4/7 full, which is less than 5/8.
        let slots = (entries.saturating_mul(7) / 4 + 1).next_power_of_two().max(MIN_SLOTS);
        let bytes = vec![0; (PAGE_LENGTH + slots * SLOT_LENGTH as u64) as usize];
        Table::in_storage(Storage::Memory(bytes), slots, 0)
    }

    /// Returns the table in a storage with `slots` slots, of which `used` have an entry.
    pub(crate) fn in_storage(storage: Storage, slots: u64, used: u64) -> Table {
        Table { storage, slots, used, accesses: Cell::new(0) }
    }

    /// Returns the number of slots.
    pub(crate) fn slots(&self) -> u64 {
        self.slots
    }

    /// Returns how many slots have an entry.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Whether the table is more than 5/8 full and should grow: then keys are found too slowly.
    pub(crate) fn is_crowded(&self) -> bool {
        self.used * 8 > self.slots * 5
    }

    /// Returns the number of reads and writes so far, for tests of the cost.
    #[cfg(test)]
    pub(crate) fn accesses(&self) -> u64 {
        self.accesses.get()
    }

    /// Counts a read or write.
    fn count_access(&self) {
        self.accesses.set(self.accesses.get() + 1);
    }

    /// Returns the offset of a slot in the storage.
    fn offset(&self, slot: u64) -> u64 {
        PAGE_LENGTH + slot * SLOT_LENGTH as u64
    }

    /// Returns the slot where the search for a key begins.
    fn home(&self, key: &Key) -> u64 {
        // The hash modulo the number of slots, which is a power of two.
        key.hash() & (self.slots - 1)
    }

    /// Writes a slot.
    fn write_slot(&mut self, slot: u64, bytes: &Slot) -> Result<(), TableError> {
        self.count_access();
        let offset = self.offset(slot);
        Ok(self.storage.write(bytes, offset)?)
    }

    /// Calls `visit` with each slot's number and its entry (`None` if the slot is free), from slot
    /// `start` to the end and then from the first slot on. Ends when `visit` returns a value, and
    /// returns the value.
    ///
    /// # Errors
    /// - [`TableError::Corrupt`] if a slot is damaged, or if `visit` returned `None` for all slots.
    /// - [`TableError::Io`] if the file cannot be read.
    fn walk<T>(
        &self,
        start: u64,
        mut visit: impl FnMut(u64, Option<(Key, Payload)>) -> Option<T>,
    ) -> Result<T, TableError> {
        let mut buffer = [0; CHUNK as usize * SLOT_LENGTH];
        let mut position = start;
        let mut remaining = self.slots;
        while remaining > 0 {
            let count = CHUNK.min(self.slots - position).min(remaining);
            let offset = self.offset(position);
            self.count_access();
            let chunk = match &self.storage {
                // A rebuild does this hundreds of thousands of times, so the bytes are not copied.
                Storage::Memory(bytes) => {
                    let from = offset as usize;
                    bytes.get(from..from + count as usize * SLOT_LENGTH).ok_or(TableError::Corrupt)?
                }
                Storage::File(file) => {
                    let chunk = &mut buffer[..count as usize * SLOT_LENGTH];
                    file.read_exact_at(chunk, offset)?;
                    chunk
                }
            };
            for (index, slot) in chunk.chunks_exact(SLOT_LENGTH).enumerate() {
                if let Some(value) = visit(position + index as u64, decode(slot)?) {
                    return Ok(value);
                }
            }
            remaining -= count;
            position = (position + count) & (self.slots - 1);
        }
        Err(TableError::Corrupt)
    }

    /// Returns the slot of `key` and its payload. If `key` has no entry, returns the free slot for
    /// the entry and `None`.
    fn find(&self, key: &Key) -> Result<(u64, Option<Payload>), TableError> {
        self.walk(self.home(key), |slot, entry| match entry {
            None => Some((slot, None)),
            Some((found, payload)) => (found == *key).then_some((slot, Some(payload))),
        })
    }

    /// Returns the payload of a key, or `None` if it has no entry.
    pub(crate) fn get(&self, key: &Key) -> Result<Option<Payload>, TableError> {
        Ok(self.find(key)?.1)
    }

    /// Adds an entry, or replaces its payload.
    pub(crate) fn put(&mut self, key: &Key, payload: &Payload) -> Result<(), TableError> {
        let (slot, before) = self.find(key)?;
        if before.is_none() {
            // One slot stays free, because a search ends at a free slot.
            if self.used + 1 >= self.slots {
                return Err(TableError::Corrupt);
            }
            self.used += 1;
        }
        self.write_slot(slot, &key.encode(payload))
    }

    /// Removes an entry, if there is one. Moves later entries that a search would not find any
    /// more, because it ends at a free slot.
    pub(crate) fn remove(&mut self, key: &Key) -> Result<(), TableError> {
        let (mut hole, Some(_)) = self.find(key)? else { return Ok(()) };
        // The slots to write, with their new entries. A moved entry's old slot is the next hole.
        let mut moves: Vec<(u64, Slot)> = Vec::new();
        // `& mask` makes the slot after the last one the first one.
        let mask = self.slots - 1;
        self.walk((hole + 1) & mask, |slot, entry| {
            let Some((other, payload)) = entry else { return Some(()) };
            let distance_from_home = slot.wrapping_sub(self.home(&other)) & mask;
            let distance_from_hole = slot.wrapping_sub(hole) & mask;
            // The search for this entry begins at the hole or before it, so it would end there.
            if distance_from_home >= distance_from_hole {
                moves.push((hole, other.encode(&payload)));
                hole = slot;
            }
            None
        })?;
        for (slot, bytes) in moves {
            self.write_slot(slot, &bytes)?;
        }
        self.used = self.used.saturating_sub(1);
        self.write_slot(hole, &[0; SLOT_LENGTH])
    }

    /// Calls `visit` for each entry, in no order. Damaged slots are skipped.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(&Key, &Payload)) -> io::Result<()> {
        let end = self.offset(self.slots);
        let mut bytes = vec![0; (LARGE_CHUNK * SLOT_LENGTH).min((end - PAGE_LENGTH) as usize)];
        let mut offset = PAGE_LENGTH;
        while offset < end {
            let part = bytes.len().min((end - offset) as usize);
            self.count_access();
            self.storage.read(&mut bytes[..part], offset)?;
            for slot in bytes[..part].chunks_exact(SLOT_LENGTH) {
                if let Ok(Some((key, payload))) = decode(slot) {
                    visit(&key, &payload);
                }
            }
            offset += part as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn key(number: u128) -> Key {
        Key { tag: 1, family: 4, rank: 0, number }
    }

    proptest! {
        #[test]
        fn a_table_behaves_like_a_map(steps in prop::collection::vec((0u128..300, any::<bool>(), any::<u8>()), 0..900)) {
            let mut table = Table::in_memory(0);
            let mut model: HashMap<u128, u8> = HashMap::new();
            for (number, add, value) in steps {
                if add {
                    table.put(&key(number), &[value; PAYLOAD_LENGTH]).unwrap();
                    model.insert(number, value);
                } else {
                    table.remove(&key(number)).unwrap();
                    model.remove(&number);
                }
            }
            for number in 0..300 {
                let found = table.get(&key(number)).unwrap().map(|payload| payload[0]);
                prop_assert_eq!(found, model.get(&number).copied());
            }
            prop_assert_eq!(table.used(), model.len() as u64);
            let mut entries = 0;
            table.for_each(|_, _| entries += 1).unwrap();
            prop_assert_eq!(entries, model.len());
        }
    }

    #[test]
    fn a_run_that_wraps_around_the_end_survives_removals() {
        let mut table = Table::in_memory(0);
        let last: Vec<u128> = (0..).filter(|n| table.home(&key(*n)) >= MIN_SLOTS - 2).take(9).collect();
        for number in &last {
            table.put(&key(*number), &[7; PAYLOAD_LENGTH]).unwrap();
        }
        for (gone, number) in last.iter().enumerate() {
            table.remove(&key(*number)).unwrap();
            for kept in &last[gone + 1..] {
                assert!(table.get(&key(*kept)).unwrap().is_some(), "{kept} was lost with {number}");
            }
        }
        assert_eq!(table.used(), 0);
    }

    #[test]
    fn a_damaged_slot_is_noticed() {
        let mut table = Table::in_memory(0);
        table.put(&key(1), &[7; PAYLOAD_LENGTH]).unwrap();
        let slot = table.find(&key(1)).unwrap().0;
        let offset = table.offset(slot) + 30;
        table.storage.write(&[8], offset).unwrap();
        assert!(matches!(table.get(&key(1)), Err(TableError::Corrupt)));
        table.for_each(|key, _| panic!("{key:?} was believed")).unwrap();
    }

    #[test]
    fn a_full_table_is_an_error_and_no_endless_loop() {
        let mut table = Table::in_memory(0);
        for number in 0..u128::from(MIN_SLOTS) - 1 {
            table.put(&key(number), &[0; PAYLOAD_LENGTH]).unwrap();
        }
        assert!(table.put(&key(9999), &[0; PAYLOAD_LENGTH]).is_err());
        assert!(table.get(&key(9999)).unwrap().is_none());
    }
}
