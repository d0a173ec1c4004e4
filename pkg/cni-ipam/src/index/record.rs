//! The record of one address in the index.
//!
//! A record applies only to the file whose inode and times it names. It has a hash instead of the
//! file's content.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::bits::Family;
use super::table::{Key, PAYLOAD, Payload};
use crate::host::Host;
use crate::ranges::number;

/// The tag of a record in the table.
pub(super) const RECORD: u8 = 1;

/// Nanoseconds that no time has, in the ctime of a record written before its file had a name:
/// getting one changes a file's ctime, to what cannot be known beforehand. Until the true record
/// has taken its place, inode and mtime tell the file.
pub(crate) const LINKING: u32 = u32::MAX;
/// No more seconds than these are between such a record and the name.
const LINKED_WITHIN: i64 = 10;

/// The holder of an address, according to a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// The file is blank.
    Free,
    /// A file that is not a reservation occupies the name: a directory, a link, or a file that is
    /// too long and names no owner.
    Unknown,
    /// The file could not be read when the folder was: its owner is unknown.
    Unread,
    /// The hash of the file's trimmed content.
    Content(u64),
}

/// The record of one file in the folder whose name is an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) address: IpAddr,
    pub(crate) inode: u64,
    /// All zero if the file changed so recently that its times prove nothing.
    pub(crate) ctime: (i64, u32),
    pub(crate) mtime_nanos: u32,
    pub(crate) holder: Holder,
    /// The boot in which we made the reservation; 0 if it is not known to be ours, or was made
    /// through a shared file system.
    pub(crate) boot: u64,
}

pub(super) fn family(address: IpAddr) -> Family {
    if address.is_ipv4() { Family::V4 } else { Family::V6 }
}

pub(super) fn to_address(family: u8, number: u128) -> IpAddr {
    match family {
        4 => IpAddr::V4(Ipv4Addr::from_bits(number as u32)),
        _ => IpAddr::V6(Ipv6Addr::from_bits(number)),
    }
}

/// An address as a payload.
pub(super) fn to_payload(address: IpAddr) -> Payload {
    let mut payload = [0; PAYLOAD];
    payload[..16].copy_from_slice(&number(address).to_le_bytes());
    payload[16] = family(address).number();
    payload
}

/// The address that a payload is.
pub(super) fn from_payload(payload: &Payload) -> IpAddr {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&payload[..16]);
    to_address(payload[16], u128::from_le_bytes(bytes))
}

impl Record {
    pub(super) fn key(address: IpAddr) -> Key {
        Key { tag: RECORD, family: family(address).number(), rank: 0, number: number(address) }
    }

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

    pub(super) fn decode(key: &Key, payload: &Payload) -> Record {
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&payload[at..at + 8]);
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

    /// Whether we made it in an earlier boot than this one of this machine.
    pub(crate) fn is_of_earlier_boot(&self, host: &Host) -> bool {
        let known = self.boot != 0 && host.boot() != 0 && host.machine() != 0;
        known && self.boot != host.boot() && matches!(self.holder, Holder::Content(_)) && self.ctime != (0, 0)
    }

    /// Whether a file with this ctime has not been touched since we recorded it.
    pub(super) fn is_of_ctime(&self, ctime: (i64, u32)) -> bool {
        match self.ctime {
            (0, 0) => false,
            (seconds, LINKING) => (seconds..=seconds.saturating_add(LINKED_WITHIN)).contains(&ctime.0),
            recorded => recorded == ctime,
        }
    }

    pub(crate) fn is_occupied(&self) -> bool {
        self.holder != Holder::Free
    }
}
