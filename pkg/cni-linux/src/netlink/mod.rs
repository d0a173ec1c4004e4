//! A connection to the kernel's network configuration (rtnetlink), and the requests sent over it.
//!
//! This module handles requests, replies and errors; the modules for links, addresses, routes and
//! so on add methods to [`Netlink`].
//!
//! A connection always belongs to the network namespace in which it was opened, even if the thread
//! later enters another one. For each further namespace, open a connection with
//! [`Netlink::open_in`].

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use cni::steps::{Step, hex};
use netlink_packet_core::{Emitable, NLM_F_ACK, NLM_F_DUMP, NLM_F_ECHO};

use crate::error::{Cause, Error, Result};
use crate::netns::Netns;

mod request;
pub mod socket;
pub mod wire;

use socket::{Protocol, Socket};
pub(crate) use wire::{attributes, text};

/// The maximum number of requests for a dump if the table changes during each answer.
const DUMP_ATTEMPTS: usize = 20;

/// A connection to the network configuration of one network namespace. Clones share one socket.
#[derive(Clone, Debug)]
pub struct Netlink {
    connection: Arc<Mutex<Socket>>,
}

impl Netlink {
    /// Returns the number of the connection's network namespace, which no other namespace gets
    /// until the next boot; `None` on kernels before 5.14.
    pub fn netns_cookie(&self) -> Option<u64> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner).netns_cookie()
    }

    /// Opens a connection to the calling thread's namespace.
    pub fn open() -> Result<Netlink> {
        open().map(Netlink::new).map_err(|error| Error::new("failed to open a netlink socket", error))
    }

    /// Opens a connection to another namespace. The calling thread enters that namespace for a
    /// moment.
    pub fn open_in(&self, netns: &Netns) -> Result<Netlink> {
        netns.run(open)?.map(Netlink::new).map_err(|error| {
            Error::new(format_args!("failed to open a netlink socket in {}", netns.path().display()), error)
        })
    }

    fn new(connection: Socket) -> Netlink {
        Netlink { connection: Arc::new(Mutex::new(connection)) }
    }

    /// Sends a request that changes something, with `flags` in addition to `NLM_F_REQUEST` and
    /// `NLM_F_ACK`. Returns the messages before the acknowledgement: with `NLM_F_ECHO`, a
    /// description of the changed object.
    pub(crate) fn request(&self, kind: Kind, body: &dyn Body, flags: u16) -> Result<Vec<Reply>, Cause> {
        let request = Request { kind, body };
        self.exchange(request, flags | NLM_F_ACK).map(|answer| answer.messages)
    }

    /// Asks for one object. Returns `None` if the answer is only an acknowledgement; a missing
    /// object is an error with the kernel's errno.
    pub(crate) fn get(&self, kind: Kind, body: &dyn Body) -> Result<Option<Reply>, Cause> {
        self.exchange(Request { kind, body }, 0).map(|answer| answer.messages.into_iter().next())
    }

    /// Asks for one qdisc or filter, as [`get`](Netlink::get) does for other objects. Before 6.8
    /// the kernel sends such an answer as a notification, which the asking socket gets only with
    /// `NLM_F_ECHO`.
    pub(crate) fn get_echoed(&self, kind: Kind, body: &dyn Body) -> Result<Option<Reply>, Cause> {
        self.exchange(Request { kind, body }, NLM_F_ECHO).map(|answer| answer.messages.into_iter().next())
    }

    /// Asks for a whole table, or the part of it that matches `body`. Older kernels ignore some
    /// filters in `body`, so callers filter again. Repeats the request if the table changed
    /// meanwhile.
    pub(crate) fn dump(&self, kind: Kind, body: &dyn Body) -> Result<Vec<Reply>, Cause> {
        until_consistent(|| self.exchange(Request { kind, body }, NLM_F_DUMP))
    }

    /// Sends a request with these `NLM_F_*` flags, logs it and its outcome, and returns the answer.
    /// Fails with the kernel's error.
    fn exchange(&self, request: Request<'_>, flags: u16) -> Result<Answer, Cause> {
        let step = Step::begin();
        let what = if step.is_logged() { request.name(flags) } else { String::new() };
        // A thread that panicked with the lock may have left part of an answer unread. `ask` skips
        // that part, because its messages have another sequence number.
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let mut messages = Vec::new();
        let answer = connection
            .ask(request.kind as u16, flags, &wire::emitted(request.body), &mut |message| {
                messages.push(Reply { kind: message.kind, body: message.payload.to_vec() });
            })
            .map(|is_consistent| Answer { messages, is_consistent });
        if flags & NLM_F_ACK != 0 {
            step.end_request(what, &answer, || request.bytes());
        } else {
            // Without the bytes of the request: an error here often only means that the object does
            // not exist.
            step.end(what, &answer);
        }
        answer
    }
}

/// Opens a socket in the calling thread's network namespace.
fn open() -> io::Result<Socket> {
    Socket::open(Protocol::Route)
}

