//! The files that the daemon creates and removes: its socket and its PID file. A file that another
//! program has put in their place is kept.

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

/// The longest content of a PID file in bytes.
const MAX_PID_LENGTH: u64 = 32;

/// A file that the daemon has created.
#[derive(Debug)]
pub(super) struct OwnFile {
    path: PathBuf,
    /// The device and inode numbers.
    id: (u64, u64),
}

impl OwnFile {
    /// Remembers the file at a path, which the daemon has just created.
    ///
    /// # Errors
    /// The file does not exist any more.
    pub(super) fn created(path: &Path) -> io::Result<OwnFile> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(OwnFile { path: path.to_owned(), id: (metadata.dev(), metadata.ino()) })
    }

    /// Removes the file, unless another one has replaced it. An error is ignored, because a later
    /// daemon replaces the file.
    pub(super) fn remove(&self) {
        if OwnFile::created(&self.path).is_ok_and(|found| found.id == self.id) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Writes the process ID to the PID file. Only a new or empty file is written, or one that has
/// nothing but a number, as an earlier daemon leaves it.
///
/// # Errors
/// The path exists and is something else, or the file cannot be written.
pub(super) fn write_pid(path: &Path) -> io::Result<OwnFile> {
    let write = || -> io::Result<OwnFile> {
        let mut file = open_pid_file(path)?;
        let mut text = String::new();
        let content = (&mut file).take(MAX_PID_LENGTH + 1).read_to_string(&mut text);
        let is_pid = content.is_ok_and(|length| length as u64 <= MAX_PID_LENGTH)
            && text.trim_end().bytes().all(|byte| byte.is_ascii_digit());
        if !is_pid {
            return Err(io::Error::other("it exists and contains more than a process ID; it is kept"));
        }
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(std::process::id().to_string().as_bytes())?;
        let metadata = file.metadata()?;
        Ok(OwnFile { path: path.to_owned(), id: (metadata.dev(), metadata.ino()) })
    };
    write().map_err(|error| io::Error::other(format!("failed to write {}: {error}", path.display())))
}

/// Opens the PID file, and creates it if it does not exist.
///
/// # Errors
/// The kind of anything else than a regular file, or the kernel's error.
fn open_pid_file(path: &Path) -> io::Result<File> {
    let refuse = |kind: FileType| match kind.is_file() {
        true => Ok(()),
        false => Err(io::Error::other(format!("it exists and is {}, not a regular file; it is kept", kind_name(kind)))),
    };
    // Opening a device can have effects, so the kind is checked before.
    if let Ok(metadata) = fs::symlink_metadata(path) {
        refuse(metadata.file_type())?;
    }
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let mut options = OpenOptions::new();
    let file =
        options.read(true).write(true).create(true).truncate(false).mode(0o644).custom_flags(flags).open(path)?;
    refuse(file.metadata()?.file_type())?;
    Ok(file)
}

/// Returns the name of a kind of file, with its article.
pub(super) fn kind_name(kind: FileType) -> &'static str {
    if kind.is_dir() {
        "a directory"
    } else if kind.is_symlink() {
        "a symbolic link"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_socket() {
        "a socket"
    } else if kind.is_file() {
        "a regular file"
    } else {
        "a device"
    }
}
