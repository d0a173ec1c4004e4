use super::*;
use crate::message::v6;
use crate::message::v6::tests::{ADDRESS, SERVER, address, answer, association, client, option};

const OTHER: [u8; 4] = [0, 3, 0, 2];

fn s(seconds: u64) -> Duration {
    Duration::from_secs(1000 + seconds)
}

fn ms(milliseconds: u64) -> Duration {
    s(0) + Duration::from_millis(milliseconds)
}

fn new() -> Session {
    Session::new(Identity::V6(client()), Limits::default(), 42, s(0))
}

/// An answer with the address for 1000 s.
fn grant(session: &Session, kind: u8, server: &[u8], text: &str, more: &[u8]) -> Vec<u8> {
    let options = [&association(0, 0, &address(text, 1000, 1000)), more].concat();
    answer(kind, session.xid, server, &options)
}

/// Sends, and returns the kind of message.
#[track_caller]
fn sent(session: &mut Session, now: Duration) -> u8 {
    assert_eq!(session.elapse(now), None);
    match session.step(now) {
        Step::Send(bytes, Path::Multicast) => bytes[0],
        step => panic!("{step:?}"),
    }
}

fn probing() -> Session {
    let mut session = new();
    assert_eq!(sent(&mut session, s(0)), 1);
    let reply = grant(&session, 2, &SERVER, ADDRESS, &option(7, &[255]));
    assert!(matches!(session.receive(&reply, s(0)), Some(Change::Offered(_))));
    assert_eq!(sent(&mut session, s(0)), 3);
    let wrong = grant(&session, 7, &OTHER, ADDRESS, &[]);
    assert_eq!(session.receive(&wrong, s(0)), None);
    assert!(matches!(session.step(s(0)), Step::Listen(..)), "another server has not granted the offer");
    let reply = grant(&session, 7, &SERVER, ADDRESS, &[]);
    assert_eq!(session.receive(&reply, s(1)), None);
    session
}

fn bound() -> Session {
    let mut session = probing();
    assert_eq!(session.step(s(1)), Step::Probe("2001:db8::5/128".parse().unwrap()));
    assert_eq!(session.lease(), None, "not before the probe");
    assert_eq!(session.probed(true, s(2)), Some(Change::Acquired));
    session
}

#[test]
fn a_unique_address_is_kept_until_t1() {
    let mut session = bound();
    let lease = session.lease().unwrap().clone();
    assert_eq!((lease.t1(), lease.t2(), lease.expiry()), (s(500), s(800), s(1000)));
    assert_eq!(session.step(s(3)), Step::Sleep(s(500)));
}

#[test]
fn a_lease_without_an_offer_is_not_used() {
    let mut session = new();
    sent(&mut session, s(0));
    for options in [option(14, &[]), vec![]] {
        let reply = grant(&session, 7, &SERVER, ADDRESS, &options);
        assert_eq!(session.receive(&reply, s(0)), None);
    }
    assert!(matches!(session.step(s(0)), Step::Listen(..)), "the search goes on");
}

/// The offer that the client accepts after these, and when. An offer has a time in milliseconds,
/// the last octet of the server's DUID, and a preference.
fn accepted(offers: &[(u64, u8, Option<u8>)]) -> (u64, u8) {
    let mut session = new();
    sent(&mut session, s(0));
    let of = |change: &Change| match change {
        Change::Offered(LeaseParameters { server: Server::Duid(duid), .. }) => duid[3],
        change => panic!("{change:?}"),
    };
    let mut offers = offers.iter().peekable();
    for now in 0..2000 {
        if let Some(change) = session.elapse(ms(now)) {
            return (now, of(&change));
        }
        session.step(ms(now));
        if let Some((_, server, preference)) = offers.next_if(|(at, ..)| *at == now) {
            let preference = preference.map(|number| option(7, &[number])).unwrap_or_default();
            let reply = grant(&session, 2, &[0, 3, 0, *server], ADDRESS, &preference);
            if let Some(change) = session.receive(&reply, ms(now)) {
                return (now, of(&change));
            }
        }
    }
    panic!("no offer was accepted")
}

#[test]
fn the_offer_with_the_highest_preference_is_accepted() {
    assert_eq!(accepted(&[(5, 1, None), (6, 2, Some(0)), (90, 3, Some(7)), (91, 4, Some(7))]), (250, 3));
    assert_eq!(accepted(&[(5, 1, Some(9)), (6, 2, Some(255)), (90, 3, Some(255))]), (6, 2), "ends the wait");
    assert_eq!(accepted(&[(300, 1, None), (301, 2, Some(7))]), (300, 1), "after the wait the first one");
}

