//! The netlink socket for routing, nf_tables and connection tracking: sends requests, reads
//! answers.
//!
//! The kernel handles a request during `send`, so the answer is in the queue when `send` returns,
//! and each `recv` of a table queues the next part. So nothing here waits: an answer that is not in
//! the queue will not come.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST};
use netlink_sys::SocketAddr;
use netlink_sys::protocols::{NETLINK_NETFILTER, NETLINK_ROUTE};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::SndBufForce;

use super::wire::{self, Message, NLMSG_DONE, NLMSG_ERROR};
use crate::error::Cause;
use crate::patience;

/// The size of the receive buffer in bytes. The kernel sends a table in parts of at most 32 KiB,
/// and a little more for a link with hundreds of virtual functions.
const RECEIVE_BUFFER: usize = 64 << 10;

/// The netlink protocol: the part of the kernel that handles the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Links, addresses, routes, rules, neighbours, traffic control.
    Route,
    /// nf_tables and connection tracking.
    Netfilter,
}

impl Protocol {
    /// Creates a socket of this protocol.
    fn socket(self) -> io::Result<netlink_sys::Socket> {
        netlink_sys::Socket::new(match self {
            Protocol::Route => NETLINK_ROUTE,
            Protocol::Netfilter => NETLINK_NETFILTER,
        })
    }
}

/// A netlink socket in the network namespace in which it was opened.
pub struct Socket {
    socket: netlink_sys::Socket,
    /// The sequence number of the last request.
    sequence: u32,
    /// The last datagram. Its unused capacity is not initialised, so the pages stay untouched.
    buffer: Vec<u8>,
    /// Whether the queue may still have parts of the last answer.
    pending: bool,
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel refuses the socket.
    pub fn open(protocol: Protocol) -> io::Result<Socket> {
        let socket = protocol.socket()?;
        // A socket that is connected to the kernel (port 0) receives nothing from other processes.
        socket.connect(&SocketAddr::new(0, 0))?;
        // Available since Linux 4.12, 4.2 and 4.20. Older kernels send no explanation of errors and
        // do not filter tables; callers filter every table again.
        let _ = (socket.set_ext_ack(true), socket.set_cap_ack(true));
        if protocol == Protocol::Route {
            let _ = socket.set_netlink_get_strict_chk(true);
        }
        Ok(Socket { socket, sequence: 0, buffer: Vec::new(), pending: false })
    }

    /// Returns the next sequence number.
    pub fn next_sequence(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    /// Sends one request of the type `kind`, with NLM_F_REQUEST added to `flags`, and calls `each`
    /// for each message of the answer.
    ///
    /// The answer ends with the acknowledgement (NLM_F_ACK), with the end of the table
    /// (NLM_F_DUMP), or, without both flags, after one message. Returns `false` if the kernel
    /// reports that the table changed while it was read.
    ///
    /// # Errors
    /// The kernel's errno, with its explanation; the answer ends early.
    pub fn ask(
        &mut self,
        kind: u16,
        flags: u16,
        body: &[u8],
        each: &mut dyn FnMut(&Message<'_>),
    ) -> Result<bool, Cause> {
        let sequence = self.next_sequence();
        let mut bytes = Vec::with_capacity(wire::HEADER + body.len());
        Message { kind, flags: NLM_F_REQUEST | flags, sequence, payload: body }.write(&mut bytes);
        log::trace!("request without its length field: {:02x?}", bytes.get(4..).unwrap_or_default());
        self.send(&bytes)?;

        let expects_one_message = flags & NLM_F_ACK == 0 && flags & NLM_F_DUMP != NLM_F_DUMP;
        let mut is_consistent = true;
        while self.fill()? {
            for message in wire::messages(&self.buffer) {
                // Part of the answer to an earlier request that was not read to its end.
                if message.sequence != sequence {
                    continue;
                }
                if message.flags & NLM_F_DUMP_INTR != 0 {
                    is_consistent = false;
                }
                let is_end = matches!(message.kind, NLMSG_DONE | NLMSG_ERROR);
                if is_end && let Some((errno, explanation)) = wire::outcome(&message).filter(|(errno, _)| *errno != 0) {
                    self.pending = false;
                    return Err(Cause::kernel(errno, explanation));
                }
                if !is_end {
                    each(&message);
                }
                if is_end || expects_one_message {
                    self.pending = false;
                    return Ok(is_consistent);
                }
            }
        }
        Err(Cause::text("the kernel ended its answer early"))
    }

    /// Sends encoded messages, after dropping what the queue still has of an earlier answer.
    ///
    /// # Errors
    /// The kernel does not accept the messages.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), Cause> {
        if self.pending {
            while let Ok(true) = self.fill() {}
        }
        self.pending = true;
        let mut is_buffer_grown = false;
        patience::retry(|| match self.socket.send(bytes, 0) {
            // By default, a socket accepts as much at once as the deletion of some 2,000 rules
            // takes. Root may set a larger buffer. Without that privilege the second attempt fails
            // too.
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) && !is_buffer_grown => {
                is_buffer_grown = true;
                let _ = setsockopt(&self.socket, SndBufForce, &bytes.len());
                self.socket.send(bytes, 0)
            }
            sent => sent,
        })?;
        Ok(())
    }

