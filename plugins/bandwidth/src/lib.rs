//! The plugin `bandwidth`: limits the rates at which a container receives and sends. It runs after
//! a plugin of the same list that has created a veth pair.
//!
//! Both limits apply at the host's end of the pair. The host sends packets to the container on this
//! end, so a token bucket filter (tbf) on the end limits them. The host receives packets from the
//! container on this end. The kernel cannot delay received packets, so they are redirected to an
//! ifb (intermediate functional block) device, and the filter is on the ifb.
//!
//! The kernel removes the filters together with the host's end. DEL removes the ifb.

mod add;
mod check;
mod conf;

use cni::AttachmentId;
use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::result::AddResult;
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Error, Result};
use cni_linux::{Link, Netlink, Netns};
use cni_plugin::identity;
use cni_plugin::interface::gc_links;

use conf::Conf;

/// The plugin `bandwidth`.
#[derive(Clone, Copy, Debug)]
pub struct Bandwidth;

impl Plugin for Bandwidth {
    fn name(&self) -> &'static str {
        "bandwidth"
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

    /// Sets the configured limits. The result is `prevResult` and, if one is created, the ifb.
    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let conf = Conf::new(&call.conf)?;
        let mut result = call.conf.prev_result()?.ok_or_else(|| Error::config("must be called as chained plugin"))?;
        let mut rollback = call.rollback();
        for limit in [conf.ingress, conf.egress].into_iter().flatten() {
            if let Some(note) = limit.note_of_reduced_burst() {
                call.notes.note(format_args!("bandwidth: {note}"));
            }
        }
        if conf.ingress.is_some() || conf.egress.is_some() {
            add::set_limits(call, conf, &mut result, &mut rollback)?;
        }
        Ok(Added { result, rollback })
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        check::check(call)
    }

    /// Removes the attachment's ifb. The limits are not read, so DEL works even if they are
    /// invalid.
    fn del(&self, call: &Call<'_>) -> Result<()> {
        let (host, attachment) = (Netlink::open()?, call.attachment());
        let prev = call.conf.prev_result().unwrap_or_else(|error| {
            call.notes.note(format_args!("bandwidth: prevResult is not used: {error}"));
            None
        });
        let mut had_own_ifb = false;
        for name in [attachment.own_ifb_name(), attachment.ifb_name()] {
            let Some(ifb) = host.find_link(&name)?.filter(Link::is_ifb) else { continue };
            let is_of_attachment = match &ifb.alias {
                Some(alias) => attachment.is_on(Some(alias)),
                // The ifb still has the group that each link of this network has until its alias is
                // set: an ADD was killed in between.
                None if ifb.group == AttachmentId::group(&attachment.network) => true,
                // Go's plugin sets no alias, and uses one name for the ifbs of all the container's
                // interfaces in a network. This ifb belongs to another interface if this attachment
                // had an ifb with its own name, or if a `prevResult` does not list this ifb.
                None => !had_own_ifb && prev.as_ref().is_none_or(|prev| lists_host_interface(prev, &name)),
            };
            if is_of_attachment {
                host.purge_link(ifb.index)?;
                had_own_ifb = true;
            }
        }
        Ok(())
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        gc_links(call, valid)
    }
}

/// Returns the host's end of the container's veth pair.
///
/// # Errors
/// Code 7, with the texts of Go's plugin, if CNI_IFNAME is not a veth, its other end is not on this
/// host, or `prev`, the result of the plugin before this one, does not list that end.
fn find_host_end(call: &Call<'_>, prev: &AddResult, host: &Netlink) -> Result<Link> {
    if prev.interfaces.is_empty() {
        return Err(Error::config("no interfaces provided"));
    }
    let ifname = &call.ifname;
    let netns = Netns::open(call.netns()?)?;
    let container = host.open_in(&netns)?;
    let no_peer = |reason: String| Error::config(format!("container interface {ifname} has no veth peer: {reason}"));
    let inner = container.find_link(ifname)?;
    let inner = inner.ok_or_else(|| no_peer(format!("could not look up {ifname:?}: Link not found")))?;
    let index = inner.peer_index.filter(|_| inner.is_veth());
    let index = index.ok_or_else(|| no_peer(format!("interface {ifname:?} was not a veth interface")))?;
    let host_end = identity::find_host_end(host, &call.attachment(), &netns, &inner)?;
    let host_end = host_end.ok_or_else(|| Error::config(format!("veth peer with index {index} is not in host ns")))?;
    if !lists_host_interface(prev, &host_end.name) {
        let details = format!("prevResult does not list {}, the host's end of {ifname}", host_end.name);
        return Err(Error::config("no veth peer of container interface found in host ns").with_details(details));
    }
    Ok(host_end)
}

/// Whether `result` lists an interface of this name on the host.
fn lists_host_interface(result: &AddResult, name: &str) -> bool {
    result.interfaces.iter().any(|interface| interface.sandbox.is_empty() && interface.name == name)
}
