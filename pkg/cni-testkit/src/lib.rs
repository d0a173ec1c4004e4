//! Test only: a node to play on, plugins to run there, and the truth about what they left behind.
//!
//! - [`Node`]: one host network namespace with a private mount namespace, its [`Container`]s, its
//!   own data folder. Its drop asserts that nothing is left of any attachment.
//! - [`Invocation`]: one run of a plugin binary in a node; [`Outcome`]: what came back, with
//!   assertions that print the whole call when they fail. Configurations sent and results received
//!   are validated by JSON Schema.
//! - [`Attachment`]: one (network, container, interface) and its verbs, for tests that go through a
//!   whole life.
//! - [`trace`]: a run in which one system call is a program's last, or fails.
//! - [`locks`]: who holds one and who waits, as the kernel lists them.
//! - [`program`]: scripts and copies that can be run as soon as they are written.
//! - [`probe`]: what this kernel can do, found out by doing it; [`require!`] and [`skip!`] make a
//!   test a visible skip, or a failure with `CNI_TEST_REQUIRE=all`.
//! - [`patience`]: deadlines of tests, longer where everything is slower.
//! - [`assert_cost_below`]: how the time that something takes grows, which does not depend on the
//!   machine.
//! - [`deviation`]: what is known to be different in the plugins under test, as data.
//!
//! Nothing here is named on the machine: namespaces live by file descriptors, paths to them are
//! symlinks in the node's temporary folder, and several nodes live side by side in one process.
//! Never shipped.
//!
//! A namespace is a property of a *thread*. Programs are
//! started, and closures run, on throw-away threads that have entered the node; the test's own
//! thread never leaves home.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fixture fails by panicking, where the test can see it"
)]

mod attachment;
mod cost;
pub mod deviation;
mod invocation;
mod leftovers;
pub mod locks;
mod namespace;
mod node;
mod outcome;
mod patience;
pub mod probe;
pub mod program;
mod schema;
mod skip;
pub mod trace;

pub use attachment::Attachment;
pub use cost::assert_cost_below;
pub use invocation::{Invocation, Started};
pub use namespace::{in_new_netns, output};
pub use node::{Container, Node, Ran};
pub use outcome::{Failure, Outcome};
pub use patience::{crowd, patience, rounds};
pub use skip::{skipped, unprovoked};

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Says that it is over when it goes, by a panic too: to threads that work until then, and are
/// waited for.
pub struct Ended<'a>(pub &'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The folder of the plugins under test: `CNI_BIN_DIR`, else the one this test was built into.
///
/// # Panics
/// If there is no such folder: tests build nothing themselves.
pub fn bin_dir() -> PathBuf {
    let dir = match std::env::var_os("CNI_BIN_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => {
            let test = std::env::current_exe().expect("the test binary has a path");
            test.ancestors().nth(2).expect("target/<profile>/deps/<test>").to_path_buf()
        }
    };
    // Plugins run with another working directory, and CNI_PATH must be absolute for them.
    match std::fs::canonicalize(&dir) {
        Ok(dir) => dir,
        Err(error) => panic!("no folder of plugins to test at {}: {error}; set CNI_BIN_DIR", dir.display()),
    }
}

/// Returns the folder of the Go plugins, for tests that mix both: `CNI_GO_BIN_DIR`, else the
/// release that `scripts/test` has unpacked into the target folder, else the one that Debian
/// installs.
pub fn go_bin_dir() -> PathBuf {
    let unpacked = || {
        let test = std::env::current_exe().ok()?;
        let mut folders = test.ancestors().map(|folder| folder.join("go-plugins/usr/lib/cni"));
        folders.find(|folder| folder.join("bridge").is_file())
    };
    let given = std::env::var_os("CNI_GO_BIN_DIR").map(PathBuf::from);
    given.or_else(unpacked).unwrap_or_else(|| PathBuf::from("/usr/lib/cni"))
}
