//! One attachment's task: it does what the state machine says, keeps the record, and answers the
//! plugin's calls.

use std::rc::Rc;
use std::time::Duration;

use cni::result::AddResult;
use cni_dhcp::lease::{Change, Session, Step};
use cni_dhcp::message::LeaseParameters;
use nix::time::{ClockId, clock_gettime};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use super::network::{Exchange, Interface};
use super::{Daemon, log};
use crate::record::{Record, RecordedLease};

/// Timers are set no further ahead.
const LONGEST: Duration = Duration::from_secs(3600);
/// The pause before an address is added again that could not be added.
const AGAIN: Duration = Duration::from_secs(10);

/// The answer to a plugin's call that does not wait.
#[derive(Clone, Debug)]
pub(crate) enum Status {
    /// There is no lease yet.
    Acquiring,
    /// There is one.
    Leased(Rc<AddResult>),
    /// There was one.
    Lost(String),
    /// There will be none: the task ends.
    Failed(String),
}

/// The request to a task.
#[derive(Debug)]
pub(crate) enum LeaseCommand {
    /// Give the lease up and end.
    Release(oneshot::Sender<()>),
    /// Look whether the interface is still there.
    Look,
}

/// A task, as others see it.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    pub(crate) orders: mpsc::UnboundedSender<LeaseCommand>,
    pub(crate) status: watch::Receiver<Status>,
    pub(crate) interface: Interface,
}

impl Handle {
    /// Whether it is the attachment of this interface.
    pub(crate) fn is_for(&self, found: &Interface) -> bool {
        let Interface { netns, netns_id, index, mac, .. } = &self.interface;
        let is_same_link = *netns_id == found.netns_id && *index == found.index;
        // A path that has gone leads nowhere at the renewal.
        let is_open = *netns == found.netns || !self.interface.is_gone();
        // The kernel gives the number of a namespace that has gone to a new one. In the same
        // namespace, tuning may have changed the MAC after the ADD: then the address is there.
        let has_address = || match &*self.status.borrow() {
            Status::Leased(result) => result.ips.iter().any(|ip| found.has(ip.address)),
            Status::Acquiring | Status::Lost(_) | Status::Failed(_) => false,
        };
        is_same_link && is_open && (*mac == found.mac || has_address())
    }
}

pub(crate) struct Attachment {
    pub(crate) daemon: Rc<Daemon>,
    pub(crate) interface: Interface,
    pub(crate) record: Record,
    pub(crate) session: Session,
    pub(crate) status: watch::Sender<Status>,
    pub(crate) orders: mpsc::UnboundedReceiver<LeaseCommand>,
    /// The parts of a lease that the interface still lacks after the lease replaced another.
    pub(crate) lacking: Option<Rc<AddResult>>,
}

/// The time since the machine started, its sleep included.
pub(crate) fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default()
}

impl Attachment {
    /// Runs until the lease is released, the interface has gone, or there is no lease to be had.
    pub(crate) async fn run(mut self) {
        let key = self.record.key();
        let ended = self.live(&key).await;
        match ended {
            End::Kept => {}
            End::Forgotten(why) => {
                log(format_args!("{key}: {why}"));
                self.purge(&key);
                self.status.send_replace(Status::Failed(why));
                self.daemon.forget(&key, &self.status);
            }
            End::Released(done) => {
                self.daemon.forget(&key, &self.status);
                let _ = done.send(());
            }
        }
    }

    fn purge(&self, key: &str) {
        self.note(self.daemon.records.purge(key));
    }

    /// Records what the attachment has. If that fails while the plugin still waits for its first
    /// lease, returns the error: no later daemon would know the lease, so nothing would release
    /// it. Afterwards it is only logged.
    fn keep(&mut self, held: RecordedLease) -> Result<(), cni::Error> {
        self.record.held = held;
        self.record.error = None;
        match self.daemon.records.write(&self.record) {
            Err(error) if matches!(*self.status.borrow(), Status::Acquiring) => Err(error),
            outcome => {
                self.note(outcome);
                Ok(())
            }
        }
    }

