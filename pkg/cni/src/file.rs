//! Reading files that a person has put there.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

/// The longest that a file of configuration may be: what a plugin takes on its stdin.
const LONGEST: u64 = 16 << 20;

/// What is in a regular file of at most 16 MiB, or behind a link to one.
///
/// # Errors
/// It cannot be read, is something else, or is longer.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    // Asked first, since opening a FIFO waits for its other end. A person does not swap them in between.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(LONGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LONGEST {
        return Err(io::Error::other("it is longer than 16 MiB"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_or_longer_than_any_configuration_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let [path, link] = ["file", "link"].map(|name| folder.path().join(name));
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(read(&link).unwrap_err().kind(), io::ErrorKind::NotFound);
        let file = File::create(&path).unwrap();
        file.set_len(LONGEST).unwrap();
        assert_eq!(read(&link).unwrap().len() as u64, LONGEST);
        file.set_len(5 << 30).unwrap();
        assert_eq!(read(&path).unwrap_err().to_string(), "it is longer than 16 MiB");
        let fifo = folder.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        for path in [Path::new("/dev/zero"), folder.path(), &fifo] {
            assert_eq!(read(path).unwrap_err().to_string(), "it is no regular file");
        }
    }
}
