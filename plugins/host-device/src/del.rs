//! Implements the steps of DEL that return the interface to the host.

use cni::skel::Call;
use cni::{AttachmentId, Code, Error, Result};
use cni_linux::{Link, Netlink, Netns};
use cni_plugin::interface::ensure_free;
use cni_plugin::record::AttachmentRecord as _;

use crate::record::Record;
use crate::{host_name, keys_of, prev_mac};

/// Moves an interface without a record back to the host, where it gets its former name and is
/// down. The configured name comes before the alias, which the pod can write.
///
/// # Errors
/// - Code 102 if the former name is unknown, or another interface of the host has it.
/// - The errors of the kernel.
pub(crate) fn remove(call: &Call<'_>, container: &Netlink, inner: &Link) -> Result<()> {
    let configured = keys_of(call).device;
    let name = host_name(inner).map(|alias| if configured.is_empty() { alias } else { &configured });
    let name = name.ok_or_else(|| {
        let why = match inner.alias.as_deref() {
            None | Some("") => "alias is not set".to_owned(),
            Some(alias) => format!("its alias {alias:?} is not an interface name"),
        };
        let msg = format!("failed to find original ifname for {:?} ({why})", inner.name);
        Error::new(Code::CONFLICT, msg).with_details("the interface was left in the container")
    })?;
    ensure_free(name)?;
    Ok(container.move_link(inner.index, &Netns::current()?, name, "")?)
}

/// Renames the interface if the kernel has moved it to the host, because the container's
/// namespace ended: gives it the recorded name or else the one in its alias, and removes the
/// alias. Without a record, leaves an interface with a name that the kernel does not give it then:
/// its ADD has failed, and the alias is the administrator's.
pub(crate) fn clean(call: &Call<'_>, attachment: &AttachmentId) -> Result<()> {
    let (keys, host) = (keys_of(call), Netlink::open()?);
    if let Some(record) = Record::find(attachment)? {
        return record.complete(call, &host);
    }
    // Usually the device is already on the host again, and the list of all links is not needed.
    if host.find_link(&keys.device)?.is_some_and(|link| link.alias.is_none()) {
        return Ok(());
    }
    // An unreadable `prevResult` was already noted when DEL began.
    let prev = call.conf.prev_result().ok().flatten();
    let prev_mac = prev_mac(call, prev.as_ref());
    for link in host.list_links()? {
        let Some(alias) = host_name(&link) else { continue };
        let name = if keys.device.is_empty() { alias } else { &keys.device };
        // The kernel names it `devN` if the host has another interface CNI_IFNAME.
        let number = link.name.strip_prefix("dev").unwrap_or_default();
        // The kernel sets it down when it moves it.
        let is_fallen_back = !link.up && (link.name == call.ifname || number.parse::<u32>().is_ok());
        if !(is_fallen_back || link.name == name) || !keys.identifies(&link, prev_mac) {
            continue;
        }
        if link.name != name {
            host.set_name(link.index, name)?;
        }
        host.set_alias(link.index, "")?;
    }
    Ok(())
}
