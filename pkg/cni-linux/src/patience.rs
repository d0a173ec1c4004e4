//! Retries failed calls on a netlink socket.
//!
//! After an error, the answer to a request would be lost: a new link or rule may exist, and the
//! undo needs the same socket. But a failed `send` has sent nothing, and a failed `recv` has
//! removed nothing from the queue. So such a call is repeated a few times before its error is
//! returned.
//!
//! ENOBUFS is not retried: it reports that the kernel has dropped messages, which the caller must
//! know. EAGAIN reports that the queue is empty.

use std::io;

/// How often a failing call is made.
const ATTEMPTS: usize = 4;

/// Makes the call until it succeeds, at most [`ATTEMPTS`] times. Attempts that end with EINTR do
/// not count.
///
/// # Errors
/// The last attempt's; EAGAIN and ENOBUFS at once.
pub(crate) fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut attempts = 1;
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(error),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return Err(error),
            Err(_) if attempts < ATTEMPTS => attempts += 1,
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(failing(ATTEMPTS - 1, libc::EIO), (ATTEMPTS, true));
        assert_eq!(failing(ATTEMPTS, libc::EIO), (ATTEMPTS, false));
        assert_eq!(failing(99, libc::EINTR), (100, true));
        assert_eq!(failing(1, libc::ENOBUFS), (1, false));
        assert_eq!(failing(1, libc::EAGAIN), (1, false));
    }
}
