//! A socket for rtnetlink that a failed call does not end.
//!
//! rtnetlink gives its connection up at the first error of `send` or `recv`: the answer that was about to be read is lost,
//! a link may exist that nobody knows of, and no undo has a connection left to run on. Yet a `send` that failed has
//! sent nothing, and a `recv` that failed has taken nothing off the queue. So the same is tried again, a few times:
//! what fails for good (a policy that forbids the call) still ends the connection.
//!
//! The newcomer's mistake: counting ENOBUFS among these errors. It says that the kernel has dropped messages, which
//! whoever reads a list must know.

use std::io;
use std::task::{Context, Poll};

use rtnetlink::sys::{AsyncSocket, Socket, SocketAddr, TokioSocket};

/// How often a call that fails is made in all.
pub(crate) const TRIES: usize = 4;

/// The socket.
pub(crate) struct Patient(TokioSocket);

/// Whether another try may go better.
pub(crate) fn may_pass(error: &io::Error) -> bool {
    error.raw_os_error() != Some(libc::ENOBUFS)
}

fn again<T>(mut call: impl FnMut() -> Poll<io::Result<T>>) -> Poll<io::Result<T>> {
    let mut tries = 1;
    loop {
        match call() {
            Poll::Ready(Err(error)) if tries < TRIES && may_pass(&error) => tries += 1,
            done => return done,
        }
    }
}

impl AsyncSocket for Patient {
    fn socket_ref(&self) -> &Socket {
        self.0.socket_ref()
    }

    fn socket_mut(&mut self) -> &mut Socket {
        self.0.socket_mut()
    }

    fn new(protocol: isize) -> io::Result<Patient> {
        TokioSocket::new(protocol).map(Patient)
    }

    fn poll_send(&self, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        again(|| self.0.poll_send(cx, buf))
    }

    fn poll_send_to(&self, cx: &mut Context<'_>, buf: &[u8], addr: &SocketAddr) -> Poll<io::Result<usize>> {
        again(|| self.0.poll_send_to(cx, buf, addr))
    }

    fn poll_recv<B: bytes::BufMut>(&self, cx: &mut Context<'_>, buf: &mut B) -> Poll<io::Result<()>> {
        again(|| self.0.poll_recv(cx, buf))
    }

    fn poll_recv_from<B: bytes::BufMut>(&self, cx: &mut Context<'_>, buf: &mut B) -> Poll<io::Result<SocketAddr>> {
        again(|| self.0.poll_recv_from(cx, buf))
    }

    fn poll_recv_from_full(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Vec<u8>, SocketAddr)>> {
        again(|| self.0.poll_recv_from_full(cx))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failing(times: usize, errno: i32) -> (usize, bool) {
        let mut calls = 0;
        let done = again(|| {
            calls += 1;
            Poll::Ready(if calls <= times { Err(io::Error::from_raw_os_error(errno)) } else { Ok(()) })
        });
        (calls, matches!(done, Poll::Ready(Ok(()))))
    }

    #[test]
    fn a_call_is_made_again_but_not_for_ever_and_lost_messages_are_told() {
        assert_eq!(failing(0, libc::EIO), (1, true));
        assert_eq!(failing(TRIES - 1, libc::EIO), (TRIES, true));
        assert_eq!(failing(TRIES, libc::EIO), (TRIES, false));
        assert_eq!(failing(1, libc::ENOBUFS), (1, false));
        assert!(matches!(again(|| Poll::<io::Result<()>>::Pending), Poll::Pending));
    }
}
