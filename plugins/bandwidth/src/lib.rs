//! `bandwidth`: limits on what a container receives and sends. Always behind another plugin, which
//! created a veth pair.
//!
//! Both limits are on the host's end of the pair. What the container receives is sent there, so a
//! token bucket filter there limits it. What the container sends is received there, where nothing
//! can wait: it is redirected to an ifb, which has the filter, and goes on from there.
//!
//! What is on the host's end ends with it. DEL removes the ifb.

mod conf;

use cni::AttachmentId;
use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Code, Error, Result};
use cni_linux::{Filter, Link, Netlink, Netns, QdiscParent, Tbf};
use cni_plugin::interface::veth::{made_up_mac, undo_creation};
use cni_plugin::interface::{collect_links, failed, host_interface};

use conf::{Conf, Limit};

/// The plugin.
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

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let conf = Conf::new(&call.conf)?;
        let mut result = call.conf.prev_result()?.ok_or_else(|| Error::config("must be called as chained plugin"))?;
        let mut rollback = call.rollback();
        for limit in [conf.ingress, conf.egress].into_iter().flatten() {
            if let Some(cut) = limit.cut() {
                call.notes.note(format_args!("bandwidth: {cut}"));
            }
        }
        if conf.ingress.is_some() || conf.egress.is_some() {
            limit(call, conf, &mut result, &mut rollback)?;
        }
        Ok(Added { result, rollback })
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(&call.conf)?;
        let prev = call.conf.prev_result()?.ok_or_else(|| Error::config("must be called as a chained plugin"))?;
        if conf.ingress.is_none() && conf.egress.is_none() {
            return Ok(());
        }
        let host = Netlink::open()?;
        let outer = host_end(call, &prev, &host)?;
        if let Some(ingress) = conf.ingress {
            check_limit(&host, &outer, ingress)?;
        }
        let Some(egress) = conf.egress else { return Ok(()) };
        let ifb =
            find_ifb(&host, &call.attachment())?.ok_or_else(|| failed("get ifb device: Link not found".to_owned()))?;
        if !ifb.up {
            return Err(failed(format!("{} is down", ifb.name)));
        }
        check_limit(&host, &ifb, egress)?;
        if !host.list_filters(outer.index)?.contains(&Filter::Redirect(ifb.index)) {
            return Err(failed(format!("the traffic that {} receives is not redirected to {}", outer.name, ifb.name)));
        }
        Ok(())
    }

    /// The configuration is not read: no mistake in it keeps the ifb from going.
    fn del(&self, call: &Call<'_>) -> Result<()> {
        let (host, mark) = (Netlink::open()?, call.attachment());
        let prev = call.conf.prev_result().unwrap_or_else(|error| {
            call.notes.note(format_args!("prevResult is not used: {error}"));
            None
        });
        let mut found = false;
        for name in [mark.own_ifb_name(), mark.ifb_name()] {
            let Some(ifb) = host.find_link(&name)?.filter(Link::is_ifb) else { continue };
            let is_ours = match &ifb.alias {
                Some(alias) => mark.is_on(Some(alias)),
                // An ADD of this plugin was killed.
                None if ifb.group == AttachmentId::group(&mark.network) => true,
                // Go's, perhaps for another interface of this container.
                None => !found && prev.as_ref().is_none_or(|prev| lists(prev, &name)),
            };
            if is_ours {
                host.purge_link(ifb.index)?;
                found = true;
            }
        }
        Ok(())
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        collect_links(call, valid)
    }

    fn status(&self, call: &Call<'_>) -> Result<()> {
        Conf::new(&call.conf).map(drop)
    }
}

/// Sets up the limits in place of those that an earlier ADD of this attachment has set up.
fn limit<'a>(call: &'a Call<'_>, conf: Conf, result: &mut AddResult, rollback: &mut Rollback<'a>) -> Result<()> {
    let host = std::rc::Rc::new(Netlink::open()?);
    let outer = host_end(call, result, &host)?;
    let index = outer.index;
    let mark = call.attachment();
    let (name, former) = place(&host, &mark, &outer)?;
    for ifb in former {
        host.purge_link(ifb.index)?;
    }
    make_room(&host, &outer)?;
    if let Some(ingress) = conf.ingress {
        let undo = std::rc::Rc::clone(&host);
        rollback
            .push(format!("remove the limit of {}", outer.name), move || undo.purge_qdisc(index, QdiscParent::Root));
        host.create_tbf(index, &ingress.tbf())?;
    }
    if let Some(egress) = conf.egress {
        let mac = made_up_mac()?;
        let created = undo_creation(&host, &name, move |link| link.mac == Some(mac), rollback);
        let ifb = host.create_ifb(&name, mac, outer.mtu, &mark)?;
        created.set(Some(ifb.index));
        let undo = std::rc::Rc::clone(&host);
        rollback.push(format!("stop the redirection of {}", outer.name), move || {
            undo.purge_qdisc(index, QdiscParent::Ingress)
        });
        host.create_ingress(index)?;
        host.create_redirect(index, ifb.index)?;
        host.create_tbf(ifb.index, &egress.tbf())?;
        result.interfaces.push(host_interface(&name, Some(mac)));
    }
    Ok(())
}

