//! The task of one attachment: it sends and receives messages for the state machine of
//! [`cni_dhcp::lease`], writes the record, and publishes the status of the lease.

use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use cni::Cidr;
use cni::result::{AddResult, Dns};
use cni_dhcp::lease::{Change, Session, Step};
use cni_dhcp::message::LeaseParameters;
use cni_dhcp::message::v6::{Information, with_zone};
use cni_linux::Family;
use nix::time::{ClockId, clock_gettime};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use super::exchange::Exchange;
use super::network::Interface;
use super::{Daemon, log};
use crate::client::NO_MORE_TRIES;
use crate::conf::MtuTarget;
use crate::record::{Record, RecordedLease};

/// The longest time that the task sleeps before it checks whether the interface still exists.
const LONGEST_SLEEP: Duration = Duration::from_secs(3600);
/// After a sleep of at most this time, the task does not check whether the interface still exists.
/// A message follows such a short sleep, and sending it fails if the interface is gone.
const UNCHECKED_SLEEP: Duration = Duration::from_secs(1);
/// The pause before the task tries again to add an address or route to the interface.
const RETRY_PAUSE: Duration = Duration::from_secs(10);
/// The reason for the end of a task whose interface is gone.
const INTERFACE_GONE: &str = "the interface no longer exists";

/// The state of an attachment's lease, from which the daemon answers the plugin's calls.
#[derive(Clone, Debug)]
pub(crate) enum Status {
    /// The first lease has not been granted yet.
    Acquiring,
    /// There is a lease. The value is the result for ADD.
    Leased(Rc<AddResult>),
    /// The lease has ended, for this reason. The task tries to get another.
    Lost(String),
    /// The task has given up, for this reason, and ends.
    Failed(String),
}

/// A command to a task.
#[derive(Debug)]
pub(crate) enum LeaseCommand {
    /// Release the lease, report that through the channel, and end.
    Release(oneshot::Sender<()>),
    /// Check whether the interface still exists, and end if it does not.
    CheckInterface,
}

/// The daemon's access to a task.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    pub(crate) commands: mpsc::UnboundedSender<LeaseCommand>,
    pub(crate) status: watch::Receiver<Status>,
    pub(crate) interface: Interface,
    /// Has one reference for the daemon, and one for each call that waits for the lease.
    pub(crate) waiting: Rc<()>,
}

impl Handle {
    /// Waits for the lease, and returns it as a result.
    ///
    /// # Errors
    /// The text for the plugin: the lease is lost or was released, or no server has granted one.
    pub(crate) async fn lease(&self) -> Result<Rc<AddResult>, String> {
        let mut status = self.status.clone();
        loop {
            match status.borrow_and_update().clone() {
                Status::Leased(result) => return Ok(result),
                Status::Lost(why) | Status::Failed(why) => return Err(why),
                Status::Acquiring => {}
            }
            // Fails if the task has ended because its lease was released.
            status.changed().await.map_err(|_| "the lease was released".to_owned())?;
        }
    }

    /// Whether the task is for the interface `found`. If it is not, the container has been started
    /// again, and `found` is a new interface of the same name.
    pub(crate) fn is_for(&self, found: &Interface) -> bool {
        let Interface { netns, netns_id, index, mac, .. } = &self.interface;
        let is_same_link = *netns_id == found.netns_id && *index == found.index;
        // The namespace may have moved to another path. The task can only renew the lease if its
        // own path still leads to the interface.
        let is_path_valid = *netns == found.netns || !self.interface.is_gone();
        // A new namespace can get the inode number of a deleted one, so the MAC is compared too.
        let is_same_mac = *mac == found.mac;
        // If the plugin tuning has changed the MAC of the same interface, the interface still has
        // the leased address.
        let has_leased_address = || match &*self.status.borrow() {
            Status::Leased(result) => result.ips.iter().any(|ip| found.has_address(ip.address)),
            Status::Acquiring | Status::Lost(_) | Status::Failed(_) => false,
        };
        is_same_link && is_path_valid && (is_same_mac || has_leased_address())
    }
}

/// The state of the task.
pub(crate) struct Attachment {
    pub(crate) daemon: Rc<Daemon>,
    pub(crate) interface: Interface,
    pub(crate) record: Record,
    pub(crate) session: Session,
    pub(crate) status: watch::Sender<Status>,
    pub(crate) commands: mpsc::UnboundedReceiver<LeaseCommand>,
    /// The result whose address and routes the task must still add to the interface, because the
    /// address has changed or a lost lease was replaced. For the first lease, the interface plugin
    /// adds them.
    pub(crate) pending: Option<Rc<AddResult>>,
}

