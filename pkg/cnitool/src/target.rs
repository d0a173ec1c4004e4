//! Network namespaces: whether one exists at a path, and the container ID for a path.
//!
//! cnitool has no containers. Like Go's cnitool, it derives a container ID from the namespace's
//! path. So ADD and DEL need exactly the same path.

use std::io::ErrorKind;
use std::path::Path;

use cni::hash::sha512_hex;
use cni::machine::Machine;

/// Whether there is a namespace at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NetnsPresence {
    /// The namespace exists.
    Exists,
    /// There is no file at the path, for this reason.
    Gone(String),
    /// The file at the path is not a namespace, for this reason: an empty file remains after a
    /// namespace was unmounted. This does not prove that the namespace is gone: it may still be
    /// mounted at this path in another mount namespace.
    OtherFile(String),
    /// It is not known whether the namespace exists, for this reason.
    Unknown(String),
}

impl NetnsPresence {
    /// Whether nothing exists at the path.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self, NetnsPresence::Gone(_))
    }

    /// Checks whether there is a namespace at the path `netns`.
    pub(crate) fn at(netns: &str, machine: &dyn Machine) -> NetnsPresence {
        if netns.is_empty() {
            return NetnsPresence::Unknown("no path was recorded".to_owned());
        }
        // `is_own_netns` succeeds only for a namespace, whether it is this process's own or not.
        let Err(error) = machine.is_own_netns(Path::new(netns)) else { return NetnsPresence::Exists };
        match error.kind() {
            ErrorKind::NotFound => NetnsPresence::Gone("it does not exist".to_owned()),
            ErrorKind::NotADirectory => NetnsPresence::Gone(error.to_string()),
            // The error of `is_own_netns` for a file that is not a network namespace.
            ErrorKind::InvalidInput => {
                NetnsPresence::OtherFile(format!("the file there is not a network namespace: {error}"))
            }
            _ => NetnsPresence::Unknown(error.to_string()),
        }
    }
}

/// Returns the container ID for a namespace: `cnitool-` and the first 20 hex digits of the SHA-512
/// of its path.
pub(crate) fn container_id(netns: &str) -> String {
    format!("cnitool-{}", sha512_hex(&[netns.as_bytes()], 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_container_id_is_the_one_go_derives() {
        // printf %s /var/run/netns/testing | sha512sum
        assert_eq!(container_id("/var/run/netns/testing"), "cnitool-77383ca0a0715733ca6f");
    }
}
