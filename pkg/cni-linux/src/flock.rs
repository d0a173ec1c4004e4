//! Takes an `flock`, with a deadline, and reports the process that holds it.
//!
//! A free lock is taken at once. For a held lock, a second thread calls the blocking `flock`, so
//! that this process has its place in the kernel's queue. The calling thread waits for that thread,
//! the deadline, or a signal. After the deadline the second thread cannot be stopped. If it gets
//! the lock later, it closes the file, which releases the lock.
//!
//! While a process waits, the file may be removed or replaced. So callers must compare the file at
//! the path with the file that they have locked.

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

/// The bound of a wait.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// The end of the wait.
    pub deadline: Instant,
    /// The length of the wait, for the error message.
    pub length: Duration,
}

/// A lock that was not taken.
#[derive(Debug)]
pub struct Refused {
    /// The deadline, a signal, or the kernel's error.
    pub cause: Cause,
    /// The process that holds the lock, as `process 12 (bridge)`. `None` if it is not known, for
    /// example because it is in another PID namespace.
    pub holder: Option<String>,
}

/// Locks the file exclusively and returns it. Closing the file releases the lock. A rollback uses
/// [`OnSigterm::Finish`], so that the signal that has caused the rollback does not end the wait.
///
/// # Errors
/// The deadline has passed; with [`OnSigterm::Kill`], SIGTERM, SIGINT or SIGHUP has come (the
/// machine must have blocked them); or the kernel refuses.
pub fn lock(file: File, machine: &dyn Machine, on_sigterm: OnSigterm, limit: Limit) -> Result<File, Refused> {
    let failed = |error: io::Error| Refused { cause: error.into(), holder: None };
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => break,
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
    }
    let identity = file.metadata().map_err(failed)?;
    wait(file, machine, on_sigterm, limit).map_err(|cause| {
        let is_held = cause.is_deadline() || cause.is_terminated();
        let holder = if is_held { holder(&identity) } else { None };
        Refused { cause, holder }
    })
}

impl Netns {
    /// Locks the namespace itself, for at most `length`, and returns a file that holds the lock
    /// until it is closed. The lock belongs to the namespace, so it is the same for every path to
    /// it.
    ///
    /// # Errors
    /// Those of [`lock()`]; the message names the process that holds the lock.
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

/// Waits in a second thread for the lock of `file`; see the head of this module.
fn wait(file: File, machine: &dyn Machine, on_sigterm: OnSigterm, limit: Limit) -> Result<File, Cause> {
    let sigterm = term_descriptor()?;
    // The second thread closes its end of the pipe when it has a result.
    let (pipe, thread_end) = io::pipe()?;
    let (sender, receiver) = mpsc::channel();
    let lock_in_thread = move || {
        let result = loop {
            match file.lock() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result.map(|()| file),
            }
        };
        // If the receiver is gone, sending returns the file in the error, and dropping it releases
        // the lock.
        drop(sender.send(result));
        drop(thread_end);
    };
    thread::Builder::new().name("flock".into()).spawn(lock_in_thread)?;
    let mut is_pending = false;
    loop {
        if on_sigterm == OnSigterm::Kill && (is_pending || machine.terminated()) {
            return Err(Cause::terminated());
        }
        let left = limit.deadline.saturating_duration_since(machine.now());
        if left.is_zero() {
            return Err(Cause::deadline(limit.length));
        }
        let mut fds = [PollFd::new(pipe.as_fd(), PollFlags::POLLIN), PollFd::new(sigterm.as_fd(), PollFlags::POLLIN)];
        let polled = if on_sigterm == OnSigterm::Kill { &mut fds[..] } else { &mut fds[..1] };
        wait_ready(polled, Some(left))?;
        let is_ready = |fd: &PollFd<'_>| fd.revents().is_some_and(|events| !events.is_empty());
        if is_ready(&fds[0]) {
            // The thread closes its end after it has sent the result.
            return match receiver.try_recv() {
                Ok(result) => Ok(result?),
                Err(_) => Err(Cause::text("the waiting thread died")),
            };
        }
        is_pending = is_ready(&fds[1]);
    }
}

/// Returns the process that holds the lock of a file, as `process 12 (bridge)`, or `None` if it is
/// not visible in this PID namespace.
fn holder(file: &Metadata) -> Option<String> {
    let device = (major(file.dev()), minor(file.dev()));
    // While the list is read, other locks may be released, and lines get lost. So it is read twice
    // if the holder is missing.
    let find = || holder_in(&read_locks().unwrap_or_default(), device, file.ino());
    let pid = find().or_else(find)?;
    Some(match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("process {pid} ({})", name.trim()),
        Err(_) => format!("process {pid}"),
    })
}

/// Reads `/proc/locks`, in large pieces because the list may change between two of them.
///
/// # Errors
/// The file cannot be read.
pub fn read_locks() -> io::Result<String> {
    let (mut text, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    let mut file = File::open("/proc/locks")?;
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(String::from_utf8_lossy(&text).into_owned()),
            length => text.extend_from_slice(&buffer[..length]),
        }
    }
}

/// Returns the process ID of the holder of an flock in the text of `/proc/locks`. `device` (major
/// and minor) and `inode` identify the file. Some file systems show another device there than in
/// `stat`, so if no line matches both, one with the same inode is returned.
pub(crate) fn holder_in(locks: &str, device: (u64, u64), inode: u64) -> Option<u32> {
    let mut same_inode = None;
    for line in locks.lines() {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        // A waiting process has `->` instead of `FLOCK` as its second word.
        let [_, "FLOCK", _, _, pid, file, ..] = words[..] else { continue };
        let [major, minor, number] = file.split(':').collect::<Vec<_>>()[..] else { continue };
        // The process ID is 0 if the process is in a PID namespace that is not visible from here.
        let Some(pid) = pid.parse().ok().filter(|pid| *pid != 0) else { continue };
        if number.parse() != Ok(inode) {
            continue;
        }
        let hex = |digits| u64::from_str_radix(digits, 16);
        if (hex(major), hex(minor)) == (Ok(device.0), Ok(device.1)) {
            return Some(pid);
        }
        same_inode = same_inode.or(Some(pid));
    }
    same_inode
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
