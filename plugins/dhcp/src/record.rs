//! Stores the leases, so that a later daemon can continue them: one file for each attachment, in a
//! folder beside the socket.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use cni::hash::sha512_hex;
use cni::result::{AddResult, Route};
use cni::{Code, Error, Result};
use cni_dhcp::lease::{Identity, Lease};
use cni_dhcp::message::v6::with_zone;
use cni_dhcp::message::{LeaseParameters, RouteChoices};
use cni_linux::file::replace;
use serde::{Deserialize, Serialize};

use crate::conf::MtuTarget;

/// The record of one lease. An attachment with both protocols has two.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) container_id: String,
    pub(crate) network: String,
    pub(crate) ifname: String,
    /// CNI_NETNS, without the daemon's prefix.
    pub(crate) netns: String,
    /// The device and inode numbers of the namespace: its path may lead to another one later.
    pub(crate) netns_id: (u64, u64),
    /// The index of the interface.
    pub(crate) index: u32,
    /// The priority (metric) of the routes.
    pub(crate) priority: Option<u32>,
    /// The routes of the configuration. Older records have none.
    #[serde(default)]
    pub(crate) routes: Vec<Route>,
    /// Where the MTU of the lease is set.
    #[serde(default)]
    pub(crate) mtu_target: MtuTarget,
    /// The identity that the client sends.
    pub(crate) client: Identity,
    // The key keeps its original name, so that existing records stay readable.
    #[serde(rename = "held")]
    pub(crate) lease: RecordedLease,
    /// The last error since the lease was granted.
    #[serde(default)]
    pub(crate) error: Option<String>,
}

/// The lease of the attachment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum RecordedLease {
    /// No lease has been requested yet, and there is no file.
    Nothing,
    /// An address has been requested. The server may have leased it even if its answer is missing.
    Requested(LeaseParameters),
    /// The attachment has a lease.
    Bound(Lease),
}

impl Record {
    /// Returns the result of a lease on an interface with this MTU, if that is known.
    pub(crate) fn result(&self, terms: &LeaseParameters, link_mtu: Option<u32>) -> AddResult {
        let mut result = terms.result(&RouteChoices { priority: self.priority, link_mtu, routes: &self.routes });
        for server in &mut result.dns.nameservers {
            *server = with_zone(server, &self.ifname);
        }
        result
    }

    /// Returns the key of the lease: that of the attachment, or that of its DHCPv6 lease.
    pub(crate) fn key(&self) -> String {
        let key = key(&self.container_id, &self.network, &self.ifname);
        if self.client.is_v6() { key_v6(&key) } else { key }
    }
}

/// Returns the key of an attachment, which is that of Go's daemon. The default client identifier
/// contains it.
pub(crate) fn key(container_id: &str, network: &str, ifname: &str) -> String {
    format!("{container_id}/{network}/{ifname}")
}

/// Returns the key of an attachment's DHCPv6 lease. No name contains a slash, so no other
/// attachment has it.
pub(crate) fn key_v6(key: &str) -> String {
    format!("{key}/ipv6")
}

/// The extension of the temporary file that is renamed to a record.
const PART: &str = "part";

/// The folder of the records.
#[derive(Clone, Debug)]
pub(crate) struct Records(PathBuf);

impl Records {
    /// Returns the folder that belongs to a socket: `/run/cni/dhcp` for `/run/cni/dhcp.sock`, and
    /// `PATH.leases` for a PATH that does not end in `.sock`.
    pub(crate) fn for_socket(socket: &Path) -> Records {
        match socket.extension() {
            Some(extension) if extension == "sock" => Records(socket.with_extension("")),
            _ => Records(format!("{}.leases", socket.display()).into()),
        }
    }

    /// Returns the path of an attachment's record.
    fn path(&self, key: &str) -> PathBuf {
        self.0.join(format!("{}.json", sha512_hex(&[key.as_bytes()], 40)))
    }

    /// Replaces an attachment's record atomically.
    ///
    /// # Errors
    /// Code 5 if the record cannot be written.
    pub(crate) fn write(&self, record: &Record) -> Result<()> {
        let path = self.path(&record.key());
        let write = || -> io::Result<()> {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
            let temporary = path.with_extension(PART);
            let json = serde_json::to_vec(record).map_err(io::Error::other)?;
            replace(&path, &temporary, &json)
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

    /// Removes the temporary files that a killed daemon has left. Only for the daemon, before it
    /// writes a record. An error is ignored: such a file does no harm.
    pub(crate) fn purge_temporary(&self) {
        let paths = fs::read_dir(&self.0).into_iter().flatten().flatten().map(|entry| entry.path());
        for path in paths.filter(|path| path.extension().is_some_and(|extension| extension == PART)) {
            let _ = fs::remove_file(path);
        }
    }

    /// Reads all records. A record that cannot be read is left out: its lease is not renewed, and
    /// ends at the server. Returns none if the folder does not exist.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be opened.
    pub(crate) fn list(&self) -> Result<Vec<Record>> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries
                .map_err(|error| Error::caused(Code::IO, format_args!("failed to read {}", self.0.display()), error))?,
        };
        // An error while listing is ignored, because the entries before the error are still useful.
        let paths = entries.flatten().map(|entry| entry.path());
        let paths = paths.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
        Ok(paths.filter_map(|path| read(&path).ok().flatten()).collect())
    }
}

/// Reads and decodes a record, or returns `None` if the file does not exist.
fn read(path: &Path) -> Result<Option<Record>> {
    let failed = |error: io::Error| Error::caused(Code::IO, format_args!("failed to read {}", path.display()), error);
    // `cni::file::read` refuses a FIFO, which would block the daemon.
    let bytes = match cni::file::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        outcome => outcome.map_err(failed)?,
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| failed(error.into()))
}
