//! Reads the folder of reservations for a rebuild of the index: all names, and the content of files
//! that are new or changed.
//!
//! Nothing in the folder is changed. Files whose names are not addresses, in the spelling of Go's
//! plugin and this one, are ignored. Metadata is read with std instead of nix, because the C
//! library of a 32-bit machine truncates inodes and times.

use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

use super::record::UNRELIABLE_CTIME;
use super::{Holder, Record, hash};
use crate::host::Timestamp;

/// The length of the longest reservation, in bytes. Only this much of a longer file is read.
pub(crate) const MAX_LENGTH: u64 = 64 * 1024;
/// The length of the longest container ID, in bytes.
const MAX_ID_LENGTH: usize = 4096;
/// The number of characters that messages show of a first line that is too long for an ID.
const SHOWN_LENGTH: usize = 64;
/// The length of the longest text of an address, in bytes.
const MAX_ADDRESS_LENGTH: usize = 45;
/// How many seconds after a change another change of the file could leave the same times: the
/// kernel's clock for the times of files is coarse.
const CLOCK_UNCERTAINTY: i64 = 2;

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

/// Returns the addresses that are names of files in the folder. Reads no file.
pub(crate) fn names_in(folder: &Path) -> io::Result<Vec<IpAddr>> {
    let mut addresses = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        addresses.extend(address_of_name(entry?.file_name().as_bytes()));
    }
    Ok(addresses)
}

/// Returns a record for each file whose name is an address, in no order. `known` are earlier
/// records: a file that is unchanged since its record is not read.
///
/// # Errors
/// The folder cannot be read. A single file that cannot be read is not an error: it gets a record
/// with [`Holder::Unreadable`].
pub(crate) fn scan(path: &Path, folder: &File, known: &HashMap<IpAddr, Record>) -> io::Result<Vec<Record>> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() as i64;
    let mut records = Vec::with_capacity(known.len());
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        let Some(address) = address_of_name(entry.file_name().as_bytes()) else { continue };
        // `DirEntry::metadata` uses the folder's descriptor, which takes half the time of a path.
        let metadata = match entry.metadata() {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            // One damaged file must not make every DEL of the network fail.
            Err(_) => {
                records.push(unreadable_record(address));
                continue;
            }
        };
        // Unreadable files are tried again. So are foreign files: older builds recorded every file
        // that is too long as foreign, even if it names an owner.
        let reusable = known.get(&address).filter(|record| {
            !matches!(record.holder, Holder::Unreadable | Holder::Foreign) && is_same(record, &metadata)
        });
        records.push(match reusable {
            // A provisional record has no exact ctime, so it gets that of the file.
            Some(record) => Record { ctime: ctime(&metadata), ..*record },
            None => new_record(address, &metadata, read(folder, address), now),
        });
    }
    Ok(records)
}

/// Returns the record of a file whose metadata cannot be read.
fn unreadable_record(address: IpAddr) -> Record {
    Record { address, inode: 0, ctime: UNRELIABLE_CTIME, mtime_nanos: 0, holder: Holder::Unreadable, boot: 0 }
}

/// Returns the file's ctime.
fn ctime(metadata: &Metadata) -> Timestamp {
    (metadata.ctime(), metadata.ctime_nsec() as u32)
}

/// Whether `metadata` is that of the file that the record describes, and the file is unchanged.
fn is_same(known: &Record, metadata: &Metadata) -> bool {
    known.inode == metadata.ino()
        && known.matches_ctime(ctime(metadata))
        && known.mtime_nanos == metadata.mtime_nsec() as u32
}

/// Whether the folder still has the file that the record describes, unchanged.
pub(crate) fn is_unchanged(folder: &File, record: &Record) -> bool {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let Ok(file) = openat(folder.as_fd(), record.address.to_string().as_str(), flags, Mode::empty()) else {
        return false;
    };
    File::from(file).metadata().is_ok_and(|metadata| is_same(record, &metadata))
}

/// Returns the record of a file that was just read. `now` is in seconds since 1970.
fn new_record(address: IpAddr, metadata: &Metadata, content: io::Result<Content>, now: i64) -> Record {
    // A ctime in the future, after the clock was set back, is not reliable either.
    let is_ctime_reliable = (0..=now - CLOCK_UNCERTAINTY).contains(&metadata.ctime());
    let holder = match content {
        Ok(Content::Text(text)) => Holder::Content(hash(&text)),
        Ok(Content::Blank | Content::Absent) => Holder::Free,
        Ok(Content::Foreign) => Holder::Foreign,
        Err(_) => Holder::Unreadable,
    };
    let ctime = if is_ctime_reliable { ctime(metadata) } else { UNRELIABLE_CTIME };
    // Only the process that creates a reservation knows the boot.
    Record { address, inode: metadata.ino(), ctime, mtime_nanos: metadata.mtime_nsec() as u32, holder, boot: 0 }
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

    #[test]
    fn an_unreadable_file_counts_as_taken_and_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("10.0.0.2");
        std::fs::write(&path, "a").unwrap();
        // No folder, so that nothing in it can be read.
        let (open, broken) = (File::open(folder.path()).unwrap(), File::open(&path).unwrap());
        let mut records = scan(folder.path(), &broken, &HashMap::new()).unwrap();
        assert_eq!((records[0].holder, records[0].is_occupied()), (Holder::Unreadable, true));
        // As if long ago.
        records[0].ctime = ctime(&std::fs::metadata(&path).unwrap());
        let known = HashMap::from([(records[0].address, records[0])]);
        let again = scan(folder.path(), &open, &known).unwrap();
        assert_eq!(again[0].holder, Holder::Content(hash(b"a")));
        let known = HashMap::from([(again[0].address, Record { ctime: records[0].ctime, ..again[0] })]);
        let kept = scan(folder.path(), &broken, &known).unwrap();
        assert_eq!(kept[0].holder, again[0].holder, "what is known is not read");
    }

    #[test]
    fn times_of_a_file_that_has_just_changed_prove_nothing() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("10.0.0.2"), "a").unwrap();
        let open = File::open(folder.path()).unwrap();
        let metadata = std::fs::metadata(folder.path().join("10.0.0.2")).unwrap();
        let address = address_of_name(b"10.0.0.2").unwrap();
        let at = |now: i64| new_record(address, &metadata, read(&open, address), now);
        assert!(!is_same(&at(metadata.ctime()), &metadata));
        assert!(!is_same(&at(metadata.ctime() - 100), &metadata), "a clock that was set back");
        assert!(is_same(&at(metadata.ctime() + CLOCK_UNCERTAINTY), &metadata));
    }
}
