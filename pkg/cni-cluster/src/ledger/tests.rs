//! Tests of the rules, one by one.

use super::*;
use std::slice;

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Returns the block of 16 addresses that begins at `10.61.0.<first>`.
fn block(first: u8) -> Block {
    Block::of("10.61.0.0-24", 16, IpAddr::from([10, 61, 0, first]))
}

fn version(number: u8) -> Version {
    Version(number.to_string())
}

fn holder() -> Holder {
    Holder { node: "node2".to_owned(), network: "net".to_owned() }
}

/// Returns a ledger with one block in this state.
fn ledger(state: State) -> Ledger {
    Ledger { entries: vec![Entry { block: block(16), state }], ..Ledger::default() }
}

fn host(boot: &str, uptime: u64) -> Host {
    Host { machine: "m".to_owned(), boot: boot.to_owned(), uptime }
}

#[test]
fn each_state_and_claim_have_one_next_operation() {
    let (held, releasing) = (State::Held(version(1)), State::Releasing(version(1)));
    let (claiming, lost) = (State::Claiming, State::Lost(holder()));
    let own = |number| Seen::Own(version(number));
    let (changed, absent) = (|| Seen::Outcome(Outcome::Conflict), || Seen::Outcome(Outcome::Absent));
    let other = || Seen::Other(holder());
    let swap = Action::Change(Change::Swap(version(2)));
    for (state, seen, reserved, next, action) in [
        (&claiming, Seen::Unread, "", Some(&claiming), Action::Change(Change::Create)),
        (&held, Seen::Unread, "", Some(&held), Action::Get),
        (&releasing, Seen::Unread, "", Some(&releasing), Action::Change(Change::Delete(version(1)))),
        (&lost, Seen::Unread, "", Some(&lost), Action::Get),
        (&releasing, changed(), "", Some(&releasing), Action::Get),
        (&claiming, changed(), "", Some(&claiming), Action::Get),
        (&claiming, Seen::Outcome(Outcome::Written(version(1))), "", Some(&held), Action::Done),
        (&lost, Seen::Outcome(Outcome::Written(version(1))), "reserved", Some(&held), Action::Done),
        (&held, own(1), "", Some(&held), Action::Done),
        (&held, own(2), "reserved", Some(&held), swap.clone()),
        (&claiming, own(2), "", Some(&claiming), swap.clone()),
        (&lost, own(2), "", Some(&lost), swap),
        (&releasing, own(1), "", Some(&releasing), Action::Change(Change::Delete(version(1)))),
        (&releasing, own(2), "", Some(&releasing), Action::Change(Change::Delete(version(2)))),
        (&releasing, absent(), "", None, Action::Done),
        (&releasing, other(), "", None, Action::Done),
        (&claiming, absent(), "", Some(&claiming), Action::Change(Change::Create)),
        (&held, absent(), "", Some(&claiming), Action::Change(Change::Create)),
        (&lost, absent(), "", None, Action::Done),
        (&lost, absent(), "reserved", Some(&claiming), Action::Change(Change::Create)),
        (&held, other(), "", None, Action::Done),
        (&held, other(), "reserved", Some(&lost), Action::Done),
        (&claiming, other(), "", None, Action::Done),
    ] {
        let mut ledger = ledger(state.clone());
        let found = ledger.step(&block(16), seen.clone(), !reserved.is_empty());
        assert_eq!((ledger.state(&block(16)), found), (next, action), "{state:?} {seen:?} {reserved}");
    }
}

#[test]
fn a_ledger_is_trusted_for_15_minutes_of_its_boot() {
    let mut ledger = ledger(State::Claiming);
    assert!(!ledger.is_usable(&host("b1", 0)));
    ledger.set_verified(&host("b1", 100));
    assert!(ledger.is_usable(&host("b1", 100)) && ledger.is_usable(&host("b1", 999)));
    assert!(!ledger.is_usable(&host("b1", 1000)) && !ledger.is_usable(&host("b2", 100)));
    ledger.extend_trust(&host("b1", 2000));
    assert!(ledger.is_usable(&host("b1", 2059)) && !ledger.is_usable(&host("b1", 2060)));
}

#[test]
fn only_held_blocks_are_allocated_from() {
    let mut ledger = ledger(State::Held(version(1)));
    ledger.entries.push(Entry { block: block(0), state: State::Held(version(2)) });
    for (first, state) in [(32, State::Claiming), (48, State::Releasing(version(3))), (64, State::Lost(holder()))] {
        ledger.entries.push(Entry { block: block(first), state });
    }
    let span = |first, last| (address(first), address(last));
    assert_eq!(ledger.spans(|_| true), [span("10.61.0.0", "10.61.0.15"), span("10.61.0.16", "10.61.0.31")]);
}

#[test]
fn one_empty_block_of_a_pool_is_kept() {
    let mut ledger = Ledger::default();
    for first in [0, 16, 32] {
        ledger.entries.push(Entry { block: block(first), state: State::Held(version(first)) });
    }
    let used = [address("10.61.0.20")];
    assert_eq!(ledger.surplus(&used, None, &|_| true), [block(0)]);
    assert_eq!(ledger.surplus(&[], None, &|_| true), [block(0), block(16)]);
    assert_eq!(ledger.surplus(&used, Some(&[address("10.61.0.33")]), &|_| true), [block(32)]);
    assert_eq!(ledger.surplus(&used, Some(&used), &|_| true), []);
    assert_eq!(ledger.surplus(&used, None, &|_| false), [block(0), block(32)]);
    ledger.begin_release(&block(0));
    assert_eq!(ledger.state(&block(0)), Some(&State::Releasing(version(0))));
    // GC repeats the release, and gives back a claim that was begun.
    ledger.entries.push(Entry { block: block(48), state: State::Claiming });
    assert_eq!(ledger.surplus(&used, None, &|_| true), [block(0), block(48)]);
    assert_eq!(ledger.surplus(&used, Some(&used), &|_| true), []);
    ledger.begin_release(&block(48));
    assert_eq!(ledger.state(&block(48)), Some(&State::Releasing(version(0))));
}

