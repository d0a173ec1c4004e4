//! Connections the kernel remembers, and forgetting those that a changed port mapping has made wrong.
//!
//! NAT is decided by a connection's first packet. A UDP peer that keeps sending stays mapped to a container that is
//! gone, or to nobody, until its entry is deleted here; then its next packet is a first one.
//!
//! One pass over the table for all ports, as text or as a list over netlink, none where nothing is tracked. The
//! kernel can be asked for one entry only by all there is of its addresses and ports, so there is no way around the pass.
//! Never waits, never runs a program. A newcomer's mistake: matching the port alone. The connections of other hosts'
//! clients to that port *elsewhere* pass through this table too, and must live.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd as _;

use netlink_sys::{Socket, protocols::NETLINK_NETFILTER};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};

use crate::Netlink;
use crate::error::{Cause, Error, Result};
use crate::netlink::wire::{self, Message, NLMSG_DONE, NLMSG_ERROR, attributes};

mod claim;
mod text;

pub use claim::{Claim, Protocol};

/// A dump's parts are at most 32 KiB.
const RECEIVE: usize = 64 * 1024;
/// How often a dump the kernel calls incomplete is begun anew. What is still missed then stays: nothing worse.
const DUMPS: usize = 3;

const CTNETLINK: u16 = 1 << 8;
const IPCTNL_MSG_CT_NEW: u16 = CTNETLINK;
const IPCTNL_MSG_CT_GET: u16 = CTNETLINK | 1;
const IPCTNL_MSG_CT_DELETE: u16 = CTNETLINK | 2;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_DUMP_INTR: u16 = 0x10;
/// `struct nfgenmsg`
const NFGENMSG: usize = 4;

const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const NLA_F_NESTED: u16 = 1 << 15;

/// Which of the connections to a claimed port are forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forget {
    /// Those that are answered by somebody else than the claim's container: at its ADD.
    Others,
    /// Those that are answered by the claim's container: at its DEL.
    Own,
}

/// One entry, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The protocol.
    pub protocol: Protocol,
    /// Where the first packet was sent to, before any NAT.
    pub destination: SocketAddr,
    /// Who answers.
    pub answered_by: IpAddr,
    /// What names it to the kernel.
    key: Vec<u8>,
}

#[cfg(feature = "fuzzing")]
impl Entry {
    pub(crate) fn key(&self) -> &[u8] {
        &self.key
    }
}

/// The entries of these ports in a text like `/proc/net/nf_conntrack`.
#[cfg(feature = "fuzzing")]
pub(crate) fn entries_in(text: &str, ports: &[(Protocol, u16)]) -> Option<Vec<Entry>> {
    text::parse(text, &Wanted { ports: ports.iter().copied().collect(), family: 0 })
}

/// A connection to the kernel's table in the network namespace it was opened in.
pub struct Conntrack {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl fmt::Debug for Conntrack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conntrack").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

impl Conntrack {
    /// Opens a socket in the calling thread's network namespace.
    pub fn open() -> Result<Conntrack> {
        let open = || -> std::io::Result<Socket> {
            let mut socket = Socket::new(NETLINK_NETFILTER)?;
            socket.bind_auto()?;
            socket.connect(&netlink_sys::SocketAddr::new(0, 0))?;
            Ok(socket)
        };
        match open() {
            Ok(socket) => Ok(Conntrack { socket, sequence: 0, buffer: vec![0; RECEIVE] }),
            Err(error) => Err(Error::new("failed to open a netfilter socket", error)),
        }
    }

