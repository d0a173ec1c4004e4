//! Bridges and their ports.
//!
//! What a bridge's ports do with VLANs is in [`vlan`](crate::vlan). A bridge created without an
//! address takes the lowest address of its ports and changes it with them. A kernel may have
//! bridges but no VLAN filtering, which it reports (EOPNOTSUPP) only when filtering is switched on.

use std::thread;
use std::time::Instant;

use nix::sched::{CloneFlags, unshare};

use crate::error::{Cause, Error, Reason, Result};
use crate::link::{
    IFLA_BR_VLAN_FILTERING, IFLA_BRPORT_ISOLATED, IFLA_BRPORT_MODE, Link, LinkRequest, OperState, PortState,
};
use crate::mac::Mac;
use crate::netlink::wire::new_attribute;
use crate::netlink::{Kind, Netlink};
use crate::watch::Watch;

/// A bridge to be made.
#[derive(Clone, Copy, Debug)]
pub struct BridgeSpec<'a> {
    /// Its name.
    pub name: &'a str,
    /// The largest packet, or the kernel's default (which follows the ports).
    pub mtu: Option<u32>,
    /// Its address from the first moment on, which then never changes by itself; or one that
    /// follows the ports.
    pub mac: Option<Mac>,
    /// Whether it filters by VLAN.
    pub vlan_filtering: bool,
    /// Whether it is up at once.
    pub up: bool,
}

impl<'a> BridgeSpec<'a> {
    /// A bridge with nothing but a name: down, no VLANs, the kernel's defaults.
    pub fn named(name: &'a str) -> BridgeSpec<'a> {
        BridgeSpec { name, mtu: None, mac: None, vlan_filtering: false, up: false }
    }
}

/// How a bridge treats a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortFlags {
    /// Whether a frame may leave by the port it came in by.
    pub hairpin: bool,
    /// Whether it exchanges no frames with other isolated ports. Ignored by kernels before 4.18.
    pub isolated: bool,
}

/// Checks that this kernel's bridges can filter by VLAN, by making such a bridge in a network
/// namespace of its own, which ends with the thread that made it. No network namespace that exists
/// is changed.
///
/// # Errors
/// [`Error::is_unsupported`] if the kernel has no VLAN filtering. Any other error leaves it
/// unknown.
pub fn probe_vlan_filtering() -> Result<()> {
    let failed = |cause: Cause| Error::new("failed to probe bridge VLAN filtering in a new network namespace", cause);
    let probe = move || {
        unshare(CloneFlags::CLONE_NEWNET).map_err(|errno| failed(errno.into()))?;
        let spec = BridgeSpec { vlan_filtering: true, ..BridgeSpec::named("probe0") };
        Netlink::open()?.create_bridge(&spec).map(drop)
    };
    let thread = thread::Builder::new().name("vlan-probe".into()).spawn(probe).map_err(|error| failed(error.into()))?;
    thread.join().unwrap_or_else(|_| Err(failed(Cause::text("the thread panicked"))))
}

impl Netlink {
    /// Makes a bridge, in one request. What is returned is as at its birth: whether it works is not
    /// judged yet.
    ///
    /// # Errors
    /// [`Error::is_exists`] if any interface has that name; [`Error::is_unsupported`] if VLAN
    /// filtering was asked for and the kernel has none. Nothing is made in either case.
    pub fn create_bridge(&self, spec: &BridgeSpec<'_>) -> Result<Link> {
        let failed = |cause| Error::new(format_args!("failed to create bridge {}", spec.name), cause);
        let request = LinkRequest::new(0).name(spec.name);
        let request = if spec.up { request.up() } else { request };
        let request = request.optional(spec.mtu, LinkRequest::mtu).optional(spec.mac, LinkRequest::mac);
        let options = if spec.vlan_filtering { new_attribute(IFLA_BR_VLAN_FILTERING, &[1]) } else { Vec::new() };
        self.create_link(&request.kind("bridge", &options), spec.name).map_err(failed)
    }

