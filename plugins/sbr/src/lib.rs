//! The plugin `sbr` (source-based routing): packets from an address of CNI_IFNAME leave over
//! CNI_IFNAME, even if the container has other interfaces with other routes. It runs after a plugin
//! of the same list that has created the interface, and returns that plugin's result.
//!
//! Each address gets a rule that leads to a routing table of its own, and the interface's routes
//! move from the main table into these tables. With the key `table`, only the rules are added.
//! Rules and routes are in the container's namespace and vanish with it, so GC has nothing to do.
//!
//! Two ADDs for one namespace must not choose the same table. Each locks the namespace as Go's
//! plugin does: with `flock` on the file that CNI_NETNS names. No lock file is created. DEL chooses
//! no table and does not lock: a process of the pod can hold the lock as long as it wants to.

mod check;
mod conf;
mod del;
mod plan;

use cni::config::NetConf;
use cni::json::{Json, UnknownKey};
use cni::result::{AddResult, IpConfig};
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Code, Error, Result};
use cni_linux::{Netlink, Netns};
use cni_plugin::container::{lock_for_add, require_link};

use conf::Conf;
use plan::Plan;

/// The plugin `sbr`.
#[derive(Clone, Copy, Debug)]
pub struct Sbr;

impl Plugin for Sbr {
    fn name(&self) -> &'static str {
        "sbr"
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
        let result = prev_result(call)?;
        let ips = addresses_of(&result, &call.ifname);
        if result.ips.is_empty() {
            return Err(Error::config(format!("No IP addresses supplied on interface: {}", call.ifname)));
        }
        if ips.is_empty() {
            call.notes.note(format_args!(
                "sbr: no routing rule was added: all addresses of prevResult belong to interfaces other than {}",
                call.ifname
            ));
            return Ok(Added { result, rollback: call.rollback() });
        }
        let netns = Netns::open(call.netns()?)?;
        let mut rollback = lock_for_add(call, &netns)?;
        let netlink = netns.run(Netlink::open)??;
        let link = require_link(&netlink, call)?;
        let plan = Plan::new(&netlink, &link, &conf, &ips)?;
        plan.carry_out(&netlink, &mut rollback)?;
        Ok(Added { result, rollback })
    }

    /// Fails with code 101 if a rule or a default route is missing. The interface need not have all
    /// its addresses: a later plugin may have removed one.
    fn check(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(&call.conf)?;
        let ips = addresses_of(&prev_result(call)?, &call.ifname);
        let netns = Netns::open(call.netns()?)?;
        let netlink = netns.run(Netlink::open)??;
        let link = require_link(&netlink, call)?;
        let missing = check::find_missing(&netlink, &link, &conf, &ips)?;
        if missing.is_empty() { Ok(()) } else { Err(Error::new(Code::CHECK_FAILED, missing.join("; "))) }
    }

    fn del(&self, call: &Call<'_>) -> Result<()> {
        del::del(call)
    }
}

/// Returns the result of the plugin before this one.
///
/// # Errors
/// Code 7, with the text of Go's plugin, if there is none.
fn prev_result(call: &Call<'_>) -> Result<AddResult> {
    let prev = call.conf.prev_result()?;
    prev.ok_or_else(|| Error::config("This plugin must be called as chained plugin"))
}

/// Returns the addresses in `prev` of the interface `ifname`. An address that refers to none of the
/// result's interfaces counts too, as in Go's plugin.
fn addresses_of(prev: &AddResult, ifname: &str) -> Vec<IpConfig> {
    let may_be_of_interface = |ip: &&IpConfig| {
        let interface = ip.interface.and_then(|index| prev.interfaces.get(index));
        interface.is_none_or(|interface| interface.name == ifname)
    };
    prev.ips.iter().filter(may_be_of_interface).cloned().collect()
}
