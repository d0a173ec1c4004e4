//! gc: removes reservations of containers that do not exist any more.
//!
//! If the result cache does not have the attachment, the reservation may belong to an ADD that is
//! still running. So it is only removed with `--unknown`, and if it is old enough.

use std::net::IpAddr;

use clap::Args;
use cni::Error;
use cni_ipam::{Listed, Reservation};

use super::{Decision, age_in_seconds, write_removal};
use crate::call::{Format, Streams};
use crate::node::attachments::{CheckedReservation, Liveness};
use crate::node::ipam::IpamContext;

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
            write_removal(&args.network, !args.dry_run, [removed, kept], format, streams)
        };
        let Some(mut locked) = self.lock(&pool)? else { return write(&[], &[]) };
        let Listed { reservations, unread, .. } = locked.list()?;
        let read_outcome = Error::join(unread.into_iter().map(|(_, error)| error));
        let mut to_remove: Vec<Reservation> = Vec::new();
        for CheckedReservation { reservation, liveness } in self.check_all(&pool.network, reservations)? {
            let (is_removed, why) = decide(args, &reservation, liveness);
            if is_removed { &mut removed } else { &mut kept }.push(Decision::new(&reservation, &why));
            to_remove.extend(is_removed.then_some(reservation));
        }
        // The text is printed before anything is removed, so that it is complete even if the
        // removal fails. The JSON document reports what was removed.
        if format == Format::Text {
            write(&removed, &kept)?;
        }
        if !args.dry_run {
            let released = locked.release_chosen(&to_remove)?;
            for address in keep_unremoved(&mut removed, &mut kept, &released) {
                self.context
                    .notes
                    .note(format_args!("{address} was not removed, because it has changed in the meantime"));
            }
        }
        if format == Format::Json {
            write(&removed, &kept)?;
        }
        read_outcome
    }
}

/// Moves the decisions about addresses that are not in `released` from `removed` to `kept`, because
/// these reservations have changed in the meantime. Returns their addresses.
fn keep_unremoved(removed: &mut Vec<Decision>, kept: &mut Vec<Decision>, released: &[IpAddr]) -> Vec<IpAddr> {
    let changed: Vec<Decision> = removed.extract_if(.., |decision| !released.contains(&decision.address)).collect();
    let reason = "it has changed in the meantime";
    kept.extend(changed.iter().map(|decision| Decision { reason: reason.to_owned(), ..decision.clone() }));
    changed.iter().map(|decision| decision.address).collect()
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

    #[test]
    fn what_was_to_go_and_was_not_removed_is_reported_as_kept() {
        let one = |address: &str| {
            let (address, ifname) = (address.parse().unwrap(), Some("eth0".to_owned()));
            Decision { address, container_id: "c".to_owned(), ifname, reason: "because".to_owned() }
        };
        let (mut removed, mut kept) = (vec![one("10.0.0.2"), one("10.0.0.3")], vec![one("10.0.0.4")]);
        let released = [removed[0].address];
        assert_eq!(keep_unremoved(&mut removed, &mut kept, &released), [one("10.0.0.3").address]);
        let reasons = |list: &[Decision]| list.iter().map(|one| one.reason.clone()).collect::<Vec<_>>();
        assert_eq!(reasons(&removed), ["because"]);
        assert_eq!(reasons(&kept), ["because", "it has changed in the meantime"]);
    }
}
