//! `bridge` after another plugin that made CNI_IFNAME: that interface becomes a port.
//!
//! The interface is not ours, so it gets a mark of its own kind, and DEL takes it off the bridge
//! instead of deleting it. DEL and CHECK always carry a `prevResult`, chained or not: they go by
//! the mark alone.

use std::rc::Rc;

use cni::AttachmentId;
use cni::json::Json;
use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_linux::{Link, Netlink};
use cni_plugin::interface::{
    AttachmentContext, CreatedLink, Layer3, PortMark, give_back, purge_addresses, restore_alias,
};

use crate::attach::AttachedPort;
use crate::conf::Conf;
use crate::device;
use crate::port::{self, PortEnds};

/// The kernel keeps 255 bytes of an alias.
const ALIAS_MAX: usize = 255;

/// Room for the numbers that [`note_addresses`] fills in later.
const NUMBERS: usize = 8;

/// Returns `prevResult` if an earlier plugin created CNI_IFNAME in the container. The loopback
/// plugin, with which Nomad's list begins, does not: then this plugin creates the interface and
/// ignores that result.
///
/// Runtimes hand a result on in its plugin's version. Go reads none at all at ADD, so one that
/// cannot be read matters only where it names that interface.
pub(crate) fn earlier(call: &Call<'_>) -> Result<Option<AddResult>> {
    let Some(json) = call.conf.json().get("prevResult") else { return Ok(None) };
    let is_ours = |name: &str, sandbox: &str| name == call.ifname && !sandbox.is_empty();
    match AddResult::decode(json, call.conf.version()) {
        Ok(prev) => {
            let meant = prev.interfaces.iter().any(|interface| is_ours(&interface.name, &interface.sandbox));
            Ok(Some(prev).filter(|_| meant))
        }
        Err(error) => {
            let text = |interface: &Json, key| interface.get(key).and_then(Json::as_str).unwrap_or_default().to_owned();
            if let Some(Json::Array(interfaces)) = json.get("interfaces")
                && interfaces.iter().any(|interface| is_ours(&text(interface, "name"), &text(interface, "sandbox")))
            {
                return Err(Error::caused(Code::DECODE, "could not parse prevResult", error));
            }
            call.notes.note(format_args!("prevResult is not used: {error}"));
            Ok(None)
        }
    }
}

/// Makes the host's end of the earlier plugin's interface a port of the bridge.
pub(crate) fn plug_in<'a>(
    context: &AttachmentContext<'a, Conf>,
    earlier: &AddResult,
    rollback: &mut Rollback<'a>,
) -> Result<CreatedLink<AttachedPort>> {
    let AttachmentContext { call, conf, host, mark, .. } = context;
    let inner = context.container.find_link(&call.ifname)?.ok_or_else(|| {
        Error::config(format!(
            "chained use: the container has no interface {:?}, which an earlier plugin should have made",
            call.ifname
        ))
    })?;
    let link = host_side(host, conf, earlier, &inner)?;
    let peer_mac = inner.mac.ok_or_else(|| {
        Error::config(format!(
            "chained use: the container's interface {:?} has no hardware address, and only Ethernet interfaces can be \
             connected to a bridge",
            call.ifname
        ))
    })?;
    if conf.spoof_check {
        port::refuse_second(host, mark, Some(&link))?;
    }
    let bridge = device::ensure(host, conf, call.machine)?;
    let port_mark = check_free(&bridge, &link, mark)?;
    // A port of the bridge that the earlier plugin made one stays one.
    let (undo, index, was_port) = (Rc::clone(host), link.index, link.master.is_some());
    rollback.push(format!("take {} off {}", link.name, bridge.name), move || match undo.find_link_by_index(index)? {
        Some(link) if was_port => restore_alias(&undo, &link),
        Some(link) => give_back(&undo, &link),
        None => Ok(()),
    });
    take(host, &bridge, &link, &port_mark)?;
    let ends = PortEnds { index: link.index, name: &link.name, peer_mac };
    port::protect(host, &ends, mark, conf, rollback)?;
    let interface = match earlier.find_interface(&call.ifname, call.sandbox()) {
        None if conf.ipam.is_some() => {
            return Err(Error::config(format!(
                "chained use: prevResult has no interface {:?} in {}",
                call.ifname,
                call.sandbox()
            )));
        }
        interface => interface.unwrap_or_default(),
    };
    let port = link.index;
    let link = AttachedPort { bridge, port, gateway: None, earlier: Some(Earlier { inner_up: inner.up, port_mark }) };
    Ok(CreatedLink { index: inner.index, mac: peer_mac, result: earlier.clone(), interface, link })
}

