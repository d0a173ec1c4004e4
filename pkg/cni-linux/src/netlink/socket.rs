//! A netlink socket: sends a request and reads its answer. Routing, nf_tables and connection
//! tracking use it.
//!
//! The kernel handles a request during the `send` call, so the answer is in the queue when `send`
//! returns. The next part of a dump is queued during each `recv`. So nothing here waits: if the
//! queue is empty, no answer will come.

use std::io;

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST};
use netlink_sys::SocketAddr;
use netlink_sys::protocols::{NETLINK_NETFILTER, NETLINK_ROUTE};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::SndBufForce;

use super::wire::{self, Message, NLMSG_DONE, NLMSG_ERROR};
use crate::error::Cause;
use crate::retry::retry;

/// The size of the receive buffer. A part of a dump has at most 32 KiB (the kernel's limit), the
/// answer about one link with hundreds of virtual functions a little more.
pub(crate) const RECEIVE_BUFFER: usize = 64 << 10;

/// Which part of the kernel a socket talks to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Links, addresses, routes, neighbours.
    Route,
    /// nf_tables and connection tracking.
    Netfilter,
}

impl Protocol {
    /// Creates a socket in the calling thread's network namespace.
    pub(crate) fn socket(self) -> io::Result<netlink_sys::Socket> {
        netlink_sys::Socket::new(match self {
            Protocol::Route => NETLINK_ROUTE,
            Protocol::Netfilter => NETLINK_NETFILTER,
        })
    }
}

/// A connection to one part of the kernel, in the network namespace that it was opened in.
#[derive(Debug)]
pub struct Socket {
    socket: netlink_sys::Socket,
    /// The sequence number of the last request.
    sequence: u32,
    /// The last datagram. Only its capacity is reserved; it is not zeroed before a read.
    buffer: Vec<u8>,
    /// Whether unread parts of an earlier answer may be in the queue.
    has_unread: bool,
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace.
    pub fn open(protocol: Protocol) -> io::Result<Socket> {
        let socket = protocol.socket()?;
        // Once connected to the kernel, the socket receives no messages from other processes.
        socket.connect(&SocketAddr::new(0, 0))?;
        // Failures are ignored, because older kernels lack these options: explanations in errors
        // (since 4.12), and errors without the request's body (since 4.3).
        let _ = (socket.set_ext_ack(true), socket.set_cap_ack(true));
        // Dumps that are filtered by the request (since 4.20), only for routing. Callers filter the
        // answer for older kernels.
        if protocol == Protocol::Route {
            let _ = socket.set_netlink_get_strict_chk(true);
        }
        Ok(Socket { socket, sequence: 0, buffer: Vec::new(), has_unread: false })
    }

