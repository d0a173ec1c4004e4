//! The result cache: one file for each attachment,
//! `<dir>/results/<network>-<containerID>-<ifname>`.
//!
//! A file has an entry, the record of its attachment, as one line of JSON of the kind `cniCacheV1`.
//! Older versions of Go's libcni wrote a bare result instead: only the result of the ADD.
//!
//! The files are byte for byte those of Go's libcni, so that either can replace the other while
//! containers run. Files that only this crate uses are in `results/.cni`, which Go's libcni skips
//! because it is a folder.
//!
//! `-` is allowed in all three parts of the file's name, so two attachments may have the same file
//! name. An entry names the attachment to which the file belongs. A bare result does not, so it
//! belongs to the attachment that is looked up.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::value::{RawValue, to_raw_value};

use super::folder::paths_in;
use super::{AddedKeys, Attachment, NetworkList, PluginConf};
use cni::json::Json;
use cni::result::{AddResult, Interface};
use cni::version::Version;
use cni::{AttachmentId, Code, Error, Result, ident};
use slot::{is_slot, lock, lock_slot};

mod slot;
mod wire;

/// The folder of the cache that Go's libcni and cnitool use. The results are in its folder
/// `results`.
pub const DEFAULT_DIR: &str = "/var/lib/cni";

/// The name of the folder, in the folder of results, for files that only this crate uses.
const OWN_FOLDER: &str = ".cni";

/// The largest length of a file that is read, in bytes. An entry is shorter: a plugin accepts at
/// most 16 MiB, so the configuration, in base64, and the result have less than 40 MiB together.
const MAX_FILE_LENGTH: u64 = 64 << 20;

/// The result cache in one folder.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

/// The record of an attachment in the result cache.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The network's name.
    pub network: String,
    /// The arguments of the ADD. An entry from a bare result has only the container ID and the
    /// interface name of the attachment that was looked up, and the namespace in the result.
    pub attachment: Attachment,
    /// The bytes of the network's configuration at the time of the ADD.
    pub config: Vec<u8>,
    /// The ADD's result, verbatim, in the version in which it was returned.
    pub result: Option<Box<RawValue>>,
}

/// The entries of a network in the result cache, and the files that have no usable entry.
#[derive(Debug, Default)]
pub struct Listing {
    /// The entries, sorted by file name.
    pub entries: Vec<Entry>,
    /// One line for each file without a usable entry, with the reason. Such files are not changed.
    pub problems: Vec<String>,
}

/// The content of a file of the cache.
enum Content {
    /// The file does not exist.
    Absent,
    /// The entry of some attachment.
    Entry(Box<Entry>),
    /// Only a result: the format before cniCacheV1.
    BareResult(Box<RawValue>),
    /// The file cannot be decoded, for this reason.
    Undecodable(String),
}

/// The entry in the file of an attachment that is looked up: `None` if the file does not exist, and
/// the reason if it cannot be decoded. The entry may be that of another attachment with the same
/// file name.
type Found = Option<Result<Entry, String>>;

impl Entry {
    /// Returns the network's configuration at the time of the ADD. For an ADD without a list, Go's
    /// libcni stores the object of the single plugin, which this function turns into a list.
    ///
    /// # Errors
    /// Those of [`NetworkList::parse`].
    pub fn list(&self) -> Result<NetworkList> {
        // If both fail, the error about a list is returned: single plugins are rare.
        NetworkList::parse(&self.config).or_else(|error| NetworkList::parse_single(&self.config).map_err(|_| error))
    }

    /// Returns the identifier of the entry's attachment.
    pub fn id(&self) -> AttachmentId {
        self.attachment.id(&self.network)
    }

    /// Takes the namespace from the result if the entry has none: libcni before 1.2, which Podman 4
    /// and containerd 1.6 use, does not store it. Ignores a result that cannot be decoded: whatever
    /// uses the result later reports the error.
    fn with_netns_of_result(mut self) -> Entry {
        if self.attachment.netns.is_empty()
            && let Ok(Some(interface)) = self.container_interface()
        {
            self.attachment.netns = interface.sandbox;
        }
        self
    }

    /// Returns the container's interface as the result describes it, or `None` if the result does
    /// not have it.
    ///
    /// # Errors
    /// Code 6 if the result cannot be decoded.
    pub fn container_interface(&self) -> Result<Option<Interface>> {
        let undecodable =
            |why| Error::new(Code::DECODE, format!("failed to decode the result in the result cache: {why}"));
        let result = self.decoded_result().map_err(undecodable)?.unwrap_or_default();
        let is_container_interface =
            |interface: &Interface| interface.name == self.attachment.ifname && !interface.sandbox.is_empty();
        Ok(result.interfaces.into_iter().find(is_container_interface))
    }

    /// Returns the decoded result, or `None` if the entry has none.
    ///
    /// # Errors
    /// The reason why the result cannot be decoded.
    pub fn decoded_result(&self) -> Result<Option<AddResult>, String> {
        let Some(result) = self.result.as_deref() else { return Ok(None) };
        let json = Json::parse(result.get().as_bytes()).map_err(|error| error.to_string())?;
        AddResult::decode(&json, Version::NEWEST).map(Some).map_err(|error| error.to_string())
    }

