//! The operations of the operating system that the protocol needs, as a trait.
//!
//! `cni-linux` implements the trait, and tests of the protocol replace it.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The operations that [`skel`](crate::skel), [`delegate`](crate::delegate) and `libcni` need from
/// the machine.
pub trait Machine {
    /// Whether `path` is the network namespace in which this process runs.
    ///
    /// # Errors
    /// The path cannot be opened or is not a namespace.
    fn is_own_netns(&self, path: &Path) -> io::Result<bool>;

    /// Whether this process has received SIGTERM, SIGINT or SIGHUP. All three end waits early.
    fn terminated(&self) -> bool;

    /// Returns the time of the monotonic clock.
    fn now(&self) -> Instant;

    /// Runs a program without a shell, waits until it has ended and returns its output. The program
    /// has an empty signal mask, and the kernel kills it if this process dies.
    ///
    /// # Errors
    /// See [`RunError`]. The program is not running in this case either.
    fn run(&self, child: &Child<'_>) -> Result<Output, RunError>;
}

/// A program to run.
#[derive(Clone, Debug)]
pub struct Child<'a> {
    /// The path of the executable file.
    pub program: PathBuf,
    /// The arguments, without the program's name.
    pub args: Vec<OsString>,
    /// All environment variables, or `None` for those of this process.
    pub env: Option<Vec<(OsString, OsString)>>,
    /// The content of its standard input.
    pub stdin: &'a [u8],
    /// How long the program may run before it is killed and reaped.
    pub timeout: Duration,
    /// What happens to the program if this process receives a signal to end before or while it
    /// runs.
    pub on_sigterm: OnSigterm,
}

/// What happens to a child if this process receives a signal to end: SIGTERM, SIGINT or SIGHUP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnSigterm {
    /// The child is killed, or not started.
    Kill,
    /// The child runs to its end, and is started even after the signal, because it undoes an
    /// interrupted call.
    Finish,
}

/// How a program ended, and its output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// How it ended.
    pub status: Exit,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
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
    /// The program could not be started.
    #[error("it could not be started: {0}")]
    Start(#[source] io::Error),
    /// The program exceeded its time and was killed.
    #[error("it was killed after {} s without an answer", .0.as_secs_f32())]
    Timeout(Duration),
    /// This process received SIGTERM, SIGINT or SIGHUP, so the program was killed or not started.
    #[error("it was killed or not started because this process received a signal to end")]
    Terminated,
    /// Writing the program's input or reading its output failed, so the program was killed.
    #[error("its input could not be written or its output could not be read: {0}")]
    Io(#[source] io::Error),
}
