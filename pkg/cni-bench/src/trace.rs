//! Runs a plugin under ptrace and counts its system calls, programs, threads and netlink requests,
//! the bytes that it receives over netlink, and the memory of its largest process.
//!
//! The counts do not depend on the load of the machine, so a test can compare them. The memory is
//! read from each process as it ends (`VmHWM`), because the value of wait4 includes the parent's
//! memory before the exec.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;

use nix::libc;
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde::Serialize;
use serde_json::Value;

use crate::call::Call;
use crate::error::{Doing as _, Result};

/// The script of a shell that stops itself and, when it is continued, becomes the program `$0`, in
/// the environment that the shell was given.
const HOLDER: &str = "kill -STOP $$ && unset PWD && exec \"$0\"";

/// What one or more calls did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Counts {
    /// The system calls of programs in the plugin's own folder, after the exec of the plugin.
    pub(crate) syscalls: usize,
    /// Programs that the plugin started.
    pub(crate) programs: usize,
    /// The threads that programs in the plugin's own folder start.
    pub(crate) threads: usize,
    /// The memory of the largest process, in KiB.
    #[serde(rename = "peak_kib")]
    pub(crate) peak: usize,
    /// The datagrams that programs in the plugin's own folder send over netlink. A transaction of
    /// nf_tables is one.
    #[serde(rename = "netlink_requests")]
    pub(crate) requests: usize,
    /// The bytes that programs in the plugin's own folder receive over netlink.
    #[serde(rename = "netlink_bytes_received")]
    pub(crate) received: usize,
}

impl Counts {
    /// Lowers each count of the guard's table to that of another run of the same call.
    pub(crate) fn lower_to(&mut self, other: &Counts) {
        self.syscalls = self.syscalls.min(other.syscalls);
        self.programs = self.programs.min(other.programs);
        self.threads = self.threads.min(other.threads);
        self.requests = self.requests.min(other.requests);
        self.received = self.received.min(other.received);
    }
}

/// Runs a plugin, adds its counts to `total`, and returns its result. Fails if the plugin fails.
pub(crate) fn run(call: &Call, total: &mut Counts) -> Result<Value> {
    let (mut command, streams) = call.command(Path::new("/bin/sh"))?;
    command.args(["-c", HOLDER]).arg(&call.program);
    let id = command.spawn().doing(format_args!("failed to run {call}"))?.id();
    let root = Pid::from_raw(i32::try_from(id).doing(format_args!("invalid process ID {id} of {call}"))?);
    let folder = call.program.parent().unwrap_or(Path::new("/"));
    let succeeded = follow(root, folder, total).doing(format_args!("failed to trace {call}"))?;
    streams.outcome(call, succeeded)
}

/// Traces the process `root`, a shell with the script [`HOLDER`], and all its children until `root`
/// has ended, and adds the counts to `counts`. Programs in `folder` are the plugin's own. Returns
/// whether `root` succeeded.
fn follow(root: Pid, folder: &Path, counts: &mut Counts) -> Result<bool> {
    use ptrace::Options;
    let options = Options::PTRACE_O_TRACESYSGOOD
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_TRACEFORK
        | Options::PTRACE_O_TRACEVFORK
        | Options::PTRACE_O_TRACEEXEC
        | Options::PTRACE_O_TRACEEXIT
        | Options::PTRACE_O_EXITKILL;
    waitpid(root, Some(WaitPidFlag::WUNTRACED)).doing("failed to wait until its process has stopped")?;
    ptrace::seize(root, options).doing("failed to attach to its process")?;
    kill(root, Signal::SIGCONT).doing("failed to continue its process")?;
    let mut tracer = Tracer {
        folder,
        counts,
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
            WaitStatus::Stopped(pid, signal) => resume(pid, Some(signal))?,
            WaitStatus::Exited(pid, status) if pid == root => return Ok(status == 0),
            WaitStatus::Signaled(pid, signal, _) if pid == root => {
                return Err(format!("its process was ended by {signal}"));
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
    counts: &'a mut Counts,
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
            self.counts.syscalls += usize::from(is_own);
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
                let is_own =
                    fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.parent() == Some(self.folder));
                match is_own {
                    true => self.foreign.remove(&pid),
                    false => self.foreign.insert(pid),
                };
                // The first program of the folder is the plugin itself.
                self.counts.programs += usize::from(self.has_begun);
                self.has_begun |= is_own;
            }
            libc::PTRACE_EVENT_CLONE | libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK => {
                // fork and vfork have their own events, so a clone is a new thread.
                if event == libc::PTRACE_EVENT_CLONE {
                    self.counts.threads += usize::from(self.has_begun && !self.foreign.contains(&pid));
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
