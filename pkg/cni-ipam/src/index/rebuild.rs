//! Reading the folder of reservations: every name, and of the files only those that are new or
//! changed.
//!
//! It changes nothing. A name is a reservation only if it is an address in the one spelling that Go
//! and these plugins write; other files in the folder are ignored. Metadata comes from std, which
//! has 64-bit inodes and times everywhere; the C library of a 32-bit machine does not.

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

use super::{Holder, Record, hash};

/// The length of the longest reservation, in bytes. Only this much of a longer file is read.
pub(crate) const LONGEST: u64 = 64 * 1024;
/// The length of the longest container ID, in bytes. A longer first line is not an ID.
const LONGEST_ID: usize = 4096;
/// A file that changed less than this many seconds ago may change again without its times telling.
const SETTLED: i64 = 2;

/// The address that a file's name is, in its only spelling.
pub(crate) fn canonical(name: &[u8]) -> Option<IpAddr> {
    // Longer than any address, or no hexadecimal digit in front: most foreign names end here.
    if name.len() > 45 || !name.first().is_some_and(|byte| byte.is_ascii_hexdigit() || *byte == b':') {
        return None;
    }
    let name = std::str::from_utf8(name).ok()?;
    let address: IpAddr = name.parse().ok()?;
    // An IPv4 address has one spelling that parses; of IPv6 we and Go write the same one.
    let exact = match address {
        IpAddr::V4(_) => true,
        IpAddr::V6(v6) => v6.to_ipv4_mapped().is_none() && v6.to_string() == name,
    };
    exact.then_some(address)
}

/// The addresses that are names in a folder, without looking at a single file: for STATUS without
/// an index.
pub(crate) fn names_in(folder: &Path) -> io::Result<Vec<IpAddr>> {
    let mut addresses = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        addresses.extend(canonical(entry?.file_name().as_bytes()));
    }
    Ok(addresses)
}

/// Everything in the folder that is named as an address, in no order. `known` are records of an
/// earlier time.
///
/// # Errors
/// The folder cannot be read. A single file that cannot be read is taken, and read again next time.
pub(crate) fn scan(path: &Path, folder: &File, known: &HashMap<IpAddr, Record>) -> io::Result<Vec<Record>> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() as i64;
    let mut records = Vec::with_capacity(known.len());
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        let Some(address) = canonical(entry.file_name().as_bytes()) else { continue };
        // Reads the name itself, by the folder's descriptor: walking the path again for each would
        // double the time.
        let metadata = match entry.metadata() {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            // A broken inode must not keep every container of the network from ending.
            Err(_) => {
                records.push(unread(address));
                continue;
            }
        };
        let record = match known.get(&address) {
            // A file without a known owner may have one now: older builds did not read files that
            // are too long.
            Some(known) if !matches!(known.holder, Holder::Unread | Holder::Unknown) && is_same(known, &metadata) => {
                Record { ctime: ctime(&metadata), ..*known }
            }
            _ => fresh(address, &metadata, read(folder, address), now),
        };
        records.push(record);
    }
    Ok(records)
}

/// A record of a file of which nothing can be had.
fn unread(address: IpAddr) -> Record {
    Record { address, inode: 0, ctime: (0, 0), mtime_nanos: 0, holder: Holder::Unread, boot: 0 }
}

/// When a file was last changed in any way.
fn ctime(metadata: &Metadata) -> (i64, u32) {
    (metadata.ctime(), metadata.ctime_nsec() as u32)
}

fn is_same(known: &Record, metadata: &Metadata) -> bool {
    known.inode == metadata.ino()
        && known.is_of_ctime(ctime(metadata))
        && known.mtime_nanos == metadata.mtime_nsec() as u32
}

/// Whether a file is still the one that a record describes, unchanged.
pub(crate) fn is_unchanged(folder: &File, record: &Record) -> bool {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let Ok(file) = openat(folder.as_fd(), record.address.to_string().as_str(), flags, Mode::empty()) else {
        return false;
    };
    File::from(file).metadata().is_ok_and(|metadata| is_same(record, &metadata))
}

/// A record of a file whose making we did not see.
fn fresh(address: IpAddr, metadata: &Metadata, content: io::Result<Content>, now: i64) -> Record {
    let settled = (0..=now - SETTLED).contains(&metadata.ctime());
    let holder = match content {
        Ok(Content::Text(text)) => Holder::Content(hash(&text)),
        Ok(Content::Blank | Content::Absent) => Holder::Free,
        Ok(Content::Foreign) => Holder::Unknown,
        Err(_) => Holder::Unread,
    };
    let ctime = if settled { ctime(metadata) } else { (0, 0) };
    Record { address, inode: metadata.ino(), ctime, mtime_nanos: metadata.mtime_nsec() as u32, holder, boot: 0 }
}

