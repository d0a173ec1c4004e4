//! Programs of the system, found in the folders of PATH and then in the system's.
//!
//! A runtime may start a plugin with any PATH, or none: the system's folders follow it.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// Where programs of the system are, after PATH.
const SYSTEM: [&str; 6] = ["/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/bin", "/bin", "/usr/local/bin"];

/// Returns the absolute folders of `path` (as in the variable PATH), then the system's.
pub fn folders(path: Option<OsString>) -> Vec<PathBuf> {
    let path = path.unwrap_or_default();
    let given = std::env::split_paths(&path).filter(|folder| folder.is_absolute());
    given.chain(SYSTEM.map(PathBuf::from)).collect()
}

/// Returns the first executable file `name` in `folders`.
pub fn find(folders: &[PathBuf], name: &str) -> Option<PathBuf> {
    folders.iter().map(|folder| folder.join(name)).find(|path| is_executable(path))
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}
