//! Which boot of which machine this is: what a reservation's record remembers.
//!
//! Only hashes are kept. An unknown machine or boot is `None` and never equals anything, itself included: whoever
//! wants to call a reservation dead must know both.

use std::fs;
use std::path::Path;

use crate::index::hash;

/// The machine and its current boot, as far as they are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Host {
    machine: Option<u64>,
    boot: Option<u64>,
}

impl Host {
    /// Reads `/etc/machine-id` and the kernel's boot id below `root`, which is `/` outside tests. What is missing,
    /// empty or uninitialised stays unknown.
    pub fn read(root: &Path) -> Host {
        let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        Host::new(&text("etc/machine-id"), &text("proc/sys/kernel/random/boot_id"))
    }

    /// From the texts of the two files.
    pub fn new(machine_id: &str, boot_id: &str) -> Host {
        let known = |text: &str| {
            let text = text.trim();
            (!text.is_empty() && text != "uninitialized").then(|| hash(text.as_bytes()))
        };
        Host { machine: known(machine_id), boot: known(boot_id) }
    }

    /// The machine, 0 if unknown.
    pub(crate) fn machine(&self) -> u64 {
        self.machine.unwrap_or(0)
    }

    /// The boot, 0 if unknown.
    pub(crate) fn boot(&self) -> u64 {
        self.boot.unwrap_or(0)
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
    }
}
