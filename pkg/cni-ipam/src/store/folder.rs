//! Reads and writes the files in the folder of reservations, in the Go plugin's format.
//!
//! The caller holds the store's lock. A reservation should not be visible before it is complete,
//! because the Go plugin never frees the address of an empty file. So a file is written without a
//! name, or under a temporary name, and then linked to its final name. Just before the link, the
//! caller can store a provisional record of the file (see [`PROVISIONAL_NANOS`]). If files cannot
//! be linked, they are written under their final names, as by Go, without a provisional record.
//!
//! Nothing is synced to the disk, because no container survives a power loss.

use std::fs::{File, FileTimes, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cni::steps::Step;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat};
use nix::libc::O_TMPFILE;
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, linkat, unlinkat};

use crate::index::{Holder, PROVISIONAL_NANOS, Record, hash, random_nanos};

/// The open folder of reservations.
#[derive(Debug)]
pub(crate) struct Folder {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    /// The folder of these plugins' own files.
    pub(crate) sidecar: PathBuf,
}

/// The outcome of creating a reservation.
#[derive(Debug)]
pub(crate) enum LinkOutcome {
    /// The reservation was created. The value is its record.
    Created(Record),
    /// A file with the address as its name exists already.
    Exists,
}

impl Folder {
    /// Creates a reservation and returns its record. `boot` is the hash of the boot ID for the
    /// record, or 0.
    ///
    /// `before_link` is called with a provisional record just before a file is linked to the final
    /// name, and again if linking fails and a second file is linked. It is not called for a file
    /// that is written under its final name.
    ///
    /// # Errors
    /// The file cannot be written. No file with this name remains.
    pub(crate) fn create(
        &self,
        address: IpAddr,
        content: &str,
        boot: u64,
        before_link: &mut dyn FnMut(&Record),
    ) -> io::Result<LinkOutcome> {
        let step = Step::begin();
        let record_of = |file: &File| -> io::Result<Record> {
            let metadata = file.metadata()?;
            Ok(Record {
                address,
                inode: metadata.ino(),
                ctime: (metadata.ctime(), metadata.ctime_nsec() as u32),
                mtime_nanos: metadata.mtime_nsec() as u32,
                holder: Holder::Content(hash(content.as_bytes())),
                boot,
            })
        };
        let name = address.to_string();
        let written = self.write_file(content, &name, &mut |file| {
            let record = record_of(file)?;
            before_link(&Record { ctime: (record.ctime.0, PROVISIONAL_NANOS), ..record });
            Ok(())
        });
        let outcome = match written {
            Ok(Some(file)) => record_of(&file).map(LinkOutcome::Created).inspect_err(|_| {
                // The caller needs the record, so without one the reservation is removed again.
                let _ = self.unlink(&name);
            }),
            Ok(None) => Ok(LinkOutcome::Exists),
            Err(error) => Err(error),
        };
        let suffix = if matches!(outcome, Ok(LinkOutcome::Exists)) { ", which exists" } else { "" };
        step.end(format_args!("create {}/{address}{suffix}", self.path.display()), &outcome);
        outcome
    }

    /// Creates a file with this name and content. Tries three methods: to link a file without a
    /// name (O_TMPFILE), to link a temporary file in the sidecar, and to write under the final
    /// name. Returns `None` if the name exists.
    fn write_file(
        &self,
        content: &str,
        name: &str,
        before_link: &mut dyn FnMut(&File) -> io::Result<()>,
    ) -> io::Result<Option<File>> {
        let unnamed = self.write_unnamed(content).and_then(|file| {
            before_link(&file)?;
            self.link(&file, name).map(|()| file)
        });
        let name_exists = |error: &io::Error| error.kind() == io::ErrorKind::AlreadyExists;
        let could_succeed_otherwise = |error: &io::Error| !name_exists(error) && !is_final(error);
        let linked = match unnamed {
            // Perhaps the file system lacks O_TMPFILE.
            Err(error) if could_succeed_otherwise(&error) => self.write_temporary(content, name, before_link),
            outcome => outcome,
        };
        match linked {
            Ok(file) => Ok(Some(file)),
            Err(error) if name_exists(&error) => Ok(None),
            // Perhaps the sidecar is not writable.
            Err(error) if could_succeed_otherwise(&error) => self.write_under_final_name(content, name),
            Err(error) => Err(error),
        }
    }

    /// Writes a file without a name.
    fn write_unnamed(&self, content: &str) -> io::Result<File> {
        let file = OpenOptions::new().write(true).mode(0o600).custom_flags(O_TMPFILE).open(&self.path)?;
        fill(file, content)
    }

