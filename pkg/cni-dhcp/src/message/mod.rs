//! DHCP messages: writes those of a client, and reads a server's answers. [`v6`]: those of DHCPv6.
//!
//! The crate smoltcp encodes and decodes the header and the list of options of DHCPv4. The values
//! of options are encoded and decoded here.

mod parameters;
pub mod v6;

use std::net::{IpAddr, Ipv4Addr};

use cni::Cidr;
use serde::{Deserialize, Serialize};
use smoltcp::wire::{ArpHardware, DhcpFlags, DhcpMessageType, DhcpOpCode, DhcpOption, DhcpPacket, EthernetAddress};

pub use parameters::{LeaseParameters, RouteChoices, Server};

/// The codes of the options (RFC 2132, 3397 and 3442).
mod code {
    pub(super) const SUBNET_MASK: u8 = 1;
    pub(super) const ROUTERS: u8 = 3;
    pub(super) const NAMESERVERS: u8 = 6;
    pub(super) const DOMAIN: u8 = 15;
    pub(super) const MTU: u8 = 26;
    pub(super) const CLASSFUL_ROUTES: u8 = 33;
    pub(super) const REQUESTED_ADDRESS: u8 = 50;
    pub(super) const LEASE_TIME: u8 = 51;
    pub(super) const MESSAGE_TYPE: u8 = 53;
    pub(super) const SERVER: u8 = 54;
    pub(super) const REQUESTED_OPTIONS: u8 = 55;
    pub(super) const MAX_MESSAGE_SIZE: u8 = 57;
    pub(super) const T1: u8 = 58;
    pub(super) const T2: u8 = 59;
    pub(super) const CLIENT_ID: u8 = 61;
    pub(super) const SEARCH_DOMAINS: u8 = 119;
    pub(super) const CLASSLESS_ROUTES: u8 = 121;
}

/// The options that are requested by default. RFC 3442 requires the classless routes before the
/// routers and the classful routes.
pub const DEFAULT_REQUEST: [u8; 8] = [
    code::CLASSLESS_ROUTES,
    code::ROUTERS,
    code::SUBNET_MASK,
    code::CLASSFUL_ROUTES,
    code::NAMESERVERS,
    code::DOMAIN,
    code::SEARCH_DOMAINS,
    code::MTU,
];
/// The shortest time in seconds from the request of a lease to its renewal (T1). For a lease
/// shorter than twice this time, the shortest T1 is half of the lease time.
const MIN_T1: u32 = 10;
/// The lease time in seconds if the server sends none.
const DEFAULT_LEASE: u32 = 3600;
/// The shortest length of a message in bytes. Some servers and relays drop shorter ones, because a
/// BOOTP message has this length.
const MIN_LENGTH: usize = 300;
/// The length in bytes of the longest message that the client accepts, sent in option 57.
const MAX_LENGTH: u16 = 1500;
/// The length of a message before its options, in bytes.
const HEADER_LENGTH: usize = 240;
/// The four bytes between header and options.
const MAGIC_NUMBER: u32 = 0x6382_5363;
/// The smallest MTU that is accepted. Every IPv4 host must accept packets of this length.
const MIN_MTU: u16 = 576;
/// How many pointers are followed in an encoded domain name. The limit ends a loop of pointers.
const MAX_POINTERS: u32 = 16;

/// The destination of servers' answers while the client has no address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReplyMode {
    /// The client's hardware address.
    #[default]
    Unicast,
    /// All hosts on the link.
    Broadcast,
}

/// The identity that a client sends in every message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Client {
    /// The hardware address.
    pub mac: [u8; 6],
    /// The client identifier (option 61).
    pub id: Vec<u8>,
    /// The codes of the options that the client requests (option 55).
    pub request: Vec<u8>,
    /// The codes and values of the options that the configuration adds to its messages.
    pub provide: Vec<(u8, Vec<u8>)>,
    /// The destination that the client asks servers to use for their answers.
    pub answers: ReplyMode,
}

