//! show: lists the reservations of a network.

use std::time::Duration;

use clap::Args;
use cni::Error;
use cni_ipam::{Listed, RangeSets};
use serde_json::{Value, json};

use super::age_in_seconds;
use crate::call::Streams;
use crate::node::attachments::CheckedReservation;
use crate::node::ipam::IpamContext;
use crate::report::{Colour, Report};

/// The arguments of `show`.
#[derive(Debug, Args)]
pub(super) struct Show {
    /// The network's name
    network: String,
}

impl IpamContext<'_> {
    /// Prints the reservations of a network, each with its age and whether it is in use. Below
    /// them, prints the unusual files: those that are named like a reservation, but are not regular
    /// files or are too long. Also prints the released addresses that cool down.
    ///
    /// # Errors
    /// - As [`pool_of`](IpamContext::pool_of).
    /// - Code 5 if the store or the result cache cannot be read, or stdout cannot be written.
    /// - Code 11 if the lock is held for too long.
    /// - The kernel's error if the host's links cannot be listed.
    pub(super) fn show(&self, args: &Show, streams: &mut Streams<'_>) -> Result<(), Error> {
        let pool = self.pool_of(&args.network)?;
        let Listed { reservations, unusual, cooling, .. } = self.list_reservations(&pool)?;
        let checked = self.check_all(&pool.network, reservations)?;
        let folder = pool.folder().display().to_string();
        let is_outside = |address| {
            let is_inside = |ranges: &RangeSets| ranges.sets().iter().any(|set| set.find(address).is_some());
            pool.ranges.as_ref().is_ok_and(|ranges| !is_inside(ranges))
        };
        let row = |CheckedReservation { reservation, liveness }: CheckedReservation| {
            json!({
                "address": reservation.address, "containerID": reservation.id, "ifname": reservation.ifname,
                "ageSeconds": age_in_seconds(reservation.since), "state": liveness.word(), "reason": liveness.why(),
                "outsideOfRanges": is_outside(reservation.address),
            })
        };
        let colour = |row: &Value| match row["state"].as_str() {
            Some("over") => Some(Colour::Red),
            Some("unknown") => Some(Colour::Yellow),
            _ => None,
        };
        let mut report = Report::new(streams);
        let columns = ["address", "containerID", "ifname", "ageSeconds", "state", "reason", "outsideOfRanges"];
        let none = format!("No container has a reservation in {folder}.");
        report.table("reservations", &columns, checked.into_iter().map(row).collect(), colour, &none);
        for (address, what) in &unusual {
            report.painted(Colour::Yellow, &format!("{address}: {what}"));
        }
        // Rounded up.
        let seconds_left = |left: &Duration| left.as_millis().div_ceil(1000);
        for (address, left) in &cooling {
            report.line(format_args!("{address}: cools down for another {} s (releaseCooldown)", seconds_left(left)));
        }
        let unusual: Vec<Value> = unusual.iter().map(|(ip, what)| json!({"address": ip, "what": what})).collect();
        let cooling = cooling.iter().map(|(ip, left)| json!({"address": ip, "secondsLeft": seconds_left(left)}));
        report.set("unusual", unusual);
        report.set("coolingDown", cooling.collect::<Vec<Value>>());
        report.set("network", &pool.network);
        report.set("folder", folder);
        report.write(streams, self.context.format())
    }
}
