//! Runs a plugin under ptrace and counts its system calls, programs, threads and netlink requests,
//! the bytes that it receives over netlink, and the memory of its largest process.
//!
//! The counts do not depend on the load of the machine, so a test can compare them. The memory is
//! read from each process as it ends (`VmHWM`), because the value of wait4 includes the parent's
//! memory before the exec.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use nix::libc;
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
    /// The part of `syscalls` that programs in the plugin's own folder make.
    pub(crate) own_syscalls: usize,
    /// The part of `threads` that programs in the plugin's own folder start.
    pub(crate) own_threads: usize,
    /// The datagrams that programs in the plugin's own folder send over netlink. A transaction of
    /// nf_tables is one.
    pub(crate) requests: usize,
    /// The bytes that programs in the plugin's own folder receive over netlink.
    pub(crate) received: usize,
}

impl Counts {
    /// Adds the counts of another call of the same chain. The peak is that of the larger one.
    pub(crate) fn add(&mut self, other: &Counts) {
        let peak = self.peak.max(other.peak);
        self.combine(other, |own, other| own + other);
        self.peak = peak;
    }

    /// Lowers each count to that of another run of the same call.
    pub(crate) fn lower_to(&mut self, other: &Counts) {
        self.combine(other, usize::min);
    }

    /// Replaces each count by its combination with the same count of `other`.
    fn combine(&mut self, other: &Counts, combine: fn(usize, usize) -> usize) {
        let Counts { syscalls, programs, threads, peak, own_syscalls, own_threads, requests, received } = self;
        for (own, other) in [
            (syscalls, other.syscalls),
            (programs, other.programs),
            (threads, other.threads),
            (peak, other.peak),
            (own_syscalls, other.own_syscalls),
            (own_threads, other.own_threads),
            (requests, other.requests),
            (received, other.received),
        ] {
            *own = combine(*own, other);
        }
    }
}

/// In a process that [`run`] started, waits for the tracer and execs the program to trace; returns
/// only if that fails, with the error. Returns `None` in every other process.
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
    // `/proc/self/exe` works even if a build has replaced this program's file.
    let mut command = call.command(Path::new("/proc/self/exe"), &streams)?;
    command.env(TRACEE, &call.program);
    let child = command.spawn().doing(format_args!("failed to run {call}"))?;
    let id = child.id();
    let root = Pid::from_raw(i32::try_from(id).doing(format_args!("invalid process ID {id} of {call}"))?);
    let folder = call.program.parent().unwrap_or(Path::new("/"));
    let (succeeded, counts) = follow(root, folder).doing(format_args!("failed to trace {call}"))?;
    Ok((streams.outcome(call, succeeded)?, counts))
}

/// Traces the process `root` and all its children to their end. Returns whether `root` succeeded,
/// and the counts; programs in `folder` are the plugin's own.
fn follow(root: Pid, folder: &Path) -> Result<(bool, Counts)> {
    use ptrace::Options;
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
    resume(root, None)?;
    let mut tracer = Tracer {
        folder,
        counts: Counts::default(),
        known: HashSet::new(),
        begun_calls: HashMap::new(),
        foreign: HashSet::new(),
        netlink_sockets: HashSet::new(),
        has_begun: false,
    };
    loop {
        match waitpid(None, Some(WaitPidFlag::__WALL)).doing("failed to wait for the traced processes")? {
            WaitStatus::PtraceSyscall(pid) => {
                tracer.on_syscall(pid);
                resume(pid, None)?;
            }
            WaitStatus::PtraceEvent(pid, _, event) => {
                tracer.on_event(pid, event)?;
                resume(pid, None)?;
            }
            WaitStatus::Stopped(pid, signal) => {
                // A new thread or process begins with a SIGSTOP, which must not be delivered.
                let is_first_stop = tracer.known.insert(pid) && signal == Signal::SIGSTOP;
                resume(pid, (!is_first_stop).then_some(signal))?;
            }
            WaitStatus::Exited(pid, status) if pid == root => return Ok((status == 0, tracer.counts)),
            WaitStatus::Signaled(pid, signal, _) if pid == root => {
                return Err(Error::new(format!("its process was ended by {signal}")));
            }
            _ => {}
        }
    }
}

/// Continues a stopped thread until its next system call or event. Delivers `signal`, if there is
/// one, to the thread.
fn resume(pid: Pid, signal: Option<Signal>) -> Result<()> {
    match ptrace::syscall(pid, signal) {
        // ESRCH: the thread was killed meanwhile; `waitpid` reports its end later.
        Ok(()) | Err(nix::errno::Errno::ESRCH) => Ok(()),
        Err(errno) => Err(errno).doing(format_args!("failed to resume {pid}")),
    }
}

