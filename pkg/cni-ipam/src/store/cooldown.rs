//! Stores when addresses were released, so that ADD does not give them out again too soon.
//!
//! The file `released` in the sidecar has a line for each address: the address, a space, and the
//! time of its release in milliseconds since 1970. It is only used with a cool-down period
//! ([`Options::cooldown`](super::Options::cooldown)), and may be deleted at any time. A release is
//! stored before the reservation is removed: if the process is killed in between, the address is
//! still reserved, and its next release is stored again.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::Locked;
use crate::content::address_of_name;
use crate::ranges::RangeSet;

/// The largest number of addresses in the file. Of more, the latest releases are stored.
const MAX_ENTRIES: usize = 65_536;
/// The largest number of bytes that are read: 64 for each address.
const MAX_LENGTH: u64 = 64 * MAX_ENTRIES as u64;

/// Released addresses, each with the time of the release in milliseconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Released {
    times: HashMap<IpAddr, u64>,
    /// The number of lines that are not an address and a time.
    pub(crate) damaged: usize,
    /// Whether a time was in the future, after the clock was set back, and counts as now.
    pub(crate) is_from_future: bool,
}

impl Released {
    /// Reads the lines of the file at the time `now`. The last line of an address counts.
    pub(crate) fn parse(text: &[u8], now: u64) -> Released {
        let mut released = Released::default();
        for line in text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            match parse_line(line) {
                Some((address, time)) => {
                    released.is_from_future |= time > now;
                    released.times.insert(address, time.min(now));
                }
                None => released.damaged += 1,
            }
        }
        released
    }

    /// Returns the lines of the file, the earliest release first.
    pub(crate) fn to_text(&self) -> String {
        let mut sorted: Vec<(u64, IpAddr)> = self.times.iter().map(|(address, time)| (*time, *address)).collect();
        sorted.sort_unstable();
        let latest = &sorted[sorted.len().saturating_sub(MAX_ENTRIES)..];
        latest.iter().map(|(time, address)| format!("{address} {time}\n")).collect()
    }

    /// Drops the addresses that were released at least `period` ago.
    pub(crate) fn expire(&mut self, now: u64, period: Duration) {
        self.times.retain(|_, time| u128::from(now.saturating_sub(*time)) < period.as_millis());
    }

    /// Whether the address is one of the released addresses.
    fn contains(&self, address: IpAddr) -> bool {
        self.times.contains_key(&address)
    }
}

/// Returns the address and the time of a line.
fn parse_line(line: &[u8]) -> Option<(IpAddr, u64)> {
    let (address, time) = std::str::from_utf8(line).ok()?.split_once(' ')?;
    Some((address_of_name(address.as_bytes())?, time.parse().ok()?))
}

/// Returns the time in milliseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Opens a regular file. Symbolic links are not followed, and opening a FIFO does not block.
fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let file = options.custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a regular file")) }
}

impl Locked {
    /// Returns the path of the file.
    fn released_path(&self) -> PathBuf {
        self.store.sidecar.join("released")
    }

    /// Returns the addresses that cool down at the time `now`: none without a cool-down period.
    /// Writes a note if the file or some of its lines cannot be read.
    fn read_released(&self, now: u64) -> Released {
        let path = self.released_path();
        let mut text = Vec::new();
        let read = open(&path, OpenOptions::new().read(true))
            .and_then(|file| file.take(MAX_LENGTH).read_to_end(&mut text).map(drop));
        let notes = &self.store.options.notes;
        if let Err(error) = read
            && error.kind() != io::ErrorKind::NotFound
        {
            notes.note(format_args!(
                "failed to read {}, so released addresses do not cool down: {error}",
                path.display()
            ));
        }
        let mut released = Released::parse(&text, now);
        if released.damaged > 0 {
            let (damaged, path) = (released.damaged, path.display());
            notes.note(format_args!("{damaged} damaged lines of {path} are ignored; their addresses do not cool down"));
        }
        released.expire(now, self.store.options.cooldown);
        released
    }

    /// Replaces the file atomically. Only writes a note on failure, for example on a full disk.
    fn write_released(&self, released: &Released) {
        let path = self.released_path();
        // The lock is held, so an existing temporary file was left by a killed process.
        let temporary = path.with_extension("new");
        let mut options = OpenOptions::new();
        let written = open(&temporary, options.write(true).create(true).truncate(true).mode(0o600))
            .and_then(|mut file| file.write_all(released.to_text().as_bytes()))
            .and_then(|()| std::fs::rename(&temporary, &path));
        if let Err(error) = written {
            let _ = std::fs::remove_file(&temporary);
            let path = path.display();
            self.store
                .options
                .notes
                .note(format_args!("failed to write {path}, so the released addresses do not cool down: {error}"));
        }
    }

