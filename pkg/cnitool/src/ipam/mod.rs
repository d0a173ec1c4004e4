//! The verbs of `cnitool ipam`: they show and release the reservations of host-local, and show the
//! leases of dhcp.
//!
//! `show`, `gc` and `release` hold the store's lock, as the plugins do, so they see no unfinished
//! change.

mod remove;
mod show;

use std::path::PathBuf;
use std::time::SystemTime;

use clap::{Args, Subcommand};

use crate::call::{Context, Exit, Failure, Streams, Watch, failed};
use crate::node::ipam::IpamContext;

/// See and repair the address reservations of host-local, and see the leases of dhcp
#[derive(Debug, Args)]
#[command(subcommand_value_name = "VERB", subcommand_help_heading = "Verbs")]
pub(crate) struct Ipam {
    #[command(subcommand)]
    verb: Verb,
    /// The folder of reservations [the networks' dataDir, else /var/lib/cni/networks]
    #[arg(long, global = true, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    #[arg(help_heading = "Options of every ipam verb")]
    data_dir: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List each network's ranges and how full they are
    List(Watch),
    /// List a network's reservations: address, owner, age, whether it is in use
    Show {
        /// The network's name
        network: String,
    },
    /// Remove the reservations of containers that do not exist any more
    ///
    /// Removes reservations of containers that do not exist any more. A reservation of
    /// an attachment that a runtime has stored is removed if the attachment's network
    /// namespace is gone and no link on the host belongs to it. A reservation of an
    /// unknown container stays unless --unknown is given. Plugins may run at the same
    /// time, because cnitool uses the same lock as they do.
    ///
    /// This verb removes only addresses. If rules and links are left over too, 'cnitool
    /// gc' or the runtime's own garbage collection removes all of them.
    ///
    /// ---
    /// Exit codes: 0 done, 1 failed, 2 the arguments are invalid
    ///
    /// Examples:
    ///   cnitool ipam gc mynet --dry-run
    ///   cnitool ipam gc mynet --unknown --keep 0123456789ab
    #[command(verbatim_doc_comment)]
    Gc(remove::Collect),
    /// Remove one reservation, or all reservations of one container
    ///
    /// Refuses to release an address that is in use, because another container could
    /// get the address while the first one still uses it. --force releases it anyway.
    ///
    /// ---
    /// Exit codes: 0 released, 1 not reserved, in use, or failed,
    ///             2 the arguments are invalid
    ///
    /// Examples:
    ///   cnitool ipam release mynet 10.61.0.7
    ///   cnitool ipam release mynet --container-id 0123456789ab -i eth0
    #[command(verbatim_doc_comment)]
    Release(remove::Release),
    /// List the leases of the dhcp daemon: address, server, times, last error
    Dhcp(show::Dhcp),
}

/// Runs `cnitool ipam`.
pub(crate) fn run(args: &Ipam, context: &Context<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    let ipam = IpamContext { context, data_dir: args.data_dir.as_deref(), cached: None };
    let (verb, outcome) = match &args.verb {
        Verb::List(watch) => ("ipam list", watch.run(context.call, streams, |streams| ipam.list(streams))),
        Verb::Show { network } => ("ipam show", ipam.show(network, streams)),
        Verb::Gc(args) => ("ipam gc", ipam.gc(args, streams)),
        Verb::Release(args) => ("ipam release", ipam.release(args, streams)),
        Verb::Dhcp(args) => ("ipam dhcp", ipam.dhcp(args, streams)),
    };
    outcome.map(|()| Exit::Done).map_err(|error| failed(verb, error, context.format()))
}

/// Returns the seconds since `since`, 0 for a time in the future, or `None` if `since` is not
/// known.
fn age_in_seconds(since: Option<SystemTime>) -> Option<u64> {
    Some(SystemTime::now().duration_since(since?).unwrap_or_default().as_secs())
}