/// The counts so far, and what is known about the traced threads.
struct Tracer<'a> {
    /// The plugin's own folder.
    folder: &'a Path,
    counts: Counts,
    /// The threads that have been stopped by a signal.
    known: HashSet<Pid>,
    /// The number and the first argument of the system call that a thread has begun and not ended.
    begun_calls: HashMap<Pid, (i64, u64)>,
    /// Threads of programs outside `folder`.
    foreign: HashSet<Pid>,
    /// The netlink sockets: thread and descriptor.
    netlink_sockets: HashSet<(Pid, u64)>,
    /// Whether the root process has become the plugin. Nothing is counted before.
    has_begun: bool,
}

impl Tracer<'_> {
    /// Handles a stop of a thread: the entry of a system call and its exit, alternately. Counts the
    /// call at its entry, and what it does with a netlink socket at its exit.
    fn on_syscall(&mut self, pid: Pid) {
        const NETLINK: u64 = libc::AF_NETLINK as u64;
        let is_own = self.has_begun && !self.foreign.contains(&pid);
        let Some((call, argument)) = self.begun_calls.remove(&pid) else {
            self.begun_calls.insert(pid, registers::call(pid).unwrap_or_default());
            self.counts.syscalls += usize::from(self.has_begun);
            self.counts.own_syscalls += usize::from(is_own);
            return;
        };
        let Some(returned) = registers::returned(pid).filter(|_| is_own) else { return };
        match call {
            libc::SYS_socket if argument == NETLINK => drop(self.netlink_sockets.insert((pid, returned))),
            libc::SYS_close => drop(self.netlink_sockets.remove(&(pid, argument))),
            _ if !self.netlink_sockets.contains(&(pid, argument)) => {}
            libc::SYS_sendto | libc::SYS_sendmsg => self.counts.requests += 1,
            libc::SYS_recvfrom | libc::SYS_recvmsg => {
                self.counts.received += usize::try_from(returned).unwrap_or_default();
            }
            _ => {}
        }
    }

    /// Counts an exec or a new thread, notes which program a new process runs, and reads the memory
    /// of a process that ends.
    fn on_event(&mut self, pid: Pid, event: i32) -> Result<()> {
        match event {
            libc::PTRACE_EVENT_EXEC => {
                // The exit of the `execve` call is still to come.
                self.begun_calls.entry(pid).or_default();
                // The first exec is that of the plugin itself.
                self.counts.programs += usize::from(self.has_begun);
                self.has_begun = true;
                match fs::read_link(format!("/proc/{pid}/exe")) {
                    Ok(program) if program.parent() == Some(self.folder) => self.foreign.remove(&pid),
                    _ => self.foreign.insert(pid),
                };
            }
            libc::PTRACE_EVENT_CLONE | libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK => {
                // fork and vfork have their own events, so a clone is a new thread.
                if event == libc::PTRACE_EVENT_CLONE {
                    self.counts.threads += usize::from(self.has_begun);
                    self.counts.own_threads += usize::from(self.has_begun && !self.foreign.contains(&pid));
                }
                let child = ptrace::getevent(pid)
                    .doing(format_args!("failed to read the ID of the thread or process that {pid} created"))?;
                // Until an exec, a thread or process runs the program of its creator.
                if self.foreign.contains(&pid) {
                    let child = i32::try_from(child)
                        .doing(format_args!("invalid ID {child} of a thread or process that {pid} created"))?;
                    self.foreign.insert(Pid::from_raw(child));
                }
            }
            libc::PTRACE_EVENT_EXIT => self.counts.peak = self.counts.peak.max(peak_memory(pid).unwrap_or(0)),
            _ => {}
        }
        Ok(())
    }
}

/// Reads a stopped thread's registers.
mod registers {
    use nix::sys::ptrace;
    use nix::unistd::Pid;

    /// Returns the number of the system call that the thread enters, and its first argument.
    pub(super) fn call(thread: Pid) -> Option<(i64, u64)> {
        let registers = ptrace::getregs(thread).ok()?;
        #[cfg(target_arch = "x86_64")]
        let call = (registers.orig_rax.cast_signed(), registers.rdi);
        #[cfg(target_arch = "aarch64")]
        let call = (registers.regs[8].cast_signed(), registers.regs[0]);
        Some(call)
    }

    /// Returns the result of the system call that the thread leaves; `None` for an error.
    pub(super) fn returned(thread: Pid) -> Option<u64> {
        let registers = ptrace::getregs(thread).ok()?;
        #[cfg(target_arch = "x86_64")]
        let value = registers.rax;
        #[cfg(target_arch = "aarch64")]
        let value = registers.regs[0];
        (value.cast_signed() >= 0).then_some(value)
    }
}

/// Returns the largest memory that a process has had, in KiB; `None` if it cannot be read.
fn peak_memory(pid: Pid) -> Option<usize> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?.trim().strip_suffix(" kB")?.trim().parse().ok()
}
