//! Encodes and decodes the record of one address in the index.
//!
//! A record has the inode, the times, and a hash of the content of the address's file. If the file
//! now has another inode or other times, the record is outdated and the file must be read.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::table::{Key, PAYLOAD_LENGTH, Payload};
use crate::host::{Host, Timestamp};
use crate::ranges::number;

/// The tag of a record in the table.
pub(super) const RECORD: u8 = 1;

/// The nanoseconds of the ctime in a provisional record, which is stored just before its file is
/// linked to its name: if the process is killed after that, the file still has a record. Linking
/// changes the ctime, so inode and mtime identify the file until the final record replaces the
/// provisional one.
pub(crate) const PROVISIONAL_NANOS: u32 = u32::MAX;
/// The longest time in seconds between a provisional record and the link of its file.
const MAX_LINK_DELAY: i64 = 10;
/// The ctime in the record of a file that was read just after a change: another change could leave
/// the same ctime. A record with this value matches no file, so the file is read again.
pub(crate) const UNRELIABLE_CTIME: Timestamp = (0, 0);

// The numbers of the holders that are not a hash: `hash` never returns them.
const FREE: u64 = 0;
const FOREIGN: u64 = 1;
const UNREADABLE: u64 = 2;

/// The holder of an address, according to a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// The file is blank, so the address is free.
    Free,
    /// The file is not a reservation: it is a directory, a symbolic link, or a file that is too
    /// long and does not name an owner.
    Foreign,
    /// The file could not be read, so its owner is unknown.
    Unreadable,
    /// The hash of the file's trimmed content.
    Content(u64),
}

/// The record of one file in the folder whose name is an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) address: IpAddr,
    pub(crate) inode: u64,
    /// The time of the last change of any kind, or [`UNRELIABLE_CTIME`]. The nanoseconds of a
    /// provisional record are [`PROVISIONAL_NANOS`].
    pub(crate) ctime: Timestamp,
    pub(crate) mtime_nanos: u32,
    pub(crate) holder: Holder,
    /// A hash of the ID of the boot in which this plugin made the reservation. 0 if another program
    /// may have made it, or if the folder is on a shared file system.
    pub(crate) boot: u64,
}

/// Returns the family of an address: 4 or 6.
pub(super) fn family(address: IpAddr) -> u8 {
    if address.is_ipv4() { 4 } else { 6 }
}

/// Returns the address with this number. `family` is 4 or 6.
pub(super) fn to_address(family: u8, number: u128) -> IpAddr {
    match family {
        4 => IpAddr::V4(Ipv4Addr::from_bits(number as u32)),
        _ => IpAddr::V6(Ipv6Addr::from_bits(number)),
    }
}

/// Encodes an address as the payload of an entry.
pub(super) fn address_to_payload(address: IpAddr) -> Payload {
    let mut payload = [0; PAYLOAD_LENGTH];
    payload[..16].copy_from_slice(&number(address).to_le_bytes());
    payload[16] = family(address);
    payload
}

/// Decodes an address that [`address_to_payload`] has encoded.
pub(super) fn address_from_payload(payload: &Payload) -> IpAddr {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&payload[..16]);
    to_address(payload[16], u128::from_le_bytes(bytes))
}

impl Record {
    /// Returns the key of an address's record.
    pub(super) fn key(address: IpAddr) -> Key {
        Key { tag: RECORD, family: family(address), rank: 0, number: number(address) }
    }

    /// Returns the payload of the record's entry: five 64-bit words.
    pub(super) fn encode(&self) -> Payload {
        let (seconds, nanos) = self.ctime;
        let holder = match self.holder {
            Holder::Free => FREE,
            Holder::Foreign => FOREIGN,
            Holder::Unreadable => UNREADABLE,
            Holder::Content(hash) => hash,
        };
        let both_nanos = u64::from(self.mtime_nanos) << 32 | u64::from(nanos);
        let words = [self.inode, seconds as u64, both_nanos, holder, self.boot];
        let mut payload = [0; PAYLOAD_LENGTH];
        for (bytes, word) in payload.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        payload
    }

    /// Decodes the record in an entry of the table.
    pub(super) fn decode(key: &Key, payload: &Payload) -> Record {
        let mut words = [0; PAYLOAD_LENGTH / 8];
        for (word, bytes) in words.iter_mut().zip(payload.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        let [inode, seconds, both_nanos, holder, boot] = words;
        Record {
            address: to_address(key.family, key.number),
            inode,
            ctime: (seconds as i64, both_nanos as u32),
            mtime_nanos: (both_nanos >> 32) as u32,
            holder: match holder {
                FREE => Holder::Free,
                FOREIGN => Holder::Foreign,
                UNREADABLE => Holder::Unreadable,
                hash => Holder::Content(hash),
            },
            boot,
        }
    }

    /// Whether this plugin made the reservation in an earlier boot of this machine. `false` if that
    /// is uncertain, or if the record cannot prove that the file is still the same.
    pub(crate) fn is_of_earlier_boot(&self, host: &Host) -> bool {
        // 0 in a record of another machine too, because `old_records` clears the boot there.
        let is_recorded_boot_known = self.boot != 0;
        // 0 stands for an unknown ID.
        let is_host_known = host.machine() != 0 && host.boot() != 0;
        if !is_recorded_boot_known || !is_host_known || self.boot == host.boot() {
            return false;
        }
        let is_reservation = matches!(self.holder, Holder::Content(_));
        // No file matches a record with an unreliable ctime.
        let can_prove_same_file = self.ctime != UNRELIABLE_CTIME;
        is_reservation && can_prove_same_file
    }

    /// Whether a file with this ctime is unchanged since the record was made.
    pub(super) fn matches_ctime(&self, ctime: Timestamp) -> bool {
        match self.ctime {
            UNRELIABLE_CTIME => false,
            // Linking the file has set its ctime, shortly after the provisional record was stored.
            (seconds, PROVISIONAL_NANOS) => (seconds..=seconds.saturating_add(MAX_LINK_DELAY)).contains(&ctime.0),
            recorded => recorded == ctime,
        }
    }

    /// Whether the address is not free.
    pub(crate) fn is_occupied(&self) -> bool {
        self.holder != Holder::Free
    }
}
