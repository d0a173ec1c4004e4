//! show: lists the reservations of a network.

use std::net::IpAddr;
use std::time::Duration;

use clap::Args;
use cni::Error;
use cni_ipam::{Listed, RangeSets};
use serde_json::{Value, json};

use super::{age_in_seconds, age_text, escaped_owner};
use crate::call::Streams;
use crate::node::attachments::{CheckedReservation, Liveness};
use crate::node::ipam::{IpamContext, NetworkPool};
use crate::report::{Colour, Row, paint, table, write_report};

/// The arguments of `show`.
#[derive(Debug, Args)]
pub(super) struct Show {
    /// The network's name
    network: String,
}

impl IpamContext<'_, '_> {
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
        let rows: Vec<ShownReservation> =
            checked.into_iter().map(|checked| ShownReservation::new(checked, &pool)).collect();
        let json = || {
            let file = |(address, what): &(IpAddr, String)| json!({"address": address, "what": what});
            let reservations: Vec<Value> = rows.iter().map(ShownReservation::as_json).collect();
            let unusual: Vec<Value> = unusual.iter().map(file).collect();
            let cooling_down =
                cooling.iter().map(|(address, left)| json!({"address": address, "secondsLeft": whole_seconds(*left)}));
            json!({
                "network": pool.network,
                "folder": folder,
                "reservations": reservations,
                "unusual": unusual,
                "coolingDown": cooling_down.collect::<Vec<Value>>(),
            })
        };
        let text = |style| {
            if rows.is_empty() && unusual.is_empty() && cooling.is_empty() {
                return format!("Nothing is reserved in {folder}.\n");
            }
            let header = ["ADDRESS", "CONTAINER", "IFNAME", "AGE", "STATE", ""];
            let table = table(&header, rows.iter().map(ShownReservation::as_row).collect(), style);
            let unusual = unusual
                .iter()
                .map(|(address, what)| paint(style, Colour::Yellow, &format!("{address}: {what}")) + "\n");
            let cooling = cooling.iter().map(|(address, left)| {
                format!("{address}: cools down for another {} s (releaseCooldown)\n", whole_seconds(*left))
            });
            table + &unusual.collect::<String>() + &cooling.collect::<String>()
        };
        write_report(streams, self.shared.format(), json, text)
    }
}

/// Returns the seconds of a duration, rounded up.
fn whole_seconds(duration: Duration) -> u128 {
    duration.as_millis().div_ceil(1000)
}

/// A reservation as the verb shows it.
struct ShownReservation {
    checked: CheckedReservation,
    /// Whether its address is in none of the network's ranges, if these are known.
    is_outside_ranges: bool,
}

impl ShownReservation {
    /// Compares a reservation with the ranges of its pool.
    fn new(checked: CheckedReservation, pool: &NetworkPool) -> ShownReservation {
        let address = checked.reservation.address;
        let is_inside = |ranges: &RangeSets| ranges.sets().iter().any(|set| set.find(address).is_some());
        ShownReservation { checked, is_outside_ranges: pool.ranges.as_ref().is_ok_and(|ranges| !is_inside(ranges)) }
    }

    /// Returns the reservation for `--json`.
    fn as_json(&self) -> Value {
        let CheckedReservation { reservation, liveness } = &self.checked;
        json!({
            "address": reservation.address,
            "containerID": reservation.id,
            "ifname": reservation.ifname,
            "ageSeconds": age_in_seconds(reservation.since),
            "state": liveness.word(),
            "reason": liveness.why(),
            "outsideOfRanges": self.is_outside_ranges,
        })
    }

    /// Returns the row of the table. Reservations that are not in use are coloured.
    fn as_row(&self) -> Row {
        let CheckedReservation { reservation, liveness } = &self.checked;
        let (id, ifname) = escaped_owner(reservation);
        let mut why = liveness.why().to_owned();
        if self.is_outside_ranges {
            why += "; outside the network's ranges";
        }
        let (address, age) = (reservation.address.to_string(), age_text(reservation.since));
        let colour = match liveness {
            Liveness::InUse(_) => None,
            Liveness::ContainerGone(_) => Some(Colour::Red),
            Liveness::Unknown(_) => Some(Colour::Yellow),
        };
        (vec![address, id, ifname, age, liveness.word().to_owned(), why], colour)
    }
}
