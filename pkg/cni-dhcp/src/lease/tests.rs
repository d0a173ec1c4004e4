use super::*;
use crate::message::tests::{client, from_server};

fn s(seconds: u64) -> Duration {
    Duration::from_secs(1000 + seconds)
}

const ADDRESS: [u8; 4] = [10, 0, 0, 9];
const FROM: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 9);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

/// What a server sends: 2 an offer, 5 an ACK, 6 a NAK; a lease of 1000 s.
fn answer(session: &Session, kind: u8, server: u8, address: [u8; 4]) -> Vec<u8> {
    let server = [54, 4, 10, 0, 0, server];
    from_server(session.xid, address, &[&[53, 1, kind], &server, &[1, 4, 255, 255, 255, 0], &[51, 4, 0, 0, 3, 232]])
}

/// Sends, and returns the kind of message, its address as the client's own, and the path.
#[track_caller]
fn sent(session: &mut Session, now: Duration) -> (u8, Ipv4Addr, Path) {
    assert_eq!(session.elapse(now), None);
    match session.step(now) {
        Step::Send(bytes, path) => {
            let at = bytes.windows(2).position(|window| window == [53, 1]).unwrap();
            (bytes[at + 2], Ipv4Addr::new(bytes[12], bytes[13], bytes[14], bytes[15]), path)
        }
        step => panic!("{step:?}"),
    }
}

fn new() -> Session {
    Session::new(Identity::V4(client()), Limits::default(), 42, s(0))
}

fn bound() -> Session {
    let mut session = new();
    sent(&mut session, s(0));
    assert!(matches!(session.receive(&answer(&session, 2, 1, ADDRESS), s(0)), Some(Change::Offered(_))));
    assert_eq!(sent(&mut session, s(0)), (3, Ipv4Addr::UNSPECIFIED, Path::Broadcast));
    assert_eq!(session.receive(&answer(&session, 5, 1, ADDRESS), s(2)), Some(Change::Acquired));
    session
}

#[test]
fn an_address_is_found_requested_and_kept_until_t1() {
    let mut session = bound();
    let lease = session.lease().unwrap().clone();
    assert_eq!(
        (lease.t1(), lease.t2(), lease.expiry()),
        (s(500), s(875), s(1000)),
        "from the request, not from the answer"
    );
    assert_eq!(session.step(s(3)), Step::Sleep(s(500)));
}

#[test]
fn messages_are_repeated_until_the_time_is_up() {
    let mut session = new();
    let mut times = Vec::new();
    let mut now = s(0);
    loop {
        match session.step(now) {
            Step::Send(..) => times.push((now - s(0)).as_millis()),
            Step::Listen(until, _) | Step::Sleep(until) => now = until,
            Step::Probe(_) => panic!("DHCPv4 has no probe"),
            Step::Failed(why) => {
                let count = times.len();
                assert_eq!(why, format!("no DHCP server answered: {count} messages sent in 208 s"));
                break;
            }
        }
    }
    assert_eq!(times[..9], [0, 250, 750, 1750, 3750, 7750, 15750, 25750, 35750]);
    assert_eq!(now, s(208));
}

#[test]
fn a_renewal_is_requested_from_the_leased_address() {
    let mut session = bound();
    assert_eq!(sent(&mut session, s(500)), (3, FROM, Path::Unicast { from: FROM, to: SERVER }));
    assert_eq!(session.receive(&answer(&session, 5, 1, ADDRESS), s(501)), Some(Change::Extended));
    assert_eq!(session.lease().unwrap().expiry(), s(1500));
    assert_eq!(session.step(s(501)), Step::Sleep(s(1000)));
}

#[test]
fn nothing_listens_between_two_attempts_to_renew() {
    let mut session = bound();
    sent(&mut session, s(500));
    let path = Path::Unicast { from: FROM, to: SERVER };
    assert_eq!(session.step(s(500)), Step::Listen(s(510), path));
    assert!(matches!(session.step(s(510)), Step::Sleep(until) if until > s(680) && until < s(700)));
}

#[test]
fn with_a_silent_server_the_lease_is_rebound_then_expires() {
    let mut session = bound();
    sent(&mut session, s(500));
    assert_eq!(sent(&mut session, s(875)), (3, FROM, Path::BroadcastFrom(FROM)));
    assert_eq!(session.elapse(s(999)), None);
    let cidr = session.lease().unwrap().terms.cidr;
    assert_eq!(session.elapse(s(1000)), Some(Change::Lost(cidr)));
    assert_eq!(session.lease(), None);
    assert_eq!(sent(&mut session, s(1000)).0, 1);
    assert!(!matches!(session.step(s(1_000_000)), Step::Failed(_)), "a lost lease is looked for without end");
}

#[test]
fn deadlines_do_not_move_when_the_caller_is_late() {
    let mut session = bound();
    assert_eq!(sent(&mut session, s(900)).2, Path::BroadcastFrom(FROM));
    assert!(matches!(bound().elapse(s(5000)), Some(Change::Lost(_))));
}

