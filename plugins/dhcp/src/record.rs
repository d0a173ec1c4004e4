//! A lease on disk, so that the daemon may end at any moment: one file for each attachment, in a
//! folder beside the socket.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use cni::hash::sha512_hex;
use cni::{Code, Error, Result};
use cni_dhcp::lease::Lease;
use cni_dhcp::message::{Client, LeaseParameters};
use serde::{Deserialize, Serialize};

/// One attachment's lease.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) container_id: String,
    pub(crate) network: String,
    pub(crate) ifname: String,
    /// CNI_NETNS, without the daemon's prefix.
    pub(crate) netns: String,
    /// The namespace's device and inode: its path may lead to another one later.
    pub(crate) netns_id: (u64, u64),
    /// The interface.
    pub(crate) index: u32,
    /// The routes' metric.
    pub(crate) priority: Option<u32>,
    pub(crate) client: Client,
    pub(crate) held: RecordedLease,
    /// The last error since the lease was granted.
    #[serde(default)]
    pub(crate) error: Option<String>,
}

/// The lease of the attachment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum RecordedLease {
    /// Nothing yet: there is no file.
    Nothing,
    /// An address that was requested; the server may have leased it.
    Requested(LeaseParameters),
    /// A lease.
    Bound(Lease),
}

impl Record {
    pub(crate) fn key(&self) -> String {
        key(&self.container_id, &self.network, &self.ifname)
    }
}

/// Returns the name of an attachment, as in Go: the client identifier's text.
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

    fn path(&self, key: &str) -> PathBuf {
        self.0.join(format!("{}.json", sha512_hex(&[key.as_bytes()], 40)))
    }

    /// Writes a record in one step: a reader sees the old one or the new one.
    pub(crate) fn write(&self, record: &Record) -> Result<()> {
        let path = self.path(&record.key());
        let write = || -> io::Result<()> {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
            let part = path.with_extension("part");
            let written = fs::write(&part, serde_json::to_vec(record).map_err(io::Error::other)?);
            written.and_then(|()| fs::rename(&part, &path)).inspect_err(|_| drop(fs::remove_file(&part)))
        };
        write().map_err(|error| Error::caused(Code::IO, format_args!("failed to write {}", path.display()), error))
    }

    /// Removes a record, if there is one.
    pub(crate) fn purge(&self, key: &str) -> Result<()> {
        let path = self.path(key);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(Error::caused(Code::IO, format_args!("failed to remove {}", path.display()), error))
            }
            _ => Ok(()),
        }
    }

    /// Reads an attachment's record.
    pub(crate) fn find(&self, key: &str) -> Result<Option<Record>> {
        read(&self.path(key))
    }

    /// Reads all records. One that cannot be read is left out: its lease ends at the server by
    /// itself.
    pub(crate) fn list(&self) -> Result<Vec<Record>> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries
                .map_err(|error| Error::caused(Code::IO, format_args!("failed to read {}", self.0.display()), error))?,
        };
        let paths = entries.flatten().map(|entry| entry.path());
        let paths = paths.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
        Ok(paths.filter_map(|path| read(&path).ok().flatten()).collect())
    }
}

fn read(path: &Path) -> Result<Option<Record>> {
    let failed = |error: io::Error| Error::caused(Code::IO, format_args!("failed to read {}", path.display()), error);
    // Nothing but a regular file: a FIFO would block the daemon.
    match cni::file::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        bytes => serde_json::from_slice(&bytes.map_err(failed)?).map(Some).map_err(|error| failed(error.into())),
    }
}
