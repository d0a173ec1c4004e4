//! Creates and replaces small files, such as records, so that a reader never sees a part of one.
//!
//! The files have the mode 0600 unless the caller gives another, and a symbolic link at their path
//! is never followed.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::linkat;

/// Creates a file with this content. If the file system supports files without a name, the file
/// gets its name only when its content is complete.
///
/// # Errors
/// `AlreadyExists` if the path exists, `NotFound` without the folder, or another error of the file
/// system.
pub fn create(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let nameless = OpenOptions::new().write(true).mode(0o600).custom_flags(libc::O_TMPFILE).open(folder);
    // After a failure, the file is created under its name. If that fails too, its error is
    // returned.
    if let Ok(mut file) = nameless {
        file.write_all(content)?;
        let from = format!("/proc/self/fd/{}", file.as_raw_fd());
        return Ok(linkat(AT_FDCWD, from.as_str(), AT_FDCWD, path, AtFlags::AT_SYMLINK_FOLLOW)?);
    }
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?.write_all(content)
}

/// Creates or replaces a file. A reader sees the old content or the new one. `temporary` is a path
/// in the same folder, which no other process uses at the same time; what a killed process has left
/// there is replaced.
///
/// # Errors
/// `NotFound` without the folder, or another error of the file system. The file is unchanged.
pub fn replace(path: &Path, temporary: &Path, content: &[u8]) -> io::Result<()> {
    replace_with_mode(path, temporary, content, 0o600)
}

/// As [`replace`], but the file gets the mode `mode` before it gets its name.
///
/// # Errors
/// As [`replace`].
pub fn replace_with_mode(path: &Path, temporary: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let created = match create(temporary, content) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(temporary).and_then(|()| create(temporary, content))
        }
        created => created,
    };
    let permitted = created.and_then(|()| fs::set_permissions(temporary, Permissions::from_mode(mode)));
    permitted.and_then(|()| fs::rename(temporary, path)).inspect_err(|_| {
        // Only the first error is returned.
        let _ = fs::remove_file(temporary);
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_file_is_created_once_and_only_for_its_owner() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record");
        create(&path, b"first").unwrap();
        assert_eq!(create(&path, b"second").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"first");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        let error = create(&folder.path().join("absent/record"), b"").unwrap_err();
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
