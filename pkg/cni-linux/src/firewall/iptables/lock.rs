//! One writer of iptables per network namespace, among our processes.
//!
//! What is read and then written with iptables is not one transaction, so whoever does that holds this lock. It is an
//! `flock` of the namespace itself (`/proc/thread-self/ns/net`): every process in the namespace locks the same inode,
//! whatever it sees mounted on /run, no file is made, and nothing is left when the namespace goes.
//!
//! It keeps out our own processes alone: Go's plugins know nothing of it, and iptables-legacy has a lock of its own for
//! the length of one process. A newcomer's mistake: taking it twice in one thread. The second waits for the first.

use std::fs::{File, TryLockError};
use std::io;
use std::os::fd::AsFd as _;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use cni::machine::{Machine, OnSigterm};
use nix::poll::{PollFd, PollFlags};

use crate::error::{Cause, Error, Result};
use crate::machine::wait_ready;
use crate::watch::term_descriptor;

/// The lock. Dropping it lets the next one in.
#[derive(Debug)]
pub struct NetnsLock {
    _file: File,
}

impl NetnsLock {
    /// Waits for its turn in the kernel's queue, for `limit` at most.
    ///
    /// # Errors
    /// [`Error::is_deadline`], or, where SIGTERM is to end the wait, [`Error::is_terminated`]: a rollback must not be cut
    /// short by what caused it.
    pub fn acquire(machine: &dyn Machine, on_sigterm: OnSigterm, limit: Duration) -> Result<NetnsLock> {
        let failed = |cause: Cause| Error::new("failed to lock the network namespace for a change of iptables", cause);
        let file = File::open("/proc/thread-self/ns/net").map_err(|error| failed(error.into()))?;
        match file.try_lock() {
            Ok(()) => Ok(NetnsLock { _file: file }),
            Err(TryLockError::WouldBlock) => wait(file, machine, on_sigterm, limit).map_err(failed),
            Err(TryLockError::Error(error)) => Err(failed(error.into())),
        }
    }
}

/// A second thread calls the blocking `flock`, so that it keeps its turn; this one waits for it, the deadline, SIGTERM.
fn wait(file: File, machine: &dyn Machine, on_sigterm: OnSigterm, limit: Duration) -> Result<NetnsLock, Cause> {
    let deadline = machine.now() + limit;
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
        // If nobody waits any more, the file comes back in the error and is closed, which unlocks it.
        drop(sender.send(result));
        drop(waker);
    };
    thread::Builder::new().name("flock".into()).spawn(body)?;
    loop {
        if let Ok(result) = receiver.try_recv() {
            return Ok(NetnsLock { _file: result? });
        }
        // Asked where it does not matter too: the asking empties the descriptor.
        if machine.terminated() && on_sigterm == OnSigterm::Kill {
            return Err(Cause::Terminated);
        }
        let left = deadline.saturating_duration_since(machine.now());
        if left.is_zero() {
            return Err(Cause::Deadline(limit));
        }
        let mut fds = vec![PollFd::new(woken.as_fd(), PollFlags::POLLIN)];
        if on_sigterm == OnSigterm::Kill {
            fds.push(PollFd::new(sigterm.as_fd(), PollFlags::POLLIN));
        }
        wait_ready(&mut fds, Some(left))?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, machine, new_netns};
    use std::sync::atomic::{AtomicUsize, Ordering};

    const SHORT: Duration = Duration::from_millis(30);
    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn a_held_lock_ends_in_a_deadline_and_a_free_one_is_had_at_once() {
        in_new_netns(|| {
            let machine = machine();
            let held = NetnsLock::acquire(&machine, OnSigterm::Kill, LONG).unwrap();
            assert!(NetnsLock::acquire(&machine, OnSigterm::Kill, SHORT).unwrap_err().is_deadline());
            drop(held);
            NetnsLock::acquire(&machine, OnSigterm::Kill, SHORT).unwrap();
        });
    }

    #[test]
    fn another_namespace_has_another_lock() {
        in_new_netns(|| {
            let machine = machine();
            let _held = NetnsLock::acquire(&machine, OnSigterm::Kill, LONG).unwrap();
            new_netns()
                .run(|| NetnsLock::acquire(&crate::testing::machine(), OnSigterm::Kill, SHORT).map(drop))
                .unwrap()
                .unwrap();
        });
    }

    #[test]
    fn of_many_one_is_inside_at_any_time_and_all_get_in() {
        in_new_netns(|| {
            let (inside, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
            thread::scope(|scope| {
                for _ in 0..20 {
                    scope.spawn(|| {
                        let _lock = NetnsLock::acquire(&machine(), OnSigterm::Kill, LONG).unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        done.fetch_add(1, Ordering::SeqCst);
                    });
                }
            });
            assert_eq!(done.into_inner(), 20);
        });
    }

    #[test]
    fn sigterm_ends_the_wait_but_not_that_of_a_rollback() {
        in_new_netns(|| {
            let machine = machine();
            let _held = NetnsLock::acquire(&machine, OnSigterm::Kill, LONG).unwrap();
            thread::scope(|scope| {
                let (told, waiting) = mpsc::channel();
                let wait = scope.spawn(move || {
                    let machine = crate::testing::machine();
                    told.send(nix::sys::pthread::pthread_self()).unwrap();
                    let first = NetnsLock::acquire(&machine, OnSigterm::Kill, LONG).unwrap_err();
                    (first, NetnsLock::acquire(&machine, OnSigterm::Finish, SHORT).unwrap_err())
                });
                nix::sys::pthread::pthread_kill(waiting.recv().unwrap(), nix::sys::signal::Signal::SIGTERM).unwrap();
                let (first, second) = wait.join().unwrap();
                assert!(first.is_terminated(), "{first}");
                assert!(second.is_deadline(), "{second}");
            });
        });
    }
}
