//! Manages the addresses of networks: the ranges, the reservations and their owners.
//!
//! Modules, from the configuration to the disk:
//!
//! - [`ranges`]: ranges and range sets, checked by Go's rules.
//! - [`allocator`]: the choice of an address from each set.
//! - [`store`]: the folder of reservations, byte for byte Go's, behind its lock ([`lock`]).
//! - `content`: the files of the folder.
//! - `links`: the reservations of each owner, so that a verb need not read every file.
//! - [`gateways`]: the gateways of a configuration, for the plugin that delegates to host-local.
//! - [`host`]: the identity of this machine and of its boot, by which reservations of an earlier
//!   boot are recognised.
//!
//! This crate knows no plugin, no result and no network state. The folder is authoritative, and
//! other programs write to it. So the links are used only while their folder has the same mtime,
//! and the file of a reservation is read before it is replaced or removed.

pub mod allocator;
mod content;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod gateways;
pub mod host;
mod links;
pub mod lock;
pub mod ranges;
pub mod store;

pub use allocator::Requested;
pub use gateways::configured_gateways;
pub use host::Host;
pub use ranges::{Range, RangeConf, RangeSet, RangeSets};
pub use store::{
    Lease, Listed, Locked, NewReservation, Options, Owner, RebootPolicy, RepeatPolicy, Reservation, Shortage, Store,
};
