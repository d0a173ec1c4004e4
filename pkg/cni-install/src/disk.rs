//! Reads, writes and compares files so that the result is on the disk and no other process's file
//! is written to.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink};
use std::path::Path;

use nix::errno::Errno;

/// Gives a file a second name: a hard link or, where the file system or the kernel's protection of
/// links does not allow one, a copy.
pub(crate) fn link_or_copy(from: &Path, to: &Path) -> io::Result<()> {
    if fs::hard_link(from, to).is_ok() {
        return Ok(());
    }
    if fs::symlink_metadata(from)?.is_symlink() {
        return symlink(fs::read_link(from)?, to);
    }
    fs::copy(from, to)?; // with its mode
    File::open(to)?.sync_all()
}

/// Whether `place` holds what `kept` holds: the same file, or a link or regular file with equal
/// content and mode.
pub(crate) fn holds(place: &Path, kept: &Path) -> io::Result<bool> {
    let kept_is = fs::symlink_metadata(kept)?;
    let Some(place_is) = metadata(place)? else { return Ok(false) };
    if (kept_is.dev(), kept_is.ino()) == (place_is.dev(), place_is.ino()) {
        return Ok(true);
    }
    if kept_is.is_symlink() && place_is.is_symlink() {
        return Ok(fs::read_link(kept)? == fs::read_link(place)?);
    }
    let alike = kept_is.is_file() && place_is.is_file() && kept_is.len() == place_is.len();
    Ok(alike && kept_is.mode() == place_is.mode() && read(kept)? == read(place)?)
}

/// Returns what is at `path` without following links; `None` if nothing is there.
pub(crate) fn metadata(path: &Path) -> io::Result<Option<fs::Metadata>> {
    match fs::symlink_metadata(path) {
        Ok(metadata) => Ok(Some(metadata)),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(cause),
    }
}

/// Reads a regular file. Opening or reading anything else, a FIFO for instance, might never return.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    open(path)?.map_or_else(|| Err(io::Error::other("it is not a regular file")), |(_, content)| Ok(content))
}

/// Reads the mode and the content of the regular file that `path`, or a link there, leads to;
/// `None` if there is none.
pub(crate) fn look(path: &Path) -> io::Result<Option<(u32, Vec<u8>)>> {
    match open(path) {
        // Nothing, a dangling link, links in a circle; a socket.
        Err(cause)
            if [Errno::ENOENT, Errno::ELOOP, Errno::ENXIO]
                .map(|errno| Some(errno as i32))
                .contains(&cause.raw_os_error()) =>
        {
            Ok(None)
        }
        found => found,
    }
}

fn open(path: &Path) -> io::Result<Option<(u32, Vec<u8>)>> {
    let mut file = OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Ok(None);
    }
    let mut content = Vec::new();
    file.read_to_end(&mut content)?;
    Ok(Some((metadata.mode(), content)))
}

/// Writes a new file with this content to the disk, after removing any file of that name.
pub(crate) fn put(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    absent_is_fine(fs::remove_file(path))?;
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(content)?;
    file.set_permissions(fs::Permissions::from_mode(mode))?; // whatever the umask was
    file.sync_all()
}

/// Writes the changes of a folder's entries to the disk.
pub(crate) fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

pub(crate) fn absent_is_fine(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
