//! Creates interfaces on top of another one, their master: macvlan, ipvlan and vlan.
//!
//! At creation, the kernel (6.1) requires that the name is free both in the connection's namespace
//! and in the one that the interface is created in. So an interface is created with a unique name.
//! [`Netlink::set_first_name`] then gives it the final name, which need only be free in the
//! container.

use std::fmt;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};

use super::LinkRequest;
use crate::error::{Error, Result};
use crate::mac::Mac;
use crate::netlink::wire::{attribute, new_attribute};
use crate::netlink::{Kind, Netlink};
use crate::netns::Netns;

/// The attribute `IFLA_MACVLAN_MODE` (32 bits), `IFLA_IPVLAN_MODE` or `IFLA_VLAN_ID` (16 bits): all
/// three have this number.
const MODE_OR_ID: u16 = 1;

const IFLA_MACVLAN_BC_QUEUE_LEN: u16 = 7;

/// The kind of an interface on top of a master, with its mode or VLAN ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stacked {
    /// A macvlan, which has a hardware address of its own.
    Macvlan(MacvlanMode),
    /// An ipvlan, which has the master's hardware address. All ipvlans of a master share one mode:
    /// the last one set.
    Ipvlan(IpvlanMode),
    /// A vlan, which gets the master's frames with this VLAN ID.
    Vlan(u16),
}

/// How macvlan interfaces of one master reach each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MacvlanMode {
    /// Not at all.
    Private = 1,
    /// Over the switch behind the master, if it sends frames back.
    Vepa = 2,
    /// Directly.
    #[default]
    Bridge = 4,
    /// There is only one interface on the master, and it has the master's hardware address.
    Passthru = 8,
}

/// Which part of the host's network stack handles the packets of ipvlan interfaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IpvlanMode {
    /// No part: frames are switched at the master.
    #[default]
    L2,
    /// Routing.
    L3,
    /// Routing and netfilter.
    L3s,
}

impl MacvlanMode {
    const ALL: [MacvlanMode; 4] = [MacvlanMode::Private, MacvlanMode::Vepa, MacvlanMode::Bridge, MacvlanMode::Passthru];

    /// Returns the mode with this name in a configuration; `None` for an unknown name.
    pub fn by_name(name: &str) -> Option<MacvlanMode> {
        MacvlanMode::ALL.into_iter().find(|mode| mode.name() == name)
    }

    /// Returns the mode's name in a configuration.
    fn name(self) -> &'static str {
        match self {
            MacvlanMode::Private => "private",
            MacvlanMode::Vepa => "vepa",
            MacvlanMode::Bridge => "bridge",
            MacvlanMode::Passthru => "passthru",
        }
    }
}

impl IpvlanMode {
    const ALL: [IpvlanMode; 3] = [IpvlanMode::L2, IpvlanMode::L3, IpvlanMode::L3s];

    /// Returns the mode with this name in a configuration; `None` for an unknown name.
    pub fn by_name(name: &str) -> Option<IpvlanMode> {
        IpvlanMode::ALL.into_iter().find(|mode| mode.name() == name)
    }

    /// Returns the mode's name in a configuration.
    fn name(self) -> &'static str {
        match self {
            IpvlanMode::L2 => "l2",
            IpvlanMode::L3 => "l3",
            IpvlanMode::L3s => "l3s",
        }
    }
}

impl Stacked {
    /// Returns the kernel's name of the kind.
    pub fn kind(self) -> &'static str {
        match self {
            Stacked::Macvlan(_) => "macvlan",
            Stacked::Ipvlan(_) => "ipvlan",
            Stacked::Vlan(_) => "vlan",
        }
    }

    /// Decodes the options of a link of this kind. Returns `None` for other kinds, unknown modes,
    /// and malformed options.
    pub(super) fn decode(kind: &str, options: &[u8]) -> Option<Stacked> {
        let value = attribute(options, MODE_OR_ID)?;
        let u16_value = value.first_chunk().copied().map(u16::from_ne_bytes);
        match kind {
            "macvlan" => {
                let number = u32::from_ne_bytes(*value.first_chunk()?);
                MacvlanMode::ALL.into_iter().find(|mode| *mode as u32 == number).map(Stacked::Macvlan)
            }
            // These modes are numbered from 0, in the order of `ALL`.
            "ipvlan" => IpvlanMode::ALL.get(usize::from(u16_value?)).copied().map(Stacked::Ipvlan),
            "vlan" => u16_value.map(Stacked::Vlan),
            _ => None,
        }
    }
}

