//! release: one reservation by its address, or all of one container, by an operator who knows
//! better.

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
    /// All that this container has
    #[arg(long, value_name = "ID")]
    container_id: Option<String>,
    /// With --container-id: this interface alone
    #[arg(long, short, value_name = "NAME", requires = "container_id")]
    ifname: Option<String>,
    /// Even if it is in use: its address may then be given to another container
    #[arg(long)]
    force: bool,
}

impl IpamContext<'_, '_> {
    pub(super) fn release(&self, args: &Release, streams: &mut Streams<'_>) -> Result<(), Error> {
        let addresses = self.one(&args.network)?;
        let nothing = || {
            let msg = match (&args.address, &args.container_id) {
                (Some(address), _) => format!("{address} is not reserved"),
                (None, id) => format!("container {} has no reservation", id.as_deref().unwrap_or_default()),
            };
            let folder = self.store(&addresses).path().display().to_string();
            Error::new(Code::UNKNOWN_CONTAINER, msg).with_details(folder)
        };
        let Some(mut locked) = self.lock(&addresses)? else { return Err(nothing()) };
        let Listed { reservations: mut chosen, unread, .. } = locked.list()?;
        chosen.retain(|held| is_meant(args, held));
        // A reservation that cannot be read may be the container's.
        let unread = unread.into_iter().filter(|(address, _)| args.address.is_none_or(|meant| meant == *address));
        let unread = Error::join(unread.map(|(_, error)| error)).err();
        if chosen.is_empty() {
            return Err(unread.unwrap_or_else(nothing));
        }
        for held in self.judged(&addresses.network, chosen.clone())? {
            if let (Liveness::InUse(why), false) = (&held.life, args.force) {
                let msg = format!("{} is in use: {why}", held.reservation);
                let details =
                    "'cnitool del' or the runtime detaches it properly; --force releases it although it is in use";
                return Err(Error::new(REFUSED, msg).with_details(details));
            }
        }
        let removed = locked.release_chosen(&chosen)?;
        match self.shared.format() {
            Format::Json => {
                let row = |held: &Reservation| json!({"address": held.address, "containerID": held.id, "ifname": held.ifname});
                let rows: Vec<_> = chosen.iter().filter(|held| removed.contains(&held.address)).map(row).collect();
                write_json(streams, &json!({"network": args.network, "removed": rows}))?;
            }
            Format::Text => {
                let lines = chosen.iter().filter(|held| removed.contains(&held.address));
                write(streams, &lines.map(|held| format!("released: {held}\n")).collect::<String>())?;
            }
        }
        unread.map_or(Ok(()), Err)
    }
}

fn is_meant(args: &Release, held: &Reservation) -> bool {
    match (&args.address, &args.container_id) {
        (Some(address), _) => held.address == *address,
        (None, Some(id)) => {
            held.id == *id && args.ifname.as_ref().is_none_or(|name| held.ifname.as_ref() == Some(name))
        }
        (None, None) => false,
    }
}
