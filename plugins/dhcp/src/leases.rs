//! The recorded leases, for a reader that is not the daemon.

use std::net::Ipv4Addr;
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
    /// CNI_CONTAINERID
    pub container_id: String,
    /// CNI_IFNAME
    pub ifname: String,
    /// The address.
    pub address: Cidr,
    /// The server.
    pub server: Ipv4Addr,
    /// The times, unless the address was requested and no answer has come yet.
    pub times: Option<Times>,
    /// The last error since the lease was granted.
    pub error: Option<String>,
}

/// The time from now until something happens; zero once it has. `None`: never.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// The server is asked for more time.
    pub t1: Option<Duration>,
    /// Any server is asked.
    pub t2: Option<Duration>,
    /// The lease ends.
    pub expiry: Option<Duration>,
}

/// Returns the socket that a configuration names. `None` if its IPAM plugin is not dhcp.
///
/// # Errors
/// As for the plugin.
pub fn socket(conf: &NetConf) -> Result<Option<PathBuf>> {
    match conf.ipam_type() {
        "dhcp" => Conf::read(conf, "").map(|conf| Some(conf.socket)),
        _ => Ok(None),
    }
}

/// Returns the socket of a daemon without flags.
pub fn default_socket() -> PathBuf {
    DEFAULT_SOCKET.into()
}

/// Reads the leases of the daemon that has this socket, whether it runs or not: by network,
/// container and interface.
///
/// # Errors
/// The folder of the records cannot be read.
pub fn list(socket: &Path) -> Result<Vec<Lease>> {
    let mut leases: Vec<Lease> = Records::of(socket).list()?.into_iter().filter_map(read).collect();
    leases.sort_by(|a, b| (&a.network, &a.container_id, &a.ifname).cmp(&(&b.network, &b.container_id, &b.ifname)));
    Ok(leases)
}

fn read(record: Record) -> Option<Lease> {
    let now = now();
    let left = |end: Duration| if end == Duration::MAX { None } else { Some(end.saturating_sub(now)) };
    let (terms, times) = match &record.held {
        RecordedLease::Nothing => return None,
        RecordedLease::Requested(terms) => (terms, None),
        RecordedLease::Bound(lease) => {
            let times = Times { t1: left(lease.t1()), t2: left(lease.t2()), expiry: left(lease.expiry()) };
            (&lease.terms, Some(times))
        }
    };
    let (address, server) = (terms.network, terms.server);
    let Record { network, container_id, ifname, error, .. } = record;
    Some(Lease { network, container_id, ifname, address, server, times, error })
}
