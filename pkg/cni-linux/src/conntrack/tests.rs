//! Tests the decoders with given bytes and texts, and deletions on the real kernel.

use std::net::UdpSocket;
use std::process::Command;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::testing::{in_new_netns, output};

fn claim(host_ip: Option<&str>, port: u16, container: &str) -> ClaimedPort {
    let host_ip = host_ip.map(|host_ip| host_ip.parse().unwrap());
    ClaimedPort { protocol: Protocol::Udp, host_ip, host_port: port, container: container.parse().unwrap() }
}

/// Makes the kernel track connections: it does so only where a rule needs it.
fn track() {
    let rules = "table inet t { chain c { type filter hook output priority 0; ct state new accept; }; }";
    let done = Command::new("nft").args([rules]).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    output("ip link set lo up");
    // An IPv6 address is not usable before the end of DAD.
    for address in ["192.0.2.1/24", "192.0.2.2/24", "fd00::1/64"] {
        let nodad = if address.contains(':') { " nodad" } else { "" };
        output(&format!("ip address add {address} dev lo{nodad}"));
    }
}

fn send(to: &str) -> UdpSocket {
    let from = if to.starts_with('[') { "[::]:0" } else { "0.0.0.0:0" };
    let socket = UdpSocket::bind(from).unwrap();
    socket.send_to(b"x", to).unwrap();
    socket
}

/// Returns the tracked destinations with these ports, sorted.
fn tracked(ports: &[u16]) -> Vec<String> {
    let ports = ports.iter().map(|port| (Protocol::Udp, *port)).collect();
    let entries = Conntrack::open().unwrap().list_entries(&Selection { ports, family: 0 }).unwrap();
    let mut found: Vec<String> = entries.iter().map(|entry| entry.destination.to_string()).collect();
    found.sort();
    found
}

