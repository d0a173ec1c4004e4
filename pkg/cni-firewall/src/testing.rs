//! Test only: throw-away network namespaces for this crate's own tests.

use cni_linux::{LinuxMachine, Netns};

pub(crate) use cni_testkit::{in_new_netns, skipped as skip};

/// Another fresh namespace. The calling thread stays where it is.
pub(crate) fn new_netns() -> Netns {
    let mut made = None;
    in_new_netns(|| made = Netns::current().ok());
    made.unwrap()
}

/// A machine that never ends anything.
pub(crate) fn machine() -> LinuxMachine {
    LinuxMachine::install().unwrap()
}
