//! The life of a lease, as RFC 2131 has it: when to send what to whom, and what an answer means.
//!
//! Nothing here waits or sends. The caller gives the time, sends what [`Session::step`] returns, and hands in what arrives.
//! Time is counted from the machine's boot, so that a record is still true after the daemon's restart.

use std::net::Ipv4Addr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::message::{Ask, Client, Reply, Terms};

/// The time until a first message is repeated; doubled each time. Short, because the first message or its answer may be lost
/// where both ends of the link have only just come up.
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// The pause after a refused request.
const REFUSED_WAIT: Duration = Duration::from_secs(1);
/// How often an offered address is requested before the search begins again.
const SELECT_TRIES: u32 = 4;
/// No lease is asked to be extended more often.
const MIN_EXTEND: Duration = Duration::from_secs(10);

/// How long to wait for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest wait for an answer to one message.
    pub answer: Duration,
    /// The longest wait between two attempts of a client that has lost its lease.
    pub pause: Duration,
    /// The whole time for the first lease.
    pub total: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        let seconds = Duration::from_secs;
        Limits { answer: seconds(10), pause: seconds(62), total: seconds(208) }
    }
}

/// A lease: its terms, and when it was requested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// What the server granted.
    pub terms: Terms,
    /// When the message was sent that the server answered: RFC 2131 counts from there.
    pub since: Duration,
}

impl Lease {
    fn after(&self, seconds: u32) -> Duration {
        // All bits set: the lease has no end.
        if self.terms.seconds == u32::MAX {
            Duration::MAX
        } else {
            self.since.saturating_add(Duration::from_secs(seconds.into()))
        }
    }

    /// Returns when its server is asked for more time.
    pub fn t1(&self) -> Duration {
        self.after(self.terms.t1)
    }

    /// Returns when any server is asked for more time.
    pub fn t2(&self) -> Duration {
        self.after(self.terms.t2)
    }

    /// Returns when the address must not be used any more.
    pub fn expiry(&self) -> Duration {
        self.after(self.terms.seconds)
    }
}

/// Where a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// To everyone on the link, from no address.
    Broadcast,
    /// To everyone on the link, from the leased address.
    BroadcastFrom(Ipv4Addr),
    /// To a server, from the leased address.
    Unicast {
        /// The leased address.
        from: Ipv4Addr,
        /// The server.
        to: Ipv4Addr,
    },
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send this, and ask again.
    Send(Vec<u8>, Path),
    /// Listen until then for answers that come by this path, and ask again.
    Listen(Duration, Path),
    /// Do nothing until then; no socket is needed.
    Sleep(Duration),
    /// The first lease was not to be had in time.
    Failed,
}

/// What an answer, or the time, has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// An address is offered and will be requested.
    Offered(Terms),
    /// There is a lease where there was none.
    Acquired,
    /// The lease is longer, with the same address.
    Extended,
    /// The lease has another address.
    Moved(Terms),
    /// The address must not be used any more.
    Lost(Terms),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Searching,
    Requesting(Terms),
    Bound(Lease),
    /// Asking its server for more time.
    Renewing(Lease),
    /// Asking any server.
    Rebinding(Lease),
}

/// One attachment's dealings with servers.
#[derive(Clone, Debug)]
pub struct Session {
    client: Client,
    limits: Limits,
    state: State,
    /// When the first lease must be there. `None` once there was one.
    deadline: Option<Duration>,
    random: u64,
    xid: u32,
    /// How often the message of this state has been sent.
    tries: u32,
    sent: Duration,
    next: Duration,
}

impl Session {
    /// Begins to look for a lease. `random`: where transaction numbers come from.
    pub fn new(client: Client, limits: Limits, random: u64, now: Duration) -> Session {
        let deadline = Some(now.saturating_add(limits.total));
        let mut session = Session {
            client,
            limits,
            state: State::Searching,
            deadline,
            random,
            xid: 0,
            tries: 0,
            sent: now,
            next: now,
        };
        session.enter(State::Searching, now);
        session
    }

    /// Continues with a lease that is recorded.
    pub fn resume(client: Client, limits: Limits, random: u64, lease: Lease) -> Session {
        let mut session = Session::new(client, limits, random, lease.since);
        session.deadline = None;
        session.state = State::Bound(lease);
        session
    }

