//! The first page of an index: for which state of the folder its table is true.
//!
//! This module only encodes and decodes it. A *dirty* header is still readable, because a rebuild
//! uses the old records; only its table must not be queried.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use super::bits::Family;
use super::table::{HEADER, SLOT, hash};
use crate::host::Timestamp;

/// Changes with the format of the page, of the slots, or of [`hash`]. An index of another format is
/// not read, and is rebuilt.
const MAGIC: &[u8; 8] = b"cni-ix\x00\x03";
/// Where the state stands; it is outside the checksum, so that one small write makes a header
/// dirty.
pub(crate) const STATE: u64 = 8;
/// How many ranges are counted at a time.
pub(crate) const COUNTERS: usize = 32;
/// A table of more slots is not believed: 1 GiB, good for some five million reservations.
const MAX_SLOTS: u64 = 1 << 24;

/// The folder as a header remembers it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) mtime: (i64, u32),
    pub(crate) ctime: (i64, u32),
}

impl Stamp {
    pub(crate) fn of(metadata: &Metadata) -> Stamp {
        Stamp {
            device: metadata.dev(),
            inode: metadata.ino(),
            mtime: (metadata.mtime(), metadata.mtime_nsec() as u32),
            ctime: (metadata.ctime(), metadata.ctime_nsec() as u32),
        }
    }
}

/// How many addresses of a range are occupied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counter {
    pub(crate) family: Family,
    pub(crate) first: u128,
    pub(crate) last: u128,
    pub(crate) used: u64,
    /// The sequence number when an ADD last asked for this range; the oldest makes way.
    pub(crate) last_asked: u64,
}

impl Counter {
    pub(crate) fn has(&self, family: Family, number: u128) -> bool {
        self.family == family && (self.first..=self.last).contains(&number)
    }
}

/// The decoded page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    /// Whether the table is true for the folder of this stamp.
    pub(crate) clean: bool,
    /// Whether no unnoticed change of the folder is possible since the last rebuild, because these
    /// plugins have made no change since.
    pub(crate) exact: bool,
    /// Whether there may be files that could not be read when the folder was.
    pub(crate) unread: bool,
    /// Whether files other than reservations may occupy names of addresses.
    pub(crate) foreign: bool,
    /// Whether another machine may have the folder on a disk of its own: what is reserved here gets
    /// no boot.
    pub(crate) shared: bool,
    pub(crate) slots: u64,
    pub(crate) used: u64,
    pub(crate) stamp: Stamp,
    pub(crate) machine: u64,
    pub(crate) boot: u64,
    /// No reservation of an earlier boot that could be reclaimed was made before this; `None` if
    /// there is none.
    pub(crate) earlier: Option<Timestamp>,
    pub(crate) sequence: u64,
    pub(crate) counters: Vec<Counter>,
}

pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    pub(super) fn u128(&mut self, value: u128) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn time(&mut self, (seconds, nanoseconds): (i64, u32)) {
        self.u64(seconds as u64);
        self.u64(u64::from(nanoseconds));
    }
}

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
    pub(super) fn u128(&mut self) -> Option<u128> {
        self.take().map(u128::from_le_bytes)
    }
    fn time(&mut self) -> Option<(i64, u32)> {
        Some((self.u64()? as i64, self.u64()? as u32))
    }
}

impl Header {
    /// The bytes of the page that matter; the rest of it is unused.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut body = Writer(Vec::with_capacity(512));
        let flags = [self.exact, self.unread, self.shared, self.foreign];
        body.u64(flags.into_iter().enumerate().map(|(bit, flag)| u64::from(flag) << bit).sum());
        body.u64(self.slots);
        body.u64(self.used);
        body.u64(self.stamp.device);
        body.u64(self.stamp.inode);
        body.time(self.stamp.mtime);
        body.time(self.stamp.ctime);
        body.u64(self.machine);
        body.u64(self.boot);
        body.u64(u64::from(self.earlier.is_some()));
        body.time(self.earlier.unwrap_or_default());
        body.u64(self.sequence);
        body.u64(self.counters.len() as u64);
        for counter in &self.counters {
            body.u64(u64::from(counter.family.number()));
            body.u128(counter.first);
            body.u128(counter.last);
            body.u64(counter.used);
            body.u64(counter.last_asked);
        }
        // The number of further ranges. Older builds kept ranges here for STATUS, and refuse a page
        // without the number.
        body.u64(0);
        let mut page = Writer(MAGIC.to_vec());
        page.u64(u64::from(self.clean));
        page.u64(body.0.len() as u64);
        page.u64(hash(&body.0));
        page.0.append(&mut body.0);
        page.0
    }

    /// How long the file of this header is.
    pub(crate) fn file_size(&self) -> Option<u64> {
        self.slots.checked_mul(SLOT as u64)?.checked_add(HEADER)
    }

    /// Reads a page; `None` if it is not a header of this format, or describes an impossible table.
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
        let mut header = Header { clean, exact: flag(0), unread: flag(1), shared: flag(2), ..Header::default() };
        header.foreign = flag(3);
        (header.slots, header.used) = (body.u64()?, body.u64()?);
        let (device, inode) = (body.u64()?, body.u64()?);
        header.stamp = Stamp { device, inode, mtime: body.time()?, ctime: body.time()? };
        (header.machine, header.boot) = (body.u64()?, body.u64()?);
        let (is_some, earlier) = (body.u64()? == 1, body.time()?);
        header.earlier = is_some.then_some(earlier);
        header.sequence = body.u64()?;
        let counters = body.u64()?;
        let possible = header.slots.is_power_of_two() && header.slots <= MAX_SLOTS && header.used < header.slots;
        if counters > COUNTERS as u64 || !possible {
            return None;
        }
        for _ in 0..counters {
            let family = if body.u64()? == 4 { Family::V4 } else { Family::V6 };
            let (first, last) = (body.u128()?, body.u128()?);
            header.counters.push(Counter { family, first, last, used: body.u64()?, last_asked: body.u64()? });
        }
        // The rest of an older build's page is ignored.
        Some(header)
    }
}

const FULL: usize = 32 + 17 * 8 + COUNTERS * 56;
const _: () = assert!(FULL <= HEADER as usize, "a full header must fit its page");

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Header {
        let counter = Counter { family: Family::V6, first: 1, last: 1 << 90, used: 5, last_asked: 3 };
        Header {
            clean: true,
            exact: true,
            unread: true,
            shared: true,
            foreign: true,
            slots: 512,
            used: 7,
            stamp: Stamp { device: 1, inode: 2, mtime: (-3, 4), ctime: (5, 999_999_999) },
            machine: 6,
            boot: 7,
            earlier: Some((9, 10)),
            sequence: 8,
            counters: vec![counter; COUNTERS],
        }
    }

    #[test]
    fn a_header_survives_its_page_and_fits_it() {
        let bytes = sample().encode();
        assert!(bytes.len() <= HEADER as usize);
        assert_eq!(Header::decode(&bytes), Some(sample()));
    }

    /// Older builds kept ranges behind the counters: 9 words each, preceded by their number.
    #[test]
    fn a_header_of_an_older_build_is_read() {
        let mut page = sample().encode();
        let body = page.split_off(32);
        let remembered = [1_u64, 0, 24, 0x0a00_0001, 0, 0x0a00_00fe, 0, 0x0a00_0001, 0, 4 << 8 | 4];
        let mut body = body[..body.len() - 8].to_vec();
        remembered.iter().for_each(|word| body.extend_from_slice(&word.to_le_bytes()));
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
        bytes[STATE as usize..][..8].fill(0);
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
