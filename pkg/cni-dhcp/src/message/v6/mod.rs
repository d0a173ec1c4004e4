//! DHCPv6 messages (RFC 8415): writes those of a client, and reads a server's answers.

use std::net::{IpAddr, Ipv6Addr};

use cni::Cidr;
use serde::{Deserialize, Serialize};

use super::{Ask, LeaseParameters, Reply, Server, domains, renewal_times};

/// The types of messages.
mod kind {
    pub(super) const SOLICIT: u8 = 1;
    pub(super) const ADVERTISE: u8 = 2;
    pub(super) const REQUEST: u8 = 3;
    pub(super) const RENEW: u8 = 5;
    pub(super) const REBIND: u8 = 6;
    pub(super) const REPLY: u8 = 7;
    pub(super) const RELEASE: u8 = 8;
    pub(super) const DECLINE: u8 = 9;
    pub(super) const INFORMATION_REQUEST: u8 = 11;
}

/// The codes of the options (RFC 8415, 3646 and 5908).
mod code {
    pub(super) const CLIENT_ID: u16 = 1;
    pub(super) const SERVER_ID: u16 = 2;
    pub(super) const IA_NA: u16 = 3;
    pub(super) const IA_ADDR: u16 = 5;
    pub(super) const REQUESTED_OPTIONS: u16 = 6;
    pub(super) const PREFERENCE: u16 = 7;
    pub(super) const ELAPSED_TIME: u16 = 8;
    pub(super) const STATUS: u16 = 13;
    pub(super) const NAMESERVERS: u16 = 23;
    pub(super) const SEARCH_DOMAINS: u16 = 24;
    pub(super) const NTP: u16 = 56;
}

/// The codes of statuses.
mod status {
    pub(super) const SUCCESS: u16 = 0;
    pub(super) const NO_ADDRESSES: u16 = 2;
    pub(super) const NO_BINDING: u16 = 3;
    pub(super) const NOT_ON_LINK: u16 = 4;
}

/// The largest length of a DUID in bytes, with its type.
pub const MAX_DUID: usize = 130;
/// The smallest length of a DUID in bytes, with its type.
pub const MIN_DUID: usize = 3;
/// The bits of a transaction number.
const XID_MASK: u32 = 0xff_ffff;

/// The identity that a client sends in every message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Client {
    /// The hardware address of the interface, which no message contains.
    pub mac: [u8; 6],
    /// The client's DUID.
    pub duid: Vec<u8>,
    /// The number of the client's address (IAID). `None` for a client that asks for other options
    /// only.
    pub iaid: Option<u32>,
}

/// What an answer contains besides an address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Information {
    /// The DNS servers (option 23).
    pub nameservers: Vec<IpAddr>,
    /// The search domains (option 24).
    pub search: Vec<String>,
    /// The addresses and names of time servers (option 56).
    pub ntp: Vec<String>,
}

/// The client's address in a server's answer.
enum Binding {
    /// The server grants or offers an address.
    Address { address: Ipv6Addr, seconds: u32, t1: u32, t2: u32 },
    /// The server refuses.
    Refused,
}

impl Client {
    /// Returns the bytes of a message with the transaction number `xid`, of which the lower 24 bits
    /// are sent. `hundredths`: the time since the exchange began.
    pub fn write(&self, ask: Ask<'_>, xid: u32, hundredths: u16) -> Vec<u8> {
        let (kind, terms) = match ask {
            Ask::Discover if self.iaid.is_none() => (kind::INFORMATION_REQUEST, None),
            // A DHCPv6 client never confirms an address.
            Ask::Discover | Ask::Confirm(_) => (kind::SOLICIT, None),
            Ask::Request(terms) => (kind::REQUEST, Some(terms)),
            Ask::Renew(terms) => (kind::RENEW, Some(terms)),
            Ask::Rebind(terms) => (kind::REBIND, Some(terms)),
            Ask::Release(terms) => (kind::RELEASE, Some(terms)),
            Ask::Decline(terms) => (kind::DECLINE, Some(terms)),
        };
        let mut bytes = (u32::from(kind) << 24 | (xid & XID_MASK)).to_be_bytes().to_vec();
        push_option(&mut bytes, code::CLIENT_ID, &self.duid);
        if let (Some(LeaseParameters { server: Server::Duid(duid), .. }), false) = (terms, kind == kind::REBIND) {
            push_option(&mut bytes, code::SERVER_ID, duid);
        }
        push_option(&mut bytes, code::ELAPSED_TIME, &hundredths.to_be_bytes());
        if let Some(iaid) = self.iaid {
            // The client has no wish for T1 and T2.
            let mut association = [&iaid.to_be_bytes()[..], &[0; 8]].concat();
            if let Some(IpAddr::V6(address)) = terms.map(|terms| terms.cidr.address()) {
                // Nor for the lifetimes of the address.
                push_option(&mut association, code::IA_ADDR, &[&address.octets()[..], &[0; 8]].concat());
            }
            push_option(&mut bytes, code::IA_NA, &association);
        }
        if !matches!(ask, Ask::Release(_) | Ask::Decline(_)) {
            let wanted = [code::NAMESERVERS, code::SEARCH_DOMAINS, code::NTP];
            push_option(&mut bytes, code::REQUESTED_OPTIONS, &wanted.map(u16::to_be_bytes).concat());
        }
        bytes
    }

