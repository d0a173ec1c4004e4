//! Finds programs in the folders of PATH and then in the system's folders.
//!
//! A runtime may start a plugin with any PATH or without one, so the system's folders are always
//! searched too.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// The system's folders with programs.
const SYSTEM: [&str; 6] = ["/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/bin", "/bin", "/usr/local/bin"];

/// Returns the absolute folders in `path`, a value of the variable PATH, then the system's folders.
pub fn folders(path: Option<OsString>) -> Vec<PathBuf> {
    let path = path.unwrap_or_default();
    let absolute = std::env::split_paths(&path).filter(|folder| folder.is_absolute());
    absolute.chain(SYSTEM.map(PathBuf::from)).collect()
}

/// Returns the path of the first executable file `name` in `folders`, or `None` if there is none.
pub fn find(folders: &[PathBuf], name: &str) -> Option<PathBuf> {
    folders.iter().map(|folder| folder.join(name)).find(|path| is_executable(path))
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}
