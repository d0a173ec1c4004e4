//! Deletes the entries of the kernel's connection tracking table that a changed port mapping has
//! made wrong.
//!
//! The kernel decides on NAT at a connection's first packet. A UDP peer that keeps sending stays
//! mapped to a removed container, or to no container, until the connection's entry is deleted here.
//! After that, the peer's next packet counts as a first one.
//!
//! One pass over the table, read as text or over netlink, handles all ports. The kernel looks up a
//! single entry only by its complete addresses and ports, which are not known here. The port alone
//! does not identify an entry: the table also has connections to the same port of *other* hosts
//! that pass through this host, and these must stay.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use cni::cidr::from_octets;
use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP};
use nix::errno::Errno;

use crate::Netlink;
use crate::error::{Cause, Error, Result};
use crate::netlink::socket::{Protocol as Subsystem, Socket};
use crate::netlink::wire::{Message, attribute, attributes, new_attribute, new_nest};

mod claim;
mod text;

pub use claim::{ClaimedPort, Protocol};

/// The maximum number of readings of a table that changes during each of them.
const DUMP_ATTEMPTS: usize = 3;

const CTNETLINK: u16 = 1 << 8;
const IPCTNL_MSG_CT_NEW: u16 = CTNETLINK;
const IPCTNL_MSG_CT_GET: u16 = CTNETLINK | 1;
const IPCTNL_MSG_CT_DELETE: u16 = CTNETLINK | 2;
/// The length of `struct nfgenmsg`, the header of every message.
const NFGENMSG: usize = 4;

const AF_UNSPEC: u8 = 0;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

// The attributes of an entry or request. A tuple describes the packets of one direction.
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;

// The attributes of a tuple.
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;

// The attributes of `CTA_TUPLE_IP`.
const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_SRC: u16 = 3;
const CTA_IP_V6_DST: u16 = 4;

// The attributes of `CTA_TUPLE_PROTO`.
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_SRC_PORT: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;

/// Which connections to a claimed port are deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushScope {
    /// Connections whose replies come from none of the claims' containers, but for example from an
    /// earlier container. Used at ADD.
    Others,
    /// Connections whose replies come from the claim's container. Used at DEL.
    Own,
}

/// A tracked connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The protocol.
    pub protocol: Protocol,
    /// The destination of the first packet, before any NAT.
    pub destination: SocketAddr,
    /// The source address of the replies.
    pub answered_by: IpAddr,
    /// The body of a request that identifies the entry: header and attributes.
    key: Vec<u8>,
}

#[cfg(feature = "fuzzing")]
impl Entry {
    pub(crate) fn key(&self) -> &[u8] {
        &self.key
    }
}

/// Returns the entries with one of these ports in a text like `/proc/net/nf_conntrack`; `None` if
/// the text is malformed.
#[cfg(feature = "fuzzing")]
pub(crate) fn entries_in(text: &str, ports: &[(Protocol, u16)]) -> Option<Vec<Entry>> {
    text::parse(text, &Selection { ports: ports.iter().copied().collect(), family: AF_UNSPEC })
}

