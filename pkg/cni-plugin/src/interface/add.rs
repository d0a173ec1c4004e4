//! ADD: creates the link, gets the addresses, configures the host, then the container's interface.
//!
//! The order matters: no frame passes over a new link before the plugin's protection rules are in
//! force, and no address is announced before frames can reach it.

use cni::Result;
use cni::delegate::Delegate;
use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::skel::{Added, Call};
use cni_linux::{Dad, Watch, announce};

use super::conf::{CommonConf, SLAAC};
use super::layer3::{self, Layer3};
use super::{AttachmentContext, CreatedLink, HostEnd, Interface, LinkState, Release, masquerade, name_taken};

/// Adds the interface, its addresses and routes, and the masquerade rules. Returns the result, and
/// the undos of everything that was done. Before it returns an error, all undos have run.
///
/// # Errors
/// - Code 102 if CNI_IFNAME exists already.
/// - The errors of the configuration, of the IPAM plugin and of the kernel.
pub(super) fn add<'a, I: Interface>(plugin: &I, call: &'a Call<'_>) -> Result<Added<'a>> {
    let conf = plugin.parse(&call.conf, &call.environment.args)?;
    let CommonConf { accept_ra, dns } = CommonConf::read(&call.conf, &plugin.layer3(&conf), &call.notes)?;
    let adopted = plugin.find_adopted(call)?;
    let context = AttachmentContext::open(call, conf, adopted)?;
    let in_kernel = plugin.is_in_kernel(&context.conf)?;
    // The kernel would refuse a taken name too, but only after `create` has created shared links,
    // for example the bridge.
    if in_kernel && context.adopted.is_none() && context.container.find_link(&call.ifname)?.is_some() {
        return Err(name_taken::<I>(&context.attachment));
    }
    let policy = plugin.layer3(&context.conf);
    // On failure, the undos in `rollback` run before those in `late_rollback`, because values are
    // dropped in the reverse order of their declaration.
    let mut late_rollback = call.rollback();
    let mut rollback = call.rollback();
    let mut created = plugin.create(&context, &mut rollback)?;
    if in_kernel {
        accept_ra.apply(&context, &mut rollback)?;
    }
    let undos = match Release::order::<I>(call) {
        Release::AfterLink => &mut late_rollback,
        // Within `rollback`, the newest undo runs first: the release, then the removal of the link.
        Release::BeforeLink => &mut rollback,
    };
    let answer = match lease::<I>(call, undos)? {
        // Without addresses only slaac answers, if `required` is false and no router has.
        Some(answer) if call.conf.ipam_type() == SLAAC && answer.ips.is_empty() => None,
        None => policy.inherited.cloned(),
        answer => answer,
    };
    if let Some(answer) = answer {
        let mut layer3 = Layer3::new(&answer, &policy, created.interface_position, &created.result.ips)?;
        if in_kernel {
            masquerade::ensure(&context, policy.masquerade, &layer3.addresses(), &mut rollback)?;
            bring_up(plugin, &context, &mut created, &mut layer3, &mut rollback)?;
        }
        created.result.ips.append(&mut layer3.ips);
        created.result.routes.append(&mut layer3.routes);
        if !answer.dns.is_empty() {
            created.result.dns = answer.dns;
        }
    } else if in_kernel && policy.state == LinkState::Up && context.adopted.is_none() {
        bring_up_without_addresses(plugin, &context, &created)?;
    }
    plugin.finish(&context, &mut created)?;
    if let Some(dns) = dns {
        created.result.dns = dns;
    }
    // The undos of `rollback` are now the newest of `late_rollback`, so they still run first.
    late_rollback.append(rollback);
    Ok(Added { result: created.result, rollback: late_rollback })
}

/// Runs the ADD of the IPAM plugin, and registers its DEL on `undos`. Returns its answer, or `None`
/// without an IPAM plugin.
///
/// # Errors
/// Those of the IPAM plugin, with the plugin's [`Interface::LEASE_CONTEXT`].
fn lease<'a, I: Interface>(call: &'a Call<'_>, undos: &mut Rollback<'a>) -> Result<Option<AddResult>> {
    let answer = Delegate::find_ipam(call).and_then(|ipam| ipam.map(|ipam| ipam.lease(undos)).transpose());
    answer.map_err(|error| match I::LEASE_CONTEXT {
        Some(text) => error.context(text),
        None => error,
    })
}

/// Sets the container's interface up. If the link has an end on the host, waits until frames pass.
///
/// # Errors
/// - Code 11 if frames do not pass before the deadline.
/// - The errors of the kernel.
fn bring_up_without_addresses<I: Interface>(
    plugin: &I,
    context: &AttachmentContext<'_, I::Conf>,
    created: &CreatedLink<I::Link>,
) -> Result<()> {
    let watch = host_watch::<I>()?;
    context.container.set_up(created.index)?;
    match &watch {
        Some(watch) => plugin.wait_for_frames(context, created, watch),
        None => Ok(()),
    }
}

/// Configures the host for the addresses, then adds addresses and routes to the container's
/// interface and sets it up. Once frames pass and the addresses are usable, announces them to the
/// neighbours.
///
/// # Errors
/// - Code 102 if another host has one of the addresses.
/// - Code 11 if a wait ends at its deadline.
/// - The errors of the kernel.
fn bring_up<'a, I: Interface>(
    plugin: &I,
    context: &AttachmentContext<'a, I::Conf>,
    created: &mut CreatedLink<I::Link>,
    layer3: &mut Layer3,
    rollback: &mut Rollback<'a>,
) -> Result<()> {
    let dad = plugin.layer3(&context.conf).dad;
    let host_state = plugin.configure_host(context, created, layer3, rollback)?;
    layer3::prepare_namespace(context, dad, I::HOST_END, layer3)?;
    // Both watches are opened before the interface is set up, so that no event is missed.
    let host_watch = host_watch::<I>()?;
    let dad_watch = if dad == Dad::Normal { Some(Watch::open_in(&context.netns)?) } else { None };
    layer3::configure(&context.container, created.index, dad, layer3, &context.call.notes)?;
    if let Some(watch) = &host_watch {
        plugin.wait_for_frames(context, created, watch)?;
    }
    if let Some(watch) = &dad_watch {
        // ADD does not wait for the host's addresses here: their detection takes seconds, and the
        // container's first packets do not depend on it.
        layer3::wait_for_dad(&context.container, watch, created.index, context.call.machine)?;
    } else {
        layer3::wait_until_usable(&context.host, host_state.added, context.call, Watch::open)?;
    }
    let addresses = layer3.ips.iter().map(|ip| ip.address.address());
    layer3::wait_until_usable(&context.container, addresses, context.call, || Watch::open_in(&context.netns))?;
    // Another container may have had one of the addresses a moment ago. The neighbours, and the
    // host, may still have the MAC of that container in their neighbour tables.
    if !created.mac.is_zero() {
        if I::HOST_END != HostEnd::None {
            let _ = context.netns.run(|| announce::allow(&context.call.ifname))?;
        }
        context.container.announce(created.index, created.mac)?;
    }
    if let Some(link) = host_state.neighbours_on {
        // Only existing neighbour entries are changed: the kernel resolves other addresses itself.
        for ip in &layer3.ips {
            context.host.correct_neighbour(link, ip.address.address(), created.mac)?;
        }
    }
    Ok(())
}

/// Opens a watch on the host's link events if the link has an end on the host, else returns `None`.
fn host_watch<I: Interface>() -> Result<Option<Watch>> {
    Ok(match I::HOST_END {
        HostEnd::Veth { .. } => Some(Watch::open()?),
        HostEnd::None => None,
    })
}
