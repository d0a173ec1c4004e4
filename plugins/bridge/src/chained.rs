//! `bridge` after another plugin that made CNI_IFNAME: that interface becomes a port (D16 of the decisions).
//!
//! The interface is not ours, so it gets a mark of its own kind, and DEL takes it off the bridge instead of deleting
//! it. DEL and CHECK always carry a `prevResult`, chained or not: they go by the mark alone.

use std::rc::Rc;

use cni::delegate::Delegate;
use cni::json::Json;
use cni::result::AddResult;
use cni::skel::{Added, Call};
use cni::{Cidr, Code, Error, Result};
use cni_linux::{Link, Mark, Netlink, Netns};

use crate::attach::{self, Ends, bring_up, gateway_link};
use crate::conf::Conf;
use crate::layer3::Layer3;
use crate::port::{self, PortEnds};
use crate::{device, gateway, mark, masquerade};

/// The kernel keeps 255 bytes of an alias.
const ALIAS_MAX: usize = 255;

/// Room for the numbers that [`note_addresses`] fills in later.
const NUMBERS: usize = 8;

/// The alias of a port that another plugin made: `cni-port:<mark> <first>+<count> <alias it had before>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PortMark {
    /// The mark it would have if we had made it.
    pub(crate) mark: String,
    /// Which of the result's addresses are ours: the first one's place, and how many. The earlier plugin's stay.
    pub(crate) addresses: (usize, usize),
    /// What to put back.
    pub(crate) before: String,
}

impl PortMark {
    pub(crate) fn parse(alias: &str) -> Option<PortMark> {
        let mut parts = alias.strip_prefix("cni-port:")?.splitn(3, ' ');
        let (mark, addresses, before) = (parts.next()?, parts.next()?, parts.next()?);
        let (first, count) = addresses.split_once('+')?;
        let addresses = (first.parse().ok()?, count.parse().ok()?);
        Some(PortMark { mark: mark.to_owned(), addresses, before: before.to_owned() })
    }

    fn alias(&self) -> String {
        let (first, count) = self.addresses;
        format!("cni-port:{} {first}+{count} {}", self.mark, self.before)
    }

    /// Whether the port was given to the bridge by this attachment.
    pub(crate) fn is(&self, mark: &Mark) -> bool {
        self.mark == mark.alias()
    }
}

/// `prevResult`, if an earlier plugin made CNI_IFNAME in the container. One that made something else, as the loopback that
/// Nomad's list begins with, leaves it to us to make it, and its result is none of ours.
///
/// Runtimes hand a result on in its plugin's version. Go reads none at all at ADD, so one that cannot be read matters only
/// where it names that interface.
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

