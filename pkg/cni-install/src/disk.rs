//! Reads, writes and compares files.
//!
//! Existing files are replaced, never written to, because another process may have them open. When
//! a function returns, the content that it wrote is on the disk. The name of the file is on the
//! disk after a [`sync`] of the folder.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink};
use std::path::Path;

use nix::errno::Errno;

/// Makes `to` a hard link of `from` or, if that fails, a copy with the same mode and modification
/// time: some file systems have no hard links, and `fs.protected_hardlinks` may forbid one. The
/// copy of a symbolic link is a link with the same target.
pub(crate) fn link_or_copy(from: &Path, to: &Path) -> io::Result<()> {
    if fs::hard_link(from, to).is_ok() {
        return Ok(());
    }
    let metadata = fs::symlink_metadata(from)?;
    if metadata.is_symlink() {
        return symlink(fs::read_link(from)?, to);
    }
    if !metadata.is_file() {
        // Opening a FIFO would wait for its writer.
        return Err(io::Error::other("it is not a regular file, and the file system refuses a hard link of it"));
    }
    // `copy` also copies the mode. The owner of a file may set its times without being able to
    // write to it.
    fs::copy(from, to)?;
    let copy = File::open(to)?;
    copy.set_modified(metadata.modified()?)?;
    copy.sync_all()
}

/// Whether both paths are hard links of one file, regular files with equal content and mode, or
/// symbolic links with the same target. False if `installed` does not exist.
pub(crate) fn is_same(installed: &Path, kept: &Path) -> io::Result<bool> {
    let kept_metadata = fs::symlink_metadata(kept)?;
    let Some(installed_metadata) = find_metadata(installed)? else { return Ok(false) };
    if (kept_metadata.dev(), kept_metadata.ino()) == (installed_metadata.dev(), installed_metadata.ino()) {
        return Ok(true);
    }
    if kept_metadata.is_symlink() && installed_metadata.is_symlink() {
        return Ok(fs::read_link(kept)? == fs::read_link(installed)?);
    }
    let may_be_equal =
        kept_metadata.is_file() && installed_metadata.is_file() && kept_metadata.len() == installed_metadata.len();
    Ok(may_be_equal && kept_metadata.mode() == installed_metadata.mode() && read(kept)? == read(installed)?)
}

/// Returns the metadata of the file at `path`, or of the symbolic link itself if it is one. `None`
/// if nothing exists there.
pub(crate) fn find_metadata(path: &Path) -> io::Result<Option<fs::Metadata>> {
    match fs::symlink_metadata(path) {
        Ok(metadata) => Ok(Some(metadata)),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(cause),
    }
}

/// Reads a regular file. Fails for every other kind of file: reading a FIFO, for example, might
/// never end.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    match read_with_mode(path)? {
        Some((_mode, content)) => Ok(content),
        None => Err(io::Error::other("it is not a regular file")),
    }
}

/// Reads a regular file as text. `None` if nothing exists at `path`.
pub(crate) fn read_text(path: &Path) -> io::Result<Option<String>> {
    match read(path) {
        Ok(text) => Ok(Some(String::from_utf8_lossy(&text).into_owned())),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(cause),
    }
}

/// Returns the mode and the content of the file at `path`, following symbolic links. `None` if
/// there is no file or it is not a regular one.
pub(crate) fn read_if_regular(path: &Path) -> io::Result<Option<(u32, Vec<u8>)>> {
    read_with_mode(path).or_else(|cause| match cause.raw_os_error().map(Errno::from_raw) {
        // ENOENT: missing, or a link to a missing file; ELOOP: links in a circle; ENXIO: a socket.
        Some(Errno::ENOENT | Errno::ELOOP | Errno::ENXIO) => Ok(None),
        _ => Err(cause),
    })
}

/// Returns the mode and the content of a file, following symbolic links. `None` if it is not a
/// regular file.
fn read_with_mode(path: &Path) -> io::Result<Option<(u32, Vec<u8>)>> {
    // Non-blocking, because opening a FIFO without a writer would block.
    let mut file = OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Ok(None);
    }
    let mut content = Vec::new();
    file.read_to_end(&mut content)?;
    Ok(Some((metadata.mode(), content)))
}

/// Creates a file with this content and mode. An existing file at `path` is removed first.
pub(crate) fn write_new(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    ignore_not_found(fs::remove_file(path))?;
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(content)?;
    // The mode above is reduced by the umask.
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.sync_all()
}

/// Waits until all creations, renames and removals of files in the folder are on the disk.
pub(crate) fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Turns the error that a file does not exist into success.
pub(crate) fn ignore_not_found(outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(()),
        outcome => outcome,
    }
}
