//! DHCP messages: what a client sends, and what of a server's answer is used.
//!
//! The crate smoltcp lays messages out and divides answers into options. The values of options are
//! read here.

use std::net::{IpAddr, Ipv4Addr};

use cni::Cidr;
use cni::result::{AddResult, Dns, IpConfig, Route};
use serde::{Deserialize, Serialize};
use smoltcp::wire::{ArpHardware, DhcpFlags, DhcpMessageType, DhcpOpCode, DhcpOption, DhcpPacket, EthernetAddress};

/// The options that are requested unless the configuration says otherwise. Classless routes come
/// first, as RFC 3442 says.
pub const DEFAULT_REQUEST: [u8; 8] = [121, 3, 1, 33, 6, 15, 119, 26];
/// No lease is renewed earlier, in seconds, unless its half is over.
const MIN_T1: u32 = 10;
/// The lease time of a server that names none.
const DEFAULT_LEASE: u32 = 3600;
/// No message is shorter, as some servers and relays expect of BOOTP.
const MIN_LENGTH: usize = 300;
/// The length of a message before its options.
const HEADER: usize = 240;
/// The four bytes before the options.
const MAGIC: u32 = 0x6382_5363;
/// The scope of a route without a gateway.
const LINK_SCOPE: u8 = 253;

/// How servers are asked to answer before the client has an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReplyMode {
    /// To the client's hardware address.
    #[default]
    Unicast,
    /// To everyone on the link.
    Broadcast,
}

/// The identity that a client sends in every message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Client {
    /// Its hardware address.
    pub mac: [u8; 6],
    /// Its identifier: option 61.
    pub id: Vec<u8>,
    /// The options it requests: option 55.
    pub request: Vec<u8>,
    /// Options that the configuration provides, with their values.
    pub provide: Vec<(u8, Vec<u8>)>,
    /// How servers are asked to answer.
    pub answers: ReplyMode,
}

/// The message that a client sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Offers.
    Discover,
    /// The address that a server offered.
    Select {
        /// The address.
        address: Ipv4Addr,
        /// The server.
        server: Ipv4Addr,
    },
    /// An address that this client was leased before, from the server that remembers it.
    Confirm {
        /// The address.
        address: Ipv4Addr,
    },
    /// More time, from one server or from any.
    Extend {
        /// The leased address.
        address: Ipv4Addr,
    },
    /// The client gives the address back.
    Release {
        /// The leased address.
        address: Ipv4Addr,
        /// The server.
        server: Ipv4Addr,
    },
}

impl Client {
    /// Returns a message.
    ///
    /// # Errors
    /// An option is longer than 255 bytes.
    pub fn write(&self, ask: Ask, xid: u32) -> Result<Vec<u8>, String> {
        let kind = match ask {
            Ask::Discover => DhcpMessageType::Discover,
            Ask::Select { .. } | Ask::Confirm { .. } | Ask::Extend { .. } => DhcpMessageType::Request,
            Ask::Release { .. } => DhcpMessageType::Release,
        };
        let mut options = vec![(53, vec![kind.into()]), (61, self.id.clone())];
        if !matches!(ask, Ask::Release { .. }) {
            options.extend([(57, 1500_u16.to_be_bytes().to_vec()), (55, self.request.clone())]);
            options.extend(self.provide.iter().cloned());
        }
        if let Ask::Select { address, .. } | Ask::Confirm { address } = ask {
            options.push((50, address.octets().to_vec()));
        }
        if let Ask::Select { server, .. } | Ask::Release { server, .. } = ask {
            options.push((54, server.octets().to_vec()));
        }
        options.sort_unstable();
        let length: usize = options.iter().map(|(_, data)| 2 + data.len()).sum();
        let mut bytes = vec![0; (HEADER + length + 1).max(MIN_LENGTH)];
        let mut message = DhcpPacket::new_unchecked(&mut bytes);
        message.set_opcode(DhcpOpCode::Request);
        message.set_hardware_type(ArpHardware::Ethernet);
        message.set_hardware_len(6);
        message.set_transaction_id(xid);
        message.set_client_hardware_address(EthernetAddress(self.mac));
        message.set_magic_number(MAGIC);
        if self.answers == ReplyMode::Broadcast && !matches!(ask, Ask::Extend { .. } | Ask::Release { .. }) {
            message.set_flags(DhcpFlags::BROADCAST);
        }
        if let Ask::Extend { address } | Ask::Release { address, .. } = ask {
            message.set_client_ip(address);
        }
        let mut writer = message.options_mut();
        for (kind, data) in &options {
            writer.emit(DhcpOption { kind: *kind, data }).map_err(|_| format!("option {kind} is too long"))?;
        }
        writer.end().map_err(|error| error.to_string())?;
        Ok(bytes)
    }

