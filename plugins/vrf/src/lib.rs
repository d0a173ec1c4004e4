//! The plugin `vrf`: adds CNI_IFNAME to a VRF of the container. A VRF (virtual routing and
//! forwarding) is a device that gives the interfaces in it a routing table of their own. It is
//! created for its first interface and removed after its last one. The plugin runs after a plugin
//! of the same list that has created the interface, and returns that plugin's result.
//!
//! When an interface joins a VRF, the kernel takes it down and up again, and it loses its IPv6
//! addresses and its routes. ADD restores both; routes of the main table go to the VRF's table.
//!
//! VRF, addresses and routes are in the container's namespace and vanish with it, so GC has nothing
//! to do. DEL leaves the rule for VRFs (priority 1000), which the kernel adds with the first VRF.

mod conf;
mod join;

use std::time::Duration;

use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::machine::OnSigterm;
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Code, Error, Result};
use cni_linux::{Link, Netlink, Netns};
use cni_plugin::identity::{Identity, expected_mac, identify};

use conf::Conf;
use join::Plan;

/// How long ADD waits for another call that has locked the same namespace.
const LOCK_LIMIT: Duration = Duration::from_secs(30);

/// How long DEL waits. Then DEL continues without the lock, because a process of the pod can hold
/// the lock as long as it wants to.
const DEL_LOCK_LIMIT: Duration = Duration::from_secs(2);

/// The plugin `vrf`.
#[derive(Clone, Copy, Debug)]
pub struct Vrf;

impl Plugin for Vrf {
    fn name(&self) -> &'static str {
        "vrf"
    }

    fn role(&self) -> Role {
        Role::Chained
    }

    fn examine(&self, conf: &NetConf) -> Result<()> {
        Conf::new(conf).map(drop)
    }

    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        conf::unknown_keys(json)
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let conf = Conf::new(&call.conf)?;
        let result = call.conf.prev_result()?.ok_or_else(no_prev_result)?;
        // Go's plugin begins these errors with the same words.
        let failed = |error: Error| error.context("cmdAdd failed");
        let netns = Netns::open(call.netns()?)?;
        let locked = netns.lock(call.machine, OnSigterm::Kill, LOCK_LIMIT)?;
        let mut rollback = call.rollback();
        // After a failure this undo, the first on the stack, runs last. After success the stack is
        // dropped once the result has been written, and the dropped file unlocks the namespace.
        rollback.push("unlock the namespace", move || locked.unlock());
        let netlink = netns.run(Netlink::open)??;
        let plan = Plan::new(&netlink, &conf, &call.ifname, &result).map_err(failed)?;
        plan.carry_out(&netlink, &mut rollback).map_err(failed)?;
        Ok(Added { result, rollback })
    }

    /// Fails with code 101 if the interface is not in the VRF, the VRF is down, or the VRF's table
    /// is not the configured one.
    fn check(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(&call.conf)?;
        call.conf.prev_result()?.ok_or_else(no_prev_result)?;
        let netlink = Netns::open(call.netns()?)?.run(Netlink::open)??;
        let check_failed = |msg: String| Err(Error::new(Code::CHECK_FAILED, msg));
        let vrf = find_vrf(&netlink, &conf.name)?;
        let link = netlink.find_link(&call.ifname)?;
        let master = link.and_then(|link| link.master);
        let Some(vrf) = vrf.filter(|vrf| master == Some(vrf.index)) else {
            return check_failed(format!("failed to find {} associated to vrf {}", call.ifname, conf.name));
        };
        if !vrf.up {
            return check_failed(format!("VRF {} is down", conf.name));
        }
        match (vrf.vrf_table, conf.table) {
            (Some(found), Some(configured)) if found != configured => {
                check_failed(different_table_text(&conf.name, found))
            }
            _ => Ok(()),
        }
    }

    /// Removes the interface from the VRF, and the VRF if no interface is left in it, even if
    /// another program created it. An interface that is in another VRF or in a bridge stays there,
    /// and so does one that belongs to another attachment.
    fn del(&self, call: &Call<'_>) -> Result<()> {
        let conf = match Conf::new(&call.conf) {
            Ok(conf) => conf,
            Err(error) => {
                call.notes.note(format_args!(
                    "vrf: nothing was removed, since no ADD succeeds with this configuration: {error}"
                ));
                return Ok(());
            }
        };
        let netns = match call.netns.as_deref().map(Netns::open) {
            None => return Ok(()),
            Some(Err(error)) if error.is_no_netns() => return Ok(()),
            Some(netns) => netns?,
        };
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
        if let Some(link) = netlink.find_link(&call.ifname)?.filter(|link| link.master == Some(vrf.index)) {
            if !is_own(call, &netlink, &link)? {
                call.notes.note(format_args!(
                    "vrf: {} in {} was not removed from VRF {}: it belongs to another attachment",
                    link.name,
                    netns.path().display(),
                    conf.name
                ));
                return Ok(());
            }
            netlink.unset_master(link.index)?;
        }
        Ok(join::purge_if_empty(&netlink, &vrf)?)
    }

    fn gc(&self, _: &Call<'_>, _: &ValidAttachments) -> Result<()> {
        Ok(())
    }

    fn status(&self, call: &Call<'_>) -> Result<()> {
        self.examine(&call.conf)
    }
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

/// Returns Go's error for a configuration without `prevResult`.
fn no_prev_result() -> Error {
    Error::config("missing prevResult from earlier plugin")
}

/// Returns the text of Go's plugin for a VRF whose table is not the configured one.
fn different_table_text(name: &str, found: u32) -> String {
    format!("VRF {name} already exist with different routing table {found}")
}

/// Returns the VRF of this name, or `None` if there is none.
///
/// # Errors
/// Code 102, with the text of Go's plugin, if an interface of another kind has the name.
fn find_vrf(netlink: &Netlink, name: &str) -> Result<Option<Link>> {
    match netlink.find_link(name)? {
        Some(other) if other.vrf_table.is_none() => {
            let msg = format!("Netlink {name} is not a VRF");
            Err(Error::new(Code::CONFLICT, msg).with_details(format!("it is a {}", other.kind)))
        }
        found => Ok(found),
    }
}
