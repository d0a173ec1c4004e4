//! What a stopped tracee is about to do, and making it not do it: the part that knows the
//! processor.

use nix::errno::Errno;
use nix::libc;
use nix::sys::ptrace;
use nix::unistd::Pid;

use crate::probe::Probed;

/// At which end of a call a tracee has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    Entry,
    Exit,
}

/// Whether plugins can be traced here.
///
/// # Errors
/// Why not.
pub fn supported() -> Probed {
    if cfg!(all(target_arch = "x86_64", target_env = "gnu")) {
        Ok(())
    } else {
        Err("the tests' tracer knows x86_64 with glibc alone".into())
    }
}

#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
mod machine {
    use super::{Errno, Pid, Stop, libc, ptrace};

    pub(crate) fn stop(thread: Pid) -> Option<Stop> {
        match ptrace::syscall_info(thread).ok()?.op {
            libc::PTRACE_SYSCALL_INFO_ENTRY => Some(Stop::Entry),
            libc::PTRACE_SYSCALL_INFO_EXIT => Some(Stop::Exit),
            _ => None,
        }
    }

    pub(crate) fn number(thread: Pid) -> Option<i64> {
        ptrace::getregs(thread).ok().map(|registers| registers.orig_rax.cast_signed())
    }

    pub(crate) fn first_argument(thread: Pid) -> Option<u64> {
        ptrace::getregs(thread).ok().map(|registers| registers.rdi)
    }

    /// A number that no call has: the kernel makes none.
    pub(crate) fn skip_call(thread: Pid) {
        let mut registers = ptrace::getregs(thread).expect("a stopped tracee has registers");
        registers.orig_rax = u64::MAX;
        ptrace::setregs(thread, registers).expect("a stopped tracee takes registers");
    }

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

/// Calls that read or wait: those that a signal interrupts.
const WAITING: Calls = calls! {
    SYS_read SYS_readv SYS_write SYS_writev SYS_recvfrom SYS_recvmsg SYS_sendto SYS_sendmsg SYS_sendmmsg SYS_ppoll
    SYS_epoll_pwait SYS_flock SYS_wait4 SYS_waitid
};

/// What cannot fail, or what no program survives: memory, signals, threads, its own end.
const SURE: Calls = calls! {
    SYS_mmap SYS_munmap SYS_mprotect SYS_brk SYS_mremap SYS_madvise SYS_rt_sigaction SYS_rt_sigprocmask SYS_sigaltstack
    SYS_rt_sigreturn SYS_futex SYS_exit SYS_exit_group SYS_set_tid_address SYS_set_robust_list SYS_rseq SYS_gettid
    SYS_getpid SYS_getppid SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_sched_yield SYS_restart_syscall
    SYS_clock_gettime SYS_umask SYS_tkill SYS_tgkill SYS_kill SYS_prlimit64
};

/// The others that are worth a name in a report.
const OTHERS: Calls = calls! {
    SYS_openat SYS_close SYS_socket SYS_bind SYS_getsockname SYS_setsockopt SYS_getsockopt SYS_connect SYS_fcntl SYS_fstat
    SYS_newfstatat SYS_statx SYS_statfs SYS_fstatfs SYS_lseek SYS_pread64 SYS_pwrite64 SYS_ftruncate SYS_linkat
    SYS_unlinkat SYS_renameat SYS_renameat2 SYS_mkdirat SYS_utimensat SYS_getdents64 SYS_getrandom SYS_setns SYS_unshare
    SYS_clone SYS_clone3 SYS_execve SYS_prctl SYS_pipe2 SYS_dup SYS_dup3 SYS_epoll_create1 SYS_epoll_ctl SYS_eventfd2
    SYS_signalfd4 SYS_pidfd_open SYS_ioctl SYS_readlinkat SYS_faccessat SYS_faccessat2 SYS_fchmod SYS_fchmodat
    SYS_setpgid SYS_socketpair SYS_uname SYS_getcwd SYS_chdir
};

/// The older ones, which newer processors do not have.
#[cfg(target_arch = "x86_64")]
mod older {
    use super::{Calls, libc};

    pub(super) const WAITING: Calls = calls! { SYS_poll SYS_epoll_wait SYS_select };
    pub(super) const SURE: Calls = calls! { SYS_arch_prctl SYS_getpgrp SYS_time };
    pub(super) const OTHERS: Calls = calls! {
        SYS_open SYS_stat SYS_lstat SYS_access SYS_fork SYS_vfork SYS_pipe SYS_dup2 SYS_mkdir SYS_unlink SYS_rename
        SYS_link SYS_readlink SYS_chmod SYS_epoll_create SYS_eventfd SYS_rmdir SYS_symlink
    };
}

#[cfg(not(target_arch = "x86_64"))]
mod older {
    use super::Calls;

    pub(super) const WAITING: Calls = &[];
    pub(super) const SURE: Calls = &[];
    pub(super) const OTHERS: Calls = &[];
}

fn find(lists: &[Calls], number: i64) -> Option<&'static str> {
    lists.iter().copied().flatten().find(|(known, _)| *known == number).map(|(_, name)| &name["SYS_".len()..])
}

/// The name of a call; its number if it is in no list.
pub(super) fn name(number: i64) -> String {
    let lists = [WAITING, older::WAITING, OTHERS, older::OTHERS, SURE, older::SURE];
    find(&lists, number).map_or_else(|| format!("call {number}"), str::to_owned)
}

/// Whether a signal can interrupt it.
pub(super) fn waits(number: i64) -> bool {
    find(&[WAITING, older::WAITING], number).is_some()
}

/// Whether there is no sense in letting the call that this thread is about to make fail like this:
/// it cannot, or no process survives it.
pub(super) fn cannot_fail(thread: Pid, number: i64, errno: Errno) -> bool {
    if find(&[SURE, older::SURE], number).is_some() {
        return true;
    }
    match name(number).as_str() {
        // On a descriptor that is one, the kernel knows a signal and nothing else; tokio panics at
        // others, rightly.
        "epoll_wait" | "epoll_pwait" => errno != Errno::EINTR,
        // A descriptor is closed whatever close returns; one that is not closed would be another
        // fault.
        "close" => true,
        // Bytes by chance there always are; a policy may forbid to ask.
        "getrandom" => !matches!(errno, Errno::EINTR | Errno::EPERM),
        "write" => argument(thread).is_some_and(|target| target.contains("eventfd")),
        // How the standard library learns of a child's exec. It waits forever for a child
        // that waits for us.
        "recvfrom" => argument(thread).is_some_and(|target| is_local(thread, &target)),
        _ => false,
    }
}

/// What the descriptor is that is the call's first argument.
fn argument(thread: Pid) -> Option<String> {
    let target = std::fs::read_link(format!("/proc/{thread}/fd/{}", first_argument(thread)?)).ok()?;
    Some(target.to_string_lossy().into_owned())
}

/// Whether it is a socket between processes.
fn is_local(thread: Pid, target: &str) -> bool {
    let Some(inode) = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')) else { return false };
    let sockets = std::fs::read_to_string(format!("/proc/{thread}/net/unix")).unwrap_or_default();
    sockets.lines().any(|line| line.split_whitespace().nth(6) == Some(inode))
}

/// Whether the thread reads its standard input: the first thing a plugin does for itself. The
/// loader of a program that is not linked statically reads before that, the files of its libraries.
pub(super) fn reads_stdin(thread: Pid, number: i64) -> bool {
    [libc::SYS_read, libc::SYS_readv].contains(&number) && first_argument(thread) == Some(0)
}
