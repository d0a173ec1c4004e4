//! Reads files whose paths an operator has configured, and simplifies paths.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Component, Path, PathBuf};

use crate::skel::MAX_STDIN;

/// The largest configuration file in bytes: the largest configuration that a plugin accepts on
/// stdin.
const MAX_LENGTH: u64 = MAX_STDIN as u64;

/// Returns the content of a regular file of at most 16 MiB. Follows symbolic links.
///
/// # Errors
/// The file cannot be read, is not a regular file, or is larger than 16 MiB.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    // Checked before opening, because opening a FIFO would wait for a writer.
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    // One call reads the content of most files, another one notices the end.
    let mut bytes = Vec::with_capacity(metadata.len().min(MAX_LENGTH) as usize + 1);
    // Reads one byte more than allowed, to notice a file that is too long.
    File::open(path)?.take(MAX_LENGTH + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_LENGTH {
        return Err(io::Error::other("it is longer than 16 MiB"));
    }
    Ok(bytes)
}

/// Simplifies a path lexically, like Go's `filepath.Clean`, which the Go plugins use: removes `.`
/// and superfluous slashes, and resolves `..`. The empty path becomes `.`.
///
/// `link/..` becomes `.` too, although for the kernel it is the parent of the folder that `link`
/// points to.
pub fn clean(path: &str) -> PathBuf {
    let mut clean = PathBuf::new();
    for component in Path::new(path).components() {
        match (component, clean.components().next_back()) {
            (Component::CurDir, _) | (Component::ParentDir, Some(Component::RootDir)) => {}
            (Component::ParentDir, Some(Component::Normal(_))) => {
                clean.pop();
            }
            (component, _) => clean.push(component),
        }
    }
    if clean.as_os_str().is_empty() { PathBuf::from(".") } else { clean }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_cleaned_lexically() {
        for (path, expected) in [
            ("/var/lib/cni", "/var/lib/cni"),
            ("/a//b/./c/", "/a/b/c"),
            ("/a/b/../c", "/a/c"),
            ("/../a", "/a"),
            ("/a/../..", "/"),
            ("a/../../b", "../b"),
            ("./a/..", "."),
            ("", "."),
        ] {
            assert_eq!(clean(path).to_str(), Some(expected), "{path}");
        }
    }

    #[test]
    fn only_regular_files_of_bounded_size_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let [path, link] = ["file", "link"].map(|name| folder.path().join(name));
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(read(&link).unwrap_err().kind(), io::ErrorKind::NotFound);
        let file = File::create(&path).unwrap();
        file.set_len(MAX_LENGTH).unwrap();
        assert_eq!(read(&link).unwrap().len() as u64, MAX_LENGTH);
        file.set_len(5 << 30).unwrap();
        assert_eq!(read(&path).unwrap_err().to_string(), "it is longer than 16 MiB");
        let fifo = folder.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        for path in [Path::new("/dev/zero"), folder.path(), &fifo] {
            assert_eq!(read(path).unwrap_err().to_string(), "it is not a regular file");
        }
    }
}
