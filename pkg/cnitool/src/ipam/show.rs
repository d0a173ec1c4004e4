//! list, show and dhcp: the verbs that only print.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use cni::Error;
use cni_cluster::ledger::{Entry, Ledger, State};
use cni_ipam::store::Usage;
use cni_ipam::{Listed, RangeSets, Reservation};
use plugin_dhcp::leases::{self, Lease, Times};
use serde_json::{Value, json};

use super::age_in_seconds;
use crate::call::Streams;
use crate::node::attachments::{Attachments, OVER};
use crate::node::ipam::{IpamContext, NEARLY_FULL_PERCENT, sockets, used_percent};
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

/// Returns the row of a block of cluster-local, with the number of its reserved addresses.
fn block_row(Entry { block, state }: &Entry, reservations: &[Reservation]) -> Value {
    let state = match state {
        State::Claiming => "claiming".to_owned(),
        State::Held(_) => "held".to_owned(),
        State::Releasing(_) => "releasing".to_owned(),
        State::Lost(holder) => holder.to_string(),
    };
    let used = reservations.iter().filter(|reservation| block.contains(reservation.address)).count();
    json!({"first": block.first, "last": block.last, "pool": block.pool, "state": state, "used": used})
}

impl IpamContext<'_> {
    /// Prints a line for each range set, and for the reservations of each network that are in none.
    /// Takes no lock and opens no reservation, so it is fast on a busy node.
    ///
    /// # Errors
    /// Code 5 if a folder cannot be read.
    pub(super) fn list(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let mut rows: Vec<Value> = Vec::new();
        // JSON's numbers are not exact beyond 64 bits.
        let number = |n: u128| u64::try_from(n).unwrap_or(u64::MAX);
        for pool in self.list_pools()? {
            let mut outside = pool.store(&self.context.notes).count()? as u128;
            let first_row = rows.len();
            for usage in &pool.usage(&self.context.notes)? {
                let Usage { set, used, total, .. } = usage;
                outside = outside.saturating_sub(*used);
                let percent = number(used_percent(usage));
                rows.push(json!({"range": set, "used": number(*used), "total": number(*total), "percent": percent, "note": null}));
            }
            let note = pool.ranges.as_ref().err().map_or("outside of the configured ranges", String::as_str);
            if pool.ranges.is_err() || outside > 0 {
                rows.push(
                    json!({"range": null, "used": number(outside), "total": null, "percent": null, "note": note}),
                );
            }
            for row in rows.iter_mut().skip(first_row) {
                row["network"] = json!(pool.network);
                row["folder"] = json!(pool.folder().display().to_string());
            }
        }
        let is_nearly_full =
            |row: &Value| u128::from(row["percent"].as_u64().unwrap_or_default()) >= NEARLY_FULL_PERCENT;
        let mut report = Report::new(streams);
        let columns = "network range used total percent folder note";
        let colour = |row: &Value| is_nearly_full(row).then_some(Colour::Yellow);
        report.table(columns, &rows, colour, "No network has reservations or uses host-local.");
        report.write(streams, self.context.format(), &json!({"ranges": rows}))
    }

    /// Prints the reservations of a network, each with its age and whether it is in use. Below
    /// them, prints the unusual files: those that are named like a reservation, but are not regular
    /// files or are too long. Also prints the released addresses that cool down, and the blocks
    /// that cluster-local has for the network on this node.
    ///
    /// # Errors
    /// - As [`pool_of`](IpamContext::pool_of).
    /// - Code 5 if the store or the result cache cannot be read, or stdout cannot be written.
    /// - Code 11 if the lock is held for too long.
    /// - The kernel's error if the host's links cannot be listed.
    pub(super) fn show(&self, network: &str, streams: &mut Streams<'_>) -> Result<(), Error> {
        let pool = self.pool_of(network)?;
        let Listed { reservations, unusual, cooling, .. } = self.list_reservations(&pool)?;
        let folder = pool.folder().display().to_string();
        let ledger = Ledger::read(pool.store(&self.context.notes).sidecar());
        let blocks: Vec<Value> = ledger.entries().iter().map(|entry| block_row(entry, &reservations)).collect();
        let is_outside = |address| {
            let is_inside = |ranges: &RangeSets| ranges.sets().iter().any(|set| set.find(address).is_some());
            pool.ranges.as_ref().is_ok_and(|ranges| !is_inside(ranges))
        };
        let attachments = Attachments::read(self.context, Some(network))?;
        let row = |reservation: &Reservation| {
            let liveness = attachments.liveness_of(&pool.network, reservation);
            json!({
                "address": reservation.address, "containerID": reservation.id, "ifname": reservation.ifname,
                "ageSeconds": age_in_seconds(reservation.since), "state": liveness.word(), "reason": liveness.why(),
                "outsideOfRanges": is_outside(reservation.address),
            })
        };
        let colour = |row: &Value| match row["state"].as_str() {
            Some(OVER) => Some(Colour::Red),
            Some("unknown") => Some(Colour::Yellow),
            _ => None,
        };
        let mut report = Report::new(streams);
        let columns = "address containerID ifname ageSeconds state reason outsideOfRanges";
        let none = format!("No container has a reservation in {folder}.");
        let rows: Vec<Value> = reservations.iter().map(row).collect();
        report.table(columns, &rows, colour, &none);
        for (address, what) in &unusual {
            report.painted(Colour::Yellow, &format!("{address}: {what}"));
        }
        // Rounded up.
        let seconds_left = |left: &Duration| left.as_millis().div_ceil(1000);
        for (address, left) in &cooling {
            report.line(format_args!("{address}: cools down for another {} s (releaseCooldown)", seconds_left(left)));
        }
        if !blocks.is_empty() {
            report.table("first last pool state used", &blocks, |_| None, "");
        }
        let unusual: Vec<Value> = unusual.iter().map(|(ip, what)| json!({"address": ip, "what": what})).collect();
        let cooling = cooling.iter().map(|(ip, left)| json!({"address": ip, "secondsLeft": seconds_left(left)}));
        let cooling: Vec<Value> = cooling.collect();
        let document = json!({"reservations": rows, "unusual": unusual, "coolingDown": cooling, "blocks": blocks, "network": pool.network, "folder": folder});
        report.write(streams, self.context.format(), &document)
    }

    /// Prints the leases, or only those of the network that the arguments name.
    ///
    /// # Errors
    /// Code 5 if the networks' folder or a daemon's leases cannot be read.
    pub(super) fn dhcp(&self, args: &Dhcp, streams: &mut Streams<'_>) -> Result<(), Error> {
        let sockets = match &args.socket {
            Some(socket) => vec![socket.clone()],
            None => sockets(&self.context.networks()?),
        };
        let mut found: Vec<Lease> = Vec::new();
        for socket in sockets {
            found.extend(leases::list(&socket)?);
        }
        found.retain(|lease| args.network.as_ref().is_none_or(|network| *network == lease.network));
        let colour = |row: &Value| row["lastError"].is_string().then_some(Colour::Yellow);
        let columns =
            "network containerID ifname address server t1Seconds t2Seconds expirySeconds unconfirmed lastError";
        let mut report = Report::new(streams);
        let rows: Vec<Value> = found.iter().map(as_json).collect();
        report.table(columns, &rows, colour, "No lease is recorded.");
        report.write(streams, self.context.format(), &json!({"leases": rows}))
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
