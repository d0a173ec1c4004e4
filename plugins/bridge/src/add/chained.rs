//! Chained use: an earlier plugin has created CNI_IFNAME, and its host's end becomes a port of the
//! bridge.
//!
//! The interface belongs to the earlier plugin, so DEL detaches its host's end from the bridge
//! instead of deleting it. DEL and CHECK get a `prevResult` in any case, so only the mark of the
//! host's end, a [`PortMark`], shows them that the use is chained.

use std::rc::Rc;

use cni::AttachmentId;
use cni::json::Json;
use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_linux::{Link, Netlink};
use cni_plugin::identity;
use cni_plugin::interface::{
    AttachmentContext, CreatedLink, Layer3, PortMark, give_back, purge_addresses, restore_alias,
};

use crate::add::AttachedPort;
use crate::conf::Conf;
use crate::device;
use crate::port;

/// The longest alias, in bytes, that the kernel stores.
const ALIAS_MAX: usize = 255;

/// The bytes kept free in the alias: the two numbers in the mark initially have one digit each, and
/// [`record_addresses`] may replace them with longer ones.
const NUMBERS_LEN: usize = 8;

/// Returns `prevResult` if an earlier plugin created CNI_IFNAME in the container; otherwise `None`,
/// and this plugin creates the interface itself. For example, Nomad's list begins with the loopback
/// plugin, which does not create CNI_IFNAME.
///
/// A `prevResult` that cannot be decoded and does not name the interface is ignored, with a note:
/// Go does not read `prevResult` at ADD at all.
///
/// # Errors
/// Code 6 if `prevResult` names the interface but cannot be decoded, for example because it has
/// another version.
pub(crate) fn find_adopted(call: &Call<'_>) -> Result<Option<AddResult>> {
    let Some(json) = call.conf.json().get("prevResult") else { return Ok(None) };
    let is_in_container = |name: &str, sandbox: &str| name == call.ifname && !sandbox.is_empty();
    match AddResult::decode(json, call.conf.version()) {
        Ok(prev) => {
            let has_interface =
                prev.interfaces.iter().any(|interface| is_in_container(&interface.name, &interface.sandbox));
            if has_interface { Ok(Some(prev)) } else { Ok(None) }
        }
        Err(error) => {
            let is_named = |interface: &Json| {
                let name = interface.get("name").and_then(Json::as_str).unwrap_or_default();
                let sandbox = interface.get("sandbox").and_then(Json::as_str).unwrap_or_default();
                is_in_container(name, sandbox)
            };
            if let Some(Json::Array(interfaces)) = json.get("interfaces")
                && interfaces.iter().any(is_named)
            {
                return Err(Error::caused(Code::DECODE, "could not parse prevResult", error));
            }
            call.notes.note(format_args!("prevResult is not used: {error}"));
            Ok(None)
        }
    }
}

/// Makes the host's end of the earlier plugin's interface a port of the bridge. `earlier` is the
/// earlier plugin's result.
///
/// # Errors
/// - Code 7 if the container has no Ethernet interface CNI_IFNAME, if `earlier` does not list the
///   host's end, or, with IPAM, if `earlier` does not list CNI_IFNAME in CNI_NETNS.
/// - Code 102 if another attachment or bridge uses the host's end.
/// - The errors of [`device::ensure`], [`port::guard`] and [`port::configure`].
pub(crate) fn plug_in<'a>(
    context: &AttachmentContext<'a, Conf>,
    earlier: &AddResult,
    rollback: &mut Rollback<'a>,
) -> Result<CreatedLink<AttachedPort>> {
    let AttachmentContext { call, conf, host, attachment, .. } = context;
    let inner = context.container.find_link(&call.ifname)?.ok_or_else(|| {
        Error::config(format!(
            "bridge is chained, but the container has no interface {:?}: the plugin before it must create one",
            call.ifname
        ))
    })?;
    let link = find_host_end(context, earlier, &inner)?;
    let peer_mac = inner.mac.ok_or_else(|| {
        Error::config(format!(
            "bridge is chained, but the container's interface {:?} has no hardware address: only Ethernet interfaces \
             can be connected to a bridge",
            call.ifname
        ))
    })?;
    if conf.spoof_check {
        port::check_not_guarded(host, attachment, Some(&link))?;
    }
    let bridge = device::ensure(host, conf, call.machine)?;
    let port_mark = new_port_mark(&bridge, &link, attachment)?;
    if conf.spoof_check {
        // Before the link becomes a port, because the container's end may be up already.
        port::guard(&link.name, peer_mac, attachment, rollback)?;
    }
    let (undo_host, index, was_port) = (Rc::clone(host), link.index, link.master.is_some());
    rollback.push(format!("take {} off {}", link.name, bridge.name), move || {
        match undo_host.find_link_by_index(index)? {
            // The earlier plugin had attached the link to the bridge, so the link stays there.
            Some(link) if was_port => restore_alias(&undo_host, &link),
            Some(link) => give_back(&undo_host, &link),
            None => Ok(()),
        }
    });
    mark_and_attach(host, &bridge, &link, &port_mark)?;
    port::configure(host, link.index, conf)?;
    let listed_at = earlier.find_interface(&call.ifname, call.sandbox());
    if listed_at.is_none() && conf.has_ipam {
        return Err(Error::config(format!(
            "bridge is chained, but prevResult does not list interface {:?} in network namespace {}: the plugin \
             before it must report the interface that it created",
            call.ifname,
            call.sandbox()
        )));
    }
    // Without IPAM, no address refers to the position, so it does not matter.
    let interface_position = listed_at.unwrap_or_default();
    let port = link.index;
    let adopted = AdoptedInterface { inner_was_up: inner.up, port_mark };
    let link = AttachedPort { bridge, port, gateway_link: None, adopted: Some(adopted) };
    Ok(CreatedLink { index: inner.index, mac: peer_mac, result: earlier.clone(), interface_position, link })
}

