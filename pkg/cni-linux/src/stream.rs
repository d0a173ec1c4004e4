//! Reads standard input and writes standard output of a plugin. A signal or a deadline ends the
//! wait for the runtime, which otherwise could block the plugin forever.
//!
//! The error after a signal is not `Interrupted`, because std's loops take that for EINTR and try
//! again. A write has at most PIPE_BUF bytes: a pipe that is ready has room for that many, and a
//! longer write could block.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use cni::machine::{Machine as _, OnSigterm};
use nix::poll::{PollFd, PollFlags};

use crate::machine::{LinuxMachine, is_ready, wait_ready};

/// How long a stream may be used, from its first read or write. If the runtime has not sent the
/// configuration or read the result by then, the plugin gives up.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Standard input or output, connected to the runtime. A read or write that would have to wait
/// fails with [`ErrorKind::TimedOut`] after a termination signal (SIGTERM, SIGINT, SIGHUP), and at
/// the deadline.
#[derive(Debug)]
pub struct Stream<'m, F> {
    machine: &'m LinuxMachine,
    fd: F,
    patience: Duration,
    /// The end of `patience`, set by the first read or write.
    deadline: Option<Instant>,
}

impl<'m, F: AsFd> Stream<'m, F> {
    /// Returns a stream over this descriptor. `patience` is the time from the first read or write
    /// to the deadline.
    pub fn new(machine: &'m LinuxMachine, fd: F, patience: Duration) -> Stream<'m, F> {
        Stream { machine, fd, patience, deadline: None }
    }

    /// Waits until the descriptor is ready for `event`, and returns it. Fails with
    /// [`ErrorKind::TimedOut`] if it is not ready after a termination signal or at the deadline.
    fn wait_until_ready(&mut self, event: PollFlags) -> io::Result<BorrowedFd<'_>> {
        let deadline = *self.deadline.get_or_insert_with(|| self.machine.now() + self.patience);
        // The machine's descriptor no longer reports a signal that `terminated` has read. So after
        // such a signal, the loop polls once, without waiting.
        let was_terminated = self.machine.was_terminated();
        loop {
            let time_left =
                if was_terminated { Duration::ZERO } else { deadline.saturating_duration_since(self.machine.now()) };
            let mut fds = [PollFd::new(self.fd.as_fd(), event), PollFd::new(self.machine.as_fd(), PollFlags::POLLIN)];
            wait_ready(&mut fds, Some(time_left))?;
            if is_ready(&fds[0]) {
                return Ok(self.fd.as_fd());
            }
            if was_terminated || self.machine.terminated() {
                return Err(io::Error::new(ErrorKind::TimedOut, "interrupted by a signal"));
            }
            if time_left.is_zero() {
                let text = format!("the other end of the stream did nothing for {} s", self.patience.as_secs_f32());
                return Err(io::Error::new(ErrorKind::TimedOut, text));
            }
        }
    }
}

impl<F: AsFd> Read for Stream<'_, F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(nix::unistd::read(self.wait_until_ready(PollFlags::POLLIN)?, buffer)?)
    }
}