/// The content of a file in the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// There is no file of that name.
    Absent,
    /// A file of nothing but NULs and white space: what a killed Go plugin leaves. The address is
    /// free.
    Blank,
    /// The reservation's text, trimmed as Go trims it; for a file that is too long, the owner that
    /// its beginning names.
    Text(Vec<u8>),
    /// Neither a reservation nor free: not a regular file, or a file that is too long and names no
    /// owner.
    Foreign,
}

/// Reads one reservation by its address.
pub(crate) fn read(folder: &File, address: IpAddr) -> io::Result<Content> {
    read_name(folder, &address.to_string())
}

/// Reads a small file of the folder. It is never waited for, and a symbolic link never followed.
pub(crate) fn read_name(folder: &File, name: &str) -> io::Result<Content> {
    let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC | OFlag::O_NOCTTY;
    let file: OwnedFd = match openat(folder.as_fd(), name, flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::ENOENT) => return Ok(Content::Absent),
        Err(Errno::ELOOP | Errno::ENXIO) => return Ok(Content::Foreign),
        Err(error) => return Err(error.into()),
    };
    let file = File::from(file);
    if !file.metadata()?.is_file() {
        return Ok(Content::Foreign);
    }
    let mut bytes = Vec::with_capacity(256);
    file.take(LONGEST + 1).read_to_end(&mut bytes)?;
    Ok(classify(&bytes))
}

pub(crate) fn classify(bytes: &[u8]) -> Content {
    if bytes.len() as u64 > LONGEST {
        return owner_of_oversized(&bytes[..LONGEST as usize]);
    }
    if bytes.iter().all(|byte| *byte == 0 || byte.is_ascii_whitespace()) {
        return Content::Blank;
    }
    match std::str::from_utf8(bytes) {
        Ok(text) if text.trim().is_empty() => Content::Blank,
        Ok(text) => Content::Text(text.trim().as_bytes().to_vec()),
        Err(_) => Content::Text(bytes.trim_ascii().to_vec()),
    }
}

/// Returns the owner that the `beginning` of a file names: a container ID in its first line and, in
/// a reservation, an interface in the second one. Whatever the rest of the file is, the owner's DEL
/// and a GC without the owner must find it.
fn owner_of_oversized(beginning: &[u8]) -> Content {
    let text = String::from_utf8_lossy(beginning);
    let text = text.trim_start();
    let end = text.find(['\r', '\n', '\0']).unwrap_or(text.len());
    let (id, rest) = text.split_at(end);
    let id = match id.trim_end() {
        "" => return Content::Foreign,
        // This text is not a container's ID: no ID contains its last character.
        id if id.len() > LONGEST_ID => format!("{}…", id.chars().take(64).collect::<String>()),
        id => id.to_owned(),
    };
    let ifname = rest.strip_prefix("\r\n").and_then(|rest| rest.split(|c: char| c.is_whitespace() || c == '\0').next());
    let owner = match ifname.filter(|name| cni::ident::check_interface_name(name).is_ok()) {
        Some(ifname) => format!("{id}\r\n{ifname}"),
        None => id,
    };
    Content::Text(owner.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_spelling_of_an_address_is_a_reservation() {
        for name in ["10.0.0.1", "0.0.0.0", "fd00::2", "::", "::a01:203", "fd00::1:0:0:1"] {
            assert_eq!(canonical(name.as_bytes()).map(|address| address.to_string()).as_deref(), Some(name));
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
            assert_eq!(canonical(name.as_bytes()), None, "{name}");
        }
        assert_eq!(canonical(b"10.0.0.1\xff"), None);
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
            bytes.resize(LONGEST as usize + 1, filler);
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
        let mut invalid = vec![0xff; LONGEST as usize + 1];
        assert!(matches!(classify(&invalid), Content::Text(_)));
        invalid.truncate(LONGEST as usize);
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
        assert_eq!((records[0].holder, records[0].is_occupied()), (Holder::Unread, true));
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
        let address = canonical(b"10.0.0.2").unwrap();
        let at = |now: i64| fresh(address, &metadata, read(&open, address), now);
        assert!(!is_same(&at(metadata.ctime()), &metadata));
        assert!(!is_same(&at(metadata.ctime() - 100), &metadata), "a clock that was set back");
        assert!(is_same(&at(metadata.ctime() + SETTLED), &metadata));
    }
}
