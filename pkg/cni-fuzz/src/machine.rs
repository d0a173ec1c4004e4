//! A [`Machine`] for the targets, which need no program and no real namespace.

use std::io;
use std::path::Path;
use std::time::Instant;

use cni::machine::{Child, Machine, Output, RunError};

/// A machine that runs no program and treats [`OWN_NETNS`] as the plugin's own namespace.
#[derive(Debug)]
pub(crate) struct NoMachine;

/// The path of the plugin's own namespace. No file needs to exist there.
pub(crate) const OWN_NETNS: &str = "/own";

impl Machine for NoMachine {
    fn is_own_netns(&self, path: &Path) -> io::Result<bool> {
        Ok(path == Path::new(OWN_NETNS))
    }

    fn terminated(&self) -> bool {
        false
    }

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn run(&self, _: &Child<'_>) -> Result<Output, RunError> {
        Err(RunError::Start(io::ErrorKind::Unsupported.into()))
    }
}
