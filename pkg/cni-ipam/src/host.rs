//! Identifies the machine and its current boot, for the records of reservations.
//!
//! The links have hashes of the IDs, not the IDs. If the machine or the boot has no known ID, no
//! reservation counts as one of an earlier boot.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::content::{hash, parse_hash};

/// A time of a file: seconds since 1970, and nanoseconds.
pub(crate) type Timestamp = (i64, u32);

/// A boot of a machine: hashes of the machine ID and of the boot ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Boot {
    machine: u64,
    boot: u64,
}

impl Boot {
    /// Parses what [`fmt::Display`] writes. Returns `None` for another text.
    pub(crate) fn parse(text: &str) -> Option<Boot> {
        let (machine, boot) = text.split_once('-')?;
        Some(Boot { machine: parse_hash(machine)?, boot: parse_hash(boot)? })
    }

    /// Whether it is another boot of the same machine.
    pub(crate) fn is_other_boot_of_same_machine(&self, other: &Boot) -> bool {
        self.machine == other.machine && self.boot != other.boot
    }
}

impl fmt::Display for Boot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{:016x}", self.machine, self.boot)
    }
}

/// The identity of the machine and of its current boot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// The current boot, or `None` if an ID is unknown.
    boot: Option<Boot>,
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
        let boot = hash_of_id(machine_id).zip(hash_of_id(boot_id)).map(|(machine, boot)| Boot { machine, boot });
        Host { boot, uptime: PathBuf::new() }
    }

    /// Returns the current boot, or `None` if the machine or the boot has no known ID.
    pub(crate) fn boot(&self) -> Option<Boot> {
        self.boot
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
    fn a_boot_is_known_with_both_ids() {
        for (machine, boot) in [(" \n", "uninitialized\n"), ("", "b"), ("a", "\n")] {
            assert_eq!(Host::new(machine, boot).boot(), None);
        }
        let host = Host::new("a\n", "b\n");
        let boot = host.boot().unwrap();
        assert_eq!(Boot::parse(&boot.to_string()), Some(boot));
        assert!(boot.is_other_boot_of_same_machine(&Host::new("a", "c").boot().unwrap()));
        assert!(!boot.is_other_boot_of_same_machine(&Host::new("c", "b").boot().unwrap()));
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
