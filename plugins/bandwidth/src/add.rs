//! Implements ADD: sets the configured limits.

use std::rc::Rc;

use cni::AttachmentId;
use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_linux::{Filter, Link, Netlink, QdiscParent};
use cni_plugin::interface::host_interface;
use cni_plugin::interface::veth::{made_up_mac, undo_creation};

use crate::conf::Conf;
use crate::find_host_end;

/// A redirection to an ifb that has been removed: the kernel reports 0 as the ifb's index.
const REDIRECT_TO_REMOVED: Filter = Filter::Redirect(0);

/// Removes limits that an earlier ADD of the same attachment has set, and sets the configured ones.
/// `result` is the result of the plugin before this one; a created ifb is added to it.
///
/// # Errors
/// - Code 7 if the container's interface is not a veth whose other end is on this host.
/// - Code 102 if another program has attached a queueing discipline to that end.
/// - Code 100 if the kernel refuses a change.
pub(crate) fn set_limits<'a>(
    call: &'a Call<'_>,
    conf: Conf,
    result: &mut AddResult,
    rollback: &mut Rollback<'a>,
) -> Result<()> {
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
