//! The rules of `macspoofchk`, when they are to go.

use cni::AttachmentId;
use cni::config::ValidAttachments;
use cni::skel::Call;
use cni::{Error, Result};
use cni_firewall::spoof::SpoofCheck;
use cni_linux::Netlink;

/// DEL. Also without `macspoofchk`: it may have been on at the time of the ADD. After the link,
/// although its wait then comes on top: up to its end the container must not get frames past the
/// rules.
pub(crate) fn purge(call: &Call<'_>, mark: &AttachmentId) -> Result<()> {
    match SpoofCheck::open().and_then(|mut spoof| spoof.purge(mark)) {
        Ok(Some(owner)) => call.notes.note(format_args!("spoof rules were not removed: they belong to {owner}")),
        Ok(None) => {}
        Err(error) if error.is_unsupported() => {}
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// GC. Rules are known by their tag; what Go made has none and is removed only when its interface
/// is gone for sure.
pub(crate) fn collect(network: &str, valid: &ValidAttachments) -> Result<()> {
    let mut spoof = match SpoofCheck::open() {
        Ok(spoof) => spoof,
        Err(error) if error.is_unsupported() => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let owners = spoof.list()?;
    if owners.is_empty() {
        return Ok(());
    }
    let host = Netlink::open()?;
    let names: Vec<String> = host.list_links()?.into_iter().map(|link| link.name).collect();
    let valid: Vec<(&str, &str)> = valid.iter().collect();
    let mut errors = Vec::new();
    for owner in owners {
        if owner.is_garbage(network, &valid, |name| names.iter().any(|link| link == name)) {
            errors.extend(spoof.purge_owner(&owner).err().map(Error::from));
        }
    }
    Error::join(errors)
}