    /// Makes an existing bridge tell VLANs apart. This stops other people's tagged traffic at once:
    /// the caller has made sure that there is none.
    ///
    /// # Errors
    /// [`Error::is_unsupported`] if the kernel cannot.
    pub fn set_vlan_filtering(&self, index: u32) -> Result<()> {
        let request = LinkRequest::new(index).kind("bridge", &new_attribute(IFLA_BR_VLAN_FILTERING, &[1]));
        // SETLINK ignores a link's own options; only NEWLINK, on a link that exists, changes them.
        self.request(Kind::NewLink, &request, 0).map(drop).map_err(|cause| {
            Error::new(format_args!("failed to switch on VLAN filtering of {}", self.label(index)), cause)
        })
    }

    /// Sets both flags of a bridge's port, in one request.
    pub fn set_port(&self, index: u32, flags: &PortFlags) -> Result<()> {
        let hairpin = new_attribute(IFLA_BRPORT_MODE, &[u8::from(flags.hairpin)]);
        let isolated = new_attribute(IFLA_BRPORT_ISOLATED, &[u8::from(flags.isolated)]);
        let request = LinkRequest::new(index).port("bridge", &[hairpin, isolated].concat());
        self.request(Kind::NewLink, &request, 0).map(drop).map_err(|cause| {
            Error::new(format_args!("failed to set hairpin mode and isolation of {}", self.label(index)), cause)
        })
    }

    /// Waits until a bridge's port lets frames pass: both ends up, and the bridge has agreed. A
    /// spanning tree may take half a minute to agree, so on a bridge that runs one this waits for
    /// the carrier alone. `watch` must have been opened in this connection's namespace, before the
    /// port was touched.
    ///
    /// # Errors
    /// [`Error::is_deadline`], [`Error::is_terminated`], or the port is gone, or no port.
    pub fn wait_port_forwarding(
        &self,
        watch: &Watch,
        index: u32,
        deadline: Instant,
        machine: &dyn cni::machine::Machine,
    ) -> Result<Link> {
        watch.wait("the bridge's port to forward", deadline, machine, || {
            let found = self.find_link_by_index(index)?;
            let missing = || Error::new(format_args!("failed to find interface {index}"), Reason::LinkNotFound);
            let link = found.ok_or_else(missing)?;
            match link.port {
                // A port just made is taken to work until the kernel has judged it, and forwards
                // for that moment.
                Some(port) if port.state == PortState::Forwarding && link.oper_state == OperState::Up => Ok(Some(link)),
                Some(port) if port.state == PortState::HeldBack && link.oper_state == OperState::Up => {
                    let bridge = link.master.map(|master| self.find_link_by_index(master)).transpose()?.flatten();
                    let spanning_tree = bridge.and_then(|link| link.bridge).is_some_and(|bridge| bridge.spanning_tree);
                    Ok(spanning_tree.then_some(link))
                }
                Some(_) => Ok(None),
                None => {
                    Err(Error::new(format_args!("failed to wait for {}", link.name), Cause::text("it is on no bridge")))
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, new_netns, output};
    use crate::{LinkKind, VethSpec};

    #[test]
    fn a_bridge_is_made_with_everything_at_once() {
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
    fn a_given_address_is_kept_whatever_the_ports_have() {
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
    fn a_kernel_without_vlan_filtering_says_so_and_makes_nothing() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let spec = BridgeSpec { vlan_filtering: true, ..BridgeSpec::named("br0") };
            match netlink.create_bridge(&spec) {
                Ok(link) => assert!(link.bridge.unwrap().vlan_filtering),
                Err(error) => {
                    assert!(error.is_unsupported(), "{error}");
                    assert_eq!(netlink.find_link("br0").unwrap(), None);
                    let bridge = netlink.create_bridge(&BridgeSpec::named("br0")).unwrap();
                    assert!(netlink.set_vlan_filtering(bridge.index).unwrap_err().is_unsupported());
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
            for flags in [(true, false), (false, true), (false, false)] {
                netlink.set_port(veth.index, &PortFlags { hairpin: flags.0, isolated: flags.1 }).unwrap();
                let ports = netlink.list_ports(bridge.index).unwrap();
                assert_eq!(ports.len(), 1);
                let port = ports[0].port.unwrap();
                assert_eq!((port.hairpin, port.isolated), flags);
            }
            assert!(output("ip -d link show veth0").contains("hairpin off"));
            assert!(netlink.set_port(bridge.index, &PortFlags { hairpin: true, isolated: false }).is_err());

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