impl fmt::Display for Stacked {
    /// Writes the mode or the VLAN ID.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stacked::Macvlan(mode) => f.write_str(mode.name()),
            Stacked::Ipvlan(mode) => f.write_str(mode.name()),
            Stacked::Vlan(id) => id.fmt(f),
        }
    }
}

/// An interface that is to be created on top of a master.
#[derive(Clone, Copy, Debug)]
pub struct StackedSpec<'a> {
    /// The name at creation, free in both namespaces.
    pub name: &'a str,
    /// The index of the master, in the connection's namespace.
    pub master: u32,
    /// The kind and mode.
    pub stacked: Stacked,
    /// The MTU in bytes; `None` for the master's.
    pub mtu: Option<u32>,
    /// The hardware address; `None` for one that the kernel chooses.
    pub mac: Option<Mac>,
    /// How many broadcast frames a macvlan's master queues; `None` for the kernel's default.
    pub broadcast_queue: Option<u32>,
    /// The namespace to create it in.
    pub netns: &'a Netns,
}

impl Netlink {
    /// Creates an interface, down, on top of a master in this connection's namespace.
    ///
    /// # Errors
    /// [`Error::is_exists`] if the name is taken or, for a vlan, the master has a vlan with this
    /// ID; [`Error::is_unsupported`] if the kernel does not support this kind.
    pub fn create_stacked(&self, spec: &StackedSpec<'_>) -> Result<()> {
        // Without NLM_F_ECHO: the kernel would send the echo in the other namespace, to whichever
        // socket has this connection's port ID there.
        let created = self.request(Kind::NewLink, &creation_request(spec), NLM_F_CREATE | NLM_F_EXCL);
        created.map(drop).map_err(|cause| Error::new(format_args!("failed to create {}", spec.stacked.kind()), cause))
    }

    /// Gives a new interface its name and its alias, in one request.
    ///
    /// # Errors
    /// [`Error::is_exists`] if the name is taken; then the alias is not set either.
    pub fn set_first_name(&self, index: u32, name: &str, alias: &str) -> Result<()> {
        self.set_link(LinkRequest::new(index).name(name).alias(alias), |link| {
            format!("failed to rename {link} to {name:?}")
        })
    }
}

