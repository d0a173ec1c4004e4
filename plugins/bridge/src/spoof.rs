//! Removes the rules of `macspoofchk`.

use cni::AttachmentId;
use cni::config::ValidAttachments;
use cni::skel::Call;
use cni::{Error, Result};
use cni_firewall::spoof::SpoofCheck;
use cni_linux::Netlink;

/// Removes the attachment's rules, for DEL. If the rules belong to another attachment, leaves them
/// and prints a note.
///
/// Called even without `macspoofchk`, because the configuration may have had the key at ADD. Called
/// after the link is deleted, so that the container's last frames are still checked.
pub(crate) fn purge(call: &Call<'_>, attachment: &AttachmentId) -> Result<()> {
    match SpoofCheck::open().and_then(|mut spoof| spoof.purge(attachment)) {
        Ok(Some(owner)) => call.notes.note(format_args!("spoof rules were not removed: they belong to {owner}")),
        Ok(None) => {}
        // A kernel without nf_tables has no rules.
        Err(error) if error.is_unsupported() => {}
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// Removes the rules of the network's attachments that are not in `valid`, for GC. Rules of the Go
/// plugin do not name their network: they are only removed if their interface does not exist.
///
/// # Errors
/// The errors of nf_tables, joined: a failure for one attachment does not stop the others.
pub(crate) fn collect(network: &str, valid: &ValidAttachments) -> Result<()> {
    let mut spoof = match SpoofCheck::open() {
        Ok(spoof) => spoof,
        // A kernel without nf_tables has no rules.
        Err(error) if error.is_unsupported() => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let owners = spoof.list()?;
    if owners.is_empty() {
        return Ok(());
    }
    let host = Netlink::open()?;
    let link_names: Vec<String> = host.list_links()?.into_iter().map(|link| link.name).collect();
    let valid: Vec<(&str, &str)> = valid.iter().collect();
    let mut errors = Vec::new();
    for owner in owners {
        if owner.is_garbage(network, &valid, |name| link_names.iter().any(|link_name| link_name == name)) {
            errors.extend(spoof.purge_owner(&owner).err().map(Error::from));
        }
    }
    Error::join(errors)
}
