//! Implements CHECK: compares the limits with the configuration.

use cni::AttachmentId;
use cni::skel::Call;
use cni::{Error, Result};
use cni_linux::{Filter, Link, Netlink, QdiscParent};
use cni_plugin::interface::failed;

use crate::conf::{Conf, Limit};
use crate::find_host_end;

/// Compares the limits with the configuration.
///
/// # Errors
/// - Code 7 without `prevResult`, and those of [`find_host_end`].
/// - Code 101 if a configured limit is not as ADD sets it.
pub(crate) fn check(call: &Call<'_>) -> Result<()> {
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
        return Err(failed(format!("the traffic that {} receives is not redirected to {}", host_end.name, ifb.name)));
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
