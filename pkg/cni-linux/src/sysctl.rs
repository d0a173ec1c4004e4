//! Reads and writes sysctls: files under /proc/sys.
//!
//! `net/…` has the values of the network namespace of the *thread* that opens the file. For a
//! container's values, call these functions inside [`Netns::run`](crate::Netns::run).

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use cni::steps::Step;

use crate::error::{Cause, Error, Result};

const ROOT: &str = "/proc/sys";

/// Returns the file of a sysctl. As in Go and in sysctl(8), the components of `name` are separated
/// by `.` or by `/`, whichever comes first in it. In a name that is separated by `.`, a `/` stands
/// for a dot: `net.ipv4.conf.eth0/100.forwarding` is about the interface `eth0.100`.
///
/// # Errors
/// A component is empty, `.` or `..`, or contains a NUL byte, so the path could lead elsewhere.
pub fn path(name: &str) -> Result<PathBuf> {
    let first_separator = name.find(['.', '/']).map(|at| name.as_bytes()[at]);
    let relative: String = if first_separator == Some(b'.') {
        let swap = |c| match c {
            '.' => '/',
            '/' => '.',
            other => other,
        };
        name.chars().map(swap).collect()
    } else {
        name.to_owned()
    };
    if name.contains('\0') || relative.split('/').any(|part| matches!(part, "" | "." | "..")) {
        let cause = Cause::text("it is not a valid name");
        return Err(Error::new(format_args!("failed to find sysctl {name:?}"), cause));
    }
    Ok(Path::new(ROOT).join(relative))
}

/// Returns the value of a sysctl, without its final newline.
///
/// # Errors
/// [`Error::is_not_found`] if this kernel has no such sysctl.
pub fn read(name: &str) -> Result<String> {
    let path = path(name)?;
    let bytes =
        fs::read(&path).map_err(|error| Error::new(format_args!("failed to read {}", path.display()), error))?;
    let mut text = String::from_utf8_lossy(&bytes).into_owned();
    if text.ends_with('\n') {
        text.pop();
    }
    Ok(text)
}

/// Writes a value to a sysctl.
///
/// # Errors
/// [`Error::is_not_found`] if this kernel has no such sysctl; the kernel's errno if it refuses the
/// value.
pub fn write(name: &str, value: &str) -> Result<()> {
    let path = path(name)?;
    let write = || -> io::Result<()> {
        // Without `create`, so a missing sysctl is an error that names it.
        OpenOptions::new().write(true).open(&path)?.write_all(value.as_bytes())
    };
    let step = Step::begin();
    let written = write();
    step.end(format_args!("write {value:?} to {}", path.display()), &written);
    written.map_err(|error| Error::new(format_args!("failed to write {value:?} to {}", path.display()), error))
}

/// Writes a value to a sysctl that does not have it yet. Returns the replaced value, or `None` if
/// the sysctl had the value already, which also works on a read-only /proc/sys.
///
/// # Errors
/// The sysctl cannot be read or written.
pub fn ensure(name: &str, value: &str) -> Result<Option<String>> {
    let old = read(name)?;
    if old == value {
        return Ok(None);
    }
    write(name, value)?;
    Ok(Some(old))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, new_netns};

    #[test]
    fn the_first_separator_decides() {
        for (name, file) in [
            ("net.ipv4.ip_forward", "net/ipv4/ip_forward"),
            ("net/ipv4/ip_forward", "net/ipv4/ip_forward"),
            ("net.ipv4.conf.eth0/100.forwarding", "net/ipv4/conf/eth0.100/forwarding"),
            ("net/ipv4/conf/eth0.100/forwarding", "net/ipv4/conf/eth0.100/forwarding"),
            ("single", "single"),
        ] {
            assert_eq!(path(name).unwrap(), Path::new(ROOT).join(file), "{name}");
        }
    }

    #[test]
    fn no_name_leads_out_of_the_tree() {
        for name in [
            "",
            "/etc/passwd",
            "..",
            "net/../../../etc/passwd",
            "net.//.x",
            "net.ipv4..x",
            "a/./b",
            "net/",
            "net.",
            "n\0/x",
        ] {
            assert!(path(name).is_err(), "{name:?} became {:?}", path(name));
        }
    }

    #[test]
    fn a_value_belongs_to_the_namespace_of_the_thread() {
        in_new_netns(|| {
            let name = "net/ipv4/conf/all/arp_notify";
            assert_eq!(ensure(name, "1").unwrap().as_deref(), Some("0"));
            assert_eq!(ensure(name, "1").unwrap(), None);
            assert_eq!(read("net.ipv4.conf.all.arp_notify").unwrap(), "1");
            assert_eq!(new_netns().run(|| read(name).unwrap()).unwrap(), "0");
        });
    }

    #[test]
    fn a_failure_names_the_file() {
        in_new_netns(|| {
            let error = write("net.ipv4.no_such_value", "1").unwrap_err();
            assert!(error.is_not_found());
            let expected = "failed to write \"1\" to /proc/sys/net/ipv4/no_such_value: No such file or directory";
            assert!(error.to_string().starts_with(expected), "{error}");
            let error = write("net.ipv4.ip_forward", "many").unwrap_err();
            assert_eq!(error.errno(), Some(libc::EINVAL));
        });
    }
}
