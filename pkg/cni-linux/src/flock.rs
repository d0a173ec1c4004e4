//! Waiting for an `flock` that another process holds: with a deadline, open to SIGTERM, and naming
//! the holder.
//!
//! A free lock is taken at once. For a held one a second thread calls the blocking `flock` and so
//! keeps its turn in the kernel's queue, while the caller's thread waits for that thread, the
//! deadline, or a signal. The thread that lost its wait cannot be stopped: it gives the lock back
//! as soon as it gets it, since no caller takes the file from it.
//!
//! Owning the lock of a file proves nothing if the file has been removed or replaced meanwhile:
//! callers compare what is at the path with what they have locked.

use std::fs::{File, Metadata, TryLockError};
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use cni::machine::{Machine, OnSigterm};
use nix::poll::{PollFd, PollFlags};
use nix::sys::stat::{major, minor};

use crate::error::{Cause, Error};
use crate::machine::wait_ready;
use crate::netns::Netns;
use crate::watch::term_descriptor;

/// How long to wait.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// The end of the wait.
    pub deadline: Instant,
    /// The whole length of the wait, as the cause reports it.
    pub length: Duration,
}

/// Why a lock was not had.
#[derive(Debug)]
pub struct Refused {
    /// The deadline, a signal, or what the kernel refused.
    pub cause: Cause,
    /// After a wait, the process that holds the lock, as `process 12 (bridge)`; `None` if it is not
    /// visible from here.
    pub holder: Option<String>,
}

/// Locks the file, for as long as it is open. [`OnSigterm::Finish`] is for a rollback, which must
/// not be cut short by what caused it.
///
/// # Errors
/// The deadline came first, or, with [`OnSigterm::Kill`], SIGTERM, SIGINT or SIGHUP is pending
/// (which the machine must have blocked; it stays pending), or the kernel refused.
pub fn lock(file: File, machine: &dyn Machine, on_sigterm: OnSigterm, limit: Limit) -> Result<File, Refused> {
    let broken = |error: io::Error| Refused { cause: error.into(), holder: None };
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => break,
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(TryLockError::Error(error)) => return Err(broken(error)),
        }
    }
    let identity = file.metadata().map_err(broken)?;
    wait(file, machine, on_sigterm, limit).map_err(|cause| {
        let holder = (cause.is_deadline() || cause.is_terminated()).then(|| holder(&identity)).flatten();
        Refused { cause, holder }
    })
}

impl Netns {
    /// Locks the namespace itself, as long as this handle or the returned file is open. No file is
    /// created, and a process that locks any path to the namespace waits for this lock.
    ///
    /// # Errors
    /// Those of [`lock`], with the process that holds the lock.
    pub fn lock(&self, machine: &dyn Machine, on_sigterm: OnSigterm, length: Duration) -> crate::Result<File> {
        let path = self.path().display();
        let file = self.as_fd().try_clone_to_owned();
        let file = file.map_err(|error| Error::new(format_args!("failed to lock netns {path}"), error))?;
        let limit = Limit { deadline: machine.now() + length, length };
        lock(File::from(file), machine, on_sigterm, limit).map_err(|Refused { cause, holder }| {
            let holder = holder.map(|holder| format!(", which {holder} holds")).unwrap_or_default();
            Error::new(format_args!("failed to lock netns {path}{holder}"), cause)
        })
    }
}

fn wait(file: File, machine: &dyn Machine, on_sigterm: OnSigterm, limit: Limit) -> Result<File, Cause> {
    let sigterm = term_descriptor()?;
    let (woken, waker) = io::pipe()?;
    let (sender, receiver) = mpsc::channel();
    let body = move || {
        let result = loop {
            match file.lock() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result.map(|()| file),
            }
        };
        // If the caller waits no longer, the file comes back in the error and is closed, which
        // unlocks it.
        drop(sender.send(result));
        drop(waker);
    };
    thread::Builder::new().name("flock".into()).spawn(body)?;
    let mut is_pending = false;
    loop {
        if on_sigterm == OnSigterm::Kill && (is_pending || machine.terminated()) {
            return Err(Cause::terminated());
        }
        let left = limit.deadline.saturating_duration_since(machine.now());
        if left.is_zero() {
            return Err(Cause::deadline(limit.length));
        }
        let mut fds = [PollFd::new(woken.as_fd(), PollFlags::POLLIN), PollFd::new(sigterm.as_fd(), PollFlags::POLLIN)];
        let watched = if on_sigterm == OnSigterm::Kill { &mut fds[..] } else { &mut fds[..1] };
        wait_ready(watched, Some(left))?;
        let happened = |fd: &PollFd<'_>| fd.revents().is_some_and(|events| !events.is_empty());
        if happened(&fds[0]) {
            // The other thread closes its end after it has sent.
            return match receiver.try_recv() {
                Ok(result) => Ok(result?),
                Err(_) => Err(Cause::text("the waiting thread died")),
            };
        }
        is_pending = happened(&fds[1]);
    }
}

