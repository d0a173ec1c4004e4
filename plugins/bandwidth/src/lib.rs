//! The plugin `bandwidth`: limits the rates at which a container receives and sends. It runs after
//! a plugin of the same list that has created a veth pair.
//!
//! Both limits apply at the host's end of the pair. The host sends packets to the container on this
//! end, so a token bucket filter (tbf) on the end limits them. The host receives packets from the
//! container on this end. The kernel cannot delay received packets, so they are redirected to an
//! ifb (intermediate functional block) device, and the filter is on the ifb.
//!
//! The kernel removes the filters together with the host's end. DEL removes the ifb.

mod conf;

use std::rc::Rc;

use cni::AttachmentId;
use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Code, Error, Result};
use cni_linux::{Filter, Link, Netlink, Netns, QdiscParent};
use cni_plugin::interface::veth::{made_up_mac, undo_creation};
use cni_plugin::interface::{failed, gc_links, host_interface};

use conf::{Conf, Limit};

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
        conf::unknown_keys(json)
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
            set_limits(call, conf, &mut result, &mut rollback)?;
        }
        Ok(Added { result, rollback })
    }

    /// Fails with code 101 if a configured limit is not as ADD sets it.
    fn check(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(&call.conf)?;
        let prev = call.conf.prev_result()?.ok_or_else(|| Error::config("must be called as a chained plugin"))?;
        if conf.ingress.is_none() && conf.egress.is_none() {
            return Ok(());
        }
        let host = Netlink::open()?;
        let host_end = find_host_end(call, &prev, &host)?;
        if let Some(ingress) = conf.ingress {
            check_limit(&host, &host_end, ingress)?;
        }
        let Some(egress) = conf.egress else { return Ok(()) };
        let ifb =
            find_ifb(&host, &call.attachment())?.ok_or_else(|| failed("get ifb device: Link not found".to_owned()))?;
        if !ifb.up {
            return Err(failed(format!("{} is down", ifb.name)));
        }
        check_limit(&host, &ifb, egress)?;
        if !host.list_filters(host_end.index)?.contains(&Filter::Redirect(ifb.index)) {
            return Err(failed(format!(
                "the traffic that {} receives is not redirected to {}",
                host_end.name, ifb.name
            )));
        }
        Ok(())
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

    fn status(&self, call: &Call<'_>) -> Result<()> {
        Conf::new(&call.conf).map(drop)
    }
}

