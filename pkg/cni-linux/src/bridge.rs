//! Creates bridges and configures their ports; [`vlan`](crate::vlan) configures the ports' VLANs.
//!
//! A bridge that is created without a hardware address uses the lowest address of its ports, which
//! changes as ports are added and removed. A kernel may support bridges but not their VLAN
//! filtering; it reports that (EOPNOTSUPP) only when filtering is switched on.

use std::thread;
use std::time::Instant;

use nix::sched::{CloneFlags, unshare};

use crate::error::{Cause, Error, Result};
use crate::link::{
    IFLA_BR_GROUP_FWD_MASK, IFLA_BR_MCAST_SNOOPING, IFLA_BR_STP_STATE, IFLA_BR_VLAN_FILTERING, IFLA_BRPORT_ISOLATED,
    IFLA_BRPORT_MODE, IFLA_BRPORT_NEIGH_SUPPRESS, Link, LinkRequest, OperState, PortState,
};
use crate::mac::Mac;
use crate::netlink::wire::new_attribute;
use crate::netlink::{Kind, Netlink};
use crate::watch::Watch;

/// The properties of a bridge to create.
#[derive(Clone, Copy, Debug)]
pub struct BridgeSpec<'a> {
    /// The name.
    pub name: &'a str,
    /// The MTU; `None` for the smallest MTU of the ports.
    pub mtu: Option<u32>,
    /// The hardware address; `None` for one that depends on the ports.
    pub mac: Option<Mac>,
    /// Whether it filters by VLAN.
    pub vlan_filtering: bool,
    /// Whether it is up at once.
    pub up: bool,
}

impl<'a> BridgeSpec<'a> {
    /// Returns a bridge that is down, without VLAN filtering, with the kernel's defaults.
    pub fn named(name: &'a str) -> BridgeSpec<'a> {
        BridgeSpec { name, mtu: None, mac: None, vlan_filtering: false, up: false }
    }
}

/// Settings of a bridge to change; `None` keeps a setting. [`BridgeInfo`](crate::link::BridgeInfo)
/// describes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BridgeSettings {
    /// Which frames to reserved addresses it forwards. The kernel refuses the bits 0 to 2.
    pub group_fwd_mask: Option<u16>,
    /// Whether it sends multicast frames only to the ports that have asked for them.
    pub mcast_snooping: Option<bool>,
    /// Whether it runs the spanning tree protocol.
    pub spanning_tree: Option<bool>,
}

/// The settings of a bridge's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortFlags {
    /// Hairpin mode: whether a frame may leave through the port on which it arrived.
    pub hairpin: bool,
    /// Port isolation: whether the port exchanges no frames with other isolated ports. Kernels
    /// before 4.18 ignore it.
    pub isolated: bool,
    /// Whether the bridge answers neighbour requests for addresses behind the port; `None` keeps
    /// the setting. Kernels before 4.15 ignore it.
    pub neigh_suppress: Option<bool>,
}

/// Checks that the kernel's bridges support VLAN filtering. Creates a bridge that filters by VLAN
/// in a new network namespace on a new thread; when the thread ends, the kernel deletes the
/// namespace and the bridge.
///
/// # Errors
/// [`Error::is_unsupported`] if the kernel does not support VLAN filtering. After any other error
/// the answer is unknown.
pub fn probe_vlan_filtering() -> Result<()> {
    let failed = |cause: Cause| Error::new("failed to probe bridge VLAN filtering in a new network namespace", cause);
    let probe = move || {
        unshare(CloneFlags::CLONE_NEWNET).map_err(|errno| failed(errno.into()))?;
        let spec = BridgeSpec { vlan_filtering: true, ..BridgeSpec::named("probe0") };
        Netlink::open()?.create_bridge(&spec).map(drop)
    };
    let thread = thread::Builder::new().name("vlan-probe".into()).spawn(probe).map_err(|error| failed(error.into()))?;
    thread.join().unwrap_or_else(|_| Err(failed(Cause::text("internal error: the thread of the probe panicked"))))
}

