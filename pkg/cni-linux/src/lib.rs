//! Functions of the Linux kernel that CNI plugins need.
//!
//! The modules:
//!
//! - [`netns`]: opens network namespaces by path, and runs code inside one.
//! - [`netlink`]: a connection to the network configuration of one namespace. [`link`], [`bridge`],
//!   [`veth`], [`vlan`], [`addr`], [`route`], [`rule`], [`neigh`] and [`qdisc`] add methods to it.
//!   Its [`socket`](netlink::socket) is also used by [`conntrack`], [`watch`] and `cni-firewall`.
//! - [`watch`]: waits for an event with a deadline. [`announce`]: announces the hardware address of
//!   an IP address to the neighbours.
//! - [`sysctl`]: reads and writes values under /proc/sys. [`mac`]: hardware addresses.
//! - [`tun`]: TAP interfaces. [`program`]: finds programs of the system. [`selinux`]: the label of
//!   a started program.
//! - [`packet`]: UDP over an interface that has no address yet.
//! - [`machine`]: signals and the clock. `child`: runs another program, which never outlives this
//!   process.
//! - [`stream`]: standard input and output, with a deadline.
//! - [`conntrack`]: deletes connection tracking entries that a changed port mapping has made stale.
//! - [`mod@file`]: creates and replaces records. [`flock`]: waits for a file lock that another
//!   process holds.
//! - `sys`: the only unsafe code of the workspace.
//!
//! Everything is synchronous. No type of a netlink crate is part of the public interface. A netlink
//! socket belongs to the namespace in which it was created, so there is one connection per
//! namespace. A file of /proc/sys belongs to the namespace of the thread that opens it, so callers
//! open it in [`Netns::run`].

pub mod addr;
pub mod announce;
pub mod bond;
pub mod bridge;
mod child;
pub mod conntrack;
pub mod error;
pub mod ethtool;
pub mod file;
pub mod flock;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod link;
pub mod mac;
pub mod machine;
pub mod neigh;
pub mod netlink;
pub mod netns;
pub mod packet;
pub mod program;
pub mod qdisc;
mod retry;
pub mod route;
pub mod rule;
pub mod selinux;
pub mod stream;
mod sys;
pub mod sysctl;
#[cfg(test)]
mod testing;
pub mod tun;
pub mod veth;
pub mod vlan;
pub mod watch;

pub use addr::{Addr, Dad, SavedAddr};
pub use bond::{BondMode, BondOptions, HashPolicy};
pub use bridge::{BridgeSettings, BridgeSpec, PortFlags, probe_vlan_filtering};
pub use error::{Error, Result, TakenName};
pub use ethtool::{Ethtool, Feature, Features};
pub use link::{
    BridgeInfo, Ipv4Sysctls, IpvlanMode, Link, LinkFlag, LinkKind, MacvlanMode, OperState, Port, PortState, Stacked,
    StackedSpec,
};
pub use mac::Mac;
pub use machine::LinuxMachine;
pub use neigh::Neighbour;
pub use netlink::Netlink;
pub use netns::Netns;
pub use qdisc::{Filter, Qdisc, QdiscParent, Tbf};
pub use route::{Family, Route, SavedRoute};
pub use rule::Rule;
pub use sys::{Arena, default_sigchld, inherited};
pub use tun::{Queues, Tap, TapSpec};
pub use veth::{Veth, VethSpec};
pub use vlan::{Target, Vlan, VlanFlags};
pub use watch::Watch;
