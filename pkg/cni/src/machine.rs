//! The few things the protocol needs of the operating system, as a value that `main` hands in.
//!
//! `cni-linux` provides the real one; so this crate stays free of the kernel, and protocol tests
//! pass values.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The operations that [`skel`](crate::skel), [`delegate`](crate::delegate) and `libcni` need from
/// the machine.
pub trait Machine {
    /// Whether `path` is the network namespace this process runs in. An error if it cannot be
    /// opened or is none.
    fn is_own_netns(&self, path: &Path) -> io::Result<bool>;

    /// Whether SIGTERM has been received, or SIGINT or SIGHUP, which mean the same. Waits end early
    /// when it is.
    fn terminated(&self) -> bool;

    /// The monotonic clock.
    fn now(&self) -> Instant;

    /// Runs a program to its end: no shell, an empty signal mask, killed with this process.
    ///
    /// # Errors
    /// See [`RunError`]; in every case the child is gone when this returns.
    fn run(&self, child: &Child<'_>) -> Result<Output, RunError>;
}

/// A program to run.
#[derive(Clone, Debug)]
pub struct Child<'a> {
    /// The file to execute; never looked up on a path.
    pub program: PathBuf,
    /// Its arguments, without the program's name.
    pub args: Vec<OsString>,
    /// The complete environment, or `None` to inherit this process's.
    pub env: Option<Vec<(OsString, OsString)>>,
    /// The bytes of its standard input.
    pub stdin: &'a [u8],
    /// How long it may run before it is killed and reaped.
    pub timeout: Duration,
    /// The effect on it of a SIGTERM that this process receives before or while it runs.
    pub on_sigterm: OnSigterm,
}

/// The effect on a child of a SIGTERM that this process receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnSigterm {
    /// It is not started, or killed: what it does is not wanted any more.
    Kill,
    /// It runs to its end, and is started even after a signal: it undoes an interrupted call.
    Finish,
}

/// How a program ended, and what it wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// How it ended.
    pub status: Exit,
    /// All it wrote to standard output.
    pub stdout: Vec<u8>,
    /// All it wrote to standard error.
    pub stderr: Vec<u8>,
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It exited with this status.
    Status(i32),
    /// This signal ended it.
    Signal(i32),
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Exit::Status(status) => write!(f, "exit status {status}"),
            Exit::Signal(signal) => write!(f, "killed by signal {signal}"),
        }
    }
}

/// Why a program could not be run to its end.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// It could not be started.
    #[error("it could not be started: {0}")]
    Start(#[source] io::Error),
    /// It ran out of time and was killed.
    #[error("it was killed after {} s without an answer", .0.as_secs_f32())]
    Timeout(Duration),
    /// This process received SIGTERM; the child was killed.
    #[error("it was killed because this process received a signal to end")]
    Terminated,
    /// Talking to it failed; it was killed.
    #[error("talking to it failed: {0}")]
    Io(#[source] io::Error),
}