    /// Links an open file to a name in the folder.
    fn link(&self, file: &File, name: &str) -> io::Result<()> {
        match linkat(file.as_fd(), "", self.file.as_fd(), name, AtFlags::AT_EMPTY_PATH) {
            // Without CAP_DAC_READ_SEARCH, the descriptor cannot be linked, but its path in /proc
            // can.
            Err(Errno::ENOENT) => {
                let path = format!("/proc/self/fd/{}", file.as_raw_fd());
                Ok(linkat(AT_FDCWD, path.as_str(), self.file.as_fd(), name, AtFlags::AT_SYMLINK_FOLLOW)?)
            }
            result => Ok(result?),
        }
    }

    /// Writes a temporary file in the sidecar and links it, for file systems without O_TMPFILE. If
    /// this process is killed, the next rebuild of the index removes the temporary file.
    fn write_temporary(
        &self,
        content: &str,
        name: &str,
        before_link: &mut dyn FnMut(&File) -> io::Result<()>,
    ) -> io::Result<File> {
        let temporary = self.sidecar.join(format!("new.{}", std::process::id()));
        // A killed process with the same ID may have left the file. Usually it does not exist.
        let _ = std::fs::remove_file(&temporary);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        let linked = fill(file, content).and_then(|file| {
            before_link(&file)?;
            linkat(AT_FDCWD, &temporary, self.file.as_fd(), name, AtFlags::empty())?;
            Ok(file)
        });
        let _ = std::fs::remove_file(&temporary);
        linked
    }

    /// Creates a file with this name and then writes its content, as the Go plugin does. This is
    /// the last resort if no file can be linked. Returns `None` if the name exists.
    ///
    /// If this process is killed in between, an empty file remains, which the Go plugin never
    /// frees. If it is killed later, before the record is stored, the reservation is not reclaimed
    /// after a reboot.
    fn write_under_final_name(&self, content: &str, name: &str) -> io::Result<Option<File>> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let file = match openat(self.file.as_fd(), name, flags, Mode::from_bits_truncate(0o600)) {
            Ok(file) => File::from(file),
            Err(Errno::EEXIST) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        match fill(file, content) {
            Ok(file) => Ok(Some(file)),
            Err(error) => {
                let _ = self.unlink(name);
                Err(error)
            }
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
        match crate::index::read_name(&self.file, &last_reserved_name(set)) {
            Ok(crate::index::Content::Text(text)) => crate::ranges::parse_ip(std::str::from_utf8(&text).ok()?),
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
        } else if metadata.len() > crate::index::MAX_LENGTH {
            Some(format!("its file has {} bytes, more than any reservation", metadata.len()))
        } else {
            None
        }
    }

    /// Returns when a reservation was made, which is its file's ctime, in whole seconds. Returns
    /// `None` if the file does not exist.
    pub(crate) fn made_at(&self, address: IpAddr) -> Option<SystemTime> {
        let metadata = std::fs::symlink_metadata(self.path.join(address.to_string())).ok()?;
        u64::try_from(metadata.ctime()).ok().map(|seconds| UNIX_EPOCH + Duration::from_secs(seconds))
    }
}

/// Returns the name of the file with the address that was allocated last from the set with this
/// position.
fn last_reserved_name(set: usize) -> String {
    format!("last_reserved_ip.{set}")
}

/// Writes the content to a new file, and sets the file's mtime to the current second with random
/// nanoseconds. So inode and times identify the file, even if the file system reuses inodes
/// quickly.
fn fill(mut file: File, content: &str) -> io::Result<File> {
    file.write_all(content.as_bytes())?;
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let time = UNIX_EPOCH + Duration::new(seconds, random_nanos()?);
    file.set_times(FileTimes::new().set_modified(time))?;
    Ok(file)
}

/// Whether every method of writing would fail with this error: no space, a full quota, a read-only
/// or broken disk.
fn is_final(error: &io::Error) -> bool {
    use nix::libc::{EDQUOT, EFBIG, EIO, ENOSPC, EROFS};
    matches!(error.raw_os_error(), Some(ENOSPC | EDQUOT | EROFS | EIO | EFBIG))
}

/// Removes the temporary files of killed processes from the sidecar. The caller holds the lock, so
/// they do not belong to a running process. Files with other names stay: the sidecar may be a link
/// to a folder of another program.
pub(crate) fn sweep(sidecar: &Path) {
    let Ok(entries) = std::fs::read_dir(sidecar) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_process_id = |end: &str| !end.is_empty() && end.bytes().all(|byte| byte.is_ascii_digit());
        let is_temporary = |name: &str| {
            matches!(name, "index.new" | "released.new") || name.strip_prefix("new.").is_some_and(is_process_id)
        };
        if name.to_str().is_some_and(is_temporary) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Creates the sidecar with access for root only.
pub(crate) fn create_sidecar(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_temporary_files_of_these_plugins_are_swept() {
        let sidecar = tempfile::tempdir().unwrap();
        let foreign = ["index", "new.", "new.conf", "new.12.bak", "news", "index.new.bak", "released"];
        for name in foreign.iter().chain(&["new.12", "index.new", "released.new"]) {
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
