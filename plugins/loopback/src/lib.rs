//! The plugin `loopback`: ADD sets the interface `lo` of the container's namespace up, DEL sets it
//! down if no other interface there is up.
//!
//! CNI_IFNAME is ignored, as in Go's plugin: the interface is always `lo`. The result of an earlier
//! plugin is returned unchanged, without an entry for `lo`. `lo` vanishes with its namespace, so GC
//! has nothing to do.

use cni::config::NetConf;
use cni::json::{Json, UnknownKey};
use cni::result::{AddResult, Interface, IpConfig};
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Code, Error, Result};
use cni_linux::{Addr, Family, Netlink, Netns};
use serde::Deserialize;

/// The plugin `loopback`.
#[derive(Clone, Copy, Debug)]
pub struct Loopback;

/// The keys that this plugin reads: none.
#[derive(Deserialize)]
struct NoKeys {}

/// The name of the loopback interface in every network namespace.
const LO: &str = "lo";

impl Plugin for Loopback {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn role(&self) -> Role {
        Role::Namespace
    }

    /// Accepts every configuration: the plugin has no keys.
    fn examine(&self, _: &NetConf) -> Result<()> {
        Ok(())
    }

    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        json.unknown_keys::<NoKeys>()
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let prev = call.conf.prev_result()?;
        let netlink = Netlink::open()?.open_in(&Netns::open(call.netns()?)?)?;
        let lo = netlink.link(LO)?;
        let mut rollback = call.rollback();
        if !lo.up {
            let undo_netlink = netlink.clone();
            rollback.push("set lo down again", move || undo_netlink.set_down(lo.index));
        }
        // The kernel adds 127.0.0.1/8 and ::1/128 when lo goes up, so lo is set up before its
        // addresses are read for the result.
        netlink.set_up(lo.index)?;
        let addresses = netlink.list_addresses(lo.index)?;
        if let Some(other) = addresses.iter().find(|address| !address.cidr.address().is_loopback()) {
            let msg = format!("loopback interface found with non-loopback address \"{}\"", other.cidr);
            return Err(Error::new(Code::CONFLICT, msg));
        }
        let result = prev.unwrap_or_else(|| result_for_lo(call, &addresses));
        Ok(Added { result, rollback })
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        let netlink = Netlink::open()?.open_in(&Netns::open(call.netns()?)?)?;
        if netlink.link(LO)?.up {
            return Ok(());
        }
        Err(Error::new(Code::CHECK_FAILED, "loopback interface is down"))
    }

    /// Sets `lo` down, unless another interface of the namespace is up. Nothing in `lo` names an
    /// attachment, so the namespace may be that of another container, which the reused PID of a
    /// container that has ended leads to.
    fn del(&self, call: &Call<'_>) -> Result<()> {
        let Some(netns) = Netns::open_if_exists(call.netns.as_deref())? else { return Ok(()) };
        let netlink = Netlink::open()?.open_in(&netns)?;
        let links = netlink.list_links()?;
        if let Some(in_use) = links.iter().find(|link| link.up && link.name != LO) {
            call.notes.note(format_args!("{LO} was left up in {}: {} is up", netns.path().display(), in_use.name));
            return Ok(());
        }
        match links.iter().find(|link| link.name == LO) {
            Some(lo) if lo.up => Ok(netlink.set_down(lo.index)?),
            _ => Ok(()),
        }
    }
}

/// Returns the result of ADD: the interface `lo` with its first IPv4 and its first IPv6 address.
fn result_for_lo(call: &Call<'_>, addresses: &[Addr]) -> AddResult {
    let first_of =
        |family| addresses.iter().map(|address| address.cidr).find(|cidr| Family::of(cidr.address()) == family);
    AddResult {
        interfaces: vec![Interface {
            name: LO.to_owned(),
            mac: "00:00:00:00:00:00".to_owned(),
            sandbox: call.environment.netns.clone(),
            ..Interface::default()
        }],
        ips: Family::ALL
            .into_iter()
            .filter_map(first_of)
            .map(|address| IpConfig { interface: Some(0), address, gateway: None })
            .collect(),
        ..AddResult::default()
    }
}
