//! Repeats failed calls on a netlink socket.
//!
//! A transient error must not lose the answer to a request: the caller would not know whether a
//! link or rule was created, and could not remove it. A failed `send` has sent nothing and a failed
//! `recv` has not removed anything from the queue, so each can be repeated. After a few attempts
//! the failure counts as permanent and is returned.
//!
//! ENOBUFS is not retried: it reports that the kernel has dropped messages, which the reader of a
//! list must know. EAGAIN is not retried either: it means that the queue is empty.

use std::io;

/// How often a failing call is made in total.
const TRIES: usize = 4;

/// Makes the call until it succeeds, at most [`TRIES`] times, and returns its last result.
/// Interruptions by a signal (EINTR) do not count. EAGAIN and ENOBUFS are returned at once.
pub(crate) fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut tries = 1;
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOBUFS)) => return Err(error),
            Err(_) if tries < TRIES => tries += 1,
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Retries a call that fails `times` times. Returns the number of calls, and whether `retry`
    /// succeeded.
    fn failing(times: usize, errno: i32) -> (usize, bool) {
        let mut calls = 0;
        let done = retry(|| {
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
