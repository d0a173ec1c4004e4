//! The task of one attachment: it sends and receives for the state machine of
//! [`cni_dhcp::lease`], writes the record, and answers the plugin's calls.

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

/// The longest time that the task sleeps before it checks whether the interface still exists.
const LONGEST_SLEEP: Duration = Duration::from_secs(3600);
/// The longest sleep after which the task does not check whether the interface still exists. Such a
/// sleep is one between two messages: if the interface is gone, sending the next one fails.
const UNCHECKED_SLEEP: Duration = Duration::from_secs(1);
/// The pause before the task tries again to add an address or route to the interface.
const RETRY_PAUSE: Duration = Duration::from_secs(10);
/// The reason for the end of a task whose interface is gone.
const INTERFACE_GONE: &str = "the interface no longer exists";

/// The state of an attachment's lease, from which the daemon answers the plugin's calls.
#[derive(Clone, Debug)]
pub(crate) enum Status {
    /// There has been no lease yet.
    Acquiring,
    /// There is a lease. The value is the result of ADD.
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
}

impl Handle {
    /// Whether the task's lease is for this interface. If it is not, the container has been started
    /// again with another interface of the same name.
    pub(crate) fn is_for(&self, found: &Interface) -> bool {
        let Interface { netns, netns_id, index, mac, .. } = &self.interface;
        let is_same_link = *netns_id == found.netns_id && *index == found.index;
        // The namespace may have another path now. The task can only renew the lease if the path
        // that it knows still leads to the interface.
        let is_path_valid = *netns == found.netns || !self.interface.is_gone();
        // A new namespace can get the inode number of a deleted one, so the MAC is compared too.
        // The plugin tuning may have changed the MAC of the same interface. Then the interface
        // still has the leased address.
        let has_address = || match &*self.status.borrow() {
            Status::Leased(result) => result.ips.iter().any(|ip| found.has_address(ip.address)),
            Status::Acquiring | Status::Lost(_) | Status::Failed(_) => false,
        };
        is_same_link && is_path_valid && (*mac == found.mac || has_address())
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
    /// The address and routes that must still be added to the interface, after a lease with another
    /// address or after the loss of a lease.
    pub(crate) missing: Option<Rc<AddResult>>,
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
        match self.maintain_lease(&key).await {
            End::Kept => {}
            End::Forgotten(why) => {
                log(format_args!("{key}: {why}"));
                self.purge_record(&key);
                self.status.send_replace(Status::Failed(why));
                self.daemon.forget(&key, &self.status);
            }
            End::Released(done) => {
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

    /// Records the lease. An error is only logged, unless it is about the first lease.
    ///
    /// # Errors
    /// Code 5 if the first lease, for which the plugin still waits, cannot be recorded: a later
    /// daemon would not know this lease, so it would never be released.
    fn write_record(&mut self, held: RecordedLease) -> Result<(), cni::Error> {
        self.record.held = held;
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
            if !matches!(self.record.held, RecordedLease::Nothing) {
                self.log_error(self.daemon.records.write(&self.record));
            }
        }
    }

    /// Logs and records an error that may occur again and again. It is only logged if it is not the
    /// error that was recorded last.
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
    async fn maintain_lease(&mut self, key: &str) -> End {
        if self.session.lease().is_none() {
            log(format_args!("{key}: acquiring lease"));
            let (interface, timeout) = (self.interface.clone(), self.daemon.limits.answer);
            tokio::select! {
                // A release that waits in the channel comes before the first message.
                biased;
                end = self.process_commands(key) => return end,
                up = interface.bring_up(timeout) => if let Err(error) = up {
                    return End::Forgotten(error);
                },
            }
        }
        let mut exchange = Exchange::default();
        // Whether the last request to extend the lease has no answer yet.
        let mut is_unanswered = false;
        loop {
            if let Some(change) = self.session.elapse(now())
                && let Err(error) = self.apply_change(key, change)
            {
                return self.give_up_unrecorded(key, &error);
            }
            let until = match self.session.step(now()) {
                Step::Send(bytes, path) => {
                    if is_unanswered {
                        self.record_error("the server did not answer the last request to renew the lease".into());
                    }
                    is_unanswered = self.session.lease().is_some();
                    if let Err(error) = exchange.send(&self.interface, &bytes, path) {
                        // The message counts as lost in the network, unless the interface is gone.
                        exchange.close();
                        if self.interface.is_gone() {
                            return End::Forgotten(INTERFACE_GONE.into());
                        }
                        let why = format!("failed to send a DHCP message on {}: {error}", self.interface.name);
                        self.log_repeated_error(key, why);
                        is_unanswered = false;
                    }
                    continue;
                }
                Step::Listen(until, _) => until,
                Step::Sleep(until) => {
                    exchange.close();
                    until
                }
                Step::Failed => {
                    // The server may have leased the address although its answer did not arrive.
                    if matches!(self.record.held, RecordedLease::Requested(_)) {
                        self.release(key);
                    }
                    return End::Forgotten("no more tries".into());
                }
            };
            self.add_missing(key);
            let longest = if self.missing.is_some() { RETRY_PAUSE } else { LONGEST_SLEEP };
            let wait = until.saturating_sub(now()).min(longest);
            tokio::select! {
                () = sleep_until(Instant::now() + wait) => {
                    if wait > UNCHECKED_SLEEP && self.interface.is_gone() {
                        return End::Forgotten(INTERFACE_GONE.into());
                    }
                }
                received = exchange.receive() => match received {
                    Ok(bytes) => if let Some(change) = self.session.receive(&bytes, now()) {
                        is_unanswered = false;
                        if let Err(error) = self.apply_change(key, change) {
                            return self.give_up_unrecorded(key, &error);
                        }
                    },
                    Err(error) => {
                        log(format_args!("{key}: failed to receive DHCP messages on {}: {error}", self.interface.name));
                        exchange.close();
                    }
                },
                end = self.process_commands(key) => return end,
            }
        }
    }

    /// Adds the missing address and routes to the interface. After an error they stay missing.
    fn add_missing(&mut self, key: &str) {
        let Some(result) = &self.missing else { return };
        match self.interface.add_address_and_routes(result) {
            Ok(()) => self.missing = None,
            Err(error) => self.log_repeated_error(key, error.to_string()),
        }
    }

    /// Releases a lease that cannot be recorded, and returns the end of the task.
    fn give_up_unrecorded(&mut self, key: &str, error: &cni::Error) -> End {
        if self.session.lease().is_some() {
            self.release(key);
        }
        End::Forgotten(error.to_string())
    }

    /// Processes the daemon's commands until one ends the task.
    async fn process_commands(&mut self, key: &str) -> End {
        loop {
            match self.commands.recv().await {
                // The daemon ends. The record stays for the next one.
                None => return End::Kept,
                Some(LeaseCommand::CheckInterface) if self.interface.is_gone() => {
                    return End::Forgotten(INTERFACE_GONE.into());
                }
                Some(LeaseCommand::CheckInterface) => {}
                Some(LeaseCommand::Release(done)) => {
                    self.release(key);
                    return End::Released(done);
                }
            }
        }
    }

    /// Sends DHCPRELEASE, which servers do not answer, deletes the address, and removes the record.
    fn release(&mut self, key: &str) {
        let terms: Option<LeaseParameters> = match (&self.session.lease(), &self.record.held) {
            (Some(lease), _) => Some(lease.terms.clone()),
            // The server may have leased the address without an answer that has arrived.
            (None, RecordedLease::Requested(terms)) => Some(terms.clone()),
            // A recorded lease without one in the session is lost.
            (None, RecordedLease::Bound(_) | RecordedLease::Nothing) => None,
        };
        if let Some(terms) = terms.filter(|_| !self.interface.is_gone()) {
            log(format_args!("{key}: releasing lease"));
            let sent = self.session.release(&terms).and_then(|(bytes, path)| {
                self.interface.send_release(&bytes, path, terms.network).map_err(|error| error.to_string())
            });
            if let Err(error) = sent {
                log(format_args!("{key}: failed to send DHCPRELEASE: {error}"));
            }
            // The server may lease the address to another client at once, and the interface may
            // stay.
            self.log_error(self.interface.delete_address(terms.network));
        }
        self.purge_record(key);
    }

    /// Updates the record, the interface and the status after a change of the lease.
    ///
    /// # Errors
    /// That of [`write_record`](Attachment::write_record).
    fn apply_change(&mut self, key: &str, change: Change) -> Result<(), cni::Error> {
        match change {
            // A requested address is recorded before the request, so that it can be released if the
            // daemon ends now. The record of a lost lease is not replaced, because with it a daemon
            // that starts later continues to search.
            Change::Offered(_) if matches!(*self.status.borrow(), Status::Lost(_)) => return Ok(()),
            Change::Offered(terms) => return self.write_record(RecordedLease::Requested(terms)),
            Change::Lost(network) => {
                let why = format!("the lease of {} is lost", network.address());
                log(format_args!("{key}: {why}"));
                self.log_error(self.interface.delete_address(network));
                self.missing = None;
                // A daemon that starts later must see that the lease has ended.
                if let RecordedLease::Bound(lease) = &mut self.record.held {
                    lease.terms.seconds = 0;
                }
                self.record_error(why.clone());
                self.status.send_replace(Status::Lost(why));
                return Ok(());
            }
            Change::Moved(_) | Change::Acquired | Change::Extended => {}
        }
        // After these changes the session has a lease.
        let Some(lease) = self.session.lease().cloned() else { return Ok(()) };
        let has_moved =
            matches!(&*self.status.borrow(), Status::Leased(result) if result.ips[0].address != lease.terms.network);
        let is_regained = matches!(*self.status.borrow(), Status::Lost(_));
        let result = Rc::new(lease.terms.result(self.record.priority));
        self.write_record(RecordedLease::Bound(lease.clone()))?;
        // After the first lease, the interface plugin adds the address.
        if has_moved || is_regained {
            self.missing = Some(Rc::clone(&result));
            self.add_missing(key);
        }
        // The old address is deleted after the new one is added, because an interface without an
        // address loses its routes.
        if let Change::Moved(old) = change {
            self.log_error(self.interface.delete_address(old));
        }
        let seconds = lease.expiry().saturating_sub(now()).as_secs();
        log(format_args!("{key}: {} is leased by {} for {seconds} s", lease.terms.address(), lease.terms.server));
        self.status.send_replace(Status::Leased(result));
        Ok(())
    }
}

/// How a task ends.
enum End {
    /// The daemon ends. The record stays.
    Kept,
    /// There is no lease or interface any more, for this reason. The record is removed.
    Forgotten(String),
    /// A command has released the lease. The end is reported through this channel.
    Released(oneshot::Sender<()>),
}
