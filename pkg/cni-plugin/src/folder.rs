//! A folder of a plugin on the host, with a small file for each attachment: reads, replaces and
//! removes its files.
//!
//! The folder is created with the mode 0700, each file with 0600. A file is replaced by renaming a
//! temporary file, so that it is always complete, even if the process is killed. Symbolic links in
//! the folder are not followed.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use cni::steps::Step;
use cni::{Code, Error, Result};
use cni_linux::file::replace;
use serde::de::DeserializeOwned;

/// The length in bytes of the longest file that is read.
const MAX_SIZE: u64 = 1 << 20;

/// The folder of the files of all networks, for a call of one of these networks.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    /// What a file is, for errors: `backup`.
    noun: &'static str,
    /// The suffix of the names of this network's temporary files. GC removes those that killed
    /// processes have left. It does not remove other networks' temporary files, because a process
    /// may be writing them. `None` if a temporary file has the extension `tmp` instead of that of
    /// its file.
    temporary_suffix: Option<String>,
}

/// The file of one attachment, which does not need to exist. [`Folder::list`] also returns
/// temporary files as this type.
#[derive(Clone, Debug)]
pub struct StateFile {
    folder: Folder,
    path: PathBuf,
}

/// The content of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// The bytes of a regular file.
    Bytes(Vec<u8>),
    /// Something that these plugins do not write, with the reason.
    Garbage(String),
}

impl Folder {
    /// Returns the folder at `path`, which does not need to exist, for a call of `network`. `noun`
    /// is what errors call a file: `backup`.
    pub fn new(path: PathBuf, noun: &'static str, network: &str) -> Folder {
        Folder { path, noun, temporary_suffix: Some(format!("-{:016x}.tmp", fnv(network.as_bytes()))) }
    }

    /// Returns the folder of records at `path`, which does not need to exist. The names of
    /// temporary files do not show their network.
    pub fn of_records(path: PathBuf) -> Folder {
        Folder { path, noun: "record", temporary_suffix: None }
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file with this name, which has no slash and does not begin with a dot.
    /// [`cni::skel`] has checked that of container IDs.
    pub fn file(&self, name: &str) -> StateFile {
        StateFile { folder: self.clone(), path: self.path.join(name) }
    }

    /// Returns the files and temporary files of all networks, sorted by path.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    pub fn list(&self) -> Result<Vec<StateFile>> {
        let failed = |error| Error::caused(Code::IO, format_args!("failed to list {}", self.path.display()), error);
        let entries = match fs::read_dir(&self.path) {
            Err(error) if is_absent(&error) => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let mut all = Vec::new();
        for entry in entries {
            let path = entry.map_err(failed)?.path();
            all.push(StateFile { folder: self.clone(), path });
        }
        all.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(all)
    }

    /// Checks that a file can be written, without creating anything.
    ///
    /// # Errors
    /// Code 5 if it cannot be written.
    pub fn check_writable(&self) -> Result<()> {
        let failed = |path: &Path, why: io::Error| {
            Err(Error::caused(Code::IO, format_args!("{}s cannot be written to {}", self.noun, path.display()), why))
        };
        // ADD creates the missing folders of the path in the nearest parent that exists.
        let mut candidates = self.path.ancestors().filter(|path| !path.as_os_str().is_empty());
        let existing = loop {
            // No part of a relative path exists yet: ADD creates it in the working directory.
            let Some(path) = candidates.next() else { return Ok(()) };
            match fs::metadata(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return failed(path, error),
                Ok(metadata) if !metadata.is_dir() => {
                    return failed(path, io::Error::from_raw_os_error(libc::ENOTDIR));
                }
                Ok(_) => break path,
            }
        };
        // A file without a name is opened, because the permissions do not show that a file system
        // is mounted read-only.
        match OpenOptions::new().write(true).mode(0o600).custom_flags(libc::O_TMPFILE).open(existing) {
            Ok(_) => Ok(()),
            // Some file systems do not support files without a name.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
            Err(error) => failed(existing, error),
        }
    }

    /// Creates the folder. Its parents get the mode 0755, because other plugins have folders in
    /// `/run/cni`, and iptables' lock in `/run/cni` requires that only root can write there.
    fn ensure(&self) -> io::Result<()> {
        if let Some(parent) = self.path.parent() {
            DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
        }
        match DirBuilder::new().mode(0o700).create(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            created => created,
        }
    }
}

impl Content {
    /// Decodes JSON. The error is the reason why the content cannot be decoded.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, String> {
        match self {
            Content::Bytes(bytes) => serde_json::from_slice(bytes).map_err(|error| error.to_string()),
            Content::Garbage(why) => Err(why.clone()),
        }
    }
}