/// Returns the request that creates the interface.
fn creation_request(spec: &StackedSpec<'_>) -> LinkRequest {
    let options = match spec.stacked {
        Stacked::Macvlan(mode) => {
            let mut options = new_attribute(MODE_OR_ID, &(mode as u32).to_ne_bytes());
            if let Some(frames) = spec.broadcast_queue {
                options.extend(new_attribute(IFLA_MACVLAN_BC_QUEUE_LEN, &frames.to_ne_bytes()));
            }
            options
        }
        Stacked::Ipvlan(mode) => new_attribute(MODE_OR_ID, &(mode as u16).to_ne_bytes()),
        Stacked::Vlan(id) => new_attribute(MODE_OR_ID, &id.to_ne_bytes()),
    };
    let request = LinkRequest::without_index().name(spec.name).on_top_of(spec.master).netns(spec.netns);
    let request = request.optional(spec.mtu, LinkRequest::mtu).optional(spec.mac, LinkRequest::mac);
    request.kind(spec.stacked.kind(), &options)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, new_netns};
    use crate::{Link, VethSpec};
    use cni_testkit::{probe, require};

    /// Calls `test` with a namespace, its link `eth0`, which is to become a master, and a
    /// container's namespace.
    fn with_master(test: impl FnOnce(&Netlink, &Link, &Netns) + Send + 'static) {
        in_new_netns(|| {
            let host = Netlink::open().unwrap();
            let spec = VethSpec::new("eth0", Mac([2, 0, 0, 0, 0, 1]), "peer0", Mac([2, 0, 0, 0, 0, 2]));
            host.create_veth(&spec).unwrap();
            test(&host, &host.link("eth0").unwrap(), &new_netns());
        });
    }

    fn spec<'a>(master: &Link, stacked: Stacked, netns: &'a Netns) -> StackedSpec<'a> {
        let (mtu, mac, broadcast_queue) = (None, None, None);
        StackedSpec { name: "veth01234567", master: master.index, stacked, mtu, mac, broadcast_queue, netns }
    }

    #[track_caller]
    fn assert_created(host: &Netlink, spec: &StackedSpec<'_>) -> Link {
        host.create_stacked(spec).unwrap();
        let container = host.open_in(spec.netns).unwrap();
        let link = container.link(spec.name).unwrap();
        assert_eq!((link.stacked, link.up), (Some(spec.stacked), false));
        assert_eq!(link.kind.to_string(), spec.stacked.kind());
        // 6.1 checks first whether the master allows another interface; with passthru it does not.
        let again = host.create_stacked(spec).unwrap_err();
        assert!(again.is_exists() || spec.stacked == Stacked::Macvlan(MacvlanMode::Passthru), "{again}");
        container.set_first_name(link.index, "eth0", "cni:net/c1/eth0").unwrap();
        let renamed = container.link("eth0").unwrap();
        assert_eq!((renamed.index, renamed.alias.as_deref()), (link.index, Some("cni:net/c1/eth0")));
        container.delete_link(link.index).unwrap();
        renamed
    }

    #[test]
    fn a_macvlan_of_each_mode_is_created_in_its_namespace() {
        with_master(|host, master, netns| {
            for mode in MacvlanMode::ALL {
                assert_eq!(MacvlanMode::by_name(mode.name()), Some(mode));
                assert_created(host, &spec(master, Stacked::Macvlan(mode), netns));
            }
            let mac = Mac([2, 0, 0, 0, 0, 9]);
            let spec = spec(master, Stacked::Macvlan(MacvlanMode::Bridge), netns);
            let link = assert_created(host, &StackedSpec { mtu: Some(1400), mac: Some(mac), ..spec });
            assert_eq!((link.mtu, link.mac), (1400, Some(mac)));
            let long = StackedSpec { broadcast_queue: Some(4321), ..spec };
            host.create_stacked(&long).unwrap();
            assert_eq!(host.list_links().unwrap().len(), 3);
        });
    }

    #[test]
    fn a_taken_name_leaves_the_existing_link() {
        with_master(|host, master, netns| {
            let container = host.open_in(netns).unwrap();
            let spec = spec(master, Stacked::Macvlan(MacvlanMode::Bridge), netns);
            host.create_stacked(&spec).unwrap();
            let link = container.link(spec.name).unwrap();
            assert!(container.set_first_name(link.index, "lo", "cni:net/c1/lo").unwrap_err().is_exists());
            assert_eq!(container.link(spec.name).unwrap(), link);
        });
    }

    #[test]
    fn an_ipvlan_of_each_mode_is_created_in_its_namespace() {
        require!(probe::ipvlan());
        with_master(|host, master, netns| {
            for mode in IpvlanMode::ALL {
                assert_eq!(IpvlanMode::by_name(mode.name()), Some(mode));
                let link = assert_created(host, &spec(master, Stacked::Ipvlan(mode), netns));
                assert_eq!(link.mac, master.mac);
            }
        });
    }

    #[test]
    fn a_vlan_is_created_in_its_namespace() {
        require!(probe::vlan_links());
        with_master(|host, master, netns| {
            let link = assert_created(host, &spec(master, Stacked::Vlan(5), netns));
            assert_eq!(link.mac, master.mac);
        });
    }

    #[test]
    fn other_modes_are_not_read() {
        let mode = |number: u8| [8, 0, 1, 0, number, 0, 0, 0];
        assert_eq!(Stacked::decode("macvlan", &mode(8)), Some(Stacked::Macvlan(MacvlanMode::Passthru)));
        assert_eq!(Stacked::decode("macvlan", &mode(16)), None);
        assert_eq!(Stacked::decode("ipvlan", &mode(3)), None);
        assert_eq!(Stacked::decode("vlan", &mode(5)), Some(Stacked::Vlan(5)));
        assert_eq!(Stacked::decode("macvtap", &mode(4)), None);
        assert_eq!(Stacked::decode("vlan", &[]), None);
    }
}
