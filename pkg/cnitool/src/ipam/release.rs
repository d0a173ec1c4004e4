//! release: removes one reservation by its address, or all reservations of one container.

use std::net::IpAddr;

use clap::{ArgGroup, Args};
use cni::{Code, Error};
use cni_ipam::{Listed, Reservation};
use serde_json::json;

use super::IpamContext;
use crate::Streams;
use crate::node::Liveness;
use crate::report::{Format, REFUSED, write, write_json};

/// The arguments of `release`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).args(["address", "container_id"]))]
pub(super) struct Release {
    /// The network's name
    network: String,
    /// The address
    address: Option<IpAddr>,
    /// All reservations of this container
    #[arg(long, value_name = "ID")]
    container_id: Option<String>,
    /// With --container-id: only of this interface
    #[arg(long, short, value_name = "NAME", requires = "container_id")]
    ifname: Option<String>,
    /// Even if it is in use: another container may then get its address
    #[arg(long)]
    force: bool,
}

impl IpamContext<'_, '_> {
    /// Releases the selected reservations and prints them.
    ///
    /// # Errors
    /// Code 3 if there are none; 103 if one is in use and `--force` is missing; those of the store.
    pub(super) fn release(&self, args: &Release, streams: &mut Streams<'_>) -> Result<(), Error> {
        let addresses = self.one(&args.network)?;
        let none_error = || {
            let msg = match (&args.address, &args.container_id) {
                (Some(address), _) => format!("{address} is not reserved"),
                (None, id) => format!("container {} has no reservation", id.as_deref().unwrap_or_default()),
            };
            let folder = self.store(&addresses).path().display().to_string();
            Error::new(Code::UNKNOWN_CONTAINER, msg).with_details(folder)
        };
        let Some(mut locked) = self.lock(&addresses)? else { return Err(none_error()) };
        let Listed { reservations: mut chosen, unread, .. } = locked.list()?;
        chosen.retain(|reservation| is_selected(args, reservation));
        // A file that cannot be read may be a reservation of the container.
        let unread = unread.into_iter().filter(|(address, _)| args.address.is_none_or(|wanted| wanted == *address));
        let unread = Error::join(unread.map(|(_, error)| error)).err();
        if chosen.is_empty() {
            return Err(unread.unwrap_or_else(none_error));
        }
        for checked in self.judge_all(&addresses.network, chosen.clone())? {
            if let (Liveness::InUse(why), false) = (&checked.liveness, args.force) {
                let msg = format!("{} is in use: {why}", checked.reservation);
                let details =
                    "detach the container with 'cnitool del' or its runtime, or release the address with --force";
                return Err(Error::new(REFUSED, msg).with_details(details));
            }
        }
        let removed = locked.release_chosen(&chosen)?;
        match self.shared.format() {
            Format::Json => {
                let row = |reservation: &Reservation| {
                    let Reservation { address, id, ifname, .. } = reservation;
                    json!({"address": address, "containerID": id, "ifname": ifname})
                };
                let rows: Vec<_> =
                    chosen.iter().filter(|reservation| removed.contains(&reservation.address)).map(row).collect();
                write_json(streams, &json!({"network": args.network, "removed": rows}))?;
            }
            Format::Text => {
                let released = chosen.iter().filter(|reservation| removed.contains(&reservation.address));
                let lines: String = released.map(|reservation| format!("released: {reservation}\n")).collect();
                write(streams, &lines)?;
            }
        }
        unread.map_or(Ok(()), Err)
    }
}

/// Whether the arguments select a reservation.
fn is_selected(args: &Release, reservation: &Reservation) -> bool {
    match (&args.address, &args.container_id) {
        (Some(address), _) => reservation.address == *address,
        (None, Some(id)) => {
            reservation.id == *id && args.ifname.as_ref().is_none_or(|name| reservation.ifname.as_ref() == Some(name))
        }
        (None, None) => false,
    }
}