    /// Returns a server's answer to this client's message `xid`. `None` for everything else that
    /// may arrive.
    pub fn read(&self, bytes: &[u8], xid: u32) -> Option<Reply> {
        let message = DhcpPacket::new_checked(bytes).ok()?;
        let mac = message.client_hardware_address();
        if message.opcode() != DhcpOpCode::Reply
            || message.hardware_len() != 6
            || message.transaction_id() != xid
            || mac != EthernetAddress(self.mac)
            || message.magic_number() != MAGIC
        {
            return None;
        }
        let options: Vec<DhcpOption<'_>> = message.options().collect();
        // RFC 3396: an option that occurs again is continued.
        let find = |wanted: u8| -> Option<Vec<u8>> {
            let parts = options.iter().filter(|option| option.kind == wanted);
            let parts: Vec<&[u8]> = parts.map(|option| option.data).collect();
            if parts.is_empty() { None } else { Some(parts.concat()) }
        };
        let server = find(54).and_then(|data| addresses(&data).first().copied());
        match find(53)?[..] {
            [2] => Some(Reply::Offer(self.terms(message.your_ip(), server?, &find)?)),
            [5] => Some(Reply::Ack(self.terms(message.your_ip(), server?, &find)?)),
            [6] => Some(Reply::Nak(server?)),
            _ => None,
        }
    }

    fn terms(
        &self,
        address: Ipv4Addr,
        server: Ipv4Addr,
        find: &dyn Fn(u8) -> Option<Vec<u8>>,
    ) -> Option<LeaseParameters> {
        let number = |code| find(code).and_then(|data| <[u8; 4]>::try_from(data).ok()).map(u32::from_be_bytes);
        let requested = |code| if self.request.contains(&code) { find(code) } else { None };
        let mask = number(1)?;
        let prefix = mask.leading_ones();
        let seconds = number(51).unwrap_or(DEFAULT_LEASE);
        if !is_host(address) || !is_host(server) || mask.count_ones() != prefix || prefix == 0 || seconds == 0 {
            return None;
        }
        let network = Cidr::new(address.into(), u8::try_from(prefix).ok()?)?;
        let (half, most) = (seconds / 2, u32::try_from(u64::from(seconds) * 7 / 8).ok()?);
        // RFC 2131 4.4.5: T1 before T2 before the end. Contradictory times are the server's
        // mistake.
        let (t1, t2) = match (number(58).unwrap_or(half), number(59).unwrap_or(most)) {
            (t1, t2) if t1 < t2 && t2 < seconds => (t1, t2),
            _ => (half, most),
        };
        // A server that sets both to zero, or leases for a second, would keep the daemon busy.
        let rest = seconds.div_ceil(2).min(MIN_T1);
        let (t1, t2) = (t1.max(rest), t2.max(rest));
        let list = |code| requested(code).map(|data| addresses(&data)).unwrap_or_default();
        let text = |data: Vec<u8>| String::from_utf8(data).ok().map(|text| text.trim_end_matches('\0').to_owned());
        let mtu = requested(26).and_then(|data| <[u8; 2]>::try_from(data).ok()).map(u16::from_be_bytes);
        Some(LeaseParameters {
            network,
            server,
            seconds,
            t1,
            t2,
            routers: list(3),
            classless: requested(121).and_then(|data| classless(&data)),
            classful: list(33).chunks_exact(2).map(|pair| (pair[0], pair[1])).collect(),
            nameservers: list(6),
            domain: requested(15).and_then(text).filter(|name| is_domain(name)).unwrap_or_default(),
            search: requested(119).map(|data| domains(&data)).unwrap_or_default(),
            mtu: mtu.filter(|mtu| *mtu >= 576),
        })
    }
}

/// A server's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// An address could be had.
    Offer(LeaseParameters),
    /// The address is leased.
    Ack(LeaseParameters),
    /// The client must not use the address; from this server.
    Nak(Ipv4Addr),
}

/// An offer's or a lease's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseParameters {
    /// The address and its prefix.
    #[serde(with = "cidr_text")]
    pub network: Cidr,
    /// The server.
    pub server: Ipv4Addr,
    /// The lease's length; `u32::MAX` has no end.
    pub seconds: u32,
    /// When to ask this server for more time, in seconds.
    pub t1: u32,
    /// When to ask any server, in seconds.
    pub t2: u32,
    /// Option 3.
    pub routers: Vec<Ipv4Addr>,
    /// Option 121, if there is one: destination, prefix and gateway.
    pub classless: Option<Vec<(Ipv4Addr, u8, Ipv4Addr)>>,
    /// Option 33.
    pub classful: Vec<(Ipv4Addr, Ipv4Addr)>,
    /// Option 6.
    pub nameservers: Vec<Ipv4Addr>,
    /// Option 15.
    pub domain: String,
    /// Option 119.
    pub search: Vec<String>,
    /// Option 26.
    pub mtu: Option<u16>,
}

