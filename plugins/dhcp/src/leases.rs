//! Lists the recorded leases, for cnitool.

use std::path::{Path, PathBuf};
use std::time::Duration;

use cni::config::NetConf;
use cni::{Cidr, Result};

use crate::conf::{Conf, DEFAULT_SOCKET};
use crate::daemon::now;
use crate::record::{Record, RecordedLease, Records};

/// A lease, as the daemon has recorded it.
#[derive(Clone, Debug)]
pub struct Lease {
    /// The network's name.
    pub network: String,
    /// The container's ID (CNI_CONTAINERID).
    pub container_id: String,
    /// The interface's name (CNI_IFNAME).
    pub ifname: String,
    /// The leased address.
    pub address: Cidr,
    /// The address of the server, or the DUID of a DHCPv6 server.
    pub server: String,
    /// The time servers of a DHCPv6 lease.
    pub ntp: Vec<String>,
    /// The times, or `None` if the address was requested and the server has not answered yet.
    pub times: Option<Times>,
    /// The last error since the lease was granted.
    pub error: Option<String>,
}

/// The remaining times of a lease; zero once they have passed. All are `None` for a lease that
/// never ends.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// The time until the daemon asks the server of the lease to extend it.
    pub t1: Option<Duration>,
    /// The time until the daemon asks all servers to extend the lease.
    pub t2: Option<Duration>,
    /// The time until the lease ends.
    pub expiry: Option<Duration>,
}

/// Returns the daemon's socket that a configuration names, or `None` if its IPAM plugin is not
/// dhcp.
///
/// # Errors
/// Code 6 or 7 if the configuration is invalid.
pub fn socket(conf: &NetConf) -> Result<Option<PathBuf>> {
    match conf.ipam_type() {
        "dhcp" => Conf::read(conf, "").map(|conf| Some(conf.socket)),
        _ => Ok(None),
    }
}

/// Returns the socket of a daemon that is started without flags.
pub fn default_socket() -> PathBuf {
    DEFAULT_SOCKET.into()
}

/// Reads the recorded leases of the daemon with this socket, sorted by network, container and
/// interface. The daemon does not need to run.
///
/// # Errors
/// Code 5 if the folder of the records cannot be read.
pub fn list(socket: &Path) -> Result<Vec<Lease>> {
    let mut leases: Vec<Lease> = Records::for_socket(socket).list()?.into_iter().filter_map(lease_of).collect();
    leases.sort_by(|a, b| (&a.network, &a.container_id, &a.ifname).cmp(&(&b.network, &b.container_id, &b.ifname)));
    Ok(leases)
}

/// Converts a record. Returns `None` for a record without a lease.
fn lease_of(record: Record) -> Option<Lease> {
    let now = now();
    let remaining = |end: Duration| if end == Duration::MAX { None } else { Some(end.saturating_sub(now)) };
    let (terms, times) = match &record.lease {
        RecordedLease::Nothing => return None,
        RecordedLease::Requested(terms) => (terms, None),
        RecordedLease::Bound(lease) => {
            let times =
                Times { t1: remaining(lease.t1()), t2: remaining(lease.t2()), expiry: remaining(lease.expiry()) };
            (&lease.terms, Some(times))
        }
    };
    let (address, server, ntp) = (terms.cidr, terms.server.to_string(), terms.ntp.clone());
    let Record { network, container_id, ifname, error, .. } = record;
    Some(Lease { network, container_id, ifname, address, server, ntp, times, error })
}
