//! Reads and writes the files in the folder of reservations, in the Go plugin's format.
//!
//! The caller holds the store's lock. A reservation should not be visible before it is complete,
//! because the Go plugin never frees the address of an empty file. So a file is written under the
//! name of its link, and then linked to its final name. If files cannot be linked, they are written
//! under their final names, as by Go.
//!
//! Nothing is synced to the disk, because no container survives a power loss.

use std::fs::File;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use cni::steps::Step;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, linkat, unlinkat};

use crate::content::{self, Content};
use crate::links::{Link, Links};

/// A reservation that was created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Created {
    /// The file's inode.
    pub(crate) inode: u64,
    /// Whether the file has its link. Otherwise the folder must not be stamped.
    pub(crate) is_linked: bool,
}

/// The open folder of reservations.
#[derive(Debug)]
pub(crate) struct Folder {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    pub(crate) links: Links,
}

impl Folder {
    /// Creates a reservation and, if possible, its link. Returns `None` if a file with the address
    /// as its name exists already.
    ///
    /// # Errors
    /// The file cannot be written. No file with this name remains.
    pub(crate) fn create(&self, link: &Link, content: &str) -> io::Result<Option<Created>> {
        let step = Step::begin();
        let created = match self.write_and_link(link, content) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                let written = self.write_under_final_name(link.address, content);
                written.map(|inode| Created { inode, is_linked: self.links.add(&self.file, link).is_ok() })
            }
            outcome => outcome.map(|inode| Created { inode, is_linked: true }),
        };
        let created = match created {
            Ok(created) => Ok(Some(created)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(error),
        };
        let suffix = if matches!(created, Ok(None)) { ", which exists" } else { "" };
        step.end(format_args!("create {}/{}{suffix}", self.path.display(), link.address), &created);
        created
    }

    /// Writes a file under the name of its link, and links it to its final name. Returns its inode.
    /// If this process is killed in between, only the link remains, which is outdated.
    fn write_and_link(&self, link: &Link, content: &str) -> io::Result<u64> {
        let file = self.links.create(link, content)?;
        let name = link.address.to_string();
        let final_link =
            || linkat(AT_FDCWD, &self.links.path(link), self.file.as_fd(), name.as_str(), AtFlags::empty());
        // The inode is read first, because the reservation is visible once it has its final name.
        let linked = file.metadata().and_then(|metadata| Ok(final_link().map(|()| metadata.ino())?));
        linked.inspect_err(|_| self.links.remove(link))
    }

    /// Creates a file with this name and then writes its content, as the Go plugin does. This is
    /// the last resort if no file can be linked. Returns the file's inode.
    ///
    /// If this process is killed in between, an empty file remains, which the Go plugin never
    /// frees.
    fn write_under_final_name(&self, address: IpAddr, content: &str) -> io::Result<u64> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let name = address.to_string();
        let mut file = File::from(openat(self.file.as_fd(), name.as_str(), flags, Mode::from_bits_truncate(0o600))?);
        let written = file.write_all(content.as_bytes()).and_then(|()| Ok(file.metadata()?.ino()));
        written.inspect_err(|_| drop(self.unlink(&name)))
    }

    /// Whether every reservation has its link.
    pub(crate) fn is_complete(&self) -> io::Result<bool> {
        self.links.is_complete(&self.file)
    }

    /// Whether the address has no file or a blank one. An address whose file cannot be read is not
    /// free.
    pub(crate) fn is_free(&self, address: IpAddr) -> bool {
        match std::fs::symlink_metadata(self.path.join(address.to_string())) {
            Ok(_) => matches!(content::read(&self.file, address), Ok(Content::Blank | Content::Absent)),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    /// Removes a file of the folder. Returns whether the file existed.
    pub(crate) fn unlink(&self, name: &str) -> io::Result<bool> {
        let step = Step::begin();
        let removed = match unlinkat(self.file.as_fd(), name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) => Ok(true),
            Err(Errno::ENOENT) => Ok(false),
            Err(error) => Err(error.into()),
        };
        step.end(format_args!("remove {}/{name}", self.path.display()), &removed);
        removed
    }

    /// Returns the address that was allocated last from the set with this position. Returns `None`
    /// if the file with that address is missing, cannot be read or is invalid: then the allocation
    /// begins at the first address.
    pub(crate) fn last_reserved(&self, set: usize) -> Option<IpAddr> {
        match content::read_name(&self.file, &last_reserved_name(set)) {
            Ok(Content::Text(text)) => crate::ranges::parse_ip(std::str::from_utf8(&text).ok()?),
            _ => None,
        }
    }

    /// Stores the address that was allocated last from the set with this position.
    pub(crate) fn set_last_reserved(&self, set: usize, address: IpAddr) -> io::Result<()> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let mode = Mode::from_bits_truncate(0o600);
        let mut file = File::from(openat(self.file.as_fd(), last_reserved_name(set).as_str(), flags, mode)?);
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        let text = address.to_string();
        // The file is shortened after the write, not truncated before it: ext4 flushes a truncated
        // file to the disk when it is closed.
        file.write_all(text.as_bytes())?;
        file.set_len(text.len() as u64)
    }

    /// Returns what is unusual about the file of an address, such as `it is a directory, not a
    /// reservation`. Returns `None` for a usual or missing file.
    pub(crate) fn peculiarity(&self, address: IpAddr) -> Option<String> {
        let metadata = std::fs::symlink_metadata(self.path.join(address.to_string())).ok()?;
        let kind = metadata.file_type();
        if kind.is_dir() {
            Some("it is a directory, not a reservation".to_owned())
        } else if kind.is_symlink() {
            Some("it is a symbolic link, not a reservation".to_owned())
        } else if !kind.is_file() {
            Some("it is not a regular file".to_owned())
        } else if metadata.len() > content::MAX_LENGTH {
            Some(format!("its file has {} bytes, more than any reservation", metadata.len()))
        } else {
            None
        }
    }

    /// Returns when a reservation was made, which is its file's mtime. The ctime is that of its
    /// link. Returns `None` if the file does not exist.
    pub(crate) fn made_at(&self, address: IpAddr) -> Option<SystemTime> {
        std::fs::symlink_metadata(self.path.join(address.to_string())).ok()?.modified().ok()
    }
}

