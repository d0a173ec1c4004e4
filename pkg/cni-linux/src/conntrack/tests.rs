//! The decoder against bytes, the whole against the real kernel.

use std::net::UdpSocket;
use std::process::Command;

use proptest::prelude::*;

use super::*;
use crate::testing::{in_new_netns, output};

fn claim(host_ip: Option<&str>, port: u16, container: &str) -> Claim {
    let host_ip = host_ip.map(|host_ip| host_ip.parse().unwrap());
    Claim { protocol: Protocol::Udp, host_ip, host_port: port, container: container.parse().unwrap() }
}

/// Makes the kernel track: it does so only where somebody asks for it.
fn track() {
    let rules = "table inet t { chain c { type filter hook output priority 0; ct state new accept; }; }";
    let done = Command::new("nft").args([rules]).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    output("ip link set lo up");
    // Until DAD is over, addresses of IPv6 are not there.
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

/// The tracked destinations of these ports, sorted.
fn tracked(ports: &[u16]) -> Vec<String> {
    let ports = ports.iter().map(|port| (Protocol::Udp, *port)).collect();
    let entries = Conntrack::open().unwrap().entries(&Wanted { ports, family: 0 }).unwrap();
    let mut found: Vec<String> = entries.iter().map(|entry| entry.destination.to_string()).collect();
    found.sort();
    found
}

#[test]
fn of_others_connections_those_to_the_claimed_port_of_this_host_are_forgotten() {
    in_new_netns(|| {
        track();
        let all = ["127.0.0.1:53", "192.0.2.1:53", "192.0.2.1:54", "192.0.2.2:53", "192.0.2.77:53", "[fd00::1]:53"];
        let sockets = all.map(send);
        // Now and then the first packet over IPv6 is not tracked: the address has just been added.
        for _ in 0..200 {
            if tracked(&[53, 54]).len() == all.len() {
                break;
            }
            sockets.iter().zip(all).for_each(|(socket, to)| drop(socket.send_to(b"x", to)));
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(tracked(&[53, 54]).len(), all.len(), "{:?}", tracked(&[53, 54]));
        let mut conntrack = Conntrack::open().unwrap();
        let one = claim(Some("192.0.2.1"), 53, "10.0.0.2:53");
        assert_eq!(conntrack.forget(&[one], Forget::Own).unwrap(), 0, "not its own");
        assert_eq!(conntrack.forget(&[one], Forget::Others).unwrap(), 1);
        assert_eq!(tracked(&[53]), ["127.0.0.1:53", "192.0.2.2:53", "192.0.2.77:53", "[fd00::1]:53"]);
        let every = [claim(None, 53, "10.0.0.2:53"), claim(None, 99, "10.0.0.2:53")];
        assert_eq!(conntrack.forget(&every, Forget::Others).unwrap(), 2);
        assert_eq!(tracked(&[53, 54]), ["192.0.2.1:54", "192.0.2.77:53", "[fd00::1]:53"], "elsewhere, and other ports");
        let v6 = claim(None, 53, "[fd00::2]:53");
        assert_eq!(conntrack.forget(&[v6], Forget::Others).unwrap(), 1);
    });
}

#[test]
fn of_its_own_connections_those_it_answers_are_forgotten() {
    in_new_netns(|| {
        track();
        let _sockets = ["192.0.2.1:53", "192.0.2.2:53"].map(send);
        let mut conntrack = Conntrack::open().unwrap();
        // Nothing is translated here, so each address answers for itself.
        let own = claim(None, 53, "192.0.2.2:53");
        assert_eq!(conntrack.forget(&[own], Forget::Own).unwrap(), 1);
        assert_eq!(tracked(&[53]), ["192.0.2.1:53"]);
        assert_eq!(conntrack.forget(&[claim(None, 53, "192.0.2.1:53")], Forget::Others).unwrap(), 0);
        assert_eq!(conntrack.forget(&[], Forget::Others).unwrap(), 0);
    });
}

/// An entry as the kernel sends it: UDP, 10.0.0.9:4000 to 192.0.2.1:53, answered by 10.0.0.2.
fn a_message() -> Vec<u8> {
    let tuple = |from: [u8; 4], to: [u8; 4], port: u16| {
        let ip = [attribute(1, &from), attribute(2, &to)].concat();
        let proto =
            [attribute(1, &[17]), attribute(2, &4000_u16.to_be_bytes()), attribute(3, &port.to_be_bytes())].concat();
        [attribute(1 | NLA_F_NESTED, &ip), attribute(2 | NLA_F_NESTED, &proto)].concat()
    };
    let mut payload = vec![2, 0, 0, 0];
    payload.extend(attribute(CTA_TUPLE_ORIG | NLA_F_NESTED, &tuple([10, 0, 0, 9], [192, 0, 2, 1], 53)));
    payload.extend(attribute(CTA_TUPLE_REPLY | NLA_F_NESTED, &tuple([10, 0, 0, 2], [10, 0, 0, 9], 4000)));
    payload.extend(attribute(CTA_ID, &[1, 2, 3, 4]));
    payload
}

fn read(payload: &[u8]) -> Option<Entry> {
    entry(&Message { kind: IPCTNL_MSG_CT_NEW, flags: 0, sequence: 0, payload })
}

#[test]
fn an_entry_is_read() {
    let found = read(&a_message()).unwrap();
    assert_eq!((found.protocol, found.destination), (Protocol::Udp, "192.0.2.1:53".parse().unwrap()));
    assert_eq!(found.answered_by, "10.0.0.2".parse::<IpAddr>().unwrap());
    assert_eq!(found.key[0], 2);
    assert!(is_about(&found, &claim(None, 53, "10.0.0.2:5353")));
    assert!(!is_about(&found, &claim(None, 53, "[fd00::2]:5353")));
    assert!(!is_about(&found, &claim(Some("192.0.2.9"), 53, "10.0.0.2:5353")));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), cut in 0_usize..200) {
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