#[test]
fn another_server_may_extend_or_move_a_lease_after_t2() {
    let mut session = bound();
    sent(&mut session, s(875));
    assert_eq!(session.clone().receive(&answer(&session, 5, 2, ADDRESS), s(876)), Some(Change::Extended));
    let old = session.lease().unwrap().terms.cidr;
    assert_eq!(session.receive(&answer(&session, 5, 2, [10, 0, 0, 10]), s(876)), Some(Change::Moved(old)));
    assert_eq!(session.lease().unwrap().terms.address(), Ipv4Addr::new(10, 0, 0, 10));
}

#[test]
fn answers_of_other_servers_and_for_other_addresses_are_ignored() {
    let mut session = new();
    sent(&mut session, s(0));
    assert_eq!(session.receive(&answer(&session, 5, 1, ADDRESS), s(0)), None, "nothing was requested");
    session.receive(&answer(&session, 2, 1, ADDRESS), s(0));
    sent(&mut session, s(0));
    for (kind, server, address) in [(5, 2, ADDRESS), (5, 1, [10, 0, 0, 66]), (6, 2, ADDRESS), (2, 1, ADDRESS)] {
        assert_eq!(session.receive(&answer(&session, kind, server, address), s(0)), None);
    }
    let mut session = bound();
    sent(&mut session, s(500));
    for (kind, server, address) in [(5, 2, ADDRESS), (5, 1, [10, 0, 0, 66]), (6, 2, ADDRESS)] {
        assert_eq!(session.receive(&answer(&session, kind, server, address), s(501)), None);
    }
    assert!(session.lease().is_some());
}

#[test]
fn a_refusal_ends_the_lease_and_the_search_begins_at_once() {
    for at in [500, 875] {
        let mut session = bound();
        sent(&mut session, s(at));
        assert!(matches!(session.receive(&answer(&session, 6, 1, [0; 4]), s(at)), Some(Change::Lost(_))));
        assert_eq!(sent(&mut session, s(at)).0, 1);
    }
}

#[test]
fn a_refused_request_is_not_repeated_at_once() {
    let mut session = new();
    sent(&mut session, s(0));
    session.receive(&answer(&session, 2, 1, ADDRESS), s(0));
    sent(&mut session, s(0));
    assert_eq!(session.receive(&answer(&session, 6, 1, [0; 4]), s(0)), None);
    assert!(matches!(session.step(s(0)), Step::Listen(until, _) if until == s(1)));
    assert_eq!(sent(&mut session, s(1)).0, 1);
}

#[test]
fn a_server_that_offers_but_never_acknowledges_is_dropped() {
    let mut session = new();
    sent(&mut session, s(0));
    session.receive(&answer(&session, 2, 1, ADDRESS), s(0));
    let kinds: Vec<u8> = [0, 1, 3, 7, 15].iter().map(|at| sent(&mut session, s(*at)).0).collect();
    assert_eq!(kinds, [3, 3, 3, 3, 1]);
}

#[test]
fn a_recorded_lease_continues_and_an_infinite_one_stays() {
    let lease = bound().lease().unwrap().clone();
    let mut session = Session::resume(Identity::V4(client()), Limits::default(), 1, lease.clone());
    assert_eq!(session.step(s(10)), Step::Sleep(s(500)));
    let terms = LeaseParameters { seconds: u32::MAX, ..lease.terms };
    let mut session = Session::resume(Identity::V4(client()), Limits::default(), 1, Lease { terms, ..lease });
    assert_eq!(session.elapse(s(1 << 40)), None);
    assert_eq!(session.step(s(1 << 40)), Step::Sleep(Duration::MAX));
}

#[test]
fn a_release_is_sent_from_the_address_to_the_server() {
    let mut session = bound();
    let terms = session.lease().unwrap().terms.clone();
    let (bytes, path) = session.release(&terms).unwrap();
    assert_eq!((&bytes[12..16], path), (&ADDRESS[..], Path::Unicast { from: FROM, to: SERVER }));
    assert_eq!(session.lease(), None);
}

#[test]
fn an_adopted_address_is_requested_until_it_is_confirmed() {
    let cidr: Cidr = "10.0.0.9/24".parse().unwrap();
    let mut session = Session::adopt(client(), Limits::default(), 42, cidr, s(0));
    let Step::Send(bytes, Path::Broadcast) = session.step(s(0)) else { panic!() };
    assert!(bytes.windows(6).any(|window| window == [50, 4, 10, 0, 0, 9]), "the address");
    assert!(!bytes.windows(2).any(|window| window == [54, 4]), "no server");
    assert_eq!(sent(&mut session, s(100_000)), (3, Ipv4Addr::UNSPECIFIED, Path::Broadcast), "without end");
    let mut refused = session.clone();
    assert_eq!(session.receive(&answer(&session, 5, 1, [10, 0, 0, 66]), s(100_000)), None);
    assert_eq!(session.receive(&answer(&session, 5, 1, ADDRESS), s(100_000)), Some(Change::Acquired));
    assert!(session.lease().is_some());
    assert_eq!(refused.receive(&answer(&refused, 6, 1, [0; 4]), s(100_000)), Some(Change::Lost(cidr)));
    assert_eq!(sent(&mut refused, s(100_000)).0, 1);
}
