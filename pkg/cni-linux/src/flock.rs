//! Takes an `flock`: waits for it until a deadline or SIGTERM, and then names the process that
//! holds the lock.
//!
//! A free lock is taken at once. For a held lock, a second thread calls the blocking `flock`, which
//! keeps its place in the kernel's queue, while the calling thread waits for the second thread, the
//! deadline or a signal. After a deadline or signal the second thread cannot be stopped, but it
//! releases the lock as soon as it gets the lock.
//!
//! The file may be removed or replaced during the wait. Callers check that the file at the path is
//! still the one that they have locked.

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
use crate::machine::{is_ready, wait_ready};
use crate::netns::Netns;
use crate::watch::term_descriptor;

/// How long to wait for a lock.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// The end of the wait.
    pub deadline: Instant,
    /// The length of the whole wait, for the error message.
    pub length: Duration,
}

/// The failure to take a lock.
#[derive(Debug)]
pub struct Refused {
    /// The deadline, a signal, or the kernel's error.
    pub cause: Cause,
    /// After a deadline or signal, the process that holds the lock, as `process 12 (bridge)`;
    /// `None` if that process is not visible in this PID namespace, and after other failures.
    pub holder: Option<String>,
}

/// Locks the file exclusively and returns it. The lock ends when the file is closed.
///
/// With [`OnSigterm::Finish`] signals do not end the wait. A rollback needs this, because SIGTERM
/// may have caused the rollback.
///
/// # Errors
/// - The deadline came before the lock was free.
/// - With [`OnSigterm::Kill`], SIGTERM, SIGINT or SIGHUP came before the lock was free. The machine
///   must have blocked these signals. The signal is not lost: the machine still reports it.
/// - The kernel failed.
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
    // Read now, because `wait_for_lock` takes ownership of the file.
    let metadata = file.metadata().map_err(failed)?;
    wait_for_lock(file, machine, on_sigterm, limit).map_err(|cause| {
        let holder = if cause.is_deadline() || cause.is_terminated() { describe_holder(&metadata) } else { None };
        Refused { cause, holder }
    })
}

impl Netns {
    /// Locks the namespace's own inode, not a lock file, so the lock is the same for every path to
    /// the namespace. Waits at most for `length`. The lock ends when both the returned file and
    /// this handle are closed.
    ///
    /// # Errors
    /// Those of [`lock()`]. The message names the process that holds the lock, if it is known.
    pub fn lock(&self, machine: &dyn Machine, on_sigterm: OnSigterm, length: Duration) -> crate::Result<File> {
        let path = self.path().display();
        let file = self.as_fd().try_clone_to_owned();
        let file = file.map_err(|error| Error::new(format_args!("failed to lock netns {path}"), error))?;
        let limit = Limit { deadline: machine.now() + length, length };
        lock(File::from(file), machine, on_sigterm, limit).map_err(|Refused { cause, holder }| match holder {
            Some(holder) => Error::new(format_args!("failed to lock netns {path}, which {holder} holds"), cause),
            None => Error::new(format_args!("failed to lock netns {path}"), cause),
        })
    }
}

/// Waits until a second thread has locked the file, and returns the file. Fails as [`lock()`] does.
fn wait_for_lock(file: File, machine: &dyn Machine, on_sigterm: OnSigterm, limit: Limit) -> Result<File, Cause> {
    let sigterm = term_descriptor()?;
    // The thread closes `done_writer` at its end, which makes `done_reader` readable. A pipe can be
    // polled; a channel cannot.
    let (done_reader, done_writer) = io::pipe()?;
    let (sender, receiver) = mpsc::channel();
    let lock_and_send = move || {
        let result = loop {
            match file.lock() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result.map(|()| file),
            }
        };
        // If the caller no longer waits, `send` fails and returns the file. Dropping the file
        // unlocks it.
        drop(sender.send(result));
        drop(done_writer);
    };
    thread::Builder::new().name("flock".into()).spawn(lock_and_send)?;
    let mut is_signal_pending = false;
    loop {
        // If the poll has seen a signal, the wait ends without a call of `terminated`, which might
        // read the signal. So the signal stays pending, and the machine can still report it.
        if on_sigterm == OnSigterm::Kill && (is_signal_pending || machine.terminated()) {
            return Err(Cause::Terminated);
        }
        let time_left = limit.deadline.saturating_duration_since(machine.now());
        if time_left.is_zero() {
            return Err(Cause::Deadline(limit.length));
        }
        let mut fds =
            [PollFd::new(done_reader.as_fd(), PollFlags::POLLIN), PollFd::new(sigterm.as_fd(), PollFlags::POLLIN)];
        let watched = match on_sigterm {
            OnSigterm::Kill => &mut fds[..],
            // Without `sigterm`: a pending signal would end each poll at once.
            OnSigterm::Finish => &mut fds[..1],
        };
        wait_ready(watched, Some(time_left))?;
        if is_ready(&fds[0]) {
            // The result was sent before the pipe was closed.
            return match receiver.try_recv() {
                Ok(result) => Ok(result?),
                Err(_) => Err(Cause::text("internal error: the thread that waits for the lock panicked")),
            };
        }
        is_signal_pending = is_ready(&fds[1]);
    }
}

/// Describes the process that holds the lock of the file, as `process 12 (bridge)`; `None` if
/// the lock is not found in `/proc/locks`.
fn describe_holder(file: &Metadata) -> Option<String> {
    let device = (major(file.dev()), minor(file.dev()));
    let find = || holder_in(&read_locks().unwrap_or_default(), device, file.ino());
    // A line can be missing because other locks changed while the list was read: try twice.
    let pid = find().or_else(find)?;
    Some(match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("process {pid} ({})", name.trim()),
        Err(_) => format!("process {pid}"),
    })
}

/// Returns the text of `/proc/locks`, which lists the file locks of the machine. The list may
/// change between two reads, so this uses a large buffer and few reads.
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

/// Returns the ID of the process that holds the `flock` of a file, found in the text of
/// `/proc/locks` by the file's device (major and minor number) and inode; `None` if there is no
/// such lock.
///
/// For some file systems, the device in this text differs from that of `stat`. So if no line
/// matches device and inode, the first line with the same inode is used.
pub(crate) fn holder_in(locks: &str, device: (u64, u64), inode: u64) -> Option<u32> {
    let (device_major, device_minor) = device;
    let mut pid_with_same_inode = None;
    for line in locks.lines() {
        // "4: FLOCK  ADVISORY  WRITE 13 fd:1a:77 0 EOF"; a waiting process has "->" before "FLOCK".
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, "FLOCK", _, _, pid, file, ..] = words[..] else { continue };
        let [major, minor, inode_number] = file.split(':').collect::<Vec<_>>()[..] else { continue };
        let Ok(pid) = pid.parse::<u32>() else { continue };
        // The kernel writes 0 for a process that is not visible in this PID namespace.
        if pid == 0 || inode_number.parse() != Ok(inode) {
            continue;
        }
        let hex = |digits| u64::from_str_radix(digits, 16);
        if hex(major) == Ok(device_major) && hex(minor) == Ok(device_minor) {
            return Some(pid);
        }
        pid_with_same_inode = pid_with_same_inode.or(Some(pid));
    }
    pid_with_same_inode
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{machine, new_netns};

    #[test]
    fn a_namespace_lock_does_not_depend_on_the_path() {
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
