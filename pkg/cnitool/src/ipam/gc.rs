//! gc: what becomes of each reservation, decided and carried out under one lock.
//!
//! Reservations that are or may be in use stay. One of an unknown container may belong to an ADD
//! that is still running: it goes only with `--unknown`, and only if it is older than any ADD
//! takes.

use std::net::IpAddr;

use clap::Args;
use cni::Error;
use cni_ipam::{Listed, Reservation};
use serde_json::{Value, json};

use super::{CheckedReservation, IpamContext, owner, seconds};
use crate::Streams;
use crate::node::Liveness;
use crate::report::{Colour, Format, paint, write, write_json};

/// The arguments of `gc`.
#[derive(Debug, Args)]
pub(super) struct Collect {
    /// The network's name
    network: String,
    /// Print what would go and why, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Also remove reservations of unknown containers
    #[arg(long)]
    unknown: bool,
    /// With --unknown: only what is older; an ADD that is under way is not known yet
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    min_age: u64,
    /// Keep what this container has; can be repeated
    #[arg(long, value_name = "ID")]
    keep: Vec<String>,
}

/// A reservation and what becomes of it.
struct Decided {
    reservation: Reservation,
    goes: bool,
    why: String,
}

impl IpamContext<'_, '_> {
    pub(super) fn gc(&self, args: &Collect, streams: &mut Streams<'_>) -> Result<(), Error> {
        let addresses = self.one(&args.network)?;
        let Some(mut locked) = self.lock(&addresses)? else { return self.gc_report(args, &[], streams) };
        let Listed { reservations, unread, .. } = locked.list()?;
        let unread = Error::join(unread.into_iter().map(|(_, error)| error)).err();
        let judged = self.judged(&addresses.network, reservations)?;
        let mut decided: Vec<Decided> = judged.into_iter().map(|held| decide(args, held)).collect();
        // Text is printed first, so that it is complete even if the removal fails half-way. A JSON
        // document says what has happened.
        let text_first = self.shared.format() == Format::Text;
        if text_first {
            self.gc_report(args, &decided, streams)?;
        }
        if !args.dry_run {
            let going = decided.iter().filter(|one| one.goes);
            let doomed: Vec<Reservation> = going.map(|one| one.reservation.clone()).collect();
            let removed = locked.release_chosen(&doomed)?;
            for spared in spare(&mut decided, &removed) {
                self.notes.note(format_args!("{spared} was changed meanwhile and stays"));
            }
        }
        if !text_first {
            self.gc_report(args, &decided, streams)?;
        }
        unread.map_or(Ok(()), Err)
    }

    fn gc_report(&self, args: &Collect, decided: &[Decided], streams: &mut Streams<'_>) -> Result<(), Error> {
        let going = decided.iter().filter(|one| one.goes).count();
        if self.shared.format() == Format::Json {
            let row = |one: &Decided| -> Value {
                let Reservation { address, id, ifname, .. } = &one.reservation;
                json!({"address": address, "containerID": id, "ifname": ifname, "reason": one.why})
            };
            let of = |goes: bool| decided.iter().filter(|one| one.goes == goes).map(row).collect::<Vec<_>>();
            let report =
                json!({"network": args.network, "changed": !args.dry_run, "removed": of(true), "kept": of(false)});
            return write_json(streams, &report);
        }
        let mut text = String::new();
        for one in decided {
            let verb = if one.goes { "remove" } else { "keep" };
            let (id, ifname) = owner(&one.reservation);
            let line =
                format!("{verb:<6}  {}  {}  ({})", one.reservation.address, format!("{id} {ifname}").trim(), one.why);
            text += &if one.goes { paint(streams.stdout_style, Colour::Red, &line) } else { line };
            text.push('\n');
        }
        text += &match (args.dry_run, going) {
            (true, _) => format!("{going} of {} would go. Nothing was changed.\n", decided.len()),
            (false, _) => format!("{going} of {} go.\n", decided.len()),
        };
        write(streams, &text)
    }
}

/// Whatever was to go and has not, stays: its address.
fn spare(decided: &mut [Decided], removed: &[IpAddr]) -> Vec<IpAddr> {
    let mut spared = Vec::new();
    for one in decided.iter_mut().filter(|one| one.goes && !removed.contains(&one.reservation.address)) {
        one.goes = false;
        "it was changed meanwhile".clone_into(&mut one.why);
        spared.push(one.reservation.address);
    }
    spared
}

fn decide(args: &Collect, CheckedReservation { reservation, life }: CheckedReservation) -> Decided {
    if args.keep.contains(&reservation.id) {
        return Decided { reservation, goes: false, why: "named with --keep".to_owned() };
    }
    let (goes, why) = match life {
        Liveness::InUse(why) => (false, why),
        Liveness::Over(why) => (true, why),
        Liveness::Unknown(why) => match seconds(reservation.since) {
            _ if !args.unknown => (false, format!("{why}; --unknown removes it")),
            Some(age) if age >= args.min_age => (true, why),
            Some(age) => (false, format!("{why}, but it is only {age} s old: an ADD may be under way")),
            None => (false, format!("{why}, and its age is unknown")),
        },
    };
    Decided { reservation, goes, why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

    fn decided(args: &Collect, life: Liveness, age: u64) -> (bool, String) {
        let since = SystemTime::now().checked_sub(Duration::from_secs(age));
        let address = "10.0.0.2".parse().unwrap();
        let reservation = Reservation { address, id: "c".into(), ifname: Some("eth0".into()), since };
        let Decided { goes, why, .. } = decide(args, CheckedReservation { reservation, life });
        (goes, why)
    }

    #[test]
    fn unknown_reservations_go_only_on_request_and_if_old() {
        let plain = Collect { network: "n".into(), dry_run: false, unknown: false, min_age: 600, keep: Vec::new() };
        let why = || "because".to_owned();
        assert_eq!(decided(&plain, Liveness::InUse(why()), 9999), (false, why()));
        assert_eq!(decided(&plain, Liveness::Over(why()), 0), (true, why()));
        assert!(!decided(&plain, Liveness::Unknown(why()), 9999).0);
        let all = Collect { unknown: true, ..plain };
        assert_eq!(decided(&all, Liveness::InUse(why()), 9999), (false, why()));
        assert_eq!(decided(&all, Liveness::Unknown(why()), 9999), (true, why()));
        assert!(!decided(&all, Liveness::Unknown(why()), 500).0);
        let kept = Collect { keep: vec!["c".into()], ..all };
        assert!(!decided(&kept, Liveness::Over(why()), 9999).0);
    }

    #[test]
    fn what_was_to_go_and_was_not_removed_is_reported_as_kept() {
        let one = |address: &str, goes| {
            let (id, ifname) = ("c".to_owned(), Some("eth0".to_owned()));
            let reservation = Reservation { address: address.parse().unwrap(), id, ifname, since: None };
            Decided { reservation, goes, why: "because".to_owned() }
        };
        let mut decided = [one("10.0.0.2", true), one("10.0.0.3", true), one("10.0.0.4", false)];
        let removed = [decided[0].reservation.address];
        assert_eq!(spare(&mut decided, &removed), [decided[1].reservation.address]);
        let told: Vec<(bool, &str)> = decided.iter().map(|one| (one.goes, one.why.as_str())).collect();
        assert_eq!(told, [(true, "because"), (false, "it was changed meanwhile"), (false, "because")]);
    }
}
