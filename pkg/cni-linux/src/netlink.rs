//! A connection to the kernel's routing tables, and how a question is asked.
//!
//! rtnetlink on a current-thread runtime, wrapped so that callers see plain synchronous functions. This room knows
//! requests, replies and errors; what links, addresses and routes are is known to the rooms named after them.
//!
//! The newcomer's mistake: a connection belongs for life to the namespace in which it was opened, wherever its user
//! goes later. Open one per namespace, with [`Netlink::open_in`], and never switch.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use cni::steps::Step;
use futures_util::StreamExt as _;
use netlink_packet_core::{
    ErrorMessage, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload, NlasIterator,
};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::link::LinkAttribute;
use rtnetlink::sys::AsyncSocket as _;
use tokio::runtime::{Builder, Runtime};

use crate::error::{Cause, Error, Result};
use crate::netns::Netns;
use crate::patience::Patient;

/// The kernel marks a dump with this when the tables changed while it was written: entries may be missing or twice.
const NLM_F_DUMP_INTR: u16 = 0x10;

/// How often an interrupted dump is begun again.
const DUMP_ATTEMPTS: usize = 20;

/// The kernel answers within microseconds, or after the 30 ms of a deletion; on a machine with a long queue for its
/// RTNL lock after seconds. Whoever waits longer than this waits for ever.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// A connection to the routing tables of one network namespace.
#[derive(Clone, Debug)]
pub struct Netlink {
    runtime: Arc<Runtime>,
    handle: rtnetlink::Handle,
}

impl Netlink {
    /// Opens a connection to the calling thread's namespace.
    pub fn open() -> Result<Netlink> {
        let open = || -> io::Result<Netlink> {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            let handle = connect(&runtime)?;
            Ok(Netlink { runtime: Arc::new(runtime), handle })
        };
        open().map_err(|error| Error::new("failed to open a netlink socket", error))
    }

    /// Opens a connection to another namespace. It shares this one's runtime, so it costs a thread and a socket.
    pub fn open_in(&self, netns: &Netns) -> Result<Netlink> {
        let handle = netns.run(|| connect(&self.runtime))?;
        let handle = handle.map_err(|error| {
            Error::new(format_args!("failed to open a netlink socket in {}", netns.path().display()), error)
        })?;
        Ok(Netlink { runtime: Arc::clone(&self.runtime), handle })
    }

    /// Sends a request that changes something (or asks for one thing), with `flags` beside REQUEST and ACK, and
    /// returns what came before the acknowledgement.
    pub(crate) fn request(&self, message: RouteNetlinkMessage, flags: u16) -> Result<Vec<RouteNetlinkMessage>, Cause> {
        // The acknowledgement is wanted for a question too: should the packet crate fail to decode the answer, it drops
        // it, and only the acknowledgement tells us not to wait.
        self.exchange(message, flags | NLM_F_ACK).map(|answer| answer.messages)
    }

    /// Asks for a whole table, or what of it matches `message`.
    pub(crate) fn dump(&self, message: RouteNetlinkMessage) -> Result<Vec<RouteNetlinkMessage>, Cause> {
        until_consistent(|| self.exchange(message.clone(), NLM_F_DUMP))
    }

    fn exchange(&self, message: RouteNetlinkMessage, flags: u16) -> Result<Answer, Cause> {
        let mut message = NetlinkMessage::from(message);
        message.header.flags = NLM_F_REQUEST | flags;
        let step = Step::begin();
        let what = if step.is_heard() { name(&message) } else { String::new() };
        let exchange = exchange(self.handle.clone(), message);
        let answer = self
            .runtime
            .block_on(async { tokio::time::timeout(ANSWER_LIMIT, exchange).await })
            .unwrap_or(Err(Cause::Deadline(ANSWER_LIMIT)));
        if step.is_heard() {
            step.end(what, &answer.as_ref().map_err(|cause| cause.to_string()));
        }
        answer
    }
}

/// A request as the log names it; whole at `trace`.
fn name(message: &NetlinkMessage<RouteNetlinkMessage>) -> String {
    let NetlinkPayload::InnerMessage(inner) = &message.payload else { return "netlink".to_owned() };
    let text = format!("{inner:?}");
    log::trace!("request {text}");
    let kind = text.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
    let whole = if message.header.flags & NLM_F_DUMP == NLM_F_DUMP { " (all)" } else { "" };
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

/// A socket in the calling thread's namespace, served by `runtime`.
fn connect(runtime: &Runtime) -> io::Result<rtnetlink::Handle> {
    let _context = runtime.enter();
    let (mut connection, handle, _) = rtnetlink::new_connection_with_socket::<Patient>()?;
    // The end of every exchange is wanted, not only its contents: see `Netlink::request`.
    connection.set_forward_ack(true);
    connection.set_forward_done(true);
    let socket = connection.socket_mut().socket_mut();
    // Since 4.12 and 4.20. An older kernel explains less and filters less; what we ask is filtered again here.
    let _ = socket.set_ext_ack(true);
    let _ = socket.set_cap_ack(true);
    let _ = socket.set_netlink_get_strict_chk(true);
    runtime.spawn(connection);
    Ok(handle)
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

async fn exchange(
    mut handle: rtnetlink::Handle,
    message: NetlinkMessage<RouteNetlinkMessage>,
) -> Result<Answer, Cause> {
    let mut replies = handle.request(message).map_err(|_| Cause::text("the netlink connection is closed"))?;
    let mut answer = Answer { messages: Vec::new(), interrupted: false };
    while let Some(reply) = replies.next().await {
        answer.interrupted |= reply.header.flags & NLM_F_DUMP_INTR != 0;
        match reply.payload {
            NetlinkPayload::InnerMessage(message) => answer.messages.push(message),
            NetlinkPayload::Error(error) => return refusal(&error).map_or(Ok(answer), Err),
            // A dump that fails half-way says so in its last message.
            NetlinkPayload::Done(done) if done.code < 0 => {
                return Err(kernel(-done.code, explanation(&done.extended_ack)));
            }
            NetlinkPayload::Done(_) => return Ok(answer),
            NetlinkPayload::Overrun(_) => return Err(Cause::from(nix::errno::Errno::ENOBUFS)),
            _ => {}
        }
    }
    Err(Cause::text("the netlink connection was closed before the answer came"))
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
