//! Implements the move of ADD, and its undo.

use std::rc::Rc;

use cni::rollback::Rollback;
use cni::{Error, Result};
use cni_linux::{Link, Netlink};
use cni_plugin::interface::{AttachmentContext, name_taken};
use cni_plugin::record::AttachmentRecord as _;

use crate::HostDevice;
use crate::conf::Conf;
use crate::record::Record;

/// Moves `device` from the host into the container, where it is named CNI_IFNAME. Returns its index
/// in the container.
///
/// # Errors
/// - Code 102 if the container has an interface of that name.
/// - Code 100 if the kernel refuses the move.
pub(crate) fn move_to_container<'a>(
    context: &AttachmentContext<'a, Conf>,
    device: &Link,
    rollback: &mut Rollback<'a>,
) -> Result<u32> {
    let AttachmentContext { host, container, call, .. } = context;
    let (undo_host, undo_container, before) = (Rc::clone(host), container.clone(), device.clone());
    let record = Record::new(&context.attachment, container, &context.netns, device);
    let undo_record = record.clone();
    rollback.push(format!("move {} back to the host", device.name), move || {
        undo_move(&undo_host, &undo_container, &undo_record, &before)
    });
    // The record and the alias are written before the move, so that DEL recognises the interface
    // even if this process is killed.
    record.write()?;
    host.set_alias(device.index, &device.name)?;
    let moved = host.move_link(device.index, &context.netns, &call.ifname, &device.name);
    moved.map_err(|error| {
        if error.is_exists() {
            name_taken::<HostDevice>(&context.attachment)
        } else {
            Error::from(error).context("failed to move link")
        }
    })?;
    Ok(container.link(&call.ifname)?.index)
}

/// Undoes [`move_to_container`], which may have failed at any point: moves the interface back if it
/// is in the container, restores its name, alias and state, and removes the record. `before` is the
/// device before ADD.
fn undo_move(host: &Netlink, container: &Netlink, record: &Record, before: &Link) -> Result<()> {
    let alias = before.alias.as_deref().unwrap_or_default();
    if let Some(moved) = record.find_in(container)? {
        record.device.move_to_host(container, &moved, alias)?;
    } else if let Some(unmoved) = host.find_link(&before.name)?.filter(|link| record.device.fits(link, None)) {
        host.set_alias(unmoved.index, alias)?;
    }
    if before.up {
        host.set_up(host.link(&before.name)?.index)?;
    }
    record.purge()
}
