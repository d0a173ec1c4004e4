//! The states of a DHCP client (RFC 2131, figure 5): when to send which message, and what an answer
//! changes. A DHCPv6 client (RFC 8415) has the same states and waits, and two more: it checks that
//! no other host has a new address, and declines one that another host has.
//!
//! Nothing here waits or sends. The caller sends the messages that [`Session::step`] returns, and
//! calls [`Session::receive`] with the answers. Times are durations since the boot of the machine,
//! so that those of a recorded lease remain valid after a restart of the daemon.

mod client;
mod granted;

use std::net::Ipv4Addr;
use std::time::Duration;

use cni::Cidr;

use crate::message::v6::Information;
use crate::message::{Ask, Client, HIGHEST_PREFERENCE, LeaseParameters, Reply, Server, v4};
pub use client::Identity;
use client::Search;
pub use granted::Lease;

/// The wait before the first message is repeated. It doubles with each repetition. It is short
/// because messages may get lost right after the link has come up.
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// The largest number of doublings of [`FIRST_WAIT`], so that the product does not overflow. It is
/// then 256 s, which is longer than each of the default [`Limits`].
const MAX_DOUBLINGS: u32 = 10;
/// The pause after a server has refused to lease the address that it offered.
const REFUSED_WAIT: Duration = Duration::from_secs(1);
/// How many times an offered address is requested before the client discards the offer.
const SELECT_TRIES: u32 = 4;
/// The shortest wait before a message is repeated. The daemon's flags cannot make it shorter.
const MIN_WAIT: Duration = Duration::from_millis(10);
/// The shortest wait between two requests to extend a lease.
const MIN_EXTEND: Duration = Duration::from_secs(10);

/// The client's longest waits. The daemon's flags set them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest wait for an answer to one message.
    pub answer: Duration,
    /// The longest wait between two attempts of a client that has lost its lease or confirms an
    /// adopted one.
    pub pause: Duration,
    /// How long the client tries to get its first lease.
    pub total: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        let seconds = Duration::from_secs;
        Limits { answer: seconds(10), pause: seconds(62), total: seconds(208) }
    }
}

/// The source and destination address of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// From 0.0.0.0 to all hosts on the link.
    Broadcast,
    /// From the leased address to all hosts on the link.
    BroadcastFrom(Ipv4Addr),
    /// From the leased address to one server.
    Unicast {
        /// The leased address.
        from: Ipv4Addr,
        /// The server's address.
        to: Ipv4Addr,
    },
    /// From the interface's link-local address to all DHCPv6 servers and relays on the link.
    Multicast,
}

/// What the caller has to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send this message, and call `step` again.
    Send(Vec<u8>, Path),
    /// Listen until this time for answers to the message that was sent on this path, and call
    /// `step` again.
    Listen(Duration, Path),
    /// Do nothing until this time, without an open socket, and call `step` again.
    Sleep(Duration),
    /// Check that no other host has this address, and call [`Session::probed`].
    Probe(Cidr),
    /// Give up, for this reason: no server has granted the first lease in time, or an option, such
    /// as the client identifier, is too long for a message.
    Failed(String),
}

/// A change of the lease, by an answer or because a time has passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A server has offered an address, which the client will request.
    Offered(LeaseParameters),
    /// A server has sent what a client without an address asked for.
    Informed(Information),
    /// A server has granted a lease to a client without one, or has confirmed the adopted lease.
    Acquired,
    /// A server has extended the lease, with the same address.
    Extended,
    /// A server has extended or confirmed the lease, but with another address or prefix. The value
    /// is the old address with its prefix.
    Moved(Cidr),
    /// The lease has expired, or a server has refused to extend or confirm it. The value is its
    /// address, which must not be used any more.
    Lost(Cidr),
}

/// The state of a client. The names in brackets are those of RFC 2131.
#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// It asks all servers for offers (SELECTING).
    Searching,
    /// It requests the address of this offer (REQUESTING).
    Requesting(LeaseParameters),
    /// It has a lease, and checks that no other host has the address.
    Probing(Lease),
    /// It reports to the server of these parameters that another host has the address.
    Declining(LeaseParameters),
    /// It asks whether the lease of this address is still valid. The lease's other parameters are
    /// not known (REBOOTING).
    Confirming(Cidr),
    /// It has a lease, and sends nothing (BOUND).
    Bound(Lease),
    /// It asks its server to extend the lease (RENEWING).
    Renewing(Lease),
    /// It asks all servers to extend the lease (REBINDING).
    Rebinding(Lease),
}

