//! Implements CHECK: whether the ports still lead to the container.
//!
//! The rules may be in either backend: the configuration may have changed since ADD, and the Go
//! plugin may have written them.

use cni::result::AddResult;
use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_firewall::portmap::{Forwarding, PortMap};
use cni_linux::sysctl;

use crate::add;
use crate::conf::Conf;

/// The sysctl that maps 127.0.0.1 on all interfaces.
const LOCALNET_OF_ALL: &str = "net/ipv4/conf/all/route_localnet";

/// Checks that each host port leads to the container, for connections to 127.0.0.1 too.
///
/// # Errors
/// - Code 3 if no host port of the container is mapped.
/// - Code 101 if a rule is missing or differs, or 127.0.0.1 is not mapped because the sysctl
///   `route_localnet` is off.
/// - The error of a backend or sysctl that cannot be read.
pub(crate) fn check(call: &Call<'_>, conf: &Conf, prev: &AddResult) -> Result<()> {
    let forwarding = add::configured_forwarding(call, conf, add::container_addresses(&call.ifname, prev));
    if forwarding.all_claims().is_empty() {
        return Ok(());
    }
    check_rules(call, conf, &forwarding)?;
    let Some(link) = add::find_link_without_localnet(call, &forwarding) else { return Ok(()) };
    // The link's own `route_localnet` is off. The kernel maps 127.0.0.1 if either that sysctl or
    // the one of all interfaces is on. kube-proxy sets the latter.
    match sysctl::read(LOCALNET_OF_ALL) {
        Ok(value) if value == "1" => Ok(()),
        Ok(_) => {
            let key = add::localnet_key(&link);
            Err(Error::new(Code::CHECK_FAILED, format!("sysctl {key} is off, so 127.0.0.1 is not mapped: set it to 1")))
        }
        // As in ADD, which cannot set what /proc/sys does not have.
        Err(error) if error.is_not_found() => {
            add::note_no_localnet(call, &error);
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// Checks that one of the backends has all rules of the attachment. If both have only some of them,
/// reports the differences in the backend that a new ADD would choose.
///
/// # Errors
/// - Code 3 if neither backend has a rule of the attachment.
/// - Code 101 if a rule is missing or differs.
fn check_rules(call: &Call<'_>, conf: &Conf, forwarding: &Forwarding) -> Result<()> {
    let portmap = PortMap::new(call.machine, call.notes.clone());
    let backend = match conf.backend {
        Some(backend) => backend,
        None => portmap.default_backend()?,
    };
    match portmap.check(forwarding, backend)? {
        Some(differences) if differences.is_empty() => Ok(()),
        Some(differences) => Err(Error::new(Code::CHECK_FAILED, differences.join("; "))),
        None => {
            let msg = format!("no host port of container {} is mapped", call.container_id);
            let details = format!("neither {backend} nor {} has rules of this attachment", backend.other());
            Err(Error::new(Code::UNKNOWN_CONTAINER, msg).with_details(details))
        }
    }
}
