//! The plugin `route-override`: removes routes that earlier plugins of the list have added to the
//! container, adds others, and returns the earlier plugins' result with the routes that are then in
//! force.
//!
//! Only routes of the main table over the attachment's interfaces are removed. DEL restores them,
//! and removes the added ones: a record on the host has both. It also serves a DEL after a later
//! plugin's ADD has failed, or after a killed ADD. GC only removes records, because the namespaces
//! of the attachments are gone.
//!
//! - `conf`: the configuration. `change`: the changes, and the comparison for CHECK. `record`: the
//!   record.

mod change;
mod conf;
mod record;

use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::result::AddResult;
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Error, Result};
use cni_linux::{Link, Netlink, Netns, SavedRoute};
use cni_plugin::container::require_link;
use cni_plugin::interface::failed;
use cni_plugin::record::AttachmentRecord as _;

use change::{Change, lists, take_back};
use conf::Conf;
use record::Record;

/// The plugin `route-override`.
#[derive(Clone, Copy, Debug)]
pub struct RouteOverride;

impl Plugin for RouteOverride {
    fn name(&self) -> &'static str {
        "route-override"
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
        let mut result = prev_result(call)?;
        let netns = Netns::open(call.netns()?)?;
        let netlink = netns.run(Netlink::open)??;
        let link = require_link(&netlink, call)?;
        let links = indexes(&netlink, &link, &result)?;
        let change = Change::new(&netlink, &links, link.index, &conf, &call.notes)?;
        let mut rollback = call.rollback();
        if !change.is_empty() {
            let previous = Record::find(&call.attachment())?.filter(|record| record.is_of(&netlink, &netns, &link));
            let mut record =
                previous.clone().unwrap_or_else(|| Record::new(call.attachment(), &netlink, &netns, &link));
            record.extend(&change.removed, &change.added());
            let (undo_netlink, removed, added) = (netlink.clone(), change.removed.clone(), change.added());
            let undo_record = record.clone();
            rollback.push("restore the routes", move || -> Result<()> {
                take_back(&undo_netlink, &removed, &added)?;
                // An earlier entry of the list, or an earlier ADD, has written it.
                previous.map_or_else(|| undo_record.purge(), |previous| previous.write())
            });
            // Written before the first change, so that DEL finds it even if this process is killed.
            record.write()?;
            change.carry_out(&netlink)?;
        }
        let removed_routes: Vec<_> = change.removed.iter().flat_map(SavedRoute::routes).collect();
        result.routes.retain(|listed| !removed_routes.iter().any(|route| lists(listed, route)));
        result.routes.extend(change.listed);
        if conf.flush_gateway {
            result.ips.iter_mut().for_each(|ip| ip.gateway = None);
        }
        Ok(Added { result, rollback })
    }

    /// Fails with code 101 if an added route does not exist, or a route exists that ADD removes.
    /// With `skipcheck`, only the configuration is checked.
    fn check(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(&call.conf)?;
        if conf.skip_check {
            return Ok(());
        }
        let prev = prev_result(call)?;
        let netlink = Netns::open(call.netns()?)?.run(Netlink::open)??;
        let link = require_link(&netlink, call)?;
        let links = indexes(&netlink, &link, &prev)?;
        let differences = change::differences(&netlink, &links, link.index, &conf, &prev)?;
        if differences.is_empty() { Ok(()) } else { Err(failed(differences.join("; "))) }
    }

    /// Restores the routes, and removes the record. Restores nothing if CNI_NETNS leads to another
    /// namespace than at ADD, or CNI_IFNAME was created again. A route that the kernel refuses is
    /// only noted: the namespace will usually be deleted anyway, and a failing DEL would keep the
    /// container from ending.
    fn del(&self, call: &Call<'_>) -> Result<()> {
        let Some(record) = Record::find(&call.attachment())? else { return Ok(()) };
        if let Some(netns) = Netns::open_if_exists(call.netns.as_deref())? {
            restore(call, &netns, &record)?;
        }
        record.purge()
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        let stale = Record::list_stale(call, valid)?;
        Error::join(stale.iter().filter_map(|record| record.purge().err()))
    }
}

/// Takes the recorded changes back in `netns`, if it has the interface of the record.
fn restore(call: &Call<'_>, netns: &Netns, record: &Record) -> Result<()> {
    let netlink = netns.run(Netlink::open)??;
    // The container may have renamed it.
    let link = netlink.find_link_by_index(record.interface.0)?;
    if !link.is_some_and(|link| record.is_of(&netlink, netns, &link)) {
        call.notes.note(format_args!("no route was restored: {} is not the interface of the ADD", call.ifname));
        return Ok(());
    }
    if let Err(error) = take_back(&netlink, &record.removed(), &record.added()) {
        call.notes.note(format_args!("not restored: {error}"));
    }
    Ok(())
}

/// Returns the result of the earlier plugins.
///
/// # Errors
/// Code 7 if there is none.
fn prev_result(call: &Call<'_>) -> Result<AddResult> {
    call.conf.prev_result()?.ok_or_else(|| Error::config("Required prevResult missing"))
}

/// Returns the indexes of the attachment's interfaces: `link`, which is CNI_IFNAME, and those that
/// `prev` lists in the container.
fn indexes(netlink: &Netlink, link: &Link, prev: &AddResult) -> Result<Vec<u32>> {
    let mut indexes = vec![link.index];
    for interface in prev.interfaces.iter().filter(|interface| !interface.sandbox.is_empty()) {
        indexes.extend(netlink.find_link(&interface.name)?.map(|link| link.index));
    }
    Ok(indexes)
}
