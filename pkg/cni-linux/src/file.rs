//! Creates and replaces small files, such as records, so that a reader never sees a part of one.
//!
//! The files have the mode 0600 unless the caller gives another, and a symbolic link at their path
//! is never followed.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::linkat;

/// The mode of a file unless the caller gives another.
const DEFAULT_MODE: u32 = 0o600;

/// Creates or replaces a file. A reader sees the old content or the new one. `temporary` is a path
/// in the same folder, which no other process uses at the same time; what a killed process has left
/// there is replaced.
///
/// # Errors
/// `NotFound` without the folder, or another error of the file system. The file is unchanged.
pub fn replace(path: &Path, temporary: &Path, content: &[u8]) -> io::Result<()> {
    replace_with_mode(path, temporary, content, DEFAULT_MODE)
}

/// As [`replace`], but the file gets the mode `mode` before it gets its name.
///
/// # Errors
/// As [`replace`].
pub fn replace_with_mode(path: &Path, temporary: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // A file without a name is complete before it gets one. If the file system does not support
    // that, the file is created under its temporary name.
    let nameless = match OpenOptions::new().write(true).mode(DEFAULT_MODE).custom_flags(libc::O_TMPFILE).open(folder) {
        Ok(file) => Some(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(error),
        Err(_) => None,
    };
    if let Some(file) = &nameless {
        fill(file, content, mode)?;
        match name(file, path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            outcome => return outcome,
        }
    }
    let create = || match &nameless {
        Some(file) => name(file, temporary),
        None => {
            let file = OpenOptions::new().write(true).create_new(true).mode(DEFAULT_MODE).open(temporary)?;
            fill(&file, content, mode)
        }
    };
    let created = match create() {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(temporary).and_then(|()| create())
        }
        created => created,
    };
    created.and_then(|()| fs::rename(temporary, path)).inspect_err(|_| {
        // Only the first error is returned.
        let _ = fs::remove_file(temporary);
    })
}

/// Writes the content of a new file, and sets its mode.
fn fill(mut file: &File, content: &[u8], mode: u32) -> io::Result<()> {
    file.write_all(content)?;
    if mode == DEFAULT_MODE { Ok(()) } else { file.set_permissions(Permissions::from_mode(mode)) }
}

/// Gives a file without a name this one.
///
/// # Errors
/// `AlreadyExists` if the path exists.
fn name(file: &File, path: &Path) -> io::Result<()> {
    let from = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(linkat(AT_FDCWD, from.as_str(), AT_FDCWD, path, AtFlags::AT_SYMLINK_FOLLOW)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_file_is_created_for_its_owner_only() {
        let folder = tempfile::tempdir().unwrap();
        let [path, temporary] = ["record", "temporary"].map(|name| folder.path().join(name));
        replace(&path, &temporary, b"first").unwrap();
        assert_eq!((fs::read(&path).unwrap(), temporary.exists()), (b"first".to_vec(), false));
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(), 0o600);
        replace_with_mode(&path, &temporary, b"second", 0o644).unwrap();
        assert_eq!((fs::read(&path).unwrap(), mode()), (b"second".to_vec(), 0o644));
        let error = replace(&folder.path().join("absent/record"), &folder.path().join("absent/new"), b"").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn links_and_leftovers_are_replaced_and_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let [path, temporary, outside] = ["record", "temporary", "outside"].map(|name| folder.path().join(name));
        fs::write(&outside, "outside").unwrap();
        symlink(&outside, &path).unwrap();
        symlink(&outside, &temporary).unwrap();
        replace(&path, &temporary, b"new").unwrap();
        assert_eq!((fs::read(&path).unwrap(), fs::read(&outside).unwrap()), (b"new".to_vec(), b"outside".to_vec()));
        assert!(fs::symlink_metadata(&path).unwrap().is_file() && !temporary.exists());
    }

    #[test]
    fn a_failed_replacement_leaves_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let [path, temporary] = ["record", "temporary"].map(|name| folder.path().join(name));
        fs::create_dir(&path).unwrap();
        replace(&path, &temporary, b"new").unwrap_err();
        assert!(path.is_dir() && !temporary.exists());
    }
}