impl LeaseParameters {
    /// Returns the leased address.
    pub fn address(&self) -> Ipv4Addr {
        v4(self.network)
    }

    /// Returns the result of an ADD. `priority`: the routes' metric.
    pub fn result(&self, priority: Option<u32>) -> AddResult {
        let gateway = self.routers.first().copied().map(IpAddr::V4);
        let net = |address: Ipv4Addr, prefix| Cidr::new(address.into(), prefix);
        let via = |dst, gateway: Ipv4Addr| match gateway.is_unspecified() {
            true => Route { scope: Some(LINK_SCOPE), ..Route::new(dst, None) },
            false => Route::new(dst, Some(gateway.into())),
        };
        let mut routes: Vec<Route> = match &self.classless {
            Some(list) => {
                list.iter().filter_map(|(dst, prefix, gateway)| Some(via(net(*dst, *prefix)?, *gateway))).collect()
            }
            None => {
                let classful = self.classful.iter();
                let classful = classful.filter_map(|(dst, gateway)| Some(via(net(*dst, class(*dst))?, *gateway)));
                classful.chain(gateway.map(|gateway| Route::new(Cidr::default_route(gateway), Some(gateway)))).collect()
            }
        };
        for route in &mut routes {
            route.priority = priority;
            route.mtu = self.mtu.map(u32::from);
        }
        AddResult {
            ips: vec![IpConfig { interface: None, address: self.network, gateway }],
            routes,
            dns: Dns {
                nameservers: self.nameservers.iter().map(Ipv4Addr::to_string).collect(),
                domain: self.domain.clone(),
                search: self.search.clone(),
                options: Vec::new(),
            },
            ..AddResult::default()
        }
    }
}

mod cidr_text {
    use super::{Cidr, Deserialize};
    use serde::{Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(cidr: &Cidr, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(cidr)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Cidr, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// Returns the address of an IPv4 network.
pub(crate) fn v4(network: Cidr) -> Ipv4Addr {
    match network.address() {
        IpAddr::V4(address) => address,
        IpAddr::V6(_) => Ipv4Addr::UNSPECIFIED,
    }
}

/// Whether a host may have the address.
fn is_host(address: Ipv4Addr) -> bool {
    !(address.is_unspecified() || address.is_broadcast() || address.is_multicast() || address.is_loopback())
}

fn addresses(data: &[u8]) -> Vec<Ipv4Addr> {
    data.chunks_exact(4).filter_map(|bytes| <[u8; 4]>::try_from(bytes).ok()).map(Ipv4Addr::from).collect()
}

/// The prefix that a destination's class has.
fn class(address: Ipv4Addr) -> u8 {
    match address.octets()[0] {
        _ if address.is_unspecified() => 0,
        0..128 => 8,
        128..192 => 16,
        192..224 => 24,
        _ => 32,
    }
}

/// Option 121. `None` if it is cut off or wrong, as if the server had not sent it.
fn classless(mut data: &[u8]) -> Option<Vec<(Ipv4Addr, u8, Ipv4Addr)>> {
    let mut routes = Vec::new();
    while let Some((prefix, rest)) = data.split_first() {
        let significant = usize::from(prefix.div_ceil(8));
        let (dst, rest) = rest.split_at_checked(significant).filter(|_| *prefix <= 32)?;
        let (gateway, rest) = rest.split_at_checked(4)?;
        let mut octets = [0; 4];
        octets[..significant].copy_from_slice(dst);
        routes.push((Ipv4Addr::from(octets), *prefix, addresses(gateway).first().copied()?));
        data = rest;
    }
    Some(routes)
}

/// Option 119: names as DNS writes them. What is wrong ends the list.
fn domains(data: &[u8]) -> Vec<String> {
    let (mut names, mut at) = (Vec::new(), 0);
    while at < data.len() {
        let (mut labels, mut next, mut jumps) = (Vec::new(), at, 0);
        let mut end = None;
        loop {
            match data.get(next).map(|length| usize::from(*length)) {
                Some(0) => break,
                Some(length @ 1..64) => {
                    let Some(label) = data.get(next + 1..next + 1 + length) else { return names };
                    labels.push(String::from_utf8_lossy(label).into_owned());
                    next += 1 + length;
                }
                Some(high @ 192..) if jumps < 16 => {
                    let Some(low) = data.get(next + 1) else { return names };
                    end.get_or_insert(next + 2);
                    jumps += 1;
                    next = (high - 192) << 8 | usize::from(*low);
                }
                _ => return names,
            }
        }
        at = end.unwrap_or(next + 1);
        let name = labels.join(".");
        if is_domain(&name) {
            names.push(name);
        }
    }
    names
}

/// Whether a name can stand in resolv.conf without changing its other lines.
fn is_domain(name: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !name.is_empty() && name.len() <= 253 && name.bytes().all(known)
}

#[cfg(test)]
pub(crate) mod tests;
