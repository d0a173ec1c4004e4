//! A hash table in a file, with slots of 64 bytes, linear probing, and changes in place.
//!
//! Each slot has its own checksum, so a page that did not reach the disk, or other damage, is
//! noticed ([`TableError::Corrupt`]). A removal moves later entries back into the free slot,
//! because there are no tombstones. So one change may write several slots, and only the caller's
//! dirty header makes that safe if the process is killed.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The bytes of a slot: 2 for the checksum, 1 tag, 1 family, 4 rank, 16 number, 40 payload.
pub(crate) const SLOT: usize = 64;
/// The bytes of a payload.
pub(crate) const PAYLOAD: usize = 40;
/// The bytes before the first slot.
pub(crate) const HEADER: u64 = 4096;
/// The number of slots of the smallest table.
pub(crate) const MIN_SLOTS: u64 = 512;
/// How many slots are read at a time. As a table is never more than 5/8 full, one read is nearly
/// always enough to find a key.
const CHUNK: u64 = 8;

/// The key of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    /// The kind of the entry; never 0, which is an empty slot.
    pub(crate) tag: u8,
    /// 4 or 6, or 0 if the number is not an address.
    pub(crate) family: u8,
    /// Distinguishes several entries with the same number.
    pub(crate) rank: u32,
    /// An address, a part of one, or a hash.
    pub(crate) number: u128,
}

/// The payload of an entry.
pub(crate) type Payload = [u8; PAYLOAD];

/// Where the slots are: a file, or memory where no file can be written.
#[derive(Debug)]
pub(crate) enum Storage {
    /// An open index file.
    File(File),
    /// The bytes of a file that does not exist.
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
    /// How many slots have an entry.
    used: u64,
    /// How many reads and writes there were.
    accesses: Cell<u64>,
}

type Slot = [u8; SLOT];

/// Returns the hash of a text: FNV-1a with a finaliser, because the hashes of the standard library
/// may change, and these are in a file. Never 0 to 2.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    let fnv = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    // 0 to 2 stand for `Holder::Free`, `Unknown` and `Unread`.
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
        let mut slot = [0; SLOT];
        slot[2] = self.tag;
        slot[3] = self.family;
        slot[4..8].copy_from_slice(&self.rank.to_le_bytes());
        slot[8..24].copy_from_slice(&self.number.to_le_bytes());
        slot[24..].copy_from_slice(payload);
        let sum = checksum(&slot);
        slot[..2].copy_from_slice(&sum);
        slot
    }
}

