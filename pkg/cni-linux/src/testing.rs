//! Test only: throw-away network namespaces for this crate's own tests.

use std::thread;

use nix::sched::{CloneFlags, unshare};

use crate::netns::Netns;

pub(crate) use cni_testkit::{in_new_netns, output, skipped as skip};

/// Another fresh namespace. The calling thread stays where it is.
pub(crate) fn new_netns() -> Netns {
    thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        Netns::current().unwrap()
    })
    .join()
    .unwrap()
}

/// A machine that never ends anything.
pub(crate) fn machine() -> crate::LinuxMachine {
    crate::LinuxMachine::install().unwrap()
}
