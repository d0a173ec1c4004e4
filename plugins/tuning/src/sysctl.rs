//! Finds, reads and writes the sysctls of a container.
//!
//! All functions must be called inside the namespace, by [`Netns::run`](cni_linux::Netns::run),
//! because /proc/sys/net is that of the calling thread's namespace. Some values can only be written
//! (`route.flush`), and reading `stable_secret` fails until it is set. DEL does not restore such
//! values.

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

/// Finds the file of a sysctl, the first of its key's [readings](crate::key) that exists, and reads
/// the value.
///
/// # Errors
/// Code 7 if the sysctl does not exist in this namespace, and those of [`read_current`].
pub(crate) fn find(sysctl: &Sysctl) -> Result<Found> {
    // If none of the files exists, the error is about the first one.
    let mut first_failure = None;
    for reading in &sysctl.key.readings {
        let path = &reading.path;
        let why = match std::fs::metadata(Path::new("/proc/sys").join(path)) {
            Ok(metadata) if metadata.is_file() => {
                let current = read_current(path, || read(path))?;
                return Ok(Found { sysctl: sysctl.clone(), path: path.clone(), current });
            }
            Ok(_) => "it is a directory, not a sysctl".to_owned(),
            Err(error) => error.to_string(),
        };
        first_failure.get_or_insert_with(|| format!("{} below /proc/sys: {why}", shown(path)));
    }
    let msg = format!("sysctl {} cannot be set to {}", shown(&sysctl.key.written), shown(&sysctl.value));
    Err(Error::config(format!("{msg}: {}", first_failure.unwrap_or_default())))
}

/// Returns the current value, which `read` reads, or `None` if the kernel permanently refuses to
/// return it. DEL then has nothing to restore. `path` is for the error.
///
/// # Errors
/// Any other error of reading, for example a lack of memory. ADD then fails, because DEL could not
/// restore the value.
fn read_current(path: &str, read: impl Fn() -> cni_linux::Result<String>) -> Result<Option<String>> {
    // The second attempt is for transient errors; a permanent refusal has one of the errnos below.
    match read().or_else(|_| read()) {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(error.errno(), Some(libc::EACCES | libc::EPERM | libc::EIO | libc::EINVAL)) => Ok(None),
        Err(error) => Err(Error::from(error).context(format_args!("the value of {path}, which DEL restores"))),
    }
}

/// Writes an original value. An empty one is written as an empty line, because writing no bytes
/// changes nothing.
pub(crate) fn write_original(path: &str, original: &str) -> cni_linux::Result<()> {
    write(path, if original.is_empty() { "\n" } else { original })
}

impl Found {
    /// Writes the value of the configuration, and reads it back. Returns the kernel's value if it
    /// differs from the written one, or `None` if both are the same or it cannot be read.
    ///
    /// # Errors
    /// The kernel's refusal, with its errno, and the key and value of the configuration.
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

    /// Returns the outcome for a sysctl whose first `failures` reads fail, and the number of reads.
    fn read_after(failures: usize, path: &str) -> (Result<Option<String>>, usize) {
        let calls = Cell::new(0);
        let read = || {
            calls.set(calls.get() + 1);
            if calls.get() <= failures { read("net/no/such/value") } else { read(path) }
        };
        (read_current("x", read), calls.get())
    }

    #[test]
    fn a_value_that_cannot_be_read_once_is_read_again() {
        let path = "kernel/ostype";
        assert_eq!(read_after(0, path).0.unwrap().as_deref(), Some("Linux"));
        assert_eq!(read_after(1, path).0.unwrap().as_deref(), Some("Linux"));
        let (failed, calls) = read_after(9, path);
        assert!(failed.is_err() && calls == 2);
    }

    #[test]
    fn a_sysctl_that_cannot_be_read_has_no_value() {
        assert_eq!(read_after(0, "net/ipv4/route/flush").0.unwrap(), None);
    }
}
