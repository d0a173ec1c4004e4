//! `vrf`: puts CNI_IFNAME into a VRF of the container, which is created with its first interface
//! and removed with its last. Always behind another plugin, whose result it hands on.
//!
//! The kernel takes an interface down and up again when it joins a VRF. That costs its IPv6
//! addresses and its routes, so ADD puts both back, the routes of the main table into that of the
//! VRF.
//!
//! All of it is in the container's namespace and ends with it, so GC and STATUS have nothing to do.
//! The kernel's rule for VRFs (priority 1000), added with the first VRF, stays.

mod conf;
mod join;

use std::time::Duration;

use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::machine::OnSigterm;
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Code, Error, Result};
use cni_linux::{Link, Netlink, Netns};

use conf::Conf;
use join::Plan;

/// How long a call waits for another one that changes the same namespace.
const LOCK_LIMIT: Duration = Duration::from_secs(30);

/// The plugin.
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
        let failed = |error: Error| error.context("cmdAdd failed");
        let netns = Netns::open(call.netns()?)?;
        let locked = netns.lock(call.machine, OnSigterm::Kill, LOCK_LIMIT)?;
        let mut rollback = call.rollback();
        // Undone last: the lock holds until the result has been written, or all has been undone.
        rollback.push("unlock the namespace", move || locked.unlock());
        let netlink = netns.run(Netlink::open)??;
        let plan = Plan::new(&netlink, &conf, &call.ifname).map_err(failed)?;
        plan.carry_out(&netlink, &mut rollback).map_err(failed)?;
        Ok(Added { result, rollback })
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(&call.conf)?;
        call.conf.prev_result()?.ok_or_else(no_prev_result)?;
        let netlink = Netns::open(call.netns()?)?.run(Netlink::open)??;
        let differs = |msg: String| Err(Error::new(Code::CHECK_FAILED, msg));
        let vrf = find_vrf(&netlink, &conf.name)?;
        let link = netlink.find_link(&call.ifname)?;
        let master = link.and_then(|link| link.master);
        let Some(vrf) = vrf.filter(|vrf| master == Some(vrf.index)) else {
            return differs(format!("failed to find {} associated to vrf {}", call.ifname, conf.name));
        };
        if !vrf.up {
            return differs(format!("VRF {} is down", conf.name));
        }
        match (vrf.vrf_table, conf.table) {
            (Some(found), Some(wanted)) if found != wanted => differs(different_table(&conf.name, found)),
            _ => Ok(()),
        }
    }

    /// Removes the interface from the VRF. An interface with another master is left alone. A VRF
    /// without interfaces is removed even if another program created it.
    fn del(&self, call: &Call<'_>) -> Result<()> {
        let conf = match Conf::new(&call.conf) {
            Ok(conf) => conf,
            Err(error) => {
                call.notes.note(format_args!("vrf: no ADD can have worked with this configuration: {error}"));
                return Ok(());
            }
        };
        let netns = match call.netns.as_deref().map(Netns::open) {
            None => return Ok(()),
            Some(Err(error)) if error.is_no_netns() => return Ok(()),
            Some(netns) => netns?,
        };
        let _locked = netns.lock(call.machine, OnSigterm::Finish, LOCK_LIMIT)?;
        let netlink = netns.run(Netlink::open)??;
        let vrf = match netlink.find_link(&conf.name)? {
            Some(vrf) if vrf.vrf_table.is_some() => vrf,
            _ => return Ok(()),
        };
        if let Some(link) = netlink.find_link(&call.ifname)?.filter(|link| link.master == Some(vrf.index)) {
            netlink.unset_master(link.index)?;
        }
        Ok(join::purge_empty(&netlink, &vrf)?)
    }

    fn gc(&self, _: &Call<'_>, _: &ValidAttachments) -> Result<()> {
        Ok(())
    }

    fn status(&self, call: &Call<'_>) -> Result<()> {
        self.examine(&call.conf)
    }
}

fn no_prev_result() -> Error {
    Error::config("missing prevResult from earlier plugin")
}

fn different_table(name: &str, found: u32) -> String {
    format!("VRF {name} already exist with different routing table {found}")
}

/// # Errors
/// 102 if another kind of interface has the name.
fn find_vrf(netlink: &Netlink, name: &str) -> Result<Option<Link>> {
    match netlink.find_link(name)? {
        Some(other) if other.vrf_table.is_none() => {
            let msg = format!("Netlink {name} is not a VRF");
            Err(Error::new(Code::CONFLICT, msg).with_details(format!("it is a {}", other.kind)))
        }
        found => Ok(found),
    }
}
