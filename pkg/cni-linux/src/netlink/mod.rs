//! A connection to the kernel's routing tables, and how a question is asked.
//!
//! One socket and no runtime: the kernel works on a request inside the very `send` that brings it, so every answer is
//! there when `send` returns, and each `recv` of a dump queues the next part. Nothing here ever waits for an event. This
//! room knows requests, replies and errors; what links, addresses and routes are is known to the rooms named after them.
//!
//! The newcomer's mistake: a connection belongs for life to the namespace in which it was opened, wherever its user
//! goes later. Open one per namespace, with [`Netlink::open_in`], and never switch.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use cni::steps::{Step, hex};
use netlink_packet_core::{
    Emitable, ErrorMessage, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkDeserializable,
    NetlinkHeader, NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use nix::errno::Errno;

use crate::error::{Cause, Error, Result};
use crate::netns::Netns;
use crate::patience;

mod request;
pub mod wire;

pub(crate) use wire::{attributes, text};

/// How often an interrupted dump is begun again.
const DUMP_ATTEMPTS: usize = 20;

/// A dump's parts are at most 32 KiB (the kernel's own limit for one buffer); a link with hundreds of virtual functions
/// takes a little more.
const RECEIVE: usize = 64 << 10;

/// The length of a message's header, and where its length stands in it.
const HEADER: usize = 16;

/// A connection to the routing tables of one network namespace.
#[derive(Clone, Debug)]
pub struct Netlink {
    connection: Arc<Mutex<Connection>>,
}

/// The socket, and what belongs to one user of it at a time.
#[derive(Debug)]
struct Connection {
    socket: Socket,
    sequence: u32,
    /// Capacity alone: what is never written is never touched.
    buffer: Vec<u8>,
}

/// What ends an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// The acknowledgement, after whatever was asked to be told.
    Acknowledgement,
    /// The one message that was asked for.
    Message,
    /// The end of a list.
    Done,
}

impl Netlink {
    /// Opens a connection to the calling thread's namespace.
    pub fn open() -> Result<Netlink> {
        Connection::open().map(Netlink::new).map_err(|error| Error::new("failed to open a netlink socket", error))
    }

    /// Opens a connection to another namespace. Costs a visit to it.
    pub fn open_in(&self, netns: &Netns) -> Result<Netlink> {
        netns.run(Connection::open)?.map(Netlink::new).map_err(|error| {
            Error::new(format_args!("failed to open a netlink socket in {}", netns.path().display()), error)
        })
    }

    fn new(connection: Connection) -> Netlink {
        Netlink { connection: Arc::new(Mutex::new(connection)) }
    }

    /// Sends a request that changes something, with `flags` beside REQUEST and ACK, and returns what came before the
    /// acknowledgement.
    pub(crate) fn request(&self, kind: Kind, body: &dyn Body, flags: u16) -> Result<Vec<Reply>, Cause> {
        let request = Request { kind, body };
        self.exchange(request, flags | NLM_F_ACK, Ending::Acknowledgement).map(|answer| answer.messages)
    }

    /// Asks for one thing. `None` if the answer is no netlink message.
    pub(crate) fn get(&self, kind: Kind, body: &dyn Body) -> Result<Option<Reply>, Cause> {
        self.exchange(Request { kind, body }, 0, Ending::Message).map(|answer| answer.messages.into_iter().next())
    }

    /// Asks for a whole table, or what of it matches `body`.
    pub(crate) fn dump(&self, kind: Kind, body: &dyn Body) -> Result<Vec<Reply>, Cause> {
        until_consistent(|| self.exchange(Request { kind, body }, NLM_F_DUMP, Ending::Done))
    }

    fn exchange(&self, request: Request<'_>, flags: u16, ending: Ending) -> Result<Answer, Cause> {
        let step = Step::begin();
        let what = if step.is_heard() { request.name(flags) } else { String::new() };
        // A panic of another user leaves nothing half done: what it did not read has another sequence number.
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = connection.exchange(request, flags, ending);
        match ending {
            Ending::Acknowledgement => step.end_request(what, &answer, || request.bytes()),
            // A question that is answered with no is no failure.
            Ending::Message | Ending::Done => step.end(what, &answer),
        }
        answer
    }
}

/// What is asked of the kernel, by the number of the message (`RTM_…`).
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
    NewNeighbour = libc::RTM_NEWNEIGH,
    GetNeighbour = libc::RTM_GETNEIGH,
}

/// What a request says beyond its kind.
pub(crate) trait Body: Emitable {
    /// The same in words, for the log.
    fn words(&self) -> Vec<String>;
}

/// A request. Not the packet crate's enum of all there are: whoever holds that has the code to write, read and drop each
/// of them, traffic control too.
#[derive(Clone, Copy)]
struct Request<'a> {
    kind: Kind,
    body: &'a dyn Body,
}

