//! show: lists the reservations of a network.

use clap::Args;
use cni::Error;
use cni_ipam::Listed;
use serde_json::json;

use super::{age_in_seconds, age_text, escaped_owner};
use crate::call::{Format, Streams};
use crate::node::attachments::{CheckedReservation, Liveness};
use crate::node::ipam::IpamContext;
use crate::report::{Colour, paint, table, write, write_json};

/// The arguments of `show`.
#[derive(Debug, Args)]
pub(super) struct Show {
    /// The network's name
    network: String,
}

impl IpamContext<'_, '_> {
    /// Prints the reservations of a network, each with its age and whether it is in use. Below
    /// them, prints the unusual files: those that are named like a reservation, but are not regular
    /// files or are too long.
    ///
    /// # Errors
    /// - As [`pool_of`](IpamContext::pool_of).
    /// - Code 5 if the store or the result cache cannot be read, or stdout cannot be written.
    /// - Code 11 if the lock is held for too long.
    /// - The kernel's error if the host's links cannot be listed.
    pub(super) fn show(&self, args: &Show, streams: &mut Streams<'_>) -> Result<(), Error> {
        let pool = self.pool_of(&args.network)?;
        let Listed { reservations, unusual, .. } = self.list_reservations(&pool)?;
        let all_checked = self.check_all(&pool.network, reservations)?;
        let is_outside_ranges = |checked: &CheckedReservation| match &pool.ranges {
            Ok(ranges) => !ranges.sets().iter().any(|set| set.find(checked.reservation.address).is_some()),
            // The ranges are not known.
            Err(_) => false,
        };
        let folder = self.store(&pool).path().display().to_string();
        match self.shared.format() {
            Format::Json => {
                let row = |checked: &CheckedReservation| {
                    json!({
                        "address": checked.reservation.address,
                        "containerID": checked.reservation.id,
                        "ifname": checked.reservation.ifname,
                        "ageSeconds": age_in_seconds(checked.reservation.since),
                        "state": checked.liveness.word(),
                        "reason": checked.liveness.why(),
                        "outsideOfRanges": is_outside_ranges(checked),
                    })
                };
                let rows: Vec<_> = all_checked.iter().map(row).collect();
                let files: Vec<_> =
                    unusual.iter().map(|(address, what)| json!({"address": address, "what": what})).collect();
                write_json(
                    streams,
                    &json!({"network": pool.network, "folder": folder, "reservations": rows, "unusual": files}),
                )
            }
            Format::Text if all_checked.is_empty() && unusual.is_empty() => {
                write(streams, &format!("Nothing is reserved in {folder}.\n"))
            }
            Format::Text => {
                let mut lines = as_lines(&all_checked, is_outside_ranges, streams);
                lines.extend(
                    unusual.iter().map(|(address, what)| {
                        paint(streams.stdout_style, Colour::Yellow, &format!("{address}: {what}"))
                    }),
                );
                write(streams, &format!("{}\n", lines.join("\n")))
            }
        }
    }
}

/// Returns the reservations as the lines of a table. Reservations that are not in use are coloured.
fn as_lines(
    all_checked: &[CheckedReservation],
    is_outside_ranges: impl Fn(&CheckedReservation) -> bool,
    streams: &Streams<'_>,
) -> Vec<String> {
    let header = ["ADDRESS", "CONTAINER", "IFNAME", "AGE", "STATE", ""];
    let mut rows: Vec<Vec<String>> = vec![header.map(str::to_owned).to_vec()];
    for checked in all_checked {
        let (id, ifname) = escaped_owner(&checked.reservation);
        let mut why = checked.liveness.why().to_owned();
        if is_outside_ranges(checked) {
            why += "; outside the network's ranges";
        }
        let address = checked.reservation.address.to_string();
        let state = checked.liveness.word().to_owned();
        rows.push(vec![address, id, ifname, age_text(checked.reservation.since), state, why]);
    }
    let mut lines = table(&rows);
    for (line, checked) in lines.iter_mut().skip(1).zip(all_checked) {
        match checked.liveness {
            Liveness::InUse(_) => {}
            Liveness::ContainerGone(_) => *line = paint(streams.stdout_style, Colour::Red, line),
            Liveness::Unknown(_) => *line = paint(streams.stdout_style, Colour::Yellow, line),
        }
    }
    lines
}
