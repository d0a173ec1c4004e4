//! Provides the machine that the tests of this crate use.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use cni::machine::{Child, Machine, Output, RunError};

/// A machine with the real clock. A test sets whether it has received SIGTERM.
#[derive(Debug, Default)]
pub(crate) struct TestMachine {
    pub(crate) terminated: AtomicBool,
}

impl Machine for TestMachine {
    fn is_own_netns(&self, _: &Path) -> io::Result<bool> {
        Ok(false)
    }
    fn terminated(&self) -> bool {
        self.terminated.load(Ordering::SeqCst)
    }
    fn now(&self) -> Instant {
        Instant::now()
    }
    fn run(&self, _: &Child<'_>) -> Result<Output, RunError> {
        Err(RunError::Start(io::ErrorKind::Unsupported.into()))
    }
}
