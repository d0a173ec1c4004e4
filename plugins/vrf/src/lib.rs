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
mod del;
mod join;

use cni::config::NetConf;
use cni::json::{Json, UnknownKey};
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Code, Error, Result};
use cni_linux::{Link, Netlink, Netns};
use cni_plugin::container::lock_for_add;

use conf::Conf;
use join::Plan;

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
        json.unknown_keys::<conf::Keys>()
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let conf = Conf::new(&call.conf)?;
        let result = call.conf.prev_result()?.ok_or_else(no_prev_result)?;
        // Go's plugin begins these errors with the same words.
        let failed = |error: Error| error.context("cmdAdd failed");
        let netns = Netns::open(call.netns()?)?;
        let mut rollback = lock_for_add(call, &netns)?;
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

    fn del(&self, call: &Call<'_>) -> Result<()> {
        del::del(call)
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
