//! Whom a verb is about: the path of a network namespace, and the container ID that goes with it.
//!
//! cnitool has no containers. Like Go's it takes the namespace's path for one, and derives the ID
//! from it; so the path must come out the same to the letter, or a DEL would not find what an ADD
//! made.

use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};

use cni::hash::sha512_hex;
use cni::machine::Machine;

/// Whether there is a namespace at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NetnsPresence {
    /// A namespace.
    There,
    /// Nothing: the reason.
    Gone(String),
    /// Something else: a description. An empty file is left where a namespace was unmounted; but a
    /// live one looks the same from a mount namespace that its mount has not reached. So it does
    /// not prove that the namespace is gone.
    Other(String),
    /// It could not be found out: why.
    Unknown(String),
}

impl NetnsPresence {
    pub(crate) fn of(netns: &str, machine: &dyn Machine) -> NetnsPresence {
        if netns.is_empty() {
            return NetnsPresence::Unknown("no path was recorded".to_owned());
        }
        match machine.is_own_netns(Path::new(netns)) {
            Ok(_) => NetnsPresence::There,
            Err(error) => match error.kind() {
                ErrorKind::NotFound => NetnsPresence::Gone("it does not exist".to_owned()),
                ErrorKind::NotADirectory => NetnsPresence::Gone(error.to_string()),
                ErrorKind::InvalidInput => {
                    NetnsPresence::Other(format!("the file there is not a network namespace: {error}"))
                }
                _ => NetnsPresence::Unknown(error.to_string()),
            },
        }
    }
}

/// A path made absolute as Go does it: lexically, without asking the file system about links.
pub(crate) fn absolute(path: &Path, folder: &Path) -> PathBuf {
    let mut clean = PathBuf::from("/");
    for component in folder.join(path).components() {
        match component {
            Component::Normal(name) => clean.push(name),
            Component::ParentDir => {
                clean.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    clean
}

/// The ID of the "container" behind a namespace: `cnitool-` and the first 20 digits of the SHA-512
/// of its path.
pub(crate) fn container_id(netns: &str) -> String {
    format!("cnitool-{}", sha512_hex(&[netns.as_bytes()], 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_become_absolute_lexically() {
        for (path, expected) in [
            ("/var/run/netns/x", "/var/run/netns/x"),
            ("x", "/work/x"),
            ("./../a//b/./c/", "/a/b/c"),
            ("/../../a", "/a"),
            ("/", "/"),
        ] {
            assert_eq!(absolute(Path::new(path), Path::new("/work")), Path::new(expected), "{path}");
        }
    }

    #[test]
    fn the_container_id_is_the_one_go_derives() {
        // printf %s /var/run/netns/testing | sha512sum
        assert_eq!(container_id("/var/run/netns/testing"), "cnitool-77383ca0a0715733ca6f");
    }
}
