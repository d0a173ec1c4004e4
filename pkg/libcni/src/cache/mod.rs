//! The result cache: one file for each attachment,
//! `<dir>/results/<network>-<containerID>-<ifname>`.
//!
//! The files are byte for byte those of Go's libcni, so that either can replace the other while
//! containers run: one line of JSON of the kind `cniCacheV1` or, from older versions, a bare
//! result. Files that only this crate uses are in `results/.cni`, which Go's libcni skips because
//! it is a folder.
//!
//! `-` is allowed in all three parts of the name, so two attachments may have the same file name.
//! The content of the file names its attachment.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde_json::value::{RawValue, to_raw_value};

use super::request::{AddedKeys, derive};
use super::{Attachment, NetworkList, PluginConf};
use cni::json::Json;
use cni::result::{AddResult, Interface};
use cni::version::Version;
use cni::{AttachmentId, Code, Error, Result, ident};

mod wire;

use wire::Content;

/// The folder of the cache that Go's libcni and cnitool use. The results are in its folder
/// `results`.
pub const DEFAULT_DIR: &str = "/var/lib/cni";

/// The name of the folder, in the folder of results, for files that only this crate uses.
const OWN_FOLDER: &str = ".cni";

/// The number of processes that can write at the same time. It is never reached, and limits the
/// search for a free temporary file.
const MAX_WRITERS: u32 = 4096;

/// The largest length of an entry in bytes. It is twice what the longest configuration and the
/// longest result need that a plugin reads.
const LONGEST: u64 = 64 << 20;

/// The result cache in one folder.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

/// An attachment in the result cache.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The network's name.
    pub network: String,
    /// The arguments of the ADD. An entry of the oldest form has only the container ID and the
    /// interface name, which are those of its file name.
    pub attachment: Attachment,
    /// The bytes of the network's configuration at the time of the ADD.
    pub config: Vec<u8>,
    /// The ADD's result, verbatim, in the version in which it was returned.
    pub result: Option<Box<RawValue>>,
}

/// The attachments of a network in the result cache, and the files that cannot be decoded.
#[derive(Debug, Default)]
pub struct Listing {
    /// The attachments, sorted by file name.
    pub entries: Vec<Entry>,
    /// One line for each file that cannot be decoded. Such files are not changed.
    pub problems: Vec<String>,
}

/// What the file of an attachment has.
enum Found {
    /// The file does not exist.
    Nothing,
    /// The attachment's entry.
    Entry(Box<Entry>),
    /// The entry of another attachment with the same file name. The text names it.
    Another(String),
    /// Something that cannot be decoded, with the reason.
    Garbage(String),
}

impl Entry {
    /// Returns the network's configuration at the time of the ADD. Go's libcni stores the object of
    /// a single plugin if the ADD was without a list; it becomes a list with this plugin.
    ///
    /// # Errors
    /// Those of [`NetworkList::parse`].
    pub fn list(&self) -> Result<NetworkList> {
        NetworkList::parse(&self.config).or_else(|error| NetworkList::parse_single(&self.config).map_err(|_| error))
    }

    /// Returns the identifier of the entry's attachment.
    pub fn id(&self) -> AttachmentId {
        self.attachment.id(&self.network)
    }

    /// Adds the namespace of the container's interface in the result to an entry that has none:
    /// libcni before 1.2, which Podman 4 and containerd 1.6 use, does not store it.
    fn with_netns(mut self) -> Entry {
        if self.attachment.netns.is_empty()
            && let Ok(Some(interface)) = self.container_interface()
        {
            self.attachment.netns = interface.sandbox;
        }
        self
    }

    /// Returns the entry of the container's interface in the result, or `None` if the result has no
    /// such entry.
    ///
    /// # Errors
    /// Code 6 if the result cannot be decoded.
    pub fn container_interface(&self) -> Result<Option<Interface>> {
        let Some(result) = self.result.as_deref() else { return Ok(None) };
        let undecodable =
            |why: String| Error::new(Code::DECODE, format!("failed to decode the result in the result cache: {why}"));
        let json = Json::parse(result.get().as_bytes()).map_err(|error| undecodable(error.to_string()))?;
        let result = AddResult::decode(&json, Version::NEWEST).map_err(|error| undecodable(error.to_string()))?;
        let is_container_interface =
            |interface: &Interface| interface.name == self.attachment.ifname && !interface.sandbox.is_empty();
        Ok(result.interfaces.into_iter().find(is_container_interface))
    }

