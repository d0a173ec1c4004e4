//! The records of leases, with which a daemon continues after its predecessor has ended: one file
//! for each attachment, in a folder beside the socket.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use cni::hash::sha512_hex;
use cni::{Code, Error, Result};
use cni_dhcp::lease::Lease;
use cni_dhcp::message::{Client, LeaseParameters};
use serde::{Deserialize, Serialize};

/// The record of one attachment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) container_id: String,
    pub(crate) network: String,
    pub(crate) ifname: String,
    /// CNI_NETNS, without the daemon's prefix.
    pub(crate) netns: String,
    /// The device and inode numbers of the namespace, because another one may be at its path later.
    pub(crate) netns_id: (u64, u64),
    /// The index of the interface.
    pub(crate) index: u32,
    /// The priority (metric) of the routes.
    pub(crate) priority: Option<u32>,
    /// The identity that the client sends.
    pub(crate) client: Client,
    /// The lease.
    pub(crate) held: RecordedLease,
    /// The last error since the lease was granted.
    #[serde(default)]
    pub(crate) error: Option<String>,
}

/// The lease of the attachment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum RecordedLease {
    /// No lease has been requested yet, and there is no file.
    Nothing,
    /// An address has been requested. The server may have leased it.
    Requested(LeaseParameters),
    /// The attachment has a lease.
    Bound(Lease),
}

impl Record {
    /// Returns the key of the attachment.
    pub(crate) fn key(&self) -> String {
        key(&self.container_id, &self.network, &self.ifname)
    }
}

/// Returns the key of an attachment. It is that of Go's daemon, which is also the client
/// identifier.
pub(crate) fn key(container_id: &str, network: &str, ifname: &str) -> String {
    format!("{container_id}/{network}/{ifname}")
}

/// The folder of the records.
#[derive(Clone, Debug)]
pub(crate) struct Records(PathBuf);

impl Records {
    /// Returns the folder that belongs to a socket: `/run/cni/dhcp` for `/run/cni/dhcp.sock`.
    pub(crate) fn of(socket: &Path) -> Records {
        match socket.extension() {
            Some(extension) if extension == "sock" => Records(socket.with_extension("")),
            _ => Records(format!("{}.leases", socket.display()).into()),
        }
    }

    /// Returns the path of an attachment's record.
    fn path(&self, key: &str) -> PathBuf {
        self.0.join(format!("{}.json", sha512_hex(&[key.as_bytes()], 40)))
    }

    /// Replaces an attachment's record. A reader sees the old record or the new one.
    ///
    /// # Errors
    /// Code 5 if the record cannot be written.
    pub(crate) fn write(&self, record: &Record) -> Result<()> {
        let path = self.path(&record.key());
        let write = || -> io::Result<()> {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
            let temporary = path.with_extension("part");
            let written = fs::write(&temporary, serde_json::to_vec(record).map_err(io::Error::other)?);
            // An error of the removal is not reported: the first error is the cause.
            written.and_then(|()| fs::rename(&temporary, &path)).inspect_err(|_| drop(fs::remove_file(&temporary)))
        };
        write().map_err(|error| Error::caused(Code::IO, format_args!("failed to write {}", path.display()), error))
    }

    /// Removes an attachment's record, if there is one.
    ///
    /// # Errors
    /// Code 5 if the record cannot be removed.
    pub(crate) fn purge(&self, key: &str) -> Result<()> {
        let path = self.path(key);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(Error::caused(Code::IO, format_args!("failed to remove {}", path.display()), error))
            }
            _ => Ok(()),
        }
    }

    /// Reads an attachment's record, or returns `None` if there is none.
    ///
    /// # Errors
    /// Code 5 if the record cannot be read or decoded.
    pub(crate) fn find(&self, key: &str) -> Result<Option<Record>> {
        read(&self.path(key))
    }

    /// Reads all records. One that cannot be read is left out: its lease is not renewed, and ends
    /// at the server.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be opened.
    pub(crate) fn list(&self) -> Result<Vec<Record>> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries
                .map_err(|error| Error::caused(Code::IO, format_args!("failed to read {}", self.0.display()), error))?,
        };
        // After an error of the folder, the records that were listed before it are still of use.
        let paths = entries.flatten().map(|entry| entry.path());
        let paths = paths.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
        Ok(paths.filter_map(|path| read(&path).ok().flatten()).collect())
    }
}

/// Reads and decodes a file, or returns `None` if there is none.
fn read(path: &Path) -> Result<Option<Record>> {
    let failed = |error: io::Error| Error::caused(Code::IO, format_args!("failed to read {}", path.display()), error);
    // `cni::file::read` refuses a FIFO, which would block the daemon.
    match cni::file::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        bytes => serde_json::from_slice(&bytes.map_err(failed)?).map(Some).map_err(|error| failed(error.into())),
    }
}
