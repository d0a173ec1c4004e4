//! gc: removes reservations of containers that do not exist any more.
//!
//! If the result cache does not have the attachment, the reservation may belong to an ADD that is
//! still running. So it is only removed with `--unknown`, and if it is old enough.

use std::net::IpAddr;

use clap::Args;
use cni::Error;
use cni_ipam::{Listed, Reservation};
use serde_json::{Value, json};

use super::{age_in_seconds, escaped_owner};
use crate::call::{Format, Streams};
use crate::node::attachments::{CheckedReservation, Liveness};
use crate::node::ipam::IpamContext;
use crate::report::{Colour, paint, write_report};

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

/// A reservation, and whether it is removed.
struct Decision {
    reservation: Reservation,
    is_removed: bool,
    why: String,
}

impl IpamContext<'_, '_> {
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
        let Some(mut locked) = self.lock(&pool)? else { return self.print_decisions(args, &[], streams) };
        let Listed { reservations, unread, .. } = locked.list()?;
        let read_outcome = Error::join(unread.into_iter().map(|(_, error)| error));
        let checked = self.check_all(&pool.network, reservations)?;
        let mut decisions: Vec<Decision> = checked.into_iter().map(|checked| decide(args, checked)).collect();
        // The text is printed before anything is removed, so that it is complete even if the
        // removal fails. The JSON document reports what was removed.
        let is_text = self.shared.format() == Format::Text;
        if is_text {
            self.print_decisions(args, &decisions, streams)?;
        }
        if !args.dry_run {
            let to_remove = decisions.iter().filter(|decision| decision.is_removed);
            let to_remove: Vec<Reservation> = to_remove.map(|decision| decision.reservation.clone()).collect();
            let removed = locked.release_chosen(&to_remove)?;
            for address in mark_unremoved_as_kept(&mut decisions, &removed) {
                self.notes.note(format_args!("{address} was not removed, because it has changed in the meantime"));
            }
        }
        if !is_text {
            self.print_decisions(args, &decisions, streams)?;
        }
        read_outcome
    }

    /// Prints whether and why each reservation is removed.
    fn print_decisions(&self, args: &Collect, decisions: &[Decision], streams: &mut Streams<'_>) -> Result<(), Error> {
        let (removed, kept): (Vec<&Decision>, Vec<&Decision>) =
            decisions.iter().partition(|decision| decision.is_removed);
        let json = || {
            let row = |decision: &&Decision| -> Value {
                let Reservation { address, id, ifname, .. } = &decision.reservation;
                json!({"address": address, "containerID": id, "ifname": ifname, "reason": decision.why})
            };
            let [removed, kept] = [&removed, &kept].map(|rows| rows.iter().map(row).collect::<Vec<Value>>());
            // `changed` is true without `--dry-run`, even if nothing was removed.
            json!({"network": args.network, "changed": !args.dry_run, "removed": removed, "kept": kept})
        };
        let text = |style| {
            let mut text = String::new();
            for Decision { reservation, is_removed, why } in decisions {
                let verb = if *is_removed { "remove" } else { "keep" };
                let (id, ifname) = escaped_owner(reservation);
                let line = format!("{verb:<6}  {}  {}  ({why})", reservation.address, format!("{id} {ifname}").trim());
                text += &if *is_removed { paint(style, Colour::Red, &line) } else { line };
                text.push('\n');
            }
            let (removed_count, count) = (removed.len(), decisions.len());
            text + &match args.dry_run {
                true => format!("{removed_count} of {count} would be removed. Nothing was changed.\n"),
                false => format!("{removed_count} of {count} are removed.\n"),
            }
        };
        write_report(streams, self.shared.format(), json, text)
    }
}

/// Changes the decision to remove a reservation if its address is not in `removed`, because the
/// reservation has changed in the meantime. Returns the addresses of these reservations.
fn mark_unremoved_as_kept(decisions: &mut [Decision], removed: &[IpAddr]) -> Vec<IpAddr> {
    let mut kept = Vec::new();
    for decision in decisions {
        let address = decision.reservation.address;
        if decision.is_removed && !removed.contains(&address) {
            decision.is_removed = false;
            "it has changed in the meantime".clone_into(&mut decision.why);
            kept.push(address);
        }
    }
    kept
}

/// Decides whether a reservation is removed.
fn decide(args: &Collect, CheckedReservation { reservation, liveness }: CheckedReservation) -> Decision {
    if args.keep.contains(&reservation.id) {
        return Decision { reservation, is_removed: false, why: "named with --keep".to_owned() };
    }
    let (is_removed, why) = match liveness {
        Liveness::InUse(why) => (false, why),
        Liveness::ContainerGone(why) => (true, why),
        Liveness::Unknown(why) if !args.unknown => (false, format!("{why}; --unknown removes it")),
        Liveness::Unknown(why) => match age_in_seconds(reservation.since) {
            Some(age) if age >= args.min_age => (true, why),
            Some(age) => (false, format!("{why}, but it is only {age} s old: its ADD may still be running")),
            None => (false, format!("{why}, and its age is unknown")),
        },
    };
    Decision { reservation, is_removed, why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

    fn decided(args: &Collect, liveness: Liveness, age: u64) -> (bool, String) {
        let since = SystemTime::now().checked_sub(Duration::from_secs(age));
        let address = "10.0.0.2".parse().unwrap();
        let reservation = Reservation { address, id: "c".into(), ifname: Some("eth0".into()), since };
        let Decision { is_removed, why, .. } = decide(args, CheckedReservation { reservation, liveness });
        (is_removed, why)
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
        let one = |address: &str, is_removed| {
            let (id, ifname) = ("c".to_owned(), Some("eth0".to_owned()));
            let reservation = Reservation { address: address.parse().unwrap(), id, ifname, since: None };
            Decision { reservation, is_removed, why: "because".to_owned() }
        };
        let mut decided = [one("10.0.0.2", true), one("10.0.0.3", true), one("10.0.0.4", false)];
        let removed = [decided[0].reservation.address];
        assert_eq!(mark_unremoved_as_kept(&mut decided, &removed), [decided[1].reservation.address]);
        let reported: Vec<(bool, &str)> = decided.iter().map(|one| (one.is_removed, one.why.as_str())).collect();
        assert_eq!(reported, [(true, "because"), (false, "it has changed in the meantime"), (false, "because")]);
    }
}