    /// Stores that these addresses are released now. Does nothing without a cool-down period.
    pub(super) fn store_release(&self, addresses: impl ExactSizeIterator<Item = IpAddr>) {
        if self.store.options.cooldown.is_zero() || addresses.len() == 0 {
            return;
        }
        let now = now();
        let mut released = self.read_released(now);
        released.times.extend(addresses.map(|address| (address, now)));
        self.write_released(&released);
    }

    /// Returns the addresses that cool down. Without a cool-down period there are none, and no file
    /// is read.
    pub(super) fn cooling(&self) -> Cooling {
        if self.store.options.cooldown.is_zero() {
            return Cooling::default();
        }
        let now = now();
        Cooling { released: self.read_released(now), now }
    }

    /// Writes the file again if it has releases of the future, which count as now. Otherwise they
    /// would count as now in every ADD, until the clock has reached their time.
    pub(super) fn repair_future_releases(&self, cooling: &Cooling) {
        if cooling.released.is_from_future {
            self.write_released(&cooling.released);
        }
    }

    /// Writes a note that an address is given although it cools down, and why.
    pub(super) fn note_cooling(&self, cooling: &Cooling, address: IpAddr, why: &str) {
        if let Some(ago) = cooling.since_release(address) {
            let period = self.store.options.cooldown.as_secs();
            let ago = ago.as_secs();
            self.store.options.notes.note(format_args!(
                "{address} was released {ago} s ago, less than the releaseCooldown of {period} s; it is given out, because {why}"
            ));
        }
    }
}

/// The addresses that cool down during one ADD.
#[derive(Debug, Default)]
pub(super) struct Cooling {
    released: Released,
    now: u64,
}

impl Cooling {
    /// Whether the address cools down.
    pub(super) fn contains(&self, address: IpAddr) -> bool {
        self.released.contains(address)
    }

    /// Returns how long ago an address that cools down was released.
    fn since_release(&self, address: IpAddr) -> Option<Duration> {
        self.released.times.get(&address).map(|time| Duration::from_millis(self.now.saturating_sub(*time)))
    }

    /// Returns the addresses of a set that can be allocated, the earliest release first.
    pub(super) fn in_set(&self, set: &RangeSet) -> Vec<IpAddr> {
        let in_set = self.released.times.iter().filter(|(address, _)| set.can_allocate(**address));
        let mut sorted: Vec<(u64, IpAddr)> = in_set.map(|(address, time)| (*time, *address)).collect();
        sorted.sort_unstable();
        sorted.into_iter().map(|(_, address)| address).collect()
    }

    /// Returns all addresses that cool down, each with the remaining time, sorted by address.
    pub(super) fn remaining(&self, period: Duration) -> Vec<(IpAddr, Duration)> {
        let remaining = |address: IpAddr| period.saturating_sub(self.since_release(address).unwrap_or_default());
        let mut sorted: Vec<(IpAddr, Duration)> =
            self.released.times.keys().map(|address| (*address, remaining(*address))).collect();
        sorted.sort_unstable();
        sorted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn damaged_lines_are_counted_and_the_others_count() {
        let text = b"10.0.0.2 1000\n10.0.0.2\nx 5\nfd00::2 1500\n10.0.0.03 1\n10.0.0.4 -1\n\xff 3\n10.0.0.5 ";
        let released = Released::parse(text, 2000);
        assert_eq!((released.times.len(), released.damaged, released.is_from_future), (2, 6, false));
        assert_eq!(released.to_text(), "10.0.0.2 1000\nfd00::2 1500\n");
        assert_eq!(Released::parse(released.to_text().as_bytes(), 2000).to_text(), released.to_text());
    }

    #[test]
    fn a_release_of_the_future_counts_as_now() {
        let mut released = Released::parse(b"10.0.0.2 99999999\n10.0.0.3 500\n", 1000);
        assert!(released.is_from_future);
        assert_eq!(released.to_text(), "10.0.0.3 500\n10.0.0.2 1000\n");
        released.expire(1500, Duration::from_secs(1));
        assert_eq!(released.to_text(), "10.0.0.2 1000\n");
        released.expire(2000, Duration::from_secs(1));
        assert_eq!(released.to_text(), "");
    }

    #[test]
    fn the_file_has_a_bounded_number_of_lines() {
        let times = (0..MAX_ENTRIES as u32 + 5).map(|n| (IpAddr::from(std::net::Ipv4Addr::from_bits(n)), u64::from(n)));
        let released = Released { times: times.collect(), ..Released::default() };
        let text = released.to_text();
        assert_eq!((text.lines().count(), text.lines().next()), (MAX_ENTRIES, Some("0.0.0.5 5")));
        assert!((text.len() as u64) < MAX_LENGTH);
        assert!(!released.contains(address("::1")));
    }
}