/// The state of another plugin's interface before ADD.
#[derive(Debug)]
pub(crate) struct Earlier {
    /// Whether the container's end was up.
    inner_up: bool,
    /// The mark that the port has got.
    port_mark: PortMark,
}

/// Remembers on the port which of the result's addresses are ours, for DEL; and how to take them
/// off the interface.
///
/// The interface stays even if the ADD fails, so our addresses must be removed from it before IPAM
/// gets them back. The addresses that it has already are the earlier plugin's.
pub(crate) fn note_addresses<'a>(
    context: &AttachmentContext<'a, Conf>,
    created: &CreatedLink<AttachedPort>,
    layer3: &Layer3,
    rollback: &mut Rollback<'a>,
) -> Result<()> {
    let Some(Earlier { inner_up, port_mark }) = &created.link.earlier else { return Ok(()) };
    let there = context.container.list_addresses(created.index)?;
    let mut addresses = layer3.addresses();
    addresses.retain(|cidr| there.iter().all(|address| address.cidr != *cidr));
    let (undo, index, was_up) = (context.container.clone(), created.index, *inner_up);
    rollback.push(format!("take our addresses off {}", context.call.ifname), move || {
        let purged = purge_addresses(&undo, index, &addresses);
        let down = if was_up { Ok(()) } else { undo.set_down(index) };
        purged.and(down)
    });
    let addresses = (created.result.ips.len(), layer3.ips.len());
    let port_mark = PortMark { addresses, ..port_mark.clone() };
    Ok(context.host.set_alias(created.link.port, &port_mark.alias())?)
}

/// The one interface of prevResult that is on the host and the other end of CNI_IFNAME.
fn host_side(host: &Netlink, conf: &Conf, prev: &AddResult, inner: &Link) -> Result<Link> {
    let mut peers = Vec::new();
    for interface in &prev.interfaces {
        if !interface.sandbox.is_empty() || interface.name == conf.bridge {
            continue;
        }
        if let Some(link) = host.find_link(&interface.name)?
            && (inner.peer_index, link.peer_index) == (Some(link.index), Some(inner.index))
        {
            peers.push(link);
        }
    }
    match <[Link; 1]>::try_from(peers) {
        Ok([link]) => Ok(link),
        Err(peers) => Err(Error::config(format!(
            "chained use: prevResult must name exactly one interface of the host that is the other end of {}, and names {}",
            inner.name,
            peers.len()
        ))),
    }
}

/// Returns the mark for the link, if this attachment may use the link.
fn check_free(bridge: &Link, link: &Link, mark: &AttachmentId) -> Result<PortMark> {
    if link.master.is_some_and(|master| master != bridge.index) {
        let msg = format!("{} is already a port of another interface", link.name);
        return Err(Error::new(Code::CONFLICT, msg));
    }
    let before = link.alias.clone().unwrap_or_default();
    let port_mark = match PortMark::parse(&before) {
        // A port already: the attachment lives. Only marked: an ADD was cut off right here.
        Some(port_mark) if port_mark.belongs_to(mark) && link.master.is_some() => {
            let msg = format!("{} is already a port of {} for this attachment", link.name, bridge.name);
            return Err(Error::new(Code::CONFLICT, msg).with_details("run DEL before adding it again"));
        }
        Some(port_mark) if port_mark.belongs_to(mark) => port_mark,
        Some(_) => {
            return Err(Error::new(
                Code::CONFLICT,
                format!("{} was attached to a bridge by another attachment", link.name),
            ));
        }
        None => PortMark { mark: mark.alias(), addresses: (0, 0), before },
    };
    if port_mark.alias().len() + NUMBERS > ALIAS_MAX {
        let msg = format!("the alias of {} is too long to be kept with the mark: {:?}", link.name, port_mark.before);
        return Err(Error::config(msg));
    }
    Ok(port_mark)
}

/// Marks the link and makes it a port.
fn take(host: &Netlink, bridge: &Link, link: &Link, port_mark: &PortMark) -> Result<()> {
    // The mark comes first: an unmarked port could never be cleaned up, a mark on a link that is
    // not a port does no harm.
    host.set_alias(link.index, &port_mark.alias())?;
    if link.master.is_none() {
        host.set_master(link.index, bridge.index)?;
    }
    Ok(())
}