/// Returns the process that holds the lock of this file.
fn holder(file: &Metadata) -> Option<String> {
    let device = (major(file.dev()), minor(file.dev()));
    // Locks come and go while the list is read, and lines are lost by that: a second look.
    let look = || holder_in(&all().unwrap_or_default(), device, file.ino());
    let pid = look().or_else(look)?;
    Some(match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("process {pid} ({})", name.trim()),
        Err(_) => format!("process {pid}"),
    })
}

/// Reads `/proc/locks`, in pieces as large as possible: between two of them the list may change.
///
/// # Errors
/// It cannot be read.
pub fn all() -> io::Result<String> {
    let (mut text, mut piece) = (Vec::new(), vec![0; 1 << 16]);
    let mut file = File::open("/proc/locks")?;
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(String::from_utf8_lossy(&text).into_owned()),
            length => text.extend_from_slice(&piece[..length]),
        }
    }
}

/// Finds the holder in the text of `/proc/locks`. Lines with an arrow are waiters. Some file
/// systems show another device there than in `stat`, so an equal inode alone counts if nothing
/// matches better.
pub(crate) fn holder_in(locks: &str, device: (u64, u64), inode: u64) -> Option<u32> {
    let mut by_inode = None;
    for line in locks.lines() {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, "FLOCK", _, _, pid, file, ..] = words[..] else { continue };
        let [major, minor, number] = file.split(':').collect::<Vec<_>>()[..] else { continue };
        // Process 0: it is in a PID namespace that cannot be seen from here.
        let Some(pid) = pid.parse().ok().filter(|pid| *pid != 0 && number.parse() == Ok(inode)) else { continue };
        let hex = |digits| u64::from_str_radix(digits, 16);
        if (hex(major), hex(minor)) == (Ok(device.0), Ok(device.1)) {
            return Some(pid);
        }
        by_inode = by_inode.or(Some(pid));
    }
    by_inode
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{machine, new_netns};

    #[test]
    fn a_namespace_is_locked_by_whatever_path() {
        let (netns, machine) = (new_netns(), machine());
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&netns.as_fd()));
        let other = Netns::open(std::path::Path::new(&path)).unwrap();
        let held = netns.lock(&machine, OnSigterm::Finish, Duration::ZERO).unwrap();
        let refused = other.lock(&machine, OnSigterm::Finish, Duration::ZERO).unwrap_err();
        assert!(refused.is_deadline() && refused.to_string().starts_with(&format!("failed to lock netns {path}")));
        held.unlock().unwrap();
        other.lock(&machine, OnSigterm::Finish, Duration::ZERO).unwrap();
    }

    #[test]
    fn the_holder_is_found_among_waiters_and_other_locks() {
        let locks = "1: POSIX  ADVISORY  WRITE 10 fd:1a:77 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 0 fd:1a:77 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 11 fd:1b:77 0 EOF\n\
                     3: -> FLOCK  ADVISORY  WRITE 12 fd:1a:77 0 EOF\n\
                     4: FLOCK  ADVISORY  WRITE 13 fd:1a:77 0 EOF\n\
                     5: FLOCK  ADVISORY  WRITE 14 fd:1a:78 0 EOF\n";
        assert_eq!(holder_in(locks, (0xfd, 26), 77), Some(13));
        assert_eq!(holder_in(locks, (0, 33), 77), Some(11), "only the inode agrees");
        assert_eq!(holder_in(locks, (0xfd, 26), 79), None);
        assert_eq!(holder_in("nonsense\n1: FLOCK\n", (0, 0), 0), None);
    }
}