    /// Decodes a server's answer to this client's message with the transaction number `xid`.
    /// Returns `None` for any other message, for a malformed one, and for an answer that neither
    /// grants nor refuses: one with an invalid address or with invalid times, or with the status of
    /// another failure.
    pub fn read(&self, bytes: &[u8], xid: u32) -> Option<Reply> {
        let (header, rest) = bytes.split_first_chunk::<4>()?;
        let header = u32::from_be_bytes(*header);
        let options = options(rest)?;
        let server = find(&options, code::SERVER_ID).filter(|duid| (MIN_DUID..=MAX_DUID).contains(&duid.len()))?;
        if header & XID_MASK != xid & XID_MASK || find(&options, code::CLIENT_ID)? != self.duid {
            return None;
        }
        let kind = header.to_be_bytes()[0];
        let information = Information::of(&options);
        let server = Server::Duid(server.to_vec());
        let binding = match status_of(&options)? {
            status::SUCCESS => self.binding(&options)?,
            code if is_refusal(code) => Some(Binding::Refused),
            _ => return None,
        };
        match (kind, binding) {
            (kind::REPLY, None) => Some(Reply::Information(information)),
            (kind::REPLY, Some(Binding::Refused)) => Some(Reply::Nak(server)),
            (kind::ADVERTISE, Some(Binding::Address { address, seconds, t1, t2 })) => {
                // A server without the option has the lowest preference.
                let preference = find(&options, code::PREFERENCE).and_then(|data| data.first()).copied();
                Some(Reply::Offer(information.with(address, server, (seconds, t1, t2))?, preference.unwrap_or(0)))
            }
            (kind::REPLY, Some(Binding::Address { address, seconds, t1, t2 })) => {
                Some(Reply::Ack(information.with(address, server, (seconds, t1, t2))?))
            }
            _ => None,
        }
    }

    /// Returns what the answer says about this client's address; the inner `None` if nothing.
    /// Returns `None` if that is malformed or invalid.
    fn binding(&self, options: &[(u16, &[u8])]) -> Option<Option<Binding>> {
        let Some(iaid) = self.iaid else { return Some(None) };
        let associations = options.iter().filter(|(code, _)| *code == code::IA_NA);
        let mut own = associations.map(|(_, data)| data).filter(|data| data.starts_with(&iaid.to_be_bytes()));
        let Some(own) = own.next() else { return Some(None) };
        let (t1, rest) = own[4..].split_first_chunk::<4>()?;
        let (t2, rest) = rest.split_first_chunk::<4>()?;
        let (t1, t2) = (u32::from_be_bytes(*t1), u32::from_be_bytes(*t2));
        let nested = self::options(rest)?;
        match status_of(&nested)? {
            status::SUCCESS => {}
            code if is_refusal(code) => return Some(Some(Binding::Refused)),
            _ => return None,
        }
        // RFC 8415, 21.4: a client discards such an association.
        if t2 > 0 && t1 > t2 {
            return None;
        }
        let mut has_ended = false;
        for (_, data) in nested.iter().filter(|(code, _)| *code == code::IA_ADDR) {
            let (address, rest) = data.split_first_chunk::<16>()?;
            let (preferred, rest) = rest.split_first_chunk::<4>()?;
            let (seconds, rest) = rest.split_first_chunk::<4>()?;
            let address = Ipv6Addr::from(*address);
            let (preferred, seconds) = (u32::from_be_bytes(*preferred), u32::from_be_bytes(*seconds));
            let is_granted = status_of(&self::options(rest)?)? == status::SUCCESS && seconds > 0;
            // RFC 8415, 21.6: a client discards an address whose preferred lifetime is longer.
            if is_granted && is_host(address) && preferred <= seconds {
                let (t1, t2) = times(preferred, seconds, t1, t2);
                return Some(Some(Binding::Address { address, seconds, t1, t2 }));
            }
            has_ended |= seconds == 0;
        }
        // An address that the server has ended, and none in its place.
        if has_ended { Some(Some(Binding::Refused)) } else { None }
    }
}

