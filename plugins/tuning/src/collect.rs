//! GC: backups of this network whose attachment is not valid any more.
//!
//! Nothing is restored: the request names no namespaces, and those of invalid attachments are gone
//! or going. What does not say that it is this network's stays, Go's files among it.

use cni::config::ValidAttachments;
use cni::skel::Call;
use cni::{Error, Result};

use crate::backup::{Attachment, Backup, Content, Folder};
use crate::conf::data_dir;

pub(crate) fn gc(call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
    let folder = Folder::new(data_dir(&call.conf)?, call.conf.name());
    let mut errors = Vec::new();
    for backup in folder.list()? {
        let record = match backup.read() {
            Ok(Some(Content::Record(record, _))) => record,
            // Written in part, and by its name of this network. Other unreadable files may be of
            // any network.
            Ok(Some(Content::Garbage(_))) if backup.is_temporary() => {
                purge(call, &backup, &mut errors);
                continue;
            }
            // An operator may want to know of what cannot even be read.
            Ok(_) => continue,
            Err(error) => {
                call.notes.note(format_args!("gc: left: {error}"));
                continue;
            }
        };
        let Some(Attachment { network, container_id, ifname, .. }) = &record.attachment else { continue };
        if network != call.conf.name() {
            continue;
        }
        // Under another name it is what a killed ADD was about to write; no ADD of this network
        // runs now.
        let in_place = backup.path() == folder.backup(container_id, ifname).path();
        if in_place && valid.contains(container_id, ifname) {
            continue;
        }
        purge(call, &backup, &mut errors);
    }
    Error::join(errors)
}

fn purge(call: &Call<'_>, backup: &Backup, errors: &mut Vec<Error>) {
    match backup.purge() {
        Ok(_) => call.notes.note(format_args!("gc: removed {}", backup.path().display())),
        Err(error) => errors.push(error),
    }
}