impl State {
    /// Returns the purpose of this state's messages.
    fn ask(&self) -> Ask<'_> {
        match self {
            State::Requesting(offer) => Ask::Request(offer),
            State::Declining(terms) => Ask::Decline(terms),
            State::Confirming(cidr) => Ask::Confirm(*cidr),
            State::Renewing(lease) => Ask::Renew(&lease.terms),
            State::Rebinding(lease) => Ask::Rebind(&lease.terms),
            // The last two send nothing.
            State::Searching | State::Probing(_) | State::Bound(_) => Ask::Discover,
        }
    }
}

/// The DHCP client of one attachment.
#[derive(Clone, Debug)]
pub struct Session {
    client: Identity,
    limits: Limits,
    state: State,
    /// The time by which a server must have granted the first lease. `None` once the client has, or
    /// has had, a lease.
    deadline: Option<Duration>,
    /// The state of the random number generator for transaction numbers.
    random: u64,
    /// The transaction number of this state's messages.
    xid: u32,
    /// How many messages have been sent in this state.
    tries: u32,
    /// The best offer of a search whose first wait has not passed, and its preference.
    best: Option<(LeaseParameters, u8)>,
    /// What has happened until the first lease.
    search: Search,
    /// When this state's exchange with servers began.
    begun: Duration,
    /// When the last message was sent.
    sent: Duration,
    /// When the next message is due.
    next: Duration,
}

impl Session {
    /// Returns a client without a lease. `random` is the seed of its transaction numbers.
    pub fn new(client: Identity, limits: Limits, random: u64, now: Duration) -> Session {
        let deadline = Some(now.saturating_add(limits.total));
        let mut session = Session {
            client,
            limits,
            state: State::Searching,
            deadline,
            random,
            // `enter` replaces it.
            xid: 0,
            tries: 0,
            best: None,
            search: Search::default(),
            begun: now,
            sent: now,
            next: now,
        };
        session.enter(State::Searching, now);
        session
    }

    /// Returns a client with a recorded lease.
    pub fn resume(client: Identity, limits: Limits, random: u64, lease: Lease) -> Session {
        let mut session = Session::new(client, limits, random, lease.since);
        session.deadline = None;
        session.state = State::Bound(lease);
        session
    }

    /// Returns a client with an address that another daemon, such as Go's, has leased for it. The
    /// other parameters of the lease are not known.
    pub fn adopt(client: Client, limits: Limits, random: u64, cidr: Cidr, now: Duration) -> Session {
        let mut session = Session::new(Identity::V4(client), limits, random, now);
        session.deadline = None;
        session.state = State::Confirming(cidr);
        session
    }

    /// Returns the lease, or `None` if the client has none.
    pub fn lease(&self) -> Option<&Lease> {
        match &self.state {
            State::Bound(lease) | State::Renewing(lease) | State::Rebinding(lease) => Some(lease),
            State::Searching
            | State::Requesting(_)
            | State::Probing(_)
            | State::Declining(_)
            | State::Confirming(_) => None,
        }
    }

    /// Returns the identity that the client sends.
    pub fn client(&self) -> &Identity {
        &self.client
    }

    /// Returns how long to wait for the interface's carrier before the first message. At least half
    /// of the time for the first lease remains for messages.
    pub fn carrier_wait(&self) -> Duration {
        self.limits.answer.min(self.limits.total / 2)
    }

    /// Enters a state with a new transaction number. The state's first message is due now.
    fn enter(&mut self, state: State, now: Duration) {
        self.state = state;
        self.tries = 0;
        self.best = None;
        self.begun = now;
        self.next = now;
        // The generator splitmix64, which needs only one random number as its seed.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        self.xid = ((mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 32) as u32;
    }

    /// Enters the next state if the wait for offers has passed, or T1, T2 or the end of the lease
    /// has been reached. Returns the change if an offer is accepted or the lease has expired. Must
    /// be called before each [`step`](Session::step).
    pub fn elapse(&mut self, now: Duration) -> Option<Change> {
        if now >= self.next
            && let Some((terms, _)) = self.best.take()
        {
            return Some(self.accept(terms, now));
        }
        let lease = self.lease().cloned()?;
        if now >= lease.expiry() {
            self.enter(State::Searching, now);
            return Some(Change::Lost(lease.terms.cidr));
        }
        match &self.state {
            State::Bound(_) | State::Renewing(_) if now >= lease.t2() => self.enter(State::Rebinding(lease), now),
            State::Bound(_) if now >= lease.t1() => self.enter(State::Renewing(lease), now),
            _ => {}
        }
        None
    }