impl Request<'_> {
    /// As the log names it.
    fn name(self, flags: u16) -> String {
        // Of a list the words say how it is cut down, which is nobody's concern.
        if flags & NLM_F_DUMP == NLM_F_DUMP {
            return format!("netlink {:?} (all)", self.kind);
        }
        let words: String = self.body.words().iter().map(|word| format!(" {word}")).collect();
        format!("netlink {:?}{words}", self.kind)
    }

    /// Byte for byte, without the header that is the same for all.
    fn bytes(self) -> String {
        let mut bytes = vec![0; self.body.buffer_len()];
        self.body.emit(&mut bytes);
        format!("type {}: {}", self.kind as u16, hex(&bytes))
    }
}

impl NetlinkSerializable for Request<'_> {
    fn message_type(&self) -> u16 {
        self.kind as u16
    }

    fn buffer_len(&self) -> usize {
        self.body.buffer_len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        self.body.emit(buffer);
    }
}

/// A message of the kernel's, to be read by the room that asked.
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

    /// What it says, if it is of that kind.
    pub(crate) fn body(&self, kind: Kind) -> Option<&[u8]> {
        (self.kind == kind as u16).then_some(&*self.body)
    }
}

impl NetlinkDeserializable for Reply {
    type Error = std::convert::Infallible;

    fn deserialize(header: &NetlinkHeader, body: &[u8]) -> Result<Reply, Self::Error> {
        Ok(Reply { kind: header.message_type, body: body.to_vec() })
    }
}

impl Connection {
    /// A socket in the calling thread's namespace.
    fn open() -> io::Result<Connection> {
        let socket = Socket::new(NETLINK_ROUTE)?;
        // Connected to the kernel, it hears nobody else.
        socket.connect(&SocketAddr::new(0, 0))?;
        // Since 4.12 and 4.20. An older kernel explains less and filters less; what we ask is filtered again here.
        let _ = socket.set_ext_ack(true);
        let _ = socket.set_cap_ack(true);
        let _ = socket.set_netlink_get_strict_chk(true);
        Ok(Connection { socket, sequence: 0, buffer: Vec::new() })
    }

    fn exchange(&mut self, request: Request<'_>, flags: u16, ending: Ending) -> Result<Answer, Cause> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut message = NetlinkMessage::new(NetlinkHeader::default(), NetlinkPayload::InnerMessage(request));
        message.header.flags = NLM_F_REQUEST | flags;
        message.header.sequence_number = self.sequence;
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        log::trace!("request, bytes from type and flags on: {:02x?}", bytes.get(4..).unwrap_or_default());
        patience::again(|| self.socket.send(&bytes, 0))?;

        let mut answer = Answer { messages: Vec::new(), interrupted: false };
        loop {
            self.receive()?;
            for bytes in messages(&self.buffer) {
                let reply = match NetlinkMessage::<Reply>::deserialize(bytes) {
                    // The remains of an exchange that was given up.
                    Ok(reply) if reply.header.sequence_number != self.sequence => continue,
                    Ok(reply) => reply,
                    // Of a list, what cannot be read is left out.
                    Err(_) if ending == Ending::Message => return Ok(answer),
                    Err(_) => continue,
                };
                answer.interrupted |= reply.header.flags & NLM_F_DUMP_INTR != 0;
                match reply.payload {
                    NetlinkPayload::InnerMessage(message) => answer.messages.push(message),
                    NetlinkPayload::Error(error) => return refusal(&error).map_or(Ok(answer), Err),
                    // A dump that fails half-way says so in its last message.
                    NetlinkPayload::Done(done) if done.code < 0 => {
                        return Err(kernel(-done.code, explanation(&done.extended_ack)));
                    }
                    NetlinkPayload::Done(_) => return Ok(answer),
                    NetlinkPayload::Overrun(_) => return Err(Cause::from(Errno::ENOBUFS)),
                    _ => continue,
                }
                if ending == Ending::Message {
                    return Ok(answer);
                }
            }
        }
    }