    /// Deletes the connections to the claimed ports that `forget` says, in one pass. A claim without a host address is
    /// for every address this host has. Returns how many. A kernel without connection tracking has none.
    ///
    /// # Errors
    /// The first; of those that could be read all the others have been tried.
    pub fn forget(&mut self, claims: &[Claim], forget: Forget) -> Result<usize> {
        let tracked = count();
        if claims.is_empty() || tracked == Some(0) {
            return Ok(0);
        }
        let wanted = Wanted::of(claims);
        let short = tracked.filter(|tracked| text::is_cheaper(*tracked)).and_then(|_| text::entries(&wanted));
        let entries = match short.map_or_else(|| self.entries(&wanted), Ok) {
            Err(error) if error.is_unsupported() => return Ok(0),
            entries => entries?,
        };
        let mut local = Local::default();
        let (mut forgotten, mut failed) = (0, None);
        for entry in entries {
            let wrong = is_wrong(&entry, claims, forget, &mut local);
            match wrong.and_then(|wrong| Ok(wrong && self.delete(&entry)?)) {
                Ok(deleted) => forgotten += usize::from(deleted),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(forgotten), Err)
    }

    /// The entries with one of these original destination ports.
    fn entries(&mut self, wanted: &Wanted) -> Result<Vec<Entry>> {
        match self.entries_by(wanted, &wanted.filter()) {
            // A kernel that finds fault with the filter.
            Err(error) if error.is_unsupported() => self.entries_by(wanted, &[0; NFGENMSG]),
            entries => entries,
        }
    }

    fn entries_by(&mut self, wanted: &Wanted, request: &[u8]) -> Result<Vec<Entry>> {
        const WHAT: &str = "failed to list the tracked connections";
        for _ in 0..DUMPS {
            let mut entries = Vec::new();
            let undisturbed = self.ask(WHAT, IPCTNL_MSG_CT_GET, NLM_F_DUMP, request, |message| {
                let is_wanted = |entry: &Entry| wanted.ports.contains(&(entry.protocol, entry.destination.port()));
                entries.extend(entry(message).filter(is_wanted));
            })?;
            if undisturbed {
                return Ok(entries);
            }
        }
        Err(Error::new(WHAT, Cause::text(format!("the table changed during each of {DUMPS} attempts to read it"))))
    }

    /// `false` if it has gone by itself.
    fn delete(&mut self, entry: &Entry) -> Result<bool> {
        let what = format!(
            "failed to delete the tracked {} connection to {} that {} answers",
            entry.protocol, entry.destination, entry.answered_by
        );
        match self.ask(&what, IPCTNL_MSG_CT_DELETE, NLM_F_ACK, &entry.key, |_| {}) {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Sends one request and hands over each message of the answer. Returns whether a list was read undisturbed.
    fn ask(
        &mut self,
        what: &str,
        kind: u16,
        flags: u16,
        body: &[u8],
        mut object: impl FnMut(&Message<'_>),
    ) -> Result<bool> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut bytes = Vec::with_capacity(16 + body.len());
        bytes.extend(u32::try_from(16 + body.len()).unwrap_or(u32::MAX).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((NLM_F_REQUEST | flags).to_ne_bytes());
        bytes.extend(self.sequence.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(body);
        self.socket.send(&bytes, 0).map_err(|error| Error::new(what, error))?;
        let (sequence, mut undisturbed) = (self.sequence, true);
        // The kernel answers inside `send`, and queues each next part of a dump inside `recv`.
        while let Some(datagram) = self.receive(what)? {
            for message in wire::messages(datagram).filter(|message| message.sequence == sequence) {
                undisturbed &= message.flags & NLM_F_DUMP_INTR == 0;
                match message.kind {
                    NLMSG_DONE | NLMSG_ERROR => match wire::answer(&message) {
                        None | Some((None, _)) => return Ok(undisturbed),
                        // What the kernel says where it has no ctnetlink.
                        Some((Some(Errno::EINVAL), _)) if kind == IPCTNL_MSG_CT_GET => {
                            return Err(Error::new(what, Errno::EOPNOTSUPP));
                        }
                        Some((Some(errno), said)) => {
                            let cause = Cause::Kernel { source: errno.into(), ack: said.map(Into::into) };
                            return Err(Error::new(what, cause));
                        }
                    },
                    _ => object(&message),
                }
            }
        }
        Err(Error::new(what, Cause::text("the kernel's answer has no end")))
    }

    fn receive(&mut self, what: &str) -> Result<Option<&[u8]>> {
        loop {
            match recv(self.socket.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC) {
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(None),
                Err(errno) => return Err(Error::new(what, errno)),
                Ok(len) if len > self.buffer.len() => return Err(Error::new(what, Errno::EMSGSIZE)),
                Ok(len) => return Ok(Some(&self.buffer[..len])),
            }
        }
    }
}

/// How many connections are tracked in the calling thread's namespace, where the kernel tells. A pass over the table
/// costs something even if it is none, because the kernel walks every bucket that all namespaces share.
fn count() -> Option<u64> {
    crate::sysctl::read("net/netfilter/nf_conntrack_count").ok()?.parse().ok()
}

/// Whether the entry is one that `forget` says.
fn is_wrong(entry: &Entry, claims: &[Claim], forget: Forget, local: &mut Local) -> Result<bool> {
    let mut wrong = false;
    for claim in claims.iter().filter(|claim| is_about(entry, claim)) {
        let meant = match forget {
            // Another claim of the container may have the same port at another address of the host.
            Forget::Others => !claims.iter().any(|other| is_served(entry, other)),
            Forget::Own => is_served(entry, claim),
        };
        let here = claim.host_ip.is_some() || (meant && local.has(entry.destination.ip())?);
        wrong |= meant && here;
    }
    Ok(wrong)
}

/// Whether the entry's first packet was one for the claim, as far as the entry tells.
fn is_about(entry: &Entry, claim: &Claim) -> bool {
    (entry.protocol, entry.destination.port()) == (claim.protocol, claim.host_port)
        && entry.destination.is_ipv4() == claim.container.is_ipv4()
        && claim.host_ip.is_none_or(|host_ip| host_ip == entry.destination.ip())
}

/// Whether the entry is about the claim and its container answers.
fn is_served(entry: &Entry, claim: &Claim) -> bool {
    is_about(entry, claim) && entry.answered_by == claim.container.ip()
}

/// The host's own addresses, read when first asked for.
#[derive(Default)]
struct Local(Option<BTreeSet<IpAddr>>);

impl Local {
    fn has(&mut self, address: IpAddr) -> Result<bool> {
        if address.is_loopback() {
            return Ok(true);
        }
        let addresses = match &mut self.0 {
            Some(addresses) => addresses,
            none => none
                .insert(Netlink::open()?.list_all_addresses()?.into_iter().map(|addr| addr.cidr.address()).collect()),
        };
        Ok(addresses.contains(&address))
    }
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    let mut bytes = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// What all entries that matter have in common.
struct Wanted {
    ports: BTreeSet<(Protocol, u16)>,
    /// `AF_*`, or 0 if both families are wanted.
    family: u8,
}

impl Wanted {
    fn of(claims: &[Claim]) -> Wanted {
        const AF_INET: u8 = 2;
        const AF_INET6: u8 = 10;
        let family = match (claims.iter().any(|c| c.container.is_ipv4()), claims.iter().any(|c| c.container.is_ipv6()))
        {
            (true, false) => AF_INET,
            (false, true) => AF_INET6,
            _ => 0,
        };
        Wanted { ports: claims.iter().map(|claim| (claim.protocol, claim.host_port)).collect(), family }
    }

    /// The body of the request for a list. Where all have a family and a protocol in common, and perhaps the port, the
    /// kernel is asked to choose (since 5.8; older ones send everything, and all is looked at again here anyway).
    fn filter(&self) -> Vec<u8> {
        const CTA_FILTER_ORIG_FLAGS: u16 = 1;
        const CTA_FILTER_REPLY_FLAGS: u16 = 2;
        const F_PROTO_NUM: u32 = 1 << 3;
        const F_PROTO_DST_PORT: u32 = 1 << 5;
        const CTA_PROTO_NUM: u16 = 1;
        const CTA_PROTO_DST_PORT: u16 = 3;
        let mut body = vec![self.family, 0, 0, 0];
        let protocols: BTreeSet<Protocol> = self.ports.iter().map(|(protocol, _)| *protocol).collect();
        let (Some(protocol), 1, true) = (protocols.first(), protocols.len(), self.family != 0) else { return body };
        let mut proto = attribute(CTA_PROTO_NUM, &[protocol.number()]);
        let mut flags = F_PROTO_NUM;
        if let (1, Some((_, port))) = (self.ports.len(), self.ports.first()) {
            proto.extend(attribute(CTA_PROTO_DST_PORT, &port.to_be_bytes()));
            flags |= F_PROTO_DST_PORT;
        }
        let tuple = attribute(CTA_TUPLE_PROTO | NLA_F_NESTED, &proto);
        body.extend(attribute(CTA_TUPLE_ORIG | NLA_F_NESTED, &tuple));
        let mut wanted = attribute(CTA_FILTER_ORIG_FLAGS, &flags.to_ne_bytes());
        wanted.extend(attribute(CTA_FILTER_REPLY_FLAGS, &0_u32.to_ne_bytes()));
        body.extend(attribute(CTA_FILTER | NLA_F_NESTED, &wanted));
        body
    }
}

/// Reads one message of a list. `None` for what has no ports, and for anything malformed.
pub fn entry(message: &Message<'_>) -> Option<Entry> {
    if message.kind != IPCTNL_MSG_CT_NEW {
        return None;
    }
    let (header, body) = message.payload.split_at_checked(NFGENMSG)?;
    let find = |wanted| attributes(body).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
    let original = find(CTA_TUPLE_ORIG)?;
    let (protocol, destination) = tuple(original)?;
    let answered_by = address(find(CTA_TUPLE_REPLY)?, Side::Source)?;
    // The family, then what tells this entry from all others.
    let mut key = vec![*header.first()?, 0, 0, 0];
    key.extend(attribute(CTA_TUPLE_ORIG | NLA_F_NESTED, original));
    for kind in [CTA_ID, CTA_ZONE] {
        key.extend(find(kind).map(|value| attribute(kind, value)).unwrap_or_default());
    }
    Some(Entry { protocol, destination, answered_by, key })
}

#[derive(Clone, Copy)]
enum Side {
    Source,
    Destination,
}

/// Protocol and destination of a tuple.
fn tuple(tuple: &[u8]) -> Option<(Protocol, SocketAddr)> {
    const CTA_PROTO_NUM: u16 = 1;
    const CTA_PROTO_DST_PORT: u16 = 3;
    let (_, proto) = attributes(tuple).find(|(kind, _)| *kind == CTA_TUPLE_PROTO)?;
    let find = |wanted| attributes(proto).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
    let [number] = find(CTA_PROTO_NUM)? else { return None };
    let port = u16::from_be_bytes(find(CTA_PROTO_DST_PORT)?.try_into().ok()?);
    Some((Protocol::by_number(*number)?, SocketAddr::new(address(tuple, Side::Destination)?, port)))
}

fn address(tuple: &[u8], side: Side) -> Option<IpAddr> {
    let (_, ip) = attributes(tuple).find(|(kind, _)| *kind == CTA_TUPLE_IP)?;
    // Source and destination of IPv4 are 1 and 2, those of IPv6 3 and 4.
    let offset = match side {
        Side::Source => 0,
        Side::Destination => 1,
    };
    attributes(ip).find_map(|(kind, value)| match kind.checked_sub(offset)? {
        1 => <[u8; 4]>::try_from(value).ok().map(IpAddr::from),
        3 => <[u8; 16]>::try_from(value).ok().map(IpAddr::from),
        _ => None,
    })
}

#[cfg(test)]
mod tests;