#[test]
fn a_duplicate_is_declined_until_a_reply_and_the_search_goes_on() {
    let mut session = probing();
    assert_eq!(session.probed(false, s(2)), None);
    assert_eq!(sent(&mut session, s(2)), 9);
    assert!(matches!(session.step(s(2)), Step::Listen(..)));
    assert_eq!(sent(&mut session, s(3)), 9, "repeated");
    let reply = answer(7, session.xid, &SERVER, &[]);
    assert_eq!(session.receive(&reply, s(3)), None);
    assert_eq!(sent(&mut session, s(4)), 1);
    assert_eq!(session.lease(), None);
    match session.step(s(300)) {
        Step::Failed(why) => assert!(why.ends_with(", 1 declined because another host on the link has the address")),
        step => panic!("{step:?}"),
    }
}

#[test]
fn without_a_reply_to_decline_the_search_goes_on() {
    let mut session = probing();
    session.probed(false, s(2));
    let mut kinds = Vec::new();
    let mut now = s(2);
    while kinds.last() != Some(&1) {
        match session.step(now) {
            Step::Send(bytes, _) => kinds.push(bytes[0]),
            Step::Listen(until, _) | Step::Sleep(until) => now = until,
            step => panic!("{step:?}"),
        }
    }
    assert_eq!(kinds, [9, 9, 9, 9, 1]);
}

#[test]
fn renewal_asks_the_server_and_rebinding_all_servers() {
    let mut session = bound();
    assert_eq!(sent(&mut session, s(500)), 5);
    let other = grant(&session, 7, &OTHER, ADDRESS, &[]);
    assert_eq!(session.receive(&other, s(501)), None);
    let reply = grant(&session, 7, &SERVER, ADDRESS, &[]);
    assert_eq!(session.receive(&reply, s(501)), Some(Change::Extended));
    assert_eq!(sent(&mut session, s(1300)), 6);
    let other = grant(&session, 7, &OTHER, "2001:db8::6", &[]);
    assert_eq!(session.receive(&other, s(1301)), Some(Change::Moved("2001:db8::5/128".parse().unwrap())));
}

#[test]
fn a_lost_binding_and_an_expired_lease_end_in_a_search() {
    let mut session = bound();
    sent(&mut session, s(500));
    let refusal = answer(7, session.xid, &SERVER, &association(0, 0, &option(13, &[0, 3])));
    assert!(matches!(session.receive(&refusal, s(501)), Some(Change::Lost(_))));
    assert_eq!(sent(&mut session, s(501)), 1);
    let mut session = bound();
    assert!(matches!(session.elapse(s(1000)), Some(Change::Lost(_))));
}

#[test]
fn a_refused_request_is_repeated_as_a_search_after_a_pause() {
    let mut session = new();
    sent(&mut session, s(0));
    let advertise = grant(&session, 2, &SERVER, ADDRESS, &option(7, &[255]));
    session.receive(&advertise, s(0));
    sent(&mut session, s(0));
    let refusal = answer(7, session.xid, &SERVER, &option(13, &[0, 2]));
    assert_eq!(session.receive(&refusal, s(0)), None);
    assert_ne!(session.step(s(0)), Step::Listen(s(0), Path::Multicast));
    assert_eq!(sent(&mut session, s(1)), 1);
}

#[test]
fn a_client_without_an_address_gets_information_only() {
    let stateless = Identity::V6(v6::Client { iaid: None, ..client() });
    let mut session = Session::new(stateless, Limits::default(), 42, s(0));
    assert_eq!(sent(&mut session, s(0)), 11);
    let reply = answer(7, session.xid, &SERVER, &[]);
    assert!(matches!(session.receive(&reply, s(0)), Some(Change::Informed(_))));
    // A client that needs an address does not take it.
    let mut session = new();
    sent(&mut session, s(0));
    let reply = answer(7, session.xid, &SERVER, &[]);
    assert_eq!(session.receive(&reply, s(0)), None);
}

#[test]
fn a_release_names_the_server_and_the_address() {
    let mut session = bound();
    let terms = session.lease().unwrap().terms.clone();
    let (bytes, path) = session.release(&terms).unwrap();
    assert_eq!((bytes[0], path), (8, Path::Multicast));
    assert!(bytes.windows(8).any(|window| window == option(2, &SERVER)));
}
