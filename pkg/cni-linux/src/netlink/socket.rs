//! The netlink socket that routing, nf_tables and connection tracking share: open, request, answer.
//!
//! The kernel works on a request inside the very `send` that brings it, so every answer is there
//! when `send` returns, and each `recv` of a dump queues the next part. Nothing here ever waits: an
//! answer that is not there does not come.

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

/// A dump's parts are at most 32 KiB (the kernel's own limit for one buffer); a link with hundreds
/// of virtual functions takes a little more.
const RECEIVE: usize = 64 << 10;

/// Which part of the kernel a socket talks to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Links, addresses, routes, neighbours.
    Route,
    /// nf_tables and connection tracking.
    Netfilter,
}

impl Protocol {
    fn socket(self) -> io::Result<netlink_sys::Socket> {
        netlink_sys::Socket::new(match self {
            Protocol::Route => NETLINK_ROUTE,
            Protocol::Netfilter => NETLINK_NETFILTER,
        })
    }
}

/// A connection to one part of the kernel, in the network namespace it was opened in.
pub struct Socket {
    socket: netlink_sys::Socket,
    sequence: u32,
    /// Capacity alone: what is never written is never touched.
    buffer: Vec<u8>,
    /// Whether the queue may hold the remains of an earlier request.
    pending: bool,
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace.
    pub fn open(protocol: Protocol) -> io::Result<Socket> {
        let socket = protocol.socket()?;
        // Connected to the kernel, the socket receives from no other process.
        socket.connect(&SocketAddr::new(0, 0))?;
        // Since 4.12, 4.2 and 4.20. An older kernel explains less and filters less; callers filter
        // every list again.
        let _ = (socket.set_ext_ack(true), socket.set_cap_ack(true));
        if protocol == Protocol::Route {
            let _ = socket.set_netlink_get_strict_chk(true);
        }
        Ok(Socket { socket, sequence: 0, buffer: Vec::new(), pending: false })
    }

    /// Takes the next sequence number.
    pub fn next_sequence(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    /// Sends one request, with `flags` beside REQUEST, and hands over each message of the answer:
    /// those before the acknowledgement, a whole list, or without ACK and DUMP the one message
    /// asked for. Returns whether a list was read undisturbed.
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
        log::trace!("request, bytes from type and flags on: {:02x?}", bytes.get(4..).unwrap_or_default());
        self.send(&bytes)?;

        let single = flags & NLM_F_ACK == 0 && flags & NLM_F_DUMP != NLM_F_DUMP;
        let mut undisturbed = true;
        while self.fill()? {
            // Another sequence number: the remains of a request that was given up.
            for message in wire::messages(&self.buffer).filter(|message| message.sequence == sequence) {
                undisturbed &= message.flags & NLM_F_DUMP_INTR == 0;
                let last = matches!(message.kind, NLMSG_DONE | NLMSG_ERROR);
                if last && let Some((errno, said)) = wire::answer(&message).filter(|(errno, _)| *errno != 0) {
                    self.pending = false;
                    return Err(Cause::kernel(errno, said));
                }
                if !last {
                    each(&message);
                }
                if last || single {
                    self.pending = false;
                    return Ok(undisturbed);
                }
            }
        }
        Err(Cause::text("the kernel ended its answer early"))
    }

    /// Sends messages as they are. Without an answer in the queue, [`receive`](Socket::receive)
    /// returns at once.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), Cause> {
        if self.pending {
            while let Ok(true) = self.fill() {}
        }
        self.pending = true;
        let mut grown = false;
        patience::again(|| match self.socket.send(bytes, 0) {
            // Some 2,000 rules to delete are more than a socket takes at once by default. Root may
            // have any size; without that privilege the first error is returned.
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) && !grown => {
                grown = true;
                let _ = setsockopt(&self.socket, SndBufForce, &bytes.len());
                self.socket.send(bytes, 0)
            }
            sent => sent,
        })?;
        Ok(())
    }

    /// The next datagram, if there is one.
    pub fn receive(&mut self) -> Result<Option<&[u8]>, Cause> {
        Ok(self.fill()?.then_some(&*self.buffer))
    }

    /// Reads the next datagram into the buffer. `false` if there is none.
    fn fill(&mut self) -> Result<bool, Cause> {
        self.buffer.clear();
        self.buffer.reserve_exact(RECEIVE);
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        match patience::again(|| self.socket.recv(&mut self.buffer, flags)) {
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

/// A socket that hears of changes in the calling thread's network namespace, for
/// [`Watch`](crate::Watch).
#[derive(Debug)]
pub(crate) struct Events(netlink_sys::Socket);

impl Events {
    /// Subscribes to these multicast groups (`RTMGRP_…`) of routing.
    pub(crate) fn open(groups: u32) -> io::Result<Events> {
        let mut socket = Protocol::Route.socket()?;
        socket.bind(&SocketAddr::new(0, groups))?;
        Ok(Events(socket))
    }

    /// Subscribes to links of all namespaces that have a number in the calling thread's, and to the
    /// numbers.
    pub(crate) fn open_everywhere() -> io::Result<Events> {
        const RTMGRP_LINK: u32 = 1;
        const RTNLGRP_NSID: u32 = 28;
        let mut socket = Protocol::Route.socket()?;
        socket.set_listen_all_namespaces(true)?;
        socket.bind(&SocketAddr::new(0, RTMGRP_LINK))?;
        socket.add_membership(RTNLGRP_NSID)?;
        Ok(Events(socket))
    }

    /// Takes every event out of the queue. Whether something went (a link, a namespace's number),
    /// or events were lost.
    pub(crate) fn forget(&self) -> bool {
        const GOING: [u16; 2] = [libc::RTM_DELLINK, libc::RTM_DELNSID];
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        let mut gone = false;
        let mut head = [0; 8];
        loop {
            match self.0.recv(&mut &mut head[..], flags) {
                Ok(_) => gone |= GOING.contains(&u16::from_ne_bytes([head[4], head[5]])),
                // Events were lost, which is reported once; the look that follows makes up for it.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => gone = true,
                Err(_) => return gone,
            }
        }
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
