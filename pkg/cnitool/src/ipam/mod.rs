//! The verbs of `cnitool ipam`: they show and release the reservations of host-local, and show the
//! leases of dhcp.
//!
//! `show`, `gc` and `release` hold the store's lock, as the plugins do, so they see no unfinished
//! change.

mod dhcp;
mod gc;
mod list;
mod release;
mod show;

use std::path::PathBuf;
use std::time::SystemTime;

use clap::{Args, Subcommand};
use cni_ipam::Reservation;

use crate::call::{Call, Exit, Failure, Shared, Streams, failed};
use crate::help;
use crate::node::ipam::IpamContext;

/// See and repair the address reservations of host-local, and see the leases of dhcp
#[derive(Debug, Args)]
#[command(after_help = help::AFTER_IPAM, subcommand_value_name = "VERB", subcommand_help_heading = "Verbs")]
pub(crate) struct Ipam {
    #[command(subcommand)]
    verb: Verb,
    #[command(flatten)]
    location: StoreLocation,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List each network's ranges and how full they are
    List,
    /// List a network's reservations: address, owner, age, whether it is in use
    Show(show::Show),
    /// Remove the reservations of containers that do not exist any more
    #[command(before_help = help::IPAM_GC, after_help = help::AFTER_IPAM_GC)]
    Gc(gc::Collect),
    /// Remove one reservation, or all reservations of one container
    #[command(before_help = help::IPAM_RELEASE, after_help = help::AFTER_IPAM_RELEASE)]
    Release(release::Release),
    /// List the leases of the dhcp daemon: address, server, times, last error
    Dhcp(dhcp::Dhcp),
}

/// The location of the reservations.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options of every ipam verb")]
struct StoreLocation {
    /// The folder of reservations [the networks' dataDir, else /var/lib/cni/networks]
    #[arg(long, global = true, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    data_dir: Option<PathBuf>,
}

/// Runs `cnitool ipam`.
pub(crate) fn run(args: &Ipam, shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    let data_dir = args.location.data_dir.as_deref();
    let context = IpamContext { shared, call, data_dir, notes: streams.notes.clone() };
    let (verb, outcome) = match &args.verb {
        Verb::List => ("ipam list", context.list(streams)),
        Verb::Show(args) => ("ipam show", context.show(args, streams)),
        Verb::Gc(args) => ("ipam gc", context.gc(args, streams)),
        Verb::Release(args) => ("ipam release", context.release(args, streams)),
        Verb::Dhcp(args) => ("ipam dhcp", context.dhcp(args, streams)),
    };
    outcome.map(|()| Exit::Done).map_err(|error| failed(verb, error, shared.format()))
}

/// Returns the time since `since`, such as `3 d`, in the largest unit that gives at least 2, or `?`
/// if `since` is not known.
fn age_text(since: Option<SystemTime>) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    match age_in_seconds(since) {
        None => "?".to_owned(),
        Some(age) if age < 2 * MINUTE => format!("{age} s"),
        Some(age) if age < 2 * HOUR => format!("{} min", age / MINUTE),
        Some(age) if age < 2 * DAY => format!("{} h", age / HOUR),
        Some(age) => format!("{} d", age / DAY),
    }
}

/// Returns the seconds since `since`, 0 for a time in the future, or `None` if `since` is not
/// known.
fn age_in_seconds(since: Option<SystemTime>) -> Option<u64> {
    Some(SystemTime::now().duration_since(since?).unwrap_or_default().as_secs())
}

/// Returns the container ID and the interface of a reservation, with control characters escaped.
/// The interface is empty if the reservation has none.
fn escaped_owner(reservation: &Reservation) -> (String, String) {
    let escaped = |text: &str| text.escape_debug().to_string();
    (escaped(&reservation.id), reservation.ifname.as_deref().map(escaped).unwrap_or_default())
}