/// A socket for the connection tracking table of the network namespace that it was opened in.
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

    /// Deletes the connections to the claimed ports that are in `scope`. A claim without a host
    /// address covers every address of this host. Returns how many connections were deleted; 0 on a
    /// kernel without connection tracking.
    ///
    /// # Errors
    /// - The table could not be read; nothing was deleted.
    /// - The host's addresses could not be read, or an entry could not be deleted. The first of
    ///   these errors is returned after all entries have been tried.
    pub fn flush(&mut self, claims: &[ClaimedPort], scope: FlushScope) -> Result<usize> {
        let tracked_count = tracked_connections();
        // A pass over an empty table is not cheap: the kernel visits every hash bucket of all
        // namespaces.
        if claims.is_empty() || tracked_count == Some(0) {
            return Ok(0);
        }
        let entries = match self.read_entries(&Selection::of(claims), tracked_count) {
            Err(error) if error.is_unsupported() => return Ok(0),
            entries => entries?,
        };
        let mut host_addresses = HostAddresses::default();
        let (mut deleted_count, mut first_error) = (0, None);
        for entry in entries {
            let deleted = match must_delete(&entry, claims, scope, &mut host_addresses) {
                Ok(true) => self.delete(&entry),
                Ok(false) => Ok(false),
                Err(error) => Err(error),
            };
            match deleted {
                Ok(is_deleted) => deleted_count += usize::from(is_deleted),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        match first_error {
            Some(error) => Err(error),
            None => Ok(deleted_count),
        }
    }

    /// Returns the entries with one of the selected ports, read as text if that is cheaper, else
    /// over netlink. `tracked_count` is the number of entries in the table, if it is known.
    ///
    /// # Errors
    /// [`Error::is_unsupported`] if the kernel does not offer connection tracking over netlink.
    fn read_entries(&mut self, selection: &Selection, tracked_count: Option<u64>) -> Result<Vec<Entry>> {
        if tracked_count.is_some_and(text::is_cheaper)
            && let Some(entries) = text::read_entries(selection)
        {
            return Ok(entries);
        }
        self.list_entries(selection)
    }

    /// Returns the entries with one of the selected ports, read over netlink.
    fn list_entries(&mut self, selection: &Selection) -> Result<Vec<Entry>> {
        match self.request_entries(selection, &selection.request()) {
            // Perhaps only the filter in the request is not supported: list everything.
            Err(error) if error.is_unsupported() => self.request_entries(selection, &nfgenmsg(AF_UNSPEC)),
            entries => entries,
        }
    }

    /// Lists the table with a request that has this body. Returns the entries that have one of the
    /// selected ports. Repeats the request if the table changed during the answer.
    ///
    /// # Errors
    /// [`Error::is_unsupported`] if the kernel does not offer connection tracking over netlink, or
    /// does not support a filter in `request`.
    fn request_entries(&mut self, selection: &Selection, request: &[u8]) -> Result<Vec<Entry>> {
        const FAILURE: &str = "failed to list the tracked connections";
        for _ in 0..DUMP_ATTEMPTS {
            let mut entries = Vec::new();
            let is_consistent = self.socket.ask(IPCTNL_MSG_CT_GET, NLM_F_DUMP, request, &mut |message| {
                if let Some(entry) = decode_entry(message)
                    && selection.ports.contains(&(entry.protocol, entry.destination.port()))
                {
                    entries.push(entry);
                }
            });
            match is_consistent.map_err(|cause| Error::new(FAILURE, cause)) {
                Ok(true) => return Ok(entries),
                Ok(false) => {}
                // The kernel answers EINVAL if it has no connection tracking over netlink. Callers
                // expect the errno of an unsupported feature.
                Err(error) if error.errno() == Some(libc::EINVAL) => {
                    return Err(Error::new(FAILURE, Errno::EOPNOTSUPP));
                }
                Err(error) => return Err(error),
            }
        }
        Err(Error::new(
            FAILURE,
            Cause::text(format!("the table changed during each of {DUMP_ATTEMPTS} attempts to read it")),
        ))
    }

    /// Deletes an entry. Returns `false` if it no longer exists.
    fn delete(&mut self, entry: &Entry) -> Result<bool> {
        let failure = format!(
            "failed to delete the tracked {} connection to {} that {} answers",
            entry.protocol, entry.destination, entry.answered_by
        );
        let deleted = self.socket.ask(IPCTNL_MSG_CT_DELETE, NLM_F_ACK, &entry.key, &mut |_| {});
        match deleted.map_err(|cause| Error::new(failure, cause)) {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Returns how many connections are tracked in the calling thread's namespace; `None` if the kernel
/// does not report the number.
fn tracked_connections() -> Option<u64> {
    crate::sysctl::read("net/netfilter/nf_conntrack_count").ok()?.parse().ok()
}

/// Whether an entry is to be deleted: it targets one of the claims and is in `scope`, and, if that
/// claim has no host address, its destination is an address of this host. Fails if the host's
/// addresses cannot be listed.
fn must_delete(
    entry: &Entry,
    claims: &[ClaimedPort],
    scope: FlushScope,
    host_addresses: &mut HostAddresses,
) -> Result<bool> {
    // The entry may target several claims, for example one with and one without a host address.
    let is_answered_by_any = claims.iter().any(|claim| is_answered_by_container(entry, claim));
    for claim in claims.iter().filter(|claim| targets(entry, claim)) {
        let is_in_scope = match scope {
            FlushScope::Others => !is_answered_by_any,
            FlushScope::Own => is_answered_by_container(entry, claim),
        };
        if !is_in_scope {
            continue;
        }
        // A claim without a host address is also targeted by connections to other hosts that pass
        // through this host.
        if claim.host_ip.is_some() || host_addresses.contains(entry.destination.ip())? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the entry's first packet was sent to the claimed port, which is on any address if the
/// claim has no host address.
fn targets(entry: &Entry, claim: &ClaimedPort) -> bool {
    (entry.protocol, entry.destination.port()) == (claim.protocol, claim.host_port)
        && entry.destination.is_ipv4() == claim.container.is_ipv4()
        && claim.host_ip.is_none_or(|host_ip| host_ip == entry.destination.ip())
}

/// Whether the entry targets the claim and the claim's container answers the connection.
fn is_answered_by_container(entry: &Entry, claim: &ClaimedPort) -> bool {
    targets(entry, claim) && entry.answered_by == claim.container.ip()
}

/// The addresses of this host, listed at the first use.
#[derive(Default)]
struct HostAddresses(Option<BTreeSet<IpAddr>>);

impl HostAddresses {
    /// Whether this host has the address. Fails if the addresses cannot be listed.
    fn contains(&mut self, address: IpAddr) -> Result<bool> {
        // This host has every address of 127.0.0.0/8, also those that are not listed.
        if address.is_loopback() {
            return Ok(true);
        }
        let addresses = match &mut self.0 {
            Some(addresses) => addresses,
            empty => {
                let listed = Netlink::open()?.list_all_addresses()?;
                empty.insert(listed.into_iter().map(|addr| addr.cidr.address()).collect())
            }
        };
        Ok(addresses.contains(&address))
    }
}

/// The entries that are read from the table. Whether an entry is then deleted is decided by
/// [`must_delete`].
struct Selection {
    /// The protocol and the original destination port: an entry must have one of these pairs.
    ports: BTreeSet<(Protocol, u16)>,
    /// The family (`AF_*`) of all selected entries; `AF_UNSPEC` for both.
    family: u8,
}

impl Selection {
    /// Selects the entries of the claimed ports.
    fn of(claims: &[ClaimedPort]) -> Selection {
        let has_ipv4 = claims.iter().any(|claim| claim.container.is_ipv4());
        let has_ipv6 = claims.iter().any(|claim| claim.container.is_ipv6());
        let family = match (has_ipv4, has_ipv6) {
            (true, false) => AF_INET,
            (false, true) => AF_INET6,
            _ => AF_UNSPEC,
        };
        Selection { ports: claims.iter().map(|claim| (claim.protocol, claim.host_port)).collect(), family }
    }

    /// Returns the body of the list request. Its header selects the family. If all ports have one
    /// family and one protocol, a filter selects the protocol, and the port if there is only one.
    /// Kernels before 5.8 ignore the filter, so the caller must filter the answer.
    fn request(&self) -> Vec<u8> {
        const CTA_FILTER_ORIG_FLAGS: u16 = 1;
        const CTA_FILTER_REPLY_FLAGS: u16 = 2;
        const F_PROTO_NUM: u32 = 1 << 3;
        const F_PROTO_DST_PORT: u32 = 1 << 5;
        let mut body = nfgenmsg(self.family);
        let Some((protocol, port)) = self.ports.first() else { return body };
        let is_one_protocol = self.ports.iter().all(|(other, _)| other == protocol);
        if self.family == AF_UNSPEC || !is_one_protocol {
            return body;
        }
        // The tuple has the values to compare. The flags select which fields of the tuple are
        // compared: some of the original packet's, none of the reply's.
        let mut tuple_fields = new_attribute(CTA_PROTO_NUM, &[protocol.number()]);
        let mut flags = F_PROTO_NUM;
        if self.ports.len() == 1 {
            tuple_fields.extend(new_attribute(CTA_PROTO_DST_PORT, &port.to_be_bytes()));
            flags |= F_PROTO_DST_PORT;
        }
        body.extend(new_nest(CTA_TUPLE_ORIG, &new_nest(CTA_TUPLE_PROTO, &tuple_fields)));
        let mut filter = new_attribute(CTA_FILTER_ORIG_FLAGS, &flags.to_ne_bytes());
        filter.extend(new_attribute(CTA_FILTER_REPLY_FLAGS, &0_u32.to_ne_bytes()));
        body.extend(new_nest(CTA_FILTER, &filter));
        body
    }
}

/// Returns the header of a message: family, version, and two bytes for a resource.
fn nfgenmsg(family: u8) -> Vec<u8> {
    vec![family, 0, 0, 0]
}

/// Decodes one message of a list. Returns `None` for a protocol that [`Protocol`] lacks, and for a
/// message that is malformed or of another type.
pub fn decode_entry(message: &Message<'_>) -> Option<Entry> {
    if message.kind != IPCTNL_MSG_CT_NEW {
        return None;
    }
    let (header, body) = message.payload.split_at_checked(NFGENMSG)?;
    let original = attribute(body, CTA_TUPLE_ORIG)?;
    let (protocol, destination) = protocol_and_destination(original)?;
    let answered_by = address(attribute(body, CTA_TUPLE_REPLY)?, Side::Source)?;
    // The header's family, then the attributes that identify the entry: its first packet, its ID (a
    // later connection with the same addresses has another ID), and its zone.
    let mut key = nfgenmsg(*header.first()?);
    key.extend(new_nest(CTA_TUPLE_ORIG, original));
    for kind in [CTA_ID, CTA_ZONE] {
        if let Some(value) = attribute(body, kind) {
            key.extend(new_attribute(kind, value));
        }
    }
    Some(Entry { protocol, destination, answered_by, key })
}

/// One of the two addresses of a packet.
#[derive(Clone, Copy)]
enum Side {
    Source,
    Destination,
}

/// Decodes the protocol and the destination of a tuple, which describes the packets of a connection
/// in one direction. Returns `None` for a protocol that [`Protocol`] lacks, or if the tuple is
/// malformed.
fn protocol_and_destination(tuple: &[u8]) -> Option<(Protocol, SocketAddr)> {
    let proto = attribute(tuple, CTA_TUPLE_PROTO)?;
    let [number] = attribute(proto, CTA_PROTO_NUM)? else { return None };
    let port = u16::from_be_bytes(attribute(proto, CTA_PROTO_DST_PORT)?.try_into().ok()?);
    Some((Protocol::by_number(*number)?, SocketAddr::new(address(tuple, Side::Destination)?, port)))
}

/// Decodes the source or destination address of a tuple. Returns `None` if the tuple is malformed.
fn address(tuple: &[u8], side: Side) -> Option<IpAddr> {
    let (ipv4, ipv6) = match side {
        Side::Source => (CTA_IP_V4_SRC, CTA_IP_V6_SRC),
        Side::Destination => (CTA_IP_V4_DST, CTA_IP_V6_DST),
    };
    for (kind, value) in attributes(attribute(tuple, CTA_TUPLE_IP)?) {
        if (kind == ipv4 && value.len() == 4) || (kind == ipv6 && value.len() == 16) {
            return from_octets(value);
        }
    }
    None
}

#[cfg(test)]
mod tests;
