//! Reads and changes the system call at which a tracee has stopped: the part that depends on the
//! processor.

use nix::errno::Errno;
use nix::libc;
use nix::sys::ptrace;
use nix::unistd::Pid;

use crate::probe::Probed;

/// Whether a tracee has stopped before or after a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    Entry,
    Exit,
}

/// Probes whether plugins can be traced on this machine.
///
/// # Errors
/// The reason why not.
pub fn supported() -> Probed {
    if cfg!(all(target_arch = "x86_64", target_env = "gnu")) {
        Ok(())
    } else {
        Err("the tests' tracer supports only x86_64 with glibc".into())
    }
}

#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
mod machine {
    use super::{Errno, Pid, Stop, libc, ptrace};

    /// Returns where the thread has stopped; `None` if it is not at a call.
    pub(crate) fn stop(thread: Pid) -> Option<Stop> {
        match ptrace::syscall_info(thread).ok()?.op {
            libc::PTRACE_SYSCALL_INFO_ENTRY => Some(Stop::Entry),
            libc::PTRACE_SYSCALL_INFO_EXIT => Some(Stop::Exit),
            _ => None,
        }
    }

    /// Returns the number of the call.
    pub(crate) fn number(thread: Pid) -> Option<i64> {
        ptrace::getregs(thread).ok().map(|registers| registers.orig_rax.cast_signed())
    }

    /// Returns the first argument of the call.
    pub(crate) fn first_argument(thread: Pid) -> Option<u64> {
        ptrace::getregs(thread).ok().map(|registers| registers.rdi)
    }

    /// Makes the kernel skip the call, by giving it a number that no call has.
    pub(crate) fn skip_call(thread: Pid) {
        let mut registers = ptrace::getregs(thread).expect("a stopped tracee has registers");
        registers.orig_rax = u64::MAX;
        ptrace::setregs(thread, registers).expect("a stopped tracee takes registers");
    }

    /// Makes the call return this error.
    pub(crate) fn answer(thread: Pid, errno: Errno) {
        let mut registers = ptrace::getregs(thread).expect("a stopped tracee has registers");
        registers.rax = (-i64::from(errno as i32)).cast_unsigned();
        ptrace::setregs(thread, registers).expect("a stopped tracee takes registers");
    }
}

#[cfg(not(all(target_arch = "x86_64", target_env = "gnu")))]
mod machine {
    use super::{Errno, Pid, Stop};

    pub(crate) fn stop(_: Pid) -> Option<Stop> {
        None
    }

    pub(crate) fn number(_: Pid) -> Option<i64> {
        None
    }

    pub(crate) fn first_argument(_: Pid) -> Option<u64> {
        None
    }

    pub(crate) fn skip_call(_: Pid) {}

    pub(crate) fn answer(_: Pid, _: Errno) {}
}

use machine::first_argument;
pub(super) use machine::{answer, number, skip_call, stop};

macro_rules! calls {
    ($($call:ident)*) => { &[$((libc::$call, stringify!($call))),*] };
}

type Calls = &'static [(i64, &'static str)];

/// Calls that a signal may interrupt.
const WAITING: Calls = calls! {
    SYS_read SYS_readv SYS_write SYS_writev SYS_recvfrom SYS_recvmsg SYS_sendto SYS_sendmsg SYS_sendmmsg SYS_ppoll
    SYS_epoll_pwait SYS_flock SYS_wait4 SYS_waitid
};

/// Calls that cannot fail, or whose failure no program survives: memory, signals, threads, exit.
const CANNOT_FAIL: Calls = calls! {
    SYS_mmap SYS_munmap SYS_mprotect SYS_brk SYS_mremap SYS_madvise SYS_rt_sigaction SYS_rt_sigprocmask SYS_sigaltstack
    SYS_rt_sigreturn SYS_futex SYS_exit SYS_exit_group SYS_set_tid_address SYS_set_robust_list SYS_rseq SYS_gettid
    SYS_getpid SYS_getppid SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_sched_yield SYS_restart_syscall
    SYS_clock_gettime SYS_umask SYS_tkill SYS_tgkill SYS_kill SYS_prlimit64
};

