//! Reads and writes sysctls, the files under /proc/sys.
//!
//! A file under `net/` belongs to the network namespace of the *thread* that opens it. For a
//! container's values, call these functions inside [`Netns::run`](crate::Netns::run).

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use cni::steps::Step;

use crate::error::{Cause, Error, Result};

const ROOT: &str = "/proc/sys";

/// Returns the path of a sysctl's file. The components of `name` are separated by `.` or `/`,
/// whichever comes first in `name`. With `.` as the separator, a `/` inside a component stands for
/// a dot: `net.ipv4.conf.eth0/100.forwarding` is about `eth0.100`, as in Go and in sysctl(8).
///
/// # Errors
/// `name` contains a zero byte, or a component is empty, `.` or `..`: the path could be outside
/// /proc/sys.
pub fn path(name: &str) -> Result<PathBuf> {
    let is_dotted = name.find(['.', '/']).is_some_and(|first| name[first..].starts_with('.'));
    let relative = if is_dotted { swap_separators(name) } else { name.to_owned() };
    if name.contains('\0') || relative.split('/').any(|part| matches!(part, "" | "." | "..")) {
        let cause = Cause::text("a part of the name is empty, `.` or `..`, or contains a zero byte");
        return Err(Error::new(format_args!("failed to find sysctl {name:?}"), cause));
    }
    Ok(Path::new(ROOT).join(relative))
}

/// Returns the other spelling of a name, with dots for slashes and slashes for dots.
pub fn swap_separators(name: &str) -> String {
    let swap = |letter| match letter {
        '.' => '/',
        '/' => '.',
        other => other,
    };
    name.chars().map(swap).collect()
}

/// Returns the value of a sysctl, without its final newline.
///
/// # Errors
/// [`Error::is_not_found`] if the kernel does not have the sysctl.
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

/// Writes the value of a sysctl.
///
/// # Errors
/// [`Error::is_not_found`] if the kernel does not have the sysctl; the kernel's errno if it refuses
/// the value.
pub fn write(name: &str, value: &str) -> Result<()> {
    let path = path(name)?;
    let write = || -> io::Result<()> {
        // Without the flag to create a file, so that a missing sysctl fails with ENOENT.
        OpenOptions::new().write(true).open(&path)?.write_all(value.as_bytes())
    };
    let step = Step::begin();
    let written = write();
    step.end(format_args!("write {value:?} to {}", path.display()), &written);
    written.map_err(|error| Error::new(format_args!("failed to write {value:?} to {}", path.display()), error))
}

/// Sets a sysctl to `value` and returns the previous value. If the sysctl has `value` already,
/// returns `None` and writes nothing, so a read-only /proc/sys is not an error.
///
/// # Errors
/// Those of [`read()`] and [`write()`].
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
    fn no_sysctl_name_leaves_the_tree() {
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
