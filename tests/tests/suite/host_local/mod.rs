//! host-local called directly: which address, what is on disk, what comes back.

mod allocation;
mod bad_disks;
mod exhaustion;
mod life;
mod oversized;
mod ranges;
mod reboot;
mod requested;
mod store;
mod surroundings;
mod unread;
