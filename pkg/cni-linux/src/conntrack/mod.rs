//! Connections the kernel remembers, and forgetting those that a changed port mapping has made
//! wrong.
//!
//! NAT is decided by a connection's first packet. A UDP peer that keeps sending stays mapped to a
//! removed container, or to no container, until its entry is deleted here; then its next packet is
//! a first one.
//!
//! One pass over the table for all ports, as text or as a list over netlink, none where nothing is
//! tracked. The kernel can be asked for one entry only by all there is of its addresses and ports,
//! so there is no way around the pass. Never waits, never runs a program. The port alone does not
//! identify an entry: connections to the same port of *other* hosts pass through this table too,
//! and must stay.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP};
use nix::errno::Errno;

use crate::Netlink;
use crate::error::{Cause, Error, Result};
use crate::netlink::socket::{Protocol as Subsystem, Socket};
use crate::netlink::wire::{Message, attribute, attributes, new_attribute, new_nest};

mod claim;
mod text;

pub use claim::{ClaimedPort, Protocol};

/// How often a dump that the kernel reports as incomplete is repeated. Entries missed after that
/// stay, which does no other harm.
const DUMPS: usize = 3;

const CTNETLINK: u16 = 1 << 8;
const IPCTNL_MSG_CT_NEW: u16 = CTNETLINK;
const IPCTNL_MSG_CT_GET: u16 = CTNETLINK | 1;
const IPCTNL_MSG_CT_DELETE: u16 = CTNETLINK | 2;
/// `struct nfgenmsg`
const NFGENMSG: usize = 4;

const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;

/// Which of the connections to a claimed port are forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushScope {
    /// The connections that another peer than the claim's container answers: at its ADD.
    Others,
    /// The connections that the claim's container answers: at its DEL.
    Own,
}

/// One entry, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The protocol.
    pub protocol: Protocol,
    /// Where the first packet was sent to, before any NAT.
    pub destination: SocketAddr,
    /// The address that answers.
    pub answered_by: IpAddr,
    /// The attributes that name the entry to the kernel.
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
#[derive(Debug)]
pub struct Conntrack {
    socket: Socket,
}

impl Conntrack {
    /// Opens a socket in the calling thread's network namespace.
    pub fn open() -> Result<Conntrack> {
        let socket = Socket::open(Subsystem::Netfilter);
        let socket = socket.map_err(|error| Error::new("failed to open a netfilter socket", error))?;
        Ok(Conntrack { socket })
    }

