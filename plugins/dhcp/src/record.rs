//! Stores the leases, so that a later daemon can continue them: one file for each attachment, in a
//! folder beside the socket.

use std::path::Path;

use cni::result::{AddResult, Route};
use cni::{Code, Error, Result};
use cni_dhcp::lease::{Identity, Lease};
use cni_dhcp::message::v6::with_zone;
use cni_dhcp::message::{LeaseParameters, RouteChoices};
use cni_plugin::folder::{Folder, StateFile};
use cni_plugin::record::record_name;
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

/// The folder of the records.
#[derive(Clone, Debug)]
pub(crate) struct Records(Folder);

impl Records {
    /// Returns the folder that belongs to a socket: `/run/cni/dhcp` for `/run/cni/dhcp.sock`, and
    /// `PATH.leases` for a PATH that does not end in `.sock`.
    pub(crate) fn for_socket(socket: &Path) -> Records {
        Records(Folder::of_records(match socket.extension() {
            Some(extension) if extension == "sock" => socket.with_extension(""),
            _ => format!("{}.leases", socket.display()).into(),
        }))
    }

    /// Replaces an attachment's record atomically.
    ///
    /// # Errors
    /// Code 5 if the record cannot be written.
    pub(crate) fn write(&self, record: &Record) -> Result<()> {
        let json =
            serde_json::to_vec(record).map_err(|error| Error::caused(Code::IO, "failed to encode a record", error))?;
        self.0.file(&record_name(&record.key())).write(&json)
    }

    /// Removes an attachment's record, if there is one.
    ///
    /// # Errors
    /// Code 5 if the record cannot be removed.
    pub(crate) fn purge(&self, key: &str) -> Result<()> {
        self.0.file(&record_name(key)).purge().map(drop)
    }

    /// Reads an attachment's record, or returns `None` if there is none.
    ///
    /// # Errors
    /// Code 5 if the record cannot be read or decoded.
    pub(crate) fn find(&self, key: &str) -> Result<Option<Record>> {
        read(&self.0.file(&record_name(key)))
    }

    /// Removes the temporary files that a killed daemon has left. Only for the daemon, before it
    /// writes a record. An error is ignored: such a file does no harm. Those of older releases have
    /// the extension `part`.
    pub(crate) fn purge_temporary(&self) {
        for file in self.0.list().unwrap_or_default() {
            if file.path().extension().is_some_and(|extension| extension == "tmp" || extension == "part") {
                let _ = file.purge();
            }
        }
    }

    /// Reads all records. A record that cannot be read is left out: its lease is not renewed, and
    /// ends at the server. Returns none if the folder does not exist.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    pub(crate) fn list(&self) -> Result<Vec<Record>> {
        let files = self.0.list()?.into_iter();
        let records = files.filter(|file| file.path().extension().is_some_and(|extension| extension == "json"));
        Ok(records.filter_map(|file| read(&file).ok().flatten()).collect())
    }
}

/// Reads and decodes a record, or returns `None` if the file does not exist.
fn read(file: &StateFile) -> Result<Option<Record>> {
    let failed = |why| Error::caused(Code::IO, format_args!("failed to read {}", file.path().display()), why);
    file.read()?.map(|content| content.decode().map_err(failed)).transpose()
}