/// The earlier plugin's interface that this ADD makes a port.
#[derive(Debug)]
pub(crate) struct AdoptedInterface {
    /// Whether the container's end was up before this ADD.
    inner_was_up: bool,
    /// The mark that this ADD gives to the host's end.
    port_mark: PortMark,
}

/// Records in the port's mark, for DEL, which addresses of the result this plugin's IPAM assigned,
/// and registers their removal with `rollback`.
///
/// The earlier plugin's interface remains if this ADD fails, so the rollback must remove the new
/// addresses before IPAM releases them. Addresses that the interface already has are the earlier
/// plugin's, and stay. The rollback also sets the interface down again if it was down.
pub(crate) fn record_addresses<'a>(
    context: &AttachmentContext<'a, Conf>,
    created: &CreatedLink<AttachedPort>,
    layer3: &Layer3,
    rollback: &mut Rollback<'a>,
) -> Result<()> {
    let Some(AdoptedInterface { inner_was_up, port_mark }) = &created.link.adopted else { return Ok(()) };
    let existing = context.container.list_addresses(created.index)?;
    let mut new_addresses = layer3.addresses();
    new_addresses.retain(|cidr| existing.iter().all(|address| address.cidr != *cidr));
    let (undo_container, index, was_up) = (context.container.clone(), created.index, *inner_was_up);
    rollback.push(format!("remove the added addresses from {}", context.call.ifname), move || {
        // The interface is set down even if an address could not be removed.
        let purged = purge_addresses(&undo_container, index, &new_addresses);
        let set_down = if was_up { Ok(()) } else { undo_container.set_down(index) };
        purged.and(set_down)
    });
    // The new addresses follow those of the earlier plugins in the result.
    let port_mark =
        PortMark { first_address: created.result.ips.len(), address_count: layer3.ips.len(), ..port_mark.clone() };
    Ok(context.host.set_alias(created.link.port, &port_mark.alias())?)
}

/// Returns the host's end of the container's interface `inner`.
///
/// # Errors
/// Code 7 unless the host has that end and `earlier` lists it.
fn find_host_end(context: &AttachmentContext<'_, Conf>, earlier: &AddResult, inner: &Link) -> Result<Link> {
    let AttachmentContext { host, attachment, netns, conf, .. } = context;
    let is_listed = |link: &Link| {
        let mut on_host = earlier.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
        link.name != conf.bridge && on_host.any(|interface| interface.name == link.name)
    };
    identity::find_host_end(host, attachment, netns, inner)?.filter(is_listed).ok_or_else(|| {
        Error::config(format!(
            "bridge is chained, so prevResult must list the host interface that is the other end of {}",
            inner.name
        ))
    })
}

/// Returns the mark that the link gets as a port of `bridge` for this attachment.
///
/// # Errors
/// - Code 102 if another bridge or attachment uses the link, or this attachment already does.
/// - Code 7 if the link's alias is too long to be stored beside the mark.
fn new_port_mark(bridge: &Link, link: &Link, attachment: &AttachmentId) -> Result<PortMark> {
    if link.master.is_some_and(|master| master != bridge.index) {
        let msg = format!("{} is already attached to another bridge or bond", link.name);
        return Err(Error::new(Code::CONFLICT, msg));
    }
    let earlier_alias = link.alias.clone().unwrap_or_default();
    let port_mark = match PortMark::parse(&earlier_alias) {
        Some(port_mark) if port_mark.belongs_to(attachment) && link.master.is_some() => {
            let msg = format!("{} is already a port of {} for this attachment", link.name, bridge.name);
            return Err(Error::new(Code::CONFLICT, msg).with_details("run DEL before adding it again"));
        }
        // Marked but not attached: an earlier ADD ended between marking and attaching.
        Some(port_mark) if port_mark.belongs_to(attachment) => port_mark,
        Some(_) => {
            return Err(Error::new(
                Code::CONFLICT,
                format!("{} was attached to a bridge by another attachment", link.name),
            ));
        }
        None => PortMark { attachment_alias: attachment.alias(), first_address: 0, address_count: 0, earlier_alias },
    };
    if port_mark.alias().len() + NUMBERS_LEN > ALIAS_MAX {
        return Err(Error::config(format!(
            "the alias of {} is too long to be stored beside this attachment's mark, in {ALIAS_MAX} bytes together: {:?}",
            link.name, port_mark.earlier_alias
        )));
    }
    Ok(port_mark)
}

/// Sets the link's mark as its alias and attaches the link to the bridge.
fn mark_and_attach(host: &Netlink, bridge: &Link, link: &Link, port_mark: &PortMark) -> Result<()> {
    // The mark comes first: DEL could never detach a port without a mark, whereas a mark on a link
    // that is not a port does no harm.
    host.set_alias(link.index, &port_mark.alias())?;
    if link.master.is_none() {
        host.set_master(link.index, bridge.index)?;
    }
    Ok(())
}
