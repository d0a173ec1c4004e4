//! Encodes and decodes the record of one address in the index.
//!
//! A record describes the file whose inode and times it has: a file with other ones must be read
//! again. It has a hash of the file's content instead of the content.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::bits::Family;
use super::table::{Key, PAYLOAD, Payload};
use crate::host::Host;
use crate::ranges::number;

/// The tag of a record in the table.
pub(super) const RECORD: u8 = 1;

/// The nanoseconds of the ctime in a provisional record, which is written before its file is linked
/// to its name. Linking changes the ctime to one that cannot be known before. Until the final
/// record replaces the provisional one, inode and mtime identify the file.
pub(crate) const LINKING: u32 = u32::MAX;
/// How many seconds after the provisional record the file is linked at most.
const LINKED_WITHIN: i64 = 10;

/// The holder of an address, according to a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// The file is empty, so the address is free.
    Free,
    /// The name belongs to something else than a reservation: a directory, a link, or a file that
    /// is too long and does not name an owner.
    Unknown,
    /// The file could not be read, so its owner is unknown.
    Unread,
    /// The hash of the file's trimmed content.
    Content(u64),
}

/// The record of one file in the folder whose name is an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) address: IpAddr,
    pub(crate) inode: u64,
    /// The time of the last change in seconds and nanoseconds, or zeros if the file had changed so
    /// recently that another change could have left the same time.
    pub(crate) ctime: (i64, u32),
    pub(crate) mtime_nanos: u32,
    pub(crate) holder: Holder,
    /// A hash of the boot in which this plugin made the reservation. 0 if another program may have
    /// made it, or if the folder is on a shared file system.
    pub(crate) boot: u64,
}

/// Returns the family of an address.
pub(super) fn family(address: IpAddr) -> Family {
    if address.is_ipv4() { Family::V4 } else { Family::V6 }
}

/// Returns the address with this number. `family` is 4 or 6.
pub(super) fn to_address(family: u8, number: u128) -> IpAddr {
    match family {
        4 => IpAddr::V4(Ipv4Addr::from_bits(number as u32)),
        _ => IpAddr::V6(Ipv6Addr::from_bits(number)),
    }
}

/// Encodes an address as the payload of an entry.
pub(super) fn to_payload(address: IpAddr) -> Payload {
    let mut payload = [0; PAYLOAD];
    payload[..16].copy_from_slice(&number(address).to_le_bytes());
    payload[16] = family(address).number();
    payload
}

/// Decodes an address that [`to_payload`] has encoded.
pub(super) fn from_payload(payload: &Payload) -> IpAddr {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&payload[..16]);
    to_address(payload[16], u128::from_le_bytes(bytes))
}

impl Record {
    /// Returns the key of an address's record.
    pub(super) fn key(address: IpAddr) -> Key {
        Key { tag: RECORD, family: family(address).number(), rank: 0, number: number(address) }
    }

    /// Returns the payload of the record's entry.
    pub(super) fn encode(&self) -> Payload {
        let mut payload = [0; PAYLOAD];
        payload[..8].copy_from_slice(&self.inode.to_le_bytes());
        payload[8..16].copy_from_slice(&self.ctime.0.to_le_bytes());
        payload[16..20].copy_from_slice(&self.ctime.1.to_le_bytes());
        payload[20..24].copy_from_slice(&self.mtime_nanos.to_le_bytes());
        let holder = match self.holder {
            Holder::Free => 0,
            Holder::Unknown => 1,
            Holder::Unread => 2,
            Holder::Content(hash) => hash,
        };
        payload[24..32].copy_from_slice(&holder.to_le_bytes());
        payload[32..].copy_from_slice(&self.boot.to_le_bytes());
        payload
    }

    /// Decodes the record in an entry of the table.
    pub(super) fn decode(key: &Key, payload: &Payload) -> Record {
        let word = |offset: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&payload[offset..offset + 8]);
            u64::from_le_bytes(bytes)
        };
        Record {
            address: to_address(key.family, key.number),
            inode: word(0),
            ctime: (word(8) as i64, word(16) as u32),
            mtime_nanos: (word(16) >> 32) as u32,
            holder: match word(24) {
                0 => Holder::Free,
                1 => Holder::Unknown,
                2 => Holder::Unread,
                hash => Holder::Content(hash),
            },
            boot: word(32),
        }
    }

    /// Whether this plugin made the reservation on this machine before it was booted.
    pub(crate) fn is_of_earlier_boot(&self, host: &Host) -> bool {
        let are_boots_known = self.boot != 0 && host.boot() != 0 && host.machine() != 0;
        are_boots_known && self.boot != host.boot() && matches!(self.holder, Holder::Content(_)) && self.ctime != (0, 0)
    }

    /// Whether a file with this ctime is unchanged since the record was made.
    pub(super) fn is_of_ctime(&self, ctime: (i64, u32)) -> bool {
        match self.ctime {
            (0, 0) => false,
            (seconds, LINKING) => (seconds..=seconds.saturating_add(LINKED_WITHIN)).contains(&ctime.0),
            recorded => recorded == ctime,
        }
    }

    /// Whether the address is not free.
    pub(crate) fn is_occupied(&self) -> bool {
        self.holder != Holder::Free
    }
}
