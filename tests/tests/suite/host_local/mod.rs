//! host-local called directly: the chosen address, the files on disk and the result.

mod allocation;
mod bad_disks;
mod cooldown;
mod exhaustion;
mod life;
mod oversized;
mod ranges;
mod reboot;
mod requested;
mod store;
mod surroundings;
mod unread;