impl Information {
    /// Reads the options of an answer. Invalid servers and names are left out.
    fn of(options: &[(u16, &[u8])]) -> Information {
        let nameservers = find(options, code::NAMESERVERS).unwrap_or_default().as_chunks::<16>().0;
        let nameservers = nameservers.iter().map(|octets| Ipv6Addr::from(*octets));
        let mut ntp = Vec::new();
        for (kind, value) in find(options, code::NTP).and_then(self::options).unwrap_or_default() {
            match (kind, <[u8; 16]>::try_from(value)) {
                // The address of a server or a group of servers, and a name.
                (1 | 2, Ok(octets)) => ntp.push(Ipv6Addr::from(octets).to_string()),
                (3, _) => ntp.extend(domains(value)),
                _ => {}
            }
        }
        Information {
            nameservers: nameservers.filter(is_reachable).map(IpAddr::V6).collect(),
            search: find(options, code::SEARCH_DOMAINS).map(domains).unwrap_or_default(),
            ntp,
        }
    }

    /// Returns the parameters of a lease with this information. `times`: the lease time, T1 and T2.
    fn with(self, address: Ipv6Addr, server: Server, times: (u32, u32, u32)) -> Option<LeaseParameters> {
        let (seconds, t1, t2) = times;
        Some(LeaseParameters {
            cidr: Cidr::new(address.into(), 128)?,
            server,
            seconds,
            t1,
            t2,
            nameservers: self.nameservers,
            search: self.search,
            ntp: self.ntp,
            routers: Vec::new(),
            classless: None,
            classful: Vec::new(),
            domain: String::new(),
            mtu: None,
        })
    }
}

/// Returns T1 and T2. A time of 0 leaves the choice to the client, which takes those of RFC 8415,
/// 21.4: a half and four fifths of the preferred lifetime.
fn times(preferred: u32, seconds: u32, t1: u32, t2: u32) -> (u32, u32) {
    let base = if preferred == 0 { seconds } else { preferred };
    let part = |sent: u32, fifths_of_ten: u64| match sent {
        0 => u32::try_from(u64::from(base) * fifths_of_ten / 10).unwrap_or(base),
        sent => sent,
    };
    renewal_times(seconds, Some(part(t1, 5)), Some(part(t2, 8)))
}

/// Appends an option. Its data is always shorter than 64 KiB.
fn push_option(bytes: &mut Vec<u8>, code: u16, data: &[u8]) {
    bytes.extend(code.to_be_bytes());
    bytes.extend(u16::try_from(data.len()).unwrap_or(u16::MAX).to_be_bytes());
    bytes.extend(data);
}

/// Splits options: each has its code, its length and its data. Returns `None` if one is longer than
/// the message.
fn options(mut bytes: &[u8]) -> Option<Vec<(u16, &[u8])>> {
    let mut options = Vec::new();
    while !bytes.is_empty() {
        let (code, rest) = bytes.split_first_chunk::<2>()?;
        let (length, rest) = rest.split_first_chunk::<2>()?;
        let (data, rest) = rest.split_at_checked(usize::from(u16::from_be_bytes(*length)))?;
        options.push((u16::from_be_bytes(*code), data));
        bytes = rest;
    }
    Some(options)
}

/// Returns the data of the first option with this code.
fn find<'a>(options: &[(u16, &'a [u8])], code: u16) -> Option<&'a [u8]> {
    options.iter().find(|(other, _)| *other == code).map(|(_, data)| *data)
}

/// Returns the status among options. Its absence means success. Returns `None` if it is malformed.
fn status_of(options: &[(u16, &[u8])]) -> Option<u16> {
    match find(options, code::STATUS) {
        None => Some(status::SUCCESS),
        Some(data) => data.first_chunk::<2>().map(|code| u16::from_be_bytes(*code)),
    }
}

/// Whether a status means that the client must not use the address.
fn is_refusal(code: u16) -> bool {
    matches!(code, status::NO_ADDRESSES | status::NO_BINDING | status::NOT_ON_LINK)
}

/// Returns the address of a name server. A link-local one gets the interface's name as its zone,
/// without which a resolver cannot reach it.
pub fn with_zone(server: &str, ifname: &str) -> String {
    match server.parse::<Ipv6Addr>() {
        Ok(address) if address.is_unicast_link_local() => format!("{server}%{ifname}"),
        _ => server.to_owned(),
    }
}

/// Whether packets to one host can have this address as their destination.
pub fn is_reachable(address: &Ipv6Addr) -> bool {
    !(address.is_unspecified() || address.is_multicast() || address.is_loopback())
}

/// Whether a server can lease this address.
fn is_host(address: Ipv6Addr) -> bool {
    is_reachable(&address) && !address.is_unicast_link_local() && address.to_ipv4_mapped().is_none()
}

#[cfg(test)]
pub(crate) mod tests;