    /// Reads the next part of the answer into the buffer.
    fn receive(&mut self) -> Result<(), Cause> {
        self.buffer.clear();
        self.buffer.reserve_exact(RECEIVE);
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        match patience::again(|| self.socket.recv(&mut self.buffer, flags)) {
            Ok(length) if length > self.buffer.len() => {
                Err(Cause::text(format!("the kernel's answer is too large: {length} bytes")))
            }
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(Cause::text("the kernel ended its answer early"))
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// The messages of a datagram, each as long as it says, as far as that can be.
fn messages(datagram: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(rest.first_chunk::<4>().copied()?);
        let length = usize::try_from(length).ok().filter(|length| (HEADER..=rest.len()).contains(length))?;
        let message = rest.get(..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

struct Answer {
    messages: Vec<Reply>,
    interrupted: bool,
}

/// Reads again what was interrupted, with a bound.
fn until_consistent(mut read: impl FnMut() -> Result<Answer, Cause>) -> Result<Vec<Reply>, Cause> {
    for _ in 0..DUMP_ATTEMPTS {
        let answer = read()?;
        if !answer.interrupted {
            return Ok(answer.messages);
        }
    }
    Err(Cause::text(format!("the tables changed during each of {DUMP_ATTEMPTS} attempts to read them")))
}

/// `None` if it is an acknowledgement.
fn refusal(error: &ErrorMessage) -> Option<Cause> {
    let errno = error.code?.get().saturating_neg();
    // The request's header comes first (alone, because NETLINK_CAP_ACK is set), then the explanation's attributes.
    Some(kernel(errno, explanation(error.header.get(16..).unwrap_or_default())))
}

fn kernel(errno: i32, ack: Option<Box<str>>) -> Cause {
    Cause::Kernel { source: io::Error::from_raw_os_error(errno), ack }
}

/// The kernel's words out of an extended acknowledgement.
fn explanation(bytes: &[u8]) -> Option<Box<str>> {
    const NLMSGERR_ATTR_MSG: u16 = 1;
    attributes(bytes).find(|(kind, _)| *kind == NLMSGERR_ATTR_MSG).map(|(_, value)| text(value).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, new_netns};
    use rtnetlink::packet_route::link::{LinkAttribute, LinkMessage};

    /// An attribute that says it is that long.
    fn attribute(len: u16, kind: u16, value: &[u8]) -> Vec<u8> {
        [&len.to_ne_bytes(), &kind.to_ne_bytes(), value].concat()
    }

    #[test]
    fn an_explanation_is_read_out_of_its_attributes() {
        // NLMSGERR_ATTR_OFFS (2), four bytes; then NLMSGERR_ATTR_MSG (1), padded.
        let bytes = [attribute(8, 2, &[9, 0, 0, 0]), attribute(9, 1, b"nope\0\0\0\0")].concat();
        assert_eq!(explanation(&bytes).as_deref(), Some("nope"));
        assert_eq!(explanation(&bytes[..8]), None);
        assert_eq!(explanation(&[]), None);
        assert_eq!(explanation(&[255, 255, 1]), None);
    }

    #[test]
    fn a_datagram_is_taken_apart_and_no_length_leads_out_of_it() {
        let message = |length: u32, size: usize| {
            let mut bytes = length.to_ne_bytes().to_vec();
            bytes.resize(size, 7);
            bytes
        };
        let lengths = |bytes: &[u8]| messages(bytes).map(<[u8]>::len).collect::<Vec<_>>();
        assert_eq!(lengths(&[message(18, 20), message(16, 16)].concat()), [18, 16]);
        // The last one's padding may be missing.
        assert_eq!(lengths(&[message(16, 16), message(18, 18)].concat()), [16, 18]);
        for (length, size) in [(0, 16), (15, 16), (17, 16), (u32::MAX, 16), (16, 3)] {
            let bytes = message(length, size.max(4));
            assert_eq!(lengths(&bytes[..size]), [0; 0], "{length} {size}");
        }
    }

    #[test]
    fn an_answer_given_up_does_not_reach_the_next_question() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let mut ask = LinkMessage::default();
            ask.attributes.push(LinkAttribute::IfName("lo".to_owned()));
            let request = Request { kind: Kind::GetLink, body: &ask };
            let mut message = NetlinkMessage::new(NetlinkHeader::default(), NetlinkPayload::InnerMessage(request));
            message.header.flags = NLM_F_REQUEST;
            message.finalize();
            let mut bytes = vec![0; message.buffer_len()];
            message.serialize(&mut bytes);
            // Sequence number 0: nobody waits for it.
            netlink.connection.lock().unwrap().socket.send(&bytes, 0).unwrap();
            assert_eq!(netlink.find_link("not-there").unwrap(), None);
            assert_eq!(netlink.link("lo").unwrap().index, 1);
        });
    }

    #[test]
    fn an_acknowledgement_is_no_refusal() {
        assert!(refusal(&ErrorMessage::default()).is_none());
        let mut error = ErrorMessage::default();
        error.code = std::num::NonZeroI32::new(-17);
        // The refused request's header, of which nothing is read, then an attribute.
        error.header = vec![0; 16];
        error.header.extend(attribute(8, 1, b"why\0"));
        let refusal = Error::new("failed", refusal(&error).unwrap());
        assert_eq!((refusal.errno(), refusal.explanation()), (Some(17), Some("why")));
    }

    #[test]
    fn an_interrupted_dump_is_read_again_but_not_for_ever() {
        let link = || Reply::new(Kind::NewLink, &[]);
        for (interruptions, reads) in [(0, Some(1)), (1, Some(2)), (DUMP_ATTEMPTS - 1, Some(DUMP_ATTEMPTS)), (99, None)]
        {
            let mut count = 0;
            let answer = until_consistent(|| {
                count += 1;
                Ok(Answer { messages: vec![link(); count], interrupted: count <= interruptions })
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
            assert!(error.explanation().is_some(), "{error}");
            assert!(error.to_string().contains("a-name-that-is-too-long"), "{error}");
        });
    }
}
