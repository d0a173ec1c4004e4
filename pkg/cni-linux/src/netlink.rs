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

use cni::steps::Step;
use netlink_packet_core::{
    ErrorMessage, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload, NlasIterator,
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use nix::errno::Errno;
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::link::LinkAttribute;

use crate::error::{Cause, Error, Result};
use crate::netns::Netns;
use crate::patience;

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
    pub(crate) fn request(&self, message: RouteNetlinkMessage, flags: u16) -> Result<Vec<RouteNetlinkMessage>, Cause> {
        self.exchange(message, flags | NLM_F_ACK, Ending::Acknowledgement).map(|answer| answer.messages)
    }

    /// Asks for one thing. `None` if the packet crate cannot read the answer.
    pub(crate) fn get(&self, message: RouteNetlinkMessage) -> Result<Option<RouteNetlinkMessage>, Cause> {
        self.exchange(message, 0, Ending::Message).map(|answer| answer.messages.into_iter().next())
    }

    /// Asks for a whole table, or what of it matches `message`.
    pub(crate) fn dump(&self, message: RouteNetlinkMessage) -> Result<Vec<RouteNetlinkMessage>, Cause> {
        until_consistent(|| self.exchange(message.clone(), NLM_F_DUMP, Ending::Done))
    }

    fn exchange(&self, message: RouteNetlinkMessage, flags: u16, ending: Ending) -> Result<Answer, Cause> {
        let step = Step::begin();
        let what = if step.is_heard() { name(&message, flags) } else { String::new() };
        // A panic of another user leaves nothing half done: what it did not read has another sequence number.
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = connection.exchange(message, flags, ending);
        if step.is_heard() {
            step.end(what, &answer.as_ref().map_err(|cause| cause.to_string()));
        }
        answer
    }
}

/// A request as the log names it. Not by its `Debug`: the text of every message there is made each binary half a
/// megabyte larger.
fn name(inner: &RouteNetlinkMessage, flags: u16) -> String {
    let kind = match inner {
        RouteNetlinkMessage::NewLink(_) => "NewLink",
        RouteNetlinkMessage::GetLink(_) => "GetLink",
        RouteNetlinkMessage::SetLink(_) => "SetLink",
        RouteNetlinkMessage::DelLink(_) => "DelLink",
        RouteNetlinkMessage::NewAddress(_) => "NewAddress",
        RouteNetlinkMessage::GetAddress(_) => "GetAddress",
        RouteNetlinkMessage::DelAddress(_) => "DelAddress",
        RouteNetlinkMessage::NewRoute(_) => "NewRoute",
        RouteNetlinkMessage::GetRoute(_) => "GetRoute",
        RouteNetlinkMessage::DelRoute(_) => "DelRoute",
        RouteNetlinkMessage::NewNeighbour(_) => "NewNeighbour",
        RouteNetlinkMessage::GetNeighbour(_) => "GetNeighbour",
        RouteNetlinkMessage::DelNeighbour(_) => "DelNeighbour",
        _ => "request",
    };
    let whole = if flags & NLM_F_DUMP == NLM_F_DUMP { " (all)" } else { "" };
    let subject = match inner {
        RouteNetlinkMessage::NewLink(link)
        | RouteNetlinkMessage::GetLink(link)
        | RouteNetlinkMessage::SetLink(link)
        | RouteNetlinkMessage::DelLink(link) => {
            let named = link.attributes.iter().find_map(|attribute| match attribute {
                LinkAttribute::IfName(name) => Some(format!(" {name}")),
                _ => None,
            });
            named.or_else(|| (link.header.index != 0).then(|| format!(" index {}", link.header.index)))
        }
        RouteNetlinkMessage::NewAddress(address) | RouteNetlinkMessage::DelAddress(address) => {
            address.attributes.iter().find_map(|attribute| match attribute {
                AddressAttribute::Local(ip) => Some(format!(" {ip}/{}", address.header.prefix_len)),
                _ => None,
            })
        }
        _ => None,
    };
    format!("netlink {kind}{}{whole}", subject.unwrap_or_default())
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

    fn exchange(&mut self, message: RouteNetlinkMessage, flags: u16, ending: Ending) -> Result<Answer, Cause> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut message = NetlinkMessage::from(message);
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
                let reply = match NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes) {
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
    messages: Vec<RouteNetlinkMessage>,
    interrupted: bool,
}

/// Reads again what was interrupted, with a bound.
fn until_consistent(mut read: impl FnMut() -> Result<Answer, Cause>) -> Result<Vec<RouteNetlinkMessage>, Cause> {
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
fn explanation(attributes: &[u8]) -> Option<Box<str>> {
    const NLMSGERR_ATTR_MSG: u16 = 1;
    NlasIterator::new(attributes).filter_map(|attribute| attribute.ok()).find_map(|attribute| {
        (attribute.kind() == NLMSGERR_ATTR_MSG).then(|| {
            let text = attribute.value().split(|byte| *byte == 0).next().unwrap_or_default();
            String::from_utf8_lossy(text).into()
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, new_netns};
    use rtnetlink::packet_route::link::LinkMessage;

    #[test]
    fn an_explanation_is_read_out_of_its_attributes() {
        // NLMSGERR_ATTR_OFFS (2), four bytes; then NLMSGERR_ATTR_MSG (1), "nope\0", padded.
        let bytes = [8, 0, 2, 0, 9, 0, 0, 0, 9, 0, 1, 0, b'n', b'o', b'p', b'e', 0, 0, 0, 0];
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
            let mut message = NetlinkMessage::from(RouteNetlinkMessage::GetLink(ask));
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
        // The refused request's header, then an attribute: four bytes of its own and "why\0".
        error.header = [40, 0, 0, 0, 16, 0, 5, 6, 1, 0, 0, 0, 0, 0, 0, 0].to_vec();
        error.header.extend([8, 0, 1, 0, b'w', b'h', b'y', 0]);
        let refusal = Error::new("failed", refusal(&error).unwrap());
        assert_eq!((refusal.errno(), refusal.explanation()), (Some(17), Some("why")));
    }

    #[test]
    fn an_interrupted_dump_is_read_again_but_not_for_ever() {
        let link = || RouteNetlinkMessage::NewLink(Default::default());
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
