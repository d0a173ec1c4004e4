//! GC: removes the backups of this network whose attachment is not valid any more.
//!
//! No setting is restored: GC does not get the paths of namespaces, and the namespaces of invalid
//! attachments are gone or will be soon. Files that do not name this network stay, which includes
//! all files of the Go plugin.

use cni::config::ValidAttachments;
use cni::skel::Call;
use cni::{Error, Result};
use cni_plugin::folder::StateFile;

use crate::backup::{self, Attachment, Content, file_name};

/// Removes the backups of this network whose attachment is not in `valid`, and the network's
/// temporary files. A file that cannot be read is noted.
///
/// # Errors
/// Code 5 if the folder cannot be read, or if files cannot be removed. The remaining files are
/// still processed.
pub(crate) fn gc(call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
    let folder = backup::folder(&call.conf)?;
    let mut errors = Vec::new();
    for backup in backup::list(&folder)? {
        let record = match backup::read(&backup) {
            Ok(Some(Content::Record(record, _))) => record,
            // An incomplete temporary file. Its name shows that it belongs to this network.
            Ok(Some(Content::Garbage(_))) if backup.is_temporary() => {
                purge(call, &backup, &mut errors);
                continue;
            }
            // Any other file that cannot be decoded may belong to another network.
            Ok(Some(Content::Garbage(_)) | None) => continue,
            Err(error) => {
                call.notes.note(format_args!("gc: not removed: {error}"));
                continue;
            }
        };
        let Some(Attachment { network, container_id, ifname, .. }) = &record.attachment else { continue };
        if network != call.conf.name() {
            continue;
        }
        // DEL does not read files with other names, such as a complete temporary file that a killed
        // ADD has left. No ADD is writing the file: none of this network runs during a GC.
        let is_read_by_del = backup.path() == folder.file(&file_name(container_id, ifname)).path();
        if is_read_by_del && valid.contains(container_id, ifname) {
            continue;
        }
        purge(call, &backup, &mut errors);
    }
    Error::join(errors)
}

/// Removes a backup and prints a note. If removing fails, adds the error to `errors`.
fn purge(call: &Call<'_>, backup: &StateFile, errors: &mut Vec<Error>) {
    match backup.purge() {
        Ok(_) => call.notes.note(format_args!("gc: removed {}", backup.path().display())),
        Err(error) => errors.push(error),
    }
}
