//! Runs a plugin under ptrace and counts its system calls, programs and threads, and the memory of
//! its largest process.
//!
//! The counts do not depend on the load of the machine, so a test can compare them. The memory is
//! read from each process as it ends (`VmHWM`), because the value of wait4 includes the parent's
//! memory before the exec.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use nix::sys::ptrace;
use nix::sys::signal::{Signal, raise};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde_json::Value;

use crate::call::{Call, Streams};
use crate::error::{Doing as _, Error, Result};

/// The environment variable that makes this program stop for its tracer and then exec the program
/// that the variable names.
const TRACEE: &str = "CNI_BENCH_TRACEE";

/// What one run did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// System calls of all processes and threads of the plugin, after the exec of the plugin.
    pub(crate) syscalls: usize,
    /// Programs that the plugin started.
    pub(crate) programs: usize,
    /// Threads that the plugin started, in all its processes.
    pub(crate) threads: usize,
    /// The memory of the largest process, in KiB.
    pub(crate) peak: usize,
    /// Of the system calls, those of programs in the plugin's own folder.
    pub(crate) own_syscalls: usize,
    /// Of the threads, those of programs in the plugin's own folder.
    pub(crate) own_threads: usize,
}

impl Counts {
    /// Adds what another call of the same chain did.
    pub(crate) fn add(&mut self, other: Counts) {
        self.syscalls += other.syscalls;
        self.programs += other.programs;
        self.threads += other.threads;
        self.peak = self.peak.max(other.peak);
        self.own_syscalls += other.own_syscalls;
        self.own_threads += other.own_threads;
    }
}

/// Replaces this process by the program to trace, if [`run`] started this process for that.
/// Otherwise returns `None`. Returns an error if the exec failed.
pub(crate) fn become_tracee() -> Option<Error> {
    let program = std::env::var_os(TRACEE)?;
    let traced = ptrace::traceme().and_then(|()| raise(Signal::SIGSTOP));
    let error = match traced {
        Ok(()) => Command::new(&program).env_remove(TRACEE).exec().to_string(),
        Err(errno) => errno.to_string(),
    };
    Some(Error::new(format!("failed to run {}: {error}", program.display())))
}

/// Runs a plugin, and returns its result and counts. Fails if the plugin fails.
pub(crate) fn run(call: &Call, scratch: &Path) -> Result<(Value, Counts)> {
    let mut streams = Streams::new(scratch, 0, &call.conf)?;
    // Not this program's path: a build may have replaced the file.
    let mut command = call.command(Path::new("/proc/self/exe"), &streams)?;
    command.env(TRACEE, &call.program);
    let child = command.spawn().doing(format_args!("failed to run {call}"))?;
    let root = Pid::from_raw(i32::try_from(child.id()).doing("invalid process ID of a plugin")?);
    let folder = call.program.parent().unwrap_or(Path::new("/"));
    let (succeeded, counts) = follow(root, folder).doing(format_args!("failed to trace {call}"))?;
    Ok((streams.outcome(call, succeeded)?, counts))
}

/// Traces the process `root` and all its children to their end. Returns whether `root` succeeded,
/// and the counts; programs in `folder` are the plugin's own.
fn follow(root: Pid, folder: &Path) -> Result<(bool, Counts)> {
    use ptrace::Options;
    const EXEC: i32 = ptrace::Event::PTRACE_EVENT_EXEC as i32;
    const CLONE: i32 = ptrace::Event::PTRACE_EVENT_CLONE as i32;
    const FORK: i32 = ptrace::Event::PTRACE_EVENT_FORK as i32;
    const VFORK: i32 = ptrace::Event::PTRACE_EVENT_VFORK as i32;
    const EXIT: i32 = ptrace::Event::PTRACE_EVENT_EXIT as i32;
    let mut counts = Counts::default();
    // The known threads, and whether each is between the entry and the exit of a system call.
    let mut in_syscall: HashMap<Pid, bool> = HashMap::new();
    // Threads of programs outside `folder`.
    let mut foreign: HashSet<Pid> = HashSet::new();
    // Nothing is counted before the process has become the plugin.
    let mut begun = false;
    match waitpid(root, None).doing("failed to wait until its process stops")? {
        WaitStatus::Stopped(_, Signal::SIGSTOP) => {}
        other => return Err(Error::new(format!("its process did not stop to be traced: {other:?}"))),
    }
    let options = Options::PTRACE_O_TRACESYSGOOD
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_TRACEFORK
        | Options::PTRACE_O_TRACEVFORK
        | Options::PTRACE_O_TRACEEXEC
        | Options::PTRACE_O_TRACEEXIT
        | Options::PTRACE_O_EXITKILL;
    ptrace::setoptions(root, options).doing("failed to set the options of ptrace")?;
    // Continues a stopped thread until its next system call or event.
    let resume = |pid: Pid, signal: Option<Signal>| match ptrace::syscall(pid, signal) {
        // The thread was killed meanwhile; `waitpid` reports its end later.
        Ok(()) | Err(nix::errno::Errno::ESRCH) => Ok(()),
        Err(errno) => Err(errno).doing(format_args!("failed to resume {pid}")),
    };
    resume(root, None)?;
    loop {
        match waitpid(None, Some(WaitPidFlag::__WALL)).doing("failed to wait for the traced processes")? {
            WaitStatus::PtraceSyscall(pid) => {
                let is_entry = in_syscall.entry(pid).or_default();
                *is_entry = !*is_entry;
                if *is_entry && begun {
                    counts.syscalls += 1;
                    counts.own_syscalls += usize::from(!foreign.contains(&pid));
                }
                resume(pid, None)?;
            }
            WaitStatus::PtraceEvent(pid, _, event) => {
                match event {
                    EXEC => {
                        // The exit of the `execve` call is still to come.
                        in_syscall.insert(pid, true);
                        counts.programs += usize::from(begun);
                        begun = true;
                        match fs::read_link(format!("/proc/{pid}/exe")) {
                            Ok(program) if program.parent() == Some(folder) => foreign.remove(&pid),
                            _ => foreign.insert(pid),
                        };
                    }
                    CLONE | FORK | VFORK => {
                        // fork and vfork have events of their own, so a clone is a new thread.
                        if event == CLONE {
                            counts.threads += usize::from(begun);
                            counts.own_threads += usize::from(begun && !foreign.contains(&pid));
                        }
                        let child = ptrace::getevent(pid).doing("failed to read the ID of a new thread or process")?;
                        // Until an exec, a thread or process runs the program of its creator.
                        if foreign.contains(&pid) {
                            foreign.insert(Pid::from_raw(i32::try_from(child).doing("invalid ID of a new thread")?));
                        }
                    }
                    EXIT => counts.peak = counts.peak.max(high_water(pid).unwrap_or(0)),
                    _ => {}
                }
                resume(pid, None)?;
            }
            WaitStatus::Stopped(pid, signal) => {
                // A new thread or child begins with a stop that no signal caused.
                let is_new = !in_syscall.contains_key(&pid);
                in_syscall.entry(pid).or_default();
                resume(pid, Some(signal).filter(|signal| !(is_new && *signal == Signal::SIGSTOP)))?;
            }
            WaitStatus::Exited(pid, status) if pid == root => return Ok((status == 0, counts)),
            WaitStatus::Signaled(pid, signal, _) if pid == root => {
                return Err(Error::new(format!("its process was ended by {signal}")));
            }
            _ => {}
        }
    }
}

/// Returns the largest memory that a process has had, in KiB; `None` if it cannot be read.
fn high_water(pid: Pid) -> Option<usize> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?.trim().strip_suffix(" kB")?.trim().parse().ok()
}
