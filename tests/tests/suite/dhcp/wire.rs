//! A server of the test's own, which sees what is sent and answers with messages written by hand.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cni_testkit::{Node, bin_dir, patience, probe, require, wait_until};
use conformance::lan::{Lan, configure};
use serde_json::{Value, json};

pub(super) const DISCOVER: u8 = 1;
const OFFER: u8 = 2;
const REQUEST: u8 = 3;
const ACK: u8 = 5;
const NAK: u8 = 6;
const RELEASE: u8 = 7;
const NINE: [u8; 4] = [192, 168, 1, 9];
const MASK: &[u8] = &[1, 4, 255, 255, 255, 0];
const SERVER: &[u8] = &[54, 4, 192, 168, 1, 1];
const TIME: &[u8] = &[51, 4, 0, 0, 0, 120];

/// A client's message.
#[derive(Clone, Debug)]
pub(super) struct Message {
    bytes: Vec<u8>,
    from: SocketAddr,
    /// To 192.168.1.1, not to everyone.
    is_unicast: bool,
}

impl Message {
    pub(super) fn option(&self, code: u8) -> Option<&[u8]> {
        let mut rest = &self.bytes[240..];
        while let [found, length, tail @ ..] = rest
            && *found != 255
        {
            let (value, after) = tail.split_at(usize::from(*length));
            if *found == code {
                return Some(value);
            }
            rest = after;
        }
        None
    }

    fn kind(&self) -> u8 {
        self.option(53).unwrap()[0]
    }

    /// An answer with these options and no others.
    fn answer(&self, kind: u8, address: [u8; 4], options: &[&[u8]]) -> Vec<u8> {
        let mut bytes = self.bytes[..236].to_vec();
        bytes[0] = 2;
        bytes[12..16].fill(0);
        bytes[16..20].copy_from_slice(&address);
        bytes.extend([99, 130, 83, 99, 53, 1, kind]);
        options.iter().for_each(|option| bytes.extend(*option));
        bytes.push(255);
        bytes
    }

    /// What a sound server says: 192.168.1.9, with more options.
    pub(super) fn granted(&self, options: &[&[u8]]) -> Vec<u8> {
        let kind = if self.kind() == DISCOVER { OFFER } else { ACK };
        self.answer(kind, NINE, &[&[SERVER, MASK, TIME], options].concat())
    }
}

pub(super) struct Wire {
    own: UdpSocket,
    all: UdpSocket,
}

impl Wire {
    pub(super) fn new(node: &Node) -> Wire {
        let bind = |address| {
            let socket = node.enter(|| UdpSocket::bind((address, 67))).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        };
        let wire = Wire { own: bind(Ipv4Addr::new(192, 168, 1, 1)), all: bind(Ipv4Addr::BROADCAST) };
        wire.own.set_broadcast(true).unwrap();
        wire
    }

    pub(super) fn received(&self) -> Option<Message> {
        let mut buffer = [0; 2048];
        [(&self.own, true), (&self.all, false)].into_iter().find_map(|(socket, is_unicast)| {
            let (length, from) = socket.recv_from(&mut buffer).ok()?;
            Some(Message { bytes: buffer[..length].to_vec(), from, is_unicast })
        })
    }

    /// Waits for a message of a kind.
    #[track_caller]
    pub(super) fn next(&self, kind: u8) -> Message {
        let mut found = None;
        wait_until("the client sends that", || {
            found = self.received().filter(|message| message.kind() == kind);
            found.is_some()
        });
        found.unwrap()
    }

    fn send(&self, answer: &[u8]) {
        self.own.send_to(answer, (Ipv4Addr::BROADCAST, 68)).unwrap();
    }

    /// Answers all messages as long as something is being done.
    pub(super) fn during<T>(&self, answers: impl Fn(&Message) -> Vec<Vec<u8>> + Sync, work: impl FnOnce() -> T) -> T {
        answering(|| self.received(), |message| answers(message).iter().for_each(|answer| self.send(answer)), work)
    }
}

/// Passes all messages to `answer` as long as something is being done.
pub(super) fn answering<M, T>(
    receive: impl Fn() -> Option<M> + Sync,
    answer: impl Fn(&M) + Sync,
    work: impl FnOnce() -> T,
) -> T {
    struct Ended<'a>(&'a AtomicBool);
    impl Drop for Ended<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let _ended = Ended(&has_ended);
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                match receive() {
                    Some(message) => answer(&message),
                    None => thread::sleep(Duration::from_millis(1)),
                }
            }
        });
        work()
    })
}