impl Netlink {
    /// Creates a bridge and returns it. Its operational state may still change.
    ///
    /// # Errors
    /// [`Error::is_exists`] if any interface has this name; [`Error::is_unsupported`] if VLAN
    /// filtering is requested and the kernel does not support it. In both cases nothing is created.
    pub fn create_bridge(&self, spec: &BridgeSpec<'_>) -> Result<Link> {
        let failed = |cause| Error::new(format_args!("failed to create bridge {}", spec.name), cause);
        let request = LinkRequest::without_index().name(spec.name);
        let request = if spec.up { request.up() } else { request };
        let request = request.optional(spec.mtu, LinkRequest::mtu).optional(spec.mac, LinkRequest::mac);
        let options = if spec.vlan_filtering { new_attribute(IFLA_BR_VLAN_FILTERING, &[1]) } else { Vec::new() };
        self.create_link(&request.kind("bridge", &options), spec.name).map_err(failed)
    }

    /// Switches on VLAN filtering of an existing bridge. The bridge then drops a tagged frame at a
    /// port that is not in the frame's VLAN, so the caller must have checked that no port needs
    /// such frames.
    ///
    /// # Errors
    /// [`Error::is_unsupported`] if the kernel does not support VLAN filtering.
    pub fn enable_vlan_filtering(&self, index: u32) -> Result<()> {
        let request = LinkRequest::new(index).kind("bridge", &new_attribute(IFLA_BR_VLAN_FILTERING, &[1]));
        // NEWLINK, because SETLINK ignores the options of a link.
        self.change(Kind::NewLink, index, &request, 0, |link| format!("failed to switch on VLAN filtering of {link}"))
    }

    /// Changes settings of an existing bridge, in one request. A kernel that lacks a setting
    /// ignores it.
    pub fn set_bridge(&self, index: u32, settings: &BridgeSettings) -> Result<()> {
        let mut options = Vec::new();
        if let Some(mask) = settings.group_fwd_mask {
            options.extend(new_attribute(IFLA_BR_GROUP_FWD_MASK, &mask.to_ne_bytes()));
        }
        if let Some(snooping) = settings.mcast_snooping {
            options.extend(new_attribute(IFLA_BR_MCAST_SNOOPING, &[u8::from(snooping)]));
        }
        if let Some(spanning_tree) = settings.spanning_tree {
            options.extend(new_attribute(IFLA_BR_STP_STATE, &u32::from(spanning_tree).to_ne_bytes()));
        }
        let request = LinkRequest::new(index).kind("bridge", &options);
        // NEWLINK, because SETLINK ignores the options of a link.
        self.change(Kind::NewLink, index, &request, 0, |link| format!("failed to set {settings:?} of {link}"))
    }

    /// Sets hairpin mode, isolation and the suppression of neighbour requests of a bridge's port.
    pub fn set_port(&self, index: u32, flags: &PortFlags) -> Result<()> {
        let hairpin = new_attribute(IFLA_BRPORT_MODE, &[u8::from(flags.hairpin)]);
        let isolated = new_attribute(IFLA_BRPORT_ISOLATED, &[u8::from(flags.isolated)]);
        let suppress = flags.neigh_suppress.map(|on| new_attribute(IFLA_BRPORT_NEIGH_SUPPRESS, &[u8::from(on)]));
        let request =
            LinkRequest::new(index).port("bridge", &[hairpin, isolated, suppress.unwrap_or_default()].concat());
        // NEWLINK, because SETLINK ignores the options of a port.
        self.change(Kind::NewLink, index, &request, 0, |link| {
            format!("failed to set hairpin mode and isolation of {link}")
        })
    }