    /// Returns the result as a `prevResult` of `version`, or `None` without a result. A result that
    /// already has that version is returned verbatim.
    ///
    /// # Errors
    /// Code 6 if the result cannot be decoded or cannot be expressed in `version`.
    pub fn result_as(&self, version: Version) -> Result<Option<Box<RawValue>>> {
        self.result.as_deref().map(|result| convert_result(result, version)).transpose()
    }

    /// Returns the configuration that `plugin` of `list` reads on its stdin for a CHECK of the
    /// attachment.
    ///
    /// # Errors
    /// - Code 1 if the list's version is not supported.
    /// - Code 6 if the result cannot be decoded or cannot be expressed in the list's version.
    pub fn request(&self, list: &NetworkList, plugin: &PluginConf) -> Result<Vec<u8>> {
        let result = self.result_as(list.version()?)?;
        let capability_args = Some(&self.attachment.capability_args);
        list.request(plugin, AddedKeys { prev_result: result.as_deref(), capability_args, valid: None })
    }
}

/// Converts a result to `version`. A result without `cniVersion` is taken to be in `version`. The
/// result stays verbatim if its `cniVersion` is `version`, but it is checked.
///
/// # Errors
/// Code 6 if the result cannot be decoded or cannot be expressed in `version`.
pub(super) fn convert_result(result: &RawValue, version: Version) -> Result<Box<RawValue>> {
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
    /// - Code 7 with Go's text if a part of the identifier is empty.
    /// - Code 4 or 7 if a part is invalid, because the path could then be outside the folder.
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
    /// - Those of [`path`](Cache::path).
    /// - Code 5 if the file cannot be read.
    /// - Code 6 if the file cannot be decoded.
    pub fn find(&self, id: &AttachmentId) -> Result<Option<Entry>> {
        let path = self.path(id)?;
        match read_for(id, &path)? {
            Some(Ok(entry)) if entry.id() == *id => Ok(Some(entry)),
            Some(Ok(_)) | None => Ok(None),
            Some(Err(why)) => Err(Error::new(Code::DECODE, format!("failed to decode {}: {why}", path.display()))),
        }
    }

    /// Returns when the file of an attachment was written, which is the end of its ADD. Returns
    /// `None` if the file does not exist, or its time cannot be read.
    pub fn written_at(&self, id: &AttachmentId) -> Option<SystemTime> {
        fs::symlink_metadata(self.path(id).ok()?).ok()?.modified().ok()
    }

    /// Creates the folder, and checks that the cache does not have the attachment yet, so that an
    /// ADD can write its entry.
    ///
    /// # Errors
    /// - Those of [`path`](Cache::path).
    /// - Code 5 if the folder cannot be created or the file cannot be read.
    /// - [`Code::CONFLICT`] if the file has the entry of this attachment, which needs a DEL first,
    ///   or the entry of another attachment with the same file name.
    pub(super) fn prepare_for_add(&self, id: &AttachmentId) -> Result<()> {
        let path = self.path(id)?;
        create_folder(&self.folder)?;
        // The ADD replaces a file that cannot be decoded.
        let Some(Ok(entry)) = read_for(id, &path)? else { return Ok(()) };
        let owner = entry.id();
        let AttachmentId { network, container_id, ifname } = &owner;
        if owner == *id {
            let msg = format!("{ifname} of container {container_id} is already attached to network {network}");
            return Err(Error::new(Code::CONFLICT, msg)
                .with_details(format!("{} records this; call DEL before another ADD", path.display())));
        }
        let msg = format!(
            "{} is the cache file of another attachment, {ifname} of container {container_id} in network {network}",
            path.display()
        );
        Err(Error::new(Code::CONFLICT, msg))
    }

    /// Stores an entry. The file is replaced atomically.
    ///
    /// # Errors
    /// - Those of [`path`](Cache::path).
    /// - Code 5 if the entry cannot be written. The file is unchanged.
    pub fn write(&self, entry: &Entry) -> Result<()> {
        let path = self.path(&entry.id())?;
        let failed = |error| Error::caused(Code::IO, format_args!("failed to write {}", path.display()), error);
        let bytes = wire::encode(entry)?;
        let temporary_folder = self.own_folder();
        create_folder(&temporary_folder)?;
        let (mut file, temporary) = lock_slot(&temporary_folder).map_err(failed)?;
        // A killed process may have left content in the temporary file.
        file.set_len(0)
            .and_then(|()| file.write_all(bytes.as_bytes()))
            .and_then(|()| fs::rename(&temporary, &path))
            .map_err(failed)
    }

    /// Removes the entry of an attachment. It is not an error if there is none. A file that cannot
    /// be decoded is removed too. The file of another attachment with the same file name stays.
    ///
    /// # Errors
    /// - Those of [`path`](Cache::path).
    /// - Code 5 if the file cannot be read or removed.
    pub fn purge(&self, id: &AttachmentId) -> Result<()> {
        let path = self.path(id)?;
        match read_for(id, &path)? {
            None => Ok(()),
            Some(Ok(entry)) if entry.id() != *id => Ok(()),
            Some(_) => ignore_not_found(fs::remove_file(&path))
                .map_err(|error| Error::caused(Code::IO, format_args!("failed to remove {}", path.display()), error)),
        }
    }

    /// Returns the entries of `network`, or of all networks. Each file without a usable entry that
    /// may belong to a wanted network is listed as a problem.
    ///
    /// # Errors
    /// Code 5 if the folder or one of these files cannot be read.
    pub fn list(&self, network: Option<&str>) -> Result<Listing> {
        let failed = |error| Error::caused(Code::IO, format_args!("failed to list {}", self.folder.display()), error);
        let mut paths = paths_in(&self.folder).map_err(failed)?;
        // The files of a network `<network>-b` have this prefix too, so the entry's network is
        // compared.
        let prefix = network.map(|network| format!("{network}-")).unwrap_or_default();
        paths.retain(|path| {
            let name = path.file_name().unwrap_or_default();
            name.as_encoded_bytes().starts_with(prefix.as_bytes()) && name != OWN_FOLDER
        });
        let mut listing = Listing::default();
        for path in paths {
            let problem = match read(&path)? {
                Content::Absent => continue, // another process has just removed the file
                Content::Entry(entry) if network.is_some_and(|network| network != entry.network) => continue,
                Content::Entry(entry) if path == self.folder.join(file_name(&entry.id())) => {
                    listing.entries.push(*entry);
                    continue;
                }
                Content::Entry(_) => "its name does not match the attachment that it contains".to_owned(),
                Content::BareResult(_) => "it has a result, but does not name its attachment".to_owned(),
                Content::Undecodable(why) => why,
            };
            listing.problems.push(format!("{}: {problem}", path.display()));
        }
        Ok(listing)
    }

    /// Removes the temporary files of processes that were killed while they wrote an entry. Other
    /// files stay, because the folder may be a link to that of another program.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read, or a file cannot be locked or removed.
    pub(super) fn clean(&self) -> Result<()> {
        let own = self.own_folder();
        let failed = |error| Error::caused(Code::IO, format_args!("failed to clean {}", own.display()), error);
        for path in paths_in(&own).map_err(failed)?.into_iter().filter(|path| is_slot(path)) {
            // A process that is still writing its file holds the lock. `_lock` is held until the
            // file is removed.
            if let Some(_lock) = lock(&path, OpenOptions::new().write(true)).map_err(failed)? {
                ignore_not_found(fs::remove_file(&path)).map_err(failed)?;
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
fn ignore_not_found(outcome: io::Result<()>) -> io::Result<()> {
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

/// Reads and decodes a file.
///
/// # Errors
/// Code 5 if the file cannot be read. A folder is an error too, because no entry can replace it.
fn read(path: &Path) -> Result<Content> {
    let absent_or_failed = |error: io::Error| match error.kind() {
        // An attachment whose file name would be too long was never stored.
        ErrorKind::NotFound | ErrorKind::InvalidFilename => Ok(Content::Absent),
        _ => Err(Error::caused(Code::IO, format_args!("failed to read {}", path.display()), error)),
    };
    let undecodable = |why: &str| Ok(Content::Undecodable(why.to_owned()));
    // libcni does not create symbolic links, so they are not followed.
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) => return absent_or_failed(error),
    };
    // Checked before opening, because opening a FIFO waits for its other end. A folder is accepted
    // here: reading it fails below with the kernel's error.
    if !metadata.is_file() && !metadata.is_dir() {
        return undecodable("it is not a regular file");
    }
    // One call reads the content of most files, another one notices the end.
    let mut bytes = Vec::with_capacity(metadata.len().min(MAX_FILE_LENGTH) as usize + 1);
    // One byte more shows that the file is too long.
    match File::open(path).and_then(|file| file.take(MAX_FILE_LENGTH + 1).read_to_end(&mut bytes)) {
        Ok(length) if length as u64 > MAX_FILE_LENGTH => undecodable("it is longer than 64 MiB"),
        Ok(_) => Ok(wire::decode(&bytes).unwrap_or_else(Content::Undecodable)),
        Err(error) => absent_or_failed(error),
    }
}

/// Reads the file at `path`, the [path](Cache::path) of attachment `id`. A bare result is the entry
/// of `id`.
///
/// # Errors
/// Code 5 if the file cannot be read.
fn read_for(id: &AttachmentId, path: &Path) -> Result<Found> {
    Ok(match read(path)? {
        Content::Absent => None,
        Content::Undecodable(why) => Some(Err(why)),
        Content::Entry(entry) => Some(Ok(*entry)),
        Content::BareResult(result) => {
            let attachment = Attachment {
                container_id: id.container_id.clone(),
                ifname: id.ifname.clone(),
                ..Attachment::default()
            };
            let entry = Entry { network: id.network.clone(), attachment, config: Vec::new(), result: Some(result) };
            Some(Ok(entry.with_netns_of_result()))
        }
    })
}

#[cfg(test)]
mod tests;
