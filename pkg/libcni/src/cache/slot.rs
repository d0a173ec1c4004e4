//! Opens and locks the temporary files in which entries are written before they are renamed.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// The number of processes that can write at the same time. It only bounds the search for a free
/// temporary file, and is never reached in practice.
const MAX_WRITERS: u32 = 4096;

/// Whether a file has the name of a temporary file: `slot-0`, `slot-1`, …
pub(super) fn is_slot(path: &Path) -> bool {
    let number = path.file_name().and_then(|name| name.to_str()?.strip_prefix("slot-"));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Opens and locks a temporary file that no other process uses, and returns it with its path. The
/// names `slot-0`, `slot-1`, … are reused, so the file may have content.
pub(super) fn lock_slot(folder: &Path) -> io::Result<(File, PathBuf)> {
    for slot in 0..MAX_WRITERS {
        let path = folder.join(format!("slot-{slot}"));
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        if let Some(file) = lock(&path, &options)? {
            return Ok((file, path));
        }
    }
    Err(io::Error::other(format!("{MAX_WRITERS} other processes are writing to this folder; try again")))
}

/// Opens and locks a temporary file. Returns `None` if the caller must not use the file, because it
/// is not a regular file or belongs to another process, or if `options` do not create a file that
/// does not exist.
pub(super) fn lock(path: &Path, options: &OpenOptions) -> io::Result<Option<File>> {
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