    /// Waits until a bridge's port is operationally up and forwards frames, and returns the port.
    /// Does not wait for the spanning tree protocol, which can block a new port for half a minute.
    /// `watch` must have been opened in this connection's namespace before the port was created.
    ///
    /// # Errors
    /// [`Error::is_deadline`] at the deadline, [`Error::is_terminated`] after SIGTERM,
    /// [`Error::is_not_found`] if the interface does not exist; another error if the interface is
    /// not a port of a bridge.
    pub fn wait_port_forwarding(
        &self,
        watch: &Watch,
        index: u32,
        deadline: Instant,
        machine: &dyn cni::machine::Machine,
    ) -> Result<Link> {
        let what = format!("interface {index} to forward as a port of its bridge");
        watch.wait(&what, deadline, machine, || {
            let Some(link) = self.find_link_by_index(index)? else {
                return Err(Error::new(format_args!("failed to find interface {index}"), Cause::LinkNotFound));
            };
            let Some(port) = link.port else {
                let cause = Cause::text("it is not attached to a bridge");
                return Err(Error::new(format_args!("failed to wait for {}", link.name), cause));
            };
            // A new port is in state "forwarding" until the kernel has noticed the missing carrier,
            // so the port's state alone is not enough.
            if link.oper_state != OperState::Up {
                return Ok(None);
            }
            let is_done = match port.state {
                PortState::Forwarding => true,
                // Without the protocol, the kernel soon sets the port to "forwarding".
                PortState::HeldBack => self.has_spanning_tree(link.master)?,
                PortState::Disabled => false,
            };
            Ok(is_done.then_some(link))
        })
    }

    /// Whether `master`, the index of a port's bridge, runs the spanning tree protocol. `false` if
    /// there is no such bridge.
    fn has_spanning_tree(&self, master: Option<u32>) -> Result<bool> {
        let Some(master) = master else { return Ok(false) };
        let bridge = self.find_link_by_index(master)?.and_then(|link| link.bridge);
        Ok(bridge.is_some_and(|bridge| bridge.spanning_tree))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, new_netns, output};
    use crate::{LinkKind, VethSpec};