/// Returns the checksum of a slot. It adds whole words, because a rebuild computes hundreds of
/// thousands of checksums.
fn checksum(slot: &[u8]) -> [u8; 2] {
    let head = u64::from_le_bytes([0, 0, slot[2], slot[3], slot[4], slot[5], slot[6], slot[7]]);
    let sum = slot[8..].chunks_exact(8).fold(mix(head ^ 0x5107), |sum, bytes| {
        let mut word = [0; 8];
        word.copy_from_slice(bytes);
        (sum ^ u64::from_le_bytes(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    });
    let sum = mix(sum);
    ((sum >> 48) as u16).to_le_bytes()
}

/// Returns the entry in a slot, or `None` if the slot is free.
///
/// # Errors
/// [`TableError::Corrupt`] if the checksum is wrong.
pub(crate) fn decode(slot: &[u8]) -> Result<Option<(Key, Payload)>, TableError> {
    if slot[2] == 0 {
        return if slot.iter().all(|byte| *byte == 0) { Ok(None) } else { Err(TableError::Corrupt) };
    }
    if slot[..2] != checksum(slot) {
        return Err(TableError::Corrupt);
    }
    let (mut rank, mut number, mut payload) = ([0; 4], [0; 16], [0; PAYLOAD]);
    rank.copy_from_slice(&slot[4..8]);
    number.copy_from_slice(&slot[8..24]);
    payload.copy_from_slice(&slot[24..SLOT]);
    let (rank, number) = (u32::from_le_bytes(rank), u128::from_le_bytes(number));
    Ok(Some((Key { tag: slot[2], family: slot[3], rank, number }, payload)))
}

impl Table {
    /// Returns an empty table in memory that is not crowded with `entries` entries.
    pub(crate) fn in_memory(entries: u64) -> Table {
        let slots = (entries.saturating_mul(7) / 4 + 1).next_power_of_two().max(MIN_SLOTS);
        let bytes = vec![0; (HEADER + slots * SLOT as u64) as usize];
        Table::over(Storage::Memory(bytes), slots, 0)
    }

    /// Returns the table in a storage with `slots` slots, of which `used` have an entry.
    pub(crate) fn over(storage: Storage, slots: u64, used: u64) -> Table {
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

    /// Returns how many reads and writes there were, for tests of the cost.
    #[cfg(test)]
    pub(crate) fn accesses(&self) -> u64 {
        self.accesses.get()
    }

    /// Counts a read or write.
    fn count(&self) {
        self.accesses.set(self.accesses.get() + 1);
    }

    /// Returns the offset of a slot in the storage.
    fn offset(&self, slot: u64) -> u64 {
        HEADER + slot * SLOT as u64
    }

    /// Returns the slot where the search for a key begins.
    fn home(&self, key: &Key) -> u64 {
        key.hash() & (self.slots - 1)
    }

    /// Writes a slot.
    fn write_slot(&mut self, slot: u64, bytes: &Slot) -> Result<(), TableError> {
        self.count();
        let offset = self.offset(slot);
        Ok(self.storage.write(bytes, offset)?)
    }

    /// Calls `visit` for each slot from `slot` on, at most once for each, with its entry or `None`
    /// for a free slot, until `visit` returns a value. Returns that value.
    ///
    /// # Errors
    /// A slot is damaged; `visit` never returned a value.
    fn walk<T>(
        &self,
        slot: u64,
        mut visit: impl FnMut(u64, Option<(Key, Payload)>) -> Option<T>,
    ) -> Result<T, TableError> {
        let mut chunk = [0; CHUNK as usize * SLOT];
        let mut position = slot;
        let mut remaining = self.slots;
        while remaining > 0 {
            let slots = CHUNK.min(self.slots - position).min(remaining);
            let offset = self.offset(position);
            self.count();
            let bytes = match &self.storage {
                // Not copied, because a rebuild does this hundreds of thousands of times.
                Storage::Memory(bytes) => {
                    let from = offset as usize;
                    bytes.get(from..from + slots as usize * SLOT).ok_or(TableError::Corrupt)?
                }
                Storage::File(file) => {
                    let bytes = &mut chunk[..slots as usize * SLOT];
                    file.read_exact_at(bytes, offset)?;
                    bytes
                }
            };
            for (index, bytes) in bytes.chunks_exact(SLOT).enumerate() {
                if let Some(found) = visit(position + index as u64, decode(bytes)?) {
                    return Ok(found);
                }
            }
            remaining -= slots;
            position = (position + slots) & (self.slots - 1);
        }
        Err(TableError::Corrupt)
    }

    /// Returns the slot of `key` and its payload, or the free slot for it and `None`.
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
            if self.used + 1 >= self.slots {
                return Err(TableError::Corrupt);
            }
            self.used += 1;
        }
        self.write_slot(slot, &key.encode(payload))
    }

    /// Removes an entry, if there is one, and moves later entries so that they are still found.
    pub(crate) fn remove(&mut self, key: &Key) -> Result<(), TableError> {
        let (mut hole, Some(_)) = self.find(key)? else { return Ok(()) };
        let mut moves: Vec<(u64, Slot)> = Vec::new();
        let mask = self.slots - 1;
        self.walk((hole + 1) & mask, |slot, entry| {
            let Some((key, payload)) = entry else { return Some(()) };
            // An entry can move into the hole if the search for it begins at the hole or before.
            let distance_from_home = slot.wrapping_sub(self.home(&key)) & mask;
            let distance_from_hole = slot.wrapping_sub(hole) & mask;
            if distance_from_home >= distance_from_hole {
                moves.push((hole, key.encode(&payload)));
                hole = slot;
            }
            None
        })?;
        for (slot, bytes) in moves {
            self.write_slot(slot, &bytes)?;
        }
        self.used = self.used.saturating_sub(1);
        self.write_slot(hole, &[0; SLOT])
    }

    /// Calls `visit` for each entry, in no order. Damaged slots are skipped.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(&Key, &Payload)) -> io::Result<()> {
        let mut bytes = vec![0; SLOT << 12];
        let end = HEADER + self.slots * SLOT as u64;
        let mut offset = HEADER;
        while offset < end {
            let part = bytes.len().min((end - offset) as usize);
            self.count();
            self.storage.read(&mut bytes[..part], offset)?;
            for (key, payload) in bytes[..part].chunks_exact(SLOT).filter_map(|slot| decode(slot).ok().flatten()) {
                visit(&key, &payload);
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
                    table.put(&key(number), &[value; PAYLOAD]).unwrap();
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
            table.put(&key(*number), &[7; PAYLOAD]).unwrap();
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
        table.put(&key(1), &[7; PAYLOAD]).unwrap();
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
            table.put(&key(number), &[0; PAYLOAD]).unwrap();
        }
        assert!(table.put(&key(9999), &[0; PAYLOAD]).is_err());
        assert!(table.get(&key(9999)).unwrap().is_none());
    }
}
