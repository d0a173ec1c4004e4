//! Finds the reservations of an owner without reading the folder: the file of each reservation has
//! a second name, a hard link, that begins with a hash of the file's content.
//!
//! The links are in `<dataDir>/.cni/<network>/links/<bucket>/`. The bucket is a hash of the
//! container ID, so that one small folder has all links of an attachment. The links may be deleted
//! at any time: the next verb that takes the lock reads the folder and creates them again.
//!
//! # How missing links are recognised
//!
//! After each change, these plugins set the mtime of the folder of reservations and of the folder
//! `links` to the same time: a day in the past, with random nanoseconds ([`Links::stamp`]). When
//! any program creates or removes a file, the kernel sets the folder's mtime to the present time.
//! So every reservation has its link if both mtimes are equal ([`Links::is_complete`]). If they are
//! not, or a process was killed between the two, [`scan`] compares the folder with the links. A
//! file and its link have the same inode number, and the link keeps the inode from being used
//! again, so only files without a link are read.
//!
//! # What the links can miss
//!
//! - A program that ignores the lock (Go's plugin takes it) changes the folder just before it is
//!   stamped. The next scan finds the change.
//! - A file is edited in place. Every verb reads a file before it acts on it, but the new owner's
//!   DEL does not find the file until a verb of the previous owner has found the edit.

use std::collections::HashMap;
use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, DirEntryExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::sys::stat::{UtimensatFlags, futimens, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::linkat;

use crate::content::{self, Content, address_of_name, hash, parse_hash};
use crate::host::{Boot, Timestamp};

/// The number of buckets. More would make a scan slower, fewer a look-up on a full node.
const BUCKETS: u64 = 256;
/// How many seconds before the present a stamp is.
const STAMP_AGE: i64 = 86_400;

/// The link of one reservation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    /// The name of its folder, a hash of the container ID.
    bucket: u8,
    /// The hash of the reservation's content.
    pub(crate) owner: u64,
    pub(crate) address: IpAddr,
    /// The boot in which this plugin made the reservation. `None` if another program may have made
    /// it, or if the folder is on a shared file system.
    pub(crate) boot: Option<Boot>,
}

impl Link {
    /// Returns the link of a reservation with this content.
    pub(crate) fn new(content: &[u8], address: IpAddr, boot: Option<Boot>) -> Link {
        Link { bucket: bucket_of(content), owner: hash(content), address, boot }
    }

    /// Returns the name of the link in its bucket.
    fn name(&self) -> String {
        match &self.boot {
            Some(boot) => format!("{:016x}-{}-{boot}", self.owner, self.address),
            None => format!("{:016x}-{}", self.owner, self.address),
        }
    }

    /// Parses the name of a link. Returns `None` for another file.
    pub(crate) fn parse(bucket: u8, name: &str) -> Option<Link> {
        let (owner, rest) = name.split_once('-')?;
        let (address, boot) = match rest.split_once('-') {
            Some((address, boot)) => (address, Some(Boot::parse(boot)?)),
            None => (rest, None),
        };
        Some(Link { bucket, owner: parse_hash(owner)?, address: address_of_name(address.as_bytes())?, boot })
    }
}

/// Returns the bucket of a content: a hash of the container ID, which is its first line.
fn bucket_of(content: &[u8]) -> u8 {
    let end = content.windows(2).position(|pair| pair == b"\r\n").unwrap_or(content.len());
    (hash(&content[..end]) % BUCKETS) as u8
}

/// The links of one network's reservations. The caller holds the lock when it changes them.
#[derive(Clone, Debug)]
pub(crate) struct Links {
    /// The folder `links`.
    root: PathBuf,
}

impl Links {
    /// Returns the links in this sidecar, which need not exist.
    pub(crate) fn of(sidecar: &Path) -> Links {
        Links { root: sidecar.join("links") }
    }

    /// Returns the path of a link.
    pub(crate) fn path(&self, link: &Link) -> PathBuf {
        self.bucket_path(link.bucket).join(link.name())
    }

    /// Returns the path of a bucket.
    fn bucket_path(&self, bucket: u8) -> PathBuf {
        self.root.join(format!("{bucket:02x}"))
    }

    /// Creates the folder of the links, with access for root only. Removes another file of its
    /// name.
    pub(crate) fn prepare(&self) -> io::Result<()> {
        if std::fs::symlink_metadata(&self.root).is_ok_and(|metadata| !metadata.is_dir()) {
            std::fs::remove_file(&self.root)?;
        }
        create_folder(&self.root)
    }

