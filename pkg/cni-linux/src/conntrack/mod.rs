//! Deletes entries of the kernel's connection tracking table that a changed port mapping has made
//! wrong.
//!
//! The kernel applies NAT rules to the first packet of a connection only. A UDP peer that keeps
//! sending stays mapped to a removed container until its entry is deleted.
//!
//! The table is read once for all ports, as text from /proc or over netlink, and not at all while
//! it is empty. The kernel finds a single entry only by all of its addresses and ports, so the
//! whole table has to be read. A port does not identify an entry: connections to the same port of
//! *other* hosts pass through this host too, and must stay.

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

/// How often the table is read if the kernel reports that it changed meanwhile.
const DUMPS: usize = 3;

const CTNETLINK: u16 = 1 << 8;
const IPCTNL_MSG_CT_NEW: u16 = CTNETLINK;
const IPCTNL_MSG_CT_GET: u16 = CTNETLINK | 1;
const IPCTNL_MSG_CT_DELETE: u16 = CTNETLINK | 2;
/// The size of `struct nfgenmsg`, with which each message begins.
const NFGENMSG: usize = 4;

const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;

/// Which connections to a claimed port are deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushScope {
    /// Those that another address than the claim's container answers. For ADD.
    Others,
    /// Those that the claim's container answers. For DEL.
    Own,
}

/// One tracked connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The protocol.
    pub protocol: Protocol,
    /// The destination of the first packet, before any NAT.
    pub destination: SocketAddr,
    /// The address that answers, after NAT.
    pub answered_by: IpAddr,
    /// The message, without its netlink header, that identifies the entry to the kernel.
    key: Vec<u8>,
}

#[cfg(feature = "fuzzing")]
impl Entry {
    pub(crate) fn key(&self) -> &[u8] {
        &self.key
    }
}

/// Returns the entries of these ports in a text like `/proc/net/nf_conntrack`.
#[cfg(feature = "fuzzing")]
pub(crate) fn entries_in(text: &str, ports: &[(Protocol, u16)]) -> Option<Vec<Entry>> {
    text::parse(text, &Selection { ports: ports.iter().copied().collect(), family: 0 })
}

/// The connection tracking table of the network namespace in which this was opened.
#[derive(Debug)]
pub struct Conntrack {
    socket: Socket,
}

impl Conntrack {
    /// Opens a netfilter socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel refuses the socket.
    pub fn open() -> Result<Conntrack> {
        let socket = Socket::open(Subsystem::Netfilter);
        let socket = socket.map_err(|error| Error::new("failed to open a netfilter socket", error))?;
        Ok(Conntrack { socket })
    }

