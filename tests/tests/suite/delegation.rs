//! Delegates that misbehave, as real executables. Each must give an error that names the file, and DEL must still
//! clean what is bridge's own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cni_testkit::Node;

/// Writes an executable `name` into a folder of the node and returns the folder, for `CNI_PATH`.
pub(crate) fn executable(node: &Node, name: &str, script: &str) -> PathBuf {
    let path = node.file(&format!("plugins/{name}"), script);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.parent().unwrap().to_owned()
}

/// Waits until a file that a delegate writes is there and not empty.
pub(crate) fn wait_for(path: &Path) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !fs::metadata(path).is_ok_and(|meta| meta.len() > 0) {
        assert!(Instant::now() < deadline, "{} never came", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}