impl StateFile {
    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the content of the file, or `None` if there is no file.
    ///
    /// # Errors
    /// Code 5 if it exists and cannot be read.
    pub fn read(&self) -> Result<Option<Content>> {
        let read = || -> io::Result<Vec<u8>> {
            // Opening must not block if the file is a pipe.
            let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
            let file = OpenOptions::new().read(true).custom_flags(flags).open(&self.path)?;
            if !file.metadata()?.is_file() {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            let mut bytes = Vec::with_capacity(1024);
            file.take(MAX_SIZE + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let why = match read() {
            Ok(bytes) if bytes.len() as u64 <= MAX_SIZE => return Ok(Some(Content::Bytes(bytes))),
            Ok(_) => format!("it is longer than any {} of these plugins", self.folder.noun),
            Err(error) if is_absent(&error) => return Ok(None),
            // `O_NOFOLLOW` refuses a symbolic link with this error.
            Err(error) if error.raw_os_error() == Some(libc::ELOOP) => "it is a symbolic link".to_owned(),
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => "it is not a regular file".to_owned(),
            Err(error) => return Err(self.failed("read", error)),
        };
        Ok(Some(Content::Garbage(why)))
    }

    /// Creates or replaces the file. A reader sees the old content or the new one.
    ///
    /// # Errors
    /// Code 5 if the file cannot be written, or is too long to be read; then it is unchanged.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        let temporary = self.temporary();
        let step = Step::begin();
        let written = match check_size(bytes).and_then(|()| replace(&self.path, &temporary, bytes)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.folder.ensure().and_then(|()| replace(&self.path, &temporary, bytes))
            }
            written => written,
        };
        step.end(format_args!("write {}", self.path.display()), &written);
        written.map_err(|error| self.failed("write", error))
    }

    /// Returns the path of the temporary file that is renamed to the file. Its name has a hash of
    /// the attachment, so that DEL can find the file, and a hash of the network, so that GC can.
    /// Hashes keep the name short enough for every attachment.
    fn temporary(&self) -> PathBuf {
        // `list` has returned a temporary file.
        if self.is_temporary() {
            return self.path.clone();
        }
        let Some(suffix) = &self.folder.temporary_suffix else { return self.path.with_extension("tmp") };
        let name = self.path.file_name().unwrap_or_default().as_encoded_bytes();
        self.folder.path.join(format!(".{:016x}{suffix}", fnv(name)))
    }

    /// Whether the file is a temporary file of this network.
    pub fn is_temporary(&self) -> bool {
        let name = self.path.file_name().unwrap_or_default().as_encoded_bytes();
        let suffix = self.folder.temporary_suffix.as_deref();
        name.starts_with(b".") && suffix.is_some_and(|suffix| name.ends_with(suffix.as_bytes()))
    }

    /// Removes the file and its temporary file. Returns whether the file existed.
    ///
    /// # Errors
    /// Code 5 if one of them cannot be removed.
    pub fn purge(&self) -> Result<bool> {
        let temporary_outcome = self.purge_temporary();
        let outcome = purge_file(&self.path).map_err(|error| self.failed("remove", error));
        let existed = matches!(outcome, Ok(true));
        Error::join(temporary_outcome.err().into_iter().chain(outcome.err()))?;
        Ok(existed)
    }

    /// Removes the temporary file of this network's file. It exists only if its writer was killed.
    ///
    /// # Errors
    /// Code 5 if it cannot be removed.
    pub fn purge_temporary(&self) -> Result<()> {
        let outcome = purge_file(&self.temporary());
        outcome.map(drop).map_err(|error| self.failed("remove the temporary file of", error))
    }

    /// Returns the error for a failed action: `read`, `write` or `remove`.
    fn failed(&self, action: &str, error: io::Error) -> Error {
        let path = self.path.display().to_string();
        // A container ID may have any length.
        let shown = if path.len() <= 200 { &path } else { cni::text::cut(&path, 60) };
        // An error about a record names only the file.
        let noun =
            if self.folder.temporary_suffix.is_some() { format!("the {} ", self.folder.noun) } else { String::new() };
        Error::caused(Code::IO, format_args!("failed to {action} {noun}{shown}"), error)
    }
}

/// Returns the FNV-1a hash, which must be the same in all releases. It does not need to resist
/// attackers: two attachments with the same hash would only remove each other's temporary file.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// Removes a file, and returns whether it existed. On a read-only file system, removing fails even
/// if the file does not exist, so existence is checked after a failure.
fn purge_file(path: &Path) -> io::Result<bool> {
    let step = Step::begin();
    let removed = match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if is_absent(&error) => Ok(false),
        Err(error) => match fs::symlink_metadata(path) {
            Err(absent) if is_absent(&absent) => Ok(false),
            _ => Err(error),
        },
    };
    step.end(format_args!("remove {}", path.display()), &removed);
    removed
}

/// Whether the error means that the file does not exist. A file with a name that is too long cannot
/// exist, and neither can one with a NUL: std refuses such a name itself, so the error has no
/// errno.
fn is_absent(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidFilename, InvalidInput, NotADirectory, NotFound};
    match error.kind() {
        NotFound | NotADirectory | InvalidFilename => true,
        InvalidInput => error.raw_os_error().is_none(),
        _ => false,
    }
}

