//! Records on the host which interface an attachment got.
//!
//! A process in the container that has CAP_NET_ADMIN can write the interface's name, alias and
//! hardware address, and can put another interface in its place. DEL therefore identifies the
//! interface by the record, which only has properties that such a process cannot write. The record
//! is written before the move, and removed when the interface is on the host again.
//!
//! The folder is on a tmpfs: a reboot ends all namespaces, and with them all attachments.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use cni::hash::sha512_hex;
use cni::{AttachmentId, Code, Error, Result};
use cni_linux::file::create;
use cni_linux::{Link, Netns};
use nix::libc;
use serde::{Deserialize, Serialize};

/// The folder of the records.
const FOLDER: &str = "/run/cni/host-device";

/// The length in bytes of the longest record that is read.
const MAX_SIZE: u64 = 1 << 16;

/// The interface of one attachment, as it was on the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Record {
    network: String,
    #[serde(rename = "containerID")]
    container_id: String,
    ifname: String,
    /// The device and inode numbers of the container's namespace. CNI_NETNS may lead to another one
    /// later.
    netns: (u64, u64),
    /// The name on the host.
    pub(crate) name: String,
    /// The index on the host. The kernel keeps it in the container if it is free there.
    index: u32,
    /// The kind of link, as [`LinkKind`](cni_linux::LinkKind) writes it.
    kind: String,
    /// The hardware address that the device was built with.
    permanent_mac: Option<String>,
    /// The device below the interface, by its bus.
    parent: Option<String>,
    /// A veth's other end, or the interface below.
    peer: Option<Peer>,
}

/// The other end of a veth, or the interface below, as seen from the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Peer {
    /// Its index in its own namespace.
    pub(crate) index: u32,
    /// Whether it is on the host.
    #[serde(rename = "onHost")]
    pub(crate) is_on_host: bool,
}

impl Record {
    /// Returns the record of an attachment that gets `device`, an interface of the host.
    pub(crate) fn new(attachment: &AttachmentId, netns: &Netns, device: &Link) -> Record {
        Record {
            network: attachment.network.clone(),
            container_id: attachment.container_id.clone(),
            ifname: attachment.ifname.clone(),
            netns: netns.id(),
            name: device.name.clone(),
            index: device.index,
            kind: device.kind.to_string(),
            permanent_mac: device.permanent_mac.map(|mac| mac.to_string()),
            parent: device.parent.clone(),
            peer: device.peer_index.map(|index| Peer { index, is_on_host: device.peer_netnsid.is_none() }),
        }
    }

    /// Returns the record of an attachment, or `None` if there is none. Removes an incomplete
    /// record.
    ///
    /// # Errors
    /// Code 5 if it cannot be read.
    pub(crate) fn find(attachment: &AttachmentId) -> Result<Option<Record>> {
        read(&path(attachment))
    }