/// Removes limits that an earlier ADD of the same attachment has set, and sets the configured ones.
/// `result` is the result of the plugin before this one; a created ifb is added to it.
///
/// # Errors
/// - Code 7 if the container's interface is not a veth whose other end is on this host.
/// - Code 102 if another program has attached a queueing discipline to that end.
/// - Code 100 if the kernel refuses a change.
fn set_limits<'a>(call: &'a Call<'_>, conf: Conf, result: &mut AddResult, rollback: &mut Rollback<'a>) -> Result<()> {
    let host = Rc::new(Netlink::open()?);
    let host_end = find_host_end(call, result, &host)?;
    let index = host_end.index;
    let attachment = call.attachment();
    let (ifb_name, earlier_ifbs) = name_and_earlier_ifbs(&host, &attachment, &host_end)?;
    for ifb in earlier_ifbs {
        host.purge_link(ifb.index)?;
    }
    remove_earlier_qdiscs(&host, &host_end)?;
    if let Some(ingress) = conf.ingress {
        let undo_host = Rc::clone(&host);
        rollback.push(format!("remove the limit of {}", host_end.name), move || {
            undo_host.purge_qdisc(index, QdiscParent::Root)
        });
        host.create_tbf(index, &ingress.tbf())?;
    }
    if let Some(egress) = conf.egress {
        // The MAC is random, so the undo recognises the ifb by it.
        let mac = made_up_mac()?;
        let created_index = undo_creation(&host, &ifb_name, move |link| link.mac == Some(mac), rollback);
        let ifb = host.create_ifb(&ifb_name, mac, host_end.mtu, &attachment)?;
        created_index.set(Some(ifb.index));
        let undo_host = Rc::clone(&host);
        rollback.push(format!("stop the redirection of {}", host_end.name), move || {
            undo_host.purge_qdisc(index, QdiscParent::Ingress)
        });
        host.create_ingress(index)?;
        host.create_redirect(index, ifb.index)?;
        host.create_tbf(ifb.index, &egress.tbf())?;
        result.interfaces.push(host_interface(&ifb_name, Some(mac)));
    }
    Ok(())
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
    let container = host.open_in(&Netns::open(call.netns()?)?)?;
    let no_peer = |reason: String| Error::config(format!("container interface {ifname} has no veth peer: {reason}"));
    let inner = container.find_link(ifname)?;
    let inner = inner.ok_or_else(|| no_peer(format!("could not look up {ifname:?}: Link not found")))?;
    let index = inner.peer_index.filter(|_| inner.is_veth());
    let index = index.ok_or_else(|| no_peer(format!("interface {ifname:?} was not a veth interface")))?;
    // The other end must name CNI_IFNAME as its peer: an unrelated interface of the host may have
    // the same index.
    let host_end = host.find_link_by_index(index)?.filter(|link| link.peer_index == Some(inner.index));
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

/// Returns the name for the attachment's new ifb, and the ifbs that earlier ADDs of this attachment
/// have created.
///
/// The name is the one that Go's plugin uses, [`AttachmentId::ifb_name`], which is the same for all
/// interfaces of a container. If another interface's ifb already has that name, the name is
/// [`AttachmentId::own_ifb_name`].
fn name_and_earlier_ifbs(host: &Netlink, attachment: &AttachmentId, host_end: &Link) -> Result<(String, Vec<Link>)> {
    let (shared_name, own_name) = (attachment.ifb_name(), attachment.own_ifb_name());
    let mut earlier: Vec<Link> = host.find_link(&own_name)?.into_iter().collect();
    let Some(ifb) = host.find_link(&shared_name)? else { return Ok((shared_name, earlier)) };
    let is_of_attachment = match &ifb.alias {
        Some(alias) => attachment.is_on(Some(alias)),
        // Go's plugin sets no alias: the ifb belongs to the interface that is redirected to it.
        None => host.list_filters(host_end.index)?.contains(&Filter::Redirect(ifb.index)),
    };
    if !is_of_attachment {
        return Ok((own_name, earlier));
    }
    earlier.push(ifb);
    Ok((shared_name, earlier))
}

/// A redirection to an ifb that has been removed: the kernel reports 0 as the ifb's index.
const REDIRECT_TO_REMOVED: Filter = Filter::Redirect(0);

/// Removes the queueing disciplines that an earlier ADD has attached to the host's end. The caller
/// has already removed that ADD's ifb, so the redirection to the ifb is [`REDIRECT_TO_REMOVED`].
/// Any tbf is treated as one of an earlier ADD.
///
/// # Errors
/// Code 102 if there is any other queueing discipline or filter.
fn remove_earlier_qdiscs(host: &Netlink, host_end: &Link) -> Result<()> {
    for (parent, kind) in [(QdiscParent::Root, "tbf"), (QdiscParent::Ingress, "ingress")] {
        let Some(qdisc) = host.find_qdisc(host_end.index, parent)? else { continue };
        let mut is_of_earlier_add = qdisc.kind == kind;
        if is_of_earlier_add && parent == QdiscParent::Ingress {
            let filters = host.list_filters(host_end.index)?;
            is_of_earlier_add = filters.iter().all(|filter| *filter == REDIRECT_TO_REMOVED);
        }
        if !is_of_earlier_add {
            let msg = format!("create qdisc: file exists: {} already has a qdisc {}", host_end.name, qdisc.kind);
            return Err(
                Error::new(Code::CONFLICT, msg).with_details("another program created it: it was left unchanged")
            );
        }
        host.purge_qdisc(host_end.index, parent)?;
    }
    Ok(())
}

/// Returns the attachment's ifb: the ifb whose alias names the attachment or, if there is none, the
/// ifb that Go's plugin has created for the container, which has no alias.
fn find_ifb(host: &Netlink, attachment: &AttachmentId) -> Result<Option<Link>> {
    let own = host.find_link(&attachment.own_ifb_name())?.filter(|ifb| attachment.is_on(ifb.alias.as_deref()));
    if own.is_some() {
        return Ok(own);
    }
    let ifb = host.find_link(&attachment.ifb_name())?;
    Ok(ifb.filter(|ifb| ifb.alias.is_none() || attachment.is_on(ifb.alias.as_deref())))
}

/// Checks that `link` has a token bucket filter with the numbers of `limit`, as this plugin or
/// Go's sets them.
///
/// # Errors
/// Code 101 if `link` has no such filter, or if a number differs. Then the text names the first
/// such number as that of Go's plugin does.
fn check_limit(host: &Netlink, link: &Link, limit: Limit) -> Result<()> {
    let found = host.find_qdisc(link.index, QdiscParent::Root)?.and_then(|qdisc| qdisc.tbf);
    let Some(found) = found else { return Err(failed(format!("{} has no token bucket filter", link.name))) };
    let expected = limit.tbf();
    if found == expected || found == limit.tbf_of_go() {
        return Ok(());
    }
    let (parameter, wanted, actual) = if found.rate != expected.rate {
        ("Rate", expected.rate, found.rate)
    } else if found.limit != expected.limit {
        ("Limit", expected.limit.into(), found.limit.into())
    } else {
        ("Buffer", expected.buffer.into(), found.buffer.into())
    };
    Err(failed(format!("{parameter} doesn't match: {} has {actual}, not {wanted}", link.name)))
}
