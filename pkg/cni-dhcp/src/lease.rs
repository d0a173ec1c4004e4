//! The life of a lease, as RFC 2131 has it: when to send what to whom, and what an answer means.
//!
//! Nothing here waits or sends. The caller gives the time, sends what [`Session::step`] returns,
//! and hands in what arrives. Time is counted from the machine's boot, so that a record is still
//! true after the daemon's restart.

use std::net::Ipv4Addr;
use std::time::Duration;

use cni::Cidr;
use serde::{Deserialize, Serialize};

use crate::message::{Ask, Client, LeaseParameters, Reply, v4};

/// The time until a first message is repeated; doubled each time. Short, because the first message
/// or its answer may be lost where both ends of the link have only just come up.
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// The pause after a refused request.
const REFUSED_WAIT: Duration = Duration::from_secs(1);
/// How often an offered address is requested before the search begins again.
const SELECT_TRIES: u32 = 4;
/// The shortest wait between two messages, whatever the flags of the daemon are.
const MIN_WAIT: Duration = Duration::from_millis(10);
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
    /// The lease's parameters, as the server granted them.
    pub terms: LeaseParameters,
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

/// The next thing that the caller has to do.
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

/// The change that an answer, or the time, has made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// An address is offered and will be requested.
    Offered(LeaseParameters),
    /// A lease was granted where there was none.
    Acquired,
    /// The lease is longer, with the same address.
    Extended,
    /// The lease has another address.
    Moved(Cidr),
    /// The address must not be used any more.
    Lost(Cidr),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Searching,
    Requesting(LeaseParameters),
    /// Asking whether an address of which nothing else is known is still leased: INIT-REBOOT.
    Confirming(Cidr),
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

    /// Continues with an address that another daemon was leased for this client.
    pub fn adopt(client: Client, limits: Limits, random: u64, network: Cidr, now: Duration) -> Session {
        let mut session = Session::new(client, limits, random, now);
        session.deadline = None;
        session.state = State::Confirming(network);
        session
    }

    /// Returns the lease, unless there is none or it has been lost.
    pub fn lease(&self) -> Option<&Lease> {
        match &self.state {
            State::Bound(lease) | State::Renewing(lease) | State::Rebinding(lease) => Some(lease),
            State::Searching | State::Requesting(_) | State::Confirming(_) => None,
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
            return Some(Change::Lost(lease.terms.network));
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
            State::Confirming(network) => (Ask::Confirm { address: v4(*network) }, Path::Broadcast, Duration::MAX),
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
                _ => {
                    let longest = if self.deadline.is_some() { self.limits.answer } else { self.limits.pause };
                    (FIRST_WAIT * (1 << self.tries.min(10))).min(longest.max(MIN_WAIT))
                }
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
            (State::Confirming(network), Reply::Ack(terms)) if v4(network) == terms.address() => {
                let same = network == terms.network;
                self.state = State::Bound(Lease { terms, since });
                Some(if same { Change::Acquired } else { Change::Moved(network) })
            }
            (State::Confirming(network), Reply::Nak(_)) => {
                self.enter(State::Searching, now);
                Some(Change::Lost(network))
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
                Some(if moved { Change::Moved(lease.terms.network) } else { Change::Extended })
            }
            (State::Renewing(lease), Reply::Nak(server)) if lease.terms.server == server => {
                self.enter(State::Searching, now);
                Some(Change::Lost(lease.terms.network))
            }
            (State::Rebinding(lease), Reply::Nak(_)) => {
                self.enter(State::Searching, now);
                Some(Change::Lost(lease.terms.network))
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
    /// The client identifier is longer than 255 bytes.
    pub fn release(&mut self, terms: &LeaseParameters) -> Result<(Vec<u8>, Path), String> {
        self.enter(State::Searching, self.sent);
        let (from, to) = (terms.address(), terms.server);
        let bytes = self.client.write(Ask::Release { address: from, server: to }, self.xid)?;
        Ok((bytes, Path::Unicast { from, to }))
    }
}

#[cfg(test)]
mod tests;