    /// Returns the result as a `prevResult` of `version`, or `None` without a result. It is
    /// verbatim if it has that version already.
    ///
    /// # Errors
    /// Code 6 if the result cannot be decoded or cannot be expressed in `version`.
    pub fn result_as(&self, version: Version) -> Result<Option<Box<RawValue>>> {
        self.result.as_deref().map(|result| in_version(result, version)).transpose()
    }

    /// Returns the configuration that `plugin` of `list` reads on its stdin for a CHECK of the
    /// attachment.
    ///
    /// # Errors
    /// Code 6 if the result cannot be decoded or cannot be expressed in the list's version.
    pub fn request(&self, list: &NetworkList, plugin: &PluginConf) -> Result<Vec<u8>> {
        let result = self.result_as(list.version()?)?;
        let capability_args = Some(&self.attachment.capability_args);
        derive(list, plugin, AddedKeys { prev_result: result.as_deref(), capability_args, valid: None })
    }
}

/// Converts a result to `version`. A result without `cniVersion` is taken to be in `version`.
///
/// # Errors
/// Code 6 if the result cannot be decoded or cannot be expressed in `version`.
pub(super) fn in_version(result: &RawValue, version: Version) -> Result<Box<RawValue>> {
    let failed = |why: String| Error::new(Code::DECODE, why);
    let json = Json::parse(result.get().as_bytes()).map_err(|error| failed(error.to_string()))?;
    let decoded = AddResult::decode(&json, version).map_err(|error| failed(error.to_string()))?;
    if json.get("cniVersion").and_then(Json::as_str) == Some(version.as_str()) {
        return Ok(result.to_owned());
    }
    let encoded = decoded.to_value(version).map_err(|error| failed(error.to_string()))?;
    to_raw_value(&encoded).map_err(|error| failed(error.to_string()))
}

impl Cache {
    /// Returns the cache in `dir`, usually [`DEFAULT_DIR`]. The first ADD creates the folder.
    pub fn new(dir: impl AsRef<Path>) -> Cache {
        Cache { folder: dir.as_ref().join("results") }
    }

    /// Returns the path of an attachment's file.
    ///
    /// # Errors
    /// A part of the identifier is empty (Go's text), or invalid, so that the path could be outside
    /// the folder (codes 4 and 7).
    pub fn path(&self, id: &AttachmentId) -> Result<PathBuf> {
        let AttachmentId { network, container_id, ifname } = id;
        if network.is_empty() || container_id.is_empty() || ifname.is_empty() {
            return Err(Error::config(format!(
                "cache file path requires network name ({network:?}), container ID ({container_id:?}), and interface name ({ifname:?})"
            )));
        }
        ident::check_network_name(network)?;
        ident::check_container_id(container_id)?;
        ident::check_interface_name(ifname)?;
        Ok(self.folder.join(file_name(id)))
    }

    /// Returns the entry of an attachment, or `None` if there is none or its file belongs to
    /// another attachment with the same file name.
    ///
    /// # Errors
    /// Code 5 if the file cannot be read, 6 if it cannot be decoded.
    pub fn find(&self, id: &AttachmentId) -> Result<Option<Entry>> {
        let path = self.path(id)?;
        match look(&path, id)? {
            Found::Nothing | Found::Another(_) => Ok(None),
            Found::Entry(entry) => Ok(Some(*entry)),
            Found::Garbage(why) => Err(Error::new(Code::DECODE, format!("failed to decode {}: {why}", path.display()))),
        }
    }

    /// Creates the folder, and checks that the cache does not have the attachment yet, so that an
    /// ADD can write its entry.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be created or the file cannot be read; [`Code::CONFLICT`] if the
    /// file has an entry: of this attachment, which needs a DEL first, or of another one.
    pub(super) fn prepare_for_add(&self, id: &AttachmentId) -> Result<()> {
        let path = self.path(id)?;
        create_folder(&self.folder)?;
        match look(&path, id)? {
            Found::Nothing | Found::Garbage(_) => Ok(()),
            Found::Entry(_) => {
                let AttachmentId { network, container_id, ifname } = id;
                let msg = format!("{ifname} of container {container_id} is already attached to network {network}");
                Err(Error::new(Code::CONFLICT, msg)
                    .with_details(format!("{} records this; call DEL before another ADD", path.display())))
            }
            Found::Another(owner) => {
                let msg = format!("{} is the cache file of another attachment, {owner}", path.display());
                Err(Error::new(Code::CONFLICT, msg))
            }
        }
    }