/// The host's end of the container's veth pair, which the earlier plugin's result must list.
///
/// # Errors
/// Go's texts.
fn host_end(call: &Call<'_>, prev: &AddResult, host: &Netlink) -> Result<Link> {
    if prev.interfaces.is_empty() {
        return Err(Error::config("no interfaces provided"));
    }
    let ifname = &call.ifname;
    let container = host.open_in(&Netns::open(call.netns()?)?)?;
    let no_peer = |why: String| Error::config(format!("container interface {ifname} has no veth peer: {why}"));
    let inner = container.find_link(ifname)?;
    let inner = inner.ok_or_else(|| no_peer(format!("could not look up {ifname:?}: Link not found")))?;
    let index = inner.peer_index.filter(|_| inner.is_veth());
    let index = index.ok_or_else(|| no_peer(format!("interface {ifname:?} was not a veth interface")))?;
    let outer = host.find_link_by_index(index)?.filter(|outer| outer.peer_index == Some(inner.index));
    let outer = outer.ok_or_else(|| Error::config(format!("veth peer with index {index} is not in host ns")))?;
    if !lists(prev, &outer.name) {
        return Err(Error::config("no veth peer of container interface found in host ns"));
    }
    Ok(outer)
}

/// Whether a result lists an interface of that name on the host.
fn lists(result: &AddResult, name: &str) -> bool {
    result.interfaces.iter().any(|interface| interface.sandbox.is_empty() && interface.name == name)
}

/// Returns the name for the ifb, and the ifbs that earlier ADDs of this attachment have created.
fn place(host: &Netlink, mark: &AttachmentId, outer: &Link) -> Result<(String, Vec<Link>)> {
    let mut former: Vec<Link> = host.find_link(&mark.own_ifb_name())?.into_iter().collect();
    let Some(ifb) = host.find_link(&mark.ifb_name())? else { return Ok((mark.ifb_name(), former)) };
    let is_former = match &ifb.alias {
        Some(alias) => mark.is_on(Some(alias)),
        // Go's.
        None => host.list_filters(outer.index)?.contains(&Filter::Redirect(ifb.index)),
    };
    if !is_former {
        // Another interface's of this container.
        return Ok((mark.own_ifb_name(), former));
    }
    former.push(ifb);
    Ok((mark.ifb_name(), former))
}

/// A redirection to an interface that has gone.
const GONE: Filter = Filter::Redirect(0);

/// Removes what an earlier ADD has attached to the host's end; the ifb has gone.
///
/// # Errors
/// 102 if something else is attached there.
fn make_room(host: &Netlink, outer: &Link) -> Result<()> {
    for (place, kind) in [(QdiscParent::Root, "tbf"), (QdiscParent::Ingress, "ingress")] {
        let Some(there) = host.find_qdisc(outer.index, place)? else { continue };
        let is_former = match place {
            QdiscParent::Root => there.kind == kind,
            QdiscParent::Ingress => {
                there.kind == kind && host.list_filters(outer.index)?.iter().all(|filter| *filter == GONE)
            }
        };
        if !is_former {
            let msg = format!("create qdisc: file exists: {} already has a qdisc {}", outer.name, there.kind);
            return Err(Error::new(Code::CONFLICT, msg).with_details("it was left untouched"));
        }
        host.purge_qdisc(outer.index, place)?;
    }
    Ok(())
}

/// The attachment's ifb: by its mark, else the one that Go has created.
fn find_ifb(host: &Netlink, mark: &AttachmentId) -> Result<Option<Link>> {
    let own = host.find_link(&mark.own_ifb_name())?.filter(|ifb| mark.is_on(ifb.alias.as_deref()));
    if own.is_some() {
        return Ok(own);
    }
    let is_ours = |ifb: &Link| ifb.alias.is_none() || mark.is_on(ifb.alias.as_deref());
    Ok(host.find_link(&mark.ifb_name())?.filter(is_ours))
}

/// CHECK: `link` sends no faster than `limit`, in Go's words otherwise.
fn check_limit(host: &Netlink, link: &Link, limit: Limit) -> Result<()> {
    let there = host.find_qdisc(link.index, QdiscParent::Root)?.and_then(|qdisc| qdisc.tbf);
    let Some(there) = there else { return Err(failed(format!("{} has no token bucket filter", link.name))) };
    let wanted = limit.tbf();
    if there == wanted || there == limit.tbf_by_go() {
        return Ok(());
    }
    let Tbf { rate, limit, buffer } = there;
    let (what, expected, found) = if rate != wanted.rate {
        ("Rate", wanted.rate, rate)
    } else if limit != wanted.limit {
        ("Limit", wanted.limit.into(), limit.into())
    } else {
        ("Buffer", wanted.buffer.into(), buffer.into())
    };
    Err(failed(format!("{what} doesn't match: {} has {found}, not {expected}", link.name)))
}
