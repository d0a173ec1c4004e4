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
    pub(crate) fn add(&mut self, other: Counts) {
        self.syscalls += other.syscalls;
        self.programs += other.programs;
        self.threads += other.threads;
        self.peak = self.peak.max(other.peak);
        self.own_syscalls += other.own_syscalls;
        self.own_threads += other.own_threads;
        self.requests += other.requests;
        self.received += other.received;
    }

    /// Lowers each count to that of another run of the same call.
    pub(crate) fn lower_to(&mut self, other: &Counts) {
        self.syscalls = self.syscalls.min(other.syscalls);
        self.programs = self.programs.min(other.programs);
        self.threads = self.threads.min(other.threads);
        self.peak = self.peak.min(other.peak);
        self.own_syscalls = self.own_syscalls.min(other.own_syscalls);
        self.own_threads = self.own_threads.min(other.own_threads);
        self.requests = self.requests.min(other.requests);
        self.received = self.received.min(other.received);
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
        in_syscall: HashMap::new(),
        foreign: HashSet::new(),
        begun_calls: HashMap::new(),
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
                let is_new = !tracer.in_syscall.contains_key(&pid);
                tracer.in_syscall.entry(pid).or_default();
                let is_first_stop = is_new && signal == Signal::SIGSTOP;
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
    /// The known threads, and whether each is between the entry and the exit of a system call.
    in_syscall: HashMap<Pid, bool>,
    /// Threads of programs outside `folder`.
    foreign: HashSet<Pid>,
    /// The system call that a thread is in, if it is a [`SocketCall`].
    begun_calls: HashMap<Pid, SocketCall>,
    /// The netlink sockets: thread and descriptor.
    netlink_sockets: HashSet<(Pid, u64)>,
    /// Whether the root process has become the plugin. Nothing is counted before.
    has_begun: bool,
}

impl Tracer<'_> {
    /// Handles a stop at the entry or exit of a system call, and counts the call at its entry.
    fn on_syscall(&mut self, pid: Pid) {
        // The thread stops at the entry and at the exit of each call, alternately.
        let in_syscall = self.in_syscall.entry(pid).or_default();
        *in_syscall = !*in_syscall;
        if !self.has_begun {
            return;
        }
        if *in_syscall {
            self.counts.syscalls += 1;
            if self.foreign.contains(&pid) {
                return;
            }
            self.counts.own_syscalls += 1;
            if let Some(call) = registers::arguments(pid).and_then(SocketCall::new) {
                self.begun_calls.insert(pid, call);
            }
        } else if let Some(call) = self.begun_calls.remove(&pid)
            && let Some(returned) = registers::returned(pid)
        {
            self.on_socket_call(pid, call, returned);
        }
    }

    /// Counts a call that has ended and `returned` this value, if its socket is one of netlink.
    fn on_socket_call(&mut self, pid: Pid, call: SocketCall, returned: u64) {
        match call {
            SocketCall::Open => {
                self.netlink_sockets.insert((pid, returned));
            }
            SocketCall::Close { descriptor } => {
                self.netlink_sockets.remove(&(pid, descriptor));
            }
            SocketCall::Send { descriptor } | SocketCall::Receive { descriptor }
                if !self.netlink_sockets.contains(&(pid, descriptor)) => {}
            SocketCall::Send { .. } => self.counts.requests += 1,
            SocketCall::Receive { .. } => self.counts.received += usize::try_from(returned).unwrap_or(0),
        }
    }

    /// Counts an exec or a new thread, notes which program a new process runs, and reads the memory
    /// of a process that ends.
    fn on_event(&mut self, pid: Pid, event: i32) -> Result<()> {
        const EXEC: i32 = ptrace::Event::PTRACE_EVENT_EXEC as i32;
        const CLONE: i32 = ptrace::Event::PTRACE_EVENT_CLONE as i32;
        const FORK: i32 = ptrace::Event::PTRACE_EVENT_FORK as i32;
        const VFORK: i32 = ptrace::Event::PTRACE_EVENT_VFORK as i32;
        const EXIT: i32 = ptrace::Event::PTRACE_EVENT_EXIT as i32;
        match event {
            EXEC => {
                // The exit of the `execve` call is still to come.
                self.in_syscall.insert(pid, true);
                // The first exec is that of the plugin itself.
                self.counts.programs += usize::from(self.has_begun);
                self.has_begun = true;
                match fs::read_link(format!("/proc/{pid}/exe")) {
                    Ok(program) if program.parent() == Some(self.folder) => self.foreign.remove(&pid),
                    _ => self.foreign.insert(pid),
                };
            }
            CLONE | FORK | VFORK => {
                // fork and vfork have their own events, so a clone is a new thread.
                if event == CLONE {
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
            EXIT => self.counts.peak = self.counts.peak.max(peak_memory(pid).unwrap_or(0)),
            _ => {}
        }
        Ok(())
    }
}

/// A system call on a socket, or one that may close a socket.
#[derive(Clone, Copy, Debug)]
enum SocketCall {
    /// Opens a netlink socket.
    Open,
    Close {
        descriptor: u64,
    },
    Send {
        descriptor: u64,
    },
    Receive {
        descriptor: u64,
    },
}

impl SocketCall {
    /// Returns what a system call does, by its number and its first argument; `None` for any other
    /// call.
    fn new((number, argument): (i64, u64)) -> Option<SocketCall> {
        const NETLINK: u64 = libc::AF_NETLINK as u64;
        match number {
            libc::SYS_socket => (argument == NETLINK).then_some(SocketCall::Open),
            libc::SYS_close => Some(SocketCall::Close { descriptor: argument }),
            libc::SYS_sendto | libc::SYS_sendmsg => Some(SocketCall::Send { descriptor: argument }),
            libc::SYS_recvfrom | libc::SYS_recvmsg => Some(SocketCall::Receive { descriptor: argument }),
            _ => None,
        }
    }
}

/// Reads a stopped thread's registers.
mod registers {
    use nix::sys::ptrace;
    use nix::unistd::Pid;

    /// Returns the number of the system call that the thread enters, and its first argument.
    pub(super) fn arguments(thread: Pid) -> Option<(i64, u64)> {
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
