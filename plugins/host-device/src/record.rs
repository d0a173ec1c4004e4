//! Records on the host which interface an attachment got. The record is written before the move,
//! and removed when the interface is on the host again.

use cni::skel::Call;
use cni::{AttachmentId, Result};
use cni_linux::{Link, Netlink, Netns};
use cni_plugin::interface::{BorrowedLink, Return, ensure_free};
use cni_plugin::record::AttachmentRecord;
use serde::{Deserialize, Serialize};

/// The interface of one attachment, as it was on the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    attachment: AttachmentId,
    /// The device and inode numbers of the container's namespace. CNI_NETNS may lead to another one
    /// later.
    netns: (u64, u64),
    /// The interface.
    pub(crate) device: BorrowedLink,
}

impl AttachmentRecord for Record {
    const FOLDER: &'static str = "/run/cni/host-device";

    fn attachment(&self) -> AttachmentId {
        self.attachment.clone()
    }
}

impl Record {
    /// Returns the record of an attachment that gets `device`, an interface of the host.
    pub(crate) fn new(attachment: &AttachmentId, netns: &Netns, device: &Link) -> Record {
        Record { attachment: attachment.clone(), netns: netns.id(), device: BorrowedLink::new(device) }
    }

    /// Returns the recorded interface in the container.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(crate) fn find_in(&self, container: &Netlink) -> Result<Option<Link>> {
        self.device.find_in(container, &self.attachment.ifname)
    }

    /// DEL: moves the recorded interface from `netns`, the container's namespace, back to the host,
    /// whatever its name, alias and hardware address are now. Leaves every other interface, with a
    /// note.
    ///
    /// # Errors
    /// - Code 102 if another interface of the host has the recorded name.
    /// - The errors of the kernel.
    pub(crate) fn give_back(&self, call: &Call<'_>, container: &Netlink, netns: &Netns) -> Result<()> {
        let name = &self.device.name;
        // After the container's end, its path may lead to another container's namespace.
        let found = if self.netns == netns.id() { self.find_in(container)? } else { None };
        if let Some(link) = &found {
            ensure_free(name)?;
            container.move_link(link.index, &Netns::current()?, name, "")?;
        }
        if let Some(left) = container.find_link(&call.ifname)? {
            call.notes.note(format_args!(
                "{} in {} was not moved to the host: it is not {name}, the interface that this attachment got",
                left.name,
                netns.path().display()
            ));
        }
        Ok(())
    }

    /// DEL and GC: completes the return of the interface to the host. Removes the record if the
    /// interface is back or does not exist any more.
    ///
    /// # Errors
    /// The errors of the kernel, and those of the record.
    pub(crate) fn complete(&self, call: &Call<'_>, host: &Netlink) -> Result<()> {
        match self.device.complete_return(host, &call.notes)? {
            Return::Pending => Ok(()),
            Return::Complete(_) | Return::Gone => self.purge(),
        }
    }
}
