//! Reads the files in the folder of reservations.
//!
//! Nothing is changed. Files whose names are not addresses, in the spelling of Go's plugin and this
//! one, are ignored.

use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

/// The length of the longest reservation, in bytes. Only this much of a longer file is read.
pub(crate) const MAX_LENGTH: u64 = 64 * 1024;
/// The length of the longest container ID, in bytes.
const MAX_ID_LENGTH: usize = 4096;
/// The number of characters that messages show of a first line that is too long for an ID.
const SHOWN_LENGTH: usize = 64;
/// The length of the longest text of an address, in bytes.
const MAX_ADDRESS_LENGTH: usize = 45;

/// Returns the address that is the file's name. Returns `None` if the name is not an address, or
/// not in the spelling of these plugins and Go's.
pub(crate) fn address_of_name(name: &[u8]) -> Option<IpAddr> {
    // Excludes most other names quickly.
    let begins_like_address = name.first().is_some_and(|byte| byte.is_ascii_hexdigit() || *byte == b':');
    if !begins_like_address || name.len() > MAX_ADDRESS_LENGTH {
        return None;
    }
    let name = std::str::from_utf8(name).ok()?;
    let address: IpAddr = name.parse().ok()?;
    let has_same_spelling = match address {
        // Only one spelling of an IPv4 address can be parsed.
        IpAddr::V4(_) => true,
        // Go writes an IPv4-mapped address as IPv4.
        IpAddr::V6(v6) => v6.to_ipv4_mapped().is_none() && v6.to_string() == name,
    };
    has_same_spelling.then_some(address)
}

/// The content of a file in the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// There is no file of that name.
    Absent,
    /// The file is empty or has only NULs and white space, as a killed Go plugin leaves it. The
    /// address is free.
    Blank,
    /// The reservation's text, trimmed as in Go's plugin. For a file that is too long: the text of
    /// the owner that its beginning names.
    Text(Vec<u8>),
    /// Neither a reservation nor free: not a regular file, or a file that is too long and does not
    /// name an owner.
    Foreign,
}

/// Reads the file of an address.
///
/// # Errors
/// The file exists and cannot be read.
pub(crate) fn read(folder: &File, address: IpAddr) -> io::Result<Content> {
    read_name(folder, &address.to_string())
}

/// Reads a file of the folder. Symbolic links are not followed, and opening a FIFO does not block.
///
/// # Errors
/// The file exists and cannot be read.
pub(crate) fn read_name(folder: &File, name: &str) -> io::Result<Content> {
    let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC | OFlag::O_NOCTTY;
    let file: OwnedFd = match openat(folder.as_fd(), name, flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::ENOENT) => return Ok(Content::Absent),
        // A symbolic link or a socket.
        Err(Errno::ELOOP | Errno::ENXIO) => return Ok(Content::Foreign),
        Err(error) => return Err(error.into()),
    };
    let file = File::from(file);
    if !file.metadata()?.is_file() {
        return Ok(Content::Foreign);
    }
    let mut bytes = Vec::with_capacity(256);
    // One byte more, so that `classify` recognises a file that is too long.
    file.take(MAX_LENGTH + 1).read_to_end(&mut bytes)?;
    Ok(classify(&bytes))
}

/// Returns the content of a file with these bytes.
pub(crate) fn classify(bytes: &[u8]) -> Content {
    if bytes.len() as u64 > MAX_LENGTH {
        return owner_of_oversized(&bytes[..MAX_LENGTH as usize]);
    }
    if bytes.iter().all(|byte| *byte == 0 || byte.is_ascii_whitespace()) {
        return Content::Blank;
    }
    match std::str::from_utf8(bytes) {
        // White space beyond ASCII.
        Ok(text) if text.trim().is_empty() => Content::Blank,
        Ok(text) => Content::Text(text.trim().as_bytes().to_vec()),
        Err(_) => Content::Text(bytes.trim_ascii().to_vec()),
    }
}