    /// Returns the records of all attachments. Leaves out those that cannot be read.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    pub(crate) fn list() -> Result<Vec<Record>> {
        let entries = match fs::read_dir(FOLDER) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|error| failed("list", Path::new(FOLDER), error))?,
        };
        let paths = entries.flatten().map(|entry| entry.path());
        let paths = paths.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
        Ok(paths.filter_map(|path| read(&path).ok().flatten()).collect())
    }

    /// Creates or replaces the record.
    ///
    /// # Errors
    /// Code 5 if it cannot be written.
    pub(crate) fn write(&self) -> Result<()> {
        let path = path(&self.attachment());
        let write = || -> io::Result<()> {
            let json = serde_json::to_vec(self).map_err(io::Error::other)?;
            match create(&path, &json) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => ensure_folder()?,
                // An earlier ADD of this attachment has left it.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => fs::remove_file(&path)?,
                outcome => return outcome,
            }
            create(&path, &json)
        };
        write().map_err(|error| failed("write", &path, error))
    }

    /// Removes the record, if it exists.
    ///
    /// # Errors
    /// Code 5 if it cannot be removed.
    pub(crate) fn purge(&self) -> Result<()> {
        purge(&path(&self.attachment()))
    }

    /// Returns the attachment.
    pub(crate) fn attachment(&self) -> AttachmentId {
        AttachmentId::new(&self.network, &self.container_id, &self.ifname)
    }

    /// Whether `netns` is the namespace that the attachment was made in.
    pub(crate) fn is_of(&self, netns: &Netns) -> bool {
        self.netns == netns.id()
    }

    /// Whether only one link can have the recorded properties: that of a hardware device, or a veth
    /// whose other end is on the host. A pod can create others of all other kinds.
    pub(crate) fn is_proof(&self) -> bool {
        self.is_hardware() || self.host_peer().is_some()
    }

    /// Whether the interface is that of a hardware device, which the kernel moves to the host when
    /// the container's namespace ends.
    pub(crate) fn is_hardware(&self) -> bool {
        self.permanent_mac.is_some() || self.parent.is_some()
    }

    /// Returns the index of the other end on the host, if the interface is a veth with such an end.
    pub(crate) fn host_peer(&self) -> Option<u32> {
        self.host_peer_or_lower().filter(|_| self.kind == "veth")
    }

    /// Returns the index of the other end, or of the interface below, if it is on the host.
    pub(crate) fn host_peer_or_lower(&self) -> Option<u32> {
        self.peer.filter(|peer| peer.is_on_host).map(|peer| peer.index)
    }

    /// Whether `link` has the recorded properties. `host_id` is the ID that the host's namespace
    /// has in the namespace of `link`, or `None` if `link` is on the host.
    pub(crate) fn fits(&self, link: &Link, host_id: Option<i32>) -> bool {
        let peer_fits = match self.peer {
            None => link.peer_index.is_none(),
            Some(peer) => link.peer_index == Some(peer.index) && (!peer.is_on_host || link.peer_netnsid == host_id),
        };
        peer_fits
            && link.kind.to_string() == self.kind
            && link.permanent_mac.map(|mac| mac.to_string()) == self.permanent_mac
            && link.parent == self.parent
    }

    /// Returns the attachment's interface among `links`, those of the container. If several fit,
    /// prefers CNI_IFNAME, then the recorded index. `host_id` is that of [`fits`](Record::fits).
    pub(crate) fn find_in(&self, links: Vec<Link>, host_id: Option<i32>) -> Option<Link> {
        let has_name = |link: &Link| link.name == self.ifname;
        let has_index = |link: &Link| link.index == self.index;
        let mut fitting: Vec<Link> = links.into_iter().filter(|link| self.fits(link, host_id)).collect();
        fitting.retain(|link| self.is_proof() || has_name(link) || has_index(link));
        fitting.into_iter().max_by_key(|link| (has_name(link), has_index(link)))
    }
}

/// Returns the path of an attachment's record.
fn path(attachment: &AttachmentId) -> PathBuf {
    let key = format!("{}/{}/{}", attachment.network, attachment.container_id, attachment.ifname);
    Path::new(FOLDER).join(format!("{}.json", sha512_hex(&[key.as_bytes()], 40)))
}

/// Creates the folder of the records. Its parent has mode 0755, because other plugins use it too.
fn ensure_folder() -> io::Result<()> {
    if let Some(parent) = Path::new(FOLDER).parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(FOLDER) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Removes a record, if it exists.
fn purge(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", path, error)),
        _ => Ok(()),
    }
}

/// Reads and decodes a record, or returns `None` if the file does not exist. Removes an incomplete
/// record: its ADD was killed before it moved the interface. Follows no link.
fn read(path: &Path) -> Result<Option<Record>> {
    let read = || -> io::Result<Vec<u8>> {
        // Opening must not block if the file is a pipe.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        let mut bytes = Vec::with_capacity(1024);
        file.take(MAX_SIZE).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    match read() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("read", path, error)),
        Ok(bytes) => match serde_json::from_slice(&bytes) {
            Ok(record) => Ok(Some(record)),
            Err(_) => purge(path).map(|()| None),
        },
    }
}

/// Returns the error for a failed action: `list`, `read`, `write` or `remove`.
fn failed(action: &str, path: &Path, error: io::Error) -> Error {
    Error::caused(Code::IO, format_args!("failed to {action} {}", path.display()), error)
}
