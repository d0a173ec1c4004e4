//! Records about attachments, on the host, where a pod cannot write: what DEL and GC need to know
//! about an ADD and cannot learn from the kernel.
//!
//! A plugin has one folder, with one file for each attachment. The folder is on a tmpfs: a reboot
//! ends all namespaces, and with them all attachments.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use cni::config::ValidAttachments;
use cni::hash::sha512_hex;
use cni::skel::Call;
use cni::steps::Step;
use cni::{AttachmentId, Code, Error, Result};
use cni_linux::file::{create, replace};

use crate::folder::{MAX_SIZE, check_size};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

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
        let path = path(Self::FOLDER, attachment);
        match read(&path)? {
            None => Ok(None),
            Some(bytes) => match serde_json::from_slice(&bytes) {
                Ok(record) => Ok(Some(record)),
                Err(_) => purge(&path).map(|()| None),
            },
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
        let path = path(Self::FOLDER, &self.attachment());
        let write = || -> io::Result<()> {
            let json = serde_json::to_vec(self).map_err(io::Error::other)?;
            check_size(&json)?;
            let created = match create(&path, &json) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    ensure_folder(Path::new(Self::FOLDER))?;
                    create(&path, &json)
                }
                created => created,
            };
            match created {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => replace(&path, &temporary(&path), &json),
                created => created,
            }
        };
        let step = Step::begin();
        let written = write();
        step.end(format_args!("write {}", path.display()), &written);
        written.map_err(|error| failed("write", &path, error))
    }

    /// Removes the record, if it exists.
    ///
    /// # Errors
    /// Code 5 if it cannot be removed.
    fn purge(&self) -> Result<()> {
        let path = path(Self::FOLDER, &self.attachment());
        Error::join([purge(&temporary(&path)).err(), purge(&path).err()].into_iter().flatten())
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
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|error| failed("list", folder, error))?,
    };
    let is_record = |path: &PathBuf| path.extension().is_some_and(|end| end == "json" || end == "tmp");
    let paths = entries.flatten().map(|entry| entry.path()).filter(is_record);
    let decode = |path: PathBuf| serde_json::from_slice(&read(&path).ok()??).ok().map(|record| (path, record));
    let mut records: Vec<_> = paths.filter_map(decode).collect();
    records.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok(records)
}

/// Returns the path of an attachment's record.
fn path(folder: &str, attachment: &AttachmentId) -> PathBuf {
    let key = format!("{}/{}/{}", attachment.network, attachment.container_id, attachment.ifname);
    Path::new(folder).join(format!("{}.json", sha512_hex(&[key.as_bytes()], 40)))
}

/// Returns the path of the file that is renamed to replace the record at `path`.
fn temporary(path: &Path) -> PathBuf {
    path.with_extension("tmp")
}

/// Creates the folder. Its parent has mode 0755, because other plugins use it too.
fn ensure_folder(folder: &Path) -> io::Result<()> {
    if let Some(parent) = folder.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Removes a file, if it exists.
fn purge(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", path, error)),
        _ => Ok(()),
    }
}

/// Reads a file, or returns `None` if it does not exist. Follows no link.
fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    let read = || -> io::Result<Vec<u8>> {
        // Opening must not block if the file is a pipe.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        let mut bytes = Vec::with_capacity(1024);
        file.take(MAX_SIZE).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    match read() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("read", path, error)),
        Ok(bytes) => Ok(Some(bytes)),
    }
}

/// Returns the error for a failed action: `list`, `read`, `write` or `remove`.
fn failed(action: &str, path: &Path, error: io::Error) -> Error {
    Error::caused(Code::IO, format_args!("failed to {action} {}", path.display()), error)
}