/// Other calls that are shown with a name in a report.
const OTHERS: Calls = calls! {
    SYS_openat SYS_close SYS_socket SYS_bind SYS_getsockname SYS_setsockopt SYS_getsockopt SYS_connect SYS_fcntl SYS_fstat
    SYS_newfstatat SYS_statx SYS_statfs SYS_fstatfs SYS_lseek SYS_pread64 SYS_pwrite64 SYS_ftruncate SYS_linkat
    SYS_unlinkat SYS_renameat SYS_renameat2 SYS_mkdirat SYS_utimensat SYS_getdents64 SYS_getrandom SYS_setns SYS_unshare
    SYS_clone SYS_clone3 SYS_execve SYS_prctl SYS_pipe2 SYS_dup SYS_dup3 SYS_epoll_create1 SYS_epoll_ctl SYS_eventfd2
    SYS_signalfd4 SYS_pidfd_open SYS_ioctl SYS_readlinkat SYS_faccessat SYS_faccessat2 SYS_fchmod SYS_fchmodat
    SYS_setpgid SYS_socketpair SYS_uname SYS_getcwd SYS_chdir
};

/// Older calls, which newer processors do not have.
#[cfg(target_arch = "x86_64")]
mod older {
    use super::{Calls, libc};

    pub(super) const WAITING: Calls = calls! { SYS_poll SYS_epoll_wait SYS_select };
    pub(super) const CANNOT_FAIL: Calls = calls! { SYS_arch_prctl SYS_getpgrp SYS_time };
    pub(super) const OTHERS: Calls = calls! {
        SYS_open SYS_stat SYS_lstat SYS_access SYS_fork SYS_vfork SYS_pipe SYS_dup2 SYS_mkdir SYS_unlink SYS_rename
        SYS_link SYS_readlink SYS_chmod SYS_epoll_create SYS_eventfd SYS_rmdir SYS_symlink
    };
}

#[cfg(not(target_arch = "x86_64"))]
mod older {
    use super::Calls;

    pub(super) const WAITING: Calls = &[];
    pub(super) const CANNOT_FAIL: Calls = &[];
    pub(super) const OTHERS: Calls = &[];
}

/// Returns the name of the call with this number, if it is in one of the lists.
fn find(lists: &[Calls], number: i64) -> Option<&'static str> {
    lists.iter().copied().flatten().find(|(known, _)| *known == number).map(|(_, name)| &name["SYS_".len()..])
}

/// Returns the name of a call, or its number if it is in none of the lists.
pub(super) fn name(number: i64) -> String {
    let lists = [WAITING, older::WAITING, OTHERS, older::OTHERS, CANNOT_FAIL, older::CANNOT_FAIL];
    find(&lists, number).map_or_else(|| format!("call {number}"), str::to_owned)
}

/// Whether a signal may interrupt the call.
pub(super) fn waits(number: i64) -> bool {
    find(&[WAITING, older::WAITING], number).is_some()
}

/// Whether the call that this thread is about to make cannot fail with `errno`, or no program
/// survives that.
pub(super) fn cannot_fail(thread: Pid, number: i64, errno: Errno) -> bool {
    if find(&[CANNOT_FAIL, older::CANNOT_FAIL], number).is_some() {
        return true;
    }
    match name(number).as_str() {
        // With a valid descriptor it only fails because of a signal. Tokio panics at other errors.
        "epoll_wait" | "epoll_pwait" => errno != Errno::EINTR,
        // The kernel closes the descriptor even if it returns an error, but a skipped call does
        // not.
        "close" => true,
        // Random bytes are always available, but a policy may forbid the call.
        "getrandom" => !matches!(errno, Errno::EINTR | Errno::EPERM),
        "write" => argument(thread).is_some_and(|target| target.contains("eventfd")),
        // The standard library waits so for the exec of a child. After an error it would wait
        // forever for the child, which waits for it.
        "recvfrom" => argument(thread).is_some_and(|target| is_local(thread, &target)),
        _ => false,
    }
}

/// Returns what the descriptor in the call's first argument leads to, as `/proc` shows it.
fn argument(thread: Pid) -> Option<String> {
    let target = std::fs::read_link(format!("/proc/{thread}/fd/{}", first_argument(thread)?)).ok()?;
    Some(target.to_string_lossy().into_owned())
}

/// Whether `target`, what a descriptor leads to, is a Unix socket.
fn is_local(thread: Pid, target: &str) -> bool {
    let Some(inode) = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')) else { return false };
    let sockets = std::fs::read_to_string(format!("/proc/{thread}/net/unix")).unwrap_or_default();
    sockets.lines().any(|line| line.split_whitespace().nth(6) == Some(inode))
}

/// Whether the call reads standard input. That is the end of a program's start: before, the loader
/// reads the files of its libraries.
pub(super) fn reads_stdin(thread: Pid, number: i64) -> bool {
    [libc::SYS_read, libc::SYS_readv].contains(&number) && first_argument(thread) == Some(0)
}
