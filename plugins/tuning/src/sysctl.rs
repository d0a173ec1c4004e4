//! Finds, reads and writes the sysctls of a container.
//!
//! All functions must be called inside the namespace, by [`Netns::run`](cni_linux::Netns::run),
//! because /proc/sys/net is that of the calling thread's namespace. Some values can only be written
//! (`route.flush`), and reading `stable_secret` fails until it is set; such values have no
//! original.

use std::path::Path;

use cni::{Code, Error, Result};
use cni_linux::sysctl::{read, write};

use crate::conf::Sysctl;
use crate::key::shown;
use crate::value::is_same;

/// A sysctl of the configuration, with its file in the container.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) sysctl: Sysctl,
    /// The path below /proc/sys.
    pub(crate) path: String,
    /// The current value, or `None` if the kernel does not let it be read.
    pub(crate) current: Option<String>,
}

/// Finds the files of all sysctls.
///
/// # Errors
/// Code 7 for the first sysctl that does not exist in this namespace.
pub(crate) fn find_all(sysctls: &[Sysctl]) -> Result<Vec<Found>> {
    sysctls.iter().map(find).collect()
}

/// Finds the file of a sysctl, and reads its value.
///
/// # Errors
/// As [`find_all`].
pub(crate) fn find(sysctl: &Sysctl) -> Result<Found> {
    let mut why = None;
    for reading in &sysctl.key.readings {
        let path = &reading.path;
        match std::fs::metadata(Path::new("/proc/sys").join(path)) {
            Ok(metadata) if metadata.is_file() => {
                let current = original(path, || read(path))?;
                return Ok(Found { sysctl: sysctl.clone(), path: path.clone(), current });
            }
            Ok(_) => why = why.or_else(|| Some("it is a folder of values".to_owned())),
            Err(error) => why = why.or_else(|| Some(error.to_string())),
        }
    }
    let msg = format!("sysctl {} cannot be set to {}", shown(&sysctl.key.written), shown(&sysctl.value));
    let path = sysctl.key.readings.first().map(|reading| shown(&reading.path)).unwrap_or_default();
    let why = why.unwrap_or_default();
    Err(Error::config(format!("{msg}: {path} below /proc/sys: {why}")))
}

/// Returns the current value, or `None` if the kernel never lets it be read, so that there is
/// nothing to restore.
///
/// # Errors
/// Any other error of reading, for example a lack of memory. ADD then fails, because DEL could not
/// restore the value.
fn original(path: &str, read: impl Fn() -> cni_linux::Result<String>) -> Result<Option<String>> {
    // The second attempt is for passing errors; a permanent refusal has one of the errno below.
    match read().or_else(|_| read()) {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(error.errno(), Some(libc::EACCES | libc::EPERM | libc::EIO | libc::EINVAL)) => Ok(None),
        Err(error) => Err(Error::from(error).context(format_args!("the value of {path}, which DEL restores"))),
    }
}

/// Writes an original value. An empty one is written as an empty line, because writing no bytes
/// changes nothing.
pub(crate) fn put_back(path: &str, original: &str) -> cni_linux::Result<()> {
    write(path, if original.is_empty() { "\n" } else { original })
}

impl Found {
    /// Writes the value of the configuration. Returns the value that the kernel has after the
    /// write, or `None` if that is the written value or cannot be read.
    ///
    /// # Errors
    /// The kernel refuses the value. The error has key, value and errno.
    pub(crate) fn write(&self) -> Result<Option<String>> {
        let Sysctl { key, value } = &self.sysctl;
        write(&self.path, value).map_err(|error| {
            let errno = std::io::Error::from_raw_os_error(error.errno().unwrap_or_default());
            let msg = format!("failed to set sysctl {} to {}", shown(&key.written), shown(value));
            Error::caused(Code::KERNEL, msg, errno)
        })?;
        if self.current.is_none() {
            return Ok(None);
        }
        Ok(read(&self.path).ok().filter(|current| !is_same(current, value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Read as often as it takes; the first `failures` times it is not there.
    fn read_after(failures: usize, path: &str) -> (Result<Option<String>>, usize) {
        let calls = Cell::new(0);
        let read = || {
            calls.set(calls.get() + 1);
            if calls.get() <= failures { read("net/no/such/value") } else { read(path) }
        };
        (original("x", read), calls.get())
    }

    #[test]
    fn an_original_that_cannot_be_read_for_a_moment_is_not_given_up() {
        let path = "kernel/ostype";
        assert_eq!(read_after(0, path).0.unwrap().as_deref(), Some("Linux"));
        assert_eq!(read_after(1, path).0.unwrap().as_deref(), Some("Linux"));
        let (failed, calls) = read_after(9, path);
        assert!(failed.is_err() && calls == 2);
    }

    #[test]
    fn what_refuses_to_be_read_by_nature_has_no_original() {
        assert_eq!(read_after(0, "net/ipv4/route/flush").0.unwrap(), None);
    }
}