    /// Returns the lease, unless there is none or it has been lost.
    pub fn lease(&self) -> Option<&Lease> {
        match &self.state {
            State::Bound(lease) | State::Renewing(lease) | State::Rebinding(lease) => Some(lease),
            State::Searching | State::Requesting(_) => None,
        }
    }

    /// Returns the client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    fn enter(&mut self, state: State, now: Duration) {
        self.state = state;
        self.tries = 0;
        self.next = now;
        // splitmix64, so that one random number is enough.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        self.xid = ((mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 32) as u32;
    }

    /// Returns what the time alone has changed. To be asked before [`step`](Session::step).
    pub fn elapse(&mut self, now: Duration) -> Option<Change> {
        let lease = self.lease().cloned()?;
        if now >= lease.expiry() {
            self.enter(State::Searching, now);
            return Some(Change::Lost(lease.terms));
        }
        match &self.state {
            State::Bound(_) | State::Renewing(_) if now >= lease.t2() => self.enter(State::Rebinding(lease), now),
            State::Bound(_) if now >= lease.t1() => self.enter(State::Renewing(lease), now),
            _ => {}
        }
        None
    }

    /// Returns what to do at this time.
    pub fn step(&mut self, now: Duration) -> Step {
        if self.deadline.is_some_and(|deadline| now >= deadline) {
            return Step::Failed;
        }
        let (ask, path, end) = match &self.state {
            State::Bound(lease) => return Step::Sleep(lease.t1()),
            State::Searching => (Ask::Discover, Path::Broadcast, Duration::MAX),
            State::Requesting(offer) => {
                if self.tries >= SELECT_TRIES && now >= self.next {
                    self.enter(State::Searching, now);
                    return self.step(now);
                }
                (Ask::Select { address: offer.address(), server: offer.server }, Path::Broadcast, Duration::MAX)
            }
            State::Renewing(lease) => {
                let (address, to) = (lease.terms.address(), lease.terms.server);
                (Ask::Extend { address }, Path::Unicast { from: address, to }, lease.t2())
            }
            State::Rebinding(lease) => {
                let address = lease.terms.address();
                (Ask::Extend { address }, Path::BroadcastFrom(address), lease.expiry())
            }
        };
        if now >= self.next {
            let wait = match self.state {
                State::Renewing(_) | State::Rebinding(_) => (end.saturating_sub(now) / 2).max(MIN_EXTEND),
                // Once there was a lease, the search has no end, and the pauses grow.
                _ => (FIRST_WAIT * (1 << self.tries.min(10))).min(if self.deadline.is_some() {
                    self.limits.answer
                } else {
                    self.limits.pause
                }),
            };
            self.tries += 1;
            self.sent = now;
            self.next = now.saturating_add(wait).min(end);
            return match self.client.write(ask, self.xid) {
                Ok(bytes) => Step::Send(bytes, path),
                Err(_) => Step::Failed,
            };
        }
        let next = self.deadline.map_or(self.next, |deadline| self.next.min(deadline));
        // Between two attempts no socket stays open: it would keep the container's namespace alive.
        match self.sent.saturating_add(self.limits.answer) {
            heard if now < heard => Step::Listen(next.min(heard), path),
            _ => Step::Sleep(next),
        }
    }

    /// Takes an answer, as it came from the network. `None` if it changes nothing.
    pub fn receive(&mut self, bytes: &[u8], now: Duration) -> Option<Change> {
        let reply = self.client.read(bytes, self.xid)?;
        let since = self.sent;
        match (self.state.clone(), reply) {
            (State::Searching, Reply::Offer(terms)) => {
                self.enter_same(State::Requesting(terms.clone()), now);
                Some(Change::Offered(terms))
            }
            (State::Requesting(offer), Reply::Ack(terms))
                if offer.server == terms.server && offer.network == terms.network =>
            {
                self.deadline = None;
                self.state = State::Bound(Lease { terms, since });
                Some(Change::Acquired)
            }
            (State::Requesting(offer), Reply::Nak(server)) if offer.server == server => {
                self.enter(State::Searching, now);
                // A server that always refuses is not asked at once again and again.
                self.next = now.saturating_add(REFUSED_WAIT);
                None
            }
            (State::Renewing(lease), Reply::Ack(terms))
                if lease.terms.server == terms.server && lease.terms.network == terms.network =>
            {
                self.state = State::Bound(Lease { terms, since });
                Some(Change::Extended)
            }
            (State::Rebinding(lease), Reply::Ack(terms)) => {
                let moved = lease.terms.network != terms.network;
                self.state = State::Bound(Lease { terms, since });
                Some(if moved { Change::Moved(lease.terms) } else { Change::Extended })
            }
            (State::Renewing(lease), Reply::Nak(server)) if lease.terms.server == server => {
                self.enter(State::Searching, now);
                Some(Change::Lost(lease.terms))
            }
            (State::Rebinding(lease), Reply::Nak(_)) => {
                self.enter(State::Searching, now);
                Some(Change::Lost(lease.terms))
            }
            _ => None,
        }
    }

    /// Enters a state whose messages belong to the transaction of the one before.
    fn enter_same(&mut self, state: State, now: Duration) {
        let xid = self.xid;
        self.enter(state, now);
        self.xid = xid;
    }

    /// Returns the message that gives a lease back, and where it goes.
    ///
    /// # Errors
    /// The text of dhcproto.
    pub fn release(&mut self, terms: &Terms) -> Result<(Vec<u8>, Path), String> {
        self.enter(State::Searching, self.sent);
        let (from, to) = (terms.address(), terms.server);
        let bytes = self.client.write(Ask::Release { address: from, server: to }, self.xid)?;
        Ok((bytes, Path::Unicast { from, to }))
    }
}