pub(crate) fn add<'a>(call: &'a Call<'_>, conf: &Conf, prev: AddResult) -> Result<Added<'a>> {
    let netns = Netns::open(call.netns()?)?;
    let host = Rc::new(Netlink::open()?);
    let container = host.open_in(&netns)?;
    let mark = mark(call);
    let inner = container.find_link(&call.ifname)?.ok_or_else(|| {
        Error::config(format!(
            "chained use: the container has no interface {:?}, which an earlier plugin should have made",
            call.ifname
        ))
    })?;
    let link = host_side(&host, conf, &prev, &inner)?;
    let peer_mac = inner.mac.ok_or_else(|| Error::config(format!("{} has no hardware address", call.ifname)))?;
    if conf.spoof_check {
        port::refuse_second(&host, &mark, Some(&link))?;
    }

    let mut lease = call.rollback();
    let mut rollback = call.rollback();
    let bridge = device::ensure(&host, conf, call.machine)?;
    let port_mark = check_free(&bridge, &link, &mark)?;
    // A port of the bridge that the earlier plugin made one stays one.
    let (undo, index, was_port) = (Rc::clone(&host), link.index, link.master.is_some());
    rollback.push(format!("take {} off {}", link.name, bridge.name), move || match undo.find_link_by_index(index)? {
        Some(link) if was_port => restore_alias(&undo, &link),
        Some(link) => give_back(&undo, &link),
        None => Ok(()),
    });
    take(&host, &bridge, &link, &port_mark)?;
    let ends = PortEnds { index: link.index, name: &link.name, peer_mac };
    port::protect(&host, &ends, &mark, conf, &mut rollback)?;

    let mut result = prev;
    if let Some(kind) = &conf.ipam {
        let interface = result
            .interfaces
            .iter()
            .position(|interface| interface.name == call.ifname && interface.sandbox == attach::sandbox(call));
        let interface = interface.ok_or_else(|| {
            Error::config(format!(
                "chained use: prevResult has no interface {:?} in {}",
                call.ifname,
                attach::sandbox(call)
            ))
        })?;
        let ipam = Delegate::find(call, kind)?.lease(&mut lease)?;
        let mut layer3 = Layer3::new(&ipam, conf, interface, &result.ips)?;
        masquerade::ensure(call, conf, &mark, &layer3.addresses(), &mut rollback)?;
        // The interface stays even if the ADD fails, so our addresses must be removed from it
        // before IPAM gets them back. The addresses that it has already are the earlier plugin's.
        let there = container.list_addresses(inner.index)?;
        let mut addresses = layer3.addresses();
        addresses.retain(|cidr| there.iter().all(|address| address.cidr != *cidr));
        let undo = container.clone();
        let (inner_index, was_up) = (inner.index, inner.up);
        rollback.push(format!("take our addresses off {}", inner.name), move || {
            let purged = purge_addresses(&undo, inner_index, &addresses);
            let down = if was_up { Ok(()) } else { undo.set_down(inner_index) };
            purged.and(down)
        });
        note_addresses(&host, &link, &mark, result.ips.len(), layer3.ips.len())?;
        let link = gateway_link(&host, &bridge, conf)?;
        let gateway = gateway::Plan::new(&host, link, conf, &layer3)?.serve(conf, &call.notes, &mut rollback)?;
        bring_up(
            call,
            conf,
            &Ends { host: &host, container: &container, netns: &netns },
            &gateway,
            &ends,
            inner.index,
            &mut layer3,
        )?;
        result.ips.append(&mut layer3.ips);
        result.routes.append(&mut layer3.routes);
        if !ipam.dns.is_empty() {
            result.dns = ipam.dns;
        }
        if gateway.link.index != bridge.index {
            result.interfaces.push(attach::interface(&gateway.link.name, gateway.link.mac));
        }
    }
    // At the end, so that no index into the earlier plugins' list changes its meaning.
    if !result.interfaces.iter().any(|interface| interface.name == bridge.name && interface.sandbox.is_empty()) {
        result.interfaces.push(attach::interface(&bridge.name, device::final_mac(&host, &bridge)?));
    }
    if let Some(dns) = &conf.dns {
        result.dns = dns.clone();
    }
    lease.append(rollback);
    Ok(Added { result, rollback: lease })
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
fn check_free(bridge: &Link, link: &Link, mark: &Mark) -> Result<PortMark> {
    if link.master.is_some_and(|master| master != bridge.index) {
        let msg = format!("{} is a port of another interface already", link.name);
        return Err(Error::new(Code::CONFLICT, msg));
    }
    let before = link.alias.clone().unwrap_or_default();
    let port_mark = match PortMark::parse(&before) {
        // A port already: the attachment lives. Only marked: an ADD was cut off right here.
        Some(port_mark) if port_mark.is(mark) && link.master.is_some() => {
            let msg = format!("{} is a port of {} for this attachment already", link.name, bridge.name);
            return Err(Error::new(Code::CONFLICT, msg).with_details("DEL it before it is added again"));
        }
        Some(port_mark) if port_mark.is(mark) => port_mark,
        Some(_) => {
            return Err(Error::new(
                Code::CONFLICT,
                format!("{} was given to a bridge by another attachment", link.name),
            ));
        }
        None => PortMark { mark: mark.alias(), addresses: (0, 0), before },
    };
    if port_mark.alias().len() + NUMBERS > ALIAS_MAX {
        let msg = format!("the alias of {} is too long to be kept beside our mark: {:?}", link.name, port_mark.before);
        return Err(Error::config(msg));
    }
    Ok(port_mark)
}

/// Marks the link and makes it a port.
fn take(host: &Netlink, bridge: &Link, link: &Link, port_mark: &PortMark) -> Result<()> {
    // The mark first: a port that nobody knows of is worse than a mark on what is no port.
    host.set_alias(link.index, &port_mark.alias())?;
    if link.master.is_none() {
        host.set_master(link.index, bridge.index)?;
    }
    Ok(())
}

/// Remembers on the port which of the result's addresses are ours, for DEL.
fn note_addresses(host: &Netlink, link: &Link, mark: &Mark, first: usize, count: usize) -> Result<()> {
    let before = link.alias.as_deref();
    // As it was before `take`, or as an ADD that was cut off left it.
    let before = match before.and_then(PortMark::parse) {
        Some(port_mark) => port_mark.before,
        None => before.unwrap_or_default().to_owned(),
    };
    let port_mark = PortMark { mark: mark.alias(), addresses: (first, count), before };
    Ok(host.set_alias(link.index, &port_mark.alias())?)
}

/// Takes addresses off an interface. What is not there is fine.
pub(crate) fn purge_addresses(netlink: &Netlink, index: u32, addresses: &[Cidr]) -> cni_linux::Result<()> {
    let mut first = Ok(());
    for address in addresses {
        match netlink.delete_address(index, *address) {
            Err(error) if !error.is_not_found() && first.is_ok() => first = Err(error),
            _ => {}
        }
    }
    first
}

/// Takes a marked link off its bridge and gives it its alias back.
pub(crate) fn give_back(host: &Netlink, link: &Link) -> cni_linux::Result<()> {
    if link.alias.as_deref().and_then(PortMark::parse).is_none() {
        return Ok(());
    }
    take_off(host, link)?;
    restore_alias(host, link)
}

/// Gives a marked link its alias back.
fn restore_alias(host: &Netlink, link: &Link) -> cni_linux::Result<()> {
    match link.alias.as_deref().and_then(PortMark::parse) {
        Some(port_mark) => host.set_alias(link.index, &port_mark.before),
        None => Ok(()),
    }
}

/// Takes a marked link off its bridge. It stays marked.
pub(crate) fn take_off(host: &Netlink, link: &Link) -> cni_linux::Result<()> {
    if link.master.is_some() { host.unset_master(link.index) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_mark_keeps_the_alias_it_covers() {
        let mark = Mark::new("net", "c1", "eth0");
        for before in ["", "cni:net/c1/eth0", "my uplink, with spaces"] {
            let port_mark = PortMark { mark: mark.alias(), addresses: (1, 2), before: before.to_owned() };
            assert_eq!(PortMark::parse(&port_mark.alias()), Some(port_mark.clone()));
            assert!(port_mark.is(&mark));
        }
        assert_eq!(PortMark::parse("cni:net/c1/eth0"), None);
        assert_eq!(
            Mark::parse(&PortMark { mark: mark.alias(), addresses: (0, 0), before: String::new() }.alias()),
            None
        );
    }
}