/// Returns the reservation that an oversized file is treated as, so that DEL or GC can remove the
/// file. The owner is the container ID in the first line, with the interface name at the beginning
/// of the second line if that name is valid. Returns [`Content::Foreign`] if there is no ID.
fn owner_of_oversized(beginning: &[u8]) -> Content {
    let text = String::from_utf8_lossy(beginning);
    let text = text.trim_start();
    let end = text.find(['\r', '\n', '\0']).unwrap_or(text.len());
    let (id, rest) = text.split_at(end);
    let id = match id.trim_end() {
        "" => return Content::Foreign,
        // Too long for an ID: messages show the beginning of the line. No ID contains `…`, so this
        // owner matches no attachment, and of the verbs only GC removes the file.
        id if id.len() > MAX_ID_LENGTH => format!("{}…", id.chars().take(SHOWN_LENGTH).collect::<String>()),
        id => id.to_owned(),
    };
    // A reservation separates ID and interface name by `\r\n`.
    let second_line = rest.strip_prefix("\r\n").unwrap_or_default();
    let ifname = second_line.split(|c: char| c.is_whitespace() || c == '\0').next().unwrap_or_default();
    let owner = if cni::ident::check_interface_name(ifname).is_ok() { format!("{id}\r\n{ifname}") } else { id };
    Content::Text(owner.into_bytes())
}

/// Returns the hash of a text (FNV-1a with a finaliser). Names of links contain such hashes, so the
/// algorithm must not change; those of the standard library may.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    let mut h = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    h ^= h >> 33;
    h = h.wrapping_mul(0xff51_afd7_ed55_8ccd);
    h ^= h >> 33;
    h = h.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    h ^ (h >> 33)
}

/// Parses a hash of 16 digits, as `{:016x}` writes it. Returns `None` for another text.
pub(crate) fn parse_hash(text: &str) -> Option<u64> {
    let is_spelled_so = text.len() == 16 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    u64::from_str_radix(text, 16).ok().filter(|_| is_spelled_so)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_spelling_of_an_address_is_a_reservation() {
        for name in ["10.0.0.1", "0.0.0.0", "fd00::2", "::", "::a01:203", "fd00::1:0:0:1"] {
            assert_eq!(address_of_name(name.as_bytes()).map(|address| address.to_string()).as_deref(), Some(name));
        }
        for name in [
            "lock",
            "last_reserved_ip.0",
            "10.0.0.01",
            "10.0.0",
            "FD00::2",
            "fd00:0::2",
            "fd00::2%eth0",
            "::ffff:10.0.0.1",
            "::ffff:a00:1",
            "10.0.0.1.tmp",
            "",
            "beef",
            "10.0.0.1 ",
        ] {
            assert_eq!(address_of_name(name.as_bytes()), None, "{name}");
        }
        assert_eq!(address_of_name(b"10.0.0.1\xff"), None);
    }

    #[test]
    fn contents_are_trimmed_as_in_go_and_only_blank_files_are_free() {
        for blank in [&b""[..], b"\0\0\0", b" \r\n", b"\0 \n", "\u{a0}".as_bytes()] {
            assert_eq!(classify(blank), Content::Blank);
        }
        assert_eq!(classify(b" id\r\neth0\n"), Content::Text(b"id\r\neth0".to_vec()));
        assert_eq!(classify(b"x"), Content::Text(b"x".to_vec()), "a short text is an old reservation");
        assert_eq!(classify(b"\xff \n"), Content::Text(b"\xff".to_vec()));
    }

    #[test]
    fn a_file_that_is_too_long_is_its_beginnings_owners() {
        let oversized = |beginning: &str, filler: u8| {
            let mut bytes = beginning.as_bytes().to_vec();
            bytes.resize(MAX_LENGTH as usize + 1, filler);
            classify(&bytes)
        };
        let text = |text: &str| Content::Text(text.as_bytes().to_vec());
        assert_eq!(oversized("id\r\neth0", 0), text("id\r\neth0"));
        assert_eq!(oversized(" id\r\neth0\r\n", b'x'), text("id\r\neth0"));
        assert_eq!(oversized("id\r\neth0", b'x'), text("id"), "no interface has such a name");
        assert_eq!(oversized("id\n", b'x'), text("id"));
        assert_eq!(oversized("id", b' '), text("id"));
        assert_eq!(oversized("", b'x'), text(&format!("{}…", "x".repeat(64))));
        assert_eq!(oversized("", 0), Content::Foreign, "blank as far as it is read, so the owner is unknown");
        assert_eq!(oversized("\r\n", b' '), Content::Foreign);
        let mut invalid = vec![0xff; MAX_LENGTH as usize + 1];
        assert!(matches!(classify(&invalid), Content::Text(_)));
        invalid.truncate(MAX_LENGTH as usize);
        assert_eq!(classify(&invalid), Content::Text(invalid));
    }
}
