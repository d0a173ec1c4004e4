//! DHCP messages: what a client sends, and what of a server's answer is used.
//!
//! The crate dhcproto writes messages and divides answers into options. The values of options are read here: its own reader
//! believes the fixed length of an option over the length that the message has, and stops at the first option that it
//! cannot read.

use std::net::{IpAddr, Ipv4Addr};

use cni::Cidr;
use cni::result::{AddResult, Dns, IpConfig, Route};
use dhcproto::v4::{self, DhcpOption, Flags, MessageType, OptionCode, UnknownOption, borrowed};
use dhcproto::{Encodable, Encoder};
use serde::{Deserialize, Serialize};

/// The options that are requested unless the configuration says otherwise. Classless routes come first, as RFC 3442 says.
pub const DEFAULT_REQUEST: [u8; 8] = [121, 3, 1, 33, 6, 15, 119, 26];
/// The lease time of a server that names none.
const DEFAULT_LEASE: u32 = 3600;
/// No message is shorter, as some servers and relays expect of BOOTP.
const MIN_LENGTH: usize = 300;
/// The scope of a route without a gateway.
const LINK_SCOPE: u8 = 253;

/// How servers are asked to answer before the client has an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answers {
    /// To the client's hardware address.
    #[default]
    Unicast,
    /// To everyone on the link.
    Broadcast,
}

/// What a client says of itself in every message.
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
    pub answers: Answers,
}

