//! Calls on a netlink socket that fail once do not end the conversation.
//!
//! Given up at the first error, an answer would be lost: a link or a rule may exist that nobody
//! knows of, and no undo has a connection left to run on. Yet a `send` that failed has sent
//! nothing, and a `recv` that failed has taken nothing off the queue. So the same is tried again, a
//! few times: what fails for good (a policy that forbids the call) is told.
//!
//! The newcomer's mistake: counting ENOBUFS among these errors. It says that the kernel has dropped
//! messages, which whoever reads a list must know. And EAGAIN is no failure: there is nothing in
//! the queue.

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
    fn a_call_is_made_again_but_not_for_ever_and_lost_messages_are_told() {
        assert_eq!(failing(0, libc::EIO), (1, true));
        assert_eq!(failing(TRIES - 1, libc::EIO), (TRIES, true));
        assert_eq!(failing(TRIES, libc::EIO), (TRIES, false));
        assert_eq!(failing(99, libc::EINTR), (100, true));
        assert_eq!(failing(1, libc::ENOBUFS), (1, false));
        assert_eq!(failing(1, libc::EAGAIN), (1, false));
    }
}
