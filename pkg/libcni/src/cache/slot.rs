//! The temporary files in which entries are written before they are renamed. An ADD locks the file
//! of its attachment before it runs a plugin, so two ADDs of one attachment exclude each other.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use cni::hash::sha512_hex;
use cni::{Code, Error, Result};

use super::{Entry, ignore_not_found, wire};

/// The locked temporary file of an attachment. Dropping the value removes the file, unless the file
/// has become the attachment's entry.
#[derive(Debug)]
pub(crate) struct Slot {
    file: File,
    path: PathBuf,
    /// The path of the entry.
    target: PathBuf,
    is_renamed: bool,
}

impl Slot {
    /// Opens and locks the file at `path`, which a killed process may have left. Returns `None` if
    /// another process has locked it.
    pub(super) fn lock(path: &Path, target: PathBuf) -> io::Result<Option<Slot>> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let file = lock(path, &options)?;
        Ok(file.map(|file| Slot { file, path: path.to_owned(), target, is_renamed: false }))
    }

    /// Writes the entry, and renames the file to that of the entry.
    ///
    /// # Errors
    /// Code 5 if the entry cannot be written. Its file is unchanged.
    pub(crate) fn write(&mut self, entry: &Entry) -> Result<()> {
        let text = wire::encode(entry)?;
        let failed = |error| Error::caused(Code::IO, format_args!("failed to write {}", self.target.display()), error);
        self.file
            .set_len(0)
            .and_then(|()| self.file.write_all(text.as_bytes()))
            .and_then(|()| fs::rename(&self.path, &self.target))
            .map_err(failed)?;
        self.is_renamed = true;
        Ok(())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if !self.is_renamed {
            // The DEL of the attachment and GC remove a file that stays.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Returns the name of the temporary file for the cache file `name`: that name may already have the
/// largest possible length.
pub(super) fn slot_name(name: &str) -> String {
    format!("slot-{}", sha512_hex(&[name.as_bytes()], 20))
}

/// Whether a file has the name of a temporary file. Earlier builds used decimal numbers.
pub(super) fn is_slot(path: &Path) -> bool {
    let number = path.file_name().and_then(|name| name.to_str()?.strip_prefix("slot-"));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Removes a temporary file, unless another process has locked it.
pub(super) fn purge_unused(path: &Path) -> io::Result<()> {
    // The lock is held until the file is removed.
    match lock(path, OpenOptions::new().write(true))? {
        Some(_lock) => ignore_not_found(fs::remove_file(path)),
        None => Ok(()),
    }
}

/// Opens and locks a temporary file. Returns `None` if the caller must not use the file, because it
/// is not a regular file or belongs to another process, or if `options` do not create a file that
/// does not exist.
fn lock(path: &Path, options: &OpenOptions) -> io::Result<Option<File>> {
    // The type is checked first, because opening a FIFO waits for its other end. Only root can
    // write to the folder, so no FIFO replaces the file between this check and `open`.
    if fs::symlink_metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        return Ok(None);
    }
    let file = match options.open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match file.try_lock() {
        Ok(()) => {}
        // Another process is writing the file.
        Err(TryLockError::WouldBlock) => return Ok(None),
        Err(TryLockError::Error(error)) => return Err(error),
    }
    // Another process may have renamed the file between `open` and `try_lock`. The opened file is
    // then the file of an attachment, and must not be overwritten.
    let inode = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let opened = inode(file.metadata()?);
    let is_at_path = fs::symlink_metadata(path).is_ok_and(|metadata| inode(metadata) == opened);
    Ok(if is_at_path { Some(file) } else { None })
}