impl<F: AsFd> Write for Stream<'_, F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = bytes.len().min(libc::PIPE_BUF);
        Ok(nix::unistd::write(self.wait_until_ready(PollFlags::POLLOUT)?, &bytes[..length])?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until a descriptor is readable, or its other end is closed.
///
/// # Errors
/// [`ErrorKind::TimedOut`] at the deadline and, with [`OnSigterm::Kill`], after a termination
/// signal.
pub fn wait_readable(
    fd: impl AsFd,
    deadline: Instant,
    machine: &dyn cni::machine::Machine,
    on_sigterm: OnSigterm,
) -> io::Result<()> {
    let sigterm = crate::watch::term_descriptor()?;
    loop {
        if on_sigterm == OnSigterm::Kill && machine.terminated() {
            return Err(io::Error::new(ErrorKind::TimedOut, "interrupted by a signal"));
        }
        let time_left = deadline.saturating_duration_since(machine.now());
        let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN), PollFd::new(sigterm.as_fd(), PollFlags::POLLIN)];
        // With `Finish`, a signal in the descriptor would end each poll at once.
        let length = if on_sigterm == OnSigterm::Kill { 2 } else { 1 };
        wait_ready(&mut fds[..length], Some(time_left))?;
        if is_ready(&fds[0]) {
            return Ok(());
        }
        if time_left.is_zero() {
            return Err(io::Error::new(ErrorKind::TimedOut, "the other end of the stream did not answer in time"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::machine;
    use nix::sys::signal::{Signal, raise};
    use std::thread;

    const SHORT: Duration = Duration::from_millis(50);

    fn timed_out(result: io::Result<usize>, text: &str) {
        let error = result.unwrap_err();
        assert_eq!((error.kind(), error.to_string()), (ErrorKind::TimedOut, text.to_owned()));
    }

    #[test]
    fn large_input_passes_a_small_pipe_to_its_end() {
        let (reader, writer) = io::pipe().unwrap();
        let sent: Vec<u8> = (0..300_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        let mut received = Vec::new();
        thread::scope(|scope| {
            scope.spawn(|| Stream::new(&machine(), writer, PATIENCE).write_all(&sent).unwrap());
            Stream::new(&machine(), reader, PATIENCE).read_to_end(&mut received).unwrap();
        });
        assert!(sent == received);
    }

    #[test]
    fn an_idle_peer_is_waited_for_until_the_deadline() {
        let machine = machine();
        let (reader, writer) = io::pipe().unwrap();
        let nothing = "the other end of the stream did nothing for 0.05 s";
        timed_out(Stream::new(&machine, &reader, SHORT).read(&mut [0; 8]), nothing);
        let mut full = Stream::new(&machine, &writer, SHORT);
        timed_out(full.write_all(&[0; 1 << 20]).map(|()| 0), nothing);
        // A second write does not get a new deadline.
        let begin = Instant::now();
        timed_out(full.write(b"and why"), nothing);
        assert!(begin.elapsed() < PATIENCE / 2);
    }

    #[test]
    fn a_signal_ends_the_wait_but_ready_data_is_still_read() {
        // On a thread of its own, because the machine blocks signals for the thread.
        let test = || {
            if crate::sys::is_ignored(Signal::SIGTERM).unwrap() {
                return crate::testing::skip("SIGTERM is ignored by the parent process");
            }
            let machine = machine();
            let (reader, writer) = io::pipe().unwrap();
            let mut output = Stream::new(&machine, &writer, PATIENCE);
            raise(Signal::SIGCHLD).unwrap();
            raise(Signal::SIGTERM).unwrap();
            for _ in 0..2 {
                timed_out(Stream::new(&machine, &reader, PATIENCE).read(&mut [0; 8]), "interrupted by a signal");
                // As a plugin writes its error after the signal.
                assert_eq!(output.write(b"x").unwrap(), 1);
                assert_eq!(Stream::new(&machine, &reader, PATIENCE).read(&mut [0; 8]).unwrap(), 1);
            }
            // As the undo of an ADD waits for a daemon after the signal.
            let wait = |on_sigterm| wait_readable(&reader, Instant::now() + SHORT, &machine, on_sigterm).map(|()| 0);
            timed_out(wait(OnSigterm::Kill), "interrupted by a signal");
            raise(Signal::SIGTERM).unwrap();
            timed_out(wait(OnSigterm::Finish), "the other end of the stream did not answer in time");
            output.write_all(b"x").unwrap();
            assert_eq!(wait(OnSigterm::Finish).unwrap(), 0);
        };
        let begin = Instant::now();
        thread::Builder::new()
            .name(thread::current().name().unwrap_or("?").to_owned())
            .spawn(test)
            .unwrap()
            .join()
            .unwrap();
        assert!(begin.elapsed() < PATIENCE / 2);
    }
}