    #[test]
    fn a_bridge_is_created_with_all_settings_at_once() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let mac = "02:00:00:00:00:09".parse().unwrap();
            let spec = BridgeSpec { mtu: Some(1450), mac: Some(mac), up: true, ..BridgeSpec::named("br0") };
            let made = netlink.create_bridge(&spec).unwrap();
            assert_eq!(made.index, netlink.link("br0").unwrap().index);
            assert_eq!((made.mac, made.mtu, made.up, &made.kind), (Some(mac), 1450, true, &LinkKind::Bridge));
            assert!(made.bridge.is_some());
            let again = netlink.create_bridge(&spec).unwrap_err();
            assert!(again.is_exists(), "{again}");
            assert!(again.to_string().starts_with("failed to create bridge br0: File exists (os error 17)"), "{again}");
        });
    }

    #[test]
    fn each_setting_of_a_bridge_is_changed_alone() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let index = netlink.create_bridge(&BridgeSpec::named("br0")).unwrap().index;
            let settings = || {
                let bridge = netlink.link("br0").unwrap().bridge.unwrap();
                (bridge.group_fwd_mask, bridge.mcast_snooping, bridge.spanning_tree)
            };
            let keep = BridgeSettings::default();
            for (change, expected) in [
                (keep, (0, true, false)),
                (BridgeSettings { group_fwd_mask: Some(0x4008), ..keep }, (0x4008, true, false)),
                (BridgeSettings { mcast_snooping: Some(false), ..keep }, (0x4008, false, false)),
                (BridgeSettings { spanning_tree: Some(true), ..keep }, (0x4008, false, true)),
            ] {
                netlink.set_bridge(index, &change).unwrap();
                assert_eq!(settings(), expected);
            }
            netlink.set_bridge(index, &BridgeSettings { group_fwd_mask: Some(1), ..keep }).unwrap_err();
        });
    }

    #[test]
    fn a_configured_mac_stays_when_ports_are_added() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let mac = "0e:00:00:00:00:09".parse().unwrap();
            let bridge = netlink.create_bridge(&BridgeSpec { mac: Some(mac), ..BridgeSpec::named("br0") }).unwrap();
            let mut spec = VethSpec::new("veth0", "02:00:00:00:00:01".parse().unwrap(), "eth0", Mac([2; 6]));
            spec.master = Some(bridge.index);
            netlink.create_veth(&spec).unwrap();
            assert_eq!(netlink.link("br0").unwrap().mac, Some(mac));
        });
    }

    #[test]
    fn probing_vlan_filtering_agrees_and_leaves_nothing() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let before = netlink.list_links().unwrap();
            let probed = probe_vlan_filtering();
            assert_eq!(netlink.list_links().unwrap(), before);
            let made = netlink.create_bridge(&BridgeSpec { vlan_filtering: true, ..BridgeSpec::named("br0") });
            assert_eq!(probed.is_ok(), made.is_ok(), "{probed:?}");
            assert!(probed.is_ok() || probed.unwrap_err().is_unsupported());
        });
    }

    #[test]
    fn missing_vlan_filtering_is_reported_and_nothing_created() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let spec = BridgeSpec { vlan_filtering: true, ..BridgeSpec::named("br0") };
            match netlink.create_bridge(&spec) {
                Ok(link) => assert!(link.bridge.unwrap().vlan_filtering),
                Err(error) => {
                    assert!(error.is_unsupported(), "{error}");
                    assert_eq!(netlink.find_link("br0").unwrap(), None);
                    let bridge = netlink.create_bridge(&BridgeSpec::named("br0")).unwrap();
                    assert!(netlink.enable_vlan_filtering(bridge.index).unwrap_err().is_unsupported());
                }
            }
        });
    }

    #[test]
    fn ports_are_listed_with_their_flags_and_wait_for_the_other_end() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let container = new_netns();
            let bridge = netlink.create_bridge(&BridgeSpec { up: true, ..BridgeSpec::named("br0") }).unwrap();
            let mut spec = VethSpec::new("veth0", Mac([2, 0, 0, 0, 0, 1]), "eth0", Mac([2, 0, 0, 0, 0, 2]));
            (spec.peer_netns, spec.master, spec.up) = (Some(&container), Some(bridge.index), true);
            let veth = netlink.create_veth(&spec).unwrap();
            netlink.create_bridge(&BridgeSpec::named("other")).unwrap();
            for flags in [(true, false, Some(true)), (false, true, None), (false, false, Some(false))] {
                let suppressed_before = netlink.list_ports(bridge.index).unwrap()[0].port.unwrap().neigh_suppress;
                let wanted = PortFlags { hairpin: flags.0, isolated: flags.1, neigh_suppress: flags.2 };
                netlink.set_port(veth.index, &wanted).unwrap();
                let ports = netlink.list_ports(bridge.index).unwrap();
                assert_eq!(ports.len(), 1);
                let port = ports[0].port.unwrap();
                assert_eq!((port.hairpin, port.isolated), (flags.0, flags.1));
                assert_eq!(port.neigh_suppress, flags.2.unwrap_or(suppressed_before));
            }
            assert!(output("ip -d link show veth0").contains("hairpin off"));
            let hairpin = PortFlags { hairpin: true, isolated: false, neigh_suppress: None };
            assert!(netlink.set_port(bridge.index, &hairpin).is_err());

            let machine = crate::testing::machine();
            let watch = Watch::open().unwrap();
            let soon = || Instant::now() + std::time::Duration::from_millis(50);
            let early = netlink.wait_port_forwarding(&watch, veth.index, soon(), &machine).unwrap_err();
            assert!(early.is_deadline(), "{early}");
            netlink.open_in(&container).unwrap().set_up(veth.peer_index).unwrap();
            let deadline = Instant::now() + std::time::Duration::from_secs(5);
            let link = netlink.wait_port_forwarding(&watch, veth.index, deadline, &machine).unwrap();
            assert!(link.running && link.up);
        });
    }
}