    /// Returns the sequence number for the next request.
    pub fn next_sequence(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    /// Sends one request, with `flags` in addition to `NLM_F_REQUEST`, and calls `handle` for each
    /// message of the answer except the acknowledgement and the end of a dump. With neither
    /// `NLM_F_ACK` nor `NLM_F_DUMP`, the answer is a single message. Returns `false` if the kernel
    /// reports that the table changed during a dump, else `true`.
    ///
    /// # Errors
    /// The kernel refused the request, sending or receiving failed, or the answer has no end or a
    /// malformed one.
    pub fn ask(
        &mut self,
        kind: u16,
        flags: u16,
        body: &[u8],
        handle: &mut dyn FnMut(&Message<'_>),
    ) -> Result<bool, Cause> {
        let sequence = self.next_sequence();
        let mut bytes = Vec::with_capacity(wire::HEADER + body.len());
        Message { kind, flags: NLM_F_REQUEST | flags, sequence, payload: body }.write(&mut bytes);
        log::trace!("request, bytes from type and flags on: {:02x?}", bytes.get(4..).unwrap_or_default());
        self.send(&bytes)?;

        let expects_one_message = flags & NLM_F_ACK == 0 && flags & NLM_F_DUMP != NLM_F_DUMP;
        let mut is_consistent = true;
        while self.fill()? {
            // Messages with another sequence number belong to an earlier answer that was not read
            // to its end.
            for message in wire::messages(&self.buffer).filter(|message| message.sequence == sequence) {
                is_consistent &= message.flags & NLM_F_DUMP_INTR == 0;
                if matches!(message.kind, NLMSG_DONE | NLMSG_ERROR) {
                    self.has_unread = false;
                    return match wire::outcome(&message) {
                        Some((0, _)) => Ok(is_consistent),
                        Some((errno, explanation)) => Err(Cause::kernel(errno, explanation)),
                        None => Err(Cause::text("the kernel's answer is malformed: its end has no error number")),
                    };
                }
                handle(&message);
                if expects_one_message {
                    self.has_unread = false;
                    return Ok(is_consistent);
                }
            }
        }
        Err(Cause::text("the kernel's answer is incomplete: its end is missing"))
    }

    /// Returns the number of the socket's network namespace, which no other namespace gets until
    /// the next boot; `None` on kernels before 5.14.
    pub fn netns_cookie(&self) -> Option<u64> {
        crate::sys::netns_cookie(&self.socket).ok()
    }

    /// Sends encoded messages unchanged. Read the answers with [`receive`](Socket::receive).
    ///
    /// # Errors
    /// The kernel refuses the datagram, for example because it is too large. An error about one of
    /// the messages is an answer instead.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), Cause> {
        if self.has_unread {
            // Discard the unread parts of the earlier answer.
            while let Ok(true) = self.fill() {}
        }
        self.has_unread = true;
        let mut has_grown = false;
        retry(|| match self.socket.send(bytes, 0) {
            // The default send buffer is too small for the deletion of some 2,000 rules, so the
            // buffer is enlarged once. Without CAP_NET_ADMIN that fails, and the second send fails
            // like the first.
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) && !has_grown => {
                has_grown = true;
                let _ = setsockopt(&self.socket, SndBufForce, &bytes.len());
                self.socket.send(bytes, 0)
            }
            result => result,
        })?;
        Ok(())
    }

    /// Returns the next datagram in the queue; `None` if the queue is empty. Does not wait.
    pub fn receive(&mut self) -> Result<Option<&[u8]>, Cause> {
        Ok(self.fill()?.then_some(&*self.buffer))
    }

    /// Reads the next datagram into the buffer. Returns `false` if the queue is empty. Fails if the
    /// datagram is larger than the buffer.
    fn fill(&mut self) -> Result<bool, Cause> {
        self.buffer.clear();
        self.buffer.reserve_exact(RECEIVE_BUFFER);
        // MSG_TRUNC: `recv` returns the datagram's length even if the buffer is shorter.
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        match retry(|| self.socket.recv(&mut self.buffer, flags)) {
            Ok(length) if length > self.buffer.len() => Err(Cause::text(format!(
                "the kernel's answer of {length} bytes does not fit into the buffer of {RECEIVE_BUFFER} bytes"
            ))),
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.has_unread = false;
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::testing::in_new_netns;

    #[test]
    fn a_malformed_end_of_an_answer_is_an_error() {
        in_new_netns(|| {
            // A socket of this process takes the place of the kernel.
            let bound = || {
                let mut socket = Protocol::Route.socket().unwrap();
                let address = socket.bind_auto().unwrap();
                (socket, address)
            };
            let ((sender, sender_address), (receiver, receiver_address)) = (bound(), bound());
            receiver.connect(&sender_address).unwrap();
            let mut socket = Socket { socket: receiver, sequence: 0, buffer: Vec::new(), has_unread: false };
            let mut ask_with_answer = |kind, payload: &[u8]| {
                let mut answer = Vec::new();
                Message { kind, flags: 0, sequence: socket.sequence + 1, payload }.write(&mut answer);
                sender.send_to(&answer, &receiver_address, 0).unwrap();
                socket
                    .ask(libc::RTM_GETLINK, NLM_F_ACK, &[], &mut |_| {})
                    .map_err(|cause| Error::new("ask", cause).to_string())
            };
            for kind in [NLMSG_ERROR, NLMSG_DONE] {
                assert_eq!(ask_with_answer(kind, &[0; 4]), Ok(true));
                let malformed = Err("ask: the kernel's answer is malformed: its end has no error number".to_owned());
                assert_eq!(ask_with_answer(kind, &[0; 3]), malformed);
            }
        });
    }
}