#[test]
fn only_foreign_connections_to_the_claimed_port_are_deleted() {
    in_new_netns(|| {
        track();
        let all = ["127.0.0.1:53", "192.0.2.1:53", "192.0.2.1:54", "192.0.2.2:53", "192.0.2.77:53", "[fd00::1]:53"];
        let sockets = all.map(send);
        // Now and then the first packet over IPv6 is not tracked: the address has just been added.
        let deadline = Instant::now() + cni_testkit::patience(Duration::from_secs(10));
        while tracked(&[53, 54]).len() < all.len() && Instant::now() < deadline {
            sockets.iter().zip(all).for_each(|(socket, to)| drop(socket.send_to(b"x", to)));
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(tracked(&[53, 54]).len(), all.len(), "{:?}", tracked(&[53, 54]));
        let mut conntrack = Conntrack::open().unwrap();
        let one = claim(Some("192.0.2.1"), 53, "10.0.0.2:53");
        assert_eq!(conntrack.flush(&[one], FlushScope::Own).unwrap(), 0, "not its own");
        assert_eq!(conntrack.flush(&[one], FlushScope::Others).unwrap(), 1);
        assert_eq!(tracked(&[53]), ["127.0.0.1:53", "192.0.2.2:53", "192.0.2.77:53", "[fd00::1]:53"]);
        let every = [claim(None, 53, "10.0.0.2:53"), claim(None, 99, "10.0.0.2:53")];
        assert_eq!(conntrack.flush(&every, FlushScope::Others).unwrap(), 2);
        assert_eq!(tracked(&[53, 54]), ["192.0.2.1:54", "192.0.2.77:53", "[fd00::1]:53"], "elsewhere, and other ports");
        let v6 = claim(None, 53, "[fd00::2]:53");
        assert_eq!(conntrack.flush(&[v6], FlushScope::Others).unwrap(), 1);
    });
}

#[test]
fn own_connections_that_the_container_answers_are_deleted() {
    in_new_netns(|| {
        track();
        let _sockets = ["192.0.2.1:53", "192.0.2.2:53"].map(send);
        let mut conntrack = Conntrack::open().unwrap();
        // Nothing is translated here, so each address answers for itself.
        let own = claim(None, 53, "192.0.2.2:53");
        assert_eq!(conntrack.flush(&[own], FlushScope::Own).unwrap(), 1);
        assert_eq!(tracked(&[53]), ["192.0.2.1:53"]);
        assert_eq!(conntrack.flush(&[claim(None, 53, "192.0.2.1:53")], FlushScope::Others).unwrap(), 0);
        assert_eq!(conntrack.flush(&[], FlushScope::Others).unwrap(), 0);
    });
}

#[test]
fn the_conntrack_text_and_the_netlink_list_agree() {
    in_new_netns(|| {
        track();
        let dnat =
            "table ip n { chain c { type nat hook output priority -100; udp dport 53 dnat to 127.0.0.9:5353; }; }";
        let done = Command::new("nft").args([dnat]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let _sockets = ["192.0.2.1:53", "127.0.0.1:54", "192.0.2.1:55", "[::1]:53"].map(send);
        let listener = std::net::TcpListener::bind("127.0.0.1:80").unwrap();
        let _stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ports = [(Protocol::Udp, 53), (Protocol::Udp, 54), (Protocol::Tcp, 80), (Protocol::Tcp, 53)];
        let selection = Selection { ports: ports.into_iter().collect(), family: 0 };
        let plain = |entries: Vec<Entry>| {
            let mut all: Vec<String> = entries
                .iter()
                .map(|entry| format!("{} {} {}", entry.protocol, entry.destination, entry.answered_by))
                .collect();
            all.sort();
            all
        };
        let Some(text) = text::read_entries(&selection) else {
            crate::testing::skip("this kernel has no /proc/net/nf_conntrack");
            return;
        };
        let text = plain(text);
        assert_eq!(text, plain(Conntrack::open().unwrap().list_entries(&selection).unwrap()));
        let expected = ["tcp 127.0.0.1:80 127.0.0.1", "udp 127.0.0.1:54 127.0.0.1", "udp 192.0.2.1:53 127.0.0.9"];
        assert!(expected.iter().all(|line| text.iter().any(|found| found == line)), "{text:?}");
        // An entry from the text can be deleted by its key.
        let mut conntrack = Conntrack::open().unwrap();
        let tcp = ClaimedPort { protocol: Protocol::Tcp, ..claim(None, 80, "10.0.0.2:80") };
        assert_eq!(conntrack.flush(&[tcp], FlushScope::Others).unwrap(), 1);
        assert_eq!(conntrack.flush(&[claim(None, 53, "127.0.0.9:5353")], FlushScope::Own).unwrap(), 1);
        assert_eq!(
            plain(conntrack.list_entries(&selection).unwrap()).iter().filter(|line| !line.contains("::1")).count(),
            1
        );
    });
}

#[test]
fn no_connection_is_missed_while_others_end() {
    const KEPT: u8 = 60;
    in_new_netns(|| {
        track();
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        let selection = Selection { ports: [(Protocol::Udp, 53)].into(), family: 0 };
        if text::read_entries(&selection).is_none() {
            crate::testing::skip("this kernel has no /proc/net/nf_conntrack");
            return;
        }
        (1..=KEPT).for_each(|host| drop(socket.send_to(b"x", format!("127.2.0.{host}:53"))));
        for _ in 0..20 {
            (1..=200).for_each(|host| drop(socket.send_to(b"x", format!("127.1.0.{host}:99"))));
            let ending = std::thread::spawn(|| {
                Conntrack::open().unwrap().flush(&[claim(None, 99, "10.0.0.2:99")], FlushScope::Others).unwrap()
            });
            while !ending.is_finished() {
                // `None` is an answer too: then the table is listed over netlink.
                if let Some(entries) = text::read_entries(&selection) {
                    assert_eq!(entries.len(), usize::from(KEPT));
                }
            }
            assert_eq!(ending.join().unwrap(), 200);
        }
    });
}

#[test]
fn connections_in_a_long_table_are_deleted_too() {
    in_new_netns(|| {
        track();
        let socket = send("192.0.2.1:53");
        for number in 0..600_u16 {
            let host = format!("127.1.{}.{}:99", number / 250, 1 + number % 250);
            let _ = socket.send_to(b"x", host);
        }
        assert!(!text::is_cheaper(tracked_connections().unwrap()), "{:?} entries", tracked_connections());
        let mut conntrack = Conntrack::open().unwrap();
        assert_eq!(conntrack.flush(&[claim(None, 53, "10.0.0.2:53")], FlushScope::Others).unwrap(), 1);
        assert_eq!(tracked(&[53]), Vec::<String>::new());
    });
}

#[test]
fn a_text_that_cannot_be_parsed_is_refused() {
    let selection = Selection { ports: [(Protocol::Udp, 53)].into_iter().collect(), family: 0 };
    let line = |tail: &str| {
        format!(
            "ipv4     2 udp      17 29 src=10.0.0.9 dst=192.0.2.1 sport=4000 dport=53 [UNREPLIED] src=10.0.0.2 {tail}\n"
        )
    };
    let read = |text: &str| text::parse(text, &selection).map(|entries| entries.len());
    assert_eq!(read(&line("dst=10.0.0.9 sport=53 dport=4000 mark=0 zone=0 use=2")), Some(1));
    let icmp =
        "ipv4     2 icmp     1 29 src=10.0.0.9 dst=192.0.2.1 type=8 code=0 id=1 src=192.0.2.1 dst=10.0.0.9 use=2\n";
    assert_eq!(read(&(icmp.to_owned() + &line("use=2"))), Some(1));
    assert_eq!(read(&line("zone-orig=7 use=2")), None, "the addresses alone do not name it");
    assert_eq!(read("ipv4 2 udp 17 29 src=10.0.0.9 dst=192.0.2.1"), None);
    assert_eq!(read("udp"), None);
    // The key of an entry from the text is that from netlink without the ID at its end.
    let by_text = text::parse(&line("use=2"), &selection).unwrap().remove(0);
    let found = self::read(&a_message()).unwrap();
    assert_eq!(found.key[..by_text.key.len()], by_text.key);
}

/// Returns an entry as the kernel sends it: UDP, 10.0.0.9:4000 to 192.0.2.1:53, answered by
/// 10.0.0.2.
fn a_message() -> Vec<u8> {
    let tuple = |from: [u8; 4], to: [u8; 4], port: u16| {
        let ip = [new_attribute(1, &from), new_attribute(2, &to)].concat();
        let proto =
            [new_attribute(1, &[17]), new_attribute(2, &4000_u16.to_be_bytes()), new_attribute(3, &port.to_be_bytes())]
                .concat();
        [new_nest(1, &ip), new_nest(2, &proto)].concat()
    };
    let mut payload = vec![2, 0, 0, 0];
    payload.extend(new_nest(CTA_TUPLE_ORIG, &tuple([10, 0, 0, 9], [192, 0, 2, 1], 53)));
    payload.extend(new_nest(CTA_TUPLE_REPLY, &tuple([10, 0, 0, 2], [10, 0, 0, 9], 4000)));
    payload.extend(new_attribute(CTA_ID, &[1, 2, 3, 4]));
    payload
}

fn read(payload: &[u8]) -> Option<Entry> {
    decode_entry(&Message { kind: IPCTNL_MSG_CT_NEW, flags: 0, sequence: 0, payload })
}

#[test]
fn a_conntrack_entry_is_parsed() {
    let found = read(&a_message()).unwrap();
    assert_eq!((found.protocol, found.destination), (Protocol::Udp, "192.0.2.1:53".parse().unwrap()));
    assert_eq!(found.answered_by, "10.0.0.2".parse::<IpAddr>().unwrap());
    assert_eq!(found.key[0], 2);
    assert!(targets(&found, &claim(None, 53, "10.0.0.2:5353")));
    assert!(!targets(&found, &claim(None, 53, "[fd00::2]:5353")));
    assert!(!targets(&found, &claim(Some("192.0.2.9"), 53, "10.0.0.2:5353")));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_text_makes_the_parser_panic(text in "(ipv[46] |udp 17 |[a-z]+=[0-9.:]+ |\\PC{0,4}|\n){0,40}") {
        let _ = text::parse(&text, &Selection { ports: [(Protocol::Udp, 53)].into_iter().collect(), family: 0 });
    }

    #[test]
    fn no_bytes_make_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), cut in 0_usize..200) {
        let _ = read(&bytes);
        let mut message = a_message();
        for (at, byte) in bytes.iter().take(4).enumerate() {
            let len = message.len();
            message[(usize::from(*byte) * 7 + at) % len] = *byte;
        }
        message.truncate(cut);
        let _ = read(&message);
    }
}