#[test]
fn a_renewal_comes_from_the_leased_address_to_its_server() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan.node);
    let mut daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let result = wire.during(|message| vec![message.granted(&[])], || attachment.add().success());
    configure(&container, "eth0", &result);
    let leased: SocketAddr = "192.168.1.9:68".parse().unwrap();
    // T1 is at 60 s, T2 at 105.
    for (seconds, is_unicast) in [(70, true), (40, false)] {
        daemon.kill();
        lan.age(seconds);
        daemon = lan.daemon();
        let renewal = wire.next(REQUEST);
        assert_eq!((renewal.from, renewal.is_unicast, &renewal.bytes[12..16]), (leased, is_unicast, &NINE[..]));
        assert_eq!((renewal.option(50), renewal.option(54)), (None, None));
    }
    attachment.del().success();
    let release = wire.next(RELEASE);
    assert_eq!((release.from, release.is_unicast, &release.bytes[12..16]), (leased, true, &NINE[..]));
    assert_eq!(release.option(54), Some(&SERVER[2..]));
}

pub(super) const IMPATIENT: [&str; 6] = ["-timeout", "1s", "-resendmax", "1s", "-resendtimeout", "2s"];

#[test]
fn a_server_that_only_broadcasts_is_asked_to_broadcast() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan.node);
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let answers = |message: &Message| match message.bytes[10] {
        128 => vec![message.granted(&[])],
        _ => vec![],
    };
    let daemon = lan.daemon_of(&bin_dir(), &IMPATIENT);
    wire.during(answers, || drop(attachment.add().failure()));
    daemon.kill();
    let _daemon = lan.daemon_of(&bin_dir(), &["-broadcast"]);
    let result = wire.during(answers, || attachment.add().success());
    assert_eq!(result["ips"][0]["address"], "192.168.1.9/24");
    attachment.del().success();
}

/// What no client may take for an answer, and what only looks like one. 192.168.1.66 is in all of
/// it.
fn hostile(message: &Message) -> Vec<Vec<u8>> {
    const EVIL: [u8; 4] = [192, 168, 1, 66];
    let kind = if message.kind() == DISCOVER { OFFER } else { ACK };
    let sound = message.answer(kind, EVIL, &[SERVER, MASK, TIME]);
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = sound.clone();
        change(&mut bytes);
        bytes
    };
    let mut all = vec![
        with(&|bytes| bytes[0] = 1),
        with(&|bytes| bytes[2] = 255),
        with(&|bytes| bytes[2] = 0),
        with(&|bytes| bytes[7] ^= 1),
        with(&|bytes| bytes[33] ^= 1),
        with(&|bytes| bytes[236] = 0),
        // A length beyond the end, and one that swallows the other options.
        with(&|bytes| bytes[244] = 255),
        with(&|bytes| bytes[241] = 200),
        with(&|bytes| bytes[242] = 77),
        message.answer(kind, [0; 4], &[SERVER, MASK, TIME]),
        message.answer(kind, [255; 4], &[SERVER, MASK, TIME]),
        message.answer(kind, [224, 0, 0, 9], &[SERVER, MASK, TIME]),
        message.answer(kind, [127, 0, 0, 1], &[SERVER, MASK, TIME]),
        message.answer(kind, EVIL, &[MASK, TIME]),
        message.answer(kind, EVIL, &[SERVER, TIME]),
        message.answer(kind, EVIL, &[SERVER, &[1, 4, 255, 0, 255, 0], TIME]),
        message.answer(kind, EVIL, &[SERVER, &[1, 0], TIME]),
        message.answer(kind, EVIL, &[SERVER, MASK, &[51, 4, 0, 0, 0, 0]]),
        message.answer(kind, EVIL, &[&[54, 4, 255, 255, 255, 255], MASK, TIME]),
        // In several fragments.
        message.answer(kind, EVIL, &[SERVER, MASK, TIME, &[0; 4000]]),
        vec![],
        vec![2],
        vec![255; 1400],
    ];
    all.extend((0..240).step_by(30).map(|length| sound[..length].to_vec()));
    // Of other servers, and of other times.
    match message.kind() {
        DISCOVER => all.push(message.answer(ACK, EVIL, &[SERVER, MASK, TIME])),
        _ => {
            let other: &[u8] = &[54, 4, 192, 168, 1, 2];
            all.extend([sound.clone(), message.answer(ACK, NINE, &[other, MASK, TIME])]);
            all.push(message.answer(NAK, [0; 4], &[other]));
            all.push(message.answer(OFFER, EVIL, &[SERVER, MASK, TIME]));
        }
    }
    all
}

