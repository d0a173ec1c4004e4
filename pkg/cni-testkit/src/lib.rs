//! Helps tests to run plugins on a test node in namespaces, and to check what they have left there.
//!
//! - [`Node`]: a network namespace for the host, a private mount namespace, and the node's
//!   [`Container`]s. When it is dropped, it asserts that no attachment has left anything.
//! - [`Invocation`]: one run of a plugin on a node. [`Outcome`]: what it returned, with assertions
//!   that print the whole call when they fail. Configurations and results are checked with the JSON
//!   Schemas.
//! - [`Attachment`]: one attachment and its verbs, for tests that use several.
//! - [`cluster`]: stores of claims, a part of the Kubernetes API and real members of etcd.
//! - [`trace`]: a run in which a program is killed, or gets an error, at a chosen system call.
//! - [`locks`]: waits for locks of other processes.
//! - [`program`]: writes scripts and copies programs so that they can be run at once.
//! - [`probe`]: finds out what this kernel supports. With [`require!`] and [`skip!`] a test is
//!   skipped visibly, or fails with `CNI_TEST_REQUIRE=all`.
//! - [`patience`]: longer deadlines on slow machines. [`wait_until`], [`retry`]: wait up to such a
//!   deadline.
//! - [`cost`], [`assert_cost_below`]: the CPU time of a function, which the load of the machine
//!   hardly changes.
//! - [`report_errors`]: compares a document of cnitool with its documented JSON Schema.
//! - [`deviation`]: the known differences of the plugins under test.
//!
//! Nothing on the machine itself is changed: namespaces are held by file descriptors, paths to them
//! are links in the node's temporary folder, and several nodes can exist in one process. A
//! namespace is a property of a *thread*: programs are started, and closures run, on new threads
//! that have entered the node, and the test's own thread never enters one.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fixture fails by panicking, where the test can see it"
)]

mod attachment;
pub mod cluster;
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
pub use cost::{assert_cost_below, cost};
pub use invocation::{Invocation, Started};
pub use namespace::{in_new_netns, output};
pub use node::{Container, Node, Ran};
pub use outcome::{Failure, Outcome};
pub use patience::{crowd, patience, retry, rounds, wait_until};
pub use schema::report_errors;
pub use skip::{skipped, unprovoked};

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Sets the flag when it is dropped, also by a panic. Threads that work until the flag is set then
/// end, and the test can wait for them.
pub struct Ended<'a>(pub &'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns the folder of the plugins under test: `CNI_BIN_DIR` or, if that is not set, the folder
/// that this test was built into.
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

/// Returns the folder of Go's plugins: `CNI_GO_BIN_DIR`, or the release that `scripts/test` has
/// unpacked into the target folder, or the folder of Debian's package.
pub fn go_bin_dir() -> PathBuf {
    let unpacked = || {
        let test = std::env::current_exe().ok()?;
        let mut folders = test.ancestors().map(|folder| folder.join("go-plugins/usr/lib/cni"));
        folders.find(|folder| folder.join("bridge").is_file())
    };
    let given = std::env::var_os("CNI_GO_BIN_DIR").map(PathBuf::from);
    given.or_else(unpacked).unwrap_or_else(|| PathBuf::from("/usr/lib/cni"))
}
