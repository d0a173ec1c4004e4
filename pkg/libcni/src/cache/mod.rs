//! The result cache: `<dir>/results/<network>-<containerID>-<ifname>`, one file per attachment.
//!
//! Byte for byte the layout of Go's libcni, so that either can take over from the other with
//! containers running: one line of JSON, kind `cniCacheV1`; or, from before that, a bare result.
//! Files of this crate alone are in `results/.cni`, which Go's reader skips because it is a folder.
//!
//! `-` is legal in all three parts of the name, so two attachments may share a file name. The
//! content says whose file it is.

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

/// Where Go's libcni and cnitool keep theirs; the results are in a folder in it.
pub const DEFAULT_DIR: &str = "/var/lib/cni";

/// In the folder of results: what is ours alone.
const OWN_FOLDER: &str = ".cni";

/// How many may write at once: far more than there are, and an end to the search for a free name.
const MAX_WRITERS: u32 = 4096;

/// No entry is longer: a configuration and a result of the longest that a plugin reads are half of
/// it.
const LONGEST: u64 = 64 << 20;

/// The folder of remembered attachments.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

/// A remembered attachment.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The network's name.
    pub network: String,
    /// Whom the ADD attached, and with what. An entry of the oldest form knows only what its file
    /// name says.
    pub attachment: Attachment,
    /// The bytes of the network list at the time of the ADD.
    pub config: Vec<u8>,
    /// The ADD's result, verbatim, in the version it was returned in.
    pub result: Option<Box<RawValue>>,
}

/// The remembered attachments of a network, and which files could not be understood.
#[derive(Debug, Default)]
pub struct Listing {
    /// The attachments, by file name.
    pub entries: Vec<Entry>,
    /// One line each; such files are left alone.
    pub problems: Vec<String>,
}

/// The content of an attachment's file.
enum Found {
    Nothing,
    Entry(Box<Entry>),
    /// The file of another attachment with the same file name, which is described.
    Another(String),
    /// Not readable: the reason.
    Garbage(String),
}

impl Entry {
    /// Returns the network at the time of the ADD: a list, or the single plugin that Go's libcni
    /// remembers of an ADD without a list.
    ///
    /// # Errors
    /// Those of a list.
    pub fn list(&self) -> Result<NetworkList> {
        NetworkList::parse(&self.config).or_else(|error| NetworkList::parse_single(&self.config).map_err(|_| error))
    }

    /// Returns the attachment that it is of.
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

    /// Returns the container's interface in the result, or `None` if the result does not have it.
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

    /// The result as a `prevResult` of `version`: verbatim if it has that version already.
    ///
    /// # Errors
    /// Code 6 for a result that cannot be decoded, or not be expressed in `version`.
    pub fn result_as(&self, version: Version) -> Result<Option<Box<RawValue>>> {
        self.result.as_deref().map(|result| in_version(result, version)).transpose()
    }

    /// Returns the configuration that `plugin` of `list` reads on its stdin for a CHECK of the
    /// attachment.
    ///
    /// # Errors
    /// Code 6 for a result that cannot be decoded, or not be expressed in the list's version.
    pub fn request(&self, list: &NetworkList, plugin: &PluginConf) -> Result<Vec<u8>> {
        let result = self.result_as(list.version()?)?;
        let capability_args = Some(&self.attachment.capability_args);
        derive(list, plugin, AddedKeys { prev_result: result.as_deref(), capability_args, valid: None })
    }
}

