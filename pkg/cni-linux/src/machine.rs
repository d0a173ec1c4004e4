//! Implements [`Machine`] for Linux: signals, the clock, running programs, comparing namespaces.
//!
//! SIGTERM, SIGINT and SIGHUP all ask this process to end; in this crate's comments, SIGTERM stands
//! for all three. They are blocked and read from a descriptor, without a signal handler. Every wait
//! that they can end polls that descriptor, so a rollback runs on the main thread, as after any
//! other failure.
//!
//! A signal is blocked per *thread*, and a new thread inherits the mask, so `main` calls
//! [`LinuxMachine::install`] first. The descriptor reports a blocked signal even if the signal is
//! ignored, so a SIGHUP that nohup has set to be ignored is not blocked. SIGPIPE is ignored by
//! Rust's runtime.

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

/// The signals that end this process: SIGTERM of a runtime, Ctrl-C and the hang-up of a terminal.
const TERMINATION: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

/// Signals whose default action ends the process at once, without a rollback, and which say nothing
/// that a plugin needs to know: those of timers and limits, which a process inherits from its
/// caller, and those that are free for users. A write beyond RLIMIT_FSIZE fails with EFBIG while
/// SIGXFSZ is blocked. SIGQUIT and the signals of faults end the process with a core dump on
/// purpose.
const BLOCKED: [Signal; 10] = [
    Signal::SIGALRM,
    Signal::SIGVTALRM,
    Signal::SIGPROF,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGIO,
    Signal::SIGPWR,
    Signal::SIGSTKFLT,
    Signal::SIGXCPU,
    Signal::SIGXFSZ,
];

/// Returns [`TERMINATION`] as a set.
pub(crate) fn termination_signals() -> SigSet {
    TERMINATION.into_iter().collect()
}

/// The machine that this process runs on.
#[derive(Debug)]
pub struct LinuxMachine {
    /// Readable when SIGCHLD or a signal of [`TERMINATION`] is pending.
    signals: SignalFd,
    /// Whether a signal of [`TERMINATION`] was read from `signals`.
    terminated: Cell<bool>,
}

impl LinuxMachine {
    /// Blocks SIGTERM, SIGINT, SIGHUP and SIGCHLD in the calling thread and the threads that it
    /// starts later, and opens a descriptor that reports them. If the parent process has set one
    /// of the first three to be ignored, that signal stays ignored and is not blocked.
    ///
    /// Also blocks the signals of `BLOCKED`.
    ///
    /// # Errors
    /// The kernel cannot create the descriptor.
    pub fn install() -> io::Result<LinuxMachine> {
        let mut reported = SigSet::from(Signal::SIGCHLD);
        for signal in TERMINATION {
            if !sys::is_ignored(signal)? {
                reported.add(signal);
            }
        }
        let mut blocked = reported;
        blocked.extend(BLOCKED);
        blocked.thread_block()?;
        let signals = SignalFd::with_flags(&reported, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        Ok(LinuxMachine { signals, terminated: Cell::new(false) })
    }

    /// Whether an earlier call of [`terminated`](Machine::terminated) has read a termination
    /// signal. Does not look for new signals.
    pub(crate) fn was_terminated(&self) -> bool {
        self.terminated.get()
    }
}

impl AsFd for LinuxMachine {
    /// Returns a descriptor that is readable when a signal is pending.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }
}

impl Machine for LinuxMachine {
    fn is_own_netns(&self, path: &Path) -> io::Result<bool> {
        Ok(Netns::is_current(path)?)
    }

    /// Whether SIGTERM, SIGINT or SIGHUP has arrived, now or earlier. Reads, and so removes, all
    /// pending signals from the descriptor.
    fn terminated(&self) -> bool {
        // A signal can be read only once, so its arrival is stored. SIGCHLD has only woken
        // `child::run`, which checks its child itself.
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

    /// Runs a program to its end, and logs the run if steps are logged. Fails as `child::run` does.
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

/// Waits until one of the descriptors is ready, or `time_left` has passed; `None` waits without a
/// bound. Also returns if a signal interrupts the wait, so callers check their condition again.
pub(crate) fn wait_ready(fds: &mut [PollFd<'_>], time_left: Option<Duration>) -> io::Result<()> {
    let timeout = match time_left {
        None => PollTimeout::NONE,
        Some(left) => {
            // Rounded up to whole milliseconds: rounded down to 0, the last millisecond would be a
            // busy loop.
            let milliseconds = left.as_millis().saturating_add(1);
            PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::MAX)
        }
    };
    match poll(fds, timeout) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether the last [`wait_ready`] found the descriptor ready, or its other end closed.
pub(crate) fn is_ready(fd: &PollFd<'_>) -> bool {
    // `None`, an event that nix does not know, counts as ready.
    fd.any() != Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, machine, new_netns};
    use nix::sys::signal::raise;

    #[test]
    fn a_termination_signal_is_remembered_unless_ignored() {
        for signal in TERMINATION {
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
    fn the_namespace_of_the_process_is_recognised() {
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
