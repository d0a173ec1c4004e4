//! A DHCPv6 server of the test's own, which sees what is sent and answers with messages written by
//! hand. It answers from a global address: a server's address proves nothing.

use std::net::{Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use cni_testkit::{Outcome, bin_dir, patience, wait_until};
use conformance::lan::Lan;
use serde_json::json;

use super::ipv6::{configure, globals, stateful};
use super::wire::{IMPATIENT, answering};

const SOLICIT: u8 = 1;
const ADVERTISE: u8 = 2;
const REQUEST: u8 = 3;
const RENEW: u8 = 5;
const REBIND: u8 = 6;
const REPLY: u8 = 7;
const RELEASE: u8 = 8;
/// The DUIDs of two servers.
const SERVER: [u8; 6] = [0, 3, 0, 1, 0, 1];
const OTHER: [u8; 6] = [0, 3, 0, 1, 0, 2];
const NINE: &str = "2001:db8:1::9";
/// The largest preference: the client waits for no other offer.
const AT_ONCE: [u8; 5] = [0, 7, 0, 1, 255];
/// An address that the client must not use.
const EVIL: &str = "2001:db8:1::66";
const RAPID_COMMIT: [u8; 4] = [0, 14, 0, 0];

fn option(code: u8, data: &[u8]) -> Vec<u8> {
    [&[0, code], &u16::try_from(data.len()).unwrap().to_be_bytes()[..], data].concat()
}

/// The option with an address and its lifetimes.
fn address(text: &str, preferred: u32, valid: u32) -> Vec<u8> {
    let octets = text.parse::<Ipv6Addr>().unwrap().octets();
    option(5, &[&octets[..], &preferred.to_be_bytes(), &valid.to_be_bytes()].concat())
}

/// A client's message.
#[derive(Clone, Debug)]
struct Message {
    bytes: Vec<u8>,
    from: SocketAddrV6,
}

impl Message {
    fn option(&self, code: u8) -> Option<&[u8]> {
        let mut rest = &self.bytes[4..];
        while let [high, low, long, short, tail @ ..] = rest {
            let (value, after) = tail.split_at(usize::from(u16::from_be_bytes([*long, *short])));
            if [*high, *low] == [0, code] {
                return Some(value);
            }
            rest = after;
        }
        None
    }

    fn kind(&self) -> u8 {
        self.bytes[0]
    }

    /// An answer with these options and no others.
    fn bare(&self, kind: u8, options: &[&[u8]]) -> Vec<u8> {
        [&[kind], &self.bytes[1..4], &options.concat()].concat()
    }

    /// An answer of a server with its DUID, that of the client, and these options.
    fn answer(&self, kind: u8, server: &[u8], options: &[&[u8]]) -> Vec<u8> {
        let duids = [option(1, self.option(1).unwrap()), option(2, server)].concat();
        self.bare(kind, &[&[&duids[..]], options].concat())
    }

    /// The client's association, with T1 at 60 s, T2 at 90, and these options.
    fn association(&self, nested: &[u8]) -> Vec<u8> {
        let iaid = &self.option(3).unwrap()[..4];
        option(3, &[iaid, &60_u32.to_be_bytes(), &90_u32.to_be_bytes(), nested].concat())
    }

    /// What a sound server says: 2001:db8:1::9 for 120 s, with more options.
    fn granted(&self, server: &[u8], options: &[&[u8]]) -> Vec<u8> {
        let kind = if self.kind() == SOLICIT { ADVERTISE } else { REPLY };
        let association = self.association(&address(NINE, 100, 120));
        self.answer(kind, server, &[&[&association[..]], options].concat())
    }
}

struct Wire {
    own: UdpSocket,
    all: UdpSocket,
}

impl Wire {
    fn new(lan: &Lan) -> Wire {
        lan.node.ip(&["address add 2001:db8:1::1/64 dev lan nodad"]);
        let link = lan.node.link("lan").unwrap();
        let index = u32::try_from(link["ifindex"].as_u64().unwrap()).unwrap();
        let bind = |address: Ipv6Addr| {
            let socket = lan.node.enter(|| UdpSocket::bind(SocketAddrV6::new(address, 547, 0, index))).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        };
        let group = "ff02::1:2".parse().unwrap();
        let wire = Wire { own: bind("2001:db8:1::1".parse().unwrap()), all: bind(group) };
        wire.all.join_multicast_v6(&group, index).unwrap();
        wire
    }

    fn received(&self) -> Option<Message> {
        let mut buffer = [0; 2048];
        let (length, from) = self.all.recv_from(&mut buffer).ok()?;
        let SocketAddr::V6(from) = from else { panic!("{from}") };
        Some(Message { bytes: buffer[..length].to_vec(), from })
    }

    /// Waits for a message of a kind.
    #[track_caller]
    fn next(&self, kind: u8) -> Message {
        let mut found = None;
        wait_until("the client sends that", || {
            found = self.received().filter(|message| message.kind() == kind);
            found.is_some()
        });
        found.unwrap()
    }

    fn send(&self, to: &Message, answer: &[u8]) {
        self.own.send_to(answer, to.from).unwrap();
    }

    /// Answers all messages as long as something is being done.
    fn during<T>(&self, answers: impl Fn(&Message) -> Vec<Vec<u8>> + Sync, work: impl FnOnce() -> T) -> T {
        answering(
            || self.received(),
            |message| answers(message).iter().for_each(|answer| self.send(message, answer)),
            work,
        )
    }
}

/// Answers as a sound server.
fn sound(message: &Message) -> Vec<Vec<u8>> {
    match message.kind() {
        RELEASE => vec![],
        _ => vec![message.granted(&SERVER, &[&AT_ONCE])],
    }
}

#[test]
fn an_ipv6_renewal_names_its_server_until_t2() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan);
    let mut daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = stateful(&lan, &container);
    let result = wire.during(sound, || attachment.add().success());
    configure(&container, &result);
    for (seconds, kind, server) in [(70, RENEW, Some(&SERVER[..])), (30, REBIND, None)] {
        daemon.kill();
        lan.age(seconds);
        daemon = lan.daemon();
        let renewal = wire.next(kind);
        assert!(renewal.from.ip().is_unicast_link_local() && renewal.from.port() == 546, "{}", renewal.from);
        assert_eq!(renewal.option(2), server);
        assert!(renewal.option(3).unwrap().ends_with(&address(NINE, 0, 0)), "{renewal:?}");
    }
    attachment.del().success();
    let release = wire.next(RELEASE);
    assert_eq!(release.option(2), Some(&SERVER[..]));
    assert!(release.option(3).unwrap().ends_with(&address(NINE, 0, 0)), "{release:?}");
}