    /// Records an error, for `cnitool ipam dhcp`. An attachment without a lease has no record.
    fn failed(&mut self, error: String) {
        if self.record.error.as_ref() != Some(&error) {
            self.record.error = Some(error);
            if !matches!(self.record.held, RecordedLease::Nothing) {
                self.note(self.daemon.records.write(&self.record));
            }
        }
    }

    fn note<E: std::fmt::Display>(&self, outcome: Result<(), E>) {
        if let Err(error) = outcome {
            log(format_args!("{}: {error}", self.record.key()));
        }
    }

    async fn live(&mut self, key: &str) -> End {
        if self.session.lease().is_none() {
            log(format_args!("{key}: acquiring lease"));
            let (interface, patience) = (self.interface.clone(), self.daemon.limits.answer);
            tokio::select! {
                // A release that is ordered already comes before the first message.
                biased;
                end = self.ordered(key) => return end,
                up = interface.bring_up(patience) => if let Err(error) = up {
                    return End::Forgotten(error);
                },
            }
        }
        let mut exchange = Exchange::default();
        // Whether a request for more time is without an answer.
        let mut asked = false;
        loop {
            if let Some(change) = self.session.elapse(now())
                && let Err(error) = self.changed(key, change)
            {
                return self.unrecorded(key, &error);
            }
            let until = match self.session.step(now()) {
                Step::Send(bytes, path) => {
                    if std::mem::replace(&mut asked, self.session.lease().is_some()) {
                        self.failed("the server did not answer the last request to renew the lease".into());
                    }
                    if let Err(error) = exchange.send(&self.interface, &bytes, path) {
                        // As if the network had lost it, unless there is nothing to send it by.
                        exchange.close();
                        if self.interface.is_gone() {
                            return End::Forgotten("the interface has gone".into());
                        }
                        let error = format!("failed to send on {}: {error}", self.interface.name);
                        if self.record.error.as_ref() != Some(&error) {
                            log(format_args!("{key}: {error}"));
                        }
                        self.failed(error);
                        asked = false;
                    }
                    continue;
                }
                Step::Listen(until, _) => until,
                Step::Sleep(until) => {
                    exchange.close();
                    until
                }
                Step::Failed => {
                    // The server may have leased the address, and its answer is lost.
                    if matches!(self.record.held, RecordedLease::Requested(_)) {
                        self.release(key);
                    }
                    return End::Forgotten("no more tries".into());
                }
            };
            self.complete(key);
            let longest = if self.lacking.is_some() { AGAIN } else { LONGEST };
            let wait = until.saturating_sub(now()).min(longest);
            tokio::select! {
                () = sleep_until(Instant::now() + wait) => {
                    if wait > Duration::from_secs(1) && self.interface.is_gone() {
                        return End::Forgotten("the interface has gone".into());
                    }
                }
                received = exchange.receive() => match received {
                    Ok(bytes) => if let Some(change) = self.session.receive(&bytes, now()) {
                        asked = false;
                        if let Err(error) = self.changed(key, change) {
                            return self.unrecorded(key, &error);
                        }
                    },
                    Err(error) => {
                        log(format_args!("{key}: failed to receive on {}: {error}", self.interface.name));
                        exchange.close();
                    }
                },
                end = self.ordered(key) => return end,
            }
        }
    }

    /// Gives the interface what it lacks.
    fn complete(&mut self, key: &str) {
        let Some(result) = &self.lacking else { return };
        match self.interface.add(result) {
            Ok(()) => self.lacking = None,
            Err(error) => {
                let error = error.to_string();
                if self.record.error.as_ref() != Some(&error) {
                    log(format_args!("{key}: {error}"));
                }
                self.failed(error);
            }
        }
    }