/// How a task ends.
enum TaskEnd {
    /// The daemon ends. The record stays.
    DaemonEnded,
    /// There is no lease or interface, for this reason. The record is removed.
    GaveUp(String),
    /// A command has released the lease. The task reports its end through this channel.
    Released(oneshot::Sender<()>),
    /// A server has answered a client without an address, which needs nothing more.
    Informed,
}

/// Returns the time since the boot of the machine, including suspension.
pub(crate) fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default()
}

impl Attachment {
    /// Runs the task until the lease is released, the interface is gone, no server grants a lease,
    /// or the daemon ends.
    pub(crate) async fn run(mut self) {
        let key = self.record.key();
        let Err(end) = self.maintain_lease(&key).await;
        match end {
            TaskEnd::DaemonEnded => {}
            TaskEnd::GaveUp(why) => {
                log(format_args!("{key}: {why}"));
                self.purge_record(&key);
                self.status.send_replace(Status::Failed(why));
                self.daemon.forget(&key, &self.status);
            }
            TaskEnd::Informed => self.daemon.forget(&key, &self.status),
            TaskEnd::Released(done) => {
                self.daemon.forget(&key, &self.status);
                // Sending fails if the connection of the DEL was closed meanwhile.
                let _ = done.send(());
            }
        }
    }

    /// Removes the record. An error is logged.
    fn purge_record(&self, key: &str) {
        self.log_error(self.daemon.records.purge(key));
    }

    /// Records the lease and clears the recorded error.
    ///
    /// # Errors
    /// Code 5 if the record cannot be written while the plugin still waits for the first lease:
    /// without a record, a later daemon could not release the lease. Afterwards, such an error is
    /// only logged.
    fn write_record(&mut self, lease: RecordedLease) -> Result<(), cni::Error> {
        self.record.lease = lease;
        self.record.error = None;
        match self.daemon.records.write(&self.record) {
            Err(error) if matches!(*self.status.borrow(), Status::Acquiring) => Err(error),
            outcome => {
                self.log_error(outcome);
                Ok(())
            }
        }
    }

    /// Records an error, for `cnitool ipam dhcp`. An attachment without a lease has no record, so
    /// its error is not stored.
    fn record_error(&mut self, error: String) {
        if self.record.error.as_ref() != Some(&error) {
            self.record.error = Some(error);
            if !matches!(self.record.lease, RecordedLease::Nothing) {
                self.log_error(self.daemon.records.write(&self.record));
            }
        }
    }

    /// Records an error that may occur again and again, and logs it unless it is the one that was
    /// recorded last.
    fn log_repeated_error(&mut self, key: &str, error: String) {
        if self.record.error.as_ref() != Some(&error) {
            log(format_args!("{key}: {error}"));
        }
        self.record_error(error);
    }

    /// Logs the error of an outcome, if there is one.
    fn log_error<E: std::fmt::Display>(&self, outcome: Result<(), E>) {
        if let Err(error) = outcome {
            log(format_args!("{}: {error}", self.record.key()));
        }
    }

