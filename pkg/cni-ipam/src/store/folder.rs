//! The files of the folder, as Go writes and reads them.
//!
//! One function per effect, each under the lock that the caller holds; no decisions. A reservation
//! must never be visible before it is complete (Go never frees an empty file's address), so the
//! file is written without a name and then linked. Nothing here waits for the disk, because no
//! container survives a power loss.

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

use crate::index::{Holder, LINKING, Record, hash, random_nanos};

/// The open folder, its path for what needs one, and the sidecar's.
#[derive(Debug)]
pub(crate) struct Folder {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    pub(crate) sidecar: PathBuf,
}

/// How a reservation went.
#[derive(Debug)]
pub(crate) enum LinkOutcome {
    /// It is ours now.
    NewReservation(Record),
    /// There is a file of that name.
    Exists,
}

impl Folder {
    /// Makes a reservation, complete or not at all. `announce` hears of the file just before it
    /// gets its name: what it writes down then is there even if we are killed right after.
    ///
    /// # Errors
    /// Nothing is left behind.
    pub(crate) fn create(
        &self,
        address: IpAddr,
        content: &str,
        boot: u64,
        announce: &mut dyn FnMut(&Record),
    ) -> io::Result<LinkOutcome> {
        let step = Step::begin();
        let record = |file: &File| -> io::Result<Record> {
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
        let placed = self.place(content, &name, &mut |file| {
            let record = record(file)?;
            announce(&Record { ctime: (record.ctime.0, LINKING), ..record });
            Ok(())
        });
        let made = match placed {
            Ok(Some(file)) => record(&file).map(LinkOutcome::NewReservation).inspect_err(|_| drop(self.unlink(&name))),
            Ok(None) => Ok(LinkOutcome::Exists),
            Err(error) => Err(error),
        };
        let taken = if matches!(made, Ok(LinkOutcome::Exists)) { ", which exists" } else { "" };
        step.end(format_args!("create {}/{address}{taken}", self.path.display()), &made);
        made
    }

    /// Writes a file and gives it its name, in the best of three ways; `None` if there is something
    /// of that name.
    fn place(
        &self,
        content: &str,
        name: &str,
        announce: &mut dyn FnMut(&File) -> io::Result<()>,
    ) -> io::Result<Option<File>> {
        let unnamed = self.unnamed(content).and_then(|file| {
            announce(&file)?;
            self.link(&file, name).map(|()| file)
        });
        let named = match unnamed {
            // Out of space or of rights: another way to write would end the same.
            Err(error) if !is_final(&error) && error.kind() != io::ErrorKind::AlreadyExists => {
                self.by_temporary(content, name, announce)
            }
            named => named,
        };
        match named {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
            Err(error) if is_final(&error) => Err(error),
            Err(_) => self.as_go_does(content, name),
        }
    }

    fn unnamed(&self, content: &str) -> io::Result<File> {
        let file = OpenOptions::new().write(true).mode(0o600).custom_flags(O_TMPFILE).open(&self.path)?;
        fill(file, content)
    }

    fn link(&self, file: &File, name: &str) -> io::Result<()> {
        match linkat(file.as_fd(), "", self.file.as_fd(), name, AtFlags::AT_EMPTY_PATH) {
            // Linking a descriptor directly wants CAP_DAC_READ_SEARCH; the way through /proc does
            // not.
            Err(Errno::ENOENT) => {
                let path = format!("/proc/self/fd/{}", file.as_raw_fd());
                Ok(linkat(AT_FDCWD, path.as_str(), self.file.as_fd(), name, AtFlags::AT_SYMLINK_FOLLOW)?)
            }
            result => Ok(result?),
        }
    }

    /// For file systems without O_TMPFILE: a named file, but in the sidecar, where a rebuild sweeps
    /// up what a kill leaves.
    fn by_temporary(
        &self,
        content: &str,
        name: &str,
        announce: &mut dyn FnMut(&File) -> io::Result<()>,
    ) -> io::Result<File> {
        let temporary = self.sidecar.join(format!("new.{}", std::process::id()));
        let _ = std::fs::remove_file(&temporary);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        let linked = fill(file, content).and_then(|file| {
            announce(&file)?;
            linkat(AT_FDCWD, &temporary, self.file.as_fd(), name, AtFlags::empty())?;
            Ok(file)
        });
        let _ = std::fs::remove_file(&temporary);
        linked
    }

    /// The last resort. A kill in between leaves an empty file, which is free to us, though not to
    /// Go.
    fn as_go_does(&self, content: &str, name: &str) -> io::Result<Option<File>> {
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

    /// Removes a name; `false` if it was not there.
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

    /// Returns the address that a set's round robin allocated last; `None` if the file has no valid
    /// address.
    pub(crate) fn last_reserved(&self, set: usize) -> Option<IpAddr> {
        match crate::index::read_name(&self.file, &last_reserved_name(set)) {
            Ok(crate::index::Content::Text(text)) => crate::ranges::parse_ip(std::str::from_utf8(&text).ok()?),
            _ => None,
        }
    }

    /// Remembers where the round robin of a set stands.
    pub(crate) fn set_last_reserved(&self, set: usize, address: IpAddr) -> io::Result<()> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let mode = Mode::from_bits_truncate(0o600);
        let mut file = File::from(openat(self.file.as_fd(), last_reserved_name(set).as_str(), flags, mode)?);
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        let text = address.to_string();
        // The file is not truncated first: ext4 would start writing to the disk when such a file is
        // closed.
        file.write_all(text.as_bytes())?;
        file.set_len(text.len() as u64)
    }

    /// Returns what is unusual about an address's file: `its file has 70000 bytes, more than any
    /// reservation`, `it is a directory`.
    pub(crate) fn peculiarity(&self, address: IpAddr) -> Option<String> {
        let metadata = std::fs::symlink_metadata(self.path.join(address.to_string())).ok()?;
        let kind = metadata.file_type();
        Some(match metadata.len() {
            _ if kind.is_dir() => "it is a directory, not a reservation".to_owned(),
            _ if kind.is_symlink() => "it is a symbolic link, not a reservation".to_owned(),
            _ if !kind.is_file() => "it is not a regular file".to_owned(),
            length if length > crate::index::LONGEST => {
                format!("its file has {length} bytes, more than any reservation")
            }
            _ => return None,
        })
    }

    /// When a reservation was made, by its file.
    pub(crate) fn made_at(&self, address: IpAddr) -> Option<SystemTime> {
        let metadata = std::fs::symlink_metadata(self.path.join(address.to_string())).ok()?;
        u64::try_from(metadata.ctime()).ok().map(|seconds| UNIX_EPOCH + Duration::from_secs(seconds))
    }
}

fn last_reserved_name(set: usize) -> String {
    format!("last_reserved_ip.{set}")
}

/// Writes the content and gives the file an mtime of this second but with random nanoseconds: if
/// inode and times are found again, it is this file, unchanged, however fast inodes are reused.
fn fill(mut file: File, content: &str) -> io::Result<File> {
    file.write_all(content.as_bytes())?;
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let time = UNIX_EPOCH + Duration::new(seconds, random_nanos()?);
    file.set_times(FileTimes::new().set_modified(time))?;
    Ok(file)
}

fn is_final(error: &io::Error) -> bool {
    use nix::libc::{EDQUOT, EFBIG, EIO, ENOSPC, EROFS};
    matches!(error.raw_os_error(), Some(ENOSPC | EDQUOT | EROFS | EIO | EFBIG))
}

/// Removes what killed processes left in the sidecar. The lock excludes other processes.
pub(crate) fn sweep(sidecar: &Path) {
    let Ok(entries) = std::fs::read_dir(sidecar) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name.to_str().is_some_and(|name| name.starts_with("new.") || name == "index.new") {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Makes the sidecar's folder, for root alone.
pub(crate) fn create_sidecar(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}