#[cfg(test)]
mod tests {
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
        Session::new(client(), Limits::default(), 42, s(0))
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
                Step::Failed => break,
            }
        }
        assert_eq!(times[..9], [0, 250, 750, 1750, 3750, 7750, 15750, 25750, 35750]);
        assert_eq!(now, s(208));
    }

    #[test]
    fn the_server_is_asked_for_more_time_from_the_leased_address() {
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
    fn a_silent_server_leads_to_any_server_and_then_to_the_end() {
        let mut session = bound();
        sent(&mut session, s(500));
        assert_eq!(sent(&mut session, s(875)), (3, FROM, Path::BroadcastFrom(FROM)));
        assert_eq!(session.elapse(s(999)), None);
        let terms = session.lease().unwrap().terms.clone();
        assert_eq!(session.elapse(s(1000)), Some(Change::Lost(terms)));
        assert_eq!(session.lease(), None);
        assert_eq!(sent(&mut session, s(1000)).0, 1);
        assert!(!matches!(session.step(s(1_000_000)), Step::Failed), "a lost lease is looked for without end");
    }

    #[test]
    fn times_hold_however_late_the_caller_comes() {
        let mut session = bound();
        assert_eq!(sent(&mut session, s(900)).2, Path::BroadcastFrom(FROM));
        assert!(matches!(bound().elapse(s(5000)), Some(Change::Lost(_))));
    }

    #[test]
    fn another_server_may_extend_or_move_a_lease_after_t2() {
        let mut session = bound();
        sent(&mut session, s(875));
        assert_eq!(session.clone().receive(&answer(&session, 5, 2, ADDRESS), s(876)), Some(Change::Extended));
        let old = session.lease().unwrap().terms.clone();
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
    fn a_server_that_offers_and_then_is_silent_is_given_up() {
        let mut session = new();
        sent(&mut session, s(0));
        session.receive(&answer(&session, 2, 1, ADDRESS), s(0));
        let kinds: Vec<u8> = [0, 1, 3, 7, 15].iter().map(|at| sent(&mut session, s(*at)).0).collect();
        assert_eq!(kinds, [3, 3, 3, 3, 1]);
    }

    #[test]
    fn a_recorded_lease_goes_on_and_one_without_end_is_never_renewed() {
        let lease = bound().lease().unwrap().clone();
        let mut session = Session::resume(client(), Limits::default(), 1, lease.clone());
        assert_eq!(session.step(s(10)), Step::Sleep(s(500)));
        let terms = Terms { seconds: u32::MAX, ..lease.terms };
        let mut session = Session::resume(client(), Limits::default(), 1, Lease { terms, ..lease });
        assert_eq!(session.elapse(s(1 << 40)), None);
        assert_eq!(session.step(s(1 << 40)), Step::Sleep(Duration::MAX));
    }

    #[test]
    fn a_release_goes_from_the_address_to_the_server() {
        let mut session = bound();
        let terms = session.lease().unwrap().terms.clone();
        let (bytes, path) = session.release(&terms).unwrap();
        assert_eq!((&bytes[12..16], path), (&ADDRESS[..], Path::Unicast { from: FROM, to: SERVER }));
        assert_eq!(session.lease(), None);
    }
}