/// Returns the name of the file with the address that was allocated last from the set with this
/// position.
fn last_reserved_name(set: usize) -> String {
    format!("last_reserved_ip.{set}")
}

/// Removes the temporary files of killed processes from the sidecar, and the index and temporary
/// files of older builds. The caller holds the lock, so they do not belong to a running process.
/// Files with other names stay: the sidecar may be a link to a folder of another program.
pub(crate) fn sweep(sidecar: &Path) {
    let Ok(entries) = std::fs::read_dir(sidecar) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_process_id = |end: &str| !end.is_empty() && end.bytes().all(|byte| byte.is_ascii_digit());
        let is_removed = |name: &str| {
            matches!(name, "boot.new" | "released.new" | "index" | "index.new")
                || name.strip_prefix("new.").is_some_and(is_process_id)
        };
        if name.to_str().is_some_and(is_removed) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_temporary_files_of_these_plugins_are_swept() {
        let sidecar = tempfile::tempdir().unwrap();
        let foreign = ["boot", "new.", "new.conf", "new.12.bak", "news", "index.new.bak", "released"];
        for name in foreign.iter().chain(&["new.12", "index", "index.new", "boot.new", "released.new"]) {
            std::fs::write(sidecar.path().join(name), "x").unwrap();
        }
        sweep(sidecar.path());
        let entries = std::fs::read_dir(sidecar.path()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        let mut expected = foreign;
        expected.sort_unstable();
        assert_eq!(names, expected);
    }
}