    /// Gives up a lease that cannot be recorded.
    fn unrecorded(&mut self, key: &str, error: &cni::Error) -> End {
        if self.session.lease().is_some() {
            self.release(key);
        }
        End::Forgotten(error.to_string())
    }

    /// Waits for an order that ends the task.
    async fn ordered(&mut self, key: &str) -> End {
        loop {
            match self.orders.recv().await {
                // The daemon ends; the record stays.
                None => return End::Kept,
                Some(LeaseCommand::Look) if self.interface.is_gone() => {
                    return End::Forgotten("the interface has gone".into());
                }
                Some(LeaseCommand::Look) => {}
                Some(LeaseCommand::Release(done)) => {
                    self.release(key);
                    return End::Released(done);
                }
            }
        }
    }

    /// Sends the release. The server's answer is not waited for, as there is none.
    fn release(&mut self, key: &str) {
        let terms: Option<LeaseParameters> = match (&self.session.lease(), &self.record.held) {
            (Some(lease), _) => Some(lease.terms.clone()),
            (None, RecordedLease::Requested(terms)) => Some(terms.clone()),
            (None, RecordedLease::Bound(_) | RecordedLease::Nothing) => None,
        };
        if let Some(terms) = terms.filter(|_| !self.interface.is_gone()) {
            log(format_args!("{key}: releasing lease"));
            let sent = self.session.release(&terms).and_then(|(bytes, path)| {
                self.interface.release(&bytes, path, terms.network).map_err(|error| error.to_string())
            });
            if let Err(error) = sent {
                log(format_args!("{key}: failed to send DHCPRELEASE: {error}"));
            }
            // The server may lease the address to another at once, and the interface may live on.
            self.note(self.interface.delete(terms.network));
        }
        self.purge(key);
    }

    /// Does what a change means for the record, the interface and those who wait. Fails as
    /// [`keep`](Attachment::keep) does.
    fn changed(&mut self, key: &str, change: Change) -> Result<(), cni::Error> {
        match change {
            // Before the request: if the daemon ends now, the address can still be released. The
            // record of a lost lease stays, because with it a restarted daemon goes on searching.
            Change::Offered(_) if matches!(*self.status.borrow(), Status::Lost(_)) => return Ok(()),
            Change::Offered(terms) => return self.keep(RecordedLease::Requested(terms)),
            Change::Lost(network) => {
                let why = format!("the lease of {} is lost", network.address());
                log(format_args!("{key}: {why}"));
                self.note(self.interface.delete(network));
                self.lacking = None;
                // A daemon that is restarted now must not take the lease for a good one.
                if let RecordedLease::Bound(lease) = &mut self.record.held {
                    lease.terms.seconds = 0;
                }
                self.failed(why.clone());
                self.status.send_replace(Status::Lost(why));
                return Ok(());
            }
            Change::Moved(_) | Change::Acquired | Change::Extended => {}
        }
        let Some(lease) = self.session.lease().cloned() else { return Ok(()) };
        let moved =
            matches!(&*self.status.borrow(), Status::Leased(result) if result.ips[0].address != lease.terms.network);
        let regained = matches!(*self.status.borrow(), Status::Lost(_));
        let result = Rc::new(lease.terms.result(self.record.priority));
        self.keep(RecordedLease::Bound(lease.clone()))?;
        if moved || regained {
            self.lacking = Some(Rc::clone(&result));
            self.complete(key);
        }
        // Done after the new address is there: with its last address an interface loses its routes.
        if let Change::Moved(old) = change {
            self.note(self.interface.delete(old));
        }
        let seconds = lease.expiry().saturating_sub(now()).as_secs();
        log(format_args!("{key}: {} is leased by {} for {seconds} s", lease.terms.address(), lease.terms.server));
        self.status.send_replace(Status::Leased(result));
        Ok(())
    }
}

enum End {
    Kept,
    Forgotten(String),
    Released(oneshot::Sender<()>),
}
