//! The operating system as the protocol sees it: signals, the clock, programs, and whether two
//! namespaces are one.
//!
//! SIGTERM, SIGINT and SIGHUP mean one thing, to end, and are blocked and read from a descriptor:
//! no handler, nothing asynchronous. Every wait includes that descriptor; the rollback then
//! runs on the main thread like after any other failure. Where the comments say SIGTERM, they mean
//! all three.
//!
//! A signal is blocked per *thread*, and a thread inherits the mask of its
//! maker, so [`LinuxMachine::install`] is `main`'s first act; an ignored signal is still delivered
//! to the descriptor once it is blocked, so under nohup SIGHUP must not be; and SIGPIPE needs
//! nothing: Rust's runtime ignores it.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use cni::machine::{Child, Machine, Output, RunError};
use cni::steps::Step;
use nix::errno::Errno;
use nix::poll::{PollFd, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::child;
use crate::netns::Netns;
use crate::sys;

/// The signals that end this process: a runtime's SIGTERM, a terminal's Ctrl-C, its hang-up.
const ENDING: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

/// [`ENDING`] as a set.
pub(crate) fn ending() -> SigSet {
    ENDING.into_iter().collect()
}

/// The real machine.
#[derive(Debug)]
pub struct LinuxMachine {
    signals: SignalFd,
    terminated: Cell<bool>,
}

impl LinuxMachine {
    /// Blocks SIGTERM, SIGINT, SIGHUP and SIGCHLD in the calling thread, and in those it will make,
    /// and opens a descriptor that reports them. Signals that the caller set to be ignored stay
    /// ignored.
    ///
    /// SIGXFSZ is blocked too and never looked at: a write beyond RLIMIT_FSIZE then fails with
    /// EFBIG like any other, where the signal would end us without an answer and without a
    /// rollback.
    pub fn install() -> io::Result<LinuxMachine> {
        let mut signals = SigSet::from(Signal::SIGCHLD);
        for signal in ENDING {
            if !sys::is_ignored(signal)? {
                signals.add(signal);
            }
        }
        let mut blocked = signals;
        blocked.add(Signal::SIGXFSZ);
        blocked.thread_block()?;
        let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        Ok(LinuxMachine { signals, terminated: Cell::new(false) })
    }
}

impl LinuxMachine {
    /// Whether a signal to end has been seen: [`terminated`](Machine::terminated) without a look at
    /// what has come since.
    pub(crate) fn was_terminated(&self) -> bool {
        self.terminated.get()
    }
}

impl AsFd for LinuxMachine {
    /// Readable when a signal has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }
}

impl Machine for LinuxMachine {
    fn is_own_netns(&self, path: &Path) -> io::Result<bool> {
        Ok(Netns::is_current(path)?)
    }

    fn terminated(&self) -> bool {
        // A signal is read once, so it must be remembered. SIGCHLD only ends a wait; who waits then
        // looks at its child.
        while let Ok(Some(signal)) = self.signals.read_signal() {
            if i32::try_from(signal.ssi_signo) != Ok(Signal::SIGCHLD as i32) {
                self.terminated.set(true);
            }
        }
        self.terminated.get()
    }

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn run(&self, child: &Child<'_>) -> Result<Output, RunError> {
        let step = Step::begin();
        let output = child::run(self, child);
        if step.is_logged() {
            let args: Vec<_> = child.args.iter().map(|arg| arg.to_string_lossy()).collect();
            let what = format!("run {} {}", child.program.display(), args.join(" "));
            match &output {
                Ok(output) => step.end_program(what.trim_end(), child.stdin, output),
                Err(error) => step.end(what.trim_end(), &Err::<(), _>(error)),
            }
        }
        output
    }
}

/// Waits until a descriptor is ready, or for `left` (without a bound if `None`). An interruption
/// counts as an event: callers look again anyway.
pub(crate) fn wait_ready(fds: &mut [PollFd<'_>], left: Option<Duration>) -> io::Result<()> {
    // Whole milliseconds, rounded up: rounded down, the last one would be spent turning in circles.
    let timeout = left.map_or(PollTimeout::NONE, |left| {
        i32::try_from(left.as_millis())
            .ok()
            .and_then(|ms| ms.checked_add(1))
            .map_or(PollTimeout::MAX, |ms| PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX))
    });
    match poll(fds, timeout) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, machine, new_netns};
    use nix::sys::signal::raise;

    #[test]
    fn a_termination_signal_is_remembered_unless_ignored() {
        for signal in ENDING {
            std::thread::spawn(move || {
                let machine = machine();
                raise(Signal::SIGCHLD).unwrap();
                assert!(!machine.terminated());
                raise(signal).unwrap();
                // Under nohup, or behind a shell's `&`, it is ignored.
                let comes = !sys::is_ignored(signal).unwrap();
                assert_eq!((machine.terminated(), machine.terminated()), (comes, comes), "{signal}");
            })
            .join()
            .unwrap();
        }
    }

    #[test]
    fn a_broken_pipe_does_not_kill_the_process() {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:\t")).unwrap();
        let ignored = u64::from_str_radix(ignored, 16).unwrap();
        assert!(ignored & (1 << (Signal::SIGPIPE as i32 - 1)) != 0, "SigIgn: {ignored:x}");
    }

    #[test]
    fn its_own_namespace_is_recognised() {
        in_new_netns(|| {
            let machine = machine();
            let thread = format!("/proc/self/task/{}/ns/net", nix::unistd::gettid());
            assert!(machine.is_own_netns(Path::new(&thread)).unwrap());
            let other = new_netns();
            let other = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&other.as_fd()));
            assert!(!machine.is_own_netns(Path::new(&other)).unwrap());
            let error = machine.is_own_netns(Path::new("/nonexistent")).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NotFound);
            assert!(error.to_string().contains("failed to Statfs \"/nonexistent\": no such file or directory"));
        });
    }
}