/// The type of a message to or from the kernel (`RTM_…`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Kind {
    NewLink = libc::RTM_NEWLINK,
    DelLink = libc::RTM_DELLINK,
    GetLink = libc::RTM_GETLINK,
    SetLink = libc::RTM_SETLINK,
    NewAddress = libc::RTM_NEWADDR,
    DelAddress = libc::RTM_DELADDR,
    GetAddress = libc::RTM_GETADDR,
    NewRoute = libc::RTM_NEWROUTE,
    DelRoute = libc::RTM_DELROUTE,
    GetRoute = libc::RTM_GETROUTE,
    NewRule = libc::RTM_NEWRULE,
    DelRule = libc::RTM_DELRULE,
    GetRule = libc::RTM_GETRULE,
    NewNeighbour = libc::RTM_NEWNEIGH,
    DelNeighbour = libc::RTM_DELNEIGH,
    GetNeighbour = libc::RTM_GETNEIGH,
    NewQdisc = libc::RTM_NEWQDISC,
    DelQdisc = libc::RTM_DELQDISC,
    GetQdisc = libc::RTM_GETQDISC,
    NewFilter = libc::RTM_NEWTFILTER,
    GetFilter = libc::RTM_GETTFILTER,
    NewNetnsId = libc::RTM_NEWNSID,
    GetNetnsId = libc::RTM_GETNSID,
    /// `RTM_DELLINKPROP`, which `libc` lacks.
    DelLinkProperty = 109,
}

/// The body of a request.
pub(crate) trait Body: Emitable {
    /// Describes the content for the log, in words like the arguments of ip(8).
    fn describe(&self) -> Vec<String>;
}

/// A request. The packet crate's enum of all requests is not used, because it links the code for
/// every type of message into the program.
#[derive(Clone, Copy)]
struct Request<'a> {
    kind: Kind,
    body: &'a dyn Body,
}

impl Request<'_> {
    /// Returns the request as the log names it: its type and description, or only its type for a
    /// dump (`NLM_F_DUMP` in `flags`).
    fn name(self, flags: u16) -> String {
        if flags & NLM_F_DUMP == NLM_F_DUMP {
            return format!("netlink {:?} (all)", self.kind);
        }
        let words: String = self.body.describe().iter().map(|word| format!(" {word}")).collect();
        format!("netlink {:?}{words}", self.kind)
    }

    /// Returns the type and the body in hexadecimal, for the log.
    fn bytes(self) -> String {
        format!("type {}: {}", self.kind as u16, hex(&wire::emitted(self.body)))
    }
}

/// A message from the kernel, not decoded yet: the module that sent the request decodes the body.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    kind: u16,
    body: Vec<u8>,
}

impl Reply {
    #[cfg(test)]
    pub(crate) fn new(kind: Kind, body: &[u8]) -> Reply {
        Reply { kind: kind as u16, body: body.to_vec() }
    }

    /// Returns the body if the message is of this type.
    pub(crate) fn body(&self, kind: Kind) -> Option<&[u8]> {
        (self.kind == kind as u16).then_some(&*self.body)
    }
}

/// The messages of an answer.
struct Answer {
    messages: Vec<Reply>,
    /// `false` if the table changed during a dump, so that messages may be missing or outdated.
    is_consistent: bool,
}

/// Calls `read` until an answer is consistent, and returns its messages. Fails with the first error
/// of `read`, or after [`DUMP_ATTEMPTS`] inconsistent answers.
fn until_consistent(mut read: impl FnMut() -> Result<Answer, Cause>) -> Result<Vec<Reply>, Cause> {
    for _ in 0..DUMP_ATTEMPTS {
        let answer = read()?;
        if answer.is_consistent {
            return Ok(answer.messages);
        }
    }
    Err(Cause::text(format!("the tables changed during each of {DUMP_ATTEMPTS} attempts to read them")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::LinkRequest;
    use crate::testing::{in_new_netns, new_netns};

    #[test]
    fn an_abandoned_answer_does_not_reach_the_next_request() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let payload = &wire::emitted(&LinkRequest::without_index().name("lo"));
            let mut bytes = Vec::new();
            // Sequence number 0: no caller waits for the answer.
            wire::Message { kind: Kind::GetLink as u16, flags: 1, sequence: 0, payload }.write(&mut bytes);
            netlink.connection.lock().unwrap().send(&bytes).unwrap();
            assert_eq!(netlink.find_link("not-there").unwrap(), None);
            assert_eq!(netlink.link("lo").unwrap().index, 1);
        });
    }

    #[test]
    fn an_interrupted_dump_is_retried_a_bounded_number_of_times() {
        let link = || Reply::new(Kind::NewLink, &[]);
        for (interruptions, reads) in [(0, Some(1)), (1, Some(2)), (DUMP_ATTEMPTS - 1, Some(DUMP_ATTEMPTS)), (99, None)]
        {
            let mut count = 0;
            let answer = until_consistent(|| {
                count += 1;
                Ok(Answer { messages: vec![link(); count], is_consistent: count > interruptions })
            });
            assert_eq!(answer.ok().map(|messages| messages.len()), reads, "{interruptions} interruptions");
            assert!(count <= DUMP_ATTEMPTS);
        }
        let mut count = 0;
        let failed = until_consistent(|| {
            count += 1;
            Err(Cause::text("no"))
        });
        assert!(failed.is_err() && count == 1);
    }

    #[test]
    fn a_connection_stays_in_the_namespace_it_was_opened_in() {
        in_new_netns(|| {
            let host = Netlink::open().unwrap();
            let container = host.open_in(&new_netns()).unwrap();
            host.create_bridge(&crate::BridgeSpec::named("only-here")).unwrap();
            assert!(host.find_link("only-here").unwrap().is_some());
            assert!(container.find_link("only-here").unwrap().is_none());
            assert_eq!(container.list_links().unwrap().len(), 1);
        });
    }

    #[test]
    fn the_kernels_explanation_is_in_the_error() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let error = netlink.create_bridge(&crate::BridgeSpec::named("a-name-that-is-too-long")).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("a-name-that-is-too-long"), "{text}");
            let (_, explanation) = text.split_once(&format!("(os error {})", error.errno().unwrap())).unwrap();
            assert!(explanation.starts_with(": "), "{text}");
        });
    }
}
