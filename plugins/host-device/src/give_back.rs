//! Gives the interface of an attachment back to the host, by the [`Record`] of its ADD.

use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_linux::{Link, Netlink, Netns};
use cni_plugin::record::AttachmentRecord as _;

use crate::record::Record;

/// DEL: moves the recorded interface from `netns`, the container's namespace, back to the host,
/// whatever its name, alias and hardware address are now. Leaves every other interface, with a
/// note.
///
/// # Errors
/// - Code 102 if another interface of the host has the recorded name.
/// - The errors of the kernel.
pub(crate) fn from_container(call: &Call<'_>, record: &Record, container: &Netlink, netns: &Netns) -> Result<()> {
    // After the container's end, its path may lead to another container's namespace.
    let found = if record.is_of(netns) { find_in(record, container)? } else { None };
    if let Some(link) = &found {
        ensure_free(&record.name)?;
        container.move_link(link.index, &Netns::current()?, &record.name, "")?;
    }
    if let Some(left) = container.find_link(&call.ifname)? {
        call.notes.note(format_args!(
            "{} in {} was not moved to the host: it is not {}, the interface that this attachment got",
            left.name,
            netns.path().display(),
            record.name
        ));
    }
    Ok(())
}

/// Returns the recorded interface in the container.
///
/// # Errors
/// Those of the kernel.
pub(crate) fn find_in(record: &Record, container: &Netlink) -> Result<Option<Link>> {
    let links = container.list_links()?;
    // Asked after the interfaces, because the answer about a veth assigns the ID.
    let host_id = match record.host_peer_or_lower() {
        Some(_) => container.find_netns_id(&Netns::current()?)?,
        None => None,
    };
    // Without an ID, no interface of the container has its other end on the host.
    if record.host_peer_or_lower().is_some() && host_id.is_none() {
        return Ok(None);
    }
    Ok(record.find_in(links, host_id))
}

/// DEL and GC: completes the return of the recorded interface to the host. The kernel moves a
/// hardware interface there, under its name in the container, when the container's namespace ends.
/// Removes the record if the interface is back or does not exist any more.
///
/// # Errors
/// The errors of the kernel, and those of the record.
pub(crate) fn complete(call: &Call<'_>, record: &Record, host: &Netlink) -> Result<()> {
    let has_alias = |link: &Link| link.alias.as_deref() == Some(&*record.name);
    let is_recorded = |link: &Link| record.fits(link, None) && (record.is_proof() || has_alias(link));
    // Usually the interface is already on the host again, and the list of all links is not needed.
    if let Some(named) = host.find_link(&record.name)?
        && record.fits(&named, None)
    {
        if has_alias(&named) {
            host.set_alias(named.index, "")?;
        }
        return record.purge();
    }
    let mut fitting = host.list_links()?;
    fitting.retain(is_recorded);
    match &*fitting {
        [] => match record.host_peer() {
            // The interface exists as long as its other end does.
            Some(peer) if host.find_link_by_index(peer)?.is_some_and(|link| link.is_veth()) => Ok(()),
            // The kernel may still move it to the host.
            None if record.is_hardware() => Ok(()),
            _ => record.purge(),
        },
        // The pod may have removed the alias. An interface that is up may be in use under its new
        // name.
        [link] if has_alias(link) || !link.up => {
            if link.up {
                host.set_down(link.index)?;
            }
            host.set_name(link.index, &record.name)?;
            host.set_alias(link.index, "")?;
            record.purge()
        }
        several => {
            let names: Vec<&str> = several.iter().map(|link| link.name.as_str()).collect();
            call.notes.note(format_args!(
                "{} was not renamed to {}: it is in use, or several interfaces fit",
                names.join(", "),
                record.name
            ));
            Ok(())
        }
    }
}

/// Checks that the host has no interface `name`: the kernel would first move the interface and then
/// refuse the name.
///
/// # Errors
/// Code 102, with the text of Go's plugin, if it has one.
pub(crate) fn ensure_free(name: &str) -> Result<()> {
    if Netlink::open()?.find_link(name)?.is_none() {
        return Ok(());
    }
    let details = format!("the host has another interface {name}: rename or remove it, and repeat DEL");
    Err(Error::new(Code::CONFLICT, format!("failed to move {name:?} to hostNS: file exists")).with_details(details))
}
