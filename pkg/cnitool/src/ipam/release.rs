//! release: removes one reservation by its address, or all reservations of one container.

use std::net::IpAddr;

use clap::{ArgGroup, Args};
use cni::{Code, Error};
use cni_ipam::{Listed, Reservation};

use super::{Decision, write_removal};
use crate::call::Streams;
use crate::node::attachments::Liveness;
use crate::node::ipam::IpamContext;
use crate::report::REFUSED;

/// The arguments of `release`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).args(["address", "container_id"]))]
pub(super) struct Release {
    /// The network's name
    network: String,
    /// The address to release
    address: Option<IpAddr>,
    /// All reservations of this container
    #[arg(long, value_name = "ID")]
    container_id: Option<String>,
    /// With --container-id: only of this interface
    #[arg(long, short, value_name = "NAME", requires = "container_id")]
    ifname: Option<String>,
    /// Release even an address in use, which another container may then get
    #[arg(long)]
    force: bool,
}

impl IpamContext<'_> {
    /// Releases the selected reservations and prints them.
    ///
    /// # Errors
    /// - As [`pool_of`](IpamContext::pool_of).
    /// - Code 3 if no reservation is selected.
    /// - Code 103 without `--force` if a selected reservation is in use. Nothing is released then.
    /// - Code 5 if the store, the result cache or a reservation cannot be read, a reservation
    ///   cannot be removed, or stdout cannot be written. An unreadable reservation does not prevent
    ///   the release of the others.
    /// - Code 11 if the lock is held for too long.
    /// - The kernel's error if the host's links cannot be listed.
    pub(super) fn release(&self, args: &Release, streams: &mut Streams<'_>) -> Result<(), Error> {
        let pool = self.pool_of(&args.network)?;
        let not_found_error = || {
            let msg = match (&args.address, &args.container_id) {
                (Some(address), _) => format!("{address} is not reserved"),
                (None, id) => format!("container {} has no reservation", id.as_deref().unwrap_or_default()),
            };
            let folder = pool.folder().display().to_string();
            Error::new(Code::UNKNOWN_CONTAINER, msg).with_details(folder)
        };
        let Some(mut locked) = self.lock(&pool)? else { return Err(not_found_error()) };
        let Listed { reservations: mut selected, unread, .. } = locked.list()?;
        selected.retain(|reservation| is_selected(args, reservation));
        // Without an address, each unreadable file may be a reservation of the container.
        let unread = unread.into_iter().filter(|(address, _)| args.address.is_none_or(|wanted| wanted == *address));
        let read_outcome = Error::join(unread.map(|(_, error)| error));
        if selected.is_empty() {
            read_outcome?;
            return Err(not_found_error());
        }
        for checked in self.check_all(&pool.network, selected.clone())? {
            if let Liveness::InUse(why) = &checked.liveness
                && !args.force
            {
                let msg = format!("{} and is in use: {why}", checked.reservation);
                let details =
                    "detach the container with 'cnitool del' or its runtime, or release the address with --force";
                return Err(Error::new(REFUSED, msg).with_details(details));
            }
        }
        // A reservation that has changed in the meantime is not released.
        let released_addresses = locked.release_chosen(&selected)?;
        let mut released = selected;
        released.retain(|reservation| released_addresses.contains(&reservation.address));
        let released: Vec<Decision> =
            released.iter().map(|reservation| Decision::new(reservation, "selected")).collect();
        write_removal(&args.network, true, [&released, &[]], self.context.format(), streams)?;
        read_outcome
    }
}

/// Whether the arguments select a reservation.
fn is_selected(args: &Release, reservation: &Reservation) -> bool {
    match (&args.address, &args.container_id) {
        (Some(address), _) => reservation.address == *address,
        (None, Some(id)) => {
            reservation.id == *id && args.ifname.as_ref().is_none_or(|name| reservation.ifname.as_ref() == Some(name))
        }
        // clap requires one of the two.
        (None, None) => false,
    }
}
