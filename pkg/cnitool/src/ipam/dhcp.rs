//! dhcp: lists the leases that the daemon of the plugin dhcp has recorded.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use cni::Error;
use plugin_dhcp::leases::{self, Lease, Times};
use serde_json::{Value, json};

use crate::call::Streams;
use crate::node::ipam::{IpamContext, sockets};
use crate::report::{Colour, Report};

/// The arguments of `dhcp`.
#[derive(Debug, Args)]
pub(super) struct Dhcp {
    /// Only the leases of this network
    network: Option<String>,
    /// The daemon's socket [those of the networks' daemonSocketPath, and /run/cni/dhcp.sock]
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
    socket: Option<PathBuf>,
}

impl IpamContext<'_> {
    /// Prints the leases, or only those of the network that the arguments name.
    ///
    /// # Errors
    /// Code 5 if the networks' folder or a daemon's leases cannot be read.
    pub(super) fn dhcp(&self, args: &Dhcp, streams: &mut Streams<'_>) -> Result<(), Error> {
        let mut found: Vec<Lease> = Vec::new();
        for socket in self.selected_sockets(args)? {
            found.extend(leases::list(&socket)?);
        }
        found.retain(|lease| args.network.as_ref().is_none_or(|network| *network == lease.network));
        let colour = |row: &Value| row["lastError"].is_string().then_some(Colour::Yellow);
        let columns = [
            "network",
            "containerID",
            "ifname",
            "address",
            "server",
            "t1Seconds",
            "t2Seconds",
            "expirySeconds",
            "unconfirmed",
            "lastError",
        ];
        let mut report = Report::new(streams);
        report.table("leases", &columns, found.iter().map(as_json).collect(), colour, "No lease is recorded.");
        report.write(streams, self.context.format())
    }

    /// Returns the sockets of the daemons whose leases are listed: the socket in the arguments, or
    /// those of all networks.
    ///
    /// # Errors
    /// Code 5 if the networks' folder cannot be read.
    fn selected_sockets(&self, args: &Dhcp) -> Result<Vec<PathBuf>, Error> {
        if let Some(socket) = &args.socket {
            return Ok(vec![socket.clone()]);
        }
        Ok(sockets(&self.context.networks()?))
    }
}

/// Returns the fields of a lease. The times are the remaining seconds, null without an end.
fn as_json(lease: &Lease) -> Value {
    let seconds = |select: fn(&Times) -> Option<Duration>| Some(select(lease.times.as_ref()?)?.as_secs());
    json!({
        "network": lease.network, "containerID": lease.container_id, "ifname": lease.ifname,
        "address": lease.address.to_string(), "server": lease.server, "ntp": lease.ntp,
        // Without times, the address was requested, but not granted yet.
        "unconfirmed": lease.times.is_none(),
        "t1Seconds": seconds(|times| times.t1),
        "t2Seconds": seconds(|times| times.t2),
        "expirySeconds": seconds(|times| times.expiry),
        "lastError": lease.error,
    })
}
