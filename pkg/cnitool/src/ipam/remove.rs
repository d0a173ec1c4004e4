//! gc removes reservations of containers that do not exist any more; release removes one
//! reservation by its address, or all reservations of one container.
//!
//! If the result cache does not have the attachment, the reservation may belong to an ADD that is
//! still running. So gc only removes it with `--unknown`, and if it is old enough.

use std::net::IpAddr;

use clap::{ArgGroup, Args};
use cni::{Code, Error};
use cni_ipam::{Listed, Reservation};
use serde_json::{Value, json};

use super::age_in_seconds;
use crate::call::{Format, Streams};
use crate::node::attachments::{Attachments, Liveness};
use crate::node::ipam::IpamContext;
use crate::report::{Colour, Report};

/// The arguments of `gc`.
#[derive(Debug, Args)]
pub(super) struct Collect {
    /// The network's name
    network: String,
    /// Print what would be removed and why, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Also remove reservations of unknown containers
    #[arg(long)]
    unknown: bool,
    /// With --unknown: the minimum age, because an ADD in progress is not known yet
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    min_age: u64,
    /// Keep the reservations of this container; can be repeated
    #[arg(long, value_name = "ID")]
    keep: Vec<String>,
}

/// The arguments of `release`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).args(["address", "container_id"]))]
pub(super) struct Release {
    /// The network's name
    network: String,
    /// The address to release
    address: Option<IpAddr>,
    /// All reservations of this container
    #[arg(long, value_name = "ID")]
    container_id: Option<String>,
    /// With --container-id: only of this interface
    #[arg(long, short, value_name = "NAME", requires = "container_id")]
    ifname: Option<String>,
    /// Release even an address in use, which another container may then get
    #[arg(long)]
    force: bool,
}

impl IpamContext<'_> {
    /// Decides which reservations are removed, prints the decisions, and removes these reservations
    /// unless `--dry-run` is given.
    ///
    /// # Errors
    /// - As [`pool_of`](IpamContext::pool_of).
    /// - Code 5 if the store, a reservation or the result cache cannot be read, a reservation
    ///   cannot be removed, or stdout cannot be written. An unreadable reservation does not prevent
    ///   the removal of the others.
    /// - Code 11 if the lock is held for too long.
    /// - The kernel's error if the host's links cannot be listed.
    pub(super) fn gc(&self, args: &Collect, streams: &mut Streams<'_>) -> Result<(), Error> {
        let pool = self.pool_of(&args.network)?;
        let (format, mut removed, mut kept) = (self.context.format(), Vec::new(), Vec::new());
        let mut write = |removed: &[Decision], kept: &[Decision]| {
            self.write_removal(&args.network, !args.dry_run, [removed, kept], streams)
        };
        let Some(mut locked) = self.lock(&pool)? else { return write(&[], &[]) };
        let Listed { reservations, unread, .. } = locked.list()?;
        let read_outcome = Error::join(unread.into_iter().map(|(_, error)| error));
        let attachments = Attachments::read(self.context, Some(&pool.network))?;
        for reservation in reservations {
            let liveness = attachments.liveness_of(&pool.network, &reservation);
            let (is_removed, reason) = decide(args, &reservation, liveness);
            if is_removed { &mut removed } else { &mut kept }.push((reservation, reason));
        }
        // The text is printed before anything is removed, so that it is complete even if the
        // removal fails. The JSON document reports what was removed.
        if format == Format::Text {
            write(&removed, &kept)?;
        }
        if !args.dry_run {
            let chosen: Vec<Reservation> = removed.iter().map(|(reservation, _)| reservation.clone()).collect();
            let released = locked.release_chosen(&chosen)?;
            let (gone, changed): (Vec<Decision>, Vec<Decision>) =
                removed.into_iter().partition(|(reservation, _)| released.contains(&reservation.address));
            removed = gone;
            let reason = "another program has changed it despite the lock";
            kept.extend(changed.into_iter().map(|(reservation, _)| (reservation, reason.to_owned())));
        }
        if format == Format::Json {
            write(&removed, &kept)?;
        }
        read_outcome
    }

    /// Releases the selected reservations and prints them.
    ///
    /// # Errors
    /// - As [`pool_of`](IpamContext::pool_of).
    /// - Code 3 if no reservation is selected.
    /// - Code 103 without `--force` if a selected reservation is in use. Nothing is released then.
    /// - Code 5 if the store, the result cache or a reservation cannot be read, a reservation
    ///   cannot be removed, or stdout cannot be written. An unreadable reservation does not prevent
    ///   the release of the others.
    /// - Code 11 if the lock is held for too long.
    /// - The kernel's error if the host's links cannot be listed.
    pub(super) fn release(&self, args: &Release, streams: &mut Streams<'_>) -> Result<(), Error> {
        let pool = self.pool_of(&args.network)?;
        let not_found_error = || {
            let msg = match (&args.address, &args.container_id) {
                (Some(address), _) => format!("{address} is not reserved"),
                (None, id) => format!("container {} has no reservation", id.as_deref().unwrap_or_default()),
            };
            let folder = pool.folder().display().to_string();
            Error::new(Code::UNKNOWN_CONTAINER, msg).with_details(folder)
        };
        let Some(mut locked) = self.lock(&pool)? else { return Err(not_found_error()) };
        let Listed { reservations: mut selected, unread, .. } = locked.list()?;
        selected.retain(|reservation| is_selected(args, reservation));
        // Without an address, each unreadable file may be a reservation of the container.
        let unread = unread.into_iter().filter(|(address, _)| args.address.is_none_or(|wanted| wanted == *address));
        let read_outcome = Error::join(unread.map(|(_, error)| error));
        if selected.is_empty() {
            read_outcome?;
            return Err(not_found_error());
        }
        let attachments = Attachments::read(self.context, Some(&pool.network))?;
        for reservation in &selected {
            if let Liveness::InUse(why) = attachments.liveness_of(&pool.network, reservation)
                && !args.force
            {
                let msg = format!("{reservation} and is in use: {why}");
                let details =
                    "detach the container with 'cnitool del' or its runtime, or release the address with --force";
                return Err(Error::new(Code::REFUSED, msg).with_details(details));
            }
        }
        // A reservation that has changed in the meantime is not released.
        let released_addresses = locked.release_chosen(&selected)?;
        selected.retain(|reservation| released_addresses.contains(&reservation.address));
        let released: Vec<Decision> = selected.into_iter().map(|one| (one, "selected".to_owned())).collect();
        self.write_removal(&args.network, true, [&released, &[]], streams)?;
        read_outcome
    }

    /// Writes the report of a verb that removes reservations. `changed` is false if it only
    /// reports.
    ///
    /// # Errors
    /// Code 5 if stdout cannot be written.
    fn write_removal(
        &self,
        network: &str,
        changed: bool,
        [removed, kept]: [&[Decision]; 2],
        streams: &mut Streams<'_>,
    ) -> Result<(), Error> {
        let mut report = Report::new(streams);
        for (verb, colour, decisions) in [("keep", None, kept), ("remove", Some(Colour::Red), removed)] {
            for (Reservation { address, id, ifname, .. }, reason) in decisions {
                let owner = format!("{id} {}", ifname.as_deref().unwrap_or_default());
                let owner = owner.trim().escape_debug();
                report.painted(colour, &format!("{verb:<6}  {address}  {owner}  ({reason})"));
            }
        }
        let counts = format!("{} of {}", removed.len(), removed.len() + kept.len());
        report.line(match changed {
            false => format!("{counts} would be removed. Nothing was changed."),
            true => format!("{counts} are removed."),
        });
        let as_json = |(reservation, reason): &Decision| {
            let Reservation { address, id, ifname, .. } = reservation;
            json!({"address": address, "containerID": id, "ifname": ifname, "reason": reason})
        };
        let [removed, kept] = [removed, kept].map(|decisions| decisions.iter().map(as_json).collect::<Value>());
        let document = json!({"network": network, "changed": changed, "removed": removed, "kept": kept});
        report.write(streams, self.context.format(), &document)
    }
}

