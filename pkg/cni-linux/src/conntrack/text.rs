//! Reads the connection tracking table as text, `/proc/net/nf_conntrack`, which is much faster than
//! netlink while the table has few entries.
//!
//! Over netlink, the kernel takes a lock for each bucket of a table that all namespaces share, also
//! for empty ones (3.5 ms for 262,144 buckets). It writes the text without these locks (0.16 ms,
//! and 0.7 µs for each entry). But it writes the text page by page, and some kernels start from the
//! first bucket again for each page. So the text is only read while there are few entries for the
//! number of buckets. A kernel without the file (`CONFIG_NF_CONNTRACK_PROCFS`) is asked over
//! netlink.

use std::io::Read as _;
use std::net::{IpAddr, SocketAddr};

use super::{CTA_TUPLE_IP, CTA_TUPLE_ORIG, CTA_TUPLE_PROTO, Entry, Protocol, Selection, new_attribute, new_nest};

/// The text is read if there are at least this many buckets for each entry.
const BUCKETS_PER_ENTRY: u64 = 512;
/// The initial size of the buffer, enough for some 350 entries.
const INITIAL_CAPACITY: usize = 64 * 1024;

/// Whether reading the text is faster than netlink for a table with this number of entries.
pub(super) fn is_cheaper(entries: u64) -> bool {
    let buckets = crate::sysctl::read("net/netfilter/nf_conntrack_buckets").ok().and_then(|text| text.parse().ok());
    buckets.is_some_and(|buckets: u64| entries <= buckets / BUCKETS_PER_ENTRY)
}

/// Returns the selected entries of the calling thread's namespace. Returns `None` if the file does
/// not exist or has an unknown format; then the caller uses netlink.
pub(super) fn entries(selection: &Selection) -> Option<Vec<Entry>> {
    // A large buffer, because each read may start from the first bucket again, and `read_to_end`
    // reads a file of unknown length in small pieces at first.
    let mut text = Vec::with_capacity(INITIAL_CAPACITY);
    std::fs::File::open("/proc/thread-self/net/nf_conntrack").ok()?.read_to_end(&mut text).ok()?;
    parse(&String::from_utf8_lossy(&text), selection)
}

/// Parses the text. Returns the selected entries, or `None` if a line has an unknown format. A line
/// has the original direction first, then the reply:
///
/// ```text
/// ipv4     2 udp      17 29 src=10.0.0.9 dst=192.0.2.1 sport=4000 dport=53 [UNREPLIED]
///     src=10.0.0.2 dst=10.0.0.9 ... zone=0
/// ```
pub(super) fn parse(text: &str, selection: &Selection) -> Option<Vec<Entry>> {
    let mut entries = Vec::new();
    for line in text.lines() {
        let number = line.split_ascii_whitespace().nth(3)?.parse().ok()?;
        let Some(protocol) = Protocol::by_number(number) else { continue };
        let found = entry(line, protocol)?;
        if selection.ports.contains(&(protocol, found.destination.port())) {
            entries.push(found);
        }
    }
    Some(entries)
}

/// Parses one line. Returns `None` if its format is unknown.
fn entry(line: &str, protocol: Protocol) -> Option<Entry> {
    const AF_INET: u8 = 2;
    const AF_INET6: u8 = 10;
    let values = |key: &'static str| {
        line.split_ascii_whitespace().filter_map(move |word| word.strip_prefix(key)?.strip_prefix('='))
    };
    // In another zone than 0, the addresses and ports alone do not identify an entry.
    let has_zone = line.split_ascii_whitespace().any(|word| word.starts_with("zone") && !word.ends_with("=0"));
    if has_zone {
        return None;
    }
    let mut sources = values("src");
    let (source, answered_by): (IpAddr, IpAddr) = (sources.next()?.parse().ok()?, sources.next()?.parse().ok()?);
    let destination: IpAddr = values("dst").next()?.parse().ok()?;
    let source_port: u16 = values("sport").next()?.parse().ok()?;
    let destination_port: u16 = values("dport").next()?.parse().ok()?;
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
    let ports =
        [new_attribute(2, &source_port.to_be_bytes()), new_attribute(3, &destination_port.to_be_bytes())].concat();
    let tuple = [new_nest(CTA_TUPLE_IP, &ip), new_nest(CTA_TUPLE_PROTO, &[number, ports].concat())];
    // The text does not have the entry's number (CTA_ID). So the key also matches an entry that
    // replaces this one in the same moment. Deleting that is harmless: its next packet creates it
    // again.
    let mut key = vec![family, 0, 0, 0];
    key.extend(new_nest(CTA_TUPLE_ORIG, &tuple.concat()));
    Some(Entry { protocol, destination: SocketAddr::new(destination, destination_port), answered_by, key })
}
