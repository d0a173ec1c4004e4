//! Checks container IDs, network names and interface names.
//!
//! They become part of file names, chain names and link aliases, so every call checks them before
//! any work. The messages are Go's, because other programs compare them.

use crate::{Code, Error, Result};

/// The longest network name in bytes. File names that contain a longer one could exceed the limit
/// of 255 bytes.
pub const MAX_NETWORK_NAME: usize = 200;

/// The longest interface name in bytes that the kernel accepts: IFNAMSIZ without the terminating
/// zero.
const MAX_INTERFACE_NAME: usize = 15;

/// Whether a text begins with an ASCII letter or digit and has only ASCII letters, digits, `_`, `.`
/// and `-`.
fn is_identifier(text: &str) -> bool {
    text.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte))
}

/// Checks the characters of CNI_CONTAINERID.
///
/// # Errors
/// Code 4 with Go's text if a character is not allowed or the ID is empty. The details are the ID.
pub fn check_container_id(id: &str) -> Result<()> {
    if is_identifier(id) {
        return Ok(());
    }
    Err(Error::new(Code::INVALID_ENVIRONMENT, "invalid characters in containerID (CNI_CONTAINERID)").with_details(id))
}

/// Checks the characters of a network's name, not its length.
///
/// # Errors
/// Code 7 with Go's text if the name is empty or a character is not allowed. The details are the
/// name.
pub fn check_network_name(name: &str) -> Result<()> {
    if name.is_empty() {
        return Err(Error::config("missing network name"));
    }
    if is_identifier(name) {
        return Ok(());
    }
    Err(Error::config("invalid characters found in network name").with_details(name))
}

/// Checks CNI_IFNAME of an ADD. Besides names that [`check_interface_name`] refuses, this refuses
/// names that the kernel changes, or that some kernels refuse, when a link is created.
///
/// DEL and CHECK only use [`check_interface_name`], because an earlier release may have created an
/// attachment with a name that ADD now refuses.
///
/// # Errors
/// Code 4 if the name is refused.
pub fn check_new_interface_name(name: &str) -> Result<()> {
    check_interface_name(name)?;
    match reason_against_new_link(name) {
        Some(why) => Err(Error::new(Code::INVALID_ENVIRONMENT, format!("interface name {name:?} {why} (CNI_IFNAME)"))),
        None => Ok(()),
    }
}

/// Checks the name of a link on the host, such as a bridge, that a configuration has under `key`.
///
/// # Errors
/// Code 7 if the name is not valid for a new link or is `lo`.
pub fn check_host_link_name(key: &str, name: &str) -> Result<()> {
    let refuse = |why: &str| Err(Error::config(format!("{key} {name:?}: {why}")));
    if let Some(invalid) = invalid_link_name(name) {
        return refuse(invalid.msg);
    }
    match reason_against_new_link(name) {
        Some(why) => refuse(&format!("the name {why}")),
        None if name == "lo" => refuse("the name is that of the loopback interface"),
        None => Ok(()),
    }
}

/// Returns why a new link must not get this name, although [`invalid_link_name`] accepts it.
/// Returns `None` if the name is allowed.
fn reason_against_new_link(name: &str) -> Option<&'static str> {
    if name.contains('%') {
        // The kernel replaces `%d` in the name of a new link with a number.
        return Some("contains %, which the kernel treats as a template");
    }
    if name == "all" || name == "default" {
        // Some kernels refuse these names.
        return Some("is reserved: /proc/sys/net/ipv4/conf has settings for several interfaces under this name");
    }
    None
}

/// Checks that the kernel accepts CNI_IFNAME as the name of a link.
///
/// # Errors
/// Code 4 with Go's text and details if it does not.
pub fn check_interface_name(name: &str) -> Result<()> {
    match invalid_link_name(name) {
        Some(InvalidName { msg, details }) => {
            Err(Error::new(Code::INVALID_ENVIRONMENT, format!("{msg} (CNI_IFNAME)")).with_details(details))
        }
        None => Ok(()),
    }
}

/// Why the kernel does not accept a name, in Go's words.
struct InvalidName<'a> {
    msg: &'static str,
    details: &'a str,
}

/// Returns why the kernel does not accept a text as the name of a link, or `None` if the text is a
/// valid name.
fn invalid_link_name(name: &str) -> Option<InvalidName<'_>> {
    let invalid = |msg, details| Some(InvalidName { msg, details });
    if name.is_empty() {
        return invalid("interface name is empty", "");
    }
    if name.len() > MAX_INTERFACE_NAME {
        return invalid("interface name is too long", "interface name should be less than 16 characters");
    }
    if name == "." || name == ".." {
        return invalid("interface name is . or ..", name);
    }
    // An environment variable cannot contain a NUL byte, but a JSON string can, and the kernel
    // would cut the name there.
    if name.contains('\0') {
        return invalid("interface name contains a NUL", name);
    }
    if name.chars().any(|c| c == '/' || c == ':' || c.is_whitespace()) {
        return invalid("interface name contains / or : or whitespace characters", name);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_ids_and_network_names_share_their_alphabet() {
        for good in ["a", "0", "a-b_c.d", "Z9.", "a--"] {
            assert!(check_container_id(good).is_ok() && check_network_name(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", ".a", "_a", "a/b", "a b", "some-%%container-id", "ä", "a\0"] {
            assert!(check_container_id(bad).is_err() && check_network_name(bad).is_err(), "{bad}");
        }
        assert_eq!(check_network_name("").unwrap_err().msg(), "missing network name");
    }

    #[test]
    fn a_new_interface_has_a_name_of_its_own() {
        for good in ["eth0", "lo", "all0", "defaults", "ALL", "eth0.100"] {
            assert!(check_new_interface_name(good).is_ok(), "{good}");
        }
        for bad in ["eth%d", "%", "%s", "100%", "all", "default", "", "a/b"] {
            assert_eq!(check_new_interface_name(bad).unwrap_err().code(), Code::INVALID_ENVIRONMENT, "{bad}");
        }
        assert!(check_host_link_name("bridge", "br0").is_ok());
        for bad in ["br%d", "all", "default", "lo", "a/b", ""] {
            let error = check_host_link_name("bridge", bad).unwrap_err();
            assert!(error.code() == Code::INVALID_CONFIG && error.msg().starts_with("bridge \""), "{error}");
        }
    }

    #[test]
    fn interface_names_are_what_the_kernel_takes() {
        for good in ["eth0", "a", "123456789012345", "eth0.100", "e%d"] {
            assert!(check_interface_name(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "1234567890123456", "a/b", "a:b", "a b", "a\tb", "a\u{a0}b", "a\0", "a\0b"] {
            assert!(check_interface_name(bad).is_err(), "{bad}");
        }
    }
}
