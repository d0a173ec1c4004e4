//! dhcp: lists the leases that the daemon of the plugin dhcp has recorded.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use cni::Error;
use plugin_dhcp::leases::{self, Lease, Times};
use serde_json::{Value, json};

use crate::call::{ColorMode, Streams, Variables};
use crate::node::ipam::{IpamContext, sockets};
use crate::node::networks;
use crate::report::{Colour, table, write_report};

/// The arguments of `dhcp`.
#[derive(Debug, Args)]
pub(super) struct Dhcp {
    /// Only the leases of this network
    network: Option<String>,
    /// The daemon's socket [those of the networks' daemonSocketPath, and /run/cni/dhcp.sock]
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
    socket: Option<PathBuf>,
}

impl IpamContext<'_, '_> {
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
        let json = || json!({"leases": found.iter().map(as_json).collect::<Vec<_>>()});
        write_report(streams, self.shared.format(), json, |style| as_text(&found, style))
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
        let folder = self.shared.conf_folder(&Variables(&self.call.environment));
        Ok(sockets(&networks(&folder)?))
    }
}

/// Returns the table of the leases. Those whose last renewal failed are coloured.
fn as_text(leases: &[Lease], style: ColorMode) -> String {
    if leases.is_empty() {
        return "No lease is recorded.\n".to_owned();
    }
    let header = ["NETWORK", "CONTAINER", "IFNAME", "ADDRESS", "SERVER", "T1", "T2", "EXPIRY", "LAST ERROR"];
    let row = |lease: &Lease| (as_row(lease), lease.error.as_ref().map(|_| Colour::Yellow));
    table(&header, leases.iter().map(row).collect(), style)
}

/// Returns a lease for `--json`.
fn as_json(lease: &Lease) -> Value {
    let seconds = |select: fn(&Times) -> Option<Duration>| {
        let remaining = lease.times.as_ref().and_then(select);
        remaining.map(|time| time.as_secs())
    };
    json!({
        "network": lease.network,
        "containerID": lease.container_id,
        "ifname": lease.ifname,
        "address": lease.address.to_string(),
        "server": lease.server,
        "ntp": lease.ntp,
        // Without times, the address was requested, but not granted yet.
        "confirmed": lease.times.is_some(),
        "t1Seconds": seconds(|times| times.t1),
        "t2Seconds": seconds(|times| times.t2),
        "expirySeconds": seconds(|times| times.expiry),
        "lastError": lease.error,
    })
}

/// Returns a lease as a row of the table.
fn as_row(lease: &Lease) -> Vec<String> {
    let time_text = |select: fn(&Times) -> Option<Duration>| match &lease.times {
        // The address was requested, but not granted yet.
        None => "?".to_owned(),
        Some(times) => match select(times) {
            None => "never".to_owned(),
            Some(Duration::ZERO) => "over".to_owned(),
            Some(remaining) => format!("in {} s", remaining.as_secs()),
        },
    };
    vec![
        lease.network.clone(),
        lease.container_id.clone(),
        lease.ifname.clone(),
        lease.address.to_string(),
        lease.server.clone(),
        time_text(|times| times.t1),
        time_text(|times| times.t2),
        time_text(|times| times.expiry),
        lease.error.clone().unwrap_or_default(),
    ]
}