    /// Acquires the lease and renews it, until something ends the task.
    async fn maintain_lease(&mut self, key: &str) -> Result<Infallible, TaskEnd> {
        if self.session.lease().is_none() {
            log(format_args!("{key}: acquiring lease"));
            let (interface, timeout, family) = (self.interface.clone(), self.session.carrier_wait(), self.family());
            tokio::select! {
                // A command that is already in the channel is processed before any message is sent.
                biased;
                end = self.process_commands(key) => return Err(end),
                up = interface.bring_up(timeout, family) => up.map_err(TaskEnd::GaveUp)?,
            }
        }
        let mut exchange = Exchange::default();
        // Whether the last request to extend the lease has no answer yet.
        let mut is_unanswered = false;
        loop {
            if let Some(change) = self.session.elapse(now()) {
                self.apply_change(key, change)?;
            }
            let until = match self.session.step(now()) {
                Step::Send(bytes, path) => {
                    if is_unanswered {
                        self.record_error("the server did not answer the last request to renew the lease".into());
                    }
                    match exchange.send(&self.interface, &bytes, path) {
                        // With a lease, every message is a request to extend it.
                        Ok(()) => is_unanswered = self.session.lease().is_some(),
                        Err(error) => {
                            is_unanswered = false;
                            exchange.close();
                            if self.interface.is_gone() {
                                return Err(TaskEnd::GaveUp(INTERFACE_GONE.into()));
                            }
                            // The message counts as lost in the network, and is repeated later.
                            let why = format!("failed to send a DHCP message on {}: {error}", self.interface.name);
                            self.log_repeated_error(key, why);
                        }
                    }
                    continue;
                }
                Step::Listen(until, _) => until,
                Step::Sleep(until) => {
                    exchange.close();
                    until
                }
                Step::Probe(cidr) => {
                    exchange.close();
                    let (interface, timeout) = (self.interface.clone(), self.session.carrier_wait());
                    tokio::select! {
                        biased;
                        end = self.process_commands(key) => return Err(end),
                        unique = interface.is_unique(cidr, timeout) => match unique {
                            Ok(is_unique) => {
                                if !is_unique {
                                    let why = format!("another host on the link has {}", cidr.address());
                                    self.log_repeated_error(key, why);
                                }
                                if let Some(change) = self.session.probed(is_unique, now()) {
                                    self.apply_change(key, change)?;
                                }
                            }
                            Err(error) => {
                                self.release(key);
                                return Err(TaskEnd::GaveUp(error));
                            }
                        },
                    }
                    continue;
                }
                Step::Failed(why) => {
                    // The server may have leased the address although its answer did not arrive.
                    if matches!(self.record.lease, RecordedLease::Requested(_)) {
                        self.release(key);
                    }
                    let last_error = self.record.error.as_ref().map(|error| format!("; {error}")).unwrap_or_default();
                    let name = &self.interface.name;
                    return Err(TaskEnd::GaveUp(format!("{NO_MORE_TRIES}: {name}: {why}{last_error}")));
                }
            };
            self.add_pending(key);
            let longest_wait = if self.pending.is_some() { RETRY_PAUSE } else { LONGEST_SLEEP };
            let wait = until.saturating_sub(now()).min(longest_wait);
            tokio::select! {
                () = sleep_until(Instant::now() + wait) => {
                    if wait > UNCHECKED_SLEEP && self.interface.is_gone() {
                        return Err(TaskEnd::GaveUp(INTERFACE_GONE.into()));
                    }
                }
                received = exchange.receive() => match received {
                    Ok(bytes) => if let Some(change) = self.session.receive(&bytes, now()) {
                        is_unanswered = false;
                        if let Change::Informed(information) = change {
                            self.publish(information);
                            return Err(TaskEnd::Informed);
                        }
                        self.apply_change(key, change)?;
                    },
                    Err(error) => {
                        log(format_args!("{key}: failed to receive DHCP messages on {}: {error}", self.interface.name));
                        exchange.close();
                    }
                },
                end = self.process_commands(key) => return Err(end),
            }
        }
    }

    /// Returns the protocol's address family.
    fn family(&self) -> Family {
        if self.session.client().is_v6() { Family::V6 } else { Family::V4 }
    }

    /// Publishes what a server has sent to a client without an address.
    fn publish(&self, information: Information) {
        let servers = information.nameservers.iter().map(|server| with_zone(&server.to_string(), &self.record.ifname));
        let dns = Dns { nameservers: servers.collect(), search: information.search, ..Dns::default() };
        self.status.send_replace(Status::Leased(Rc::new(AddResult { dns, ..AddResult::default() })));
    }

    /// Adds the pending address and routes, if any, to the interface. After an error the next call
    /// tries again.
    fn add_pending(&mut self, key: &str) {
        let Some(result) = &self.pending else { return };
        match self.interface.add_address_and_routes(result) {
            Ok(()) => self.pending = None,
            Err(error) => self.log_repeated_error(key, error.to_string()),
        }
    }

    /// Processes the daemon's commands until one ends the task.
    async fn process_commands(&mut self, key: &str) -> TaskEnd {
        loop {
            match self.commands.recv().await {
                // The channel is closed, because the daemon ends.
                None => return TaskEnd::DaemonEnded,
                Some(LeaseCommand::CheckInterface) if self.interface.is_gone() => {
                    return TaskEnd::GaveUp(INTERFACE_GONE.into());
                }
                Some(LeaseCommand::CheckInterface) => {}
                Some(LeaseCommand::Release(done)) => {
                    self.release(key);
                    return TaskEnd::Released(done);
                }
            }
        }
    }

    /// Sends DHCPRELEASE, which servers do not answer, deletes the address, and removes the record.
    /// If no address is leased or requested, or the interface is gone, only removes the record.
    fn release(&mut self, key: &str) {
        let terms: Option<LeaseParameters> = match (&self.session.lease(), &self.record.lease) {
            (Some(lease), _) => Some(lease.terms.clone()),
            // The server may have leased the address although its answer did not arrive.
            (None, RecordedLease::Requested(terms)) => Some(terms.clone()),
            // Without a lease in the session, the recorded lease is lost.
            (None, RecordedLease::Bound(_) | RecordedLease::Nothing) => None,
        };
        if let Some(terms) = terms.filter(|_| !self.interface.is_gone()) {
            log(format_args!("{key}: releasing lease"));
            let sent = self.session.release(&terms).and_then(|(bytes, path)| {
                self.interface.send_release(&bytes, path, terms.cidr).map_err(|error| error.to_string())
            });
            if let Err(error) = sent {
                log(format_args!("{key}: failed to send the release: {error}"));
            }
            // The interface may stay, and the server may lease the address to another client at
            // once.
            self.log_error(self.interface.purge_address(terms.cidr));
        }
        self.purge_record(key);
    }

