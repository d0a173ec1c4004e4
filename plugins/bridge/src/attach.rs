//! ADD: bridge, port and protection; the wait until the port forwards.
//!
//! The order is the point: flags, VLANs and spoof rules are in force before the container's end
//! comes up.

use std::time::Duration;

use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::{Error, Result};
use cni_linux::link::PortState;
use cni_linux::{Link, Watch};
use cni_plugin::interface::veth::{self, Choices};
use cni_plugin::interface::{AttachmentContext, CreatedLink, host_interface};

use crate::chained::Earlier;
use crate::conf::Conf;
use crate::device;
use crate::port::{self, PortEnds};

/// How long a port may take to forward. It takes milliseconds; this is for a machine under stress.
const PORT_DEADLINE: Duration = Duration::from_secs(5);

const EOPNOTSUPP: i32 = 95;

/// A port of a bridge.
#[derive(Debug)]
pub struct AttachedPort {
    /// The bridge.
    pub(crate) bridge: Link,
    /// The index of the port.
    pub(crate) port: u32,
    /// The index of the link that has the gateway's address, once it has.
    pub(crate) gateway: Option<u32>,
    /// The earlier state of another plugin's interface.
    pub(crate) earlier: Option<Earlier>,
}

/// Creates a veth pair whose host's end is a port of the bridge.
pub(crate) fn create<'a>(
    context: &AttachmentContext<'a, Conf>,
    rollback: &mut Rollback<'a>,
) -> Result<CreatedLink<AttachedPort>> {
    let (host, conf) = (&context.host, &context.conf);
    if conf.spoof_check {
        port::refuse_second(host, &context.mark, None)?;
    }
    let bridge = device::ensure(host, conf, context.call.machine)?;
    let choices = Choices { mtu: conf.mtu, mac: conf.mac, master: Some(bridge.index) };
    let pair = veth::create(context, &choices, rollback)?;
    let ends = PortEnds { index: pair.index, name: &pair.name, peer_mac: pair.peer_mac };
    port::protect(host, &ends, &context.mark, conf, rollback).map_err(|error| match error.errno() {
        Some(errno) if errno == EOPNOTSUPP && conf.vlans.is_some() => device::no_vlan_filtering(error, conf),
        _ => error,
    })?;
    let result = AddResult {
        interfaces: vec![
            host_interface(&bridge.name, None),
            host_interface(&pair.name, Some(pair.mac)),
            context.container_interface(pair.peer_mac),
        ],
        ..AddResult::default()
    };
    let link = AttachedPort { bridge, port: pair.index, gateway: None, earlier: None };
    Ok(CreatedLink { index: pair.peer_index, mac: pair.peer_mac, result, interface: 2, link })
}

/// Waits until frames pass: the port forwards, and it, the gateway's link and the container's end
/// have their carriers. A worker of the kernel sets each carrier, in any order, and an interface
/// drops what it is to send until then.
pub(crate) fn wait_for_frames(
    context: &AttachmentContext<'_, Conf>,
    created: &CreatedLink<AttachedPort>,
    watch: &Watch,
) -> Result<()> {
    let machine = context.call.machine;
    let deadline = machine.now() + PORT_DEADLINE;
    let wait = || -> cni_linux::Result<()> {
        let port = context.host.wait_port_forwarding(watch, created.link.port, deadline, machine)?;
        if port.port.is_some_and(|state| state.state == PortState::Forwarding) {
            if let Some(gateway) = created.link.gateway {
                context.host.wait_carrier(watch, gateway, deadline, machine)?;
            }
        } else {
            let notes = &context.call.notes;
            notes.note(format_args!("{}: STP has not put the port into the forwarding state yet", port.name));
        }
        // The container's end nearly always has its carrier by now.
        context.container.wait_carrier_in(&context.netns, created.index, deadline, machine)
    };
    wait().map_err(|error| Error::from(error).context("bridge port in error state"))
}
