//! Records on the host which interface an attachment got. The record is written before the move,
//! and removed when the interface is on the host again.

use cni::skel::Call;
use cni::{AttachmentId, Result};
use cni_linux::{Link, Netlink, Netns};
use cni_plugin::interface::{BorrowedLink, Return};
use cni_plugin::record::AttachmentRecord;
use serde::{Deserialize, Serialize};

/// The interface of one attachment, as it was on the host.
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
    /// `container` is a connection to `netns`.
    pub(crate) fn new(attachment: &AttachmentId, container: &Netlink, netns: &Netns, device: &Link) -> Record {
        Record {
            attachment: attachment.clone(),
            netns: netns.id(),
            netns_cookie: container.netns_cookie(),
            device: BorrowedLink::new(device),
        }
    }

    /// Whether `netns`, with the connection `container`, is the recorded namespace.
    fn is_of(&self, container: &Netlink, netns: &Netns) -> bool {
        let has_cookie = self.netns_cookie.is_none_or(|cookie| container.netns_cookie() == Some(cookie));
        self.netns == netns.id() && has_cookie
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
        let found = if self.is_of(container, netns) { self.find_in(container)? } else { None };
        if let Some(link) = &found {
            self.device.move_to_host(container, link, "")?;
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

/// DEL without a record: whether CNI_IFNAME in `netns` is the interface that another attachment has
/// got. Then it is left there, with a note.
pub(crate) fn keep_for_another(call: &Call<'_>, container: &Netlink, netns: &Netns) -> Result<bool> {
    let Some(inner) = container.find_link(&call.ifname)? else { return Ok(false) };
    for record in Record::list()?.iter().filter(|record| record.is_of(container, netns)) {
        if record.find_in(container)?.is_some_and(|link| link.index == inner.index) {
            let AttachmentId { network, ifname, .. } = &record.attachment;
            call.notes.note(format_args!(
                "{} in {} was not moved to the host: the network {network} has got it as {ifname}",
                inner.name,
                netns.path().display()
            ));
            return Ok(true);
        }
    }
    Ok(false)
}

/// ADD: completes the return of the interfaces that the kernel has moved to the host and whose DEL
/// is missing. Otherwise ADD could record the name that such an interface had in the container.
/// Returns whether there was one.
pub(crate) fn complete_fallen_back(call: &Call<'_>, host: &Netlink) -> Result<bool> {
    let records = Record::list()?;
    if records.is_empty() {
        return Ok(false);
    }
    let links = host.list_links()?;
    let fallen_back: Vec<&Record> = records.iter().filter(|record| record.device.has_fallen_back(&links)).collect();
    for record in &fallen_back {
        record.complete(call, host)?;
    }
    Ok(!fallen_back.is_empty())
}
