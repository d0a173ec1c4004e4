//! Encodes and decodes the header of an index, which is the first page of its file.
//!
//! The header identifies the state of the folder that the table describes. If the header is not
//! *clean*, the table must not be queried. A rebuild still uses the table's records.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use super::table::{PAGE_LENGTH, SLOT_LENGTH, hash};
use crate::host::Timestamp;

/// The first bytes of the file. A change of the format of the page or the slots, or of [`hash`],
/// needs another value: an index with another value is not read, but rebuilt.
const MAGIC: &[u8; 8] = b"cni-ix\x00\x03";
/// The offset of the field `clean`, which the checksum does not include, so that one small write
/// can change it.
pub(crate) const CLEAN_AT: u64 = 8;
/// The largest table that is accepted, in slots: 1 GiB, enough for five million reservations.
pub(crate) const MAX_SLOTS: u64 = 1 << 24;

/// Identifies a state of the folder: every change of the folder changes its times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) mtime: Timestamp,
    pub(crate) ctime: Timestamp,
}

impl Stamp {
    /// Returns the stamp of a folder with this metadata.
    pub(crate) fn of(metadata: &Metadata) -> Stamp {
        Stamp {
            device: metadata.dev(),
            inode: metadata.ino(),
            mtime: (metadata.mtime(), metadata.mtime_nsec() as u32),
            ctime: (metadata.ctime(), metadata.ctime_nsec() as u32),
        }
    }
}

/// The content of the header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    /// Whether the table describes the folder with the stamp `stamp`.
    pub(crate) clean: bool,
    /// Whether the index is certain to know every created and removed file, because these plugins
    /// have not changed the folder since the last rebuild.
    pub(crate) exact: bool,
    /// Whether some files could not be read at the last rebuild.
    pub(crate) unreadable: bool,
    /// Whether some files with addresses as names were not reservations at the last rebuild.
    pub(crate) foreign: bool,
    /// Whether another machine may also use the folder, on a shared file system. Then reservations
    /// are recorded without a boot.
    pub(crate) shared: bool,
    /// The number of slots of the table, a power of two.
    pub(crate) slots: u64,
    /// The number of slots that have an entry.
    pub(crate) used: u64,
    pub(crate) stamp: Stamp,
    /// A hash of the machine's ID.
    pub(crate) machine: u64,
    /// A hash of the boot's ID.
    pub(crate) boot: u64,
    /// A lower bound of the ctimes of the reclaimable reservations, which are those of earlier
    /// boots. `None` if there are none.
    pub(crate) oldest_reclaimable: Option<Timestamp>,
}

/// A buffer to which numbers are appended in little-endian order.
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn time(&mut self, (seconds, nanoseconds): Timestamp) {
        self.u64(seconds as u64);
        self.u64(u64::from(nanoseconds));
    }
}

/// The unread rest of a [`Writer`]'s buffer. Its methods return the next number, or `None` at the
/// end.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }
    pub(super) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
    fn time(&mut self) -> Option<Timestamp> {
        Some((self.u64()? as i64, self.u64()? as u32))
    }
}

