//! The container's namespace and interface, for chained plugins.

use std::time::Duration;

use cni::machine::OnSigterm;
use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_linux::{Link, Netlink, Netns};

/// How long ADD waits for another call that has locked the same namespace.
const LOCK_LIMIT: Duration = Duration::from_secs(30);

/// Returns CNI_IFNAME. `netlink` is a socket of the container's namespace.
///
/// # Errors
/// Code 4, with the text of Go's plugins, if it does not exist.
pub fn require_link(netlink: &Netlink, call: &Call<'_>) -> Result<Link> {
    let missing = || {
        let msg = format!("Cannot find network interface {}: Link not found (CNI_IFNAME)", call.ifname);
        Error::new(Code::INVALID_ENVIRONMENT, msg)
    };
    netlink.find_link(&call.ifname)?.ok_or_else(missing)
}

/// Locks the namespace, so that ADDs of other networks do not change its routes and rules at the
/// same time. The lock is the first entry of the returned stack, so a failed ADD is undone before
/// the namespace is unlocked. After success the stack is dropped, and with it the lock, once the
/// result has been written.
///
/// # Errors
/// Code 11 if another call holds the lock for 30 seconds, or a signal ends the wait.
pub fn lock_for_add<'a>(call: &'a Call<'_>, netns: &Netns) -> Result<Rollback<'a>> {
    let locked = netns.lock(call.machine, OnSigterm::Kill, LOCK_LIMIT)?;
    let mut rollback = call.rollback();
    rollback.push("unlock the namespace", move || locked.unlock());
    Ok(rollback)
}
