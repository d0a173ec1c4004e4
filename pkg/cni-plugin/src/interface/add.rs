//! ADD: the link, the address, what the host does for it, and only then an interface that is up.
//!
//! The order is the point: no frame passes before the plugin's protection is in force, and no
//! address is announced before frames can reach it.

use cni::Result;
use cni::delegate::Delegate;
use cni::rollback::Rollback;
use cni::skel::{Added, Call};
use cni_linux::{Dad, Watch};

use super::layer3::{self, Layer3};
use super::{AttachmentContext, CreatedLink, HostEnd, Interface, LinkState, Release, masquerade, name_taken};

pub(super) fn add<'a, I: Interface>(plugin: &I, call: &'a Call<'_>) -> Result<Added<'a>> {
    let conf = plugin.parse(&call.conf, &call.environment.args, &call.notes)?;
    let earlier = plugin.earlier(call)?;
    let context = AttachmentContext::open(call, conf, earlier)?;
    let in_kernel = plugin.is_in_kernel(&context.conf)?;
    // The kernel would refuse this too, but only after links that are shared have been created for
    // it.
    if in_kernel && context.earlier.is_none() && context.container.find_link(&call.ifname)?.is_some() {
        return Err(name_taken::<I>(&context.mark));
    }
    let policy = plugin.layer3(&context.conf);
    // Dropped in reverse on failure: an address in `lease` is given back only after the interface
    // that had it is gone.
    let mut lease = call.rollback();
    let mut rollback = call.rollback();
    let mut created = plugin.create(&context, &mut rollback)?;
    let answer = match policy.ipam {
        Some(kind) => {
            let undos = match Release::order::<I>(call) {
                Release::AfterLink => &mut lease,
                Release::BeforeLink => &mut rollback,
            };
            let answer = Delegate::find(call, kind).and_then(|delegate| delegate.lease(undos));
            Some(answer.map_err(|error| match I::LEASE_CONTEXT {
                Some(doing) => error.context(doing),
                None => error,
            })?)
        }
        None => policy.earlier.cloned(),
    };
    if let Some(ipam) = answer {
        let mut layer3 = Layer3::new(&ipam, &policy, created.interface, &created.result.ips)?;
        if in_kernel {
            masquerade::ensure(&context, policy.masquerade, &layer3.addresses(), &mut rollback)?;
            bring_up(plugin, &context, &mut created, &mut layer3, &mut rollback)?;
        }
        created.result.ips.append(&mut layer3.ips);
        created.result.routes.append(&mut layer3.routes);
        if !ipam.dns.is_empty() {
            created.result.dns = ipam.dns;
        }
    } else if in_kernel && policy.state == LinkState::Up && context.earlier.is_none() {
        let watch = host_watch::<I>()?;
        context.container.set_up(created.index)?;
        if let Some(watch) = &watch {
            plugin.wait_for_frames(&context, &created, watch)?;
        }
    }
    plugin.finish(&context, &mut created)?;
    if let Some(dns) = policy.dns {
        created.result.dns = dns.clone();
    }
    lease.append(rollback);
    Ok(Added { result: created.result, rollback: lease })
}

/// Layer 3: the host first, then the container's end, then, once frames pass, the announcement.
fn bring_up<'a, I: Interface>(
    plugin: &I,
    context: &AttachmentContext<'a, I::Conf>,
    created: &mut CreatedLink<I::Link>,
    layer3: &mut Layer3,
    rollback: &mut Rollback<'a>,
) -> Result<()> {
    let dad = plugin.layer3(&context.conf).dad;
    let served = plugin.serve(context, created, layer3, rollback)?;
    layer3::prepare_namespace(context, dad, layer3)?;
    // Listening starts before there is anything to hear.
    let watch = host_watch::<I>()?;
    let inner = if dad == Dad::Normal { Some(Watch::open_in(&context.netns)?) } else { None };
    layer3::configure(&context.container, created.index, dad, layer3, &context.call.notes)?;
    if let Some(watch) = &watch {
        plugin.wait_for_frames(context, created, watch)?;
    }
    if let Some(inner) = &inner {
        layer3::wait_for_dad(&context.container, inner, created.index, context.call.machine)?;
    } else {
        // Duplicate address detection of the gateway's address takes seconds. ADD does not wait for
        // it, because no first packet of the container depends on it.
        layer3::wait_for_own(&context.host, served.added, context.call, Watch::open)?;
    }
    let own = layer3.ips.iter().map(|ip| ip.address.address());
    layer3::wait_for_own(&context.container, own, context.call, || Watch::open_in(&context.netns))?;
    // An address that another container had a moment ago: its neighbours, and the host, still know
    // the old MAC.
    if !created.mac.is_zero() {
        context.container.announce(created.index, created.mac)?;
    }
    if let Some(link) = served.neighbours_on {
        for ip in &layer3.ips {
            context.host.correct_neighbour(link, ip.address.address(), created.mac)?;
        }
    }
    Ok(())
}

/// Listens to the host, if the link has an end there.
fn host_watch<I: Interface>() -> Result<Option<Watch>> {
    Ok(match I::HOST_END {
        HostEnd::Veth { .. } => Some(Watch::open()?),
        HostEnd::None => None,
    })
}