/// Options that contradict each other, and values that are cut off or of no use.
const CONTRADICTIONS: [&[u8]; 10] = [
    &[58, 4, 0, 0, 0, 110],
    &[59, 4, 0, 0, 0, 10],
    &[3, 3, 192, 168, 1],
    &[6, 2, 192, 168],
    &[15, 9, b'a', b'\n', b'o', b'p', b't', b'i', b'o', b'n', b's'],
    &[119, 2, 192, 0],
    &[121, 3, 16, 10, 9],
    &[33, 7, 10, 0, 0, 0, 192, 168, 1],
    &[26, 2, 0, 1],
    &[0, 0, 0],
];

#[test]
fn only_valid_answers_of_a_hostile_server_are_used() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan.node);
    let mut daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let answers = |message: &Message| [hostile(message), vec![message.granted(&CONTRADICTIONS)]].concat();
    let result = wire.during(answers, || attachment.add().success());
    let ips = json!([{"address": "192.168.1.9/24"}]);
    assert_eq!(result, json!({"cniVersion": conformance::VERSION, "ips": ips}));
    attachment.check(&result).success();
    assert!(daemon.0.try_wait().unwrap().is_none(), "the daemon runs");
    attachment.del().success();
}

#[test]
fn options_that_were_not_requested_are_not_used() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan.node);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let mut config = attachment.config.clone();
    config["ipam"]["request"] = json!([{"skipDefault": true}, {"option": "routers"}]);
    let attachment = attachment.config(config);
    let options: [&[u8]; 6] = [
        &[3, 4, 192, 168, 1, 1],
        &[6, 4, 192, 168, 1, 66],
        &[15, 4, b'e', b'v', b'i', b'l'],
        &[26, 2, 4, 0],
        &[33, 8, 10, 0, 0, 0, 192, 168, 1, 66],
        &[121, 5, 0, 192, 168, 1, 66],
    ];
    let result = wire.during(|message| vec![message.granted(&options)], || attachment.add().success());
    assert_eq!(result["routes"], json!([{"dst": "0.0.0.0/0", "gw": "192.168.1.1"}]));
    assert_eq!(result["dns"], json!(null));
    attachment.del().success();
}

#[test]
fn floods_of_offers_and_refusals_do_not_move_the_deadline() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan.node);
    let _daemon = lan.daemon_of(&bin_dir(), &IMPATIENT);
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let answers = |message: &Message| match message.kind() {
        DISCOVER => vec![message.granted(&[]); 100],
        _ => vec![message.answer(NAK, [0; 4], &[SERVER]); 100],
    };
    let began = Instant::now();
    let failure = wire.during(answers, || attachment.add().failure());
    // The daemon gives up after two seconds. Without an end of its own the plugin waits for
    // minutes.
    assert!(began.elapsed() < patience(Duration::from_secs(30)), "{:?}", began.elapsed());
    assert_eq!(failure.msg, "error calling DHCP.Allocate: no more tries");
    attachment.del().success();
    assert_eq!((lan.records(), container.addresses("eth0")), (0, vec![]));
}

/// A folder of records on a file system of its own, so that it can be made read-only.
fn records_on_a_disk(lan: &Lan) -> String {
    let folder = lan.node.dir().join("dhcp").display().to_string();
    lan.node.exec(&["mkdir", "-p", &folder]);
    lan.node.exec(&["mount", "-t", "tmpfs", "records", &folder]);
    folder
}