/// What a client asks for.
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
    /// More time, from one server or from any.
    Extend {
        /// The leased address.
        address: Ipv4Addr,
    },
    /// That the address be given back.
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
    /// The text of dhcproto: an option that cannot be written.
    pub fn write(&self, ask: Ask, xid: u32) -> Result<Vec<u8>, String> {
        let mut message = v4::Message::default();
        message.set_xid(xid).set_chaddr(&self.mac);
        if self.answers == Answers::Broadcast && matches!(ask, Ask::Discover | Ask::Select { .. }) {
            message.set_flags(Flags::default().set_broadcast());
        }
        let kind = match ask {
            Ask::Discover => MessageType::Discover,
            Ask::Select { .. } | Ask::Extend { .. } => MessageType::Request,
            Ask::Release { .. } => MessageType::Release,
        };
        if let Ask::Extend { address } | Ask::Release { address, .. } = ask {
            message.set_ciaddr(address);
        }
        let options = message.opts_mut();
        let mut raw = |code: u8, data: Vec<u8>| {
            options.insert(DhcpOption::Unknown(UnknownOption::new(OptionCode::from(code), data)));
        };
        if !matches!(ask, Ask::Release { .. }) {
            raw(57, 1500_u16.to_be_bytes().to_vec());
            raw(55, self.request.clone());
            self.provide.iter().for_each(|(code, value)| raw(*code, value.clone()));
        }
        raw(61, self.id.clone());
        options.insert(DhcpOption::MessageType(kind));
        if let Ask::Select { address, .. } = ask {
            options.insert(DhcpOption::RequestedIpAddress(address));
        }
        if let Ask::Select { server, .. } | Ask::Release { server, .. } = ask {
            options.insert(DhcpOption::ServerIdentifier(server));
        }
        let mut bytes = Vec::new();
        message.encode(&mut Encoder::new(&mut bytes)).map_err(|error| error.to_string())?;
        bytes.resize(bytes.len().max(MIN_LENGTH), 0);
        Ok(bytes)
    }

    /// Returns a server's answer to this client's message `xid`. `None` for everything else that may arrive.
    pub fn read(&self, bytes: &[u8], xid: u32) -> Option<Reply> {
        let message = borrowed::Message::new(bytes).ok()?;
        // The length of the hardware address first: its reader believes it.
        if bytes[0] != 2 || message.hlen() != 6 || message.xid() != xid || message.chaddr() != self.mac {
            return None;
        }
        let options = message.opts();
        let options: Vec<(u8, Vec<u8>)> =
            options.map(|option| (option.code().into(), option.data().to_vec())).collect();
        // RFC 3396: an option that occurs again is continued.
        let find = |wanted: u8| -> Option<Vec<u8>> {
            let parts: Vec<&[u8]> =
                options.iter().filter(|(code, _)| *code == wanted).map(|(_, data)| &data[..]).collect();
            if parts.is_empty() { None } else { Some(parts.concat()) }
        };
        let server = find(54).and_then(|data| addresses(&data).first().copied());
        match find(53)?[..] {
            [2] => Some(Reply::Offer(self.terms(message.yiaddr(), server?, &find)?)),
            [5] => Some(Reply::Ack(self.terms(message.yiaddr(), server?, &find)?)),
            [6] => Some(Reply::Nak(server?)),
            _ => None,
        }
    }

    fn terms(&self, address: Ipv4Addr, server: Ipv4Addr, find: &dyn Fn(u8) -> Option<Vec<u8>>) -> Option<Terms> {
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
        // RFC 2131 4.4.5: T1 before T2 before the end. Contradictory times are the server's mistake.
        let (t1, t2) = match (number(58).unwrap_or(half), number(59).unwrap_or(most)) {
            (t1, t2) if t1 < t2 && t2 < seconds => (t1, t2),
            _ => (half, most),
        };
        let list = |code| requested(code).map(|data| addresses(&data)).unwrap_or_default();
        let text = |data: Vec<u8>| String::from_utf8(data).ok().map(|text| text.trim_end_matches('\0').to_owned());
        let mtu = requested(26).and_then(|data| <[u8; 2]>::try_from(data).ok()).map(u16::from_be_bytes);
        Some(Terms {
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

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// An address could be had.
    Offer(Terms),
    /// The address is leased.
    Ack(Terms),
    /// The client must not use the address; from this server.
    Nak(Ipv4Addr),
}

/// An offer's or a lease's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
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

impl Terms {
    /// Returns the leased address.
    pub fn address(&self) -> Ipv4Addr {
        match self.network.address() {
            IpAddr::V4(address) => address,
            IpAddr::V6(_) => Ipv4Addr::UNSPECIFIED,
        }
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
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn client() -> Client {
        Client {
            mac: [2, 0, 0, 0, 0, 7],
            id: b"\0c/net/eth0".to_vec(),
            request: DEFAULT_REQUEST.to_vec(),
            provide: vec![(12, b"pod".to_vec())],
            answers: Answers::Unicast,
        }
    }

    /// A server's message. `options` without the end.
    pub(crate) fn from_server(xid: u32, address: [u8; 4], options: &[&[u8]]) -> Vec<u8> {
        let mut bytes = vec![0; 236];
        bytes[..3].copy_from_slice(&[2, 1, 6]);
        bytes[4..8].copy_from_slice(&xid.to_be_bytes());
        bytes[16..20].copy_from_slice(&address);
        bytes[28..34].copy_from_slice(&client().mac);
        bytes.extend([99, 130, 83, 99]);
        options.iter().for_each(|option| bytes.extend(*option));
        bytes.push(255);
        bytes
    }

    const SERVER: &[u8] = &[54, 4, 10, 0, 0, 1];
    const MASK: &[u8] = &[1, 4, 255, 255, 255, 0];

    fn acked(options: &[&[u8]]) -> Option<Terms> {
        let all = [&[&[53, 1, 5][..], SERVER, MASK][..], options].concat();
        match client().read(&from_server(1, [10, 0, 0, 9], &all), 1) {
            Some(Reply::Ack(terms)) => Some(terms),
            _ => None,
        }
    }

    #[test]
    fn messages_have_the_options_of_their_kind() {
        let (address, server) = (Ipv4Addr::new(10, 0, 0, 9), Ipv4Addr::new(10, 0, 0, 1));
        let codes = |ask| {
            let bytes = client().write(ask, 7).unwrap();
            assert!(bytes.len() >= MIN_LENGTH && bytes[4..8] == [0, 0, 0, 7]);
            let message = borrowed::Message::new(&bytes).unwrap();
            let mut codes: Vec<u8> = message.opts().map(|option| option.code().into()).collect();
            codes.sort_unstable();
            (codes, message.ciaddr())
        };
        let none = Ipv4Addr::UNSPECIFIED;
        assert_eq!(codes(Ask::Discover), (vec![12, 53, 55, 57, 61], none));
        assert_eq!(codes(Ask::Select { address, server }), (vec![12, 50, 53, 54, 55, 57, 61], none));
        assert_eq!(codes(Ask::Extend { address }), (vec![12, 53, 55, 57, 61], address));
        assert_eq!(codes(Ask::Release { address, server }), (vec![53, 54, 61], address));
    }

    #[test]
    fn a_provided_identifier_is_in_the_release_too() {
        let client = Client { id: b"mine".to_vec(), ..client() };
        let (address, server) = (Ipv4Addr::new(10, 0, 0, 9), Ipv4Addr::new(10, 0, 0, 1));
        let bytes = client.write(Ask::Release { address, server }, 7).unwrap();
        assert!(bytes.windows(6).any(|window| window == [61, 4, b'm', b'i', b'n', b'e']));
    }

    #[test]
    fn the_broadcast_flag_is_set_only_if_asked_for() {
        let flag = |answers| Client { answers, ..client() }.write(Ask::Discover, 1).unwrap()[10];
        assert_eq!((flag(Answers::Unicast), flag(Answers::Broadcast)), (0, 0x80));
    }

    #[test]
    fn answers_for_others_are_ignored() {
        let offer = from_server(1, [10, 0, 0, 9], &[&[53, 1, 2], SERVER, MASK]);
        assert!(client().read(&offer, 1).is_some());
        assert_eq!(client().read(&offer, 2), None);
        for at in [0, 2, 30, 237] {
            let mut other = offer.clone();
            other[at] ^= 1;
            assert_eq!(client().read(&other, 1), None, "byte {at}");
        }
    }

    #[test]
    fn times_that_contradict_each_other_are_replaced() {
        let times = |options: &[&[u8]]| acked(options).map(|terms| (terms.seconds, terms.t1, terms.t2));
        assert_eq!(times(&[]), Some((3600, 1800, 3150)));
        assert_eq!(times(&[&[51, 4, 0, 0, 0, 100], &[58, 4, 0, 0, 0, 20], &[59, 4, 0, 0, 0, 30]]), Some((100, 20, 30)));
        assert_eq!(times(&[&[51, 4, 0, 0, 0, 100], &[58, 4, 0, 0, 0, 40], &[59, 4, 0, 0, 0, 30]]), Some((100, 50, 87)));
        assert_eq!(times(&[&[51, 4, 0, 0, 0, 0]]), None);
    }

    #[test]
    fn impossible_addresses_and_masks_are_refused() {
        for (address, mask) in
            [([0; 4], [255, 255, 255, 0]), ([224, 0, 0, 1], [255; 4]), ([10, 0, 0, 9], [255, 0, 255, 0])]
        {
            let mask = [&[1, 4][..], &mask].concat();
            assert_eq!(client().read(&from_server(1, address, &[&[53, 1, 5], SERVER, &mask]), 1), None);
        }
    }

    #[test]
    fn classless_routes_replace_the_others() {
        let router = &[3, 4, 10, 0, 0, 1][..];
        let classful = &[33, 16, 10, 0, 0, 0, 10, 0, 0, 2, 192, 168, 1, 0, 10, 0, 0, 3][..];
        let routes = |options: &[&[u8]]| -> Vec<(String, Option<String>, Option<u8>)> {
            let routes = acked(options).unwrap().result(Some(5)).routes;
            assert!(routes.iter().all(|route| route.priority == Some(5)));
            routes.iter().map(|route| (route.dst.to_string(), route.gw.map(|gw| gw.to_string()), route.scope)).collect()
        };
        let via = |dst: &str, gw: &str| (dst.to_owned(), Some(gw.to_owned()), None);
        let all = [via("10.0.0.0/8", "10.0.0.2"), via("192.168.1.0/24", "10.0.0.3"), via("0.0.0.0/0", "10.0.0.1")];
        assert_eq!(routes(&[router, classful]), all);
        let classless = &[121, 14, 16, 10, 9, 10, 0, 0, 4, 24, 10, 8, 7, 0, 0, 0, 0][..];
        let only = [via("10.9.0.0/16", "10.0.0.4"), ("10.8.7.0/24".into(), None, Some(253))];
        assert_eq!(routes(&[router, classful, &[&[121, 15], &classless[2..]].concat()]), only);
        assert_eq!(routes(&[router, &[121, 2, 33, 1]]), [via("0.0.0.0/0", "10.0.0.1")], "a wrong one counts as absent");
    }

    #[test]
    fn name_servers_and_domains_are_in_the_result() {
        let search = &[119, 15, 1, b'a', 2, b'd', b'e', 0, 1, b'b', 192, 2, 3, b'x', b'\n', b'y', 0][..];
        let dns = acked(&[&[6, 4, 10, 0, 0, 1], &[15, 4, b'a', b'.', b'd', b'e'], search]).unwrap().result(None).dns;
        assert_eq!((dns.nameservers, dns.domain.as_str()), (vec!["10.0.0.1".to_owned()], "a.de"));
        assert_eq!(dns.search, ["a.de", "b.de"], "a name with a newline is left out");
        assert_eq!(acked(&[&[15, 3, b'a', b'\n', b'b']]).unwrap().domain, "");
    }

    #[test]
    fn an_option_that_was_not_requested_is_not_used() {
        let client = Client { request: vec![3], ..client() };
        let ack =
            from_server(1, [10, 0, 0, 9], &[&[53, 1, 5], SERVER, MASK, &[6, 4, 10, 0, 0, 1], &[3, 4, 10, 0, 0, 1]]);
        let Some(Reply::Ack(terms)) = client.read(&ack, 1) else { panic!() };
        assert_eq!((terms.nameservers.len(), terms.routers.len()), (0, 1));
    }

    proptest! {
        #[test]
        fn any_options_are_read_or_refused(options: Vec<u8>, head: [u8; 40], length in 0..300_usize) {
            let mut bytes = from_server(1, [10, 0, 0, 9], &[&[53, 1, 5], SERVER, MASK, &options]);
            if let Some(Reply::Ack(terms)) = client().read(&bytes, 1) {
                terms.result(None);
            }
            bytes[..40].copy_from_slice(&head);
            bytes.truncate(length);
            let _ = client().read(&bytes, 1);
        }
    }
}
