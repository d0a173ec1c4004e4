//! Creates network namespaces for this crate's tests.

use std::thread;

use nix::sched::{CloneFlags, unshare};

use crate::netns::Netns;

pub(crate) use cni_testkit::{in_new_netns, output, skipped as skip};

/// Returns a new network namespace. The calling thread stays in its own.
pub(crate) fn new_netns() -> Netns {
    thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        Netns::current().unwrap()
    })
    .join()
    .unwrap()
}

/// Returns a machine without a pending signal.
pub(crate) fn machine() -> crate::LinuxMachine {
    crate::LinuxMachine::install().unwrap()
}
