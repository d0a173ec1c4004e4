//! Addresses: what a network offers, which are taken, and by whom.
//!
//! Rooms, from the configuration to the disk:
//!
//! - [`ranges`]: ranges and range sets, checked by Go's rules.
//! - [`allocator`]: which address of each set an attachment gets.
//! - [`store`]: the folder of reservations, byte for byte Go's, behind its lock ([`lock`]).
//! - `index`: beside the folder, a table of what is in it, so that no verb reads every reservation.
//!   It can always be thrown away.
//! - [`gateways`]: the gateways of a configuration, for the plugin that delegates.
//! - [`host`]: which boot of which machine this is, so that what an earlier boot reserved can be
//!   told dead.
//!
//! This crate knows no plugin, no result and no network state. The fact a newcomer gets wrong: the
//! folder is the truth and other programs write it; the index is believed only while the folder
//! bears the stamp set with it, and the one reservation an operation acts on is read from its file
//! even then.

pub mod allocator;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod gateways;
pub mod host;
mod index;
pub mod lock;
pub mod ranges;
pub mod store;

pub use allocator::Requested;
pub use gateways::configured_gateways;
pub use host::Host;
pub use ranges::{Range, RangeConf, RangeSet, RangeSets};
pub use store::{Again, Earlier, Lease, Listed, Locked, Made, Options, Owner, Reservation, Store};
