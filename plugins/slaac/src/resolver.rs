//! Decodes the name servers and search domains in the options of router advertisements (RFC 8106).
//!
//! The options come from the network: no input makes a function panic, and malformed options are
//! ignored.

use std::net::Ipv6Addr;

use cni::result::Dns;
use cni_dhcp::message::v6::{is_reachable, with_zone};

/// The type of the option with recursive name servers (RDNSS).
const RDNSS: u8 = 25;
/// The type of the option with search domains (DNSSL).
const DNSSL: u8 = 31;
/// How many servers, and how many domains, are kept. Resolvers use the first three servers and six
/// domains.
const MAX_ENTRIES: usize = 8;

/// The name resolution that routers have advertised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resolvers {
    servers: Vec<Ipv6Addr>,
    domains: Vec<String>,
}

impl Resolvers {
    /// Reads encoded options of a router advertisement. An entry whose lifetime is 0 is removed
    /// from the earlier ones.
    pub fn read(&mut self, mut options: &[u8]) {
        // Each option has its type, its length in units of 8 bytes, and its value.
        while let [kind, units, ..] = *options {
            let Some((option, rest)) = options.split_at_checked(8 * usize::from(units)) else { return };
            options = rest;
            // Two unused bytes, then the lifetime in seconds, in network byte order.
            let Some((lifetime, value)) = option.get(4..).and_then(|bytes| bytes.split_first_chunk::<4>()) else {
                // A length of 0 would repeat forever.
                return;
            };
            let is_valid = *lifetime != [0; 4];
            match kind {
                RDNSS => {
                    let (addresses, rest) = value.as_chunks::<16>();
                    if rest.is_empty() {
                        let servers = addresses.iter().map(|octets| Ipv6Addr::from(*octets));
                        update(&mut self.servers, servers.filter(is_reachable), is_valid);
                    }
                }
                DNSSL => update(&mut self.domains, cni_dhcp::message::domains(value).into_iter(), is_valid),
                _ => {}
            }
        }
    }

    /// Adds the servers and domains to those of a result. A link-local server gets the interface's
    /// name as its zone, without which a resolver cannot reach it.
    pub fn add_to(&self, dns: &mut Dns, ifname: &str) {
        let servers = self.servers.iter().map(|server| with_zone(&server.to_string(), ifname));
        update(&mut dns.nameservers, servers, true);
        update(&mut dns.search, self.domains.iter().cloned(), true);
    }
}

/// Adds those of `entries` that `list` does not have, or removes all of them if they are not valid.
fn update<T: PartialEq>(list: &mut Vec<T>, entries: impl Iterator<Item = T>, are_valid: bool) {
    for entry in entries {
        if !are_valid {
            list.retain(|other| *other != entry);
        } else if list.len() < MAX_ENTRIES && !list.contains(&entry) {
            list.push(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn option(kind: u8, units: u8, lifetime: u32, value: &[u8]) -> Vec<u8> {
        [&[kind, units, 0, 0], &lifetime.to_be_bytes()[..], value].concat()
    }

    fn servers(lifetime: u32, list: &[&str]) -> Vec<u8> {
        let value: Vec<u8> = list.iter().flat_map(|text| text.parse::<Ipv6Addr>().unwrap().octets()).collect();
        option(RDNSS, u8::try_from(1 + 2 * list.len()).unwrap(), lifetime, &value)
    }

    fn dns(options: &[Vec<u8>]) -> (Vec<String>, Vec<String>) {
        let (mut resolvers, mut dns) = (Resolvers::default(), Dns::default());
        options.iter().for_each(|options| resolvers.read(options));
        resolvers.add_to(&mut dns, "eth0");
        (dns.nameservers, dns.search)
    }

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn servers_and_domains_of_all_options_are_listed_once() {
        let domains = option(DNSSL, 4, 60, b"\x03lan\x07example\x00\x01b\x00\0\0\0\0\0\0\0\0\0");
        let both = [servers(60, &["2001:db8::53", "fe80::1"]), domains].concat();
        let (found, search) = dns(&[both.clone(), both, servers(60, &["2001:db8::54"])]);
        assert_eq!(found, strings(&["2001:db8::53", "fe80::1%eth0", "2001:db8::54"]));
        assert_eq!(search, strings(&["lan.example", "b"]));
    }

    #[test]
    fn a_lifetime_of_0_removes_an_entry() {
        let (found, _) = dns(&[servers(60, &["2001:db8::1", "2001:db8::2"]), servers(0, &["2001:db8::1"])]);
        assert_eq!(found, strings(&["2001:db8::2"]));
    }

    #[test]
    fn malformed_options_and_impossible_values_are_ignored() {
        let addresses: Vec<String> = (0..100).map(|number| format!("2001:db8::{number:x}")).collect();
        let many: Vec<&str> = addresses.iter().map(String::as_str).collect();
        assert_eq!(dns(&[servers(60, &many)]).0.len(), MAX_ENTRIES);
        for options in [
            vec![],
            vec![RDNSS],
            vec![RDNSS, 0, 0, 0, 0, 0, 0, 60],
            // Longer than the message, and not a whole number of addresses.
            option(RDNSS, 5, 60, &[1; 16]),
            option(RDNSS, 2, 60, &[1; 8]),
            servers(60, &["::", "::1", "ff02::1"]),
            // A line of resolv.conf, a label without its end, and pointers in a circle.
            option(DNSSL, 3, 60, b"\x0ca\nnameserver\0\0\0"),
            option(DNSSL, 2, 60, b"\x3fabcdefg"),
            option(DNSSL, 2, 60, b"\xc0\0\xc0\0\xc0\0\xc0\0"),
        ] {
            assert_eq!(dns(std::slice::from_ref(&options)), (vec![], vec![]), "{options:?}");
        }
    }
}