/// Decides whether a reservation is removed, and why.
fn decide(args: &Collect, reservation: &Reservation, liveness: Liveness) -> (bool, String) {
    if args.keep.contains(&reservation.id) {
        return (false, "named with --keep".to_owned());
    }
    match liveness {
        Liveness::InUse(why) => (false, why),
        Liveness::ContainerGone(why) => (true, why),
        Liveness::Unknown(why) if !args.unknown => (false, format!("{why}; --unknown removes it")),
        Liveness::Unknown(why) => match age_in_seconds(reservation.since) {
            Some(age) if age >= args.min_age => (true, why),
            Some(age) => (false, format!("{why}, but it is only {age} s old: its ADD may still be running")),
            None => (false, format!("{why}, and its age is unknown")),
        },
    }
}

/// Whether the arguments select a reservation.
fn is_selected(args: &Release, Reservation { address, id, ifname, .. }: &Reservation) -> bool {
    // clap requires the address or the container, and refuses both.
    args.address.is_none_or(|wanted| wanted == *address)
        && args.container_id.as_ref().is_none_or(|wanted| wanted == id)
        && args.ifname.as_ref().is_none_or(|wanted| ifname.as_ref() == Some(wanted))
}

/// A reservation, and why it is removed or kept.
type Decision = (Reservation, String);

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

    fn decided(args: &Collect, liveness: Liveness, age: u64) -> (bool, String) {
        let since = SystemTime::now().checked_sub(Duration::from_secs(age));
        let address = "10.0.0.2".parse().unwrap();
        let reservation = Reservation { address, id: "c".into(), ifname: Some("eth0".into()), since };
        decide(args, &reservation, liveness)
    }

    #[test]
    fn unknown_reservations_go_only_on_request_and_if_old() {
        let plain = Collect { network: "n".into(), dry_run: false, unknown: false, min_age: 600, keep: Vec::new() };
        let why = || "because".to_owned();
        assert_eq!(decided(&plain, Liveness::InUse(why()), 9999), (false, why()));
        assert_eq!(decided(&plain, Liveness::ContainerGone(why()), 0), (true, why()));
        assert!(!decided(&plain, Liveness::Unknown(why()), 9999).0);
        let all = Collect { unknown: true, ..plain };
        assert_eq!(decided(&all, Liveness::InUse(why()), 9999), (false, why()));
        assert_eq!(decided(&all, Liveness::Unknown(why()), 9999), (true, why()));
        assert!(!decided(&all, Liveness::Unknown(why()), 500).0);
        let kept = Collect { keep: vec!["c".into()], ..all };
        assert!(!decided(&kept, Liveness::ContainerGone(why()), 9999).0);
    }
}