    /// Returns what the caller has to do at this time.
    pub fn step(&mut self, now: Duration) -> Step {
        if self.deadline.is_some_and(|deadline| now >= deadline) {
            return Step::Failed(self.search.failure(self.limits.total));
        }
        if self.is_given_up(now) {
            self.enter(State::Searching, now);
        }
        let path = match &self.state {
            State::Bound(lease) => return Step::Sleep(lease.t1()),
            State::Probing(lease) => return Step::Probe(lease.terms.cidr),
            _ if self.client.is_v6() => Path::Multicast,
            State::Renewing(lease) => path_to_server(&lease.terms),
            State::Rebinding(lease) => Path::BroadcastFrom(lease.terms.address()),
            State::Searching | State::Requesting(_) | State::Declining(_) | State::Confirming(_) => Path::Broadcast,
        };
        if now >= self.next { self.send(path, now) } else { self.wait(path, now) }
    }

    /// Whether the server has not answered the last of the requests for the address that it had
    /// offered, or of the messages that decline it.
    fn is_given_up(&self, now: Duration) -> bool {
        let is_limited = matches!(self.state, State::Requesting(_) | State::Declining(_));
        is_limited && self.tries >= SELECT_TRIES && now >= self.next
    }

    /// Returns the step that sends this state's message, and plans its repetition.
    fn send(&mut self, path: Path, now: Duration) -> Step {
        self.next = self.repetition(now);
        self.tries += 1;
        self.search.asked += 1;
        self.sent = now;
        let elapsed = now.saturating_sub(self.begun);
        match self.client.write(self.state.ask(), self.xid, elapsed) {
            Ok(bytes) => Step::Send(bytes, path),
            Err(text) => Step::Failed(text),
        }
    }

    /// Returns the step that waits until the next message is due or the deadline has passed. For
    /// the time [`Limits::answer`] after a message the caller listens. Then it sleeps, because an
    /// open socket would keep the container's namespace alive.
    fn wait(&self, path: Path, now: Duration) -> Step {
        let until = self.deadline.map_or(self.next, |deadline| self.next.min(deadline));
        let listen_until = self.sent.saturating_add(self.limits.answer);
        if now < listen_until { Step::Listen(until.min(listen_until), path) } else { Step::Sleep(until) }
    }

    /// Returns when the message that is sent now is due again, if no answer ends this state.
    fn repetition(&self, now: Duration) -> Duration {
        // RFC 2131, 4.4.5: after half of the time until `elapse` ends the state.
        let halfway = |end: Duration| {
            let wait = (end.saturating_sub(now) / 2).max(MIN_EXTEND);
            now.saturating_add(wait).min(end)
        };
        match &self.state {
            State::Renewing(lease) => halfway(lease.t2()),
            State::Rebinding(lease) => halfway(lease.expiry()),
            _ => now.saturating_add(self.doubled_wait()),
        }
    }

    /// Returns the wait before the repetition of a message of a client without a lease. It doubles
    /// with each repetition.
    fn doubled_wait(&self) -> Duration {
        // Without a deadline, the client has lost its lease or confirms an adopted one, and repeats
        // its messages without end.
        let longest = if self.deadline.is_some() { self.limits.answer } else { self.limits.pause };
        let doubled = FIRST_WAIT * (1 << self.tries.min(MAX_DOUBLINGS));
        doubled.min(longest.max(MIN_WAIT))
    }

