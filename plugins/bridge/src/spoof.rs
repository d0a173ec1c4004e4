//! Removes the rules of `macspoofchk`.

use cni::AttachmentId;
use cni::Result;
use cni::config::ValidAttachments;
use cni::skel::Call;
use cni_firewall::spoof::SpoofCheck;

/// Removes the attachment's rules, for DEL. If the rules belong to another attachment, leaves them
/// and prints a note.
///
/// Called even without `macspoofchk`, because the configuration may have had the key at ADD. Called
/// after the link is deleted, so that the container's last frames are still checked.
pub(crate) fn purge(call: &Call<'_>, attachment: &AttachmentId) -> Result<()> {
    if let Some(owner) = SpoofCheck::open()?.purge(attachment)? {
        call.notes.note(format_args!("spoof rules were not removed: they belong to {owner}"));
    }
    Ok(())
}

/// Removes the rules of the network's attachments that are not in `valid`, for GC.
pub(crate) fn gc(network: &str, valid: &ValidAttachments) -> Result<()> {
    Ok(SpoofCheck::open()?.gc(network, valid)?)
}