    /// Stores an entry. After a crash, the file has the whole entry or is as before.
    ///
    /// # Errors
    /// Code 5; then the file is as before.
    pub fn write(&self, entry: &Entry) -> Result<()> {
        let path = self.path(&entry.id())?;
        let failed = |error| Error::caused(Code::IO, format_args!("failed to write {}", path.display()), error);
        let bytes = wire::encode(entry)?;
        let own = self.own_folder();
        create_folder(&own)?;
        let (mut file, temporary) = lock_slot(&own).map_err(failed)?;
        file.set_len(0)
            .and_then(|()| file.write_all(bytes.as_bytes()))
            .and_then(|()| fs::rename(&temporary, &path))
            .map_err(failed)
    }

    /// Removes the entry of an attachment. It is not an error if there is none. The file of another
    /// attachment with the same file name stays.
    ///
    /// # Errors
    /// Code 5.
    pub fn purge(&self, id: &AttachmentId) -> Result<()> {
        let path = self.path(id)?;
        match look(&path, id)? {
            Found::Nothing | Found::Another(_) => Ok(()),
            Found::Entry(_) | Found::Garbage(_) => absent_is_fine(fs::remove_file(&path))
                .map_err(|error| Error::caused(Code::IO, format_args!("failed to remove {}", path.display()), error)),
        }
    }

    /// Returns all attachments of a network.
    ///
    /// # Errors
    /// Code 5 if the folder or one of the network's files cannot be read.
    pub fn list(&self, network: &str) -> Result<Listing> {
        let mut listing = self.list_files(&format!("{network}-"))?;
        listing.entries.retain(|entry| entry.network == network);
        Ok(listing)
    }

    /// Returns all attachments of all networks.
    ///
    /// # Errors
    /// As [`list`](Cache::list).
    pub fn list_all(&self) -> Result<Listing> {
        self.list_files("")
    }