    /// Deletes the connections to the claimed ports that `scope` selects. A claim without a host
    /// address includes all addresses of this host. Returns the number of deleted entries, which is
    /// 0 on a kernel without connection tracking.
    ///
    /// # Errors
    /// The table cannot be read, or the first deletion that failed, after all others were tried.
    pub fn forget(&mut self, claims: &[ClaimedPort], scope: FlushScope) -> Result<usize> {
        let tracked = count();
        if claims.is_empty() || tracked == Some(0) {
            return Ok(0);
        }
        let selection = Selection::of(claims);
        let from_text = if tracked.is_some_and(text::is_cheaper) { text::entries(&selection) } else { None };
        let entries = match from_text {
            Some(entries) => entries,
            None => match self.entries(&selection) {
                Err(error) if error.is_unsupported() => return Ok(0),
                entries => entries?,
            },
        };
        let mut host_addresses = HostAddresses::default();
        let (mut deleted, mut first_error) = (0, None);
        for entry in entries {
            let outcome = match is_selected(&entry, claims, scope, &mut host_addresses) {
                Ok(true) => self.delete(&entry),
                Ok(false) => Ok(false),
                Err(error) => Err(error),
            };
            match outcome {
                Ok(was_deleted) => deleted += usize::from(was_deleted),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        first_error.map_or(Ok(deleted), Err)
    }

    /// Reads the selected entries over netlink, and lets the kernel filter them if it can.
    fn entries(&mut self, selection: &Selection) -> Result<Vec<Entry>> {
        match self.dump(selection, &selection.request()) {
            // The kernel does not support the filter.
            Err(error) if error.is_unsupported() => self.dump(selection, &[0; NFGENMSG]),
            entries => entries,
        }
    }

    /// Reads the table over netlink with `request`, and returns the selected entries.
    ///
    /// # Errors
    /// The table changed during each of [`DUMPS`] attempts; [`Error::is_unsupported`] without
    /// ctnetlink.
    fn dump(&mut self, selection: &Selection, request: &[u8]) -> Result<Vec<Entry>> {
        const WHAT: &str = "failed to list the tracked connections";
        for _ in 0..DUMPS {
            let mut entries = Vec::new();
            let has_port = |entry: &Entry| selection.ports.contains(&(entry.protocol, entry.destination.port()));
            let read = self.socket.ask(IPCTNL_MSG_CT_GET, NLM_F_DUMP, request, &mut |message| {
                entries.extend(entry(message).filter(has_port));
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

    /// Deletes an entry. Returns `false` if it does not exist any more.
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
/// Returns the number of connections that are tracked in the calling thread's namespace, or `None`
/// if the kernel does not report it. Reading the table is expensive even if it has no entries,
/// because the kernel walks all buckets, which all namespaces share.
fn count() -> Option<u64> {
    crate::sysctl::read("net/netfilter/nf_conntrack_count").ok()?.parse().ok()
}

/// Whether `scope` selects the entry for deletion.
fn is_selected(
    entry: &Entry,
    claims: &[ClaimedPort],
    scope: FlushScope,
    host_addresses: &mut HostAddresses,
) -> Result<bool> {
    for claim in claims.iter().filter(|claim| matches_claim(entry, claim)) {
        let is_in_scope = match scope {
            // Any claim may name the container that answers: the same port may be claimed at two
            // addresses of the host.
            FlushScope::Others => !claims.iter().any(|other| is_answered_by_container(entry, other)),
            FlushScope::Own => is_answered_by_container(entry, claim),
        };
        // Without a host address in the claim, the entry may be about a port of another host.
        if is_in_scope && (claim.host_ip.is_some() || host_addresses.contains(entry.destination.ip())?) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the first packet of the entry had the protocol, port and host address of the claim.
fn matches_claim(entry: &Entry, claim: &ClaimedPort) -> bool {
    (entry.protocol, entry.destination.port()) == (claim.protocol, claim.host_port)
        && entry.destination.is_ipv4() == claim.container.is_ipv4()
        && claim.host_ip.is_none_or(|host_ip| host_ip == entry.destination.ip())
}

/// Whether the entry matches the claim and the claim's container answers.
fn is_answered_by_container(entry: &Entry, claim: &ClaimedPort) -> bool {
    matches_claim(entry, claim) && entry.answered_by == claim.container.ip()
}

/// The host's addresses, which are read at the first use.
#[derive(Default)]
struct HostAddresses(Option<BTreeSet<IpAddr>>);

impl HostAddresses {
    /// Whether this host has the address.
    fn contains(&mut self, address: IpAddr) -> Result<bool> {
        if address.is_loopback() {
            return Ok(true);
        }
        if let Some(addresses) = &self.0 {
            return Ok(addresses.contains(&address));
        }
        let listed = Netlink::open()?.list_all_addresses()?;
        let addresses: BTreeSet<IpAddr> = listed.iter().map(|addr| addr.cidr.address()).collect();
        Ok(self.0.insert(addresses).contains(&address))
    }
}

/// Selects the entries to read from the table.
struct Selection {
    /// The protocols and ports of the claims. Entries with another destination are not read.
    ports: BTreeSet<(Protocol, u16)>,
    /// `AF_INET` or `AF_INET6`, or 0 for both.
    family: u8,
}

impl Selection {
    /// Returns the selection of all entries that may match one of the claims.
    fn of(claims: &[ClaimedPort]) -> Selection {
        const AF_INET: u8 = 2;
        const AF_INET6: u8 = 10;
        let has_ipv4 = claims.iter().any(|claim| claim.container.is_ipv4());
        let has_ipv6 = claims.iter().any(|claim| claim.container.is_ipv6());
        let family = match (has_ipv4, has_ipv6) {
            (true, false) => AF_INET,
            (false, true) => AF_INET6,
            _ => 0,
        };
        Selection { ports: claims.iter().map(|claim| (claim.protocol, claim.host_port)).collect(), family }
    }

    /// Returns the body of the request for the table. If the selected entries have the same family
    /// and protocol, it has a filter for these, and if they also have the same port, for that too.
    /// Kernels before 5.8 ignore the filter and send all entries, so the caller selects again.
    fn request(&self) -> Vec<u8> {
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
        // Which of the tuple's attributes the kernel compares.
        let mut compared = new_attribute(CTA_FILTER_ORIG_FLAGS, &flags.to_ne_bytes());
        compared.extend(new_attribute(CTA_FILTER_REPLY_FLAGS, &0_u32.to_ne_bytes()));
        body.extend(new_nest(CTA_FILTER, &compared));
        body
    }
}

/// Decodes one message of the table. Returns `None` if it is malformed or the protocol has no
/// ports.
pub fn entry(message: &Message<'_>) -> Option<Entry> {
    if message.kind != IPCTNL_MSG_CT_NEW {
        return None;
    }
    let (header, body) = message.payload.split_at_checked(NFGENMSG)?;
    let original = attribute(body, CTA_TUPLE_ORIG)?;
    let (protocol, destination) = tuple(original)?;
    let answered_by = address(attribute(body, CTA_TUPLE_REPLY)?, Side::Source)?;
    // `struct nfgenmsg` with the family, then the attributes that identify the entry.
    let mut key = vec![*header.first()?, 0, 0, 0];
    key.extend(new_nest(CTA_TUPLE_ORIG, original));
    for kind in [CTA_ID, CTA_ZONE] {
        key.extend(attribute(body, kind).map(|value| new_attribute(kind, value)).unwrap_or_default());
    }
    Some(Entry { protocol, destination, answered_by, key })
}

/// An end of a connection.
#[derive(Clone, Copy)]
enum Side {
    Source,
    Destination,
}

/// Decodes the protocol and the destination of a tuple (CTA_TUPLE_ORIG).
fn tuple(tuple: &[u8]) -> Option<(Protocol, SocketAddr)> {
    const CTA_PROTO_NUM: u16 = 1;
    const CTA_PROTO_DST_PORT: u16 = 3;
    let proto = attribute(tuple, CTA_TUPLE_PROTO)?;
    let [number] = attribute(proto, CTA_PROTO_NUM)? else { return None };
    let port = u16::from_be_bytes(attribute(proto, CTA_PROTO_DST_PORT)?.try_into().ok()?);
    Some((Protocol::by_number(*number)?, SocketAddr::new(address(tuple, Side::Destination)?, port)))
}

/// Decodes an address of a tuple (CTA_TUPLE_ORIG or CTA_TUPLE_REPLY).
fn address(tuple: &[u8], side: Side) -> Option<IpAddr> {
    let ip = attribute(tuple, CTA_TUPLE_IP)?;
    // The attributes of source and destination have the numbers 1 and 2 for IPv4, 3 and 4 for IPv6.
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
