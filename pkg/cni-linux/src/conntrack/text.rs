//! The table as text, `/proc/net/nf_conntrack`: for a short table much cheaper than a list over
//! netlink.
//!
//! A list over netlink takes a lock for each bucket of a table that all namespaces share, empty or
//! not (262,144 of them: 3.5 ms); the text is made without one (0.16 ms, and 0.7 µs for each
//! entry). But it is handed out by pages, and kernels differ in how far back they begin to count
//! for each. So it is read only where the entries are few for the size of the table, and a kernel
//! that does not have it at all (`CONFIG_NF_CONNTRACK_PROCFS`) loses nothing.

use std::io::Read as _;
use std::net::{IpAddr, SocketAddr};

use super::{CTA_TUPLE_IP, CTA_TUPLE_ORIG, CTA_TUPLE_PROTO, Entry, Protocol, Wanted, new_attribute, new_nest};

/// So many buckets have to be there for each entry.
const BUCKETS: u64 = 512;
/// For some 350 entries; more are read into more.
const ROOM: usize = 64 * 1024;

/// Whether the text is the cheaper way for so many entries.
pub(super) fn is_cheaper(entries: u64) -> bool {
    let buckets = crate::sysctl::read("net/netfilter/nf_conntrack_buckets").ok().and_then(|text| text.parse().ok());
    buckets.is_some_and(|buckets: u64| entries <= buckets / BUCKETS)
}

/// The wanted entries of the calling thread's namespace. `None` if there is no such text, or
/// something in it is not understood: then the caller lists over netlink.
pub(super) fn entries(wanted: &Wanted) -> Option<Vec<Entry>> {
    // In as few reads as there are pages: each starts from the beginning, and a file without a
    // length is else read in small steps first.
    let mut text = Vec::with_capacity(ROOM);
    std::fs::File::open("/proc/thread-self/net/nf_conntrack").ok()?.read_to_end(&mut text).ok()?;
    // The kernel never writes anything but ASCII, and this must not fail if it does.
    parse(&String::from_utf8_lossy(&text), wanted)
}

/// ```text
/// ipv4     2 udp      17 29 src=10.0.0.9 dst=192.0.2.1 sport=4000 dport=53 [UNREPLIED]
///     src=10.0.0.2 dst=10.0.0.9 ... zone=0
/// ```
pub(super) fn parse(text: &str, wanted: &Wanted) -> Option<Vec<Entry>> {
    let mut entries = Vec::new();
    for line in text.lines() {
        let number = line.split_ascii_whitespace().nth(3)?.parse().ok()?;
        let Some(protocol) = Protocol::by_number(number) else { continue };
        let found = entry(line, protocol)?;
        if wanted.ports.contains(&(protocol, found.destination.port())) {
            entries.push(found);
        }
    }
    Some(entries)
}

fn entry(line: &str, protocol: Protocol) -> Option<Entry> {
    const AF_INET: u8 = 2;
    const AF_INET6: u8 = 10;
    let values = |key: &'static str| {
        line.split_ascii_whitespace().filter_map(move |word| word.strip_prefix(key)?.strip_prefix('='))
    };
    // If the entry has a zone, the addresses alone do not name it.
    let zones = line.split_ascii_whitespace().filter(|word| word.starts_with("zone"));
    if zones.into_iter().any(|word| !word.ends_with("=0")) {
        return None;
    }
    let mut sources = values("src");
    let (source, answered_by): (IpAddr, IpAddr) = (sources.next()?.parse().ok()?, sources.next()?.parse().ok()?);
    let destination: IpAddr = values("dst").next()?.parse().ok()?;
    let from: u16 = values("sport").next()?.parse().ok()?;
    let to: u16 = values("dport").next()?.parse().ok()?;
    let (family, ip) = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            (AF_INET, [new_attribute(1, &source.octets()), new_attribute(2, &destination.octets())].concat())
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            (AF_INET6, [new_attribute(3, &source.octets()), new_attribute(4, &destination.octets())].concat())
        }
        _ => return None,
    };
    let number = new_attribute(1, &[protocol.number()]);
    let ports = [new_attribute(2, &from.to_be_bytes()), new_attribute(3, &to.to_be_bytes())].concat();
    let tuple = [new_nest(CTA_TUPLE_IP, &ip), new_nest(CTA_TUPLE_PROTO, &[number, ports].concat())];
    // Without the entry's number a new connection from the same port in this very moment would be
    // meant too; its next packet creates the entry again, by the same rules.
    let mut key = vec![family, 0, 0, 0];
    key.extend(new_nest(CTA_TUPLE_ORIG, &tuple.concat()));
    Some(Entry { protocol, destination: SocketAddr::new(destination, to), answered_by, key })
}