#[test]
fn the_ipv6_server_of_the_highest_preference_is_asked() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = stateful(&lan, &container);
    let requests = Mutex::new(Vec::new());
    let answers = |message: &Message| match message.kind() {
        SOLICIT => vec![message.granted(&SERVER, &[]), message.granted(&OTHER, &[&option(7, &[9])])],
        kind => {
            requests.lock().unwrap().push((kind, message.option(2).map(<[u8]>::to_vec)));
            vec![message.granted(&OTHER, &[])]
        }
    };
    wire.during(answers, || attachment.add().success());
    assert_eq!(requests.lock().unwrap()[..], [(REQUEST, Some(OTHER.to_vec()))]);
    attachment.del().success();
}

/// What no client may take for an answer, and what only looks like one. 2001:db8:1::66 is in all of
/// it.
fn hostile(message: &Message) -> Vec<Vec<u8>> {
    let kind = if message.kind() == SOLICIT { ADVERTISE } else { REPLY };
    let own = message.association(&address(EVIL, 100, 120));
    let valid = message.answer(kind, &SERVER, &[&own, &AT_ONCE]);
    let client = option(1, message.option(1).unwrap());
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = valid.clone();
        change(&mut bytes);
        bytes
    };
    let nested = |options: &[u8]| message.answer(kind, &SERVER, &[&message.association(options), &AT_ONCE]);
    let mut all = vec![
        // Another transaction, and kinds that no server sends.
        with(&|bytes| bytes[3] ^= 1),
        with(&|bytes| bytes[0] = SOLICIT),
        with(&|bytes| bytes[0] = 10),
        with(&|bytes| bytes[0] = 13),
        // Another client, none, and no server.
        with(&|bytes| bytes[12] ^= 1),
        message.bare(kind, &[&option(2, &SERVER), &own, &AT_ONCE]),
        message.bare(kind, &[&client, &own, &AT_ONCE]),
        message.answer(kind, &[0, 1], &[&own, &AT_ONCE]),
        message.answer(kind, &[0; 131], &[&own, &AT_ONCE]),
        // A length beyond the end, and one that covers the other options.
        with(&|bytes| bytes[6] = 255),
        with(&|bytes| bytes[7] = 60),
        // Another association, a short one, and nested options with wrong lengths.
        message.answer(kind, &SERVER, &[&option(3, &[&[7; 12][..], &address(EVIL, 100, 120)].concat()), &AT_ONCE]),
        message.answer(kind, &SERVER, &[&option(3, &message.option(3).unwrap()[..6]), &AT_ONCE]),
        nested(&[0, 5, 0, 24, 32, 1]),
        nested(&[0, 5, 255, 255]),
        nested(&option(5, &address(EVIL, 100, 120)[4..14])),
        nested(&own),
        nested(&[address(EVIL, 100, 120), option(13, &[0])].concat()),
        nested(&[address(EVIL, 100, 120), option(13, &[0, 1])].concat()),
        message.answer(kind, &SERVER, &[&own, &option(13, &[0, 1]), &AT_ONCE]),
        // Lifetimes and times in the wrong order, and addresses that no host has.
        nested(&address(EVIL, 120, 100)),
        with(&|bytes| {
            let position = own_t2(bytes);
            bytes[position] = 1;
        }),
        nested(&address("ff02::66", 100, 120)),
        nested(&address("fe80::66", 100, 120)),
        nested(&address("::ffff:192.168.1.66", 100, 120)),
        nested(&address("::1", 100, 120)),
        nested(&address("::", 100, 120)),
        // In several fragments.
        message.answer(kind, &SERVER, &[&own, &AT_ONCE, &option(99, &[0; 60_000])]),
        vec![],
        vec![kind],
        vec![255; 1400],
    ];
    all.extend((0..valid.len() - 9).step_by(7).map(|length| valid[..length].to_vec()));
    // Of other servers, and of other times.
    match message.kind() {
        SOLICIT => all.push(message.answer(REPLY, &SERVER, &[&own])),
        _ => {
            all.extend([valid.clone(), message.granted(&OTHER, &[])]);
            all.push(message.answer(REPLY, &OTHER, &[&option(13, &[0, 2])]));
            all.push(message.answer(ADVERTISE, &SERVER, &[&own, &AT_ONCE]));
        }
    }
    all
}