/// The purpose of a client's message, with the names of DHCPv4 and DHCPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask<'a> {
    /// DHCPDISCOVER or SOLICIT: to get offers from all servers. INFORMATION-REQUEST of a client
    /// without IAID.
    Discover,
    /// DHCPREQUEST or REQUEST: to get the address that a server has offered.
    Request(&'a LeaseParameters),
    /// DHCPREQUEST to all servers, only of DHCPv4: to ask the server that has granted the lease of
    /// an address whether the lease is still valid.
    Confirm(Cidr),
    /// DHCPREQUEST or RENEW: to have the server of the lease extend it.
    Renew(&'a LeaseParameters),
    /// DHCPREQUEST or REBIND: to have any server extend the lease.
    Rebind(&'a LeaseParameters),
    /// DHCPRELEASE or RELEASE: to give up the lease.
    Release(&'a LeaseParameters),
    /// DECLINE, only of DHCPv6: another host has the leased address.
    Decline(&'a LeaseParameters),
}

impl Client {
    /// Returns the bytes of a message with the transaction number `xid`.
    ///
    /// # Errors
    /// An option is longer than 255 bytes.
    pub fn write(&self, ask: Ask<'_>, xid: u32) -> Result<Vec<u8>, String> {
        let (kind, requested, server, leased) = match ask {
            // A DHCPv4 client never declines an address.
            Ask::Discover | Ask::Decline(_) => (DhcpMessageType::Discover, None, None, None),
            Ask::Request(terms) => (DhcpMessageType::Request, Some(terms.cidr), Some(&terms.server), None),
            Ask::Confirm(cidr) => (DhcpMessageType::Request, Some(cidr), None, None),
            Ask::Renew(terms) | Ask::Rebind(terms) => (DhcpMessageType::Request, None, None, Some(terms)),
            Ask::Release(terms) => (DhcpMessageType::Release, None, Some(&terms.server), Some(terms)),
        };
        let mut options = vec![(code::MESSAGE_TYPE, vec![kind.into()]), (code::CLIENT_ID, self.id.clone())];
        if !matches!(ask, Ask::Release(_)) {
            options.push((code::MAX_MESSAGE_SIZE, MAX_LENGTH.to_be_bytes().to_vec()));
            options.push((code::REQUESTED_OPTIONS, self.request.clone()));
            options.extend(self.provide.iter().cloned());
        }
        if let Some(cidr) = requested {
            options.push((code::REQUESTED_ADDRESS, v4(cidr).octets().to_vec()));
        }
        if let Some(Server::Ipv4(server)) = server {
            options.push((code::SERVER, server.octets().to_vec()));
        }
        options.sort_unstable();
        // Each option has its code and its length before the data. One byte ends the list.
        let options_length: usize = options.iter().map(|(_, data)| 2 + data.len()).sum();
        let mut bytes = vec![0; (HEADER_LENGTH + options_length + 1).max(MIN_LENGTH)];
        let mut message = DhcpPacket::new_unchecked(&mut bytes);
        message.set_opcode(DhcpOpCode::Request);
        message.set_hardware_type(ArpHardware::Ethernet);
        message.set_hardware_len(6);
        message.set_transaction_id(xid);
        message.set_client_hardware_address(EthernetAddress(self.mac));
        message.set_magic_number(MAGIC_NUMBER);
        if self.answers == ReplyMode::Broadcast && leased.is_none() {
            message.set_flags(DhcpFlags::BROADCAST);
        }
        if let Some(terms) = leased {
            message.set_client_ip(terms.address());
        }
        let mut writer = message.options_mut();
        for (code, data) in &options {
            let too_long = |_| format!("option {code} has {} bytes, at most 255 fit", data.len());
            writer.emit(DhcpOption { kind: *code, data }).map_err(too_long)?;
        }
        writer.end().map_err(|error| error.to_string())?;
        Ok(bytes)
    }

    /// Decodes a server's answer to this client's message with the transaction number `xid`.
    /// Returns `None` for any other message, and for an answer without a server, without a type, or
    /// without valid parameters of an offer or a lease.
    pub fn read(&self, bytes: &[u8], xid: u32) -> Option<Reply> {
        let message = DhcpPacket::new_checked(bytes).ok()?;
        let mac = message.client_hardware_address();
        if message.opcode() != DhcpOpCode::Reply
            || message.hardware_len() != 6
            || message.transaction_id() != xid
            || mac != EthernetAddress(self.mac)
            || message.magic_number() != MAGIC_NUMBER
        {
            return None;
        }
        let options: Vec<DhcpOption<'_>> = message.options().collect();
        // RFC 3396: a long option is split into several with the same code, which are joined here.
        let find = |code: u8| -> Option<Vec<u8>> {
            let parts = options.iter().filter(|option| option.kind == code);
            let parts: Vec<&[u8]> = parts.map(|option| option.data).collect();
            if parts.is_empty() { None } else { Some(parts.concat()) }
        };
        let server = find(code::SERVER).and_then(|data| addresses(&data).first().copied())?;
        let [kind] = find(code::MESSAGE_TYPE)?[..] else { return None };
        match DhcpMessageType::from(kind) {
            DhcpMessageType::Offer => {
                let terms = self.terms(message.your_ip(), server, &find)?;
                Some(Reply::Offer(terms, HIGHEST_PREFERENCE))
            }
            DhcpMessageType::Ack => Some(Reply::Ack(self.terms(message.your_ip(), server, &find)?)),
            DhcpMessageType::Nak => Some(Reply::Nak(Server::Ipv4(server))),
            _ => None,
        }
    }

    /// Decodes the parameters of an offer or a lease. `find` returns the value of an option by its
    /// code. Options that this client did not request are ignored, except the mask and the times.
    /// Returns `None` if the mask is absent, or if the address, the server, the mask or the lease
    /// time is invalid.
    fn terms(
        &self,
        address: Ipv4Addr,
        server: Ipv4Addr,
        find: &dyn Fn(u8) -> Option<Vec<u8>>,
    ) -> Option<LeaseParameters> {
        let number = |code| find(code).and_then(|data| <[u8; 4]>::try_from(data).ok()).map(u32::from_be_bytes);
        let requested = |code| if self.request.contains(&code) { find(code) } else { None };
        let mask = number(code::SUBNET_MASK)?;
        let prefix = mask.leading_ones();
        let is_mask_valid = prefix > 0 && mask.count_ones() == prefix;
        let seconds = number(code::LEASE_TIME).unwrap_or(DEFAULT_LEASE);
        if !is_host(address) || !is_host(server) || !is_mask_valid || seconds == 0 {
            return None;
        }
        let cidr = Cidr::new(address.into(), u8::try_from(prefix).ok()?)?;
        let (t1, t2) = renewal_times(seconds, number(code::T1), number(code::T2));
        let address_list = |code| requested(code).map(|data| addresses(&data)).unwrap_or_default();
        let text = |data: Vec<u8>| String::from_utf8(data).ok().map(|text| text.trim_end_matches('\0').to_owned());
        let mtu = requested(code::MTU).and_then(|data| <[u8; 2]>::try_from(data).ok()).map(u16::from_be_bytes);
        Some(LeaseParameters {
            cidr,
            server: Server::Ipv4(server),
            seconds,
            t1,
            t2,
            routers: address_list(code::ROUTERS),
            classless: requested(code::CLASSLESS_ROUTES).and_then(|data| classless_routes(&data)),
            classful: address_list(code::CLASSFUL_ROUTES).chunks_exact(2).map(|pair| (pair[0], pair[1])).collect(),
            nameservers: address_list(code::NAMESERVERS).into_iter().map(IpAddr::V4).collect(),
            domain: requested(code::DOMAIN).and_then(text).filter(|name| is_domain(name)).unwrap_or_default(),
            search: requested(code::SEARCH_DOMAINS).map(|data| domains(&data)).unwrap_or_default(),
            mtu: mtu.filter(|mtu| *mtu >= MIN_MTU),
            ntp: Vec::new(),
        })
    }
}

/// Returns T1 and T2 of a lease of `seconds`, from the times that the server has sent. The default
/// times of RFC 2131, 4.4.5, replace absent times, and times that are not in the order T1, T2, end.
fn renewal_times(seconds: u32, sent_t1: Option<u32>, sent_t2: Option<u32>) -> (u32, u32) {
    let default_t1 = seconds / 2;
    let default_t2 = u32::try_from(u64::from(seconds) * 7 / 8).unwrap_or(seconds);
    let (t1, t2) = (sent_t1.unwrap_or(default_t1), sent_t2.unwrap_or(default_t2));
    let (t1, t2) = if t1 < t2 && t2 < seconds { (t1, t2) } else { (default_t1, default_t2) };
    // Times near zero would keep the daemon busy with renewals.
    let min_t1 = seconds.div_ceil(2).min(MIN_T1);
    (t1.max(min_t1), t2.max(min_t1))
}

/// The preference of a server whose offer is accepted at once, without a wait for others. DHCPv4
/// has no preferences, so all its offers have this one.
pub(crate) const HIGHEST_PREFERENCE: u8 = 255;

/// A server's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// DHCPOFFER, or ADVERTISE: the server offers an address. The number is the server's
    /// preference.
    Offer(LeaseParameters, u8),
    /// DHCPACK, or REPLY: the server has leased the address.
    Ack(LeaseParameters),
    /// DHCPNAK, or REPLY with a status: the client must not use the address. The value is the
    /// server.
    Nak(Server),
    /// REPLY about no address.
    Information(v6::Information),
}

/// Returns the IPv4 address of a CIDR. Returns 0.0.0.0 for IPv6, which DHCPv4 never has.
pub(crate) fn v4(cidr: Cidr) -> Ipv4Addr {
    match cidr.address() {
        IpAddr::V4(address) => address,
        IpAddr::V6(_) => Ipv4Addr::UNSPECIFIED,
    }
}

/// Whether a host can have this address.
fn is_host(address: Ipv4Addr) -> bool {
    !(address.is_unspecified() || address.is_broadcast() || address.is_multicast() || address.is_loopback())
}

/// Decodes a list of IPv4 addresses. An incomplete address at the end is ignored.
fn addresses(data: &[u8]) -> Vec<Ipv4Addr> {
    data.chunks_exact(4).filter_map(|bytes| <[u8; 4]>::try_from(bytes).ok()).map(Ipv4Addr::from).collect()
}

/// Decodes the classless routes (option 121): destination, prefix and gateway. Of a destination,
/// the option has only the bytes that the prefix covers. Returns `None` for an invalid option.
fn classless_routes(mut data: &[u8]) -> Option<Vec<(Ipv4Addr, u8, Ipv4Addr)>> {
    let mut routes = Vec::new();
    while let Some((prefix, rest)) = data.split_first() {
        if *prefix > 32 {
            return None;
        }
        let significant = usize::from(prefix.div_ceil(8));
        let (dst, rest) = rest.split_at_checked(significant)?;
        let (gateway, rest) = rest.split_first_chunk::<4>()?;
        let mut octets = [0; 4];
        octets[..significant].copy_from_slice(dst);
        routes.push((Ipv4Addr::from(octets), *prefix, Ipv4Addr::from(*gateway)));
        data = rest;
    }
    Some(routes)
}

/// Decodes the search domains (option 119), which are names in the encoding of DNS (RFC 1035,
/// 4.1.4): a name is a list of labels, and may end with a pointer to the rest of an earlier name.
/// Returns the names before the first error. Names that are not domain names (see `is_domain`)
/// are left out. Router advertisements have the same encoding without pointers (RFC 8106, 5.2).
pub fn domains(data: &[u8]) -> Vec<String> {
    let mut names = Vec::new();
    let mut begin = 0;
    while begin < data.len() {
        let Some((name, end)) = domain_at(data, begin) else { return names };
        begin = end;
        if is_domain(&name) {
            names.push(name);
        }
    }
    names
}

/// Decodes the name at the position `begin` of `data`. Returns the name and the position of the
/// next one, or `None` if the encoding is invalid.
fn domain_at(data: &[u8], begin: usize) -> Option<(String, usize)> {
    let mut labels = Vec::new();
    let mut position = begin;
    let mut pointers = 0;
    // The first pointer is the last part of a name, so the next name begins after it. The labels
    // that the pointer refers to are elsewhere in `data`.
    let mut after_first_pointer = None;
    loop {
        match data.get(position).map(|byte| usize::from(*byte))? {
            0 => break,
            length @ 1..64 => {
                let label = data.get(position + 1..position + 1 + length)?;
                labels.push(String::from_utf8_lossy(label).into_owned());
                position += 1 + length;
            }
            // The two highest bits mark a pointer of 14 bits.
            high @ 192.. if pointers < MAX_POINTERS => {
                let low = data.get(position + 1)?;
                after_first_pointer.get_or_insert(position + 2);
                pointers += 1;
                position = (high - 192) << 8 | usize::from(*low);
            }
            _ => return None,
        }
    }
    Some((labels.join("."), after_first_pointer.unwrap_or(position + 1)))
}

/// Whether a name has the length and only the characters of a domain name. Other characters could
/// add lines to resolv.conf.
fn is_domain(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !name.is_empty() && name.len() <= 253 && name.bytes().all(is_allowed)
}

#[cfg(test)]
pub(crate) mod tests;
