//! Finds installed programs, in the folders of PATH and then in the system's usual folders, because
//! a runtime may start a plugin with any PATH, or none.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// The folders to search after those of PATH.
const SYSTEM: [&str; 6] = ["/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/bin", "/bin", "/usr/local/bin"];

/// Returns the absolute folders of `path`, the value of the variable PATH, followed by the system's
/// folders.
pub fn folders(path: Option<OsString>) -> Vec<PathBuf> {
    let path = path.unwrap_or_default();
    let from_path = std::env::split_paths(&path).filter(|folder| folder.is_absolute());
    from_path.chain(SYSTEM.map(PathBuf::from)).collect()
}

/// Returns the path of the first executable file `name` in `folders`; `None` if there is none.
pub fn find(folders: &[PathBuf], name: &str) -> Option<PathBuf> {
    folders.iter().map(|folder| folder.join(name)).find(|path| is_executable(path))
}

/// Whether the path is a file with an execute permission.
fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}