    /// Returns the links of reservations with one of two contents, which name the same container.
    pub(crate) fn of_contents(&self, contents: &[Vec<u8>; 2]) -> io::Result<Vec<Link>> {
        let owners = contents.each_ref().map(|content| format!("{:016x}-", hash(content)));
        let bucket = bucket_of(&contents[0]);
        let mut links = Vec::new();
        self.list(bucket, |name, _| {
            if owners.iter().any(|owner| name.starts_with(owner)) {
                links.extend(Link::parse(bucket, name));
            }
        })?;
        Ok(links)
    }

    /// Calls `visit` with the name and the inode of each file in a bucket.
    fn list(&self, bucket: u8, mut visit: impl FnMut(&str, u64)) -> io::Result<()> {
        let entries = match std::fs::read_dir(self.bucket_path(bucket)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if let Some(name) = entry.file_name().to_str() {
                visit(name, entry.ino());
            }
        }
        Ok(())
    }

    /// Calls `visit` with each link, and its inode.
    fn list_all(&self, mut visit: impl FnMut(Link, u64)) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.root)? {
            let bucket = entry?.file_name().to_str().and_then(|name| u8::from_str_radix(name, 16).ok());
            let Some(bucket) = bucket else { continue };
            self.list(bucket, |name, inode| {
                if let Some(link) = Link::parse(bucket, name) {
                    visit(link, inode);
                }
            })?;
        }
        Ok(())
    }

    /// Runs `make`, which creates a file at the path of the link. If that fails, creates the bucket
    /// or removes an outdated link, and tries again.
    fn place<T>(&self, link: &Link, make: impl Fn(&Path) -> io::Result<T>) -> io::Result<T> {
        let path = self.path(link);
        match make(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => create_folder(&self.bucket_path(link.bucket))?,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => std::fs::remove_file(&path)?,
            outcome => return outcome,
        }
        make(&path)
    }

    /// Creates the file of a new reservation under the name of its link.
    pub(crate) fn create(&self, link: &Link, content: &str) -> io::Result<File> {
        let open = |path: &Path| OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let mut file = self.place(link, open)?;
        file.write_all(content.as_bytes()).inspect_err(|_| self.remove(link))?;
        Ok(file)
    }

    /// Creates the link of an existing reservation. It is not an error if the reservation has been
    /// removed.
    pub(crate) fn add(&self, folder: &File, link: &Link) -> io::Result<()> {
        let name = link.address.to_string();
        let make = |path: &Path| Ok(linkat(folder.as_fd(), name.as_str(), AT_FDCWD, path, AtFlags::empty())?);
        match self.place(link, make) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            outcome => outcome,
        }
    }

    /// Removes a link. A link that remains does no harm: the next scan removes it.
    pub(crate) fn remove(&self, link: &Link) {
        let _ = std::fs::remove_file(self.path(link));
    }

    /// Whether every reservation in the folder has its link.
    pub(crate) fn is_complete(&self, folder: &File) -> io::Result<bool> {
        let of_folder = stamp_of(&folder.metadata()?);
        let of_links = std::fs::symlink_metadata(&self.root).ok().and_then(|metadata| stamp_of(&metadata));
        Ok(of_folder.is_some() && of_folder == of_links)
    }

    /// Stamps both folders after a change of the reservations and their links.
    pub(crate) fn stamp(&self, folder: &File) -> io::Result<()> {
        let stamp = stamp_folder(folder)?;
        self.set_stamp(&stamp)
    }

    /// Sets the mtime of the folder `links` to the stamp of the folder of reservations.
    fn set_stamp(&self, stamp: &TimeSpec) -> io::Result<()> {
        Ok(utimensat(AT_FDCWD, &self.root, &TimeSpec::UTIME_OMIT, stamp, UtimensatFlags::NoFollowSymlink)?)
    }

    /// Brings the links up to date with the folder. `path` is the folder's path. Returns what is in
    /// the folder, and the error if the links cannot be written.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(crate) fn update(&self, path: &Path, folder: &File) -> io::Result<(Scan, io::Result<()>)> {
        // Before the folder is read. If another program then changes the folder, the kernel changes
        // the mtime, and the next verb reads the folder again.
        let stamped = self.prepare().and_then(|()| stamp_folder(folder));
        let scan = scan(path, folder, self)?;
        let update = |stamp: TimeSpec| {
            scan.outdated.iter().for_each(|link| self.remove(link));
            scan.held[scan.linked..].iter().try_for_each(|(link, _)| self.add(folder, link))?;
            // An unreadable file has no link, so the next verb must scan again.
            if scan.unread.is_empty() { self.set_stamp(&stamp) } else { Ok(()) }
        };
        let updated = stamped.and_then(update);
        Ok((scan, updated))
    }
}