/// Checks that a file with these bytes can be read again.
///
/// # Errors
/// The file would be longer than [`MAX_SIZE`].
fn check_size(bytes: &[u8]) -> io::Result<()> {
    if bytes.len() as u64 > MAX_SIZE {
        return Err(io::Error::other(format!("it would be longer than {MAX_SIZE} bytes")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    fn folder(path: &Path, network: &str) -> Folder {
        Folder::new(path.to_owned(), "backup", network)
    }

    fn read(file: &StateFile) -> Option<Vec<u8>> {
        match file.read().unwrap()? {
            Content::Bytes(bytes) => Some(bytes),
            Content::Garbage(why) => panic!("{why}"),
        }
    }

    #[test]
    fn a_backup_is_made_replaced_read_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = folder(&dir.path().join("a/b"), "net");
        let backup = folder.file("c1_eth0.json");
        assert!(backup.read().unwrap().is_none() && !backup.purge().unwrap() && folder.list().unwrap().is_empty());
        for content in [b"1", b"2"] {
            backup.write(content).unwrap();
            assert_eq!(read(&backup), Some(content.to_vec()));
        }
        assert_eq!((mode(&dir.path().join("a/b")), mode(backup.path())), (0o700, 0o600));
        assert_eq!(mode(&dir.path().join("a")) & 0o500, 0o500);
        let names: Vec<_> = fs::read_dir(&folder.path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["c1_eth0.json"]);
        assert!(backup.purge().unwrap() && !backup.purge().unwrap());
    }

    #[test]
    fn an_existing_folder_keeps_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o600)).unwrap();
        let folder = folder(dir.path(), "net");
        folder.file("c1_eth0.json").write(b"1").unwrap();
        assert_eq!(mode(dir.path()), 0o600);
    }

    #[test]
    fn a_file_left_by_a_killed_writer_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let folder = folder(dir.path(), "net");
        let backup = folder.file("c1_eth0.json");
        fs::write(backup.temporary(), "half").unwrap();
        for content in [b"0", b"1"] {
            backup.write(content).unwrap();
            assert_eq!(read(&backup), Some(content.to_vec()));
        }
        assert_eq!(folder.list().unwrap().len(), 1);
        fs::write(backup.temporary(), "half").unwrap();
        assert!(backup.purge().unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_name_of_a_partial_file_has_its_network() {
        let dir = tempfile::tempdir().unwrap();
        let [ours, theirs] = ["net", "net2"].map(|network| folder(dir.path(), network));
        for folder in [&ours, &theirs] {
            fs::write(folder.file("c1_eth0.json").temporary(), "half").unwrap();
        }
        fs::write(dir.path().join("other.tmp"), "x").unwrap();
        let mine: Vec<StateFile> = ours.list().unwrap().into_iter().filter(StateFile::is_temporary).collect();
        let paths: Vec<&Path> = mine.iter().map(StateFile::path).collect();
        // Never another name: a later release must find what an earlier one left.
        assert_eq!(paths, [dir.path().join(".10e34f79b7d93865-2138d2192571b218.tmp")]);
        mine[0].purge().unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_link_is_never_followed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = folder(&dir.path().join("folder"), "net");
        fs::create_dir(&folder.path).unwrap();
        let outside = dir.path().join("outside");
        fs::write(&outside, "{}").unwrap();
        let backup = folder.file("c1_eth0.json");
        symlink(&outside, backup.path()).unwrap();
        assert!(matches!(backup.read().unwrap(), Some(Content::Garbage(_))));
        backup.write(b"1").unwrap();
        assert_eq!(fs::read(&outside).unwrap(), b"{}");
        assert!(fs::symlink_metadata(backup.path()).unwrap().is_file());
        fs::remove_file(backup.path()).unwrap();
        symlink(&outside, backup.path()).unwrap();
        assert!(backup.purge().unwrap() && outside.exists());
    }

    #[test]
    fn a_file_that_is_not_regular_is_garbage() {
        let dir = tempfile::tempdir().unwrap();
        let folder = folder(dir.path(), "net");
        fs::create_dir(folder.file("c1_eth0.json").path()).unwrap();
        fs::write(folder.file("c2_eth0.json").path(), vec![b' '; 2 << 20]).unwrap();
        for id in ["c1_eth0.json", "c2_eth0.json"] {
            assert!(matches!(folder.file(id).read().unwrap(), Some(Content::Garbage(_))), "{id}");
        }
    }

    #[test]
    fn a_name_that_is_too_long_fails_to_write_and_reads_as_absent() {
        let dir = tempfile::tempdir().unwrap();
        let backup = folder(dir.path(), "net").file(&"c".repeat(300));
        assert_eq!(backup.write(b"1").unwrap_err().code(), Code::IO);
        assert!(backup.read().unwrap().is_none() && !backup.purge().unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn check_writable_creates_nothing() {
        let dir = tempfile::tempdir().unwrap();
        folder(&dir.path().join("a/b"), "net").check_writable().unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        fs::write(dir.path().join("file"), "").unwrap();
        assert_eq!(folder(&dir.path().join("file"), "net").check_writable().unwrap_err().code(), Code::IO);
        assert!(folder(&dir.path().join("file/a"), "net").check_writable().is_err());
    }
}