#[test]
fn an_add_that_cannot_be_recorded_requests_nothing() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan.node);
    let folder = records_on_a_disk(&lan);
    lan.node.exec(&["mount", "-o", "remount,ro", &folder]);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let kinds = Mutex::new(Vec::new());
    let answers = |message: &Message| {
        kinds.lock().unwrap().push(message.kind());
        vec![message.granted(&[])]
    };
    let failure = wire.during(answers, || attachment.add().failure());
    let begins = format!("error calling DHCP.Allocate: failed to write {folder}/");
    assert!(failure.msg.starts_with(&begins) && failure.msg.contains("(os error 30)"), "{failure:?}");
    assert!(!kinds.lock().unwrap().contains(&REQUEST), "{kinds:?}");
    attachment.del().success();
    lan.node.exec(&["mount", "-o", "remount,rw", &folder]);
    let result = wire.during(|message| vec![message.granted(&[])], || attachment.add().success());
    assert_eq!(result["ips"][0]["address"], "192.168.1.9/24");
    attachment.del().success();
    assert_eq!(lan.records(), 0);
    lan.node.exec(&["umount", &folder]);
}

#[test]
fn a_lease_that_cannot_be_recorded_is_released() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan.node);
    let folder = records_on_a_disk(&lan);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let kinds = Mutex::new(Vec::new());
    let answers = |message: &Message| {
        let kind = message.kind();
        if kind == REQUEST {
            lan.node.exec(&["mount", "-o", "remount,ro", &folder]);
        }
        kinds.lock().unwrap().push(kind);
        if kind == RELEASE { vec![] } else { vec![message.granted(&[])] }
    };
    wire.during(answers, || {
        attachment.add().fails_naming(11, &["error calling DHCP.Allocate: failed to write ", "(os error 30)"]);
        wait_until("the address is released", || kinds.lock().unwrap().contains(&RELEASE));
    });
    lan.node.exec(&["mount", "-o", "remount,rw", &folder]);
    attachment.del().success();
    assert_eq!(lan.records(), 0);
    lan.node.exec(&["umount", &folder]);
}

#[test]
fn an_address_that_cannot_be_added_is_tried_again() {
    require!(probe::tool("prlimit"));
    let lan = Lan::silent();
    let wire = Wire::new(&lan.node);
    let daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let router: &[u8] = &[3, 4, 192, 168, 1, 1];
    let result = wire.during(|message| vec![message.granted(&[router])], || attachment.add().success());
    configure(&container, "eth0", &result);
    daemon.kill();
    // Its end is over, so it is replaced.
    lan.age(130);
    let daemon = lan.daemon();
    let pid = format!("--pid={}", daemon.0.id());
    let log = || std::fs::read_to_string(lan.node.dir().join("daemon.log")).unwrap();
    let answers = |message: &Message| {
        if message.kind() == REQUEST {
            assert_eq!(container.addresses("eth0"), [""; 0]);
            // Nothing more can be opened.
            lan.node.exec(&["prlimit", &pid, "--nofile=0:1024"]);
        }
        vec![message.granted(&[router])]
    };
    wire.during(answers, || wait_until("it is leased again", || log().contains(" is leased by ")));
    assert_eq!(container.addresses("eth0"), [""; 0]);
    lan.node.exec(&["prlimit", &pid, "--nofile=1024:1024"]);
    wait_until("the address is there", || container.addresses("eth0") == ["192.168.1.9/24"]);
    let routes = || container.json(&["ip", "-j", "route", "show", "default"]);
    wait_until("the route is there", || routes()[0]["gateway"] == "192.168.1.1");
    attachment.del().success();
}

/// The container got its first default route from another network.
#[test]
fn a_replaced_lease_has_its_default_route_behind_the_first() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan.node);
    let daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let router: &[u8] = &[3, 4, 192, 168, 1, 1];
    let result = wire.during(|message| vec![message.granted(&[router])], || attachment.add().success());
    configure(&container, "eth0", &result);
    for line in [
        "link add first type veth peer name other",
        "link set first up",
        "address add 10.9.0.2/24 dev first",
        "route add default via 10.9.0.1 dev first",
    ] {
        container.ip(&[line]);
    }
    daemon.kill();
    // The lease has ended, so it is replaced.
    lan.age(130);
    let _daemon = lan.daemon();
    let defaults = || {
        let routes = container.json(&["ip", "-j", "route", "show", "default"]);
        let row = |route: &Value| (route["dev"].to_string(), route["metric"].as_u64());
        routes.as_array().unwrap().iter().map(row).collect::<Vec<_>>()
    };
    let expected = [("\"first\"".to_owned(), None), ("\"eth0\"".to_owned(), Some(1))];
    wire.during(
        |message| vec![message.granted(&[router])],
        || wait_until("the route is there", || defaults() == expected),
    );
    attachment.del().success();
}
