//! Implements DEL: removes CNI_IFNAME from its VRF.

use std::time::Duration;

use cni::Result;
use cni::machine::OnSigterm;
use cni::skel::Call;
use cni_linux::{Link, Netlink, Netns};
use cni_plugin::identity::{Identity, expected_mac, identify};

use crate::conf::Conf;
use crate::join;

/// How long DEL waits. Then DEL continues without the lock, because a process of the pod can hold
/// the lock as long as it wants to.
const DEL_LOCK_LIMIT: Duration = Duration::from_secs(2);

/// Removes the interface from the VRF, and the VRF if no interface is left in it, even if another
/// program created it. An interface that is in another VRF or in a bridge stays there, and so does
/// one that belongs to another attachment.
///
/// # Errors
/// - Code 4 if CNI_NETNS cannot be opened.
/// - The errors of the kernel.
pub(crate) fn del(call: &Call<'_>) -> Result<()> {
    let conf = match Conf::new(&call.conf) {
        Ok(conf) => conf,
        Err(error) => {
            call.notes
                .note(format_args!("vrf: nothing was removed, since no ADD succeeds with this configuration: {error}"));
            return Ok(());
        }
    };
    let Some(netns) = Netns::open_if_exists(call.netns.as_deref())? else { return Ok(()) };
    let _locked = match netns.lock(call.machine, OnSigterm::Finish, DEL_LOCK_LIMIT) {
        Ok(locked) => Some(locked),
        Err(error) => {
            call.notes.note(format_args!("vrf: DEL continues without the lock: {error}"));
            None
        }
    };
    let netlink = netns.run(Netlink::open)??;
    let vrf = match netlink.find_link(&conf.name)? {
        Some(vrf) if vrf.vrf_table.is_some() => vrf,
        // The VRF does not exist, or another kind of interface has its name.
        _ => return Ok(()),
    };
    if let Some(link) = netlink.find_link(&call.ifname)? {
        if !is_own(call, &netlink, &link)? {
            call.notes.note(format_args!(
                "vrf: {} in {} was not removed from VRF {}: it belongs to another attachment",
                link.name,
                netns.path().display(),
                conf.name
            ));
            return Ok(());
        }
        if link.master == Some(vrf.index) {
            netlink.unset_master(link.index)?;
        }
    }
    Ok(join::purge_if_empty(&netlink, &vrf)?)
}

/// Whether `link`, which is CNI_IFNAME in CNI_NETNS, may belong to the attachment of this DEL. It
/// does not if its mark names another attachment, or if it has no mark and neither the MAC nor an
/// address of `prevResult`. The MAC alone is not enough: `tuning` may have changed it in ADD and
/// restored it in DEL.
///
/// # Errors
/// The kernel cannot list the addresses or look up the end on the host.
fn is_own(call: &Call<'_>, netlink: &Netlink, link: &Link) -> Result<bool> {
    let prev = call.conf.prev_result().ok().flatten();
    match (identify(call, prev.as_ref(), link)?, &prev) {
        (Identity::Own, _) | (Identity::Unknown, None) => Ok(true),
        (Identity::Other, _) => Ok(false),
        (Identity::Unknown, Some(prev)) => {
            if expected_mac(call, Some(prev)).is_none() {
                return Ok(true);
            }
            let existing = netlink.list_addresses(link.index)?;
            Ok(prev.ips.iter().any(|ip| existing.iter().any(|addr| addr.cidr == ip.address)))
        }
    }
}