/// A result in `version`; one that does not say its version has it already.
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
    /// The cache in `dir`, by default [`DEFAULT_DIR`]; made by the first ADD.
    pub fn new(dir: impl AsRef<Path>) -> Cache {
        Cache { folder: dir.as_ref().join("results") }
    }

    /// The file of an attachment.
    ///
    /// # Errors
    /// Go's text where a part is missing; codes 4 and 7 for a part that could lead out of the
    /// folder.
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

    /// Returns the cached entry of an attachment. Ignores the file of another attachment that
    /// happens to have its name.
    ///
    /// # Errors
    /// Code 5 for a file that cannot be read, 6 for one that cannot be understood.
    pub fn find(&self, id: &AttachmentId) -> Result<Option<Entry>> {
        let path = self.path(id)?;
        match look(&path, id)? {
            Found::Nothing | Found::Another(_) => Ok(None),
            Found::Entry(entry) => Ok(Some(*entry)),
            Found::Garbage(why) => Err(Error::new(Code::DECODE, format!("failed to decode {}: {why}", path.display()))),
        }
    }

    /// Makes sure that an ADD can write its file: the folder exists, and the file does not.
    ///
    /// # Errors
    /// Code 5, and [`Code::CONFLICT`] naming the owner of an existing file: this attachment, which
    /// needs a DEL first, or another one.
    pub(super) fn reserve(&self, id: &AttachmentId) -> Result<()> {
        let path = self.path(id)?;
        make_folder(&self.folder)?;
        match look(&path, id)? {
            Found::Nothing | Found::Garbage(_) => Ok(()),
            Found::Entry(_) => {
                let AttachmentId { network, container_id, ifname } = id;
                let msg = format!("{ifname} of container {container_id} is already attached to network {network}");
                Err(Error::new(Code::CONFLICT, msg)
                    .with_details(format!("{} remembers it; call DEL before another ADD", path.display())))
            }
            Found::Another(owner) => {
                let msg = format!("{} is the cache file of another attachment, {owner}", path.display());
                Err(Error::new(Code::CONFLICT, msg))
            }
        }
    }

    /// Remembers an attachment. The file is there in full or, after a crash, not at all.
    ///
    /// # Errors
    /// Code 5; whatever was remembered before still is.
    pub fn write(&self, entry: &Entry) -> Result<()> {
        let path = self.path(&entry.id())?;
        let failed = |error| Error::caused(Code::IO, format_args!("failed to write {}", path.display()), error);
        let bytes = wire::encode(entry)?;
        let own = self.own_folder();
        make_folder(&own)?;
        let (mut file, temporary) = lock_slot(&own).map_err(failed)?;
        file.set_len(0)
            .and_then(|()| file.write_all(bytes.as_bytes()))
            .and_then(|()| fs::rename(&temporary, &path))
            .map_err(failed)
    }

    /// Forgets an attachment; one that is not remembered is fine. Another attachment's file stays.
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

    /// Every cached attachment of a network.
    ///
    /// # Errors
    /// Code 5 if the folder or one of the network's files cannot be read: then the attachments are
    /// not known.
    pub fn list(&self, network: &str) -> Result<Listing> {
        let mut listing = self.list_files(&format!("{network}-"))?;
        listing.entries.retain(|entry| entry.network == network);
        Ok(listing)
    }

    /// Every remembered attachment of every network.
    ///
    /// # Errors
    /// As [`list`](Cache::list).
    pub fn list_all(&self) -> Result<Listing> {
        self.list_files("")
    }

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
            // The folder of what is ours alone has no entries in it.
            if name.as_encoded_bytes().starts_with(prefix.as_bytes()) && name != OWN_FOLDER {
                paths.push(file.path());
            }
        }
        paths.sort();
        let mut listing = Listing::default();
        for path in paths {
            let problem = match read(&path)? {
                None => continue, // gone meanwhile
                Some(Ok(Content::Whole(entry))) => {
                    if path.file_name().is_some_and(|name| name == file_name(&entry.id()).as_str()) {
                        listing.entries.push(*entry);
                        continue;
                    }
                    if !prefix.is_empty() && format!("{}-", entry.network) != prefix {
                        continue; // another network's affair
                    }
                    "it holds an attachment that belongs into another file".to_owned()
                }
                Some(Ok(Content::Bare(_))) => "it does not say whose it is".to_owned(),
                Some(Err(why)) => why,
            };
            listing.problems.push(format!("{}: {problem}", path.display()));
        }
        Ok(listing)
    }

    /// Removes what a crashed write left behind.
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

    fn own_folder(&self) -> PathBuf {
        self.folder.join(OWN_FOLDER)
    }
}

fn file_name(AttachmentId { network, container_id, ifname }: &AttachmentId) -> String {
    format!("{network}-{container_id}-{ifname}")
}

fn absent_is_fine(outcome: io::Result<()>) -> io::Result<()> {
    outcome.or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

/// Results may hold what only root should see; so Go has it.
fn make_folder(folder: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(|error| Error::caused(Code::IO, format_args!("failed to create {}", folder.display()), error))
}

/// A temporary file that no other process writes to. The names are few and fixed, so that leftovers
/// of a crash are used again.
fn lock_slot(folder: &Path) -> io::Result<(File, PathBuf)> {
    for slot in 0..MAX_WRITERS {
        let path = folder.join(format!("slot-{slot}"));
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        if let Some(file) = lock(&path, &options)? {
            return Ok((file, path));
        }
    }
    Err(io::Error::other(format!("{MAX_WRITERS} others are writing at this moment")))
}

/// Opens and locks a file; `None` if another process holds it or has just renamed it into its
/// place, or if it is not a regular file.
fn lock(path: &Path, options: &OpenOptions) -> io::Result<Option<File>> {
    // Asked first, since opening a FIFO waits for its other end. The file is not replaced in
    // between: only root can write to the folder.
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
    // Between open and lock the holder may have renamed it: then what we hold is a published entry.
    let inode = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let ours = inode(file.metadata()?);
    Ok(fs::symlink_metadata(path).is_ok_and(|there| inode(there) == ours).then_some(file))
}

/// A file's content, or why it cannot be understood; `None` if there is no file.
fn read(path: &Path) -> Result<Option<Result<Content, String>>> {
    // Asked first, as in `lock`; a link was not created here. A folder is an error, since no entry
    // can be written there.
    let file = fs::symlink_metadata(path).and_then(|metadata| {
        let openable = metadata.is_file() || metadata.is_dir();
        if openable { File::open(path).map(Some) } else { Ok(None) }
    });
    let mut bytes = Vec::new();
    match file.and_then(|file| file.map(|file| file.take(LONGEST + 1).read_to_end(&mut bytes)).transpose()) {
        Ok(None) => Ok(Some(Err("it is not a regular file".to_owned()))),
        Ok(Some(length)) if length as u64 > LONGEST => Ok(Some(Err("it is longer than 64 MiB".to_owned()))),
        Ok(Some(_)) => Ok(Some(wire::decode(&bytes))),
        // A key whose name is too long for a file was never written.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InvalidFilename) => Ok(None),
        Err(error) => Err(Error::caused(Code::IO, format_args!("failed to read {}", path.display()), error)),
    }
}

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