    /// Deletes the connections to the claimed ports that `forget` says, in one pass. A claim
    /// without a host address is for every address this host has. Returns how many. A kernel
    /// without connection tracking has none.
    ///
    /// # Errors
    /// The first; of those that could be read all the others have been tried.
    pub fn forget(&mut self, claims: &[ClaimedPort], forget: FlushScope) -> Result<usize> {
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
            let is_wanted = |entry: &Entry| wanted.ports.contains(&(entry.protocol, entry.destination.port()));
            let read = self.socket.ask(IPCTNL_MSG_CT_GET, NLM_F_DUMP, request, &mut |message| {
                entries.extend(entry(message).filter(is_wanted));
            });
            match read.map_err(|cause| Error::new(WHAT, cause)) {
                Ok(true) => return Ok(entries),
                Ok(false) => {}
                // The kernel's answer if it has no ctnetlink.
                Err(error) if error.errno() == Some(libc::EINVAL) => return Err(Error::new(WHAT, Errno::EOPNOTSUPP)),
                Err(error) => return Err(error),
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
        let deleted = self.socket.ask(IPCTNL_MSG_CT_DELETE, NLM_F_ACK, &entry.key, &mut |_| {});
        match deleted.map_err(|cause| Error::new(what, cause)) {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }
}
/// How many connections are tracked in the calling thread's namespace, if the kernel reports it. A
/// pass over the table costs something even if it is none, because the kernel walks every bucket
/// that all namespaces share.
fn count() -> Option<u64> {
    crate::sysctl::read("net/netfilter/nf_conntrack_count").ok()?.parse().ok()
}

/// Whether the entry is one that `forget` says.
fn is_wrong(entry: &Entry, claims: &[ClaimedPort], forget: FlushScope, local: &mut Local) -> Result<bool> {
    let mut wrong = false;
    for claim in claims.iter().filter(|claim| is_about(entry, claim)) {
        let meant = match forget {
            // Another claim of the container may have the same port at another address of the host.
            FlushScope::Others => !claims.iter().any(|other| is_served(entry, other)),
            FlushScope::Own => is_served(entry, claim),
        };
        let here = claim.host_ip.is_some() || (meant && local.has(entry.destination.ip())?);
        wrong |= meant && here;
    }
    Ok(wrong)
}

/// Whether the entry's first packet was one for the claim, according to the entry.
fn is_about(entry: &Entry, claim: &ClaimedPort) -> bool {
    (entry.protocol, entry.destination.port()) == (claim.protocol, claim.host_port)
        && entry.destination.is_ipv4() == claim.container.is_ipv4()
        && claim.host_ip.is_none_or(|host_ip| host_ip == entry.destination.ip())
}

/// Whether the entry is about the claim and its container answers.
fn is_served(entry: &Entry, claim: &ClaimedPort) -> bool {
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

/// The properties that all selected entries have in common.
struct Wanted {
    ports: BTreeSet<(Protocol, u16)>,
    /// `AF_*`, or 0 if both families are wanted.
    family: u8,
}

impl Wanted {
    fn of(claims: &[ClaimedPort]) -> Wanted {
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

    /// The body of the request for a list. Where all have a family and a protocol in common, and
    /// perhaps the port, the kernel is asked to choose (since 5.8; older ones send everything, and
    /// all is looked at again here anyway).
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
        let mut proto = new_attribute(CTA_PROTO_NUM, &[protocol.number()]);
        let mut flags = F_PROTO_NUM;
        if let (1, Some((_, port))) = (self.ports.len(), self.ports.first()) {
            proto.extend(new_attribute(CTA_PROTO_DST_PORT, &port.to_be_bytes()));
            flags |= F_PROTO_DST_PORT;
        }
        let tuple = new_nest(CTA_TUPLE_PROTO, &proto);
        body.extend(new_nest(CTA_TUPLE_ORIG, &tuple));
        let mut wanted = new_attribute(CTA_FILTER_ORIG_FLAGS, &flags.to_ne_bytes());
        wanted.extend(new_attribute(CTA_FILTER_REPLY_FLAGS, &0_u32.to_ne_bytes()));
        body.extend(new_nest(CTA_FILTER, &wanted));
        body
    }
}

/// Reads one message of a list. `None` for what has no ports, and for anything malformed.
pub fn entry(message: &Message<'_>) -> Option<Entry> {
    if message.kind != IPCTNL_MSG_CT_NEW {
        return None;
    }
    let (header, body) = message.payload.split_at_checked(NFGENMSG)?;
    let original = attribute(body, CTA_TUPLE_ORIG)?;
    let (protocol, destination) = tuple(original)?;
    let answered_by = address(attribute(body, CTA_TUPLE_REPLY)?, Side::Source)?;
    // The family, then what identifies the entry.
    let mut key = vec![*header.first()?, 0, 0, 0];
    key.extend(new_nest(CTA_TUPLE_ORIG, original));
    for kind in [CTA_ID, CTA_ZONE] {
        key.extend(attribute(body, kind).map(|value| new_attribute(kind, value)).unwrap_or_default());
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
    let proto = attribute(tuple, CTA_TUPLE_PROTO)?;
    let [number] = attribute(proto, CTA_PROTO_NUM)? else { return None };
    let port = u16::from_be_bytes(attribute(proto, CTA_PROTO_DST_PORT)?.try_into().ok()?);
    Some((Protocol::by_number(*number)?, SocketAddr::new(address(tuple, Side::Destination)?, port)))
}

fn address(tuple: &[u8], side: Side) -> Option<IpAddr> {
    let ip = attribute(tuple, CTA_TUPLE_IP)?;
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