/// The position of the last octet of T2 in an answer with one association.
fn own_t2(bytes: &[u8]) -> usize {
    let header = [0, 3, 0, 40];
    bytes.windows(4).position(|window| window == header).unwrap() + 15
}

#[test]
fn only_valid_answers_of_a_hostile_ipv6_server_are_used() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan);
    let mut daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = stateful(&lan, &container);
    // Values that are cut off or of no use.
    let useless = [
        option(23, &[32, 1, 13]),
        option(24, b"\x03a\nb\x00"),
        option(24, &[192, 0]),
        option(56, &[0, 1, 0, 16, 1]),
        option(99, &[]),
        option(13, &[0, 0, 255]),
    ];
    let useless: Vec<&[u8]> = useless.iter().map(Vec::as_slice).chain([&AT_ONCE[..]]).collect();
    let answers = |message: &Message| match message.kind() {
        RELEASE => vec![],
        _ => [hostile(message), vec![message.granted(&SERVER, &useless)]].concat(),
    };
    let result = wire.during(answers, || attachment.add().success());
    let ips = json!([{"address": format!("{NINE}/128")}]);
    assert_eq!(result, json!({"cniVersion": "1.1.0", "ips": ips}));
    attachment.check(&result).success();
    assert!(daemon.0.try_wait().unwrap().is_none(), "the daemon runs");
    attachment.del().success();
}

