//! The Linux kernel as CNI plugins need it.
//!
//! Rooms:
//!
//! - [`netns`]: network namespaces by path, and the one door through which code runs inside one.
//! - [`netlink`]: a connection to the kernel's routing tables, one per namespace; on it [`link`],
//!   [`bridge`], [`veth`], [`vlan`], [`addr`], [`route`], [`rule`], [`neigh`] and [`qdisc`] put
//!   their verbs. Its [`socket`](netlink::socket) is also that of [`conntrack`], [`watch`] and
//!   `cni-firewall`.
//! - [`watch`]: waiting for an event with a deadline. [`announce`]: telling the neighbours where an
//!   address lives now.
//! - [`sysctl`]: values under /proc/sys. [`mac`]: hardware addresses.
//! - [`tun`]: TAP interfaces. [`program`]: where programs of the system are. [`selinux`]: the label
//!   that a program gets.
//! - [`packet`]: UDP over an interface that has no address yet.
//! - [`machine`], `child`: signals, and running another program so that it can never outlive this
//!   one.
//! - [`stream`]: standard input and output, with a deadline.
//! - [`conntrack`]: forgetting connections that a mapping has made wrong.
//! - [`flock`]: waiting for a file lock that another process holds.
//! - `sys`: the only unsafe code of the whole workspace.
//!
//! Everything is synchronous. No type of a netlink crate leaves this crate.
//! A netlink socket belongs to the namespace in which it was created, a file of /proc/sys to the
//! namespace of the thread that opens it. So there is one connection per namespace, and
//! [`Netns::run`] for the files.

pub mod addr;
pub mod announce;
pub mod bridge;
mod child;
pub mod conntrack;
pub mod error;
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
mod patience;
pub mod program;
pub mod qdisc;
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
pub use bridge::{BridgeSpec, PortFlags, probe_vlan_filtering};
pub use error::{Error, Result, TakenName};
pub use link::{
    BridgeInfo, IpvlanMode, Link, LinkFlag, LinkKind, MacvlanMode, OperState, Port, PortState, Stacked, StackedSpec,
};
pub use mac::Mac;
pub use machine::LinuxMachine;
pub use netlink::Netlink;
pub use netns::Netns;
pub use qdisc::{Filter, Qdisc, QdiscParent, Tbf};
pub use route::{Family, Route, SavedRoute};
pub use rule::Rule;
pub use sys::{Arena, inherited};
pub use tun::{Queues, Tap, TapSpec};
pub use veth::{Veth, VethSpec};
pub use vlan::{Target, Vlan, VlanFlags};
pub use watch::Watch;