/// Creates a folder and its parents with access for root only.
///
/// # Errors
/// Not `AlreadyExists`, which would mean a reservation of the address: a dangling symbolic link in
/// place of a folder is reported as `NotADirectory`.
fn create_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => ErrorKind::NotADirectory.into(),
        _ => error,
    })
}

/// Returns the mtime of a folder if it is a stamp. An mtime that the kernel has set is about as old
/// as the ctime. Two folders may have the same, because the kernel's clock is coarse.
fn stamp_of(metadata: &Metadata) -> Option<Timestamp> {
    let is_stamp = metadata.mtime() + STAMP_AGE / 2 < metadata.ctime();
    is_stamp.then(|| (metadata.mtime(), metadata.mtime_nsec() as u32))
}

/// Sets the folder's mtime to a new stamp, which is returned.
fn stamp_folder(folder: &File) -> io::Result<TimeSpec> {
    let random = getrandom::u32().map_err(|error| io::Error::other(error.to_string()))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let stamp = TimeSpec::new((now as i64 - STAMP_AGE) as _, (random % 1_000_000_000) as _);
    futimens(folder.as_fd(), &TimeSpec::UTIME_OMIT, &stamp)?;
    Ok(stamp)
}

/// What is in the folder of reservations.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    /// The reservations, each as its link and its inode. The first [`linked`](Scan::linked) have
    /// this link, the others should get it.
    pub(crate) held: Vec<(Link, u64)>,
    /// How many reservations have their link.
    linked: usize,
    /// The links of removed and replaced files.
    outdated: Vec<Link>,
    /// The addresses whose files are not reservations.
    pub(crate) foreign: Vec<IpAddr>,
    /// The addresses whose files could not be read, and why.
    pub(crate) unread: Vec<(IpAddr, io::Error)>,
}

impl Scan {
    /// Whether every file has its link, and every link its file.
    pub(crate) fn is_up_to_date(&self) -> bool {
        self.linked == self.held.len() && self.outdated.is_empty() && self.unread.is_empty()
    }

    /// Returns the addresses that are not free, in no order.
    pub(crate) fn occupied(&self) -> impl Iterator<Item = IpAddr> {
        let held = self.held.iter().map(|(link, _)| link.address);
        held.chain(self.foreign.iter().copied()).chain(self.unread.iter().map(|(address, _)| *address))
    }
}

/// Compares the folder with the links, and reads the files that have no link. Changes nothing.
///
/// # Errors
/// The folder cannot be read. A single file that cannot be read is not an error.
pub(crate) fn scan(path: &Path, folder: &File, links: &Links) -> io::Result<Scan> {
    let mut inodes: HashMap<IpAddr, u64> = names_in(path)?.into_iter().collect();
    let mut scan = Scan::default();
    // A folder of links that cannot be read is like one without links.
    let _ = links.list_all(|link, inode| {
        if inodes.get(&link.address) == Some(&inode) {
            inodes.remove(&link.address);
            scan.held.push((link, inode));
        } else {
            scan.outdated.push(link);
        }
    });
    scan.linked = scan.held.len();
    for (address, inode) in inodes {
        // Tried twice, because the cause may pass, such as a signal or a lack of memory.
        match content::read(folder, address).or_else(|_| content::read(folder, address)) {
            Ok(Content::Text(text)) => scan.held.push((Link::new(&text, address, None), inode)),
            Ok(Content::Blank | Content::Absent) => {}
            Ok(Content::Foreign) => scan.foreign.push(address),
            Err(error) => scan.unread.push((address, error)),
        }
    }
    Ok(scan)
}

/// Returns the addresses that are names of files in the folder, each with its inode. Reads no file.
pub(crate) fn names_in(folder: &Path) -> io::Result<Vec<(IpAddr, u64)>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        names.extend(address_of_name(entry.file_name().as_bytes()).map(|address| (address, entry.ino())));
    }
    Ok(names)
}