impl Header {
    /// Returns the bytes at the beginning of the page. The rest of the page is unused.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut body = Writer(Vec::with_capacity(512));
        let flags = [self.exact, self.unreadable, self.shared, self.foreign];
        body.u64(flags.into_iter().enumerate().map(|(bit, flag)| u64::from(flag) << bit).sum());
        body.u64(self.slots);
        body.u64(self.used);
        body.u64(self.stamp.device);
        body.u64(self.stamp.inode);
        body.time(self.stamp.mtime);
        body.time(self.stamp.ctime);
        body.u64(self.machine);
        body.u64(self.boot);
        body.u64(u64::from(self.oldest_reclaimable.is_some()));
        body.time(self.oldest_reclaimable.unwrap_or_default());
        // Older builds stored a sequence number and two lists here, and refuse a page without them.
        // These are number 0 and two empty lists.
        (0..3).for_each(|_| body.u64(0));
        let mut page = Writer(MAGIC.to_vec());
        page.u64(u64::from(self.clean));
        page.u64(body.0.len() as u64);
        page.u64(hash(&body.0));
        page.0.append(&mut body.0);
        page.0
    }

    /// Returns the length of an index file with this header, or `None` if the number overflows.
    pub(crate) fn file_size(&self) -> Option<u64> {
        self.slots.checked_mul(SLOT_LENGTH as u64)?.checked_add(PAGE_LENGTH)
    }

    /// Decodes a page. Returns `None` if the page is not a header of this format, is damaged, or
    /// describes an impossible table.
    pub(crate) fn decode(page: &[u8]) -> Option<Header> {
        let mut page = Reader(page);
        if page.take::<8>()? != *MAGIC {
            return None;
        }
        let clean = page.u64()? == 1;
        let (length, sum) = (usize::try_from(page.u64()?).ok()?, page.u64()?);
        let mut body = Reader(page.0.get(..length)?);
        if hash(body.0) != sum {
            return None;
        }
        let flags = body.u64()?;
        let flag = |bit: u32| flags & (1 << bit) != 0;
        let (exact, unreadable, shared, foreign) = (flag(0), flag(1), flag(2), flag(3));
        let mut header = Header { clean, exact, unreadable, shared, foreign, ..Header::default() };
        (header.slots, header.used) = (body.u64()?, body.u64()?);
        let (device, inode) = (body.u64()?, body.u64()?);
        header.stamp = Stamp { device, inode, mtime: body.time()?, ctime: body.time()? };
        (header.machine, header.boot) = (body.u64()?, body.u64()?);
        let (is_any_reclaimable, oldest_reclaimable) = (body.u64()? == 1, body.time()?);
        header.oldest_reclaimable = is_any_reclaimable.then_some(oldest_reclaimable);
        let is_table_possible =
            header.slots.is_power_of_two() && header.slots <= MAX_SLOTS && header.used < header.slots;
        // What older builds stored behind is ignored.
        is_table_possible.then_some(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of bytes before the body: [`MAGIC`], `clean`, and the body's length and checksum.
    const PREFIX: usize = 32;

    fn sample() -> Header {
        Header {
            clean: true,
            exact: true,
            unreadable: true,
            shared: true,
            foreign: true,
            slots: 512,
            used: 7,
            stamp: Stamp { device: 1, inode: 2, mtime: (-3, 4), ctime: (5, 999_999_999) },
            machine: 6,
            boot: 7,
            oldest_reclaimable: Some((9, 10)),
        }
    }

    #[test]
    fn a_header_survives_its_page_and_fits_it() {
        let bytes = sample().encode();
        assert!(bytes.len() <= PAGE_LENGTH as usize);
        assert_eq!(Header::decode(&bytes), Some(sample()));
    }

    /// Older builds stored a sequence number, counters of 7 words each, and ranges of 9 words each.
    #[test]
    fn a_header_of_an_older_build_is_read() {
        let mut page = sample().encode();
        let body = page.split_off(PREFIX);
        let sequence = [8_u64].into_iter();
        let counters = [32].into_iter().chain((0..32).flat_map(|_| [4, 1, 0, 9, 0, 5, 3]));
        let ranges = [1, 0, 24, 0x0a00_0001, 0, 0x0a00_00fe, 0, 0x0a00_0001, 0, 4 << 8 | 4];
        let mut body = body[..body.len() - 3 * 8].to_vec();
        sequence.chain(counters).chain(ranges).for_each(|word| body.extend_from_slice(&word.to_le_bytes()));
        page[16..24].copy_from_slice(&(body.len() as u64).to_le_bytes());
        page[24..].copy_from_slice(&hash(&body).to_le_bytes());
        page.append(&mut body);
        assert_eq!(Header::decode(&page), Some(sample()));
    }

    #[test]
    fn a_table_that_cannot_be_has_no_header() {
        for (slots, used) in [(1 << 58, 7), (1 << 63, 7), (MAX_SLOTS * 2, 7), (0, 0), (513, 7), (512, 512)] {
            let forged = Header { slots, used, ..sample() }.encode();
            assert_eq!(Header::decode(&forged), None, "{used} of {slots} slots");
        }
        let largest = Header { slots: MAX_SLOTS, ..sample() };
        assert_eq!(Header::decode(&largest.encode()), Some(largest));
    }

    #[test]
    fn one_small_write_makes_a_header_dirty_but_keeps_it_readable() {
        let mut bytes = sample().encode();
        bytes[CLEAN_AT as usize..][..8].fill(0);
        assert_eq!(Header::decode(&bytes), Some(Header { clean: false, ..sample() }));
    }

    #[test]
    fn any_other_changed_byte_is_noticed() {
        let bytes = sample().encode();
        for at in (0..bytes.len()).filter(|at| !(8..16).contains(at)) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_ne!(Header::decode(&damaged), Some(sample()), "byte {at}");
            assert!(at >= 16 || Header::decode(&damaged).is_none());
        }
        for length in 0..bytes.len() {
            assert_eq!(Header::decode(&bytes[..length]), None);
        }
    }
}
