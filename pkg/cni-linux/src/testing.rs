//! Test only: throw-away network namespaces for this crate's own tests.
//!
//! A test's body runs on a thread that has left the machine's namespace, so nothing can be done to it by mistake.

use std::panic::resume_unwind;
use std::process::Command;
use std::thread::{self, Builder};

pub(crate) use cni_testkit::skipped as skip;
use nix::sched::{CloneFlags, unshare};

use crate::netns::Netns;

/// Runs `body` on a fresh thread in a fresh namespace. Without the privilege it says so and skips, unless
/// `CNI_TEST_REQUIRE=all` forbids that.
#[track_caller]
pub(crate) fn in_new_netns(body: impl FnOnce() + Send) {
    thread::scope(|scope| {
        // The test's name, for the line that tells of a skip.
        let builder = Builder::new().name(thread::current().name().unwrap_or("?").to_owned());
        let test = builder.spawn_scoped(scope, || match unshare(CloneFlags::CLONE_NEWNET) {
            Ok(()) => body(),
            Err(errno) => skip(&format!("cannot make a network namespace: {errno}")),
        });
        test.unwrap().join().unwrap_or_else(|panic| resume_unwind(panic));
    });
}

/// Another fresh namespace. The calling thread stays where it is.
pub(crate) fn new_netns() -> Netns {
    thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        Netns::current().unwrap()
    })
    .join()
    .unwrap()
}

/// What another program sees here: the words of its output. The child inherits the thread's namespace.
pub(crate) fn output(command: &str) -> String {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A machine that never ends anything.
pub(crate) fn machine() -> crate::LinuxMachine {
    crate::LinuxMachine::install().unwrap()
}
