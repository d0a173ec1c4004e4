//! Implements ADD with a new veth pair. ADD in chained use (module [`chained`]) shares the wait
//! until the port forwards.
//!
//! The port's flags, VLANs and spoof rules are set before the container's end comes up, so that no
//! frame passes without them.

pub(crate) mod chained;

use std::time::Duration;

use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::{Error, Result};
use cni_linux::link::PortState;
use cni_linux::{Link, Watch};
use cni_plugin::interface::veth::{self, Choices};
use cni_plugin::interface::{AttachmentContext, CreatedLink, host_interface};

use crate::conf::Conf;
use crate::device;
use crate::port;
use chained::AdoptedInterface;

/// The time limit for the port to forward and the links to have their carriers. That usually takes
/// milliseconds, but longer on a busy host.
const PORT_DEADLINE: Duration = Duration::from_secs(5);

/// A port of a bridge.
#[derive(Debug)]
pub struct AttachedPort {
    /// The bridge.
    pub(crate) bridge: Link,
    /// The index of the port.
    pub(crate) port: u32,
    /// The index of the link for the gateways' addresses; that of the bridge if the configuration
    /// has no gateway. `None` without IPAM, and until that link is known.
    pub(crate) gateway_link: Option<u32>,
    /// In chained use, the earlier plugin's interface that became the port.
    pub(crate) adopted: Option<AdoptedInterface>,
}

/// Finds or creates the bridge, and creates a veth pair with its host's end as a port of the
/// bridge.
///
/// # Errors
/// Those of [`port::check_not_guarded`], [`device::ensure`], [`device::port_mtu`],
/// [`veth::create`], [`port::guard`] and [`port::configure`].
pub(crate) fn create<'a>(
    context: &AttachmentContext<'a, Conf>,
    rollback: &mut Rollback<'a>,
) -> Result<CreatedLink<AttachedPort>> {
    let (host, conf) = (&context.host, &context.conf);
    if conf.spoof_check {
        port::check_not_guarded(host, &context.attachment, None)?;
    }
    let bridge = device::ensure(host, conf, context.call.machine)?;
    let mtu = device::port_mtu(host, &bridge, conf)?;
    let choices = Choices { mtu, mac: conf.mac, master: Some(bridge.index) };
    let pair = veth::create(context, &choices, rollback)?;
    if conf.spoof_check {
        port::guard(&pair.name, pair.peer_mac, &context.attachment, rollback)?;
    }
    port::configure(host, pair.index, conf)?;
    let result = AddResult {
        interfaces: vec![
            host_interface(&bridge.name, None),
            host_interface(&pair.name, Some(pair.mac)),
            context.container_interface(pair.peer_mac),
        ],
        ..AddResult::default()
    };
    let link = AttachedPort { bridge, port: pair.index, gateway_link: None, adopted: None };
    Ok(CreatedLink { index: pair.peer_index, mac: pair.peer_mac, result, interface_position: 2, link })
}

/// Waits until frames pass: the port forwards, and the gateway's link and the container's end have
/// their carriers. The kernel sets each carrier asynchronously, in any order, and an interface
/// drops outgoing frames until it has its carrier.
///
/// If STP blocks the port, prints a note and waits for the container's carrier only.
///
/// # Errors
/// - Code 11 at the deadline.
/// - The errors of the kernel.
pub(crate) fn wait_for_frames(
    context: &AttachmentContext<'_, Conf>,
    created: &CreatedLink<AttachedPort>,
    watch: &Watch,
) -> Result<()> {
    let machine = context.call.machine;
    let deadline = machine.now() + PORT_DEADLINE;
    let wait = || -> cni_linux::Result<()> {
        let link = context.host.wait_port_forwarding(watch, created.link.port, deadline, machine)?;
        // A bridge gets its carrier only when one of its ports forwards.
        if link.port.is_some_and(|port| port.state == PortState::Forwarding) {
            if let Some(gateway_link) = created.link.gateway_link {
                context.host.wait_carrier(watch, gateway_link, deadline, machine)?;
            }
        } else {
            let notes = &context.call.notes;
            notes.note(format_args!("{}: STP has not put the port into the forwarding state yet", link.name));
        }
        context.container.wait_carrier_in(&context.netns, created.index, deadline, machine)
    };
    wait().map_err(|error| Error::from(error).context("bridge port in error state"))
}