#[test]
fn a_block_of_one_address_is_not_kept() {
    let single = Block::of("10.61.0.0-24", 1, address("10.61.0.9"));
    let entry = Entry { block: single.clone(), state: State::Held(version(1)) };
    let ledger = Ledger { entries: vec![entry], ..Ledger::default() };
    assert_eq!(ledger.surplus(&[], None, &|_| true), slice::from_ref(&single));
    assert_eq!(ledger.surplus(&[], Some(&[address("10.61.0.9")]), &|_| true), [single]);
    assert_eq!(ledger.surplus(&[address("10.61.0.9")], None, &|_| true), []);
}

#[test]
fn reservations_in_a_lost_block_are_reported() {
    let ledger = ledger(State::Lost(holder()));
    let notes = ledger.lost_notes(&[address("10.61.0.17"), address("10.61.0.1"), address("10.61.0.18")]);
    let expected = "block 10.61.0.16-10.61.0.31 of pool 10.61.0.0-24 is claimed by network net of node node2, \
                    but 10.61.0.17, 10.61.0.18 are in use here: containers of other nodes may get these addresses; \
                    replace the containers of this node";
    assert_eq!(notes, [expected]);
    assert!(ledger.lost_notes(&[address("10.61.0.1")]).is_empty());
}

#[test]
fn an_absent_node_loses_its_claim_after_an_hour() {
    let claim = |node: &str, absent_since: Option<&str>| Claim {
        pool: "p".to_owned(),
        first: address("10.61.0.0"),
        last: address("10.61.0.15"),
        node: node.to_owned(),
        network: "net".to_owned(),
        machine: "m".to_owned(),
        nonce: "n".to_owned(),
        absent_since: absent_since.map(str::to_owned),
    };
    let (now, version) = (1_795_225_384, version(4));
    let (hour_ago, later) = ("2026-11-21T00:43:04Z", "2026-11-21T00:43:05Z");
    let change = |node: &str, since: Option<&str>, rule| {
        let mut claim = claim(node, since);
        let change = reclaim(&mut claim, version.clone(), rule, now);
        (change, claim.absent_since)
    };
    let rule = |node, since| change(node, since, Reclaim::AfterOneHour);
    let marked = (Some(Change::Swap(version.clone())), Some("2026-11-21T01:43:04.000Z".to_owned()));
    assert_eq!(rule("n", None), marked);
    assert_eq!(rule("n", Some(later)), (None, Some(later.to_owned())));
    assert_eq!(rule("n", Some(hour_ago)), (Some(Change::Delete(version.clone())), Some(hour_ago.to_owned())));
    for unclear in ["", "yesterday", "9999-12-31T23:59:59Z"] {
        assert_eq!(rule("n", Some(unclear)), (None, Some(unclear.to_owned())));
    }
    assert_eq!(rule("", Some(hour_ago)).0, None);
    assert_eq!(change("n", Some(hour_ago), Reclaim::Never).0, None);
    assert_eq!(change("n", None, Reclaim::Never), (None, None));
}

#[test]
fn a_damaged_or_unknown_file_is_not_a_ledger() {
    let mut ledger = ledger(State::Held(version(7)));
    ledger.set_verified(&host("b1", 5));
    ledger.pools.insert("10.61.0.0-24".to_owned(), 16);
    ledger.entries.push(Entry { block: block(32), state: State::Claiming });
    let text = ledger.to_json();
    let read = Ledger::parse(text.as_bytes()).unwrap();
    assert_eq!(
        (read.to_json(), read.spans(|_| true), read.pools),
        (text.clone(), ledger.spans(|_| true), ledger.pools.clone())
    );
    for end in 0..text.len() {
        assert_eq!(Ledger::parse(&text.as_bytes()[..end]), None);
    }
    for (from, to) in [
        ("\"format\":1", "\"format\":2"),
        ("10.61.0.31", "10.61.0.15"),
        ("10.61.0.31", "fd00::1"),
        // Two entries of one block.
        ("10.61.0.32\",\"last\":\"10.61.0.47", "10.61.0.16\",\"last\":\"10.61.0.31"),
        ("\"held\"", "\"kept\""),
    ] {
        assert!(text.contains(from));
        assert_eq!(Ledger::parse(text.replace(from, to).as_bytes()), None, "{to}");
    }
}

#[test]
fn the_host_is_read_from_its_files() {
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    assert_eq!(Host::read(root.path()).unwrap_err().code(), cni::Code::IO);
    write("proc/uptime", "12345.67 99.0\n");
    write("proc/sys/kernel/random/boot_id", "b1\n");
    let read = || Host::read(root.path()).unwrap();
    assert_eq!(read(), Host { machine: String::new(), ..host("b1", 12_345) });
    write("etc/machine-id", "m\n");
    assert_eq!(read(), host("b1", 12_345));
    write("etc/machine-id", "uninitialized\n");
    assert_eq!(read().machine, "");
    write("proc/uptime", "up\n");
    assert_eq!(read().uptime, u64::MAX);
}