    /// Updates the record, the interface and the status after a change of the lease.
    ///
    /// # Errors
    /// The record cannot be written, see [`write_record`](Attachment::write_record). Then the lease
    /// has been released.
    fn apply_change(&mut self, key: &str, change: Change) -> Result<(), TaskEnd> {
        let outcome = match change {
            Change::Offered(terms) => self.record_offer(terms),
            Change::Acquired | Change::Extended => self.apply_lease(key, None),
            Change::Moved(old) => self.apply_lease(key, Some(old)),
            Change::Lost(lost) => {
                self.apply_loss(key, lost);
                Ok(())
            }
            // The task has ended; see `maintain_lease`.
            Change::Informed(_) => Ok(()),
        };
        outcome.map_err(|error| {
            if self.session.lease().is_some() {
                self.release(key);
            }
            TaskEnd::GaveUp(error.to_string())
        })
    }

    /// Records an offered address before it is requested, so that a later daemon can release it if
    /// this one ends before the answer. Keeps the record of a lost lease: with that record, a later
    /// daemon continues to search.
    fn record_offer(&mut self, terms: LeaseParameters) -> Result<(), cni::Error> {
        if matches!(*self.status.borrow(), Status::Lost(_)) {
            return Ok(());
        }
        self.write_record(RecordedLease::Requested(terms))
    }

    /// Deletes `lost`, the address of a lost lease, from the interface, and records the loss.
    fn apply_loss(&mut self, key: &str, lost: Cidr) {
        let why = format!("the lease of {} is lost", lost.address());
        log(format_args!("{key}: {why}"));
        self.log_error(self.interface.purge_address(lost));
        self.pending = None;
        // A later daemon must see that the lease has ended.
        if let RecordedLease::Bound(lease) = &mut self.record.lease {
            lease.terms.seconds = 0;
        }
        self.record_error(why.clone());
        self.status.send_replace(Status::Lost(why));
    }

    /// Sets the MTU of the first lease on the interface, if the configuration requests that. An
    /// error is logged, and the interface keeps its MTU.
    fn set_mtu(&self, key: &str, terms: &LeaseParameters) {
        let Some(mtu) = terms.mtu.filter(|_| self.record.mtu_target == MtuTarget::Interface) else { return };
        if let Err(why) = self.interface.set_mtu(mtu.into()) {
            log(format_args!("{key}: {} keeps its MTU instead of {mtu}: {why}", self.interface.name));
        }
    }

    /// Records and publishes the session's new or extended lease. If the address has changed or a
    /// lost lease was replaced, adds the address and routes to the interface. Deletes `old`, the
    /// address that the new one replaces, if any.
    fn apply_lease(&mut self, key: &str, old: Option<Cidr>) -> Result<(), cni::Error> {
        // Always present here: the server has just granted the lease.
        let Some(lease) = self.session.lease().cloned() else { return Ok(()) };
        // The result of an adopted lease may also have addresses of other IPAM plugins.
        let has_moved = matches!(&*self.status.borrow(), Status::Leased(result)
            if result.ips.iter().all(|ip| ip.address != lease.terms.cidr));
        let is_regained = matches!(*self.status.borrow(), Status::Lost(_));
        if matches!(*self.status.borrow(), Status::Acquiring) {
            self.set_mtu(key, &lease.terms);
        }
        let result = Rc::new(self.record.result(&lease.terms, self.interface.mtu()));
        self.write_record(RecordedLease::Bound(lease.clone()))?;
        // After the first lease, the interface plugin adds the address instead.
        if has_moved || is_regained {
            self.pending = Some(Rc::clone(&result));
            self.add_pending(key);
        }
        // The old address is deleted after the new one is added, because an interface without an
        // address loses its routes.
        if let Some(old) = old {
            self.log_error(self.interface.purge_address(old));
        }
        let seconds = lease.expiry().saturating_sub(now()).as_secs();
        log(format_args!("{key}: {} is leased by {} for {seconds} s", lease.terms.cidr.address(), lease.terms.server));
        self.status.send_replace(Status::Leased(result));
        Ok(())
    }
}
