//! Records on the host which interfaces an attachment bonds, and returns them. The record is
//! written before the first change, and removed when all interfaces are as they were.

use cni::skel::Call;
use cni::{AttachmentId, Error, Result};
use cni_linux::{Link, Netlink, Netns};
use cni_plugin::interface::{BorrowedLink, Return};
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
    /// The cookie of this namespace, since the kernel reuses inode numbers.
    #[serde(default)]
    netns_cookie: Option<u64>,
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
    /// Returns the record of an attachment that bonds `ports`. `container` is a connection to
    /// `netns`.
    pub(crate) fn new(
        attachment: &AttachmentId,
        container: &Netlink,
        netns: &Netns,
        place: Place,
        ports: &[Link],
    ) -> Record {
        Record {
            attachment: attachment.clone(),
            netns: netns.id(),
            netns_cookie: container.netns_cookie(),
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
        let has_cookie = self.netns_cookie.is_none_or(|cookie| container.netns_cookie() == Some(cookie));
        if self.netns != netns.id() || !has_cookie {
            return Ok(());
        }
        let mut errors = Vec::new();
        let is_anothers = |link: &Link| {
            let alias = link.alias.as_deref();
            alias.and_then(AttachmentId::parse).is_some() && !self.attachment.is_on(alias)
        };
        let bond = container.find_link(&self.attachment.ifname)?;
        let bond = bond.filter(|link| link.bond_mode.is_some() && !is_anothers(link));
        for port in &self.ports {
            errors.extend(self.release(port, container).err());
        }
        if let Some(bond) = bond {
            errors.extend(container.purge_link(bond.index).err().map(Error::from));
        }
        Error::join(errors)?;
        // The ports of the container are as they were: nothing is missing on the host.
        if self.in_container { self.purge() } else { Ok(()) }
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
        port.move_to_host(container, &link, &port.alias)
    }

    /// Restores the ports that are on the host, and removes them from the record, so that a later
    /// DEL does not reset them. Removes the record if no port is missing. The kernel moves a
    /// hardware interface to the host when the container's namespace ends.
    ///
    /// # Errors
    /// The errors of the kernel, and those of the record.
    pub(crate) fn complete(&self, call: &Call<'_>, host: &Netlink) -> Result<()> {
        if self.in_container {
            // After an error of `give_back`, the next DEL needs the record.
            let netns = call.netns.as_deref().and_then(|path| Netns::open(path).ok());
            return if netns.is_some_and(|netns| netns.id() == self.netns) { Ok(()) } else { self.purge() };
        }
        let (mut errors, mut missing) = (Vec::new(), Vec::new());
        for port in &self.ports {
            let is_done = port.complete_return(host, &call.notes).and_then(|returned| match returned {
                Return::Complete(index) => port.restore(host, index).map(|()| true),
                Return::Gone => Ok(true),
                Return::Pending => Ok(false),
            });
            if !matches!(is_done, Ok(true)) {
                missing.push(port.clone());
            }
            errors.extend(is_done.err());
        }
        let recorded = match missing.len() {
            0 => self.purge(),
            count if count == self.ports.len() => Ok(()),
            _ => Record { ports: missing, ..self.clone() }.write(),
        };
        errors.extend(recorded.err());
        Error::join(errors)
    }
}
