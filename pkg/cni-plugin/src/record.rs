//! Records about attachments, on the host, where a pod cannot write: what DEL and GC need to know
//! about an ADD and cannot learn from the kernel.
//!
//! A plugin has one folder, with one file for each attachment. The folder is on a tmpfs: a reboot
//! ends all namespaces, and with them all attachments.

use std::path::{Path, PathBuf};

use cni::config::ValidAttachments;
use cni::hash::sha512_hex;
use cni::skel::Call;
use cni::{AttachmentId, Code, Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::folder::{Folder, StateFile};

/// The record of one attachment, which is stored as JSON.
pub trait AttachmentRecord: Serialize + DeserializeOwned {
    /// The folder of the plugin's records, in `/run/cni`.
    const FOLDER: &'static str;

    /// Returns the attachment.
    fn attachment(&self) -> AttachmentId;

    /// Returns the record of an attachment, or `None` if there is none. Removes an incomplete
    /// record: its ADD was killed before it changed anything.
    ///
    /// # Errors
    /// Code 5 if it cannot be read.
    fn find(attachment: &AttachmentId) -> Result<Option<Self>> {
        let file = file(Self::FOLDER, attachment);
        match file.read()?.map(|content| content.decode()) {
            None => Ok(None),
            Some(Ok(record)) => Ok(Some(record)),
            Some(Err(_)) => file.purge().map(|_| None),
        }
    }

    /// Returns the records of the call's network whose attachments are not in `valid`. Leaves out
    /// those that cannot be read.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    fn list_stale(call: &Call<'_>, valid: &ValidAttachments) -> Result<Vec<Self>> {
        Ok(Self::list()?
            .into_iter()
            .filter(|record| {
                let attachment = record.attachment();
                attachment.network == call.conf.name() && !valid.contains(&attachment.container_id, &attachment.ifname)
            })
            .collect())
    }

    /// Returns the records of all attachments. Leaves out those that cannot be read.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    fn list() -> Result<Vec<Self>> {
        Ok(list_as::<Self>(Path::new(Self::FOLDER))?.into_iter().map(|(_, record)| record).collect())
    }

    /// Creates or replaces the record. A reader sees the old record or the new one.
    ///
    /// # Errors
    /// Code 5 if it cannot be written, or is too long to be read.
    fn write(&self) -> Result<()> {
        let json =
            serde_json::to_vec(self).map_err(|error| Error::caused(Code::IO, "failed to encode a record", error))?;
        file(Self::FOLDER, &self.attachment()).write(&json)
    }

    /// Removes the record, if it exists.
    ///
    /// # Errors
    /// Code 5 if it cannot be removed.
    fn purge(&self) -> Result<()> {
        file(Self::FOLDER, &self.attachment()).purge().map(drop)
    }
}

/// Returns the path and the attachment of each record of any plugin in `folder`. Leaves out those
/// that cannot be read.
///
/// # Errors
/// Code 5 if the folder cannot be read.
pub fn list(folder: &Path) -> Result<Vec<(PathBuf, AttachmentId)>> {
    #[derive(Deserialize)]
    struct Owner {
        attachment: AttachmentId,
    }
    Ok(list_as::<Owner>(folder)?.into_iter().map(|(path, record)| (path, record.attachment)).collect())
}

/// Returns the files of a folder that can be decoded, each with its path, sorted by path. A killed
/// writer can leave only its temporary file, so temporary files are returned too.
fn list_as<T: DeserializeOwned>(folder: &Path) -> Result<Vec<(PathBuf, T)>> {
    let files = Folder::of_records(folder.to_owned()).list()?.into_iter();
    let records = files.filter(|file| file.path().extension().is_some_and(|end| end == "json" || end == "tmp"));
    let decode = |file: &StateFile| file.read().ok()??.decode().ok();
    Ok(records.filter_map(|file| decode(&file).map(|record| (file.path().to_owned(), record))).collect())
}

/// Returns the file of an attachment's record.
fn file(folder: &str, attachment: &AttachmentId) -> StateFile {
    let key = format!("{}/{}/{}", attachment.network, attachment.container_id, attachment.ifname);
    Folder::of_records(folder.into()).file(&record_name(&key))
}

/// Returns the name of the record with this key.
pub fn record_name(key: &str) -> String {
    format!("{}.json", sha512_hex(&[key.as_bytes()], 40))
}