#[test]
fn floods_of_ipv6_answers_do_not_move_the_deadline() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan);
    let _daemon = lan.daemon_of(&bin_dir(), &IMPATIENT);
    let container = lan.container(&["eth0"]);
    let attachment = stateful(&lan, &container);
    let answers = |message: &Message| match message.kind() {
        SOLICIT => vec![message.granted(&SERVER, &[&AT_ONCE]); 100],
        _ => vec![message.answer(REPLY, &SERVER, &[&option(13, &[0, 2])]); 100],
    };
    let began = Instant::now();
    let failure = wire.during(answers, || attachment.add().failure());
    assert!(began.elapsed() < patience(Duration::from_secs(30)), "{:?}", began.elapsed());
    assert_eq!(failure.msg, "error calling DHCP.AllocateIPv6: no more tries");
    attachment.del().success();
    assert_eq!((lan.records(), globals(&container)), (0, String::new()));
}

/// How far an ADD has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Point {
    /// The client has asked for offers.
    Solicited,
    /// It has requested the offered address.
    Requested,
    /// The kernel checks whether another host has the leased address.
    Probing,
}

/// Kills the daemon at a point of an ADD, and returns the outcome of the ADD.
fn killed_at(point: Point, lan: &Lan, wire: &Wire, container: &cni_testkit::Container) -> Outcome {
    let daemon = lan.daemon();
    thread::scope(|scope| {
        let adding = scope.spawn(|| stateful(lan, container).invocation("ADD", None).run());
        let solicit = wire.next(SOLICIT);
        if point >= Point::Requested {
            wire.send(&solicit, &solicit.granted(&SERVER, &[&AT_ONCE]));
            let request = wire.next(REQUEST);
            if point >= Point::Probing {
                wire.send(&request, &request.granted(&SERVER, &[]));
                wait_until("the address is checked", || globals(container).contains(NINE));
            }
        }
        daemon.kill();
        adding.join().unwrap()
    })
}

#[test]
fn after_a_killed_daemon_del_and_gc_release_what_was_asked() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan);
    for point in [Point::Solicited, Point::Requested, Point::Probing] {
        for verb in ["DEL", "GC", "ADD"] {
            let container = lan.container(&["eth0"]);
            let attachment = stateful(&lan, &container);
            let outcome = killed_at(point, &lan, &wire, &container);
            outcome.fails_naming(11, &["error calling DHCP.AllocateIPv6"]);
            let is_recorded = point > Point::Solicited;
            assert_eq!(lan.records(), usize::from(is_recorded), "{point:?}");
            // Without a daemon.
            match is_recorded {
                true => drop(attachment.del().fails_naming(11, &["the attachment has a lease"])),
                false => drop(attachment.del().success()),
            }
            let daemon = lan.daemon();
            match verb {
                "ADD" => {
                    let result = wire.during(sound, || attachment.add().success());
                    assert_eq!((&result["ips"][0]["address"], lan.records()), (&json!(format!("{NINE}/128")), 1));
                    attachment.del().success();
                }
                "GC" => drop(attachment.gc(&[]).success()),
                _ => drop(attachment.del().success()),
            }
            if is_recorded || verb == "ADD" {
                let release = wire.next(RELEASE);
                assert_eq!(release.option(2), Some(&SERVER[..]), "{point:?} {verb}");
                assert!(release.option(3).unwrap().ends_with(&address(NINE, 0, 0)), "{point:?} {verb}");
            }
            assert_eq!((lan.records(), globals(&container)), (0, String::new()), "{point:?} {verb}");
            daemon.kill();
        }
    }
}

/// What no server offered before it leased it has no record, and would stay after a kill.
#[test]
fn an_address_that_was_not_offered_is_not_used() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan);
    let container = lan.container(&["eth0"]);
    let attachment = stateful(&lan, &container);
    let _daemon = lan.daemon();
    let is_asked_for = Mutex::new(false);
    let answers = |message: &Message| match message.kind() {
        SOLICIT => {
            *is_asked_for.lock().unwrap() |= message.option(14).is_some();
            let association = message.association(&address(EVIL, 100, 120));
            let committed = message.answer(REPLY, &SERVER, &[&association, &RAPID_COMMIT]);
            [vec![committed], sound(message)].concat()
        }
        _ => sound(message),
    };
    let result = wire.during(answers, || attachment.add().success());
    assert_eq!((&result["ips"][0]["address"], lan.records()), (&json!(format!("{NINE}/128")), 1));
    assert!(!*is_asked_for.lock().unwrap(), "the client does not ask for rapid commit");
    attachment.del().success();
}
