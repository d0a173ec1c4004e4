//! Records on the host which interfaces an attachment bonds, and returns them. The record is
//! written before the first change, and removed when all interfaces are as they were.

use cni::skel::Call;
use cni::{AttachmentId, Error, Result};
use cni_linux::{Link, Netlink, Netns};
use cni_plugin::interface::{BorrowedLink, Return, ensure_free};
use cni_plugin::record::AttachmentRecord;
use serde::{Deserialize, Serialize};

use crate::conf::Place;

/// The ports of one attachment's bond, as they were before ADD.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Record {
    attachment: AttachmentId,
    /// The device and inode numbers of the container's namespace. CNI_NETNS may lead to another one
    /// later.
    netns: (u64, u64),
    /// Whether the ports are interfaces of the container.
    in_container: bool,
    ports: Vec<BorrowedLink>,
}

impl AttachmentRecord for Record {
    const FOLDER: &'static str = "/run/cni/bond";

    fn attachment(&self) -> AttachmentId {
        self.attachment.clone()
    }
}

impl Record {
    /// Returns the record of an attachment that bonds `ports`.
    pub(crate) fn new(attachment: &AttachmentId, netns: &Netns, place: Place, ports: &[Link]) -> Record {
        Record {
            attachment: attachment.clone(),
            netns: netns.id(),
            in_container: place == Place::Container,
            ports: ports.iter().map(BorrowedLink::new).collect(),
        }
    }

    /// Removes the bond from `netns`, the container's namespace, and returns its ports: to the host
    /// or, if they were in the container, to their former state. Every port is tried.
    ///
    /// # Errors
    /// - Code 102 if another interface of the host has the name of a port.
    /// - The errors of the kernel.
    pub(crate) fn give_back(&self, container: &Netlink, netns: &Netns) -> Result<()> {
        // After the container's end, its path may lead to another container's namespace.
        if self.netns != netns.id() {
            return Ok(());
        }
        let mut errors = Vec::new();
        let bond = container.find_link(&self.attachment.ifname)?.filter(|link| link.bond_mode.is_some());
        for port in &self.ports {
            errors.extend(self.release(port, container).err());
        }
        if let Some(bond) = bond {
            errors.extend(container.purge_link(bond.index).err().map(Error::from));
        }
        Error::join(errors)
    }

    /// Takes one port off the bond. Then moves it to the host or, if it was in the container,
    /// restores its state.
    fn release(&self, port: &BorrowedLink, container: &Netlink) -> Result<()> {
        let found = if self.in_container {
            container.find_link_by_index(port.index)?.filter(|link| port.fits(link, None))
        } else {
            port.find_in(container, &port.name)?
        };
        let Some(link) = found else { return Ok(()) };
        if link.master.is_some() {
            // The kernel restores the MAC and MTU, and sets the port down.
            container.unset_master(link.index)?;
        }
        if self.in_container {
            return port.restore(container, link.index);
        }
        ensure_free(&port.name)?;
        Ok(container.move_link(link.index, &Netns::current()?, &port.name, &port.alias)?)
    }

    /// Restores the ports that are on the host, and removes the record if none is missing. The
    /// kernel moves a hardware interface there when the container's namespace ends.
    ///
    /// # Errors
    /// The errors of the kernel, and those of the record.
    pub(crate) fn complete(&self, call: &Call<'_>, host: &Netlink) -> Result<()> {
        if self.in_container {
            return self.purge();
        }
        let (mut errors, mut is_pending) = (Vec::new(), false);
        for port in &self.ports {
            let returned = port.complete_return(host, &call.notes).and_then(|returned| match returned {
                Return::Complete(index) => port.restore(host, index),
                Return::Gone => Ok(()),
                Return::Pending => {
                    is_pending = true;
                    Ok(())
                }
            });
            errors.extend(returned.err());
        }
        if errors.is_empty() && !is_pending {
            return self.purge();
        }
        Error::join(errors)
    }
}