    /// Returns the attachments of the files whose names begin with `prefix`: a network's name with
    /// `-`, or nothing for all networks. Files of another network that begin with the same text are
    /// in `entries` if they can be decoded, and not in `problems`.
    fn list_files(&self, prefix: &str) -> Result<Listing> {
        let failed = |error| Error::caused(Code::IO, format_args!("failed to list {}", self.folder.display()), error);
        let files = match fs::read_dir(&self.folder) {
            Ok(files) => files,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Listing::default()),
            Err(error) => return Err(failed(error)),
        };
        let mut paths = Vec::new();
        for file in files {
            let file = file.map_err(failed)?;
            let name = file.file_name();
            if name.as_encoded_bytes().starts_with(prefix.as_bytes()) && name != OWN_FOLDER {
                paths.push(file.path());
            }
        }
        paths.sort();
        let mut listing = Listing::default();
        for path in paths {
            let problem = match read(&path)? {
                None => continue, // another process has just removed it
                Some(Ok(Content::Whole(entry))) => {
                    if path.file_name().is_some_and(|name| name == file_name(&entry.id()).as_str()) {
                        listing.entries.push(*entry);
                        continue;
                    }
                    if !prefix.is_empty() && format!("{}-", entry.network) != prefix {
                        continue; // a file of another network
                    }
                    "its name does not match the attachment that it contains".to_owned()
                }
                Some(Ok(Content::Bare(_))) => "it has a result, but does not name its attachment".to_owned(),
                Some(Err(why)) => why,
            };
            listing.problems.push(format!("{}: {problem}", path.display()));
        }
        Ok(listing)
    }

    /// Removes the temporary files of processes that were killed while they wrote an entry.
    ///
    /// # Errors
    /// Code 5.
    pub(super) fn clean(&self) -> Result<()> {
        let own = self.own_folder();
        let failed = |error| Error::caused(Code::IO, format_args!("failed to clean {}", own.display()), error);
        let files = match fs::read_dir(&own) {
            Ok(files) => files,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(failed(error)),
        };
        for file in files {
            let path = file.map_err(failed)?.path();
            if let Some(_lock) = lock(&path, OpenOptions::new().write(true)).map_err(failed)? {
                absent_is_fine(fs::remove_file(&path)).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Returns the path of the folder for files that only this crate uses.
    fn own_folder(&self) -> PathBuf {
        self.folder.join(OWN_FOLDER)
    }
}

/// Returns the name of an attachment's file.
fn file_name(AttachmentId { network, container_id, ifname }: &AttachmentId) -> String {
    format!("{network}-{container_id}-{ifname}")
}

/// Turns the error that a file does not exist into success.
fn absent_is_fine(outcome: io::Result<()>) -> io::Result<()> {
    outcome.or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

/// Creates a folder and its parents, readable by root only, as Go does: results may have secrets.
fn create_folder(folder: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(|error| Error::caused(Code::IO, format_args!("failed to create {}", folder.display()), error))
}

/// Opens and locks a temporary file that no other process uses, and returns it with its path. The
/// names are `slot-0`, `slot-1`, …, so that a file that a crash left is used again.
fn lock_slot(folder: &Path) -> io::Result<(File, PathBuf)> {
    for slot in 0..MAX_WRITERS {
        let path = folder.join(format!("slot-{slot}"));
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        if let Some(file) = lock(&path, &options)? {
            return Ok((file, path));
        }
    }
    Err(io::Error::other(format!("{MAX_WRITERS} other processes are writing to this folder; try again")))
}

/// Opens and locks a file. Returns `None` if another process has the lock, if the file was renamed
/// to an entry in the meantime, or if it is not a regular file.
fn lock(path: &Path, options: &OpenOptions) -> io::Result<Option<File>> {
    // The type is checked first, because opening a FIFO waits for its other end. It is not replaced
    // before it is opened: only root can write to the folder.
    if fs::symlink_metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        return Ok(None);
    }
    let file = match options.open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(None),
        Err(TryLockError::Error(error)) => return Err(error),
    }
    // If the other process renamed the file between `open` and `lock`, the opened file is an entry
    // now, and must not be overwritten.
    let inode = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let opened = inode(file.metadata()?);
    let is_at_path = fs::symlink_metadata(path).is_ok_and(|metadata| inode(metadata) == opened);
    Ok(if is_at_path { Some(file) } else { None })
}

/// Reads and decodes a file. Returns `None` if it does not exist, and an inner error with the
/// reason if it cannot be decoded.
///
/// # Errors
/// Code 5 if the file cannot be read, also if it is a folder, because then no entry can be written.
fn read(path: &Path) -> Result<Option<Result<Content, String>>> {
    // The type is checked first, because opening a FIFO waits. libcni does not create symbolic
    // links, so they are not followed. A folder is opened, for the kernel's error.
    let file = fs::symlink_metadata(path).and_then(|metadata| {
        let can_be_opened = metadata.is_file() || metadata.is_dir();
        if can_be_opened { File::open(path).map(Some) } else { Ok(None) }
    });
    let mut bytes = Vec::new();
    match file.and_then(|file| file.map(|file| file.take(LONGEST + 1).read_to_end(&mut bytes)).transpose()) {
        Ok(None) => Ok(Some(Err("it is not a regular file".to_owned()))),
        Ok(Some(length)) if length as u64 > LONGEST => Ok(Some(Err("it is longer than 64 MiB".to_owned()))),
        Ok(Some(_)) => Ok(Some(wire::decode(&bytes))),
        // An attachment whose file name would be too long was never stored.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InvalidFilename) => Ok(None),
        Err(error) => Err(Error::caused(Code::IO, format_args!("failed to read {}", path.display()), error)),
    }
}

/// Reads the file of an attachment, and compares the attachment that it names with `id`.
///
/// # Errors
/// Code 5 if the file cannot be read.
fn look(path: &Path, id: &AttachmentId) -> Result<Found> {
    Ok(match read(path)? {
        None => Found::Nothing,
        Some(Err(why)) => Found::Garbage(why),
        Some(Ok(Content::Whole(entry))) if entry.id() == *id => Found::Entry(entry),
        Some(Ok(Content::Whole(entry))) => {
            let AttachmentId { network, container_id, ifname } = entry.id();
            Found::Another(format!("{ifname} of container {container_id} in network {network}"))
        }
        Some(Ok(Content::Bare(result))) => {
            let attachment = Attachment {
                container_id: id.container_id.clone(),
                ifname: id.ifname.clone(),
                ..Attachment::default()
            };
            let entry = Entry { network: id.network.clone(), attachment, config: Vec::new(), result: Some(result) };
            Found::Entry(Box::new(entry.with_netns()))
        }
    })
}

#[cfg(test)]
mod tests;
