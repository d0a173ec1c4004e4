//! Options of router advertisements. Each name server in the result is an address, each domain has
//! only the characters of a domain name, both lists are short, and no entry is
//! listed twice.

use std::net::Ipv6Addr;

use cni::result::Dns;
use plugin_slaac::resolver::Resolvers;

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let mut resolvers = Resolvers::default();
    resolvers.read(data);
    let mut dns = Dns::default();
    resolvers.add_to(&mut dns, "eth0");
    assert!(dns.nameservers.len() <= 8 && dns.search.len() <= 8, "{dns:?}");
    for server in &dns.nameservers {
        server.trim_end_matches("%eth0").parse::<Ipv6Addr>().unwrap();
    }
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    for domain in &dns.search {
        assert!(!domain.is_empty() && domain.bytes().all(is_allowed), "{domain:?}");
    }
    let before = dns.clone();
    resolvers.add_to(&mut dns, "eth0");
    assert_eq!(dns, before, "entries are listed twice");
}
