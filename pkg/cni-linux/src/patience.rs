//! Retries calls on a netlink socket that fail.
//!
//! Giving up at the first error would lose an answer: an unknown link or rule may exist, and no
//! undo has a connection left. But a `send` that failed has sent nothing, and a `recv` that failed
//! has taken nothing off the queue. So the call is repeated a few times; a permanent failure (a
//! policy that forbids the call) is returned.
//!
//! ENOBUFS is not retried: it reports that the kernel has dropped messages, which the reader of a
//! list must know. EAGAIN is not a failure: the queue is empty.

use std::io;

/// How often a call that fails is made in all.
const TRIES: usize = 4;

/// Whether another try may go better.
fn may_pass(error: &io::Error) -> bool {
    error.raw_os_error() != Some(libc::ENOBUFS)
}

/// Makes the call until it passes, or fails for good. Interruptions do not count.
pub(crate) fn again<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut tries = 1;
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(error),
            Err(error) if tries < TRIES && may_pass(&error) => tries += 1,
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failing(times: usize, errno: i32) -> (usize, bool) {
        let mut calls = 0;
        let done = again(|| {
            calls += 1;
            if calls <= times { Err(io::Error::from_raw_os_error(errno)) } else { Ok(()) }
        });
        (calls, done.is_ok())
    }

    #[test]
    fn a_failed_call_is_retried_a_few_times_but_not_for_enobufs() {
        assert_eq!(failing(0, libc::EIO), (1, true));
        assert_eq!(failing(TRIES - 1, libc::EIO), (TRIES, true));
        assert_eq!(failing(TRIES, libc::EIO), (TRIES, false));
        assert_eq!(failing(99, libc::EINTR), (100, true));
        assert_eq!(failing(1, libc::ENOBUFS), (1, false));
        assert_eq!(failing(1, libc::EAGAIN), (1, false));
    }
}
