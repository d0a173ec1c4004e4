//! Reads the connection tracking table as text, `/proc/net/nf_conntrack`. For a short table that is
//! much cheaper than a list over netlink.
//!
//! For a list over netlink the kernel locks each hash bucket of a table that all namespaces share,
//! empty or not (262,144 buckets: 3.5 ms). For the text it takes no lock (0.16 ms, and 0.7 µs for
//! each entry). But the text is read page by page, and some kernels (6.1) find the beginning of a
//! page by counting entries from the beginning of the table. This has two consequences:
//!
//! - Each page takes another walk through the table. So the text is used only if the table has few
//!   entries in relation to its buckets.
//! - If a connection ends while the text is read, the next page begins one entry too late. So a
//!   text of several pages is used only if a second reading has the same connections.
//!
//! A kernel without the text (`CONFIG_NF_CONNTRACK_PROCFS`) is always asked over netlink.

use std::fs::File;
use std::io::{self, Read as _};
use std::net::{IpAddr, SocketAddr};

use super::{
    AF_INET, AF_INET6, CTA_IP_V4_DST, CTA_IP_V4_SRC, CTA_IP_V6_DST, CTA_IP_V6_SRC, CTA_PROTO_DST_PORT, CTA_PROTO_NUM,
    CTA_PROTO_SRC_PORT, CTA_TUPLE_IP, CTA_TUPLE_ORIG, CTA_TUPLE_PROTO, Entry, Protocol, Selection, new_attribute,
    new_nest, nfgenmsg,
};

/// The text is used if the table has at least this number of hash buckets for each entry.
const BUCKETS_PER_ENTRY: u64 = 512;
/// The size of the buffer for one page of the text. The kernel returns at most one page of memory:
/// 4 KiB, some 20 entries, on most machines.
const LARGEST_PAGE: usize = 64 * 1024;
/// The maximum number of times that the text is read.
const READINGS: usize = 3;

/// Whether reading the text of `entry_count` entries is cheaper than a list over netlink. `false`
/// if the kernel does not report the number of buckets.
pub(super) fn is_cheaper(entry_count: u64) -> bool {
    let Ok(buckets) = crate::sysctl::read("net/netfilter/nf_conntrack_buckets") else { return false };
    let Ok(buckets) = buckets.parse::<u64>() else { return false };
    entry_count <= buckets / BUCKETS_PER_ENTRY
}

/// Returns the selected entries of the calling thread's namespace. Returns `None` if the text
/// cannot be read or parsed, or connections began or ended during all readings. The caller then
/// lists over netlink.
pub(super) fn read_entries(selection: &Selection) -> Option<Vec<Entry>> {
    let mut previous_text: Option<String> = None;
    for _ in 0..READINGS {
        let (text, pages) = read_text().ok()?;
        let is_confirmed =
            previous_text.is_some_and(|previous| connection_words(&previous).eq(connection_words(&text)));
        if pages <= 1 || is_confirmed {
            return parse(&text, selection);
        }
        previous_text = Some(text);
    }
    None
}

/// Reads the text. Returns it with the number of pages.
fn read_text() -> io::Result<(String, usize)> {
    let mut file = File::open("/proc/thread-self/net/nf_conntrack")?;
    let (mut text, mut pages) = (Vec::new(), 0);
    let mut page = vec![0; LARGEST_PAGE];
    loop {
        match file.read(&mut page)? {
            0 => return Ok((String::from_utf8_lossy(&text).into_owned(), pages)),
            length => text.extend_from_slice(page.get(..length).unwrap_or_default()),
        }
        pages += 1;
    }
}

/// Returns the words of a text that identify its connections, in the text's order: addresses, and
/// ports or the numbers of ICMP. Other words, such as the remaining time, may differ between two
/// readings of the same connections.
fn connection_words(text: &str) -> impl Iterator<Item = &str> {
    const KEYS: [&str; 7] = ["src=", "dst=", "sport=", "dport=", "type=", "code=", "id="];
    text.split_ascii_whitespace().filter(|word| KEYS.iter().any(|key| word.starts_with(key)))
}

/// Returns the selected entries in a text with one entry in each line. `None` if a line has no
/// protocol number (the fourth word, 17 here), or has a known protocol but cannot be parsed.
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
        let entry = parse_line(line, protocol)?;
        if selection.ports.contains(&(protocol, entry.destination.port())) {
            entries.push(entry);
        }
    }
    Some(entries)
}

/// Parses the line of an entry with this protocol. Returns `None` if a field is missing or
/// malformed. Also returns `None` for a zone other than 0: the line does not have everything that
/// identifies an entry in a zone.
fn parse_line(line: &str, protocol: Protocol) -> Option<Entry> {
    // Each key occurs twice, first for the original packet and then for the reply.
    let values = |key: &'static str| {
        line.split_ascii_whitespace().filter_map(move |word| word.strip_prefix(key)?.strip_prefix('='))
    };
    if line.split_ascii_whitespace().any(|word| word.starts_with("zone") && !word.ends_with("=0")) {
        return None;
    }
    let mut sources = values("src");
    let source: IpAddr = sources.next()?.parse().ok()?;
    let answered_by: IpAddr = sources.next()?.parse().ok()?;
    let destination: IpAddr = values("dst").next()?.parse().ok()?;
    let source_port: u16 = values("sport").next()?.parse().ok()?;
    let destination_port: u16 = values("dport").next()?.parse().ok()?;
    // The key is the same as over netlink, but without the entry's ID, which the text does not
    // have. So a deletion by this key also hits a new connection with the same addresses and ports.
    // The next packet of that connection creates an entry again.
    let (family, ip) = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => (
            AF_INET,
            [new_attribute(CTA_IP_V4_SRC, &source.octets()), new_attribute(CTA_IP_V4_DST, &destination.octets())],
        ),
        (IpAddr::V6(source), IpAddr::V6(destination)) => (
            AF_INET6,
            [new_attribute(CTA_IP_V6_SRC, &source.octets()), new_attribute(CTA_IP_V6_DST, &destination.octets())],
        ),
        _ => return None,
    };
    let proto = [
        new_attribute(CTA_PROTO_NUM, &[protocol.number()]),
        new_attribute(CTA_PROTO_SRC_PORT, &source_port.to_be_bytes()),
        new_attribute(CTA_PROTO_DST_PORT, &destination_port.to_be_bytes()),
    ];
    let tuple = [new_nest(CTA_TUPLE_IP, &ip.concat()), new_nest(CTA_TUPLE_PROTO, &proto.concat())];
    let mut key = nfgenmsg(family);
    key.extend(new_nest(CTA_TUPLE_ORIG, &tuple.concat()));
    Some(Entry { protocol, destination: SocketAddr::new(destination, destination_port), answered_by, key })
}
