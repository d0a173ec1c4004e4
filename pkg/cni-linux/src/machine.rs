//! Signals, the clock and child processes of this process: the real [`Machine`].
//!
//! SIGTERM, SIGINT and SIGHUP all end the call. They are blocked and read from a signalfd, without
//! handlers. Every wait polls that descriptor too, so after a signal the wait fails and the
//! rollback runs as after any other error. Comments that mention SIGTERM mean all three signals.
//!
//! Signals are blocked per thread, and a new thread inherits the mask of the thread that creates
//! it. So `main` calls [`LinuxMachine::install`] first. A signal that is ignored (nohup) must not
//! be blocked, because a signalfd would report it. SIGPIPE is ignored by Rust's runtime.

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

/// The signals that end the call: SIGTERM of a runtime, SIGINT and SIGHUP of a terminal.
const ENDING: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

/// Returns [`ENDING`] as a set.
pub(crate) fn ending() -> SigSet {
    ENDING.into_iter().collect()
}

/// The operating system of this process.
#[derive(Debug)]
pub struct LinuxMachine {
    signals: SignalFd,
    /// Whether a signal of [`ENDING`] has been read from `signals`.
    terminated: Cell<bool>,
}

impl LinuxMachine {
    /// Blocks SIGTERM, SIGINT, SIGHUP and SIGCHLD in the calling thread and in the threads that it
    /// will create, and opens a signalfd for them. Signals that are ignored stay ignored.
    ///
    /// Also blocks SIGXFSZ, so that a write beyond RLIMIT_FSIZE fails with EFBIG. The signal would
    /// end this process without an answer and without a rollback.
    ///
    /// # Errors
    /// The kernel refuses a call.
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
    /// Whether a signal that ends the call had come when [`terminated`](Machine::terminated) was
    /// last called.
    pub(crate) fn was_terminated(&self) -> bool {
        self.terminated.get()
    }
}

impl AsFd for LinuxMachine {
    /// Returns the signalfd, which is readable when a signal has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }
}

impl Machine for LinuxMachine {
    fn is_own_netns(&self, path: &Path) -> io::Result<bool> {
        Ok(Netns::is_current(path)?)
    }

    fn terminated(&self) -> bool {
        // Reading a signal removes it, so the field keeps it. SIGCHLD only ends the poll of
        // `child`.
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

/// Waits until a descriptor is ready, at most for `time_left` if that is given. May return early
/// after EINTR, so callers check the descriptors or the time again.
///
/// # Errors
/// The kernel refuses the call.
pub(crate) fn wait_ready(fds: &mut [PollFd<'_>], time_left: Option<Duration>) -> io::Result<()> {
    let timeout = match time_left {
        None => PollTimeout::NONE,
        // Rounded up to whole milliseconds. Rounded down, the caller's loop would spin during the
        // last one.
        Some(time_left) => PollTimeout::try_from(time_left.as_millis() + 1).unwrap_or(PollTimeout::MAX),
    };
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