    /// Processes a message from the network, and returns the change of the lease. Returns `None` if
    /// the message is not an answer that this state expects, or if it refuses an offered address.
    pub fn receive(&mut self, bytes: &[u8], now: Duration) -> Option<Change> {
        let reply = self.client.read(bytes, self.xid)?;
        // The time of a granted lease begins with the request.
        let since = self.sent;
        match (self.state.clone(), reply) {
            (State::Searching, Reply::Offer(terms, preference)) => self.compare(terms, preference, now),
            (State::Searching, Reply::Information(information)) if self.client.is_stateless() => {
                Some(Change::Informed(information))
            }
            (State::Requesting(offer), Reply::Ack(terms))
                if offer.server == terms.server && offer.cidr == terms.cidr =>
            {
                let lease = Lease { terms, since };
                if self.client.is_v6() {
                    self.state = State::Probing(lease);
                    return None;
                }
                self.deadline = None;
                self.state = State::Bound(lease);
                Some(Change::Acquired)
            }
            (State::Declining(_), Reply::Ack(_) | Reply::Nak(_) | Reply::Information(_)) => {
                self.search_after_pause(now);
                None
            }
            (State::Requesting(offer), Reply::Nak(server)) if offer.server == server => {
                self.search.refusals += 1;
                self.search_after_pause(now);
                None
            }
            (State::Confirming(cidr), Reply::Ack(terms)) if v4(cidr) == terms.address() => {
                // The address is the same, but its prefix may differ.
                let is_same = cidr == terms.cidr;
                self.state = State::Bound(Lease { terms, since });
                Some(if is_same { Change::Acquired } else { Change::Moved(cidr) })
            }
            (State::Confirming(cidr), Reply::Nak(_)) => {
                self.enter(State::Searching, now);
                Some(Change::Lost(cidr))
            }
            (State::Renewing(lease), Reply::Ack(terms))
                if lease.terms.server == terms.server && (lease.terms.cidr == terms.cidr || self.client.is_v6()) =>
            {
                Some(self.extend(lease.terms.cidr, Lease { terms, since }))
            }
            (State::Rebinding(lease), Reply::Ack(terms)) => Some(self.extend(lease.terms.cidr, Lease { terms, since })),
            (State::Renewing(lease), Reply::Nak(server)) if lease.terms.server == server => {
                self.enter(State::Searching, now);
                Some(Change::Lost(lease.terms.cidr))
            }
            (State::Rebinding(lease), Reply::Nak(_)) => {
                self.enter(State::Searching, now);
                Some(Change::Lost(lease.terms.cidr))
            }
            _ => None,
        }
    }

    /// Keeps the offer with the highest preference until the first wait has passed (RFC 8415,
    /// 18.2.1). Accepts an offer at once if it has the highest possible preference, and each offer
    /// after the first wait.
    fn compare(&mut self, terms: LeaseParameters, preference: u8, now: Duration) -> Option<Change> {
        self.search.offers += 1;
        if preference == HIGHEST_PREFERENCE || self.tries > 1 {
            return Some(self.accept(terms, now));
        }
        if self.best.as_ref().is_none_or(|(_, best)| preference > *best) {
            self.best = Some((terms, preference));
        }
        None
    }

    /// Continues with a request for an offered address.
    fn accept(&mut self, terms: LeaseParameters, now: Duration) -> Change {
        self.enter_in_transaction(State::Requesting(terms.clone()), now);
        Change::Offered(terms)
    }

    /// Continues with an extended lease. `old` is the address until now: a server may replace it.
    fn extend(&mut self, old: Cidr, lease: Lease) -> Change {
        let has_moved = old != lease.terms.cidr;
        self.state = State::Bound(lease);
        if has_moved { Change::Moved(old) } else { Change::Extended }
    }

    /// Continues after [`Step::Probe`]. If the address is not unique, the client declines it and
    /// searches for another.
    pub fn probed(&mut self, is_unique: bool, now: Duration) -> Option<Change> {
        let State::Probing(lease) = self.state.clone() else { return None };
        if is_unique {
            self.deadline = None;
            self.state = State::Bound(lease);
            return Some(Change::Acquired);
        }
        self.search.duplicates += 1;
        self.enter(State::Declining(lease.terms), now);
        None
    }

    /// Searches again after a pause. Without it, a server that always refuses, or always offers an
    /// address of another host, would be asked in a busy loop.
    fn search_after_pause(&mut self, now: Duration) {
        self.enter(State::Searching, now);
        self.next = now.saturating_add(REFUSED_WAIT);
    }

    /// Enters a state that continues the transaction of the previous state.
    fn enter_in_transaction(&mut self, state: State, now: Duration) {
        let xid = self.xid;
        self.enter(state, now);
        self.xid = xid;
    }

    /// Returns the message that releases the lease with these parameters, and the message's path.
    /// The session must not be used afterwards.
    ///
    /// # Errors
    /// The client identifier is longer than 255 bytes.
    pub fn release(&mut self, terms: &LeaseParameters) -> Result<(Vec<u8>, Path), String> {
        // This only begins a transaction. The state and its time are not used any more.
        self.enter(State::Searching, self.sent);
        let bytes = self.client.write(Ask::Release(terms), self.xid, Duration::ZERO)?;
        Ok((bytes, path_to_server(terms)))
    }
}

/// Returns the path of a message to the server of a lease.
fn path_to_server(terms: &LeaseParameters) -> Path {
    match terms.server {
        Server::Ipv4(to) => Path::Unicast { from: terms.address(), to },
        Server::Duid(_) => Path::Multicast,
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod v6_tests;