    /// Returns the next datagram, or `None` if the queue is empty.
    ///
    /// # Errors
    /// The kernel's; ENOBUFS if it has dropped messages.
    pub fn receive(&mut self) -> Result<Option<&[u8]>, Cause> {
        Ok(if self.fill()? { Some(&self.buffer) } else { None })
    }

    /// Reads the next datagram into the buffer. Returns `false` if the queue is empty.
    fn fill(&mut self) -> Result<bool, Cause> {
        self.buffer.clear();
        self.buffer.reserve_exact(RECEIVE_BUFFER);
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        match patience::retry(|| self.socket.recv(&mut self.buffer, flags)) {
            Ok(length) if length > self.buffer.len() => {
                Err(Cause::text(format!("the kernel's answer is too large: {length} bytes")))
            }
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.pending = false;
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// A socket that receives the kernel's events about changes, for [`Watch`](crate::Watch).
#[derive(Debug)]
pub(crate) struct Events(netlink_sys::Socket);

impl Events {
    /// Subscribes to these multicast groups (`RTMGRP_…`) in the calling thread's network namespace.
    pub(crate) fn open(groups: u32) -> io::Result<Events> {
        let mut socket = Protocol::Route.socket()?;
        socket.bind(&SocketAddr::new(0, groups))?;
        Ok(Events(socket))
    }

    /// Subscribes to the links of all namespaces that have an ID in the calling thread's namespace,
    /// and to these IDs.
    pub(crate) fn open_everywhere() -> io::Result<Events> {
        const RTMGRP_LINK: u32 = 1;
        const RTNLGRP_NSID: u32 = 28;
        let mut socket = Protocol::Route.socket()?;
        socket.set_listen_all_namespaces(true)?;
        socket.bind(&SocketAddr::new(0, RTMGRP_LINK))?;
        socket.add_membership(RTNLGRP_NSID)?;
        Ok(Events(socket))
    }

    /// Removes all events from the queue. Returns whether one of them reported the deletion of a
    /// link or of a namespace's ID, or whether the kernel has dropped events, which may have been
    /// such.
    pub(crate) fn drain(&self) -> bool {
        const DELETIONS: [u16; 2] = [libc::RTM_DELLINK, libc::RTM_DELNSID];
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        let mut is_deletion = false;
        // The length and the type of a message; the rest is truncated.
        let mut header = [0; 8];
        loop {
            match self.0.recv(&mut &mut header[..], flags) {
                Ok(_) => is_deletion |= DELETIONS.contains(&u16::from_ne_bytes([header[4], header[5]])),
                // The kernel has dropped events.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => is_deletion = true,
                Err(_) => return is_deletion,
            }
        }
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
