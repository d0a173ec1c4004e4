//! Identifies the machine and its current boot, for the records of reservations.
//!
//! The index has hashes of the IDs, not the IDs. If the machine or the boot has no known ID, no
//! reservation counts as one of an earlier boot.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::index::hash;

/// A time of a file: seconds since 1970, and nanoseconds.
pub(crate) type Timestamp = (i64, u32);

/// The identity of the machine and of its current boot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// The hash of the machine ID, or `None` if the ID is unknown.
    machine: Option<u64>,
    /// The hash of the boot ID, or `None` if the ID is unknown.
    boot: Option<u64>,
    /// The path of /proc/uptime. Empty if the time of the boot is unknown.
    uptime: PathBuf,
}

impl Host {
    /// Reads `/etc/machine-id` and the kernel's boot ID below `root`, which is `/` outside tests.
    /// An ID that is missing, empty or uninitialised is unknown.
    pub fn read(root: &Path) -> Host {
        let read_or_empty = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let host = Host::new(&read_or_empty("etc/machine-id"), &read_or_empty("proc/sys/kernel/random/boot_id"));
        Host { uptime: root.join("proc/uptime"), ..host }
    }

    /// Returns the host with these IDs. The time of its boot is unknown.
    pub fn new(machine_id: &str, boot_id: &str) -> Host {
        let hash_of_id = |id: &str| match id.trim() {
            "" | "uninitialized" => None,
            id => Some(hash(id.as_bytes())),
        };
        Host { machine: hash_of_id(machine_id), boot: hash_of_id(boot_id), uptime: PathBuf::new() }
    }

    /// Returns the hash of the machine ID, or 0 if the ID is unknown.
    pub(crate) fn machine(&self) -> u64 {
        self.machine.unwrap_or(0)
    }

    /// Returns the hash of the boot ID, or 0 if the ID is unknown.
    pub(crate) fn boot(&self) -> u64 {
        self.boot.unwrap_or(0)
    }

    /// Returns when this machine was booted, by the present clock, or `None` if that is unknown.
    pub(crate) fn booted(&self) -> Option<Timestamp> {
        // `btime` in /proc/stat has only whole seconds, and reading /proc/stat is slow.
        let text = fs::read_to_string(&self.uptime).ok()?;
        let up: f64 = text.split_ascii_whitespace().next()?.parse().ok()?;
        let up = Duration::try_from_secs_f64(up).ok()?;
        let booted = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.checked_sub(up)?;
        Some((booted.as_secs() as i64, booted.subsec_nanos()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unknown_is_zero() {
        let host = Host::new(" \n", "uninitialized\n");
        assert_eq!((host.machine(), host.boot()), (0, 0));
        let host = Host::new("a\n", "b\n");
        assert!(host.machine() != 0 && host.boot() != 0 && host.machine() != host.boot());
        assert_eq!(host, Host::new("a", "b"));
        assert_eq!(host.booted(), None);
    }

    #[test]
    fn the_boot_time_is_now_minus_the_uptime() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("proc")).unwrap();
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        for (text, expected) in
            [("100.50 7.00\n", Some(100_500)), ("0.00 0.00", Some(0)), ("", None), ("-1 0", None), ("x", None)]
        {
            fs::write(root.path().join("proc/uptime"), text).unwrap();
            let before = now();
            let booted = Host::read(root.path()).booted();
            let after = now();
            let booted = booted.map(|(seconds, nanos)| Duration::new(seconds as u64, nanos));
            match expected.map(Duration::from_millis) {
                Some(up) => {
                    let between = booted.is_some_and(|booted| (before..=after).contains(&(booted + up)));
                    assert!(between, "{text:?}: {booted:?}, between {before:?} and {after:?}");
                }
                None => assert_eq!(booted, None, "{text:?}"),
            }
        }
    }
}
